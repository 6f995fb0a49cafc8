"""Streams that are not there: how long they live, and which launches may overlap."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from cuquant import device
from cuquant.cuda import jit, streams
from cuquant.plan import Kernel, Plan


class RuntimeFailed(RuntimeError):
    """CuPy's CUDARuntimeError."""


class Stream:
    """CuPy's; its handle is given to another when it goes."""

    def __init__(self, cuda: Any, handle: int | None = None) -> None:
        self.cuda, self.done = cuda, True
        self.capturing: bool | None = False
        """None where a capture has failed."""
        self.ptr = cuda.free.pop() if handle is None else handle

    def is_capturing(self) -> bool:
        if self.capturing is None:
            raise RuntimeFailed
        return self.capturing

    def synchronize(self) -> None:
        assert not self.capturing
        if self.cuda.broken:
            raise RuntimeFailed
        self.cuda.waits += 1
        time.sleep(0.001)  # others go on
        self.done = True

    def launch(self) -> bool:
        """Whether it may overlap."""
        self.cuda.now = self
        handle, overlaps = streams.current()
        assert handle == self.ptr
        self.done, self.cuda.now = False, None
        return overlaps

    def __del__(self) -> None:
        self.cuda.destroyed.append(self.done)
        self.cuda.free.append(self.ptr)


