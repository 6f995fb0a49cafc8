"""Arithmetic that the ggml block formats share, rounding for rounding as llama.cpp's reference quantizers.

Every step rounds to float32 where the reference does: a fused or reordered step changes bits. Overflow and
invalid operations are expected here (see check.require_scales) and silenced by the caller.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

HALF = np.float32(0.5)
_NIBBLE = np.uint8(0x0F)
_SHIFT = np.uint8(4)


def signed_absmax(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Per block, the signed element of the largest magnitude, the first of equals: [n, 32] -> [n, 1]."""
    first = np.argmax(np.abs(x), axis=1, keepdims=True)
    peak = np.take_along_axis(x, first, axis=1)
    # The reference starts from +0, so a block of -0 has the peak +0 (and the scale -0).
    return np.where(peak == 0, np.float32(0), peak)


def extremes(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Per block, minimum and maximum, the first of equals (+0 and -0 are equal): [n, 32] -> 2 x [n, 1]."""
    low = np.take_along_axis(x, np.argmin(x, axis=1, keepdims=True), axis=1)
    high = np.take_along_axis(x, np.argmax(x, axis=1, keepdims=True), axis=1)
    return low, high


def inverse(d: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / d, and 0 where that is not finite.

    1 / d overflows only for subnormal d, which float16 stores as zero: whatever the codes, the block reads
    as zero. The reference converts infinity to an integer there, which C leaves undefined.
    """
    inv = np.float32(1) / d
    return np.where(np.isfinite(inv), inv, np.float32(0))


def round_half_away(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """C's roundf. x + 0.5 would round up 0.49999997; doubling the exact fraction does not."""
    whole = np.trunc(x)
    return whole + np.trunc(np.float32(2) * (x - whole))


def pack_nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes [n, b] -> bytes [n, b / 2]: code j, low, and code j + b / 2, high, are byte j."""
    half = q.shape[1] // 2
    return (q[:, :half] & _NIBBLE) | (q[:, half:] << _SHIFT)


def unpack_nibbles(qs: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes [n, b / 2] -> codes [n, b] (see pack_nibbles)."""
    return np.concatenate([qs & _NIBBLE, qs >> _SHIFT], axis=1)


def pack_fifth_bits(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bit 4 of codes [n, 32] -> bytes [n, 4]: bit j of the little-endian word belongs to code j."""
    return np.packbits(q >> _SHIFT, axis=1, bitorder="little")


def unpack_fifth_bits(qh: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes [n, 4] -> 0 or 16 for each code, [n, 32]."""
    return np.unpackbits(qh, axis=1, bitorder="little") << _SHIFT


def absmax_codes(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Symmetric 8-bit codes of blocks [n, 32]: float32 scales absmax / 127 [n, 1], and codes [n, 32].

    NaN or infinity in a block makes its scale NaN or infinite and its codes zero: it reads back as NaN.
    """
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * np.where(np.isfinite(d), inverse(d), np.float32(0))
    q = np.where(np.isfinite(scaled), round_half_away(scaled), np.float32(0))
    return d, q.astype(np.int8)


def scale_of(records: NDArray[Any], field: str = "d") -> NDArray[np.float32]:
    """A float16 field of records [n] as a float32 column [n, 1]."""
    column: NDArray[np.float32] = records[field].astype(np.float32)[:, None]
    return column


def records_of(storage: np.dtype[Any], **fields: NDArray[Any]) -> NDArray[Any]:
    """Records [n] from their fields; scale columns [n, 1] are rounded to float16, one per record."""
    records = np.empty(len(next(iter(fields.values()))), storage)
    for name, values in fields.items():
        records[name] = values.reshape(records[name].shape)
    return records
