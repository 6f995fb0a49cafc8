"""The result of an evaluation: rows, and the tables made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import check
from ..render import TABLE_STYLES, Columns, counted, missing, render_records, to_json, to_pandas
from .scores import COMPARED, TensorError

_COLUMNS = {
    "format": ("format", ""),
    "activations": ("activations", ""),
    "kv_bits": ("KV bits", ""),
    "bits_per_weight": ("bits/weight", ".3f"),
    "ppl": ("PPL", ".4f"),
    "ppl_stderr": ("±", ".4f"),
    "mean_kld": ("mean KLD", ".6f"),
    "max_kld": ("max KLD", ".4f"),
    "same_top_percent": ("same top %", ".3f"),
    "rms_dp_percent": ("RMS Δp %", ".3f"),
}
_TENSOR_COLUMNS = {
    "name": ("tensor", ""),
    "format": ("format", ""),
    "bits_per_weight": ("bits/weight", ".3f"),
    "nmse": ("NMSE", ".3e"),
    "sqnr_db": ("SQNR dB", ".2f"),
    "max_abs_error": ("max error", ".3e"),
}


@dataclass(frozen=True)
class Row:
    """One evaluated model: label, scores (see scores.Tokens.summary), size and tensor errors."""

    format: str
    ppl: float
    ppl_stderr: float | None
    mean_kld: float | None
    max_kld: float | None
    same_top_percent: float | None
    rms_dp_percent: float | None
    bits_per_weight: float
    """Bits of all tensors of the model over all its weights, norms included."""
    tensors: list[TensorError] = field(default_factory=list, repr=False)
    """Errors of the quantized tensors against the base model's; empty where there is nothing to compare."""
    kv_bits: str | None = None
    """Widths of the cached keys and values, as they were asked for; None where they are not quantized."""
    activations: str = "f16"
    """What inputs of products with quantized weights were: "f16" where there is no such product."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Scores of one model in one or more formats.

    Attributes
    ----------
    model, text : str
        What was evaluated on what (a path, or a description).
    ctx, chunks, scored_tokens : int
        Tokens of a chunk, number of chunks, tokens scored in all of them.
    backend : str
        "numpy", or the GPU's name.
    rows : list of Row
        With formats or a base model the first row is the original.
    base : str or None
        The file of a base model, whose row the first is.
    activations : str
        "f16", or "q8_1", a column then, which says so of rows with products of quantized weights: their
        inputs were quantized too.
    """

    model: str
    text: str
    ctx: int
    chunks: int
    scored_tokens: int
    backend: str
    rows: list[Row]
    base: str | None = None
    activations: str = "f16"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists: what ``render("json")`` prints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Evaluation:
        """The evaluation that `to_dict` or ``render("json")`` gave; TypeError or KeyError where it is none,
        OverflowError for an integer that no float is near.

        JSON has neither NaN nor infinity: a number that is null, and would not be missing, is NaN.
        """
        there = ["ppl"]
        there += ["ppl_stderr"] if stored["scored_tokens"] > 1 else []
        there += COMPARED if len(stored["rows"]) > 1 else []
        rows = [
            Row(**_fields(Row, row, there) | {"tensors": [_error(error) for error in row["tensors"]]})
            for row in stored["rows"]
        ]
        if len(rows) < (1 if stored.get("base") is None else 2):
            raise TypeError(f"there are {len(rows)} rows")
        return cls(**check.stored_fields(cls, stored) | {"rows": rows})

    def render(self, style: str = "table", *, tensors: bool = False) -> str:
        """The rows as text, or with `tensors` the errors of all quantized tensors.

        Parameters
        ----------
        style : "table" (for terminals), "md", "html", "csv" (full precision) or "json" (everything)
            Tables for people leave out columns that are empty. Where the base is another file, each row has
            its model's file name first.
        """
        if style == "json":
            return to_json(self.to_dict())
        return _rendered(*self._records(tensors), style)

    def to_pandas(self, *, tensors: bool = False) -> Any:
        """A pandas DataFrame of what `render` shows; pandas comes with the notebook extra."""
        records, columns = self._records(tensors)
        return to_pandas(records, list(columns))

    def plot(self, *, tensors: bool = False) -> Any:
        """A matplotlib Figure: what each row loses over its bits per weight, or with `tensors` the signal to
        noise ratio of every quantized tensor. matplotlib comes with the notebook extra: ImportError without.
        ValueError where there is nothing to draw."""
        return plotter().tensors(self.rows) if tensors else plotter().losses({"": self.rows})

    def _records(self, tensors: bool) -> tuple[list[dict[str, Any]], Columns]:
        """What tables show: of a base in another file with the names of both."""
        if tensors or self.base is None or Path(self.base) == Path(self.model):
            return self._own_records(tensors)
        return Evaluations([self])._records(tensors)

    def _own_records(self, tensors: bool) -> tuple[list[dict[str, Any]], Columns]:
        columns = _TENSOR_COLUMNS if tensors else _COLUMNS
        items: list[Any] = [error for row in self.rows for error in row.tensors] if tensors else self.rows
        usual = {"activations"} if self.activations == "f16" else set()
        usual |= {"kv_bits"} if all(row.kv_bits is None for row in self.rows) else set()
        columns = {key: column for key, column in columns.items() if key not in usual}
        return [{key: getattr(item, key) for key in columns} for item in items], columns

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        rows = f"{counted(len(self.rows), 'row')} ({', '.join(row.format for row in self.rows)})"
        return f"Evaluation({Path(self.model).name}: {rows}; print shows the table)"

    def _repr_html_(self) -> str:
        return self.render("html")


