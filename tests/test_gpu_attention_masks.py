"""What queries see on a GPU: positions, masks, and masks of huge numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attending import DTYPES, F, agree, filled, kernels_of_few_queries, normal

import cuquant as cq
from cuquant import device, testing

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    compile_ahead(kernels_of_few_queries())


def test_every_token_is_seen_without_causality() -> None:
    agree(normal(2, 3, 8, 64, seed=3), filled(), causal=False)


@pytest.mark.parametrize("positions", [[[5, 49, 0], [3, 3, 60]], [10, 20, 30], [[-1], [7]]])
def test_given_positions(positions: Any) -> None:
    y = agree(normal(2, 3, 8, 64, seed=3), filled(), positions=positions)
    assert (np.broadcast_to(positions, (2, 3)) < 0).tolist() == (~y.any(axis=(2, 3))).tolist()


@pytest.mark.parametrize("shape", [(2, 8, 3, 50), (2, 1, 1, 50), (8, 3, 50), (50,), (2, 1, 3, 64)])
@pytest.mark.parametrize("dtype", [np.dtype(bool), *DTYPES], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_masks(shape: tuple[int, ...], dtype: Any, causal: bool) -> None:
    mask = np.random.default_rng(0).random(shape) < 0.6
    if dtype.kind != "b":
        mask = np.where(mask, normal(*shape, seed=8), -np.inf).astype(dtype)
    agree(normal(2, 3, 8, 64, seed=3), filled(), mask=mask, causal=causal)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    mask = np.ones((2, 1, 3, 50), bool)
    mask[1, :, 2] = False
    y = agree(normal(2, 3, 8, 64, seed=3), filled(), mask=mask)
    assert not y[1, 2].any()


@pytest.mark.parametrize("least", [np.finfo(F).min, -1.2e38, -1.0e38])
def test_only_infinity_hides(least: float) -> None:
    """Tokens that all have the lowest number of a mask count alike; beside others they count nothing."""
    mask = np.full((2, 8, 3, 50), least, F)
    mask[:, :4, :, 10:40] = -np.inf
    mask[:, :, 2, ::7] = 0
    mask[1, 5, 0, 20] = np.nan
    agree(normal(2, 3, 8, 64, seed=3), filled(), mask=mask[:1])
    q = device.cupy().asarray(normal(2, 3, 8, 64, seed=3))
    y = testing.as_numpy(cq.attention(q, filled(), mask=device.cupy().asarray(mask)))
    spoiled = np.zeros(y.shape, bool)
    spoiled[1, 0, 5] = True
    assert np.array_equal(np.isnan(y), spoiled)


@pytest.mark.parametrize("least", [-1e7, -1e8, -1.2e8, -1e9, -1e30])
@pytest.mark.parametrize("q_len", [1, 5])
def test_numbers_that_hide_where_floats_are_far_apart(q_len: int, least: float) -> None:
    """Tokens that a mask puts far below the others are the first of their buckets."""
    mask = np.zeros((1, 8, q_len, 300), F)
    mask[..., :128] = least
    agree(normal(2, q_len, 8, 64, seed=3, dtype=np.float16), filled(300, 2, (16,)), mask=mask)
    agree(normal(2, q_len, 8, 64, seed=3), filled(300), mask=mask)


@pytest.mark.parametrize("size", [1e38, 2.5e38, np.finfo(F).max])
@pytest.mark.parametrize("q_len", [1, 5])
def test_masks_near_the_largest_float(q_len: int, size: float) -> None:
    """One token far above all others, and above tokens that are as far below."""
    mask = np.zeros((1, 8, q_len, 300), F)
    mask[..., 131] = size
    mask[:, 4:, :, 40:200] = -F(size)
    agree(normal(2, q_len, 8, 64, seed=3, dtype=np.float16), filled(300), mask=mask)
    mask = np.full((1, 8, q_len, 300), -size, F)
    mask[..., 131] = -0.5 * size
    agree(normal(2, q_len, 8, 64, seed=3), filled(300), mask=mask)


def test_a_finite_mask_shows_no_key_that_hides_itself() -> None:
    k = normal(1, 2, 1, 64)
    k[0, 1, 0, 5] = np.inf
    cache = cq.KVCache(1, 64, 2, bits=(16,))
    cache.append(k, normal(1, 2, 1, 64, seed=1))
    q, mask = np.zeros((1, 1, 1, 64), np.float16), np.full(2, np.finfo(F).min, F)
    q[..., 5] = -1
    y = cq.attention(device.cupy().asarray(q), cache.to_device("cuda"), mask=device.cupy().asarray(mask))
    assert testing.nmse(testing.as_numpy(y), cq.attention(q, cache, mask=mask)) < 1e-6
