"""Where tokens of a cache go when their widths change: which places, and that nothing else is touched."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from test_kvcache import WIDTHS, F, filled, state, tokens, widths

import cuquant as cq
from cuquant import cpu, device
from cuquant.kv import codes, cpu as kv_cpu, moves
from cuquant.plan import caches


def placed(buckets: list[str], targets: list[str]) -> tuple[list[str], int]:
    """Buckets of letters after letters have moved, and how many did: `targets` are the letters that each
    bucket gets, and those that are nowhere in them leave."""
    where = {letter: number for number, letters in enumerate(targets) for letter in letters}
    names = "".join(buckets)
    bucket = np.repeat(np.arange(len(buckets)), [len(b) for b in buckets])
    place = np.concatenate([np.arange(len(b)) for b in buckets])
    target = np.array([where.get(name, -1) for name in names], np.int64)
    who, to, lengths = moves.places(bucket, place, target, np.array([len(b) for b in buckets]))
    held = [dict(enumerate(letters)) for letters in buckets]
    for token, index in zip(who.tolist(), to.tolist(), strict=True):
        held[target[token]][index] = names[token]
    return ["".join(h[i] for i in range(n)) for h, n in zip(held, lengths.tolist(), strict=True)], len(who)


@pytest.mark.parametrize(
    ("buckets", "targets", "expected", "moved"),
    [
        (["abcdefgh", "xyz"], ["acfhxy", "z"], ["axcyhf", "z"], 4),  # as pictured
        (["abc", "xyz"], ["xyz", "abc"], ["xyz", "abc"], 6),
        (["abc", ""], ["a", "bc"], ["a", "bc"], 2),
        (["abcdefgh"], ["cdefgh"], ["ghcdef"], 2),  # the first two leave
        (["abcdefgh"], ["abcdef"], ["abcdef"], 0),  # the last two
        (["abcdefgh"], [""], [""], 0),
        (["abc", "xyz"], ["abcz", "y"], ["abcz", "y"], 2),
        (["ab", "xy"], ["ab", "xy"], ["ab", "xy"], 0),
        (["", ""], ["", ""], ["", ""], 0),
    ],
)
def test_places_by_hand(buckets: list[str], targets: list[str], expected: list[str], moved: int) -> None:
    assert placed(buckets, targets) == (expected, moved)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    share=st.floats(0, 1),
)
def test_places_fill_holes_and_ends(lengths: list[int], seed: int, share: float) -> None:
    """Buckets have no gaps, no place is taken twice, and no token moves that need not."""
    rng = np.random.default_rng(seed)
    bucket = np.repeat(np.arange(len(lengths)), lengths)
    place = np.concatenate([np.arange(n) for n in lengths])
    target = np.where(rng.random(len(bucket)) < share, rng.integers(-1, len(lengths), len(bucket)), bucket)
    who, to, after = moves.places(bucket, place, target, np.array(lengths))
    moved: dict[int, int] = dict(zip(who.tolist(), to.tolist(), strict=True))
    assert len(moved) == len(who)
    least = 0
    for number, before in enumerate(lengths):
        stay = [int(p) for p in place[(bucket == number) & (target == number)]]
        new = [i for i in np.flatnonzero((target == number) & (bucket != number)).tolist()]
        holes = [i for i in range(before) if i not in stay]
        assert after[number] == len(stay) + len(new)
        beyond = [p for p in stay if p >= after[number]]
        least += len(new) + len(beyond)
        own = [i for i in moved if target[i] == number]
        assert all(moved[i] in holes or moved[i] >= before for i in own)
        first = int(np.flatnonzero(bucket == number)[0]) if before else 0
        kept = [p for p in stay if first + p not in moved]
        assert sorted(kept + [moved[i] for i in own]) == list(range(after[number]))
        assert [moved[i] for i in new] == sorted(moved[i] for i in new)
    assert len(who) == least


Token = tuple[int, int, float, list[NDArray[Any]]]


def by_slot(cache: cq.KVCache) -> list[dict[int, Token]]:
    """Of each sequence its tokens by slot: width, id, importance, codes and scales."""
    found: list[dict[int, Token]] = [{} for _ in range(cache.batch)]
    for sequence, (bits, tier) in product(range(cache.batch), cache.tiers.items()):
        for name, slot, weight, *coded in zip(*tier.bucket(sequence), strict=True):
            assert int(slot) not in found[sequence]
            found[sequence][int(slot)] = (bits, int(name), float(weight), [a.copy() for a in coded])
    return found


def at_width(token: Token, bits: int) -> Token:
    """A token encoded anew, by itself, or as it is where its width stays."""
    held, name, weight, coded = token
    if bits == held:
        return token
    k_qx, k_scale, v_qx, v_scale = coded
    k, v = (codes.decode(qx, scale, held) for qx, scale in ((k_qx, k_scale), (v_qx, v_scale)))
    return bits, name, weight, [*codes.encode(k, bits), *codes.encode(v, bits)]


def assert_equal(found: list[dict[int, Token]], expected: list[dict[int, Token]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for slot, (*facts, coded) in ours.items():
            *wanted, arrays = theirs[slot]
            assert facts == wanted
            assert [a.tobytes() for a in coded] == [a.tobytes() for a in arrays]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**31), share=st.floats(0, 1))
def test_tokens_get_their_widths_and_others_keep_their_bytes(seed: int, share: float) -> None:
    """Of sequences of different lengths, with ids that are held twice and magnitudes of all kinds."""
    rng = np.random.default_rng(seed)
    cache = cq.KVCache(2, 16, 30, 3, WIDTHS)
    names, lengths = rng.integers(0, 20, (3, 24)), rng.integers(0, 25, 3)
    k, v = tokens(3, 24, 2, 16, seed=seed % 1000)
    k *= np.logspace(-9, 5, 24, dtype=F)[:, None, None]
    cache.append(k, v, rng.choice(WIDTHS, (3, 24)), token_ids=names, lengths=lengths)
    for tier in cache.tiers.values():
        tier.buffers.importance[:] = rng.random((3, 30))
    rows, given = np.full((3, 20), -1), rng.choice(WIDTHS, (3, 20))
    for sequence, n in enumerate(lengths):
        there = np.unique(names[sequence, :n])
        rows[sequence, : len(there)] = np.where(rng.random(len(there)) < share, there, -1)
    before = by_slot(cache)
    expected, kept, moved, gone = [], [], 0, 0
    for held, row, bits in zip(before, rows.tolist(), given.tolist(), strict=True):
        wanted = dict(zip(row, bits, strict=True))
        new = {slot: at_width(token, wanted.get(token[1], token[0])) for slot, token in held.items()}
        expected.append(new)
        kept.append({slot: token for slot, token in new.items() if token[1] not in wanted})
        moved += sum(new[slot][0] != held[slot][0] for slot in new)
        gone += len(expected[-1]) - len(kept[-1])
    assert cache.assign(rows, given) == moved
    assert_equal(by_slot(cache), expected)
    assert cache.evict(rows) == gone
    assert_equal(by_slot(cache), kept)
    assert cache.lengths.tolist() == [len(held) for held in kept]


def test_full_buckets_exchange_all_their_tokens() -> None:
    cache = filled(10, 2, [8] * 5 + [3] * 5, capacity={8: 5, 3: 5})
    before = by_slot(cache)
    assert cache.assign(np.arange(10), [3] * 5 + [8] * 5) == 20
    expected = [{s: at_width(t, {8: 3, 3: 8}[t[0]]) for s, t in held.items()} for held in before]
    assert_equal(by_slot(cache), expected)


def test_tokens_that_stay_are_not_encoded_anew() -> None:
    """Also those that fill a hole: NaN keeps its bits, and codes that encoding would not choose stay."""
    cache = filled(6, 1, [16] * 3 + [4] * 3)
    halves, fours = cache.tiers[16].buffers, cache.tiers[4].buffers
    halves.k_qx.view(np.uint16)[0, 2] = 0x7C01 + np.arange(32).reshape(2, 16)
    fours.k_qx[0, 2], fours.k_scale[0, 2] = 0x99, 1  # 1 everywhere, where -8 is to be the largest
    before = by_slot(cache)
    assert cache.evict([0, 3]) == 2
    assert_equal(by_slot(cache), [{s: t for s, t in before[0].items() if s not in (0, 3)}])
    assert cache.tiers[16].bucket(0).global_slots.tolist() == [2, 1]
    assert cache.tiers[4].bucket(0).global_slots.tolist() == [5, 4]


@pytest.mark.parametrize("options", [{}, {"rotate": True}, {"key_scales": "halves"}], ids=str)
@pytest.mark.parametrize("bits", [None, 4, [16, 4, 2, 2]], ids=str)
def test_appended_tokens_can_be_taken_back(options: dict[str, Any], bits: int | list[int] | None) -> None:
    """As of a draft of which half is rejected: but for a gap in the slots nothing is left of them."""
    k, v = tokens(1, 30, 2, 32)
    drafted, never = (cq.KVCache(2, 32, {16: 30, 4: 30, 2: 30}, **options) for _ in range(2))
    for cache in (drafted, never):
        cache.append(k[:, :20], v[:, :20], 4)
        cache.evict([3, 5])  # so that buckets are in no order
    chosen = bits[:2] if isinstance(bits, list) else bits
    drafted.append(k[:, 20:24], v[:, 20:24], bits)
    drafted.evict(np.arange(22, 24))
    never.append(k[:, 20:22], v[:, 20:22], chosen)
    for tier, other in zip(drafted.tiers.values(), never.tiers.values(), strict=True):
        held = int(tier.lengths[0])
        assert held == other.lengths[0]
        for mine, theirs in zip(tuple(tier.buffers), tuple(other.buffers), strict=True):
            assert np.array_equal(mine[:, :held], theirs[:, :held])
    q = np.random.default_rng(1).standard_normal((1, 1, 4, 32)).astype(F)
    assert np.array_equal(cq.attention(q, drafted), cq.attention(q, never))
    for cache in (drafted, never):
        cache.append(k[:, 24:25], v[:, 24:25])
    assert np.array_equal(cq.attention(q, drafted), cq.attention(q, never))
    assert [cache.tokens().slots[-3:].tolist() for cache in (drafted, never)] == [[20, 21, 24], [20, 21, 22]]


def test_few_tokens_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    move = kv_cpu.move

    def counted(cache: cq.KVCache, found: moves.Moves) -> None:
        seen.append(len(found.place))
        move(cache, found)

    monkeypatch.setattr(kv_cpu, "move", counted)
    cache = filled(3000, 1, 8, capacity=4000)
    assert cache.evict(np.arange(64)) == 64
    assert cache.evict(np.arange(1000, 1036)) == 36
    assert cache.evict(np.arange(2864, 2900)) == 36  # the last now
    assert cache.assign([70, 1500], 4) == 2  # and two take their places
    assert cache.assign([70, 1500], 4) == 0
    assert cache.trim(2862) == 2
    assert seen == [64, 36, 0, 4, 2]


def test_parts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are encoded a few at a time."""
    whole, parts = (filled(40, 2, [16, 8, 4, 3, 2] * 8) for _ in range(2))
    given = np.random.default_rng(0).choice(WIDTHS, 40)
    whole.assign(np.arange(40), given)
    monkeypatch.setattr(kv_cpu, "slabs", partial(cpu.slabs, size=3 * 2 * 16))
    parts.assign(np.arange(40), given)
    assert state(parts) == state(whole)
    assert widths(parts) == dict(enumerate(given.tolist()))


