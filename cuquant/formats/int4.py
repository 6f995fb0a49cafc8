"""int4: integers of 4 bits with one float16 scale, and maybe a zero point, per group of weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from .base import Format, register
from .kernels import Coding, Encoder, KeptAs, Kernels, Scaling, kept_as

_KERNELS_GROUPS = (128, 64, 32)
"""Sizes of groups that kernels know: of others the largest that they are a multiple of, repeated."""
WHOLE_ROW = -1
"""Group size that stands for K, whatever it is."""
_BIAS = np.float32(8)
_NIBBLE = np.uint8(0x0F)
_SHIFT = np.uint8(4)


class Int4(Format):
    """Groups of a row's weights with a scale: W = (q - 8) * scale, or W = (q - zero) * scale.

    The U4B8 and U4 of GPTQ, AWQ and Marlin. A block is one group: scale as a float16, the zero point as a
    byte (asymmetric groups only), then group_size / 2 bytes; byte j holds code 2 j in its low nibble and code
    2 j + 1 in its high one. `cuquant.int4_from_parts` and `cuquant.int4_parts` convert from and to
    separate arrays. "int4-32", "int4-64" and "int4-128" are symmetric, "int4-32-zeros" and so on are not.

    Quantizing, in float32, every operation rounded to nearest, ties to even:

    - symmetric: scale = max(max(x) / 7, -min(x) / 8), q = round(x / scale) + 8;
    - asymmetric: with low = min(x, 0) and high = max(x, 0), scale = (high - low) / 15,
      zero = round(-low / scale) and q = round(x / scale) + zero, so that 0 stays 0.

    The scale is rounded to float16 before it divides; zero and q are clipped to 0 .. 15. Where the scale is 0
    all weights read as 0.

    Parameters
    ----------
    group_size : int
        32, 64, 128 or another multiple of 32; -1 for one group per row: quantizing K weights a row then gives
        arrays of the format Int4(K).
    symmetric : bool

    Raises
    ------
    TypeError, ValueError
        An argument is none of these.
    """

    def __init__(self, group_size: int = 128, symmetric: bool = True) -> None:
        self.group_size = check.group_size(group_size)
        self.symmetric = check.flag(symmetric, "symmetric")
        # Of Int4(-1), which holds no array, the block size is what K must be a multiple of.
        self.block_size = 32 if self.group_size == WHOLE_ROW else self.group_size
        zero = [] if self.symmetric else [("zero", "u1")]
        self.storage = np.dtype([("scale", "<f2"), *zero, ("codes", "u1", (self.block_size // 2,))])
        self.formula = f"W = (q - {'8' if self.symmetric else 'zero'}) * scale"
        group = "row" if self.group_size == WHOLE_ROW else str(self.group_size)
        self.name = f"int4-{group}" + ("" if self.symmetric else "-zeros")

    bits = 4
    scales = ("scale",)

    @property
    def fine_from(self) -> int:
        """Least scale that is fine: codes are chosen for the scale as it is stored, which makes up for its
        rounding; a zero point does not, where clipping it moves all weights."""
        return 1 if self.symmetric else 2

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        known = next(size for size in _KERNELS_GROUPS if self.block_size % size == 0)
        if self.block_size != known:
            return kept_as(KeptAs(Int4(known, self.symmetric), self._split, self._joined))
        scaling = Scaling.HALF if self.symmetric else Scaling.HALF_AND_ZERO
        group = 0 if known == 32 else known
        return Kernels("int4", Coding.INTEGERS, scaling, group, Encoder("quantize_int4"))

    def _split(self, blocks: Any, xp: Any) -> Any:
        part = self.for_kernels.block_size
        *lead, row_bytes = blocks.shape
        parts, scales = self.block_size // part, self.block_bytes - self.block_size // 2
        groups = blocks.reshape(*lead, row_bytes // self.block_bytes, self.block_bytes)
        fine = xp.empty((*groups.shape[:-1], parts, scales + part // 2), np.uint8)
        fine[..., :scales] = groups[..., None, :scales]
        fine[..., scales:] = groups[..., scales:].reshape(*groups.shape[:-1], parts, part // 2)
        return fine.reshape(*lead, groups.shape[-2] * parts * fine.shape[-1])

    def _joined(self, blocks: Any, xp: Any) -> Any:
        part = self.for_kernels.block_size
        *lead, row_bytes = blocks.shape
        parts, scales = self.block_size // part, self.block_bytes - self.block_size // 2
        part_bytes = scales + part // 2
        fine = blocks.reshape(*lead, row_bytes // (parts * part_bytes), parts, part_bytes)
        groups = xp.empty((*fine.shape[:-2], self.block_bytes), np.uint8)
        groups[..., :scales] = fine[..., 0, :scales]
        groups[..., scales:] = fine[..., scales:].reshape(*fine.shape[:-2], self.block_size // 2)
        return groups.reshape(*lead, fine.shape[-3] * self.block_bytes)

    def for_row(self, k: int) -> Int4:
        return Int4(k, self.symmetric) if self.group_size == WHOLE_ROW else self

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
        if self.symmetric:
            scale = np.maximum(high / np.float32(7), low / np.float32(-8))
        else:
            low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
            scale = (high - low) / np.float32(15)
        half = (scale + np.float32(0)).astype(np.float16)  # of zeros of both signs too, the scale is +0
        records = np.empty(len(x), self.storage)
        records["scale"] = half[:, 0]
        steps = half.astype(np.float32)
        zero = _BIAS if self.symmetric else np.clip(_rounded_quotient(-low, steps), 0, 15)
        records["codes"] = pack_pairs(np.clip(_rounded_quotient(x, steps) + zero, 0, 15).astype(np.uint8))
        if not self.symmetric:
            records["zero"] = zero[:, 0]
        return records

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        zero = _BIAS if self.symmetric else records["zero"].astype(np.float32)[:, None]
        return (unpack_pairs(records["codes"]) - zero) * records["scale"].astype(np.float32)[:, None]

    def __repr__(self) -> str:
        return f"Int4({self.group_size}{'' if self.symmetric else ', symmetric=False'})"


def pack_pairs(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes (..., k) -> bytes (..., k / 2): byte j is code 2 j, in its low nibble, and code 2 j + 1."""
    return (q[..., ::2] & _NIBBLE) | (q[..., 1::2] << _SHIFT)


def unpack_pairs(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes (..., k / 2) -> codes (..., k) (see pack_pairs)."""
    pairs = np.stack([raw & _NIBBLE, raw >> _SHIFT], axis=-1)
    return pairs.reshape(*raw.shape[:-1], 2 * raw.shape[-1])


def _rounded_quotient(x: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """x / scale to the nearest integer, and 0 where the scale is."""
    return np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))


for _symmetric in (True, False):
    for _group in (32, 64, 128):
        register(Int4(_group, _symmetric))
