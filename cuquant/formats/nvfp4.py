"""nvfp4: 4-bit floats, one 8-bit float per 16 weights (ggml type 40)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import e2m1, ggml
from .base import Format

_GROUP = 16
"""Weights of one scale."""
_LARGEST_SCALE = 448.0
_LARGEST_CODE = 0x7E
_TOP_EXPONENT = 0x78
"""Code of 256, the least scale of the largest exponent."""
_SMALLEST_NORMAL = np.float32(2**-6)
_STEPS = np.float32(2**9)
"""Subnormal scales in 1."""


def _halves() -> NDArray[np.float32]:
    """Half the number of every byte: unsigned E4M3 without its sign bit, but 0x7F is 0."""
    exponent, mantissa = np.divmod(np.arange(256) & 0x7F, 8)
    normal = np.ldexp(np.float32(8) + mantissa.astype(np.float32), exponent - 11)
    halves = np.where(exponent > 0, normal, np.ldexp(mantissa.astype(np.float32), -10))
    halves[0x7F] = 0
    return halves


_HALVES = _halves()


class NVFP4(Format):
    """64 weights in 36 bytes: 4 unsigned E4M3 scales, then 4 x 8 bytes of nibbles; W = E2M1[q] * d.

    Scale g and bytes 8 g to 8 g + 7 of the nibbles belong to weights 16 g to 16 g + 15; of these bytes, byte
    j holds weight j in its low nibble and weight j + 8 in its high one. The scale is absmax / 6, rounded as
    ggml does: to nearest, ties up; but below 2^-6 to at most 7 * 2^-9, and from 248 on to 448. 0x7F, E4M3's
    NaN, reads as 0, and 0xFF as 480. Source: quantize_row_nvfp4_ref and ggml_fp32_to_ue4m3 of ggml.

    16 weights below 0.0058 read as 0, since the least scale is 2^-9. Weights of language models want the
    float32 scale that NVIDIA's NVFP4 keeps per tensor. It is no part of these blocks; multiply by it:
    ``s = abs(w).max() / (6 * 448); y = (x @ cuquant.quantize(w / s, "nvfp4").T) * s``.
    """

    name = "nvfp4"
    bits = 4
    block_size = 4 * _GROUP
    scale_size = _GROUP
    storage = np.dtype([("d", "u1", (4,)), ("qs", "u1", (32,))])
    scales = ("d",)
    largest = e2m1.LARGEST * _LARGEST_SCALE
    beyond = "divide the weights by a number, and multiply products by it"
    formula = "W = E2M1[q] * d"
    ggml_type = 40
    file_type = 39
    codebook = e2m1.TWICE
    scaling = "e4m3"

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        groups = x.reshape(-1, _GROUP)
        d = _codes(np.abs(groups).max(axis=1, keepdims=True) / np.float32(e2m1.LARGEST))
        qs = ggml.pack_nibbles(e2m1.nearest(groups, _HALVES[d]))
        return ggml.records_of(self.storage, d=d.reshape(-1, 4), qs=qs.reshape(-1, 32))

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        q = ggml.unpack_nibbles(records["qs"].reshape(-1, _GROUP // 2))
        return (e2m1.TWICE[q] * _HALVES[records["d"].reshape(-1, 1)]).reshape(-1, self.block_size)


def _codes(scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Unsigned E4M3 of numbers from 0 to 448, rounded as ggml_fp32_to_ue4m3 does."""
    bits = np.ascontiguousarray(scales).view(np.int32)
    normal = ((bits + (1 << 19)) >> 20) - ((127 - 7) << 3)
    normal = np.where(normal >= _TOP_EXPONENT, _LARGEST_CODE, normal)
    subnormal = np.minimum((scales * _STEPS + ggml.HALF).astype(np.int32), 7)
    return np.where(scales < _SMALLEST_NORMAL, subnormal, normal).astype(np.uint8)
