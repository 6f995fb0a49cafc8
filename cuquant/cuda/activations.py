"""Activations on the GPU: q8_1 blocks and the float16 rows that products read (kernels/ops/activations.cu).

What is done to them is planned first: all that kernels take, but for addresses, follows from shapes, strides
and types.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from .. import check, device, plan
from ..formats import Format, get
from ..plan.blocks import ACTIVATION_KERNELS
from . import buffers, jit, problem

_BYTE = np.dtype(np.uint8)


class Rows(NamedTuple):
    """Activations as the float16 rows that products read: one buffer, and where the rows' factors start."""

    buffer: Any
    factors: int


class Quantization(NamedTuple):
    """How floats become q8_1 blocks, and the rows that a product will want."""

    call: jit.Call
    shape: tuple[int, ...]
    """Shape of the blocks."""
    factors: int
    """Byte offset of the rows' factors in their buffer."""
    size: int
    """Bytes of the rows' buffer."""


def to_blocks(rows: Any, shape: tuple[int, ...], fmt: Format) -> Quantization | None:
    """How floats of a shape (..., K), given as rows, become blocks; None where the kernel does not take
    them."""
    *lead, k = shape
    count, half = prod(lead), rows.dtype == check.FLOAT16
    if count == 0 or not can_quantize(rows):
        return None
    entry = "quantize_half" if half else "quantize_rows"
    step = plan.activations(entry, fmt, count, k)
    call = jit.call(step, ACTIVATION_KERNELS[entry], (*numbers_of(rows), k))
    return Quantization(call, (*lead, fmt.row_bytes(k)), *buffers.rows_bytes(shape))


def can_quantize(x: Any) -> bool:
    """Whether kernels make the rows of floats (..., K) as they quantize them: of float16 any, of others those
    that a block of threads can hold."""
    return x.shape[-1] <= plan.LONGEST_ROW or x.dtype == check.FLOAT16


def quantize(how: Quantization, rows: Any) -> tuple[Any, Rows]:
    """Blocks of floats, and their rows."""
    empty = device.cupy().empty
    blocks, buffer = empty(how.shape, _BYTE), empty(how.size, _BYTE)
    start = buffer.data.ptr
    how.call(rows.data.ptr, blocks.data.ptr, start, start + how.factors)
    return blocks, Rows(buffer, how.factors)


class Operand(NamedTuple):
    """Activations of a product.

    `rows` are the float16 rows that were made with q8_1 blocks, else None; `signs` those that rows take as
    they are converted, for `each` rows (0: all) another row of bits.
    """

    x: Any
    source: problem.Source
    rows: Rows | None = None
    signs: Any = None
    each: int = 0


def operand(x: Any, quantizes: bool = False) -> Operand:
    """Activations that a product reads as they are, or converted; floats may be quantized to q8_1 first."""
    if check.is_quantized(x):
        return Operand(x, problem.quantized_source(x.shape, x.rows is not None), x.rows)
    half = x.dtype == check.FLOAT16
    source = problem.source(x.shape, x.strides, half, x.data.ptr % 16 == 0)
    if quantizes and source.entry is None:
        return Operand(x, source._replace(to_convert=True))
    return Operand(x, problem.quantized_first(x.shape, half) if quantizes else source)


def quantized_first(x: Operand) -> Operand:
    """Activations that the product was to quantize, and does not."""
    return x._replace(source=problem.quantized_first(x.source.shape, x.x.dtype == check.FLOAT16))


class Step(NamedTuple):
    """A kernel that makes float16 rows, from an address to another; `factors` tells whether it writes the
    powers of two that the rows lack, too."""

    call: jit.Call
    factors: bool = True


def conversion(x: Operand) -> tuple[Any, tuple[Step, ...]]:
    """What kernels read, x's own memory or a copy, and what makes rows of it, each step of the last one's."""
    entry, (*lead, k) = x.source.entry, x.source.shape
    count = prod(lead)
    held = x.x.blocks if check.is_quantized(x.x) else x.x if entry is None else buffers.as_rows(x.x)
    if entry is None:
        return held, ()
    if entry == "blocks_to_half":
        return held, (of_blocks(count, k),)
    if entry == "quantize_rows":  # the blocks themselves are not wanted
        return held, (Step(_call(entry, count, k, (*numbers_of(held), k, 0))),)
    factors, signs = x.source.factors, (buffers.pointer(x.signs), x.each or count)
    if entry == "round_halves":
        return held, (Step(_call(entry, count, k, (*numbers_of(held), k)), factors),)
    if check.is_quantized(x.x):  # signs of the float16 rows, which have their factors
        made = () if x.rows is not None else (of_blocks(count, k),)
        return held, (*made, Step(_call("prepare_halves", count, k, (0, k, 1, k), signs), False))
    return held, (Step(_call(entry, count, k, (*numbers_of(held), k), signs), factors),)


def of_blocks(count: int, k: int) -> Step:
    """The step that makes float16 rows of so many rows of q8_1 blocks."""
    return Step(_call("blocks_to_half", count, k, (k,)))


def addresses(held: Any, rows: Rows | None) -> tuple[int, int]:
    """Addresses of what kernels read of x, and of the factors of its rows, 0 where there are none."""
    if rows is None:
        return held.data.ptr, 0
    start = rows.buffer.data.ptr
    return start, start + rows.factors


def _call(entry: str, count: int, k: int, numbers: tuple[int, ...], last: tuple[int, ...] = ()) -> jit.Call:
    step = plan.activations(entry, get("q8_1"), count, k)
    return jit.call(step, ACTIVATION_KERNELS[entry], numbers, last)


def numbers_of(rows: Any) -> tuple[int, ...]:
    """Number of the dtype and strides in elements of rows of floats."""
    return (problem.DTYPES[rows.dtype], *buffers.element_strides(rows))
