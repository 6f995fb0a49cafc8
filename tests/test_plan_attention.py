"""Plans of attention: they fit the hardware, on GPUs that are not there."""

from __future__ import annotations

from itertools import product as combinations

import numpy as np
import pytest
from hardware import SHARED

from cuquant import plan
from cuquant.plan import attention as kv_plan, caches


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 100, 120])
def test_plans_of_attention_fit_the_hardware(capability: int) -> None:
    """Rings hold three half steps of every bucket and the sums; blocks cover all heads and rows."""
    for dim, heads, group, q_len in combinations(
        (8, 40, 64, 96, 128, 200, 256), (1, 7, 8, 13, 32), (1, 4, 7), (1, 64)
    ):
        for masked, parts, batch in combinations((0, 1, 2), (1, 2), (1, 8, 20, 33, 1000)):
            shape = kv_plan.Shape(batch, q_len, heads * group, heads, dim, (16, 8, 4, 3, 2), masked, parts)
            launch = kv_plan.attention(shape, capability, 132)
            even = kv_plan.attention(shape, capability, 132, True)
            is_like_that = masked or launch.boxes or launch.attention.kernel.op == "attention_panels"
            has_fewer = 16 <= batch <= 32 or (1 < batch < 16 and not is_like_that)
            assert even.most == (even.budget if has_fewer else 0)
            assert even.attention.grid[0] * launch.shares == launch.attention.grid[0] * (
                even.most or even.shares
            )
            assert even._replace(attention=launch.attention, most=0) == launch
            kernel, (x, y, z) = launch.attention.kernel, launch.attention.grid
            c = dict(kernel.constants)
            rows = heads * group * q_len
            if kernel.op == "attention_panels":
                assert capability == 90
                assert group * q_len >= kv_plan.PANEL_ROWS
                assert y * 128 // c["STREAMS"] >= group * q_len
                assert c["STREAMS"] == (2 if group * q_len <= 64 else 1)
                assert launch.shares == launch.budget + batch - 1
                assert (x, z) == (launch.shares * heads, 1)
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
            one_each = launch.budget * y * heads // c["BLOCK_HEADS"] <= 132
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
            assert (c["BLOCK_HEADS"] * x, z) == (heads * launch.shares, 1)
            assert c["BLOCK_HEADS"] <= c["WARPS"]
            assert y * c["GROUPS"] * 8 >= group * q_len
            assert launch.shares == launch.budget + batch - 1
            assert max(y, z) <= plan.MOST_BLOCKS
            parts_of_a_row = launch.merge.grid[2]
            assert launch.merge.grid[:2] == (batch, rows)
            assert rows <= plan.MOST_BLOCKS
            assert dim % (4 * parts_of_a_row) == 0
            assert launch.merge.block == 32 * c["MERGE_WARPS"]
            if parts_of_a_row > 1 and not launch.boxes:
                assert dim % (kv_plan.LEAST_CHANNELS * parts_of_a_row) == 0
                assert rows * batch * parts_of_a_row <= 132 * kv_plan.MERGES_BESIDE


@pytest.mark.parametrize("budget", [1, 44, 108, 132, 148])
@pytest.mark.parametrize("batch", [1, 3, 12, 100])
def test_no_share_of_attention_is_beyond_the_grid(budget: int, batch: int) -> None:
    """Shares of sequences, in float32 as kernels/attention/split.cuh counts them."""
    f32, total = np.float32, budget * batch
    for cost in np.random.default_rng(0).integers(1, 1 << 17, 200):
        part = f32(f32(f32(cost) * f32(batch)) / f32(total)) * f32(1 + kv_plan.SLACK)
        counts = batch * int(np.ceil(f32(cost) / part))
        assert batch <= counts <= total + batch - 1


@pytest.mark.parametrize("cost", [1131 * 15.0, 7475 * 4.4, 1915 * 4.3, 3895 * 8.4])
def test_no_share_of_the_most_sequences_is_beyond_the_grid(cost: float) -> None:
    """Of lengths for which the float32 sums of a warp's lanes are furthest off."""
    f32, batch = np.float32, plan.MOST_BLOCKS
    lanes = np.zeros(32, np.float32)
    for base in range(0, batch, 32):
        lanes[: batch - base] += f32(cost)
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert abs(lanes[0] / (cost * batch) - 1) > 3e-5
    for splits in (1, 2, 8):
        part = lanes[0] * f32((1 + kv_plan.SLACK) / (batch * splits))
        assert np.ceil(f32(cost) * (1 / part)) == splits


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
