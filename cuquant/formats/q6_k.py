"""q6_k: 6-bit codes around zero, scales of 8 bits per 16 weights (ggml type 14)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant
from .kernels import Coding, Kernels, Scaling
from .kquant import SEARCH, SUPER, F, Floats, KQuant


class Q6_K(KQuant):
    """256 weights in 210 bytes; W = d * s * (q - 32), with s a signed byte per 16 weights.

    2 x 64 bytes of nibbles (of each 128 weights, byte j holds weight j in its low nibble and weight j + 64 in
    its high one), 2 x 32 bytes of upper bits (bits 2 i of byte j belong to weight 32 i + j), 16 bytes s,
    float16 d. Source: quantize_row_q6_K_ref and quantize_row_q6_K_impl of ggml.
    """

    name = "q6_k"
    bits = 6
    scale_size = 16
    storage = np.dtype([("ql", "u1", (128,)), ("qh", "u1", (64,)), ("scales", "i1", (16,)), ("d", "<f2")])
    kernels = Kernels("q6_k", Coding.INTEGERS, Scaling.STEP_BYTES, SUPER, SEARCH)
    formula = "W = d * s * (q - 32)"
    ggml_type = 14
    file_type = 18

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        n, g = len(x), kquant.groups(x, 16)
        scale, q = kquant.symmetric(g, g * g if importance is None else kquant.groups(importance, 16), 32)
        top = kquant.largest(kquant.groups(scale, 16))[:, None]
        zero, inverse = np.abs(top) < kquant.NEGLIGIBLE, F(-128) / top
        d = np.where(zero, F(0), F(1) / inverse).astype(np.float16)[:, 0]
        s = np.where(zero, F(0), np.minimum(np.rint(inverse * scale.reshape(n, 16)), F(127))).astype(np.int8)
        q = kquant.ungrouped(kquant.requantized(g, kquant.scaled(d, s).reshape(-1), q, -32, 31), n)
        q = np.where(zero, np.uint8(0), q)
        return {
            "ql": ggml.pack_nibbles(q.reshape(-1, 128)),
            "qh": kquant.pack_pairs_of_bits((q >> 4).reshape(-1, 128)),
            "scales": s,
            "d": d,
        }

    def decode(self, records: NDArray[Any]) -> Floats:
        low = ggml.unpack_nibbles(records["ql"].reshape(-1, 64))
        q = low | (kquant.unpack_pairs_of_bits(records["qh"].reshape(-1, 32)) << 4)
        signed = q.reshape(-1, 256).astype(np.int8) - np.int8(32)
        return kquant.read(signed, kquant.scaled(records["d"], records["scales"]))
