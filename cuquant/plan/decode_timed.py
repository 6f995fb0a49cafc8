"""The decode core's products on sm_90: tiles by a model of measured times.

It was fitted to 20,000 times of ordinary products and 4000 of mixtures of experts on an H200: 29 formats,
1 to 8 rows, weights of many models, up to 20 tiles for each product. Times are microseconds, of launches in
a row, each of which starts while the one before it ends. Other GPUs of sm_90 have other memory and clocks:
their tiles go by an H200's times, how fast their memory is next to it, and their own number of
multiprocessors; clusters of theirs by 871 times of an H100, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ..formats import Format
from ..formats.kernels import Coding, kernels_of
from .cores import Gemm, Problem, looked_up, table_of
from .decode_core import (
    Blocks,
    DecodeProblem,
    Hits,
    Room,
    has_roomy_tables,
    planned,
    room_of,
    sized,
    stages_all_x,
    tiles_within,
)
from .decode_registers import MOST_ROWS, has_registers
from .launch import WARP, places_of

_START_US = (2.11, 1.4)
"""Microseconds from launch to launch, but for all below: of one block on a multiprocessor, and of two, that
hide each other's start and end."""
_BESIDE_US = 1.19
"""Microseconds from launch to launch where half of the GPU is free, so that the next launch's blocks start
there."""
_AGAIN_US = (2.5, 0.5)
"""Microseconds of each round of blocks after the first: of one block on a multiprocessor, and of two."""
_CLUSTER_US, _HIDDEN_CLUSTER_US = 0.7, 0.4
"""Microseconds until the blocks of a cluster have met; and where another block is on the multiprocessor
meanwhile, and the memory is no faster than an H100's, on which that was measured."""
_SLOW_MEMORY = 0.8
_TABLE_US = 0.1
"""Microseconds to fill a codebook's table of 64 KB."""
_BYTES_PER_US, _OWN_BYTES_PER_US = 4.69e6, 41e3
"""Bytes that all multiprocessors read together in a microsecond, if nothing else limits them, and one
alone."""
_SLOT_US = 0.325
"""Microseconds that a warp takes for a slot, however few row tiles it has."""
_ONCE = 0.55
"""Row tiles that take as long as what a warp does once for all of a slot: read x, ask for the next one."""
_SHARPNESS = 4.67
"""Power of the norm of a launch's instructions, waits and reads: how little the lesser ones add to the
greatest."""
_ALONE = 1.5
"""Blocks that a small block counts as in a last round for which half of the places are enough."""
_X_BYTES_PER_US, _ASK_US, _CHUNK_US = 106e3, 0.54, 1.35
"""Bytes of x that a block gets in a microsecond; microseconds to ask again; and to stage another chunk of
columns."""
_RESULT_US, _SUM_US = 0.0273, 0.001
"""Microseconds of two batch rows' results of a row tile; and of the sums that a warp has of them."""
_LOOKUPS = {2: 0.0111, 3: 0.0129, 4: 0.0117, 5: 0.0149}
_INTEGERS = {2: 0.013, 3: 0.0123, 4: 0.0092, 5: 0.011, 6: 0.0118, 8: 0.0037}
_MASKS, _E2M1, _WALKS = 0.0103, 0.0112, 0.0304
"""What a row tile's step of 64 columns takes a busy multiprocessor's instructions, by the bits of a code; and
where half of them are masks. To these 0.001 is added for minimums or zero points, 0.0032 where scales are
products (in a codebook 0.0019), 0.0019 for a scale for every 16 weights."""
_SMALL_TABLE = 1.13
"""How many times as long lookups take where a table of 64 KB has no room."""
_IDLE = 0.6
"""How much steps count that some warps have and others do not, as K is no multiple of theirs."""
_TURN_US = 0.6
"""Microseconds of a kernel before that turns a row, where blocks do not turn it themselves."""
_LEAST_STEPS = 16
"""Steps of 64 columns that each block of a cluster must have."""
_FOUR_STEPS, _FOUR_TILES = 64, 2
"""Steps of 64 columns that a cluster of four blocks must have together; and row tiles of a multiprocessor up
to which there are such."""


class DecodeWay(NamedTuple):
    """A way to run the core, with the microseconds that the measured times predict."""

    us: float
    roomy: bool
    blocks: Blocks
    tile: tuple[int, int]


