"""E4M4 against its definition: every code, every midpoint between codes, and what has no code."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cuquant as cq

F = np.float32
CODES = np.arange(256, dtype=np.uint8)


def defined() -> NDArray[np.float64]:
    """The number of each code, by the formula."""
    return np.array(
        [2.0 ** (c // 16 - 11) * (1 + c % 16 / 16) if c > 15 else c * 2.0**-14 for c in range(256)]
    )


def test_every_code_as_the_definition() -> None:
    values = cq.e4m4_decode(CODES)
    assert values.dtype == F
    np.testing.assert_array_equal(values, defined())
    assert (np.diff(values) > 0).all()
    np.testing.assert_array_equal(values[[0, 1, 15, 16, 176, 255]], [0, 2**-14, 15 * 2**-14, 2**-10, 1, 31])


def test_every_code_round_trips() -> None:
    np.testing.assert_array_equal(cq.e4m4_encode(cq.e4m4_decode(CODES)), CODES)


def test_midpoints_round_to_even_and_neighbours_to_the_nearest() -> None:
    """Midpoints are exact in float32, so their neighbours are strictly nearer to one of the two."""
    values = cq.e4m4_decode(CODES)
    middle = (values[1:] + values[:-1]) / F(2)
    lower, upper = CODES[:-1], CODES[1:]
    np.testing.assert_array_equal(cq.e4m4_encode(middle), np.where(lower % 2 == 0, lower, upper))
    np.testing.assert_array_equal(cq.e4m4_encode(np.nextafter(middle, F(0))), lower)
    np.testing.assert_array_equal(cq.e4m4_encode(np.nextafter(middle, F(np.inf))), upper)


def test_mantissas_carry_into_the_exponent() -> None:
    x = np.array([1 + 31 / 32, 15.5 * 2**-14, 16 - 0.25, 1.96875 * 2**-10], F)
    np.testing.assert_array_equal(cq.e4m4_decode(cq.e4m4_encode(x)), np.array([2, 2**-10, 16, 2**-9], F))


def test_the_range_ends() -> None:
    """Saturated above, not wrapped around; at most half the smallest subnormal is 0."""
    large = np.array([31, 31.5, 32, 33, 64, 1e10, np.finfo(F).max], F)
    assert (cq.e4m4_encode(large) == 255).all()
    small = np.array([0, -0.0, 1e-45, 1e-38, 2**-15], F)
    assert (cq.e4m4_encode(small) == 0).all()
    assert cq.e4m4_encode(np.nextafter(F(2**-15), F(1))[None]) == 1


def test_errors_are_at_most_as_documented() -> None:
    x = np.geomspace(2**-15 * 1.0001, 31, 200_000).astype(F)
    error = np.abs(cq.e4m4_decode(cq.e4m4_encode(x)) - x.astype(np.float64)) / x
    assert error[x >= 2**-10].max() <= 1 / 33
    assert error[x >= 2**-14].max() <= 1 / 3
    assert 0.99 < error.max() < 1
    worst = np.array([33 / 32, 1.5 * 2**-14], F)  # ties that go down and up
    error = np.abs(cq.e4m4_decode(cq.e4m4_encode(worst)) / worst.astype(np.float64) - 1)
    np.testing.assert_allclose(error, [1 / 33, 1 / 3], rtol=1e-12)


@pytest.mark.parametrize(
    ("bad", "shown"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (-1.5, "-1.5"), (-1e-45, "-1")]
)
def test_refuses_what_has_no_code(bad: float, shown: str) -> None:
    with pytest.raises(
        ValueError, match=f"E4M4 has no code for {shown}.*: numbers must be finite and not neg"
    ):
        cq.e4m4_encode(np.array([1, bad], F))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_other_floats_shapes_and_strides(dtype: Any) -> None:
    x = np.abs(np.random.default_rng(0).standard_normal((6, 4, 10), F)).astype(dtype)
    expected = cq.e4m4_encode(x.astype(F))
    assert expected.shape == x.shape
    np.testing.assert_array_equal(cq.e4m4_encode(x), expected)
    np.testing.assert_array_equal(cq.e4m4_encode(x[::2, ::-1, 1::3]), expected[::2, ::-1, 1::3])
    np.testing.assert_array_equal(cq.e4m4_decode(expected[:, ::2]), cq.e4m4_decode(expected)[:, ::2])
    assert cq.e4m4_encode(x[:0]).shape == (0, 4, 10)
    assert cq.e4m4_encode(np.array(0, dtype)).shape == cq.e4m4_decode(np.array(0, np.uint8)).shape == ()


def test_refuses_other_types() -> None:
    with pytest.raises(TypeError, match="x has dtype float64"):
        cq.e4m4_encode(np.ones(3))
    with pytest.raises(TypeError, match="x is a list"):
        cq.e4m4_encode([1.0])
    with pytest.raises(TypeError, match="codes has dtype int64; E4M4 codes are uint8"):
        cq.e4m4_decode(np.ones(3, np.int64))
