"""What attention on a GPU leaves of each token's importance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attending import WIDTHS, filled, kernels_of_few_queries, normal, on_gpu

import cuquant as cq
from cuquant import device, testing

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    compile_ahead(kernels_of_few_queries())


@pytest.mark.parametrize("scale", [1e4, 1e6])
@pytest.mark.parametrize("q_len", [1, 40])
def test_no_token_receives_more_than_all(q_len: int, scale: float) -> None:
    """Importance works scores out again, and huge ones come out different."""
    cache = filled(300, track_attention=True)
    cq.attention(device.cupy().asarray(normal(2, q_len, 8, 64, seed=3, dtype=np.float16)), cache, scale=scale)
    given = [cache.tokens(b).importance for b in range(2)]
    assert all(one.min() >= 0 and one.max() <= q_len * (1 + 1e-6) for one in given)


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"mask": np.arange(50) % 3 > 0}])
def test_importance_is_the_probability_received(options: dict[str, Any]) -> None:
    on_cpu = cq.KVCache(2, 64, 64, 2, WIDTHS, track_attention=True, rotate=True)
    on_cpu.append(normal(2, 50, 2, 64), normal(2, 50, 2, 64, seed=1), [16, 8, 4, 3, 2] * 10)
    cache = on_cpu.to_device("cuda")
    for seed in (3, 4):
        q = normal(2, 3, 8, 64, seed=seed)
        cq.attention(q, on_cpu, **options)
        cq.attention(device.cupy().asarray(q), cache, **on_gpu(**options))
    for ours, theirs in zip(cache.tiers.values(), on_cpu.tiers.values(), strict=True):
        for b in range(2):
            given = testing.as_numpy(ours.bucket(b).importance)
            assert np.allclose(given, theirs.bucket(b).importance, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("widths", [*((bits,) for bits in WIDTHS), WIDTHS])
@pytest.mark.parametrize(
    ("heads", "dim", "group", "q_len", "batch", "n"),
    [
        (2, 40, 1, 1, 2, 70),
        (3, 96, 4, 1, 1, 33),
        (9, 128, 1, 2, 1, 50),  # more works than warps
        (1, 128, 4, 5, 1, 300),  # three for each key head, and more steps than blocks of one
        (1, 256, 8, 1, 3, 40),
        (2, 64, 8, 1, 1, 16),
        (1, 8, 1, 1, 200, 1200),  # more tokens than a block sums up at a time
    ],
)
def test_importance_of_any_shape(
    widths: tuple[int, ...], heads: int, dim: int, group: int, q_len: int, batch: int, n: int
) -> None:
    on_cpu = cq.KVCache(heads, dim, n, batch, widths, track_attention=True)
    bits = np.random.default_rng(5).choice(widths, (batch, n))
    on_cpu.append(normal(batch, n, heads, dim), normal(batch, n, heads, dim, seed=1), bits)
    cache = on_cpu.to_device("cuda")
    q = normal(batch, q_len, heads * group, dim, seed=3, dtype=np.float16)
    cq.attention(q, on_cpu)
    cq.attention(device.cupy().asarray(q), cache)
    for b in range(0, batch, 7):
        ours, theirs = cache.tokens(b).importance, on_cpu.tokens(b).importance
        assert np.allclose(ours, theirs, rtol=2e-4, atol=1e-7)
        assert abs(theirs.sum() / q_len - 1) < 1e-5


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_do_not_matter_to_importance(bad: float, bits: int) -> None:
    """Nor those that spoil results; also where no other token is in the step of a warp."""
    for heads, dim, n, q_len in ((2, 64, 17, 1), (2, 64, 33, 3), (8, 128, 33, 1)):
        v = normal(1, n, heads, dim, seed=1)
        v[0, -1, 1, 5] = bad
        on_cpu = cq.KVCache(heads, dim, 40, bits=(bits,), track_attention=True)
        on_cpu.append(normal(1, n, heads, dim), v)
        cache = on_cpu.to_device("cuda")
        q = normal(1, q_len, 4 * heads, dim, seed=3, dtype=np.float16)
        y = cq.attention(q, on_cpu)
        assert np.array_equal(
            np.isnan(testing.as_numpy(cq.attention(device.cupy().asarray(q), cache))), np.isnan(y)
        )
        assert np.allclose(cache.tokens().importance, on_cpu.tokens().importance, rtol=2e-3, atol=1e-6)
