"""How a cache on the GPU moves its tokens, by kernels/ops/move.cu."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import device
from ..cuda import jit
from ..plan import caches
from . import buckets
from .codes import BITS
from .moves import ranks

if TYPE_CHECKING:
    from .cache import KVCache
    from .moves import Moves

_NUMBERS = struct.Struct("<2q4i")
"""Layout of the numbers behind the buckets, in the kernel's argument."""
_MOVE = np.dtype([("from", np.int64), ("to", np.int64), ("tier", np.int32), ("to_tier", np.int32)])
_TIERS = np.zeros(BITS[0] + 1, np.int64)
_TIERS[list(BITS)] = np.arange(len(BITS))
"""The number of a width in BITS."""


def move(cache: KVCache, moves: Moves) -> None:
    """Bring tokens to their places, encoded anew where their width changes: none comes to the host.

    A launch takes them to memory between, a second one puts them where others may have been, so that full
    buckets can exchange tokens. It also writes the lengths. Nothing waits: memory that is freed here is given
    to what comes later in the stream.
    """
    count, shape = len(moves.place), (cache.n_kv_heads, cache.head_dim)
    takes, puts, counts = _by_way_of(cache, moves)
    lengths = np.zeros((len(BITS), cache.batch), np.int32)
    lengths[_TIERS[list(cache.bits)]] = moves.lengths.T
    given = device.cupy().asarray(np.concatenate([a.ravel().view(np.uint8) for a in (takes, puts, lengths)]))
    first, second, new = (given.data.ptr + n * _MOVE.itemsize for n in (0, count, 2 * count))
    between = buckets.between(counts, *shape)
    appender: Any = cache._appender  # a GPU's
    own = appender.buckets.packed(cache.tiers).tiers
    launch, numbers = caches.move(count, cache.n_kv_heads), (count, cache.batch, *shape)
    jit.launch_packed(launch, own + between.packed + _NUMBERS.pack(first, 0, *numbers))
    jit.launch_packed(launch, between.packed + own + _NUMBERS.pack(second, new, *numbers))


def _by_way_of(cache: KVCache, moves: Moves) -> tuple[NDArray[Any], NDArray[Any], list[int]]:
    """`struct Move` of all tokens to memory between, and from there; and how many of each width lie in it."""
    order = np.argsort(-moves.to_bits, kind="stable")
    sequence, bits, place, to_bits, to_place = (a[order] for a in moves[:5])
    rooms = np.zeros(len(_TIERS), np.int64)
    rooms[list(cache.bits)] = [tier.room for tier in cache.tiers.values()]
    takes, puts = np.empty((2, len(order)), _MOVE)
    counts = np.bincount(_TIERS[to_bits], minlength=len(BITS))
    takes["from"], puts["to"] = sequence * rooms[bits] + place, sequence * rooms[to_bits] + to_place
    takes["to"] = puts["from"] = ranks(counts)
    takes["tier"], takes["to_tier"] = _TIERS[bits], _TIERS[to_bits]
    puts["tier"] = puts["to_tier"] = takes["to_tier"]
    return takes, puts, counts.tolist()