@pytest.mark.parametrize(("dim", "heads"), [(8, 1), (40, 3), (256, 8)])
def test_memory_between_is_a_bucket_s(dim: int, heads: int) -> None:
    """In the order of the kernel's struct; a launch has blocks enough, and few kinds of them."""
    for bits in WIDTHS:
        b = cq.KVCache(heads, dim, 7, 1, (bits,)).tiers[bits].buffers
        arrays = (b.k_qx, b.v_qx, b.k_scale, b.v_scale, b.token_ids, b.global_slots, b.importance)
        assert caches.bucket_bytes(bits, 7, heads, dim) == tuple(array.nbytes for array in arrays)
    launches = {n: caches.move(n, heads) for n in (*range(70), 1000, 10**6)}
    assert all(n <= launch.grid[0] <= max(1, 2 * n) for n, launch in launches.items() if n < 1000)
    assert launches[10**6].grid == (caches.MOVING_BLOCKS, 1, 1)
    assert len({*launches.values()}) <= 10
    assert {launch.block for launch in launches.values()} == {min(16, 2 * heads) * 32}


def test_tokens_age() -> None:
    """Never to a wider width; each sequence by its own slots; those that are coming count."""
    cache = cq.KVCache(2, 8, {16: 4, 8: 40, 4: 40, 2: 40}, 2)
    k, v = np.random.default_rng(0).standard_normal((2, 2, 12, 2, 8), np.float32)
    cache.append(k, v, [2] + [8] * 11, lengths=[12, 6])

    def widths(sequence: int) -> list[int]:
        held = {int(s): b for b, tier in cache.tiers.items() for s in tier.bucket(sequence).global_slots}
        return [held[slot] for slot in sorted(held)]

    assert cache.age({16: 2, 8: 3, 4: 4}) == 2 + 4
    assert widths(0) == [2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8]
    assert widths(1) == [2, 8, 8, 8, 8, 8]
    assert cache.age({16: 2, 8: 3, 4: 4}) == 0
    assert cache.age({8: 4}, coming=3) == (4 + 4) + 4
    assert widths(0) == [2] * 11 + [8]
    assert widths(1) == [2] * 5 + [8]
    assert cache.age({}) == 2
    assert widths(0) == [2] * 12


