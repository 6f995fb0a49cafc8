"""Trellis weights on the GPU: to and from numbers, rows, and the layout that products read."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from math import frexp, ldexp, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, device, plan
from ..formats.base import sides
from ..formats.trellis import LEAST_HALF, Parts, Trellis, random_signs
from ..formats.trellis_search import CANDIDATES, Search, search_of
from . import buffers, jit, problem
from .fragments import Fragments

NO_BAD_ROW = np.iinfo(np.uint64).max


def _sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Matrices, N and K of a shape; a vector is a matrix of one row."""
    return prod(shape[:-2]), *sides(shape)


def _sizes(matrices: int, n: int, k: int) -> tuple[Any, ...]:
    return np.int64(matrices), np.int32(n), np.int32(k)


# Numbers


def _levels(search: Search, bits: int) -> bytes:
    """`struct Levels` of kernels/ops/quantize_trellis.cu."""
    level, middle = np.zeros(16, np.float32), np.full(16, np.inf, np.float32)
    level[: len(search.levels)], middle[: len(search.middles)] = search.levels, search.middles
    order = sum(int(index) << 4 * i for i, index in enumerate(search.order))
    numbers = np.concatenate([level, middle, CANDIDATES, [search.largest]]).astype(np.float32)
    return numbers.tobytes() + np.int32(len(search.candidates)).tobytes() + np.uint64(order).tobytes()


class Nearest:
    """Indices and scales of groups, as the reference finds them, for `formats.trellis_search.fit`."""

    def __init__(self, fmt: Trellis) -> None:
        self._fmt = fmt.for_kernels
        self._given: tuple[Any, Any] = (None, None)
        self._there: tuple[Any, Any] = (None, None)

    def __call__(self, groups: Any, h: Any, grid: Any, start: Any = None) -> tuple[Any, Any]:
        cupy = device.cupy()
        if self._given[0] is not groups or self._given[1] is not h:
            self._given = groups, h
            self._there = tuple(cupy.asarray(np.ascontiguousarray(a, np.float32)) for a in (groups, h))
        codes, scales = cupy.empty(groups.shape, np.uint8), cupy.empty(len(groups), np.float32)
        start = None if start is None else cupy.asarray(start)
        step = plan.trellis.nearest(self._fmt, len(groups))
        levels = _levels(search_of(grid), self._fmt.bits)
        jit.launch(step, *self._there, start, np.int64(len(groups)), codes, scales, levels)
        return codes.get(), scales.get()


