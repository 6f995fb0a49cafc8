"""Tiles of the mma core, and how many blocks share their columns: those that were fastest."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from test_plan_decode import measured

import cuquant as cq
from cuquant import plan
from cuquant.plan import mma_core

SHAPES = ((64, 256, 1), (1000, 8192, 1), (4096, 14336, 1), (512, 29568, 3), (14336, 4096, 1))
NAMES = ("q4_0", "q8_0", "q4_k", "kbit4", "kbit5", "trellis3")


def tile_of(gemm: plan.Gemm) -> str:
    """As the file names it."""
    c = dict(gemm.plan.kernel.constants)
    if plan.core_of(gemm.plan.kernel) == "decode":
        return "decode"
    warps = (c["ROW_WARPS"], c["WARPS"] // c["ROW_WARPS"])
    tile = (c["GROUPS"], c["ROW_TILES"], *warps, c["RESIDENT"], c["STAGES"])
    return f"{'x'.join(map(str, tile))}.{gemm.plan.grid[2]}"


def test_tiles_are_those_that_were_fastest() -> None:
    """Of three formats, 8 to 512 rows and five shapes what is taken is 1% slower than the best in the
    mean."""
    slower: dict[bool, list[float]] = {True: [], False: []}
    for (name, m, n, k), times in measured("mma-tiles.txt"):
        gemm = plan.gemm(cq.formats.get(name).for_kernels, m, n, k, 1, True, plan.Gpu(80))
        slower[m > plan.DECODE_BATCH].append(times[tile_of(gemm)] / min(times.values()))
    assert len(slower[True]) > 60
    assert np.mean(slower[True]) < 1.012
    assert max(slower[True]) < 1.13
    assert np.mean(slower[False]) < 1.05


def test_tuning_tries_the_likeliest_first() -> None:
    """Whatever is cut off behind them."""
    for (name, m, n, k), times in measured("mma-tiles.txt"):
        if m > plan.DECODE_BATCH:
            fmt, gpu = cq.formats.get(name).for_kernels, plan.Gpu(80)
            tried = [tile_of(each) for each in mma_core.variants(fmt, m, n, k, 1, gpu)][: plan.tuning.MOST]
            fastest = min(times, key=lambda tile: times[tile])
            close = {tile for tile, us in times.items() if us < 1.13 * times[fastest]}
            assert close & {*tried}, (name, m, n, k)
            assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 100, 120])
@pytest.mark.parametrize("multiprocessors", [20, 46, 108, 132, 188])
def test_blocks_that_share_columns_run_at_once(capability: int, multiprocessors: int) -> None:
    """They have enough columns each, flags, and memory for their sums."""
    gpu, shared = plan.Gpu(capability, multiprocessors), 0
    for name in NAMES:
        fmt = cq.formats.get(name).for_kernels
        for m in (9, 17, 33, 100, 300):
            for n, k, matrices in (
                (64, 256, 1),
                (1000, 8192, 1),
                (4096, 14336, 1),
                (512, 29568, 3),
                (14336, 4096, 1),
            ):
                gemm = plan.mma(fmt, m, n, k, matrices, gpu)
                c = dict(gemm.plan.kernel.constants)
                parts = gemm.plan.grid[2] // matrices
                assert c["SPLITS"] == (parts > 1)
                blocks, rows = np.prod(gemm.plan.grid), 16 * c["ROW_TILES"] * c["ROW_WARPS"]
                outputs = mma_core.batch_of(gemm.plan.kernel) * rows
                assert blocks % parts == 0
                assert gemm.plan.grid[::2] == (ceil(n / rows), parts * matrices)
                assert gemm.partials == (parts > 1) * blocks * outputs * 4
                if parts > 1:
                    shared += 1
                    assert blocks <= c["RESIDENT"] * multiprocessors
                    assert blocks // parts <= plan.FLAGS
                    assert k // parts >= 256
    assert shared > 20
