"""Errors of tensors, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from math import inf, isnan, log10, nan, sqrt
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from walks import random_exl3

import cuquant as cq
from cuquant.eval.errors import error_of
from cuquant.eval.scores import tensor_error

RNG = np.random.default_rng(0)
TYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint64", "bool"]


def named(dtype: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def exact(original: NDArray[Any], other: NDArray[Any]) -> tuple[float, float]:
    """nmse and the largest difference of finite numbers."""
    pairs = [(Fraction(a), Fraction(b)) for a, b in zip(*map(numbers, (original, other)), strict=True)]
    noise, signal = sum((b - a) ** 2 for a, b in pairs), sum(a**2 for a, _ in pairs)
    return float(noise / signal), float(max(abs(b - a) for a, b in pairs))


def numbers(x: NDArray[Any]) -> list[Any]:
    """Python's, which are no less than NumPy's."""
    found: list[Any] = (x.astype(np.float64) if x.dtype.kind in "fV" else x).reshape(-1).tolist()
    return found


def assert_exact(original: Any, other: Any) -> None:
    """Of quantized tensors, too."""
    nmse, largest = exact(
        *(x.dequantize() if isinstance(x, cq.QuantizedArray) else x for x in (original, other))
    )
    found, ratio, found_largest = error_of(original, other)
    assert (found, found_largest) == pytest.approx((nmse, largest), rel=1e-13, abs=0)
    assert ratio == pytest.approx(-10 * log10(nmse), rel=1e-13)


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("b", TYPES)
def test_types(a: str, b: str) -> None:
    x, y = (np.rint(RNG.standard_normal((3, 50)) * 40).clip(0, 100).astype(named(name)) for name in (a, b))
    assert_exact(x, y)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.array([[(1 << 64) - 1, 5]], np.uint64), np.array([[(1 << 64) - 2, 5]], np.uint64)),
        (np.array([[(1 << 64) - 1, 5]], np.uint64), np.array([[2.0**64, 5]])),
        (np.array([[(1 << 53) + 1, -1]], np.int64), np.array([[1 << 53, -1]], np.float32)),
        (np.array([[-(1 << 63), 1]], np.int64), np.array([[1 - (1 << 63), 1]], np.int64)),
        (np.array([[1e300, 1e-300]]), np.array([[1e300, 1e150]])),
        (np.array([[1e-300, 3e-300]]), np.array([[2e-300, 3e-300]])),
        (np.array([[1e-45, 0]], np.float32), np.array([[3e-45, 0]], np.float32)),
        (np.array([[3e38, 1e-30]], np.float32), np.array([[-3e38, 1e-20]], np.float32)),
        (np.array([[1e100, 1.0]]), np.array([[1e100, 1 + 2.0**-52]])),
    ],
)
def test_magnitudes(a: NDArray[Any], b: NDArray[Any]) -> None:
    assert_exact(a, b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_is_not_finite(dtype: str) -> None:
    """In one place of both it is no error, and never a part of the signal."""
    kind = named(dtype)
    a = RNG.standard_normal((40, 64)).astype(kind)
    b = a + np.ones((), kind)
    clean = error_of(np.delete(a, 3, 1), np.delete(b, 3, 1))
    for value in (nan, inf, -inf):
        a[:, 3] = b[:, 3] = value
        assert error_of(a, b) == pytest.approx(clean, rel=1e-13)
    for one, other, error in [(nan, 1, nan), (1, nan, nan), (nan, inf, nan), (inf, -inf, inf), (1, inf, inf)]:
        a[:, 3] = b[:, 3] = 0
        a[7, 3], b[7, 3] = one, other
        nmse, ratio, largest = error_of(a, b)
        assert ratio is not None
        for found, expected in ((nmse, error), (largest, error), (ratio, -error)):
            assert isnan(found) if isnan(expected) else found == expected


def test_zeros() -> None:
    zeros, ones = np.zeros((2, 3), np.float16), np.ones((2, 3))
    assert error_of(zeros, -zeros) == (0, None, 0)
    assert error_of(zeros, ones) == (inf, -inf, 1)
    assert error_of(np.zeros((2, 0)), np.zeros((2, 0))) == (0, None, 0)


def several_slabs(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("cuquant.slabs.cpu.SLAB", size)
    monkeypatch.setattr("cuquant.eval.errors._PART", 100)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    w = RNG.standard_normal((2, 30, 64), np.float32)
    quantized = cq.quantize(w, "q4_0")
    whole = error_of(w, quantized)
    several_slabs(monkeypatch, 256)
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr("cuquant.eval.errors.os.cpu_count", lambda threads=threads: threads)
        found.append(error_of(w, quantized))
    assert found[0] == found[1] == found[2] == pytest.approx(whole, rel=1e-13)
    assert_exact(w, quantized)


def test_no_error_is_no_negative_zero() -> None:
    for w in (np.ones((3, 64), np.float32), np.zeros((3, 64), np.float16), np.arange(64)[None]):
        assert f"{error_of(w, w)[2]:.1e}" == "0.0e+00"


def test_slabs_that_differ_in_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    several_slabs(monkeypatch, 1)
    a, b = np.ones((3, 4)), np.ones((3, 4))
    a[2, 1], b[0, 0] = inf, nan
    assert isnan(error_of(a, b)[0])
    assert isnan(error_of(a, b)[2])


@pytest.mark.parametrize("size", [1 << 20, 500])
@pytest.mark.parametrize(
    "name", ["q8_0", "q4_k", "kbit3", "int4-32-zeros", "nvfp4", "trellis3", "trellis2-32"]
)
def test_stacks(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of formats that store matrices as a whole."""
    several_slabs(monkeypatch, size)
    w = RNG.standard_normal((2, 24, 256)).astype(np.float16)
    quantized = cq.quantize(w, name)
    assert_exact(w, quantized)
    assert_exact(quantized, cq.quantize(w, "q4_0"))
    assert error_of(quantized, quantized) == (0, None, 0)


def test_rows_that_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    several_slabs(monkeypatch, 128)
    w = random_exl3(3, (2, 256, 128))
    assert_exact(w, w.dequantize(np.float16))


@pytest.mark.parametrize(("name", "k"), [("kbit4", 70), ("q8_0", 64), ("trellis3", 48)])
def test_vectors(name: str, k: int) -> None:
    """Also whose last block is not full."""
    x = RNG.standard_normal(k).astype(np.float32)
    w = cq.quantize(x, name)
    error = tensor_error("x", x, w)
    nmse, largest = exact(x, w.dequantize())
    assert (error.nmse, error.max_abs_error) == pytest.approx((nmse, largest), rel=1e-13)
    assert error.sqnr_db == pytest.approx(-20 * log10(sqrt(nmse)), rel=1e-13)
