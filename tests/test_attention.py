"""Attention over buckets, against float64 on the dequantized cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing
from cuquant.kv import cpu

F = np.float32
WIDTHS = (16, 8, 4, 3, 2)
Array = NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, F)


def filled(
    n: int = 50, batch: int = 2, widths: Any = WIDTHS, heads: int = 2, dim: int = 64, **options: Any
) -> cq.KVCache:
    """n random tokens in each sequence, spread over the widths."""
    cache = cq.KVCache(heads, dim, max(n + 70, 1), batch, widths, **options)
    bits = np.random.default_rng(2).choice(cache.bits, (batch, n))
    cache.append(normal(batch, n, heads, dim), normal(batch, n, heads, dim, seed=1), bits)
    return cache


def agree(q: Any, cache: cq.KVCache, **arguments: Any) -> Any:
    """The result, after it is compared with the float64 reference."""
    y = cq.attention(q, cache, **arguments)
    reference = testing.attention(q, cache, **arguments)
    nmse, element = testing.BOUNDS[q.dtype]
    assert (y.shape, y.dtype) == (q.shape, q.dtype)
    assert testing.nmse(y, reference) <= nmse
    assert testing.worst_element(y, reference) <= element
    return y


MIXTURES = [m for count in range(1, 6) for m in combinations(WIDTHS, count)]


@pytest.mark.parametrize("widths", MIXTURES, ids=lambda m: "-".join(map(str, m)))
def test_every_mixture(widths: tuple[int, ...]) -> None:
    agree(normal(2, 3, 4, 64, seed=3), filled(widths=widths))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, F])
@pytest.mark.parametrize("q_len", [1, 7, 64])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_shapes_and_types(dim: int, q_len: int, dtype: Any) -> None:
    agree(normal(2, q_len, 6, dim, seed=3).astype(dtype), filled(70, dim=dim))


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (8, 1), (8, 8), (6, 3)])
def test_grouped_heads(heads: int, shared: int) -> None:
    agree(normal(2, 3, heads, 64, seed=3), filled(heads=shared))


@pytest.mark.parametrize(
    "options",
    [
        {"key_scales": "pairs"},
        {"key_scales": "halves", "rotate": True},
        {"key_scales": np.linspace(0.3, 3, 4 * 64, dtype=F).reshape(2, 2, 64)},
        {"rotate": True},
    ],
    ids=["pairs", "halves rotated", "given", "rotated"],
)
def test_scaled_and_rotated_keys(options: dict[str, Any]) -> None:
    agree(normal(2, 3, 4, 64, seed=3), filled(**options))


@pytest.mark.parametrize("options", [{}, {"key_scales": "pairs"}])
def test_float16_tokens_are_exact(options: dict[str, Any]) -> None:
    """Against attention to the keys and values as they came, not as they are stored."""
    k, v = (normal(1, 40, 1, 64, seed=s).astype(np.float16) for s in (4, 5))
    cache = cq.KVCache(1, 64, 40, bits=(16,), **options)
    cache.append(k, v)
    q = normal(1, 1, 1, 64, seed=6)
    s = (k[0, :, 0].astype(float) @ q[0, 0, 0]) / 8
    weights = np.exp(s - s.max())
    expected = weights @ v[0, :, 0].astype(float) / weights.sum()
    assert testing.nmse(cq.attention(q, cache)[0, 0, 0], expected) < 1e-12


@pytest.mark.parametrize("bits", WIDTHS)
def test_all_tokens_in_one_bucket_of_five(bits: int) -> None:
    cache = filled()
    cache.assign(np.arange(50), bits)
    agree(normal(2, 2, 4, 64, seed=3), cache)


def test_tokens_move_in_mid_stream() -> None:
    cache, q = filled(track_attention=True), normal(2, 2, 4, 64, seed=3)
    for step in range(6):
        agree(q, cache)
        cache.append(normal(2, 2, 2, 64, seed=10 + step), normal(2, 2, 2, 64, seed=20 + step), 16)
        cache.assign([20 + step, 30 + step], WIDTHS[step % 5])
        cache.allocate(4.5, recent=2)
        cache.evict([step * 3])
        agree(q, cache)


def test_many_tokens_are_taken_in_pieces() -> None:
    """Buckets beyond one slab of the NumPy backend."""
    cache = filled(9000, 1, (8, 4), heads=2, dim=128)
    agree(normal(1, 1, 2, 128, seed=3), cache)


def test_empty_caches_and_sequences_give_zeros() -> None:
    q = normal(3, 2, 4, 64)
    cache = cq.KVCache(2, 64, 8, 3)
    out = np.full(q.shape, np.nan, F)
    assert not cq.attention(q, cache, out=out).any()
    k = normal(3, 4, 2, 64, seed=1)
    cache.append(k, k, lengths=[0, 4, 1])
    y = agree(q, cache)
    assert not y[0].any()
    assert not y[2, 0].any()  # one token: the query before it sees none
    assert y[1].any(axis=-1).all()
    assert y[2, 1].any(axis=-1).all()


def test_a_sequence_of_a_batch_is_as_if_alone() -> None:
    k, v, q = normal(3, 30, 2, 64), normal(3, 30, 2, 64, seed=1), normal(3, 4, 4, 64, seed=2)
    lengths = [30, 5, 17]
    cache = cq.KVCache(2, 64, 30, 3)
    cache.append(k, v, [8, 4, 3, 2, 2] * 6, lengths=lengths)
    y = agree(q, cache)
    for b, n in enumerate(lengths):
        alone = cq.KVCache(2, 64, 30)
        alone.append(k[b : b + 1, :n], v[b : b + 1, :n], ([8, 4, 3, 2, 2] * 6)[:n])
        assert np.array_equal(cq.attention(q[b : b + 1], alone)[0], y[b])


def test_causality_goes_by_slots() -> None:
    """Each query as the only one, when its own token was the newest."""
    k, v, q = normal(1, 20, 2, 64), normal(1, 20, 2, 64, seed=1), normal(1, 20, 4, 64, seed=2)
    cache, bits = cq.KVCache(2, 64, 20), [8, 2, 4, 3] * 5
    single = []
    for t in range(20):
        cache.append(k[:, [t]], v[:, [t]], bits[t])
        single.append(cq.attention(q[:, [t]], cache))
    together = agree(q, cache)
    assert np.allclose(together, np.concatenate(single, axis=1), atol=1e-5)


@pytest.mark.parametrize("rotate", [False, True])
def test_a_long_prompt_in_chunks(rotate: bool) -> None:
    """Appended chunk by chunk, or before: then queries say where they are."""
    k, v, q = normal(2, 150, 2, 64), normal(2, 150, 2, 64, seed=1), normal(2, 150, 4, 64, seed=2)
    growing, whole = (cq.KVCache(2, 64, 150, 2, (8,), rotate=rotate) for _ in range(2))
    whole.append(k, v)
    for start in range(0, 150, 64):
        chunk = slice(start, start + 64)
        growing.append(k[:, chunk], v[:, chunk])
        y = agree(q[:, chunk], growing)
        at_once = agree(q[:, chunk], whole, positions=np.arange(150)[chunk])
        assert np.allclose(y, at_once, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"key_scales": "pairs"}])
def test_a_long_prompt_at_once(options: dict[str, Any]) -> None:
    """More queries than meet keys together; the same bits as of queries in as many calls."""
    cache, q = filled(300, **options), normal(2, 300, 4, 64, seed=3)
    y = agree(q, cache)
    for start in range(0, 300, cpu.AT_A_TIME):
        chunk = slice(start, start + cpu.AT_A_TIME)
        some = cq.attention(q[:, chunk], cache, positions=np.arange(300)[chunk])
        assert np.array_equal(y[:, chunk], some)
    random = np.random.default_rng(0)
    agree(q, cache, positions=random.integers(-20, 330, (2, 300)))
    agree(q, cache, mask=random.random((2, 1, 300, 300)) < 0.6)
    agree(q, cache, causal=False)


def test_every_token_is_seen_without_causality() -> None:
    cache, q = filled(), normal(2, 3, 4, 64, seed=3)
    y = agree(q, cache, causal=False)
    assert np.allclose(y[:, -1], cq.attention(q, cache)[:, -1])
    assert not np.allclose(y[:, 0], cq.attention(q, cache)[:, 0])


@pytest.mark.parametrize("positions", [[[5, 49, 0], [3, 3, 60]], [10, 20, 30], [[-1], [7]]])
def test_given_positions(positions: Any) -> None:
    y = agree(normal(2, 3, 4, 64, seed=3), filled(), positions=positions)
    assert (np.broadcast_to(positions, (2, 3)) < 0).tolist() == (~y.any(axis=(2, 3))).tolist()


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 100.0])
def test_scale(scale: float) -> None:
    agree(normal(2, 3, 4, 64, seed=3), filled(), scale=scale)


# Masks.

SHAPES = [(2, 4, 3, 50), (2, 1, 1, 50), (4, 3, 50), (1, 50), (50,), (2, 1, 3, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [bool, np.float16, ml_dtypes.bfloat16, F])
@pytest.mark.parametrize("causal", [True, False])
def test_masks(shape: tuple[int, ...], dtype: Any, causal: bool) -> None:
    mask = np.random.default_rng(0).random(shape) < 0.6
    if dtype is not bool:
        mask = np.where(mask, normal(*shape, seed=8), -np.inf).astype(dtype)
    agree(normal(2, 3, 4, 64, seed=3), filled(), mask=mask, causal=causal)


@pytest.mark.parametrize("hidden", [False, np.array(-np.inf, F)])
def test_a_query_that_sees_nothing_gives_zeros(hidden: Any) -> None:
    mask = np.full((2, 1, 3, 50), not hidden if hidden is False else 0, np.asarray(hidden).dtype)
    mask[1, :, 2] = hidden
    y = agree(normal(2, 3, 4, 64, seed=3), filled(), mask=mask)
    assert not y[1, 2].any()
    assert y[0].any()


def test_masks_go_by_slots_after_evictions() -> None:
    cache = filled()
    cache.evict(np.arange(5, 40))
    mask = np.zeros((2, 1, 1, 50), bool)
    mask[..., 41:] = True
    y = agree(normal(2, 3, 4, 64, seed=3), cache, mask=mask)
    cache.evict(np.r_[0:5, 40])
    assert np.allclose(y, cq.attention(normal(2, 3, 4, 64, seed=3), cache), atol=1e-6)


# Numbers.


@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1.0, 1e3, 1e30])
def test_magnitudes(magnitude: float) -> None:
    """At the largest all but one token's weight vanishes."""
    q = normal(2, 3, 4, 64, seed=3) * F(magnitude)
    agree(q, filled())


