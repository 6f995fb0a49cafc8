"""A cache on NumPy: attention, appending and moving.

Attention is a maximum, a sum and an output for every piece of a bucket, then one merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..cpu import slabs
from . import codes
from .tiers import Bucket, held_of, rooms_of

if TYPE_CHECKING:
    from ..repeats import Repeat
    from .attention import Attention
    from .cache import KVCache
    from .moves import Moves

Array = NDArray[np.float32]


class Partial(NamedTuple):
    """Softmax attention over some tokens, not normalised: with scores s, m = max(s), l = sum(exp(s - m)) and
    o = sum(exp(s - m) v). m is -inf, l and o are 0 for a query that sees none of them.

    m, l are [n_kv_heads, rows], o is [n_kv_heads, rows, head_dim]; rows are a key head's queries of all
    positions.
    """

    m: Array
    l: Array  # noqa: E741
    o: Array


def merge(parts: list[Partial]) -> Partial:
    """The union of the parts' tokens, by log-sum-exp: a part counts exp(its m - the m of all) times."""
    m = np.max([p.m for p in parts], axis=0)
    weights = [np.exp(p.m - _finite(m)) for p in parts]
    return Partial(
        m,
        sum(w * p.l for w, p in zip(weights, parts, strict=True)),
        sum(w[..., None] * p.o for w, p in zip(weights, parts, strict=True)),
    )


AT_A_TIME = 64
"""Queries of a sequence whose scores are in memory together."""


def queries_at_once(cache: KVCache, q: Any) -> int:
    """Queries of each sequence that a call had best take, of those like these: all, as none meets tokens
    behind the last one that any of AT_A_TIME sees."""
    return int(q.shape[1])


def attend(p: Attention, out: NDArray[Any]) -> None:
    """Write the attention of every query to `out` (batch, q_len, heads, head_dim)."""
    with np.errstate(all="ignore"):  # infinity and NaN propagate
        for sequence in range(p.q.shape[0]):
            positions = _positions(p, sequence)
            for first in range(0, p.q.shape[1], AT_A_TIME):
                some = slice(first, first + AT_A_TIME)
                out[sequence, some] = _attended(p, sequence, some, positions[some])


def _attended(p: Attention, sequence: int, some: slice, positions: NDArray[np.int64]) -> Array:
    """The attention of some of a sequence's queries [n, heads, head_dim], which are at these positions."""
    cache, given = p.cache, p.q[sequence, some].astype(np.float32, order="C")
    n, heads, d = given.shape
    q = _stored_queries(cache, given, sequence) * np.float32(p.scale)
    rows = q.reshape(n, cache.n_kv_heads, -1, d).transpose(1, 2, 0, 3).reshape(cache.n_kv_heads, -1, d)
    mask = None if p.mask is None else p.mask[sequence][:, some]
    last = int(positions.max()) if p.causal else None
    parts = [
        _partial(*_scores(positions, mask, p.causal, rows, bits, piece), bits, piece)
        for bits, piece in _pieces(cache, sequence, last)
    ]
    if not parts:
        return np.zeros(given.shape, np.float32)
    total = merge(parts)
    divisor = np.where(total.l == 0, 1, total.l)
    if cache.track_attention:
        for bits, piece in _pieces(cache, sequence, last):
            scores, _ = _scores(positions, mask, p.causal, rows, bits, piece)
            share = np.exp(scores - _finite(total.m)[..., None]) / divisor[..., None]
            piece.importance[...] += np.nan_to_num(share).sum(axis=(0, 1)) / heads
    return (total.o / divisor[..., None]).reshape(-1, n, d).swapaxes(0, 1)


