"""What a product adds to its sums, and where it writes, on every backend."""

from __future__ import annotations

from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from test_matmul import KINDS, F, activations, check, on, weight

import cuquant as cq
from cuquant import testing
from cuquant.testing import BOUNDS, as_numpy


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_erf", "silu"])
@pytest.mark.parametrize("m", [1, 5, 16, 50])
def test_epilogue(activation: str | None, m: int, xp: ModuleType) -> None:
    g = np.random.default_rng(5)
    w = on(xp, weight("q4_1", (72, 128)))
    x = activations("float32", (m, 128), xp, 0.2)
    bias = xp.asarray(g.standard_normal(72, F).astype(np.float16))
    residual = xp.asarray(g.standard_normal((m, 72), F).astype(ml_dtypes.bfloat16))
    reference = testing.linear(x, w, bias=bias, activation=activation, residual=residual)
    y = cq.linear(x, w, bias=bias, activation=activation, residual=residual)
    check(y, reference, "float32")
    for dtype in BOUNDS:  # rounded once
        rounded = cq.linear(x, w, bias=bias, activation=activation, residual=residual, dtype=dtype)
        assert rounded.dtype == dtype
        np.testing.assert_array_equal(as_numpy(rounded), as_numpy(y).astype(dtype))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_erf", "silu"])
def test_activations_of_products_with_floats(activation: str, xp: ModuleType) -> None:
    """A plain weight has no kernel: each array module computes them by the same formulas."""
    g = np.random.default_rng(6)
    w, x = xp.asarray(g.standard_normal((24, 64), F)), xp.asarray(g.standard_normal((5, 64), F))
    y = cq.linear(x, w, activation=activation)
    check(y, testing.linear(x, w, activation=activation), "float32")


def test_bias_and_residual_keep_their_bits(xp: ModuleType) -> None:
    """Where x is zero the result is bias + residual, one float32 addition; for a vector x too."""
    w, g = on(xp, weight("q4_0", (33, 64))), np.random.default_rng(6)
    bias, residual = g.standard_normal(33, F), g.standard_normal((20, 33), F)
    x, b, r = xp.zeros((20, 64), F), xp.asarray(bias), xp.asarray(residual)
    np.testing.assert_array_equal(as_numpy(cq.linear(x, w, bias=b, residual=r)), bias + residual)
    out = xp.full(33, np.nan, F)
    assert cq.linear(x[0], w, bias=b, residual=r[0], out=out) is out
    np.testing.assert_array_equal(as_numpy(out), bias + residual[0])


def test_biases_of_a_stack(xp: ModuleType) -> None:
    w, x = on(xp, weight("q8_0", (3, 40, 64))), activations("float32", (3, 4, 64), xp)
    bias = xp.asarray(np.random.default_rng(0).standard_normal((3, 40), F))
    check(cq.linear(x, w, bias=bias), testing.linear(x, w, bias=bias), "float32")
    check(cq.linear(x, w, bias=bias[0]), testing.linear(x, w, bias=bias[0]), "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 33), (16, 100), (40, 70)])
def test_out_is_written_and_nothing_else(m: int, n: int, strided: bool, kind: str, xp: ModuleType) -> None:
    w, x = on(xp, weight("q5_0", (n, 96))), activations(kind, (m, 96), xp)
    for dtype in BOUNDS:
        guarded = testing.Guarded((m, n), dtype, strided=strided, xp=xp)
        assert cq.matmul(x, w.T, out=guarded.array) is guarded.array
        assert not testing.is_poison(guarded.array).any()
        reference = as_numpy(cq.matmul(x, w.T, dtype=dtype))
        np.testing.assert_array_equal(as_numpy(guarded.array), reference)
        assert guarded.intact()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [5, 40])
def test_residual_may_be_out(m: int, kind: str, xp: ModuleType) -> None:
    w, x = on(xp, weight("q8_0", (70, 64))), activations(kind, (m, 64), xp)
    for dtype in BOUNDS:
        h = xp.asarray(activations("float32", (m, 160), xp, 8, seed=9).astype(dtype))[:, 3:143:2]
        expected = cq.linear(x, w, residual=h.copy(), dtype=dtype)
        assert cq.linear(x, w, residual=h, out=h) is h
        np.testing.assert_array_equal(as_numpy(h), as_numpy(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_operands_are_left_alone(kind: str, xp: ModuleType) -> None:
    w, x = on(xp, weight("q5_1", (40, 64))), activations(kind, (17, 64), xp)
    bias, residual = activations("float32", (40,), xp), activations("bfloat16", (17, 40), xp)
    read = [x.blocks if kind == "q8_1" else x, bias, residual]
    before, blocks = [as_numpy(a).copy() for a in read], as_numpy(w.blocks).copy()
    cq.linear(x, w, bias=bias, activation="gelu", residual=residual)
    for a, b in zip([*read, w.blocks], [*before, blocks], strict=True):
        np.testing.assert_array_equal(as_numpy(a), b)
