"""Attention with many queries on a GPU: where it has warpgroups' products (sm_90), tokens become panels of
float16 numbers, once for all queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attending import (
    WIDTHS,
    F,
    agree,
    changed_kernel,
    filled,
    kernels_of_panels,
    normal,
    of_unequal_lengths,
    on_gpu,
    queries,
    shuffled,
)

import cuquant as cq
from cuquant import device, testing
from cuquant.plan import attention as plan

pytestmark = pytest.mark.gpu

HALF, BFLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    compile_ahead(kernels_of_panels((64, 96, 128)))


def test_these_queries_take_panels() -> None:
    """On GPUs that have them: 32 rows of a key head and more, of float16 and bfloat16."""

    def op(q_len: int, halves: int, dim: int, capability: int = 90) -> str:
        shape = plan.Shape(2, q_len, 8, 2, dim, WIDTHS, 1, halves)
        return plan.attention(shape, capability, 132).attention.kernel.op

    assert {op(q_len, 1, dim) for q_len in (8, 64) for dim in (64, 96, 128)} == {"attention_panels"}
    others = [(7, 1, 128), (64, 2, 128), (64, 1, 256), (64, 1, 40), *((64, 1, 128, c) for c in (80, 89, 100))]
    assert {op(*other) for other in others} == {"attention"}


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("q_len", [8, 16, 17, 33, 64])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_shapes_and_types(dim: int, q_len: int, dtype: Any) -> None:
    agree(queries(2, q_len, 8, dim, dtype=dtype), filled(150, dim=dim))


@pytest.mark.parametrize("n", [1, 2, 15, 33, 63, 64, 65, 127, 129, 257, 1000, 5003])
@pytest.mark.parametrize("q_len", [16, 40])
def test_numbers_of_tokens(q_len: int, n: int) -> None:
    """Queries may be more than tokens: those before the first see none."""
    y = agree(queries(1, q_len, 4, 128), filled(n, 1, heads=1, dim=128))
    unseen = max(0, q_len - n)
    assert not y[0, :unseen].any()
    assert y[0, unseen:].any(axis=-1).all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_one_width(dim: int, bits: int) -> None:
    for n in (70, 3000):
        agree(queries(1, 24, 6, dim), filled(n, 1, (bits,), dim=dim))


@pytest.mark.parametrize("widths", [(16, 8), (8, 4, 2), (4, 3), (3, 2), (16, 2), WIDTHS])
def test_mixtures(widths: tuple[int, ...]) -> None:
    for q_len in (16, 64):
        agree(queries(3, q_len, 8, 128), filled(700, 3, widths, dim=128))


@pytest.mark.parametrize(("heads", "shared"), [(32, 1), (8, 8), (7, 7), (6, 3), (36, 12), (64, 8)])
def test_grouped_heads(heads: int, shared: int) -> None:
    agree(queries(2, 48, heads, 64), filled(heads=shared))


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_sequences_of_very_different_lengths(batch: int) -> None:
    cache, _ = of_unequal_lengths(batch, 3000, 200)
    for q_len in (10, 33):
        agree(queries(batch, q_len, 8, 64), cache)


@pytest.mark.parametrize("options", [{"key_scales": "pairs"}, {"key_scales": "halves", "rotate": True}])
@pytest.mark.parametrize("dim", [64, 128])
def test_scaled_and_rotated_keys(dim: int, options: dict[str, Any]) -> None:
    for dtype in (HALF, BFLOAT):
        agree(queries(2, 20, 8, dim, dtype=dtype), filled(130, dim=dim, **options))


def test_every_token_is_seen_without_causality() -> None:
    for q_len in (16, 64):
        agree(queries(2, q_len, 8, 64), filled(150), causal=False)


@pytest.mark.parametrize("positions", [-5, 0, 70, 10**6])
def test_given_positions(positions: int) -> None:
    given = positions + np.random.default_rng(0).integers(0, 90, (2, 33))
    y = agree(queries(2, 33, 8, 64), filled(150), positions=given)
    assert (given < 0).tolist() == (~y.any(axis=(2, 3))).tolist()


@pytest.mark.parametrize("shape", [(2, 8, 33, 150), (2, 1, 1, 150), (150,), (2, 1, 33, 170)])
@pytest.mark.parametrize("dtype", [np.dtype(bool), HALF, np.dtype(F)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_masks(shape: tuple[int, ...], dtype: Any, causal: bool) -> None:
    mask = np.random.default_rng(0).random(shape) < 0.6
    if dtype.kind != "b":
        mask = np.where(mask, normal(*shape, seed=8), -np.inf).astype(dtype)
    agree(queries(2, 33, 8, 64), filled(150), mask=mask, causal=causal)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    mask = np.ones((2, 1, 33, 150), bool)
    mask[1, :, 2] = mask[0, :, 30:] = False
    y = agree(queries(2, 33, 8, 64), filled(150), mask=mask)
    assert not y[1, 2].any()
    assert not y[0, 30:].any()


@pytest.mark.parametrize("order", ["ascending", "descending", "one"])
@pytest.mark.parametrize("q_len", [16, 64])
def test_references_move_in_mid_stream(q_len: int, order: str) -> None:
    """Scores that grow, panel by panel, or of some queries alone: sums so far are scaled down."""
    n, dim = 700, 64
    size = np.linspace(0.05, 6, n) if order == "ascending" else np.linspace(6, 0.05, n)
    k = normal(1, n, 1, dim)
    if order == "one":
        k[0, 300:400:9] *= 8
    else:
        k *= size[:, None, None].astype(F)
    cache = cq.KVCache(1, dim, n, 1, (16, 8))
    cache.append(k, normal(1, n, 1, dim, seed=1), np.resize((16, 8), n))
    q = queries(1, q_len, 4, dim)
    q[:, 1::3] *= HALF.type(4)
    agree(q, cache.to_device("cuda"), largest_score=200)


@pytest.mark.parametrize("kind", ["causal", "all", "mask"])
@pytest.mark.parametrize("q_len", [16, 64])
def test_scores_out_of_reach_of_what_was_seen(q_len: int, kind: str) -> None:
    """Weights that no float32 holds beside those before: scores 2^7 and more above, in mid-stream."""
    n, dim = 700, 64
    k = normal(1, n, 1, dim)
    k[0, 150::97] *= np.linspace(50, 250, len(k[0, 150::97]), dtype=F)[:, None, None]
    cache = cq.KVCache(1, dim, n, 1, (16, 8))
    cache.append(k, normal(1, n, 1, dim, seed=1), np.resize((16, 8), n))
    arguments: dict[str, Any] = {"causal": kind != "all"}
    if kind == "mask":
        arguments["mask"] = np.random.default_rng(0).random((1, 4, q_len, n)) < 0.6
    agree(queries(1, q_len, 4, dim), cache.to_device("cuda"), largest_score=1500, **arguments)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", [16, 64])
def test_tokens_in_any_order(q_len: int, dim: int) -> None:
    """Nearly all panels have tokens that some queries see, and others do not."""
    cache = shuffled(filled(600, dim=dim))
    q = queries(2, q_len, 8, dim)
    agree(q, cache)
    agree(q, cache, positions=np.random.default_rng(1).integers(0, 600, (2, q_len)))


@pytest.mark.parametrize("widths", [(16,), (8,), (4,), (3,), (2,), (16, 4)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_bad_tokens_reach_only_what_sees_them(which: str, bad: float, widths: tuple[int, ...]) -> None:
    """Token 98 is hidden from the queries before it, and from one behind by the mask."""
    n, q_len = 100, 20
    k, v = normal(2, n, 2, 64), normal(2, n, 2, 64, seed=1)
    q = device.cupy().asarray(queries(2, q_len, 8, 64, seed=2))
    clean, dirty = (cq.KVCache(2, 64, n, 2, WIDTHS) for _ in range(2))
    bits = np.resize(widths, n)
    clean.append(k, v, bits)
    (k if which == "k" else v)[0, 98, 1, 5] = bad
    dirty.append(k, v, bits)
    mask = np.ones((2, 1, q_len, n), bool)
    mask[0, :, 19, 98] = False
    cases: tuple[dict[str, Any], ...] = ({}, {"mask": mask})
    for arguments in cases:
        y, expected = (
            testing.as_numpy(cq.attention(q, c.to_device("cuda"), **on_gpu(**arguments)))
            for c in (dirty, clean)
        )
        touched = np.zeros(y.shape[:3], bool)
        touched[0, 18 : 20 - len(arguments), 4:] = True  # query heads 4 to 7 share key head 1
        on_cpu = cq.attention(testing.as_numpy(q), dirty, **arguments)  # infinite keys may hide themselves
        spoiled = np.isnan(on_cpu).any(axis=-1)
        assert spoiled.any()
        assert np.isnan(y[spoiled]).all()
        assert np.array_equal(y[~touched], expected[~touched])


@pytest.mark.parametrize("size", [1e-4, 40, 1000])
def test_other_queries_do_not_matter(size: float) -> None:
    """Not those, either, that are small, whose sums are scaled down again and again, or out of reach."""
    cache, q = filled(700, 1, dim=128), queries(1, 64, 8, 128)
    expected = testing.as_numpy(cq.attention(device.cupy().asarray(q), cache))
    q[:, 1::2] *= HALF.type(size)
    y = testing.as_numpy(cq.attention(device.cupy().asarray(q), cache))
    assert np.array_equal(y[:, ::2], expected[:, ::2])
    assert not np.array_equal(y[:, 1::2], expected[:, 1::2])


@pytest.mark.parametrize("widths", [(4,), (16,)])
@pytest.mark.parametrize("q_len", [16, 40])
def test_what_other_queries_see_does_not_matter(q_len: int, widths: tuple[int, ...]) -> None:
    cupy, cache = device.cupy(), filled(300, 1, widths)
    q, positions = cupy.asarray(queries(1, q_len, 8, 64)), np.full((1, q_len), 1000)
    every, one = (
        testing.as_numpy(cq.attention(q, cache, out=cupy.empty(q.shape, F), positions=given))
        for given in (positions, np.where(np.arange(q_len) == 5, 3, positions))
    )
    same = np.arange(q_len) != 5
    assert np.array_equal(every[:, same], one[:, same])
    assert not np.array_equal(every, one)


@pytest.mark.parametrize("widths", [(16, 8), (8, 4, 2), (3, 2), WIDTHS])
def test_a_warp_that_converts_late(widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of another width, which others have asked for, do not come where this one's still are."""
    cache, q = filled(700, 2, widths, dim=128), device.cupy().asarray(queries(2, 16, 8, 128))
    expected = testing.as_numpy(cq.attention(q, cache))
    wait = 'for (int i = 0; i < 1000; i++) asm volatile("nanosleep.u32 100;" ::: "memory");'
    with monkeypatch.context() as patch:
        changed_kernel(
            patch, "attention_panels", "copy_wait<J::AHEAD - 1>();", f"if (thread / WARP == 1) {wait}"
        )
        late = testing.as_numpy(cq.attention(q, cache))
    assert np.array_equal(late, expected)


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_what_lies_behind_the_tokens_is_never_seen(dim: int) -> None:
    cache = filled(137, dim=dim)
    q = device.cupy().asarray(queries(2, 20, 8, dim))
    expected = testing.as_numpy(cq.attention(q, cache))
    for tier in cache.tiers.values():
        for b in range(2):
            for array in (tier.buffers.k_qx, tier.buffers.k_scale, tier.buffers.v_qx, tier.buffers.v_scale):
                array.view(np.uint8)[b, int(tier.lengths[b]) :] = 0xFF
    assert np.array_equal(testing.as_numpy(cq.attention(q, cache)), expected)


