"""Mixtures and routings like ones before take a shorter way on the host, with the same results."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mixtures import close, gauss, on_gpu, reference, routed, stacks
from repeated import GIVEN, counting, odd

import cuquant as cq
from cuquant import device, repeats, testing
from cuquant.cuda import buffers, moe as cuda_moe, moe_memory
from cuquant.ops import moe
from cuquant.testing import as_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("grouped")]
F, H, B = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
K, N = 128, 48


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many mixtures were planned, and how many repeated; the same of routings."""
    repeats.routed.clear()
    owners = (cuda_moe, cuda_moe.Ready, cuda_moe, cuda_moe.Routing)
    return counting(monkeypatch, "mixture", "again", "route", "again", owners=owners)


def operands(tokens: int, seed: int, experts: int = 5, top_k: int = 2) -> tuple[Any, Any, Any]:
    ids, probs = routed(tokens, experts, top_k, seed)
    return on_gpu(gauss(tokens, K, seed=seed), ids, probs)


def good(y: Any, x: Any, experts: cq.Experts, ids: Any, probs: Any, activation: str | None = "silu") -> None:
    expected = reference(x, experts, ids, probs, activation)
    if isinstance(x, cq.QuantizedArray):
        assert testing.nmse(as_numpy(y), expected) <= 1e-3
    else:
        close(y, expected, y.dtype)


RESULTS: dict[str, Any] = {
    "new": lambda tokens, dtype: None,
    "float16": lambda tokens, dtype: device.cupy().empty((tokens, N), H),
    "spread": lambda tokens, dtype: device.cupy().zeros((tokens, 2 * N), dtype)[::-1, ::2],
}


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("tokens", [3, 40])
def test_what_is_like_a_mixture_before_is_not_planned_again(
    counted: list[int], tokens: int, kind: str, result: str
) -> None:
    """Of other numbers, elsewhere: against float64, and the bits of a first call."""
    experts = stacks(("kbit3", "q5_1", "q4_0"))
    kept, places = [], set()
    for seed in range(4):
        x, ids, probs = operands(tokens, seed)
        x = GIVEN[kind](x)
        out = RESULTS[result](tokens, F if isinstance(x, cq.QuantizedArray) else x.dtype)
        y = cq.moe(x, experts, ids, probs, out=out)
        assert out is None or y is out
        good(y, x, experts, ids, probs)
        kept.append(((x, ids, probs), y.copy()))
        places.add(ids.data.ptr)
    assert (counted[:2], len(places)) == ([1, 3], 4)
    for given, y in kept:
        experts.gate.fragments().repeats.clear()
        again = cq.moe(given[0], experts, *given[1:], out=RESULTS[result](tokens, y.dtype))
        np.testing.assert_array_equal(as_numpy(again).astype(F), as_numpy(y).astype(F))
    assert counted[:2] == [5, 3]


def test_only_what_is_alike_is_repeated(counted: list[int]) -> None:
    """Other dtypes, strides, places, words and weights are mixtures of their own."""
    cupy, one, other = device.cupy(), stacks("q4_0"), stacks("q5_1")
    x, ids, probs = operands(6, 0)
    more = operands(6, 1, top_k=3)[1:]
    wide = cupy.zeros((12, 2 * K), F)[::2, ::2]
    wide[...] = x
    calls: list[tuple[Any, Any, Any, Any, str | None, Any]] = [
        (x, one, ids, probs, "silu", None),
        (x, one, ids, probs, "gelu", None),
        (x, one, ids, probs, None, None),
        (x.astype(H), one, ids, probs, "silu", None),
        (odd(x.astype(H)), one, ids, probs, "silu", None),
        (x.astype(B), one, ids, probs, "silu", None),
        (wide, one, ids, probs, "silu", None),
        (cq.quantize(x, "q8_1"), one, ids, probs, "silu", None),
        (GIVEN["blocks"](x), one, ids, probs, "silu", None),
        (x, one, ids.astype(np.int64), probs, "silu", None),
        (x, one, ids, probs.astype(H), "silu", None),
        (x, one, ids, probs.astype(B), "silu", None),
        (x, one, *more, "silu", None),
        (x[:3], one, ids[:3], probs[:3], "silu", None),
        (x, one, ids, probs, "silu", cupy.empty((6, N), F)),
        (x, one, ids, probs, "silu", cupy.empty((6, N), B)),
        (x, one, ids, probs, "silu", cupy.empty((N, 6), F).T),
        (x, one._replace(up=other.up), ids, probs, "silu", None),
        (x, one._replace(down=other.down), ids, probs, "silu", None),
        (x, other._replace(down=one.down), ids, probs, "silu", None),
        (x, one._replace(up=one.gate), ids, probs, "silu", None),
    ]
    for round_ in range(2):
        for given, experts, chosen, weights, activation, out in calls:
            y = cq.moe(given, experts, chosen, weights, activation, out)
            good(y, given, experts, chosen, weights, activation)
        assert counted[:2] == [len(calls), round_ * len(calls)]


