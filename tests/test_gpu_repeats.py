"""Calls like one before take a shorter way on the host, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import repeated
from repeated import GIVEN, K, N, counting, there, weight
from test_trellis import random_parts

import cuquant as cq
from cuquant import device, plan, repeats, testing
from cuquant.cuda import backend as cuda, buffers, problem
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
F, H, B = np.float32, np.float16, ml_dtypes.bfloat16
counted = repeated.counted  # a fixture of the modules that have this name


WORDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "out": lambda y, seed: {"out": y},
    "new": lambda y, seed: {},
    "dtype": lambda y, seed: {"dtype": "float32"},
    "bias": lambda y, seed: {"out": y, "bias": there((N,), F, seed), "activation": "silu"},
    "activation": lambda y, seed: {"activation": "gelu", "dtype": B},
    "residual": lambda y, seed: {"out": y, "residual": there(y.shape, F, seed)},
    "in place": lambda y, seed: {"out": y, "residual": y, "bias": there((N,), H, seed)},
    "spread": lambda y, seed: {"out": device.cupy().zeros((*y.shape, 2), F)[..., 0]},
}


def again_and_again(
    counted: list[int], w: cq.QuantizedArray, kind: str, words: str, shape: tuple[int, ...], most: float
) -> list[int]:
    """Products of other numbers, elsewhere, that are alike, against float64, and when nothing is known."""
    before, places = list(counted), set()
    kept: list[tuple[Any, ...]] = []
    for seed in range(4):
        x = GIVEN[kind](there(shape, F, seed))
        y = there((*shape[:-1], N), H, seed + 10)
        kwargs = WORDS[words](y, seed)
        places.add((x.blocks if isinstance(x, cq.QuantizedArray) else x).data.ptr)
        expected = testing.linear(
            x, w, **{name: a for name, a in kwargs.items() if name not in ("out", "dtype")}
        )
        first = kwargs["residual"].copy() if words == "in place" else None
        got = cq.linear(x, w, **kwargs)
        assert "out" not in kwargs or got is kwargs["out"]
        assert nmse(got, expected) < most, seed
        kept.append((x, kwargs, got.copy(), first))
    found = [counted[0] - before[0], counted[1] - before[1]]
    assert len(places) == 4
    for x, kwargs, got, first in kept:
        w.fragments().repeats.clear()
        if first is not None:
            kwargs["out"][...] = first
        y = cq.linear(x, w, **kwargs)
        assert y.dtype == got.dtype
        np.testing.assert_array_equal(as_numpy(y).astype(F), as_numpy(got).astype(F))
    return found


@pytest.mark.parametrize("kind", GIVEN)
def test_what_is_like_a_product_before_is_not_checked_again(counted: list[int], kind: str) -> None:
    w = weight()
    for m, words in ((3, "out"), (3, "new"), (12, "bias")):
        assert again_and_again(counted, w, kind, words, (m, K), 1e-5) == [1, 3], (m, words)


@pytest.mark.parametrize("words", WORDS)
def test_whatever_comes_after_the_sums(counted: list[int], words: str) -> None:
    w = weight("q5_1")
    for kind in ("float16", "bfloat16", "q8_1"):
        assert again_and_again(counted, w, kind, words, (2, K), 1e-4) == [1, 3], kind


@pytest.mark.parametrize("fmt", ["q8_0", "q4_k", "kbit3", "nvfp4", cq.Trellis(2)], ids=str)
def test_formats_and_their_signs(counted: list[int], fmt: Any) -> None:
    """Of many rows a trellis weight's signs are given to these as they are converted."""
    w = weight(fmt)
    for m in (1, 40):
        for kind in ("float16", "float32", "q8_1", "blocks") if m > 1 else ("float16",):
            assert again_and_again(counted, w, kind, "out", (m, K), 1e-5) == [1, 3], (m, kind)


