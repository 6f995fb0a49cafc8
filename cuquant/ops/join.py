"""Quantized arrays joined to one: what `numpy.concatenate` and `numpy.stack` do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import check, device
from ..array import QuantizedArray


def concatenate(arrays: Sequence[QuantizedArray], axis: int = 0) -> QuantizedArray:
    """`numpy.concatenate` of quantized arrays of one format: weights that share their x as one, (N, K) below
    each other; along any axis but the last. The bytes are those of the arrays."""
    given, axis = check.joined(arrays, axis, "concatenate", new=False)
    shape = list(given[0].shape)
    shape[axis] = sum(w.shape[axis] for w in given)
    return _made(given, np.concatenate, axis, tuple(shape))


def stack(arrays: Sequence[QuantizedArray], axis: int = 0) -> QuantizedArray:
    """`numpy.stack` of quantized arrays of one format and shape: experts (N, K) as (E, N, K)."""
    given, axis = check.joined(arrays, axis, "stack", new=True)
    shape = given[0].shape
    return _made(given, np.stack, axis, (*shape[:axis], len(given), *shape[axis:]))


FUNCTIONS: dict[Callable[..., Any], Callable[..., QuantizedArray]] = {
    np.concatenate: concatenate,
    np.stack: stack,
}
"""Functions for quantized arrays, by those of NumPy that they stand for."""


def _made(
    given: Sequence[QuantizedArray], join: Callable[..., Any], axis: int, shape: tuple[int, ...]
) -> QuantizedArray:
    fmt = check.whole_blocks(shape, given[0].format)  # a vector's last block may be a part, a matrix's not
    own = join if given[0].device == "cpu" else getattr(device.cupy(), join.__name__)
    return QuantizedArray._made(fmt, own([w.blocks for w in given], axis=axis), shape=shape)
