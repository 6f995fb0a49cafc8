"""Checks of matrix products against float64, for this library's tests and for users' own kernels.

    guarded = testing.Guarded((m, n), np.float16, strided=True, xp=cupy)
    my_kernel(x, w, out=guarded.array)
    reference = testing.linear(x, w, activation="silu")
    assert testing.nmse(guarded.array, reference) < 1e-6
    assert guarded.intact() and not testing.is_poison(guarded.array).any()

Arrays are NumPy's, CuPy's or quantized ones; the results are NumPy's.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import check, device
from .array import QuantizedArray
from .kv import KVCache

CANARY = 0xFF
"""Byte that fills and surrounds a guarded array: a NaN in every float type, so that reading it shows too."""


def as_numpy(array: Any) -> NDArray[Any]:
    """A NumPy array of a NumPy or CuPy array's, or a quantized array's, numbers."""
    if isinstance(array, QuantizedArray):
        array = array.dequantize()
    return np.asarray(device.as_numpy(array))


def nmse(y: Any, reference: Any) -> float:
    """Normalised mean square error sum((y - ref)^2) / sum(ref^2), in float64.

    Parameters
    ----------
    y, reference : arrays of one shape
        Their numbers may have any size that float64 holds.

    Returns
    -------
    float: NaN, which no bound admits, where there is a NaN in either; 0 for two zero arrays.

    Raises
    ------
    ValueError
        The shapes differ.
    TypeError
        An array is masked, or has complex numbers.
    """
    error, reference = _errors(y, reference)
    (error, of_error), (reference, of_reference) = _scaled(error), _scaled(reference)
    with np.errstate(all="ignore"):
        square, power = np.square(error).sum(), np.square(reference).sum()
        scale = 2 * int((of_error - of_reference).item())
        return 0.0 if square == power == 0 else float(np.ldexp(square / power, scale))


_EXPONENT = 400
"""Binary exponent of a greatest magnitude up to which its square, and sums of such, are far from where
float64 ends."""


def _scaled(x: NDArray[np.float64], axis: int | None = None) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """x / 2^e, and e (with axes of 1): 0 but where squares along the axis would overflow, or become 0."""
    peaks = np.abs(x).max(axis=axis, keepdims=True, initial=0)
    exponents = np.where(np.isfinite(peaks), np.frexp(peaks)[1], 0)
    exponents[np.abs(exponents) <= _EXPONENT] = 0
    return (np.ldexp(x, -exponents) if exponents.any() else x), exponents


def worst_element(y: Any, reference: Any) -> float:
    """Largest |y - ref| over the root mean square of its row of ref, in float64.

    Parameters
    ----------
    y, reference : arrays of one shape
        Rows are along the last axis; a scalar is a row of its own.

    Returns
    -------
    float: infinite where a zero row is missed; NaN, which no bound admits, where there is a NaN in either.

    Raises
    ------
    ValueError
        The shapes differ.
    TypeError
        An array is masked, or has complex numbers.
    """
    error, reference = map(np.atleast_1d, _errors(y, reference))
    if error.size == 0:
        return 0.0
    scaled, exponents = _scaled(reference, axis=-1)
    with np.errstate(all="ignore"):
        rms = np.ldexp(np.sqrt(np.square(scaled).mean(axis=-1, keepdims=True)), exponents)
        return float(np.where(error == 0, 0, np.abs(error) / rms).max())


def _errors(y: Any, reference: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """y - reference and reference in float64, of one shape: a broadcast result would compare as right."""
    y, reference = _numbers(y, "y"), _numbers(reference, "reference")
    if y.shape != reference.shape:
        raise ValueError(f"y has shape {y.shape}, the reference {reference.shape}")
    with np.errstate(invalid="ignore"):
        return y - reference, reference


def _numbers(value: Any, what: str) -> NDArray[np.float64]:
    """A value's numbers in float64; TypeError for those of which that would lose a part."""
    given = check.array(value, what) if isinstance(value, np.ma.MaskedArray) else as_numpy(value)
    return np.asarray(check.numbers(given, what) if given.dtype.kind == "c" else given, np.float64)