def test_ages_of_every_width() -> None:
    """The narrowest may be named, too: what is older has it as well."""
    cache = cq.KVCache(1, 8, 10, bits=(8, 4))
    cache.append(*np.ones((2, 1, 5, 1, 8), np.float32))
    assert cache.age({8: 2, 4: 1}) == 3
    assert [len(tier.bucket(0).token_ids) for tier in cache.tiers.values()] == [2, 3]


@pytest.mark.parametrize(
    ("newest", "error", "message"),
    [
        ([16, 4], TypeError, "newest is a list; a mapping of bits"),
        (
            {4: 2, 8: 3},
            ValueError,
            r"newest has the widths \[4, 8\]; they must be widths of this cache \(8, 4\), the widest first$",
        ),
        ({3: 2}, ValueError, r"newest has the widths \[3\]"),
        ({8: -1}, ValueError, r"newest\[8\] is -1"),
        ({8: 2.5}, TypeError, r"newest\[8\] is a float"),
    ],
)
def test_what_is_no_age(newest: Any, error: type[Exception], message: str) -> None:
    cache = cq.KVCache(2, 8, 10, bits=(8, 4))
    with pytest.raises(error, match=message):
        cache.age(newest)


def test_a_sequence_starts_anew() -> None:
    cache = cq.KVCache(2, 8, 10, 2, (8, 4), key_scales="pairs")
    k, v = np.random.default_rng(0).standard_normal((2, 2, 5, 2, 8), np.float32)
    cache.append(k, v)
    before = cache.dequantize(0)
    cache.clear(1)
    assert cache.lengths.tolist() == [5, 0]
    assert cache.next_slots.tolist() == [5, 0]
    cache.append(k * np.float32(256), v, lengths=[0, 5])
    fresh = cq.KVCache(2, 8, 10, 1, (8, 4), key_scales="pairs")
    fresh.append(k[1:] * np.float32(256), v[1:])
    for ours, theirs in zip(
        (*cache.dequantize(0), *cache.dequantize(1)), (*before, *fresh.dequantize()), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    for wrong in (2, -1):
        with pytest.raises(ValueError, match="sequence is"):
            cache.clear(wrong)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_held_is_told_in_the_order_of_positions(where: str) -> None:
    cache = cq.KVCache(2, 32, {8: 6, 4: 6, 2: 6}, 2, track_attention=True, device=where)
    numbers = cache._xp.asarray(np.ones((2, 5, 2, 32), F))
    ids = np.array([[5, 3, 8, 1, 9], [2, 4, 6, 8, 10]])
    cache.append(numbers, numbers, bits=8, token_ids=ids)
    cache.assign(np.array([3, 9]), 2)
    cache.assign(np.array([8]), 4)
    cache.evict(np.array([1]))
    cq.attention(numbers[:, :1], cache)
    held = cache.tokens()
    assert held.token_ids.tolist() == [5, 3, 8, 9]
    assert held.slots.tolist() == [0, 1, 2, 4]
    assert held.bits.tolist() == [8, 2, 4, 2]
    np.testing.assert_allclose(held.importance, 0.25, rtol=1e-5)
    assert [array.dtype for array in held] == [np.int32, np.int32, np.int32, F]
    assert cache.tokens(1).bits.tolist() == [8, 8, 8, 4, 8]
    cache.clear(1)
    assert [len(array) for array in cache.tokens(1)] == [0, 0, 0, 0]
    for ask in (cache.tokens, cache.dequantize):
        for wrong in (2, -1):
            with pytest.raises(ValueError, match=r"sequence is -?\d"):
                ask(wrong)


class OnGpu:
    """CuPy's array, as far as the host may read it."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def get(self) -> NDArray[Any]:
        return self.array

    def __array__(self, *_: Any, **__: Any) -> NDArray[Any]:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class OfOthers:
    """A tensor of another library, on a GPU."""

    __cuda_array_interface__ = None

    def __init__(self, array: Any) -> None:
        self.array = array


@pytest.mark.parametrize("there", [OnGpu, OfOthers])
def test_the_host_reads_what_is_on_a_gpu(there: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_cuda", lambda value: isinstance(value, OnGpu))
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(asarray=lambda value: OnGpu(value.array)))
    one, other = (filled(batch=1, n=12, bits=8) for _ in range(2))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("assign", ([1, 2, 5], 4)),
        ("assign", ([3, 4], [4, 3])),
        ("evict", ([[0, 7, -1]],)),
        ("allocate", (4, np.arange(12.0))),
        ("trim", (5, np.arange(12)[None])),
    ]
    for name, here in calls:
        args = [there(value) if isinstance(value, (list, np.ndarray)) else value for value in here]
        assert getattr(one, name)(*args) == getattr(other, name)(*here) > 0
    np.testing.assert_equal(state(one), state(other))
