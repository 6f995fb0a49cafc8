"""The decode core: what a launch for small batches is made of. Which one is taken, decode_plain.py,
decode_timed.py (on sm_90) and decode_grouped.py say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import product
from math import ceil
from typing import NamedTuple

from .cores import Core, Gemm, Problem, gemm_kernel
from .launch import WARP, Gpu, Plan, lone, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, Layout, layout, whole_lines

_ROOMY = 200 << 10
"""Bytes of shared memory beyond which a block may have a table of 64 KB."""
_FOUND = 512
"""Bytes of static shared memory that grouped products have beyond what limits count with: the entries of rows
(`found` in kernels/core/decode.cuh)."""
_QUANTIZED = 6 << 10
"""Numbers of one row, for each block of a cluster, that blocks quantize themselves: of more a kernel before
takes less.

What it costs an H200, in us of q4_0: 0.4 at 4096 x 4096 and 14336 x 4096 with one row, but 0.7 and 1.5 with
two, and 1.4 at 4096 x 14336 with one; a kernel before 0.6 and 1.0 with four rows, and 0.5.
"""
_TURNED = 4 << 10
"""Numbers of one row that blocks turn themselves: 4096 x 4096 takes 8.9 us in place of 9.5, but 4096 x 14336
as long as with a kernel before, or longer."""


class DecodeProblem(Problem):
    """A problem, with what tiles of this core go by: `DecodeProblem(*problem)`."""

    @cached_property
    def row_tiles(self) -> int:
        """Row tiles of all sides of a matrix."""
        return self.sides * ceil(self.n / TILE_ROWS)

    @cached_property
    def steps(self) -> int:
        """Steps of 64 columns along K."""
        return ceil(self.k / TILE_COLUMNS)

    @cached_property
    def groups(self) -> int:
        """Groups of eight batch rows in a block."""
        return 1 if self.m <= 8 else 2

    @cached_property
    def batch(self) -> int:
        """Batch rows of a block, at most."""
        return min(self.m, self.groups * 8)

    @cached_property
    def batch_tiles(self) -> int:
        return ceil(self.m / (self.groups * 8))

    @cached_property
    def layout(self) -> Layout:
        return layout(self.fmt)

    @cached_property
    def step_bytes(self) -> int:
        """Bytes of a row tile's step of 64 columns."""
        return self.layout.step(1)

    @cached_property
    def large_codes(self) -> bool:
        """Whether two slots of a ring are too few."""
        return self.fmt.bits == 8 and self.groups == 1 and self.gpu.capability == 90

    def x_bytes(self, cluster: int) -> int:
        """Bytes of a block's rows of x in shared memory."""
        columns = ceil(self.steps / (8 * cluster)) * 8 * TILE_COLUMNS
        return self.batch * (columns * 2 + 16)

    def share(self, cluster: int) -> int:
        """Row tiles of a multiprocessor, or of a cluster.

        A block has rows of one matrix: what is left over of each must not be a block too many.
        """
        places = self.gpu.multiprocessors // (self.matrices * cluster)
        if places:
            return ceil(self.row_tiles / places)
        return ceil(self.row_tiles * self.matrices * cluster / self.gpu.multiprocessors)


class Hits(NamedTuple):
    """Matrices of a grouped product that have rows of x, as expected; only the GPU knows them."""

    rows: float
    """Rows of x that each such matrix has."""
    numbers: tuple[tuple[int, float], ...]
    """Numbers of matrices that there may be, with probabilities."""

    @property
    def mean(self) -> float:
        return sum(count * likely for count, likely in self.numbers)


class Blocks(NamedTuple):
    """How blocks share multiprocessors, columns and shared memory."""

    cluster: int
    """Blocks that split K."""
    two: bool
    """Whether a multiprocessor has two blocks."""
    warps: int
    room: int
    """Bytes of a block's shared memory beside a codebook's table."""
    ring: int
    """Bytes of the rings of a block's warps together."""
    tall: bool = False
    """Whether a multiprocessor has one block, though of 8 warps, of up to seven row tiles."""
    share: int = 0
    """Row tiles of a block, if all blocks have as many."""


class Room(NamedTuple):
    """What a block makes of its shared memory."""

    depth: int
    """Slots of a warp's ring."""
    chunk: int
    """Steps of 64 columns of x that are staged at a time."""
    together: int
    """Pieces of x that a thread asks for at once."""
    shared: int
    """Bytes of shared memory beside a codebook's table."""