def linear(
    x: Any, w: Any, *, bias: Any = None, activation: str | None = None, residual: Any = None
) -> NDArray[Any]:
    """act(x @ W.T + bias) + residual in float64, of the numbers that the operands stand for.

    Parameters
    ----------
    x, w, bias, activation, residual
        As in `cuquant.linear`, of any float type; quantized ones are dequantized.

    Returns
    -------
    NumPy float64 array (..., M, N), or (..., N) for a vector x.

    Raises
    ------
    ValueError
        Shapes do not fit, or the activation is unknown.
    TypeError
        An array is masked, or has complex numbers.
    """
    from scipy.special import erf

    x, w = _numbers(x, "x"), _numbers(w, "w")
    y = (x[None] @ w.swapaxes(-1, -2))[..., 0, :] if x.ndim == 1 else x @ w.swapaxes(-1, -2)
    if bias is not None:
        b = _numbers(bias, "bias")
        y = y + (b if b.ndim == 1 or x.ndim == 1 else b[..., None, :])
    with np.errstate(over="ignore", under="ignore"):
        if activation == "relu":
            y = np.maximum(y, 0)
        elif activation == "silu":
            y = y / (1 + np.exp(-y))
        elif activation == "gelu":
            y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        elif activation == "gelu_erf":
            y = 0.5 * y * (1 + erf(y / np.sqrt(2)))
        elif activation is not None:
            raise ValueError(f"unknown activation {activation!r}; known are {', '.join(check.ACTIVATIONS)}")
    return y if residual is None else y + _numbers(residual, "residual")


def attention(
    q: Any,
    cache: KVCache,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = True,
    positions: Any = None,
) -> NDArray[Any]:
    """`cuquant.attention` in float64 on the dequantized tokens, a query and head at a time.

    Parameters
    ----------
    q, cache, scale, mask, causal, positions
        As in `cuquant.attention`.

    Returns
    -------
    NumPy float64 array of q's shape. As in `cuquant.attention`, a query and head that sees a value with NaN
    or infinity in one element has NaN in all.

    Raises
    ------
    ValueError
        Shapes do not fit.
    """
    q = as_numpy(q).astype(np.float64)
    batch, q_len, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    mask = True if mask is None else as_numpy(mask)
    out = np.zeros(q.shape)
    for b in range(batch):
        _, slots, k, v = cache.dequantize(b)
        last = int(cache.next_slots[b])
        at = range(last - q_len, last) if positions is None else np.broadcast_to(positions, q.shape[:2])[b]
        allowed = np.broadcast_to(mask, (batch, heads, q_len, np.shape(mask)[-1] if np.ndim(mask) else last))
        for j, h in np.ndindex(q_len, heads):
            own = allowed[b, h, j][slots]
            bias = np.where(own, 0, -np.inf) if own.dtype == bool else own.astype(np.float64)
            seen = (bias != -np.inf) & ((slots <= at[j]) | (not causal))
            if not seen.any():
                continue
            shared = h // (heads // cache.n_kv_heads)
            values = v[seen, shared].astype(np.float64)
            if not np.isfinite(values).all():
                out[b, j, h] = np.nan
                continue
            s = scale * (k[seen, shared].astype(np.float64) @ q[b, j, h]) + bias[seen]
            with np.errstate(under="ignore"):
                weights = np.exp(s - s.max())
                out[b, j, h] = weights @ values / weights.sum()
    return out


class Guarded:
    """An array inside a larger buffer of canary bytes: writes outside it are noticed.

    Parameters
    ----------
    shape, dtype
        Of the array, of one axis or more, which starts filled with canary bytes too: an element never written
        is NaN.
    padding : int
        Elements before and after it, and between its rows where `strided`.
    strided : bool
        Leave gaps between rows.
    xp : module
        numpy or cupy.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, *, padding: int = 64, strided: bool = False, xp: Any = np
    ) -> None:
        *lead, columns = check.shape_of_rows(shape)
        step = columns + (padding if strided else 0)
        rows, item = math.prod(lead), np.dtype(dtype).itemsize
        edge, size = padding * item, rows * step * item
        buffer = xp.full(edge + size + edge, CANARY, np.uint8)
        inner = buffer[edge : edge + size]
        gaps = inner.reshape(rows, step * item)[:, columns * item :]
        self._outside = (buffer[:edge], gaps, buffer[edge + size :])
        self.array = inner.view(dtype).reshape(*lead, step)[..., :columns]
        """The guarded array."""

    def intact(self) -> bool:
        """Whether every byte outside the array is as it was."""
        return all(bool((part == CANARY).all()) for part in self._outside)


def is_poison(array: Any) -> NDArray[np.bool_]:
    """Which elements still hold the canary bytes."""
    raw = np.ascontiguousarray(as_numpy(array))
    return (raw.view(np.uint8).reshape(*raw.shape, raw.itemsize) == CANARY).all(axis=-1)


BOUNDS = {
    np.dtype(np.float16): (1e-6, 0.01),
    np.dtype(ml_dtypes.bfloat16): (1e-5, 0.05),
    np.dtype(np.float32): (1e-6, 0.01),
}
"""What a product promises, by activation type: largest NMSE, and largest element error over its row's rms."""
