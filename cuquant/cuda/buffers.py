"""Arrays as kernels take them, and the device memory between launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, lru_cache
from itertools import count, pairwise
from math import ceil, prod
from typing import Any

import numpy as np

from .. import check, device, plan
from . import jit, problem, streams


def pointer(array: Any) -> int:
    """Device address of an array, or 0 for None."""
    return 0 if array is None else int(array.data.ptr)


def element_strides(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    size = array.itemsize
    return tuple([stride // size for stride in array.strides])


def as_rows(x: Any, what: str = "x") -> Any:
    """x (..., K) as rows [R, K]: a view where one stride leads from row to row, else a copy."""
    if x.ndim > 2 and not has_rows(x):
        check.require_memory(
            f"{what} has leading axes that do not merge, and is copied", "pass a contiguous array"
        )
    return x.reshape(-1, x.shape[-1])


def has_rows(x: Any) -> bool:
    """Whether one stride leads from each row of x (..., K) to the next: `as_rows` copies others."""
    axes = [(n, step) for n, step in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return x.size == 0 or all(step == n * inner for (_, step), (n, inner) in pairwise(axes))


def records(blocks: Any) -> Any:
    """Storage bytes of whole matrices that start on 16 bytes and lie together."""
    if blocks.flags.c_contiguous and blocks.data.ptr % 16 == 0:
        return blocks
    check.require_memory("storage bytes with gaps, or that start at odd places, are copied", "do that before")
    return blocks.copy("C")


def float_rows(rows: Any) -> tuple[Any, ...]:
    """Rows of floats as kernels take them: array, number of the dtype, strides in elements."""
    return (rows, np.int32(problem.DTYPES[rows.dtype]), *map(np.int64, element_strides(rows)))


def rows_bytes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of activations as float16 rows, and of these with the float32 factors of the rows behind them."""
    *rows, k = shape
    halves = ceil(prod(rows) * problem.whole_pieces(k) * 2 / 256) * 256
    return halves, halves + ceil(prod(rows) * 4 / 256) * 256


class _Pinned(threading.local):
    """Pinned memory of a thread: allocating it takes as long as a copy."""

    def __init__(self) -> None:
        self.bytes = np.frombuffer(device.cupy().cuda.alloc_pinned_memory(_READ), np.uint8, _READ)


_READ = 64
"""Bytes that are read at a time, at most."""


@cache
def _pinned() -> _Pinned:
    return _Pinned()


def read(array: Any) -> Any:
    """A few numbers [n] on the host, once the current stream has come to them."""
    to = _pinned().bytes[: array.nbytes].view(array.dtype)
    array.get(device.cupy().cuda.get_current_stream(), out=to)
    return to.copy()


@lru_cache(maxsize=4096)
def tensor_map(address: int, tensor: problem.Map) -> bytes:
    """A tensor of float16 numbers at an address, as the copy engine takes it."""
    return jit.encode_map(address, *tensor)


@contextmanager
def _apart() -> Iterator[None]:
    """Run the block on a stream of its own, whose work is waited for."""
    with device.cupy().cuda.Stream(non_blocking=True) as stream:
        yield
        stream.synchronize()