def quantize(x: Any, fmt: Trellis, signs: tuple[Any, Any] | None = None, moments: Any = None) -> Any:
    """Storage bytes of floats (..., N, K); weights are checked (one synchronisation).

    `signs` are su [K] and sv [N], drawn by default; `moments` [K] the importance of columns.
    """
    cupy, own = device.cupy(), fmt.for_kernels
    assert fmt.grid is not None
    matrices, n, k = _sides(x.shape)
    blocks = cupy.zeros(fmt.stored(x.shape), np.uint8)
    stored = fmt.parts(blocks, x.shape)
    su, sv = signs or random_signs(n, k)
    stored.su[...], stored.sv[...] = cupy.asarray(su), cupy.asarray(sv)
    if x.size == 0:
        return blocks
    rows = x.reshape(-1, k)
    strides = tuple(np.int64(stride // rows.itemsize) for stride in rows.strides)
    h = None if moments is None else cupy.asarray(fmt.importance(moments))
    bad = cupy.full(2, NO_BAD_ROW, np.uint64)
    given = (rows, np.int32(problem.DTYPES[rows.dtype]), *strides, *_sizes(matrices, n, k), h, blocks, bad)
    levels = _levels(search_of(fmt.grid), fmt.bits)
    jit.launch(plan.trellis.quantize(own, matrices, n, k), *given, levels)
    row, scale = (int(first) for first in bad.get())
    if row < NO_BAD_ROW:
        check.require_quantizable(cupy.asnumpy(rows[row]).astype(np.float32)[None], fmt, row, x.shape)
    if scale < NO_BAD_ROW:
        check.require_trellis_scales(np.float32(np.inf), fmt)
    return blocks


def dequantize(blocks: Any, fmt: Trellis, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Numbers (..., N, K) of storage bytes."""
    assert fmt.codebook is not None
    out = device.cupy().empty(shape, dtype)
    if out.size:
        matrices, n, k = _sides(shape)
        grid = np.zeros(16, np.float32)
        grid[: 1 << fmt.bits] = fmt.codebook
        step = plan.trellis.dequantize(fmt.for_kernels, matrices, n, k)
        to = (out, np.int32(problem.DTYPES[dtype]), grid.tobytes())
        jit.launch(step, buffers.records(blocks), *_sizes(matrices, n, k), *to)
    return out


def select(
    fmt: Trellis, blocks: Any, shape: tuple[int, ...], chosen: NDArray[np.int64], result: tuple[int, ...]
) -> Any:
    """Storage bytes of an array of shape `result`, whose rows are those of these numbers: `chosen`."""
    cupy = device.cupy()
    _, n, k = _sides(shape)
    sources = buffers.records(blocks).reshape(-1, blocks.shape[-1])
    out = cupy.zeros(fmt.stored(result), np.uint8)
    targets = out.reshape(-1, out.shape[-1])
    rows = chosen.reshape(len(targets), chosen.shape[-1] if chosen.ndim else 1)
    su = fmt.parts(sources, (len(sources), n, k)).su
    for target, ids in zip(targets, rows, strict=True):
        if len(ids) == 0:
            fmt.parts(target, (0, k)).su[...] = 1
            continue
        homes = np.unique(ids // n)
        if len(homes) > 1:
            check.require_same_signs(su[homes])
        if len(ids) == n and (ids == homes[0] * n + np.arange(n)).all():
            target[...] = sources[homes[0]]
            continue
        step = plan.trellis.take_rows(fmt.for_kernels, len(ids), k)
        sizes = (np.int32(n), np.int32(k))
        jit.launch(step, sources, *sizes, cupy.asarray(ids), np.int32(len(ids)), target)
    return out


# The layout of the matrix kernels


@dataclass
class Signs:
    """Signs of columns as bits that float16 numbers are changed by: uint16 [..., K filled up to 8s].

    They compare by `digest`, for which nothing synchronises.
    """

    bits: Any = field(compare=False)
    words: Any = field(compare=False)
    """Signs as kernels take them that give them to W (kernels/core/column_signs.cuh)."""
    differ: bool = field(compare=False)
    """Whether the matrices of a stack have different signs."""
    digest: bytes
    _expanded: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False)

    def address(self, of: str) -> int:
        """Device address of the signs that a kernel gives to "x" or to "W", or 0."""
        array = {"x": self.bits, "W": self.words, "": None}[of]
        return buffers.pointer(array)

    def over(self, lead: tuple[int, ...]) -> Any:
        """The signs' bits for matrices with these leading axes, one after the other."""
        if not self.differ or lead == self.bits.shape[:-1]:
            return self.bits
        if lead not in self._expanded:
            cupy = device.cupy()
            stream = cupy.cuda.get_current_stream()
            check.require_preparable(stream)
            whole = cupy.ascontiguousarray(cupy.broadcast_to(self.bits, (*lead, self.bits.shape[-1])))
            stream.synchronize()  # other streams may use it
            self._expanded[lead] = whole
        return self._expanded[lead]


_WORDS_AHEAD = 64
"""Words of signs behind the last, that a product asks for without looking at them."""
_NOTHING_FOUND = np.array([0, 0xFFFFFFFF, 0, 0], np.uint32)
"""What `plan.trellis.survey` begins with."""
_TOP = 40
"""Exponent of scales that are no float16 numbers: below 2^40 sums of products do not overflow."""
_LIFTS = 126
"""Exponents of powers of two that are normal numbers, as their inverses are."""
_LEAST_NORMAL = 2.0**-126


class _Surveyed(NamedTuple):
    """What `plan.trellis.survey` has found out about matrices, in the order of
    kernels/ops/repack_trellis.cu."""

    greatest: float
    """The greatest magnitude of a scale."""
    least: float
    """The least magnitude of a scale that is not 0; 0 where there is none."""
    negative: bool
    """Whether any columns have the sign -1."""
    differ: bool
    """Whether matrices have different signs of columns."""

    @classmethod
    def of(cls, numbers: Any) -> _Surveyed:
        greatest, least = map(float, numbers[:2].view(np.float32))
        return cls(greatest, least if greatest else 0.0, *map(bool, numbers[2:]))


def _scale_lift(greatest: float, least: float, fmt: Trellis) -> tuple[bool, int]:
    """Whether float16 holds all weights with all their bits, and the power of two for their scales then."""
    assert fmt.half_levels is not None
    _, grid_lift, least_level, largest_level = fmt.half_levels
    (_, top), (_, top_level) = frexp(greatest), frexp(largest_level)
    lift = 15 - top_level - top
    bottom = ldexp(min(least, greatest), lift)
    if min(bottom, bottom * least_level) >= LEAST_HALF and abs(lift + grid_lift) <= _LIFTS:
        return True, lift
    return not greatest, min(max(_TOP - top, -_LIFTS - grid_lift), _LIFTS - grid_lift)


def to_fragments(blocks: Any, fmt: Trellis, shape: tuple[int, ...]) -> Fragments:
    """Storage bytes of an array (..., N, K) to the fragment layout."""
    cupy = device.cupy()
    stream = cupy.cuda.get_current_stream()
    check.require_preparable(stream)
    assert fmt.half_levels is not None
    own, (matrices, n, k) = fmt.for_kernels, _sides(shape)
    blocks, sizes = buffers.records(blocks), _sizes(matrices, n, k)
    planes, size = plan.layout(own).offsets(*plan.tiles(matrices, n, k))
    place = (fmt, shape, cupy.empty(size, np.uint8), planes)
    stored = fmt.parts(blocks, shape)
    kept = Parts(None, None, stored.su.copy(), stored.sv.copy())
    values = cupy.asarray(fmt.half_levels.levels)
    known: dict[str, Any] = {"values": int(values.data.ptr), "held": values, "vectors": kept}
    if prod(shape) == 0:
        return Fragments(*place, **known)
    found = cupy.asarray(_NOTHING_FOUND)
    jit.launch(plan.trellis.survey(own, matrices, n, k), blocks, *sizes, found)
    seen = _Surveyed.of(buffers.read(found))
    half, lift = _scale_lift(seen.greatest, min(seen.greatest, seen.least), fmt)  # NaN if the greatest is
    if seen.greatest and ldexp(seen.least, lift) < _LEAST_NORMAL:
        known["vectors"] = kept._replace(scales=stored.scales.copy())
    if seen.negative:
        pitch = k + -k % 8
        bits = cupy.empty((*shape[:-2], pitch), np.uint16)
        words = cupy.empty(bits.size // 2 + _WORDS_AHEAD, np.uint32)
        step = plan.trellis.sign_bits(own, bits.size)
        jit.launch(step, blocks, *sizes, bits, np.int32(pitch), words)
        known["signs"] = Signs(bits, words, seen.differ, sha256(kept.su.get(stream)).digest())
    made = Fragments(*place, half, lift + fmt.half_levels.lift, **known)
    fill(made, blocks)
    stream.synchronize()  # other streams may use it
    return made


def fill(made: Fragments, blocks: Any) -> None:
    """Write the planes of storage bytes, from 16 bytes on."""
    _repack("to_fragments", made, blocks)


def from_fragments(fragments: Fragments) -> Any:
    """The storage bytes, exactly as they were but for what filled the records up."""
    fmt, shape, own = fragments.fmt, fragments.shape, fragments.vectors
    assert isinstance(fmt, Trellis)
    assert isinstance(own, Parts)
    assert fmt.half_levels is not None
    cupy = device.cupy()
    if prod(shape) == 0:
        blocks = cupy.zeros(fmt.stored(shape), np.uint8)
        stored = fmt.parts(blocks, shape)
        stored.su[...], stored.sv[...] = own.su, own.sv
        return blocks
    blocks = cupy.empty(fmt.stored(shape), np.uint8)
    _repack("from_fragments", fragments, blocks, own.su, own.sv)
    if own.scales is not None:
        fmt.parts(blocks, shape).scales[...] = own.scales
    return blocks


def _repack(entry: str, fragments: Fragments, blocks: Any, *signs: Any) -> None:
    assert isinstance(fragments.fmt, Trellis)
    assert fragments.fmt.half_levels is not None
    matrices, n, k = _sides(fragments.shape)
    lift = fragments.lift - fragments.fmt.half_levels.lift
    planes = (np.uint64(address) for address in fragments.addresses[:-1])
    step = plan.trellis.repack(fragments.fmt.for_kernels, entry, matrices, n, k)
    jit.launch(step, blocks, *_sizes(matrices, n, k), *planes, np.int32(lift), *signs)
