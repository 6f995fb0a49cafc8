"""The cache of keys and values: buckets, moving, evicting."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing
from cuquant.kv import codes

F = np.float32
PACKED = (4, 3, 2)
WIDTHS = (16, 8, *PACKED)
Tokens = NDArray[np.float32]


def tokens(*shape: int, seed: int = 0) -> tuple[Tokens, Tokens]:
    """Keys and values of that shape."""
    k, v = np.random.default_rng(seed).standard_normal((2, *shape), F)
    return k, v


def filled(n: int = 20, batch: int = 2, bits: Any = None, **settings: Any) -> cq.KVCache:
    """A cache of n tokens in each sequence, spread over all widths."""
    room = settings.pop("capacity", 64)
    widths = settings.pop("widths", None if isinstance(room, dict) else WIDTHS)
    cache = cq.KVCache(2, 16, room, batch, widths, **settings)
    spread = np.random.default_rng(1).choice(cache.bits, (batch, n)) if bits is None else bits
    cache.append(*tokens(batch, n, 2, 16), spread)
    return cache


def state(cache: cq.KVCache) -> list[bytes]:
    """Everything a cache holds."""
    scales = [] if cache.key_scales is None else [cache.key_scales.tobytes()]
    kept = [cache.next_slots.tobytes(), *scales]
    for tier in cache.tiers.values():
        kept.append(tier.lengths.tobytes())
        kept += [array.tobytes() for b in range(cache.batch) for array in tier.bucket(b)]
    return kept


def widths(cache: cq.KVCache, sequence: int = 0) -> dict[int, int]:
    """Bits by token id."""
    return {int(i): bits for bits, tier in cache.tiers.items() for i in tier.bucket(sequence).token_ids}


# Buckets.


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_bucket_holds_what_the_document_names(bits: int) -> None:
    cache = cq.KVCache(2, 96, 10, 3, WIDTHS)
    k, v = tokens(3, 4, 2, 96)
    cache.append(k, v, bits)
    packed = {16: 96, 8: 96, 4: 48, 3: 36, 2: 24}[bits]
    for sequence in range(3):
        bucket = cache.tiers[bits].bucket(sequence)
        for qx, scale, x in ((bucket.k_qx, bucket.k_scale, k), (bucket.v_qx, bucket.v_scale, v)):
            assert (qx.shape, scale.shape) == ((4, 2, packed), (4, 2 if bits < 16 else 0))
            assert [a.dtype for a in (qx, scale)] == [codes.dtype(bits), np.float16]
            assert np.array_equal(qx, codes.encode(x[sequence], bits)[0])
        assert bucket.token_ids.tolist() == bucket.global_slots.tolist() == [0, 1, 2, 3]
        assert bucket.token_ids.dtype == bucket.global_slots.dtype == np.int32
    assert [tier.lengths.tolist() for tier in cache.tiers.values()] == [
        [4, 4, 4] if b == bits else [0, 0, 0] for b in WIDTHS
    ]


def test_buffers_are_made_once() -> None:
    cache = filled()
    before = [array.ctypes.data for tier in cache.tiers.values() for array in tier.buffers]
    cache.assign(np.arange(5), 4)
    cache.append(*tokens(2, 3, 2, 16))
    cache.evict([1])
    cache.allocate(3.0)
    assert [array.ctypes.data for tier in cache.tiers.values() for array in tier.buffers] == before


def test_append_goes_to_the_widest_unless_told() -> None:
    cache = cq.KVCache(2, 16, 64, 2, (2, 8, 4))
    assert cache.bits == (8, 4, 2)
    cache.append(*tokens(2, 2, 2, 16))
    cache.append(*tokens(2, 3, 2, 16), 2)
    cache.append(*tokens(2, 3, 2, 16), [4, 8, 4])
    assert widths(cache) == widths(cache, 1) == {0: 8, 1: 8, 2: 2, 3: 2, 4: 2, 5: 4, 6: 8, 7: 4}


def test_sequences_of_different_lengths() -> None:
    cache = cq.KVCache(2, 16, 64, 3)
    k, v = tokens(3, 4, 2, 16)
    cache.append(k, v, lengths=[4, 0, 2])
    cache.append(k, v, lengths=[1, 3, 0])
    assert cache.lengths.tolist() == cache.next_slots.tolist() == [5, 3, 2]
    assert cache.slots == 5
    ids, slots, *_ = cache.dequantize(1)
    assert ids.tolist() == slots.tolist() == [0, 1, 2]


@pytest.mark.parametrize("scales", [None, "pairs", np.full((2, 32), 0.125, F)])
def test_any_number_is_a_token(scales: Any) -> None:
    """Without a warning: where those are errors, a sequence would have its tokens, and the next not."""
    k, v = tokens(3, 4, 2, 32)
    k[1, 2, 0, :3], v[1, 3, 1, 5], k[2, 0, 0, 1] = (np.inf, -np.inf, np.nan), np.inf, 3e38
    cache = cq.KVCache(2, 32, 10, 3, (8, 4), rotate=True, key_scales=scales, track_attention=True)
    cache.append(k, v, [8, 4, 8, 4])
    assert (cache.lengths.tolist(), cache.next_slots.tolist()) == ([4] * 3, [4] * 3)
    y = cq.attention(np.full((3, 1, 2, 32), 3e38, F), cache, scale=2e38)
    assert np.isnan(y[1]).any()
    for sequence, numbers in enumerate(k):
        ordinary = np.abs(numbers).max(axis=-1) < 1e6
        assert np.isfinite(cache.dequantize(sequence)[2][ordinary]).all()


def test_next_slots_cannot_be_written() -> None:
    """Else tokens would be given slots twice."""
    cache = cq.KVCache(2, 16, 10, 2)
    k, v = tokens(2, 3, 2, 16)
    seen = cache.next_slots
    cache.append(k, v, lengths=[2, 3])
    assert seen.tolist() == cache.next_slots.tolist() == [2, 3]
    for made in (cache, cache.copy(), pickle.loads(pickle.dumps(cache))):
        with pytest.raises(ValueError, match="read-only"):
            made.next_slots[0] = 0
        with pytest.raises(AttributeError):
            made.next_slots = np.zeros(2, np.int32)  # type: ignore[misc]
        made.append(k, v)
        assert made.next_slots.tolist() == [5, 6]
        made.clear(0)
        assert made.next_slots.tolist() == [0, 6]


def test_tokens_beyond_lengths_may_be_anything() -> None:
    """Padding, as engines have it."""
    a, b = (cq.KVCache(2, 16, 10, 2, (8, 4)) for _ in range(2))
    k, v = tokens(2, 3, 2, 16)
    a.append(k, v, [[8, 4, 0], [4, -1, 99]], token_ids=[[5, 6, -1], [7, -1, 2**40]], lengths=[2, 1])
    b.append(k, v, [[8, 4, 8], [4, 8, 8]], token_ids=[[5, 6, 0], [7, 0, 0]], lengths=[2, 1])
    assert state(a) == state(b)
    a._next_slots[:] = b._next_slots[:] = 2**31 - 2
    a.append(k, v, lengths=[1, 0])
    for lengths, bits, problem in (([0, 2], 8, "slot 2147483648 is beyond int32"), ([0, 0], 7, "bits is 7")):
        with pytest.raises(ValueError, match=problem):
            b.append(k, v, bits, lengths=lengths)


def test_the_largest_id() -> None:
    cache = cq.KVCache(2, 16, 10)
    cache.append(*tokens(1, 1, 2, 16), 4, token_ids=[2**31 - 1])
    assert cache.assign([2**31 - 1], 2) == 1


def test_slots_end_with_int32() -> None:
    """Before the next one would be negative, and queries by themselves would see nothing."""
    cache = cq.KVCache(2, 16, 10)
    cache._next_slots[:] = 2**31 - 3
    k, v = tokens(1, 2, 2, 16)
    cache.append(k, v)
    assert (cache.slots, cache.tokens(0).slots.tolist()) == (2**31 - 1, [2**31 - 3, 2**31 - 2])
    assert cq.attention(k[:, -1:], cache).any()
    with pytest.raises(ValueError, match="slot 2147483648 is beyond int32: clear the cache"):
        cache.append(k[:, :1], v[:, :1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, F])
def test_any_floats_and_strides(dtype: Any) -> None:
    k, v = (a.astype(dtype) for a in tokens(2, 5, 2, 16))
    plain, strided = cq.KVCache(2, 16, 8, 2), cq.KVCache(2, 16, 8, 2)
    plain.append(k.astype(F), v.astype(F))
    strided.append(np.repeat(k, 2, axis=3)[..., ::2], np.asfortranarray(v))
    assert state(plain) == state(strided)


@pytest.mark.parametrize("options", [{}, {"key_scales": "pairs"}, {"rotate": True}])
def test_dequantize_gives_back_what_came_in(options: dict[str, Any]) -> None:
    k, v = tokens(1, 30, 2, 32)
    k[..., 3] *= 50
    for bits, bound in ((16, 1e-6), (8, 1e-3), (4, 0.05)):
        cache = cq.KVCache(2, 32, 30, 1, (bits,), **options)
        cache.append(k, v)
        _, _, keys, values = cache.dequantize()
        assert testing.nmse(keys, k[0]) < bound
        assert testing.nmse(values, v[0]) < bound


@pytest.mark.parametrize("how", ["pairs", "halves"])
def test_automatic_key_scales(how: str) -> None:
    """The channels of a rotary pair have one scale, a power of two, so float16 tokens are exact."""
    k, v = (a.astype(np.float16) for a in tokens(2, 30, 1, 16))
    pair = [4, 5] if how == "pairs" else [3, 11]
    k[..., pair] *= 64
    k[..., 0] = k[..., 1] = k[..., 8] = 0
    cache = cq.KVCache(1, 16, 30, 2, (16,), key_scales=how)
    cache.append(k, v, lengths=[0, 30])
    cache.append(k[:, :20], v[:, :20], lengths=[20, 0])
    assert cache.key_scales is not None
    assert cache.key_scales[:, 0, pair].tolist() == [[8, 8], [8, 8]]
    assert {*cache.key_scales.ravel().tolist()} == {1, 8}
    for sequence, n in ((0, 20), (1, 30)):
        assert np.array_equal(cache.dequantize(sequence)[2], k[sequence, :n].astype(F))


def test_given_key_scales() -> None:
    given = np.random.default_rng(0).uniform(0.5, 4, (2, 16)).astype(F)
    k, v = tokens(1, 5, 2, 16)
    cache, divided = cq.KVCache(2, 16, 5, bits=(4,), key_scales=given), cq.KVCache(2, 16, 5, bits=(4,))
    cache.append(k, v)
    divided.append(k / given, v)
    assert np.array_equal(cache.tiers[4].buffers.k_qx, divided.tiers[4].buffers.k_qx)


def test_key_scales_help_keys_with_large_channels() -> None:
    k, v = tokens(1, 200, 2, 64)
    k[..., 6:8] *= 30

    def error(**options: Any) -> float:
        cache = cq.KVCache(2, 64, 200, bits=(4,), **options)
        cache.append(k, v)
        others = np.delete(cache.dequantize()[2] - k[0], [6, 7], axis=-1)
        return float(np.square(others).mean())

    assert error(key_scales="pairs") < error() / 4
    assert error(rotate=True) < error()


def test_bytes_and_bits() -> None:
    cache = cq.KVCache(2, 64, {16: 4, 4: 10, 3: 10}, 3)
    cache.append(*tokens(3, 6, 2, 64), [16, 4, 4, 3, 3, 3])
    per = {16: 2 * 2 * 64 * 2, 4: 2 * 2 * (32 + 2), 3: 2 * 2 * (24 + 2)}
    names = 12  # token_ids, global_slots, importance
    assert cache.capacity == 24
    assert cache.nbytes == 3 * (4 * (per[16] + names) + 10 * (per[4] + names) + 10 * (per[3] + names))
    assert cache.used_nbytes == 3 * (per[16] + 2 * per[4] + 3 * per[3])
    assert cache.average_bits == (16 + 8 + 9) / 6
    assert cq.KVCache(1, 64, 1).average_bits == 0
    assert repr(cache) == (
        "KVCache(n_kv_heads=2, head_dim=64, capacity={16: 4, 4: 10, 3: 10}, batch=3, "
        "fullest_buckets={16: 1, 4: 2, 3: 3}, longest_sequence=6, "
        f"average_bits=5.5, nbytes={cache.nbytes})"
    )


def test_a_cache_shows_the_arguments_that_make_it() -> None:
    empty = cq.KVCache(2, 64, 24)
    assert repr(empty) == (
        "KVCache(n_kv_heads=2, head_dim=64, capacity=24, batch=1, bits=(8, 4, 3, 2), "
        f"tokens={{8: 0, 4: 0, 3: 0, 2: 0}}, average_bits=0, nbytes={empty.nbytes})"
    )
    cache = cq.KVCache(2, 32, {4: 9, 16: 3}, key_scales="pairs", rotate=True, track_attention=True)
    cache.append(*tokens(1, 5, 2, 32), [16, 4, 4, 4, 4])
    options = "key_scales='pairs', rotate=True, track_attention=True"
    for same in (cache, cache.copy()):
        assert f"capacity={{16: 3, 4: 9}}, batch=1, {options}, tokens={{16: 1, 4: 4}}, " in repr(same)
    given = cq.KVCache(2, 64, 8, bits=(4,), key_scales=np.ones((2, 64), F))
    assert "capacity=8, batch=1, bits=(4,), key_scales=<float32 (1, 2, 64)>, tokens={4: 0}," in repr(given)


def test_what_sequences_hold_is_compared_with_their_room() -> None:
    """Not a sum over sequences, nor over the fullest buckets of several."""
    cache = cq.KVCache(2, 64, 10, 2, (8, 4))
    cache.append(*tokens(2, 10, 2, 64), [[8] * 10, [4] * 10], lengths=[10, 9])
    assert "capacity=10, batch=2, bits=(8, 4), fullest_buckets={8: 10, 4: 9}, longest_sequence=10," in repr(
        cache
    )


# Moving and evicting.


@pytest.mark.parametrize("source", WIDTHS)
@pytest.mark.parametrize("target", WIDTHS)
def test_assign_quantizes_what_the_cache_holds(source: int, target: int) -> None:
    cache = filled(9, 1, source)
    _, _, k, v = cache.dequantize()
    assert cache.assign([7, 2], target) == (0 if source == target else 2)
    expected_k, expected_v = k.copy(), v.copy()
    for x, changed in ((expected_k, [2, 7]), (expected_v, [2, 7])):
        if source != target:
            x[changed] = codes.decode(*codes.encode(x[changed], target), target)
    _, slots, k, v = cache.dequantize()
    assert slots.tolist() == list(range(9))
    assert np.array_equal(k, expected_k)
    assert np.array_equal(v, expected_v)
    assert widths(cache) == {i: target if i in (2, 7) else source for i in range(9)}


def test_assign_of_each_sequence() -> None:
    cache = filled(4, 2, 8)
    assert cache.assign([[0, 1], [3, -1]], [[4, 2], [3, 3]]) == 3
    assert widths(cache) == {0: 4, 1: 2, 2: 8, 3: 8}
    assert widths(cache, 1) == {0: 8, 1: 8, 2: 8, 3: 3}


def test_the_last_width_of_an_id_counts() -> None:
    cache = filled(4, 1, 8)
    cache.assign([1, 2, 1], [2, 3, 4])
    assert widths(cache) == {0: 8, 1: 4, 2: 3, 3: 8}


def test_tokens_of_one_id_go_together() -> None:
    cache = cq.KVCache(2, 16, 9, 1)
    cache.append(*tokens(1, 6, 2, 16), token_ids=[5, 5, 9, 9, 9, 7])
    assert cache.assign([9], 2) == 3
    assert cache.tiers[2].bucket(0).global_slots.tolist() == [2, 3, 4]
    assert cache.evict(5) == 2
    assert cache.assign(7, 2) == 1
    assert cache.dequantize()[1].tolist() == [2, 3, 4, 5]


def test_nothing_to_do() -> None:
    cache = filled(4)
    before = state(cache)
    assert cache.assign([], 4) == cache.evict([]) == cache.trim(9) == 0
    cache.append(*tokens(2, 0, 2, 16))
    assert state(cache) == before


def test_evicted_slots_stay_empty() -> None:
    cache = filled(10, 2)
    _, _, k, v = cache.dequantize()
    assert cache.evict([[0, 4], [9, -1]]) == 3
    cache.append(*tokens(2, 1, 2, 16))
    ids, slots, keys, values = cache.dequantize()
    assert ids.tolist() == slots.tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert np.array_equal(keys[:-1], np.delete(k, [0, 4], axis=0))
    assert np.array_equal(values[:-1], np.delete(v, [0, 4], axis=0))
    assert cache.dequantize(1)[1].tolist() == [*range(9), 10]


def test_trim_keeps_the_important_and_the_newest() -> None:
    cache = filled(8)
    importance = np.array([9, 0, 8, 0, 7, 1, 0, 0], F)
    assert cache.trim(5, importance, recent=2) == 6
    for sequence in range(2):
        assert cache.dequantize(sequence)[1].tolist() == [0, 2, 4, 6, 7]
    cache.trim(2, np.zeros(8))
    assert cache.dequantize()[1].tolist() == [6, 7]
    cache.trim(0)
    assert cache.lengths.tolist() == [0, 0]


def test_clear() -> None:
    cache = filled(8, key_scales="pairs")
    cache.clear()
    k, v = tokens(2, 3, 2, 16, seed=5)
    cache.append(k * 100, v, 4)
    fresh = cq.KVCache(2, 16, 64, 2, WIDTHS, key_scales="pairs")
    fresh.append(k * 100, v, 4)
    assert state(cache) == state(fresh)


operations = st.lists(
    st.tuples(st.sampled_from(["append", "assign", "evict", "allocate", "trim"]), st.integers(0, 2**31)),
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(steps=operations)
def test_tokens_are_never_lost_or_mixed_up(steps: list[tuple[str, int]]) -> None:
    """Each token's numbers carry its slot and sequence: they stay together wherever it goes."""
    cache, live, made = cq.KVCache(1, 8, 40, 2, WIDTHS), [set[int](), set[int]()], [0, 0]
    for name, seed in steps:
        rng = np.random.default_rng(seed)
        if name == "append":
            lengths = [
                min(int(n), 40 - int(held))
                for n, held in zip(rng.integers(0, 6, 2), cache.lengths, strict=True)
            ]
            slots = np.array(made)[:, None] + np.arange(6)
            x = np.broadcast_to(
                1 + slots[..., None, None] + 100 * np.arange(2)[:, None, None, None], (2, 6, 1, 8)
            )
            cache.append(x.astype(F), -x.astype(F), rng.choice(WIDTHS, (2, 6)), lengths=lengths)
            for sequence in range(2):
                live[sequence] |= {*range(made[sequence], made[sequence] + lengths[sequence])}
                made[sequence] += int(lengths[sequence])
        elif name == "assign":
            both = sorted(live[0] | live[1])
            chosen = rng.choice(both, rng.integers(0, len(both) + 1)) if both else np.array(both)
            cache.assign(chosen, rng.choice(WIDTHS, len(chosen)))
        elif name == "evict":
            for sequence in range(2):
                some = [i for i in live[sequence] if rng.random() < 0.2]
                rows = [some, [-1] * len(some)]
                assert cache.evict(rows if sequence == 0 else rows[::-1]) == len(some)
                live[sequence] -= {*some}
        elif name == "allocate":
            cache.allocate(rng.uniform(2, 16), rng.random((2, max(made))), recent=int(rng.integers(4)))
        else:
            cache.trim(int(rng.integers(1, 41)))
            live = [{*cache.dequantize(b)[1].tolist()} & live[b] for b in range(2)]
        for sequence in range(2):
            ids, held, k, v = cache.dequantize(sequence)
            assert ids.tolist() == held.tolist() == sorted(live[sequence])
            assert np.allclose(k, (1 + held + 100 * sequence)[:, None, None], rtol=0.01)
            assert np.array_equal(v, -k)
        assert (cache.lengths <= 40).all()
        assert cache.next_slots.tolist() == made
