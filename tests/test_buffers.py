"""Memory of streams, which are not there: whose it is, and when it is given back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import cuquant.cuda.streams
from cuquant import device, plan
from cuquant.bench import timing
from cuquant.cuda import buffers


@dataclass
class Array:
    """CuPy's."""

    size: int
    data: Any


class Stream:
    """CuPy's, as far as it is there."""

    def __init__(self, streams: Streams, own: Any) -> None:
        self.streams, self.own, self.ptr = streams, own, own.ptr

    def is_capturing(self) -> bool:
        return bool(self.own.capturing)

    def begin_capture(self) -> None:
        self.own.capturing = True

    def end_capture(self) -> Any:
        self.own.capturing = False

    def synchronize(self) -> None:
        self.streams.wait(self.own)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Streams:
    """CUDA's: handles are given again, ids are not."""

    def __init__(self) -> None:
        self.current = SimpleNamespace(ptr=0, id=0, capturing=False, broken=False)
        self.ids, self.waits, self.addresses = 0, 0, 0
        self.made: list[weakref.ref[Array]] = []
        self.cleared: list[int] = []

    def enter(self, handle: int, capturing: bool = False) -> Any:
        self.ids += 1
        self.current = SimpleNamespace(ptr=handle, id=self.ids, capturing=capturing)
        return self.current

    @property
    def cuda(self) -> Any:
        own = self.current
        return SimpleNamespace(
            get_current_stream=lambda: Stream(self, own),
            runtime=SimpleNamespace(getDevice=lambda: 0),
            Stream=lambda non_blocking: Stream(self, SimpleNamespace(ptr=-1, capturing=False)),
        )

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(free_all_blocks=lambda: None)

    def zeros(self, count: int, dtype: Any) -> Any:
        self.addresses += 256
        address = self.addresses
        return SimpleNamespace(
            size=count, data=SimpleNamespace(ptr=address), fill=lambda value: self.clear(address)
        )

    def clear(self, address: int) -> None:
        if self.current.broken:
            raise RuntimeError("an error of the device")
        self.cleared.append(address)

    def empty(self, count: int, dtype: Any) -> Any:
        made = Array(count, self.zeros(count, dtype).data)
        self.made.append(weakref.ref(made))
        return made

    @property
    def left(self) -> list[int]:
        """Sizes of the arrays that somebody has."""
        return [array.size for each in self.made if (array := each()) is not None]

    def id_of(self, handle: int) -> int:
        assert not self.current.capturing
        return int(self.current.id)

    def wait(self, own: Any = None) -> None:
        self.waits += 1
        if own is not None and own.capturing:
            raise RuntimeError("a stream that captures cannot be waited for")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(device, "cupy", lambda: made)
    monkeypatch.setattr(device, "synchronize", made.wait)
    monkeypatch.setattr(cuquant.cuda.streams, "id_of", made.id_of)
    monkeypatch.setattr(buffers, "_scratches", {})
    monkeypatch.setattr(buffers, "_last_ids", {})
    return made


def test_a_handle_that_is_given_again_is_another_stream(streams: Streams) -> None:
    streams.enter(100)
    first = buffers.scratch()
    assert buffers.scratch() is first
    streams.enter(100)
    assert buffers.scratch() is not first


def test_the_stream_of_a_thread_is_not_the_default_one(streams: Streams) -> None:
    streams.enter(0)
    default = buffers.scratch()
    own = streams.enter(2)  # cudaStreamPerThread
    first = buffers.scratch()
    assert first is not default
    buffers.give_back()
    streams.current = own
    assert buffers.scratch() not in (first, default)
    streams.enter(0)
    assert buffers.scratch() is default


def test_flags_are_made_once_and_are_there(streams: Streams) -> None:
    """More of them only for those who need more."""
    streams.enter(100)
    made = buffers.scratch()
    first = made.flags()
    assert streams.waits == 1
    assert first == made.flags() == made.flags(plan.FLAGS)
    more = made.flags(plan.FLAGS + 1)
    assert more == made.flags() == made.flags(2 * plan.FLAGS)
    assert (more == first, streams.waits) == (False, 2)


def test_graphs_have_the_memory_of_their_stream(streams: Streams) -> None:
    own = streams.enter(100)
    first = buffers.scratch()
    own.capturing = True
    assert buffers.scratch() is first
    assert first.captured
    streams.enter(200, capturing=True)
    cold = buffers.scratch()
    assert cold is buffers.scratch() is not first
    streams.enter(300, capturing=True)
    assert buffers.scratch() is not cold


