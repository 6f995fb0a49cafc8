"""GGUF files: by the gguf package, or byte by byte, so that tests can also build what no writer would."""

from __future__ import annotations

import errno
import os
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

import cuquant as cq

NANO = Path(__file__).parents[1] / "examples" / "data" / "nano-llama-f16.gguf"
HELD_OUT = NANO.with_name("heldout-public.txt")


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


Stored = NDArray[Any] | tuple[NDArray[np.uint8], Type]
"""A tensor to write: plain numbers, or rows of bytes and their type."""


def write(
    path: Path, tensors: Mapping[str, Stored], *, split: int = 0, alignment: int | None = None, **keys: str
) -> Path:
    """A file by the gguf package, `split` tensors to a part; `keys` are strings under "general."."""
    writer = gguf.GGUFWriter(path, "test", split_max_tensors=split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in keys.items():
        writer.add_string(f"general.{key}", value)
    for name, stored in tensors.items():
        values, kind = stored if isinstance(stored, tuple) else (stored, None)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_blocks(path: Path, shape: tuple[int, ...], ggml_type: int, raw: NDArray[np.uint8]) -> Path:
    """A file of one tensor, byte by byte: the gguf package is wrong about q8_1."""
    path.write_bytes(gguf_file([], [tensor("w.weight", shape[::-1], ggml_type)], raw.tobytes()))
    return path


def assert_reads_as_gguf(name: str) -> NDArray[np.float32]:
    """Random bytes read as by the gguf package, to the bit: the numbers."""
    raw = random_blocks(name, (64, 4096))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scales are infinite and NaN, or overflow
        expected = gguf.quants.dequantize(raw, Type[name.upper()])
    got: NDArray[np.float32] = cq.from_blocks(raw, name, (64, 4096)).dequantize()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    return got


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Whatever happens inside changes no file below `folder` and leaves none behind."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str) -> None:
    """Nobody may have the folder "listed", or a file "made" in it. (Modes do not stop root.)"""
    real = os.open

    def asked(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        made = bool(flags & os.O_CREAT) and Path(path).parent == folder
        if made if what == "made" else Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", asked)
