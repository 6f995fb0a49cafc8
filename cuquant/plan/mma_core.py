"""The mma core, for larger batches without wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from ..formats import Format
from .cores import Core, Gemm, gemm_kernel, table_of
from .launch import WARP, Gpu, Kernel, Plan, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, layout

_ROW_WARPS = 4
_LEAST_RING, _LARGEST_RING = 4, 8
"""Stages from which on a ring hides the latency of memory, and those that are enough."""
_LEAST_STAGES = {2: 2, 1: 3}
"""Of the ring of tiles of 256 rows of W, by how many times four warps stand beside each other. Copies have
three quarters of a step of 64 columns to arrive in with two stages, the fewest there can be, and a step more
with three (kernels/core/mma.cuh). Two blocks of 64 batch rows copy twice the bytes of W for as many outputs
as one of 128; where they have room for two stages only, it has room for three."""
_COSTS, _COSTS_8 = {(4, 2): 1.0, (4, 1): 0.98, (2, 1): 1.05}, {(4, 2): 1.0, (4, 1): 1.08, (2, 1): 1.15}
"""Of an output, by row tiles of a warp and how many times four warps stand beside each other: what an H200
takes, relative to 256 rows of W by 128 batch rows; the latter of codes of 8 bits, of which operands of few
outputs cost the L2 cache more."""


class MmaTile(NamedTuple):
    """Groups of 8 batch rows and row tiles of a warp, four of which stand one below the other; how many times
    four stand beside each other; blocks of a multiprocessor, stages of a block's ring."""

    groups: int
    rows: int
    beside: int
    resident: int
    stages: int

    @property
    def warps(self) -> int:
        return _ROW_WARPS * self.beside

    @property
    def batch(self) -> int:
        return 8 * self.groups * self.beside

    @property
    def row_tiles(self) -> int:
        """Of all warps, one below the other."""
        return _ROW_WARPS * self.rows

    @property
    def outputs(self) -> int:
        return self.batch * self.row_tiles * TILE_ROWS


def mma(fmt: Format, m: int, n: int, matrices: int, gpu: Gpu) -> Gemm:
    """The mma core. Chosen on an H200 without wgmma; elsewhere by registers (no spills) and shared memory."""
    return _of_tile(fmt, m, n, matrices, gpu, _tile(fmt, m, n, matrices, gpu))


def _of_tile(fmt: Format, m: int, n: int, matrices: int, gpu: Gpu, tile: MmaTile) -> Gemm:
    copies, fixed = _table_and_factors(fmt, tile, gpu.capability)
    sums = tile.beside * 16 * (tile.row_tiles * TILE_ROWS + 4) * 4
    shared = fixed + max(tile.stages * _stage_bytes(fmt, tile), sums)
    constants = {"GROUPS": tile.groups, "ROW_TILES": tile.rows, "ROW_WARPS": _ROW_WARPS, "WARPS": tile.warps}
    constants |= {"STAGES": tile.stages, "RESIDENT": tile.resident}
    grid = (ceil(n / (tile.row_tiles * TILE_ROWS)), ceil(m / tile.batch), matrices)
    kernel = gemm_kernel(fmt, Core.MMA, copies, constants, shared)
    return Gemm(Plan(kernel, grid, tile.warps * WARP, shared, overlaps=True))


