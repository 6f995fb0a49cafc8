"""The CUDA backend: the same operations as cuquant.cpu, on CuPy arrays, by the kernels of kernels/.

Everything runs on the current device and stream and nothing synchronises, but for quantizing a weight, which
reads back whether its values were good.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import check, cpu, device, jit, plan, problem
from .formats import Format, get

if TYPE_CHECKING:
    from .ops.matmul import Product

DENSE_SLAB = 1 << 24
"""Numbers of a plain float weight that are in float32 at a time: 64 MB."""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An uninitialised array on the current device."""
    return device.cupy().empty(shape, dtype)


def quantize(x: Any, fmt: Format) -> Any:
    """Blocks (..., N, row bytes) of floats (..., N, K); weights are checked (one synchronisation)."""
    cupy = device.cupy()
    if not fmt.encodes_on_gpu:
        return cupy.asarray(cpu.quantize(cupy.asnumpy(x), fmt))
    k = x.shape[-1]
    rows = _as_rows(x)
    out = cupy.empty((*x.shape[:-1], fmt.row_bytes(k)), np.uint8)
    if out.size == 0:
        return out
    bad = None if fmt.for_activations else cupy.full(1, np.iinfo(np.uint64).max, np.uint64)
    blocks_per_row = k // fmt.block_size
    count = len(rows) * blocks_per_row
    sizes = (np.int64(len(rows)), np.int64(blocks_per_row))
    tables = _tables(fmt)
    codebook = (np.uint64(tables.thresholds), np.int32(fmt.divides_by_stored))
    step = plan.per_block("quantize", fmt, count * fmt.block_size // 16)
    jit.launch(step, *_float_rows(rows), *sizes, out, bad, *codebook)
    if bad is not None:
        _raise_for(int(bad[0]), rows, fmt, x.shape)
    return out


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
    factors, total = _rows_bytes(x.shape)
    blocks, buffer = cupy.empty((*lead, fmt.row_bytes(k)), np.uint8), cupy.empty(total, np.uint8)
    start = buffer.data.ptr
    to = (np.int32(k), blocks, np.uint64(start), np.uint64(start + factors))
    step = plan.activations("quantize_half" if half else "quantize_rows", fmt, count, k)
    jit.launch(step, *_float_rows(_as_rows(x)), *to)
    return blocks, Rows(buffer, factors)


def _raise_for(first_bad: int, rows: Any, fmt: Format, shape: tuple[int, ...]) -> None:
    """The error of the first row that cannot be quantized, in the words of the NumPy backend."""
    if first_bad < len(rows):
        row = device.cupy().asnumpy(rows[first_bad]).astype(np.float32)[None]
        check.finite(row, first_bad, shape)
        check.magnitudes(row, fmt, first_bad, shape)
        with np.errstate(all="ignore"):
            check.scales(fmt.encode(row.reshape(-1, fmt.block_size))[None], fmt, first_bad, shape)


def dequantize(blocks: Any, fmt: Format, dtype: np.dtype[Any]) -> Any:
    """Numbers (..., N, K) of blocks (..., N, row bytes)."""
    blocks, fmt = fmt.to_kernels(blocks, device.cupy()), fmt.for_kernels
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
            np.uint64(_tables(fmt).codebook),
        )
    return out


class _Tables(NamedTuple):
    """Addresses of a codebook on a device: float32 entries, thresholds, and float16 entries, also times the
    power of two by which products lift small weights; 0 for formats without one."""

    codebook: int = 0
    thresholds: int = 0
    values: int = 0
    lifted: int = 0


_codebooks: dict[tuple[int, Format], tuple[_Tables, Any]] = {}


