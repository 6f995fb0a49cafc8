"""The decode core's ordinary products on sm_90: tiles by a model of measured times.

It was fitted to 19,000 times on an H200: 29 formats, 1 to 8 rows, up to 35 shapes of W of many models, up to
20 tiles for each product. What it takes was 0.7% slower than the best of them in the mean. Times are
microseconds, of launches in a row, each of which starts while the one before it ends. Other GPUs of sm_90
have other memory and clocks: their tiles go by an H200's times and their own number of multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ..formats import Format
from .cores import Gemm, looked_up, table_of
from .decode_core import (
    MOST_ROWS,
    Blocks,
    Room,
    Work,
    has_roomy_tables,
    most_rows,
    paired_rows,
    planned,
    room_of,
    row_tiles,
    sized,
    stages_all_x,
)
from .launch import WARP, places_of, shared_limit
from .planes import has_minimum, integer_scales

_START_US = (2.14, 1.49)
"""From launch to launch, but for all below: of one block on a multiprocessor, and of two, that hide each
other's start and end."""
_BESIDE_US = 1.17
"""The same where half of the GPU is free, so that the next launch's blocks start there."""
_AGAIN_US = (2.42, 1.2)
"""Of each round of blocks after the first."""
_CLUSTER_US = 0.92
"""Until the blocks of a cluster have met."""
_TABLE_US = 0.36
"""To fill a codebook's table of 64 KB."""
_BYTES_PER_US, _OWN_BYTES_PER_US = 4.69e6, 41e3
"""What all multiprocessors read together, if nothing else limits them, and one alone."""
_SLOT_US = 0.296
"""What a warp takes for a slot, however few row tiles it has."""
_ONCE = 0.58
"""Row tiles that take as long as what a warp does once for all of a slot: read x, ask for the next one."""
_SHARPNESS = 4.67
"""Power of the norm of these three: how little the lesser ones add to the greatest."""
_SMOOTH = 0.59
"""Of more small blocks than run at once: how much their number counts, in place of that of the busiest
multiprocessor, as whoever is done takes the next one."""
_X_BYTES_PER_US, _ASK_US, _CHUNK_US = 106e3, 0.28, 1.22
"""How fast a block gets x; what it takes to ask again; and to stage another chunk of columns."""
_RESULT_US, _SUM_US = 0.0273, 0.001
"""Of two batch rows' results of a row tile; and of the sums that a warp has of them."""
_LOOKUPS = {2: 0.0119, 3: 0.0139, 4: 0.0126, 5: 0.016}
_INTEGERS = {2: 0.014, 3: 0.0132, 4: 0.0099, 5: 0.0118, 6: 0.0127, 8: 0.004}
_E2M1, _WALKS = 0.012, 0.0327
"""What a row tile's step of 64 columns takes a busy multiprocessor's instructions, by the bits of a code. To
these 0.0011 is added for minimums or zero points, 0.0034 where scales are products (in a codebook 0.002),
0.002 for a scale for every 16 weights."""
_SMALL_TABLE = 1.13
"""How many times as long lookups take where a table of 64 KB has no room."""
_IDLE = 0.8
"""How much steps count that some warps have and others do not, as K is no multiple of theirs."""
_SCARCE, _SCARCE_ROWS, _FEW_WARPS, _FEW_BATCH = 1.03, 5, 1.03, 4
"""How many times as long tiles of so many rows and more take 16 warps, which have few registers for them; and
as what is predicted it takes 8 warps alone on a multiprocessor, of more than so many batch rows."""
_TURN_US = 0.6
"""Of a kernel before that turns a row for walks, where blocks do not turn it themselves."""
_LEAST_STEPS = 16
"""Steps of 64 columns that each block of a cluster must have."""
_FOUR_STEPS, _FOUR_TILES = 64, 2
"""The same of clusters of four, together; and row tiles of a multiprocessor up to which there are such."""


class Choice(NamedTuple):
    """A way to run the core, with the microseconds that the measured times predict."""

    us: float
    roomy: bool
    blocks: Blocks
    tile: tuple[int, int]


