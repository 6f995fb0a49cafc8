"""Appending tokens to caches of one width, next to the bytes' floor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from .. import device
from ..kv import KVCache, codes
from ..plan.caches import bucket_bytes
from ..testing import as_numpy
from .attention import HEAD_DIM, HEADS, fits
from .record import Floor, Record, rounded
from .timing import LEAST_CALLS, graph_us, most_calls, warm_up

TOKENS = (1, 16, 512)
BATCHES = (1, 8)
BITS = tuple(map(str, codes.BITS))
CACHES = 4
"""Caches that take tokens in turn, as a model's layers do."""
RUNS, RUNS_OF_MANY = 20, 2
"""Replays of LEAST_CALLS calls in one measurement, at most, of up to 16 tokens and of more: caches grow
meanwhile."""


@dataclass(frozen=True)
class AppendCell:
    """One measurement; times in microseconds.

    One call appends `tokens` to each of `batch` sequences, keys and values in float16, to be stored in `bits`
    for each number. The floor counts what is read and stored. `mhz` is the GPU's mean clock meanwhile.
    """

    op: str
    bits: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    us: float
    floor_us: float | None
    gbps: float
    mhz: float | None = None


def append(
    record: Record,
    bits: Iterable[str] = BITS,
    tokens: Iterable[int] = TOKENS,
    batches: Iterable[int] = BATCHES,
    heads: Iterable[tuple[int, int]] = HEADS,
) -> Iterator[AppendCell]:
    """Measure what the record lacks, cell by cell, adding each to it.

    The last token that each cache got is compared with NumPy's codes, bit for bit. Cells beyond the GPU's
    memory are left out. RuntimeError where a result is wrong: nothing is recorded then.
    """
    warm_up()
    for (query_heads, kv_heads), batch, n, width in product(heads, batches, tokens, bits):
        key = {"op": "append", "bits": width, "batch": batch, "heads": query_heads, "kv_heads": kv_heads}
        key["tokens"] = n
        cell = None if key in record else _cell(key, record.floor_us)
        if cell is not None:
            record.add(cell)
            yield cell


def _cell(key: dict[str, Any], floor_us: Floor) -> AppendCell | None:
    cupy = device.cupy()
    batch, heads, n, bits = key["batch"], key["kv_heads"], key["tokens"], int(key["bits"])
    runs = RUNS if n <= 16 else RUNS_OF_MANY
    rounds = LEAST_CALLS // CACHES
    room = n * rounds * most_calls(runs)
    stored = sum(bucket_bytes(bits, 1, heads, HEAD_DIM))
    if not fits(CACHES * batch * room * stored):
        return None
    caches = [KVCache(heads, HEAD_DIM, room, batch, (bits,), device="cuda") for _ in range(CACHES)]
    shape = (2, batch, n, heads, HEAD_DIM)
    given = [cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in caches]

    calls = [lambda c=c, kv=kv: c.append(*kv, bits) for c, kv in zip(caches, given, strict=True)]
    us, mhz = graph_us(calls * rounds, runs)
    for cache, kv in zip(caches, given, strict=True):
        _check(cache, kv, key)
    del calls, caches, cache
    cupy.get_default_memory_pool().free_all_blocks()
    moved = batch * n * (heads * HEAD_DIM * 4 + stored)
    values = {"us": us, "mhz": mhz, "floor_us": floor_us(moved), "gbps": moved / us * 1e-3}
    return AppendCell(**key, **{name: rounded(value) for name, value in values.items()})


def _check(cache: KVCache, given: Any, key: dict[str, Any]) -> None:
    """RuntimeError where the last sequence's last token is another than was given, ValueError where some were
    refused."""
    (tier,), last = cache.tiers.values(), cache.batch - 1
    held = tier.bucket(last)
    for stored, scales, x in zip((held.k_qx, held.v_qx), (held.k_scale, held.v_scale), given, strict=True):
        expected = codes.encode(as_numpy(x[last, -1:]).astype(np.float32), tier.bits)
        found = as_numpy(stored[-1:]), as_numpy(scales[-1:])
        if any(not np.array_equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise RuntimeError(f"wrong result: {key}")
    cache._check_appended()