def _stored_queries(cache: KVCache, q: Array, sequence: int) -> Array:
    """Queries [n, heads, head_dim] as they meet stored keys: scaled and rotated."""
    if cache.key_scales is not None:
        q = q * np.repeat(cache.key_scales[sequence], q.shape[1] // cache.n_kv_heads, axis=0)
    return codes.rotate(q) if cache.rotate else q


def _pieces(cache: KVCache, sequence: int, last: int | None) -> Iterator[tuple[int, Bucket]]:
    """Slices of all buckets of a sequence, and their bits, without the tokens at the end of each bucket that
    are behind slot `last`, if it is given."""
    for bits, tier in cache.tiers.items():
        bucket = tier.bucket(sequence)
        count = len(bucket.token_ids)
        if last is not None:
            count = int(np.flatnonzero(bucket.global_slots <= last).max(initial=-1)) + 1
        for part in slabs(count, cache.n_kv_heads * cache.head_dim):
            yield bits, bucket.select(part)


def _scores(
    positions: NDArray[np.int64], mask: Any, causal: bool, q: Array, bits: int, tokens: Bucket
) -> tuple[Array, NDArray[np.bool_]]:
    """Scores [n_kv_heads, rows, T], -inf where a token is hidden, and where it is not, for queries at these
    positions [n], with a mask [heads, n, slots]."""
    k = codes.decode(tokens.k_qx, tokens.k_scale, bits)
    scores = q @ k.transpose(1, 2, 0)
    visible: Any = True
    if causal:
        later = tokens.global_slots > positions[:, None]  # [n, T]
        visible = np.tile(~later, (scores.shape[1] // len(later), 1))
    if mask is not None:
        mask = mask[..., tokens.global_slots].reshape(scores.shape)
        if mask.dtype == bool:
            visible = visible & mask
        else:
            visible = visible & (mask != -np.inf)
            scores = scores + mask.astype(np.float32)
    visible = np.broadcast_to(visible, scores.shape)
    return np.where(visible, scores, -np.float32(np.inf)), visible


def _positions(p: Attention, sequence: int) -> NDArray[np.int64]:
    if p.positions is not None:
        return np.asarray(p.positions[sequence])
    return int(p.cache.next_slots[sequence]) + np.arange(-p.q.shape[1], 0)


def _partial(scores: Array, visible: NDArray[np.bool_], bits: int, tokens: Bucket) -> Partial:
    v = codes.decode(tokens.v_qx, tokens.v_scale, bits).swapaxes(0, 1)
    m = scores.max(axis=-1)
    e = np.exp(scores - _finite(m)[..., None])
    bad = ~np.isfinite(v).all(axis=-1)  # [n_kv_heads, T]
    if not bad.any():
        return Partial(m, e.sum(axis=-1), e @ v)
    # A weight of 0 times NaN is NaN: such values reach only the queries that see them.
    o = e @ np.where(bad[..., None], np.float32(0), v)
    o[(visible & bad[:, None]).any(axis=-1)] = np.nan
    return Partial(m, e.sum(axis=-1), o)


def _finite(m: Array) -> Array:
    """Maxima, 0 in place of -inf: exp(-inf - 0) is 0, where exp(-inf - -inf) would be NaN."""
    return np.where(m == -np.inf, np.float32(0), m)


class Appender:
    """How a cache on the CPU takes tokens (`CacheAppender`): at once, so that there is nothing to keep."""

    repeats = None
    """No table of checked calls: all are checked."""
    even = False
    """No launch goes by it on the CPU."""

    def __init__(self, cache: KVCache) -> None:
        pass

    def read(self, cache: KVCache) -> None:
        """Nothing to read: lengths are where they are looked up."""

    def know(self, held: dict[int, NDArray[np.int64]], slots: NDArray[np.int64]) -> None:
        """Nothing to note: lengths are read from the buffers."""

    def check(self, cache: KVCache) -> None:
        """Nothing to check: an append that is refused has raised."""

    def copying(self, cache: KVCache) -> AbstractContextManager[None]:
        """Surround what copies the cache: always possible."""
        return nullcontext()

    def moving(self, cache: KVCache) -> AbstractContextManager[None]:
        """Surround what moves tokens: always possible."""
        return nullcontext()

    def known_slots(self, cache: KVCache) -> int:
        """Slots given out in the longest sequence."""
        return cache.slots

    def append(self, cache: KVCache, k: Any, v: Any, bits: Any, token_ids: Any, lengths: Any) -> None:
        """See KVCache.append."""
        n = k.shape[1]
        counts = check.lengths(lengths, cache.batch, n)
        new = np.arange(n) < counts[:, None]
        wanted = check.token_bits(bits, (cache.batch, n), cache.bits, new)
        check.require_slot_range(int((cache.next_slots + counts).max()))
        slots = cache.next_slots[:, None] + np.arange(n)
        ids = check.token_ids(slots if token_ids is None else token_ids, (cache.batch, n), new)
        adds = {bits: (new & (wanted == bits)).sum(axis=1) for bits in cache.bits}
        check.require_room(adds, held_of(cache.tiers), rooms_of(cache.tiers), cache.capacity)
        k, v = k.astype(np.float32), v.astype(np.float32)
        scales: Any = None if cache.key_scales is None else cache.key_scales.copy()
        made = []  # of all sequences, before the cache changes
        with np.errstate(all="ignore"):  # NaN and infinity are tokens, too
            for sequence in np.flatnonzero(counts).tolist():
                if cache.auto_scales and cache.next_slots[sequence] == 0:
                    power = np.mean(k[sequence, new[sequence]] ** 2, axis=0)
                    scales[sequence] = codes.key_scales(power, cache.auto_scales)
                for bits, tier in cache.tiers.items():
                    chosen = new[sequence] & (wanted[sequence] == bits)
                    if chosen.any():
                        own = None if scales is None else scales[sequence]
                        keys = codes.stored_keys(k[sequence, chosen], own, cache.rotate)
                        names = ids[sequence, chosen], slots[sequence, chosen], np.zeros(chosen.sum())
                        coded = *codes.encode(keys, bits), *codes.encode(v[sequence, chosen], bits)
                        made.append((tier, sequence, Bucket(*names, *coded)))
        for tier, sequence, tokens in made:
            tier.add(sequence, tokens)
        if scales is not None:
            cache.key_scales[...] = scales
        cache._next_slots += counts.astype(np.int32)

    def append_again(self, cache: KVCache, known: Repeat, places: list[int]) -> bool:
        """Nothing to append so: no call is known."""
        return False


def move(cache: KVCache, moves: Moves) -> None:
    """Bring tokens to their places, encoded anew where their width changes."""
    read = []
    for held, bits in product(cache.bits, repeat=2):
        chosen = np.flatnonzero((moves.bits == held) & (moves.to_bits == bits))
        for part in slabs(len(chosen), cache.n_kv_heads * cache.head_dim):
            some = chosen[part]
            tokens = cache.tiers[held].buffers.select((moves.sequence[some], moves.place[some]))
            to = moves.sequence[some], moves.to_place[some]
            read.append((bits, to, tokens if bits == held else _recoded(tokens, held, bits)))
    for bits, to, tokens in read:
        for name in Bucket._fields:
            getattr(cache.tiers[bits].buffers, name)[to] = getattr(tokens, name)
    for tier, lengths in zip(cache.tiers.values(), moves.lengths.T, strict=True):
        tier.lengths[:] = lengths


def _recoded(tokens: Bucket, held: int, bits: int) -> Bucket:
    k = codes.encode(codes.decode(tokens.k_qx, tokens.k_scale, held), bits)
    v = codes.encode(codes.decode(tokens.v_qx, tokens.v_scale, held), bits)
    return Bucket(*tokens[:3], *k, *v)