def fastest(problem: Problem, to_convert: bool) -> tuple[float, Gemm]:
    """Predicted microseconds, and the launch that should be fastest."""
    own = DecodeProblem(*problem)
    # All weights have the tiles of those that float16 holds, which were measured.
    alike = own._replace(half=True, gpu=own.gpu._replace(tuned=None))
    best = _best(alike, to_convert and own.kernels.turned)
    return best.us, of_way(own, best, to_convert)


@lru_cache(maxsize=4096)
def _best(problem: DecodeProblem, turned: bool) -> DecodeWay:
    """The way that should be fastest, with activations that are to be turned, or not."""

    def us(way: DecodeWay) -> float:
        itself = turned and of_way(problem, way, True).converts_x
        return way.us + (_TURN_US if turned and not itself else 0)

    return min(ways(problem), key=us)


def fastest_grouped(problem: Problem, hits: Hits) -> tuple[float, Gemm] | None:
    """Predicted microseconds and the fastest launch for as many matrices as rows may lead to; None where two
    sides have no room."""
    own = DecodeProblem(*problem)
    best = min(ways(own._replace(half=True), hits), default=None)
    return None if best is None else (best.us, of_way(own, best))


def variants(problem: Problem) -> Iterator[Gemm]:
    """Every way of this core, those first that should be fastest."""
    own = DecodeProblem(*problem)
    for way in sorted(ways(own)):
        yield of_way(own, way)


def of_way(problem: DecodeProblem, way: DecodeWay, to_convert: bool = False) -> Gemm:
    """The launch of a way of this core."""
    table = table_of(problem.fmt, problem.gpu.capability, way.roomy, problem.sides)
    return planned(problem, table, way.blocks, way.tile, to_convert)


def ways(problem: DecodeProblem, hits: Hits | None = None) -> Iterator[DecodeWay]:
    """One block on a multiprocessor, or two small ones; clusters that split K; tiles of all heights for which
    there are registers. Up to 8 batch rows a codebook's table is a large one where all of x has room beside
    it, and those of two sides need that room. Of a grouped product `hits` are the matrices that there may
    be."""
    numbers = ((problem.matrices, 1.0),) if hits is None else hits.numbers
    batch = problem.batch if hits is None else min(problem.batch, hits.rows)
    for cluster, two in product((1, 2, 4), (False, True)):
        if problem.groups == 2 and (two or cluster != 2):  # for want of room, and of registers
            continue
        if cluster > 1 and not _splits(problem, cluster):
            continue
        usual_table = table_of(problem.fmt, 90, sides=problem.sides)
        tables = {usual_table[1]: False}  # bytes, and whether it is the large one
        if has_roomy_tables(problem):
            tables = {table_of(problem.fmt, 90, True)[1]: True} | tables
        long = problem.share(cluster) > 8 if hits is None else problem.m > 4
        for table, roomy in tables.items():
            usual = sized(problem, table, cluster, two, long=two and long)
            tall = usual._replace(warps=8, tall=True)
            for blocks in (usual,) if two or problem.groups == 2 or cluster == 4 else (usual, tall):
                most = blocks.warps if problem.m > 2 else blocks.warps // 2
                for tile in tiles_within(problem.sides, most, MOST_ROWS):
                    if not has_registers(problem, blocks, tile):
                        continue
                    if not _run_together(problem, blocks, tile, numbers):
                        continue
                    room = room_of(problem, blocks, tile)
                    if room.shared > blocks.room:
                        continue
                    if stages_all_x(problem, room.chunk, cluster) or not (roomy or problem.sides == 2):
                        us = sum(
                            likely * _us(problem, table, blocks, tile, room, matrices, batch)
                            for matrices, likely in numbers
                        )
                        yield DecodeWay(us, roomy, blocks, tile)


def _splits(problem: DecodeProblem, cluster: int) -> bool:
    """Whether there are columns enough for so many blocks, and of four blocks few rows."""
    if problem.steps < cluster * _LEAST_STEPS or not places_of(problem.gpu, cluster):
        return problem.groups == 2
    few = problem.steps >= _FOUR_STEPS and problem.share(1) <= _FOUR_TILES and not problem.kernels.walks
    return cluster == 2 or (few and not problem.grouped)


def _made(problem: DecodeProblem, blocks: Blocks, tile: tuple[int, int], matrices: float) -> int:
    """Blocks of a launch that have work to do."""
    return ceil(ceil(problem.row_tiles / prod(tile)) * blocks.cluster * problem.batch_tiles * matrices)


