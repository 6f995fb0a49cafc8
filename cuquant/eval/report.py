"""The result of an evaluation: rows, and the tables made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..render import Columns, render_records, to_json, to_pandas
from .scores import TensorError

_COLUMNS = {
    "format": ("format", ""),
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
    tensors: list[TensorError] = field(default_factory=list)
    """Errors of the quantized tensors against the base model's; empty where there is nothing to compare."""
    kv_bits: str | None = None
    """Widths of the cached keys and values, as they were asked for; None where they are not quantized."""


@dataclass(frozen=True)
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
    """

    model: str
    text: str
    ctx: int
    chunks: int
    scored_tokens: int
    backend: str
    rows: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists: what ``render("json")`` prints."""
        return asdict(self)

    def render(self, style: str = "table", *, tensors: bool = False) -> str:
        """The rows as text, or with `tensors` the errors of all quantized tensors.

        Parameters
        ----------
        style : "table" (for terminals), "md", "html", "csv" (full precision) or "json" (everything)
        """
        if style == "json":
            return to_json(self.to_dict())
        return render_records(*self._records(tensors), style)

    def to_pandas(self, *, tensors: bool = False) -> Any:
        """A pandas DataFrame of what `render` shows; pandas comes with the notebook extra."""
        records, columns = self._records(tensors)
        return to_pandas(records, list(columns))

    def _records(self, tensors: bool) -> tuple[list[dict[str, Any]], Columns]:
        columns = _TENSOR_COLUMNS if tensors else _COLUMNS
        items: list[Any] = [error for row in self.rows for error in row.tensors] if tensors else self.rows
        if not tensors and all(row.kv_bits is None for row in self.rows):
            columns = {key: column for key, column in columns.items() if key != "kv_bits"}
        return [{key: getattr(item, key) for key in columns} for item in items], columns

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return self.render("html")