def test_signs_of_each_matrix(counted: list[int]) -> None:
    """Nothing is known of rows that are not x's own: copies for each matrix, or numbers of q8_1 blocks."""
    w = cq.trellis_from_parts(**random_parts(2, (3, N, K), 128)).to_device("cuda")
    for kind, shape, known in (
        ("float16", (3, 40, K), True),
        ("float32", (3, 40, K), True),
        ("float32", (40, K), False),
        ("q8_1", (3, 40, K), False),
        ("q8_1", (3, 1, K), True),
    ):
        found = again_and_again(counted, w, kind, "new", shape, 1e-5)
        assert found == ([1, 3] if known else [4, 0]), (kind, shape)


def test_vectors_stacks_and_the_other_side(counted: list[int]) -> None:
    w = weight("q5_1", (3, N, K))
    for kind in ("float16", "float32", "q8_1"):
        assert again_and_again(counted, w[0], kind, "out", (K,), 1e-5) == [1, 3]
        assert again_and_again(counted, w, kind, "new", (3, 2, K), 1e-5) == [1, 3]
    before = list(counted)
    for seed in range(2):
        x = there((2, 3, K), F, seed).swapaxes(0, 1)  # of rows that are copied first, nothing is known
        assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6
    assert [counted[0] - before[0], counted[1] - before[1]] == [2, 0]
    for seed in range(3):
        x = there((K, 5), F, seed)
        assert nmse(w[1] @ x, testing.linear(x.T, w[1]).T) < 1e-6
    assert [counted[0] - before[0], counted[1] - before[1]] == [5, 0]  # each w[1] is another weight
    own = w[1].prepare()
    for seed in range(3):
        x = there((K, 5), F, seed)
        assert nmse(own @ x, testing.linear(x.T, own).T) < 1e-6
    assert [counted[0] - before[0], counted[1] - before[1]] == [6, 2]


def test_a_residual_in_place_and_one_that_is_almost_there(counted: list[int]) -> None:
    """Of what is like the first, a residual a row further on would be overwritten while it is read."""
    w, x, sums = weight(), there((3, K)), there((4, N), F)
    for known in (0, 1):
        cq.linear(x, w, residual=sums[:3], out=sums[:3])
        assert counted == [1, known]
    for start, stop in ((1, 0), (0, 1)):
        with pytest.raises(ValueError, match="out may share memory with residual"):
            cq.linear(x, w, residual=sums[start : start + 3], out=sums[stop : stop + 3])
    apart = there((3, N), F, 1)
    expected = testing.linear(x, w) + as_numpy(apart)
    assert nmse(cq.linear(x, w, residual=apart, out=sums[:3]), expected) < 1e-5


NO_FORMAT: Any = ["q8_1"]
VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x[:, :64],
    lambda x: x[:, ::2],
    lambda x: x[:, 1:65],
    lambda x: x[0, :64],
    lambda x: x[:, :64].reshape(3, 1, 64),
]


def test_quantized_activations_like_ones_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counting(monkeypatch, "quantize_activations", "quantize_again")
    cupy, w, rounds = device.cupy(), weight("q4_0", (40, 64)), 0
    for dtype in (H, B, F):
        for view in VIEWS:
            for seed in range(3):
                x = view(there((3, 128), dtype, seed))
                q, expected = cq.quantize(x, "q8_1"), cq.quantize(as_numpy(x), "q8_1")
                assert (q.format.name, q.shape, type(q.blocks)) == ("q8_1", x.shape, type(x))
                np.testing.assert_array_equal(as_numpy(q.blocks), expected.blocks)
                of_blocks = cq.from_blocks(q.blocks, "q8_1", q.shape)
                np.testing.assert_array_equal(as_numpy(q @ w.T), as_numpy(of_blocks @ w.T))
            rounds += 1
            assert counts == [rounds, 2 * rounds], (dtype, x.strides)
    swapped = there((2, 3, 64)).swapaxes(0, 1)  # rows that must be copied first
    for _ in range(2):
        np.testing.assert_array_equal(
            as_numpy(cq.quantize(swapped, "q8_1").blocks), cq.quantize(as_numpy(swapped), "q8_1").blocks
        )
    assert counts == [rounds + 2, 2 * rounds]
    for given in (swapped.get(), swapped.get().astype(B)):
        assert cq.quantize(given, "q8_1").device == "cpu"
    with pytest.raises(ValueError, match="positive multiple"):
        cq.quantize(there((3, 63)), "q8_1")
    with pytest.raises(TypeError, match="a format is a name"):
        cq.quantize(there((3, 64)), NO_FORMAT)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
        with pytest.raises(ValueError, match="current device is GPU 1"):
            cq.quantize(there((3, 128), F)[:, :64], "q8_1")
    for rows in range(1, repeats.MOST + 8):
        cq.quantize(cupy.zeros((rows, 32), F), "q8_1")
        assert 0 < len(repeats.quantized) <= repeats.MOST


