"""How errors are measured: `testing.nmse` and `testing.worst_element`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cuquant as cq
from cuquant import testing

ONES = np.ones((2, 3))


@pytest.mark.parametrize("size", [1e-307, 1e-170, 1e-150, 1e-30, 1, 1e30, 1e150, 1e170, 1e307])
def test_numbers_of_any_size(size: float) -> None:
    y = np.array([[1.0, 3.0, -2.0], [0.5, 0.0, 4.0]])
    reference = np.array([[2.0, 3.0, -2.0], [0.5, 1.0, 4.0]])
    scaled = y * size, reference * size
    assert testing.nmse(*scaled) == pytest.approx(2 / 34.25, rel=1e-12)
    assert testing.worst_element(*scaled) == pytest.approx(1 / math.sqrt(17 / 3), rel=1e-12)
    assert testing.nmse([size], [2 * size]) == 0.25
    assert testing.nmse([0.0], [size]) == 1
    assert testing.nmse([size], [0.0]) == math.inf
    assert testing.nmse([size], [size]) == 0


def test_an_error_far_from_the_numbers() -> None:
    assert testing.nmse([1.0, 1e-170], [1.0, 0.0]) == 0  # below float64's least
    assert testing.nmse([1e-100, 1e-170], [1e-100, 0.0]) == pytest.approx(1e-140, rel=1e-12)
    assert testing.nmse([1e300], [1e-300]) == math.inf


def test_ordinary_results_are_the_same_to_the_bit() -> None:
    y, reference = np.random.default_rng(0).standard_normal((2, 64, 96)) * 1e-9
    assert testing.nmse(y, reference) == np.square(y - reference).sum() / np.square(reference).sum()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("size", [1e-200, 1, 1e200])
def test_what_is_not_finite_never_passes(bad: float, size: float) -> None:
    for y, reference in (([bad, size], [size, size]), ([size, size], [bad, size])):
        for measure in (testing.nmse, testing.worst_element):
            assert not measure(y, reference) < 1
    assert testing.nmse(np.zeros(0), np.zeros(0)) == testing.worst_element(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (np.ma.masked_array(ONES, ONES > 0), "is a masked array; its mask would be lost"),
        (ONES.astype(complex), "has dtype complex128; numbers are needed"),
    ],
)
def test_what_would_lose_a_part_is_refused(given: Any, problem: str) -> None:
    for measure in (testing.nmse, testing.worst_element):
        with pytest.raises(TypeError, match=f"^y {problem}"):
            measure(given, ONES)
        with pytest.raises(TypeError, match=f"^reference {problem}"):
            measure(ONES, given)
    with pytest.raises(TypeError, match=f"^x {problem}"):
        testing.linear(given, ONES)
    with pytest.raises(TypeError, match=f"^bias {problem}"):
        testing.linear(ONES, ONES, bias=given)


def test_a_scalar_is_a_row_of_its_own() -> None:
    for y, expected in ((1.0, 0.0), (np.float32(3), 2.0), (np.nan, np.nan)):
        np.testing.assert_equal(testing.worst_element(y, 1.0), expected)


def test_a_guarded_array_has_an_axis() -> None:
    with pytest.raises(ValueError, match=r"shape is \(\), that of a scalar; one axis or more is needed"):
        testing.Guarded((), np.float32)
    assert testing.Guarded((3,), np.float32).array.shape == (3,)


def test_numpy_s_strictest_errors_change_nothing() -> None:
    """References of what is too small for float64, too."""
    cache = cq.KVCache(1, 64, 4)
    cache.append(np.ones((1, 4, 1, 64), np.float32), np.ones((1, 4, 1, 64), np.float32))
    mask = np.array([[[[0, -800, 0, 0]]]], np.float32)
    with np.errstate(all="raise"):
        assert (testing.attention(np.ones((1, 1, 1, 64), np.float32), cache, mask=mask) == 1).all()
        for activation in ("relu", "silu", "gelu", "gelu_erf"):
            y = testing.linear(np.array([[-1e3], [1e-310], [1]]), np.ones((1, 1)), activation=activation)
            assert not y[0].any()
