"""Streams that kernels are launched on, and how long they live.

A launch that overlaps its predecessor waits for it on the GPU. If its stream is destroyed meanwhile, as CuPy
does when nobody has the object any more, launches of this stream and of the next one that is made may wait
for ever: seen on an H200 (driver 580) where a few other streams lived and the GPU was behind the host; never
where streams lived on, or launches did not overlap, or a graph's did. So a stream's object is kept here until
its work is done.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import suppress
from functools import cache
from typing import Any

from .. import device

PER_THREAD = 2
"""cudaStreamPerThread: another stream in each thread. Handles below are the default stream's, which no graph
captures."""
FEW, MOST = 16, 64
"""Streams that are kept before it is asked which of them have nobody else and no work left, and those with
work that may be left before the oldest are waited for: programs that make one for each request have no end
of them."""

_kept: dict[int, Any] = {}
"""Streams by their handles, the oldest first: a stream that is kept is not destroyed, so nobody else has its
handle."""
_room = FEW
"""Streams that may be kept before it is asked again which of them to let go."""
_keeping = threading.RLock()
_OURS = 2
"""References to a stream's object that nobody else has: the table's, and that of who counts."""


def current() -> tuple[int, bool]:
    """The handle of the current stream, and whether launches on it may overlap their predecessors: those on
    a stream that others destroy may not, but for those that are captured."""
    cuda = device.cupy().cuda
    stream = cuda.get_current_stream()
    handle = stream.ptr
    if handle < PER_THREAD or _kept.get(handle) is stream:
        return handle, True
    if handle == PER_THREAD:  # it goes with the thread
        return handle, threading.current_thread() is threading.main_thread() or stream.is_capturing()
    if isinstance(stream, cuda.ExternalStream) or getattr(stream, "_foreign_stream_ref", None) is not None:
        return handle, stream.is_capturing()
    _keep(stream)
    return handle, True


def _keep(stream: Any) -> None:
    global _room
    with _keeping:
        _kept[stream.ptr] = stream
        if len(_kept) <= _room or _captures(stream):
            return
        late = _let_go()
        _room = FEW + 2 * (len(_kept) - len(late))
        late = late[:-MOST]  # no reference to the others, or who asks next would take them for somebody's
    for old in late:
        # Where that fails because the GPU has, the launch says so; where another thread captures, they stay.
        with suppress(device.cupy().cuda.runtime.CUDARuntimeError):
            old.synchronize()


def _let_go() -> list[Any]:
    """Let go the streams that nobody else has and that are done; returns the others nobody else has, the
    oldest first."""
    late: list[Any] = []
    for handle in list(_kept):
        if sys.getrefcount(_kept.get(handle)) > _OURS:  # it may be given work meanwhile
            continue
        own = _kept[handle]
        if _captures(own):
            continue
        if own.done:
            del _kept[handle]
        else:
            late.append(own)
    return late


def _captures(stream: Any) -> bool:
    """Whether a capture has begun and not ended, also one that has failed."""
    try:
        return bool(stream.is_capturing())
    except RuntimeError:
        return True


class _Number(threading.local):
    """Where the driver writes a number for this thread."""

    def __init__(self) -> None:
        self.held = ctypes.c_ulonglong()
        self.place = ctypes.byref(self.held)


_number = _Number()


@cache
def _id() -> Any:
    function = device.driver().cuStreamGetId
    function.argtypes = ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulonglong)
    return function


def id_of(handle: int) -> int:
    """What tells a stream from all others of the process, also from those that had its handle before.

    Of the calling thread's cudaStreamPerThread too. It must not be capturing a graph, which would end.
    """
    status = _id()(handle, _number.place)
    if status:
        device.once_more(status, _id(), handle, _number.place)
    return int(_number.held.value)
