"""What the header of a GGUF file holds: typed metadata, and where each tensor lies."""

from __future__ import annotations

import html
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..formats import Format
from ..render import Columns, counted, escaped, html_facts, html_shape, render_records, short
from .words import missing


class Mapped(mmap.mmap):
    """A file in memory, which stays there while views of it are alive, also when nothing is to be read any
    more."""

    let_go = False


Buffer: TypeAlias = bytes | memoryview | Mapped

MAX_RANK = 4
MAX_NAME_BYTES = 63
"""ggml keeps a tensor's name in 64 bytes, the terminator included."""
LENGTH = struct.Struct("<Q")
"""A string's length in bytes, in front of it."""


def still_open(buffer: Buffer, what: str) -> Buffer:
    """The bytes of a file; ValueError where it is closed."""
    if isinstance(buffer, Mapped) and (buffer.let_go or buffer.closed):
        raise ValueError(f"{what}: the file is closed")
    return buffer


class Cursor:
    """A place in the bytes of a file, behind whose end nothing is read; `source` is what errors call it."""

    def __init__(self, buffer: Buffer, source: str) -> None:
        self.buffer, self.source = buffer, source
        self.pos = 0

    def need(self, nbytes: int, what: str) -> None:
        """Refuse what does not fit into the bytes left."""
        left = len(self.buffer) - self.pos
        if nbytes > left:
            self.fail(f"{what} needs {nbytes} bytes, but {left} are left: the file is damaged or cut short")

    def fail(self, problem: str) -> NoReturn:
        """Raise an error at the cursor."""
        raise ValueError(f"{self.source}: {problem} (at byte {self.pos})") from None


class GGUFError(ValueError):
    """A file is not a model that can be trusted; the message says what is wrong and where."""


class ValueType(IntEnum):
    """Types of metadata values, numbered as in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type of a number or bool."""
        dtype: np.dtype[Any] = np.dtype(self.name.lower())
        return dtype.newbyteorder("<")


ValueTypes: TypeAlias = tuple[ValueType, ValueType | None]
"""Type of a metadata value, and of its elements where it is an array."""

_COLUMNS: Columns = {key: (key, "") for key in ("key", "type", "value")}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file, and what it is.

    The shape is in NumPy's order, slowest axis first. `type_name` is "F32", "Q4_0", "Q4_K", ..., or in a
    safetensors file a format that GGUF lacks ("KBIT4"): then `ggml_type` is None. `offset` counts from the
    file's start, in bytes; `format` is that of the blocks, if there is one here.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int | None
    type_name: str
    offset: int
    nbytes: int
    format: Format | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        return html_facts(
            {
                "name": escaped(self.name),
                "shape": html_shape(self.shape),
                "type": self.type_name,
                "bytes": f"{self.nbytes:,}",
                "offset": f"{self.offset:,}",
            }
        )


def misfit(name: str, shape: tuple[int, ...]) -> str | None:
    """Why no model has a tensor of that name and shape; None where one may."""
    size = len(name.encode())
    if not 0 < size <= MAX_NAME_BYTES:
        return f"has a name of {size} bytes; those of models have 1 to {MAX_NAME_BYTES}"
    if len(shape) > MAX_RANK or 0 in shape:
        return f"has the shape {shape}; those of models have up to {MAX_RANK} dimensions, none zero"
    return None