def _tables(fmt: Format) -> _Tables:
    """The codebook of a format on the current device, uploaded once."""
    if not fmt.lookup and fmt.codebook is None:
        return _Tables()
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), fmt)
    found = _codebooks.get(key)
    if found is None:
        tables = np.zeros((4, 32), np.float32)
        assert fmt.codebook is not None
        tables[0, : len(fmt.codebook)] = fmt.codebook
        tables[1] = np.inf
        if fmt.lookup:
            tables[1, : len(fmt.thresholds)] = fmt.thresholds
        for row, lift in ((2, 0), (3, LIFT)) if fmt.lookup else ():
            halves = (fmt.codebook * np.float32(2.0**lift / fmt.scale_unit)).astype(np.float16)
            tables[row].view(np.float16)[: len(halves)] = halves
        buffer = cupy.asarray(tables)
        cupy.cuda.get_current_stream().synchronize()  # other streams may use it
        starts = (int(buffer.data.ptr) + row * 128 for row in range(4))
        found = _codebooks.setdefault(key, (_Tables(*starts), buffer))
    return found[0]


LIFT, LIFTED_BELOW = 11, 2.0**-5
"""Where all weights of a codebook are below this in magnitude, products multiply them by 2^LIFT, since
float16 loses bits of small numbers, and take it back in float32. (Integers times a scale lose none.)"""


@dataclass(frozen=True)
class Fragments:
    """A weight of shape (..., N, K) in the fragment layout: one buffer, and where its planes start."""

    fmt: Format
    shape: tuple[int, ...]
    buffer: Any
    low: int
    high: int
    scale: int
    half: bool = True
    """Whether no weight is beyond float16's largest number, so that kernels may hold it in float16."""
    lift: int = 0
    """Exponent of the power of two by which the weights are multiplied."""
    offset: int = 0
    """What has been added to scales that are exponents."""
    kept: Any = None
    """Scales as blocks have them, where what kernels read has lost some."""

    @cached_property
    def weight(self) -> problem.Weight:
        """What a product has to know of it."""
        return problem.Weight(self.fmt.for_kernels, self.shape, self.half, self.lift)

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Device addresses of the planes."""
        start = self.buffer.data.ptr
        return start + self.low, start + self.high, start + self.scale

    @cached_property
    def values(self) -> int:
        """Device address of the codebook in float16, or 0."""
        tables = _tables(self.fmt)
        return tables.lifted if self.lift else tables.values


def to_fragments(blocks: Any, fmt: Format) -> Fragments:
    """Storage blocks (..., N, row bytes) to the fragment layout; waits, so that any stream may use it."""
    stream = device.cupy().cuda.get_current_stream()
    check.may_prepare(stream)
    fine, own = fmt.to_kernels(blocks, device.cupy()), fmt.for_kernels
    *lead, n, row_bytes = fine.shape
    k = row_bytes // own.block_bytes * own.block_size
    count = plan.tiles(prod(lead), n, k)
    low, high, scale, size = plan.layout(own).offsets(count)
    buffer = device.cupy().empty(size, np.uint8)
    result = Fragments(fmt, (*lead, n, k), buffer, low, high, scale)
    _tables(fmt)  # now: the first product may be captured in a graph
    if not count:
        return result
    peak = device.cupy().zeros(1, np.float32)
    _repack("to_fragments", result, fine, count, peak)
    if fmt.scaling != "float":
        return _centered(result, blocks) if fmt.scaling == "e8m0" else _canonical(result, blocks)
    greatest = float(peak.get(stream)[0])
    lift = LIFT if fmt.lookup and greatest < LIFTED_BELOW else 0
    return replace(result, half=greatest <= float(np.finfo(np.float16).max), lift=lift)


_EXPONENTS, _EXACT = (96, 126), 24
"""Bytes whose last five bits kernels take for a float16 number's exponent (kernels/core/tile.cuh); how far
below the last one E2M1 numbers, in float16 2^-14 times themselves, times such a scale are exact."""


def _centered(fragments: Fragments, blocks: Any) -> Fragments:
    """E8M0 scales e of weights E2M1 * 2^(e - 127) in the range of float16's exponents, if they fit there."""
    cupy = device.cupy()
    records = blocks.reshape(-1, fragments.fmt.block_bytes)
    e, used = records[:, 0], (records[:, 1:] & 0x77).any(axis=1)  # codes but for their signs
    first, last = _EXPONENTS
    # The least keeps the power of two that products are multiplied by a normal number.
    greatest, least = int(cupy.where(used, e, 4).max()), int(cupy.where(used, e, 255).min())
    # Sums with scales in float32, in units of 2^(e - 127), are 2^-14 times their own, times 2^16.
    if greatest - least > _EXACT:
        return replace(fragments, half=False, lift=16 - 14)
    offset = last - greatest
    lost = bool((e.astype(np.int16) + offset < first).any())  # of blocks of zeros
    plane = fragments.buffer[fragments.scale :]
    plane[...] = cupy.clip(plane.astype(np.int16) + offset, first, last)
    cupy.cuda.get_current_stream().synchronize()
    return replace(fragments, lift=16 - 14 + offset, offset=offset, kept=e[:, None].copy() if lost else None)