class ExternalStream(Stream):
    """CuPy's, of a stream that others have made."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=None, free=[100 * n for n in range(900, 0, -1)], destroyed=[])
    made.waits, made.broken = 0, False
    made.get_current_stream, made.ExternalStream = lambda: made.now, ExternalStream
    made.runtime = SimpleNamespace(CUDARuntimeError=RuntimeFailed)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=made))
    monkeypatch.setattr(streams, "_kept", {})
    monkeypatch.setattr(streams, "_room", streams.FEW)
    return made


def test_a_stream_is_not_destroyed_before_its_work_is_done(cuda: Any) -> None:
    """The oldest are waited for where many have work left."""
    for _ in range(4 * streams.MOST):
        assert Stream(cuda).launch()
    assert len(streams._kept) <= streams.MOST + streams.FEW
    assert len(cuda.destroyed) >= 2 * streams.MOST
    assert 4 * streams.MOST - streams.MOST - streams.FEW <= cuda.waits <= 4 * streams.MOST - streams.MOST
    assert all(cuda.destroyed)


def test_nobody_waits_for_streams_that_are_done(cuda: Any) -> None:
    """Few of them are kept."""
    for _ in range(200):
        stream = Stream(cuda)
        assert stream.launch()
        stream.done = True
    assert cuda.waits == 0
    assert len(streams._kept) <= streams.FEW + 2
    assert all(cuda.destroyed)


def test_a_slow_stream_does_not_keep_others(cuda: Any) -> None:
    slow = Stream(cuda)
    slow.launch()
    handle = slow.ptr
    del slow
    for _ in range(3 * streams.MOST):
        stream = Stream(cuda)
        stream.launch()
        stream.done = True
    assert cuda.waits == 0
    assert handle in streams._kept
    assert len(streams._kept) <= streams.FEW + 3


def test_streams_that_others_have_stay(cuda: Any) -> None:
    """They are not waited for, and however many there are, new ones are let go."""
    mine = [Stream(cuda) for _ in range(100)]
    for stream in (*mine, *mine):
        assert stream.launch()
    for _ in range(300):
        Stream(cuda).launch()
    assert all(streams._kept[stream.ptr] is stream for stream in mine)
    assert not any(stream.done for stream in mine)
    assert len(streams._kept) <= len(mine) * 3 + streams.MOST + streams.FEW
    assert len(cuda.destroyed) > 50
    assert all(cuda.destroyed)
    gone = [weakref.ref(stream) for stream in mine]
    del stream
    mine.clear()
    for _ in range(400):
        Stream(cuda).launch()
    assert not any(own() for own in gone)
    assert all(cuda.destroyed)


@pytest.mark.parametrize("capturing", [True, None])
def test_streams_that_capture_stay(cuda: Any, capturing: bool | None) -> None:
    """Who began a capture may still end it, even if it has failed; and while one captures others are not
    asked."""
    for _ in range(streams.FEW):
        stream = Stream(cuda)
        stream.launch()
        stream.done = True
    del stream
    captured = Stream(cuda)
    captured.capturing = capturing
    handle = captured.ptr
    assert captured.launch()
    assert not cuda.destroyed
    del captured
    for _ in range(4 * streams.MOST):
        assert Stream(cuda).launch()
    assert handle in streams._kept
    assert len(cuda.destroyed) >= 2 * streams.MOST
    assert all(cuda.destroyed)


def test_a_gpu_that_fails_is_not_reported_by_another_stream(cuda: Any) -> None:
    """Its launch does that; nothing is destroyed meanwhile, or lost."""
    cuda.broken = True
    for _ in range(2 * streams.MOST):
        assert Stream(cuda).launch()
    assert not cuda.destroyed
    cuda.broken = False
    for _ in range(2 * streams.MOST):
        assert Stream(cuda).launch()
    assert len(cuda.destroyed) >= streams.MOST
    assert all(cuda.destroyed)
    assert len(streams._kept) <= streams.MOST + streams.FEW


def test_what_others_destroy_does_not_overlap(cuda: Any) -> None:
    """`Stream.from_external` has the object of a stream, which somebody may close."""
    foreign = Stream(cuda)
    foreign._foreign_stream_ref = object()  # type: ignore[attr-defined]
    own = Stream(cuda)
    own._foreign_stream_ref = None  # type: ignore[attr-defined]
    for stream in (ExternalStream(cuda), foreign):
        assert not stream.launch()
        stream.capturing = True
        assert stream.launch()
    assert not streams._kept
    assert own.launch()
    assert list(streams._kept) == [own.ptr]


def test_default_streams_are_not_kept(cuda: Any) -> None:
    assert Stream(cuda, handle=0).launch()
    assert Stream(cuda, handle=1).launch()
    assert not streams._kept


def test_streams_of_threads_go_with_them(cuda: Any) -> None:
    own = Stream(cuda, handle=streams.PER_THREAD)
    assert own.launch()
    found: list[bool] = []

    def run() -> None:
        found.append(own.launch())
        own.capturing = True
        found.append(own.launch())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False, True]
    assert not streams._kept


def test_threads_with_streams_of_their_own(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at a time: none is destroyed with work left."""
    now = threading.local()
    cuda.get_current_stream = lambda: now.stream

    def run() -> None:
        for _ in range(60):
            now.stream = stream = Stream(cuda)
            assert streams.current() == (stream.ptr, True)
            stream.done = False
            assert streams.current() == (stream.ptr, True)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cuda.destroyed)
    assert len(streams._kept) <= streams.MOST + 2 * streams.FEW


@pytest.mark.parametrize(("cluster", "overlaps"), [(1, False), (1, True), (4, False), (4, True)])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_driver_is_told_what_may_overlap(
    monkeypatch: pytest.MonkeyPatch, capability: int, cluster: int, overlaps: bool
) -> None:
    """Launch by launch, as the stream has it; before sm_90 none may."""
    told: list[list[int]] = []

    def start(config: Any, *_: Any) -> int:
        made = config._obj
        told.append([made.attributes[i].id for i in range(made.count)])
        return 0

    monkeypatch.setattr(device, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=start))
    monkeypatch.setattr(jit, "_capability", lambda number: capability)
    monkeypatch.setattr(
        jit, "_function", lambda number, kernel: SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    )
    plan = Plan(Kernel("gemm", "gemm"), (8, 1, 1), 32, cluster=cluster, overlaps=overlaps)
    launch = jit._Launch(0, plan, ctypes.sizeof(ctypes.c_int), (0,))
    for stream_overlaps in (True, False, False, True):
        launch(77, stream_overlaps)
    without = [jit._CLUSTER_DIMENSION] if cluster > 1 else []
    whole = [*without, jit._PROGRAMMATIC_SERIALIZATION] if overlaps and capability == 90 else without
    assert told == [whole, without, without, whole]


