"""q2_k: 2-bit codes above minimums, scales and minimums of 4 bits per 16 weights (ggml type 10)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import kquant
from .kernels import Coding, Kernels, Scaling
from .kquant import SEARCH, SUPER, Floats, KQuant


class Q2_K(KQuant):
    """256 weights in 84 bytes; W = d * s * q - dmin * m, with s and m of 4 bits per 16 weights.

    16 bytes, s in their low nibbles and m in their high ones, 2 x 32 bytes of codes (of each 128 weights,
    bits 2 i of byte j belong to weight 32 i + j), float16 d, float16 dmin. Source: quantize_row_q2_K_ref and
    quantize_row_q2_K_impl of ggml.
    """

    name = "q2_k"
    bits = 2
    scale_size = 16
    storage = np.dtype([("scales", "u1", (16,)), ("qs", "u1", (64,)), ("d", "<f2"), ("dmin", "<f2")])
    scales = ("d", "dmin")
    kernels = Kernels("q2_k", Coding.INTEGERS, Scaling.STEP_NIBBLES_AND_MIN, SUPER, SEARCH)
    formula = "W = d * s * q - dmin * m"
    ggml_type = 10
    file_type = 10

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        n, g = len(x), kquant.groups(x, 16)
        if importance is None:
            scale, minimum, q = kquant.affine(g, np.abs(g), 3, -0.5, 0.1, 15, absolute=True)
            d, s = kquant.of_largest(scale.reshape(n, 16), 15)
            dmin, m = kquant.of_largest(minimum.reshape(n, 16), 15)
        else:
            w = kquant.spread(x, 16, 1, importance)
            scale, minimum, q = kquant.affine(g, w, 3, -0.9, 0.05, 36)
            total = kquant.sums(w).reshape(n, 16)
            d, s = kquant.of_least_error(scale.reshape(n, 16), total, 15)
            dmin, m = kquant.of_least_error(minimum.reshape(n, 16), total, 15)
        d, dmin = d.astype(np.float16), dmin.astype(np.float16)
        steps, below = kquant.scaled(d, s), kquant.scaled(dmin, m)
        q = kquant.requantized(g + below.reshape(-1), steps.reshape(-1), q, 0, 3)
        packed = kquant.pack_pairs_of_bits(kquant.ungrouped(q, n).reshape(-1, 128))
        return {"scales": s | (m << 4), "qs": packed, "d": d, "dmin": dmin}

    def decode(self, records: NDArray[Any]) -> Floats:
        q = kquant.unpack_pairs_of_bits(records["qs"].reshape(-1, 32)).reshape(-1, 256)
        s, m = records["scales"] & 15, records["scales"] >> 4
        return kquant.read(q, kquant.scaled(records["d"], s), kquant.scaled(records["dmin"], m))
