"""Copies and pickles of a cache: equal, and independent from then on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from test_kvcache import WIDTHS, F, filled, state, tokens

import cuquant as cq
from cuquant import device
from cuquant.kv import file

COPIES: dict[str, Callable[[cq.KVCache], cq.KVCache]] = {
    "method": cq.KVCache.copy,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}
ATTRIBUTES = (
    *("n_kv_heads", "head_dim", "batch", "bits", "capacity", "auto_scales", "rotate", "track_attention"),
    *("device", "slots", "_known_slots", "average_bits", "nbytes", "used_nbytes"),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "one sequence": {"batch": 1},
    "batch": {"batch": 3},
    "rooms": {"capacity": {16: 20, 8: 20, 4: 64, 3: 30, 2: 64}},
    "pairs": {"key_scales": "pairs"},
    "given scales": {"key_scales": np.linspace(0.3, 3, 2 * 2 * 16, dtype=F).reshape(2, 2, 16)},
    "tracked": {"track_attention": True},
    **{f"{bits} bits": {"bits": bits} for bits in WIDTHS},
}


def queries(cache: cq.KVCache) -> Any:
    return np.random.default_rng(7).standard_normal((cache.batch, 2, 4, cache.head_dim), F)


def use(cache: cq.KVCache) -> None:
    """Change everything that a cache holds."""
    heads, dim = cache.n_kv_heads, cache.head_dim
    cache.append(*tokens(cache.batch, 3, heads, dim, seed=3), cache.bits[-1])
    cache.assign([4, 6], cache.bits[0])
    cq.attention(queries(cache), cache)
    cache.allocate(4.0, recent=2)
    cache.evict([1])


def rotated() -> cq.KVCache:
    cache = cq.KVCache(2, 32, 64, 2, key_scales="halves", rotate=True, track_attention=True)
    cache.append(*tokens(2, 20, 2, 32), np.resize(cache.bits, 20))
    return cache


MADE: dict[str, Callable[[], cq.KVCache]] = {
    "rotated": rotated,
    **{name: partial(filled, **options) for name, options in OPTIONS.items()},
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MADE)
def test_what_happens_to_a_copy_leaves_the_original_alone(name: str, how: str) -> None:
    cache = MADE[name]()
    cq.attention(queries(cache), cache)
    cache.evict([3])
    made = COPIES[how](cache)
    assert state(made) == state(cache)
    assert [getattr(made, a) for a in ATTRIBUTES] == [getattr(cache, a) for a in ATTRIBUTES]
    for ours, theirs in zip(cache.tiers.values(), made.tiers.values(), strict=True):
        assert not any(map(np.shares_memory, ours.buffers, theirs.buffers))
    twin = MADE[name]()  # what the original would be without a copy
    cq.attention(queries(twin), twin)
    twin.evict([3])
    use(made)
    assert state(cache) == state(twin) != state(made)
    assert np.array_equal(cq.attention(queries(cache), cache), cq.attention(queries(twin), twin))
    assert state(cache) == state(twin)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", MADE)
def test_a_copy_goes_on_as_the_original_does(name: str, how: str) -> None:
    cache = MADE[name]()
    cq.attention(queries(cache), cache)
    made = COPIES[how](cache)
    for each in (made, cache):
        use(each)
    assert state(made) == state(cache)
    assert np.array_equal(cq.attention(queries(made), made), cq.attention(queries(cache), cache))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_an_empty_cache_finds_its_own_key_scales(how: str) -> None:
    cache = cq.KVCache(2, 16, 8, key_scales="pairs")
    made = COPIES[how](cache)
    k, v = tokens(1, 4, 2, 16)
    made.append(k * 100, v)
    assert (cache.slots, made.slots) == (0, 4)
    assert (cache.key_scales == 1).all()
    assert (made.key_scales > 1).all()


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_of_the_same_class(how: str) -> None:
    cache = Named(2, 16, 8)
    assert type(COPIES[how](cache)) is Named


class Named(cq.KVCache):
    """Of this module, so that pickles find it."""


def test_a_cache_that_is_there_twice_is_copied_once() -> None:
    cache = filled()
    a, b = copy.deepcopy([cache, cache])
    assert a is b is not cache


def test_a_pickle_holds_tokens_and_not_buffers() -> None:
    cache = filled(6, capacity=4096)
    assert len(pickle.dumps(cache)) < 5 * cache.used_nbytes < cache.nbytes / 10


def test_a_pickle_of_another_version() -> None:
    settings, arrays = file.state(filled())
    with pytest.raises(ValueError, match="the cache's version is 2; this is version 1"):
        file.restored(cq.KVCache, (settings | {"version": 2}, arrays), "cpu")


def test_a_pickle_from_a_gpu_where_there_is_none() -> None:
    if device.gpu_problem() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="no CUDA device can be used: CuPy"):
        file.restored(cq.KVCache, file.state(filled()), "cuda")


def test_tiers_and_caches_show_what_they_hold() -> None:
    cache = cq.KVCache(2, 64, {16: 4, 4: 1000}, 3)
    cache.append(*tokens(3, 5, 2, 64), [16, 16, 4, 4, 4], lengths=[5, 5, 4])
    assert repr(cache.tiers) == (
        "{16: Tier(bits=16, batch=3, room=4, tokens=6), 4: Tier(bits=4, batch=3, room=1000, tokens=8)}"
    )
    page = cache._repr_html_()
    facts = {
        "key heads": "2 of 64 channels",
        "sequences": "3",
        "room of a sequence": "4 of 16 bits, 1,000 of 4 bits",
        "fullest buckets": "2 of 16 bits, 3 of 4 bits",
        "longest sequence": "5 tokens",
        "bytes": f"{cache.nbytes:,}",
        "device": "cpu",
    }
    for name, fact in facts.items():
        assert f"<th>{name}</th><td>{fact}</td>" in page
    assert not any(name in page for name in ("key scales", "rotated", "attention"))
    page = rotated().copy()._repr_html_()
    assert "<th>room of a sequence</th><td>64 tokens (8, 4, 3, 2 bits)</td>" in page
    assert "<th>key scales</th><td>&#x27;halves&#x27;</td>" in page
    assert "<th>rotated</th><td>keys and queries</td>" in page
    assert "<th>attention</th><td>tracked</td>" in page
    one = cq.KVCache(2, 64, {16: 4, 4: 1000})
    one.append(*tokens(1, 5, 2, 64), [16, 16, 4, 4, 4])
    assert "<th>tokens</th><td>2 of 16 bits, 3 of 4 bits</td>" in one._repr_html_()
