"""The mma core, for larger batches without wgmma."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import NamedTuple

from ..formats import Format
from ..formats.kernels import Coding, kernels_of
from .cores import Core, Gemm, Problem, gemm_kernel, table_of
from .launch import FLAGS, WARP, Kernel, Plan, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, layout

_LEAST_RING, _LARGEST_RING = 4, 8
"""Stages from which on a ring hides the latency of memory, and those that are enough."""
_LEAST_STAGES = {1: 2, 2: 3}
"""Least stages of the ring of tiles of 256 rows of W, by how many blocks a multiprocessor has. Copies have a
half to three quarters of a step of 64 columns to arrive in with two stages, the fewest there can be, and a
step more with three (kernels/core/mma.cuh). Two blocks of 64 batch rows copy twice the bytes of W for as many
outputs as one of 128; where they have room for two stages only, it has room for three."""


_PACE: dict[str, dict[tuple[int, int, int, int], tuple[float, ...]]] = {
    "masks": {
        (4, 1, 4, 1): (3.14, 0.166, 0.288),
        (4, 2, 4, 1): (3.44, 0.372, 0.483, 0.697, 1.05),
        (8, 1, 4, 1): (3.95, 0.260, 0.496),
        (8, 2, 4, 1): (5.94, 0.408, 0.680, 0.969),
        (8, 2, 4, 2): (5.74, 0.643),
        (8, 4, 4, 1): (2.72, 0.663, 1.23),
        (16, 2, 8, 1): (6.30, 1.09),
    },
    "bytes": {
        (4, 1, 4, 1): (2.93, 0.180, 0.338),
        (4, 2, 4, 1): (3.09, 0.433, 0.626, 0.919, 1.33),
        (8, 1, 4, 1): (3.43, 0.293, 0.562),
        (8, 2, 4, 1): (5.73, 0.465, 0.748, 1.09),
        (8, 2, 4, 2): (4.87, 0.674),
        (8, 4, 4, 1): (2.30, 0.724, 1.30),
        (16, 2, 8, 1): (5.96, 1.15),
    },
    "lookups": {
        (4, 1, 4, 1): (2.79, 0.229, 0.411),
        (4, 2, 4, 1): (3.17, 0.404, 0.726, 1.16, 1.67),
        (8, 1, 4, 1): (3.95, 0.344, 0.646),
        (8, 2, 4, 1): (5.33, 0.503, 0.911, 1.33),
        (8, 2, 4, 2): (6.04, 0.768),
        (8, 4, 4, 1): (3.20, 0.866, 1.48),
        (16, 2, 8, 1): (5.03, 1.26),
    },
}
"""What blocks of groups, row tiles, and warps below and beside each other (`MmaTile`) take, in microseconds,
by how codes become numbers: whatever columns they have, and for 64 columns, with one on a multiprocessor,
two, three, and four. Fitted to 1900 times of q4_0, q8_0 and kbit4 on an H100 and an H200 without wgmma
(tests/data/mma-tiles.txt): in the mean 3 to 5% from what was measured. Elsewhere they are taken to stand in
the same ratios."""
_MEET_US, _LARGE_MEET_US, _PART_US = 2.4, 8.3, 0.44
"""Microseconds until blocks that share columns have added up their sums: any; of tiles of 256 rows of W, of
which a thread has too many to have them all on their way; and for each block but the first, if a tile has
8192 outputs."""
_PARTS, _LEAST_STEPS = (2, 3, 4, 6, 8, 12, 16), 8
"""How many blocks may share columns, and the steps of 64 that the one with the most of them has at least."""
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
        """Groups, row tiles, and warps below and beside each other: the key of `_PACE`."""
        return self[:4]

    @property
    def warps(self) -> int:
        return self.below * self.beside

    @property
    def batch(self) -> int:
        return 8 * self.groups * self.beside

    @property
    def row_tiles(self) -> int:
        """Row tiles of all warps, one below the other."""
        return self.below * self.rows

    @property
    def outputs(self) -> int:
        return self.batch * self.row_tiles * TILE_ROWS

    @property
    def together(self) -> int:
        """Groups of a warp whose sums are staged at a time: half as many barriers for the largest tile."""
        return 4 if self.groups == 16 else 2

    @property
    def staged(self) -> int:
        """Bytes of the sums that are staged at a time."""
        return self.beside * 8 * self.together * (self.row_tiles * TILE_ROWS + 4) * 4

    def grid(self, problem: Problem) -> tuple[int, int, int]:
        """Tiles of a product: along N, of its batch rows, of its matrices."""
        along_n = ceil(problem.n / (self.row_tiles * TILE_ROWS))
        return along_n, ceil(problem.m / self.batch), problem.matrices


class MmaWay(NamedTuple):
    """A tile, and of how many of the last ones the columns are shared, by how many blocks each."""

    tile: MmaTile
    shared: int = 0
    parts: int = 1


def mma(problem: Problem) -> Gemm:
    """The mma core. Chosen on an H200 without wgmma; elsewhere by registers (no spills) and shared memory."""
    return _of_way(problem, _fastest(problem))


def wins_over_decode(problem: Problem) -> bool:
    """Whether this core wins over the decode core: from 9 rows on, where its blocks can share long columns,
    and those of the decode core cannot, as there are no clusters: of 4096 x 14336 16 rows take 21 to 28 us in
    place of 32 to 35, of 1024 x 8192 9 in place of 13 to 17."""
    few = problem.matrices == 1 and problem.n <= _FEW_ROWS * problem.gpu.multiprocessors
    return problem.gpu.capability >= 80 and problem.m > 8 and problem.k >= _LONG_ROW and few


def mma_grouped(problem: Problem) -> Gemm:
    """The mma core for rows that are sorted by their matrix of W, at most m of each."""
    unshared = (MmaWay(tile) for tile in _usable(problem))
    return _of_way(problem, min(unshared, key=lambda way: _us(problem, way)))


def _fastest(problem: Problem) -> MmaWay:
    """The fastest way of all tiles, with columns shared or not."""
    found = (_best_way(problem, tile) for tile in _usable(problem))
    return min(found, key=lambda each: each[0])[1]


def _best_way(problem: Problem, tile: MmaTile) -> tuple[float, MmaWay]:
    """Predicted microseconds of a tile's fastest way, and that way."""
    found = ((_us(problem, way), way) for way in _ways(problem, tile))
    return min(found, key=lambda each: each[0])