def fastest(work: Work, in_half: bool, converted: bool) -> tuple[float, Gemm]:
    """What should be fastest, and what it takes."""
    best = _best(work._replace(gpu=work.gpu._replace(tuned=None)), converted and work.fmt.walks)
    return best.us, _launch(work, best, in_half, converted)


@lru_cache(maxsize=4096)
def _best(work: Work, turned: bool) -> Choice:
    """The same for weights of any size, with activations that are to be turned, or not."""

    def us(choice: Choice) -> float:
        itself = turned and _launch(work, choice, True, True).converts_x
        return choice.us + (_TURN_US if turned and not itself else 0)

    return min(choices(work), key=us)


def variants(work: Work) -> Iterator[Gemm]:
    """Every way of this core, those first that should be fastest."""
    for choice in sorted(choices(work)):
        yield _launch(work, choice, True, False)


def _launch(work: Work, choice: Choice, in_half: bool, converted: bool) -> Gemm:
    table = table_of(work.fmt, work.gpu.capability, choice.roomy)
    return planned(work, table, in_half, choice.blocks, choice.tile, converted)


def choices(work: Work) -> Iterator[Choice]:
    """One block on a multiprocessor, or two small ones; clusters that split K; tiles of all heights for which
    there are registers. Up to 8 batch rows a codebook's table is a large one where all of x has room beside
    it."""
    for cluster, two in product((1, 2, 4), (False, True)):
        if work.groups == 2 and (two or cluster != 2):  # for want of room, and of registers
            continue
        if cluster > 1 and not _splits(work, cluster):
            continue
        tables = {table_of(work.fmt, 90)[1]: False}  # bytes, and whether it is the large one
        if has_roomy_tables(work):
            tables = {table_of(work.fmt, 90, True)[1]: True} | tables
        for table, roomy in tables.items():
            usual = sized(work, table, cluster, two, long=two and work.share(cluster) > 8)
            tall = usual._replace(warps=8, tall=True)
            for blocks in (usual,) if two or work.groups == 2 else (usual, tall):
                most = 2 if two else blocks.warps if work.m > 2 else blocks.warps // 2
                for tile in row_tiles(1, most, MOST_ROWS):
                    if not _has_registers(work, blocks, tile) or not _run_together(work, blocks, tile):
                        continue
                    room = room_of(work, blocks, tile, True)
                    if room.shared + table > shared_limit(90, 1 + two):
                        continue
                    if stages_all_x(work, room.chunk, cluster) or not roomy:
                        yield Choice(_us(work, table, blocks, tile, room), roomy, blocks, tile)


def _splits(work: Work, cluster: int) -> bool:
    """Whether there are columns enough for so many blocks, and of four blocks few rows."""
    if work.steps < cluster * _LEAST_STEPS or not places_of(work.gpu, cluster):
        return work.groups == 2
    few = work.steps >= _FOUR_STEPS and work.share(1) <= _FOUR_TILES and not work.fmt.walks
    return cluster == 2 or few


def _made(work: Work, blocks: Blocks, tile: tuple[int, int]) -> int:
    """Blocks of a launch."""
    return ceil(work.row_tiles / prod(tile)) * blocks.cluster * work.batch_tiles * work.matrices


def _run_together(work: Work, blocks: Blocks, tile: tuple[int, int]) -> bool:
    """Whether there are enough small blocks for each to have another beside it, and clusters of four all run
    at once."""
    places, made = _places(work, blocks), _made(work, blocks, tile)
    return (made > places or not blocks.two) and (made <= places * (1 + blocks.two) or blocks.cluster < 4)


def _places(work: Work, blocks: Blocks) -> int:
    """Blocks that run at once, one on a multiprocessor."""
    return max(1, places_of(work.gpu, blocks.cluster)) * blocks.cluster


def _has_registers(work: Work, blocks: Blocks, tile: tuple[int, int]) -> bool:
    """Whether there are registers for tiles of this height.

    Blocks of 8 warps that have all of a multiprocessor's must need more than half of them: else ptxas aims at
    128 of a thread, as if two had to fit, and waits for each piece of what is on its way (60% more time).
    """
    row_warps, rows = tile
    if work.groups == 2:
        return rows <= most_rows(work)
    most, fmt = _most_rows(work.fmt, row_warps), work.fmt
    if blocks.two:  # of clusters taller ones were compiled so, too; a row tile alone took up to 30% more
        most = min(most if fmt.whole_matrices else MOST_ROWS, 3 if blocks.cluster > 1 else MOST_ROWS)
        return (1 if fmt.bits == 8 else 2) <= rows <= min(most, paired_rows(work, row_warps))
    if not blocks.tall:
        return rows <= most
    if fmt.walks or (has_minimum(fmt) and not integer_scales(fmt)):
        return rows > most
    return rows > min(most, 5 if fmt.lookup or integer_scales(fmt) else 6)


