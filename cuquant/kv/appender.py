"""How a cache on the GPU takes tokens, by kernels/ops/append.cu."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from ..cuda import buffers, jit
from ..cuda.problem import DTYPES
from ..plan import Plan, caches
from ..repeats import CallTable, Repeat
from . import codes
from .buckets import Buckets
from .codes import BITS
from .tiers import held_of, rooms_of

if TYPE_CHECKING:
    from .cache import KVCache

_PLACES = struct.Struct("<11q")
_NUMBERS = struct.Struct("<6q11i4x")
"""Layout of the numbers behind the buckets, in the kernel's argument."""
_WORDS = 1024
"""Words of the host's memory that are taken at a time."""


_words: list[NDArray[np.int32]] = []
_pages: list[Any] = []
_taking = threading.Lock()


def _host_word() -> NDArray[np.int32]:
    """A zero in memory of the host that kernels can write, as an array [1].

    It is not given to anybody again: an append may still be running when its cache is gone.
    """
    with _taking:
        if not _words:
            _pages.append(device.cupy().cuda.alloc_pinned_memory(4 * _WORDS))
            page = np.frombuffer(_pages[-1], np.int32, _WORDS)
            page[:] = 0
            _words.extend(page[i : i + 1] for i in range(_WORDS))
        return _words.pop()


class Appending(NamedTuple):
    """A launch that appends tokens of one width, but for where everything lies."""

    plan: Plan
    numbers: bytes
    bits: int
    n: int
    """Tokens of each sequence."""


