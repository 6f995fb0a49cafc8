"""Plans for GPUs with other numbers of multiprocessors than an H200's."""

from __future__ import annotations

from itertools import product as combinations
from math import ceil

import numpy as np
import pytest

import cuquant as cq
from cuquant import plan

OTHER_GPUS = {
    "T4": plan.Gpu(75, 40),
    "A100": plan.Gpu(80, 108),
    "RTX 3090": plan.Gpu(86, 82),
    "RTX 4070": plan.Gpu(89, 46),
    "L4": plan.Gpu(89, 58),
    "RTX 4090": plan.Gpu(89, 128),
    "H20": plan.Gpu(90, 78),
    "H100 PCIe": plan.Gpu(90, 114),
    "B200": plan.Gpu(100, 148),
    "RTX 5090": plan.Gpu(120, 170),
}


def most_row_tiles(gemm: plan.Gemm, gpu: plan.Gpu) -> float:
    """That a multiprocessor has of a product of the decode core; blocks of a pair have half of each."""
    c = dict(gemm.plan.kernel.constants)
    return ceil(gemm.plan.grid[0] / gpu.multiprocessors) * c["ROW_TILES"] * c["ROW_WARPS"] / c["CLUSTER"]


@pytest.mark.parametrize("gpu", OTHER_GPUS.values(), ids=OTHER_GPUS)
def test_few_rows_keep_all_multiprocessors_busy(gpu: plan.Gpu) -> None:
    """The busiest has less than twice its share, and at most a third more than by a plan for 132."""
    busy = []
    for name, m, (n, k) in combinations(
        ("q4_0", "q5_1", "q8_0", "kbit4", "q6_k"),
        (1, 2, 4, 8),
        ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (11008, 4096)),
    ):
        fmt = cq.formats.get(name).for_kernels
        gpus = (gpu, plan.Gpu(gpu.capability))
        own, other = (plan.decode(plan.Problem(fmt, m, n, k, each)) for each in gpus)
        most = most_row_tiles(own, gpu)
        share = ceil(n / 16) / gpu.multiprocessors
        busy.append(share / most)
        assert most <= 1.34 * most_row_tiles(other, gpu), (name, m, n, k)
        assert share / most > 0.5, (name, m, n, k)
    assert np.mean(busy) > 0.7


def test_larger_products_fill_the_gpu_that_there_is() -> None:
    fmt = cq.formats.get("q4_0").for_kernels
    for gpu in (plan.Gpu(90, 78), plan.Gpu(90, 114), plan.Gpu(90)):
        for m in (16, 64, 256, 4096):
            gemm = plan.gemm(plan.Problem(fmt, m, 14336, 4096, gpu))
            c = dict(gemm.plan.kernel.constants)
            assert gemm.plan.grid[0] <= gpu.multiprocessors * c["RESIDENT"]
            assert not gemm.streamed or gemm.plan.grid[0] >= gpu.multiprocessors - 1
    made = plan.moe.product(fmt, plan.moe.Load(512, 2, 8), 14336, 4096, plan.Gpu(90, 78), gated=True)
    assert made is not None
    assert made.gemm.plan.grid[0] <= 78
    # Two blocks of a multiprocessor have room for two runs each, which are shorter where memory is less.
    for capability, tiles in ((75, 16), (86, 32), (90, 64)):
        step = plan.repack(fmt, "to_fragments", 1000, 1000, plan.Gpu(capability))
        assert dict(step.kernel.constants)["RUN"] == tiles
        assert step.shared <= plan.launch.shared_limit(capability, 2)


@pytest.mark.parametrize("multiprocessors", [1, 2, 4, 5])
def test_a_few_multiprocessors_have_plans(multiprocessors: int) -> None:
    """A part of a GPU may have no room for clusters of two blocks, or of four."""
    fmt, gpu = cq.formats.get("q4_0").for_kernels, plan.Gpu(90, multiprocessors)
    for m in (1, 16, 64, 4096):
        assert plan.gemm(plan.Problem(fmt, m, 4096, 4096, gpu)).plan.grid[0] >= 1
    for tokens in (1, 64, 4096):
        load = plan.moe.Load(tokens, 2, 8)
        assert plan.moe.product(fmt, load, 4096, 4096, gpu, half=False, gated=True) is not None
