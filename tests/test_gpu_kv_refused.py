"""Appends to caches on a GPU that are refused after the call, or in a graph: who tells, and what stays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches_there import REFUSED, assert_same, both, cache_of, graph_of, put, some, synchronize, tokens
from test_kvcache import state

import cuquant as cq
from cuquant import device
from cuquant.testing import as_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_stream")]
F, H = np.float32, np.float16


def test_more_than_a_launch_has_blocks_for() -> None:
    with pytest.raises(ValueError, match="batch is 65536; allowed are 1 to 65535"):
        cache_of(0, batch=2**16)
    with pytest.raises(ValueError, match="batch is 65536; allowed are 1 to 65535"):
        cq.KVCache(1, 8, 1, 2**16, (2,)).to_device("cuda")
    cache = cache_of(1)
    q = device.cupy().zeros((2, 64, 2**10, 64), F)  # of float16 fewer blocks do
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"the result \(2, 64, 1024, 64\) takes 65536 blocks along an axis"
        ):
            cq.attention(q, cache)
    assert cq.attention(q[:, :, :2], cache).shape == (2, 64, 2, 64)


LENGTHS = [
    np.array([1, 3], np.int32),
    np.array([-1, 2], np.int32),
    np.array([0, -128], np.int8),
    np.array([1, 2**32 + 1]),
    np.array([-(2**32) + 1, 1]),
    np.array([2**32 - 1, 0], np.uint32),
    np.array([2**63, 0], np.uint64),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("bits", [4, [8, 4]])
def test_lengths_that_are_not_of_the_tokens_given(bits: Any, lengths: Any) -> None:
    cache = cache_of()
    before = state(cache)
    cache.append(*some(), bits, lengths=put(lengths))
    synchronize()
    assert state(cache) == before
    with pytest.raises(ValueError, match=REFUSED + ".*or its length was below 0 or above the tokens given"):
        cache.append(*some())
    assert state(cache) == before
    cache.append(*some(), bits, lengths=put(np.array([2, 0])))
    assert cache.lengths.tolist() == [4, 2]
    cache._check_appended()


def test_what_was_counted_of_a_refused_append() -> None:
    cache = cache_of(capacity=6)
    given = some(1)
    graph = graph_of(lambda: cache.append(*given))
    for _ in range(2):
        graph.launch(device.cupy().cuda.get_current_stream())
    cache.append(*some(3))  # of what it holds the host has seen 2
    synchronize()
    with pytest.raises(ValueError, match=REFUSED):
        cache.append(*given)
    assert cache._known_slots == cache.slots == 4
    cache.append(*some(2))
    assert cache.lengths.tolist() == [6, 6]


def test_a_mask_has_no_columns_of_refused_tokens() -> None:
    cache = cache_of()
    cache.append(*some(), put(np.array([8, 5])))
    q = put(tokens(2, 1, 8, 64)[0])
    mask = device.cupy().ones(cache.slots, bool)
    with pytest.raises(ValueError, match=REFUSED + ".*or no such width"):
        cq.attention(q, cache, mask=mask)
    cq.attention(q, cache, mask=mask)


SEES: dict[str, Callable[[cq.KVCache, Path], Any]] = {
    "save": lambda cache, path: cache.save(path),
    "pickle": lambda cache, path: pickle.dumps(cache),
    "to_device": lambda cache, path: cache.to_device("cpu"),
    "copy": lambda cache, path: cache.copy(),
    "attention": lambda cache, path: cq.attention(put(tokens(2, 1, 8, 64)[0]), cache),
    "no tokens": lambda cache, path: cache.append(*some(0)),
}


@pytest.mark.parametrize("how", SEES)
def test_who_tells_of_a_refused_append(how: str, tmp_path: Path) -> None:
    cache = cache_of()
    before, path = state(cache), tmp_path / "cache.safetensors"
    cache.append(*some(), put(np.array([8, 2])))
    synchronize()
    with pytest.raises(ValueError, match=REFUSED):
        SEES[how](cache, path)
    assert not path.exists()
    assert (state(cache), cache._known_slots) == (before, 2)
    SEES[how](cache, path)


def test_a_refusal_during_a_capture_is_told_until_counts_can_be_read() -> None:
    cache = cache_of()
    cache.append(*some(), put(np.array([8, 2])))
    synchronize()
    given = some()

    def append() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match=REFUSED):
                cache.append(*given)

    graph_of(append)
    with pytest.raises(ValueError, match=REFUSED):
        cache.append(*given)
    assert cache._known_slots == 2
    cache.append(*given)
    assert cache.lengths.tolist() == [4, 4]


REFUSALS: dict[str, dict[str, Any]] = {
    "length": {"lengths": np.array([3, 5])},
    "room": {"n": 9, "lengths": np.array([9, 2])},
    "bucket": {"n": 8, "bits": np.full(8, 4)},
    "width": {"bits": np.array([4, 8, 2])},
}


@pytest.mark.parametrize("how", [*REFUSALS, "at once"])
def test_key_scales_are_not_of_refused_tokens(how: str) -> None:
    """Of sequences that have none yet; then tokens that are taken find theirs."""
    a, b = both(2, 64, {8: 8, 4: 6}, 2, key_scales="pairs")
    k, v = tokens(2, 3, 2, 64)
    for cache, place in ((a, np.asarray), (b, put)):
        cache.append(place(k * 50), place(v), lengths=[0, 1])
    before = state(b)
    given = REFUSALS.get(how, {}).copy()
    big = [put(x * 1000) for x in tokens(2, given.pop("n", 15 if how == "at once" else 3), 2, 64)]
    words = {name: put(value) for name, value in given.items()}
    if how == "at once":
        with pytest.raises(ValueError, match="more do not fit"):
            b.append(*big)
    else:
        b.append(*big, **words)
        synchronize()
        assert state(b) == before
        with pytest.raises(ValueError, match=REFUSED):
            b._check_appended()
    assert state(b) == before
    for cache, place in ((a, np.asarray), (b, put)):
        cache.append(place(k), place(v))
    np.testing.assert_array_equal(a.key_scales, as_numpy(b.key_scales))
    assert_same(a, b)
