"""The cache of keys and values: codes, buckets, widths by importance, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from scipy.linalg import hadamard

import cuquant as cq
from cuquant import testing
from cuquant.kv import allocator, codes

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
    cache = cq.KVCache(2, 16, settings.pop("capacity", 64), batch, settings.pop("widths", WIDTHS), **settings)
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


# Codes.


def plain_codes(raw: bytes, bits: int, count: int) -> list[int]:
    """Codes of packed bytes, as one long little-endian number."""
    number = int.from_bytes(raw, "little")
    return [(number >> (bits * i) & (1 << bits) - 1) - (1 << bits - 1) for i in range(count)]


def test_packing_by_hand() -> None:
    """-4 .. 3 at 3 bits are stored as 0 .. 7, eight to three bytes, the first code in the lowest bits."""
    qx, scale = codes.encode(np.array([[-4, -3, -2, -1, 0, 1, 2, 3]], F), 3)
    assert scale.tolist() == [1]
    assert qx.tolist() == [[0b10_001_000, 0b1_100_011_0, 0b111_110_10]]
    assert codes.encode(np.array([[-8, 7, 1, -1] * 2], F), 4)[0].tolist() == [[0xF0, 0x79] * 2]
    assert codes.encode(np.array([[-2, -1, 0, 1] * 2], F), 2)[0].tolist() == [[0b11_10_01_00] * 2]
    assert codes.encode(np.array([[-128, 127, 0, 1] * 2], F), 8)[0].tolist() == [[-128, 127, 0, 1] * 2]


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e5, max_value=1e5)


@settings(deadline=None, max_examples=50)
@given(x=arrays(F, (3, 2, 16), elements=numbers), bits=st.sampled_from((8, *PACKED)))
def test_codes_as_defined(x: Tokens, bits: int) -> None:
    least = -(1 << (bits - 1))
    qx, scale = codes.encode(x, bits)
    assert qx.shape == (3, 2, codes.packed_dim(16, bits))
    assert scale.shape == (3, 2)
    assert [a.dtype for a in (qx, scale)] == [np.int8 if bits == 8 else np.uint8, np.float16]
    for index in np.ndindex(3, 2):
        row, raw = x[index], qx[index]
        q = raw.astype(int) if bits == 8 else np.array(plain_codes(raw.tobytes(), bits, 16))
        extreme = row[np.abs(row).argmax()]
        wanted = extreme / least
        step = float(scale[index])
        assert abs(wanted) <= abs(step) <= abs(wanted) * (1 + 2**-10) + 2**-24
        assert step * wanted >= 0
        decoded = q * step
        assert np.array_equal(codes.decode(qx, scale, bits)[index], decoded.astype(F))
        clipped = q == -1 - least
        assert (np.abs(decoded - row) <= abs(step) * np.where(clipped, 1.001, 0.501)).all()


def test_codes_of_16_bits_are_float16() -> None:
    x = tokens(3, 2, 16)[0]
    qx, scale = codes.encode(x, 16)
    assert scale.shape == (3, 0)
    assert np.array_equal(codes.decode(qx, scale, 16), x.astype(np.float16).astype(F))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("bits", [8, *PACKED])
def test_what_no_code_stands_for_is_nan_in_its_row(bad: float, bits: int) -> None:
    x = tokens(3, 2, 16)[0]
    x[1, 0, 5] = bad
    decoded = codes.decode(*codes.encode(x, bits), bits)
    assert np.isnan(decoded[1, 0]).all()
    decoded[1, 0] = 0
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("bits", [8, *PACKED])
def test_magnitudes(magnitude: float, bits: int) -> None:
    x = tokens(50, 2, 64)[0] * F(magnitude)
    error = testing.nmse(codes.decode(*codes.encode(x, bits), bits), x)
    assert error < {8: 2e-3, 4: 0.02, 3: 0.05, 2: 0.2}[bits] or magnitude < 1e-5


def test_rotation_is_hadamard_s() -> None:
    x = tokens(5, 2, 96)[0]
    matrix = hadamard(32) / np.sqrt(32)
    expected = (x.astype(float).reshape(5, 2, 3, 32) @ matrix).reshape(x.shape)
    assert np.allclose(codes.rotate(x), expected, atol=1e-6)
    assert np.allclose(codes.rotate(codes.rotate(x)), x, atol=1e-6)


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
        "KVCache(n_kv_heads=2, head_dim=64, capacity=24, batch=3, tokens={16: 3, 4: 6, 3: 9}, "
        f"average_bits=5.5, nbytes={cache.nbytes})"
    )


# What does not fit.


def full_bucket() -> cq.KVCache:
    return filled(6, 1, [8, 8, 8, 4, 4, 4], capacity={8: 3, 4: 8})


FULL: dict[str, tuple[Callable[[], cq.KVCache], Callable[[cq.KVCache], Any], str]] = {
    "cache": (
        lambda: filled(20, capacity=22),
        lambda c: c.append(*tokens(2, 3, 2, 16), lengths=[2, 3]),
        "sequence 1 holds 20 tokens of the 22 that this cache has room for: 3 more do not fit",
    ),
    "bucket": (
        full_bucket,
        lambda c: c.append(*tokens(1, 2, 2, 16), [4, 8]),
        "sequence 0 holds 3 tokens of the 3 that its 8-bit bucket has room for: 1 more",
    ),
    "assign": (full_bucket, lambda c: c.assign([3, 4], 8), "2 more do not fit; move or evict some"),
    "unknown id": (full_bucket, lambda c: c.assign([3, 6], 4), "the cache holds no token of id 6"),
    "unknown id of a sequence": (
        lambda: filled(3),
        lambda c: c.evict([[0, 1], [2, 3]]),
        "sequence 1 holds no token of id 3",
    ),
    "unknown bits": (full_bucket, lambda c: c.assign([3], 2), "bits is 2; this cache has 8, 4"),
    "bits of append": (full_bucket, lambda c: c.append(*tokens(1, 1, 2, 16), 5), "bits is 5; this cache"),
}


@pytest.mark.parametrize("case", FULL)
def test_an_error_comes_before_any_change(case: str) -> None:
    make, act, message = FULL[case]
    cache = make()
    before = state(cache)
    with pytest.raises(ValueError, match=message):
        act(cache)
    assert state(cache) == before


def test_a_full_bucket_takes_one_for_one() -> None:
    cache = full_bucket()
    assert cache.assign([0, 3], [4, 8]) == 2
    assert widths(cache) == {0: 4, 1: 8, 2: 8, 3: 8, 4: 4, 5: 4}


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
    assert cache.evict([5]) == 2
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


# Widths by importance.


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


def test_rooms_come_before_the_average() -> None:
    importance = np.arange(10.0) + 1
    few = allocated(importance, 8.0, rooms={16: 1, 8: 2, 4: 3, 2: 10})
    assert few.tolist() == [2, 2, 2, 2, 2, 4, 4, 4, 8, 8]
    many = allocated(importance, 2.0, rooms={16: 10, 4: 3, 2: 4})
    assert many.tolist() == [2, 2, 2, 2, 4, 4, 4, 16, 16, 16]


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
    cache.allocate(2.4)
    assert {i for i, bits in widths(cache).items() if bits == 8} == {4, 9}
    assert cache.tiers[8].bucket(0).importance.tolist() == [np.float32(received[4]), np.float32(received[9])]


# Files.


@pytest.mark.parametrize(
    "options", [{}, {"key_scales": "halves"}, {"track_attention": True}, {"capacity": {8: 9, 3: 20}}]
)
def test_save_and_load(tmp_path: Path, options: dict[str, Any]) -> None:
    cache = filled(12, 3, [8, 3] * 6, **({"widths": (8, 3)} | options))
    cache.evict([[3], [-1], [7]])
    cache.save(tmp_path / "cache.safetensors")
    loaded = cq.KVCache.load(tmp_path / "cache.safetensors")
    assert state(loaded) == state(cache)
    for name in ("capacity", "bits", "rotate", "auto_scales", "track_attention", "nbytes"):
        assert getattr(loaded, name) == getattr(cache, name)
    for each in (cache, loaded):
        each.append(*tokens(3, 2, 2, 16, seed=3), 3)
    assert state(loaded) == state(cache)


def test_save_and_load_of_an_empty_rotated_cache(tmp_path: Path) -> None:
    cq.KVCache(2, 32, 5, key_scales="pairs", rotate=True).save(str(tmp_path / "cache"))
    loaded = cq.KVCache.load(tmp_path / "cache")
    assert (loaded.rotate, loaded.auto_scales, loaded.slots) == (True, "pairs", 0)


def test_a_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    path.write_bytes(b"before")

    def fails(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no space left"):
        filled().save(path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("cache", b"before")]


def damaged(change: Callable[[dict[str, Any], dict[str, Any]], Any], path: Path) -> None:
    """A saved cache after a change of its arrays and settings."""
    filled(6, 1, 8).save(path)
    arrays = {name: array.copy() for name, array in load_file(path).items()}
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    settings = json.loads(header["__metadata__"]["cuquant.kv_cache"])
    change(arrays, settings)
    save_file(arrays, path, {"cuquant.kv_cache": json.dumps(settings)})


DAMAGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "version": (lambda a, s: s.update(version=2), "its version is 2; this is version 1"),
    "no version": (lambda a, s: s.pop("version"), "it has no 'version'"),
    "no array": (lambda a, s: a.pop("8.k_qx"), "it has no '8.k_qx'"),
    "head_dim": (
        lambda a, s: s.update(head_dim=24),
        r"16.k_qx is float16 \(0, 2, 16\); float16 \(0, 2, 24\) is",
    ),
    "dtype": (lambda a, s: a.update({"8.v_qx": a["8.v_qx"].astype(F)}), "8.v_qx is float32"),
    "rooms": (lambda a, s: s.update(rooms=[[8, 3]], capacity=3), "8.lengths are beyond the 3 tokens"),
    "lengths": (lambda a, s: a.update({"8.lengths": np.array([-1], np.int32)}), "8.lengths are beyond"),
    "slots": (lambda a, s: a["8.global_slots"].fill(2), "global slots of sequence 0 are out of range, or"),
    "next slot": (lambda a, s: a["next_slots"].fill(5), "global slots of sequence 0 are out of range"),
    "ids": (lambda a, s: a["8.token_ids"].fill(-1), "sequence 0 has a negative token id"),
    "bits": (lambda a, s: s.update(rooms=[[7, 64]]), "bits are"),
    "text": (lambda a, s: s.update(batch="many"), "batch is a str"),
    "scales": (
        lambda a, s: a.update(key_scales=np.zeros((1, 2, 16), F)),
        "key_scales must be finite and positive",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    change, message = DAMAGES[name]
    damaged(change, tmp_path / "cache")
    with pytest.raises(ValueError, match=rf"cache is no cache that cuquant saved: .*{message}"):
        cq.KVCache.load(tmp_path / "cache")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3, F)}, tmp_path / "other")
    (tmp_path / "text").write_bytes(b"nothing")
    filled().save(tmp_path / "cut")
    os.truncate(tmp_path / "cut", 900)
    for name in ("other", "text", "cut"):
        with pytest.raises(ValueError, match=rf"{name} is no cache that cuquant saved"):
            cq.KVCache.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        cq.KVCache.load(tmp_path / "none")


# Arguments.

K, V = tokens(2, 3, 2, 16)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "head_dim": (lambda: cq.KVCache(2, 100, 8), ValueError, "head_dim is 100; a multiple of 8 up to 256"),
    "large head_dim": (lambda: cq.KVCache(2, 264, 8), ValueError, "head_dim is 264"),
    "rotated head_dim": (
        lambda: cq.KVCache(2, 80, 8, rotate=True),
        ValueError,
        "head_dim is 80; a multiple of 32 up to 256 is needed to rotate keys",
    ),
    "heads": (lambda: cq.KVCache(0, 64, 8), ValueError, "n_kv_heads is 0; allowed are 1 to"),
    "float": (lambda: cq.KVCache(2.0, 64, 8), TypeError, "n_kv_heads is a float"),  # type: ignore[arg-type]
    "capacity": (lambda: cq.KVCache(2, 64, 2**31), ValueError, "capacity is 2147483648; allowed are"),
    "batch": (lambda: cq.KVCache(2, 64, 8, 0), ValueError, "batch is 0"),
    "bits": (
        lambda: cq.KVCache(2, 64, 8, bits=(8, 5)),
        ValueError,
        r"bits are \[8, 5\]; one or more of 16, 8",
    ),
    "bits twice": (lambda: cq.KVCache(2, 64, 8, bits=(8, 8)), ValueError, r"\[8, 8\].* each once"),
    "no bits": (lambda: cq.KVCache(2, 64, 8, bits=()), ValueError, r"bits are \[\]"),
    "key_scales": (
        lambda: cq.KVCache(2, 64, 8, key_scales=np.ones((2, 32), F)),
        ValueError,
        r"key_scales has shape \(2, 32\); \(2, 64\) or \(1, 2, 64\)",
    ),
    "key_scales of 0": (
        lambda: cq.KVCache(2, 64, 8, key_scales=np.zeros((2, 64), F)),
        ValueError,
        "must be finite and positive",
    ),
    "unknown key_scales": (
        lambda: cq.KVCache(2, 64, 8, key_scales="auto"),
        ValueError,
        "key_scales is 'auto'; allowed are 'pairs', 'halves'",
    ),
    "k of integers": (lambda: filled().append(K.astype(int), V), TypeError, "k has dtype int64"),
    "k of other heads": (
        lambda: filled().append(K[:, :, :1], V),
        ValueError,
        r"k has shape \(2, 3, 1, 16\); this cache takes \(2, n, 2, 16\)",
    ),
    "a token without batch": (lambda: filled().append(K[0], V[0]), ValueError, r"k has shape \(3, 2, 16\)"),
    "v shorter": (lambda: filled().append(K, V[:, :2]), ValueError, "differ in their number of tokens"),
    "lengths": (
        lambda: filled().append(K, V, lengths=[3, 4]),
        ValueError,
        r"lengths are \[3, 4\]; allowed are 0 to 3",
    ),
    "one length": (lambda: filled().append(K, V, lengths=[3]), ValueError, r"lengths has shape \(1,\)"),
    "ids": (lambda: filled().append(K, V, token_ids=[1, 2, -1]), ValueError, "run from -1 to 2"),
    "float ids": (lambda: filled().append(K, V, token_ids=[1.0] * 3), TypeError, "token_ids has dtype float"),
    "too many ids": (
        lambda: filled().append(K, V, token_ids=[1] * 4),
        ValueError,
        r"token_ids has shape \(4,\), which does not broadcast to \(2, 3\)",
    ),
    "float bits": (lambda: filled().assign([1], 4.0), TypeError, "bits has dtype float64"),
    "ids of three sequences": (
        lambda: filled().evict([[1]] * 3),
        ValueError,
        r"\(n,\) or \(2, n\) is needed",
    ),
    "average": (lambda: filled().allocate(1.9), ValueError, "average_bits is 1.9; .* allow 2 to 16"),
    "no average": (lambda: filled().allocate("4 bits"), TypeError, "average_bits is a str"),  # type: ignore[arg-type]
    "hysteresis": (lambda: filled().allocate(4, hysteresis=-1), ValueError, "hysteresis is -1"),
    "importance": (lambda: filled().allocate(4, [1.0] * 19), ValueError, r"\(19,\); \(20,\) or \(2, 20\)"),
    "negative importance": (lambda: filled().allocate(4, [-1.0] * 20), ValueError, "finite and not negative"),
    "text importance": (lambda: filled().trim(4, ["a"] * 20), TypeError, "importance has dtype <U1"),
    "recent": (lambda: filled().trim(4, recent=-1), ValueError, "recent is -1; allowed are 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("batch", [1, 2])
def test_key_scales_survive_a_file(order: Any, batch: int, tmp_path: Path) -> None:
    """Also those that a batch shares, or that lie column by column."""
    scales = np.asarray(np.random.default_rng(0).uniform(0.5, 2, (2, 32)), np.float32, order=order)
    cache = cq.KVCache(2, 32, 10, batch, key_scales=scales)
    cache.save(tmp_path / "c.safetensors")
    again = cq.KVCache.load(tmp_path / "c.safetensors")
    np.testing.assert_array_equal(again.key_scales, cache.key_scales)
    np.testing.assert_array_equal(again.key_scales[0], scales)
