"""A cache on a GPU: moves, graphs that let it grow, and what happens when it is full."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches_there import WIDTHS, assert_same, both, put, tokens

import cuquant as cq
from cuquant import device, testing
from cuquant.cuda import jit

pytestmark = pytest.mark.gpu


def test_buffers_are_freed_with_the_last_reference() -> None:
    """At once: a cache is large, and garbage that refers to itself is collected at any time later."""
    a, b = both(2, 64, 8, 1, WIDTHS)
    k, v = tokens(1, 4, 2, 64)
    a.append(k, v)
    b.append(put(k), put(v))
    left = weakref.ref(a), weakref.ref(b)
    del a, b
    assert [cache() for cache in left] == [None, None]


def test_moving_and_evicting_is_the_cpu_s() -> None:
    a, b = both(2, 64, 80, 2, WIDTHS)
    k, v = tokens(2, 50, 2, 64)
    a.append(k, v, np.resize(WIDTHS, 50))
    b.append(put(k), put(v), np.resize(WIDTHS, 50))
    importance = np.random.default_rng(3).random((2, 50))
    acts: list[Callable[[cq.KVCache], int]] = [
        lambda c: c.assign([3, 7, 20, 49], [2, 16, 4, 8]),
        lambda c: c.evict([[0, 4], [9, -1]]),
        lambda c: c.allocate(4.2, importance, recent=3),
        lambda c: c.trim(31, importance, recent=3),
        lambda c: c.age({16: 4, 8: 9, 3: 10}, coming=2),
    ]
    for act in acts:
        assert act(a) == act(b)
        assert_same(a, b)
    for x, y in zip(a.dequantize(1), b.dequantize(1), strict=True):
        np.testing.assert_array_equal(x, y)
    for name in ("nbytes", "used_nbytes", "average_bits"):
        assert getattr(a, name) == getattr(b, name)
    assert repr(a) == repr(b)
    for c in (a, b):
        c.clear(1)
    assert_same(a, b)
    assert a.lengths.tolist() == [31, 0]
    for c, place in ((a, np.asarray), (b, put)):
        c.append(place(k[:, :40]), place(v[:, :40]), 8, lengths=[0, 40])
    assert_same(a, b)
    assert a.lengths.tolist() == [31, 40]
    a.clear()
    b.clear()
    a.append(k, v, 3)
    b.append(put(k), put(v), 3)
    assert_same(a, b)


@pytest.mark.parametrize("options", [{}, {"key_scales": "pairs", "rotate": True}])
def test_a_graph_serves_a_growing_cache(options: dict[str, Any]) -> None:
    """Append and attention of a decode step, captured once, replayed as the cache grows."""
    cupy = device.cupy()
    a, b = both(2, 64, 700, 2, (8, 4), **options)
    start = tokens(2, 5, 2, 64, seed=9)
    a.append(*start)
    b.append(*map(put, start))
    k, v = (cupy.empty((2, 1, 2, 64), np.float16) for _ in range(2))
    q, y = cupy.empty((2, 1, 8, 64), np.float16), cupy.empty((2, 1, 8, 64), np.float16)
    k[...], v[...], q[...] = 0, 0, 0
    stream = cupy.cuda.Stream(non_blocking=True)
    warm = cq.KVCache(2, 64, 700, 2, (8, 4), **options, device="cuda")
    cupy.cuda.Device().synchronize()
    with stream:
        warm.append(k, v, 4)
        cq.attention(q, warm, out=y)
        stream.synchronize()
        stream.begin_capture()
        b.append(k, v, 4)
        cq.attention(q, b, out=y)
        graph = stream.end_capture()
        for step in range(600):
            new_k, new_v = tokens(2, 1, 2, 64, seed=step)
            a.append(new_k.astype(np.float16), new_v.astype(np.float16), 4)
            k.set(new_k.astype(np.float16))
            v.set(new_v.astype(np.float16))
            if step % 100 and step < 590:
                graph.launch(stream)
                continue
            new_q = np.random.default_rng(step).standard_normal((2, 1, 8, 64)).astype(np.float16)
            q.set(new_q)
            graph.launch(stream)
            stream.synchronize()
            assert testing.nmse(y.get(), testing.attention(new_q, a)) <= 1e-6
    assert_same(a, b)


def test_a_full_cache_is_an_error_before_any_change() -> None:
    cache = cq.KVCache(2, 64, {8: 3, 4: 8}, device="cuda")
    k, v = map(put, tokens(1, 3, 2, 64))
    cache.append(k, v)
    with pytest.raises(
        ValueError, match="sequence 0 holds 3 tokens of the 3 that its 8-bit bucket has room for"
    ):
        cache.append(k[:, :1], v[:, :1])
    assert cache.lengths.tolist() == [3]
    cache.append(k, v, 4)
    cache.assign([0], 4)
    cache.append(k[:, :1], v[:, :1])
    assert cache.lengths.tolist() == [7]


def test_a_graph_past_capacity_writes_nothing_and_is_found_out() -> None:
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 6, 2, (4,), device="cuda")
    k, v = map(put, tokens(2, 2, 2, 64))
    q = put(tokens(2, 1, 8, 64)[0])
    cache.append(k, v, lengths=[2, 1])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cache.append(k, v)
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        assert cache.lengths.tolist() == [6, 5]
        before = [a.tobytes() for b in range(2) for a in cache.tiers[4].bucket(b).on_cpu()]
        cq.attention(q, cache)
        graph.launch(stream)
        stream.synchronize()
        assert cache.lengths.tolist() == [6, 5]
        assert [a.tobytes() for b in range(2) for a in cache.tiers[4].bucket(b).on_cpu()] == before
        with pytest.raises(
            ValueError, match=r"was refused and changed nothing: sequence [01] or one of its buckets"
        ):
            cq.attention(q, cache)
        cq.attention(q, cache)
        cache.trim(3)
        cache.append(k, v)
        assert cache.lengths.tolist() == [5, 5]


def test_a_width_on_the_gpu_that_the_cache_lacks_is_found_out() -> None:
    cache = cq.KVCache(2, 64, 6, 1, (8, 4), device="cuda")
    k, v = map(put, tokens(1, 2, 2, 64))
    cache.append(k, v, put(np.array([4, 5])))
    device.cupy().cuda.Device().synchronize()
    with pytest.raises(ValueError, match="or no such width"):
        cache.append(k, v)
    assert cache.lengths.tolist() == [0]


def test_launches_of_another_thread_do_not_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's launches read lengths more than once: on one stream none that changes them is between."""
    cache = cq.KVCache(2, 64, 64, bits=(8, 4), track_attention=True, device="cuda")
    appender: Any = cache._appender
    launch, seen = jit.launch_packed, []

    def launched(plan: Any, *arguments: Any) -> None:
        assert appender.lock.locked()
        seen.append(plan.kernel.entry)
        launch(plan, *arguments)

    monkeypatch.setattr(jit, "launch_packed", launched)
    k = device.cupy().asarray(np.ones((1, 3, 2, 64), np.float16))
    cache.append(k, k)
    cq.attention(k[:, :1], cache)
    cache.assign([0], 4)
    assert seen == ["append", "attention", "merge", "importance", "move", "move"]
    cleared = []
    monkeypatch.setattr(cache, "_refresh", lambda: cleared.append(appender.lock.locked()))
    cache.clear()
    assert cleared == [True]


def test_devices_do_not_mix() -> None:
    a, b = both(2, 64, 8)
    k, v = tokens(1, 2, 2, 64)
    with pytest.raises(TypeError, match="k is on cpu, the cache on cuda"):
        b.append(k, v)
    with pytest.raises(TypeError, match="v is on cuda, the cache on cpu"):
        a.append(k, put(v))
