"""A cache on the GPU: attention and appending, by kernels/ops/attention.cu, importance.cu and append.cu."""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import buffers, check, device, jit
from ..problem import DTYPES
from . import codes, plan
from .codes import BITS
from .tiers import Tier, held_of, rooms_of

if TYPE_CHECKING:
    from .attention import Attention
    from .cache import KVCache

LOG2_E = 1.4426950408889634
_TIER = struct.Struct("<9q")
_ABSENT = _TIER.pack(*(0,) * 9)
_ATTENTION = struct.Struct("<11q11q11ifi4x")
_APPEND = struct.Struct("<11q6q9i4x")
_MASKS = {**DTYPES, np.dtype(bool): 3}
_WORDS = 1024
"""Of the host's memory, that are taken at a time."""


@cache
def _multiprocessors(device_id: int) -> int:
    return int(device.cupy().cuda.Device(device_id).attributes["MultiProcessorCount"])


def attend(p: Attention, out: Any) -> None:
    """Write the attention of every query to `out` (batch, q_len, heads, head_dim)."""
    cache, q = p.cache, p.q
    cache.check_appended()
    batch, q_len, heads, dim = q.shape
    if q.strides[-1] != q.itemsize:
        q = device.cupy().ascontiguousarray(q)
    masked = p.mask is not None or (p.causal and (q_len > 1 or p.positions is not None))
    parts = 1 if q.dtype == check.FLOATS[0] else 2
    shape = plan.Shape(batch, q_len, heads, cache.n_kv_heads, dim, cache.bits, masked, parts)
    multiprocessors = _multiprocessors(device.cupy().cuda.runtime.getDevice())
    launch = plan.attention(shape, jit.capability(), multiprocessors)
    rows = heads * q_len
    blocks = launch.attention.grid[0]
    sizes: tuple[int, ...] = (blocks * rows * dim * 4, blocks * rows * 8, batch * 8)
    if cache.track_attention:
        sizes += (batch * rows * dim * 4, batch * rows * 8)
    with buffers.scratch() as scratch:
        places = _places(scratch, sizes)
        kept = places[3:] or (0, 0)
        argument = b"".join([_tier(cache.tiers.get(bits)) for bits in BITS]) + _ATTENTION.pack(
            *(
                q.data.ptr,
                out.data.ptr,
                buffers.pointer(p.mask),
                buffers.pointer(p.positions),
                cache.next_slots.data.ptr,
            ),
            *(buffers.pointer(cache.key_scales), *places[:3], *kept),
            *buffers.element_strides(q)[:3],
            *buffers.element_strides(out),
            *((0,) * 4 if p.mask is None else buffers.element_strides(p.mask)),
            *(batch, q_len, heads, cache.n_kv_heads, DTYPES[q.dtype], DTYPES[out.dtype]),
            *((-1, 0) if p.mask is None else (_MASKS[p.mask.dtype], p.mask.shape[-1])),
            *(int(p.causal), int(cache.rotate), launch.budget),
            p.scale * LOG2_E,
            launch.least,
        )
        if launch.boxes:
            maps = b"".join(_maps(cache.tiers[bits], batch, cache.n_kv_heads, dim) for bits in cache.bits)
            start = len(argument) + -len(argument) % 64
            jit.launch_packed(launch.attention, argument.ljust(start, b"\0") + maps, (0, start))
        else:
            jit.launch_packed(launch.attention, argument)
        jit.launch_packed(launch.merge, argument)
        if cache.track_attention:
            jit.launch_packed(plan.importance(batch, dim, multiprocessors), argument)


