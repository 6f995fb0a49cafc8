"""Decode attention over caches of several widths, next to torch's float16 attention and the bytes' floor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from .. import check, device
from ..kv import KVCache, attention, codes
from ..testing import BOUNDS, as_numpy, nmse
from . import peers
from .record import Floor, Record, rounded
from .timing import graph_us, rotation, warm_up

HEAD_DIM = 128
CONTEXTS = (1024, 4096, 16384, 32768, 65536, 131072)
BATCHES = (1, 8, 32)
HEADS = ((32, 8), (32, 32))
MIXED = {8: 1 / 8, 4: 3 / 8, 2: 1 / 2}
"""Shares of a mixed cache's tokens."""
WIDTHS = {"16": {16: 1.0}, "8": {8: 1.0}, "4": {4: 1.0}, "3": {3: 1.0}, "2": {2: 1.0}, "mixed": MIXED}
EQUAL, SPREAD, ONE_LONG = "equal", "spread", "one-long"
SIZES = {
    EQUAL: tuple(product(BATCHES, CONTEXTS)),
    SPREAD: ((8, 8192), (32, 8192), (100, 1024)),
    ONE_LONG: ((8, 8192),),
}
"""Kinds of lengths (`lengths_of`), and of each how many sequences, of which mean length, are measured where
nothing else is asked for."""
UNEQUAL_WIDTHS, UNEQUAL_HEADS = ("8", "4", "mixed"), ((32, 8),)
"""Widths and heads that are measured where lengths differ and nothing else is asked for."""
ANY_ORDER = 64
"""Queries up to which a sequence's tokens lie in any order, as where they have moved; with more, a prompt's,
they lie in that of their slots."""
POOL = 64 << 20
"""Bytes of random codes that fill caches again and again."""
SPARE = 4 << 30
"""Bytes of memory that are left free."""


@dataclass(frozen=True)
class AttentionCell:
    """One measurement; times in microseconds.

    `bits` are those of the tokens; "mixed" has MIXED of them. `lengths` says how many tokens each sequence
    has (`lengths_of`), of which `context` is the mean. `queries` of each sequence are the last tokens, each
    of which sees those up to itself. The floor and `gbps` count the tokens that are there; where computing is
    the floor, what queries see of them. The others' times are there where they are installed, and lengths
    equal, as their calls take no others; their queries see all tokens, unless there are as many, a whole
    prompt. `mhz` is the GPU's mean clock meanwhile.
    """

    op: str
    bits: str
    batch: int
    heads: int
    kv_heads: int
    context: int
    us: float
    floor_us: float | None
    sdpa_us: float | None
    gbps: float
    nmse: float
    mhz: float | None = None
    flashinfer_us: float | None = None
    queries: int = 1
    lengths: str = EQUAL


