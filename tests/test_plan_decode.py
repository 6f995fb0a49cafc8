"""Tiles of the decode core: few multiprocessors are idle, and registers suffice."""

from __future__ import annotations

from itertools import product as combinations
from math import ceil

import cuquant as cq
from cuquant import plan
from cuquant.plan import wgmma_core
from cuquant.plan.decode_grouped import decode_grouped


def test_tall_tiles_leave_fewer_multiprocessors_idle() -> None:
    """A warp has more than four row tiles only where the busiest multiprocessor has no more then than with
    four, and never more than a matrix has."""
    seen = set()
    names = ("q4_0", "q4_1", "q8_0", "kbit3", "q4_k")
    rows = (192, 4096, 11008, 12288, 14336, 18944, 28672, 32000, 49152, 128_256)
    for name, m, n, count in combinations(names, (1, 2, 4, 8), rows, (1, 128)):
        gemm = plan.decode(cq.formats.get(name).for_kernels, m, n, 4096, count, plan.Gpu(90))
        c = dict(gemm.plan.kernel.constants)
        if c["ROW_TILES"] <= 4:
            continue
        block, share = c["ROW_TILES"] * c["ROW_WARPS"], ceil(n // 16 * count / plan.LARGE_GPU)
        row_warps = 1 << (ceil(share / 4) - 1).bit_length()
        rounds = ceil(gemm.plan.grid[0] * count / (plan.LARGE_GPU * c["RESIDENT"]))
        busiest = rounds * c["RESIDENT"] * block / c["CLUSTER"]
        usual = row_warps * ceil(share / row_warps)
        assert busiest < usual or (busiest == usual and name == "kbit3" and share <= 7)
        assert block <= n // 16
        assert rounds == 1 or c["RESIDENT"] == 2
        seen.add((name, m, n))
    assert {("kbit3", 8, 14336), ("q4_0", 4, 14336), ("q4_0", 8, 28672), ("q4_k", 1, 18944)} <= seen
    assert {("q4_0", 1, 18944), ("q4_1", 1, 28672)} <= seen  # by two small blocks
    assert not {("q4_0", 1, 14336), ("q8_0", 8, 28672), ("kbit3", 4, 32000)} & seen


def test_registers_of_two_blocks() -> None:
    """With several warps along N some kernels lack one for tiles that one warp has."""
    gpu = plan.Gpu(90)
    for name, most in (("q4_1", 6), ("q5_1", 6), ("int4-128-zeros", 6), ("q6_k", 4)):
        rows = (11008, 13824, 14336, 25600, 28672, 65536)
        for n, k, count in combinations(rows, (2048, 4096), (1, 2, 4, 8)):
            gemm = plan.decode(cq.formats.get(name).for_kernels, 1, n, k, count, gpu)
            c = dict(gemm.plan.kernel.constants)
            assert c["RESIDENT"] == 1 or c["ROW_WARPS"] == 1 or c["ROW_TILES"] <= most, (name, n, k, count)
    for name, hit in combinations(("q6_k", "trellis3-32"), (1.0, 2.0, 8.0, 30.0)):
        for n, k in ((2048, 1024), (768, 1024), (14336, 4096)):
            made = decode_grouped(cq.formats.get(name).for_kernels, 1, n, k, hit, gpu, True, 2)
            c = {} if made is None else dict(made.plan.kernel.constants)
            assert c.get("RESIDENT", 1) == 1 or c["ROW_TILES"] <= 4, (name, hit, n, k)


def test_tall_tiles_of_q6_k() -> None:
    seen = set()
    for m, n, k, count in combinations((1, 2), (11008, 22016, 28672, 152_064), (2048, 4096), (1, 3)):
        gemm = plan.decode(cq.formats.get("q6_k").for_kernels, m, n, k, count, plan.Gpu(90))
        constants = dict(gemm.plan.kernel.constants)
        if constants["RESIDENT"] == 2:
            seen.add((constants["ROW_WARPS"] > 1, constants["ROW_TILES"] > 4))
    assert seen == {(False, False), (False, True), (True, False)}


def test_tall_tiles_are_one_large_block_or_two_small_ones() -> None:
    """As they were measured: of seven row tiles a warp, how many blocks a multiprocessor has."""
    for name, m, n, resident in (
        ("q4_0", 1, 28672, 2),
        ("q4_0", 2, 28672, 1),
        ("q4_k", 1, 28672, 2),
        ("q5_k", 1, 28672, 1),
        ("kbit4", 1, 28672, 1),
        ("mxfp4", 8, 14336, 1),
    ):
        gemm = plan.decode(cq.formats.get(name).for_kernels, m, n, 4096, 1, plan.Gpu(90))
        constants = dict(gemm.plan.kernel.constants)
        assert (constants["ROW_TILES"], constants["RESIDENT"]) == (7, resident), (name, m)
    for name, count in combinations(("q4_0", "mxfp4", "q4_k"), (2, 3)):  # of stacks one large block
        gemm = plan.decode(cq.formats.get(name).for_kernels, 1, 28672 // count, 4096, count, plan.Gpu(90))
        constants = dict(gemm.plan.kernel.constants)
        assert constants["ROW_TILES"] * constants["ROW_WARPS"] == 14, (name, count)


def test_few_multiprocessors_are_idle_for_weights_of_many_models() -> None:
    """Of Llama, Qwen and Phi: the busiest has less than 1.2 times its fair share on average."""
    square = [(5120, 5120), (6144, 4096), (3072, 3072), (10240, 8192)]
    wide = [(12288, 4096), (11008, 4096), (9728, 2560), (13824, 5120), (17408, 5120), (18944, 3584)]
    others = [(2560, 9728), (5120, 13824), (152_064, 3584)]
    busiest = []
    for name, (n, k), m in combinations(
        ("q4_0", "q8_0", "q4_k", "kbit4"), square + wide + others, (1, 2, 4, 8)
    ):
        fmt = cq.formats.get(name).for_kernels
        if m >= wgmma_core.least_batch(fmt, n * k):
            continue
        gemm = plan.decode(fmt, m, n, k, 1, plan.Gpu(90))
        c = dict(gemm.plan.kernel.constants)
        rounds = ceil(gemm.plan.grid[0] / (plan.LARGE_GPU * c["RESIDENT"]))
        row_tiles = rounds * c["RESIDENT"] * c["ROW_TILES"] * c["ROW_WARPS"] / c["CLUSTER"]
        busiest.append(row_tiles * plan.LARGE_GPU / ceil(n / 16))
    assert max(busiest) < 1.5
    assert sum(busiest) / len(busiest) < 1.2


def test_tables_are_large_where_all_of_x_has_room_beside_them() -> None:
    for capability, m, shape, copies in (
        (90, 1, (14336, 4096), 64),
        (90, 8, (14336, 4096), 64),
        (90, 8, (28672, 8192), 32),
        (90, 16, (14336, 4096), 32),
        (86, 1, (14336, 4096), 32),
    ):
        gemm = plan.decode(cq.formats.get("kbit4").for_kernels, m, *shape, 1, plan.Gpu(capability))
        assert dict(gemm.plan.kernel.constants)["COPIES"] == copies, (capability, m, shape)


def test_blocks_of_stacked_matrices_run_at_once() -> None:
    """Of blocks that need a multiprocessor each one too many would take as long as all the others. Where a
    block can have its share, that is: up to 56 row tiles, seven of eight warps."""
    for m, n, count in combinations((1, 4, 8, 16), (1024, 4096, 11008, 14336), range(2, 33)):
        gemm = plan.decode(cq.formats.get("q4_0"), m, n, 4096, count, plan.Gpu(90))
        c = dict(gemm.plan.kernel.constants)
        share = ceil(n // 16 / (plan.LARGE_GPU // (count * c["CLUSTER"])))
        if share <= 56 and c["RESIDENT"] == 1:
            assert gemm.plan.grid[0] * count <= plan.LARGE_GPU
