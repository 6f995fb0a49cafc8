"""Streams that come and go: each has scratch memory of its own, and none takes what another still reads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuquant as cq
from cuquant import device
from cuquant.cuda import buffers

pytestmark = pytest.mark.gpu
F = np.float32
ROOT = Path(__file__).parent.parent


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
    cupy = real_streams()
    w = cq.quantize(there(4096, 2048), "q4_0").prepare()
    xs = [there(512, 2048, seed=seed) for seed in range(8)]
    expected = [x @ w.T for x in xs]
    cupy.cuda.Device().synchronize()
    return SimpleNamespace(cupy=cupy, w=w, xs=xs, expected=expected)


def test_streams_that_are_gone_may_have_work_left(products: Any) -> None:
    """CUDA gives their handles to others at once."""
    cupy, ys = products.cupy, [products.cupy.empty((512, 4096), F) for _ in range(200)]
    handles = set()
    for i, y in enumerate(ys):
        stream = cupy.cuda.Stream(non_blocking=True)
        handles.add(stream.ptr)
        with stream:
            cq.matmul(products.xs[i % 8], products.w.T, out=y)
        del stream
    cupy.cuda.Device().synchronize()
    assert len(handles) < len(ys)
    assert all(bool((y == products.expected[i % 8]).all()) for i, y in enumerate(ys))
    kept = [own for own in buffers._scratches.values() if not own.captured]
    assert len(kept) <= buffers._STREAMS


BEHIND = """
import cupy
import numpy as np
import cuquant as cq

draw = np.random.default_rng(0).standard_normal
w = cq.quantize(cupy.asarray(draw((4096, 2048), np.float32)), "q4_0").prepare()
x = cupy.asarray(draw((4096, 2048), np.float32))
expected, y = x @ w.T, cupy.empty((4096, 4096), np.float32)
stay = [cupy.cuda.Stream(non_blocking=True) for _ in range(7)]
for stream in stay:
    with stream:
        cq.matmul(x, w.T)
cupy.cuda.Device().synchronize()
for _ in range(1200):
    with cupy.cuda.Stream(non_blocking=True):
        cq.matmul(x, w.T, out=y)
cupy.cuda.Device().synchronize()
assert bool((y == expected).all())
"""


def test_streams_go_while_the_gpu_is_behind() -> None:
    """Overlapping launches would wait for ever if streams went before their work was done, with a few others
    that stay: in a process of its own, which can be ended."""
    real_streams()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-c", BEHIND], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


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
