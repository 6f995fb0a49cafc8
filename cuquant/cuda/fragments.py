"""Weights on the GPU as the matrix kernels read them: the fragment layout of kernels/core/tile.cuh.

Making it waits for the GPU once, so that any stream may use it afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import frexp, inf, isfinite, isnan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, device, plan
from ..formats import Format, e4m4
from ..formats.exl3 import Exl3Parts
from ..formats.kernels import Scaling, kernels_of
from ..formats.trellis import Parts
from ..repeats import CallTable
from . import buffers, jit, problem

if TYPE_CHECKING:
    from .trellis import Signs


class Tables(NamedTuple):
    """Addresses of a codebook on a device: float32 entries, thresholds, and float16 entries as products take
    them; 0 for formats without one."""

    codebook: int = 0
    thresholds: int = 0
    values: int = 0

    def lifted(self, lift: int) -> int:
        """The float16 entries that lift weights by 2^lift; where no masks make them, of 0 and `_LIFT`."""
        return self.values + lift * _ROW


_ROW = 128
"""Bytes of one of these arrays."""
_tables: dict[tuple[int, Format, bytes], tuple[Tables, Any]] = {}


def tables(fmt: Format) -> Tables:
    """The codebook of a format on the current device, uploaded (and waited for) once."""
    if fmt.codebook is None:
        return Tables()
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), fmt, fmt.codebook.tobytes())  # formats may be defined again
    found = _tables.get(key)
    if found is None:
        rows = np.zeros((2 + _MOST_LIFT + 1, _ROW // 4), np.float32)
        rows[0, : len(fmt.codebook)] = fmt.codebook
        rows[1] = np.inf
        if fmt.thresholds is not None:
            rows[1, : len(fmt.thresholds)] = fmt.thresholds
        kernels = kernels_of(fmt)
        if kernels.lookup:
            for lift in range(_MOST_LIFT + 1) if kernels.masked else (0, _LIFT):
                halves = _halves(fmt, lift)
                rows[2 + lift].view(np.float16)[: len(halves)] = halves
        buffer = cupy.asarray(rows)
        cupy.cuda.get_current_stream().synchronize()  # other streams may use it
        starts = (int(buffer.data.ptr) + row * _ROW for row in range(3))
        found = _tables.setdefault(key, (Tables(*starts), buffer))
    return found[0]


def _halves(fmt: Format, lift: int) -> NDArray[np.float16]:
    """A codebook as products take it, times 2^lift; of values that masks make, these, and 2^lift."""
    kernels = kernels_of(fmt)
    if kernels.masked:
        return np.append(kernels.masked.halves, np.float16(2.0**lift))
    assert fmt.codebook is not None
    values = np.ldexp(fmt.codebook, _codebook_lift(fmt) + lift) / np.float32(kernels.scale_unit)
    return values.astype(np.float16)


@cache
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
    """Exponent of the power of two by which sums are divided: `problem.Weight` has what for."""
    values: int = 0
    """Device address of the codebook in float16."""
    offset: int = 0
    """What has been added to scales that are exponents."""
    kept: Kept | None = None
    """Scales of blocks, where what kernels read has lost bits of them."""
    vectors: Parts | Exl3Parts | None = None
    """Signs or factors of columns and rows of whole matrices, and scales where kernels read less of them."""
    held: Any = None
    """Object that must live as long: a codebook that is the array's own."""
    signs: Signs | None = None
    """Signs of columns, where some are -1."""
    repeats: CallTable = field(default_factory=CallTable, compare=False, repr=False)
    """Products that were checked, by what their operands look like."""
    matrices: dict[int, Fragments] = field(default_factory=dict, compare=False, repr=False)
    """Matrices of a stack that is multiplied one by one: those that were asked for, in the same memory."""

    @property
    def tiles(self) -> tuple[int, int]:
        """Row tiles of all matrices, and the tiles of each along K."""
        *lead, n, k = self.shape
        return plan.tiles(prod(lead), n, k)

    @cached_property
    def weight(self) -> problem.Weight:
        """The weight as products plan by it."""
        masked = kernels_of(self.fmt).masked
        scale = self.fmt.tensor_scale / (masked.unit if masked else 1)
        signed = self.signs is not None
        return problem.Weight(self.fmt.for_kernels, self.shape, self.half, self.lift, scale, signed)

    @property
    def exl3_vectors(self) -> Exl3Parts:
        """Factors of columns and rows of EXL3 matrices."""
        assert isinstance(self.vectors, Exl3Parts)
        return self.vectors

    @cached_property
    def signs_address(self) -> int:
        """Device address of the signs of columns, as rows of x take them, or 0."""
        return 0 if self.signs is None else int(self.signs.bits.data.ptr)

    @cached_property
    def addresses(self) -> plan.Planes:
        """Device addresses of the planes; factors of rows are the row plane of EXL3 matrices."""
        start = self.buffer.data.ptr
        planes = plan.Planes(*(start + plane for plane in self.planes))
        return planes._replace(row=self.exl3_vectors.svh.data.ptr) if kernels_of(self.fmt).turned else planes


