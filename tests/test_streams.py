"""Streams that are not there: how long they live, and which launches may overlap."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from cuquant import device, streams


class Stream:
    """CuPy's; its handle is given to another when it goes."""

    def __init__(self, cuda: Any, handle: int | None = None) -> None:
        self.cuda, self.capturing, self.done = cuda, False, True
        self.ptr = cuda.free.pop() if handle is None else handle

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        assert not self.capturing
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
    made = SimpleNamespace(now=None, free=[100 * n for n in range(500, 0, -1)], destroyed=[])
    made.get_current_stream, made.ExternalStream = lambda: made.now, ExternalStream
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=made))
    monkeypatch.setattr(streams, "_kept", {})
    monkeypatch.setattr(streams, "_room", streams.MOST)
    return made


def test_a_stream_is_not_destroyed_before_its_work_is_done(cuda: Any) -> None:
    for _ in range(4 * streams.MOST):
        assert Stream(cuda).launch()
    assert len(streams._kept) <= streams.MOST
    assert len(cuda.destroyed) >= 3 * streams.MOST
    assert all(cuda.destroyed)


def test_streams_that_others_have_stay(cuda: Any) -> None:
    """They are not waited for, and however many there are, new ones are."""
    mine = [Stream(cuda) for _ in range(3 * streams.MOST)]
    for stream in (*mine, *mine):
        assert stream.launch()
    assert not any(stream.done for stream in mine)
    assert all(streams._kept[stream.ptr] is stream for stream in mine)
    count = len(mine)
    for _ in range(4 * count):
        Stream(cuda).launch()
    assert all(cuda.destroyed)
    assert len(streams._kept) <= 2 * count
    assert not any(stream.done for stream in mine)
    watched = weakref.ref(mine[0])
    del stream
    mine.clear()
    for _ in range(2 * count):
        Stream(cuda).launch()
    assert watched() is None
    assert all(cuda.destroyed)


def test_nobody_waits_while_a_graph_is_captured(cuda: Any) -> None:
    for _ in range(streams.MOST):
        Stream(cuda).launch()
    captured = Stream(cuda)
    captured.capturing = True
    assert captured.launch()
    assert not cuda.destroyed
    assert len(streams._kept) == streams.MOST + 1
    del captured  # nobody will end it: it cannot be waited for
    Stream(cuda).launch()
    assert cuda.destroyed == [True] * streams.MOST + [False]


def test_what_others_destroy_does_not_overlap(cuda: Any) -> None:
    stream = ExternalStream(cuda)
    assert not stream.launch()
    stream.capturing = True
    assert stream.launch()
    assert not streams._kept
    assert Stream(cuda, handle=0).launch()
    assert Stream(cuda, handle=1).launch()
    assert not streams._kept


def test_streams_of_threads_go_with_them(cuda: Any) -> None:
    own = Stream(cuda, handle=streams.PER_THREAD)
    assert own.launch()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(own.launch()))
    thread.start()
    thread.join()
    assert found == [False]
    assert not streams._kept
