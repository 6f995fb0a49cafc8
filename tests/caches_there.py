"""Small caches on the GPU, and calls that are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from test_gpu_kvcache import put, tokens

import cuquant as cq
from cuquant import device

REFUSED = "an earlier append, replayed by a graph or with bits or lengths on the GPU, was refused"
Call = Callable[[], Any]


def synchronize() -> None:
    device.cupy().cuda.Device().synchronize()


def some(n: int = 2, batch: int = 2) -> tuple[Any, Any]:
    k, v = tokens(batch, n, 2, 64)
    return put(k), put(v)


def cache_of(n: int = 2, capacity: Any = 8, batch: int = 2, **options: Any) -> cq.KVCache:
    cache = cq.KVCache(2, 64, capacity, batch, (8, 4), **options, device="cuda")
    cache.append(*some(n, batch))
    return cache


def graph_of(call: Call) -> Any:
    """What a call gives to a stream of its own, which is the current one for as long as a test runs."""
    stream = device.cupy().cuda.get_current_stream()
    stream.begin_capture()
    try:
        call()
    finally:
        graph = stream.end_capture()
    return graph
