"""Products that are repeated: what was checked of one is not checked again of others like it.

Types, shapes, strides and dtypes decide what a product is and how it is launched. They are a key, of each
weight; what is asked again is where the arrays lie. In a loop over small products the host sets the pace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import device, problem
from .array import QuantizedArray

_MOST = 64
"""Of a weight; then it starts anew."""


class Repeat(NamedTuple):
    """A product x @ W.T that is one launch: of contiguous float16 rows, to a contiguous result, with nothing
    after the sums."""

    launch: problem.Launch
    device: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    x_bytes: int
    out_bytes: int
    w_start: int
    w_end: int

    def takes(self, x: Any, out: Any) -> bool:
        """Whether arrays that are like the first ones lie as they may, too: on the current GPU, x where
        kernels can read it, and the result apart from what is read."""
        start, here = x.data.ptr, device.cupy().cuda.runtime.getDevice()
        if here != self.device or x.data.device_id != here or start % 16:
            return False
        if out is None:
            return True
        to = out.data.ptr
        end = to + self.out_bytes
        apart = (end <= start or start + self.x_bytes <= to) and (end <= self.w_start or self.w_end <= to)
        return apart and out.data.device_id == here


def find(x: Any, w: Any, out: Any) -> Repeat | None:
    """What is known of a product with these operands, if it can be done so."""
    if type(w) is not QuantizedArray or w._fragments is None or not device.is_cuda(x):
        return None
    if out is not None and not device.is_cuda(out):
        return None
    found = w._fragments.repeats.get(_key(x, out))
    return found if found is not None and found.takes(x, out) else None


def remember(launch: problem.Launch, fragments: Any, x: Any, out: Any) -> None:
    """That a product, of x as kernels read it, was checked and launched."""
    if not (x.flags.c_contiguous and out.flags.c_contiguous):
        return
    repeats, start = fragments.repeats, fragments.buffer.data.ptr
    if len(repeats) >= _MOST:
        repeats.clear()
    repeat = Repeat(
        launch,
        device.cupy().cuda.runtime.getDevice(),
        out.shape,
        out.dtype,
        x.nbytes,
        out.nbytes,
        start,
        start + fragments.buffer.nbytes,
    )
    repeats[_key(x, out)] = repeat
    if out.dtype == x.dtype:
        repeats[_key(x, None)] = repeat  # as it is without `out`


def _key(x: Any, out: Any) -> tuple[Any, ...]:
    if out is None:
        return x.shape, x.strides, x.dtype.char
    return x.shape, x.strides, x.dtype.char, out.shape, out.strides, out.dtype.char
