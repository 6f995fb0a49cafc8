"""Time on the GPU: graph replays between events, over operands that the L2 cache cannot hold."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import device, plan
from ..cuda import buffers, jit

ROTATE_BYTES = 256 << 20
"""Bytes of weights that are gone through before one is used again: several times any L2 cache."""
REPEATS = 9
"""Measurements, of which the median counts."""
QUEUE = 200
"""Launches that are queued behind a held stream: well below what a stream's queue takes."""
MOST_HELD = 64
"""Products that hold a stream, at most."""
ESTIMATES = 3
"""Runs by which it is found out how many fill a measurement."""
LEAST_CALLS = 32
"""Calls that are captured in a row, at least, where they are short: nothing overlaps between a graph and the
next one, as kernels in a graph do."""
MEASURE_US = 4000.0
"""Time that the runs of one measurement fill, in microseconds, where QUEUE lets them."""
REST_S = 0.1
"""Seconds without work before a measurement: a GPU at its power limit takes about as long to recover."""


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


def settle() -> None:
    """Rest, then get the clocks up: what was measured before must not heat the GPU for what comes next."""
    time.sleep(REST_S)
    warm_up(0.05)


class Timing(NamedTuple):
    """Time of a call, and the clock meanwhile."""

    us: float
    """Microseconds, median of REPEATS."""
    mhz: float
    """Mean clock of the multiprocessors meanwhile: load lowers it, and much load lowers it more."""


def graph_us(calls: Sequence[Callable[[], Any]], most: int = QUEUE) -> Timing:
    """Time of one of the calls, which are captured in a row and replayed, as often as `most` in one
    measurement."""
    # CuPy's pool keeps what streams before had. It is emptied now, rather than when memory runs out: what
    # calls take in a capture is free after it, and a graph would write to what is no longer there.
    device.cupy().get_default_memory_pool().free_all_blocks()
    stream = device.cupy().cuda.Stream(non_blocking=True)
    with stream:
        clock = _Clock()
        for call in calls:  # compile, prepare, allocate
            call()
        stream.synchronize()

        def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
            stream.begin_capture()
            for call in calls:
                call()
            graph = stream.end_capture()
            return lambda: graph.launch(stream)

        try:
            return Timing(captured_us(stream, captured, calls, clock, most), clock.mhz())
        finally:
            buffers.give_back()


def most_calls(most: int) -> int:
    """How often `graph_us` makes each of LEAST_CALLS calls, or more, that are replayed `most` times in a
    measurement: once before they are captured, for two estimates, and in measurements, of which each that
    makes the stream be held for longer is one more."""
    return 1 + 2 * ESTIMATES + most * (REPEATS + MOST_HELD.bit_length() - 1)


