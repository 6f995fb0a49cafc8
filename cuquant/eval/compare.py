"""Comparing two files of weights, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import check
from ..array import QuantizedArray
from ..formats import Format, describe
from ..io.gguf import PLAIN_TYPES, Metadata, SavedArraysError
from ..io.header import same_value
from ..io.model import Model, open as open_model
from ..io.safetensors import load
from ..ops.quantize import from_blocks
from ..render import Columns, counted, escaped, progress_bar, render_records, to_json, to_pandas
from .errors import error_of

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
    """Whether type and bytes are the same, and those of a scale beside them, too."""
    nmse: float | None = None
    sqnr_db: float | None = None
    max_abs_error: float | None = None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Differences of two files.

    Attributes
    ----------
    a, b : str
        The files.
    a_bytes, b_bytes : int
        Of their tensors.
    tensors : list of Difference
        In A's order, then those that only B has.
    metadata : dict of str to (str, str), or None
        Keys whose values differ, with both, shortened and escaped; empty where a file lacks the key. None
        where one of the files, arrays that `cuquant.save` wrote without metadata, has none to compare.
    """

    a: str
    b: str
    a_bytes: int
    b_bytes: int
    tensors: list[Difference]
    metadata: dict[str, tuple[str, str]] | None

    @property
    def identical(self) -> bool:
        """Whether all tensors and all metadata that can be compared are the same."""
        return not self.metadata and all(tensor.identical for tensor in self.tensors)

    def summary(self) -> str:
        """One line: how many tensors are the same, differ, or are in one file alone."""
        same = sum(tensor.identical for tensor in self.tensors)
        alone = [sum(getattr(t, side) is None for t in self.tensors) for side in ("b", "a")]
        other = len(self.tensors) - same - sum(alone)
        if self.metadata is None:
            keys = "no metadata to compare"
        else:
            differ = "differs" if len(self.metadata) == 1 else "differ"
            keys = f"{counted(len(self.metadata), 'key')} {differ}"
        return (
            f"{counted(same, 'tensor')} identical, {other} different, "
            f"{alone[0]} only in A, {alone[1]} only in B; "
            f"{self.a_bytes:,} and {self.b_bytes:,} bytes of tensors; {keys}"
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
    a: str | os.PathLike[str] | Model,
    b: str | os.PathLike[str] | Model,
    *,
    device: str | None = None,
    progress: bool = False,
) -> Comparison:
    """What two files have in common: types, sizes and numbers of every tensor, and their metadata.

    Tensors of the same type and bytes are not dequantized.

    Parameters
    ----------
    a, b : path or Model
        GGUF files, or safetensors files that `cuquant.save` or `cuquant.quantize_file` wrote. The numbers of
        `a` are the reference that errors are relative to: usually the float original.
    device : "cpu" or "cuda", optional
        Where numbers are compared, with the same errors but for rounding: by default on the GPU where one can
        be used. The host compares float64, integers and what has no kernels. A model may be on either.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Raises
    ------
    GGUFError, ValueError
        A file is damaged, or of another kind; a Model is closed, or its file was changed since it was opened;
        `device` is another word.
    TypeError
        `a` or `b` is neither a path nor a Model.
    OSError
        A file cannot be read.
    RuntimeError
        `device` is "cuda", and there is no GPU (the message says why).
    """
    on_gpu = check.usable_device(device) == "cuda"
    with ExitStack() as opened:
        first, second = (_side(given, opened) for given in (a, b))
        names = list(dict.fromkeys([*first.names, *second.names]))
        bar = opened.enter_context(progress_bar(progress, "tensor", names))
        both = first.metadata, second.metadata
        return Comparison(
            str(first.path),
            str(second.path),
            first.nbytes,
            second.nbytes,
            [_difference(name, first, second, on_gpu) for name in bar],
            None if both[0] is None or both[1] is None else _metadata(both[0], both[1]),
        )


class _Tensor(NamedTuple):
    """What a file says of a tensor."""

    shape: tuple[int, ...]
    type_name: str
    nbytes: int

    @property
    def bits(self) -> float | None:
        """Bits per number; None where the tensor has none."""
        count = int(np.prod(self.shape, dtype=object))
        return 8 * self.nbytes / count if count else None

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "scalar"


