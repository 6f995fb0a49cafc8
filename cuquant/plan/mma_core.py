"""The mma core, for larger batches without wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf, prod
from typing import NamedTuple

from ..formats import Format
from .cores import Core, Gemm, gemm_kernel, table_of
from .launch import FLAGS, WARP, Gpu, Kernel, Plan, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, layout

_LEAST_RING, _LARGEST_RING = 4, 8
"""Stages from which on a ring hides the latency of memory, and those that are enough."""
_LEAST_STAGES = {1: 2, 2: 3}
"""Of the ring of tiles of 256 rows of W, by how many blocks a multiprocessor has. Copies have a half to three
quarters of a step of 64 columns to arrive in with two stages, the fewest there can be, and a step more with
three (kernels/core/mma.cuh). Two blocks of 64 batch rows copy twice the bytes of W for as many outputs as
one of 128; where they have room for two stages only, it has room for three."""


_STEP_US: dict[str, dict[tuple[int, int, int, int], tuple[float, ...]]] = {
    "masks": {
        (4, 1, 4, 1): (0.157, 0.280),
        (4, 2, 4, 1): (0.366, 0.477, 0.698, 1.07),
        (8, 1, 4, 1): (0.269, 0.500),
        (8, 2, 4, 1): (0.458, 0.752, 1.20),
        (8, 2, 4, 2): (0.686,),
        (16, 2, 8, 1): (1.13,),
    },
    "bytes": {
        (4, 1, 4, 1): (0.163, 0.325),
        (4, 2, 4, 1): (0.400, 0.605, 0.910, 1.35),
        (8, 1, 4, 1): (0.287, 0.554),
        (8, 2, 4, 1): (0.502, 0.852, 1.31),
        (8, 2, 4, 2): (0.715,),
        (16, 2, 8, 1): (1.25,),
    },
    "lookups": {
        (4, 1, 4, 1): (0.220, 0.398),
        (4, 2, 4, 1): (0.395, 0.720, 1.17, 1.70),
        (8, 1, 4, 1): (0.359, 0.668),
        (8, 2, 4, 1): (0.530, 0.986, 1.51),
        (8, 2, 4, 2): (0.816,),
        (16, 2, 8, 1): (1.27,),
    },
}
"""What 64 columns take blocks of groups, row tiles, and warps below and beside each other (`MmaTile`), one
on a multiprocessor, two, three, and four, by how codes become numbers: q4_0, q8_0 and kbit4 on an H200
without wgmma, the largest tile on an H100, fitted to 1100 products (tests/data/mma-tiles.txt). Elsewhere they
are taken to stand in the same ratios."""
_COSTS = {
    "masks": {(16, 2, 8, 1): 1.0, (8, 4, 4, 1): 1.05, (8, 2, 4, 1): 1.11},
    "bytes": {(16, 2, 8, 1): 1.0, (8, 4, 4, 1): 1.07, (8, 2, 4, 1): 1.17},
    "lookups": {(16, 2, 8, 1): 1.0, (8, 4, 4, 1): 1.09, (8, 2, 4, 1): 1.16},
}
"""Of an output in a large product, of the same tiles, on an H200 or an H100: operands are made once
for all batch rows of a warp, and the fewer these are the more they cost."""
_MEET_US, _LARGE_MEET_US, _PART_US = 1.5, 8.5, 0.52
"""Until blocks that share columns have added up their sums: any; of the largest tile, of which a thread has
too many to have them all on their way; and for each block but the first, if a tile has 8192 outputs."""
_PARTS, _LEAST_STEPS = (1, 2, 3, 4, 6, 8, 12, 16), 8
"""How many blocks may share columns, and the steps of 64 that each has at least."""
_FEW_ROWS, _LONG_ROW = 40, 4096
"""Rows of W for each multiprocessor up to which, and weights of a row from which on this core wins over the
decode core at 9 to 16 rows."""


class MmaTile(NamedTuple):
    """Groups of 8 batch rows and row tiles of a warp; warps one below the other along the rows of W, and
    beside each other along the batch rows; blocks of a multiprocessor, stages of a block's ring."""

    groups: int
    rows: int
    below: int
    beside: int
    resident: int
    stages: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What a block has to do."""
        return self[:4]

    @property
    def warps(self) -> int:
        return self.below * self.beside

    @property
    def batch(self) -> int:
        return 8 * self.groups * self.beside

    @property
    def row_tiles(self) -> int:
        """Of all warps, one below the other."""
        return self.below * self.rows

    @property
    def outputs(self) -> int:
        return self.batch * self.row_tiles * TILE_ROWS

    @property
    def staged(self) -> int:
        """Bytes of sums that are staged at a time."""
        together = 4 if self.groups == 16 else 2
        return self.beside * 8 * together * (self.row_tiles * TILE_ROWS + 4) * 4

    def blocks(self, m: int, n: int, matrices: int) -> int:
        """Tiles of a product."""
        return ceil(n / (self.row_tiles * TILE_ROWS)) * ceil(m / self.batch) * matrices


def mma(fmt: Format, m: int, n: int, k: int, matrices: int, gpu: Gpu) -> Gemm:
    """The mma core. Chosen on an H200 without wgmma; elsewhere by registers (no spills) and shared memory."""
    tile, parts = _choice(fmt, m, n, k, matrices, gpu)
    return _of_tile(fmt, m, n, matrices, gpu, tile, parts)


def wins_over_decode(m: int, n: int, k: int, matrices: int, gpu: Gpu) -> bool:
    """From 9 rows on, where blocks of this core can share long columns, and those of the decode core cannot,
    as there are no clusters: of 4096 x 14336 16 rows take 21 to 28 us in place of 32 to 35, of 1024 x 8192 9
    in place of 13 to 17."""
    few = matrices == 1 and n <= _FEW_ROWS * gpu.multiprocessors
    return gpu.capability >= 80 and m > 8 and k >= _LONG_ROW and few


def mma_grouped(fmt: Format, m: int, n: int, matrices: int, gpu: Gpu) -> Gemm:
    """The same for rows that are sorted by their matrix of W, at most m of each."""
    return _of_tile(fmt, m, n, matrices, gpu, _tile(fmt, m, n, matrices, gpu))


def _choice(fmt: Format, m: int, n: int, k: int, matrices: int, gpu: Gpu) -> tuple[MmaTile, int]:
    """A tile, and how many blocks share its columns: what is fastest of all that run at once, if there are
    too few tiles of one matrix for the multiprocessors."""
    usual = _tile(fmt, m, n, matrices, gpu)
    if matrices > 1 or usual.blocks(m, n, 1) > usual.resident * gpu.multiprocessors:
        return usual, 1
    known = _STEP_US[_kind(fmt)]
    if usual.shape not in known:
        return usual, 1
    found = [
        tile for tile in (usual, *_sharing_tiles(fmt, m, gpu)) if tile.shape in known and tile.stages > 1
    ]
    return min(
        (
            (_us(fmt, tile, parts, tile.blocks(m, n, 1), k, gpu), tile != usual, tile, parts)
            for tile in dict.fromkeys(found)
            for parts in _parts(tile, tile.blocks(m, n, 1), k, gpu)
        ),
        default=(0.0, False, usual, 1),
    )[2:]


def _parts(tile: MmaTile, tiles: int, k: int, gpu: Gpu) -> Iterator[int]:
    """How many blocks may share the columns of each of so many tiles, so that all run at once."""
    for parts in _PARTS:
        whole = parts == 1 or (tiles <= FLAGS and _steps(k, parts) >= _LEAST_STEPS)
        if whole and tiles * parts <= tile.resident * gpu.multiprocessors:
            yield parts


def _us(fmt: Format, tile: MmaTile, parts: int, tiles: int, k: int, gpu: Gpu) -> float:
    """Of an H200 without wgmma, but for what all launches take."""
    steps = _STEP_US[_kind(fmt)][tile.shape]
    together = ceil(tiles * parts / gpu.multiprocessors)
    work = _steps(k, parts) * steps[together - 1]
    if parts == 1:
        return work
    meeting = _LARGE_MEET_US if tile.groups == 16 else _MEET_US
    return work + meeting + (parts - 1) * _PART_US * tile.outputs / 8192


def _steps(k: int, parts: int) -> int:
    """Of 64 columns, that the block with the most of them has: whole numbers of 256."""
    return ceil(ceil(k / 256) / parts) * 4


def _kind(fmt: Format) -> str:
    if fmt.lookup or fmt.walks:
        return "lookups"
    return "bytes" if fmt.bits == 8 else "masks"


def _of_tile(fmt: Format, m: int, n: int, matrices: int, gpu: Gpu, tile: MmaTile, parts: int = 1) -> Gemm:
    """Of a tile, whose columns so many blocks share."""
    copies, fixed = _table_and_factors(fmt, tile, gpu.capability)
    shared = fixed + max(tile.stages * _stage_bytes(fmt, tile), tile.staged)
    constants = {"GROUPS": tile.groups, "ROW_TILES": tile.rows, "ROW_WARPS": tile.below, "WARPS": tile.warps}
    constants |= {"STAGES": tile.stages, "RESIDENT": tile.resident, "SPLITS": int(parts > 1)}
    grid = (ceil(n / (tile.row_tiles * TILE_ROWS)), ceil(m / tile.batch), matrices * parts)
    kernel = gemm_kernel(fmt, Core.MMA, copies, constants, shared)
    made = Plan(kernel, grid, tile.warps * WARP, shared, overlaps=True)
    if parts == 1:
        return Gemm(made)
    return Gemm(made, partials=prod(grid) * tile.outputs * 4)


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
    if gpu.capability < 80:
        return _old_tile(groups)
    deep, square, *large = _tiles(fmt, groups, gpu.capability)
    for tile, most in (
        (deep, groups // 4 * gpu.multiprocessors),
        (square, gpu.multiprocessors if m > 64 else 0),
    ):
        if tile.blocks(m, n, matrices) <= most and tile.stages >= _LEAST_RING:
            return tile
    costs = _COSTS[_kind(fmt)]

    def work(tile: MmaTile) -> float:
        waves = ceil(tile.blocks(m, n, matrices) / gpu.multiprocessors)
        return waves * tile.outputs * costs.get(tile.shape, 1)

    return min(large, key=work)


def _old_tile(groups: int) -> MmaTile:
    """The one before sm_80."""
    return MmaTile(groups, 2, 4, 1, 2, 2)


def _sharing_tiles(fmt: Format, m: int, gpu: Gpu) -> list[MmaTile]:
    """Those of which several blocks may share the columns, if what they take is known."""
    groups = 4 if m <= 32 else 8
    if gpu.capability < 80:
        return [_old_tile(groups)]
    deep, square, small, *large = _tiles(fmt, groups, gpu.capability)
    return [deep, small, *([square] if m > 64 else ()), *(large if m > 128 else ())]


def _tiles(fmt: Format, groups: int, capability: int) -> list[MmaTile]:
    """From sm_80 on: the small one with a deep ring, the square one, and those for larger products."""
    # From sm_100 on the same code takes more registers: those of walks leave room for two blocks.
    three = 2 if fmt.walks and capability >= 100 else 3
    small = MmaTile(groups, 2, 4, 1, 4 if groups == 4 else three, 3)
    # Two small blocks have room: GPUs with fewer multiprocessors need it.
    deep = _with_ring(fmt, small._replace(rows=1, resident=2), _LARGEST_RING, capability)
    square = _with_ring(fmt, MmaTile(8, 2, 4, 2, 1, 0), _LEAST_RING, capability)
    tiles = [deep, square, small]
    # There masks of 2 bits have too few for the largest.
    largest = () if fmt.masked and capability >= 100 else (MmaTile(16, 2, 8, 1, 1, 0),)
    for large in (*largest, MmaTile(8, 4, 4, 1, 2, 0)) if groups == 8 else ():
        tile = _with_ring(fmt, large, _LEAST_RING, capability)
        if tile.stages >= _LEAST_STAGES[tile.resident]:
            tiles.append(tile)
    return tiles


def variants(fmt: Format, m: int, n: int, k: int, matrices: int, gpu: Gpu) -> Iterator[Gemm]:
    """Every way of this core that may be fastest, the likeliest first."""
    groups = (4, 8) if m > 16 else (4,)
    if gpu.capability < 80:
        tiles = [_old_tile(count) for count in groups]
    else:
        tiles = [tile for count in groups for tile in _tiles(fmt, count, gpu.capability) if tile.stages > 1]
    known, found = _STEP_US[_kind(fmt)], list[tuple[float, MmaTile, int]]()
    for tile in dict.fromkeys(tiles):
        blocks = tile.blocks(m, n, 1)
        fits = list(_parts(tile, blocks, k, gpu)) if matrices == 1 and tile.shape in known else []
        times = {parts: _us(fmt, tile, parts, blocks, k, gpu) for parts in fits}
        found.append((times.pop(1, inf), tile, 1))
        if times:
            found.append((min(times.values()), tile, min(times, key=lambda parts: times[parts])))
    for _, tile, parts in sorted(found, key=lambda each: each[0]):  # as before where times are not known
        yield _of_tile(fmt, m, n, matrices, gpu, tile, parts)
