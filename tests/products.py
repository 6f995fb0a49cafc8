"""What is held of weights of every format: bytes and numbers as on the CPU, products against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import FLOATS
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import problem
from cuquant.plan import wgmma_timed
from cuquant.testing import as_numpy, nmse, worst_element


def gauss(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def cuda_weight(name: str, shape: tuple[int, ...], seed: int = 1) -> cq.QuantizedArray:
    return cq.quantize(gauss(shape, seed), name).to_device("cuda")


def plan_anew(*prepared: cq.QuantizedArray) -> None:
    """Forget every plan, and what weights know of their products."""
    plan.gemm.cache_clear()
    problem.resolve.cache_clear()
    for w in prepared:
        w.fragments().repeats.clear()


def share_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it took no time to pass sums on."""
    monkeypatch.setattr(wgmma_timed, "leave_us", lambda tile, before_others: 0)


def check_way(
    monkeypatch: pytest.MonkeyPatch,
    way: wgmma_timed.WgmmaWay,
    w: cq.QuantizedArray,
    x: Any,
    bias: Any,
    residual: Any,
    reference: Any,
) -> None:
    """Products by this way to run the wgmma core, with every kind of result."""
    cupy, (m, n) = device.cupy(), reference.shape
    monkeypatch.setattr(wgmma_timed, "ways", lambda *a: [way])
    plan_anew(w)
    for _ in range(2):  # flags are as they were
        assert nmse(x @ w.T, reference) < 1e-6, way
    y = cq.linear(x, w, bias=bias, activation="relu", residual=residual, dtype=np.float32)
    assert nmse(y, cupy.maximum(reference + bias, 0) + residual) < 1e-6, way
    assert nmse(cq.matmul(x, w.T, dtype=np.float32), reference) < 1e-6, way
    y = cq.linear(x, w, bias=bias)
    assert nmse(y, reference + bias) < 1e-6, way
    frame = cupy.full((m + 2, n + 24), np.nan, np.float16)  # aligned rows, a row that is not, the rest
    for view in (frame[1 : m + 1, 8 : n + 8], frame[1 : m + 1, 1 : n + 1]):
        frame.fill(np.nan)
        assert nmse(cq.matmul(x, w.T, out=view), reference) < 1e-6, way
        view.fill(np.nan)
        assert cupy.isnan(frame).all(), way


def assert_read_back(raw: NDArray[np.uint8], fmt: cq.Format, shape: tuple[int, ...]) -> None:
    """Numbers are the CPU's, bit for bit, and a prepared weight and its rows give the bytes back."""
    own = cq.from_blocks(raw, fmt, shape)
    for dtype in FLOATS:
        with np.errstate(all="ignore"):
            expected = own.dequantize(dtype).astype(np.float32)
        got = as_numpy(own.to_device("cuda").dequantize(dtype)).astype(np.float32)
        np.testing.assert_array_equal(got, expected)
    there = own.to_device("cuda").prepare()
    np.testing.assert_array_equal(as_numpy(there.blocks), raw)
    for row in (0, -1):
        np.testing.assert_array_equal(as_numpy(there[row].blocks), raw[row])


def assert_quantized_as_on_the_cpu(x: NDArray[Any], fmt: str | cq.Format) -> None:
    """A GPU gives NumPy's bytes, wherever in memory the numbers (rows, K) are."""
    cupy, (rows, k) = device.cupy(), x.shape
    expected = cq.quantize(x, fmt).blocks
    wide = cupy.zeros((rows, 2 * k), x.dtype)
    for place in (slice(0, k), slice(1, k + 1), slice(0, None, 2), slice(1, None, 2)):
        wide[:, place] = cupy.asarray(x)
        np.testing.assert_array_equal(as_numpy(cq.quantize(wide[:, place], fmt).blocks), expected)
    np.testing.assert_array_equal(as_numpy(cq.quantize(cupy.asarray(x), fmt).blocks), expected)


def assert_products(w: cq.QuantizedArray) -> None:
    """x @ w.T is right for batches of every core, every type of activations, and those of 8 bits."""
    cupy = device.cupy()
    for m in (1, 8, 12, 40, 300):
        given = cupy.asarray(np.random.default_rng(2).standard_normal((m, w.shape[-1]), np.float32))
        for dtype in FLOATS:
            x = given.astype(dtype)
            y, exact = cq.matmul(x, w.T, dtype=np.float32), testing.linear(x, w)
            assert nmse(y, exact) < 1e-6, (m, w.shape, dtype)
            assert worst_element(y, exact) < 0.01, (m, w.shape, dtype)
        q = cq.quantize(x, "q8_1")
        assert nmse(q @ w.T, testing.linear(q, w)) < 1e-6, (m, w.shape)


def assert_stack_products(w: cq.QuantizedArray) -> None:
    """x @ w.T of a stack (3, N, K) on NumPy, of floats and of q8_1 activations."""
    dense, (_, n, k) = w.dequantize().astype(np.float64), w.shape
    for dtype, most in ((np.float32, 1e-6), (np.float16, 1e-6), (ml_dtypes.bfloat16, 1e-5)):
        x = np.random.default_rng(2).standard_normal((3, 7, k), np.float32).astype(dtype)
        y = x @ w.T
        assert (y.shape, y.dtype) == ((3, 7, n), np.dtype(dtype))
        assert nmse(y, x.astype(np.float64) @ dense.swapaxes(1, 2)) <= most
    x8 = cq.quantize(np.random.default_rng(3).standard_normal((5, k), np.float32), "q8_1")
    assert nmse(x8 @ w[1].T, testing.linear(x8, w[1])) <= 1e-6
