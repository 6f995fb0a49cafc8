"""The CUDA backend: the same operations as cuquant.cpu, on CuPy arrays, by the kernels of kernels/.

Everything runs on the current device and stream and nothing synchronises, but for quantizing a weight, which
reads back whether its values were good, and for its first product, which brings it to the kernels' layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, cpu, device, plan, repeats
from ..array import QuantizedArray
from ..formats import Format
from ..formats.kernels import kernels_of
from . import activations, buffers, exl3 as cuda_exl3, jit, problem, streams
from .activations import Operand, Quantization, Rows, Step, addresses
from .fragments import Fragments, of_matrices, tables

if TYPE_CHECKING:
    from ..ops.matmul import Product
    from ..repeats import Repeat
    from .trellis import Signs

DENSE_SLAB = 1 << 24
"""Numbers of a plain float weight that are in float32 at a time: 64 MB."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An uninitialised array on the current device."""
    return device.cupy().empty(shape, dtype)


def quantize(x: Any, fmt: Format, importance: NDArray[np.float32] | None = None) -> tuple[Any, int]:
    """Blocks (..., N, row bytes) of floats (..., N, K), and how many have a scale that is too coarse; weights
    are checked (one synchronisation).

    `importance` [K] is that of every row, for formats that take it.
    """
    cupy = device.cupy()
    if not fmt.encodes_on_gpu:
        blocks, lost = cpu.quantize(cupy.asnumpy(x), fmt, importance)
        return cupy.asarray(blocks), lost
    if fmt.whole_matrices:
        return of_matrices(fmt).quantize(x, fmt), 0
    rows = buffers.as_rows(x)
    out = cupy.empty((*x.shape[:-1], fmt.row_bytes(x.shape[-1])), np.uint8)
    if out.size == 0:
        return out, 0
    found = None if fmt.for_activations else cupy.full(2, _NONE_FOUND, np.uint64)
    encode(rows, fmt, out, found, None if importance is None else cupy.asarray(importance))
    if found is None:
        return out, 0
    first_bad, count = map(int, buffers.read(found))
    _raise_for(first_bad, rows, fmt, x.shape, importance)
    return out, (count - _NONE_FOUND) % 2**64 * _COUNTED


_NONE_FOUND = 2**64 - 1
"""What `encode` starts from: no row that is bad, and a count that starts at -1."""
_COUNTED = 16
"""Weights that kernels count as one."""


def encode(rows: Any, fmt: Format, out: Any, found: Any, importance: Any = None) -> None:
    """Write the blocks of rows of floats. Of `found`, if given, the first becomes the number of the first row
    without a block, if less; to the second is added what is lost (`Found` in kernels/formats/encode.cuh)."""
    blocks_per_row = rows.shape[1] // fmt.block_size
    stay = rows.dtype == np.float16 and rows.flags.c_contiguous and rows.data.ptr % 16 == 0
    step = plan.quantize(fmt, len(rows) * blocks_per_row, jit.gpu(), stay, importance is not None)
    sizes = (np.int64(len(rows)), np.int64(blocks_per_row))
    jit.launch(step, *buffers.float_rows(rows), *sizes, out, found, *_encoder(fmt, rows, importance))


def _encoder(fmt: Format, rows: Any, importance: Any) -> tuple[Any, ...]:
    """What the kernel that quantizes has to know of the format, and of columns and rows."""
    encoder = kernels_of(fmt).encoder_for(importance is not None)
    assert encoder is not None
    if encoder.op == plan.GROUPS_ENCODER:
        return np.int32(fmt.block_size), np.int32(plan.group_lanes(fmt))
    if encoder.op == plan.SEARCHING_ENCODER:
        return importance, _mean_squares(rows) if encoder.of_rows else None
    thresholds = tables(fmt.for_kernels).thresholds
    return np.uint64(thresholds), np.int32(encoder.divides_by_stored), np.float32(fmt.tensor_scale)


def _mean_squares(rows: Any) -> Any:
    """Mean squares of rows of floats, float32."""
    count, k = rows.shape
    out = device.cupy().empty(count, np.float32)
    jit.launch(plan.mean_squares(count), *buffers.float_rows(rows), np.int64(count), np.int64(k), out)
    return out