def to_fragments(blocks: Any, fmt: Format, shape: tuple[int, ...]) -> Fragments:
    """Storage bytes of an array (..., N, K) to the fragment layout."""
    check.require_columns(shape[-1], plan.MOST_COLUMNS)
    if fmt.whole_matrices:
        made: Fragments = of_matrices(fmt).to_fragments(blocks, fmt, shape)
        return made
    cupy = device.cupy()
    stream = cupy.cuda.get_current_stream()
    check.require_preparable(stream)
    own, kernels = fmt.for_kernels, kernels_of(fmt)
    blocks = kernels.to_kept(blocks, cupy)
    *lead, n, row_bytes = blocks.shape
    k = row_bytes // own.block_bytes * own.block_size
    tiles = plan.tiles(prod(lead), n, k)
    planes, size = plan.layout(own).offsets(*tiles)
    made = Fragments(fmt, (*lead, n, k), cupy.empty(size, np.uint8), planes)
    if not prod(tiles):
        return made
    found = nothing_found()
    fill(made, blocks, found)
    seen = _Found.of(buffers.read(found))
    if plan.row_factors(own):
        if isfinite(seen.greatest) and not seen.unfit:
            return replace(made, kept=_lost(made, blocks)) if seen.lost else made
        made = replace(made, half=False)
        fill(made, blocks, found)
        stream.synchronize()
        return made
    if kernels.scaling is Scaling.E8M0:
        # Sums in units of 2^(e - 127) are 2^-14 times their own, for E2M1 numbers' bits, times 2^16.
        lift, kept = 16 - 14 + seen.added, _first_bytes(blocks, own) if seen.lost else None
        return replace(made, half=not seen.unfit, lift=lift, offset=seen.added, kept=kept)
    if kernels.scaling is Scaling.E4M3:  # E2M1 numbers are 2^-14 times their own, scales 2^7 times
        return replace(made, lift=-7, kept=_first_bytes(blocks, own) if seen.greatest else None)
    half, lift = (_masked_lift if kernels.masked else _table_lift)(seen.greatest, seen.least)
    all_in_all = lift + (_MASKED if kernels.masked else _codebook_lift(fmt))
    return replace(made, half=half, lift=all_in_all, values=tables(fmt).lifted(lift))


def of_matrices(fmt: Format) -> Any:
    """The module for formats that store whole matrices, of this kind; NotImplementedError where GPUs know
    none."""
    from . import exl3 as cuda_exl3, trellis as cuda_trellis

    return cuda_exl3 if kernels_of(fmt).walks else cuda_trellis


def nothing_found() -> Any:
    """Zeros, in which `fill` leaves what `_Found` has."""
    return device.cupy().zeros(_NUMBERS, np.uint32)


def fill(made: Fragments, blocks: Any, found: Any) -> None:
    """Write the planes of storage bytes as kernels read them."""
    at, step = made.addresses, _step("to_fragments", made)
    ends = (np.int64(blocks.nbytes), np.uint64(at.row), np.int32(step.shared), found)
    jit.launch(step, blocks, *_operands(made), *ends)
    if kernels_of(made.fmt).scaling is Scaling.E8M0:
        nbytes = prod(made.tiles) * plan.layout(made.fmt.for_kernels).scale
        jit.launch(plan.center(nbytes), np.uint64(at.scale), np.int64(nbytes), found)


_NUMBERS = 8
"""Numbers that kernels leave: as many as kernels/formats/seen.cuh names, and one more."""


class _Found(NamedTuple):
    """What kernels have found out about a weight, in the order of kernels/formats/seen.cuh."""

    greatest: float
    """The greatest magnitude that a weight may have, or what the format has in its place."""
    least: float
    """The least such bound of a block that is not 0; infinity where there is none."""
    lost: bool
    """Whether scales have lost bits."""
    unfit: bool
    """Whether float16 does not hold the weights."""
    added: int
    """What was added to scales that are exponents."""

    @classmethod
    def of(cls, numbers: Any) -> _Found:
        greatest, inverted, lost, unfit, added, *_ = numbers
        least = float((~inverted).view(np.float32))
        return cls(
            float(greatest.view(np.float32)),
            inf if isnan(least) else least,
            bool(lost),
            bool(unfit),
            int(added.view(np.int32)),
        )


