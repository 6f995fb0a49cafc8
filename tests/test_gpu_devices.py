"""Several GPUs in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuquant as cq
from cuquant import device, testing
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent
FORMATS = ("q4_0", "q6_k", "kbit3", "mxfp4", "trellis3")
RNG = np.random.default_rng(0)
W = RNG.standard_normal((512, 1024)).astype(np.float32)
X = RNG.standard_normal((300, 1024)).astype(np.float16)
BATCHES = (1, 12, 40, 300)


@pytest.fixture(autouse=True)
def first_gpu() -> Iterator[None]:
    """The tests begin and end on the first of at least two."""
    if device.cupy().cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with device.cupy().cuda.Device(0):
        yield


def on(gpu: int) -> Any:
    return device.cupy().cuda.Device(gpu)


@pytest.mark.parametrize("name", FORMATS)
def test_gpus_in_turn_give_the_same_bits(name: str) -> None:
    """Kernels, codebooks, scratch memory and flags are those of the device that is current."""
    weights, given = [], cq.quantize(W, name)
    for gpu in (0, 1):
        with on(gpu):
            weights.append(given.to_device("cuda"))
    for m in BATCHES * 2:
        results = []
        for gpu, w in enumerate(weights):
            with on(gpu):
                y = cq.matmul(device.cupy().asarray(X[:m]), w.T, dtype=np.float32)
                assert y.device.id == gpu
                results.append(as_numpy(y))
        np.testing.assert_array_equal(results[0], results[1])
        assert nmse(results[0], testing.linear(X[:m], given)) < 1e-6


def test_operands_of_two_gpus_are_refused() -> None:
    cupy = device.cupy()
    w = cq.quantize(cupy.asarray(W), "q4_0").prepare()
    halves = X[:3].astype(np.float16)
    x, bias = cupy.asarray(halves), cupy.ones(512, np.float16)
    y = x @ w.T  # the products below are like these, but for where their operands are
    for given in (x, x.astype(np.float32), cq.quantize(x, "q8_1")):
        cq.linear(given, w, bias=bias, residual=y, out=cq.matmul(given, w.T, out=cupy.empty_like(y)))
    with on(1):
        x, elsewhere = cupy.asarray(halves), cupy.empty((3, 512), np.float16)
        for given in (x, x.astype(np.float32), cq.quantize(x, "q8_1")):
            with pytest.raises(ValueError, match=r"x on GPU 1, W on GPU 0"):
                cq.matmul(given, w.T, out=elsewhere)
        added = cupy.ones(512, np.float16)
        with pytest.raises(ValueError, match=r"x on GPU 1, W on GPU 0.*current device is GPU 1"):
            x @ w.T
        for use in (w.dequantize, lambda: w[3:5], lambda: next(iter(w)), lambda: next(reversed(w))):
            with pytest.raises(ValueError, match="the current device is GPU 1"):
                use()
    with pytest.raises(ValueError, match=r"x on GPU 1, W on GPU 0.*current device is GPU 0"):
        x @ w.T
    x = cupy.asarray(halves)
    for given in (x, x.astype(np.float32), cq.quantize(x, "q8_1")):
        with pytest.raises(ValueError, match="out on GPU 1"):
            cq.matmul(given, w.T, out=elsewhere)
        with pytest.raises(ValueError, match="bias on GPU 1"):
            cq.linear(given, w, bias=added, residual=y, out=cupy.empty_like(y))
        with pytest.raises(ValueError, match="residual on GPU 1"):
            cq.linear(given, w, bias=bias, residual=elsewhere, out=cupy.empty_like(y))


@pytest.mark.parametrize("prepared", [False, True])
def test_weights_move_to_the_current_gpu(prepared: bool) -> None:
    w = cq.quantize(device.cupy().asarray(W), "q5_k")
    expected = as_numpy(w.blocks)
    if prepared:
        w.prepare()
    assert w.to_device("cuda") is w
    with on(1):
        there = w.to_device("cuda")
        assert there.to_device("cuda") is there
        assert there.storage.device.id == 1
        np.testing.assert_array_equal(as_numpy(there.blocks), expected)
        np.testing.assert_array_equal(w.to_device("cpu").blocks, expected)
    assert w.storage.device.id == 0
    back = there.to_device("cuda")
    assert back.storage.device.id == 0
    np.testing.assert_array_equal(as_numpy(back.blocks), expected)


def test_threads_each_with_a_gpu() -> None:
    given, results = cq.quantize(W, "q4_k"), {}

    def work(gpu: int) -> None:
        with on(gpu):
            w = given.to_device("cuda")
            x = device.cupy().asarray(X)
            results[gpu] = [as_numpy(x[:m] @ w.T) for _ in range(10) for m in BATCHES]

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for a, b in zip(results[0], results[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_graphs_of_two_gpus_are_replayed_at_once() -> None:
    cupy, given, made = device.cupy(), cq.quantize(W, "q4_0"), []
    for gpu in (0, 1):
        with on(gpu):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                w, x = given.to_device("cuda"), cupy.asarray(X)
                y = cq.matmul(x, w.T)
                expected = as_numpy(y)
                stream.begin_capture()
                cq.matmul(x, w.T, out=y)
                graph = stream.end_capture()
                y.fill(0)
                stream.synchronize()
            made.append((graph, stream, (w, x), y, expected))
    for gpu, (graph, stream, *_) in enumerate(made):
        with on(gpu):
            graph.launch(stream)
    for gpu, (_, stream, _, y, expected) in enumerate(made):
        with on(gpu):
            stream.synchronize()
            np.testing.assert_array_equal(as_numpy(y), expected)


def test_attention_and_mixtures_on_the_second_gpu() -> None:
    cupy = device.cupy()
    k, v = (RNG.standard_normal((1, 200, 2, 64)).astype(np.float32) for _ in range(2))
    q = RNG.standard_normal((1, 1, 8, 64)).astype(np.float16)
    cache = cq.KVCache(2, 64, 256, bits=(8, 4))
    for part, bits in ((slice(0, 150), 4), (slice(150, 200), 8)):
        cache.append(k[:, part], v[:, part], bits)
    floats = (RNG.standard_normal((4, 256, 256), np.float32) for _ in range(3))
    experts = cq.Experts(*(cq.quantize(w, "q4_0") for w in floats))
    ids, probs = RNG.integers(0, 4, (20, 1)).astype(np.int32), np.ones((20, 1), np.float32)
    x, first = X[:20, :256], cache.to_device("cuda")
    attended, mixed = [], []
    for gpu in (0, 1):
        with on(gpu):
            own = first.to_device("cuda")
            assert (own is first) == (gpu == 0)
            attended.append(as_numpy(cq.attention(cupy.asarray(q), own)))
            there = cq.Experts(*(w.to_device("cuda") for w in experts))
            operands = map(cupy.asarray, (ids, probs))
            mixed.append(as_numpy(cq.moe(cupy.asarray(x), there, *operands)))
    for results, expected in (
        (attended, cq.attention(q, cache)),
        (mixed, cq.moe(x, experts, ids, probs)),
    ):
        np.testing.assert_array_equal(results[0], results[1])
        assert nmse(results[0], expected) < 1e-5


def test_models_are_evaluated_on_the_current_gpu() -> None:
    text = (ROOT / "examples/data/heldout-public.txt").read_text(encoding="utf-8")[:5000]
    found = []
    for gpu in (0, 1):
        with on(gpu):
            result = cq.evaluate(ROOT / "examples/data/nano-llama-f16.gguf", text=text, formats="q4_0")
            found.append([row.ppl for row in result.rows])
    assert found[0] == found[1]
