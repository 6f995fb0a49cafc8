"""Tokens of a cache on a GPU that move between widths or leave: the CPU's bits, and codes that stay there."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from caches_there import OPTIONS, WIDTHS, F, assert_same, both, put, tokens

import cuquant as cq
from cuquant import device, testing

pytestmark = pytest.mark.gpu
Acts = list[Callable[[cq.KVCache], int]]


def appended(caches: tuple[cq.KVCache, ...], k: Any, v: Any, bits: Any = None, **options: Any) -> None:
    """The same tokens to caches on either device."""
    for cache in caches:
        place = put if cache.device == "cuda" else np.asarray
        cache.append(place(k), place(v), bits, **options)


def state(cache: cq.KVCache) -> list[bytes]:
    """All bytes of a cache, also those of no token."""
    arrays = [array for tier in cache.tiers.values() for array in (*tier.buffers, tier.lengths)]
    return [testing.as_numpy(array).tobytes() for array in (*arrays, cache.next_slots)]


@pytest.mark.parametrize("source", WIDTHS)
@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("dim", [8, 40, 128, 256])
def test_every_width_to_every_other(source: int, target: int, dim: int) -> None:
    """Magnitudes of all kinds, zeros of either sign, extremes that are there twice."""
    a, b = both(3, dim, 40, 2, WIDTHS)
    k, v = tokens(2, 30, 3, dim)
    k[0, :12] *= np.logspace(-44, 4.5, 12)[:, None, None].astype(F)
    v[1, 3] = np.rint(v[1, 3])
    v[1, 4], v[1, 5], k[1, 6, 1], k[1, 7] = 0, -0.0, 1, -v[1, 7]
    appended((a, b), k, v, source)
    for chosen in (np.arange(0, 30, 2), np.arange(30)):
        assert a.assign(chosen, target) == b.assign(chosen, target)
        assert_same(a, b)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 65504.0, 65520.0, 6e-8])
def test_extremes_too(bad: float) -> None:
    for source, target in product(WIDTHS, WIDTHS):
        a, b = both(2, 64, 8, 1, WIDTHS)
        k, v = tokens(1, 5, 2, 64)
        k[0, 1, 0, 5], v[0, 2, 1, 63] = bad, -bad
        v[0, 3], v[0, 4] = 0, bad
        v[0, 3, 0, 7] = bad
        appended((a, b), k, v, source)
        assert a.assign([1, 2, 3, 4], target) == b.assign([1, 2, 3, 4], target)
        assert a.evict([0]) == b.evict([0]) == 1
        assert_same(a, b, nan=True)


def test_full_buckets_exchange_all_their_tokens() -> None:
    a, b = both(2, 96, {16: 3, 8: 5, 2: 5}, 2)
    appended((a, b), *tokens(2, 13, 2, 96), [8, 2, 2, 8, 16, 8, 2, 8, 16, 2, 2, 16, 8])
    for bits in ([2, 8, 8, 2, 16, 2, 8, 2, 16, 8, 8, 16, 2], [16, 8, 8, 16, 8, 16, 8, 8, 2, 2, 2, 2, 2]):
        for row, widths in enumerate((bits, bits[::-1])):
            rows = np.full((2, 13), -1)
            rows[row] = np.arange(13)
            assert a.assign(rows, widths) == b.assign(rows, widths) > 0
            assert_same(a, b)


@pytest.mark.parametrize("lengths", [[40, 40, 40], [40, 0, 7], [0, 0, 0]], ids=str)
def test_evicting_the_first_the_last_all_and_none(lengths: list[int]) -> None:
    for gone in (np.arange(9), np.arange(31, 40), np.arange(40), np.arange(0)):
        a, b = both(2, 64, 50, 3, (8, 3))
        appended((a, b), *tokens(3, 40, 2, 64), np.resize([8, 8, 3], 40), lengths=lengths)
        rows = np.where(gone < np.array(lengths)[:, None], gone, -1)
        assert a.evict(rows) == b.evict(rows) == (rows >= 0).sum()
        assert_same(a, b)
        assert a.trim(4) == b.trim(4)
        assert_same(a, b)
        appended((a, b), *tokens(3, 5, 2, 64, seed=1), lengths=[5, 1, 2])
        assert_same(a, b)


STEPS = ("append", "assign", "evict", "allocate", "trim")


def step(cache: cq.KVCache, name: str, seed: int) -> int | None:
    """An operation on a cache of three sequences; equal ones do the same."""
    rng = np.random.default_rng(seed)
    slots, held = cache.slots, [set(cache.dequantize(s)[0].tolist()) for s in range(3)]
    everywhere = sorted(set.union(*held))
    if name == "append":
        place = put if cache.device == "cuda" else np.asarray
        n, fits = 12, 60 - cache.lengths
        lengths = np.minimum(rng.integers(0, n + 1, 3), fits)
        k, v = tokens(3, n, cache.n_kv_heads, cache.head_dim, seed=seed)
        ids, bits = rng.integers(0, 30, (3, n)), rng.choice(cache.bits, (3, n))
        cache.append(place(k), place(v), bits, token_ids=ids, lengths=lengths)
        return None
    if name == "assign":
        chosen = rng.choice(everywhere, rng.integers(1, 30)) if everywhere else np.arange(0)
        return cache.assign(chosen, rng.choice(cache.bits, len(chosen)))
    if name == "evict":
        rows = np.full((3, 30), -1)
        for row, names in zip(rows, held, strict=True):
            some = [i for i in sorted(names) if rng.random() < 0.3]
            row[: len(some)] = some
        return cache.evict(rows)
    if name == "allocate":
        importance = rng.random((3, slots)) if seed % 2 else None
        return cache.allocate(float(rng.uniform(2, 16)), importance, recent=int(rng.integers(4)))
    return cache.trim(int(rng.integers(10, 60)), rng.random(slots) if seed % 2 else None, recent=2)


@pytest.mark.parametrize(
    "options", [{}, *OPTIONS[:2], OPTIONS[3]], ids=["plain", "pairs", "halves", "rotated"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_walk(options: dict[str, Any], seed: int) -> None:
    """Sequences of different lengths with ids that are held twice; attention over what has moved."""
    a, b = both(3, 96, 60, 3, WIDTHS, **options)
    rng = np.random.default_rng(seed)
    for turn, name in enumerate(["append", "append", *rng.choice(STEPS, 20)]):
        assert step(a, str(name), 100 * seed + turn) == step(b, str(name), 100 * seed + turn)
        assert_same(a, b)
        assert b._known_slots == a.slots
    q = rng.standard_normal((3, 2, 6, 96), F)
    assert testing.nmse(cq.attention(put(q), b), testing.attention(q, a)) <= 1e-6


def test_tracked_importance_goes_with_its_token() -> None:
    cache = cq.KVCache(2, 64, 60, 1, (8, 4, 2), track_attention=True, device="cuda")
    k, v = map(put, tokens(1, 40, 2, 64))
    cache.append(k, v)
    cq.attention(put(tokens(1, 2, 4, 64)[0]), cache)
    alike = cache.to_device("cpu")
    for tier, own in zip(alike.tiers.values(), cache.tiers.values(), strict=True):
        tier.buffers.importance[:] = testing.as_numpy(own.buffers.importance)
    acts: Acts = [lambda c: c.allocate(3.1), lambda c: c.trim(25), lambda c: c.allocate(5.5, recent=3)]
    for act in acts:
        assert act(alike) == act(cache) > 0
        assert_same(alike, cache)


def calls(ids: Any) -> dict[str, Callable[[cq.KVCache], int]]:
    return {
        "assign": lambda cache: cache.assign(ids, 4),
        "allocate": lambda cache: cache.allocate(4.5),
        "evict": lambda cache: cache.evict(ids),
        "trim": lambda cache: cache.trim(9),
    }


@pytest.mark.parametrize("name", calls([]))
def test_codes_stay_on_the_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two transfers to the host, of lengths and of names, whatever the sequences and widths."""
    a, b = both(4, 128, 60, 3, WIDTHS)
    appended((a, b), *tokens(3, 50, 4, 128), np.resize(WIDTHS, 50), lengths=[50, 20, 50])
    sizes, as_numpy = [], device.as_numpy

    def seen(array: Any) -> Any:
        if device.is_cuda(array):
            sizes.append(array.size)
        return as_numpy(array)

    monkeypatch.setattr(device, "as_numpy", seen)
    moved = calls([0, 3, 19])[name](b)
    assert len(sizes) == 2
    assert sizes[0] == 3 * (len(WIDTHS) + 1)
    assert sizes[1] <= 2 * 3 * 50
    assert b._known_slots == 50
    more = tokens(3, 2, 4, 128, seed=1)
    appended((b,), *more, 2)
    assert len(sizes) == 2  # the host knows how many there are
    monkeypatch.undo()
    assert calls([0, 3, 19])[name](a) == moved > 0
    appended((a,), *more, 2)
    assert_same(a, b)


