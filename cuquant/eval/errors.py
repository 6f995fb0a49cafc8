"""Errors of a tensor against another: by NumPy, in a few threads, or by a kernel that CuPy makes."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check, cpu, device
from ..slabs import Slabs, can_be_on_gpu

Doubles = NDArray[np.float64]

_THREADS = 8
"""Threads that take slabs on the host, at most: each has some 20 MB."""
_PART = 1 << 18
"""Numbers of a slab in float64 at a time: a core's own cache has room for a few as many, and threads, which
Python lets go on one by one, seldom wait."""
_RUN = 1 << 12
"""Numbers whose squares BLAS adds: of more than 10,000 it would have threads do so, in another order."""


def error_of(original: Any, other: Any, on_gpu: bool | None = None) -> tuple[float, float | None, float]:
    """nmse, its ratio in dB and the largest error of one tensor (..., N, K) or (K,) against another.

    Each is quantized, or an array of floats or of integers; errors are float64, and 0 only of equal numbers.
    A NaN or an infinity that both have in one place is no error, another one is an error of NaN or infinity.
    The signal is that of finite numbers. They are compared on the GPU, if it can have both: by default where
    one of them is there.
    """
    given = original, other
    if on_gpu is None:
        on_gpu = any(device.is_cuda(check.storage(each)) for each in given)
    if 0 in other.shape:
        return 0.0, None, 0.0
    if on_gpu and all(map(can_be_on_gpu, given)):
        found = _on_gpu(Slabs(*given, on_gpu=True))
    else:
        found = _on_host(Slabs(*given, on_gpu=False))
    with cpu.silent():
        noise, signal = map(_root, found[:2])
    ratio = noise / signal if signal else (inf if noise else 0.0)
    return ratio * ratio, -20 * log10(ratio) if ratio else None, float(found[2].max())


def _on_gpu(slabs: Slabs) -> Doubles:
    """As `_on_host`, of rows."""
    found, first = device.cupy().empty((3, slabs.rows)), 0
    for place in slabs.places:
        exact, made = slabs.at(*place)
        _kernel()(exact, made, *found[:, first : first + len(exact)], axis=1)
        first += len(exact)
    noise, signal, largest = device.as_numpy(found)
    return np.stack([np.sqrt(noise), np.sqrt(signal), largest])


_KERNEL = """
__device__ double widened(float x) {
  const int bits = __float_as_int(x);
  if (bits & 0x7F800000) return x;
  const double subnormal = (bits & 0x7FFFFF) * 0x1p-149;  // which CuPy's kernels take for 0
  return bits < 0 ? -subnormal : subnormal;
}
struct cuquant_errors {
  double noise, signal, largest;
  __device__ cuquant_errors() : noise(0), signal(0), largest(0) {}
  __device__ cuquant_errors(double x, double y) {
    double difference = y - x;
    if (isnan(difference) && isnan(x) == isnan(y)) difference = 0;
    noise = difference * difference;
    signal = isfinite(x) ? x * x : 0;
    largest = fabs(difference);
  }
};
__device__ cuquant_errors joined(const cuquant_errors& a, const cuquant_errors& b) {
  cuquant_errors both;
  both.noise = a.noise + b.noise;
  both.signal = a.signal + b.signal;
  both.largest = a.largest > b.largest || isnan(a.largest) ? a.largest : b.largest;
  return both;
}
"""
"""Sums of squares of float32 numbers, which float64 holds, and the largest difference; NaN if one is."""


@cache
def _kernel() -> Any:
    return device.cupy().ReductionKernel(
        "float32 x, float32 y",
        "float64 noise, float64 signal, float64 largest",
        "cuquant_errors(widened(x), widened(y))",
        "joined(a, b)",
        "noise = a.noise, signal = a.signal, largest = a.largest",
        "cuquant_errors()",
        "cuquant_tensor_errors",
        reduce_type="cuquant_errors",
        preamble=_KERNEL,
    )


def _on_host(slabs: Slabs) -> Doubles:
    """Roots of noise and of signal, and largest differences [3, n], in slabs' order."""
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1, len(slabs.places))) as pool:
        found = pool.map(lambda place: _of_slab(*slabs.at(*place)), slabs.places)
        return np.concatenate(list(found), axis=1)


def _of_slab(exact: NDArray[Any], made: NDArray[Any]) -> Doubles:
    exact, made = exact.reshape(-1), made.reshape(-1)
    with cpu.silent():
        return np.array([_of_part(exact[i], made[i]) for i in cpu.slabs(len(exact), 1, _PART)]).T


def _of_part(exact: NDArray[Any], made: NDArray[Any]) -> tuple[float, float, float]:
    (x, x_rest), (difference, rest) = _parts(exact), _parts(made)
    difference -= x
    beyond = rest - x_rest
    if np.ndim(beyond):
        difference += beyond
    largest = _largest(difference)
    if not largest < inf:
        alike = np.isnan(x) == np.isnan(made.astype(np.float64))
        difference[np.isnan(difference) & alike] = 0
        largest = _largest(difference)
    signal = _root(x)
    if not signal < inf:
        signal = _root(x[np.isfinite(x)])
    return _root(difference), signal, largest


def _parts(x: NDArray[Any]) -> tuple[Doubles, Any]:
    """Two float64 numbers for each: itself, and what it has beyond them if it is an integer above 2^53."""
    if x.dtype not in (np.int64, np.uint64):
        return x.astype(np.float64), 0.0
    rest = np.where(np.abs(x) > 1 << 53, x % 2048, 0)
    return (x - rest).astype(np.float64), rest.astype(np.float64)


def _largest(x: Doubles) -> float:
    """The largest magnitude, NaN if there is one."""
    return abs(float(np.maximum(x.max(initial=0), -x.min(initial=0))))  # not -0


def _root(x: Doubles) -> float:
    """The root of the sum of squares, none of which overflows or vanishes."""
    squares = _squares(x)
    if not 1e-280 < squares < inf:
        peak = _largest(x)
        if not 0 < peak < inf:
            return peak
        return peak * float(np.sqrt(_squares(x / peak)))
    return float(np.sqrt(squares))


def _squares(x: Doubles) -> float:
    """The sum of squares."""
    whole = len(x) // _RUN * _RUN
    runs, rest = x[:whole].reshape(-1, _RUN), x[whole:]
    return float(np.vecdot(runs, runs).sum() + rest @ rest)
