"""Operands of caches on a GPU: lengths, ids, positions, scales of scores, other GPUs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attending import normal
from caches_there import Call, assert_same, both, cache_of, put, some, tokens
from test_kvcache import state

import cuquant as cq
from cuquant import check, device, testing
from cuquant.testing import as_numpy, nmse

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_stream")]
F, H = np.float32, np.float16


@pytest.mark.parametrize("options", [{"rotate": True}, {"key_scales": True}], ids=str)
def test_an_offset_counts_the_queries_that_products_take(options: dict[str, Any]) -> None:
    """All channels are rounded the same way: by up to 2^-12 of them, and their sum too."""
    q, k = np.ones((1, 1, 8, 64), H), normal(1, 40, 2, 64)
    if "rotate" in options:
        q[..., np.arange(64) % 32 > 0] = 0
        q *= H(8 * (1 + 20 / 1024))
        k[..., ::32] = 0
    else:
        options = {"key_scales": np.full((2, 64), 1 + 0.45 * 2**-10, F)}
        k -= k.mean(axis=-1, keepdims=True)
    cache = cq.KVCache(2, 64, 40, bits=(16, 3), **options)
    cache.append(k, normal(1, 40, 2, 64, seed=1), 3)
    there = cache.to_device("cuda")
    y = cq.attention(put(q), there, out=device.cupy().empty(q.shape, F))
    assert nmse(y, testing.attention(q, cache)) < 1e-6


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 2)])
def test_lengths_are_of_each_sequence(shape: tuple[int, ...]) -> None:
    cache = cache_of()
    before = state(cache)
    for n in (2, 0):
        with pytest.raises(ValueError, match=r"lengths has shape .*; one for each of 2 sequences is needed"):
            cache.append(*some(n), lengths=put(np.ones(shape, np.int32)))
    assert state(cache) == before


POSITIONS = [
    np.array([[3, 9], [-1, 2**31]]),
    np.array([[2**32 + 1, -(2**32) + 9], [2**40, 0]]),
    np.array([[2**32 - 1, 2**31], [2**31 - 1, 5]], np.uint32),
    np.array([[2**64 - 1, 2**32], [7, 2**63]], np.uint64),
    np.array([[-5, 100], [0, 7]], np.int8),
]


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_positions_beyond_int32(positions: Any) -> None:
    a, b = both(2, 64, 20, 2, (8, 4))
    k, v = tokens(2, 12, 2, 64)
    a.append(k, v)
    b.append(put(k), put(v))
    q = tokens(2, 2, 8, 64)[0]
    expected = cq.attention(q, a, positions=positions)
    for given in (positions, put(positions)):
        y = cq.attention(put(q), b, positions=given)
        assert nmse(y, expected) < 1e-6
        assert (as_numpy(y) == 0).all(axis=(2, 3)).tolist() == (expected == 0).all(axis=(2, 3)).tolist()


NAMES = [
    np.array([7, 2**31]),
    np.array([7, 2**32 + 7]),
    np.array([-1, 7], np.int32),
    np.array([-(2**40), 7]),
    np.array([2**31, 7], np.uint32),
    np.array([7, 2**64 - 1], np.uint64),
]


@pytest.mark.parametrize("ids", NAMES, ids=str)
def test_ids_that_no_file_may_have(ids: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache = cache_of(0, batch=1)
    cache.append(*some(batch=1), token_ids=put(ids))
    held = cache.tokens().token_ids
    bad = int(held.min())
    assert sorted(held) == [bad, 7]
    saves: list[Call] = [
        lambda: cache.save(path),
        lambda: pickle.dumps(cache),
        lambda: cache.to_device("cpu").save(path),
    ]
    for save in saves:
        with pytest.raises(ValueError, match=rf"sequence 0 has the token id {bad}, .*evict\(\[{bad}\]\)"):
            save()
        assert not path.exists()
    assert cache.evict([bad]) == 1
    cache.save(path)
    assert_same(cache, cq.KVCache.load(path))


def test_a_row_s_minus_one_names_no_token() -> None:
    cache = cache_of(0)
    cache.append(*some(), token_ids=put(np.array([[-5, 3], [4, -1]])))
    assert cache.assign([[-1, 3], [-1, -1]], 4) == 1
    assert cache.evict([[3, -1], [-1, 4]]) == 2
    assert cache.evict([-1]) == 2


def test_no_tokens_are_checked_as_others_are() -> None:
    a, b = both(2, 64, 8, 2, (8, 4), key_scales="pairs")
    before = state(b)
    empty = np.zeros((2, 0, 2, 64), F)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "bits is 3; this cache has 8, 4", {"bits": 3}),
        (TypeError, "bits has dtype float64", {"bits": 8.0}),
        (ValueError, "bits has shape", {"bits": np.array([8, 4])}),
        (ValueError, "token_ids has shape", {"token_ids": np.array([1, 2])}),
        (ValueError, "lengths are", {"lengths": [1, 0]}),
    ]
    for cache, place in ((a, np.asarray), (b, put)):
        for error, message, words in bad:
            with pytest.raises(error, match=message):
                cache.append(place(empty), place(empty), **words)
        cache.append(place(empty), place(empty))
        cache.append(place(empty), place(empty), 4, token_ids=[], lengths=[0, 0])
    for words in ({"bits": np.array([8, 4])}, {"token_ids": np.array([1, 2])}, {"lengths": np.array([0])}):
        with pytest.raises(ValueError, match="has shape"):
            b.append(put(empty), put(empty), **{name: put(value) for name, value in words.items()})
    assert state(b) == before


def test_the_largest_scale() -> None:
    """Times log2(e) it is still a number. Queries are near the smallest that are normal: the GPU's are."""
    cache, q = cache_of(), np.sign(normal(2, 1, 8, 64)) * F(2**-124)
    for scale in (2.1e38, -3e38, float("inf")):
        with pytest.raises(ValueError, match=r"scale is .*; a finite number, up to 2e\+38, is needed"):
            cq.attention(put(q), cache, scale)
    with pytest.raises(ValueError, match=r"scale is -1e-38; 0, or a magnitude from 1\.17549e-38 on"):
        cq.attention(put(q), cache, -1e-38)
    assert nmse(cq.attention(put(q), cache, 2e38), cq.attention(q, cache.to_device("cpu"), 2e38)) < 1e-6


