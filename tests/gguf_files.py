"""GGUF files put together byte by byte, so that tests can also build what no writer would."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string, which may lie about its length."""
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw) if length is None else length) + raw


def entry(key: str | bytes, value_type: int, value: bytes) -> bytes:
    """A key-value pair."""
    return string(key) + u32(value_type) + value


def array(key: str, element_type: int, count: int, items: bytes = b"") -> bytes:
    """A key-value pair whose value is an array of `count` elements, honest or not."""
    return entry(key, 9, u32(element_type) + u64(count) + items)


def tensor(
    name: str | bytes, extents: Sequence[int], ggml_type: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    """A tensor description; extents as in the file, fastest first."""
    dims = u32(len(extents) if rank is None else rank) + b"".join(map(u64, extents))
    return string(name) + dims + u32(ggml_type) + u64(offset)


def gguf_file(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    entry_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file: header, padding to the alignment if data follow, data."""
    counts = u64(len(tensors) if tensor_count is None else tensor_count)
    counts += u64(len(entries) if entry_count is None else entry_count)
    header = b"GGUF" + u32(version) + counts + b"".join(entries) + b"".join(tensors)
    return header + (bytes(-len(header) % alignment) + data if data else b"")
