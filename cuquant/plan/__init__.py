"""From a `Problem` to a launch: the only place that knows kernels, tiles, grids and shared memory.

A Plan yields the compiler's defines and the launch from the same numbers, so that host and device cannot
disagree. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from ..formats import Format
from ..formats.kernels import kernels_of
from . import decode_timed, exl3, moe, trellis, tuning
from .blocks import (
    GROUPS_ENCODER,
    LONGEST_ROW,
    SEARCHING_ENCODER,
    activations,
    block_kernels,
    center,
    group_lanes,
    mean_squares,
    per_block,
    prepare_kernels,
    quantize,
    repack,
)
from .cores import DECODE_BATCH, WGMMA_BATCH, Core, Gemm, Problem, core_of
from .decode_plain import decode
from .launch import FLAGS, LARGE_GPU, MOST_BLOCKS, WARP, Gpu, Kernel, Plan, beside, lone, shared_limit
from .mma_core import mma, wins_over_decode
from .planes import MOST_COLUMNS, TILE_COLUMNS, TILE_ROWS, Layout, Planes, layout, row_factors, tiles
from .wgmma_core import signed
from .wgmma_timed import few_rows, least_batch, wgmma

__all__ = [
    "DECODE_BATCH",
    "FLAGS",
    "GROUPS_ENCODER",
    "SEARCHING_ENCODER",
    "LARGE_GPU",
    "LONGEST_ROW",
    "MOST_BLOCKS",
    "MOST_COLUMNS",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "WARP",
    "WGMMA_BATCH",
    "Core",
    "Gemm",
    "Gpu",
    "Kernel",
    "Layout",
    "Plan",
    "Planes",
    "Problem",
    "activations",
    "all_kernels",
    "center",
    "core_of",
    "decode",
    "exl3",
    "gemm",
    "group_lanes",
    "layout",
    "matrix_kernels",
    "mean_squares",
    "beside",
    "lone",
    "mma",
    "moe",
    "per_block",
    "prepare_kernels",
    "quantize",
    "repack",
    "row_factors",
    "shared_limit",
    "signed",
    "tiles",
    "trellis",
    "tuning",
    "wgmma",
]


@lru_cache(maxsize=4096)
def gemm(problem: Problem, repeats: bool = False, to_convert: bool = False, signs: bool = False) -> Gemm:
    """The launch of a product that is not grouped.

    Activations whose row `repeats` are multiplied by the decode core: the copy engine cannot read them. Where
    they are `to_convert`, to q8_1 or by turning them, and the plan says nothing of it, they must be converted
    beforehand; so must those that are to take `signs` of W's columns, if the plan does not say to what these
    go. What was measured to be fastest on this GPU (`tuning`) goes before an H200's figures.
    """
    m, half, gpu = problem.m, problem.half, problem.gpu
    if gpu.tuned is not None and half and not (repeats or (to_convert and not problem.kernels.turned)):
        found = gpu.tuned.choice(problem)
        if found is not None:
            return signed(found) if signs else found
    if half and not repeats and gpu.capability == 90:
        if m >= WGMMA_BATCH:
            return wgmma(problem, signs)
        if m >= least_batch(problem):
            return decode_or_wgmma(problem, to_convert)
    if not half or repeats or (m <= DECODE_BATCH and not wins_over_decode(problem)):
        return decode(problem, to_convert)
    return mma(problem)


def decode_or_wgmma(problem: Problem, to_convert: bool) -> Gemm:
    """Up to 8 rows times large weights, on sm_90. Of 8 bits they are so many bytes that how they are read
    decides, and the wgmma core's blocks share tiles: q8_0 at 28672 x 8192 takes an H200 61 us in place of 64
    with four rows. Of long rows it takes fewer instructions for codes that are looked up, or of 5 and 6 bits:
    kbit4 at 4096 x 14336 and eight rows takes 12.7 us in place of 14.4."""
    own, other = decode_timed.fastest(problem, to_convert), few_rows(problem)
    return min(own, other, key=lambda each: each[0])[1]


def matrix_kernels(fmt: Format) -> set[Kernel]:
    """What converts matrices of a format that stores them whole, and surrounds its products."""
    return exl3.kernels(fmt) if kernels_of(fmt).walks else trellis.kernels(fmt)


def all_kernels(formats: list[Format], gpus: Iterable[Gpu], every: int = 1) -> list[Kernel]:
    """Kernels of every kind that plans ask for on GPUs of one architecture, for tests that compile them.

    Of products those of many shapes: short and long rows, few and many of them, batches of every tile; or of
    `every` so many-th of them.
    """
    found, gpus = set[Kernel](), list(gpus)
    shapes = [
        (
            (1, 2, 4, 6, 8, 9),
            (16, 1 << 10, 1 << 12, 14336, 28672, 1 << 16),
            (1 << 10, 1 << 12, 14336, 28672),
        ),
        (
            (9, 17, 33, 65, 129, 513, 4096),
            (16, 1 << 10, 1 << 12, 1 << 13, 14336, 1 << 16),
            (1 << 10, 1 << 12),
        ),
    ]
    for given in (f for f in formats if f.on_gpu):
        fmt = given.for_kernels
        found |= matrix_kernels(fmt) if fmt.whole_matrices else block_kernels(given, gpus[0])
        if fmt.for_activations or not kernels_of(fmt).in_float16:
            continue
        for batches, rows, columns in shapes:
            for gpu, m, n, k, half in list(product(gpus, batches, rows, columns, (True, False)))[::every]:
                for to_convert in {False, half and n == 1 << 12}:  # the same lines in all tiles
                    for signs in {False, kernels_of(fmt).signed_columns}:
                        made = gemm(Problem(fmt, m, n, k, gpu, half=half), to_convert=to_convert, signs=signs)
                        found.add(made.plan.kernel)
    return sorted(found, key=repr)
