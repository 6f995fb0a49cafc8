"""The header of a GGUF file, read by a scanner that trusts nothing it reads.

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    keys:    string | value type u32 | value          a string is its length u64, then UTF-8 bytes
    tensors: string | rank u32 | extents u64 (fastest first) | type u32 | offset u64
    padding to `general.alignment`, then the tensors' data; offsets count from here

Every count and length is held against the bytes left before anything is allocated or looped over, in
Python integers, which cannot wrap. Layout and rules are those of the GGUF specification (docs/gguf.md in
github.com/ggml-org/ggml), little-endian, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .. import check
from ..formats import by_ggml_type, by_type_name, of_forks
from .header import (
    LENGTH,
    MAX_NAME_BYTES,
    MAX_RANK,
    Buffer,
    Cursor,
    GGUFError,
    Header,
    Mapped,
    Metadata,
    StoredArray,
    StoredText,
    TensorInfo,
    ValueType,
    ValueTypes,
    quote,
    still_open,
)
from .metadata import DEFAULT_ALIGNMENT
from .safetensors import KEY, OTHER_READERS, is_begun
from .words import LFS_POINTER, of_importance, of_pointer

__all__ = ["File", "GGUFError", "Header", "Metadata", "TensorInfo", "ValueType", "scan"]

MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20
MAX_KEY_BYTES = 65535

# Bounds of a whole header, far above real models; scanning up to any of them takes 0.02 to 0.2 s.
MAX_KEYS = 1 << 12  # real: below 100
MAX_TENSORS = 1 << 14  # real: below 2,000
MAX_ARRAY_ITEMS = 1_200_000  # strings and bools in arrays, looked at one by one; real: below 800,000
MAX_TEXT_BYTES = 1 << 20  # keys and names, decoded at once; real: below 200,000

_U32, _COUNTS, _ARRAY = struct.Struct("<I"), struct.Struct("<QQ"), struct.Struct("<IQ")
_TENSOR = {rank: struct.Struct(f"<{rank}QIQ") for rank in range(MAX_RANK + 1)}
_OWN_READERS = {
    KEY: "load reads it, as a dict of arrays",
    f"{KEY}.kv_cache": "KVCache.load reads it",
}
"""What reads our safetensors files, by keys of their metadata."""
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # a key of one letter, its type, a value of one byte
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # a name of one letter, rank, type, offset: a scalar

PLAIN_TYPES: dict[int, tuple[str, np.dtype[Any]]] = {
    0: ("F32", np.dtype("<f4")),
    1: ("F16", np.dtype("<f2")),
    24: ("I8", np.dtype("i1")),
    25: ("I16", np.dtype("<i2")),
    26: ("I32", np.dtype("<i4")),
    27: ("I64", np.dtype("<i8")),
    28: ("F64", np.dtype("<f8")),
    30: ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
"""Types of tensors that hold plain numbers: name and NumPy type."""


class SafetensorsError(GGUFError):
    """Error for a safetensors file that is no model."""


class SavedArraysError(SafetensorsError):
    """Error for a safetensors file that cuquant wrote: of arrays, or a model (`saved.SavedFile` knows)."""


class File:
    """A GGUF file, mapped into memory read-only, and its header.

    `path` is as it was given, `place` where that was then, and `status` what the system said of the file.

    Raises GGUFError for a file that breaks a rule of the format, OSError as `open` does.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.place = Path(os.path.abspath(path))
        try:
            check.require_mappable(self.path)
        except ValueError as error:
            raise GGUFError(str(error)) from None
        with self.path.open("rb") as file:
            self.status = os.fstat(file.fileno())
            if self.status.st_size == 0:
                raise GGUFError(f"{self.path}: the file is empty")
            self.buffer = Mapped(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.header = scan(self.buffer, str(self.path))
        except GGUFError:
            self._unmap()
            raise

    @property
    def closed(self) -> bool:
        """Whether nothing more can be read."""
        return self.buffer.let_go

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, a read-only view; ValueError where the file is closed."""
        buffer = still_open(self.buffer, f"{self.path}: tensor {quote(tensor.name)}")
        return np.frombuffer(buffer, np.uint8, tensor.nbytes, tensor.offset)

    def close(self) -> None:
        """Read no more of the file, and unmap it, unless views of it are alive: they keep it mapped."""
        self.header.metadata._let_go()
        self._unmap()

    def _unmap(self) -> None:
        self.buffer.let_go = True
        with suppress(BufferError):
            self.buffer.close()


def scan(buffer: Buffer, source: str) -> Header:
    """Read and validate the header of the GGUF file whose bytes are `buffer`; its data is not touched.

    Parameters
    ----------
    buffer : the whole file; the metadata's arrays stay in it until asked for.
    source : what to call the file in errors.

    Raises
    ------
    GGUFError
        For whatever breaks a rule of the format or a bound of this module (`MAX_KEYS`, ...).
    """
    scanner = _Scanner(buffer, source)
    version = scanner.version()
    tensor_count, key_count = scanner.unpack(_COUNTS, "the pair of counts (tensors and keys)")
    metadata = scanner.metadata(key_count)
    alignment = scanner.alignment(metadata)
    tensors = scanner.tensors(tensor_count, alignment)
    data_offset = -(-scanner.pos // alignment) * alignment
    tensors = {name: replace(info, offset=data_offset + info.offset) for name, info in tensors.items()}
    tensors = _with_types_of_forks(tensors, len(buffer), alignment)
    scanner.check_places(tensors)
    return Header(version, alignment, metadata, tensors, data_offset)


def _of_another_kind(buffer: Buffer, source: str) -> GGUFError:
    """The error for a file that is no GGUF file, but something else."""
    no = f"{source}: not a GGUF file"
    if pointer := of_pointer(bytes(buffer[: len(LFS_POINTER)])):
        return GGUFError(f"{no}, but {pointer}")
    if importance := of_importance(bytes(buffer[: 8 + MAX_NAME_BYTES])):
        return GGUFError(f"{source}: {importance}")
    if not is_begun(bytes(buffer[:9])):
        return GGUFError(f"{no}: it starts with {bytes(buffer[:4])!r} instead of b'GGUF'")
    header = bytes(buffer[8 : 8 + int.from_bytes(buffer[:8], "little")])
    for key, reader in _OWN_READERS.items():
        if f'"{key}"'.encode() in header:
            kind = SavedArraysError if key == KEY else SafetensorsError
            return kind(f"{no}, but a safetensors file: cuquant wrote it, and cuquant.{reader}")
    return SafetensorsError(f"{no}, but a safetensors file: {OTHER_READERS}")


class _Scanner(Cursor):
    """A cursor over the bytes of a header."""

    def __init__(self, buffer: Buffer, source: str) -> None:
        super().__init__(buffer, source)
        self.entry = 0  # where the key or tensor that is being read begins, for errors
        self.items_left = MAX_ARRAY_ITEMS
        self.text_left = MAX_TEXT_BYTES

    def fail(self, problem: str) -> NoReturn:
        """Raise the error of the entry being read."""
        raise GGUFError(f"{self.source}: {problem} (at byte {self.entry})") from None

    def bound(self, count: int, what: str, least: int, most: int) -> None:
        """Refuse a count of things of at least `least` bytes that is above `most` or cannot fit."""
        self.entry = self.pos
        if count > most:
            self.fail(f"{count} {what} are declared; at most {most} are allowed")
        self.need(count * least, f"a list of {count} {what}")

    def unpack(self, layout: struct.Struct, what: str) -> tuple[Any, ...]:
        """The next fixed-size fields."""
        self.need(layout.size, what)
        self.pos += layout.size
        return layout.unpack_from(self.buffer, self.pos - layout.size)

    def text(self, what: str, most: int) -> str:
        """The next string, of at most `most` bytes."""
        stored = self.skip_string(what)
        if stored.size > most:
            self.fail(f"{what} has {stored.size} bytes; at most {most} are allowed")
        self.text_left -= stored.size
        if self.text_left < 0:
            self.fail(f"{what} brings keys and names above {MAX_TEXT_BYTES} bytes in all")
        return stored.decode()

    def version(self) -> int:
        """The version, of a file that can be read here."""
        if bytes(self.buffer[:4]) != b"GGUF":
            raise _of_another_kind(self.buffer, self.source)
        self.pos = self.entry = 4
        (version,) = self.unpack(_U32, "the version")
        if version == 1:
            self.fail("GGUF version 1 is too old (its counts have 32 bits); versions 2 and 3 are read")
        if version in (1 << 24, 2 << 24, 3 << 24):
            self.fail("the file is big-endian; only little-endian GGUF files are read")
        if version not in (2, 3):
            self.fail(f"unknown GGUF version {version}; versions 2 and 3 are read")
        return int(version)

    def metadata(self, count: int) -> Metadata:
        """The next `count` key-value pairs."""
        self.bound(count, "keys", _MIN_KEY_BYTES, MAX_KEYS)
        entries: dict[str, tuple[ValueTypes, Any]] = {}
        for index in range(count):
            self.entry = self.pos
            key = self.text(f"key number {index}", MAX_KEY_BYTES)
            if not key:
                self.fail(f"key number {index} is empty")
            if key in entries:
                self.fail(f"key {quote(key)} occurs twice")
            entries[key] = self.value(f"key {quote(key)}")
        return Metadata(entries, self.source)

    def value(self, what: str) -> tuple[ValueTypes, Any]:
        """The types and the value of a key."""
        (number,) = self.unpack(_U32, what)
        kind = self.value_type(number, what)
        start = self.pos
        if kind is ValueType.STRING:
            return (kind, None), self.skip_string(what)
        if kind is not ValueType.ARRAY:
            self.skip_numbers(kind, 1, what)
            return (kind, None), np.frombuffer(self.buffer, kind.dtype, 1, start)[0].item()
        number, count = self.unpack(_ARRAY, what)
        element = self.value_type(number, f"the array of {what}")
        array = StoredArray(self.buffer, self.pos, count, element, f"{self.source}: {what}")
        if element is ValueType.ARRAY:
            self.fail(f"{what} is an array of arrays; nested arrays are not read")
        if element is ValueType.STRING:
            self.skip_strings(count, what)
        else:
            self.skip_numbers(element, count, what)
        return (kind, element), array

    def value_type(self, number: int, what: str) -> ValueType:
        """A value type from its number."""
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"{what} has the unknown value type {number}; known are 0 to {max(ValueType)}")

    def skip_numbers(self, kind: ValueType, count: int, what: str) -> None:
        """Walk over `count` numbers or bools."""
        nbytes = count * kind.dtype.itemsize
        self.need(nbytes, what)
        if kind is ValueType.BOOL:
            self.spend_items(count, what)
            others = bytes(self.buffer[self.pos : self.pos + count]).translate(None, delete=b"\0\1")
            if others:
                self.fail(f"{what}: a bool is the byte {others[0]}; allowed are 0 and 1")
        self.pos += nbytes

    def skip_string(self, what: str) -> StoredText:
        """Walk over a string."""
        (size,) = self.unpack(LENGTH, what)
        self.need(size, what)
        self.pos += size
        return StoredText(self.buffer, self.pos - size, size, f"{self.source}: {what}")

    def skip_strings(self, count: int, what: str) -> None:
        """Walk over `count` strings, 80 ns each; they are not decoded here."""
        self.need(8 * count, what)
        self.spend_items(count, what)
        buffer, pos, last, length_at = self.buffer, self.pos, len(self.buffer) - 8, LENGTH.unpack_from
        for index in range(count):
            if pos > last:
                self.fail(
                    f"{what}: string {index} of {count} lies beyond the end of the file, which is damaged or "
                    "cut short"
                )
            pos += 8 + length_at(buffer, pos)[0]
        self.need(pos - self.pos, what)
        self.pos = pos

    def spend_items(self, count: int, what: str) -> None:
        """Keep the strings and bools of all arrays within their bound."""
        self.items_left -= count
        if self.items_left < 0:
            self.fail(f"{what} brings all arrays above {MAX_ARRAY_ITEMS} strings and bools")

    def alignment(self, metadata: Metadata) -> int:
        """The alignment of the tensors' data, in bytes."""
        key = "general.alignment"
        if key not in metadata:
            return DEFAULT_ALIGNMENT
        kind, _ = metadata.value_type(key)
        if kind is not ValueType.UINT32:
            self.fail(f"key {key!r} has the type {kind.name}; it must be UINT32")
        value = metadata[key]
        if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.fail(f"key {key!r} is {value}, not a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}")
        return int(value)

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """The next `count` tensor descriptions; their offsets still count from the start of the data."""
        self.bound(count, "tensors", _MIN_TENSOR_BYTES, MAX_TENSORS)
        tensors: dict[str, TensorInfo] = {}
        for index in range(count):
            self.entry = self.pos
            name = self.text(f"the name of tensor number {index}", MAX_NAME_BYTES)
            if not name:
                self.fail(f"the name of tensor number {index} is empty")
            if name in tensors:
                self.fail(f"tensor {quote(name)} occurs twice")
            tensors[name] = self.tensor(name, alignment)
        return tensors

    def tensor(self, name: str, alignment: int) -> TensorInfo:
        """The description that follows a tensor's name."""
        what = f"tensor {quote(name)}"
        (rank,) = self.unpack(_U32, what)
        if rank not in _TENSOR:
            self.fail(f"{what} has {rank} dimensions; 0 to {MAX_RANK} are allowed")
        *extents, ggml_type, offset = self.unpack(_TENSOR[rank], what)
        shape = tuple(reversed(extents))
        if 0 in shape:
            self.fail(f"{what} has the shape {shape}; no dimension may be zero")
        known = _type_of(ggml_type)
        if known is None:
            self.fail(f"{what} has the unknown type {ggml_type}")
        type_name, block_size, block_bytes = known
        row = shape[-1] if shape else 1
        if row % block_size:
            self.fail(f"{what} has rows of {row} weights; {type_name} needs blocks of {block_size}")
        if offset % alignment:
            self.fail(f"{what} has the offset {offset}, not a multiple of the alignment {alignment}")
        nbytes = math.prod(shape) // block_size * block_bytes
        return TensorInfo(name, shape, ggml_type, type_name, offset, nbytes, by_type_name(type_name))

    def check_places(self, tensors: dict[str, TensorInfo]) -> None:
        """All data lies inside the file, and no two tensors share a byte."""
        end, previous = 0, ""
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            self.entry = info.offset
            if info.offset < end:
                self.fail(f"tensor {quote(info.name)} overlaps {quote(previous)}, which ends at byte {end}")
            end, previous = info.offset + info.nbytes, info.name
            if end > len(self.buffer):
                self.fail(
                    f"tensor {quote(previous)} ends at byte {end}, the file at {len(self.buffer)}: "
                    "it is cut short, perhaps an incomplete download"
                )


def _with_types_of_forks(
    tensors: dict[str, TensorInfo], file_bytes: int, alignment: int
) -> dict[str, TensorInfo]:
    """The tensors, those whose type's number a fork of llama.cpp has for blocks of another length as such, if
    that is how far they are apart: as llama.cpp's own one would reach into the next, or beyond the file."""
    starts = sorted({info.offset for info in tensors.values()})
    room = {start: end - start for start, end in pairwise([*starts, file_bytes])}
    for fmt in of_forks():
        own = [info for info in tensors.values() if info.ggml_type == fmt.ggml_type_elsewhere]
        whole = [info for info in own if info.shape and info.shape[-1] % fmt.block_size == 0]
        sizes = [math.prod(fmt.stored(info.shape)) for info in whole]
        made = [
            replace(info, type_name=fmt.type_name, nbytes=nbytes, format=fmt)
            for info, nbytes in zip(whole, sizes, strict=True)
        ]
        fit = all(0 <= room[info.offset] - info.nbytes < alignment for info in made)
        if fit and len(made) == len(own) and any(info.nbytes > room[info.offset] for info in own):
            tensors = tensors | {info.name: info for info in made}
    return tensors


def _type_of(ggml_type: int) -> tuple[str, int, int] | None:
    """Name, elements per block and bytes per block of a tensor type; None for an unknown number."""
    if ggml_type in PLAIN_TYPES:
        name, dtype = PLAIN_TYPES[ggml_type]
        return name, 1, dtype.itemsize
    fmt = by_ggml_type(ggml_type)
    if fmt is not None:
        return fmt.type_name, fmt.block_size, fmt.block_bytes
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # here because its import takes 50 ms

    try:
        kind = GGMLQuantizationType(ggml_type)
        return (kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        return None