@pytest.mark.parametrize("widths", [(16,), (4,), (16, 4)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_bad_tokens_reach_only_what_sees_them(which: str, bad: float, widths: tuple[int, ...]) -> None:
    k, v, q = normal(2, 10, 2, 64), normal(2, 10, 2, 64, seed=1), normal(2, 4, 4, 64, seed=2)
    clean, dirty = (cq.KVCache(2, 64, 10, 2, widths) for _ in range(2))
    clean.append(k, v)
    (k if which == "k" else v)[0, 8, 1, 5] = bad
    dirty.append(k, v)
    mask = np.ones((2, 1, 4, 10), bool)
    mask[0, :, 3, 8] = False
    y, expected = cq.attention(q, dirty, mask=mask), cq.attention(q, clean, mask=mask)
    touched = np.zeros(y.shape[:3], bool)
    touched[0, 2, 2:] = True  # the query at slot 8; query heads 2 and 3 share key head 1
    assert np.isnan(y[touched]).any(axis=-1).all()
    assert np.array_equal(y[~touched], expected[~touched])
    if which == "v":
        assert np.isnan(y[touched]).all()
        np.testing.assert_array_equal(np.isnan(y), np.isnan(testing.attention(q, dirty, mask=mask)))


def test_a_bad_query_spoils_only_itself() -> None:
    cache, q = filled(), normal(2, 3, 4, 64, seed=3)
    expected = cq.attention(q, cache)
    q[0, 1, 2, 5] = np.nan
    y = cq.attention(q, cache)
    assert np.isnan(y[0, 1, 2]).all()
    y[0, 1, 2] = expected[0, 1, 2]
    assert np.array_equal(y, expected)


def test_it_is_deterministic() -> None:
    cache, q = filled(500), normal(2, 3, 4, 64, seed=3)
    assert np.array_equal(cq.attention(q, cache), cq.attention(q, cache))


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(0, 12), max_size=5), hidden=st.integers(0, 2**12), seed=st.integers(0, 99))
def test_parts_merge_to_the_whole(cuts: list[int], hidden: int, seed: int) -> None:
    """However the tokens are split, and whichever of them are hidden."""
    rng = np.random.default_rng(seed)
    s, v = rng.normal(0, 20, (1, 2, 12)), rng.normal(0, 1, (12, 3))
    s[0, 0, [bool(hidden >> i & 1) for i in range(12)]] = -np.inf
    parts = []
    for first, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 12], strict=True):
        if first < stop:
            m = s[..., first:stop].max(axis=-1)
            e = np.exp(s[..., first:stop] - np.where(m == -np.inf, 0, m)[..., None])
            parts.append(cpu.Partial(*(a.astype(F) for a in (m, e.sum(axis=-1), e @ v[first:stop]))))
    whole = cpu.merge(parts)
    e = np.exp(s - np.where(np.isinf(s), 0, s).max(axis=-1, keepdims=True))
    expected = e @ v / np.where(e.sum(axis=-1) == 0, 1, e.sum(axis=-1))[..., None]
    actual = whole.o / np.where(whole.l == 0, 1, whole.l)[..., None]
    assert np.allclose(actual, expected, atol=1e-5)


