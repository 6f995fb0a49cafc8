"""Widths of cached tokens by importance."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray
from test_kvcache import WIDTHS, F, state, tokens, widths

import cuquant as cq
from cuquant.kv import allocator, widths as cached_widths


def allocated(
    importance: Any, average: float, held: Any = 16, rooms: Any = None, hysteresis: float = 0.5
) -> NDArray[np.int64]:
    weights = np.asarray(importance, float)
    n = len(weights)
    return allocator.allocate(
        weights,
        np.broadcast_to(held, n),
        np.arange(n),
        rooms or dict.fromkeys(WIDTHS, n),
        average,
        hysteresis,
    )


weights = st.lists(st.floats(1e-30, 1e6) | st.just(0.0), min_size=1, max_size=40)


@given(importance=weights, average=st.floats(2, 16), seed=st.integers(0, 99))
def test_the_average_holds(importance: list[float], average: float, seed: int) -> None:
    held = np.random.default_rng(seed).choice(WIDTHS, len(importance))
    bits = allocated(importance, average, held)
    assert {*bits.tolist()} <= {*WIDTHS}
    assert average - 8 / len(bits) < bits.mean() + 1e-9
    assert bits.mean() <= average + 1e-9


@given(importance=weights, average=st.floats(2, 16))
def test_more_important_tokens_are_never_narrower(importance: list[float], average: float) -> None:
    bits = allocated(importance, average, hysteresis=0)
    assert (np.diff(bits[np.argsort(importance, kind="stable")]) >= 0).all()


def test_importance_beyond_hysteresis_moves_tokens() -> None:
    rng = np.random.default_rng(0)
    importance = rng.lognormal(0, 2, 500)
    first = allocated(importance, 4.0)
    noise = importance * rng.uniform(0.85, 1.2, 500)
    assert np.array_equal(allocated(noise, 4.0, first), first)
    assert not np.array_equal(allocated(noise, 4.0, first, hysteresis=0), first)
    noise[first.argmin()] *= 1e6
    assert allocated(noise, 4.0, first)[first.argmin()] == 16


def test_equal_importance_favours_the_newest() -> None:
    assert allocated([0, 0, 0, 0], 2.5).tolist() == [2, 2, 3, 3]
    assert allocated([5, 5, 5, 5], 2.5, held=2).tolist() == [2, 2, 3, 3]


def test_the_least_sum_of_errors() -> None:
    """Against all ways to give six tokens widths, at averages that greedy steps reach exactly."""
    importance = np.random.default_rng(3).lognormal(0, 2, 6)
    ways = np.stack(np.meshgrid(*[WIDTHS] * 6), axis=-1).reshape(-1, 6)
    errors = (importance * 4.0**-ways).sum(axis=1)
    for average in (2.5, 3.0, 3.5, 4.0, 5.0, 7.0):
        bits = allocated(importance, average, hysteresis=0)
        best = errors[ways.sum(axis=1) <= bits.sum()].min()
        assert (importance * 4.0**-bits).sum() == pytest.approx(best)


def least_errors(importance: NDArray[np.float64], some: list[int], most: int) -> NDArray[np.float64]:
    """The least sums of importance * 4^-bits of all widths that take at most 0, 1, ... `most` bits."""
    least = np.zeros(most + 1)
    for weight in importance:
        ways = [np.r_[np.full(b, np.inf), least][: most + 1] + weight * 4.0**-b for b in some]
        least = np.min(ways, axis=0)
    return least


@example(16, 1.0, 65)
@given(st.integers(1, 30), st.floats(0, 1), st.integers(0, 9999))
def test_the_least_sum_of_errors_for_the_bits_that_are_taken(n: int, share: float, seed: int) -> None:
    """By dynamic programming; at the average itself another may be less, by less than one more step saves."""
    rng = np.random.default_rng(seed)
    some = sorted(rng.choice(WIDTHS, rng.integers(2, 6), replace=False).tolist())
    average = some[0] + share * (some[-1] - some[0])
    importance = rng.lognormal(0, 2, n)
    bits = allocated(importance, average, some[-1], dict.fromkeys(some, n), hysteresis=0)
    total, most = int(bits.sum()), int(average * n + 1e-6)
    least = least_errors(importance, some, most)
    error = (importance * 4.0**-bits).sum()
    assert error == pytest.approx(least[total], rel=1e-12)
    following = dict(pairwise(some))
    steps = [(b, following[b], w) for b, w in zip(bits.tolist(), importance, strict=True) if b in following]
    saved, cost = max(
        ((w * (4.0**-b - 4.0**-c), c - b) for b, c, w in steps), key=lambda s: s[0] / s[1], default=(0, 0)
    )
    assert error - least[most] <= saved * (1 + 1e-9) + error * 1e-12  # both sums are rounded
    assert not steps or total > most - cost


def test_what_a_step_leaves_of_the_average_is_not_used() -> None:
    """Of 9 bits: the next step of the first token takes 4 of the 3 that are left."""
    assert allocated([1, 0.01], 4.5, 2).tolist() == [4, 2]
    assert allocated([1, 0.01], 5, 2).tolist() == [8, 2]


def test_rooms_come_before_the_average() -> None:
    importance = np.arange(10.0) + 1
    few = allocated(importance, 8.0, rooms={16: 1, 8: 2, 4: 3, 2: 10})
    assert few.tolist() == [2, 2, 2, 2, 4, 4, 4, 8, 8, 16]
    many = allocated(importance, 2.0, rooms={16: 10, 4: 3, 2: 4})
    assert many.tolist() == [2, 2, 2, 2, 4, 4, 4, 16, 16, 16]


def fitting(rng: np.random.Generator, n: int) -> tuple[dict[int, int], NDArray[np.int64]]:
    """Rooms of some widths that n tokens fit in, and widths that they have there."""
    some = sorted(rng.choice(WIDTHS, rng.integers(2, 6), replace=False).tolist(), reverse=True)
    room = rng.integers(1, n + 1, len(some))
    room[rng.integers(len(some))] += n - min(n, room.sum())
    return dict(zip(some, room.tolist(), strict=True)), rng.permutation(np.repeat(some, room))[:n]


@given(st.integers(1, 8), st.floats(0, 1), st.integers(0, 9999))
def test_the_least_sum_of_errors_for_which_there_is_room(n: int, share: float, seed: int) -> None:
    """Against all ways to fill the widths, most important tokens first.

    Each time the way that saves most per bit follows, as long as it is affordable. Others that cost as much
    as the result can be better by a little: of steps that are worth their mean together some may be too many.
    """
    rng = np.random.default_rng(seed)
    rooms, held = fitting(rng, n)
    average = min(rooms) + share * (max(rooms) - min(rooms))
    importance = -np.sort(-rng.lognormal(0, 2, n))
    bits = allocated(importance, average, held, rooms, hysteresis=0)
    assert all((bits == b).sum() <= room for b, room in rooms.items())
    counts = product(*(range(min(room, n) + 1) for room in rooms.values()))
    ways = np.array([np.repeat([*rooms], count) for count in counts if sum(count) == n])
    total, budget = ways.sum(axis=1), max(ways.sum(axis=1).min(), average * n + 1e-6)
    assert bits.sum() <= budget
    step = np.diff(sorted(rooms)).max()
    assert bits.sum() > min(total.max() + 1, budget) - step - 1
    errors = (importance * 4.0**-ways).sum(axis=1)
    best = following = total.argmin()
    while total[following] <= budget and total[best := following] < total.max():
        more = total > total[best]
        saved = np.where(more, errors[best] - errors, -np.inf) / np.where(more, total - total[best], 1)
        following = saved.argmax()
    assert (importance * 4.0**-bits).sum() <= errors[best] * (1 + 1e-9)


@pytest.mark.parametrize("average", [2.4, 3.0, 4.0])
def test_the_budget_is_spent_where_there_is_room(average: float) -> None:
    """A few tokens are worth all steps, for which the widest bucket has no room; or a middle one is full."""
    importance = np.where(np.arange(100) < 10, 1e6, 1.0)
    for rooms in ({16: 2, 4: 100, 2: 100}, {16: 30, 4: 10, 2: 100}):
        bits = allocated(importance, average, 2, rooms)
        assert average - 12 / 100 < min(bits.mean(), average) <= average
        assert np.array_equal(allocated(importance, average, bits, rooms), bits)


def test_hysteresis_holds_where_a_bucket_is_full() -> None:
    cache = cq.KVCache(1, 8, {8: 2, 4: 10})
    cache.append(*tokens(1, 10, 1, 8), 4)
    rest = [0.5] * 7
    assert cache.allocate(8, [1.00, 1.01, 0.99, *rest]) == 2
    assert cache.allocate(8, [0.99, 1.01, 1.00, *rest]) == 0
    assert cache.allocate(8, [0.99, 1.01, 1.50, *rest]) == 2
    assert cache.allocate(4, [1, 1, 1, *rest], hysteresis=0) == 2  # to what has room for all
    full = {16: 10, 4: 3, 2: 7}
    held = allocated([2, 1, 1, *rest], 2, 2, full)
    assert np.array_equal(allocated([1, 1.2, 1.2, *rest], 2, held, full), held)


def test_allocate_holds_each_sequence() -> None:
    cache = cq.KVCache(2, 16, 64, 2)
    cache.append(*tokens(2, 40, 2, 16), lengths=[40, 20])
    importance = np.random.default_rng(0).random((2, 40))
    assert cache.allocate(3.5, importance, recent=3) > 0
    for sequence, n in ((0, 40), (1, 20)):
        held = widths(cache, sequence)
        assert min(held[i] for i in range(n - 3, n)) >= max(held.values())
        assert 3.5 - 4 / n <= np.mean([*held.values()]) <= 3.5
    before = state(cache)
    assert cache.allocate(3.5, importance * 1.2, recent=3) == 0
    assert state(cache) == before


def test_recent_tokens_count_as_much_as_the_most_important() -> None:
    """Also where none is important: then steps of others, the lowest first, come after theirs."""
    for bits, importance, recent, expected in (
        ((8, 2), [3, 9, 9, 9, 9, 1, 1, 1], 1, [2, 2, 2, 8, 8, 2, 2, 8]),
        ((8, 4, 2), [0] * 8, 2, [2, 2, 2, 2, 2, 4, 8, 8]),
    ):
        cache = cq.KVCache(1, 8, 8, bits=bits)
        cache.append(*tokens(1, 8, 1, 8), 2)
        cache.allocate(sum(expected) / 8, importance, recent=recent)
        held = widths(cache)
        assert [held[i] for i in range(8)] == expected


def test_allocate_by_attention_received() -> None:
    cache = cq.KVCache(1, 16, 64, bits=(8, 2), track_attention=True)
    k, v = tokens(1, 30, 1, 16)
    cache.append(k, v)
    for _ in range(3):
        cq.attention(np.concatenate([k[:, [4]], k[:, [9]]], axis=2) * F(5), cache)
    received = {
        int(s): float(w)
        for tier in cache.tiers.values()
        for s, w in zip(tier.bucket(0).global_slots, tier.bucket(0).importance, strict=True)
    }
    assert sum(received.values()) == pytest.approx(3, rel=1e-5)
    assert {4, 9} == {*sorted(received, key=received.__getitem__)[-2:]}
    cache.allocate(2.4, recent=0)
    assert {i for i, bits in widths(cache).items() if bits == 8} == {4, 9}
    assert cache.tiers[8].bucket(0).importance.tolist() == [np.float32(received[4]), np.float32(received[9])]


def test_the_newest_count_where_attention_has_had_little_time() -> None:
    """A sum over steps says little of new tokens: `trim` keeps them, `allocate` keeps them wide."""
    cache = cq.KVCache(1, 16, 256, bits=(8, 2), track_attention=True)
    k, v = tokens(1, 200, 1, 16)
    for step in range(200):
        cache.append(k[:, [step]], v[:, [step]], bits=8)
        cq.attention(k[:, [step]], cache)
        cache.trim(100)
    slots = cache.tokens(0).slots
    assert len(slots) == 100
    assert set(range(150, 200)) <= set(slots.tolist())
    assert min(slots) < 50
    cache.allocate(5)
    assert all(widths(cache)[i] == 8 for i in range(150, 200))
    cache.trim(6, recent=1)
    assert 199 in cache.tokens(0).slots
    cache.trim(5, importance=np.arange(200, 0, -1))
    assert 199 not in cache.tokens(0).slots


@pytest.mark.parametrize(("held", "length", "newest"), [(40, 10, 5), (40, 11, 6), (200, 160, 64), (9, 20, 0)])
def test_half_of_the_tokens_that_stay_are_new_ones(held: int, length: int, newest: int) -> None:
    """64 at most; the others are those of which attention has made the most, here the oldest."""
    cache = cq.KVCache(1, 8, held, bits=(8,), track_attention=True)
    cache.append(*tokens(1, held, 1, 8))
    cache.tiers[8].buffers.importance[:] = np.arange(held, 0, -1)
    assert cache.trim(length) == max(0, held - length)
    stay = min(held, length)
    oldest = [*range(stay)] if not newest else [*range(stay - newest), *range(held - newest, held)]
    assert cache.tokens(0).slots.tolist() == oldest


def test_tokens_of_which_nothing_is_known_are_alike() -> None:
    """Without attention that was tracked the newest are worth no more than the others."""
    weights = {}
    for track in (False, True):
        cache = cq.KVCache(1, 8, 8, bits=(8, 2), track_attention=track)
        cache.append(*tokens(1, 8, 1, 8))
        weights[track] = cached_widths.ranked(cache, None, None)[2].tolist()
    assert weights == {False: [0] * 8, True: [0] * 4 + [1] * 4}


def test_importance_reaches_the_last_slot_of_the_longest_sequence() -> None:
    cache = cq.KVCache(2, 16, 64, 2)
    cache.append(*tokens(2, 40, 2, 16), lengths=[20, 40])
    with pytest.raises(ValueError, match=r"importance has shape \(39,\); \(40,\) or \(2, 40\) is needed"):
        cache.trim(5, np.ones(39))


def test_allocate_leaves_room_for_tokens_to_come() -> None:
    cache = cq.KVCache(1, 16, {16: 8, 4: 64}, track_attention=True)
    k, v = tokens(1, 60, 1, 16)
    for step in range(60):
        cache.append(k[:, [step]], v[:, [step]])
        cq.attention(k[:, [step]], cache)
        cache.allocate(16, coming=1)
        assert len(cache.tiers[16].bucket(0).token_ids) == min(step + 1, 7)
    cache.append(k[:, :1], v[:, :1])
    with pytest.raises(ValueError, match="16-bit bucket has room for"):
        cache.append(k[:, :1], v[:, :1])
    full = cq.KVCache(1, 16, {16: 4, 4: 4})
    full.append(k[:, :4], v[:, :4])
    full.append(k[:, :4], v[:, :4], bits=4)
    full.allocate(16, coming=2)
    assert full.tokens(0).bits.tolist().count(16) == 4
