"""The mma core, for larger batches without wgmma."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ..formats import Format
from .cores import Core, Gemm, gemm_kernel, table_of
from .launch import LARGE_GPU, WARP, Plan, paired_limit
from .planes import TILE_COLUMNS, TILE_ROWS, has_minimum, layout, row_factors

_WARPS = 4
_LEAST_RING, _LARGEST_RING = 4, 8
"""Stages from which on a ring hides the latency of memory, and those that are enough."""
_BUSY = 0.9
"""Share of its blocks' time that a launch of tall tiles should use."""


class MmaTile(NamedTuple):
    """Groups of 8 batch rows, row tiles of a warp, blocks of a multiprocessor, stages of a block's ring."""

    groups: int
    rows: int
    resident: int
    stages: int


def mma(fmt: Format, m: int, n: int, matrices: int, capability: int) -> Gemm:
    """The mma core. Chosen on an H200 without wgmma; elsewhere by registers (no spills) and shared memory."""
    tile = _tile(fmt, m, n, matrices, capability)
    batch, row_tiles = tile.groups * 8, _WARPS * tile.rows
    copies, beside = _beside(fmt, tile.rows, capability)
    sums = 16 * (row_tiles * TILE_ROWS + 4) * 4
    shared = beside + max(tile.stages * _stage_bytes(fmt, tile.groups, tile.rows), sums)
    constants = {"GROUPS": tile.groups, "ROW_TILES": tile.rows, "WARPS": _WARPS, "STAGES": tile.stages}
    constants |= {"RESIDENT": tile.resident}
    grid = (ceil(n / (row_tiles * TILE_ROWS)), ceil(m / batch), matrices)
    kernel = gemm_kernel(fmt, Core.MMA, copies, constants, shared)
    return Gemm(Plan(kernel, grid, _WARPS * WARP, shared, overlaps=True))


def _stage_bytes(fmt: Format, groups: int, rows: int) -> int:
    return groups * 8 * (2 * TILE_COLUMNS + 16) + _WARPS * rows * layout(fmt).step(1)


def _beside(fmt: Format, rows: int, capability: int) -> tuple[int, int]:
    """Copies of a codebook's table, and bytes of shared memory that it and factors of rows take."""
    copies, table = table_of(fmt, Core.MMA, capability)
    return copies, table + _WARPS * rows * layout(fmt).row


def _tile(fmt: Format, m: int, n: int, matrices: int, capability: int) -> MmaTile:
    """Small tiles with a deep ring, where a large GPU has up to two for each multiprocessor; else tiles of
    which several on a multiprocessor hide each other's latencies, as registers allow.

    The deep ring hides that of memory: 128 rows times q4_0 weights of 4096 x 4096 take an H200 32 us in place
    of 46. Of the others codes that take more instructions have twice the rows, where that leaves enough of
    them. With 163 KB three blocks fit on a multiprocessor, with 99 KB two. Before sm_80 nothing is copied
    meanwhile.
    """
    groups, rings = 4 if m <= 32 else 8, capability >= 80
    batches = ceil(m / (8 * groups)) * matrices

    def blocks(rows: int) -> int:
        return ceil(n / (_WARPS * rows * TILE_ROWS)) * batches

    for rows, most in ((1, groups // 4 * LARGE_GPU), (2, 2 * LARGE_GPU if groups == 8 else 0)):
        # Two blocks have room: GPUs with fewer multiprocessors need it.
        room = paired_limit(capability) - _beside(fmt, rows, capability)[1]
        stages = min(_LARGEST_RING, room // _stage_bytes(fmt, groups, rows))
        if rings and blocks(rows) <= most and stages >= _LEAST_RING:
            return MmaTile(groups, rows, 2, stages)
    stages = 3 if rings else 2
    cheap = fmt.bits == 4 and not fmt.lookup and not has_minimum(fmt)
    spared = 80 <= capability < 100  # elsewhere more registers are taken by the same code
    scarce = fmt.has_zero_points or fmt.bits == 6  # which take more registers again
    if spared and not cheap and not scarce and m > 128 and _busy(blocks(4), fmt.lookup):
        return MmaTile(groups, 4, 2, stages)
    if not spared or fmt.bits == 6:
        return MmaTile(groups, 2, 2, stages)
    light = cheap or fmt.bits == 8 if groups == 4 else cheap and not row_factors(fmt)
    return MmaTile(groups, 2, 4 if light else 3, stages)


def _busy(blocks: int, lookup: bool) -> bool:
    """Whether so many blocks, of which a multiprocessor has two, keep it busy to the end; of codes that are
    looked up, once for all batch rows of a block, half as many are better than smaller ones."""
    waves = blocks / (2 * LARGE_GPU)
    return waves >= (0.5 if lookup else 3) or waves / ceil(waves) >= _BUSY