def test_an_error_comes_before_any_change() -> None:
    cache = cq.KVCache(2, 64, {8: 4, 4: 9}, 2, device="cuda")
    k, v = map(put, tokens(2, 8, 2, 64))
    cache.append(k, v, [8, 8, 8, 4, 4, 4, 4, 4], lengths=[8, 5])
    before = state(cache)
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: cache.assign([3, 4], 8),
            "sequence 0 holds 3 tokens of the 4 that its 8-bit bucket has room for",
        ),
        (lambda: cache.assign([[-1, -1], [3, 4]], 8), "sequence 1 holds 3 tokens of the 4"),
        (lambda: cache.assign([3, 70], 4), "the cache holds no token of id 70"),
        (lambda: cache.evict([[1], [5]]), "sequence 1 holds no token of id 5"),
        (lambda: cache.assign([3], 2), "bits is 2; this cache has 8, 4"),
        (lambda: cache.allocate(4, [1.0]), "importance has shape"),
        (lambda: cache.trim(2, recent=-1), "recent is -1"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
        assert state(cache) == before
    assert cache.assign([2, 3], [4, 8]) == 4


@pytest.mark.parametrize("name", calls([]))
def test_nothing_moves_while_a_graph_is_captured(name: str) -> None:
    """The capture goes on, and the tokens that it appends are known to the next move."""
    cupy = device.cupy()
    a, b = both(2, 64, {8: 12, 4: 12}, 1)
    k, v = tokens(1, 5, 2, 64)
    appended((a, b), k, v)
    there = put(k), put(v)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        before = state(b)
        stream.begin_capture()
        b.append(*there)
        for ids in ([0, 3], [], [70]):
            with pytest.raises(
                RuntimeError, match="cannot be moved, evicted or cleared while a CUDA graph is captured"
            ):
                calls(ids)[name](b)
        graph = stream.end_capture()
        assert state(b) == before
        graph.launch(stream)
        a.append(k, v)
        assert b._known_slots == 5
        act = calls([0, 8])[name]
        assert act(a) == act(b) > 0
        assert_same(a, b)
        assert b._known_slots == 10
        if int(a.tiers[8].lengths[0]) <= 7:
            a.append(k, v)
        graph.launch(stream)  # refused where there is no room
        stream.synchronize()
        assert_same(a, b)


def test_room_after_tokens_have_left() -> None:
    """Counted to the token: neither more nor less than there is."""
    a, b = both(2, 64, {8: 6, 4: 6}, 2)
    appended((a, b), *tokens(2, 6, 2, 64))
    one = tokens(2, 1, 2, 64, seed=3)
    acts: Acts = [
        lambda c: c.assign([0, 1], 4),
        lambda c: c.evict([2]),
        lambda c: c.trim(5),
        lambda c: c.allocate(4.8, np.arange(40.0)[: c.slots]),
    ]
    for act in acts:
        assert act(a) == act(b) > 0
        while (a.tiers[8].lengths < 6).all():
            appended((a, b), *one)
        for cache, place in ((a, np.asarray), (b, put)):
            with pytest.raises(ValueError, match="sequence 0 holds 6 tokens of the 6 that its 8-bit bucket"):
                cache.append(*map(place, one))
        assert_same(a, b)


def test_more_moves_than_blocks() -> None:
    """Which then take several each."""
    a, b = both(1, 8, 5000, 2, (8, 2))
    appended((a, b), *tokens(2, 5000, 1, 8))
    acts: Acts = [
        lambda c: c.assign(np.arange(0, 5000, 2), 2),
        lambda c: c.assign(np.arange(5000), 2),
        lambda c: c.evict(np.arange(4000)),
    ]
    for act in acts:
        assert act(a) == act(b) > 0
        assert_same(a, b)


def test_buffers_of_many_elements() -> None:
    """The second sequence begins behind 2^31 float16 numbers, of keys and of values."""
    a = cq.KVCache(8, 256, {16: 40, 4: 20}, 2)
    b = cq.KVCache(8, 256, {16: (1 << 20) + 50, 4: 20}, 2, device="cuda")
    appended((a, b), *tokens(2, 30, 8, 256), np.resize([16, 16, 4], 30))
    acts: Acts = [
        lambda c: c.assign([[0, 2, 5], [28, 2, 8]], [4, 16, 16]),
        lambda c: c.evict([[1, 3], [0, 4]]),
        lambda c: c.trim(20),
    ]
    for act in acts:
        assert act(a) == act(b) > 0
        assert_same(a, b)
