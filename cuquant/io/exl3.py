"""Weights of EXL3 checkpoints (exllamav3): formats/exl3.py has what the tensors mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import check
from ..array import QuantizedArray
from ..formats.exl3 import GENERATORS, Exl3


def from_exl3(trellis: Any, suh: Any, svh: Any, codebook: str = "3inst") -> QuantizedArray:
    """A weight of an EXL3 checkpoint, without rounding.

    Parameters
    ----------
    trellis : NumPy array of int16, shape (K / 16, N / 16, 16 * bits)
        K and N are multiples of 128, bits 1 to 8.
    suh, svh : NumPy arrays of float16, shapes (K,) and (N,)
        Or of int16, (K / 16,) and (N / 16,): a bit for each, from the lowest on, that is set for -1.
    codebook : "3inst", "mcg" or "mul1"
        "mcg" and "mul1" where the checkpoint has a tensor of that name beside these.

    Returns
    -------
    QuantizedArray of shape (N, K), of the format `Exl3`; the arrays are copied.

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; another codebook.
    """
    trellis, suh, svh = check.exl3(trellis, suh, svh)
    tiles_k, tiles_n, words = trellis.shape
    fmt = Exl3(words // 16, check.choice(codebook, "codebook", tuple(GENERATORS)))
    shape = (tiles_n * 16, tiles_k * 16)
    blocks = np.empty(fmt.stored(shape), np.uint8)
    for field, given in zip(fmt.parts(blocks, shape), (trellis, suh, svh), strict=True):
        field[...] = given
    return QuantizedArray._made(fmt, blocks, shape=shape)