# Results and importance.


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, F])
def test_out(dtype: Any) -> None:
    cache, q = filled(), normal(2, 3, 4, 64, seed=3)
    guarded = testing.Guarded(q.shape, dtype, strided=True)
    assert cq.attention(q, cache, out=guarded.array) is guarded.array
    assert guarded.intact()
    assert np.array_equal(guarded.array, cq.attention(q, cache).astype(dtype))


def test_any_strides_of_q() -> None:
    cache, q = filled(), normal(2, 3, 4, 64, seed=3)
    assert np.array_equal(cq.attention(np.asfortranarray(q), cache), cq.attention(q, cache))
    backwards = cq.attention(q[:, ::-1], cache, causal=False)[:, ::-1]
    assert np.allclose(backwards, cq.attention(q, cache, causal=False), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"mask": np.arange(50) % 3 > 0}])
@pytest.mark.parametrize("q_len", [3, 50, 150])
def test_importance_is_the_probability_received(q_len: int, options: dict[str, Any]) -> None:
    """With values that are unit vectors, the output is the probabilities."""
    cache = cq.KVCache(1, 64, 64, 1, (16, 8), track_attention=True)
    values = np.eye(50, 64, dtype=F)[None, :, None]
    cache.append(normal(1, 50, 1, 64), values, [16, 8] * 25)
    y = cq.attention(normal(1, q_len, 4, 64, seed=3), cache, **options)
    y = y + cq.attention(normal(1, q_len, 4, 64, seed=4), cache, **options)
    for tier in cache.tiers.values():
        bucket = tier.bucket(0)
        expected = y[0].sum(axis=0).mean(axis=0)[bucket.global_slots]
        assert np.allclose(bucket.importance, expected, rtol=2e-3, atol=1e-6)


