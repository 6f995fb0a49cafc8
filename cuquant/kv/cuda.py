"""The backend of caches on the GPU: attention by kernels/ops/attention.cu and importance.cu; it takes tokens
by appender.py and moves them by mover.py."""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import check, device
from ..cuda import buffers, jit
from ..cuda.problem import DTYPES
from ..plan import MOST_BLOCKS, Gpu, Plan, attention as plan
from .appender import Appender
from .mover import move

if TYPE_CHECKING:
    from ..repeats import Repeat
    from .attention import Attention
    from .cache import KVCache

__all__ = ["Appender", "attend", "attend_again", "move", "queries_at_once"]

LOG2_E = 1.4426950408889634
_PLACES = struct.Struct("<11q")
_NUMBERS = struct.Struct("<11q10iffiiiii4x")
"""Layout of the numbers behind the buckets: `Attention` in kernels/attention/cache.cuh, whose size is a
multiple of 8."""
_MASKS = {**DTYPES, np.dtype(bool): 3}


class _Given(NamedTuple):
    """What an attention is planned by."""

    q: tuple[int, ...]
    q_strides: tuple[int, ...]
    q_dtype: np.dtype[Any]
    out_strides: tuple[int, ...]
    out_dtype: np.dtype[Any]
    mask: tuple[int, tuple[int, ...], np.dtype[Any]] | None
    """Slots, strides and dtype of the mask; None where there is none."""
    positions: bool
    """Whether positions are given."""
    causal: bool
    scale: float
    kv_heads: int
    bits: tuple[int, ...]
    rotate: bool
    track: bool
    even: bool
    """Whether sequences have the same lengths, as far as the host knows."""
    gpu: Gpu


class _Planned(NamedTuple):
    """An attention, or that of some of its queries, but for where everything lies."""

    starts: tuple[int, ...]
    """Where these begin, in bytes from the call's: queries, results, the mask, positions."""
    launch: plan.Launch
    importance: Plan | None
    size: int
    """Bytes of scratch memory."""
    pieces: tuple[int, ...]
    """Where the pieces of scratch memory start, in bytes."""
    counters: int
    """Counters that blocks raise where they share a sequence, if `merge` goes by them."""
    numbers: bytes


@lru_cache(maxsize=1024)
def _planned(given: _Given) -> tuple[_Planned, ...]:
    """The launches, one after the other."""
    batch, all_queries, heads, dim = given.q
    masked = 2 if given.mask is not None else int(given.causal and (all_queries > 1 or given.positions))
    halves = _halves(given.q_dtype)
    shape = plan.Shape(batch, all_queries, heads, given.kv_heads, dim, given.bits, masked, halves)
    step = plan.queries_at_once(shape, given.gpu.capability, given.track)
    return tuple(
        _of_some(given, shape._replace(q_len=min(step, all_queries - first)), first)
        for first in range(0, all_queries, step)
    )


def _of_some(given: _Given, shape: plan.Shape, first: int) -> _Planned:
    """A launch for as many queries as the shape has, from the call's `first` on."""
    batch, q_len, heads, dim = shape.batch, shape.q_len, shape.heads, shape.head_dim
    multiprocessors = given.gpu.multiprocessors
    launch = plan.attention(shape, given.gpu.capability, multiprocessors, given.even)
    started = [launch.attention] if launch.alone else [launch.attention, launch.merge]
    check.require_launch_size(max(each.grid[1] for each in started), MOST_BLOCKS, given.q)
    rows, parts, shares = heads * q_len, launch.merge.grid[2], 0 if launch.alone else launch.shares
    sizes: tuple[int, ...] = (shares * rows * (dim + 8) * 4, batch * 8)
    if given.track:
        sizes += (batch * rows * dim * 4, batch * rows * 8)
    *pieces, size = accumulate((ceil(size / 256) * 256 for size in sizes), initial=0)
    columns, mask_number, mask_strides = 0, -1, _elements((0,) * 4, check.FLOAT16)
    if given.mask is not None:
        columns, strides, dtype = given.mask
        mask_number, mask_strides = _MASKS[dtype], _elements(strides, dtype)
    numbers = _NUMBERS.pack(
        *_elements(given.q_strides, given.q_dtype)[:3],
        *_elements(given.out_strides, given.out_dtype),
        *mask_strides,
        *(batch, q_len, heads, given.kv_heads, DTYPES[given.q_dtype], DTYPES[given.out_dtype]),
        *(mask_number, columns, int(given.causal), int(given.rotate)),
        given.scale * LOG2_E,
        launch.finest,
        launch.streams,
        heads // given.kv_heads,
        parts,
        given.q[1],
        given.q[1] - first,
    )
    importance = plan.importance(batch, dim, shape.rows, multiprocessors) if given.track else None
    counters = batch * rows * parts if launch.counted else 0
    mask_step = 0 if given.mask is None else given.mask[1][2]
    starts = tuple(first * step for step in (given.q_strides[1], given.out_strides[1], mask_step, 4))
    return _Planned(starts, launch, importance, size, tuple(pieces), counters, numbers)