def test_of_what_is_copied_first_nothing_is_known(counted: list[int]) -> None:
    cupy, experts = device.cupy(), stacks("q4_0")
    x, ids, probs = operands(6, 0)
    three = x.reshape(2, 3, K), ids.reshape(2, 3, 2), probs.reshape(2, 3, 2)
    apart = [cupy.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1) for a in three]
    calls = [
        (x, ids.get(), probs, None),
        (x, ids, probs.get(), None),
        (x, ids.astype(np.uint8), probs, None),
        (x, ids[:, ::-1], probs[:, ::-1], None),
        (apart[0], *three[1:], None),
        (three[0], apart[1], three[2], None),
        (*three, cupy.empty((3, 2, N), F).swapaxes(0, 1)),
    ]
    for given, chosen, weights, out in calls * 2:
        y = cq.moe(given, experts, chosen, weights, out=out)
        good(y.reshape(6, N), x, experts, ids, probs)
    assert counted[:2] == [2 * len(calls), 0]


def test_where_arrays_lie_is_asked_each_time(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, experts = device.cupy(), stacks("q4_0", n=2)
    x, ids, probs = operands(6, 0)
    memory = cupy.zeros(6 * K * 4 + 6 * 2 * 8, np.uint8)
    results = {}
    for dtype in (F, H):
        for _ in range(2):
            results[dtype] = cq.moe(x, experts, ids, probs, out=cupy.empty((6, 2), dtype))
    cq.moe(x, experts, ids, probs)
    before = list(counted)
    end = 6 * K * 4
    inside = memory[:end].view(F).reshape(6, K)
    inside[...] = x
    with pytest.raises(ValueError, match="share memory with x"):
        cq.moe(inside, experts, ids, probs, out=memory[end - 2 :][:24].view(H).reshape(6, 2))
    for name, weight in zip(cq.Experts._fields, experts, strict=True):
        part = weight.storage[-24:].view(H).reshape(6, 2)
        kept = part.copy()
        with pytest.raises(ValueError, match=f"share memory with experts.{name}"):
            cq.moe(x, experts, ids, probs, out=part)
        np.testing.assert_array_equal(as_numpy(part), as_numpy(kept))
    with pytest.raises(ValueError, match="share memory with expert_probs"):  # as the same elements, too
        cq.moe(x, experts, ids, probs, out=probs)
    with pytest.raises(ValueError, match="share memory with expert_ids"):
        cq.moe(x, experts, ids, probs, out=ids.view(F))
    assert counted == before
    beside = memory[end : end + 24].view(H).reshape(6, 2)
    again = cq.moe(inside, experts, ids, probs, out=beside)
    np.testing.assert_array_equal(as_numpy(again), as_numpy(results[H]))
    assert counted[1] == before[1] + 1
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
        for out in (None, beside):
            with pytest.raises(ValueError, match="current device is GPU 1"):
                cq.moe(x, experts, ids, probs, out=out)


def test_no_error_is_less(counted: list[int]) -> None:
    cupy, experts = device.cupy(), stacks("q4_0")
    x, ids, probs = operands(6, 0)
    y = cupy.empty((6, N), F)
    cq.moe(x, experts, ids, probs, out=y)
    on_cpu = experts._replace(up=experts.up.to_device("cpu"))
    given: Any = {"x": x, "experts": experts, "expert_ids": ids, "expert_probs": probs, "out": y}
    changes: list[tuple[Any, str, dict[str, Any]]] = [
        (ValueError, "unknown activation", {"activation": "swish"}),
        (ValueError, "unknown activation", {"activation": ["silu"]}),
        (ValueError, "do not fit x", {"expert_ids": ids[:, :1]}),
        (TypeError, "expert_ids has dtype", {"expert_ids": probs}),
        (TypeError, "expert_ids is a list", {"expert_ids": ids.tolist()}),
        (TypeError, "expert_probs has dtype", {"expert_probs": probs.astype(np.float64)}),
        (TypeError, "x has dtype", {"x": x.astype(np.float64)}),
        (TypeError, "different devices", {"x": x.get()}),
        (TypeError, "different devices", {"out": y.get()}),
        (TypeError, "different devices", {"experts": on_cpu}),
        (ValueError, "out has shape", {"out": y[:5]}),
        (TypeError, "out has dtype", {"out": y.astype(np.float64)}),
        (TypeError, "experts is a tuple", {"experts": tuple(experts)}),
        (ValueError, "experts have gate", {"experts": experts._replace(down=experts.up)}),
    ]
    for error, match, changed in changes:
        with pytest.raises(error, match=match):
            cq.moe(**given | changed)
    assert counted[:2] == [1, 0]


def test_weights_are_known_while_they_live(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by numbers that others may have later; and what is known of them keeps none of them alive."""
    experts = stacks("q4_0")
    x, ids, probs = operands(6, 0)
    with monkeypatch.context() as mistaken:
        mistaken.setattr(moe, "_words", lambda activation, weights: (activation,))
        for name in ("up", "down"):
            weight = getattr(experts, name)
            other = experts._replace(**{name: cq.quantize(-weight.dequantize(), "q4_0").prepare()})
            for given in (experts, other, other):
                good(cq.moe(x, given, ids, probs), x, given, ids, probs)
    assert counted[:2] == [4, 2]
    cq.moe(x, experts._replace(up=experts.gate), ids, probs)
    gate, up, down = experts
    left = [weakref.ref(w.fragments()) for w in experts]
    gc.disable()
    try:
        del weight, other, given, experts, up, down
        assert [fragments() is None for fragments in left] == [False, True, True]
        del gate
        assert left[0]() is None
    finally:
        gc.enable()


def test_scratch_memory_may_have_moved(counted: list[int]) -> None:
    experts = stacks("q4_0")
    given = x, *routing = operands(40, 0)
    first = cq.moe(x, experts, *routing)
    with buffers.scratch() as scratch:
        old = scratch._buffers[-1]
        scratch.take(old.size + 1)
    old.fill(0xAA)
    again = cq.moe(given[0], experts, *routing)
    np.testing.assert_array_equal(as_numpy(again), as_numpy(first))
    assert bool((old == 0xAA).all())
    assert counted[:2] == [1, 1]


@pytest.mark.parametrize("quantized", [False, True])
def test_several_rounds(counted: list[int], monkeypatch: pytest.MonkeyPatch, quantized: bool) -> None:
    monkeypatch.setattr(moe_memory, "WORKSPACE", 1 << 16)
    experts = stacks("q4_0")
    for seed in range(2):
        x, ids, probs = operands(130, seed)
        given = GIVEN["blocks"](x) if quantized else x
        good(cq.moe(given, experts, ids, probs), given, experts, ids, probs)
    assert counted[:2] == [1, 1]
    # Each round starts where the one before ends, also of ids, probabilities and results of other sizes.
    ids, probs = ids.astype(np.int64), probs.astype(H)
    out = device.cupy().empty((130, N), H)
    good(cq.moe(given, experts, ids, probs, out=out), given, experts, ids, probs)


@pytest.mark.parametrize("tokens", [2, 40])
def test_repeated_in_a_captured_graph(counted: list[int], tokens: int) -> None:
    cupy, experts = device.cupy(), stacks("q4_0")
    x, logits, out = cupy.zeros((tokens, K), H), cupy.zeros((tokens, 5), F), cupy.empty((tokens, N), H)
    stream, kept = cupy.cuda.Stream(non_blocking=True), []  # the graph writes to them

    def step() -> None:
        kept.append(cq.route(logits, 2))
        cq.moe(x, experts, *kept[-1], out=out)

    cupy.cuda.Device().synchronize()
    with stream:
        step()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        assert counted == [1, 1, 1, 1]
        for seed in range(2):
            given, scores = gauss(tokens, K, seed=seed).astype(H), gauss(tokens, 5, seed=seed)
            x.set(given)
            logits.set(scores)
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            close(out, reference(given, experts, *cq.route(scores, 2)), H)


def test_debugging_sees_repeated_calls(counted: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    experts = stacks("q4_0")
    x, ids, probs = operands(6, 0)
    for debug in (False, True):
        with cq.config(debug=debug):
            cq.moe(x, experts, ids, probs)
            cq.route(x[:, :5], 2)
    assert counted == [1, 1, 1, 1]
    shown = capsys.readouterr().err
    for title in ("moe before", "moe after", "route before", "route after"):
        assert f"=== cuquant.{title}" in shown


def test_routings_like_one_before(counted: list[int]) -> None:
    cupy = device.cupy()
    views: list[Any] = [lambda x: x, lambda x: x[:, :9], lambda x: x[::2, ::-2], lambda x: x[3]]
    number = 0
    for dtype in (F, H, B):
        for view in views:
            for words in ((2, True), (2, False), (3, True)):
                number += 1
                for seed in range(3):
                    logits = view(cupy.asarray(gauss(70, 11, seed=seed)).astype(dtype))
                    ids, probs = cq.route(logits, *words)
                    expected = cq.route(as_numpy(logits), *words)
                    assert (ids.dtype, probs.dtype) == (np.int32, F)
                    np.testing.assert_array_equal(ids.get(), expected[0])
                    np.testing.assert_allclose(probs.get(), expected[1], rtol=1e-5)
    assert counted[2:] == [number, 2 * number]
    x = cupy.asarray(gauss(70, 11))
    wrong: Any = [(2.0, True), (2, 1), (12, True), (2, [True])]
    for words in wrong:
        with pytest.raises((TypeError, ValueError), match=r"top_k|normalize"):
            cq.route(x, *words)
    with pytest.raises(TypeError, match="logits has dtype"):
        cq.route(x.astype(np.float64), 2)
    assert cq.route(x.get(), 2)[0].dtype == np.int32
    assert counted[2:] == [number, 2 * number]
    swapped = cupy.asarray(gauss(2, 3, 11)).swapaxes(0, 1)  # rows that are copied first
    for _ in range(2):
        np.testing.assert_array_equal(cq.route(swapped, 2)[0].get(), cq.route(swapped.get(), 2)[0])
    assert counted[2:] == [number + 2, 2 * number]
    for tokens in range(1, repeats.MOST + 8):
        cq.route(cupy.zeros((tokens, 4), F), 1)
        assert 0 < len(repeats.routed) <= repeats.MOST