class Scratch:
    """Device memory of one stream for converted activations and partial sums; it only grows.

    Once the stream has captured, old buffers are kept, too: a graph may hold their addresses. The lock keeps
    two threads on one stream from interleaving a conversion with the other's product.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.captured = self.retired = False
        """Whether a graph has its addresses; whether it goes when who has it now is done."""
        self._buffers: list[Any] = []
        self._flags: list[Any] = []

    def take(self, nbytes: int) -> int:
        """Address of at least nbytes, valid for the work that this stream is given under the lock, until more
        are taken."""
        if not self._buffers or self._buffers[-1].size < nbytes:
            grown = max(nbytes, 2 * self._buffers[-1].size if self._buffers else 1 << 20)
            if not self.captured:  # CuPy gives memory again on the stream it was of, behind what is under way
                self._buffers.clear()
            # An allocator that is ordered by streams would make it the graph's own, if this one is captured.
            with _apart() if device.is_capturing() else nullcontext():
                self._buffers.append(device.cupy().empty(grown, np.uint8))
        return int(self._buffers[-1].data.ptr)

    def flags(self, count: int = plan.FLAGS) -> int:
        """Address of so many zeros, which a launch, or those within `restored`, leave as they were.

        They are made on a stream of their own, so that they are there also while this one is captured.
        """
        if not self._flags or self._flags[-1].size < max(count, 1):  # what `restored` leaves is empty
            cupy = device.cupy()
            grown = max(count, plan.FLAGS, 2 * self._flags[-1].size if self._flags else 0)
            with _apart():
                self._flags.append(cupy.zeros(grown, np.uint32))
        return int(self._flags[-1].data.ptr)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Surround launches that leave flags at zero together: if one is not started, they are cleared behind
        those that are, as graphs may have their address. Where that fails, or is captured, others get new
        ones."""
        try:
            yield
        except BaseException:
            self._flags.append(np.empty(0, np.uint32))
            if len(self._flags) > 1 and not device.is_capturing():
                with suppress(RuntimeError):  # CUDA's: it works no more
                    self._flags[-2].fill(0)
                    self._flags.pop()
            raise

    def __enter__(self) -> Scratch:
        self.lock.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if self.retired:
                device.cupy().cuda.get_current_stream().synchronize()
        finally:
            self.lock.release()


_scratches: dict[tuple[int, int], Scratch] = {}
"""Scratch memory by device and stream."""
_STREAMS = 64
"""Streams of a device whose memory is kept: programs that make one for each request have no end of them."""
_last_ids: dict[tuple[int, int, int], int] = {}
"""Ids of streams when they were last asked for, by their handles: asking one that captures would end that."""
_unasked = count(1)
"""Ids, but for their sign, of streams that capture first of all."""
_making = threading.Lock()


def scratch() -> Scratch:
    """The scratch memory of the current device and stream, which all graphs share that were captured on it.

    Not by the stream's handle, nor by the thread: another stream is given that of one which is gone, though
    work may be left to do. A stream that captures before it has done anything is taken for the last one with
    its handle.
    """
    cuda = device.cupy().cuda
    number, stream = cuda.runtime.getDevice(), cuda.get_current_stream()
    if stream.ptr < streams.PER_THREAD:
        return _scratches.get((number, 0)) or _made((number, 0))
    handle = _handle(number, stream.ptr)
    if stream.is_capturing():
        return _made((number, _last_ids.setdefault(handle, -next(_unasked))), captured=True)
    key = (number, streams.id_of(stream.ptr))
    _last_ids[handle] = key[1]
    return _scratches.get(key) or _made(key)


def _made(key: tuple[int, int], captured: bool = False) -> Scratch:
    """A stream's memory, new where there is none. Where there are too many, the oldest go, but for those of
    graphs and of the default stream."""
    with _making:
        own = _scratches.get(key)
        if own is None:
            if not captured:
                _make_room(key[0])
            own = _scratches[key] = Scratch()
        own.captured |= captured
        return own


def give_back() -> None:
    """Let the memory of the current stream go, of which no graph is replayed any more: it is waited for."""
    cuda = device.cupy().cuda
    number, stream = cuda.runtime.getDevice(), cuda.get_current_stream()
    keys = {(number, 0)}
    if stream.ptr >= streams.PER_THREAD:
        handle = _handle(number, stream.ptr)
        keys = {(number, streams.id_of(stream.ptr)), (number, _last_ids.pop(handle, 0))} - keys
    with _making:
        for own in filter(None, [_scratches.pop(key, None) for key in keys]):
            own.retired = True  # who has it now waits when done
    stream.synchronize()


def _handle(number: int, stream: int) -> tuple[int, int, int]:
    """What a device's stream is known by while it captures."""
    return number, stream, threading.get_ident() if stream == streams.PER_THREAD else 0


def _make_room(number: int) -> None:
    """All streams are waited for, lest what is given back is still in use."""
    others = {key: own for key, own in _scratches.items() if key[0] == number and key[1] and not own.captured}
    if len(others) < _STREAMS:
        return
    gone = dict(list(others.items())[: _STREAMS // 2])
    for key, own in gone.items():
        own.retired = True
        del _scratches[key]
    try:
        device.synchronize()
    except BaseException:
        for own in gone.values():
            own.retired = False
        _scratches.update(gone)
        raise
