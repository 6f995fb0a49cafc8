"""Tiles of the decode core: those that were fastest, for which registers suffice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as combinations
from math import ceil
from pathlib import Path

import numpy as np
import pytest

import cuquant as cq
from cuquant import plan
from cuquant.plan import decode_timed
from cuquant.plan.decode_core import DecodeProblem, Hits
from cuquant.plan.decode_grouped import decode_grouped
from cuquant.plan.moe import Load

Product = tuple[str, int, int, int]
OF_MODELS = [(5120, 5120), (6144, 4096), (3072, 3072), (10240, 8192), (12288, 4096), (11008, 4096)]
OF_MODELS += [(9728, 2560), (13824, 5120), (17408, 5120), (18944, 3584), (2560, 9728), (5120, 13824)]
OF_MODELS += [(3584, 18944), (1024, 4096), (152_064, 3584)]


def measured(file: str) -> Iterator[tuple[Product, dict[str, float]]]:
    """Products, and the times of their fastest tiles."""
    path = Path(__file__).parent / "data" / file
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, m, n, k, *times = line.split()
            pairs = (each.split(":") for each in times)
            yield (name, int(m), int(n), int(k)), {tile: float(us) for us, tile in pairs}


def tile_of(gemm: plan.Gemm) -> str:
    """As the file names it."""
    c = dict(gemm.plan.kernel.constants)
    if plan.core_of(gemm.plan.kernel) != "decode":
        return "wgmma"
    alone = "t" if c["WARPS"] == 8 and c["RESIDENT"] == 1 else ""
    parts = [f"{c['ROW_TILES']}x{c['ROW_WARPS']}x{c['WARPS']}{alone}", c["CLUSTER"], c["DEPTH"]]
    return ".".join(map(str, [*parts, c["COPIES"]] if c["COPIES"] else parts))


def test_tiles_are_those_that_were_fastest() -> None:
    """Of products in 30 formats, of shapes of many models, what is taken is 1% slower than the best in the
    mean where it was measured; where it was not, it counts as the slowest that was. So it is of those for
    which clusters were measured."""
    slower, of_known, near_clusters, others = [], [], [], 0
    for (name, m, n, k), times in measured("decode-tiles.txt"):
        gemm = plan.gemm(plan.Problem(cq.formats.get(name).for_kernels, m, n, k, plan.Gpu(90)))
        tile = tile_of(gemm)
        if tile == "wgmma" and tile not in times:  # test_plan_wgmma.py
            others += 1
            continue
        us = times.get(tile)
        slower.append((us or max(times.values())) / min(times.values()))
        of_known += slower[-1:] if us else []
        near_clusters += (
            slower[-1:] if any(each[-1].isdigit() and each.split(".")[1] != "1" for each in times) else []
        )
    assert len(near_clusters) > 100
    assert np.mean(near_clusters) < 1.02
    assert others < 50
    assert len(of_known) > 0.92 * len(slower)
    assert np.mean(of_known) < 1.012
    assert np.quantile(of_known, 0.9) < 1.04
    assert np.mean(slower) < 1.02
    assert np.quantile(slower, 0.9) < 1.06


def test_tiles_of_an_h100() -> None:
    """Of slower memory, and clusters whose meeting others hide: 1.5% slower than the best in the mean,
    where an H200's are 3%."""
    slower: dict[float, list[float]] = {1.0: [], 0.68: []}
    for memory, found in slower.items():
        gpu = plan.Gpu(90, memory=memory)
        for (name, m, n, k), times in measured("decode-tiles-h100.txt"):
            problem = plan.Problem(cq.formats.get(name).for_kernels, m, n, k, gpu)
            _, gemm = decode_timed.fastest(problem, to_convert=False)
            found.append(times[tile_of(gemm)] / min(times.values()))
    assert len(slower[0.68]) == 144
    assert np.mean(slower[0.68]) < 1.016
    assert np.quantile(slower[0.68], 0.9) < 1.055
    assert np.mean(slower[1.0]) > 1.025


