"""q4_k: 4-bit codes above minimums, scales and minimums of 6 bits per 32 weights (ggml type 12)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant
from .kernels import Coding, Kernels, Scaling
from .kquant import SEARCH, SUPER, Codes, F, Floats, KQuant


class Q4_K(KQuant):
    """256 weights in 144 bytes; W = d * s * q - dmin * m, with s and m of 6 bits per 32 weights.

    float16 d, float16 dmin, 12 bytes of s and m (`kquant.pack_scales`), then 4 x 32 bytes of nibbles: of each
    64 weights, byte j holds weight j in its low nibble and weight j + 32 in its high one. Source:
    quantize_row_q4_K_ref of ggml, and quantize_row_q4_K_impl for weights with an importance.
    """

    name = "q4_k"
    bits = 4
    storage = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,)), ("qs", "u1", (128,))])
    scales = ("d", "dmin")
    kernels = Kernels("q4_k", Coding.INTEGERS, Scaling.BYTES_AND_MIN, SUPER, SEARCH)
    formula = "W = d * s * q - dmin * m"
    ggml_type = 12
    file_type = 14

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        fields, q = with_minimums(x, importance, 15, (-1, 0.1, 20))
        return fields | {"qs": ggml.pack_nibbles(q.reshape(-1, 64))}

    def decode(self, records: NDArray[Any]) -> Floats:
        return read(records, ggml.unpack_nibbles(records["qs"].reshape(-1, 32)))


def with_minimums(
    x: Floats, importance: Floats | None, most: int, search: tuple[float, float, int]
) -> tuple[dict[str, NDArray[Any]], Codes]:
    """d, dmin and scales of q4_k and q5_k, and codes [n, 256] of blocks [n, 256]."""
    n, g = len(x), kquant.groups(x, 32)
    if importance is None:
        w = np.sqrt(kquant.sums(g * g) / F(32)) + np.abs(g)
        scale, minimum, q = kquant.affine(g, w, most, *search)
        d, s = kquant.of_largest(scale.reshape(n, 8), 63)
        dmin, m = kquant.of_largest(minimum.reshape(n, 8), 63)
    else:
        w = kquant.spread(x, 32, 2, importance)
        scale, minimum, q = kquant.affine(g, w, most, -0.9, 0.05, 36)
        total = kquant.sums(w).reshape(n, 8)
        d, s = kquant.of_least_error(scale.reshape(n, 8), total, 63)
        dmin, m = kquant.of_least_error(minimum.reshape(n, 8), total, 63)
    d, dmin = d.astype(np.float16), dmin.astype(np.float16)
    steps, below = kquant.scaled(d, s), kquant.scaled(dmin, m)
    q = kquant.requantized(g + below.reshape(-1), steps.reshape(-1), q, 0, most)
    return {"d": d, "dmin": dmin, "scales": kquant.pack_scales(s, m)}, kquant.ungrouped(q, n)


def read(records: NDArray[Any], q: Codes) -> Floats:
    """Weights of q4_k and q5_k records [n], of their codes."""
    s, m = kquant.unpack_scales(records["scales"])
    steps, below = kquant.scaled(records["d"], s), kquant.scaled(records["dmin"], m)
    return kquant.read(q.reshape(-1, 256), steps, below)
