"""Weights on the GPU as the matrix kernels read them: the fragment layout of kernels/core/tile.cuh.

Making it waits for the GPU once, so that any stream may use it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import frexp, isfinite, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import check, device, jit, plan, problem
from .formats import Format
from .formats.trellis import Trellis

if TYPE_CHECKING:
    from .cuda_trellis import Signs


class Tables(NamedTuple):
    """Addresses of a codebook on a device: float32 entries, thresholds, and float16 entries, also times the
    power of two by which products lift small weights; 0 for formats without one."""

    codebook: int = 0
    thresholds: int = 0
    values: int = 0
    lifted: int = 0


_tables: dict[tuple[int, Format], tuple[Tables, Any]] = {}


def tables(fmt: Format) -> Tables:
    """The codebook of a format on the current device, uploaded (and waited for) once."""
    if fmt.codebook is None:
        return Tables()
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), fmt)
    found = _tables.get(key)
    if found is None:
        rows = np.zeros((4, 32), np.float32)
        rows[0, : len(fmt.codebook)] = fmt.codebook
        rows[1] = np.inf
        if fmt.lookup:
            if fmt.encoder[0] == "quantize":
                rows[1, : len(fmt.thresholds)] = fmt.thresholds
            for row, lift in ((2, 0), (3, _LIFT)):
                halves = np.ldexp(fmt.codebook, _codebook_lift(fmt) + lift) / np.float32(fmt.scale_unit)
                rows[row].view(np.float16)[: len(halves)] = halves.astype(np.float16)
        buffer = cupy.asarray(rows)
        cupy.cuda.get_current_stream().synchronize()  # other streams may use it
        starts = (int(buffer.data.ptr) + row * 128 for row in range(4))
        found = _tables.setdefault(key, (Tables(*starts), buffer))
    return found[0]


def _codebook_lift(fmt: Format) -> int:
    """Exponent of the power of two that brings the greatest entry of a codebook above 1/2, up to 1."""
    assert fmt.codebook is not None
    fraction, exponent = frexp(float(np.abs(fmt.codebook).max()))
    return int(fraction == 0.5) - exponent


@dataclass(frozen=True)
class Fragments:
    """A weight of shape (..., N, K) in the fragment layout: one buffer, and where its planes start."""

    fmt: Format
    shape: tuple[int, ...]
    buffer: Any
    planes: plan.Planes
    half: bool = True
    """Whether float16 holds the weights, times 2^lift, or over the factors of their rows, with all their bits
    or about as well."""
    lift: int = 0
    """Exponent of the power of two by which the weights are multiplied."""
    values: int = 0
    """Device address of the codebook in float16."""
    offset: int = 0
    """What has been added to scales that are exponents."""
    kept: Any = None
    """`Kept`, where what kernels read has lost bits of scales; of trellis weights `Parts`, with signs."""
    held: Any = None
    """What else must live as long: a codebook that is the array's own."""
    signs: Signs | None = None
    """Signs of columns, where some are -1."""
    repeats: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)
    """Products that were checked, by what their operands look like (`repeats.Repeat`)."""

    @cached_property
    def weight(self) -> problem.Weight:
        """What a product has to know of it."""
        return problem.Weight(self.fmt.for_kernels, self.shape, self.half, self.lift, self.fmt.tensor_scale)

    @cached_property
    def codebook(self) -> int | bytes:
        """What is the same for equal codebooks, though each trellis array has its own in memory."""
        fmt = self.fmt
        if not isinstance(fmt, Trellis):
            return self.values
        assert fmt.half_levels is not None
        return fmt.half_levels.levels.tobytes()

    @cached_property
    def signs_address(self) -> int:
        """Device address of the signs of columns, or 0."""
        return 0 if self.signs is None else self.signs.address

    @cached_property
    def addresses(self) -> plan.Planes:
        """Device addresses of the planes."""
        start = self.buffer.data.ptr
        return plan.Planes(*(start + plane for plane in self.planes))


