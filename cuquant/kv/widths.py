"""Which bit width each token of a cache is to have: as it is named, by its age, or by its importance; and
which tokens leave. All functions but `ranked` change the cache, and return how many tokens it concerns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from . import allocator, moves
from .tiers import rooms_of

if TYPE_CHECKING:
    from .cache import KVCache

RECENT = 64
"""Newest tokens, at most, that count as the most important ones where tracked attention decides: it is a sum
over steps, of which they have seen few."""


def ranked(
    cache: KVCache, importance: Any, recent: int | None, length: int | None = None
) -> tuple[moves.Tokens, NDArray[np.int32], NDArray[np.float64]]:
    """The tokens of a cache, their slots [n] and their importances [n]; `length` of a sequence's stay (None:
    all)."""
    tracked_decides = recent is None and importance is None and cache.track_attention
    count = check.count(0 if recent is None else recent, "recent", least=0)
    tokens, (slots, tracked) = moves.held(cache, "global_slots", "importance")
    given = check.importance(importance, (cache.batch, int(tokens.next_slots.max())))
    known = tracked.view(np.float32) if given is None else given[tokens.sequence, slots]
    weights = known.astype(np.float64)
    for own in tokens.of_sequences():
        if tracked_decides:
            stay = len(slots[own]) if length is None else min(length, len(slots[own]))
            count = min(RECENT, (stay + 1) // 2)
        newest = np.argsort(-slots[own])[:count]
        weights[own][newest] = weights[own].max(initial=0) or 1
    return tokens, slots, weights


def assign(cache: KVCache, token_ids: Any, bits: Any) -> int:
    """Move tokens to the widths that they are given by their names."""
    tokens, ids, column = moves.named(cache, token_ids)
    given, wanted = check.token_bits(bits, ids.shape, cache.bits), tokens.bits.copy()
    named = column >= 0
    wanted[named] = given[tokens.sequence[named], column[named]]
    return moves.move(cache, tokens, wanted)


def allocate(
    cache: KVCache, average: float, importance: Any, recent: int | None, hysteresis: float, coming: int
) -> int:
    """Move tokens to widths by importance, at an average, with room for tokens that come."""
    rooms = rooms_of(cache.tiers)
    widest, room = max(rooms), sum(rooms.values())
    tokens, slots, weights = ranked(cache, importance, recent)
    wanted = tokens.bits.copy()
    for own in tokens.of_sequences():
        held = tokens.bits[own], slots[own]
        kept = min(coming, rooms[widest], room - len(held[0]))
        given = rooms | {widest: rooms[widest] - kept}
        wanted[own] = allocator.allocate(weights[own], *held, given, average, hysteresis)
    return moves.move(cache, tokens, wanted)


def age(cache: KVCache, widths: NDArray[np.int64], ages: NDArray[np.int64], coming: int) -> int:
    """Move tokens to widths by age, never wider: `widths` up to the `ages` between them."""
    tokens, (slots,) = moves.held(cache, "global_slots")
    own = tokens.next_slots[tokens.sequence] + coming - slots
    return moves.move(cache, tokens, np.minimum(widths[np.searchsorted(ages, own)], tokens.bits))


def evict(cache: KVCache, token_ids: Any) -> int:
    """Remove the tokens that are named."""
    tokens, _, column = moves.named(cache, token_ids)
    return moves.move(cache, tokens, np.where(column < 0, tokens.bits, moves.GONE))


def trim(cache: KVCache, length: int, importance: Any, recent: int | None) -> int:
    """Remove the least important tokens of sequences that hold more than `length`."""
    tokens, slots, weights = ranked(cache, importance, recent, length)
    kept = tokens.bits.copy()
    for own in tokens.of_sequences():
        ascending = np.lexsort((slots[own], weights[own]))
        kept[own][ascending[: max(0, len(ascending) - length)]] = moves.GONE
    return moves.move(cache, tokens, kept)
