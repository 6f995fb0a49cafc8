"""Making quantized arrays, and reading them back."""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check, cpu, device, formats, repeats
from ..array import QuantizedArray
from ..debug import shown
from ..formats import Format
from . import trellis

tensor_name: ContextVar[str | None] = ContextVar("tensor_name", default=None)
"""The tensor of a file that is being quantized, if it is one: warnings name it."""


@shown
def quantize(x: Any, format: str | Format, importance: Any = None) -> QuantizedArray:
    """Quantize an array along its last axis.

    Parameters
    ----------
    x : NumPy or CuPy array of float32, float16 or bfloat16, shape (..., K), any strides
        K is a multiple of the format's block size (32 for most). A vector (K,) may have any length in a k-bit
        format: its last block is filled up with zeros.
    format : str or Format
        "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "iq4_nl", "mxfp4", "nvfp4", "kbit4", "int4-128", ...
        for weights, "q8_1" for activations; or a format with parameters, as `KBit` and `Int4`.
    importance : array of numbers, shape (K,), optional
        How much errors of each column matter: the mean square of what it is multiplied by. Finite, not
        negative, not all 0; only proportions count. For k-quants, IQ4, q4_0, q4_1, q5_0 and q5_1, whose
        scales are then searched for as llama.cpp does with an importance matrix, and for trellis formats, as
        the `moments` of `trellis_quantize`. A CuPy array is read by the host.

    Returns
    -------
    QuantizedArray of x's shape, where x lives; of ggml's formats its bytes equal those of llama.cpp's
    reference quantizers (without importance matrix).

    Raises
    ------
    TypeError
        x is not an array of those dtypes, importance not of numbers.
    ValueError
        K is not a multiple of the block size; importance does not fit, or the format takes none; or, for
        weight formats, x holds NaN or infinity or needs a scale that overflows its type (the message names
        the first such row). q8_1 propagates them instead.

    Warns
    -----
    UserWarning
        More than a hundredth of the weights are too small for the format: their scales became 0, or have so
        few bits that errors are larger than usual. The README's section on limits lists at which sizes, and
        which weights become 0 without a warning.
    """
    if importance is None:
        found = repeats.find(repeats.quantized, (format,), x)
        if found is not None:
            how, fmt = found[0].work
            blocks, rows = device.backend(True).quantize_again(how, x)
            return QuantizedArray._made(fmt, blocks, rows, x.shape)
    check.require_array_first(x, format)
    given = formats.get(format)
    x = check.floats(x, "x")
    check.require_quantized_to(given)
    given = check.whole_blocks(x.shape, given, "x")
    on_gpu = check.is_on_gpu(x=x)
    if importance is not None and given.takes_moments:
        return trellis.by_importance(x, given, importance)
    fmt = given.fitted(x)
    if importance is not None:
        weights = check.column_importance(importance, fmt, x.shape[-1])
        blocks, lost = device.backend(on_gpu).quantize(x, fmt, weights)
        _warn_of(lost, x.size, fmt)
        return QuantizedArray._made(fmt, blocks)
    if on_gpu and fmt.for_activations:
        blocks, rows, how = device.backend(True).quantize_activations(x, fmt)
        if how is not None:
            repeats.remember(repeats.quantized, (fmt.name,), (how, fmt), x, result=blocks)
        return QuantizedArray._made(fmt, blocks, rows)
    backend = device.backend(on_gpu)
    *_, k = shape = x.shape
    if missing := -k % fmt.block_size:
        filled = backend.empty((k + missing,), x.dtype)
        filled[:k], filled[k:] = x, 0
        x = filled
    blocks, lost = backend.quantize(x, fmt)
    if fmt is given:
        _warn_of(lost, x.size, fmt)
    return QuantizedArray._made(fmt, blocks, shape=shape)


def blocks_of_each(x: Any, fmt: Format, rows: NDArray[np.float32]) -> list[Any]:
    """Storage bytes of each matrix of a stack (E, N, K), by an importance of its own, a row of [E, K]; errors
    say which matrix it is, and one warning how many weights of all are lost."""
    x = check.floats(x, "x")
    backend = device.backend(check.is_on_gpu(x=x))
    made, lost = [], 0
    for index, row in enumerate(rows):
        try:
            if fmt.takes_moments:
                made.append(trellis.by_importance(x[index], fmt, row).blocks)
                continue
            weights = check.column_importance(row, fmt, x.shape[-1])
            blocks, lost_here = backend.quantize(x[index], fmt, weights)
        except ValueError as error:
            raise ValueError(f"expert {index}: {error}") from None
        made.append(blocks)
        lost += lost_here
    _warn_of(lost, x.size, fmt)
    return made


def _warn_of(lost: int, size: int, fmt: Format) -> None:
    if check.is_many(lost, size):
        name = tensor_name.get()
        tensor = "" if name is None else f"tensor {name!r}: "
        advice = fmt.beyond or "mxfp4 and trellis formats take weights of any size"
        warnings.warn(
            f"{tensor}about {lost / size:.0%} of the weights are too small for the scales of {fmt}, and read "
            f"as 0 or with larger errors than usual: {advice}",
            stacklevel=4,  # of who called `quantize`, which `shown` wraps
        )


@shown
def from_blocks(raw: Any, format: str | Format, shape: tuple[int, ...]) -> QuantizedArray:
    """A quantized array from storage bytes, shared where `raw` is contiguous.

    Parameters
    ----------
    raw : uint8 array (NumPy or CuPy) of any shape, or bytes
        The blocks in row-major order, as the file format stores them. Every byte pattern is accepted: a
        scale of NaN or infinity gives NaN or infinity in its own row (a suh of EXL3 in all).
    format : str or Format
    shape : tuple of int
        Shape (..., N, K) of the numbers; K as in `quantize`.

    Raises
    ------
    TypeError, ValueError
        Not uint8; the byte count differs from what format and shape need (both are stated); the format has no
        grid or scale yet (`Trellis(3)`, `NvFp4()`).
    """
    shape = check.shape(shape)
    fmt = check.whole_blocks(shape, formats.get(format))
    return QuantizedArray._made(fmt, check.raw_blocks(raw, fmt, shape), shape=shape)


@shown
def dequantize(w: QuantizedArray, dtype: Any) -> Any:
    """See QuantizedArray.dequantize."""
    wanted = check.float_dtype(dtype)
    if not check.is_on_gpu(W=check.storage(w)):
        return cpu.dequantize(w, wanted)
    from ..cuda import backend as cuda

    w._may_make_blocks()
    return cuda.dequantize(w.blocks, w.format, wanted, w.shape)[..., : w.shape[-1]]


def validate(w: QuantizedArray) -> None:
    """See QuantizedArray.validate."""
    w = to_device(w, "cpu")
    flaws = w.format.flaws(w.blocks, w.shape, strict=True)
    check.require_sound(w, flaws, cpu.rows_not_finite(w))


def to_device(w: QuantizedArray, name: str) -> QuantizedArray:
    """See QuantizedArray.to_device."""
    if check.device_name(name) == w.device and device.is_current(w.storage):
        return w
    if w.device == "cpu":
        blocks = device.cupy().asarray(w.blocks)
    else:
        with device.cupy().cuda.Device(w.storage.data.device_id):  # kernels may have to make them
            own = w.blocks
        device.wait_for(own)
        blocks = own.copy() if name == "cuda" else device.as_numpy(own)
        if name == "cuda":
            device.wait_for(blocks)  # before the memory of `own` is used again
    return QuantizedArray._made(w.format, blocks, shape=w.shape)