def to_fragments(blocks: Any, fmt: Format, shape: tuple[int, ...]) -> Fragments:
    """Storage bytes of an array (..., N, K) to the fragment layout."""
    if isinstance(fmt, Trellis):
        from . import cuda_trellis

        return cuda_trellis.to_fragments(blocks, fmt, shape)
    cupy = device.cupy()
    stream = cupy.cuda.get_current_stream()
    check.may_prepare(stream)
    scales = _scales(blocks, fmt)
    fine, own = fmt.to_kernels(scales.blocks, cupy), fmt.for_kernels
    *lead, n, row_bytes = fine.shape
    k = row_bytes // own.block_bytes * own.block_size
    tiles = plan.tiles(prod(lead), n, k)
    planes, size = plan.layout(own).offsets(*tiles)
    place = (fmt, (*lead, n, k), cupy.empty(size, np.uint8), planes)
    half, lift, values, kept = scales.half, scales.lift, 0, scales.kept
    if count := prod(tiles):
        peaks, made = cupy.asarray(_NO_PEAKS), Fragments(*place)
        rows = cupy.zeros(plan.TILE_ROWS * tiles[0] * plan.row_factors(own), np.uint32)
        _repack("to_fragments", made, fine, count, rows, peaks)
        if plan.row_factors(own):
            lifts = (np.uint64(made.addresses.scale), np.uint64(made.addresses.row))
            jit.launch(plan.lift(own, tiles[0]), *lifts, rows, np.int32(tiles[1]), peaks[2:3], peaks[3:])
        *found, lost, small = peaks.get(stream)
        greatest, least = (float(peak) for peak in np.array(found).view(np.float32))
        if plan.row_factors(own):
            half = isfinite(greatest) and not small
            if half and lost:
                kept = _lost(made, fine)
            elif not half:
                _repack("to_fragments", replace(made, half=False), fine, count, rows, peaks)
                stream.synchronize()
        elif fmt.scaling == "float":
            half = greatest <= _LARGEST_HALF
        if fmt.lookup:
            half, lifted = _lifted(greatest, least)
            lift = _codebook_lift(fmt) + (_LIFT if lifted else 0)
            values = tables(fmt).lifted if lifted else tables(fmt).values
    return Fragments(*place, half, lift, values, scales.offset, kept)


_NO_PEAKS = np.array([0, 0x7F800000, 0, 0], np.uint32)
"""Bits of the greatest and the least magnitude, before there is any, and that nothing has lost bits: no
scale, and of no block all weights."""
_LARGEST_HALF = float(np.finfo(np.float16).max)
_LIFT, _LIFTED_UP_TO = 11, 31.0
"""Where the weights of a codebook are small, products multiply them by 2^11, for which they must not be above
31, since float16 loses bits of small numbers. (Integers have factors of rows.)"""
_SMALL, _SMALL_BLOCK = 2.0**-5, 2.0**-13
"""What is small: all weights; or all of a block, of which float16 would lose what counts."""


def _lifted(greatest: float, least: float) -> tuple[bool, bool]:
    """Whether float16 can hold weights of a codebook, given blocks' peaks, and whether they are lifted."""
    lifted = greatest <= _LIFTED_UP_TO and (greatest < _SMALL or least < _SMALL_BLOCK)
    return greatest <= _LARGEST_HALF and (lifted or least >= _SMALL_BLOCK), lifted


class Kept(NamedTuple):
    """Scales as blocks have them: first bytes of some blocks, one after the other, or of all."""

    blocks: Any
    """Their numbers."""
    scales: Any


def _lost(made: Fragments, blocks: Any) -> Kept:
    """The scales that do not come back from fragments with all their bits."""
    cupy, fmt = device.cupy(), made.fmt.for_kernels
    scales = blocks.reshape(-1, fmt.block_bytes)[:, : fmt.kernel_scale_bytes]
    numbers = cupy.flatnonzero(
        (_blocks(made).reshape(-1, fmt.block_bytes)[:, : scales.shape[1]] != scales).any(axis=1)
    )
    kept = Kept(numbers, scales[numbers])
    cupy.cuda.get_current_stream().synchronize()  # other streams may use it
    return kept


class _Scales(NamedTuple):
    """Blocks whose scales are as kernels want them, and what `Fragments` must know of it."""

    blocks: Any
    half: bool = True
    lift: int = 0
    offset: int = 0
    kept: Any = None