def _places(scratch: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Addresses of pieces of scratch memory of these bytes."""
    padded = [ceil(size / 256) * 256 for size in sizes]
    start = scratch.take(sum(padded))
    return tuple(start + sum(padded[:i]) for i in range(len(padded)))


def _tier(tier: Tier | None) -> bytes:
    if tier is None:
        return _ABSENT
    b = tier.buffers
    arrays: tuple[Any, ...] = (
        b.k_qx,
        b.v_qx,
        b.k_scale,
        b.v_scale,
        b.token_ids,
        b.global_slots,
        b.importance,
        tier.lengths,
    )
    return _TIER.pack(*(a.data.ptr for a in arrays), tier.room)


def _maps(tier: Tier, batch: int, heads: int, dim: int) -> bytes:
    """Maps of keys, values, and scales of keys and values: `Maps` in kernels/attention/boxes.cuh."""
    b = tier.buffers
    arrays: tuple[Any, ...] = (b.k_qx, b.v_qx, b.k_scale, b.v_scale)
    return _encoded(tuple(a.data.ptr for a in arrays), tier.bits, batch * tier.room, heads, dim)


@lru_cache(maxsize=4096)
def _encoded(addresses: tuple[int, ...], bits: int, tokens: int, heads: int, dim: int) -> bytes:
    step, row = plan.box_tokens(bits), heads * dim * bits // 8
    box = (64, step, plan.BOX_HEADS * dim * bits // 1024, 1, 1)
    lines = (64, tokens, row // 128, 1, 1), (row, 128, row, row), box
    if heads == plan.BOX_HEADS:
        scales = (heads * tokens, 1, 1, 1, 1), (16,) * 4, (heads * step, 1, 1, 1, 1)
    else:
        scales = (heads, tokens, 1, 1, 1), (heads * 2,) * 4, (plan.BOX_HEADS, step, 1, 1, 1)
    codes_maps = [jit.encode_map(address, *lines) for address in addresses[:2]]
    if bits == 16:
        return b"".join(codes_maps) + bytes(2 * 128)
    return b"".join(codes_maps + [jit.encode_map(address, *scales, False) for address in addresses[2:]])


_words: list[NDArray[np.int32]] = []
_pages: list[Any] = []


def _host_word() -> NDArray[np.int32]:
    """A zero in memory of the host that kernels can write, as an array [1].

    It is not given to anybody again: an append may still be running when its cache is gone.
    """
    if not _words:
        _pages.append(device.cupy().cuda.alloc_pinned_memory(4 * _WORDS))
        page = np.frombuffer(_pages[-1], np.int32, _WORDS)
        page[:] = 0
        _words.extend(page[i : i + 1] for i in range(_WORDS))
    return _words.pop()


class Appender:
    """How a cache on the GPU takes tokens: one launch that neither synchronises nor needs the host's memory.

    The host knows lengths that the buckets have at least: exactly, but for what graphs append and what device
    arrays say. So a full cache is an error before the launch. Else the kernel finds that tokens do not fit,
    and leaves word in memory of the host, which the next call reads.

    It does not refer to its cache, whose buffers would then not be freed with the last reference to it.
    """

    def __init__(self, cache: KVCache) -> None:
        self._ticket = device.cupy().zeros(1, np.uint32)
        self._refused = _host_word()
        self._held = {bits: np.zeros(cache.batch, np.int64) for bits in cache.bits}
        self._slots = np.zeros(cache.batch, np.int64)
        """Of `next_slots`, as far as the host knows."""

    def read(self, cache: KVCache) -> None:
        """Take the lengths from the GPU."""
        self._held = held_of(cache.tiers)
        self._slots = device.as_numpy(cache.next_slots).astype(np.int64)

    def check(self, cache: KVCache) -> None:
        """ValueError if an append that could not raise was refused since."""
        refused = int(self._refused[0])
        if refused:
            self._refused[0] = 0
            check.appended(refused - 1, cache.capacity)

    def known_slots(self, cache: KVCache) -> int:
        """Slots given out in the longest sequence, as far as the host knows."""
        return int(self._slots.max())

    def append(self, cache: KVCache, k: Any, v: Any, bits: Any, token_ids: Any, lengths: Any) -> None:
        """See KVCache.append; device arrays are taken as they are."""
        cupy = device.cupy()
        self.check(cache)
        batch, n = k.shape[:2]
        if batch * n == 0:
            return
        new, new_known = _lengths(lengths, batch, n)
        widths, bits_known = _bits(bits, (batch, n), cache.bits)
        ids = _ids(token_ids, (batch, n))
        capturing = bool(cupy.cuda.get_current_stream().is_capturing())
        counts: dict[int, Any] = dict.fromkeys(cache.bits, 0)
        if new_known is not None and bits_known is not None:
            fresh = np.arange(n) < new_known[:, None]
            counts = {b: (fresh & (bits_known == b)).sum(axis=1) for b in cache.bits}
            check.fits(counts, self._held, rooms_of(cache.tiers), cache.capacity)
            check.slot_range(int((self._slots + new_known).max()) - 1)
        if cache.auto_scales and not self._slots.all():
            _find_scales(cache, k, new, cache.auto_scales)
        tier_of, rank, adds = (None, None, None) if widths is None else _ranks(cache, widths, new)
        k, v = (a if a.strides[-1] == a.itemsize else cupy.ascontiguousarray(a) for a in (k, v))
        arrays = (k, v, cache.next_slots, cache.key_scales, tier_of, rank, adds, ids, new, self._ticket)
        tier = 0 if widths is not None else BITS.index(int(bits_known.flat[0]))
        argument = b"".join([_tier(cache.tiers.get(b)) for b in BITS]) + _APPEND.pack(
            *map(buffers.pointer, arrays),
            self._refused.ctypes.data,
            *buffers.element_strides(k)[:3],
            *buffers.element_strides(v)[:3],
            *(batch, n, cache.n_kv_heads, cache.head_dim, DTYPES[k.dtype], DTYPES[v.dtype]),
            *(tier, cache.capacity, int(cache.rotate)),
        )
        jit.launch_packed(plan.append(batch, n, cache.n_kv_heads), argument)
        if not capturing and new_known is not None:
            self._slots += new_known
            for b, count in counts.items():
                self._held[b] += count


def _lengths(lengths: Any, batch: int, n: int) -> tuple[Any, Any]:
    """Tokens of each sequence on the GPU (None: all of n), and where the host knows them."""
    if device.is_cuda(lengths):
        return device.cupy().ascontiguousarray(check.on_gpu_integers(lengths, "lengths"), np.int32), None
    known = check.lengths(lengths, batch, n)
    return None if lengths is None else device.cupy().asarray(known.astype(np.int32)), known


def _bits(bits: Any, shape: tuple[int, int], allowed: tuple[int, ...]) -> tuple[Any, Any]:
    """Widths (batch, n) on the GPU (None: all the same), and where the host knows them."""
    cupy = device.cupy()
    if device.is_cuda(bits):
        return cupy.broadcast_to(check.on_gpu_integers(bits, "bits"), shape), None
    known = check.token_bits(bits, shape, allowed)
    return None if np.ndim(bits) == 0 else cupy.asarray(known), known


def _ids(token_ids: Any, shape: tuple[int, int]) -> Any:
    """Ids (batch, n) on the GPU, int32; None stays None."""
    cupy = device.cupy()
    if token_ids is None:
        return None
    if device.is_cuda(token_ids):
        ids = cupy.broadcast_to(check.on_gpu_integers(token_ids, "token_ids"), shape)
    else:
        ids = cupy.asarray(check.token_ids(token_ids, shape))
    return cupy.ascontiguousarray(ids, np.int32)


def _ranks(cache: KVCache, widths: Any, new: Any) -> tuple[Any, Any, Any]:
    """Each token's tier and rank in it (batch, n), and how many go to each tier and to none."""
    cupy = device.cupy()
    here = _new(new, widths.shape)
    chosen = cupy.stack([here & (widths == b if b in cache.tiers else False) for b in BITS])
    none = here & ~chosen.any(axis=0)
    rank = ((chosen.cumsum(axis=2) - 1) * chosen).sum(axis=0)
    adds = cupy.concatenate([chosen, none[None]]).sum(axis=2).T
    tier_of, rank, adds = (cupy.ascontiguousarray(a, np.int32) for a in (chosen.argmax(axis=0), rank, adds))
    return tier_of, rank, adds


def _new(new: Any, shape: tuple[int, int]) -> Any:
    """Which of n tokens each sequence gets, bool (batch, n), of how many it gets (None: all)."""
    cupy = device.cupy()
    return cupy.broadcast_to(cupy.arange(shape[1]) < (shape[1] if new is None else new[:, None]), shape)


def _find_scales(cache: KVCache, k: Any, new: Any, how: str) -> None:
    """Automatic key scales of the sequences that have had no token yet."""
    cupy = device.cupy()
    here = _new(new, k.shape[:2])
    power = cupy.where(here[:, :, None, None], k.astype(np.float32) ** 2, np.float32(0)).sum(axis=1)
    power /= cupy.maximum(here.sum(axis=1), 1)[:, None, None].astype(np.float32)
    first = (cache.next_slots == 0) & here.any(axis=1)
    found = codes.key_scales(power, how, cupy)
    cupy.copyto(cache.key_scales, found, where=first[:, None, None])
