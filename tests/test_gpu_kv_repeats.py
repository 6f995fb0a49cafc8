"""Decode steps like ones before take a shorter way on the host: what may change is asked each time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches_there import assert_same, both, put, tokens
from repeated import counting, odd, there

import cuquant as cq
from cuquant import device, testing
from cuquant.check import common
from cuquant.cuda import jit
from cuquant.kv import appender, cuda
from cuquant.kv.appender import Appender
from cuquant.kv.tiers import Tier
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
F, H, B = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often tokens of each sequence were counted for an append."""
    return counting(monkeypatch, "_bits", owners=[appender])


def attends(q: Any, cache: cq.KVCache, **options: Any) -> None:
    y = cq.attention(q, cache, **options)
    plain: Any = {name: as_numpy(a) for name, a in options.items() if name != "out"}
    bound = testing.BOUNDS[B][0] if B in (q.dtype, y.dtype) else 1e-6
    assert nmse(y, testing.attention(as_numpy(q), cache, **plain)) <= bound


@pytest.mark.parametrize("options", [{}, {"key_scales": "pairs"}, {"rotate": True}], ids=str)
def test_one_token_after_the_other(checked: list[int], options: Any) -> None:
    """Widths in turn, and calls that say more between them; then anew, of a cache that was cleared."""
    a, b = both(2, 64, 80, 2, (8, 4, 2), **options)
    for turn in range(2):
        for step in range(24):
            k, v = (x.astype((F, H, B)[step % 3]) for x in tokens(2, 1 + step % 2, 2, 64, seed=step))
            words: dict[str, Any] = [{}, {"bits": 4}, {"bits": 2}][step // 2 % 3]
            if step in (10, 11):
                words = {"token_ids": [1000]} if step == 10 else {"lengths": [1, 0]}
            a.append(k, v, **words)
            b.append(put(k), put(v), **words)
        assert_same(a, b)
        np.testing.assert_array_equal(as_numpy(a.key_scales), as_numpy(b.key_scales))
        # The first tokens tell automatic key scales.
        assert checked == [(turn + 1) * (2 + ("key_scales" in options))]
        assert b._known_slots == a.slots == b.slots
        attends(there((2, 1, 8, 64)), b)
        a.clear()
        b.clear()


@pytest.mark.parametrize("first", ["bucket", "cache", "own", "both"])
def test_the_token_that_does_not_fit(checked: list[int], first: str) -> None:
    """Of a bucket, of the cache, or of one sequence: the CPU's error, before any change."""
    rooms: Any = {"bucket": {8: 5, 4: 9}, "cache": 7, "own": {8: 7, 4: 9}, "both": 7}[first]
    a, b = both(2, 64, rooms, 2, (8, 4))
    k, v = tokens(2, 1, 2, 64)
    operands: Any = ((a, (k, v)), (b, (put(k), put(v))))
    unlike = first in ("own", "both")
    if unlike:
        for cache, given in operands:
            cache.append(*given, 4 if first == "both" else 8, lengths=[1, 0])
    failed = 0
    for step in range(12):
        bits = 4 if first == "cache" and step % 2 else 8
        errors = []
        for cache, given in operands:
            try:
                cache.append(*given, bits)
            except ValueError as error:
                errors.append(str(error))
        assert errors in ([], errors[:1] * 2)
        failed += bool(errors)
        assert_same(a, b)
    assert failed == {"bucket": 7, "cache": 5, "own": 6, "both": 6}[first]
    assert checked[0] == failed + unlike
    for cache in (a, b):  # there is room again, and then there is not
        assert cache.trim(4) > 0
    a.append(k, v)
    b.append(put(k), put(v))
    assert_same(a, b)
    assert checked[0] == failed + unlike


def test_slots_end_with_int32(checked: list[int]) -> None:
    cache = cq.KVCache(2, 64, 8, device="cuda")
    k, v = map(put, tokens(1, 1, 2, 64))
    cache.next_slots[:] = np.iinfo(np.int32).max - 1
    cache._refresh()
    cache.append(k, v)  # the last
    assert cache.slots == np.iinfo(np.int32).max
    with pytest.raises(ValueError, match="slot 2147483648 is beyond int32"):
        cache.append(k, v)
    assert checked == [1]


@pytest.mark.parametrize("rows", ["together", "apart"])
def test_other_keys_and_values(rows: str) -> None:
    """Dtypes and strides of either one in turn."""
    cupy = device.cupy()
    a, b = both(2, 64, 80, 2, (8,))
    for step in range(16):
        k, v = tokens(2, 2, 2, 64, seed=step)
        k, v = k.astype((F, H)[step % 2]), v.astype((F, H, B)[step % 3])
        a.append(k, v)
        given = []
        for x, spread in ((k, step // 2 % 2), (v, step // 4 % 2)):
            wide = cupy.zeros((2, 2, 4, 128), x.dtype)
            there = wide[..., ::2, 64 * spread : 64 * spread + 64] if spread else cupy.empty(x.shape, x.dtype)
            there = wide[:, :, :2, ::2] if spread and rows == "apart" else there
            there[...] = put(x)
            given.append(there)
        b.append(*given)
    assert_same(a, b)


def test_what_a_graph_appends_is_not_counted_twice(checked: list[int]) -> None:
    """Nor is what is captured, which does not run: the host knows what it has told."""
    cupy = device.cupy()
    a, b = both(2, 64, 8, 1, (8,))
    k, v = tokens(1, 1, 2, 64)
    there = put(k), put(v)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        a.append(k, v)
        b.append(*there)
        stream.begin_capture()
        b.append(*there)
        graph = stream.end_capture()
        assert b._known_slots == 1
        for _ in range(3):
            a.append(k, v)
            graph.launch(stream)
        stream.synchronize()
        for _ in range(4):
            a.append(k, v)
            b.append(*there)
        stream.synchronize()
        assert_same(a, b)
        assert (b._known_slots, b.slots) == (5, 8)
        b.append(*there)  # the host does not know that it is full
        stream.synchronize()
        assert_same(a, b)
        with pytest.raises(ValueError, match="was refused and changed nothing"):
            b.append(*there)
    assert checked == [0]


@pytest.mark.parametrize("what", ["tier", "buffers", "lengths", "_next_slots", "key_scales"])
def test_memory_that_was_replaced(what: str) -> None:
    """Of a cache that has been used: append and attention find the new, and leave the old."""
    a, b = both(2, 64, 40, 2, (8, 4), key_scales=np.linspace(0.5, 2, 128, dtype=F).reshape(2, 64))
    q = there((2, 1, 8, 64))

    def step(seed: int) -> None:
        k, v = tokens(2, 1, 2, 64, seed=seed)
        a.append(k, v)
        b.append(put(k), put(v))
        attends(q, b)

    for seed in range(2):
        step(seed)
    tier = b.tiers[8]
    old: Any
    if what == "tier":
        old = (*tier.buffers, tier.lengths)
        made = b.tiers[8] = Tier(8, 2, 40, 2, 64, "cuda")
        for array, before in zip((*made.buffers, made.lengths), old, strict=True):
            array[...] = before
    elif what == "buffers":
        old = tier.buffers
        tier.buffers = type(old)(*(array.copy() for array in old))
    else:
        owner: Any = tier if what == "lengths" else b
        old = (getattr(owner, what),)
        setattr(owner, what, old[0].copy())
    for array in old:
        array.view(np.uint8)[...] = 0x55
    for seed in range(2, 4):
        step(seed)
    assert_same(a, b)
    assert all(bool((array.view(np.uint8) == 0x55).all()) for array in old)


CALLS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"causal": False},
    {"positions": np.array([[4, 9], [3, 20]])},
    {"positions": np.array([[7, 2], [8, 8]])},
    {"positions": np.array([[4, 9], [3, 20]]), "causal": False},
    {"mask": np.arange(40) % 3 > 0},
    {"mask": np.arange(64) % 5 > 0},
    {"mask": np.where(np.arange(40) % 3 > 0, np.linspace(-1, 1, 40), -np.inf).astype(F)},
    {"mask": np.where(np.arange(40) % 3 > 0, np.linspace(-1, 1, 40), -np.inf).astype(H)},
    {"mask": np.random.default_rng(5).random((2, 8, 2, 40)) < 0.7},
]


@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"key_scales": "pairs"}], ids=str)
def test_attentions_in_turn(options: Any) -> None:
    """Every kind of call, twice, over a cache that has grown meanwhile."""
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 60, 2, (8, 4), **options, device="cuda")
    for turn in range(2):
        k, v = map(put, tokens(2, 20, 2, 64, seed=turn))
        cache.append(k, v, 4 if turn else 8)
        for seed, words in enumerate(CALLS):
            given = {name: put(a) if isinstance(a, np.ndarray) else a for name, a in words.items()}
            for dtype in (F, H, B):
                q = there((2, 2, 8, 64), dtype, seed)
                wide = cupy.zeros((2, 2, 8, 192), dtype)[..., 64:128]
                wide[...] = q
                attends(q, cache, **given)
                attends(wide, cache, **given)
                attends(q, cache, **given, out=cupy.zeros((2, 2, 64, 8), F).swapaxes(2, 3))
                attends(q, cache, **given, out=cupy.empty(q.shape, H))
        for words in ({}, {"positions": put(np.array([[4], [9]]))}, {"causal": False}) * 2:
            attends(there((2, 1, 8, 64)), cache, **words)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often tokens were appended, and attention was asked for, with checks, and again."""
    owners = {"append": Appender, "append_again": Appender, "attend": cuda, "attend_again": cuda}
    counts = counting(monkeypatch, *owners, owners=list(owners.values()))

    class Counts(dict[str, int]):
        def __missing__(self, name: str) -> int:
            return counts[list(owners).index(name)]

    return Counts()


@pytest.mark.parametrize("dtype", [F, H, B], ids=str)
def test_steps_like_ones_before_are_not_checked_again(ways: dict[str, int], dtype: Any) -> None:
    """Of other numbers, elsewhere, with a result that is given or not: the same as on the CPU."""
    a, b = both(2, 64, 40, 2, (8, 4))
    held = []
    for step in range(6):
        k, v = (x.astype(dtype) for x in tokens(2, 1, 2, 64, seed=step))
        q = there((2, 1, 8, 64), dtype, step)
        held += [put(k), put(v), q, device.cupy().empty_like(q)]
        a.append(k, v)
        b.append(held[-4], held[-3])
        attends(q, b)
        attends(q, b, out=held[-1])
        attends(q, b, scale=0.3)
    assert_same(a, b)
    assert (ways["append"], ways["append_again"]) == (1, 5)
    assert (ways["attend"], ways["attend_again"]) == (3, 15)
    a.append(k, v, 4)
    b.append(held[-4], held[-3], 4)
    assert (ways["append"], ways["append_again"]) == (2, 5)
    assert_same(a, b)


@pytest.mark.parametrize("options", [*CALLS[3:], {"q": "apart"}, {"q": "odd"}])
def test_calls_that_are_always_checked(ways: dict[str, int], options: dict[str, Any]) -> None:
    """Those with a mask, of which the cache's length decides, or positions, and queries that are copied."""
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 60, 2, (8, 4), device="cuda")
    cache.append(*map(put, tokens(2, 20, 2, 64)))
    given = {n: put(a) if isinstance(a, np.ndarray) else a for n, a in options.items() if n != "q"}
    q = there((2, 2, 8, 64), H)
    if options.get("q") == "apart":
        wide = cupy.zeros((2, 2, 8, 128), H)
        wide[..., ::2] = q
        q = wide[..., ::2]
    for _ in range(3):
        attends(odd(q) if options.get("q") == "odd" else q, cache, **given)
    assert (ways["attend"], ways["attend_again"]) == ((1, 2) if options.get("q") == "odd" else (3, 0))