def _canonical(fragments: Fragments, blocks: Any) -> Fragments:
    """E4M3 scales without their unused signs; 0x7F, which ggml reads as 0, as 0, but 0xFF, 480, as 0x7F."""
    cupy = device.cupy()
    d = blocks.reshape(-1, fragments.fmt.block_bytes)[:, : fragments.fmt.kernel_scale_bytes]
    kept = None
    if bool((d >= 0x7F).any()):
        plane = fragments.buffer[fragments.scale :]
        plane[...] = cupy.where(plane == 0x7F, 0, plane & 0x7F)
        kept = d.copy()
        cupy.cuda.get_current_stream().synchronize()
    return replace(fragments, lift=-7, kept=kept)  # E2M1 numbers are 2^-14 times their own, scales 2^7 times


def from_fragments(fragments: Fragments) -> Any:
    """The storage blocks, exactly as they were."""
    cupy, fmt = device.cupy(), fragments.fmt
    *lead, n, k = fragments.shape
    blocks = cupy.empty((*lead, n, fmt.for_kernels.row_bytes(k)), np.uint8)
    count = plan.tiles(prod(lead), n, k)
    if count:
        _repack("from_fragments", fragments, blocks, count)
    scales = blocks.reshape(-1, fmt.for_kernels.block_bytes)
    if fragments.kept is not None:
        scales[:, : fragments.kept.shape[1]] = fragments.kept
    elif fragments.offset:
        scales[:, 0] -= np.uint8(fragments.offset % 256)
    return fmt.from_kernels(blocks, cupy)


