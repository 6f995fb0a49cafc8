"""Caches on the GPU next to the same on the CPU, and calls that are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, testing

F = np.float32
WIDTHS = (16, 8, 4, 3, 2)
Tokens = NDArray[np.float32]
OPTIONS: list[dict[str, Any]] = [
    {"key_scales": "pairs"},
    {"key_scales": "halves", "rotate": True},
    {"key_scales": np.linspace(0.3, 3, 2 * 3 * 96, dtype=F).reshape(2, 3, 96)},
    {"rotate": True},
]
REFUSED = "an earlier append, replayed by a graph or with bits or lengths on the GPU, was refused"
Call = Callable[[], Any]


def put(array: Any) -> Any:
    return device.cupy().asarray(array)


def tokens(*shape: int, seed: int = 0) -> tuple[Tokens, Tokens]:
    k, v = np.random.default_rng(seed).standard_normal((2, *shape), F)
    return k, v


def both(*arguments: Any, **options: Any) -> tuple[cq.KVCache, cq.KVCache]:
    """The same cache on the CPU and on the GPU."""
    return cq.KVCache(*arguments, **options), cq.KVCache(*arguments, **options, device="cuda")


def assert_same(a: cq.KVCache, b: cq.KVCache, nan: bool = False) -> None:
    """Bit for bit; of NaN scales only that they are NaN."""
    assert a.lengths.tolist() == b.lengths.tolist()
    assert testing.as_numpy(a.next_slots).tolist() == testing.as_numpy(b.next_slots).tolist()
    for bits in a.bits:
        for sequence in range(a.batch):
            x, y = (c.tiers[bits].bucket(sequence).on_cpu() for c in (a, b))
            for name in x._fields:
                ours, theirs = getattr(x, name), getattr(y, name)
                if nan and ours.dtype == np.float16:
                    np.testing.assert_array_equal(ours, theirs, err_msg=f"{name} of {bits} bits")
                else:
                    assert ours.tobytes() == theirs.tobytes(), f"{name} of {bits} bits"


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