def _most_rows(fmt: Format, row_warps: int) -> int:
    """Row tiles of a warp, of 16 that share a multiprocessor's registers."""
    if fmt.whole_matrices and not fmt.walks:
        return 5 if fmt.kernel_group_bytes else 4
    if fmt.bits == 6 and not fmt.walks:
        return 4
    if (fmt.bits == 3 and integer_scales(fmt)) or (fmt.bits == 5 and (fmt.lookup or has_minimum(fmt))):
        return 5
    if fmt.bits == 8 and not fmt.walks:
        return 6
    return MOST_ROWS - (row_warps > 1 and (has_minimum(fmt) or fmt.bits == 6))


def _step_us(fmt: Format, table: int) -> float:
    """What a row tile's step of 64 columns takes a busy multiprocessor's instructions."""
    if fmt.walks:
        return _WALKS
    if fmt.lookup:
        work = _LOOKUPS[looked_up(fmt)] + 0.002 * integer_scales(fmt)
        work *= _SMALL_TABLE if table < 64 << 10 else 1
    elif fmt.codebook is not None:
        work = _E2M1
    else:
        work = _INTEGERS[fmt.bits] + 0.0034 * integer_scales(fmt)
    return work + 0.0011 * has_minimum(fmt) + 0.002 * (fmt.scale_size < 32 and not integer_scales(fmt))


def _us(work: Work, table: int, blocks: Blocks, tile: tuple[int, int], room: Room) -> float:
    """What a launch of such blocks should take."""
    (row_warps, rows), two, cluster = tile, blocks.two, blocks.cluster
    steps, places, made = ceil(work.steps / cluster), _places(work, blocks), _made(work, blocks, tile)
    rounds, busiest = ceil(made / (places * (1 + two))), float(ceil(made / places))
    if two and rounds > 1:
        busiest += _SMOOTH * (made / places - busiest)
    k_warps = blocks.warps // row_warps
    turns = ceil(steps / k_warps)
    own = busiest * rows * row_warps * steps  # steps of the busiest multiprocessor's row tiles
    counted = own + _IDLE * busiest * rows * row_warps * (turns * k_warps - steps)
    instructions = counted * _step_us(work.fmt, table) * (1 + _ONCE / rows)
    waits = rounds * turns * _SLOT_US
    all_steps = work.row_tiles * work.steps * work.matrices * work.batch_tiles
    read = work.step_bytes * max(all_steps / _BYTES_PER_US, own / _OWN_BYTES_PER_US)
    main = (instructions**_SHARPNESS + waits**_SHARPNESS + read**_SHARPNESS) ** (1 / _SHARPNESS)
    main *= _SCARCE if blocks.warps == 16 and rows >= _SCARCE_ROWS else 1
    # x: what a block gets, how often its threads ask for that, and how often it stages it.
    staged = min(room.chunk, steps)
    asks = ceil(work.batch * staged * 8 / (blocks.warps * WARP * room.together))
    x = busiest * work.batch * steps * 128 / _X_BYTES_PER_US
    x += rounds * ((asks - 1) * _ASK_US + (ceil(steps / room.chunk) - 1) * _CHUNK_US)
    beside = made <= places * (1 + two) // 2
    start = _BESIDE_US if beside else _START_US[two] + _TABLE_US * table / (64 << 10)
    start += (rounds - 1) * _AGAIN_US[two] + (_CLUSTER_US if cluster > 1 else 0)
    pairs = ceil(work.batch / 2)
    end = rows * pairs * (busiest * _RESULT_US + blocks.warps * _SUM_US)
    us = start + main + x + end
    return us * _FEW_WARPS if blocks.tall and work.m > _FEW_BATCH else us
