"""Captures of calls with caches: what would need memory of its own is refused, the rest is read each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caches_there import Call, assert_same, both, cache_of, graph_of, put, some, synchronize, tokens

import cuquant as cq
from cuquant import device, testing
from cuquant.testing import nmse

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_stream")]
F, H = np.float32, np.float16


def appended(**words: Any) -> Callable[[], Call]:
    def made() -> Call:
        cache, given = cache_of(1, 64), some()
        there = {name: put(value) if on_gpu else value for name, (value, on_gpu) in words.items()}
        return lambda: cache.append(*given, **there)

    return made


def gaps(which: int) -> Callable[[], Call]:
    """Keys or values of which every second channel is none."""

    def made() -> Call:
        cache, given = cache_of(1, 64), list(some())
        given[which] = device.cupy().zeros((2, 2, 2, 128), F)[..., ::2]
        return lambda: cache.append(*given)

    return made


def attended(spread: int = 1, positions: Any = None) -> Callable[[], Call]:
    def made() -> Call:
        cache, out = cache_of(), device.cupy().empty((2, 1, 8, 64), F)
        q = device.cupy().zeros((2, 1, 8, 64 * spread), F)[..., ::spread]
        there = positions() if callable(positions) else positions
        return lambda: cq.attention(q, cache, out=out, positions=there)

    return made


def first() -> Call:
    """Tokens of a sequence that is emptied each time."""
    cache, given = cache_of(1, key_scales="pairs"), some()

    def call() -> None:
        cache.append(*given)
        cache.clear(1)

    return call


IDS = np.arange(4).reshape(2, 2)
CAPTURED: dict[str, tuple[Callable[[], Call], str]] = {
    "keys with gaps": (gaps(0), "k has gaps along its last axis, and is copied"),
    "values with gaps": (gaps(1), "v has gaps along its last axis, and is copied"),
    "widths": (appended(bits=([8, 4], False)), "bits is an array, and its tokens' places"),
    "widths there": (appended(bits=(np.array([8, 4]), True)), "bits is an array"),
    "a list of ids": (
        appended(token_ids=([1, 2], False)),
        "token_ids is not on the GPU, and is",
    ),
    "ids of 64 bits": (
        appended(token_ids=(IDS, True)),
        r"token_ids is not contiguous int32 of shape \(2, 2\)",
    ),
    "ids of all sequences": (
        appended(token_ids=(IDS[0].astype(np.int32), True)),
        "token_ids is not contiguous int32",
    ),
    "a list of lengths": (appended(lengths=([1, 2], False)), "lengths is not on the GPU"),
    "short lengths": (appended(lengths=(np.array([1, 2], np.int16), True)), r"lengths is not .* \(2,\), and"),
    "key scales": (first, r"key scales are found from the first tokens .* refresh"),
    "queries with gaps": (attended(2), "q has gaps along its last axis"),
    "positions": (attended(positions=[[1], [1]]), "positions is not on the GPU"),
    "long positions": (
        attended(positions=lambda: put(np.ones((2, 1), np.int64))),
        r"positions is not contiguous int32 of shape \(2, 1\)",
    ),
    "positions with gaps": (
        attended(positions=lambda: device.cupy().ones((4, 1), np.int32)[::2]),
        "positions is not contiguous int32",
    ),
    "a cache": (
        lambda: cache_of,
        "a cache is made on the GPU, for which a CUDA graph has no memory: make it",
    ),
    "a copy": (
        lambda: (lambda here: lambda: here.to_device("cuda"))(cache_of().to_device("cpu")),
        "a cache is made on the GPU",
    ),
}


@pytest.mark.parametrize("what", CAPTURED)
def test_what_needs_memory_of_its_own_is_not_captured(what: str) -> None:
    made, message = CAPTURED[what]
    call = made()
    call()

    def refused() -> None:
        with pytest.raises(RuntimeError, match=message):
            call()

    graph_of(refused)
    call()


def test_what_a_graph_reads_each_time() -> None:
    """Lengths, ids and positions as kernels take them."""
    cupy = device.cupy()
    a, b = both(2, 64, 30, 2, (8, 4))
    k, v = tokens(2, 3, 2, 64)
    q = tokens(2, 2, 8, 64, seed=7)[0]
    there, asked, out = (put(k), put(v)), put(q), cupy.empty(q.shape, F)
    lengths, ids, positions = (cupy.zeros(s, np.int32) for s in ((2,), (2, 3), (2, 2)))
    for cache, place in ((a, np.asarray), (b, put)):
        cache.append(place(k), place(v))

    def step() -> None:
        b.append(*there, 4, token_ids=ids, lengths=lengths)
        cq.attention(asked, b, positions=positions, out=out)

    step()
    graph = graph_of(step)
    for turn in range(3):
        counts, names = np.array([turn, 3 - turn]), np.arange(6).reshape(2, 3) + 10 * turn
        ends = np.array([[2, 5], [turn, 9]])
        for array, values in ((lengths, counts), (ids, names), (positions, ends)):
            array.set(values.astype(np.int32))
        graph.launch(cupy.cuda.get_current_stream())
        a.append(k, v, 4, token_ids=names, lengths=counts)
        synchronize()
        assert nmse(out, testing.attention(q, a, positions=ends)) < 1e-6
    assert_same(a, b)