class Appender:
    """How a cache on the GPU takes tokens (`CacheAppender`): one launch, which neither synchronises nor needs
    the host's memory.

    The host knows lengths that the buckets have at least: exactly, but for what graphs append and what device
    arrays say. So a full cache is an error before the launch. Else the kernel finds that tokens do not fit,
    and leaves word in memory of the host, which the next call reads.

    It does not refer to its cache, whose buffers would then not be freed with the last reference to it.
    """

    def __init__(self, cache: KVCache) -> None:
        self.buckets = Buckets()
        self.lock = threading.Lock()
        """Lock of the launches of one call, which another thread's on the same stream must not come
        between."""
        self._ticket = device.cupy().zeros(1, np.uint32)
        self._refused = _host_word()
        self._word = self._refused.ctypes.data
        self._held = {bits: np.zeros(cache.batch, np.int64) for bits in cache.bits}
        self._slots = np.zeros(cache.batch, np.int64)
        """Copy of `next_slots`, as far as the host knows."""
        self.repeats = CallTable()
        """Calls that were checked: attention, and tokens of one width, as many for each sequence."""
        self.even = True
        """Whether all sequences hold as many tokens of each width, as far as the host knows: attention shares
        such ones by fewer blocks."""
        self._exact = True
        """Whether the host knows the lengths, but for as many tokens for each sequence."""
        self._spare: dict[int, int] | None = None
        """Tokens of a width for which all sequences have room, or fewer; None where nobody has looked."""

    def read(self, cache: KVCache) -> None:
        """Take the lengths from the GPU."""
        self.know(held_of(cache.tiers), device.as_numpy(cache.next_slots).astype(np.int64))

    def know(self, held: dict[int, NDArray[np.int64]], slots: NDArray[np.int64]) -> None:
        """Take note of how many tokens [batch] each width holds, and of `next_slots`."""
        self._held, self._slots, self._spare = held, slots, None
        self._exact = True
        self._compare()

    def _compare(self) -> None:
        self.even = len(self._slots) == 1 or (self._exact and _are_even(self._held))

    def check(self, cache: KVCache) -> None:
        """ValueError if an append that could not raise was refused since."""
        refused = int(self._refused[0])
        if refused:
            if not device.is_capturing():  # else lengths cannot be read, and the next call raises again
                self.read(cache)  # tokens were counted before they were refused
                self._refused[0] = 0
            check.require_appended(refused - 1, cache.capacity)

    @contextmanager
    def copying(self, cache: KVCache) -> Iterator[None]:
        """Surround what copies the cache, and waits for it: its GPU is the current one.

        RuntimeError while a graph is captured, ValueError as in `check`.
        """
        with device.cupy().cuda.Device(cache._next_slots.data.device_id):
            check.require_copyable(device.is_capturing())
            yield
            self.check(cache)

    @contextmanager
    def moving(self, cache: KVCache) -> Iterator[None]:
        """Surround what moves tokens, and waits for the cache: its GPU is the current one.

        RuntimeError while a graph is captured.
        """
        with device.cupy().cuda.Device(cache._next_slots.data.device_id), self.lock:
            check.require_movable(device.is_capturing())
            yield

    def known_slots(self, cache: KVCache) -> int:
        """Slots given out in the longest sequence, as far as the host knows."""
        return int(self._slots.max())

    def append(
        self, cache: KVCache, k: Any, v: Any, bits: Any, token_ids: Any, lengths: Any
    ) -> Appending | None:
        """See KVCache.append; device arrays are taken as they are.

        Returns how others like them are, where there is room; None where that depends on more.
        """
        slots, here = cache._next_slots, device.cupy().cuda.runtime.getDevice()
        if not k.data.device_id == v.data.device_id == slots.data.device_id == here:
            # What it takes to say so, each append would wait for.
            check.require_one_device(k=k, v=v, cache=slots)
        self.check(cache)
        batch, n = k.shape[:2]
        if n and token_ids is None and lengths is None and type(bits) is int and self._fits(cache, n, bits):
            given = k.data.ptr, v.data.ptr
            k, v = _readable(k, "k"), _readable(v, "v")
            how, places = _appending(cache, k, v, bits), (k.data.ptr, v.data.ptr)
            self._append_alike(cache, how, *places)
            return how if places == given else None
        new, new_known = _lengths(lengths, batch, n)
        fresh: Any = True if new_known is None else np.arange(n) < new_known[:, None]
        widths, bits_known = _bits(bits, (batch, n), cache.bits, fresh)
        ids = _ids(token_ids, (batch, n), fresh)
        capturing = device.is_capturing()
        counts: dict[int, Any] = dict.fromkeys(cache.bits, 0)
        if new_known is not None and bits_known is not None:
            counts = {b: (fresh & (bits_known == b)).sum(axis=1) for b in cache.bits}
            check.require_room(counts, self._held, rooms_of(cache.tiers), cache.capacity)
            check.require_slot_range(int((self._slots + new_known).max()))
        if n == 0:
            return None
        former = None
        if cache.auto_scales and not self._slots.all():
            check.require_memory(
                "key scales are found from the first tokens of a sequence",
                "append those before (and, where lengths were on the GPU, call refresh())",
            )
            former = cache.key_scales.copy()
            _find_scales(cache, k, new, cache.auto_scales)
        tier_of, rank, adds = (None, None, None) if widths is None else _ranks(cache, widths, new)
        width = BITS[0] if widths is not None else int(bits_known.flat[0])
        k, v = _readable(k, "k"), _readable(v, "v")
        how = _appending(cache, k, v, width)
        self._start(cache, how, k.data.ptr, v.data.ptr, tier_of, rank, adds, ids, new)
        if former is not None:  # of tokens that were refused nothing stays
            device.cupy().copyto(cache.key_scales, former, where=(cache.next_slots == 0)[:, None, None])
        known = new_known is not None and bits_known is not None
        if capturing or not known:
            self._exact = self._exact and known and _are_even(counts)
        if not capturing and new_known is not None:
            self._spare = None
            self._slots += new_known
            for b, count in counts.items():
                self._held[b] += count
        self._compare()
        return None

    def append_again(self, cache: KVCache, known: Repeat, places: list[int]) -> bool:
        """Append tokens like some before, at these places; False where they may not fit, and nothing was
        done."""
        self.check(cache)
        how: Appending = known.work
        fits = self._fits(cache, how.n, how.bits)
        if fits:
            self._append_alike(cache, how, *places[:2])
        return fits

    def _append_alike(self, cache: KVCache, how: Appending, k: int, v: int) -> None:
        """Append tokens of one width, as many for each sequence, for which there is room."""
        capturing = device.is_capturing()
        self._start(cache, how, k, v)
        if not capturing:
            n, spare = how.n, self._spare
            assert spare is not None
            for bits in spare:
                spare[bits] -= n
            self._slots += n
            self._held[how.bits] += n

    def _fits(self, cache: KVCache, n: int, bits: int) -> bool:
        """Whether all sequences have room for so many tokens, and key scales, as far as the host knows."""
        if self._spare is None:
            self._spare = self._room(cache)
        return n <= self._spare.get(bits, 0)

    def _room(self, cache: KVCache) -> dict[int, int]:
        """Tokens of each width that the fullest sequence has room for; none while key scales are to be found
        of tokens that come."""
        if cache.auto_scales and not self._slots.all():
            return {}
        total: Any = sum(self._held.values())
        most = min(cache.capacity - int(total.max()), check.LARGEST_INDEX - int(self._slots.max()))
        held = {b: int(self._held[b].max()) for b in cache.bits}
        return {b: min(most, room - held[b]) for b, room in rooms_of(cache.tiers).items()}

    def _start(self, cache: KVCache, how: Appending, k: int, v: int, *others: Any) -> None:
        """Start the launch for tokens at these addresses, all of one width, or with `others`: each token's
        tier and rank, how many go to each tier, ids, and how many tokens each sequence gets."""
        argument = self.buckets.packed(cache.tiers).tiers + _PLACES.pack(
            *(k, v, cache._next_slots.data.ptr, buffers.pointer(cache.key_scales)),
            *([buffers.pointer(a) for a in others] or (0,) * 5),
            *(self._ticket.data.ptr, self._word),
        )
        with self.lock:
            jit.launch_packed(how.plan, argument + how.numbers)


