"""E4M4: unsigned 8-bit floats of 4 exponent and 4 mantissa bits, the block scales of the k-bit formats.

Code 16 * e + m is 2^(e - 11) * (1 + m / 16) for e > 0, and the subnormal 2^-14 * m for e = 0: zero, then
2^-14 to 31, without sign, infinity or NaN. Rounding to nearest even, the relative error of normals (from
2^-10 on) is at most 1/33, of subnormals at most 1/3; between 2^-15 and 2^-14 it is less than 1, and what is
at most 2^-15 becomes 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check

LARGEST = 31.5
"""What rounds to the largest code, 31: half a step above it. Codes saturate beyond."""
_MANTISSA = np.uint32(19)
"""Bits of a float32 mantissa that E4M4 lacks."""
_EXPONENTS = np.uint32((127 - 11) << 4)
"""Difference of the biases, above four bits of mantissa."""
_SMALLEST_NORMAL = np.float32(2**-10)
_STEP = np.float32(2**-14)
"""Distance of neighbouring subnormal numbers."""
_ALIGNED = np.float32(2**9)
"""A float32 whose last bit is worth 2^-14: adding it rounds a subnormal, to nearest even."""


def codes(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of finite numbers from 0 on, to nearest even and saturating, of the same shape."""
    bits = x.view(np.uint32)
    odd = (bits >> _MANTISSA) & np.uint32(1)
    normal = ((bits + np.uint32((1 << 18) - 1) + odd) >> _MANTISSA) - _EXPONENTS
    subnormal = (x + _ALIGNED).view(np.uint32) - _ALIGNED.view(np.uint32)
    return np.minimum(np.where(x < _SMALLEST_NORMAL, subnormal, normal), 255).astype(np.uint8)


def values(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Numbers of codes, exact in float32, of the same shape."""
    wide = codes.astype(np.uint32)
    normal = ((wide + _EXPONENTS) << _MANTISSA).view(np.float32)
    return np.where(wide < 16, wide.astype(np.float32) * _STEP, normal)


def e4m4_encode(x: Any) -> NDArray[np.uint8]:
    """E4M4 codes of numbers, rounded to nearest even; above 31 they saturate to 255.

    Parameters
    ----------
    x : NumPy array of float32, float16 or bfloat16, any shape

    Returns
    -------
    uint8 array of x's shape.

    Raises
    ------
    TypeError
        x is not a NumPy array of those dtypes.
    ValueError
        x holds NaN, infinity or a negative number, which E4M4 lacks (-0 is 0).
    """
    x = check.on_cpu(check.floats(x, "x"), "x").astype(np.float32)
    check.require_e4m4(x)
    return codes(np.abs(x).reshape(-1)).reshape(x.shape)


def e4m4_decode(codes: Any) -> NDArray[np.float32]:
    """The float32 numbers of E4M4 codes, exactly.

    Parameters
    ----------
    codes : NumPy array of uint8, any shape

    Returns
    -------
    float32 array of the same shape, of 0 and 2^-14 to 31.

    Raises
    ------
    TypeError
        codes is not a NumPy array of uint8.
    """
    codes = check.on_cpu(check.codes(codes), "codes")
    return values(codes.reshape(-1)).reshape(codes.shape)