def lengths_of(kind: str, batch: int, context: int) -> list[int]:
    """Tokens of each of `batch` sequences, about `context` in the mean: "equal"; "spread", in even steps from
    1/8 to 15/8 of it; or "one-long", the first with six times as many as each other, as 30249 and 5041."""
    if kind == SPREAD:
        return [max(1, context * (batch - 1 + 14 * n) // (8 * (batch - 1))) for n in range(batch)]
    if kind == ONE_LONG:
        others = [max(1, context * batch // (batch + 5))] * (batch - 1)
        return [context * batch - sum(others), *others]
    return [context] * batch


def cell_keys(
    bits: Iterable[str] | None = None,
    contexts: Iterable[int] | None = None,
    batches: Iterable[int] | None = None,
    heads: Iterable[tuple[int, int]] | None = None,
    queries: Iterable[int] | None = None,
    lengths: Iterable[str] | None = None,
) -> list[list[dict[str, Any]]]:
    """What tells each cell from others; those that differ in bits alone are together.

    Where `lengths` is None, all kinds are taken, or equal ones alone if contexts or batches are given. Where
    any of the others is None, each kind has its own (SIZES, UNEQUAL_WIDTHS, UNEQUAL_HEADS; one query).
    ValueError where there would be more queries than tokens, or a single sequence of unequal lengths.
    """
    widths, layouts = (None if each is None else list(each) for each in (bits, heads))
    some, means = (None if each is None else list(each) for each in (batches, contexts))
    counts = [1] if queries is None else list(queries)
    made: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for kind in lengths or (SIZES if some is None and means is None else [EQUAL]):
        usual = (WIDTHS, HEADS) if kind == EQUAL else (UNEQUAL_WIDTHS, UNEQUAL_HEADS)
        sizes = [size for batch, mean in SIZES[kind] for size in product(some or [batch], means or [mean])]
        for layout, (batch, context), q_len in product(layouts or usual[1], sizes, counts):
            if kind != EQUAL and batch == 1:
                raise ValueError(f"lengths of a single sequence are {EQUAL}, not {kind}")
            most = min(check.MOST_QUERIES, *lengths_of(kind, batch, context))
            if not 1 <= q_len <= most:
                raise ValueError(f"queries are {counts}; of each sequence there can be 1 to {most}")
            shape = {"batch": batch, "heads": layout[0], "kv_heads": layout[1], "context": context}
            key = {"op": "attention", **shape, "queries": q_len, "lengths": kind}
            made[tuple(key.values())] = [key | {"bits": width} for width in widths or usual[0]]
    return list(made.values())


def attend(record: Record, cells: Iterable[list[dict[str, Any]]]) -> Iterator[AttentionCell]:
    """Measure what the record lacks of such cells as `cell_keys` has, one by one, adding each to it; every
    result is checked in float64.

    Caches are rotated so that the L2 cache cannot hold them. Cells beyond the GPU's memory are left out.
    RuntimeError where a result is wrong: nothing is recorded then.
    """
    warm_up()
    for alike in cells:
        todo = [key for key in alike if key not in record]
        if not todo:
            continue
        others = {name: _peer_us(name, call, todo[0]) for name, call in _PEERS.items()}
        for key in todo:
            cell = _cell(key, others, record.floor_us)
            if cell is not None:
                record.add(cell)
                yield cell


def _cell(key: dict[str, Any], others: dict[str, float | None], floor_us: Floor) -> AttentionCell | None:
    cupy = device.cupy()
    batch, heads, kv_heads = (key[name] for name in ("batch", "heads", "kv_heads"))
    lengths, q_len = lengths_of(key["lengths"], batch, key["context"]), key["queries"]
    tokens = [tokens_of(key["bits"], length) for length in lengths]
    per_token = {
        b: kv_heads * (2 * codes.packed_dim(HEAD_DIM, b) * codes.dtype(b).itemsize + 16) for b in tokens[0]
    }
    used = sum(n * per_token[b] for held in tokens for b, n in held.items())
    if not fits(rotation(used) * batch * sum(n * per_token[b] for b, n in rooms_of(tokens).items())):
        return None
    any_order = q_len <= ANY_ORDER
    caches = [random_cache(kv_heads, tokens, seed, any_order) for seed in range(rotation(used))]
    q = cupy.random.standard_normal((batch, q_len, heads, HEAD_DIM), dtype=np.float32).astype(np.float16)
    out = cupy.empty_like(q)
    error = sampled_error(q, caches[-1], out)
    us, mhz = graph_us([lambda cache=cache: attention(q, cache, out=out) for cache in caches])  # type: ignore[misc]
    moved = caches[0].used_nbytes + q.nbytes + out.nbytes
    del caches
    cupy.get_default_memory_pool().free_all_blocks()
    seen = sum(q_len * n - q_len * (q_len - 1) // 2 for n in lengths)
    floor = floor_us(moved, 4 * HEAD_DIM * heads * seen)
    values = {"us": us, "mhz": mhz, "floor_us": floor, "gbps": moved / us * 1e-3, **others}
    return AttentionCell(**key, nmse=error, **{name: rounded(value) for name, value in values.items()})


def fits(nbytes: int) -> bool:
    """Whether the GPU has room for so many bytes more."""
    cupy = device.cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    return bool(nbytes + SPARE <= cupy.cuda.runtime.memGetInfo()[0])


def tokens_of(bits: str, length: int) -> dict[int, int]:
    """How many of a sequence's tokens have each width."""
    *wider, narrowest = WIDTHS[bits]
    made = {b: int(length * WIDTHS[bits][b]) for b in wider}
    return made | {narrowest: length - sum(made.values())}


def rooms_of(tokens: Sequence[dict[int, int]]) -> dict[int, int]:
    """The most tokens of each width that any of the sequences has."""
    return {b: max(held[b] for held in tokens) for b in tokens[0]}


def random_cache(
    kv_heads: int, tokens: Sequence[dict[int, int]], seed: int, any_order: bool = True
) -> KVCache:
    """A cache with so many tokens of each width for every sequence, and room for the most of these: random
    codes, and scales that make numbers of about one; slots in random order, or one after the other."""
    cupy = device.cupy()
    random = cupy.random.default_rng(seed)
    cache = KVCache(kv_heads, HEAD_DIM, rooms_of(tokens), len(tokens), device="cuda")
    lengths = cupy.asarray([sum(held.values()) for held in tokens], np.int32)
    ranks = random.random((len(tokens), int(lengths.max())), dtype=np.float32)
    if not any_order:
        ranks.sort(axis=1)
    ranks[cupy.arange(ranks.shape[1]) >= lengths[:, None]] = 2  # behind all slots that there are
    order = ranks.argsort(axis=1).astype(np.int32)
    first = cupy.zeros_like(lengths)
    for bits, tier in cache.tiers.items():
        b = tier.buffers
        for numbers in (b.k_qx, b.v_qx):
            flat = numbers.reshape(-1).view(np.uint8)
            if bits == 16:
                pool = random.standard_normal(POOL // 2, dtype=np.float32).astype(np.float16).view(np.uint8)
            else:
                pool = random.integers(0, 256, POOL, dtype=np.uint8)
            for start in range(0, flat.size, POOL):
                flat[start : start + POOL] = pool[: flat.size - start]
        for scales in (b.k_scale, b.v_scale):
            scales[...] = (random.random(scales.shape, dtype=np.float32) + 1) * np.float32(2.0 ** -(bits - 1))
        places = cupy.minimum(first[:, None] + cupy.arange(tier.room), order.shape[1] - 1)
        b.token_ids[...] = b.global_slots[...] = cupy.take_along_axis(order, places, axis=1)
        tier.lengths[...] = cupy.asarray([held[bits] for held in tokens], np.int32)
        first += tier.lengths
    cache._next_slots[...] = first
    cache._refresh()
    return cache


def sampled_error(q: Any, cache: KVCache, out: Any) -> float:
    """NMSE of a key head's first queries of the first sequence, of another's last ones of the last, and where
    lengths differ, or queries are many, of one in the middle; RuntimeError beyond the bound."""
    out.view(np.uint8).fill(0xFF)
    attention(q, cache, out=out)
    group, errors = q.shape[2] // cache.n_kv_heads, []
    q_len, lengths = q.shape[1], as_numpy(cache.next_slots)
    sampled = {(0, 0, 0), (cache.batch - 1, q_len - 1, cache.n_kv_heads - 1)}
    if lengths.min() < lengths.max() or q_len > ANY_ORDER:
        sampled.add((cache.batch // 2, q_len // 2, cache.n_kv_heads // 2))
    for sequence, position, head in sampled:
        mine = (sequence, position, slice(head * group, (head + 1) * group))
        last = int(lengths[sequence]) - q_len + position
        scores, values = [], []
        for bits, tier in cache.tiers.items():
            b = tier.bucket(sequence)
            scale = slice(head, head + 1) if bits < 16 else slice(0, 0)
            k, v = (
                codes.decode(as_numpy(qx[:, head : head + 1]), as_numpy(s[:, scale]), bits)[:, 0]
                for qx, s in ((b.k_qx, b.k_scale), (b.v_qx, b.v_scale))
            )
            score = as_numpy(q[mine]).astype(np.float64) @ k.T.astype(np.float64) * HEAD_DIM**-0.5
            scores.append(np.where(as_numpy(b.global_slots) <= last, score, -np.inf))
            values.append(v)
        s = np.concatenate(scores, axis=1)
        weights = np.exp(s - s.max(axis=1, keepdims=True))
        reference = weights @ np.concatenate(values).astype(np.float64) / weights.sum(axis=1, keepdims=True)
        errors.append(nmse(out[mine], reference))
    if not all(error <= 10 * BOUNDS[check.FLOAT16][0] for error in errors):
        raise RuntimeError(f"wrong result: NMSE {errors} for {cache}, q {q.shape}")
    return float(f"{max(errors):.3g}")


def _peer_us(name: str, make: Callable[..., Any], key: dict[str, Any]) -> float | None:
    """Microseconds of another library's attention over float16 keys and values; None where it has none, as
    of sequences whose lengths differ: what takes these is called another way, and moves other bytes."""
    if key["lengths"] != EQUAL:
        return None
    shape = {name: key[name] for name in ("batch", "heads", "kv_heads", "context", "queries")}
    size = 4 * HEAD_DIM * shape["batch"] * shape["kv_heads"] * shape["context"]
    if not fits(size * rotation(size)):
        return None
    try:
        with peers.torch_on_gpu() as torch:
            calls = [make(torch, **shape) for _ in range(rotation(size))]
            return None if None in calls else peers.graph_us(torch, calls)
    except ImportError:
        return None
    except Exception as error:  # whatever another library raises must not end a run of hours
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        warnings.warn(f"{name}, {shape}: {reason}", stacklevel=2)
        return None


def _sdpa(torch: Any, batch: int, heads: int, kv_heads: int, context: int, queries: int) -> Callable[[], Any]:
    q = torch.randn(batch, heads, queries, HEAD_DIM, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, batch, kv_heads, context, HEAD_DIM, device="cuda", dtype=torch.float16)
    attend = torch.nn.functional.scaled_dot_product_attention
    whole = 1 < queries == context
    return lambda: attend(q, k, v, is_causal=whole, enable_gqa=heads != kv_heads)


def _flashinfer(
    torch: Any, batch: int, heads: int, kv_heads: int, context: int, queries: int
) -> Callable[[], Any] | None:
    """One call of FlashInfer's decode of a single sequence; None where it has none for these sizes."""
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    if batch > 1 or queries > 1:
        return None
    q = torch.randn(heads, HEAD_DIM, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, context, kv_heads, HEAD_DIM, device="cuda", dtype=torch.float16)
    return lambda: flashinfer.single_decode_with_kv_cache(q, k, v)


_PEERS = {"sdpa_us": _sdpa, "flashinfer_us": _flashinfer}
