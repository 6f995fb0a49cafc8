"""Plans of attention: they fit the hardware, on GPUs that are not there."""

from __future__ import annotations

from itertools import product as combinations

import numpy as np
import pytest
import sharing
from hardware import SHARED
from sharing import streams_of

from cuquant import check, plan
from cuquant.kv import cuda
from cuquant.plan import attention as kv_plan, caches


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 100, 120])
def test_plans_of_attention_fit_the_hardware(capability: int) -> None:
    """Rings hold three half steps of every bucket and the sums; blocks cover all heads and rows."""
    for dim, heads, group, q_len in combinations(
        (8, 40, 64, 96, 128, 200, 256), (1, 7, 8, 13, 32), (1, 4, 7), (1, 64)
    ):
        several = combinations((0, 1, 2), (1, 2), (1, 8, 20, 33, 1000), (False, True))
        for masked, parts, batch, even in several:
            shape = kv_plan.Shape(batch, q_len, heads * group, heads, dim, (16, 8, 4, 3, 2), masked, parts)
            launch = kv_plan.attention(shape, capability, 132, even)
            kernel, (x, y, z) = launch.attention.kernel, launch.attention.grid
            c = dict(kernel.constants)
            rows = heads * group * q_len
            if kernel.op == "attention_panels":
                assert capability == 90
                assert group * q_len >= kv_plan.PANEL_ROWS
                assert y * 128 // c["STREAMS"] >= group * q_len
                assert c["STREAMS"] == (2 if group * q_len <= 64 else 1)
                assert (x, z) == (launch.streams * heads, 1)
                assert launch.attention.shared == kernel.max_shared <= 227 << 10
                assert 2 * kernel.max_shared > 227 << 10
                assert launch.merge.grid == (batch, -(-rows // c["MERGE_ROWS"]), 1)
                assert launch.merge.block == 32 * c["MERGE_ROWS"]
                assert max(y, z, launch.merge.grid[1]) <= plan.MOST_BLOCKS
                assert not launch.counted
                continue
            rings = c["WARPS"] // (c["BLOCK_HEADS"] if launch.boxes else 1)
            ring = c["RING"] + kv_plan.BOX_BARRIERS * launch.boxes
            alone = kernel.max_shared
            if masked and capability >= 90:
                assert 2 * (alone + (1 << 10)) > {90: 228, 100: 228, 120: 100}[capability] << 10
            else:
                assert alone == rings * ring
            one_each = x * y <= 132
            assert launch.attention.shared == (alone if one_each else rings * ring)
            assert kernel.max_shared <= SHARED.get(f"sm_{capability}", 227 << 10)
            sums = c["GROUPS"] * 8 * (8 + 4 * kv_plan.padded(dim))
            if launch.boxes:
                assert c["RING"] % (1024 * c["DEPTH"]) == 0
                assert c["RING"] >= c["DEPTH"] * max(kv_plan.box_slot(bits, dim) for bits in (16, 8, 4, 3, 2))
                assert c["DEPTH"] >= 3
                assert c["RING"] >= c["WARPS"] * sums  # all in the first ring
            else:
                assert c["RING"] % 16 == 0
                assert c["RING"] >= 3 * max(kv_plan.slot(bits, dim, masked) for bits in (16, 8, 4, 3, 2))
                assert c["RING"] >= sums
            assert c["BLOCK_HEADS"] * c["BLOCK_STREAMS"] == c["WARPS"]
            assert c["BLOCK_STREAMS"] <= (16 if capability == 90 else 8)
            blocks = -(-launch.streams // c["BLOCK_STREAMS"])
            assert (c["BLOCK_HEADS"] * x, z) == (heads * blocks, 1)
            assert y * c["GROUPS"] * 8 >= group * q_len
            assert launch.shares == blocks + batch - 1
            assert max(y, z) <= plan.MOST_BLOCKS
            parts_of_a_row = launch.merge.grid[2]
            assert launch.merge.grid[:2] == (batch, rows)
            assert rows <= plan.MOST_BLOCKS
            assert dim % (4 * parts_of_a_row) == 0
            assert launch.merge.block == 32 * c["MERGE_WARPS"]
            if parts_of_a_row > 1 and not launch.boxes:
                assert dim % (kv_plan.LEAST_CHANNELS * parts_of_a_row) == 0
                assert rows * batch * parts_of_a_row <= 132 * kv_plan.MERGES_BESIDE


@pytest.mark.parametrize("bits", [(4,), (2,), (8, 4, 2)])
@pytest.mark.parametrize(("heads", "q_len"), [(8, 1), (32, 1), (8, 4), (8, 64)])
def test_sequences_have_streams(bits: tuple[int, ...], heads: int, q_len: int) -> None:
    """At least one each; where lengths are the same most streams have tokens, of whole blocks if that leaves
    few without."""
    for batch in (*range(1, 140), 300, 1000, plan.MOST_BLOCKS):
        shape = kv_plan.Shape(batch, q_len, 32, heads, 128, bits, int(q_len > 1), 1)
        for even in (False, True):
            launch = kv_plan.attention(shape, 90, 132, even)
            c = dict(launch.attention.kernel.constants)
            each, block = launch.streams // batch, c["BLOCK_STREAMS"]
            assert each >= 1
            assert each >= 2 or even or batch == 1 or q_len > 1
            assert each * batch >= 0.75 * launch.streams
            if even and each >= 10 * block:
                assert each % block == 0 or batch == 1
            if even and batch == 8 and q_len < 64:
                assert each == {8: 4, 2: 16 if heads == 8 else 4, 4: 4}[block] * block


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 12, 32, 33, 100, 200])
@pytest.mark.parametrize("longest", [0, 1, 30, 2000, 1 << 17])
def test_there_are_enough_streams(batch: int, longest: int) -> None:
    """Whatever the lengths, and none has much more than its part."""
    random = np.random.default_rng(0)
    for room, block in ((33, 8), (132, 2), (33, 4), (8, 1), (1, 1)):
        shape = kv_plan.Shape(batch, 1, 32, 8, 128, (4,), 0, 1)
        for even, trial in combinations((False, True), range(20)):
            streams = kv_plan._streams(shape, room, block, even)
            grains = random.integers(0, longest + 1, batch) if trial else np.full(batch, longest)
            costs = (grains * 4.4).astype(np.float32)
            counts = streams_of(costs, streams, 1e9)
            assert batch <= counts.sum() <= streams
            if streams > 4 * batch:
                most = costs.sum(dtype=np.float64) / (streams - batch) * 1.001
                assert (costs / counts <= most).all()
            if not trial and longest and streams < 2048:
                assert (counts == streams // batch).all()


@pytest.mark.parametrize("batch", [2, 8, 32, 33, 128, 129, 512])
@pytest.mark.parametrize("part", [0, 0.1, 0.5])
def test_there_are_enough_streams_of_huge_and_empty_sequences(batch: int, part: float) -> None:
    """A part of them, or one, has as many tokens as an int32 counts, half of the others none: the others have
    a stream each, and the huge ones all the rest, or nearly."""
    random, largest = np.random.default_rng(1), (2**31 - 1) // sharing.GRAIN
    for room, block in ((33, 8), (132, 2), (8, 1), (1, 1)):
        shape = kv_plan.Shape(batch, 1, 32, 8, 128, (4,), 0, 1)
        for even in (False, True):
            streams = kv_plan._streams(shape, room, block, even)
            grains = random.integers(0, 100, batch) * random.integers(0, 2, batch)
            huge = random.permutation(batch)[: max(1, int(part * batch))]
            grains[huge] = largest
            counts = streams_of((grains * 15.0).astype(np.float32), streams, 1e9)
            assert counts.sum() <= streams
            assert (np.delete(counts, huge) == 1).all()
            assert (counts[huge] >= 0.999 * (streams - batch) / len(huge)).all()


@pytest.mark.parametrize("cost", [1131 * 15.0, 7475 * 4.4, 1915 * 4.3, 3895 * 8.4])
def test_there_are_enough_streams_of_the_most_sequences(cost: float) -> None:
    """Of lengths for which the float32 sums of a warp's lanes are furthest off."""
    costs = np.full(plan.MOST_BLOCKS, cost, np.float32)
    for room in (8, 33, 132):
        for even in (False, True):
            shape = kv_plan.Shape(len(costs), 1, 32, 8, 128, (4,), 0, 1)
            streams = kv_plan._streams(shape, room, 8, even)
            assert streams_of(costs, streams, 1e9).min() >= max(1, streams // len(costs) - 1)


def test_more_rows_than_a_launch_has_blocks_for() -> None:
    """With nothing to merge, too."""
    for heads in (2047, 2048):
        q, strides = (1, check.MOST_QUERIES, heads, 64), (0, 0, 0, 2)
        half = np.dtype(np.float16)
        given = cuda._Given(
            *(q, strides, half, strides, half, None, False, True, 0.125, 1, (16,)),
            *(False, False, True, plan.Gpu(90, 132)),
        )
        if heads < 2048:
            (launch,) = cuda._planned(given)
            assert launch.launch.alone
            assert launch.launch.attention.grid[1] == heads * check.MOST_QUERIES // 128
        else:
            with pytest.raises(ValueError, match="takes 65536 blocks along an axis of one launch"):
                cuda._planned(given)


def test_what_merges_is_spread_where_launches_overlap() -> None:
    for capability, batch, heads, bits in combinations((80, 90, 120), (1, 8, 64), (5, 8, 16), (16, 4)):
        launch = kv_plan.attention(kv_plan.Shape(batch, 1, 40, heads, 128, (bits,), 0, 1), capability, 132)
        merge, total = launch.merge, {80: 164, 90: 228, 120: 100}[capability] << 10
        blocks = merge.grid[0] * merge.grid[1] * merge.grid[2]
        if capability < 90 or blocks > 132 * 4:
            assert merge.shared == 0
            continue
        beside = -(-blocks // 132) * (merge.shared + (1 << 10)) + launch.attention.shared + (1 << 10)
        assert 0 < merge.shared <= 18 << 10
        assert beside <= total


def test_plans_of_appends() -> None:
    """A warp's vectors are of one token, whose width is theirs. All vectors have lanes, most lanes have work,
    and one token alone has one block, or a cluster, unless it is huge."""
    sizes = (1, 2, 3, 5, 8, 13, 32, 200), (8, 40, 64, 128, 200, 256), (1, 2, 4096), (1, 300), (80, 90)
    for heads, dim, n, batch, capability in combinations(*sizes):
        launch, lanes = caches.append(batch, n, heads, dim, capability, 132)
        assert lanes >= max(4, -(-dim // 8))
        assert 32 % lanes == 0
        needed = 2 * heads * lanes // 32
        assert 2 * heads * lanes % 32 == 0
        blocks, sequences, tokens = launch.grid
        warps = launch.block // 32
        assert sequences == batch
        assert launch.block <= 512
        assert blocks == 1 or blocks * warps >= needed > (blocks - 1) * warps
        assert blocks > 1 or warps >= needed
        assert tokens == 1 or blocks * tokens <= 132 * 8 // batch
        at_once = max(1, warps // needed)
        assert tokens <= -(-n // at_once)
        if n == 1:
            clustered = batch == 1 and capability == 90 and 16 <= needed <= 128
            assert launch.cluster == (blocks if clustered else 1)
            assert 1 < blocks <= 8 if clustered else warps <= 16 >= -(-needed // blocks)
        else:
            assert launch.cluster == 1
            assert 2 <= warps <= 7
            assert max(1, blocks) * warps <= 1.5 * max(needed, at_once * needed)