def _repack(entry: str, fragments: Fragments, blocks: Any, count: int, *peak: Any) -> None:
    fmt, (n, k) = fragments.fmt.for_kernels, fragments.shape[-2:]
    planes = (np.uint64(address) for address in fragments.addresses)
    sizes = (np.int64(count), np.int32(n), np.int32(k // fmt.block_size))
    jit.launch(plan.repack(fmt, entry, count), blocks, *sizes, *planes, *peak)


def product(p: Product, out: Any) -> None:
    """Write act(x @ W.T + bias) + residual to `out` (..., M, N): one launch, two if x is converted."""
    if out.size == 0:
        return
    if not check.is_quantized(p.w):
        _dense(p, out)
        return
    fragments = p.w.fragments()
    rows: Rows | None = None
    if check.is_quantized(p.x):
        rows = p.x.rows
        x = rows.buffer if rows else p.x.blocks
        source = problem.quantized_source(p.x.shape, rows is not None)
    else:
        x = p.x
        source = problem.source(x.shape, x.strides, x.dtype == check.FLOATS[0] and x.data.ptr % 16 == 0)
    launch = problem.resolve(fragments.weight, source, _output(out), _epilogue(p), jit.capability())
    ends = (out.data.ptr, _pointer(p.bias), _pointer(p.residual))
    operand = (x.data.ptr, x.data.ptr + rows.factors if rows else 0)
    if source.entry is None and not launch.partials:
        _launch(launch, fragments, operand, ends, (0, 0))
        return
    with _scratch() as scratch:
        converted = 0 if source.entry is None else _rows_bytes(source.shape)[1]
        start = scratch.take(converted + launch.partials)
        if source.entry is not None:
            operand = _convert(x, source, start)
        sums = (start + converted, scratch.flags()) if launch.partials else (0, 0)
        _launch(launch, fragments, operand, ends, sums)


def _launch(
    launch: problem.Launch,
    fragments: Fragments,
    x: tuple[int, int],
    ends: tuple[int, int, int],
    sums: tuple[int, int],
) -> None:
    """Start the product with the rows of x and their factors at these addresses."""
    tensor = problem.NO_MAP if launch.map is None else _map(x[0], launch.map)
    straight, to = launch.straight, problem.NO_MAP
    if launch.out_map is not None:
        straight = ends[0] % 16 == 0
        if straight:
            to = _map(ends[0], launch.out_map)
    argument = launch.packed(
        tensor, to, *fragments.addresses, *x, *ends, *sums, fragments.values, int(straight)
    )
    jit.launch_packed(launch.plan, argument)


@lru_cache(maxsize=4096)
def _map(address: int, tensor: problem.Map) -> bytes:
    return jit.encode_map(address, *tensor)


def _output(out: Any) -> problem.Output:
    return problem.Output(out.shape, _element_strides(out), problem.DTYPES[out.dtype])


_NOTHING = problem.Epilogue(0, False, None, 0, None)


def _epilogue(p: Product) -> problem.Epilogue:
    if p.bias is None and p.activation is None and p.residual is None:
        return _NOTHING
    bias_dtype, stacked = (0, False) if p.bias is None else (problem.DTYPES[p.bias.dtype], p.bias.ndim > 1)
    if p.residual is None:
        return problem.Epilogue(bias_dtype, stacked, p.activation, 0, None)
    strides = _element_strides(p.residual)
    return problem.Epilogue(bias_dtype, stacked, p.activation, problem.DTYPES[p.residual.dtype], strides)


def _rows_bytes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of activations as float16 rows, and of these with the float32 factors of the rows behind them."""
    halves = ceil(prod(shape) * 2 / 256) * 256
    return halves, halves + ceil(prod(shape[:-1]) * 4 / 256) * 256


def _convert(x: Any, source: problem.Source, start: int) -> tuple[int, int]:
    """Convert the activations to float16; addresses of the rows and of the powers of two that they lack."""
    assert source.entry is not None
    factors = start + _rows_bytes(source.shape)[0]
    step = plan.activations(source.entry, get("q8_1"), prod(source.shape[:-1]), source.shape[-1])
    to = (np.int32(source.shape[-1]), np.uint64(start), np.uint64(factors))
    if source.entry == "blocks_to_half":
        jit.launch(step, x, *to)
    else:
        jit.launch(step, *_float_rows(_as_rows(x)), *to)
    return start, factors


def _float_rows(rows: Any) -> tuple[Any, ...]:
    """Rows of floats as kernels take them: array, number of the dtype, strides in elements."""
    return (rows, np.int32(problem.DTYPES[rows.dtype]), *map(np.int64, _element_strides(rows)))


def _pointer(array: Any) -> int:
    return 0 if array is None else int(array.data.ptr)


def _as_rows(x: Any) -> Any:
    """x (..., K) as rows [R, K]: a view where one stride leads from row to row, else a copy."""
    return x.reshape(-1, x.shape[-1])


def _element_strides(array: Any) -> tuple[int, ...]:
    size = array.itemsize
    return tuple([stride // size for stride in array.strides])


class _Scratch:
    """Device memory of one stream for converted activations and partial sums; it only grows.

    Old buffers are kept, too: a captured graph may hold their addresses. The lock keeps two threads on one
    stream from interleaving a conversion with the other's product.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._buffers: list[Any] = []
        self._flags: Any = None

    def take(self, nbytes: int) -> int:
        """Address of at least nbytes, valid for the work that this stream is given under the lock."""
        if not self._buffers or self._buffers[-1].size < nbytes:
            grown = max(nbytes, 2 * self._buffers[-1].size if self._buffers else 1 << 20)
            self._buffers.append(device.cupy().empty(grown, np.uint8))
        return int(self._buffers[-1].data.ptr)

    def flags(self) -> int:
        """Address of zeros, which every product leaves as it finds them."""
        if self._flags is None:
            self._flags = device.cupy().zeros(plan.FLAGS, np.uint32)
        return int(self._flags.data.ptr)

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