class _Side(Protocol):
    """A file, as it is compared."""

    path: Any
    nbytes: int
    metadata: Metadata | None

    @property
    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> _Tensor | None:
        """A tensor's shape, type and bytes; None where the file has no such tensor."""

    def stored(self, name: str) -> tuple[Any, Any]:
        """A tensor's bytes, and what beside its type decides what they stand for."""

    def numbers(self, name: str) -> Any:
        """A tensor with two axes at least: quantized, or an array of the numbers that the file has, none
        rounded to less than float32."""


class _OfModel:
    """A model as one side of a comparison."""

    def __init__(self, model: Model) -> None:
        self.path, self.nbytes, self._model = model.path, model.nbytes, model
        self.metadata: Metadata | None = model.metadata

    @property
    def names(self) -> Iterable[str]:
        return self._model.tensors

    def tensor(self, name: str) -> _Tensor | None:
        info = self._model.tensors.get(name)
        return None if info is None else _Tensor(info.shape, info.type_name, info.nbytes)

    def stored(self, name: str) -> tuple[Any, Any]:
        fmt, scale = self._model.format(name), self._model.scale_of(name)
        if fmt is None:  # with a scale for each expert, if any
            return self._model.raw(name), b"" if scale is None else self._model.raw(scale).tobytes()
        return self._model.raw(name), _parameters(fmt)

    def numbers(self, name: str) -> Any:
        model = self._model
        info, fmt = model.tensors[name], model.format(name)
        if fmt is not None and len(info.shape) > 1:
            return from_blocks(model.raw(name), fmt, info.shape)
        return _in_rows(model[name] if info.ggml_type in PLAIN_TYPES else model.floats(name))


class _OfArrays:
    """A file of `cuquant.save` that is no model, as one side of a comparison."""

    metadata: Metadata | None = None

    def __init__(self, path: Path) -> None:
        self.path, self._arrays = path, load(path, "cpu")
        self.nbytes = sum(array.nbytes for array in self._arrays.values())

    @property
    def names(self) -> Iterable[str]:
        return self._arrays

    def tensor(self, name: str) -> _Tensor | None:
        array = self._arrays.get(name)
        if array is None:
            return None
        kind = array.format.type_name if isinstance(array, QuantizedArray) else _TYPE_NAMES.get(array.dtype)
        return _Tensor(array.shape, (kind or str(array.dtype)).upper(), array.nbytes)

    def stored(self, name: str) -> tuple[Any, Any]:
        array = self._arrays[name]
        if not isinstance(array, QuantizedArray):
            return np.ascontiguousarray(array).reshape(-1).view(np.uint8), b""
        return array.blocks, _parameters(array.format)

    def numbers(self, name: str) -> Any:
        array = self._arrays[name]
        if isinstance(array, QuantizedArray):
            return array if array.ndim > 1 else array.dequantize().reshape(1, -1)
        return _in_rows(array)


def _parameters(fmt: Format) -> Any:
    """Parameters that decide, beside a type's name and bytes, which numbers they stand for."""
    by_type = fmt.scale_beside or fmt.ggml_type is not None
    return fmt.tensor_scale if by_type else describe(fmt)


_TYPE_NAMES = {dtype: name for name, dtype in PLAIN_TYPES.values()}


def _in_rows(numbers: Any) -> Any:
    return numbers if numbers.ndim > 1 else numbers.reshape(1, -1)


def _side(given: str | os.PathLike[str] | Model, opened: ExitStack) -> _Side:
    if isinstance(given, Model):
        return _OfModel(given._on("cpu"))
    try:
        return _OfModel(opened.enter_context(open_model(given, "cpu")))
    except SavedArraysError:
        return _OfArrays(Path(given))


def _difference(name: str, a: _Side, b: _Side, on_gpu: bool) -> Difference:
    first, second = a.tensor(name), b.tensor(name)
    shapes = list(dict.fromkeys(str(tensor) for tensor in (first, second) if tensor is not None))
    told = Difference(
        name,
        " / ".join(shapes),
        None if first is None else first.type_name,
        None if second is None else second.type_name,
        None if first is None else first.bits,
        None if second is None else second.bits,
        identical=False,
    )
    if first is None or second is None or len(shapes) > 1:
        return told
    if told.a == told.b:
        (bytes_a, beside_a), (bytes_b, beside_b) = a.stored(name), b.stored(name)
        if beside_a == beside_b and np.array_equal(np.ravel(bytes_a), np.ravel(bytes_b)):
            return replace(told, identical=True, nmse=0.0, max_abs_error=0.0)
    nmse, sqnr, largest = error_of(a.numbers(name), b.numbers(name), on_gpu)
    return replace(told, nmse=nmse, sqnr_db=sqnr, max_abs_error=largest)


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
