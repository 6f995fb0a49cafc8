"""A cache on a GPU: the CPU's bits, graphs that let it grow, and what happens when it is full."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, testing
from cuquant.cuda import jit
from cuquant.cuda.buffers import pointer

pytestmark = pytest.mark.gpu
F = np.float32
WIDTHS = (16, 8, 4, 3, 2)
Tokens = NDArray[np.float32]


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


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 256])
def test_append_gives_the_cpu_s_bits(bits: int, dim: int) -> None:
    a, b = both(3, dim, 40, 2, WIDTHS)
    k, v = tokens(2, 30, 3, dim)
    k[0, :10] *= np.logspace(-44, 4.5, 10)[:, None, None].astype(F)
    v[1, 3] = np.rint(v[1, 3])  # extremes that are there twice, of either sign
    v[1, 4], v[0, 5], k[1, 6, 1] = 0, -v[0, 5], 1
    a.append(k, v, bits)
    b.append(put(k), put(v), bits)
    assert_same(a, b)


@pytest.mark.parametrize("heads", [1, 2, 5, 32])
@pytest.mark.parametrize("dim", [8, 32, 128])
def test_vectors_that_share_a_warp(heads: int, dim: int) -> None:
    """Tokens of all widths, one and many at a time."""
    a, b = both(heads, dim, 80, 2, WIDTHS, rotate=dim % 32 == 0)
    for n in (1, 37, 1, 2):
        k, v = tokens(2, n, heads, dim, seed=n)
        bits = np.random.default_rng(n).choice(WIDTHS, (2, n))
        a.append(k, v, bits)
        b.append(put(k), put(v), bits)
    assert_same(a, b)


@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (32, 128), (40, 96), (32, 64), (200, 256)])
def test_one_token_of_many_heads(heads: int, dim: int) -> None:
    """Where a GPU has clusters, blocks of one share it; nothing is written where it does not fit."""
    a, b = both(heads, dim, 6, 1, WIDTHS)
    for step, bits in enumerate((*WIDTHS, 8)):
        k, v = tokens(1, 1, heads, dim, seed=step)
        a.append(k, v, bits)
        b.append(put(k), put(v), bits)
    assert_same(a, b)
    taken = cq.KVCache(heads, dim, 6, 1, (4,), device="cuda")
    lengths = put(np.ones(1, np.int32))  # there, so that the host does not know
    for _ in range(7):
        taken.append(put(k), put(v), lengths=lengths)
        device.cupy().cuda.get_current_stream().synchronize()
        if taken._appender._refused[0]:
            break
    assert taken.lengths.tolist() == [6]
    with pytest.raises(ValueError, match="was refused and changed nothing: sequence 0"):
        taken.append(put(k), put(v))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 65519.0, 65520.0, 1e-45])
@pytest.mark.parametrize("bits", WIDTHS)
def test_extremes_too(bits: int, bad: float) -> None:
    a, b = both(2, 64, 8, 1, WIDTHS)
    k, v = tokens(1, 4, 2, 64)
    k[0, 1, 0, 5], v[0, 2, 1, 63] = bad, -bad
    v[0, 3] = 0
    v[0, 3, 0, 7] = bad
    a.append(k, v, bits)
    b.append(put(k), put(v), bits)
    assert_same(a, b, nan=True)


@pytest.mark.parametrize("bits", WIDTHS[1:])
def test_numbers_halfway_between_codes(bits: int) -> None:
    """And up to three float32 numbers beside that, where a quotient is rounded to a tie, or is near one."""
    a, b = both(1, 256, 512, 1, (bits,))
    rng = np.random.default_rng(bits)
    steps = rng.integers(1, 0x7BFF, 512).astype(np.uint16).view(np.float16).astype(F)
    steps[:16] = 2.0 ** -np.arange(9, 25)
    steps *= rng.choice([-1, 1], 512).astype(F)
    least = -(1 << (bits - 1))
    halfway = (rng.integers(least, -1 - least, (512, 256)) + 0.5).astype(F)
    x = ((halfway * steps[:, None]).view(np.int32) + rng.integers(-3, 4, halfway.shape, np.int32)).view(F)
    x[:, 7] = least * steps
    a.append(x[None, :, None], -x[None, :, None])
    b.append(put(x[None, :, None]), put(-x[None, :, None]))
    assert_same(a, b)


OPTIONS: list[dict[str, Any]] = [
    {"key_scales": "pairs"},
    {"key_scales": "halves", "rotate": True},
    {"key_scales": np.linspace(0.3, 3, 2 * 3 * 96, dtype=F).reshape(2, 3, 96)},
    {"rotate": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["pairs", "halves rotated", "given", "rotated"])
def test_scaled_and_rotated_keys(options: dict[str, Any]) -> None:
    a, b = both(3, 96, 60, 2, WIDTHS, **options)
    for step, n in enumerate((20, 1, 5)):
        k, v = tokens(2, n, 3, 96, seed=step)
        k[..., 4:6] *= 60
        lengths = [n, 0] if step == 0 else None
        a.append(k, v, np.resize(WIDTHS, n), lengths=lengths)
        b.append(put(k), put(v), np.resize(WIDTHS, n), lengths=lengths)
    np.testing.assert_array_equal(a.key_scales, testing.as_numpy(b.key_scales))
    assert_same(a, b)


def test_buffers_are_freed_with_the_last_reference() -> None:
    """At once: a cache is large, and garbage that refers to itself is collected at any time later."""
    a, b = both(2, 64, 8, 1, WIDTHS)
    k, v = tokens(1, 4, 2, 64)
    a.append(k, v)
    b.append(put(k), put(v))
    left = weakref.ref(a), weakref.ref(b)
    del a, b
    assert [cache() for cache in left] == [None, None]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, F])
def test_any_floats_and_strides(dtype: Any) -> None:
    cupy = device.cupy()
    k, v = (x.astype(dtype) for x in tokens(2, 5, 2, 64))
    a, b = both(2, 64, 8, 2, (4,))
    a.append(k, v)
    wide = cupy.zeros((2, 5, 2, 128), dtype)
    wide[..., ::2] = put(k)
    b.append(wide[..., ::2], cupy.asfortranarray(put(v)))
    assert_same(a, b)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_widths_ids_and_lengths_of_every_token(on_gpu: bool) -> None:
    a, b = both(2, 64, {16: 9, 8: 30, 4: 30, 2: 30}, 3)
    rng = np.random.default_rng(0)
    for step in range(4):
        k, v = tokens(3, 7, 2, 64, seed=step)
        bits, ids = rng.choice([8, 4, 2], (3, 7)), rng.integers(0, 1000, (3, 7))
        lengths = rng.integers(0, 8, 3)
        unused = np.arange(7) >= lengths[:, None]
        bits[unused] = ids[unused] = -1
        a.append(k, v, bits, token_ids=ids, lengths=lengths)
        given = [put(x) if on_gpu else x for x in (bits, ids, lengths)]
        b.append(put(k), put(v), given[0], token_ids=given[1], lengths=given[2])
    assert_same(a, b)


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
    launch, seen = jit.launch_packed, []

    def launched(plan: Any, *arguments: Any) -> None:
        assert cache._appender.lock.locked()
        seen.append(plan.kernel.entry)
        launch(plan, *arguments)

    monkeypatch.setattr(jit, "launch_packed", launched)
    k = device.cupy().asarray(np.ones((1, 3, 2, 64), np.float16))
    cache.append(k, k)
    cq.attention(k[:, :1], cache)
    cache.assign([0], 4)
    assert seen == ["append", "attention", "merge", "importance", "move", "move"]
    cleared = []
    monkeypatch.setattr(cache, "_refresh", lambda: cleared.append(cache._appender.lock.locked()))
    cache.clear()
    assert cleared == [True]


def test_devices_do_not_mix() -> None:
    a, b = both(2, 64, 8)
    k, v = tokens(1, 2, 2, 64)
    with pytest.raises(TypeError, match="k is on cpu, the cache on cuda"):
        b.append(k, v)
    with pytest.raises(TypeError, match="v is on cuda, the cache on cpu"):
        a.append(k, put(v))


def test_a_long_prompt_in_one_call() -> None:
    a, b = both(4, 128, 3000, 2, WIDTHS)
    k, v = tokens(2, 2500, 4, 128)
    bits = np.random.default_rng(0).choice(WIDTHS, (2, 2500))
    a.append(k, v, bits)
    b.append(put(k), put(v), bits)
    assert_same(a, b)
