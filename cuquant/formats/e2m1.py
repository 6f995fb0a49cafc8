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
_SIGN = np.uint8(8)


def nearest(x: NDArray[np.float32], half: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes whose numbers times a scale are nearest to weights, of two equally near the smaller one.

    Distances are rounded to float32, and one to infinity never counts as smaller, as in llama.cpp's
    best_index_mxfp4: what rounds to 0 is code 0, whatever its sign.

    Parameters
    ----------
    x : float32 [n, b], finite
    half : float32 [n, 1], half the scale of each row

    Returns
    -------
    uint8 [n, b]
    """
    size = np.abs(x)
    codes = np.zeros(x.shape, np.uint8)
    least = size
    for code in range(1, 8):
        distance = np.abs(TWICE[code] * half - size)
        codes = np.where(distance < least, np.uint8(code), codes)
        least = np.minimum(distance, least)
    return np.where((x < 0) & (codes > 0), codes | _SIGN, codes)
