"""Comparing two model files, tensor by tensor."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..io.gguf import PLAIN_TYPES, Metadata, TensorInfo
from ..io.header import same_value
from ..io.model import Model, open as open_model
from ..io.words import counted, escaped
from ..ops.quantize import from_blocks
from ..render import Columns, render_records, to_json, to_pandas
from .scores import error_of

_COLUMNS: Columns = {
    "name": ("tensor", ""),
    "shape": ("shape", ""),
    "a": ("A", ""),
    "b": ("B", ""),
    "a_bits": ("bits/weight A", ".3f"),
    "b_bits": ("bits/weight B", ".3f"),
    "nmse": ("NMSE", ".3e"),
    "sqnr_db": ("SQNR dB", ".2f"),
    "max_abs_error": ("max difference", ".3e"),
}
_LONGEST = 60
"""Characters of a metadata value that are shown."""


@dataclass(frozen=True)
class Difference:
    """One tensor of two files: what it is in each, and how B's numbers differ from A's.

    `a` and `b` are types ("F16", "Q4_0"), None where the file lacks the tensor; bits count what is stored.
    nmse = sum((B - A)^2) / sum(A^2), sqnr_db = -10 log10(nmse) (None for nmse 0), and the largest absolute
    difference, in float64; all None where there is nothing to compare: one file lacks the tensor, or shapes
    differ (then `shape` has both). NaN and infinity in one place of both are no difference; else they make
    errors NaN or infinite.
    """

    name: str
    shape: str
    a: str | None
    b: str | None
    a_bits: float | None
    b_bits: float | None
    identical: bool
    """The same type and bytes, of a scale beside them, too."""
    nmse: float | None = None
    sqnr_db: float | None = None
    max_abs_error: float | None = None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Differences of two GGUF files.

    Attributes
    ----------
    a, b : str
        The files.
    a_bytes, b_bytes : int
        Of their tensors.
    tensors : list of Difference
        In A's order, then those that only B has.
    metadata : dict of str to (str, str)
        Keys whose values differ, with both, shortened and escaped; empty where a file lacks the key.
    """

    a: str
    b: str
    a_bytes: int
    b_bytes: int
    tensors: list[Difference]
    metadata: dict[str, tuple[str, str]]

    @property
    def identical(self) -> bool:
        """Whether all tensors and all metadata are the same."""
        return not self.metadata and all(tensor.identical for tensor in self.tensors)

    def summary(self) -> str:
        """One line: how many tensors are the same, differ, or are in one file alone."""
        same = sum(tensor.identical for tensor in self.tensors)
        alone = [sum(getattr(t, side) is None for t in self.tensors) for side in ("b", "a")]
        other = len(self.tensors) - same - sum(alone)
        differ = "differs" if len(self.metadata) == 1 else "differ"
        return (
            f"{counted(same, 'tensor')} identical, {other} different, "
            f"{alone[0]} only in A, {alone[1]} only in B; "
            f"{self.a_bytes:,} and {self.b_bytes:,} bytes of tensors; "
            f"{counted(len(self.metadata), 'key')} {differ}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dictionaries and lists: what ``render("json")`` prints."""
        return asdict(self)

    def render(self, style: str = "table") -> str:
        """The tensors as a "table" (for terminals), "md", "html" or "csv", where control characters in names
        are escaped; "json" has everything."""
        if style == "json":
            return to_json(self.to_dict())
        shown = [record | {"name": escaped(record["name"])} for record in self._records()]
        return render_records(shown, _COLUMNS, style, "json")

    def to_pandas(self) -> Any:
        """A pandas DataFrame of the tensors; pandas comes with the notebook extra."""
        return to_pandas(self._records(), list(_COLUMNS))

    def _records(self) -> list[dict[str, Any]]:
        return [{key: getattr(tensor, key) for key in _COLUMNS} for tensor in self.tensors]

    def __str__(self) -> str:
        return f"A {self.a}\nB {self.b}\n\n{self.render()}\n\n{self.summary()}"

    def __repr__(self) -> str:
        same = sum(tensor.identical for tensor in self.tensors)
        found = f"{counted(len(self.tensors), 'tensor')}, {same} identical"
        return f"Comparison({Path(self.a).name}, {Path(self.b).name}: {found}; print shows the table)"

    def _repr_html_(self) -> str:
        return self.render("html")


def compare(
    a: str | os.PathLike[str] | Model, b: str | os.PathLike[str] | Model, *, progress: bool = False
) -> Comparison:
    """What two GGUF files have in common: types, sizes and numbers of every tensor, and their metadata.

    Paths are opened on the CPU; tensors of the same type and bytes are not dequantized.

    Parameters
    ----------
    a, b : path or Model
        The numbers of `a` are the reference that errors are relative to: usually the float original.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Raises
    ------
    GGUFError, ValueError
        A file is damaged, or no GGUF file.
    """
    from tqdm import tqdm

    with ExitStack() as opened:
        first, second = (_opened(model, opened) for model in (a, b))
        names = list(dict.fromkeys([*first.tensors, *second.tensors]))
        bar = opened.enter_context(tqdm(names, unit="tensor", disable=None if progress else True))
        return Comparison(
            str(first.path),
            str(second.path),
            first.nbytes,
            second.nbytes,
            [_difference(name, first, second) for name in bar],
            _metadata(first.metadata, second.metadata),
        )


def _opened(model: str | os.PathLike[str] | Model, opened: ExitStack) -> Model:
    return model if isinstance(model, Model) else opened.enter_context(open_model(model, "cpu"))


def _difference(name: str, a: Model, b: Model) -> Difference:
    first, second = a.tensors.get(name), b.tensors.get(name)
    shapes = list(dict.fromkeys(_shape(info) for info in (first, second) if info is not None))
    told = Difference(
        name,
        " / ".join(shapes),
        None if first is None else first.type_name,
        None if second is None else second.type_name,
        None if first is None else _bits(first),
        None if second is None else _bits(second),
        identical=False,
    )
    if first is None or second is None or len(shapes) > 1:
        return told
    same = told.a == told.b and _scale(a, name) == _scale(b, name)
    if same and np.array_equal(a.raw(name), b.raw(name)):
        return replace(told, identical=True, nmse=0.0, max_abs_error=0.0)
    nmse, sqnr, largest = error_of(_numbers(a, name), _numbers(b, name))
    return replace(told, nmse=nmse, sqnr_db=sqnr, max_abs_error=largest)


def _scale(model: Model, name: str) -> bytes | None:
    """What multiplies a tensor's blocks, as the file has it."""
    scale = model.scale_of(name)
    return None if scale is None else model.raw(scale).tobytes()


def _shape(info: TensorInfo) -> str:
    return "x".join(map(str, info.shape)) or "scalar"


def _bits(info: TensorInfo) -> float | None:
    count = int(np.prod(info.shape, dtype=object))
    return 8 * info.nbytes / count if count else None


def _numbers(model: Model, name: str) -> Any:
    """A tensor with two axes at least: quantized, or an array of the numbers that the file has, none rounded
    to less than float32."""
    info, fmt = model.tensors[name], model.format(name)
    if fmt is not None and len(info.shape) > 1:
        return from_blocks(model.raw(name), fmt, info.shape)
    numbers = model[name] if info.ggml_type in PLAIN_TYPES else model.floats(name)
    return numbers if numbers.ndim > 1 else numbers.reshape(1, -1)


def _metadata(a: Metadata, b: Metadata) -> dict[str, tuple[str, str]]:
    keys = dict.fromkeys([*a, *b])
    return {key: (_text(a, key), _text(b, key)) for key in keys if not _same(a, b, key)}


def _same(a: Metadata, b: Metadata, key: str) -> bool:
    if key not in a or key not in b or a.value_type(key) != b.value_type(key):
        return False
    return same_value(a[key], b[key])


def _text(metadata: Metadata, key: str) -> str:
    if key not in metadata:
        return ""
    value = metadata[key]
    text = f"{len(value)} values" if isinstance(value, (list, np.ndarray)) else escaped(str(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