def test_importance_is_not_kept_unless_asked_for() -> None:
    cache = filled()
    cq.attention(normal(2, 3, 4, 64), cache)
    assert not any(tier.buffers.importance.any() for tier in cache.tiers.values())


# Arguments.

Q, CACHE = normal(2, 3, 4, 64), filled()
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a cache": (lambda: cq.attention(Q, Q), TypeError, "cache is an ndarray; a cuquant.KVCache is"),  # type: ignore[arg-type]
    "float64": (lambda: cq.attention(Q.astype(float), CACHE), TypeError, "q has dtype float64"),
    "three axes": (
        lambda: cq.attention(Q[0], CACHE),
        ValueError,
        r"q has shape \(3, 4, 64\); this cache takes",
    ),
    "batch": (lambda: cq.attention(Q[:1], CACHE), ValueError, r"this cache takes \(2, q_len, heads, 64\)"),
    "head_dim": (lambda: cq.attention(Q[..., :32], CACHE), ValueError, r"q has shape \(2, 3, 4, 32\)"),
    "heads": (
        lambda: cq.attention(Q[:, :, :3], CACHE),
        ValueError,
        r"q has 3 heads, which cannot share 2 key heads evenly: its shape is \(2, 3, 3, 64\); this cache "
        r"takes \(2, q_len, heads, 64\): \(batch, queries of a sequence, heads, head_dim\)$",
    ),
    "axes of another library": (
        lambda: cq.attention(normal(2, 4, 1, 64), CACHE),
        ValueError,
        r"q has 1 head, which cannot share 2 key heads evenly: its shape is \(2, 4, 1, 64\); this cache",
    ),
    "no heads": (lambda: cq.attention(Q[:, :, :0], CACHE), ValueError, "q has 0 heads, which"),
    "no heads for one": (
        lambda: cq.attention(Q[:, :, :0], cq.KVCache(1, 64, 8, 2)),
        ValueError,
        "q has 0 heads, which cannot share 1 key head evenly",
    ),
    "no queries": (lambda: cq.attention(Q[:, :0], CACHE), ValueError, "q has 0 queries"),
    "4097 queries": (
        lambda: cq.attention(normal(2, 4097, 4, 64), CACHE),
        ValueError,
        "4097 queries .* 1 to 4096",
    ),
    "scale": (lambda: cq.attention(Q, CACHE, float("nan")), ValueError, "scale is nan; a finite number"),
    "scale beyond float32": (lambda: cq.attention(Q, CACHE, 1e39), ValueError, r"scale is 1e\+39; a finite"),
    "giant scale": (lambda: cq.attention(Q, CACHE, -(10**400)), ValueError, "scale is -inf; a finite"),
    "text scale": (lambda: cq.attention(Q, CACHE, "a"), TypeError, "scale is a str"),  # type: ignore[arg-type]
    "integer mask": (
        lambda: cq.attention(Q, CACHE, mask=np.ones(50, int)),
        TypeError,
        "mask has dtype int64; allowed are bool, .*: pass mask != 0$",
    ),
    "float64 mask": (
        lambda: cq.attention(Q, CACHE, mask=np.ones(50)),
        TypeError,
        r"mask has dtype float64; allowed are bool, .*: pass mask.astype\(numpy.float32\)$",
    ),
    "bool scale": (lambda: cq.attention(Q, CACHE, True), TypeError, "scale is a bool; a number is needed"),  # type: ignore[arg-type, unused-ignore]
    "narrow mask": (
        lambda: cq.attention(Q, CACHE, mask=np.ones((3, 49), bool)),
        ValueError,
        r"mask has shape \(3, 49\); its last axis needs 50 columns",
    ),
    "mask of other queries": (
        lambda: cq.attention(Q, CACHE, mask=np.ones((4, 50), bool)),
        ValueError,
        r"mask has shape \(4, 50\); it does not broadcast to \(2, 4, 3, 50\)",
    ),
    "positions": (
        lambda: cq.attention(Q, CACHE, positions=[[1], [2], [3]]),
        ValueError,
        r"positions has shape \(3, 1\), which does not broadcast to \(2, 3\)",
    ),
    "float positions": (
        lambda: cq.attention(Q, CACHE, positions=[0.5] * 3),
        TypeError,
        "positions has dtype",
    ),
    "out's shape": (lambda: cq.attention(Q, CACHE, out=Q[0]), ValueError, r"out has shape \(3, 4, 64\)"),
    "out's dtype": (lambda: cq.attention(Q, CACHE, out=Q.astype(int)), TypeError, "out has dtype int64"),
    "out is q": (lambda: cq.attention(Q, CACHE, out=Q), ValueError, "out may share memory with q"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()
