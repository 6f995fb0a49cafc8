"""E2M1, the 4-bit floats of mxfp4 and nvfp4: sign, two exponent bits, one mantissa bit.

As in llama.cpp, codes stand for integers twice as large as the floats, and block scales are halved to
compensate: the products are the same, and exact in float32. -0 reads as +0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
TWICE = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
"""float32 [16], read-only: twice the number of each code."""
TWICE.flags.writeable = False
LARGEST = 6.0
_BETWEEN = (TWICE[:7] + TWICE[1:8]) / 2
"""Midpoints of neighbouring magnitudes: a weight above is nearer to the larger one."""
_SIGN = np.uint8(8)


def nearest(x: NDArray[np.float32], half: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes whose numbers times a scale are nearest to weights, of two equally near the smaller one.

    A number that overflows is never taken, and what becomes 0 is code 0, whatever its sign. So does
    llama.cpp's best_index_mxfp4, which takes the first code of the least distance in float32.

    Parameters
    ----------
    x : float32 [n, b], finite; at most 2^20 times the scale, unless that is 0
    half : float32 [n, 1], half the scale of each row

    Returns
    -------
    uint8 [n, b]
    """
    taken = (half > 0) & np.isfinite(TWICE[1:8] * half)
    limits = np.where(taken, _BETWEEN * half, np.float32(np.inf))
    size = np.abs(x)
    codes = np.zeros(x.shape, np.uint8)
    for limit in limits.T:
        codes += size > limit[:, None]
    return np.where((x < 0) & (codes > 0), codes | _SIGN, codes)