def room_of(problem: DecodeProblem, blocks: Blocks, tile: tuple[int, int]) -> Room:
    """What blocks make of their shared memory, with so many warps along N and row tiles of each."""
    warps, (row_warps, rows) = blocks.warps, tile
    # The ring holds a multiprocessor's share of the bytes in flight, twice over; older GPUs need less.
    slot, k_warps = warps * problem.layout.slot(rows), warps // row_warps
    turns = ceil(ceil(problem.steps / blocks.cluster) / k_warps)
    # Half of the slots are asked for before x, which comes behind them: of two blocks, to whose places the
    # launch before holds on, not all that there is of W (8192 x 2048 took an H200 5.3 us in place of 4.5).
    behind = blocks.two and problem.sides == 1 and problem.gpu.capability == 90
    depth = max(2, min(8, blocks.ring // slot, turns if behind else 8))
    own = turns * k_warps
    before = whole_lines(rows * row_warps * problem.layout.row) if problem.half else 0  # the rows' factors
    if blocks.cluster > 1:  # what its blocks send each other
        before += rows * row_warps * TILE_ROWS * problem.groups * 8 * 4
    left = blocks.room - before - depth * slot - problem.batch * 16
    chunk = max(k_warps, min(own, left // (problem.batch * 2 * TILE_COLUMNS) // k_warps * k_warps))
    sums = warps * rows * TILE_ROWS * problem.groups * 8 * 4
    ring_and_x = depth * slot + problem.batch * (chunk * 2 * TILE_COLUMNS + 16)
    # Tall tiles have registers for eight pieces at once; but 16 warps that look codes up have few, as have
    # tall tiles of two blocks, and of one or two rows there are few pieces.
    few = (problem.groups != 2 and problem.kernels.lookup) or (blocks.two and rows > 4)
    many = problem.batch * chunk * 8 > 4 * warps * WARP and not few
    together = 8 if many or blocks.tall else 4
    return Room(depth, chunk, together, before + max(ring_and_x, sums))


def planned(
    problem: DecodeProblem,
    table: tuple[int, int],
    blocks: Blocks,
    tile: tuple[int, int],
    converts: bool = False,
) -> Gemm:
    """The launch, with so many copies and bytes of a codebook's table; of these blocks, with these warps
    along N and row tiles of each."""
    (copies, table_bytes), (row_warps, rows) = table, tile
    fmt, m = problem.fmt, problem.m
    cluster, warps, room = blocks.cluster, blocks.warps, room_of(problem, blocks, tile)
    constants = {"GROUPS": problem.groups, "ROW_TILES": rows, "ROW_WARPS": row_warps, "WARPS": warps}
    constants |= {"DEPTH": room.depth, "CLUSTER": cluster}
    constants |= {"RESIDENT": 2 if problem.groups == 1 and warps == 8 and not blocks.tall else 1}
    constants |= {"TOGETHER": room.together}
    # x of weights with signs of columns is quantized before it takes them.
    if problem.kernels.turned:
        converts = converts and m == cluster == 1 and problem.k <= min(_TURNED, room.chunk * TILE_COLUMNS)
    else:
        converts = converts and not fmt.whole_matrices and m == 1 and problem.k <= _QUANTIZED * cluster
    constants |= {"CONVERTS": 1} if converts else {}
    grid = (ceil(problem.row_tiles / (rows * row_warps)) * cluster, problem.batch_tiles, problem.matrices)
    shared = table_bytes + room.shared
    shared = lone(shared, problem.gpu.capability) if blocks.tall else shared
    most = shared_limit(problem.gpu.capability)
    kernel = gemm_kernel(fmt, Core.DECODE, copies, constants, most, problem.half)
    plan = Plan(kernel, grid, warps * WARP, shared, cluster, overlaps=True)
    return Gemm(plan, chunk=room.chunk, converts_x=converts)


def has_roomy_tables(problem: DecodeProblem) -> bool:
    """Whether a block may have a table of 64 KB, if all of x has room beside it."""
    return problem.groups == problem.sides == 1 and shared_limit(problem.gpu.capability) > _ROOMY


def stages_all_x(problem: DecodeProblem, chunk: int, cluster: int) -> bool:
    """Whether codes are not looked up, or blocks have all that they need of x at once beside the table."""
    return not problem.kernels.lookup or chunk >= ceil(problem.steps / cluster)


def ring_bytes(capability: int) -> int:
    """Bytes of a multiprocessor's rings, unless there is a reason for more or less."""
    return (72 if shared_limit(capability) > 160 << 10 else 24) << 10


def sized(problem: DecodeProblem, table: int, cluster: int, two: bool, long: bool = False) -> Blocks:
    """What blocks that share things so have of shared memory; of two that run `long`, more bytes in flight
    only wait for each other, or x would not fit."""
    capability, x_bytes = problem.gpu.capability, problem.x_bytes(cluster)
    room, ring = shared_limit(capability, 1 + two) - table, ring_bytes(capability)
    if two and problem.grouped:
        room -= _FOUND
    if long and ring > 48 << 10:
        ring = 48 << 10
    elif problem.large_codes:
        ring = 96 << 10 if two else max(ring, min(104 << 10, room - x_bytes))
    if two:
        ring = min(ring, max(room - x_bytes, room // 2))
    warps = 16 if problem.groups == 1 and not two and capability >= 80 else 8
    return Blocks(cluster, two, warps, room, ring)


def tiles_within(least: int, most_warps: int, most: int) -> Iterator[tuple[int, int]]:
    """Warps along N and row tiles of each, within limits."""
    return product((w for w in (1, 2, 4, 8, 16) if least <= w <= most_warps), range(1, most + 1))


def rounds_of(gpu: Gpu, blocks: int, resident: int) -> tuple[int, int]:
    """Rounds of so many blocks, of which a multiprocessor has `resident` at a time, and how many blocks the
    busiest one has."""
    return ceil(blocks / (gpu.multiprocessors * resident)), ceil(blocks / gpu.multiprocessors)