def _are_even(tokens: dict[int, Any]) -> bool:
    """Whether all sequences have as many tokens (each width's are [batch], or 0)."""
    return all(np.ptp(count) == 0 for count in tokens.values())


def _appending(cache: KVCache, k: Any, v: Any, bits: int) -> Appending:
    """How such tokens are appended, if they all have this width; others say so in arrays."""
    (batch, n), heads = k.shape[:2], cache.n_kv_heads
    gpu = jit.gpu()
    launch, lanes = caches.append(batch, n, heads, cache.head_dim, gpu.capability, gpu.multiprocessors)
    groups = (lanes, launch.cluster > 1)
    given = (k.strides, k.dtype, v.strides, v.dtype, BITS.index(bits), cache.capacity, cache.rotate, *groups)
    return Appending(launch, _numbers(k.shape, *given), bits, n)


@lru_cache(maxsize=1024)
def _numbers(
    shape: tuple[int, ...],
    k_strides: tuple[int, ...],
    k_dtype: np.dtype[Any],
    v_strides: tuple[int, ...],
    v_dtype: np.dtype[Any],
    tier: int,
    capacity: int,
    rotate: bool,
    lanes: int,
    clustered: bool,
) -> bytes:
    return _NUMBERS.pack(
        *(stride // k_dtype.itemsize for stride in k_strides[:3]),
        *(stride // v_dtype.itemsize for stride in v_strides[:3]),
        *(*shape, DTYPES[k_dtype], DTYPES[v_dtype], tier, capacity, int(rotate), lanes, int(clustered)),
    )


def _readable(x: Any, what: str) -> Any:
    """Keys or values whose last axis is contiguous."""
    if x.strides[-1] == x.itemsize:
        return x
    check.require_memory(f"{what} has gaps along its last axis, and is copied", "pass a contiguous array")
    return device.cupy().ascontiguousarray(x)


def _lengths(lengths: Any, batch: int, n: int) -> tuple[Any, Any]:
    """Tokens of each sequence on the GPU (None: all of n), and where the host knows them."""
    if device.is_cuda(lengths):
        return check.lengths_on_gpu(lengths, batch), None
    known = check.lengths(lengths, batch, n)
    return None if lengths is None else check.int32_on_gpu(known, "lengths"), known


def _bits(bits: Any, shape: tuple[int, int], allowed: tuple[int, ...], new: Any) -> tuple[Any, Any]:
    """Widths (batch, n) on the GPU (None: all the same), and where the host knows them; those of tokens that
    are not `new` may be anything."""
    if device.is_cuda(bits) or np.ndim(bits):
        check.require_memory("bits is an array, and its tokens' places are found first", "pass a number")
    if device.is_cuda(bits):
        return check.on_gpu_integers(bits, "bits", shape), None
    known = check.token_bits(bits, shape, allowed, new)
    return None if np.ndim(bits) == 0 else check.int32_on_gpu(known, "bits"), known


def _ids(token_ids: Any, shape: tuple[int, int], new: Any) -> Any:
    """Ids (batch, n) on the GPU, int32; those of tokens that are not `new` may be anything. None stays."""
    if token_ids is None:
        return None
    if device.is_cuda(token_ids):
        ids = check.on_gpu_integers(token_ids, "token_ids", shape)
    else:
        ids = check.token_ids(token_ids, shape, new)
    return check.int32_on_gpu(ids, "token_ids")


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
