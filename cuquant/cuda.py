"""The CUDA backend: the same operations as cuquant.cpu, on CuPy arrays, by the kernels of kernels/.

Everything runs on the current device and stream and nothing synchronises, but for quantizing a weight, which
reads back whether its values were good.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import check, cpu, device, jit, plan
from .formats import Format, get

if TYPE_CHECKING:
    from .ops.matmul import Product

_DTYPES = {dtype: number for number, dtype in enumerate(check.FLOATS)}
_ACTIVATIONS = {None: 0} | {name: 1 + number for number, name in enumerate(check.ACTIVATIONS)}
_PROBLEM = struct.Struct("<33q9i4x")
"""`struct Problem` of kernels/core/problem.cuh, passed by value."""
_PROBLEM_BYTES = np.dtype(f"V{_PROBLEM.size}")
_BATCH_AXES = 3
DENSE_SLAB = 1 << 24
"""Numbers of a plain float weight that are in float32 at a time: 64 MB."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An uninitialised array on the current device."""
    return device.cupy().empty(shape, dtype)


def quantize(x: Any, fmt: Format) -> Any:
    """Blocks (..., N, row bytes) of floats (..., N, K); weights are checked (one synchronisation)."""
    cupy = device.cupy()
    k = x.shape[-1]
    rows = _as_rows(x)
    out = cupy.empty((*x.shape[:-1], fmt.row_bytes(k)), np.uint8)
    if out.size == 0:
        return out
    bad = None if fmt.for_activations else cupy.full(1, np.iinfo(np.uint64).max, np.uint64)
    blocks_per_row = k // fmt.block_size
    count = len(rows) * blocks_per_row
    strides = (np.int64(stride // rows.itemsize) for stride in rows.strides)
    jit.launch(
        plan.per_block("quantize", fmt, count),
        *(
            rows,
            np.int32(_DTYPES[rows.dtype]),
            *strides,
            np.int64(len(rows)),
            np.int64(blocks_per_row),
            out,
            bad,
        ),
    )
    if bad is not None:
        _raise_for(int(bad[0]), rows, fmt, x.shape)
    return out


def _raise_for(first_bad: int, rows: Any, fmt: Format, shape: tuple[int, ...]) -> None:
    """The error of the first row that cannot be quantized, in the words of the NumPy backend."""
    if first_bad < len(rows):
        row = device.cupy().asnumpy(rows[first_bad]).astype(np.float32)[None]
        check.finite(row, first_bad, shape)
        with np.errstate(all="ignore"):
            check.scales(fmt.encode(row.reshape(-1, fmt.block_size))[None], fmt, first_bad, shape)


def dequantize(blocks: Any, fmt: Format, dtype: np.dtype[Any]) -> Any:
    """Numbers (..., N, K) of blocks (..., N, row bytes)."""
    k = blocks.shape[-1] // fmt.block_bytes * fmt.block_size
    out = device.cupy().empty((*blocks.shape[:-1], k), dtype)
    count = blocks.size // fmt.block_bytes
    if count:
        jit.launch(
            plan.per_block("dequantize", fmt, count), blocks, np.int64(count), out, np.int32(_DTYPES[dtype])
        )
    return out


@dataclass(frozen=True)
class Fragments:
    """A weight of shape (..., N, K) in the fragment layout: one buffer, and where its planes start."""

    fmt: Format
    shape: tuple[int, ...]
    buffer: Any
    low: int
    fifth: int
    scale: int

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Device addresses of the planes."""
        start = self.buffer.data.ptr
        return start + self.low, start + self.fifth, start + self.scale


def to_fragments(blocks: Any, fmt: Format) -> Fragments:
    """Storage blocks (..., N, row bytes) to the fragment layout; waits, so that any stream may use it."""
    stream = device.cupy().cuda.get_current_stream()
    check.may_prepare(stream)
    *lead, n, row_bytes = blocks.shape
    per_row = row_bytes // fmt.block_bytes
    count = plan.tiles(prod(lead), n, per_row * fmt.block_size)
    low, fifth, scale, size = plan.layout(fmt).offsets(count)
    buffer = device.cupy().empty(size, np.uint8)
    result = Fragments(fmt, (*lead, n, per_row * fmt.block_size), buffer, low, fifth, scale)
    if count:
        _repack("to_fragments", result, blocks, count)
        stream.synchronize()
    return result


def from_fragments(fragments: Fragments) -> Any:
    """The storage blocks, exactly as they were."""
    *lead, n, k = fragments.shape
    blocks = device.cupy().empty((*lead, n, fragments.fmt.row_bytes(k)), np.uint8)
    count = plan.tiles(prod(lead), n, k)
    if count:
        _repack("from_fragments", fragments, blocks, count)
    return blocks


def _repack(entry: str, fragments: Fragments, blocks: Any, count: int) -> None:
    fmt, (n, k) = fragments.fmt, fragments.shape[-2:]
    planes = (np.uint64(address) for address in fragments.addresses)
    sizes = (np.int64(count), np.int32(n), np.int32(k // fmt.block_size))
    jit.launch(plan.repack(fmt, entry, count), blocks, *sizes, *planes)


def product(p: Product, out: Any) -> None:
    """Write act(x @ W.T + bias) + residual to `out` (..., M, N): one launch, two if x is converted."""
    if out.size == 0:
        return
    if not check.is_quantized(p.w):
        _dense(p, out)
        return
    fragments = p.w.fragments()
    capability = _capability()
    n = fragments.shape[-2]
    source = _source(p.x, capability)
    strides = _element_strides(out)
    residual = strides if p.residual is None else _element_strides(p.residual)
    axes = _merge(fragments.shape, (p.x.shape[:-1], source.strides), (out.shape, strides), residual)
    gemm = plan.gemm(p.w.format, axes.m, n, prod(axes.extent), source.entry == "blocks_to_int8", capability)
    if source.entry is None:
        _run(p, out, gemm, axes, source, _OperandB(source.array.data.ptr), (strides[-1], residual[-1]))
        return
    with _scratch() as scratch:
        b = source.convert(axes.m, gemm.batch_tile, scratch)
        _run(p, out, gemm, axes, source, b, (strides[-1], residual[-1]))


def _run(
    p: Product,
    out: Any,
    gemm: plan.Gemm,
    axes: _Axes,
    source: _Source,
    b: _OperandB,
    columns: tuple[int, int],
) -> None:
    """Launch the product; `columns` are the element strides from column to column of out and residual."""
    fragments = p.w.fragments()
    packed = _PROBLEM.pack(
        *fragments.addresses,
        *(b.x, b.scales, b.unscale, out.data.ptr, _pointer(p.bias), _pointer(p.residual)),
        *(axes.x_row, b.scales_matrix, axes.out_row, columns[0], axes.residual_row, columns[1]),
        *(*axes.extent, *axes.w, *axes.x, *axes.out, *axes.residual, *source.rows(axes.x)),
        *(
            axes.m,
            *fragments.shape[-2:],
            b.scales_row,
            _DTYPES[out.dtype],
            _number(p.bias),
            _number(p.residual),
        ),
        *(_ACTIVATIONS[p.activation], int(p.bias is not None and p.bias.ndim > 1)),
    )
    jit.launch(gemm.plan, np.frombuffer(packed, _PROBLEM_BYTES))


def _pointer(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _number(array: Any) -> int:
    return 0 if array is None else _DTYPES[array.dtype]


@cache
def _capability_of(device_id: int) -> int:
    return int(device.cupy().cuda.Device(device_id).compute_capability)


def _capability() -> int:
    """Compute capability of the current device: 90 for sm_90."""
    return _capability_of(device.cupy().cuda.runtime.getDevice())


class _OperandB(NamedTuple):
    """Addresses and strides of the activations as the kernel reads them."""

    x: int
    scales: int = 0
    unscale: int = 0
    scales_matrix: int = 0
    scales_row: int = 0


class _Source(NamedTuple):
    """Activations (..., M, K) and how the kernel gets them: as they are, or converted by a launch of its own.

    `strides` (elements, one per axis but the last) are those of what the kernel reads: a conversion writes
    contiguous rows of `columns` elements.
    """

    array: Any
    entry: str | None
    strides: tuple[int, ...]
    columns: int

    def rows(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Strides of leading axes in rows, for what goes with the rows of a conversion."""
        return (0, 0, 0) if self.entry is None else tuple(stride // self.columns for stride in axes)

    def convert(self, m: int, batch_tile: int, scratch: _Scratch) -> _OperandB:
        """Run the conversion for matrices of m rows."""
        if self.entry is None:
            return _OperandB(self.array.data.ptr)
        rows = prod(self.array.shape[:-1])
        if self.entry == "blocks_to_int8":
            return self._to_int8(rows // m, m, ceil(m / batch_tile) * batch_tile, scratch)
        k = self.columns
        x = scratch.take(rows * k * 2 + rows * 4 + 256)
        unscale = x + ceil(rows * k * 2 / 256) * 256
        to = (np.int32(k), np.uint64(x), np.uint64(unscale))
        launch = plan.activations(self.entry, get("q8_1"), rows)
        if self.entry == "blocks_to_half":
            jit.launch(launch, self.array, *to)
        else:
            flat = _as_rows(self.array)
            strides = (np.int64(stride // flat.itemsize) for stride in flat.strides)
            jit.launch(launch, flat, np.int32(_DTYPES[flat.dtype]), *strides, *to)
        return _OperandB(x, unscale=unscale)

    def _to_int8(self, matrices: int, m: int, padded: int, scratch: _Scratch) -> _OperandB:
        blocks = self.columns // 32
        codes = matrices * m * self.columns
        x = scratch.take(codes + matrices * blocks * padded * 8 + 256)
        scales = x + ceil(codes / 256) * 256
        count = self.array.shape[-1] // get("q8_1").block_bytes
        launch = plan.activations("blocks_to_int8", get("q8_1"), matrices * padded * blocks)
        sizes = (np.int32(size) for size in (matrices, m, count, padded, blocks))
        jit.launch(launch, self.array, *sizes, np.uint64(x), np.uint64(scales))
        return _OperandB(x, scales, scales_matrix=blocks * padded // 2, scales_row=padded // 2)


def _source(x: Any, capability: int) -> _Source:
    """How the kernel gets these activations."""
    if check.is_quantized(x):
        k = x.shape[-1]
        integer = plan.integer_products(capability)
        columns = ceil(k / plan.TILE_COLUMNS) * plan.TILE_COLUMNS if integer else k
        entry = "blocks_to_int8" if integer else "blocks_to_half"
        return _Source(x.blocks, entry, _contiguous(x.shape[:-1], columns), columns)
    k = x.shape[-1]
    if x.dtype == np.float16 and x.data.ptr % 16 == 0:
        strides = _whole_pieces(x.strides)
        if strides is not None:
            return _Source(x, None, strides, k)
    return _Source(x, "rows_to_half", _contiguous(x.shape[:-1], k), k)


@lru_cache(maxsize=4096)
def _whole_pieces(strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Element strides of the rows of a float16 array that 16-byte copies can read as it is; else None."""
    if strides[-1] != 2 or any(stride % 16 for stride in strides[:-1]):
        return None
    return tuple(stride // 2 for stride in strides[:-1])


@lru_cache(maxsize=4096)
def _contiguous(rows: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """Element strides of rows of `columns` elements back to back."""
    return tuple(prod(rows[axis + 1 :]) * columns for axis in range(len(rows)))


def _as_rows(x: Any) -> Any:
    """x (..., K) as rows [R, K]: a view where one stride leads from row to row, else a copy."""
    return x.reshape(-1, x.shape[-1])


class _Axes(NamedTuple):
    """Leading axes of a product, merged as far as strides allow: into the batch rows where W does not vary.

    Extents and strides are padded to three axes; strides of W are in matrices, the others in elements.
    """

    m: int
    x_row: int
    out_row: int
    residual_row: int
    extent: tuple[int, ...]
    w: tuple[int, ...]
    x: tuple[int, ...]
    out: tuple[int, ...]
    residual: tuple[int, ...]


@lru_cache(maxsize=4096)
def _merge(
    w: tuple[int, ...],
    x: tuple[tuple[int, ...], tuple[int, ...]],
    out: tuple[tuple[int, ...], tuple[int, ...]],
    residual: tuple[int, ...],
) -> _Axes:
    """Merge the leading axes of a product: W's shape, shapes and element strides of the rows of x and out,
    element strides of the residual."""
    (x_shape, x_strides), (shape, strides) = x, out
    lead = len(shape) - 2
    w_axes = _broadcast(w[:-2], _contiguous(w[:-2], 1), lead)
    x_axes = _broadcast(x_shape[:-1], x_strides[:-1], lead)
    merged = [(shape[-2], (0, x_strides[-1], strides[-2], residual[-2]))]
    for axis in reversed(range(lead)):
        extent, steps = shape[axis], (w_axes[axis], x_axes[axis], strides[axis], residual[axis])
        inner, inner_steps = merged[0]
        if extent == 1:
            continue
        if all(step == inner * inner_step for step, inner_step in zip(steps, inner_steps, strict=True)):
            merged[0] = (extent * inner, inner_steps)
        else:
            merged.insert(0, (extent, steps))
    *outer, (m, (_, x_row, out_row, residual_row)) = merged
    check.batch_axes(len(outer), _BATCH_AXES, shape)
    padded = [(1, (0, 0, 0, 0))] * (_BATCH_AXES - len(outer)) + outer
    columns = zip(*(steps for _, steps in padded), strict=True)
    return _Axes(m, x_row, out_row, residual_row, tuple(extent for extent, _ in padded), *columns)


def _element_strides(array: Any) -> tuple[int, ...]:
    size = array.itemsize
    return tuple([stride // size for stride in array.strides])


def _broadcast(shape: tuple[int, ...], strides: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """Strides over `axes` leading axes: 0 where the operand lacks the axis or has extent 1."""
    own = tuple(0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=True))
    return (0,) * (axes - len(own)) + own


class _Scratch:
    """Device memory of one stream for converted activations; it grows and is never given back.

    Old buffers are kept, too: a captured graph may hold their addresses. The lock keeps two threads on one
    stream from interleaving a conversion with the other's product.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffers: list[Any] = []

    def take(self, nbytes: int) -> int:
        """Address of at least nbytes, valid for the work that this stream is given under the lock."""
        if not self._buffers or self._buffers[-1].size < nbytes:
            grown = max(nbytes, 2 * self._buffers[-1].size if self._buffers else 1 << 20)
            self._buffers.append(device.cupy().empty(grown, np.uint8))
        return int(self._buffers[-1].data.ptr)

    def __enter__(self) -> _Scratch:
        self.lock.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


_scratches: dict[tuple[int, int], _Scratch] = {}


def _scratch() -> _Scratch:
    """The scratch memory of the current device and stream."""
    cuda = device.cupy().cuda
    key = (cuda.runtime.getDevice(), cuda.get_current_stream().ptr)
    return _scratches.get(key) or _scratches.setdefault(key, _Scratch())


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