def test_mixtures_have_tiles_that_were_fast() -> None:
    """Of the tiles that were measured, in calls with one routing or a few, the one that is predicted to take
    the least, of as many experts as may be hit, costs a call less than 2% in the mean."""
    slower, own = [], 0
    path = Path(__file__).parent / "data" / "mixture-tiles.txt"
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, experts, top_k, width, k, tokens, which, *times = line.split()
        known = {tile: float(us) for us, tile in (each.split(":") for each in times)}
        load = Load(int(tokens), int(top_k), int(experts))
        shape = (int(width), int(k)) if which == "both" else (int(k), int(width))
        fmt = cq.formats.get(name).for_kernels
        problem = DecodeProblem(*load.problem(fmt, *shape, plan.Gpu(90), True, which == "both"))
        ways = sorted(decode_timed.ways(problem, load.hits))
        tiles = [tile_of(decode_timed.of_way(problem, way)) for way in ways]
        taken = next((tile for tile in tiles if tile in known), None)
        if taken is not None:
            slower.append(known[taken] / min(known.values()) - 1)
            own += taken == tiles[0]
    assert len(slower) > 200
    assert own > 150  # what the plan takes was measured itself
    assert np.mean(slower) < 0.02
    assert np.quantile(slower, 0.9) < 0.06


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "kbit3", "q4_k", "trellis3-32", "exl3-3-mcg"])
def test_ways_are_launches_that_a_gpu_can_hold(name: str) -> None:
    """No more rows than registers or the shared memory allow; the likeliest first."""
    fmt = cq.formats.get(name).for_kernels
    for m, (n, k), count in combinations((1, 8, 16), [(4096, 4096), (96, 64), (2560, 9728)], (1, 3)):
        problem = plan.Problem(fmt, m, n, k, plan.Gpu(90), count)
        gemms = list(decode_timed.variants(problem))
        assert gemms[0] == plan.decode(problem)
        for gemm in gemms:
            c = dict(gemm.plan.kernel.constants)
            assert gemm.plan.shared <= plan.shared_limit(90, c["RESIDENT"])
            assert gemm.plan.grid[0] * 16 * c["ROW_TILES"] * c["ROW_WARPS"] // c["CLUSTER"] >= n
            assert c["CLUSTER"] < 4 or gemm.plan.grid[0] * count <= 112 * c["RESIDENT"]


def test_no_second_block_fits_beside_one_that_is_to_be_alone() -> None:
    """Whatever registers it takes: its shared memory leaves no room."""
    seen = set()
    for name, m, (n, k) in combinations(
        ("q4_0", "q4_1", "nvfp4", "exl3-3-mcg", "q4_k", "q6_k", "kbit4", "trellis3-32"),
        (1, 2, 4, 8),
        OF_MODELS,
    ):
        gemm = plan.decode(plan.Problem(cq.formats.get(name).for_kernels, m, n, k, plan.Gpu(90)))
        c = dict(gemm.plan.kernel.constants)
        if (c["WARPS"], c["RESIDENT"]) == (8, 1):
            seen.add(name)
            assert 2 * (gemm.plan.shared + (1 << 10)) > 228 << 10  # each costs 1 KB more
            assert gemm.plan.shared <= plan.shared_limit(90)
    assert len(seen) > 4


def test_registers_of_two_blocks() -> None:
    """With several warps along N some kernels lack one for tiles that one warp has."""
    gpu = plan.Gpu(90)
    for name, most in (("q4_1", 6), ("q5_1", 6), ("int4-128-zeros", 6), ("q6_k", 4)):
        rows = (11008, 13824, 14336, 25600, 28672, 65536)
        for n, k, count in combinations(rows, (2048, 4096), (1, 2, 4, 8)):
            gemm = plan.decode(plan.Problem(cq.formats.get(name).for_kernels, 1, n, k, gpu, count))
            c = dict(gemm.plan.kernel.constants)
            assert c["RESIDENT"] == 1 or c["ROW_WARPS"] == 1 or c["ROW_TILES"] <= most, (name, n, k, count)
    for name, hit, sides in combinations(("q6_k", "trellis3-32"), (1, 2, 8, 30), (1, 2)):
        for n, k in ((2048, 1024), (768, 1024), (14336, 4096)):
            fmt, hits = cq.formats.get(name).for_kernels, Hits(1.0, ((hit, 1.0),))
            made = decode_grouped(plan.Problem(fmt, 1, n, k, gpu, sides=sides, grouped=True), hits)
            c = {} if made is None else dict(made[1].plan.kernel.constants)
            assert c.get("RESIDENT", 1) == 1 or c["ROW_TILES"] <= 4, (name, hit, n, k)


