"""Attention over buckets on a GPU, against float64 on the dequantized cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import pytest
from attending import DTYPES, WIDTHS, F, agree, filled, kernels_of_few_queries, normal

import cuquant as cq
from cuquant import device, testing
from cuquant.cuda import buffers, jit
from cuquant.plan import attention as plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    compile_ahead(kernels_of_few_queries())


MIXTURES = [m for count in range(1, 6) for m in combinations(WIDTHS, count)]


@pytest.mark.parametrize("widths", MIXTURES, ids=lambda m: "-".join(map(str, m)))
def test_every_mixture_of_buckets(widths: tuple[int, ...]) -> None:
    agree(normal(2, 3, 8, 64, seed=3), filled(300, bits=widths))
    agree(normal(2, 1, 8, 64, seed=3, dtype=np.float16), filled(300, bits=widths))


@pytest.mark.parametrize("widths", [(8,), (4,), (3,), (2,), (16, 4), (8, 4, 3, 2)])
def test_caches_of_fewer_widths(widths: tuple[int, ...]) -> None:
    agree(normal(2, 1, 8, 128, seed=3, dtype=np.float16), filled(400, widths=widths, dim=128))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 64])
@pytest.mark.parametrize("dim", [64, 96, 128, 256, 40])
def test_shapes_and_types(dim: int, q_len: int, dtype: Any) -> None:
    agree(normal(2, q_len, 8, dim, seed=3, dtype=dtype), filled(90, dim=dim))


@pytest.mark.parametrize("n", [1000, 4099])
@pytest.mark.parametrize("dim", [8, 40, 96, 200])
def test_sizes_of_heads_whose_sequences_are_shared(dim: int, n: int) -> None:
    for batch in (1, 3):
        agree(normal(batch, 1, 8, dim, seed=3, dtype=np.float16), filled(n, batch, dim=dim))


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 33, 63, 65, 257, 1000, 4099, 131072])
def test_numbers_of_tokens(n: int) -> None:
    cache = filled(n, 1, heads=1, dim=128)
    agree(normal(1, 1, 4, 128, seed=3, dtype=np.float16), cache)


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (8, 1), (16, 1), (7, 7), (6, 3), (36, 12)])
def test_grouped_heads(heads: int, shared: int) -> None:
    agree(normal(2, 3, heads, 64, seed=3), filled(heads=shared))
    agree(normal(2, 1, heads, 64, seed=3, dtype=np.float16), filled(heads=shared))


@pytest.mark.parametrize("n", [1, 15, 33, 90, 1000])
@pytest.mark.parametrize(("heads", "shared"), [(8, 8), (32, 8), (64, 8), (32, 16), (48, 24)])
def test_eight_heads_at_once(heads: int, shared: int, n: int) -> None:
    """Float16 queries of heads of 128 channels: the copy engine takes tokens."""
    q = normal(2, 1, heads, 128, seed=3, dtype=np.float16)
    agree(q, filled(n, heads=shared, dim=128))


@pytest.mark.parametrize("batch", [2, 6, 32, 33, 150])
@pytest.mark.parametrize(
    ("q_len", "heads", "dim", "widths"),
    [(1, 2, 64, (8, 4)), (1, 8, 128, (2,)), (5, 2, 128, (4,)), (64, 2, 64, (8,))],
)
def test_sequences_that_were_thought_to_be_even(
    q_len: int, heads: int, dim: int, widths: tuple[int, ...], batch: int
) -> None:
    """Streams of tokens are fewer then, but each sequence has some, and no token is left out."""
    cache = cq.KVCache(heads, dim, 1600, batch, widths, device="cuda")
    k, v = device.cupy().asarray(normal(2, batch, 1500, heads, dim))
    cache.append(k[:, :20], v[:, :20], widths[0])
    assert cache._appender.even
    cache.append(k, v, widths[-1], lengths=np.resize([700, 1, 0, 333, 20, 1500], batch))
    assert not cache._appender.even
    q = normal(batch, q_len, 2 * heads, dim, seed=3, dtype=np.float16)
    agree(q, cache)
    cache._appender.even = True
    agree(q, cache)


@pytest.mark.parametrize("widths", [(16,), (8,), (4,), (16, 4), (8, 4)])
@pytest.mark.parametrize(("heads", "shared", "n"), [(32, 32, 40), (64, 32, 3000), (40, 40, 9000)])
def test_many_heads(heads: int, shared: int, n: int, widths: tuple[int, ...]) -> None:
    """From so many on the copy engine takes tokens of 4 and 8 bits, too."""
    batch = 1 if n > 3000 else 3
    cache = filled(n, batch, widths, heads=shared, dim=128)
    agree(normal(batch, 1, heads, 128, seed=3, dtype=np.float16), cache)


@pytest.mark.parametrize("widths", [(16,), (8,), (4,), (3,), (2,), (16, 3), (8, 4, 2)])
@pytest.mark.parametrize("n", [40, 3000, 70000])
def test_eight_heads_of_fewer_widths(widths: tuple[int, ...], n: int) -> None:
    batch = 1 if n > 3000 else 3
    cache = filled(n, batch, widths, heads=8, dim=128)
    agree(normal(batch, 1, 32, 128, seed=3, dtype=np.float16), cache)


OPTIONS: list[dict[str, Any]] = [
    {"key_scales": "pairs"},
    {"key_scales": "halves", "rotate": True},
    {"key_scales": np.linspace(0.3, 3, 4 * 64, dtype=F).reshape(2, 2, 64)},
    {"rotate": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["pairs", "halves rotated", "given", "rotated"])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_scaled_and_rotated_keys(options: dict[str, Any], dtype: Any) -> None:
    agree(normal(2, 3, 8, 64, seed=3, dtype=dtype), filled(**options))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[3], {"track_attention": True}], ids=str)
def test_options_of_eight_heads_at_once(options: dict[str, Any]) -> None:
    """One float16 query of 128 channels for each head: the copy engine takes tokens."""
    agree(normal(2, 1, 32, 128, seed=3, dtype=np.float16), filled(heads=8, dim=128, **options))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[3], {"track_attention": True}], ids=str)
def test_options_of_many_heads(options: dict[str, Any]) -> None:
    cache = filled(widths=(8, 4), heads=32, dim=128, **options)
    agree(normal(2, 1, 128, 128, seed=3, dtype=np.float16), cache)


@pytest.mark.parametrize("dim", [96, 128, 256])
def test_rotated_keys_of_other_sizes(dim: int) -> None:
    agree(normal(2, 3, 8, dim, seed=3), filled(dim=dim, rotate=True))


def test_against_float16_attention_by_hand() -> None:
    """Small known tensors: two tokens whose scores differ by log 3 share the weight 3 to 1."""
    cupy = device.cupy()
    k = np.zeros((1, 2, 1, 64), np.float16)
    k[0, 0, 0, 0] = 1
    v = np.zeros_like(k)
    v[0, 0, 0, :2], v[0, 1, 0, 2] = (4, -8), 2
    for widths in ([16, 16], [8, 8], [4, 4], [2, 16], [3, 2]):
        cache = cq.KVCache(1, 64, 2, bits=WIDTHS, device="cuda")
        cache.append(cupy.asarray(k), cupy.asarray(v), widths)
        q = np.zeros((1, 1, 2, 64), np.float16)
        q[0, 0, 1, 0] = np.float16(np.log(3))
        y = testing.as_numpy(cq.attention(cupy.asarray(q), cache, 1.0))[0, 0]
        _, _, keys, values = cache.dequantize()
        assert np.array_equal(keys[:, 0, 0], [1, 0])
        assert np.allclose(y[0], values[:, 0].mean(axis=0), atol=2e-3)
        assert np.allclose(y[1], np.array([0.75, 0.25]) @ values[:, 0], atol=4e-3)


@pytest.mark.parametrize("bits", WIDTHS)
def test_all_tokens_in_one_bucket_of_five(bits: int) -> None:
    cache = filled()
    cache.assign(np.arange(50), bits)
    agree(normal(2, 3, 8, 64, seed=3), cache)


def test_tokens_move_in_mid_stream() -> None:
    cache, q = filled(track_attention=True), normal(2, 3, 8, 64, seed=3)
    put = device.cupy().asarray
    for step in range(6):
        agree(q, cache)
        cache.append(put(normal(2, 2, 2, 64, seed=10 + step)), put(normal(2, 2, 2, 64, seed=20 + step)), 16)
        cache.assign([20 + step, 30 + step], WIDTHS[step % 5])
        cache.allocate(4.5, recent=2)
        cache.evict([step * 3])
        agree(q, cache)


@pytest.mark.parametrize(("q_len", "dtype"), [(3, F), (20, np.float16)])
def test_empty_caches_and_sequences_give_zeros(q_len: int, dtype: Any) -> None:
    put = device.cupy().asarray
    q = normal(3, q_len, 8, 64, dtype=dtype)
    cache = cq.KVCache(2, 64, 80, 3, WIDTHS, device="cuda")
    out = put(np.full(q.shape, np.nan, dtype))
    assert not cq.attention(put(q), cache, out=out).any()
    k = put(normal(3, 70, 2, 64, seed=1))
    cache.append(k, k, lengths=[0, 70, 1])
    y = agree(q, cache)
    assert not y[0].any()
    assert not y[2, :-1].any()
    assert y[1].any(axis=-1).all()


@pytest.mark.parametrize(
    ("batch", "heads", "dim"),
    [(5, 1, 64), (40, 1, 64), (300, 1, 64), (5, 8, 128), (40, 8, 128), (300, 8, 128)],
)
def test_sequences_of_very_different_lengths(batch: int, heads: int, dim: int) -> None:
    lengths = np.random.default_rng(0).integers(0, 40, batch)
    lengths[1] = 1500
    cache = cq.KVCache(heads, dim, 1500, batch, WIDTHS)
    k, v = normal(batch, 1500, heads, dim), normal(batch, 1500, heads, dim, seed=1)
    cache.append(k, v, np.resize(WIDTHS, 1500), lengths=lengths)
    agree(normal(batch, 1, 2 * heads, dim, seed=2, dtype=np.float16), cache.to_device("cuda"))


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 100.0])
def test_scale(scale: float) -> None:
    agree(normal(2, 3, 8, 64, seed=3), filled(), largest_score=40 * abs(scale), scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 5])
def test_scales_that_queries_take_back(q_len: int, dtype: Any) -> None:
    zeros = np.zeros((2, q_len, 8, 64), dtype)
    agree(zeros, filled(), scale=1e37)
    least = normal(2, q_len, 8, 64, seed=3)
    size = 1e-6 if dtype == np.float16 else 1e-33
    agree((least * F(size)).astype(dtype), filled(), largest_score=20, scale=0.3 / size)


@pytest.mark.parametrize("magnitude", [1e-5, 1e-2, 1e4])
@pytest.mark.parametrize("bits", WIDTHS)
def test_magnitudes_of_values(bits: int, magnitude: float) -> None:
    cache = cq.KVCache(2, 64, 200, 1, WIDTHS)
    v = normal(1, 200, 2, 64, seed=1) * F(magnitude)
    v[:, ::3] *= F(1e-3)
    cache.append(normal(1, 200, 2, 64), v, bits)
    agree(normal(1, 3, 8, 64, seed=3), cache.to_device("cuda"))


@pytest.mark.parametrize("widths", [(16,), (4,), (16, 4)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_bad_tokens_reach_only_what_sees_them(which: str, bad: float, widths: tuple[int, ...]) -> None:
    k, v = normal(2, 10, 2, 64), normal(2, 10, 2, 64, seed=1)
    q = device.cupy().asarray(normal(2, 4, 8, 64, seed=2))
    clean, dirty = (cq.KVCache(2, 64, 10, 2, WIDTHS) for _ in range(2))
    bits = np.resize(widths, 10)
    clean.append(k, v, bits)
    (k if which == "k" else v)[0, 8, 1, 5] = bad
    dirty.append(k, v, bits)
    mask = np.ones((2, 1, 4, 10), bool)
    mask[0, :, 3, 8] = False
    y, expected = (
        testing.as_numpy(cq.attention(q, c.to_device("cuda"), mask=device.cupy().asarray(mask)))
        for c in (dirty, clean)
    )
    touched = np.zeros(y.shape[:3], bool)
    touched[0, 2, 4:] = True  # the query at slot 8; query heads 4 to 7 share key head 1
    on_cpu = cq.attention(testing.as_numpy(q), dirty, mask=mask)  # infinite keys may hide themselves
    spoiled = np.isnan(on_cpu).any(axis=-1)
    assert spoiled.any()
    assert np.isnan(y[spoiled]).any(axis=-1).all()
    assert np.array_equal(y[~touched], expected[~touched])


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (8, 128)])
def test_what_lies_behind_the_tokens_is_never_seen(heads: int, dim: int) -> None:
    cache = filled(37, heads=heads, dim=dim)
    q = device.cupy().asarray(normal(2, 1, 4 * heads, dim, seed=3, dtype=np.float16))
    expected = testing.as_numpy(cq.attention(q, cache))
    for tier in cache.tiers.values():
        for b in range(2):
            for array in (tier.buffers.k_qx, tier.buffers.k_scale, tier.buffers.v_qx, tier.buffers.v_scale):
                array.view(np.uint8)[b, int(tier.lengths[b]) :] = 0xFF
    assert np.array_equal(testing.as_numpy(cq.attention(q, cache)), expected)


@pytest.mark.parametrize(("batch", "heads", "n"), [(1, 2, 700), (3, 8, 3000), (40, 8, 300)])
def test_counters_are_left_at_zero(batch: int, heads: int, n: int) -> None:
    """Blocks that share a sequence count what they leave, in more places than products have flags."""
    shape = plan.Shape(batch, 1, 4 * heads, heads, 128, (8, 4), False, 1)
    launch = plan.attention(shape, jit.capability(), 132)
    assert not launch.boxes
    cache = filled(n, batch, (8, 4), heads=heads, dim=128)
    agree(normal(batch, 1, 4 * heads, 128, seed=3, dtype=np.float16), cache)
    with buffers.scratch() as scratch:
        flags = scratch._flags[-1]
        assert flags.size >= prod(launch.merge.grid)
    assert not flags.any()


def test_an_interrupted_launch_leaves_no_counts_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention was started, what merges its blocks' shares was not."""
    q = device.cupy().asarray(normal(1, 1, 32, 128, seed=3, dtype=np.float16))
    cache = filled(9000, 1, (4,), heads=8, dim=128)
    expected = cq.attention(q, cache)
    real, started = jit.launch_packed, False

    def interrupted(*args: Any) -> None:
        nonlocal started
        if started:
            raise KeyboardInterrupt
        started = True
        real(*args)

    monkeypatch.setattr(jit, "launch_packed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cq.attention(q, cache)
    monkeypatch.undo()
    assert (cq.attention(q, cache) == expected).all()


def test_two_streams_at_once() -> None:
    """Each waits for blocks of its own only."""
    cupy = device.cupy()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    caches = [filled(9000, 1, (4,), heads=8, dim=128), filled(5000, 1, (8, 2), heads=8, dim=128)]
    q = cupy.asarray(normal(1, 1, 32, 128, seed=3, dtype=np.float16))
    expected = [cq.attention(q, cache) for cache in caches]
    outs: list[list[Any]] = [[], []]
    cupy.cuda.Device().synchronize()
    for _ in range(100):
        for stream, cache, mine in zip(streams, caches, outs, strict=True):
            with stream:
                mine.append(cq.attention(q, cache))
    cupy.cuda.Device().synchronize()
    for mine, reference in zip(outs, expected, strict=True):
        assert all((y == reference).all() for y in mine)


def test_it_is_deterministic() -> None:
    cache = filled(5000, heads=8, dim=128)
    q = device.cupy().asarray(normal(2, 1, 32, 128, seed=3, dtype=np.float16))
    first = cq.attention(q, cache)
    for _ in range(20):
        assert bool((cq.attention(q, cache) == first).all())


def test_devices_do_not_mix() -> None:
    cache, q = filled(), normal(2, 3, 8, 64, seed=3)
    with pytest.raises(TypeError, match="q is on cpu, the cache on cuda"):
        cq.attention(q, cache)
    with pytest.raises(TypeError, match="mask is on cpu, the cache on cuda"):
        cq.attention(device.cupy().asarray(q), cache, mask=np.ones(50, bool))
    with pytest.raises(TypeError, match="q is on cuda, the cache on cpu"):
        cq.attention(device.cupy().asarray(q), cache.to_device("cpu"))