def test_the_oldest_memory_is_given_back_when_all_have_been_waited_for(streams: Streams) -> None:
    default = buffers.scratch()
    own = streams.enter(50)
    buffers.scratch()
    own.capturing = True
    graph, made = buffers.scratch(), []
    for i in range(buffers._STREAMS + 1):
        assert streams.waits == 0
        streams.enter(100 + i)
        made.append(buffers.scratch())
    kept = list(buffers._scratches.values())
    assert streams.waits == 1
    half = buffers._STREAMS // 2
    assert kept == [default, graph, *made[half:]]
    assert [one.retired for one in made] == [True] * half + [False] * (half + 1)


def test_who_has_memory_that_goes_waits_for_its_work(streams: Streams) -> None:
    streams.enter(100)
    with buffers.scratch() as own:
        for i in range(buffers._STREAMS):
            streams.enter(200 + i)
            buffers.scratch()
        assert own.retired
        waits = streams.waits
    assert streams.waits == waits + 1
    streams.current.capturing = True  # as an error of the device would
    with pytest.raises(RuntimeError), own:
        pass
    assert not own.lock.locked()


def test_nothing_goes_where_streams_cannot_be_waited_for(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(buffers._STREAMS):
        streams.enter(100 + i)
        buffers.scratch()
    before = list(buffers._scratches)

    def refuse() -> None:
        raise RuntimeError("another thread captures")

    monkeypatch.setattr(device, "synchronize", refuse)
    streams.enter(1000)
    with pytest.raises(RuntimeError, match="captures"):
        buffers.scratch()
    assert sorted(buffers._scratches) == sorted(before)
    assert not any(own.retired for own in buffers._scratches.values())


@pytest.mark.parametrize("count", [0, 4])
def test_flags_that_a_failed_launch_left_are_cleared(streams: Streams, count: int) -> None:
    """Graphs have their address. Those that cannot be cleared, or not now, are not given again."""
    own = buffers.Scratch()
    before = own.flags(count)
    assert own.flags(count) == before
    fail(own)
    assert own.flags(count) == before
    assert streams.cleared == [before]
    for refuse in ("capturing", "broken"):
        setattr(streams.current, refuse, True)
        fail(own)
        setattr(streams.current, refuse, False)
        after = own.flags(count)
        assert after != before
        assert own.flags(count) == after
        before = after
    assert len(streams.cleared) == 1


def fail(own: buffers.Scratch) -> None:
    with pytest.raises(KeyboardInterrupt), own.restored():
        raise KeyboardInterrupt


def test_only_graphs_keep_memory_that_was_outgrown(streams: Streams) -> None:
    own = streams.enter(100)
    with buffers.scratch() as scratch:
        first = scratch.take(5)
        assert scratch.take(1 << 20) == first
        assert scratch.take((1 << 20) + 1) != first
    assert streams.left == [1 << 21]
    own.capturing = True
    with buffers.scratch() as scratch:
        scratch.take(3 << 20)
    own.capturing = False
    with buffers.scratch() as scratch:
        scratch.take(5 << 20)
    assert streams.left == [1 << 21, 1 << 22, 1 << 23]


def test_memory_of_graphs_that_are_gone_is_given_back(streams: Streams) -> None:
    """After what is under way; others keep theirs."""
    other, own = streams.enter(100), streams.enter(200)
    for stream in (other, own):
        streams.current = stream
        for stream.capturing in (False, True):
            with buffers.scratch() as scratch:
                scratch.take(1 + stream.id)
        stream.capturing = False
    del scratch
    assert len(streams.left) == 2
    buffers.give_back()
    assert streams.waits == 1
    assert [key[1] for key in buffers._scratches] == [other.id]
    assert len(streams.left) == 1
    buffers.give_back()
    with buffers.scratch() as scratch:
        assert not scratch.captured


def test_memory_is_given_back_of_streams_that_captured_first_and_of_the_default_one(streams: Streams) -> None:
    for pointer, capturing in ((100, True), (0, False)):
        own = streams.enter(pointer)
        own.capturing = capturing
        with buffers.scratch() as scratch:
            scratch.take(1)
        own.capturing = False
        assert len(buffers._scratches) == 1
        buffers.give_back()
        assert not buffers._scratches


def test_who_has_memory_that_is_given_back_waits_when_done(streams: Streams) -> None:
    """Another thread's kernel may be under way by then."""
    streams.enter(100)
    with buffers.scratch() as scratch:
        buffers.give_back()
        assert scratch.retired
        waits = streams.waits
    assert streams.waits == waits + 1


def test_measuring_leaves_no_memory_behind(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the graphs that it captures, one stream for each cell."""
    clock = SimpleNamespace(mark=lambda: None, mhz=lambda: 1000.0)
    monkeypatch.setattr(timing, "_Clock", lambda: clock)
    monkeypatch.setattr(timing, "captured_us", lambda stream, captured, calls, *more: captured(calls) and 5.0)

    def call() -> None:
        with buffers.scratch() as scratch:
            scratch.take(100)

    for _ in range(3):
        assert timing.graph_us([call]) == (5.0, 1000.0)
    assert buffers._scratches == {}
    assert streams.left == []
