"""llama.cpp's importance matrices, byte by byte, as llama-imatrix writes them and as it does not; and a
model that they are of."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import synthetic
from gguf import GGUFValueType as Value
from gguf_files import array, entry, gguf_file, string, tensor, u32, write
from numpy.typing import NDArray

import cuquant as cq

F = np.float32
Sums = tuple[NDArray[np.float32], Sequence[float]]
"""Sums of squares, [K] or [matrices, K], and how many inputs each matrix had."""


def in_gguf(
    path: Path,
    weights: Mapping[str, Sums],
    *,
    keys: Sequence[bytes] | None = None,
    more: Mapping[str, NDArray[np.float32]] | None = None,
) -> Path:
    """A file of llama-imatrix's GGUF format; `more` are other tensors."""
    named: dict[str, NDArray[np.float32]] = {}
    for name, (sums, counts) in weights.items():
        # Trailing axes of 1 are none in a file.
        many = len(counts) > 1
        named[f"{name}.in_sum2"] = np.asarray(sums, F)
        named[f"{name}.counts"] = np.array(counts, F).reshape((-1, 1) if many else (1,))
    infos, data = [], b""
    for name, values in (named | dict(more or {})).items():
        infos.append(tensor(name, values.shape[::-1], 0, len(data)))
        data += values.tobytes() + bytes(-values.nbytes % 32)
    path.write_bytes(gguf_file(metadata() if keys is None else keys, infos, data))
    return path


def metadata(
    kind: str = "imatrix", datasets: Sequence[str] = ("text.txt", "b"), chunks: int = 9
) -> list[bytes]:
    return [
        entry("general.type", Value.STRING, string(kind)),
        array("imatrix.datasets", Value.STRING, len(datasets), b"".join(map(string, datasets))),
        entry("imatrix.chunk_count", Value.UINT32, u32(chunks)),
        entry("imatrix.chunk_size", Value.UINT32, u32(512)),
    ]


def i32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A string of the older format, which may lie about its length."""
    raw = value.encode() if isinstance(value, str) else value
    return i32(len(raw) if length is None else length) + raw


def older_entry(name: str | bytes, calls: int, values: Any, count: int | None = None) -> bytes:
    raw = np.asarray(values, F)
    return text(name) + i32(calls, raw.size if count is None else count) + raw.tobytes()


def older(*entries: bytes, count: int | None = None, end: bytes | None = None) -> bytes:
    """A file of the older format."""
    tail = i32(7) + text("calibration.txt") if end is None else end
    return i32(len(entries) if count is None else count) + b"".join(entries) + tail


K = 256
EXPERTS = 3
UP, DOWN, OUTPUT, NORM = "blk.0.ffn_up.weight", "blk.0.ffn_down_exps.weight", "output.weight", "a_norm.weight"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return rng(seed).standard_normal(shape, F)


def squares(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Sums of squares that differ much."""
    return np.exp(rng(seed).normal(0, 2, shape)).astype(F)


TENSORS = {
    UP: normal(16, K, seed=1),
    DOWN: normal(EXPERTS, 8, K, seed=2),
    OUTPUT: normal(8, K, seed=3),
    NORM: normal(K, seed=4),
}


def model(path: Path) -> Path:
    return write(path, dict(TENSORS))


def importances() -> dict[str, NDArray[np.float32]]:
    return {UP: squares(K, seed=5), DOWN: squares(EXPERTS, K, seed=6), "other.weight": squares(7)}


def bytes_of(path: Path, name: str) -> NDArray[np.uint8]:
    with cq.open(path, device="cpu") as made:
        return np.array(made[name].blocks)


RARE, COLUMN = 7, 3
"""A token of only one chunk, and the only column of the embedding in which it is not 0, as no other is."""


def with_a_rare_token(path: Path) -> Path:
    """A model whose first matrices have inputs at that token whose squares float32 does not hold; they make
    nothing of them, and all states are finite."""
    made: dict[str, Any] = {name: each.copy() for name, each in synthetic.tensors(synthetic.Spec()).items()}
    made["token_embd.weight"][:, COLUMN] = 0
    made["token_embd.weight"][RARE] = np.eye(64)[COLUMN]
    made["blk.0.attn_norm.weight"][COLUMN] = 1e20
    for part in "qkv":
        made[f"blk.0.attn_{part}.weight"][:, COLUMN] = 0
    return synthetic.write(path, synthetic.Spec(), **made)
