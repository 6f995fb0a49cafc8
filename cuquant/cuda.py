"""The CUDA backend: the same operations as cuquant.cpu, on CuPy arrays, by the kernels of kernels/.

Everything runs on the current device and stream and nothing synchronises, but for quantizing a weight, which
reads back whether its values were good.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import buffers, check, cpu, cuda_trellis, device, jit, plan, problem, repeats
from .array import QuantizedArray
from .formats import Format, get
from .formats.trellis import Trellis
from .fragments import Fragments, tables

if TYPE_CHECKING:
    from .cuda_trellis import Signs
    from .ops.matmul import Product

DENSE_SLAB = 1 << 24
"""Numbers of a plain float weight that are in float32 at a time: 64 MB."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An uninitialised array on the current device."""
    return device.cupy().empty(shape, dtype)


def quantize(x: Any, fmt: Format) -> Any:
    """Blocks (..., N, row bytes) of floats (..., N, K); weights are checked (one synchronisation)."""
    cupy = device.cupy()
    if isinstance(fmt, Trellis):
        return cuda_trellis.quantize(x, fmt)
    if not fmt.encodes_on_gpu:
        return cupy.asarray(cpu.quantize(cupy.asnumpy(x), fmt))
    k = x.shape[-1]
    rows = buffers.as_rows(x)
    out = cupy.empty((*x.shape[:-1], fmt.row_bytes(k)), np.uint8)
    if out.size == 0:
        return out
    bad = None if fmt.for_activations else cupy.full(1, np.iinfo(np.uint64).max, np.uint64)
    blocks_per_row = k // fmt.block_size
    count = len(rows) * blocks_per_row
    sizes = (np.int64(len(rows)), np.int64(blocks_per_row))
    jit.launch(plan.quantize(fmt, count), *buffers.float_rows(rows), *sizes, out, bad, *_encoder(fmt))
    if bad is not None:
        _raise_for(int(bad[0]), rows, fmt, x.shape)
    return out


def _encoder(fmt: Format) -> tuple[Any, ...]:
    """What the kernel that quantizes has to know of the format."""
    kernel, _ = fmt.encoder
    if kernel == plan.GROUPS_ENCODER:
        return np.int32(fmt.block_size), np.int32(plan.group_lanes(fmt))
    if kernel == "search":
        return ()
    thresholds = tables(fmt.for_kernels).thresholds
    return np.uint64(thresholds), np.int32(fmt.divides_by_stored), np.float32(fmt.tensor_scale)


@dataclass(frozen=True)
class Rows:
    """Activations as the float16 rows that products read: one buffer, and where the rows' factors start."""

    buffer: Any
    factors: int


def quantize_activations(x: Any, fmt: Format) -> tuple[Any, Rows | None]:
    """Blocks of floats (..., K), and the rows that a product will want; None for rows beyond the kernel's."""
    *lead, k = x.shape
    count = prod(lead)
    half = x.dtype == check.FLOATS[0]
    if count == 0 or k == 0 or (k > plan.LONGEST_ROW and not half):
        return quantize(x, fmt), None
    cupy = device.cupy()
    factors, total = buffers.rows_bytes(x.shape)
    blocks, buffer = cupy.empty((*lead, fmt.row_bytes(k)), np.uint8), cupy.empty(total, np.uint8)
    start = buffer.data.ptr
    to = (np.int32(k), blocks, np.uint64(start), np.uint64(start + factors))
    step = plan.activations("quantize_half" if half else "quantize_rows", fmt, count, k)
    jit.launch(step, *buffers.float_rows(buffers.as_rows(x)), *to)
    return blocks, Rows(buffer, factors)


def _raise_for(first_bad: int, rows: Any, fmt: Format, shape: tuple[int, ...]) -> None:
    """The error of the first row that cannot be quantized, in the words of the NumPy backend."""
    if first_bad < len(rows):
        row = device.cupy().asnumpy(rows[first_bad]).astype(np.float32)[None]
        check.to_quantize(row, fmt, first_bad, shape)
        with np.errstate(all="ignore"):
            check.scales(fmt.encode(row.reshape(-1, fmt.block_size))[None], fmt, first_bad, shape)


