"""Tokens of a cache by their ids and by their importance, and what moves or removes them.

What is to become of tokens is told sequence by sequence: for each width an array [T] of the tokens that it
holds there, in the order of their bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from . import codes
from .tiers import Bucket, held_of, rooms_of

if TYPE_CHECKING:
    from .cache import KVCache


def named(cache: KVCache, token_ids: Any) -> tuple[NDArray[np.int64], list[dict[int, NDArray[np.intp]]]]:
    """Ids (batch, n), and for every sequence and width the last index there of each token's id, or -1."""
    ids, rows = check.named_tokens(token_ids, cache.batch)
    found, seen = [], np.zeros(ids.shape, bool)
    for sequence, row in enumerate(ids):
        order, indices = np.argsort(row, kind="stable"), {}
        for bits, tier in cache.tiers.items():
            held = device.as_numpy(tier.bucket(sequence).token_ids)
            index = np.append(order, -1)[np.searchsorted(row, held, side="right", sorter=order) - 1]
            indices[bits] = np.where(np.append(row, -1)[index] == held, index, -1)
            seen[sequence] |= np.isin(row, held)
        found.append(indices)
    check.found(ids, seen, rows)
    return ids, found


def ranked(
    cache: KVCache, importance: Any, recent: int
) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """Of every sequence: widths, slots and importances [T] of its tokens, in the order of the tiers."""
    recent = check.count(recent, "recent", least=0)
    given = check.importance(importance, (cache.batch, cache.slots))
    result = []
    for sequence in range(cache.batch):
        names = [tier.bucket(sequence)[:3] for tier in cache.tiers.values()]
        slots, tracked = (np.concatenate([device.as_numpy(part[i]) for part in names]) for i in (1, 2))
        held = np.repeat(cache.bits, [len(part[0]) for part in names])
        weights = (tracked if given is None else given[sequence, slots]).astype(np.float64)
        weights[np.argsort(-slots)[:recent]] = weights.max(initial=0) or 1
        result.append((held, slots, weights))
    return result


def by_tier(cache: KVCache, sequence: int, values: NDArray[Any]) -> dict[int, NDArray[Any]]:
    """Values [T] of a sequence's tokens, in the order of the tiers, by width."""
    ends = np.cumsum([tier.held[sequence] for tier in cache.tiers.values()])[:-1]
    return dict(zip(cache.tiers, np.split(values, ends), strict=True))


def move(cache: KVCache, targets: list[dict[int, NDArray[Any]]]) -> int:
    """Bring tokens to the widths `targets`; returns how many have moved.

    ValueError where a bucket has no room for them: nothing has moved then.
    """
    adds = {bits: np.zeros(cache.batch, np.int64) for bits in cache.bits}
    for sequence, target in enumerate(targets):
        for held, wanted in target.items():
            for bits in cache.bits:
                adds[bits][sequence] += int((wanted == bits).sum()) - (bits == held) * len(wanted)
    check.fits(adds, held_of(cache.tiers), rooms_of(cache.tiers), cache.capacity)
    moved = 0
    for sequence, target in enumerate(targets):
        # All leave before any arrives: two full buckets can exchange tokens.
        leaving = []
        for held, wanted in target.items():
            for bits in sorted({*wanted.tolist()} - {held}):
                tokens = cache.tiers[held].take(sequence, wanted == bits).on_cpu()
                leaving.append((bits, _recoded(tokens, held, bits)))
            if (wanted != held).any():
                cache.tiers[held].keep(sequence, wanted == held)
        for bits, tokens in leaving:
            cache.tiers[bits].add(sequence, tokens)
            moved += len(tokens.token_ids)
    cache.refresh()
    return moved


def keep(cache: KVCache, kept: list[dict[int, NDArray[np.bool_]]]) -> int:
    """Remove all tokens but those; returns how many."""
    before = int(cache.lengths.sum())
    for sequence, by_width in enumerate(kept):
        for bits, tokens in by_width.items():
            if not tokens.all():
                cache.tiers[bits].keep(sequence, tokens)
    cache.refresh()
    return before - int(cache.lengths.sum())


def _recoded(tokens: Bucket, held: int, bits: int) -> Bucket:
    k = codes.encode(codes.decode(tokens.k_qx, tokens.k_scale, held), bits)
    v = codes.encode(codes.decode(tokens.v_qx, tokens.v_scale, held), bits)
    return Bucket(*tokens[:3], *k, *v)