def test_results_of_others(monkeypatch: pytest.MonkeyPatch, ways: dict[str, int]) -> None:
    """Memory that CuPy takes as its own, of an array without strides."""

    class Foreign:
        def __init__(self, array: Any) -> None:
            self.array = array

    real = common.array
    monkeypatch.setattr(common, "array", lambda x, *a, **k: real(getattr(x, "array", x), *a, **k))
    cache = cq.KVCache(2, 64, 60, 2, (8, 4), device="cuda")
    cache.append(*map(put, tokens(2, 20, 2, 64)))
    q = there((2, 1, 8, 64), H)
    expected = cq.attention(q, cache)
    for _ in range(3):
        out = Foreign(device.cupy().empty_like(q))
        assert cq.attention(q, cache, out=out) is out
        assert (out.array == expected).all()
    assert (ways["attend"], ways["attend_again"]) == (4, 0)


def test_a_scale_that_may_change(ways: dict[str, int]) -> None:
    """It is a number of somebody's: what it is now counts."""

    class Learned:
        value = 0.3

        def __float__(self) -> float:
            return self.value

    cache = cq.KVCache(2, 64, 60, 2, (8, 4), device="cuda")
    cache.append(*map(put, tokens(2, 20, 2, 64)))
    q, scale = there((2, 1, 8, 64), F), Learned()
    for scale.value in (0.3, 3.0, 0.3):
        expected = cq.attention(q, cache, scale.value)
        assert (cq.attention(q, cache, scale) == expected).all()  # type: ignore[arg-type]
    assert (ways["attend"], ways["attend_again"]) == (5, 1)