def _elements(strides: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, ...]:
    return tuple(stride // dtype.itemsize for stride in strides)


def queries_at_once(cache: KVCache, q: Any) -> int:
    """Queries of each sequence, the last tokens, that meet its tokens together, of those like these (batch,
    q_len, heads, head_dim). More of them in a call read all tokens again, also those that they do not see."""
    batch, q_len, heads, dim = q.shape
    shape = plan.Shape(batch, q_len, heads, cache.n_kv_heads, dim, cache.bits, 1, _halves(q.dtype))
    return plan.queries_at_once(shape, jit.gpu().capability, cache.track_attention)


def _halves(dtype: np.dtype[Any]) -> int:
    """Float16 numbers that a query's channel becomes."""
    return 2 if dtype == np.float32 else 1


def attend(p: Attention, out: Any) -> tuple[_Planned, ...] | None:
    """Write the attention of every query to `out` (batch, q_len, heads, head_dim).

    Returns how it is done for others like it; None where q was copied.
    """
    cache, q, mask = p.cache, p.q, p.mask
    cupy, slots = device.cupy(), cache._next_slots
    here = cupy.cuda.runtime.getDevice()
    if not (
        q.data.device_id == out.data.device_id == slots.data.device_id == here
        and (mask is None or mask.data.device_id == here)
    ):
        check.require_one_device(q=q, mask=mask, out=out, cache=slots)
    cache._check_appended()
    copied = q.strides[-1] != q.itemsize
    if copied:
        check.require_memory("q has gaps along its last axis, and is copied", "pass a contiguous array")
        q = cupy.ascontiguousarray(q)
    shown = None if mask is None else (mask.shape[-1], mask.strides, mask.dtype)
    ends = (shown, p.positions is not None, bool(p.causal), p.scale, cache.n_kv_heads, cache.bits)
    flags = (cache.rotate, cache.track_attention, cache._appender.even, jit.gpu())
    how = _planned(_Given(q.shape, q.strides, q.dtype, out.strides, out.dtype, *ends, *flags))
    _start(how, cache, q.data.ptr, out.data.ptr, buffers.pointer(mask), buffers.pointer(p.positions))
    return None if copied else how


def attend_again(cache: KVCache, known: Repeat, places: list[int], out: Any) -> Any:
    """Attention like one before, of queries at these places, to `out` or, if that is None, to a new array;
    returns it."""
    cache._check_appended()
    q, _, to = places
    if out is None:
        out = known.result()
        to = out.data.ptr
    _start(known.work, cache, q, to)
    return out


def _start(
    launches: tuple[_Planned, ...], cache: KVCache, q: int, out: int, mask: int = 0, positions: int = 0
) -> None:
    """Start the launches, with operands at these addresses."""
    for how in launches:
        of_q, of_out, of_mask, of_positions = how.starts
        _launch(
            how,
            cache,
            q + of_q,
            out + of_out,
            mask and mask + of_mask,
            positions and positions + of_positions,
        )


def _launch(how: _Planned, cache: KVCache, q: int, out: int, mask: int, positions: int) -> None:
    """Start one. Where the buckets lie is asked each time."""
    appender: Any = cache._appender  # a GPU's
    buckets = appender.buckets.packed(cache.tiers)
    with appender.lock, buffers.scratch() as scratch:
        start = scratch.take(how.size)
        left, shares, *tracked = [start + piece for piece in how.pieces]
        argument = buckets.tiers + _PLACES.pack(
            *(q, out, mask, positions),
            *(cache._next_slots.data.ptr, buffers.pointer(cache.key_scales)),
            *(left, scratch.flags(how.counters), shares, *(tracked or (0, 0))),
        )
        argument += how.numbers
        maps = b""
        offsets: tuple[int, ...] = (0,)
        if how.launch.boxes or how.launch.direct:
            argument = argument.ljust(len(argument) + -len(argument) % 64, b"\0")
            maps, offsets = buckets.maps(cache.tiers, how.launch.direct), (0, len(argument))
        with scratch.restored():
            jit.launch_packed(how.launch.attention, argument + maps, offsets)
            if not how.launch.alone:
                jit.launch_packed(how.launch.merge, argument)
        if how.importance is not None:
            jit.launch_packed(how.importance, argument)
