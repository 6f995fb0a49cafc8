"""Decode attention over caches of several widths, next to torch's float16 attention and the bytes' floor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
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
POOL = 64 << 20
"""Bytes of random codes that fill caches again and again."""
SPARE = 4 << 30
"""Bytes of memory that are left free."""


@dataclass(frozen=True)
class AttentionCell:
    """One measurement; times in microseconds.

    `bits` are those of the tokens; "mixed" has MIXED of them. `queries` of each sequence are the last tokens,
    each of which sees those up to itself. The others' times are there where they are installed; their queries
    see all tokens. `mhz` is the GPU's mean clock meanwhile.
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


def attend(
    record: Record,
    bits: Iterable[str] = tuple(WIDTHS),
    contexts: Iterable[int] = CONTEXTS,
    batches: Iterable[int] = BATCHES,
    heads: Iterable[tuple[int, int]] = HEADS,
    queries: Iterable[int] = (1,),
) -> Iterator[AttentionCell]:
    """Measure what the record lacks, cell by cell, adding each to it; every result is checked in float64.

    Caches are rotated so that the L2 cache cannot hold them. Cells beyond the GPU's memory are left out.
    ValueError where there would be more queries than tokens; RuntimeError where a result is wrong: nothing is
    recorded then.
    """
    bits, contexts, queries = list(bits), list(contexts), list(queries)
    most = min([check.MOST_QUERIES, *contexts])
    if not all(1 <= count <= most for count in queries):
        raise ValueError(f"queries are {queries}; of each sequence there can be 1 to {most}")
    warm_up()
    for (query_heads, kv_heads), batch, context, q_len in product(heads, batches, contexts, queries):
        shape = {
            "batch": batch,
            "heads": query_heads,
            "kv_heads": kv_heads,
            "context": context,
            "queries": q_len,
        }
        todo = [key for width in bits if (key := {"op": "attention", "bits": width, **shape}) not in record]
        if not todo:
            continue
        others = {name: _peer_us(name, call, shape) for name, call in _PEERS.items()}
        for key in todo:
            cell = _cell(key, others, record.floor_us)
            if cell is not None:
                record.add(cell)
                yield cell


def _cell(key: dict[str, Any], others: dict[str, float | None], floor_us: Floor) -> AttentionCell | None:
    cupy = device.cupy()
    batch, heads, kv_heads = (key[name] for name in ("batch", "heads", "kv_heads"))
    context, q_len = key["context"], key["queries"]
    rooms = rooms_of(key["bits"], context)
    per_token = {
        b: kv_heads * (2 * codes.packed_dim(HEAD_DIM, b) * codes.dtype(b).itemsize + 16) for b in rooms
    }
    size = batch * sum(n * per_token[b] for b, n in rooms.items())
    if not fits(size * rotation(size)):
        return None
    caches = [random_cache(batch, kv_heads, rooms, seed) for seed in range(rotation(size))]
    q = cupy.random.standard_normal((batch, q_len, heads, HEAD_DIM), dtype=np.float32).astype(np.float16)
    out = cupy.empty_like(q)
    error = sampled_error(q, caches[-1], out)
    us, mhz = graph_us([lambda cache=cache: attention(q, cache, out=out) for cache in caches])  # type: ignore[misc]
    moved = caches[0].used_nbytes + q.nbytes + out.nbytes
    del caches
    cupy.get_default_memory_pool().free_all_blocks()
    floor = floor_us(moved, 4 * HEAD_DIM * batch * heads * q_len * context)
    values = {"us": us, "mhz": mhz, "floor_us": floor, "gbps": moved / us * 1e-3, **others}
    return AttentionCell(**key, nmse=error, **{name: rounded(value) for name, value in values.items()})


def fits(nbytes: int) -> bool:
    """Whether the GPU has room for so many bytes more."""
    cupy = device.cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    return bool(nbytes + SPARE <= cupy.cuda.runtime.memGetInfo()[0])


def rooms_of(bits: str, context: int) -> dict[int, int]:
    """How many of a sequence's tokens have each width."""
    return {b: int(context * share) for b, share in WIDTHS[bits].items()}


def random_cache(batch: int, kv_heads: int, rooms: dict[int, int], seed: int) -> KVCache:
    """A full cache of random codes, and scales that make numbers of about one; slots in random order."""
    cupy = device.cupy()
    random = cupy.random.default_rng(seed)
    cache = KVCache(kv_heads, HEAD_DIM, rooms, batch, device="cuda")
    order = random.random(sum(rooms.values()), dtype=np.float32).argsort().astype(np.int32)
    first = 0
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
        b.token_ids[...] = b.global_slots[...] = order[first : first + tier.room]
        first += tier.room
        tier.lengths[...] = tier.room
    cache._next_slots[...] = first
    cache._refresh()
    return cache


def sampled_error(q: Any, cache: KVCache, out: Any) -> float:
    """NMSE of a key head's first queries of the first sequence, and of another's last ones of the last;
    RuntimeError beyond the bound."""
    out.view(np.uint8).fill(0xFF)
    attention(q, cache, out=out)
    group, errors = q.shape[2] // cache.n_kv_heads, []
    q_len = q.shape[1]
    for sequence, position, head in {(0, 0, 0), (cache.batch - 1, q_len - 1, cache.n_kv_heads - 1)}:
        mine = (sequence, position, slice(head * group, (head + 1) * group))
        last = int(cache.next_slots[sequence]) - q_len + position
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


def _peer_us(name: str, make: Callable[..., Any], shape: dict[str, int]) -> float | None:
    """Microseconds of another library's attention over float16 keys and values; None where it has none."""
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
    return lambda: attend(q, k, v, enable_gqa=heads != kv_heads)


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