@pytest.mark.parametrize("which", ["attention", "append"])
def test_a_launch_that_fails_is_not_counted(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """Nor does it change what comes next."""
    a, b = both(2, 64, 40, 2, (8,))
    k, v = tokens(2, 1, 2, 64)
    given, q = (put(k), put(v)), there((2, 1, 8, 64), H)
    call = (lambda: b.append(*given)) if which == "append" else (lambda: cq.attention(q, b))
    for _ in range(2):
        a.append(k, v)
        b.append(*given)
        attends(q, b)

    def fails(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(jit, "launch_packed", fails)
        with pytest.raises(KeyboardInterrupt):
            call()
    assert b._known_slots == 2
    a.append(k, v)
    b.append(*given)
    assert_same(a, b)
    attends(q, b)


@pytest.mark.parametrize("by", [-8, 8])
def test_a_result_over_the_queries(by: int) -> None:
    """Of a call like one before, but for where the result lies."""
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 60, 1, (8,), device="cuda")
    cache.append(*map(put, tokens(1, 20, 2, 64)))
    memory = cupy.zeros(3 * 512, H)
    q = memory[512:1024].reshape(1, 1, 8, 64)
    for _ in range(2):
        cq.attention(q, cache, out=cupy.empty_like(q))
    with pytest.raises(ValueError, match="share memory with q"):
        cq.attention(q, cache, out=memory[512 + by : 1024 + by].reshape(q.shape))


def test_a_cache_is_freed_with_the_last_reference() -> None:
    cache = cq.KVCache(2, 64, 60, 1, (8,), device="cuda")
    k, v = map(put, tokens(1, 1, 2, 64))
    for _ in range(2):
        cache.append(k, v)
        cq.attention(there((1, 1, 8, 64), H), cache)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_an_append_that_was_refused_is_an_error_of_what_is_repeated(ways: dict[str, int]) -> None:
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 2, 1, (8,), device="cuda")
    k, v = map(put, tokens(1, 1, 2, 64))
    q = there((1, 1, 8, 64))
    for _ in range(2):
        cache.append(k, v)
        cq.attention(q, cache)
    assert (ways["append_again"], ways["attend_again"]) == (1, 1)
    for repeated in (lambda: cq.attention(q, cache), lambda: cache.append(k, v)):
        cache.append(k, v, lengths=cupy.ones(1, np.int32))  # the host does not know how many these are
        cupy.cuda.Device().synchronize()
        with pytest.raises(ValueError, match="was refused and changed nothing"):
            repeated()
    assert (ways["append_again"], ways["attend_again"]) == (2, 2)


