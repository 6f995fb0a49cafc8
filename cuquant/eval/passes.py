"""What a forward pass does between products, in float32: by NumPy's functions, or by kernels that CuPy makes,
which read and write each number once where a function for each operation would do so several times."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import device

Array = NDArray[np.float32]


def norm(x: Array, weight: Any, eps: float) -> Array:
    """Root-mean-square norm over the last axis, times weights."""
    weight = weight.astype(np.float32, copy=False)
    if device.is_cuda(x):
        per = np.float32(1 / x.shape[-1])
        scale = _kernel("norm")(x, per, np.float32(eps), axis=-1, keepdims=True)
        scaled: Array = _kernel("scaled")(x, scale, weight)
        return scaled
    return x * (1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))) * weight


def rotated(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotary embedding of heads (..., T, heads, head_dim) by cosines and sines [T, 1, rope_dim / 2]; other
    dimensions pass."""
    dim = 2 * cos.shape[-1]
    out: Array = x.copy()
    if interleaved:
        a, b, to_a, to_b = x[..., 0:dim:2], x[..., 1:dim:2], out[..., 0:dim:2], out[..., 1:dim:2]
    else:
        half = dim // 2
        a, b, to_a, to_b = x[..., :half], x[..., half:dim], out[..., :half], out[..., half:dim]
    if device.is_cuda(x):
        _kernel("rotated")(a, b, cos, sin, to_a, to_b)
    else:
        to_a[...] = a * cos - b * sin
        to_b[...] = a * sin + b * cos
    return out


def gated(gate: Array, up: Array) -> Array:
    """silu(gate) * up, as one pass of a GPU."""
    made: Array = _kernel("gated")(gate, up)
    return made


def exponentials(scores: Array) -> Array:
    """Overwrites scores [..., n] with e to the power of each less its row's greatest; their sums [..., 1]."""
    greatest = scores.max(axis=-1, keepdims=True)
    if device.is_cuda(scores):
        _kernel("exponentials")(scores, greatest, scores)
    else:
        scores -= greatest
        np.exp(scores, out=scores)
    sums: Array = scores.sum(axis=-1, keepdims=True)
    return sums


def greatest(x: Array) -> Any:
    """The greatest magnitude of a GPU's array, NaN if there is one: float32 [] there."""
    return _kernel("greatest")(x)


_ELEMENTS = {
    "scaled": ("float32 x, float32 scale, float32 weight", "float32 y", "y = x * scale * weight"),
    "rotated": (
        "float32 a, float32 b, float32 cos, float32 sin",
        "float32 x, float32 y",
        "x = a * cos - b * sin; y = a * sin + b * cos",
    ),
    "gated": ("float32 gate, float32 up", "float32 y", "y = gate / (1 + expf(-gate)) * up"),
    "exponentials": ("float32 x, float32 greatest", "float32 y", "y = expf(x - greatest)"),
}
"""Operands, results and what is done with each of their elements."""


_SUMS = {
    "norm": ("float32 x, float32 per, float32 eps", "x * x", "a + b", "y = 1 / sqrtf(a * per + eps)"),
    "greatest": ("float32 x", "fabsf(x)", "a > b || isnan(a) ? a : b", "y = a"),
}
"""Operands, what is taken of each element, how two of these become one, and the result of the last."""


@cache
def _kernel(name: str) -> Any:
    cupy = device.cupy()
    if name in _SUMS:
        operands, taken, joined, result = _SUMS[name]
        return cupy.ReductionKernel(operands, "float32 y", taken, joined, result, "0", f"cuquant_{name}")
    return cupy.ElementwiseKernel(*_ELEMENTS[name], f"cuquant_{name}")
