"""Tokens of a cache, also by their ids, and where they go when their widths change.

The host decides, also for a GPU (widths.py): by lengths, and by ids, or slots and importances, of all tokens,
which come from it together. Keys and values stay where they are, and the backend moves them.

In every bucket tokens that leave make holes. Those that arrive take the holes in order, and then the end; to
holes that are left come the last tokens that stay, so that few others are touched:

    held          a  b  c  d  e  f  g  h        b, d, e and g leave, x and y arrive
    then          a  x  c  y  h  f
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from .tiers import rooms_of

if TYPE_CHECKING:
    from .cache import KVCache

Numbers = NDArray[np.int64]

GONE = 0
"""The width of tokens that leave the cache."""


class Tokens(NamedTuple):
    """Where all n tokens of a cache are: sequence after sequence, from the widest bucket on, in its order.

    Attributes
    ----------
    lengths : int64 [batch, widths]
        How many each bucket holds.
    next_slots : int64 [batch]
        As the cache's.
    sequence, bits, place : int64 [n]
        Of each token; `place` is its index in the bucket.
    """

    lengths: Numbers
    next_slots: Numbers
    sequence: Numbers
    bits: Numbers
    place: Numbers

    def of_sequences(self) -> list[slice]:
        """Which tokens each sequence has."""
        ends = np.cumsum(self.lengths.sum(axis=1)).tolist()
        return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


class Moves(NamedTuple):
    """m tokens that get other places, from which all are read before any is written; and the lengths then.

    Attributes
    ----------
    sequence, bits, place, to_bits, to_place : int64 [m]
        Where each is, and where it goes: to_bits may be its own width.
    lengths : int64 [batch, widths]
        How many tokens each bucket holds then.
    """

    sequence: Numbers
    bits: Numbers
    place: Numbers
    to_bits: Numbers
    to_place: Numbers
    lengths: Numbers


def held(cache: KVCache, *names: str) -> tuple[Tokens, NDArray[np.int32]]:
    """The tokens of a cache, and of them what is named: arrays of a Bucket, int32 [names, n].

    Two transfers from a GPU, whatever the widths and sequences.
    """
    tiers = [*cache.tiers.values()]
    xp = tiers[0].xp
    *rows, next_slots = device.as_numpy(xp.stack([*(tier.lengths for tier in tiers), cache.next_slots]))
    lengths = np.stack(rows, axis=1).astype(np.int64)
    longest = lengths.max(axis=0)
    parts = [
        getattr(tier.buffers, name).view(np.int32)[:, :stop]
        for name in names
        for tier, stop in zip(tiers, longest.tolist(), strict=True)
    ]
    all_names = device.as_numpy(xp.concatenate(parts, axis=1)).reshape(cache.batch, len(names), -1)
    # Columns as they lie side by side now: of the longest sequence of each width.
    tier = np.repeat(np.arange(len(tiers)), longest)
    place = ranks(longest)
    sequence, column = np.nonzero(place < lengths[:, tier])
    bits = np.array(cache.bits)[tier[column]]
    tokens = Tokens(lengths, next_slots.astype(np.int64), sequence, bits, place[column])
    return tokens, all_names[sequence, :, column].T


def named(cache: KVCache, token_ids: Any) -> tuple[Tokens, Numbers, Numbers]:
    """The tokens of a cache, ids (batch, n), and for each token the last column of its id there, or -1."""
    ids, rows = check.named_tokens(token_ids, cache.batch)
    tokens, (names,) = held(cache, "token_ids")
    last, seen = np.empty(len(names), np.int64), np.zeros(ids.shape, bool)
    for sequence, (row, own) in enumerate(zip(ids, tokens.of_sequences(), strict=True)):
        order = np.argsort(row, kind="stable")
        column = np.append(order, -1)[np.searchsorted(row, names[own], side="right", sorter=order) - 1]
        same = (np.append(row, -1)[column] == names[own]) & ((names[own] >= 0) | (not rows))
        last[own] = np.where(same, column, -1)
        seen[sequence] = np.isin(row, names[own])
    check.require_known_ids(ids, seen, rows)
    return tokens, ids, last


def move(cache: KVCache, tokens: Tokens, wanted: Numbers) -> int:
    """Bring all tokens to the widths [n], or out of the cache (GONE); returns how many that changes.

    ValueError where a bucket has no room for them: nothing has moved then.
    """
    widths = np.array(cache.bits)

    def bucket(bits: Numbers) -> Numbers:
        return tokens.sequence * len(widths) + np.searchsorted(-widths, -bits)

    target = np.where(wanted == GONE, -1, bucket(wanted))
    moved, to_place, after = places(bucket(tokens.bits), tokens.place, target, tokens.lengths.ravel())
    lengths = after.reshape(tokens.lengths.shape)
    before, then = (dict(zip(cache.bits, table.T.copy(), strict=True)) for table in (tokens.lengths, lengths))
    adds = {bits: then[bits] - before[bits] for bits in cache.bits}
    check.require_room(adds, before, rooms_of(cache.tiers), cache.capacity)
    changed = int((wanted != tokens.bits).sum())
    if changed:
        origin = tokens.sequence[moved], tokens.bits[moved], tokens.place[moved]
        cache._backend.move(cache, Moves(*origin, wanted[moved], to_place, lengths))
    cache._appender.know(then, tokens.next_slots)
    return changed


def places(
    bucket: Numbers, place: Numbers, target: Numbers, lengths: Numbers
) -> tuple[NDArray[np.intp], Numbers, Numbers]:
    """Which tokens [m] get other places, which places they get, and the new lengths of all buckets.

    Parameters
    ----------
    bucket, place, target : int64 [n]
        The bucket of each token, by a number, its index there, and the bucket that it is to be in: its own,
        another, or -1 for none. Buckets ascend, and in them places.
    lengths : int64 [buckets]
        How many tokens each holds.
    """
    leaves = target != bucket
    holes, arriving = np.flatnonzero(leaves), np.flatnonzero(leaves & (target >= 0))
    arriving = arriving[np.argsort(target[arriving], kind="stable")]
    made, taken = (np.bincount(a, minlength=len(lengths)) for a in (bucket[holes], target[arriving]))
    after = lengths - made + taken
    to, rank = target[arriving], ranks(taken)
    found = lengths[to] + rank - made[to]  # at the end, behind as many as have taken holes
    in_hole = rank < made[to]
    first_hole = np.cumsum(made) - made
    found[in_hole] = place[holes[(first_hole[to] + rank)[in_hole]]]
    left = holes[(ranks(made) >= taken[bucket[holes]]) & (place[holes] < after[bucket[holes]])]
    last = np.flatnonzero(~leaves & (place >= after[bucket]))
    return np.concatenate([arriving, last]), np.concatenate([found, place[left]]), after


def ranks(counts: Numbers) -> Numbers:
    """0, 1, .. for each of some counts, one behind the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
