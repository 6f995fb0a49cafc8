"""Streams that come and go: each has scratch memory of its own, and none takes what another still reads."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuquant as cq
from cuquant import buffers, device

pytestmark = pytest.mark.gpu
F = np.float32


def there(*shape: int, seed: int = 0) -> Any:
    return device.cupy().asarray(np.random.default_rng(seed).standard_normal(shape, F))


def real_streams() -> Any:
    """CuPy, where streams are more than one."""
    cupy = device.cupy()
    if cupy.cuda.Stream(non_blocking=True).ptr == 0:
        pytest.skip("emulated streams are all one")
    return cupy


@pytest.fixture
def products() -> SimpleNamespace:
    """Long ones, whose x is converted in scratch memory, and what they should be."""
    return made(rows=512)


def made(rows: int) -> SimpleNamespace:
    cupy = real_streams()
    w = cq.quantize(there(4096, 2048), "q4_0").prepare()
    xs = [there(rows, 2048, seed=seed) for seed in range(8)]
    expected = [x @ w.T for x in xs]
    cupy.cuda.Device().synchronize()
    return SimpleNamespace(cupy=cupy, w=w, xs=xs, expected=expected)


@pytest.mark.parametrize(("rows", "times"), [(512, 200), (4096, 1200)])
def test_streams_that_are_gone_may_have_work_left(rows: int, times: int) -> None:
    """CUDA gives their handles to others at once. With a few streams that stay, and the GPU behind the host,
    overlapping launches would wait for ever if streams went before their work was done."""
    products = made(rows)
    cupy, handles = products.cupy, set()
    stay = [cupy.cuda.Stream(non_blocking=True) for _ in range(7)]
    ys = [cupy.full((rows, 4096), np.nan, F) for _ in products.xs]
    for stream in stay:
        with stream:
            cq.matmul(products.xs[0], products.w.T)
    cupy.cuda.Device().synchronize()
    for i in range(times):
        stream = cupy.cuda.Stream(non_blocking=True)
        handles.add(stream.ptr)
        with stream:  # those of one x write the same
            cq.matmul(products.xs[i % 8], products.w.T, out=ys[i % 8])
        del stream
    cupy.cuda.Device().synchronize()
    assert len(handles) < times
    assert all(bool((y == expected).all()) for y, expected in zip(ys, products.expected, strict=True))
    kept = [own for own in buffers._scratches.values() if not own.captured]
    assert len(kept) <= buffers._STREAMS


def test_streams_of_others_may_go_too(products: Any) -> None:
    """Of streams that CuPy does not destroy nobody knows when they go."""
    cupy, y = products.cupy, products.cupy.full((512, 4096), np.nan, F)
    stay = [cupy.cuda.Stream(non_blocking=True) for _ in range(7)]
    for i in range(200):
        handle = cupy.cuda.runtime.streamCreateWithFlags(cupy.cuda.runtime.streamNonBlocking)
        with pytest.warns(DeprecationWarning, match="ExternalStream"):
            stream = cupy.cuda.ExternalStream(handle)
        for each in (stream, *stay[i:]):
            with each:
                cq.matmul(products.xs[0], products.w.T, out=y)
        cupy.cuda.runtime.streamDestroy(handle)
    cupy.cuda.Device().synchronize()
    assert bool((y == products.expected[0]).all())


def test_threads_that_are_gone_may_have_work_left(products: Any) -> None:
    """Python gives their identifiers to others; each has a stream of its own nevertheless."""
    cupy, ys = products.cupy, [products.cupy.empty((512, 4096), F) for _ in range(40)]

    def run(i: int) -> None:
        with cupy.cuda.Stream.ptds:
            cq.matmul(products.xs[i % 8], products.w.T, out=ys[i])

    for i in range(len(ys)):
        thread = threading.Thread(target=run, args=(i,))
        thread.start()
        thread.join()
    cupy.cuda.Device().synchronize()
    assert all(bool((y == products.expected[i % 8]).all()) for i, y in enumerate(ys))


def test_a_graph_has_the_memory_of_its_stream(products: Any) -> None:
    """Of one that has done nothing before, new memory; and it is not given back while graphs have it."""
    cupy, w, x = products.cupy, products.w, products.xs[0]
    for warm in (True, False):
        stream, y = cupy.cuda.Stream(non_blocking=True), cupy.empty((512, 4096), F)
        with stream:
            if warm:
                cq.matmul(x, w.T, out=y)
                before = buffers.scratch()
            stream.begin_capture()
            cq.matmul(x, w.T, out=y)
            own = buffers.scratch()
            graph = stream.end_capture()
            assert own.captured
            assert own is before or not warm
            y.fill(np.nan)
            for _ in range(2):
                graph.launch(stream)
            stream.synchronize()
            assert bool((y == products.expected[0]).all())
        for _ in range(2 * buffers._STREAMS):
            with cupy.cuda.Stream(non_blocking=True):
                buffers.scratch()
        assert any(kept is own for kept in buffers._scratches.values())


def test_memory_that_is_given_back_is_not_in_use() -> None:
    """Who has it when it is given back waits for the stream before it goes."""
    cupy = real_streams()
    with cupy.cuda.Stream(non_blocking=True):
        with buffers.scratch() as own:
            own.take(1)
            others = [cupy.cuda.Stream(non_blocking=True) for _ in range(buffers._STREAMS)]
            for stream in others:
                with stream:
                    buffers.scratch()
            assert own.retired
        assert buffers.scratch() is not own


def test_blocks_are_kept_while_a_stream_reads_them() -> None:
    """The first product frees storage bytes, which another stream may still have to dequantize."""
    cupy = real_streams()
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    big = there(6000, 6000)
    for _ in range(10):
        with first:
            w = cq.quantize(there(4096, 4096), "q4_0")
            expected = w.dequantize()
            first.synchronize()
            with second:
                for _ in range(4):
                    big @ big
                got = w.dequantize()  # waits its turn
            size = w.nbytes
            w.prepare()
            taken = cupy.full(size, 255, np.uint8)  # of what has been freed
        cupy.cuda.Device().synchronize()
        assert bool((got == expected).all())
        assert bool((taken == 255).all())
