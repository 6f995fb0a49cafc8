"""Attention on a GPU with numbers, scales and masks of all magnitudes: with many queries, for which tokens
become panels where there are warpgroups' products (sm_90), and with few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attending import WIDTHS, F, agree, filled, kernels_of_panels, normal, queries

import cuquant as cq
from cuquant import device

pytestmark = pytest.mark.gpu

HALF, BFLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    compile_ahead(kernels_of_panels((64,)))


@pytest.mark.parametrize("least", [np.finfo(F).min, -1.2e38, -1.0e38])
def test_only_infinity_hides(least: float) -> None:
    mask = np.full((1, 8, 16, 150), least, F)
    mask[:, :4, :, 10:140] = -np.inf
    mask[:, :, 2, ::7] = 0
    agree(queries(2, 16, 8, 64), filled(150), mask=mask)


@pytest.mark.parametrize("least", [-1e7, -1e8, -1.2e8, -1e9, -1e30])
@pytest.mark.parametrize("q_len", [16, 40])
def test_numbers_that_hide_where_floats_are_far_apart(q_len: int, least: float) -> None:
    """Tokens that a mask puts far below the others are the first, and all that some panels have."""
    mask = np.zeros((1, 8, q_len, 300), F)
    mask[..., :128] = least
    mask[:, :, ::3] = 0
    agree(queries(2, q_len, 8, 64), filled(300, 2, (16,)), mask=mask)
    agree(queries(2, q_len, 8, 64, dtype=BFLOAT), filled(300), mask=mask)


@pytest.mark.parametrize("size", [1e38, 2.5e38, np.finfo(F).max])
def test_masks_near_the_largest_float(size: float) -> None:
    mask = np.zeros((1, 8, 40, 300), F)
    mask[..., 131] = size
    mask[:, 4:, :, 40:200] = -F(size)
    agree(queries(2, 40, 8, 64), filled(300), mask=mask)
    mask = np.full((1, 8, 40, 300), -size, F)
    mask[..., 131] = -0.5 * size
    agree(queries(2, 40, 8, 64, dtype=BFLOAT), filled(300), mask=mask)


def test_weights_move_where_references_have_no_room_for_more() -> None:
    """All scores are the lowest number, and values' scales above what a weight may be."""
    cache = cq.KVCache(1, 64, 300, 1, (2,))
    cache.append(normal(1, 300, 1, 64), np.copysign(F(1.2e5), normal(1, 300, 1, 64, seed=1)))
    mask = np.full((1, 1, 16, 300), np.finfo(F).min, F)
    agree(queries(1, 16, 4, 64, dtype=BFLOAT), cache.to_device("cuda"), mask=mask)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 30.0])
def test_scale(scale: float) -> None:
    agree(queries(2, 20, 8, 64), filled(300), largest_score=40 * abs(scale), scale=scale)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("size", [1e-33, 1e37])
def test_scales_that_queries_take_back(size: float, bits: int) -> None:
    tiny_or_huge = queries(2, 16, 8, 64, dtype=F) * F(size)
    agree(tiny_or_huge.astype(BFLOAT), filled(150, 2, (bits,)), largest_score=20, scale=0.3 / size)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("exponent", [-100, 20, 40, 61, 95])
@pytest.mark.parametrize("q_len", [3, 16])
def test_scales_that_queries_and_keys_take_back(q_len: int, exponent: int, bits: int) -> None:
    """Keys as large as their scales may be, and queries by which scores are a few units."""
    size, scale = {16: 1.5e4, 8: 1e6, 4: 7e4, 3: 3e4, 2: 2e4}[bits], 2.0**exponent
    cache = cq.KVCache(2, 64, 100, 1, (bits,))
    cache.append(normal(1, 100, 2, 64) * F(size), normal(1, 100, 2, 64, seed=1))
    q = normal(1, q_len, 8, 64, seed=3).astype(np.float64) * (0.25 / (size * scale))
    agree(q.astype(BFLOAT), cache.to_device("cuda"), largest_score=20, scale=scale)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_keys_of_zeros(q_len: int, bits: int) -> None:
    """Whatever queries and scale are: all scores are 0, so that values have the same weight."""
    cache = cq.KVCache(2, 64, 100, 1, (bits,))
    cache.append(np.zeros((1, 100, 2, 64), F), normal(1, 100, 2, 64, seed=1))
    there = cache.to_device("cuda")
    for scale in (2e38, -2e38):
        agree((normal(1, q_len, 8, 64) * F(5e37)).astype(BFLOAT), there, scale=scale)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_scores_as_large_as_masks(q_len: int, bits: int) -> None:
    """Of about 1e31; what a mask adds decides between tokens."""
    cache, q = filled(50, 2, (bits,)), (normal(2, q_len, 8, 64) * F(1e15)).astype(BFLOAT)
    agree(q, cache, scale=1e15, mask=normal(2, 8, q_len, 50, seed=7) * F(1e31), causal=False)


@pytest.mark.parametrize("q_len", [1, 16])
def test_importance_of_scores_as_large(q_len: int) -> None:
    """One token has all the weight of a row, or none, where its score is rounded otherwise a second time."""
    cache = filled(50, 2, (16, 8), track_attention=True)
    cq.attention(device.cupy().asarray((normal(2, q_len, 8, 64) * F(1e13)).astype(BFLOAT)), cache, scale=1e13)
    assert 0 < cache.tokens().importance.sum() <= 2 * q_len


@pytest.mark.parametrize("scale", [2e38, -2e38, 1e20, 1e-20])
def test_scales_of_queries_of_zeros(scale: float) -> None:
    agree(np.zeros((2, 16, 8, 64), HALF), filled(150), scale=scale)


@pytest.mark.parametrize("bits", WIDTHS)
def test_products_near_the_largest_float(bits: int) -> None:
    """Products of codes times a row's power are above it, where scores are not."""
    agree((queries(2, 16, 8, 64, dtype=F) * F(1e36)).astype(BFLOAT), filled(150, 2, (bits,)))


@pytest.mark.parametrize("magnitude", [1e-5, 1e-2, 1e4])
@pytest.mark.parametrize("bits", WIDTHS)
def test_magnitudes_of_values(bits: int, magnitude: float) -> None:
    """Scales differ by a factor of a thousand within a panel."""
    v = normal(1, 300, 2, 64, seed=1) * F(magnitude)
    v[:, ::3] *= F(1e-3)
    v[:, 1::50] = 0
    cache = cq.KVCache(2, 64, 300, 1, WIDTHS)
    cache.append(normal(1, 300, 2, 64), v, bits)
    agree(queries(1, 20, 8, 64, dtype=BFLOAT), cache.to_device("cuda"))


@pytest.mark.parametrize("magnitude", [6e-8, 1e-5, 0.3, 100.0])
def test_magnitudes_of_queries(magnitude: float) -> None:
    q = (normal(2, 16, 8, 64, seed=3) * F(magnitude)).astype(HALF)
    q[0, 0, 1] = 0
    agree(q, filled(100), largest_score=5 * max(magnitude, 1))
