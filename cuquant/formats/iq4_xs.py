"""iq4_xs: 4-bit indices of 16 levels, scales of 6 bits per 32 weights (ggml type 23)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml, iq4_nl, kquant
from .int4 import pack_pairs, unpack_pairs
from .kernels import Coding, Kernels, Scaling
from .kquant import SEARCH, SUPER, F, Floats, KQuant

_SHIFTS = np.arange(0, 16, 2, dtype=np.uint16)


class IQ4_XS(KQuant):
    """256 weights in 136 bytes; W = d * (s - 32) * level[q], with s of 6 bits per 32 weights.

    float16 d, a little-endian word of the upper bits of s (bits 2 i belong to scale i), 4 bytes of the lower
    ones (byte j holds those of scales 2 j and 2 j + 1), then nibbles as in 8 blocks of iq4_nl, whose levels
    these are. Source: quantize_iq4_xs of ggml.
    """

    name = "iq4_xs"
    bits = 4
    storage = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", (4,)), ("qs", "u1", (128,))])
    kernels = Kernels("iq4_xs", Coding.CODEBOOK, Scaling.BYTES, SUPER, SEARCH)
    fine_from = 4  # codes are chosen before d is rounded, and so are scales
    formula = "W = d * (s - 32) * level[q]"
    ggml_type = 23
    file_type = 30
    codebook = iq4_nl.LEVELS

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        n, g = len(x), kquant.groups(x, 32)
        scale = iq4_nl.search(g, g * g if importance is None else kquant.spread(x, 32, 2, importance))
        d = -kquant.largest(kquant.groups(scale, 8)) / F(32)
        s = np.clip(np.rint(ggml.inverse(d)[:, None] * scale.reshape(n, 8)), F(-32), F(31))
        q = iq4_nl.nearest(g, ggml.inverse(kquant.scaled(d, s)).reshape(-1))
        codes = (s + F(32)).astype(np.uint8)
        return {
            "d": d.astype(np.float16),
            "scales_h": np.bitwise_or.reduce((codes >> 4).astype(np.uint16) << _SHIFTS, axis=1),
            "scales_l": pack_pairs(codes),
            "qs": ggml.pack_nibbles(q.T),
        }

    def decode(self, records: NDArray[Any]) -> Floats:
        upper = ((records["scales_h"][:, None] >> _SHIFTS) & 3).astype(np.uint8) << 4
        s = (unpack_pairs(records["scales_l"]) | upper).astype(np.int8) - np.int8(32)
        levels = self.codebook[ggml.unpack_nibbles(records["qs"].reshape(-1, 16))].reshape(-1, 256)
        return kquant.read(levels, kquant.scaled(records["d"], s))
