"""Operands of caches on a GPU: lengths, ids, positions, what is captured, and what is refused later."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attending import normal
from test_gpu_kvcache import assert_same, both, put, tokens
from test_kvcache import state

import cuquant as cq
from cuquant import check, device, testing
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
F, H = np.float32, np.float16
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


@pytest.fixture(autouse=True)
def stream() -> Any:
    """One that can be captured."""
    made = device.cupy().cuda.Stream(non_blocking=True)
    synchronize()
    with made:
        yield made
        made.synchronize()


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
    cache.check_appended()


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
    assert cache.known_slots == cache.slots == 4
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
    assert (state(cache), cache.known_slots) == (before, 2)
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
    assert cache.known_slots == 2
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
            b.check_appended()
    assert state(b) == before
    for cache, place in ((a, np.asarray), (b, put)):
        cache.append(place(k), place(v))
    np.testing.assert_array_equal(a.key_scales, as_numpy(b.key_scales))
    assert_same(a, b)


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
