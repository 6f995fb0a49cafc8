"""Checks of matrix products against float64, for this library's tests and for users' own kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import check, device
from .array import QuantizedArray

CANARY = 0xA5
"""Byte that surrounds a guarded array."""


def as_numpy(array: Any) -> NDArray[Any]:
    """A NumPy array of a NumPy or CuPy array's, or a quantized array's, numbers."""
    if isinstance(array, QuantizedArray):
        array = array.dequantize()
    return np.asarray(device.as_numpy(array))


def nmse(y: Any, reference: Any) -> float:
    """Normalised mean square error sum((y - ref)^2) / sum(ref^2), in float64.

    NaN in either gives NaN, which no bound admits; two zero arrays give 0.
    """
    y, reference = (as_numpy(a).astype(np.float64) for a in (y, reference))
    error, power = np.square(y - reference).sum(), np.square(reference).sum()
    return float(error / power) if power else float("nan" if np.isnan(error) else error and np.inf)


def worst_element(y: Any, reference: Any) -> float:
    """Largest |y - ref| over the root mean square of its row of ref; infinite where a zero row is missed."""
    y, reference = (as_numpy(a).astype(np.float64) for a in (y, reference))
    if y.size == 0:
        return 0.0
    rms = np.sqrt(np.square(reference).mean(axis=-1, keepdims=True))
    error = np.abs(y - reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(error == 0, 0, error / rms).max())


def linear(
    x: Any, w: Any, *, bias: Any = None, activation: str | None = None, residual: Any = None
) -> NDArray[Any]:
    """act(x @ W.T + bias) + residual in float64, of the numbers that the operands stand for."""
    from scipy.special import erf

    x, w = (as_numpy(a).astype(np.float64) for a in (x, w))
    y = (x[None] @ w.swapaxes(-1, -2))[..., 0, :] if x.ndim == 1 else x @ w.swapaxes(-1, -2)
    if bias is not None:
        b = as_numpy(bias).astype(np.float64)
        y = y + (b if b.ndim == 1 or x.ndim == 1 else b[..., None, :])
    with np.errstate(over="ignore"):
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
    return y if residual is None else y + as_numpy(residual).astype(np.float64)


class Guarded:
    """An array inside a larger buffer of canary bytes: writes outside it are noticed.

    Parameters
    ----------
    shape, dtype
        Of the array, which starts filled with canary bytes too (NaN-like: an element never written shows).
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
        gap = padding if strided else 0
        count = int(np.prod(shape[:-1], dtype=int)) * (shape[-1] + gap) + 2 * padding
        self._buffer = xp.full(count * np.dtype(dtype).itemsize, CANARY, np.uint8)
        inner = self._buffer.view(dtype)[padding : count - padding]
        self.array = inner.reshape(*shape[:-1], shape[-1] + gap)[..., : shape[-1]]
        """The guarded array."""

    def intact(self) -> bool:
        """Whether every byte outside the array is as it was. Destroys the array's contents."""
        self.array[...] = self._buffer[: self.array.itemsize].view(self.array.dtype)[0]
        return bool((self._buffer == CANARY).all())


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