def test_arrays_of_another_gpu_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = device.cupy()
    cache, given, q = cache_of(), some(), cupy.zeros((2, 1, 8, 64), F)
    out, numbers, before = cupy.empty_like(q), cupy.zeros((2, 2), np.int32), state(cache)
    calls: dict[str, Call] = {
        "k on GPU 0, v on GPU 0, cache on GPU 0": lambda: cache.append(*given),
        "q on GPU 0, out on GPU 0, cache on GPU 0": lambda: cq.attention(q, cache, out=out),
        "ids on GPU 0": lambda: check.on_gpu_integers(numbers, "ids", (2, 2)),
    }
    with monkeypatch.context() as patched:
        patched.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
        for where, call in calls.items():
            with pytest.raises(ValueError, match=f"{where}; the current device is GPU 1"):
                call()
    assert state(cache) == before


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_mask_between_multiples_of_its_size_is_refused(dtype: Any) -> None:
    """Numbers of it, and strides."""
    cupy, cache, size = device.cupy(), cache_of(), np.dtype(dtype).itemsize
    cache.append(*some())
    q, raw = some(1)[0], cupy.zeros((2, 8 * size + 1), np.uint8)
    for odd in (raw[0, 1:].view(dtype), raw[:, :-1].view(dtype)[:, None, None]):
        with pytest.raises(ValueError, match=f"mask has numbers of {size} bytes that start between"):
            cq.attention(q, cache, mask=odd)


APART: dict[str, Callable[[cq.KVCache, Callable[..., Any]], Any]] = {
    "k": lambda cache, there: cache.append(there((2, 2, 2, 64), F), some()[1]),
    "v": lambda cache, there: cache.append(some()[0], there((2, 2, 2, 64), F)),
    "bits": lambda cache, there: cache.append(*some(), there((2, 2), np.int32)),
    "token_ids": lambda cache, there: cache.append(*some(), token_ids=there((2, 2), np.int32)),
    "lengths": lambda cache, there: cache.append(*some(), lengths=there((2,), np.int32)),
    "q": lambda cache, there: cq.attention(there((2, 1, 8, 64), F), cache),
    "mask": lambda cache, there: cq.attention(some(1)[0], cache, mask=there((8,), bool)),
    "positions": lambda cache, there: cq.attention(some(1)[0], cache, positions=there((2, 1), np.int32)),
    "out": lambda cache, there: cq.attention(some(1)[0], cache, out=there((2, 1, 2, 64), F)),
}


@pytest.mark.parametrize("what", APART)
def test_each_operand_of_another_gpu(what: str) -> None:
    cupy = device.cupy()
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")

    def there(shape: tuple[int, ...], dtype: Any) -> Any:
        with cupy.cuda.Device(1):
            return cupy.zeros(shape, dtype)

    cache = cache_of()
    before = state(cache)
    with pytest.raises(ValueError, match=f"{what} on GPU 1"):
        APART[what](cache, there)
    assert state(cache) == before
