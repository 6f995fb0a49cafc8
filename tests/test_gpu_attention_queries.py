"""Queries of attention on a GPU: their magnitudes, types and strides, and those that become integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attending import DTYPES, WIDTHS, Array, F, agree, filled, normal

import cuquant as cq
from cuquant import device, testing
from cuquant.cuda import jit
from cuquant.plan import attention as plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    """Of those that become integers."""
    compile_ahead(
        {
            plan.attention(
                plan.Shape(1, 1, 3 * heads, heads, 128, widths, False, 1), jit.capability(), 132
            ).attention.kernel
            for heads in (2, 8)
            for widths in (WIDTHS, (8, 4, 3, 2), (8, 4), (16, 4))
        }
    )


@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1.0, 1e3, 1e30])
def test_magnitudes_of_queries(magnitude: float) -> None:
    agree(
        normal(2, 3, 8, 64, seed=3) * F(magnitude),
        filled(),
        largest_score=5 * magnitude if magnitude < 1e6 else 0,
    )


@pytest.mark.parametrize("magnitude", [6e-8, 1e-6, 1e-3, 0.3, 100.0, 1e4])
def test_magnitudes_of_float16_queries(magnitude: float) -> None:
    """They are lifted to the top of float16's range by powers of two, those of 2^16 and more in steps."""
    q = (normal(2, 1, 8, 64, seed=3) * F(magnitude)).astype(np.float16)
    q[0, 0, 1] = 0
    q[1, 0, :4] *= np.float16(0.01)
    agree(q, filled(), largest_score=5 * max(magnitude, 1))


def larger_channel(q: Array) -> Array:
    q[..., 7] *= q.dtype.type(30)
    return q


def largest_at_the_bytes_edge(q: Array) -> Array:
    """With one power of two more, or less, the high byte of a query's largest channel would be 128, or 63."""
    for row, (exponent, part) in enumerate(
        ((0, 2 - 2**-10), (3, -2 + 2**-10), (-5, 2 - 2**-7), (1, -2.0), (2, 1.0))
    ):
        q[:, :, row::5] = np.clip(q[:, :, row::5], -1, 1) * q.dtype.type(2.0**exponent)
        q[:, :, row::5, row] = part * 2.0**exponent
    return q


def subnormal(q: Array) -> Array:
    return (q * q.dtype.type(2.0**-20)).astype(np.float16).astype(q.dtype)


@pytest.mark.parametrize("bits", WIDTHS[1:])
@pytest.mark.parametrize("change", [larger_channel, largest_at_the_bytes_edge, subnormal])
@pytest.mark.parametrize(("heads", "dtype"), [(2, np.float16), (8, ml_dtypes.bfloat16), (8, np.float16)])
def test_queries_that_become_integers(
    bits: int, change: Callable[[Array], Array], heads: int, dtype: Any
) -> None:
    """Up to four for a key head of 128 channels: those whose bytes have no room to spare, or few digits.

    Of a cache that has 16 bits they are float16 numbers first.
    """
    q = change(normal(2, 1, 3 * heads, 128, seed=3, dtype=dtype))
    largest_score = 20 if change is larger_channel else 5
    cache = filled(150, heads=heads, dim=128, widths=(8, 4, 3, 2), bits=[bits])
    agree(q, cache, largest_score)
    agree(q, filled(150, heads=heads, dim=128, bits=[16, bits]), largest_score)


@pytest.mark.parametrize(("widths", "dim"), [((8, 4), 40), ((8, 4), 64), ((8, 4, 2), 96), ((4, 3), 256)])
@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"key_scales": "pairs"}], ids=str)
def test_queries_that_become_integers_of_other_sizes(
    widths: tuple[int, ...], dim: int, options: dict[str, Any]
) -> None:
    if dim % 32 and options.get("rotate"):
        return
    cache = filled(90, dim=dim, widths=widths, **options)
    for dtype in DTYPES[:2]:
        agree(normal(2, 1, 6, dim, seed=3, dtype=dtype), cache, largest_score=5)


@pytest.mark.parametrize("peak", [32631, 32632, 32633, 32638, 32639, 32639.5, 32640, 32767])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("widths", [(8, 4), (16, 4)])
def test_the_largest_channel_where_its_high_byte_would_overflow(
    widths: tuple[int, ...], heads: int, peak: float
) -> None:
    """Where a cache has 16 bits, queries times key scales are rounded to float16 numbers before."""
    scales = np.full((heads, 128), F(peak / 16384))
    cache = filled(90, heads=heads, dim=128, widths=widths, key_scales=scales)
    for dtype in DTYPES[:2]:
        q = np.clip(normal(2, 1, 3 * heads, 128, seed=3), -1, 1).astype(dtype)
        agree(q, cache, largest_score=10)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("heads", [2, 8])
def test_bad_queries_that_would_become_integers(heads: int, bad: float) -> None:
    cache = filled(60, heads=heads, dim=128)
    q = normal(2, 1, 4 * heads, 128, seed=3, dtype=np.float16)
    expected = testing.as_numpy(cq.attention(device.cupy().asarray(q), cache))
    q[1, 0, 6, 100] = bad
    y = testing.as_numpy(cq.attention(device.cupy().asarray(q), cache))
    assert np.isnan(y[1, 0, 6]).all()
    y[1, 0, 6] = expected[1, 0, 6]
    assert np.array_equal(y, expected)


@pytest.mark.parametrize(("q_len", "dtype"), [(3, F), (20, np.float16)])
def test_a_bad_query_spoils_only_itself(q_len: int, dtype: Any) -> None:
    cache, q = filled(), normal(2, q_len, 8, 64, seed=3, dtype=dtype)
    expected = testing.as_numpy(cq.attention(device.cupy().asarray(q), cache))
    q[0, 1, 2, 5] = np.nan
    y = testing.as_numpy(cq.attention(device.cupy().asarray(q), cache))
    assert np.isnan(y[0, 1, 2]).all()
    y[0, 1, 2] = expected[0, 1, 2]
    assert np.array_equal(y, expected)


def test_any_strides_of_q() -> None:
    cupy, cache = device.cupy(), filled()
    q = cupy.asarray(normal(2, 3, 8, 64, seed=3))
    expected = cq.attention(q, cache)
    assert bool((cq.attention(cupy.asfortranarray(q), cache) == expected).all())
    shifted = cupy.zeros((*q.shape[:-1], 80), F)[..., 3:67]
    shifted[...] = q
    assert bool((cq.attention(shifted, cache) == expected).all())
