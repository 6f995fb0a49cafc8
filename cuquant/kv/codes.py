"""Codes of cached keys and values: the vector of one token and head is a float16 scale times signed integers.

x = scale * q with q of b bits in two's complement range, -2^(b-1) .. 2^(b-1) - 1. The element of the largest
magnitude is scale * -2^(b-1), as in ggml's q4_0: the scale carries its sign, and no code is wasted (at 2
bits a third of the error of codes -1, 0, 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = (16, 8, 4, 3, 2)
"""Widths of a number in a bucket; 16 is float16, without scales."""

_GROUP = {2: (4, 1), 3: (8, 3), 4: (2, 1)}
"""Codes that fill whole bytes, and those bytes."""

HADAMARD = 32
"""Points of the rotation."""

LARGEST_KEY_SCALE = 8
"""Binary logarithm of the largest automatic key scale, and of one over the smallest."""


def dtype(bits: int) -> np.dtype[Any]:
    """Dtype of stored numbers: float16, int8, or uint8 for packed codes."""
    return np.dtype({16: np.float16, 8: np.int8}.get(bits, np.uint8))


def packed_dim(head_dim: int, bits: int) -> int:
    """Elements of `dtype` that store head_dim numbers."""
    return head_dim if bits >= 8 else head_dim * bits // 8


def encode(x: NDArray[np.float32], bits: int) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Codes [..., heads, packed_dim] and scales [..., heads] of numbers [..., heads, head_dim].

    In float32: scale = extreme / -2^(bits-1), rounded away from 0 to float16; q = rint(x / scale), clipped.
    Rows of zeros have codes 0. NaN, infinity and magnitudes above 65504 * 2^(bits-1) make their whole row
    NaN. For 16 bits: float16 numbers, and no scales (last axis 0).
    """
    with np.errstate(all="ignore"):
        if bits == 16:
            return x.astype(np.float16), np.empty((*x.shape[:-2], 0), np.float16)
        least = -(1 << (bits - 1))
        extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
        scale = _away_from_zero(extreme / np.float32(least))
        q = np.clip(np.rint(x / scale.astype(np.float32)), least, -1 - least)
    q = np.where(np.isfinite(q), q, 0).astype(np.int8)
    return q if bits == 8 else _pack(q, bits), scale[..., 0]


def decode(qx: NDArray[Any], scale: NDArray[np.float16], bits: int) -> NDArray[np.float32]:
    """Numbers [..., heads, head_dim] of codes and scales (see `encode`): exact products."""
    if bits == 16:
        return qx.astype(np.float32)
    q = qx.astype(np.float32) if bits == 8 else _unpack(qx, bits)
    with np.errstate(invalid="ignore"):  # scales of infinity or NaN propagate
        return q * scale.astype(np.float32)[..., None]


def key_scales(power: Any, how: str, xp: Any = np) -> Any:
    """Powers of two near the fourth root of mean squares [..., heads, head_dim] of channels; 1 for zeros.

    Those of the channels that RoPE turns into one another ("pairs" or "halves") are averaged. A slow pair
    turns little over the first tokens: a channel of its own may be small there, and large later.
    """
    axis, pairs = (-1, (-1, 2)) if how == "pairs" else (-2, (2, -1))
    both = power.reshape(*power.shape[:-1], *pairs)
    both = xp.broadcast_to(both.mean(axis=axis, keepdims=True), both.shape).reshape(power.shape)
    exponent = xp.rint(xp.log2(both) / 4)
    exponent = xp.where(xp.isfinite(exponent), exponent, 0)
    return xp.exp2(xp.clip(exponent, -LARGEST_KEY_SCALE, LARGEST_KEY_SCALE)).astype(np.float32)


def stored_keys(
    k: NDArray[np.float32], scales: NDArray[np.float32] | None, rotated: bool
) -> NDArray[np.float32]:
    """Keys [n, heads, head_dim] as they are quantized: over their scales [heads, head_dim], and rotated."""
    if scales is not None:
        k = k / scales
    return rotate(k) if rotated else k


def rotate(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each 32 elements of the last axis times the orthonormal Hadamard matrix, its own inverse.

    The same rotation of keys and queries leaves their products as they are, and spreads outliers.
    """
    y = x.reshape(*x.shape[:-1], x.shape[-1] // HADAMARD, HADAMARD)
    for step in (1, 2, 4, 8, 16):
        pairs = y.reshape(*y.shape[:-1], HADAMARD // (2 * step), 2, step)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2).reshape(y.shape)
    return y.reshape(x.shape) * np.float32(HADAMARD**-0.5)


def _away_from_zero(x: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round to float16, magnitudes up: codes stay in range where float16 is coarse, near its smallest."""
    nearest = x.astype(np.float16)
    further = np.nextafter(nearest, np.copysign(np.float16(np.inf), nearest))
    return np.where(np.abs(nearest.astype(np.float32)) < np.abs(x), further, nearest)


def _pack(q: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Code q is stored as q + 2^(bits-1), the first in the lowest bits of little-endian groups of bytes."""
    count, size = _GROUP[bits]
    stored = (q.astype(np.int32) + (1 << (bits - 1))).astype(np.uint32)
    *lead, dim = q.shape
    groups = stored.reshape(*lead, dim // count, count) << (bits * np.arange(count, dtype=np.uint32))
    words = np.bitwise_or.reduce(groups, axis=-1)[..., None]
    packed = (words >> (8 * np.arange(size, dtype=np.uint32))).astype(np.uint8)
    return packed.reshape(*lead, dim // count * size)


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.float32]:
    """Codes as float32 (see `_pack`)."""
    count, size = _GROUP[bits]
    *lead, width = packed.shape
    groups = packed.reshape(*lead, width // size, size) << (8 * np.arange(size, dtype=np.uint32))
    words = np.bitwise_or.reduce(groups, axis=-1)[..., None]
    stored = words >> (bits * np.arange(count, dtype=np.uint32)) & np.uint32((1 << bits) - 1)
    return stored.reshape(*lead, width // size * count).astype(np.float32) - np.float32(1 << (bits - 1))
