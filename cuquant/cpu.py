"""The NumPy backend: what runs where there is no GPU, and the oracle of the GPU's tests.

Quantized rows become float32 a slab at a time, so a weight is never dense as a whole; products are BLAS's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from math import prod
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import check
from .formats import Format
from .formats.base import sides

if TYPE_CHECKING:
    from .array import QuantizedArray
    from .ops.matmul import Product

SLAB = 1 << 20
"""Weights converted at a time: 4 MB of float32, which stays in a core's share of the cache."""


# glibc gives memory of this size back to the system whenever it is freed, and every slab would fault its
# pages in anew (q4_0, 4096 x 4096, one row: 151 ms in place of 59), until something larger has been freed
# once, of up to 32 MB: then it keeps twice as much.
np.empty(31 << 20, np.uint8)


def slabs(rows: int, k: int, size: int = SLAB, together: int = 1) -> Iterator[slice]:
    """Slices of `rows` rows of k elements, `size` elements each, or of as many rows as are made together."""
    step = max(1, size // max(k, 1) // together) * together
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


empty = np.empty


def silent() -> np.errstate:
    """Silence arithmetic and casts whose results are documented: what is too large becomes infinity, what is
    too small 0, and NaN propagates, whatever `numpy.seterr` has been told."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore")


def quantize(
    x: NDArray[Any], fmt: Format, importance: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.uint8], int]:
    """Storage bytes of floats (..., N, K), and how many have a scale that is too coarse; weights are checked,
    activations are not.

    `importance` [K] is that of every row, for formats that take it.
    """
    if fmt.whole_matrices:
        return quantize_matrices(x, fmt, fmt.encode), 0
    # A vector may be long: block by block, but by importance, for which a row may count as a whole.
    k = x.shape[-1] if x.ndim > 1 or importance is not None else fmt.block_size
    rows = x.reshape(-1, k)
    blocks, lost = np.empty((len(rows), fmt.row_bytes(k)), np.uint8), 0
    for part in slabs(len(rows), k):
        values = np.ascontiguousarray(rows[part], np.float32)
        if not fmt.for_activations:
            check.require_quantizable(values, fmt, part.start, x.shape)
        records = records_of(values, fmt, importance)
        if not fmt.for_activations:
            check.require_scales(records, fmt, part.start, x.shape)
        blocks[part] = records.view(np.uint8)
        lost += _lost(values, blocks[part], fmt)
    return blocks.reshape(*x.shape[:-1], fmt.row_bytes(x.shape[-1])), lost


def records_of(
    rows: NDArray[np.float32], fmt: Format, importance: NDArray[np.float32] | None = None
) -> NDArray[Any]:
    """Records [n, K / block_size] of rows [n, K], by the importance [K] of columns if it is given."""
    with np.errstate(all="ignore"):
        given = [rows]
        if importance is not None:
            given.append(fmt.weights_of_errors(rows, np.broadcast_to(importance, rows.shape)))
        records = fmt.encode(*(each.reshape(-1, fmt.block_size) for each in given))
    return records.reshape(len(rows), -1)


def _lost(values: NDArray[np.float32], blocks: NDArray[np.uint8], fmt: Format) -> int:
    """Weights whose scale is too coarse, though they are not all 0, or, beside a minimum, the same."""
    coarse = None if fmt.for_activations else fmt.coarse_scales(blocks)
    if coarse is None or not coarse.any():
        return 0
    groups = values.reshape(*coarse.shape, -1, min(fmt.scale_size, values.size // coarse.size))
    first = groups[..., :1] if len(fmt.scales) > 1 else np.float32(0)
    needed = (groups != first).any(axis=(-2, -1))
    return int((coarse & needed).sum()) * (values.size // coarse.size)


def quantize_matrices(
    x: NDArray[Any], fmt: Format, encode: Callable[[NDArray[np.float32]], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Storage bytes of weights (..., N, K) in a format that takes a matrix [N, K] at a time."""
    matrices = x.reshape(prod(x.shape[:-2]), *sides(x.shape))
    out = np.empty((len(matrices), fmt.stored(matrices.shape)[-1]), np.uint8)
    for i, matrix in enumerate(matrices):
        values = np.ascontiguousarray(matrix, np.float32)
        check.require_quantizable(values, fmt, i * len(values), x.shape)
        out[i] = encode(values)
    return out.reshape(fmt.stored(x.shape))


def dequantize(w: QuantizedArray, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers (..., N, K) of a quantized array."""
    blocks, fmt = w.blocks, w.format
    if fmt.whole_matrices:
        out = np.empty(w.shape if w.ndim > 1 else (1, *w.shape), dtype)
        for index in np.ndindex(w.shape[:-2]):
            for part in slabs(out.shape[-2], out.shape[-1], together=fmt.rows_together):
                with silent():
                    out[index][part] = _rows(fmt, blocks[index], out.shape[-2:], part)
        return out.reshape(w.shape)
    row_bytes = blocks.shape[-1] if blocks.ndim > 1 else fmt.block_bytes  # as in quantize
    rows = blocks.reshape(-1, row_bytes)
    k = row_bytes // fmt.block_bytes * fmt.block_size
    out = np.empty((len(rows), k), dtype)
    for part in slabs(len(rows), k):
        with silent():
            out[part] = _rows(fmt, rows, out.shape, part)
    return out.reshape(*blocks.shape[:-1], blocks.shape[-1] // row_bytes * k)[..., : w.shape[-1]]


def rows_not_finite(w: QuantizedArray) -> NDArray[np.int64]:
    """Flat numbers of the rows of a quantized array that hold NaN or infinity."""
    n, k = sides(w.shape)
    blocks = w.blocks if w.format.whole_matrices or w.ndim > 1 else w.blocks[None]
    found = [np.empty(0, np.int64)]
    for i, index in enumerate(np.ndindex(w.shape[:-2])):
        for part in slabs(n, k, together=w.format.rows_together):
            finite = np.isfinite(_rows(w.format, blocks[index], (n, k), part)).all(axis=1)
            found.append(i * n + part.start + np.flatnonzero(~finite))
    return np.concatenate(found)


def product(p: Product, out: NDArray[Any]) -> None:
    """Write act(x @ W.T + bias) + residual to `out` (..., M, N), one matrix of W after the other."""
    x = _as_float32(p.x)
    x = np.broadcast_to(x, (*out.shape[:-2], *x.shape[-2:]))
    n, k = p.w.shape[-2:]
    stack = p.w.shape[:-2]
    for index in np.ndindex(stack):
        # Leading axes along which W does not vary join the rows of this matrix's product.
        lead = (slice(None) if size == 1 else i for i, size in zip(index, stack, strict=True))
        here = (..., *lead, slice(None), slice(None))
        y = out[here]
        rows = np.ascontiguousarray(x[here]).reshape(prod(y.shape[:-1]), k)
        bias = p.bias if p.bias is None or p.bias.ndim == 1 else p.bias[index]
        residual = None if p.residual is None else p.residual[here]
        for part in slabs(n, k, together=p.w.format.rows_together if check.is_quantized(p.w) else 1):
            with silent():
                acc = (rows @ weight_rows(p.w, index, part).T).reshape(*y.shape[:-1], part.stop - part.start)
                if bias is not None:
                    acc += bias[part].astype(np.float32)
                if p.activation is not None:
                    acc = activated(acc, p.activation)
                if residual is not None:
                    acc += residual[..., part].astype(np.float32)
                y[..., part] = acc


def weight_rows(w: Any, index: tuple[int, ...], part: slice) -> NDArray[np.float32]:
    """Rows `part` of the matrix `index` of a stack, quantized or float, in float32 [n, K]."""
    if isinstance(w, np.ndarray):
        return w[index][part].astype(np.float32, copy=False)
    return _rows(w.format, w.blocks[index], w.shape[-2:], part)


def _rows(fmt: Format, blocks: NDArray[np.uint8], shape: tuple[int, ...], part: slice) -> NDArray[np.float32]:
    """Rows `part` of a matrix (N, K) from its storage bytes: float32 [n, K]."""
    with silent():  # scales may be infinity or NaN, or near them
        return fmt.rows(blocks, shape, part)


def _as_float32(x: Any) -> NDArray[np.float32]:
    """Activations, floats or q8_1, in float32."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float32, copy=False)
    return dequantize(x, np.dtype(np.float32))


def activated(x: Any, name: str, xp: ModuleType = np) -> Any:
    """act(x) of float32 sums, which may be changed; of a GPU's by `xp`, CuPy."""
    half = np.float32(0.5)
    if name == "relu":
        return xp.maximum(x, np.float32(0))
    if name == "gelu":
        inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
        return half * x * (1 + xp.tanh(inner))
    special = import_module("scipy.special" if xp is np else "cupyx.scipy.special")
    if name == "gelu_erf":
        return half * x * (1 + special.erf(x * np.float32(np.sqrt(0.5))))
    return _silu(x) if xp is np else x * special.expit(x)


def _silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """silu(x), x * sigmoid(x), in a third of the time that expit takes."""
    result = np.exp(-x)  # of numbers below -88 infinity: what divides them to 0
    result += 1
    return np.divide(x, result, out=result)