@pytest.mark.parametrize("n", [100, 2000])
@pytest.mark.parametrize("q_len", [16, 64])
def test_any_strides_and_types_of_results(q_len: int, n: int) -> None:
    """Where four numbers of a result are no eight bytes beside each other they are stored one by one."""
    cupy, cache = device.cupy(), filled(n, dim=96)
    q = cupy.asarray(queries(2, q_len, 8, 96))
    expected = cq.attention(q, cache)
    exact = cq.attention(q, cache, out=cupy.empty(q.shape, F))
    assert bool((exact.astype(HALF) == expected).all())
    for out in (
        cupy.zeros((*q.shape[:-1], 192), HALF)[..., ::2],
        cupy.zeros((*q.shape[:-1], 99), HALF)[..., 3:],
        cupy.zeros((*q.shape[:-1], 100), HALF)[..., :96],
        cupy.zeros(q.shape[::-1], HALF).T,
    ):
        assert bool((cq.attention(q, cache, out=out) == expected).all())
    shifted = cupy.zeros((*q.shape[:-1], 101), HALF)[..., 3:99]
    shifted[...] = q
    assert bool((cq.attention(shifted, cache) == expected).all())


@pytest.mark.parametrize("n", [90, 3000])
@pytest.mark.parametrize("options", [{}, {"rotate": True, "key_scales": "pairs"}])
def test_importance(options: dict[str, Any], n: int) -> None:
    """What attention leaves for it: queries as they met keys, and the sums of their weights."""
    on_cpu = cq.KVCache(2, 64, n, 2, WIDTHS, track_attention=True, **options)
    on_cpu.append(normal(2, n, 2, 64), normal(2, n, 2, 64, seed=1), np.resize(WIDTHS, n))
    cache = on_cpu.to_device("cuda")
    for q_len in (16, 40):
        q = queries(2, q_len, 8, 64)
        cq.attention(q, on_cpu)
        cq.attention(device.cupy().asarray(q), cache)
    for b in range(2):
        assert np.allclose(cache.tokens(b).importance, on_cpu.tokens(b).importance, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("q_len", [16, 64])
def test_it_is_deterministic(q_len: int) -> None:
    cache = filled(5000, heads=4, dim=128)
    q = device.cupy().asarray(queries(2, q_len, 16, 128))
    first = cq.attention(q, cache)
    for _ in range(100):
        assert bool((cq.attention(q, cache) == first).all())


def test_queries_come_in_any_number_on_two_streams() -> None:
    """Few and many by turns, whose blocks leave their shares in the same scratch memory."""
    cupy = device.cupy()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    caches = [filled(4000, 1, (4,), heads=4, dim=128), filled(2500, 1, (8, 2), heads=4, dim=128)]
    q = [cupy.asarray(queries(1, q_len, 16, 128)) for q_len in (1, 16, 4, 64)]
    expected = [[cq.attention(one, cache) for one in q] for cache in caches]
    cupy.cuda.Device().synchronize()
    outs: list[list[Any]] = [[], []]
    for step in range(60):
        for stream, cache, mine in zip(streams, caches, outs, strict=True):
            with stream:
                mine.append(cq.attention(q[step % 4], cache))
    cupy.cuda.Device().synchronize()
    for mine, reference in zip(outs, expected, strict=True):
        assert all(bool((y == reference[step % 4]).all()) for step, y in enumerate(mine))


def test_a_graph_serves_a_cache_that_grows() -> None:
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 600, 2, (8, 4), device="cuda")
    k, v = (cupy.asarray(normal(2, 64, 2, 64, seed=seed)) for seed in (0, 1))
    q, out = cupy.asarray(queries(2, 64, 8, 64)), cupy.empty((2, 64, 8, 64), HALF)
    cache.append(k, v, 8)
    cq.attention(q, cache, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cache.append(k, v, 4)
        cq.attention(q, cache, out=out)
        graph = stream.end_capture()
        for _ in range(5):
            graph.launch(stream)
            stream.synchronize()
            assert testing.nmse(testing.as_numpy(out), testing.attention(testing.as_numpy(q), cache)) < 1e-5
