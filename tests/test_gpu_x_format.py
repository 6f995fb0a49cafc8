"""Products that quantize x, or have a kernel do so that stores no blocks, give what products of quantized x
give, to the bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from products import gauss
from repeated import GIVEN, K, N, counting, odd, there, weight

import cuquant as cq
from cuquant import device, plan, repeats
from cuquant.cuda import activations, jit, problem
from cuquant.testing import as_numpy

pytestmark = pytest.mark.gpu
F, H = np.float32, np.float16
FLOATS = [kind for kind in GIVEN if kind not in ("q8_1", "blocks")]


def assert_alike(x: Any, w: cq.QuantizedArray, **kwargs: Any) -> None:
    """Twice, since what is known of the first call serves the second."""
    expected = as_numpy(cq.linear(cq.quantize(x, "q8_1"), w, **kwargs))
    for _ in range(2):
        got = as_numpy(cq.linear(x, w, x_format="q8_1", **kwargs))
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got.astype(F), expected.astype(F))


@pytest.mark.parametrize("kind", FLOATS)
def test_x_of_every_kind(kind: str) -> None:
    w = weight()
    for m in (1, 2, 3, 4, 9, 40):
        assert_alike(GIVEN[kind](there((m, K), F, m)), w)
    assert_alike(GIVEN[kind](there((2, K), F)), w, bias=there((N,)), activation="silu", dtype=H)


@pytest.mark.parametrize("fmt", ["q4_1", "q8_0", "q2_k", "q6_k", "kbit3", "mxfp4", "nvfp4", "int4-128-zeros"])
def test_every_codec(fmt: str) -> None:
    w = weight(fmt, (80, 768))
    for m in (1, 3, 17):
        assert_alike(there((m, 768), H, m), w)


def test_odd_shapes() -> None:
    stack = weight("q4_0", (3, 40, 96))
    assert_alike(there((3, 2, 96)), stack)
    assert_alike(there((1, 1, 96)), stack)
    assert_alike(there((96,)), stack)
    assert_alike(there((0, 96)), stack)
    assert_alike(there((2, 5, 1, 32)), weight("q5_0", (5, 7, 32)))


def test_weights_that_the_product_cannot_quantize_for() -> None:
    signed = weight(cq.Trellis(3, group_size=32), (64, 256))
    assert_alike(there((2, 256)), signed)
    assert_alike(there((20, 256), F), signed)
    assert_alike(there((2, K)), there((N, K)))
    assert_alike(there((2, K)), weight().dequantize(F))


def test_rows_longer_than_a_block_of_threads_can_quantize() -> None:
    w = weight("q4_0", (16, plan.LONGEST_ROW + 32))
    for dtype in (H, F):
        assert_alike(there((2, plan.LONGEST_ROW + 32), dtype), w)


def test_every_scale_of_float16() -> None:
    """Peaks are all finite float16 numbers, with others below them."""
    every = np.arange(0x7C00, dtype=np.uint16).view(H)
    below = np.abs(gauss((len(every), 32), 5)).clip(0, 1) * np.sign(gauss((len(every), 32), 6))
    x = (every[:, None].astype(F) * below).astype(H)
    x[np.arange(len(every)), np.arange(len(every)) % 32] = every
    w = weight("q4_0", (16, 1024))
    for rows in device.cupy().asarray(x.reshape(-1, 4, 1024)):
        for row in rows:
            assert_alike(row, w)
        assert_alike(rows, w)


def test_numbers_near_the_end_of_float16() -> None:
    """127 times a rounded scale is beyond it."""
    x = there((3, K))
    x[:, ::32] = 65504
    x[1, 7] = -65504
    for given in (x, x * H(0.995)):
        assert_alike(given, weight())
        for row in given:
            assert_alike(row, weight())


def test_x_of_every_stride_and_address() -> None:
    w, big = weight(shape=(N, 160)), there((8, 320))
    spread = device.cupy().broadcast_to(big[:1, :160], (3, 160))
    columns = device.cupy().ascontiguousarray(big[:3, :160].T).T
    for x in (big[::4, :160], big[:3, 4:164], big[2::-1, :160], spread, columns, big[:3, ::2]):
        assert_alike(x, w)
    x = there((2, 160), H, 3)
    expected = as_numpy(cq.linear(cq.quantize(x, "q8_1"), w))
    for given in (x, odd(x), x, odd(x)):
        np.testing.assert_array_equal(as_numpy(cq.linear(given, w, x_format="q8_1")), expected)


def test_what_is_not_finite_spoils_its_row_alone() -> None:
    w = weight()
    for bad in (np.nan, np.inf, -np.inf):
        x = there((2, K))
        x[1, 33] = bad
        good = as_numpy(cq.linear(x[:1], w, x_format="q8_1"))
        got = as_numpy(cq.linear(x, w, x_format="q8_1"))
        np.testing.assert_array_equal(got[0], good[0])
        assert np.isnan(got[1]).all()
        assert np.isnan(as_numpy(cq.linear(x[1], w, x_format="q8_1"))).all()


def test_one_row_is_one_launch_and_a_repeated_call_is_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w, x = weight(), there((1, K))
    launch = problem.resolve(
        w.fragments().weight,
        activations.operand(x, quantizes=True).source,
        problem.Output((1, N), (N, 1), problem.DTYPES[np.dtype(F)]),
        problem.Epilogue(0, False, None, 0, None),
        jit.gpu(),
    )
    assert launch.converts_x
    counts = counting(monkeypatch, "product", "repeat", "quantize_activations")
    for seed in range(3):
        cq.matmul(there((1, K), H, seed), w.T, x_format="q8_1")
        cq.matmul(there((40, K), F, seed), w.T, x_format="q8_1")
    assert counts == [2, 4, 0]


def test_repeated_calls_are_known_where_x_is_quantized_before(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(cq.Trellis(3, group_size=32), (64, 256))
    counts = counting(monkeypatch, "product", "repeat", "quantize_activations", "quantize_again")
    repeats.quantized.clear()
    for seed in range(4):
        cq.matmul(there((2, 256), H, seed), w.T, x_format="q8_1")
    assert counts == [1, 3, 1, 3]


def test_it_can_be_captured() -> None:
    cupy = device.cupy()
    w = weight()
    for x in (there((1, K)), there((1, K), ml_dtypes.bfloat16)):
        out = cupy.zeros((1, N), F)
        cq.linear(x, w, x_format="q8_1", out=out)
        expected = as_numpy(out).copy()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            cq.linear(x, w, x_format="q8_1", out=out)
            stream.begin_capture()
            cq.linear(x, w, x_format="q8_1", out=out)
            graph = stream.end_capture()
            out.fill(7)
            graph.launch(stream)
            stream.synchronize()
        np.testing.assert_array_equal(as_numpy(out), expected)