def dequantize(blocks: Any, fmt: Format, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> Any:
    """Numbers (..., N, K) of blocks (..., N, row bytes), or of the storage bytes of matrices of a shape."""
    if isinstance(fmt, Trellis):
        return cuda_trellis.dequantize(blocks, fmt, shape, dtype)
    blocks, fmt, scale = fmt.to_kernels(blocks, device.cupy()), fmt.for_kernels, fmt.tensor_scale
    k = blocks.shape[-1] // fmt.block_bytes * fmt.block_size
    out = device.cupy().empty((*blocks.shape[:-1], k), dtype)
    count = out.size // 32
    if count:
        jit.launch(
            plan.per_block("dequantize", fmt, count * out.itemsize),  # a thread per 2 x 16 bytes
            blocks,
            np.int64(count),
            out,
            np.int32(problem.DTYPES[dtype]),
            np.uint64(tables(fmt).codebook),
            np.float32(scale),
        )
    return out


def product(p: Product, out: Any) -> None:
    """Write act(x @ W.T + bias) + residual to `out` (..., M, N): one launch, two if x is converted."""
    if out.size == 0:
        return
    if not check.is_quantized(p.w):
        _dense(p, out)
        return
    if not p.w.format.in_float16:
        _dense(p._replace(w=p.w.dequantize()), out)
        return
    fragments, x = p.w.fragments(), _operand(p.x)
    to = (_output(out), _epilogue(p), jit.capability())
    launch = problem.resolve(fragments.weight, x.source, *to)
    signs = fragments.signs
    if signs is not None and not launch.takes_signs:
        x, signs = _signed(p.x, signs, out.shape[:-2]), None
        launch = problem.resolve(fragments.weight, x.source, *to)
    ends = (out.data.ptr, buffers.pointer(p.bias), buffers.pointer(p.residual))
    if x.source.entry is None and not launch.partials:
        _launch(launch, fragments, signs, x.addresses, ends, (0, 0))
        if to[1] is _NOTHING and not check.is_quantized(p.x):
            repeats.remember(launch, fragments, p.x, out)
        return
    with buffers.scratch() as scratch:
        converted = 0 if x.source.entry is None else buffers.rows_bytes(x.source.shape)[1]
        start = scratch.take(converted + launch.partials)
        addresses = x.addresses if x.source.entry is None else convert(x, start)
        sums = (start + converted, scratch.flags()) if launch.partials else (0, 0)
        _launch(launch, fragments, signs, addresses, ends, sums)


def repeat(known: repeats.Repeat, x: Any, w: QuantizedArray, out: Any) -> Any:
    """A product like one before, to `out` or, if that is None, to a new array; returns it."""
    y = device.cupy().empty(known.shape, known.dtype) if out is None else out
    fragments = w.fragments()
    _launch(known.launch, fragments, fragments.signs, (x.data.ptr, 0), (y.data.ptr, 0, 0), (0, 0))
    return y


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

    @property
    def addresses(self) -> tuple[int, int]:
        """Of rows that are as the kernel reads them, and of their factors."""
        if self.rows is None:
            return self.x.data.ptr, 0
        start = self.rows.buffer.data.ptr
        return start, start + self.rows.factors


def _signed(x: Any, signs: Signs, lead: tuple[int, ...]) -> Operand:
    """Activations that take the signs of W's columns, for matrices with these leading axes."""
    if not signs.differ:
        return Operand(x, problem.prepared(x.shape), getattr(x, "rows", None), signs.bits)
    if check.is_quantized(x):
        x = dequantize(x.blocks, x.format, check.FLOATS[2])
    *own, m, k = x.shape
    if tuple(own) != lead:
        x = device.cupy().broadcast_to(x, (*lead, m, k))
    return Operand(x, problem.prepared(x.shape), None, signs.over(lead), m)


def _operand(x: Any) -> Operand:
    if not check.is_quantized(x):
        aligned = x.dtype == check.FLOATS[0] and x.data.ptr % 16 == 0
        return Operand(x, problem.source(x.shape, x.strides, aligned))
    return Operand(x, problem.quantized_source(x.shape, x.rows is not None), x.rows)


def _launch(
    launch: problem.Launch,
    fragments: Fragments,
    signs: Signs | None,
    x: tuple[int, int],
    ends: tuple[int, int, int],
    sums: tuple[int, int],
) -> None:
    """Start the product with the rows of x and their factors at these addresses; x still lacks `signs`."""
    tensor = problem.NO_MAP if launch.map is None else buffers.tensor_map(x[0], launch.map)
    straight, to = launch.straight, problem.NO_MAP
    if launch.out_map is not None:
        straight = ends[0] % 16 == 0
        if straight:
            to = buffers.tensor_map(ends[0], launch.out_map)
    columns = 0 if signs is None else signs.address
    w = (fragments.addresses, fragments.values, columns)
    argument = launch.packed(tensor, to, straight, *w, *x, *ends, *sums)
    jit.launch_packed(launch.plan, argument)


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


def convert(x: Operand, start: int) -> tuple[int, int]:
    """Convert the activations to float16; addresses of the rows and of the powers of two that they lack."""
    entry, k, count = x.source.entry, x.source.shape[-1], prod(x.source.shape[:-1])
    assert entry is not None
    factors = start + buffers.rows_bytes(x.source.shape)[0]
    if entry == "prepare_rows":
        return _prepare_rows(x, start, factors)
    to = (np.int32(k), np.uint64(start), np.uint64(factors))
    step = plan.activations(entry, get("q8_1"), count, k)
    if entry == "blocks_to_half":
        jit.launch(step, x.x.blocks, *to)
    else:
        jit.launch(step, *buffers.float_rows(buffers.as_rows(x.x)), *to)
    return start, factors


def _prepare_rows(x: Operand, start: int, factors: int) -> tuple[int, int]:
    """Rows of any length, with signs: of floats, or of the float16 rows that stand for q8_1 blocks."""
    k, count = x.source.shape[-1], prod(x.source.shape[:-1])
    floats = not check.is_quantized(x.x)
    half = not floats or x.x.dtype == check.FLOATS[0]
    if floats:
        given, unscale = buffers.float_rows(buffers.as_rows(x.x)), factors
    else:
        if x.rows is None:
            at, factors = convert(Operand(x.x, problem.quantized_source(x.source.shape, False)), start)
        else:
            at, factors = x.addresses
        given, unscale = (np.uint64(at), np.int32(0), np.int64(k), np.int64(1)), 0
    step = plan.activations("prepare_halves" if half else "prepare_rows", get("q8_1"), count, k)
    to = (np.int32(k), np.uint64(start), np.uint64(unscale))
    jit.launch(step, *given, *to, x.signs, np.int32(x.each or count))
    return start, factors


def _dense(p: Product, out: Any) -> None:
    """The product with a plain float weight, by cuBLAS in float32, a slab of its rows at a time."""
    cupy = device.cupy()
    x = (dequantize(p.x.blocks, p.x.format, check.FLOATS[2]) if check.is_quantized(p.x) else p.x).astype(
        np.float32
    )
    n, k = p.w.shape[-2:]
    for part in cpu.slabs(n, k, DENSE_SLAB):
        acc = cupy.matmul(x, p.w[..., part, :].astype(np.float32).swapaxes(-1, -2))
        if p.bias is not None:
            acc += p.bias[..., None, part] if p.bias.ndim > 1 else p.bias[part]
        acc = _activate(acc, p.activation)
        out[..., part] = acc if p.residual is None else acc + p.residual[..., part]


def _activate(x: Any, name: str | None) -> Any:
    from cupyx.scipy.special import erf, expit

    cupy = device.cupy()
    if name is None:
        return x
    if name == "relu":
        return cupy.maximum(x, np.float32(0))
    if name == "silu":
        return x * expit(x)
    if name == "gelu_erf":
        return np.float32(0.5) * x * (1 + erf(x * np.float32(np.sqrt(0.5))))
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + cupy.tanh(inner))
