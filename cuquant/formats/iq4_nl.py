"""iq4_nl: 4-bit indices of 16 levels, one scale per 32 weights (ggml type 20)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant
from .kernels import Coding, Kernels, Scaling
from .kquant import SEARCH, Codes, F, Floats, KQuant

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F)
"""Denser around 0, as weights are."""
LEVELS.flags.writeable = False
_TWICE = 2 * LEVELS.astype(np.int16)
_NEAREST = np.searchsorted((_TWICE[1:] + _TWICE[:-1]) // 2, np.arange(_TWICE[0], _TWICE[-1] + 1), "right")
"""Code of each half integer from the first level to the last: of two levels equally near the upper one."""
_NEAREST_LEVEL = LEVELS[_NEAREST]
_TRIES = 7


class IQ4_NL(KQuant):
    """32 weights in 18 bytes: float16 d, then 16 bytes of nibbles; W = d * level[q].

    Source: quantize_iq4_nl of ggml.
    """

    name = "iq4_nl"
    bits = 4
    block_size = 32
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
    kernels = Kernels("iq4_nl", Coding.CODEBOOK, Scaling.HALF, encoder=SEARCH)
    formula = "W = d * level[q]"
    ggml_type = 20
    file_type = 25
    codebook = LEVELS

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        g = kquant.groups(x, 32)
        scale = search(g, g * g if importance is None else kquant.spread(x, 32, 2, importance))
        q = nearest(g, ggml.inverse(scale))
        return {"d": scale.astype(np.float16), "qs": ggml.pack_nibbles(kquant.ungrouped(q, len(x)))}

    def decode(self, records: NDArray[Any]) -> Floats:
        return ggml.scale_of(records) * LEVELS[ggml.unpack_nibbles(records["qs"])]


def search(x: Floats, w: Floats) -> Floats:
    """Scales of least weighted squared error in x = scale * level.

    Levels are looked up with -127 / -peak and (-127 + i) / peak, i = -7 .. 7, in place of 1 / scale, where
    peak is the weight of the largest magnitude, with its sign; from these levels the scale follows by least
    squares, and the best of all is taken. (quantize_row_iq4_nl_impl.)

    Parameters
    ----------
    x, w : float32 [32, g]
        Weights, and the weight of each one's error.

    Returns
    -------
    float32 [g]
    """
    peak = kquant.largest(x)

    def tried(inverse: Floats) -> tuple[Floats, Floats]:
        level = _NEAREST_LEVEL[_half_steps(x, inverse)]
        wl = w * level
        return kquant.sums(wl * x), kquant.sums(wl * level)

    sum_xl, sum_l2 = tried(F(1) / (-peak / LEVELS[0]))
    scale = np.where(sum_l2 > 0, sum_xl / sum_l2, F(0))
    gain = scale * sum_xl
    for i in range(-_TRIES, _TRIES + 1):
        sum_xl, sum_l2 = tried((F(i) + LEVELS[0]) / peak)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > gain * sum_l2)
        scale = np.where(better, sum_xl / sum_l2, scale)
        gain = np.where(better, scale * sum_xl, gain)
    return kquant.of_peak(scale, peak, LEVELS[0])


def nearest(x: Floats, inverse: Floats) -> Codes:
    """Codes of the levels nearest to x * inverse: [32, g], [g] -> uint8 [32, g]."""
    return _NEAREST[_half_steps(x, inverse)].astype(np.uint8)


def _half_steps(x: Floats, inverse: Floats) -> NDArray[np.intp]:
    """Indices of x * inverse in `_NEAREST`. Midpoints of levels are half integers: rounding down is exact."""
    steps = np.floor(F(2) * (x * kquant.finite(inverse))) - F(_TWICE[0])
    return np.clip(steps, F(0), F(len(_NEAREST) - 1)).astype(np.intp)