@dataclass(frozen=True, slots=True)
class StoredText:
    """A string that was walked over and not yet decoded."""

    buffer: Buffer
    start: int
    size: int
    what: str

    def decode(self) -> str:
        """The string, which must be UTF-8."""
        raw = bytes(still_open(self.buffer, self.what)[self.start : self.start + self.size])
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise GGUFError(f"{self.what} is not valid UTF-8: {quote(raw)} (at byte {self.start})") from None


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array that was walked over and not yet decoded. It holds no view, so the file can be unmapped."""

    buffer: Buffer
    start: int
    count: int
    element: ValueType
    what: str

    def decode(self) -> NDArray[Any] | list[str]:
        """A read-only view of numbers or bools, or a list of strings."""
        still_open(self.buffer, self.what)
        if self.element is ValueType.STRING:
            return self.strings()
        values: NDArray[Any] = np.frombuffer(self.buffer, self.element.dtype, self.count, self.start)
        values.flags.writeable = False
        return values

    def strings(self) -> list[str]:
        """The strings, which must be UTF-8."""
        strings, pos = [], self.start
        for index in range(self.count):
            size = LENGTH.unpack_from(self.buffer, pos)[0]
            strings.append(StoredText(self.buffer, pos + 8, size, f"{self.what}: string {index}").decode())
            pos += 8 + size
        return strings


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a header, in file order.

    Numbers, bools and strings are Python's. Strings and arrays are decoded when first asked for: arrays of
    numbers and bools are read-only NumPy views of the file, those of strings lists. GGUFError where a string
    is not UTF-8; ValueError for what was not decoded when the file was closed. Equal to a mapping of the same
    keys, in any order, and values; a NaN is equal to another.
    """

    def __init__(self, entries: Mapping[str, tuple[ValueTypes, Any]], source: str) -> None:
        self._source = source
        self._types = {key: types for key, (types, _) in entries.items()}
        self._values = {key: value for key, (_, value) in entries.items()}

    def value_type(self, key: str) -> ValueTypes:
        """GGUF's type of a value, and of its elements where it is an array (else None)."""
        self._check(key)
        return self._types[key]

    def render(self, style: str = "table") -> str:
        """Keys, types and values as a "table" (for terminals), "md", "html" or "csv"; what is long is cut."""
        records = [
            {"key": escaped(key), "type": self._type_name(key, value), "value": short(value)}
            for key, value in self.items()
        ]
        return render_records(records, _COLUMNS, style)

    def _type_name(self, key: str, value: Any) -> str:
        kind, element = self._types[key]
        return kind.name.lower() if element is None else f"{element.name.lower()}[{len(value)}]"

    def _check(self, key: str) -> None:
        if key not in self._values:
            raise missing(Path(self._source).name, "key", key, self._values)

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        value = self._values[key]
        if isinstance(value, (StoredText, StoredArray)):
            value = self._values[key] = value.decode()
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where the key is missing."""
        # Mapping's asks for the item, whose error takes milliseconds to find names that are near.
        return super().get(key, default) if key in self else default

    def _let_go(self) -> None:
        """Keep no view of the file: arrays that were decoded are copied."""
        for key, value in self._values.items():
            if isinstance(value, np.ndarray):
                self._values[key] = value = value.copy()
                value.flags.writeable = False

    def __contains__(self, key: object) -> bool:
        return key in self._values  # without decoding the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.keys() == other.keys() and all(
            same_value(value, other[key]) for key, value in self.items()
        )

    def __copy__(self) -> Metadata:
        return self

    def __reduce__(self) -> NoReturn:
        raise check.pickle_error(self, "values")

    def __repr__(self) -> str:
        return self._shown("table")

    def _repr_html_(self) -> str:
        return self._shown("html")

    def _shown(self, style: str) -> str:
        """The table; where a value cannot be read a line that says so."""
        try:
            return self.render(style)
        except ValueError as error:
            text = f"GGUF metadata of {counted(len(self), 'key')}: {error}"
            return html.escape(text) if style == "html" else text


@dataclass(frozen=True, slots=True)
class Header:
    """All that a GGUF file says before its data.

    `tensors` are by name, in file order; `data_offset` is the first byte after the header's padding.
    """

    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    data_offset: int


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of metadata are equal; a NaN is equal to another."""
    arrays = [value for value in (a, b) if isinstance(value, np.ndarray)]
    if not arrays:
        return bool(a == b or (a != a and b != b))
    return np.array_equal(a, b, equal_nan=len(arrays) == 2 and all(x.dtype.kind == "f" for x in arrays))


def quote(name: str | bytes) -> str:
    """A name as errors show it: escaped, and cut if it is long."""
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}..."
