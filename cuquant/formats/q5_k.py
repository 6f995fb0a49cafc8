"""q5_k: 5-bit codes above minimums, scales and minimums of 6 bits per 32 weights (ggml type 13)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant, q4_k
from .kernels import Coding, Kernels, Scaling
from .kquant import SEARCH, SUPER, Floats, KQuant


class Q5_K(KQuant):
    """256 weights in 176 bytes; W = d * s * q - dmin * m, with s and m of 6 bits per 32 weights.

    float16 d, float16 dmin, 12 bytes of s and m, 32 bytes of fifth bits (bit i of byte j belongs to weight
    32 i + j), then nibbles as in q4_k. Source: quantize_row_q5_K_ref and quantize_row_q5_K_impl of ggml.
    """

    name = "q5_k"
    bits = 5
    storage = np.dtype(
        [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("qh", "u1", (32,)), ("qs", "u1", (128,))]
    )
    scales = ("d", "dmin")
    kernels = Kernels("q5_k", Coding.INTEGERS, Scaling.BYTES_AND_MIN, SUPER, SEARCH)
    formula = "W = d * s * q - dmin * m"
    ggml_type = 13
    file_type = 16

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        fields, q = q4_k.with_minimums(x, importance, 31, (-0.5, 0.1, 15))
        return fields | {"qh": kquant.pack_bits(q >> 4), "qs": ggml.pack_nibbles(q.reshape(-1, 64))}

    def decode(self, records: NDArray[Any]) -> Floats:
        low = ggml.unpack_nibbles(records["qs"].reshape(-1, 32)).reshape(-1, 256)
        return q4_k.read(records, low | (kquant.unpack_bits(records["qh"]) << 4))