def _with_room(fmt: Format, tile: MmaTile, capability: int) -> MmaTile:
    """The tile with as many blocks on a multiprocessor as have room with their rings."""
    table, factors = _smallest_table(fmt, capability)[1], tile.row_tiles * layout(fmt).row
    shared = table + factors + tile.stages * _stage_bytes(fmt, tile)
    while tile.resident > 1 and shared > shared_limit(capability, tile.resident):
        tile = tile._replace(resident=tile.resident - 1)
    return tile


def _usable(problem: Problem) -> list[MmaTile]:
    """Tiles for its batch rows. Before sm_80 nothing is copied meanwhile: small blocks hide each other's
    latencies."""
    fmt, m, capability = problem.fmt, problem.m, problem.gpu.capability
    groups = 4 if m <= 32 else 8
    if capability < 80:
        return [_with_room(fmt, _old_tile(groups), capability)]
    deep, square, small, *large = _tiles(fmt, groups, capability)
    tiles = [small, deep, *([square, *large] if m > 64 else ())]
    return [tile for tile in tiles if tile.stages > 1]


def _ways(problem: Problem, tile: MmaTile) -> Iterator[MmaWay]:
    """Ways of a tile: with the columns shared of no tiles, or of those that the last round has of one matrix,
    so that all of their blocks run at once."""
    yield MmaWay(tile)
    tiles, places = prod(tile.grid(problem)), tile.resident * problem.gpu.multiprocessors
    last = tiles % places if tiles > places else tiles
    if problem.matrices > 1 or not 0 < last <= FLAGS:
        return
    for parts in _PARTS:
        if _steps(problem.k, parts) >= _LEAST_STEPS and last * parts <= places:
            yield MmaWay(tile, last, parts)


def _us(problem: Problem, way: MmaWay) -> float:
    """Predicted microseconds of all tiles, launch overhead excluded."""
    tile, k, multiprocessors = way.tile, problem.k, problem.gpu.multiprocessors
    start, *steps = _PACE[_kind(problem.fmt)][tile.shape]
    rounds, last = divmod(prod(tile.grid(problem)), tile.resident * multiprocessors)
    us = rounds * (start + _steps(k, 1) * steps[tile.resident - 1])
    if last:
        together = ceil(last * way.parts / multiprocessors)
        us += start + _steps(k, way.parts) * steps[together - 1]
    if way.shared:
        us += _LARGE_MEET_US if tile.row_tiles == 16 else _MEET_US
        us += (way.parts - 1) * _PART_US * tile.outputs / 8192
    return us