class DriverFailed(Exception):
    """CuPy's CUDADriverError."""


FIRST_CALLS: dict[str, Callable[[], Any]] = {
    "cuLaunchKernelEx": lambda: jit._Launch(0, sized(1), 4, (0,))(77, True),
    "cuTensorMapEncodeTiled": lambda: jit.encode_map(256, (64, 8), (128,), (64, 8)),
    "cuStreamGetId": lambda: streams.id_of(77),
}


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_what_a_thread_asks_of_the_driver_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It has no context before CUDA's runtime was used; other errors are told, also those that come then."""
    statuses: list[int] = []
    contexts: list[int] = []

    def asked(*given: Any) -> int:
        return statuses.pop(0)

    runtime = SimpleNamespace(free=contexts.append)
    cuda = SimpleNamespace(runtime=runtime, driver=SimpleNamespace(CUDADriverError=DriverFailed))
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "driver", lambda: SimpleNamespace(**{name: asked}))
    monkeypatch.setattr(streams, "_id", streams._id.__wrapped__)
    monkeypatch.setattr(jit, "_capability", lambda number: 90)
    monkeypatch.setattr(
        jit, "_function", lambda number, kernel: SimpleNamespace(kernel=SimpleNamespace(ptr=1))
    )
    for given, error in (([201, 0], None), ([0], None), ([201, 700], 700), ([201, 201], 201), ([1], 1)):
        contexts.clear()
        statuses[:] = given
        with nullcontext() if error is None else pytest.raises(DriverFailed, match=f"^{error}$"):
            FIRST_CALLS[name]()
        assert statuses == []
        assert contexts == [0] * (len(given) - 1)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What launches were prepared for, by a thread that has none."""
    found: list[tuple[Any, ...]] = []

    class Launch:
        def __init__(self, *given: Any) -> None:
            found.append(given)

    monkeypatch.setattr(jit, "_Launch", Launch)
    monkeypatch.setattr(jit, "_prepared", jit._Prepared())
    return found


def sized(blocks: int) -> Plan:
    return Plan(Kernel("gemm", "gemm"), (blocks, 1, 1), 32)


def test_launches_are_prepared_once_for_each_thread(made: list[tuple[Any, ...]]) -> None:
    """And device, plan, and place of the arguments; of plans that are equal once, too."""
    asked = [(0, sized(1), 8, (0,)), (1, sized(1), 8, (0,)), (0, sized(1), 8, (0, 4)), (0, sized(2), 8, (0,))]
    found = [jit.prepared(*given) for given in asked * 2]
    assert found[:4] == found[4:]
    assert made == asked
    assert jit.prepared(0, sized(2), 8) is found[3]

    thread = threading.Thread(target=lambda: found.append(jit.prepared(*asked[0])))
    thread.start()
    thread.join()
    assert found[-1] not in found[:-1]


def test_plans_that_are_gone_are_taken_for_no_other(made: list[tuple[Any, ...]]) -> None:
    """A plan may be made where one was before."""
    for blocks in range(1, 2000):
        jit.prepared(0, sized(blocks), 8)
    assert [plan.grid[0] for _, plan, _, _ in made] == list(range(1, 2000))


def test_not_all_plans_are_kept(monkeypatch: pytest.MonkeyPatch, made: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(jit, "_MOST_KNOWN", 4)
    for _ in range(9):
        jit.prepared(0, sized(1), 8)
        assert len(jit._prepared.known) <= 4
    assert len(made) == 1
