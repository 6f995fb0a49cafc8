"""Time on the GPU: graph replays between events, over operands that the L2 cache cannot hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import device

ROTATE_BYTES = 256 << 20
"""Bytes of weights that are gone through before one is used again: several times any L2 cache."""
REPEATS = 9
"""Measurements, of which the median counts."""
QUEUE = 200
"""Launches that are queued behind a held stream: well below what a stream's queue takes."""
MEASURE_US = 4000.0
"""Least time of one measurement, in microseconds."""


def rotation(nbytes: int) -> int:
    """How many weights of nbytes to go through in turn."""
    return max(2, -(-ROTATE_BYTES // nbytes))


def warm_up(seconds: float = 0.3) -> None:
    """Keep the GPU busy until its clocks are up."""
    cupy = device.cupy()
    a = cupy.ones((4096, 4096), "float16")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        cupy.cuda.get_current_stream().synchronize()


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one call: the calls are captured in a row and replayed, median of REPEATS."""
    stream = device.cupy().cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:  # compile, prepare, allocate
            call()
        stream.synchronize()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        return replay_us(stream, lambda: graph.launch(stream)) / len(calls)


def stream_us(calls: Sequence[Callable[[], Any]]) -> float:
    """The same for what cannot be captured (cuBLAS through CuPy): launches in a row.

    They queue behind work that holds the stream until all are there, so that the host's pace does not show.
    """
    cupy = device.cupy()
    stream = cupy.cuda.Stream(non_blocking=True)
    a = cupy.ones((8192, 8192), "float32")  # a product takes about 25 ms on an H200, longer elsewhere
    count = max(1, QUEUE // len(calls))
    times = []
    with stream:
        for call in calls:
            call()
        for _ in range(REPEATS):
            a @ a
            times.append(_elapsed_us(stream, lambda: [call() for call in calls], count) / len(calls))
    return statistics.median(times)


def host_us(call: Callable[[], Any], count: int = 500) -> float:
    """Microseconds that the host spends in one call, median of REPEATS runs of `count`."""
    results = []
    for _ in range(REPEATS):
        device.cupy().cuda.Device().synchronize()
        started = time.perf_counter()
        for _ in range(count):
            call()
        results.append((time.perf_counter() - started) / count * 1e6)
    device.cupy().cuda.Device().synchronize()
    return statistics.median(results)


def replay_us(stream: Any, run: Callable[[], Any]) -> float:
    """Microseconds of one run on a CuPy stream, each measurement as many runs as fill MEASURE_US."""
    runs = max(1, int(MEASURE_US / _elapsed_us(stream, run, 3)))
    return statistics.median(_elapsed_us(stream, run, runs) for _ in range(REPEATS))


def _elapsed_us(stream: Any, run: Callable[[], Any], runs: int) -> float:
    event = device.cupy().cuda.Event
    begin, end = event(), event()
    begin.record(stream)
    for _ in range(runs):
        run()
    end.record(stream)
    end.synchronize()
    return float(device.cupy().cuda.get_elapsed_time(begin, end)) * 1e3 / runs
