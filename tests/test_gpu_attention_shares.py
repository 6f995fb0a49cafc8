"""Which tokens attention's blocks have, and what merges them knows of it, against NumPy's reckoning."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sharing
from attending import changed_kernel, queries
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit
from cuquant.kv import codes
from cuquant.plan import attention as kv_plan

pytestmark = pytest.mark.gpu

TELLING = """
extern "C" __global__ void tell_blocks(const __grid_constant__ Attention p, Shares* told) {
    __shared__ Shares shares;
    shares.find(p, own_block(), threadIdx.x);
    __syncwarp();
    if (head_group() == 0 && threadIdx.x == 0) told[own_block()] = shares;
}
extern "C" __global__ void tell_merges(const __grid_constant__ Attention p, int2* told) {
    const int2 shares = Portion::shares_of(p, blockIdx.x, threadIdx.x);
    if (threadIdx.x == 0) told[blockIdx.x] = shares;
}
"""
"""A block's Shares, of the first group of heads; what merges a sequence's shares knows of them."""


def launched(cache: cq.KVCache, q: Any, patch: pytest.MonkeyPatch) -> tuple[plan.Plan, bytes]:
    """What attention would have started, and its argument."""
    launches: list[tuple[plan.Plan, bytes]] = []
    with patch.context() as within:
        within.setattr(jit, "launch_packed", lambda plan, given, *offsets: launches.append((plan, given)))
        cq.attention(q, cache)
    (attention, _), (_, argument) = launches
    return attention, argument


def told(launch: plan.Plan, argument: bytes, entry: str, blocks: int, count: int, dtype: Any) -> NDArray[Any]:
    """What one of TELLING's kernels leaves: `count` items."""
    out = device.cupy().zeros(count * np.dtype(dtype).itemsize, np.uint8)
    kernel = replace(launch.kernel, entry=entry, max_shared=0)
    packed = argument + struct.pack("q", out.data.ptr)
    jit.launch_packed(plan.Plan(kernel, (blocks, 1, 1), plan.WARP), packed, (0, len(argument)))
    return testing.as_numpy(out).view(dtype)


@pytest.mark.parametrize(("heads", "dim", "bits"), [(1, 8, (8, 4, 2)), (2, 8, (4,)), (8, 128, (2,))])
@pytest.mark.parametrize(
    ("batch", "longest"), [(2, 400), (32, 4000), (33, 4000), (100, 3000), (128, 30), (129, 400), (512, 400)]
)
@pytest.mark.parametrize("alike", [False, True])
def test_shares_of_sequences(
    batch: int,
    longest: int,
    heads: int,
    dim: int,
    bits: tuple[int, ...],
    alike: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of lengths that are the same, or most of them short, some 0, and one long. A bucket's shares are all of
    it, and end within a step of NumPy's, as inverses are a digit off on a GPU."""
    random = np.random.default_rng(batch)
    lengths = {b: np.full(batch, longest // 2) for b in bits}
    for tokens in lengths.values() if not alike else ():
        tokens[:] = random.integers(0, longest // 4, batch)
        tokens[random.permutation(batch)[: batch // 4]] = 0
        tokens[batch * 2 // 3] = longest
    cache = cq.KVCache(heads, dim, dict.fromkeys(bits, longest), batch, device="cuda")
    for b, tier in cache.tiers.items():
        tier.lengths[...] = device.cupy().asarray(lengths[b], np.int32)
    cache._refresh()
    q = device.cupy().asarray(queries(batch, 1, 4 * heads, dim))
    launch, argument = launched(cache, q, monkeypatch)
    shape = kv_plan.Shape(batch, 1, 4 * heads, heads, dim, bits, 0, 1)
    how = kv_plan.attention(shape, *jit.gpu()[:2], alike)
    assert how.attention == launch
    constants, (grid, _, _) = dict(launch.kernel.constants), launch.grid
    streams, blocks = constants["BLOCK_STREAMS"], grid * constants["BLOCK_HEADS"] // heads
    changed_kernel(monkeypatch, "attention", "// Row sums of one warp in shared memory.", TELLING)
    share = np.dtype([*((name, "i4") for name in sharing.FIELDS), ("cuts", "i4", (2, 8))])
    kind = np.dtype([("of", share, streams), ("count", "i4"), ("owners", "i4", streams)])

    counts = sharing.streams_of(sharing.costs_of(lengths), how.streams, how.finest)
    before = np.cumsum(counts) - counts
    ends = dict.fromkeys(((sequence, b) for sequence in range(batch) for b in bits), 0)
    for block, own in enumerate(told(launch, argument, "tell_blocks", grid, blocks, kind)):
        expected = sharing.shares_of(counts, block, streams)
        found = own["of"][: own["count"]]
        assert [tuple(each[list(sharing.FIELDS)]) for each in found] == expected
        owners = [at for at, (*_, count) in enumerate(expected) for _ in range(count)]
        assert own["owners"].tolist() == owners + [-1] * (streams - len(owners))
        for (sequence, *_, start, count), cuts in zip(expected, found["cuts"], strict=True):
            own_lengths = {b: int(lengths[b][sequence]) for b in bits}
            last = block * streams + start + count - before[sequence]
            for b in bits:
                begin, end = cuts[:, codes.BITS.index(b)]
                assert begin == ends[sequence, b]
                ends[sequence, b] = end
                exact = sharing.cut(own_lengths, b, last, counts[sequence])
                assert abs(end - exact) <= kv_plan.box_tokens(b)
    assert ends == {(sequence, b): lengths[b][sequence] for sequence, b in ends}
    numbers = told(launch, argument, "tell_merges", batch, 2 * batch, np.int32).reshape(batch, 2)
    first = before // streams
    splits = (before + counts - 1) // streams - first + 1
    np.testing.assert_array_equal(numbers[:, 1], splits)
    np.testing.assert_array_equal(numbers[splits > 1, 0], (np.arange(batch) + first)[splits > 1])