_LARGEST_HALF = float(np.finfo(np.float16).max)
_LIFT, _LIFTED_UP_TO = 11, 31.0
"""Where the weights of a codebook are small, products multiply them by 2^11, for which they must not be above
31, since float16 loses bits of small numbers. (Integers have factors of rows.)"""
_MOST_LIFT = 15
"""The largest power of two that is a float16 number."""
_SMALL, _SMALL_BLOCK = 2.0**-5, 2.0**-13
"""Magnitudes below which all weights are small; or all of a block, of which float16 would lose what
counts."""


def _table_lift(greatest: float, least: float) -> tuple[bool, int]:
    """Whether float16 can hold weights of a codebook, given blocks' peaks, and by what power of two they are
    lifted."""
    lifted = greatest <= _LIFTED_UP_TO and (greatest < _SMALL or least < _SMALL_BLOCK)
    return greatest <= _LARGEST_HALF and (lifted or least >= _SMALL_BLOCK), _LIFT if lifted else 0


_MASKED = 15 - 4 - 24
"""Exponent for what masks make: scales are 2^-4 times their own, and taken 2^15 times, codes 2^-24 times."""
_STEP = 5
"""Lifts of what masks make differ by so much, where they need not be finer: weights alike have the same, as a
mixture's gate and up must for one launch."""


def _masked_lift(greatest: float, least: float) -> tuple[bool, int]:
    """Whether float16 can hold weights that masks make, given blocks' peaks, and by what power of two they
    are lifted. They may be lifted as far as E4M4 scales leave room, and float16 holds them if the larger
    magnitude of the least block, about 2^-2.5 before, is 2^-15 or more."""
    room = next((lift for lift in range(_MOST_LIFT, 0, -1) if greatest <= e4m4.LARGEST / 2**lift), 0)
    step = room // _STEP * _STEP
    lift = next((lift for lift in (step, room) if least * 2.0 ** (lift - 2.5) >= 2.0**-15), None)
    return lift is not None, step if lift is None else lift


class Kept(NamedTuple):
    """Scales as blocks have them: first bytes of some blocks, one after the other, or of all."""

    blocks: Any
    """Numbers of the blocks."""
    scales: Any


def _lost(made: Fragments, blocks: Any) -> Kept:
    """The scales that do not come back from fragments with all their bits."""
    cupy, fmt, kernels = device.cupy(), made.fmt.for_kernels, kernels_of(made.fmt)
    first = kernels.scale_bytes(fmt.block_size) + kernels.group_bytes
    scales = blocks.reshape(-1, fmt.block_bytes)[:, :first]
    numbers = cupy.flatnonzero(
        (_blocks(made).reshape(-1, fmt.block_bytes)[:, : scales.shape[1]] != scales).any(axis=1)
    )
    kept = Kept(numbers, scales[numbers])
    cupy.cuda.get_current_stream().synchronize()  # other streams may use it
    return kept


def _first_bytes(blocks: Any, fmt: Format) -> Kept:
    """The scales of all blocks, which are their first bytes."""
    first = kernels_of(fmt).scale_bytes(fmt.block_size)
    scales = blocks.reshape(-1, fmt.block_bytes)[:, :first].copy()
    device.cupy().cuda.get_current_stream().synchronize()  # other streams may use it
    return Kept(slice(None), scales)


def from_fragments(fragments: Fragments) -> Any:
    """The storage blocks, exactly as they were."""
    if fragments.fmt.whole_matrices:
        return of_matrices(fragments.fmt).from_fragments(fragments)
    fmt, blocks = fragments.fmt, _blocks(fragments)
    if fragments.kept is not None:
        numbers, scales = fragments.kept
        blocks.reshape(-1, fmt.for_kernels.block_bytes)[numbers, : scales.shape[1]] = scales
    return kernels_of(fmt).from_kept(blocks, device.cupy())


def _blocks(fragments: Fragments) -> Any:
    """Blocks as kernels have them, with what has become of their scales."""
    fmt, (*lead, n, k) = fragments.fmt.for_kernels, fragments.shape
    blocks = device.cupy().empty((*lead, n, fmt.row_bytes(k)), np.uint8)
    if blocks.size:
        ends = (np.uint64(fragments.addresses.row), np.int32(fragments.offset))
        jit.launch(_step("from_fragments", fragments), blocks, *_operands(fragments), *ends)
    return blocks


def _step(entry: str, fragments: Fragments) -> plan.Plan:
    """How a weight is brought to the fragment layout, or back."""
    return plan.repack(fragments.fmt.for_kernels, entry, *fragments.tiles, jit.gpu(), fragments.half)


def _operands(fragments: Fragments) -> tuple[Any, ...]:
    """Operands that both directions share: rows, blocks of a row, and addresses of the planes of tiles."""
    fmt, (*_, n, k) = fragments.fmt.for_kernels, fragments.shape
    planes = (np.uint64(address) for address in fragments.addresses[:-1])
    return np.int32(n), np.int32(k // fmt.block_size), *planes
