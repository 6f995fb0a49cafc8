"""What is not alike, or lies elsewhere, is a call of its own, and no error is less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import repeated
from repeated import GIVEN, K, N, blocks, odd, there, weight

import cuquant as cq
from cuquant import device, repeats, testing
from cuquant.cuda import buffers
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
F, H, B = np.float32, np.float16, ml_dtypes.bfloat16
counted = repeated.counted  # a fixture of the modules that have this name


def test_only_what_is_alike_is_repeated(counted: list[int]) -> None:
    """Other dtypes, strides, places, results, words and epilogues are products of their own."""
    cupy, w = device.cupy(), weight()
    x, bias, y = there((2, K)), there((N,)), cupy.empty((2, N), H)
    wide, tall = cupy.zeros((4, K), H), cupy.zeros((4, N), H)
    wide[::2] = x
    tall[::2] = there((2, N))
    calls: list[tuple[Any, dict[str, Any]]] = [
        (x, {"bias": bias, "activation": "relu", "out": y}),
        (wide[::2], {"bias": bias, "activation": "relu", "out": y}),
        (odd(x), {"bias": bias, "activation": "relu", "out": y}),
        (x.astype(F), {"bias": bias, "activation": "relu", "out": y}),
        (x.astype(B), {"bias": bias, "activation": "relu", "out": y}),
        (cq.quantize(x, "q8_1"), {"bias": bias, "activation": "relu", "out": y}),
        (blocks(x), {"bias": bias, "activation": "relu", "out": y}),
        (x, {"bias": bias, "activation": "silu", "out": y}),
        (x, {"bias": bias, "out": y}),
        (x, {"bias": bias.astype(F), "out": y}),
        (x, {"bias": bias.astype(B), "out": y}),
        (x, {"bias": cupy.asarray(np.repeat(as_numpy(bias), 2))[::2].copy(), "out": y.astype(F)}),
        (x, {"residual": bias[None] + cupy.zeros((2, 1), H), "out": y}),
        (x, {"residual": tall[::2], "out": y}),
        (x, {"residual": tall[::2].astype(F), "out": y}),
        (x, {"residual": tall[::2].astype(B), "out": y}),
        (x, {"residual": tall[::2].copy(), "out": y.astype(B)}),
        (x, {"out": cupy.zeros((2, 2 * N), H)[:, ::2]}),
        (x, {"out": cupy.zeros((2, N), H)[::-1]}),
        (x, {"dtype": F}),
        (x, {"dtype": B}),
        (x, {}),
    ]
    for round_ in range(2):
        for number, (given, kwargs) in enumerate(calls):
            plain = {name: a for name, a in kwargs.items() if name not in ("out", "dtype")}
            got = cq.linear(given, w, **kwargs)
            wanted = kwargs["out"].dtype if "out" in kwargs else kwargs.get("dtype", H)
            assert got.dtype == wanted
            assert nmse(got, testing.linear(given, w, **plain)) < 1e-4, number
        assert counted == [len(calls), round_ * len(calls)]


def operands(kind: str) -> tuple[Any, Any, Any]:
    """Memory, x in its first bytes, and a result (2, N) of float16 that has two bytes in common with it."""
    memory = device.cupy().zeros(3 * K * 4 + 2 * N * 2, np.uint8)
    size = {"float32": 2 * K * 4, "blocks": 2 * cq.formats.get("q8_1").row_bytes(K)}.get(kind, 2 * K * 2)
    part, result = memory[:size], memory[size - 2 :][: 2 * N * 2].view(H).reshape(2, N)
    if kind == "blocks":
        return memory, cq.from_blocks(part, "q8_1", (2, K)), result
    if kind == "backwards":  # its first element is in the middle
        return memory, part.view(H).reshape(2, K)[::-1], memory[: 2 * N * 2].view(H).reshape(2, N)
    return memory, part.view(kind).reshape(2, K), result


@pytest.mark.parametrize("kind", ["float16", "float32", "backwards", "blocks"])
def test_where_arrays_lie_is_asked_each_time(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cupy, w, memory = device.cupy(), weight(), device.cupy().zeros(8 * N, np.uint8)
    given, y = GIVEN[kind](there((2, K), F)), cupy.empty((2, N), H)
    bias, residual = there((N,)), there((2, N))
    words = {"bias": bias, "activation": "silu", "residual": residual}
    for _ in range(2):
        cq.linear(given, w, **words, out=y)
        cq.linear(given, w, out=y)
        cq.linear(given, w, residual=residual.astype(F), out=y)
        cq.linear(given, w)
    assert counted == [4, 4]
    held, x, shares = operands(kind)
    for kwargs in ({}, words):
        with pytest.raises(ValueError, match="share memory with x"):
            cq.linear(x, w, **kwargs, out=shares)
    kept = w.storage[: 2 * N * 2].view(H).reshape(2, N)
    with pytest.raises(ValueError, match="share memory with W"):
        cq.linear(given, w, out=kept)
    two = memory[: 4 * N].view(H).reshape(2, N)
    with pytest.raises(ValueError, match="share memory with bias"):
        cq.linear(given, w, **words | {"bias": memory[2 * N : 4 * N].view(H)}, out=two)
    with pytest.raises(ValueError, match="share memory with bias"):  # the residual alone may be the result
        cq.linear(given, w, **words | {"bias": two[0], "residual": two}, out=two)
    with pytest.raises(ValueError, match="share memory with residual"):
        cq.linear(given, w, **words | {"residual": memory[2 : 4 * N + 2].view(H).reshape(2, N)}, out=two)
    with pytest.raises(ValueError, match="share memory with residual"):  # not the same elements
        cq.linear(given, w, residual=memory.view(F).reshape(2, N), out=two)
    assert counted == [4, 4]
    free = held[-2 * N * 2 :].view(H).reshape(2, N)  # beside each other they may lie
    assert nmse(cq.linear(given, w, out=free), testing.linear(given, w)) < 1e-5
    assert nmse(cq.linear(given, w, **words | {"residual": two}, out=two), two) < 1e-5
    assert counted == [4, 6]
    for name in ("out", "bias", "residual"):
        plain = given._blocks if isinstance(given, cq.QuantizedArray) else given
        place = repeats.find(w.fragments().repeats, ("silu", None, None), given, (bias,), residual, y)
        assert place is not None
        other = SimpleNamespace(data=SimpleNamespace(device_id=1, ptr=y.data.ptr))
        arrays = {"out": y, "bias": bias, "residual": residual} | {name: other}
        assert place[0].places(plain, (arrays["bias"],), arrays["residual"], arrays["out"]) is None, name
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
        for kwargs in ({}, {"out": y}, words | {"out": y}):
            with pytest.raises(ValueError, match="current device is GPU 1"):
                cq.linear(given, w, **kwargs)
    assert counted == [4, 6]


def test_no_error_is_less(counted: list[int]) -> None:
    cupy, w = device.cupy(), weight()
    x, y, bias = there((2, K), F), cupy.empty((2, N), H), there((N,))
    cq.linear(x, w, bias=bias, activation="silu", out=y)
    cq.linear(x, w, out=y)
    for error, match, given, kwargs in (
        (ValueError, "unknown activation", x, {"bias": bias, "activation": "swish"}),
        (ValueError, "unknown activation", x, {"bias": bias, "activation": ["silu"]}),
        (ValueError, "bias has shape", x, {"bias": bias[:-1], "activation": "silu"}),
        (TypeError, "different devices", x, {"bias": bias.get(), "activation": "silu"}),
        (TypeError, "bias is a list", x, {"bias": bias.tolist(), "activation": "silu"}),
        (TypeError, "out has dtype", x, {"dtype": F}),
        (TypeError, "dtype", x, {"dtype": [("a", F)]}),
        (TypeError, "different devices", x, {"out": np.empty((2, N), H)}),
        (ValueError, "out has shape", x, {"out": y[:1]}),
        (ValueError, "differ in K", x[:, :-32], {}),
        (TypeError, "different devices", x.get(), {}),
        (TypeError, "different devices", x.get().astype(B), {}),  # which has no buffer that Python knows
        (TypeError, "x has dtype", x.astype(np.float64), {}),
        (TypeError, "x is a list", x.tolist(), {}),
    ):
        with pytest.raises(error, match=match):
            cq.linear(given, w, **{"out": y} | kwargs)
    q = blocks(x)
    cq.matmul(q, w.T, out=y)
    with pytest.raises(TypeError, match="both operands are quantized weights"):  # as bytes it is like q
        cq.linear(cq.QuantizedArray._made(w.format, q.blocks, None, q.shape), w, out=y)
    assert counted == [3, 0]


@pytest.mark.parametrize("kind", ["float32", "q8_1", "blocks"])
def test_scratch_memory_is_asked_for_each_time(counted: list[int], kind: str) -> None:
    """It may have grown, and each stream has its own."""
    cupy, w = device.cupy(), weight()
    x, y = GIVEN[kind](there((4, K), F)), cupy.empty((4, N), F)
    expected = as_numpy(cq.linear(x, w, out=y)).copy()
    with buffers.scratch() as scratch:
        scratch.take(1)
        old = scratch._buffers[-1]
        scratch.take(old.size + 1)
    old.fill(0xAA)
    cq.linear(x, w, out=y)
    np.testing.assert_array_equal(as_numpy(y), expected)
    assert bool((old == 0xAA).all())
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        y.fill(np.nan)
        cq.linear(x, w, out=y)
        if kind != "q8_1":
            assert buffers.scratch()._buffers
        stream.synchronize()
    np.testing.assert_array_equal(as_numpy(y), expected)
    assert counted == [1, 2]
