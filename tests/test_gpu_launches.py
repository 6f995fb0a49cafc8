"""Launches on a GPU: graphs, streams, threads, one after the other."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from products import cuda_weight, gauss

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import backend as cuda, jit, sources
from cuquant.plan import attention as kv_plan
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
F = np.float32


@pytest.mark.parametrize("kind", ["float16", "float32", "q8_1"])
@pytest.mark.parametrize("m", [1, 16, 64])
def test_captured_in_a_graph(kind: str, m: int) -> None:
    cupy = device.cupy()
    w = cuda_weight("q4_1", (200, 512))
    x = cupy.asarray(gauss((m, 512)).astype(np.float16 if kind != "float32" else F))
    out = cupy.empty((m, 200), F)
    stream = cupy.cuda.Stream(non_blocking=True)

    held = []  # as long as the graph

    def step() -> None:
        held.append(cq.quantize(x, "q8_1") if kind == "q8_1" else x)
        cq.matmul(held[-1], w.T, out=out)

    with stream:
        step()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for seed in range(3):
            x[...] = cupy.asarray(gauss((m, 512), seed))
            out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            expected = testing.linear(cq.quantize(x, "q8_1") if kind == "q8_1" else x, w)
            assert nmse(out, expected) < 1e-6


@pytest.mark.parametrize("direct_first", [True, False])
def test_a_stream_whose_first_product_is_captured(direct_first: bool) -> None:
    """Its sums pass between blocks by way of flags, which must be zeros before the graph has run, too."""
    cupy = device.cupy()
    w = cuda_weight("q4_0", (9000, 4096)).prepare()
    x = cupy.asarray(gauss((64, 4096)).astype(np.float16))
    if jit.capability() == 90:
        assert plan.gemm(plan.Problem(w.format, 64, 9000, 4096, jit.gpu())).partials > 0
    y, z = cupy.empty((64, 9000), F), cupy.empty((64, 9000), F)
    expected = as_numpy(cq.matmul(x, w.T, dtype=F))  # by another stream
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        used = cupy.full(1 << 24, 255, np.uint8)
        del used  # the stream's next allocations are of this memory
        stream.begin_capture()
        cq.matmul(x, w.T, out=y)
        graph = stream.end_capture()
        for step in (0, 1) if direct_first else (1, 0):
            if step == 0:
                cq.matmul(x, w.T, out=z)
            else:
                graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(as_numpy(y), expected)
    np.testing.assert_array_equal(as_numpy(z), expected)


def test_products_whose_sums_pass_between_blocks_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    w = cuda_weight("q4_0", (9000, 4096)).prepare()
    if jit.capability() == 90:
        assert plan.gemm(plan.Problem(w.format, 64, 9000, 4096, jit.gpu())).partials > 0
    for dtype in (np.float16, F):
        x = device.cupy().asarray(gauss((64, 4096)).astype(dtype))
        expected = as_numpy(x @ w.T)
        assert nmse(expected, testing.linear(x, w)) < 1e-6
        with monkeypatch.context() as repeated:
            repeated.setattr(cuda, "product", None)  # what would be checked
            for _ in range(3):
                np.testing.assert_array_equal(as_numpy(x.copy() @ w.T), expected)


def test_an_unprepared_weight_is_refused_in_a_capture() -> None:
    cupy = device.cupy()
    w = cuda_weight("q4_0", (32, 64))
    x, out = cupy.zeros((1, 64), np.float16), cupy.empty((1, 32), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=r"prepare\(\)"):
            cq.matmul(x, w.T, out=out)
        stream.end_capture()


def test_two_threads_and_two_streams() -> None:
    cupy = device.cupy()
    w = cuda_weight("q5_0", (512, 1024))
    inputs = [cupy.asarray(gauss((m, 1024), m)) for m in (1, 5, 16, 40)]
    expected = [as_numpy(x @ w.T) for x in inputs]
    failures: list[str] = []

    def work(stream: Any) -> None:
        with stream:
            for _ in range(50):
                for x, reference in zip(inputs, expected, strict=True):
                    if not np.array_equal(as_numpy(x @ w.T), reference):
                        failures.append("differs")

    streams = [
        cupy.cuda.Stream(non_blocking=True),
        cupy.cuda.Stream(non_blocking=True),
        cupy.cuda.Stream.null,
    ]
    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(stream,)) for stream in (*streams, streams[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_shared_memory_that_just_needs_no_asking() -> None:
    """48 KB for the rings of 16 warps, and a little that the kernel declares."""
    cache = cq.KVCache(2, 64, {3: 100})
    cache.append(*gauss((2, 1, 90, 2, 64)))
    q = gauss((1, 1, 8, 64), 1).astype(np.float16)
    expected = testing.attention(q, cache)
    there = cache.to_device("cuda")
    assert nmse(cq.attention(device.cupy().asarray(q), there), expected) < 1e-5
    if jit.capability() == 90:
        shape = kv_plan.Shape(1, 1, 8, 2, 64, (3,), False, 1)
        assert kv_plan.attention(shape, 90, 132).attention.shared == 48 << 10


def test_threads_compile_once() -> None:

    cupy = device.cupy()
    jit._functions.clear()
    jit._modules.clear()
    w = cuda_weight("q8_0", (64, 64))
    results: list[Any] = []

    def work() -> None:
        results.append(as_numpy(cupy.ones((3, 64), F) @ w.T))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(np.array_equal(result, results[0]) for result in results)
    assert len([key for key in jit._modules if key[1] == "gemm"]) == 1


def test_a_compiler_error_is_one_readable_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "flatten", lambda op, format: '#line 7 "broken.cu"\nint x = nonsense;')
    kernel = plan.Kernel("gemm", "gemm", "q4_0", (("ANSWER", 42),))
    with pytest.raises(
        jit.KernelError, match=r"gemm\.cu for q4_0 did not compile \(-DCUQUANT_ANSWER=42\)"
    ) as error:
        jit.launch(plan.Plan(kernel, (1, 1, 1), 32))
    assert "broken.cu(7)" in str(error.value)
    assert "nonsense" in str(error.value)


@pytest.mark.parametrize("batch", [1, 9, 40, 300])
def test_products_follow_each_other(batch: int) -> None:
    """Each product needs the one before, launched in a row and in a graph: launches overlap."""
    cupy = device.cupy()
    up, down = cuda_weight("q4_0", (1024, 256)).prepare(), cuda_weight("q4_1", (256, 1024), 2).prepare()
    x = cupy.asarray(gauss((batch, 256)).astype(np.float16))
    expected = x
    for _ in range(6):
        expected = cupy.asarray((testing.linear(expected, up) / 16).astype(np.float16))
        expected = cupy.asarray((testing.linear(expected, down) / 16).astype(np.float16))

    def chain() -> Any:
        y = x
        for _ in range(6):
            for w in (up, down):
                y = cq.matmul(y, w.T)
                y *= np.float16(1 / 16)
        return y

    assert nmse(chain(), as_numpy(expected).astype(np.float64)) < 1e-5
    hidden, y = cupy.empty((batch, 1024), np.float16), x.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        bias = cupy.zeros(256, np.float16)
        small = cq.quantize(gauss((256, 1024), 2) / 16, "q4_1").to_device("cuda").prepare()
        once = cq.matmul(cq.matmul(y, up.T, out=hidden), small.T)
        stream.begin_capture()
        for _ in range(20):
            cq.matmul(y, up.T, out=hidden)
            cq.linear(hidden, small, bias=bias, out=once)
        graph = stream.end_capture()
        want = as_numpy(once).copy()
        for _ in range(5):
            once.fill(np.nan)
            hidden.fill(np.nan)
            graph.launch(stream)
            np.testing.assert_array_equal(as_numpy(once), want)
