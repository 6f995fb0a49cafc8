"""EXL3 weights on the GPU: to numbers, the layout that products read, and what surrounds these products.

W.T = diag(suh) H V H diag(svh): a kernel makes float16 rows x diag(suh) H, and the matrix kernels multiply
them by V. The wgmma core turns these sums and does what follows; of others another kernel does.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from .. import check, device, plan
from ..formats.exl3 import HADAMARD, Exl3, Exl3Parts
from ..repeats import FEW, CallTable
from . import buffers, jit, problem
from .activations import Step, numbers_of
from .fragments import Fragments


def _sizes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Matrices, N and K."""
    return prod(shape[:-2]), shape[-2], shape[-1]


def dequantize(blocks: Any, fmt: Exl3, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Numbers (..., N, K) of storage bytes."""
    out = device.cupy().empty(shape, dtype)
    if out.size:
        matrices, n, k = sizes = _sizes(shape)
        blocks = buffers.records(blocks)
        count = matrices * (n // HADAMARD) * (k // HADAMARD)
        numbers = (np.int64(blocks.shape[-1]), np.int64(count), np.int32(n), np.int32(k))
        step = plan.exl3.dequantize(fmt, *sizes)
        jit.launch(step, blocks, *numbers, out, np.int32(problem.DTYPES[dtype]))
    return out


# The layout of the matrix kernels


def to_fragments(blocks: Any, fmt: Exl3, shape: tuple[int, ...]) -> Fragments:
    """Storage bytes of an array (..., N, K) to the fragment layout."""
    cupy = device.cupy()
    stream = cupy.cuda.get_current_stream()
    check.require_preparable(stream)
    matrices, n, k = _sizes(shape)
    blocks = buffers.records(blocks)
    planes, size = plan.layout(fmt).offsets(*plan.tiles(matrices, n, k))
    stored = fmt.parts(blocks, shape)
    vectors = Exl3Parts(None, stored.suh.copy(), stored.svh.copy())
    # Rows of x are below 2^14 then, and numbers of V below 4: sums of K products over 2^lift are float16.
    made = Fragments(fmt, shape, cupy.empty(size, np.uint8), planes, lift=k.bit_length(), vectors=vectors)
    _repack("to_fragments", made, blocks)
    stream.synchronize()  # other streams may use it
    return made


def matrix(stack: Fragments, number: int) -> Fragments:
    """One of a stack's matrices, where it lies."""
    found = stack.matrices.get(number)
    if found is None:
        fmt, (matrices, n, k) = stack.fmt, _sizes(stack.shape)
        before, tile = number * prod(plan.tiles(1, n, k)), plan.layout(fmt)
        low, high = stack.planes.low + before * tile.low, stack.planes.high + before * tile.high
        planes = stack.planes._replace(low=low, high=high)
        _, *both = stack.exl3_vectors
        vectors = Exl3Parts(None, *(part.reshape(matrices, -1)[number] for part in both))
        made = Fragments(
            fmt, (n, k), stack.buffer, planes, lift=stack.lift, vectors=vectors, repeats=CallTable(FEW)
        )
        found = stack.matrices.setdefault(number, made)
    return found


def from_fragments(fragments: Fragments) -> Any:
    """The storage bytes, exactly as they were."""
    fmt, shape = fragments.fmt, fragments.shape
    assert isinstance(fmt, Exl3)
    blocks = device.cupy().empty(fmt.stored(shape), np.uint8)
    stored = fmt.parts(blocks, shape)
    _, stored.suh[...], stored.svh[...] = fragments.exl3_vectors
    _repack("from_fragments", fragments, blocks)
    return blocks


def _repack(entry: str, fragments: Fragments, blocks: Any) -> None:
    sizes = _sizes(fragments.shape)
    if prod(sizes) == 0:
        return
    matrices, n, k = sizes
    row_tiles, tiles = plan.tiles(matrices, n, k)
    apart, rows = np.int64(blocks.shape[-1]), np.int64(row_tiles)
    counts = (np.int32(row_tiles // matrices), np.int32(tiles))
    planes = (np.uint64(fragments.addresses.low), np.uint64(fragments.addresses.high))
    jit.launch(plan.exl3.repack(fragments.fmt, entry, *sizes), blocks, apart, rows, *counts, *planes)


# What surrounds a product


def turned_rows(rows: Any, fragments: Fragments) -> Step:
    """The step that makes float16 rows of floats [R, K], and their factors."""
    suh = fragments.exl3_vectors.suh.data.ptr
    step = plan.exl3.turn_rows(*rows.shape)
    return Step(jit.call(step, plan.exl3.ARGUMENTS["turn_rows"], (*numbers_of(rows), rows.shape[1]), (suh,)))


def turned_results(
    out: Any, residual: Any, bias_dtype: int, activation: str | None, fragments: Fragments, wide: bool
) -> jit.Call:
    """What makes results, rows `out` [R, N], of the product's sums, float16 or (`wide`) float32: from their
    address to those of results, bias, residual and, or 0, factors of rows."""
    like = out if residual is None else residual  # of no residual strides and type do not matter
    strides = (*buffers.element_strides(out), *buffers.element_strides(like))
    dtypes = (problem.DTYPES[out.dtype], bias_dtype, problem.DTYPES[like.dtype])
    rest = (problem.ACTIVATIONS[activation], 2.0**fragments.lift)
    numbers = (int(wide), out.shape[1], *strides, *dtypes, *rest)
    step = plan.exl3.turn_results(*out.shape)
    return jit.call(
        step, plan.exl3.ARGUMENTS["turn_results"], numbers, (fragments.exl3_vectors.svh.data.ptr,)
    )
