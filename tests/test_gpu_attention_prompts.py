"""More than 64 queries of a sequence in a call, as of a prompt: blocks of panels leave out the tokens that
their rows do not see, and where there are no panels a launch has 64 of the queries."""

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
    filled,
    kernels_of_panels,
    normal,
    of_unequal_lengths,
    queries,
    shuffled,
)

import cuquant as cq
from cuquant import check, device, testing
from cuquant.plan import attention as plan

pytestmark = pytest.mark.gpu

HALF, BFLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    compile_ahead(kernels_of_panels((64, 128)))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, np.dtype(F)], ids=str)
@pytest.mark.parametrize(("q_len", "n"), [(65, 65), (127, 300), (128, 128), (200, 700), (517, 517)])
def test_shapes_and_types(q_len: int, n: int, dtype: Any) -> None:
    """Blocks of a head's rows alone, and of several heads'; float32 queries have no panels."""
    for widths in (WIDTHS, (16,)):
        agree(queries(2, q_len, 8, 64, dtype=dtype), filled(n, widths=widths))


@pytest.mark.parametrize("dim", [40, 96, 128, 256])
def test_heads(dim: int) -> None:
    for shared, widths in ((1, (16, 4)), (2, (16,)), (4, (16, 4)), (4, (16,))):
        agree(queries(1, 150, 4, dim), filled(200, 1, widths, heads=shared, dim=dim))


@pytest.mark.parametrize("batch", [1, 5, 40])
def test_sequences_of_different_lengths(batch: int) -> None:
    """Some are shorter than their queries, of which the first see nothing."""
    cache, lengths = of_unequal_lengths(batch, 900, 300)
    y = agree(queries(batch, 130, 8, 64), cache)
    for sequence, length in enumerate(lengths):
        assert not y[sequence, : max(0, 130 - length)].any()


@pytest.mark.parametrize("dtype", [HALF, np.dtype(F)], ids=str)
def test_tokens_in_any_order(dtype: Any) -> None:
    for widths in (WIDTHS, (16,)):
        agree(queries(2, 300, 8, 64, dtype=dtype), shuffled(filled(600, widths=widths)))


@pytest.mark.parametrize("dtype", [HALF, np.dtype(F)], ids=str)
@pytest.mark.parametrize("q_len", [20, 150])
def test_given_positions(q_len: int, dtype: Any) -> None:
    """Blocks whose rows see nothing, the first tokens, or all."""
    random = np.random.default_rng(0)
    ascending = np.sort(random.integers(-100, 1100, (2, q_len)))
    for cache in (filled(1000, widths=(16,)), shuffled(filled(1000, widths=(8, 4)))):
        for given in (ascending, random.permuted(ascending, axis=1), np.full_like(ascending, -1)):
            y = agree(queries(2, q_len, 8, 64, dtype=dtype), cache, positions=given)
            assert ((given < 0) <= (~y.any(axis=(2, 3)))).all()


@pytest.mark.parametrize("dtype", [HALF, np.dtype(F)], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 150, 220), (2, 1, 1, 220), (1, 1, 150, 230)])
def test_masks(shape: tuple[int, ...], dtype: Any) -> None:
    for kind in (np.dtype(bool), HALF):
        mask: Any = np.random.default_rng(0).random(shape) < 0.6
        if kind == HALF:
            mask = np.where(mask, normal(*shape, seed=8), -np.inf).astype(kind)
        for causal in (True, False):
            agree(queries(2, 150, 8, 64, dtype=dtype), filled(220), mask=mask, causal=causal)


def test_every_token_is_seen_without_causality() -> None:
    agree(queries(2, 200, 8, 64), filled(300), causal=False)


@pytest.mark.parametrize("dtype", [HALF, np.dtype(F)], ids=str)
def test_queries_in_pieces(dtype: Any) -> None:
    """Each sees as much, and what others see does not matter."""
    cupy, cache = device.cupy(), filled(500, widths=(16, 8))
    q = cupy.asarray(queries(2, 400, 8, 64, dtype=dtype))
    y = testing.as_numpy(cq.attention(q, cache))
    for first, count in ((0, 40), (100, 64), (336, 64)):
        positions = cupy.broadcast_to(
            cupy.arange(100 + first, 100 + first + count, dtype=np.int32), (2, count)
        )
        some = cq.attention(q[:, first : first + count], cache, positions=positions)
        assert testing.nmse(testing.as_numpy(some), y[:, first : first + count]) < 1e-6


@pytest.mark.parametrize("dim", [64, 256])
def test_what_attention_leaves_for_the_allocator(dim: int) -> None:
    caches = [filled(300, widths=(8, 4), dim=dim, track_attention=True) for _ in range(2)]
    host = caches[1].to_device("cpu")
    q = queries(2, 150, 8, dim)
    agree(q, caches[0])
    cq.attention(q, host)
    for bits, tier in host.tiers.items():
        for b in range(2):
            expected = tier.bucket(b).importance
            made = testing.as_numpy(caches[0].tiers[bits].bucket(b).importance)
            np.testing.assert_allclose(made, expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [HALF, np.dtype(F)], ids=str)
def test_a_prompt_in_a_graph(dtype: Any) -> None:
    """And a call like one before, which is not checked anew."""
    cupy, cache = device.cupy(), filled(300, widths=(16, 4))
    q = cupy.asarray(queries(2, 150, 8, 64, dtype=dtype))
    out = cupy.empty_like(q)
    expected = testing.as_numpy(cq.attention(q, cache, out=out)).copy()
    out.fill(0)
    assert np.array_equal(testing.as_numpy(cq.attention(q, cache, out=out)), expected)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cq.attention(q, cache, out=out)
        stream.begin_capture()
        cq.attention(q, cache, out=out)
        graph = stream.end_capture()
        out.fill(0)
        graph.launch()
        stream.synchronize()
    assert np.array_equal(testing.as_numpy(out), expected)


def test_a_prompt_token_by_token() -> None:
    """As many queries as tokens: as if each was appended, and attended, alone."""
    cupy, n = device.cupy(), 130
    k, v, q = (cupy.asarray(normal(1, n, heads, 64, seed=s, dtype=HALF)) for s, heads in enumerate((2, 2, 8)))
    whole, grown = (cq.KVCache(2, 64, {8: n}, device="cuda") for _ in range(2))
    whole.append(k, v)
    y = testing.as_numpy(cq.attention(q, whole))
    for token in range(n):
        here = slice(token, token + 1)
        grown.append(k[:, here], v[:, here])
        one = testing.as_numpy(cq.attention(q[:, here], grown))
        assert testing.nmse(y[:, here], one) < 1e-6


def test_sequences_of_one_block_have_nothing_to_merge() -> None:
    """Panels of many rows are a block each for every sequence; others have 64 queries a launch."""
    given: list[tuple[int, int, int, int]] = [
        (1, 4096, 32, 8),
        (8, 64, 32, 8),
        (8, 512, 32, 8),
        (1, 64, 32, 8),
    ]
    launches = [
        plan.attention(plan.Shape(batch, q_len, heads, shared, 128, (16,), 1, 1), 90, 132, True)
        for batch, q_len, heads, shared in given
    ]
    assert [launch.alone for launch in launches] == [True, True, True, False]
    shape = plan.Shape(1, 4096, 32, 8, 128, (16,), 1, 1)
    at_once = [
        plan.queries_at_once(shape, capability, track)
        for capability, track in ((90, False), (90, True), (80, False))
    ]
    assert at_once == [check.MOST_QUERIES, plan.LAUNCH_QUERIES, plan.LAUNCH_QUERIES]