def test_sums_that_blocks_leave_each_other(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They have scratch memory behind the converted rows, and flags."""
    real, given = plan.gemm, []

    def gemm(*args: Any, **kwargs: Any) -> plan.Gemm:
        made = real(*args, **kwargs)
        return replace(made, partials=max(made.partials, 4096))

    def launch(ready: cuda.Ready, *args: Any) -> None:
        given.append((ready.launch.partials, args[-2:]))
        started(ready, *args)

    started = cuda._launch
    monkeypatch.setattr(cuda, "_launch", launch)
    problem.resolve.cache_clear()
    with monkeypatch.context() as planned:
        planned.setattr(plan, "gemm", gemm)
        w = weight()
        for kind in ("float16", "float32"):
            assert again_and_again(counted, w, kind, "out", (3, K), 1e-5) == [1, 3]
    problem.resolve.cache_clear()
    with buffers.scratch() as scratch:
        start, flags = scratch.take(1), scratch.flags()
    rows = buffers.rows_bytes((3, K))[1]
    sums = {start: 8, start + rows: 8}
    assert [place for place in given if place[0]] == given
    assert {place: [s for _, s in given].count((place, flags)) for place in sums} == sums


@pytest.mark.parametrize("kind", ["float16", "float32", "q8_1"])
def test_repeated_in_a_captured_graph(counted: list[int], kind: str) -> None:
    cupy, w = device.cupy(), weight()
    x, bias, y = there((4, K), H if kind == "float16" else F), there((N,)), cupy.empty((4, N), F)
    stream = cupy.cuda.Stream(non_blocking=True)
    kept = []  # the graph writes to them

    def step() -> None:
        given = cq.quantize(x, "q8_1") if kind == "q8_1" else x
        kept.append(given)
        cq.linear(given, w, bias=bias, activation="silu", out=y)

    cupy.cuda.Device().synchronize()
    with stream:
        step()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        assert counted == [1, 1]
        for seed in range(2):
            x[...] = there(x.shape, x.dtype, seed)
            y.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            given = cq.quantize(x, "q8_1") if kind == "q8_1" else x
            assert nmse(y, testing.linear(given, w, bias=bias, activation="silu")) < 1e-6


def test_debugging_sees_repeated_calls(counted: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    x, w = there((2, K), F), weight()
    for _ in range(2):
        cq.quantize(x, "q8_1") @ w.T
    with cq.config(debug=True):
        cq.quantize(x, "q8_1") @ w.T
    assert counted == [1, 2]
    shown = capsys.readouterr().err
    for title in ("quantize before", "quantize after", "linear before", "linear after"):
        assert f"=== cuquant.{title}" in shown


def test_a_weight_knows_so_many() -> None:
    cupy, w = device.cupy(), weight("q4_0", (16, 32))
    known = w.fragments().repeats
    for m in range(1, repeats.MOST + 8):
        cq.matmul(cupy.zeros((m, 32), H), w.T, out=cupy.empty((m, 16), H))
        assert 0 < len(known) <= repeats.MOST