def _scales(blocks: Any, fmt: Format) -> _Scales:
    if fmt.scaling == "float" or blocks.size == 0:
        return _Scales(blocks)
    return _centered(blocks, fmt) if fmt.scaling == "e8m0" else _canonical(blocks, fmt)


_EXPONENTS, _EXACT = (96, 126), 24
"""Bytes whose last five bits kernels take for a float16 number's exponent (kernels/core/tile.cuh); how far
below the last one E2M1 numbers, in float16 2^-14 times themselves, times such a scale are exact."""


def _centered(blocks: Any, fmt: Format) -> _Scales:
    """E8M0 scales e of weights E2M1 * 2^(e - 127) in the range of float16's exponents, if they fit there.

    Those of blocks of zeros do not count. Where the others do not fit, they are normal float32 exponents.
    """
    cupy = device.cupy()
    records = blocks.reshape(-1, fmt.block_bytes)
    e, used = records[:, 0].astype(np.int16), (records[:, 1:] & 0x77).any(axis=1)  # codes but for their signs
    first, last = _EXPONENTS
    # At least 4, so that the power of two that products are multiplied by is a normal number.
    greatest = max(4, int(cupy.where(used, e, 0).max()))
    least = int(cupy.where(used, e, greatest).min())
    half = greatest - least <= _EXACT
    offset = last - greatest if half else -1 if greatest == 255 else int(least == 0)
    wanted = e + offset
    made = cupy.where(used, cupy.clip(wanted, 1, 254), first if half else 1)
    kept = Kept(slice(None), records[:, :1].copy()) if bool((made != wanted).any()) else None
    changed = blocks.copy()
    changed.reshape(records.shape)[:, 0] = made
    # Sums in units of 2^(e - 127) are 2^-14 times their own, for E2M1 numbers' bits, times 2^16.
    return _Scales(changed, half, 16 - 14 + offset, offset, kept)


def _canonical(blocks: Any, fmt: Format) -> _Scales:
    """E4M3 scales without their unused signs; 0x7F, which ggml reads as 0, as 0, but 0xFF, 480, as 0x7F."""
    cupy = device.cupy()
    width, lift = fmt.kernel_scale_bytes, -7  # E2M1 numbers are 2^-14 times their own, scales 2^7 times
    d = blocks.reshape(-1, fmt.block_bytes)[:, :width]
    if not bool((d >= 0x7F).any()):
        return _Scales(blocks, lift=lift)
    changed = blocks.copy()
    changed.reshape(-1, fmt.block_bytes)[:, :width] = cupy.where(d == 0x7F, 0, d & 0x7F)
    return _Scales(changed, lift=lift, kept=Kept(slice(None), d.copy()))


def from_fragments(fragments: Fragments) -> Any:
    """The storage blocks, exactly as they were."""
    if fragments.fmt.whole_matrices:
        from . import cuda_trellis

        return cuda_trellis.from_fragments(fragments)
    fmt, blocks = fragments.fmt, _blocks(fragments)
    if fragments.kept is not None:
        numbers, scales = fragments.kept
        blocks.reshape(-1, fmt.for_kernels.block_bytes)[numbers, : scales.shape[1]] = scales
    elif fragments.offset and blocks.size:
        blocks.reshape(-1, fmt.for_kernels.block_bytes)[:, 0] -= np.uint8(fragments.offset % 256)
    return fmt.from_kernels(blocks, device.cupy())


def _blocks(fragments: Fragments) -> Any:
    """Blocks as kernels have them, with what has become of their scales."""
    fmt, (*lead, n, k) = fragments.fmt.for_kernels, fragments.shape
    blocks = device.cupy().empty((*lead, n, fmt.row_bytes(k)), np.uint8)
    if count := prod(plan.tiles(prod(lead), n, k)):
        _repack("from_fragments", fragments, blocks, count, np.uint64(fragments.addresses.row))
    return blocks


def _repack(entry: str, fragments: Fragments, blocks: Any, count: int, *rows: Any) -> None:
    fmt, (n, k) = fragments.fmt.for_kernels, fragments.shape[-2:]
    planes = (np.uint64(address) for address in fragments.addresses[:-1])
    sizes = (np.int64(count), np.int32(n), np.int32(k // fmt.block_size))
    jit.launch(plan.repack(fmt, entry, count, fragments.half), blocks, *sizes, *planes, *rows)
