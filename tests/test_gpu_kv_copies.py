"""Files and copies of caches on a GPU, which go their own ways."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches_there import OPTIONS, WIDTHS, assert_same, both, put, tokens

import cuquant as cq
from cuquant import device, testing
from cuquant.cuda.buffers import pointer

pytestmark = pytest.mark.gpu


def test_files_and_copies(tmp_path: Path) -> None:
    a, b = both(2, 64, 80, 2, WIDTHS, key_scales="pairs")
    k, v = tokens(2, 50, 2, 64)
    a.append(k, v, np.resize(WIDTHS, 50))
    b.append(put(k), put(v), np.resize(WIDTHS, 50))
    b.save(tmp_path / "b.safetensors")
    for made in (
        cq.KVCache.load(tmp_path / "b.safetensors"),
        cq.KVCache.load(tmp_path / "b.safetensors", "cuda"),
        b.to_device("cpu"),
        a.to_device("cuda"),
    ):
        assert_same(a, made)
        assert made.auto_scales == "pairs"
    assert b.to_device("cuda") is b
    made = a.to_device("cuda")
    more = tokens(2, 3, 2, 64, seed=5)
    a.append(*more)
    made.append(*map(put, more))
    assert_same(a, made)
    full = tokens(2, 28, 2, 64)
    for cache in (a.to_device("cuda"), b.copy()):
        with pytest.raises(ValueError, match=r"sequence 0 holds 5[03] tokens of the 80 that this cache has"):
            cache.append(*map(put, (np.concatenate([x, x], axis=1) for x in full)))


COPIES: dict[str, Callable[[cq.KVCache], cq.KVCache]] = {
    "method": cq.KVCache.copy,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    "options", [{}, *OPTIONS], ids=["plain", "pairs", "halves rotated", "given", "rotated"]
)
def test_a_copy_and_its_original_go_their_own_ways(options: dict[str, Any], how: str) -> None:
    """Bit for bit as caches on the CPU that were never one."""
    _, cache = both(3, 96, 60, 2, WIDTHS, track_attention=True, **options)
    k, v = map(put, tokens(2, 20, 3, 96))
    q = put(tokens(2, 2, 6, 96, seed=9)[0])
    cache.append(k, v, np.resize(WIDTHS, 20))
    cq.attention(q, cache)
    cache.evict([3])
    made = COPIES[how](cache)
    assert made.device == "cuda"
    assert_same(cache, made)
    before = cq.attention(q, cache.copy()).get()
    start = cache.to_device("cpu")
    for seed, each in enumerate((made, cache), 1):
        k, v = tokens(2, 3, 3, 96, seed=seed)
        expected = start.copy()
        assert_same(expected, each)
        for one, place in ((expected, np.asarray), (each, put)):
            one.append(place(k), place(v), 4)
            one.assign([5, 21], 3)
            one.evict([[0], [7]])
        assert_same(expected, each)
        y = cq.attention(q, each)
        assert testing.nmse(y.get(), testing.attention(q.get(), expected)) <= 1e-6
        assert (y.get() != before).any()


def test_a_copy_leaves_the_tokens_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cq.KVCache(2, 64, 80, 2, WIDTHS, key_scales="pairs", device="cuda")
    k, v = map(put, tokens(2, 50, 2, 64))
    cache.append(k, v, np.resize(WIDTHS, 50))
    as_numpy, sizes = device.as_numpy, []

    def seen(array: Any) -> Any:
        sizes.append(array.size)
        return as_numpy(array)

    monkeypatch.setattr(device, "as_numpy", seen)
    made = cache.copy()
    assert max(sizes) == cache.batch
    monkeypatch.undo()
    assert_same(cache, made)
    places = ({pointer(b) for t in c.tiers.values() for b in t.buffers if b.size} for c in (cache, made))
    ours, theirs = places
    assert not ours & theirs


def test_a_copy_of_what_a_graph_has_appended_to() -> None:
    """It knows the lengths, and an append that was refused is told before there is a copy."""
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 6, 1, (4,), device="cuda")
    k, v = map(put, tokens(1, 2, 2, 64))
    cache.append(k, v)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cache.append(k, v)
        for how in COPIES.values():
            with pytest.raises(RuntimeError, match="a cache cannot be copied while a CUDA graph is captured"):
                how(cache)
        graph = stream.end_capture()
        graph.launch(stream)
        made = cache.copy()
        assert made._known_slots == 4
        made.append(k, v)
        with pytest.raises(ValueError, match="sequence 0 holds 6 tokens of the 6"):
            made.append(k, v)
        assert (cache.lengths.tolist(), made.lengths.tolist()) == ([4], [6])
        assert cache._known_slots == 2
        graph.launch(stream)
        for how in COPIES.values():
            graph.launch(stream)
            with pytest.raises(ValueError, match="was refused and changed nothing"):
                how(cache)
            assert_same(how(cache), made)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_empty_cache_finds_its_own_key_scales(how: str) -> None:
    cache = cq.KVCache(2, 64, 8, key_scales="pairs", device="cuda")
    made = COPIES[how](cache)
    k, v = map(put, tokens(1, 4, 2, 64))
    made.append(k * 100, v)
    assert (cache._known_slots, made._known_slots) == (0, 4)
    assert (testing.as_numpy(cache.key_scales) == 1).all()
    assert (testing.as_numpy(made.key_scales) > 1).all()
