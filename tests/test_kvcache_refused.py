"""What a cache of keys and values has no room for, and arguments that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_kvcache import F, filled, state, tokens, widths

import cuquant as cq


def full_bucket() -> cq.KVCache:
    return filled(6, 1, [8, 8, 8, 4, 4, 4], capacity={8: 3, 4: 8})


def without_0() -> cq.KVCache:
    cache = filled(3)
    cache.evict(0)
    return cache


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
    "unknown id 0 of a sequence": (
        without_0,
        lambda c: c.evict([[-1], [0]]),
        "sequence 1 holds no token of id 0",
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


K, V = tokens(2, 3, 2, 16)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "head_dim": (lambda: cq.KVCache(2, 100, 8), ValueError, "head_dim is 100; .* 8 up to 256 is needed$"),
    "large head_dim": (lambda: cq.KVCache(2, 264, 8), ValueError, "head_dim is 264"),
    "rotated head_dim": (
        lambda: cq.KVCache(2, 80, 8, rotate=True),
        ValueError,
        "head_dim is 80; a multiple of 32 up to 256 is needed to rotate keys",
    ),
    "rotate": (
        lambda: cq.KVCache(2, 64, 8, rotate="no"),  # type: ignore[arg-type]
        TypeError,
        "rotate is a str; allowed are True and False",
    ),
    "track_attention": (
        lambda: cq.KVCache(2, 64, 8, track_attention=1),  # type: ignore[arg-type]
        TypeError,
        "track_attention is an int; allowed",
    ),
    "heads": (lambda: cq.KVCache(0, 64, 8), ValueError, "n_kv_heads is 0; allowed are 1 to"),
    "float": (lambda: cq.KVCache(2.0, 64, 8), TypeError, "n_kv_heads is a float"),  # type: ignore[arg-type]
    "capacity": (lambda: cq.KVCache(2, 64, 2**31), ValueError, "capacity is 2147483648; allowed are"),
    "a list as capacity": (
        lambda: cq.KVCache(2, 64, [16]),  # type: ignore[arg-type]
        TypeError,
        r"capacity is a list; an integer is needed, or a mapping of bits to tokens, as \{8: 64, 4: 256\}$",
    ),
    "no capacity of a width": (
        lambda: cq.KVCache(2, 64, {16: 4, 4: 0}),
        ValueError,
        r"capacity\[4\] is 0; allowed are 1 to",
    ),
    "capacity of all widths": (
        lambda: cq.KVCache(1, 8, {3: 2**30, 2: 2**30}),
        ValueError,
        "the capacity of all widths is 2147483648; allowed are 1 to 2147483647",
    ),
    "batch": (lambda: cq.KVCache(2, 64, 8, 0), ValueError, "batch is 0"),
    "bits": (
        lambda: cq.KVCache(2, 64, 8, bits=(8, 5)),
        ValueError,
        r"bits are \[8, 5\]; one or more of 16, 8, 4, 3, 2, each once, are needed$",
    ),
    "bits of a mapping": (
        lambda: cq.KVCache(2, 64, {5: 8}),
        ValueError,
        r"capacity has the bits \[5\]; one or more of 16, 8, 4, 3, 2, each once, are needed$",
    ),
    "bits twice": (lambda: cq.KVCache(2, 64, 8, bits=(8, 8)), ValueError, r"\[8, 8\].* each once"),
    "bits beside a mapping": (
        lambda: cq.KVCache(4, 64, {4: 10}, bits=(8,)),
        ValueError,
        r"bits is \(8,\), but capacity has the bits \[4\]: leave bits out beside a mapping",
    ),
    "no bits": (lambda: cq.KVCache(2, 64, 8, bits=()), ValueError, r"bits are \[\]"),
    "one number of bits": (
        lambda: cq.KVCache(2, 64, 8, bits=4),  # type: ignore[arg-type]
        TypeError,
        r"bits is 4; widths are needed, as \(4,\) or .* capacity=\{8: 64, 4: 256\}: how many",
    ),
    "a text of bits": (
        lambda: cq.KVCache(2, 64, 8, bits="8:64,4"),  # type: ignore[arg-type]
        TypeError,
        r"bits is '8:64,4'; widths are needed, as \(4,\)",
    ),
    "a mapping of bits": (
        lambda: cq.KVCache(2, 64, 8, bits={8: 64, 4: 256}),  # type: ignore[arg-type]
        TypeError,
        r"bits is \{8: 64, 4: 256\}; widths are needed",
    ),
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
    "infinite key_scales": (
        lambda: cq.KVCache(2, 64, 8, key_scales=np.full((2, 64), np.inf, F)),
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
    "a negative length": (
        lambda: filled().append(K, V, lengths=[3, -1]),
        ValueError,
        r"lengths are \[3, -1\]; allowed are 0 to 3",
    ),
    "one length": (lambda: filled().append(K, V, lengths=[3]), ValueError, r"lengths has shape \(1,\)"),
    "ids": (lambda: filled().append(K, V, token_ids=[1, 2, -1]), ValueError, "token_ids has -1; they are"),
    "float ids": (lambda: filled().append(K, V, token_ids=[1.0] * 3), TypeError, "token_ids has dtype float"),
    "too many ids": (
        lambda: filled().append(K, V, token_ids=[1] * 4),
        ValueError,
        r"token_ids has shape \(4,\), which does not broadcast to \(2, 3\)",
    ),
    "ids beyond int64": (
        lambda: filled().append(K, V, token_ids=np.array([1, 2**64 - 1, 2], np.uint64)),
        ValueError,
        "token_ids has 18446744073709551615; they are int32",
    ),
    "lengths beyond int64": (
        lambda: filled().append(K, V, lengths=np.array([1, 2**63], np.uint64)),
        ValueError,
        r"lengths are \[1, 9223372036854775808\]; allowed are 0 to 3",
    ),
    "bits that are lists": (
        lambda: cq.KVCache(1, 64, 4, bits=[[4]]),  # type: ignore[list-item]
        ValueError,
        r"bits are \[\[4\]\]; one or more of 16, 8, 4, 3, 2, each once, are needed",
    ),
    "bits of a matrix": (
        lambda: cq.KVCache(1, 64, 4, bits=np.array([[4]])),  # type: ignore[arg-type]
        ValueError,
        r"bits are \[array\(\[4\]\)\]; one or more",
    ),
    "bits of no tokens": (
        lambda: filled().append(K[:, :0], V[:, :0], 5),
        ValueError,
        "bits is 5; this cache has 16, 8, 4, 3, 2",
    ),
    "bits that no id gets": (lambda: filled().assign([], 5), ValueError, "bits is 5; this cache"),
    "scale": (
        lambda: cq.attention(K.repeat(2, axis=2), filled(), scale=2.1e38),
        ValueError,
        r"scale is 2.1e\+38; a finite number, up to 2e\+38, is needed",
    ),
    "scale that is nearly 0": (
        lambda: cq.attention(K.repeat(2, axis=2), filled(), scale=1e-38),
        ValueError,
        r"scale is 1e-38; 0, or a magnitude from 1.17549e-38 on, is needed",
    ),
    "float bits": (lambda: filled().assign([1], 4.0), TypeError, "bits has dtype float64"),
    "ids of three sequences": (
        lambda: filled().evict([[1]] * 3),
        ValueError,
        r"\(n,\) or \(2, n\) is needed",
    ),
    "a row's negative id": (
        lambda: filled().assign([[1, -1], [-2, 1]], 4),
        ValueError,
        "token_ids has -2; in a sequence's own row -1 names none, and no id is negative",
    ),
    "average": (lambda: filled().allocate(1.9), ValueError, "average_bits is 1.9; .* allow 2 to 16"),
    "a giant average": (lambda: filled().allocate(10**400), ValueError, "average_bits is inf"),
    "no average": (lambda: filled().allocate("4 bits"), TypeError, "average_bits is a str"),  # type: ignore[arg-type]
    "an average in text": (lambda: filled().allocate("4"), TypeError, "average_bits is a str"),  # type: ignore[arg-type]
    "infinite hysteresis": (lambda: filled().allocate(4, hysteresis=np.inf), ValueError, "hysteresis is inf"),
    "hysteresis": (lambda: filled().allocate(4, hysteresis=-1), ValueError, "hysteresis is -1"),
    "importance": (lambda: filled().allocate(4, [1.0] * 19), ValueError, r"\(19,\); \(20,\) or \(2, 20\)"),
    "negative importance": (lambda: filled().allocate(4, [-1.0] * 20), ValueError, "finite and not negative"),
    "infinite importance": (
        lambda: filled().allocate(4, [np.inf] * 20),
        ValueError,
        "importance must be finite and not negative",
    ),
    "text importance": (lambda: filled().trim(4, ["a"] * 20), TypeError, "importance has dtype <U1"),
    "recent that is no number": (
        lambda: filled().allocate(4, recent=""),  # type: ignore[arg-type]
        TypeError,
        "recent is a str",
    ),
    "recent": (lambda: filled().trim(4, recent=-1), ValueError, "recent is -1; allowed are 0"),
}


def test_bits_of_tokens_that_do_not_come_may_be_anything() -> None:
    cache = filled()
    cache.append(K, V, [[4, 5, 6], [4, 4, -1]], lengths=[1, 2])
    assert cache.lengths.tolist() == [21, 22]


def test_a_position_beyond_int64_sees_every_token() -> None:
    cache, q = filled(), tokens(2, 1, 4, 16, seed=1)[0]
    y = cq.attention(q, cache, positions=np.full((2, 1), 2**64 - 1, np.uint64))
    assert np.array_equal(y, cq.attention(q, cache, causal=False))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()
