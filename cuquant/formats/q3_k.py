"""q3_k: 3-bit codes around zero, scales of 6 bits per 16 weights (ggml type 11)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant
from .kernels import Coding, Kernels, Scaling
from .kquant import SEARCH, SUPER, F, Floats, KQuant


class Q3_K(KQuant):
    """256 weights in 110 bytes; W = d * (s - 32) * (q - 4), with s of 6 bits per 16 weights.

    32 bytes of third bits (bit i of byte j belongs to weight 32 i + j), 2 x 32 bytes of lower bits as in
    q2_k, 12 bytes of s (the nibbles of byte j < 8 are lower bits of scales j and j + 8; bits 2 i of byte
    8 + j the upper ones of scale 4 i + j), float16 d. Source: quantize_row_q3_K_ref and
    quantize_row_q3_K_impl of ggml.
    """

    name = "q3_k"
    bits = 3
    scale_size = 16
    storage = np.dtype([("hmask", "u1", (32,)), ("qs", "u1", (64,)), ("scales", "u1", (12,)), ("d", "<f2")])
    kernels = Kernels("q3_k", Coding.INTEGERS, Scaling.STEP_BYTES, SUPER, SEARCH)
    fine_from = 1  # numbers of 3 bits, chosen for scales as they are stored, do with a d that is off by half
    formula = "W = d * (s - 32) * (q - 4)"
    ggml_type = 11
    file_type = 11

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        n, g = len(x), kquant.groups(x, 16)
        if importance is None:
            scale, q = kquant.by_turns(g, 4)
            top = kquant.largest(kquant.groups(scale, 16))[:, None]
            zero, inverse = np.abs(top) < kquant.NEGLIGIBLE, F(-32) / top
            s = np.clip(np.rint(inverse * scale.reshape(n, 16)), F(-32), F(31)) + F(32)
            d, s = np.where(zero, F(0), F(1) / inverse)[:, 0], np.where(zero, F(0), s).astype(np.uint8)
        else:
            w = kquant.spread(x, 16, 2, importance)
            scale, q = kquant.symmetric(g, w, 4)
            d, s = kquant.symmetric(kquant.groups(scale, 16), kquant.groups(kquant.sums(w), 16), 32)
            s = kquant.ungrouped(s, n)
        d = d.astype(np.float16)
        steps = kquant.scaled(d, s.astype(np.int8) - np.int8(32)).reshape(-1)
        q = kquant.ungrouped(kquant.requantized(g, steps, q, -4, 3), n)
        return {
            "hmask": kquant.pack_bits(q >> 2),
            "qs": kquant.pack_pairs_of_bits((q & 3).reshape(-1, 128)),
            "scales": np.concatenate([ggml.pack_nibbles(s), kquant.pack_pairs_of_bits(s >> 4)], axis=1),
            "d": d,
        }

    def decode(self, records: NDArray[Any]) -> Floats:
        low = kquant.unpack_pairs_of_bits(records["qs"].reshape(-1, 32)).reshape(-1, 256)
        q = (low | (kquant.unpack_bits(records["hmask"]) << 2)).astype(np.int8) - np.int8(4)
        lower, upper = records["scales"][:, :8], records["scales"][:, 8:]
        s = ggml.unpack_nibbles(lower) | (kquant.unpack_pairs_of_bits(upper) << 4)
        return kquant.read(q, kquant.scaled(records["d"], s.astype(np.int8) - np.int8(32)))
