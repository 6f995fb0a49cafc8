"""Which bytes arrays of one device take: whether two have some in common, or elements of one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import device

_OVERLAP_WORK = 1000
"""Candidates that NumPy tries before it gives up; slices of one buffer take about one."""


def same_view(a: Any, b: Any) -> bool:
    """Whether two arrays of one shape are the same elements."""
    return bool(_address(a) == _address(b) and a.dtype == b.dtype and _steps(a) == _steps(b))


def _steps(a: Any) -> list[int]:
    """Strides of axes of more than one element."""
    return [step for step, extent in zip(a.strides, a.shape, strict=True) if extent > 1]


def overlaps_itself(a: Any) -> bool:
    """Whether elements may share bytes: an axis whose steps do not clear the axes of smaller steps."""
    span = a.itemsize
    for stride, extent in sorted((abs(s), n) for s, n in zip(a.strides, a.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span += stride * (extent - 1)
    return False


class _Place:
    """Where an array of a device lies, as NumPy sees arrays: its address is compared, never read."""

    def __init__(self, a: Any) -> None:
        place = {"data": (_address(a), False), "shape": a.shape, "strides": a.strides}
        self.__array_interface__ = {"version": 3, "typestr": f"|V{a.itemsize}", **place}


def may_overlap(a: Any, b: Any, on_gpu: bool) -> bool:
    """Whether two arrays of one device have a byte in common; also True where that is too hard to tell.

    Most arrays are apart by their first and last bytes, which are compared first.
    """
    if not on_gpu:
        return np.may_share_memory(a, b) and _share_bytes(a, b)
    start_a, start_b = a.data.ptr, b.data.ptr
    if a.flags.c_contiguous and b.flags.c_contiguous:  # the hot path, spared CuPy's general one
        return bool(start_a < start_b + b.nbytes and start_b < start_a + a.nbytes)
    # Not by CuPy, which takes arrays in others' memory, of torch and the like, to be apart.
    return _share_bytes(np.asarray(_Place(a)), np.asarray(_Place(b)))


def _share_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays have a byte in common, or it takes more than _OVERLAP_WORK to tell."""
    # NumPy's stubs know two of the values that it takes.
    return np.may_share_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type, unused-ignore]


def _address(a: Any) -> int:
    return int(a.data.ptr) if device.is_cuda(a) else int(a.ctypes.data)
