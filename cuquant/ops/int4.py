"""int4 weights from the separate arrays that other programs keep them in, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..array import QuantizedArray
from ..debug import shown
from ..formats.int4 import Int4


@shown
def int4_from_parts(
    codes: Any, scales: Any, zeros: Any = None, group_size: int | None = None
) -> QuantizedArray:
    """A weight of the format `Int4` from its codes, scales and zero points, without rounding.

    Parameters
    ----------
    codes : NumPy array of uint8, shape (..., N, K / 2)
        Byte j of a row holds code 2 j in its low nibble and code 2 j + 1 in its high one.
    scales : NumPy array of float16, shape (..., N, K / group_size)
        NaN and infinity give NaN and infinity in their own group.
    zeros : NumPy array of uint8, shape of scales, optional
        0 to 15: W = (q - zero) * scale; without, W = (q - 8) * scale.
    group_size : int, optional
        Weights of a scale, a multiple of 32; -1 for K. By default what the shapes say.

    Returns
    -------
    QuantizedArray of shape (..., N, K), of the format Int4(group_size, symmetric=zeros is None)

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; K is not a multiple of the group, or the group not of 32; a
        zero point is beyond 15.
    """
    codes, scales, zeros, size = check.int4_parts(codes, scales, zeros, group_size)
    fmt = Int4(size, symmetric=zeros is None)
    records = np.empty(scales.shape, fmt.storage)
    records["scale"] = scales
    records["codes"] = codes.reshape(records["codes"].shape)
    if zeros is not None:
        records["zero"] = zeros
    return QuantizedArray._made(fmt, records.view(np.uint8))


def int4_parts(w: QuantizedArray) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.uint8] | None]:
    """Codes, scales and zero points of an int4 weight: copies of what `int4_from_parts` takes.

    Parameters
    ----------
    w : QuantizedArray of a format `Int4`, of NumPy, shape (..., N, K)

    Returns
    -------
    codes : uint8 (..., N, K / 2)
    scales : float16 (..., N, K / group_size)
    zeros : uint8 of the shape of scales, or None of a symmetric format

    Raises
    ------
    TypeError
        w is no such array.
    """
    fmt = check.format_of(w, Int4)
    records = np.ascontiguousarray(w.blocks).view(fmt.storage)
    codes = records["codes"].reshape(*w.shape[:-1], w.shape[-1] // 2)
    zeros = None if fmt.symmetric else records["zero"].copy()
    return codes, records["scale"].copy(), zeros