def test_importance_that_is_tracked_from_now_on() -> None:
    cache = cq.KVCache(2, 64, 60, 1, (8, 4), device="cuda")
    cache.append(*map(put, tokens(1, 20, 2, 64)))
    q = there((1, 1, 8, 64))
    for tracked in (False, True, False):
        cache.track_attention = tracked
        before = as_numpy(cache.tiers[8].buffers.importance).sum()
        attends(q, cache)
        gained = as_numpy(cache.tiers[8].buffers.importance).sum() - before
        assert abs(gained - tracked) < 1e-2


def test_no_error_is_less() -> None:
    cupy = device.cupy()
    cache = cq.KVCache(2, 64, 60, 2, (8, 4), device="cuda")
    k, v = map(put, tokens(2, 3, 2, 64))
    q = there((2, 1, 8, 64))
    for _ in range(2):
        cache.append(k, v)
        cq.attention(q, cache)
        cq.attention(q, cache, out=cupy.empty(q.shape, H))
    appends: list[tuple[Any, str, dict[str, Any]]] = [
        (TypeError, "k has dtype", {"k": k.astype(np.float64)}),
        (TypeError, "v is on cpu", {"v": v.get()}),
        (ValueError, "k has shape", {"k": k[:, :, :1]}),
        (ValueError, "differ in their number", {"k": k[:, :1]}),
        (ValueError, "bits is 3", {"bits": 3}),
        (TypeError, "bits has dtype", {"bits": 8.0}),
    ]
    for error, match, changed in appends:
        with pytest.raises(error, match=match):
            cache.append(**{"k": k, "v": v} | changed)
    attentions: list[tuple[Any, str, dict[str, Any]]] = [
        (TypeError, "q has dtype", {"q": q.astype(np.float64)}),
        (TypeError, "q is on cpu", {"q": q.get()}),
        (ValueError, "share memory with q", {"out": q}),
        (TypeError, "out is on cpu", {"out": q.get()}),
        (ValueError, "out has shape", {"out": q[:1]}),
        (ValueError, "scale is nan", {"scale": float("nan")}),
        (ValueError, "last axis needs 6 columns", {"mask": cupy.ones(5, bool)}),
    ]
    for error, match, changed in attentions:
        with pytest.raises(error, match=match):
            cq.attention(**{"q": q, "cache": cache} | changed)
    assert cache.lengths.tolist() == [6, 6]