def quantize_activations(x: Any, fmt: Format) -> tuple[Any, Rows | None, Quantization | None]:
    """Blocks of floats (..., K), the rows that a product will want, and how others like x are quantized.

    None instead of rows beyond the kernel's, and of how, where a copy of x was read.
    """
    rows = buffers.as_rows(x)
    how = activations.to_blocks(rows, x.shape, fmt)
    if how is None:
        return quantize(x, fmt)[0], None, None
    return *activations.quantize(how, rows), how if rows.data.ptr == x.data.ptr else None


def _raise_for(
    first_bad: int, rows: Any, fmt: Format, shape: tuple[int, ...], importance: NDArray[np.float32] | None
) -> None:
    """The error of the first row that cannot be quantized, in the words of the NumPy backend."""
    if first_bad < len(rows):
        row = device.cupy().asnumpy(rows[first_bad]).astype(np.float32)[None]
        check.require_quantizable(row, fmt, first_bad, shape)
        check.require_scales(cpu.records_of(row, fmt, importance), fmt, first_bad, shape)


def dequantize(blocks: Any, fmt: Format, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> Any:
    """Numbers (..., N, K) of blocks (..., N, row bytes), or of the storage bytes of matrices of a shape."""
    if fmt.whole_matrices:
        return of_matrices(fmt).dequantize(blocks, fmt, shape, dtype)
    blocks = kernels_of(fmt).to_kept(blocks, device.cupy())
    fmt, scale = fmt.for_kernels, fmt.tensor_scale
    k = blocks.shape[-1] // fmt.block_bytes * fmt.block_size
    out = device.cupy().empty((*blocks.shape[:-1], k), dtype)
    count = out.size // 32
    if count:
        jit.launch(
            plan.per_block("dequantize", fmt, count),
            blocks,
            np.int64(count),
            out,
            np.int32(problem.DTYPES[dtype]),
            np.uint64(tables(fmt).codebook),
            np.float32(scale),
        )
    return out


def quantize_again(how: Quantization, x: Any) -> tuple[Any, Rows]:
    """Activations like others before."""
    return activations.quantize(how, x)


class Ready(NamedTuple):
    """A product that is planned: all that is left to know is where its operands lie."""

    launch: problem.Launch
    argument: bytes
    """The kernel's argument for this weight; with the signs that the product itself gives to x or W, or
    factors with which it turns x."""
    steps: tuple[Step, ...] = ()
    """Kernels that make rows of x, if it has to be converted."""
    rows: int = 0
    """Bytes of the rows of x, of which the first `factors` are without their factors."""
    factors: int = 0
    results: jit.Call | None = None
    """Kernel that makes results of the product's sums, if these are not results."""
    sums: int = 0
    """Bytes of the product's sums."""


def product(p: Product, out: Any) -> Ready | None:
    """Write act(x @ W.T + bias) + residual to `out` (..., M, N): one launch, two if x is converted; of
    EXL3 up to three, for each matrix of a stack.

    Returns how others like it are computed, if it was computed by the product's kernels from x's own memory.
    """
    if out.size == 0:
        return None
    if not check.is_quantized(p.w):
        _dense(p, out)
        return None
    if p.bias is not None and not p.bias.flags.c_contiguous:  # kernels know no strides of it
        check.require_memory("bias is not contiguous, and is copied", "pass one that is")
        product(p._replace(bias=device.cupy().ascontiguousarray(p.bias)), out)
        return None
    kernels = kernels_of(p.w.format)
    if not kernels.in_float16 or (kernels.turned and p.w.size == 0):
        check.require_memory(f"products with {p.w.format} weights make floats of them", _DENSE)
        _dense(p._replace(w=p.w.dequantize()), out)
        return None
    if kernels.turned:
        if p.w.ndim == 2:
            return _turned(p, p.w.fragments(), out)
        _turned_stack(p, out)
        return None
    fragments, x = p.w.fragments(), activations.operand(p.x, p.quantizes)
    to = (_output(out), _epilogue(p), jit.gpu())
    launch = problem.resolve(fragments.weight, x.source, *to)
    if x.source.to_convert and not launch.converts_x:
        x = activations.quantized_first(x)
        launch = problem.resolve(fragments.weight, x.source, *to)
    signs = 0
    if fragments.signs is not None:
        signs = fragments.signs.address(launch.signs_go_to)
        if not launch.signs_go_to:
            x = _signed(p.x, fragments.signs, out.shape[:-2])
            launch = problem.resolve(fragments.weight, x.source, *to)
    held, steps = activations.conversion(x)
    factors, size = buffers.rows_bytes(x.source.shape) if steps else (0, 0)
    ready = Ready(launch, _argument(launch, fragments, signs), steps, size, factors)
    ends = (out.data.ptr, buffers.pointer(p.bias), buffers.pointer(p.residual))
    _run(ready, *addresses(held, x.rows), *ends)
    return ready if held.data.ptr == check.storage(p.x).data.ptr else None


_SUMS_BYTES, _TURNED_BYTES = 1 << 27, 1 << 30
"""Bytes of rows of sums that are in memory at a time; of rows of x, where there are no sums."""


def _turned_stack(p: Product, out: Any) -> None:
    """The products with a stack of EXL3 matrices, one after the other."""
    cupy, stack = device.cupy(), p.w.fragments()
    *axes, m, _ = out.shape
    *lead, _, k = p.w.shape
    own = len(axes) - len(lead)  # axes that W lacks
    x = cupy.broadcast_to(_as_floats(p.x), (*axes, m, k))
    for number, index in enumerate(np.ndindex(*lead)):
        one = (i if extent > 1 else slice(None) for i, extent in zip(index, lead, strict=True))
        where = (*[slice(None)] * own, *one)
        bias = p.bias[index] if p.bias is not None and p.bias.ndim > 1 else p.bias
        residual = None if p.residual is None else p.residual[where]
        part, to, matrix = x[where], out[where], cuda_exl3.matrix(stack, number)
        merge = all(buffers.has_rows(a) for a in (part, residual, to) if a is not None)
        for at in [()] if merge else np.ndindex(*axes[:own]):
            added = None if residual is None else residual[at]
            _of_stack(p._replace(x=part[at], bias=bias, residual=added), matrix, to[at])


def _of_stack(p: Product, matrix: Fragments, out: Any) -> None:
    """The product with one matrix of a stack, as it was done before if there was one like it."""
    alike = p.x, (p.bias,), p.residual, out
    found = repeats.find(matrix.repeats, (p.activation,), *alike)
    if found is not None:
        known, (start, bias, residual, to) = found
        _run(known.work, start, 0, to, bias, residual)
        return
    work = _turned(p, matrix, out)
    if work is not None:
        repeats.remember(matrix.repeats, (p.activation,), work, *alike, result=out, weights=(matrix.buffer,))


def _turned(p: Product, fragments: Fragments, out: Any) -> Ready | None:
    """The product with an EXL3 matrix: x is turned before it, and its sums after it, by it or by others."""
    n = out.shape[-1]
    floats = [a for a in (p.x, p.residual, out) if a is not None and not check.is_quantized(a)]
    copied = check.is_quantized(p.x) or not all(map(buffers.has_rows, floats))
    rows, y = buffers.as_rows(_as_floats(p.x)), buffers.as_rows(out, "out")
    residual = None if p.residual is None else buffers.as_rows(p.residual, "residual")
    end = _epilogue(p._replace(residual=residual))
    if _turning(fragments, rows, y, end):
        at_once = max(1, _TURNED_BYTES // (512 * rows.shape[1])) * 256  # of whole tiles
    else:
        at_once = max(1, _SUMS_BYTES // (2 * n))
    for part in cpu.slabs(len(rows), 1, at_once):
        given, to, added = rows[part], y[part], None if residual is None else residual[part]
        ready = _turning(fragments, given, to, end) or _turned_ready(fragments, given, to, added, end)
        ends = (to.data.ptr, buffers.pointer(p.bias), buffers.pointer(added))
        _run(ready, given.data.ptr, 0, *ends)
    if y.data.ptr != out.data.ptr:
        out[...] = y.reshape(out.shape)
    return None if copied or len(rows) > at_once else ready


def _turning(fragments: Fragments, x: Any, out: Any, end: problem.Epilogue) -> Ready | None:
    """A product that turns its sums, of rows that are turned before; None where it is planned otherwise."""
    turned = problem.Source(x.shape, (x.shape[1],), None, True)
    launch = problem.resolve(fragments.weight, turned, _output(out), end, jit.gpu())
    if not launch.turns_sums:
        return None
    factors, size = buffers.rows_bytes(x.shape)
    argument = _argument(launch, fragments)
    return Ready(launch, argument, (cuda_exl3.turned_rows(x, fragments),), size, factors)


def _turned_ready(fragments: Fragments, x: Any, out: Any, residual: Any, end: problem.Epilogue) -> Ready:
    """A product whose sums a kernel turns. It turns a row of float16 itself, if its plan says so."""
    (m, k), n = x.shape, out.shape[1]
    half, single = problem.DTYPES[check.FLOAT16], problem.DTYPES[check.FLOAT32]
    own = problem.source(x.shape, x.strides, x.dtype == check.FLOAT16, x.data.ptr % 16 == 0)
    to = (_NOTHING, jit.gpu())
    if m == 1 and own.entry is None:
        source = own._replace(to_convert=True)
        launch = problem.resolve(fragments.weight, source, problem.Output((m, n), (n, 1), single), *to)
        if launch.converts_x:
            results = cuda_exl3.turned_results(out, residual, end.bias_dtype, end.activation, fragments, True)
            argument = _argument(launch, fragments, fragments.exl3_vectors.suh.data.ptr)
            return Ready(launch, argument, results=results, sums=4 * n)
    source = problem.Source((m, k), (k,), None, False)
    launch = problem.resolve(fragments.weight, source, problem.Output((m, n), (n, 1), half), *to)
    factors, size = buffers.rows_bytes((m, k))
    results = cuda_exl3.turned_results(out, residual, end.bias_dtype, end.activation, fragments, False)
    steps, sums = (cuda_exl3.turned_rows(x, fragments),), buffers.rows_bytes((m, n))[0]
    return Ready(launch, _argument(launch, fragments), steps, size, factors, results, sums)


def can_quantize(x: Any, w: Any) -> bool:
    """Whether products with a weight quantize such floats themselves, or have a kernel do so that stores no
    blocks."""
    if not check.is_quantized(w):
        return False
    kernels = kernels_of(w.format)
    if kernels.turned or not kernels.in_float16:
        return False
    return w.fragments().signs is None and activations.can_quantize(x)


def repeat(known: Repeat, places: list[int], x: Any, out: Any) -> Any:
    """A product like one before, of operands at these places, to `out` or, if that is None, to a new array;
    returns it."""
    start, bias, residual, to = places
    factors = 0
    if out is None:
        out = known.result()
        to = out.data.ptr
    if type(x) is QuantizedArray:
        start, factors = addresses(x.blocks, x.rows)
    _run(known.work, start, factors, to, bias, residual)
    return out


def _run(ready: Ready, x: int, factors: int, out: int, bias: int, residual: int) -> None:
    """Start the product, after what converts x, of operands at these addresses.

    Scratch memory may have grown or be another stream's: where it is, is asked each time.
    """
    partials = ready.launch.partials
    if not ready.steps and not partials and ready.results is None:
        _launch(ready, x, factors, out, bias, residual)
        return
    with buffers.scratch() as scratch:
        start = scratch.take(ready.rows + ready.sums + partials)
        for step in ready.steps:
            if step.factors:
                factors = start + ready.factors
            step.call(x, start, factors if step.factors else 0)
            x = start
        after = start + ready.rows
        sums = (after + ready.sums, scratch.flags()) if partials else (0, 0)
        if ready.results is None:
            _launch(ready, x, factors, out, bias, residual, *sums)
        else:
            _launch(ready, x, 0, after, 0, 0, *sums)
            ready.results(after, out, bias, residual, factors if ready.steps else 0)


def _signed(x: Any, signs: Signs, lead: tuple[int, ...]) -> Operand:
    """Activations that take the signs of W's columns, for matrices with these leading axes."""
    half = not check.is_quantized(x) and x.dtype == check.FLOAT16
    if not signs.differ:
        return Operand(x, problem.prepared(x.shape, half), getattr(x, "rows", None), signs.bits)
    x = _as_floats(x)
    *own, m, k = x.shape
    if tuple(own) != lead:
        why = "x is one for several matrices, whose columns have signs of their own, and is repeated"
        check.require_memory(why, f"pass x of shape {(*lead, m, k)}")
        x = device.cupy().broadcast_to(x, (*lead, m, k))
    return Operand(x, problem.prepared(x.shape, half), None, signs.over(lead), m)


def _as_floats(x: Any) -> Any:
    """Activations, if they are quantized, in float32."""
    if not check.is_quantized(x):
        return x
    check.require_memory("x is quantized, and floats are made of it", "pass floats")
    return dequantize(x.blocks, x.format, check.FLOAT32)


def _argument(launch: problem.Launch, fragments: Fragments, signs: int = 0) -> bytes:
    """The kernel's argument for a weight, with the signs of columns that the kernel itself gives, or 0."""
    return launch.argument(fragments.addresses, fragments.values, signs)


def _launch(
    ready: Ready, x: int, factors: int, out: int, bias: int, residual: int, sums: int = 0, flags: int = 0
) -> None:
    """Start the product itself, with rows of x and their factors at these addresses."""
    launch, known, stream = ready.launch, ready.argument, streams.current()
    maps = [None if tensor is None else buffers.tensor_map(x, tensor) for tensor in launch.maps]
    out_map = buffers.tensor_map(out, launch.out_map) if launch.out_map and out % 16 == 0 else None
    own = jit.prepared(device.cupy().cuda.runtime.getDevice(), launch.plan, len(known))
    problem.fill(own.arguments, known, x, factors, out, bias, residual, sums, flags)
    for which, tensor_map in enumerate(maps):
        if tensor_map is not None:
            problem.set_map(own.arguments, which, tensor_map)
    if out_map is not None:
        problem.set_out_map(own.arguments, out_map)
    own(*stream)


def _output(out: Any) -> problem.Output:
    return problem.Output(out.shape, buffers.element_strides(out), problem.DTYPES[out.dtype])


_NOTHING = problem.Epilogue(0, False, None, 0, None)


def _epilogue(p: Product) -> problem.Epilogue:
    if p.bias is None and p.activation is None and p.residual is None:
        return _NOTHING
    bias_dtype, stacked = (0, False) if p.bias is None else (problem.DTYPES[p.bias.dtype], p.bias.ndim > 1)
    if p.residual is None:
        return problem.Epilogue(bias_dtype, stacked, p.activation, 0, None)
    strides = buffers.element_strides(p.residual)
    return problem.Epilogue(bias_dtype, stacked, p.activation, problem.DTYPES[p.residual.dtype], strides)


_DENSE = "take cupy.matmul, and a weight of floats"


def _dense(p: Product, out: Any) -> None:
    """The product with a plain float weight, by cuBLAS in float32, a slab of its rows at a time."""
    check.require_memory("a product with a plain weight is one of floats in float32", _DENSE)
    cupy = device.cupy()
    x = _as_floats(p.x).astype(np.float32)
    n, k = p.w.shape[-2:]
    for part in cpu.slabs(n, k, DENSE_SLAB):
        acc = cupy.matmul(x, p.w[..., part, :].astype(np.float32).swapaxes(-1, -2))
        if p.bias is not None:
            acc += p.bias[..., None, part] if p.bias.ndim > 1 else p.bias[part]
        if p.activation is not None:
            acc = cpu.activated(acc, p.activation, cupy)
        out[..., part] = acc if p.residual is None else acc + p.residual[..., part]
