"""What a GPU reaches at best, and the floor of a time that follows."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from .. import device
from .timing import TooSlowError, queued_us

LAUNCH_US = 2.4
"""Microseconds that a kernel costs beyond its bytes, in a replayed graph."""
MOST_BYTES = 4 << 30
"""Bytes read at a time, where the GPU has so much: several hundred times what an L2 cache holds."""
SIDE = 8192
"""Side of the square matrices whose product is timed."""


class Ceilings(NamedTuple):
    """Rates of a GPU."""

    read_gbps: float
    """10^9 bytes per second that it reads."""
    tflops: float
    """10^12 float16 operations per second of cuBLAS."""

    def floor_us(self, moved: float, operations: float = 0) -> float:
        """Microseconds that a launch takes at least which moves so many bytes and computes so much."""
        return max(moved / self.read_gbps * 1e-3, operations / self.tflops * 1e-6) + LAUNCH_US


KNOWN = {"NVIDIA H200": Ceilings(4460.0, 770.0)}
"""Rates by the GPU's name, measured once, so that floors of records made at different times agree."""


def told_by(header: dict[str, Any]) -> Ceilings | None:
    """Rates that a record's header states, or else known ones of its GPU; None where there are neither."""
    told = header.get("ceilings")
    return KNOWN.get(header.get("device", "")) if told is None else Ceilings(**told)


def measured() -> Ceilings | None:
    """Measure the rates of the current GPU: summing up numbers that its caches cannot hold, and a product of
    float16 matrices by cuBLAS. None, with a warning, where the host is slower than the GPU."""
    cupy = device.cupy()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    try:
        return _measured(cupy)
    except TooSlowError as error:
        warnings.warn(f"floors are unknown, as what this GPU reaches is not measured: {error}", stacklevel=2)
        return None
    finally:
        pool.free_all_blocks()  # others' libraries need it


def _measured(cupy: Any) -> Ceilings:
    free, _ = cupy.cuda.runtime.memGetInfo()
    numbers = cupy.ones(min(MOST_BYTES, free // 4) // 4, np.float32)
    if not abs(float(numbers.sum()) / numbers.size - 1) < 1e-3:
        raise RuntimeError(f"wrong result: {float(numbers.sum())} is the sum of {numbers.size} ones")
    read_us, nbytes = queued_us([numbers.sum]), numbers.nbytes
    del numbers
    a, b = (cupy.random.standard_normal((SIDE, SIDE), np.float32).astype(np.float16) for _ in range(2))
    c = cupy.empty_like(a)
    product_us = queued_us([lambda: cupy.matmul(a, b, out=c)])
    return Ceilings(nbytes / read_us * 1e-3, 2 * SIDE**3 / product_us * 1e-6)