def captured_us(
    stream: Any,
    captured: Callable[[Sequence[Callable[[], Any]]], Callable[[], Any]],
    calls: Sequence[Callable[[], Any]],
    clock: _Clock | None = None,
    most: int = QUEUE,
) -> float:
    """Microseconds of one of the calls, of which `captured` makes a graph, and returns what replays it.

    The clock goes while it is measured. `most` is as in `replay_us`.
    """
    replay = captured(calls)
    once = _elapsed_us(stream, replay, ESTIMATES)
    passes = min(-(-LEAST_CALLS // len(calls)), int(MEASURE_US / once))
    if passes > 1:
        calls = list(calls) * passes
        replay = captured(calls)
    return replay_us(stream, replay, most, clock) / len(calls)


class _Clock:
    """Cycles that every multiprocessor counts, from mark to mark on the current stream."""

    def __init__(self) -> None:
        self._multiprocessors = jit.gpu().multiprocessors
        kernel = plan.Kernel("clock", "count_cycles")
        self._plan = plan.Plan(kernel, (self._multiprocessors, 1, 1), 1)
        self._marks: list[Any] = []
        self.mark()  # compile
        self._marks.clear()

    def mark(self) -> None:
        """Record a mark; to be called twice for each stretch."""
        counted = device.cupy().zeros((2, self._multiprocessors), np.uint64)
        jit.launch(self._plan, counted[0], counted[1], np.uint32(self._multiprocessors))
        self._marks.append(counted)

    def mhz(self) -> float:
        """Mean clock of the multiprocessors in MHz, median of the stretches."""
        marks = [mark.get() for mark in self._marks]
        return statistics.median(map(mean_mhz, marks[::2], marks[1::2]))


def mean_mhz(begin: np.ndarray, end: np.ndarray) -> float:
    """Mean clock in MHz from cycles and nanoseconds, (2, multiprocessors) uint64, of which both are 0 where
    no block ran."""
    seen = (begin[1] > 0) & (end[1] > 0)
    cycles, nanoseconds = (end - begin)[:, seen]
    return float(np.mean(cycles / nanoseconds) * 1e3)


def stream_us(calls: Sequence[Callable[[], Any]]) -> float | None:
    """Microseconds of one call of what cannot be captured (cuBLAS through CuPy): QUEUE of the calls in a row.

    None, with a warning, where the host is slower than the GPU.
    """
    try:
        return queued_us(calls)
    except TooSlowError as error:
        warnings.warn(f"cuBLAS is not timed: {error}", stacklevel=2)
        return None


def queued_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one call, QUEUE of the calls in a row; TooSlowError where the host is slower than the
    GPU."""
    stream = device.cupy().cuda.Stream(non_blocking=True)
    calls = calls[:QUEUE]

    def run() -> None:
        for call in calls:
            call()

    with stream:
        run()
        return replay_us(stream, run, QUEUE // len(calls)) / len(calls)


class TooSlowError(RuntimeError):
    """The host does not keep up with the GPU."""


def call_us(call: Callable[[], Any]) -> float:
    """Microseconds from when the stream comes to a call until it goes on: median of REPEATS, each behind work
    that holds the stream while the host makes the call's first launches.

    For what waits for the GPU itself, and takes much longer than the host to notice that.
    """
    stream, a = device.cupy().cuda.get_current_stream(), _factor()
    call()
    settle()
    times = []
    for _ in range(REPEATS):
        a @ a
        times.append(_elapsed_us(stream, call, 1))
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


def replay_us(stream: Any, run: Callable[[], Any], most: int = QUEUE, clock: _Clock | None = None) -> float:
    """Microseconds of one run on a CuPy stream, after a rest; runs fill MEASURE_US, but are `most` at most.

    They queue behind work that holds the stream until all are there, so that the host's pace does not show:
    where it was over before, the stream is held for longer. TooSlowError where that does not help.
    """
    cupy = device.cupy()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    a = _factor()
    settle()
    runs = max(1, min(most, int(MEASURE_US / _elapsed_us(stream, run, ESTIMATES))))
    times: list[float] = []
    held = 1
    while len(times) < REPEATS:
        with stream:
            for _ in range(held):
                a @ a
            if clock:
                clock.mark()
        begin.record(stream)
        for _ in range(runs):
            run()
        late = begin.done
        end.record(stream)
        if clock:
            with stream:
                clock.mark()
        end.synchronize()
        if not late:
            times.append(float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3 / runs)
        elif held == MOST_HELD:
            raise TooSlowError("the host is busy, or has more to launch than a stream's queue takes")
        else:
            held *= 2
    return statistics.median(times)


def _factor() -> Any:
    """Factor of a product that holds a stream: it takes about 6 ms on an H200, longer elsewhere."""
    return device.cupy().ones((5120, 5120), "float32")


def _elapsed_us(stream: Any, run: Callable[[], Any], runs: int) -> float:
    event = device.cupy().cuda.Event
    begin, end = event(), event()
    begin.record(stream)
    for _ in range(runs):
        run()
    end.record(stream)
    end.synchronize()
    return float(device.cupy().cuda.get_elapsed_time(begin, end)) * 1e3 / runs