def _steps(k: int, parts: int) -> int:
    """Steps of 64 columns that the block with the most of them has: whole multiples of 256 columns."""
    return ceil(ceil(k / 256) / parts) * 4


def _kind(fmt: Format) -> str:
    if kernels_of(fmt).lookup or kernels_of(fmt).walks:
        return "lookups"
    return "bytes" if fmt.bits == 8 else "masks"


def _of_way(problem: Problem, way: MmaWay) -> Gemm:
    fmt, (tile, shared_tiles, parts) = problem.fmt, way
    copies, fixed = _table_and_factors(fmt, tile, problem.gpu.capability)
    shared = fixed + max(tile.stages * _stage_bytes(fmt, tile), tile.staged)
    constants = {"GROUPS": tile.groups, "ROW_TILES": tile.rows, "ROW_WARPS": tile.below, "WARPS": tile.warps}
    constants |= {"STAGES": tile.stages, "RESIDENT": tile.resident}
    constants |= {"TOGETHER": tile.together, "SPLITS": int(shared_tiles > 0)}
    grid = tile.grid(problem)
    if shared_tiles:
        grid = (prod(grid) + shared_tiles * (parts - 1), 1, 1)
    kernel = gemm_kernel(fmt, Core.MMA, copies, constants, shared)
    made = Plan(kernel, grid, tile.warps * WARP, shared, overlaps=True)
    partials = shared_tiles * parts * tile.outputs * 4
    return Gemm(made, streamed=shared_tiles, parts=parts if shared_tiles else 0, partials=partials)


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
    """Fewest copies of a codebook's table, and their bytes. Each weight is used so often that a ring matters
    more than copies: up to four times fewer."""
    copies, table = table_of(fmt, capability)
    fewest = max(copies // 4, min(copies, 4))
    return fewest, table // (copies // fewest) if table else 0


def _with_ring(fmt: Format, tile: MmaTile, most: int, capability: int) -> MmaTile:
    """The tile with as many stages as there is room for beside the smallest table."""
    _, table = _smallest_table(fmt, capability)
    room = shared_limit(capability, tile.resident) - tile.row_tiles * layout(fmt).row - table
    return tile._replace(stages=min(most, room // _stage_bytes(fmt, tile)))


def _old_tile(groups: int) -> MmaTile:
    """The tile before sm_80."""
    return MmaTile(groups, 2, 4, 1, 2, 2)


def _tiles(fmt: Format, groups: int, capability: int) -> list[MmaTile]:
    """Tiles from sm_80 on: the small one with a deep ring, the square one, and those for larger products."""
    kernels = kernels_of(fmt)
    # From sm_100 on the same code takes more registers: those of walks leave room for two blocks.
    three = 2 if kernels.walks and capability >= 100 else 3
    small = _with_room(fmt, MmaTile(groups, 2, 4, 1, 4 if groups == 4 else three, 3), capability)
    # Two small blocks have room: GPUs with fewer multiprocessors need it.
    deep = _with_ring(fmt, small._replace(rows=1, resident=2), _LARGEST_RING, capability)
    square = _with_ring(fmt, MmaTile(8, 2, 4, 2, 1, 0), _LEAST_RING, capability)
    tiles = [deep, square, small]
    # There masks of 2 bits have too few for the largest.
    masked = kernels.coding is Coding.MASKED_CODEBOOK
    largest = () if masked and capability >= 100 else (MmaTile(16, 2, 8, 1, 1, 0),)
    for large in (*largest, MmaTile(8, 4, 4, 1, 2, 0)) if groups == 8 else ():
        tile = _with_ring(fmt, large, _LEAST_RING, capability)
        if tile.stages >= _LEAST_STAGES[tile.resident]:
            tiles.append(tile)
    return tiles


def variants(problem: Problem) -> Iterator[Gemm]:
    """Every tile of this core that may be fastest, the likeliest first."""
    fmt, capability = problem.fmt, problem.gpu.capability
    groups = (4, 8) if problem.m > 16 else (4,)
    if capability < 80:
        tiles = [_with_room(fmt, _old_tile(count), capability) for count in groups]
    else:
        tiles = [tile for count in groups for tile in _tiles(fmt, count, capability) if tile.stages > 1]
    found = [_best_way(problem, tile) for tile in dict.fromkeys(tiles)]
    for _, way in sorted(found, key=lambda each: each[0]):
        yield _of_way(problem, way)