def _run_together(
    problem: DecodeProblem, blocks: Blocks, tile: tuple[int, int], numbers: tuple[tuple[int, float], ...]
) -> bool:
    """Whether there are more small blocks than multiprocessors, as the first ones that are free get two, and
    clusters of four all run at once."""
    places = _places(problem, blocks)
    made = _made(problem, blocks, tile, sum(matrices * likely for matrices, likely in numbers))
    return (made > places or not blocks.two) and (made <= places * (1 + blocks.two) or blocks.cluster < 4)


def _places(problem: DecodeProblem, blocks: Blocks) -> int:
    """Blocks that run at once, one on a multiprocessor."""
    return max(1, places_of(problem.gpu, blocks.cluster)) * blocks.cluster


@lru_cache(maxsize=256)
def _step_us(fmt: Format, table: int) -> float:
    """What a row tile's step of 64 columns takes a busy multiprocessor's instructions."""
    kernels = kernels_of(fmt)
    if kernels.walks:
        return _WALKS
    if kernels.lookup:
        masked = kernels.coding is Coding.MASKED_CODEBOOK
        work = _MASKS if masked else _LOOKUPS[looked_up(fmt)] + 0.0019 * kernels.integer_scales
        work *= _SMALL_TABLE if table < 64 << 10 else 1
    elif kernels.coding is Coding.E2M1:
        work = _E2M1
    else:
        work = _INTEGERS[fmt.bits] + 0.0032 * kernels.integer_scales
    fine = kernels.scale_columns < 32 and not kernels.integer_scales
    return work + 0.001 * kernels.has_minimum + 0.0019 * fine


def _us(
    problem: DecodeProblem,
    table: int,
    blocks: Blocks,
    tile: tuple[int, int],
    room: Room,
    matrices: int,
    batch: float,
) -> float:
    """What a launch of such blocks should take, of so many matrices with as many rows of x each.

    Whoever is done takes the next block, so that all rounds but the last go at the pace of all
    multiprocessors together. In the last one the busiest sets the pace; of two small blocks that all run at
    once it has both, as the multiprocessors that are free first get two each.
    """
    (row_warps, rows), two, cluster = tile, blocks.two, blocks.cluster
    steps, places = ceil(problem.steps / cluster), _places(problem, blocks)
    made = _made(problem, blocks, tile, matrices)
    together = places * (1 + two)
    rounds = ceil(made / together)
    left = made - (rounds - 1) * together
    last = 1.0 + two if rounds == 1 or left > places else _ALONE if two else 1.0
    busiest = (rounds - 1) * (1 + two) + last
    k_warps = blocks.warps // row_warps
    turns = ceil(steps / k_warps)
    own = rows * row_warps * steps  # steps of a block's row tiles
    counted = busiest * (own + _IDLE * rows * row_warps * (turns * k_warps - steps))
    instructions = counted * _step_us(problem.fmt, table) * (1 + _ONCE / rows)
    waits = rounds * turns * _SLOT_US
    all_steps = problem.row_tiles * problem.steps * problem.batch_tiles * matrices
    block_us = all_steps / made * problem.step_bytes / (_BYTES_PER_US * problem.gpu.memory)
    alone_us = last * own * problem.step_bytes / (_OWN_BYTES_PER_US * problem.gpu.memory)
    read = (made - left) * block_us + max(left * block_us, alone_us)
    main = (instructions**_SHARPNESS + waits**_SHARPNESS + read**_SHARPNESS) ** (1 / _SHARPNESS)
    # x: what a block gets, how often its threads ask for that, and how often it stages it.
    staged = min(room.chunk, steps)
    asks = ceil(batch * staged * 8 / (blocks.warps * WARP * room.together))
    x = busiest * batch * steps * 128 / _X_BYTES_PER_US
    x += rounds * ((asks - 1) * _ASK_US + (ceil(steps / room.chunk) - 1) * _CHUNK_US)
    beside = made <= together // 2
    start = _BESIDE_US if beside else _START_US[two] + _TABLE_US * table / (64 << 10)
    meeting = _HIDDEN_CLUSTER_US if two and problem.gpu.memory <= _SLOW_MEMORY else _CLUSTER_US
    start += (rounds - 1) * _AGAIN_US[two] + (rounds * meeting if cluster > 1 else 0)
    end = rows * ceil(batch / 2) * (busiest * _RESULT_US + blocks.warps * _SUM_US)
    return start + main + x + end
