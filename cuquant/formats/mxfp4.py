"""mxfp4: 4-bit floats, one power of two per 32 weights (ggml type 39)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import e2m1, ggml
from .base import Format
from .kernels import Coding, Encoder, Kernels, Scaling

_HALVES = np.ldexp(np.float32(1), np.arange(256) - 128)
"""Half of each E8M0 scale 2^(e - 127). As in llama.cpp, 255 is no NaN."""
_BIAS = 127
_LARGEST_EXPONENT = 2
"""Exponent of the largest E2M1 numbers: 4 and 6 are 2^2 and 1.5 times that."""


class MXFP4(Format):
    """32 weights in 17 bytes: E8M0 e, then 16 bytes of nibbles; W = E2M1[q] * 2^(e - 127).

    e - 127 = floor(log2(absmax)) - 2, with log2 rounded to float32: a little below a power of two it is that
    power's. Weights between 6 and 8 times the scale become 6 times it. A block whose absmax is below 2^-125
    reads as 0: its e wraps around to 232 or more, and its codes are 0. Source: quantize_row_mxfp4_ref of
    ggml; scales and codes are those of the OCP Microscaling (MX) specification, ggml has its own order of
    nibbles.
    """

    name = "mxfp4"
    bits = 4
    storage = np.dtype([("e", "u1"), ("qs", "u1", (16,))])
    scales = ("e",)
    formula = "W = E2M1[q] * 2^(e - 127)"
    kernels = Kernels("mxfp4", Coding.E2M1, Scaling.E8M0, encoder=Encoder())
    ggml_type = 39
    file_type = 38
    codebook = e2m1.TWICE

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        peak = np.abs(x).max(axis=1, keepdims=True)
        # Taken in float64 and rounded, since float32 logarithms differ between machines in their last bit.
        exponent = np.floor(np.log2(np.where(peak > 0, peak, 1).astype(np.float64)).astype(np.float32))
        e = exponent.astype(np.int32) + (_BIAS - _LARGEST_EXPONENT)
        e = np.where(peak > 0, e, 0).astype(np.uint8)
        return ggml.records_of(self.storage, e=e, qs=ggml.pack_nibbles(e2m1.nearest(x, _HALVES[e])))

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        return e2m1.TWICE[ggml.unpack_nibbles(records["qs"])] * _HALVES[records["e"]][:, None]