def test_few_multiprocessors_are_idle_for_weights_of_many_models() -> None:
    """Of Llama, Qwen and Phi: the busiest has less than 1.2 times its fair share on average."""
    busiest = []
    for name, (n, k), m in combinations(("q4_0", "q8_0", "q4_k", "kbit4"), OF_MODELS, (1, 2, 4, 8)):
        gemm = plan.gemm(plan.Problem(cq.formats.get(name).for_kernels, m, n, k, plan.Gpu(90)))
        c = dict(gemm.plan.kernel.constants)
        blocks = gemm.plan.grid[0] / plan.LARGE_GPU
        if plan.core_of(gemm.plan.kernel) == "wgmma" or blocks <= c["RESIDENT"] / 2:
            continue  # of the latter two launches have half of the GPU each
        if blocks <= c["RESIDENT"]:
            blocks = ceil(blocks)  # of more small ones whoever is done has the next
        row_tiles = blocks * c["ROW_TILES"] * c["ROW_WARPS"] / c["CLUSTER"]
        busiest.append(row_tiles * plan.LARGE_GPU / ceil(n / 16))
    assert len(busiest) > 190
    assert max(busiest) < 1.5
    assert sum(busiest) / len(busiest) < 1.2


def test_small_blocks_never_ask_for_all_of_w_before_x() -> None:
    """Half of a ring's slots, of which there are no more than a warp has steps."""
    for name, m, (n, k) in combinations(("q4_0", "nvfp4", "q4_k"), (1, 2, 4), [(8192, 2048), (8960, 1536)]):
        gemm = plan.decode(plan.Problem(cq.formats.get(name).for_kernels, m, n, k, plan.Gpu(90)))
        c = dict(gemm.plan.kernel.constants)
        assert c["RESIDENT"] == 2
        turns = ceil(k / 64 / (c["WARPS"] // c["ROW_WARPS"]))
        assert (c["DEPTH"] + 1) // 2 < turns  # AHEAD of kernels/core/decode.cuh
        assert c["DEPTH"] <= turns < 8


def test_tables_are_large_where_all_of_x_has_room_beside_them() -> None:
    for capability, m, shape, copies in (
        (90, 1, (14336, 4096), 64),
        (90, 8, (14336, 4096), 64),
        (90, 8, (28672, 28672), 32),
        (90, 16, (14336, 4096), 32),
        (86, 1, (14336, 4096), 32),
    ):
        gemm = plan.decode(plan.Problem(cq.formats.get("kbit4").for_kernels, m, *shape, plan.Gpu(capability)))
        assert dict(gemm.plan.kernel.constants)["COPIES"] == copies, (capability, m, shape)


def test_blocks_of_stacked_matrices_run_at_once() -> None:
    """Of blocks that need a multiprocessor each one too many would take as long as all the others. Of more
    than 42 row tiles for each two rounds may be less work."""
    seen = 0
    for m, n, count in combinations((1, 4, 8, 16), (1024, 4096, 11008, 14336), range(2, 33)):
        gemm = plan.decode(plan.Problem(cq.formats.get("q4_0").for_kernels, m, n, 4096, plan.Gpu(90), count))
        c = dict(gemm.plan.kernel.constants)
        share = ceil(n // 16 / (plan.LARGE_GPU // (count * c["CLUSTER"])))
        if share <= 42 and c["RESIDENT"] == 1:
            seen += 1
            assert gemm.plan.grid[0] * count <= plan.LARGE_GPU, (m, n, count)
    assert seen > 100