def batch_of(kernel: Kernel) -> int:
    """Batch rows of a block."""
    c = dict(kernel.constants)
    return int(8 * c["GROUPS"] * c["WARPS"] // c["ROW_WARPS"])


def _stage_bytes(fmt: Format, tile: MmaTile) -> int:
    return tile.batch * (2 * TILE_COLUMNS + 16) + tile.row_tiles * layout(fmt).step(1)


def _table_and_factors(fmt: Format, tile: MmaTile, capability: int) -> tuple[int, int]:
    """Copies of a codebook's table, as many as the rings of as many blocks as registers allow leave room for,
    and bytes of shared memory that it and factors of rows take."""
    copies, table = table_of(fmt, capability)
    fewest, factors = _smallest_table(fmt, capability)[0], tile.row_tiles * layout(fmt).row
    room = shared_limit(capability, tile.resident) - factors - tile.stages * _stage_bytes(fmt, tile)
    while copies > fewest and table > room:
        copies, table = copies // 2, table // 2
    return copies, table + factors


def _smallest_table(fmt: Format, capability: int) -> tuple[int, int]:
    """Each weight is used so often that a ring matters more than copies: up to four times fewer."""
    copies, table = table_of(fmt, capability)
    fewest = max(copies // 4, min(copies, 4))
    return fewest, table // (copies // fewest) if table else 0


def _with_ring(fmt: Format, tile: MmaTile, most: int, capability: int) -> MmaTile:
    """The tile with as many stages as there is room for beside the smallest table."""
    _, table = _smallest_table(fmt, capability)
    room = shared_limit(capability, tile.resident) - tile.row_tiles * layout(fmt).row - table
    return tile._replace(stages=min(most, room // _stage_bytes(fmt, tile)))


def _tile(fmt: Format, m: int, n: int, matrices: int, gpu: Gpu) -> MmaTile:
    """Small tiles with a deep ring, where there are up to two for each multiprocessor, or one of twice
    the rows and the batch rows; else those of which the busiest multiprocessor has the least work.

    The deep ring hides the latency of memory (docs/tuning.md). Before sm_80 nothing is copied meanwhile:
    small blocks hide each other's latencies.
    """
    groups = 4 if m <= 32 else 8

    def blocks(tile: MmaTile) -> int:
        return ceil(n / (tile.row_tiles * TILE_ROWS)) * ceil(m / tile.batch) * matrices

    if gpu.capability < 80:
        return MmaTile(groups, 2, 1, 2, 2)
    deep, square, *large = _tiles(fmt, groups, gpu.capability)
    for tile, most in (
        (deep, groups // 4 * gpu.multiprocessors),
        (square, gpu.multiprocessors if m > 64 else 0),
    ):
        if blocks(tile) <= most and tile.stages >= _LEAST_RING:
            return tile
    costs = _COSTS_8 if fmt.bits == 8 else _COSTS

    def work(tile: MmaTile) -> float:
        return ceil(blocks(tile) / gpu.multiprocessors) * tile.outputs * costs[tile.rows, tile.beside]

    return min(large, key=work)


def _tiles(fmt: Format, groups: int, capability: int) -> list[MmaTile]:
    """From sm_80 on: the small one with a deep ring, the square one, and those for larger products."""
    # From sm_100 on the same code takes more registers: those of walks leave room for two blocks.
    three = 2 if fmt.walks and capability >= 100 else 3
    small = MmaTile(groups, 2, 1, 4 if groups == 4 else three, 3)
    # Two small blocks have room: GPUs with fewer multiprocessors need it.
    deep = _with_ring(fmt, small._replace(rows=1, resident=2), _LARGEST_RING, capability)
    square = _with_ring(fmt, MmaTile(8, 2, 2, 1, 0), _LEAST_RING, capability)
    tiles = [deep, square, small]
    for beside in (2, 1) if groups == 8 else ():
        tile = _with_ring(fmt, MmaTile(8, 4, beside, 2 // beside, 0), _LEAST_RING, capability)
        if tile.stages >= _LEAST_STAGES[beside]:
            tiles.append(tile)
    return tiles


def variants(fmt: Format, m: int, n: int, matrices: int, gpu: Gpu) -> Iterator[Gemm]:
    """Every way of this core that may be fastest."""
    groups = (4, 8) if m > 16 else (4,)
    if gpu.capability < 80:
        tiles = [MmaTile(count, 2, 1, 2, 2) for count in groups]
    else:
        tiles = [tile for count in groups for tile in _tiles(fmt, count, gpu.capability) if tile.stages > 1]
    for tile in dict.fromkeys(tiles):
        yield _of_tile(fmt, m, n, matrices, gpu, tile)
