"""The matrix product as kernels/core/problem.cuh takes it: shapes and strides become a plan and numbers.

Everything but the addresses follows from shapes, strides and types, and is worked out once for each
combination of them. Nothing here needs a GPU.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from . import check, plan
from .formats import Format

DTYPES = {dtype: number for number, dtype in enumerate(check.FLOATS)}
"""Numbers of the float types, as kernels/core/types.cuh has them."""
_ACTIVATIONS = {None: 0} | {name: 1 + number for number, name in enumerate(check.ACTIVATIONS)}
_BATCH_AXES = 3
_ADDRESSES = struct.Struct("<9q")
_NUMBERS = struct.Struct("<24q9i4x")
_PROBLEM = np.dtype(f"V{_ADDRESSES.size + _NUMBERS.size}")
"""`struct Problem`: nine addresses, then what `resolve` packs."""

Shape = tuple[int, ...]


class Source(NamedTuple):
    """Activations (..., M, K) as the kernel reads them.

    `entry` is the kernel that converts them first, or None; `strides` are those of the rows (all axes but the
    last) in elements. A conversion writes contiguous rows of `columns` elements.
    """

    shape: Shape
    strides: Shape
    entry: str | None
    columns: int


class Output(NamedTuple):
    """Where results go: shape, strides in elements, number of the dtype."""

    shape: Shape
    strides: Shape
    dtype: int


class Epilogue(NamedTuple):
    """What follows the sums; dtypes as numbers, strides in elements (None without a residual)."""

    bias_dtype: int
    bias_stacked: bool
    activation: str | None
    residual_dtype: int
    residual_strides: Shape | None


class Launch(NamedTuple):
    """A planned product: matrices of m rows of x, which a conversion pads to a multiple of `batch_tile`."""

    plan: plan.Plan
    m: int
    batch_tile: int
    numbers: bytes

    def packed(self, *addresses: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """The kernel's argument, from the addresses of W's planes, x, its scales, out, bias and residual."""
        return np.frombuffer(_ADDRESSES.pack(*addresses) + self.numbers, _PROBLEM)


@lru_cache(maxsize=4096)
def source(shape: Shape, strides: Shape, aligned_half: bool) -> Source:
    """Float activations with byte strides: read as they are if they are float16 in whole 16-byte pieces."""
    if aligned_half and strides[-1] == 2 and not any(stride % 16 for stride in strides[:-1]):
        return Source(shape, tuple(stride // 2 for stride in strides[:-1]), None, shape[-1])
    return Source(shape, _contiguous(shape[:-1], shape[-1]), "rows_to_half", shape[-1])


@lru_cache(maxsize=4096)
def quantized_source(shape: Shape, capability: int) -> Source:
    """q8_1 activations: 8-bit codes where the GPU multiplies them, padded to whole tiles, else float16."""
    if not plan.integer_products(capability):
        return Source(shape, _contiguous(shape[:-1], shape[-1]), "blocks_to_half", shape[-1])
    columns = ceil(shape[-1] / plan.TILE_COLUMNS) * plan.TILE_COLUMNS
    return Source(shape, _contiguous(shape[:-1], columns), "blocks_to_int8", columns)


@lru_cache(maxsize=4096)
def resolve(fmt: Format, w: Shape, x: Source, out: Output, end: Epilogue, capability: int) -> Launch:
    """Plan the product of x with a weight of shape w (..., N, K), and pack its numbers."""
    n, k = w[-2:]
    residual = out.strides if end.residual_strides is None else end.residual_strides
    m, rows, axes = _merge(w, x, out, residual)
    extents = [extent for extent, _ in axes]
    steps = list(zip(*(steps for _, steps in axes), strict=True))
    gemm = plan.gemm(fmt, m, n, prod(extents), x.entry == "blocks_to_int8", capability)
    padded = ceil(m / gemm.batch_tile) * gemm.batch_tile
    # Scales and row factors of a conversion go with its rows.
    x_rows = [0] * _BATCH_AXES if x.entry is None else [stride // x.columns for stride in steps[1]]
    numbers = _NUMBERS.pack(
        *(rows[1], x.columns // 32 * padded // 2, rows[2], out.strides[-1], rows[3], residual[-1]),
        *(*extents, *steps[0], *steps[1], *steps[2], *steps[3], *x_rows),
        *(m, n, k, padded // 2, out.dtype, end.bias_dtype, end.residual_dtype),
        *(_ACTIVATIONS[end.activation], int(end.bias_stacked)),
    )
    return Launch(gemm.plan, m, gemm.batch_tile, numbers)


def _merge(w: Shape, x: Source, out: Output, residual: Shape) -> tuple[int, Shape, list[tuple[int, Shape]]]:
    """Merge leading axes as far as strides allow, into the batch rows where W does not vary.

    Returns the batch rows m, their strides, and three leading axes (extent, strides), slowest first, padded
    with ones. Strides are of W (in matrices), x, out and the residual (in elements).
    """
    lead = len(out.shape) - 2
    w_axes = _broadcast(w[:-2], _contiguous(w[:-2], 1), lead)
    x_axes = _broadcast(x.shape[:-2], x.strides[:-1], lead)
    merged: list[tuple[int, Shape]] = [(out.shape[-2], (0, x.strides[-1], out.strides[-2], residual[-2]))]
    for axis in reversed(range(lead)):
        extent, steps = out.shape[axis], (w_axes[axis], x_axes[axis], out.strides[axis], residual[axis])
        inner, inner_steps = merged[0]
        if extent == 1:
            continue
        if all(step == inner * inner_step for step, inner_step in zip(steps, inner_steps, strict=True)):
            merged[0] = (extent * inner, inner_steps)
        else:
            merged.insert(0, (extent, steps))
    *outer, (m, rows) = merged
    check.batch_axes(len(outer), _BATCH_AXES, out.shape)
    return m, rows, [(1, (0, 0, 0, 0))] * (_BATCH_AXES - len(outer)) + outer


def _contiguous(rows: Shape, columns: int) -> Shape:
    """Element strides of rows of `columns` elements back to back."""
    return tuple(prod(rows[axis + 1 :]) * columns for axis in range(len(rows)))


def _broadcast(shape: Shape, strides: Shape, axes: int) -> Shape:
    """Strides over `axes` leading axes: 0 where the operand lacks the axis or has extent 1."""
    own = tuple(0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=True))
    return (0,) * (axes - len(own)) + own