@dataclass(frozen=True, repr=False)
class Evaluations:
    """Evaluations of several models on one text, as `evaluate_files` returns them."""

    each: list[Evaluation]

    def render(self, style: str = "table", *, tensors: bool = False) -> str:
        """One table of all rows, or of all tensors' errors, with the model's file name before each, and as
        many of its folders as tell it apart; styles as in `Evaluation.render`. What the same base scored
        stands once."""
        if style == "json":
            return to_json([evaluation.to_dict() for evaluation in self.each])
        return _rendered(*self._records(tensors), style)

    def to_pandas(self, *, tensors: bool = False) -> Any:
        """A pandas DataFrame of what `render` shows; pandas comes with the notebook extra."""
        records, columns = self._records(tensors)
        return to_pandas(records, list(columns))

    def plot(self) -> Any:
        """As `Evaluation.plot`, with the rows of all models."""
        names = self._names()
        stems = {model: str(Path(name).parent / Path(name).stem) for model, name in names.items()}
        names = stems if len({*stems.values()}) == len({*names.values()}) else names
        return plotter().losses({names[e.model]: e.rows for e in self.each})

    def _names(self) -> dict[str, str]:
        """What models and bases are called in tables."""
        return _apart([path for e in self.each for path in (e.model, e.base) if path is not None])

    def _records(self, tensors: bool) -> tuple[list[dict[str, Any]], Columns]:
        columns: Columns = {"model": ("model", "")}
        records: list[dict[str, Any]] = []
        bases: dict[str, list[Row]] = {}  # those of each that are shown
        called = self._names()
        for evaluation in self.each:
            own, found = evaluation._own_records(tensors)
            columns |= found
            names = [called[evaluation.model]] * len(own)
            if evaluation.base is not None and not tensors:
                names[0] = called[evaluation.base]
                if Path(evaluation.model) == Path(evaluation.base):
                    del own[1], names[1]  # it has its row as the base
                shown, row = bases.setdefault(evaluation.base, []), evaluation.rows[0]
                if row in shown:
                    own, names = own[1:], names[1:]
                else:
                    shown.append(row)
            records += [{"model": name} | record for name, record in zip(names, own, strict=True)]
        return [{key: record.get(key) for key in columns} for record in records], columns

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        rows = counted(len(self._records(tensors=False)[0]), "row")
        return f"Evaluations({counted(len(self.each), 'model')}: {rows}; print shows the table)"

    def _repr_html_(self) -> str:
        return self.render("html")


def _rendered(records: list[dict[str, Any]], columns: Columns, style: str) -> str:
    """The records in that style; tables for people without the columns that are empty in all rows."""
    if records and style in TABLE_STYLES:
        filled = {key for record in records for key, value in record.items() if value is not None}
        columns = {key: column for key, column in columns.items() if key in filled}
    return render_records(records, columns, style, "json")


def _apart(paths: Iterable[str]) -> dict[str, str]:
    """The names of files, with the folders before them that no other of these files has."""
    parts = {path: Path(path).parts for path in paths}
    called = {}
    for path, own in parts.items():
        others = [other for other in parts.values() if other != own]
        length = next(n for n in range(1, len(own) + 2) if all(other[-n:] != own[-n:] for other in others))
        called[path] = str(Path(*own[-length:]))
    return called


def _error(stored: dict[str, Any]) -> TensorError:
    """An error as `Evaluation.from_dict` reads it."""
    there = ["nmse", "max_abs_error"] + (["sqnr_db"] if stored["nmse"] != 0 else [])
    return TensorError(**_fields(TensorError, stored, there))


def _fields(kind: type[Any], stored: dict[str, Any], there: list[str]) -> dict[str, Any]:
    """Stored fields of a class, each of the type that it has there, with NaN for null under the keys
    `there`."""
    return check.stored_fields(kind, stored | {key: float("nan") for key in there if stored[key] is None})


def plotter() -> Any:
    """The module that draws; ImportError with advice where matplotlib is missing."""
    try:
        return import_module(".plot", __package__)
    except ImportError as error:
        raise missing("a plot", "matplotlib", error) from None
