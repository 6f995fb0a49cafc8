"""The wgmma core's products: tiles, splits and shares by a model of measured times, in microseconds on an
H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil
from typing import NamedTuple

from ..formats import Format
from ..formats.kernels import kernels_of
from .cores import WGMMA_BATCH, Gemm, Problem, looked_up
from .launch import places_of
from .planes import TILE_COLUMNS, TILE_ROWS, layout, row_factors
from .wgmma_core import (
    ROOMY_BATCH,
    Tile,
    fits_grouped,
    planned,
    shares_tiles,
    signed,
    stages_of,
    sum_bytes,
    takes_signs,
    turns_sums,
)

STEP_US = {
    Tile(16, 1, k_groups=2, k_tiles=2): 0.085,
    Tile(16, 1, k_groups=2, k_tiles=2, resident=2): 0.143,
    Tile(16, 1, k_groups=2, k_tiles=4, resident=2): 0.13,
    Tile(16, 1, k_groups=4): 0.094,
    Tile(16, 1, k_groups=4, k_tiles=2): 0.078,
    Tile(16, 2, k_tiles=2): 0.162,
    Tile(16, 2, k_groups=2, k_tiles=2): 0.151,
    Tile(16, 2, k_groups=2, k_tiles=4): 0.138,
    Tile(16, 4, k_tiles=2): 0.271,
    Tile(32, 1, k_groups=2, k_tiles=2, resident=2): 0.14,
    Tile(32, 1, k_groups=2, k_tiles=2): 0.084,
    Tile(32, 1, k_groups=4): 0.091,
    Tile(32, 1, k_groups=4, k_tiles=2): 0.079,
    Tile(32, 2, k_tiles=2): 0.156,
    Tile(32, 2, k_groups=2, k_tiles=2): 0.145,
    Tile(32, 2, k_groups=2, k_tiles=4): 0.139,
    Tile(32, 4, k_tiles=2): 0.267,
    Tile(64, 1): 0.138,
    Tile(64, 1, k_groups=2, k_tiles=2): 0.089,
    Tile(64, 2): 0.185,
    Tile(64, 2, k_tiles=2): 0.163,
    Tile(64, 2, k_groups=2): 0.161,
    Tile(64, 2, 2): 0.292,
    Tile(64, 2, 2, k_tiles=2): 0.272,
    Tile(128, 1): 0.14,
    Tile(128, 1, k_groups=2): 0.11,
    Tile(128, 2): 0.186,
    Tile(128, 2, k_tiles=2): 0.167,
    Tile(128, 2, 2): 0.315,
    Tile(256, 1): 0.157,
    Tile(256, 2): 0.22,
    Tile(256, 2, pair=2): 0.22,
}
"""Tiles of the wgmma core, and what a step of 64 columns takes a busy H200's instructions (q4_0) while the
tensor cores rest."""
_GROUPED_STEP_US = {
    Tile(32, 2, 2): 0.277,
    Tile(48, 2, 2): 0.281,
    Tile(96, 2): 0.177,
    Tile(96, 2, 2): 0.302,
    Tile(144, 2): 0.185,
    Tile(144, 2, 2): 0.314,
}
"""Tiles of grouped products alone, whose batches have any size, with the microseconds of a step."""
_EVERY_STEP_US = STEP_US | _GROUPED_STEP_US
_CONTENTION = 0.5
"""Part of the tensor cores' time that is lost to the instructions: these are issued more slowly meanwhile."""
_INSTRUCTIONS = {2: 1.1, 3: 1.04, 4: 1.0, 5: 1.12, 6: 1.05, 8: 1.2}
_LOOKUPS = {2: 0.95, 3: 1.03, 4: 1.17, 5: 1.4}
"""How many times as many instructions codes of so many bits take, by their bits and in a codebook. To the
former 0.09 is added without factors of rows, 0.12 where scales are products, 0.05 for zero points; to the
latter 0.15 for a sign, 0.05 where scales are products; to both 0.05 for a minimum, 0.13 for a scale for every
16 weights."""
_WALKS = 2.2
"""How many times as many instructions steps of a walk take."""
_FEW_WAIT = 1.16
"""How many times as long lookups take two warpgroups as four, of which more wait at a time."""
_SMALL_TABLE = 1.1
"""How many times as long lookups of 3 and 4 bits take where two blocks share a multiprocessor, and in tiles
of many batch rows: there is no room for rows of 256 bytes."""
_STEP_BYTES_PER_US = 34.3e3
"""Bytes of the weights that a multiprocessor reads in a microsecond where all do; of few stages one is waited
for."""
_MEET_WAIT = 0.03
"""How much longer reading the weights takes warpgroups that share a stage."""
_TENSOR_US = 0.645 / (128 * 256)
"""Microseconds that the tensor cores take for a step of one output."""
_PAIR_STEPS = 0.985
"""How many times as long steps take where two blocks share x. Of grouped products it was seen only where the
tensor cores set the pace."""
_SHADOW_US = 1.1
"""Microseconds that a launch saves which leaves half of the GPU free: the next one begins there meanwhile."""
_START_US, _PAIR_US, _SPLIT_US = 2.1, 1.5, {2: 0.3, 4: 0.8}
"""Microseconds of a launch: until the first stage is there; until a pair, or so many blocks of a split, have
met."""
_MANY_GROUPS_US = 0.4
"""Microseconds longer that it takes until four warpgroups that share the columns of one have begun, and have
met."""
_LEAVE_US, _LEAVE_ALONE_US, _LEAVE_BYTE_US, GET_US = 1.4, 1.0, 2.4e-5, 0.6
"""Microseconds to leave a tile's sums to another cluster, and go on: before whole tiles, if parts are few;
else, with one part after the other, and for each byte of them; and to add what one has left."""
_FEW_PARTS = 2.5
"""Parts that a cluster leaves up to which they are few."""
_ALONE = 1.015
"""How many times as long as predicted it takes where clusters that leave sums do nothing else."""
MOST_PARTS = 3
"""Clusters that may help for each tile that is shared, as kernels/core/schedule.cuh has it. Their shares end
anywhere: a tile may have a part more."""
_STREAM_STEPS, _INTEGER_STEPS, _ONE_TILE = (1.03, 1.05), (1.04, 1.07), 256
"""How many times as long steps take where no multiprocessor is idle any more, and up to so many rows, where
weights are read once: memory and power are shared by more, which shows most where instructions are few."""
_TILE_US, _SPLIT_TILE_US = 2.8 / (128 * 256), 8.75 / (128 * 256)
"""Microseconds to store an output, and to send it to another block and add it up first."""
_RESULTS_US, _RESULT_US = 1.0, 1.1e-6
"""Microseconds of a kernel that turns sums, where this one does not: its launch, and each result."""
_SIGNS_US, _SIGN_US = 0.7, 4 / 4.46e6
"""Microseconds of a kernel that gives x the signs of W's columns, where this one does not give them to W: its
launch, and each number."""
_STREAM_BYTES = 32 << 20
"""Bytes of x up to which tiles are shared: clusters that are at different columns at a time must find them in
the L2 cache."""
_LARGE, _VERY_LARGE = 1 << 25, 1 << 27
"""Weights from which on this core may be faster than decode with five batch rows, and, of 8 bits, with any.
Measured."""
_FEW_ROWS, _FEW_LOOKUPS = {5: 0.94, 6: 0.94, 8: 0.825}, 0.91
"""Part of what is predicted that up to 8 batch rows take, if the decode core's times for these are right: by
bits of a code, and where 3 bits or more are looked up. Others take less time there."""


class _Timed(NamedTuple):
    """What a tile takes of a format, whatever the product."""

    tile: Tile
    split: int
    stages: int
    step: float
    store: float
    start: float
    turned: bool
    """Whether the kernel itself turns a walk's sums."""


class WgmmaWay(NamedTuple):
    """A way to run the wgmma core, with the microseconds that the measured times predict."""

    us: float
    tile: Tile
    split: int
    outputs: int
    streamed: int
    stages: int
    passing: int = 0


def _step_us(fmt: Format, tile: Tile, batch: int = 0, pairs: float = 1) -> float:
    """What a step of 64 columns takes, of so many batch rows if not of all of the tile's. Where blocks share
    x in pairs, instructions take so many times as long."""
    warpgroups = tile.groups * tile.k_groups * tile.resident
    kernels = kernels_of(fmt)
    if kernels.lookup:
        work = _LOOKUPS[looked_up(fmt)] + 0.15 * kernels.sign_bits + 0.05 * (kernels.group_size > 0)
        work *= _FEW_WAIT if warpgroups < 4 else 1
        small = tile.resident > 1 or (tile.batch > ROOMY_BATCH and not kernels.sign_bits)
        work *= _SMALL_TABLE if looked_up(fmt) in (3, 4) and small else 1
    elif kernels.walks:
        work = _WALKS
    else:
        work = _INSTRUCTIONS[fmt.bits] + 0.09 * (not row_factors(fmt)) + 0.12 * kernels.integer_scales
        work += 0.05 * kernels.has_zero_points
    work += 0.05 * kernels.has_minimum + 0.13 * (kernels.scale_columns < 32)
    tensor = (batch or tile.batch) * tile.rows * tile.resident * _TENSOR_US
    instructions = _EVERY_STEP_US[tile] * work + _CONTENTION * tensor
    if tile.pair > 1:
        tensor, instructions = tensor * _PAIR_STEPS, instructions * pairs
    elif warpgroups == 1:
        tensor *= 1.16  # nobody else multiplies while a warpgroup waits
    elif tile.blocks == 1 and tile.batch < 256:
        tensor *= 1.04  # operands are read more often
    step = tile.rows // TILE_ROWS * layout(fmt).step(tile.width) / tile.width
    read = tile.resident * step / _STEP_BYTES_PER_US
    waits = 0.5 / max(1, tile.resident * stages_of(fmt, tile, 1)) + _MEET_WAIT * (tile.k_groups > 1)
    return max(instructions, tensor, read * (1 + waits))


WGMMA_TILES = tuple(
    tile for tile in _EVERY_STEP_US if tile.batch >= 32 and tile.resident == 1 and tile.k_groups < 4
)
"""Tiles of grouped products, which store up to WARP batch rows at a time."""


def tile_us(fmt: Format, tile: Tile, steps: int) -> tuple[float, float]:
    """What an output tile takes, of so many steps of 64 columns, and what one of a narrow batch does."""
    few = narrow(tile)
    stored = tile.rows * tile.batch * _TILE_US
    return steps * _step_us(fmt, tile) + stored, steps * _step_us(fmt, tile, few) + stored * few / tile.batch


def narrow(tile: Tile) -> int:
    """Batch rows up to which the tensor cores take less time for an expert's last ones (core/wgmma.cuh)."""
    if tile.batch < 96:
        return tile.batch
    return 64 if tile.batch == 256 else 32


def wgmma_grouped(problem: Problem, tile: Tile) -> Gemm | None:
    """The wgmma core with a tile of a grouped product; None where it has no place."""
    fmt, sides = problem.fmt, problem.sides
    stages = stages_of(fmt, tile, 1, sides)
    if not fits_grouped(fmt, tile, sides) or stages < 3 or ceil(problem.k / TILE_COLUMNS) % tile.width:
        return None
    gemm = planned(fmt, tile, 1, True, stages, sides)
    return replace(gemm, box_steps=tile.width)


@lru_cache(maxsize=64)
def _timed(fmt: Format) -> list[_Timed]:
    """All tiles that a format has room for, and the splits of K that they allow."""
    found = []
    for tile, split in product(STEP_US, (1, 2, 4)):
        stages = stages_of(fmt, tile, split)
        if stages >= 3 and (split == 1 or tile.pair == 1):
            step, store = _step_us(fmt, tile, pairs=_PAIR_STEPS), tile.rows * tile.batch * _TILE_US
            start = _START_US + (_PAIR_US if tile.pair > 1 else 0) + _MANY_GROUPS_US * (tile.k_groups > 2)
            found.append(_Timed(tile, split, stages, step, store, start, turns_sums(fmt, tile, split)))
    return found


def ways(problem: Problem, signs: bool = False) -> Iterator[WgmmaWay]:
    """What the wgmma core can do: tiles, splits of K, and whether clusters share out the last tiles. `signs`
    of W's columns may want a kernel before."""
    fmt, m, n, k, gpu, matrices = problem[:6]
    kernels = problem.kernels
    few = row_factors(fmt) and not (kernels.integer_scales or kernels.has_zero_points)
    steps, slower = ceil(k / TILE_COLUMNS), _INTEGER_STEPS if few else _STREAM_STEPS
    for tile, split, stages, step, store, start, turned in _timed(fmt):
        clusters = places_of(gpu, split * tile.pair)
        if steps % tile.width or not clusters:
            continue
        outputs = ceil(n / (tile.rows * tile.pair)) * ceil(m / tile.batch) * matrices
        if tile.resident > 1 and not 1 < outputs * split / places_of(gpu) <= tile.resident:
            continue  # nobody would share a multiprocessor, or later blocks would be in nobody's shadow
        places = clusters * tile.resident
        start -= _SHADOW_US if 2 * outputs * split * tile.pair <= places_of(gpu) else 0
        if kernels.turned and not turned:
            start += _RESULTS_US + m * n * _RESULT_US
        if signs and not takes_signs(tile.batch, tile.groups):
            start += _SIGNS_US + m * k * matrices * _SIGN_US
        waves, rest = divmod(outputs, places)
        rounds = waves + (rest > 0)
        if split > 1:
            if rounds == 1 and steps >= split * max(4, tile.width):
                most = ceil(steps / (split * tile.width)) * tile.width
                us = start + most * step + _SPLIT_US[split] + tile.rows * tile.batch * _SPLIT_TILE_US
                yield WgmmaWay(us, tile, split, outputs, 0, stages)
            continue
        us = start + rounds * (steps * step + store)
        yield WgmmaWay(us, tile, 1, outputs, 0, stages)
        if not shares_tiles(fmt, tile):
            continue
        more, helpers = slower[m <= _ONE_TILE], min(places - rest, MOST_PARTS * rest)
        # Fewer tiles than helpers are better split.
        if not rest or not (waves or rest >= helpers) or m * k * 2 > _STREAM_BYTES:
            continue
        leave = leave_us(tile, waves > 0 and rest <= most_shared(places))
        passing = round(leave / (step * more))
        given = (steps * helpers // (rest + helpers) - passing) // tile.width
        # Short parts take longer than that: there is nothing to copy ahead of them.
        if rest * given >= helpers and given * tile.width * step > 2 * leave:
            us = start + (rounds * steps - given * tile.width) * step * more + rounds * store
            us += ceil(helpers / rest) * GET_US
            yield WgmmaWay(us if waves else us * _ALONE, tile, 1, outputs, rest, stages, passing)


def most_shared(places: int) -> int:
    """Tiles of the last round that so many clusters can share with few parts for each helper."""
    return int(places * _FEW_PARTS / (_FEW_PARTS + 1))


def leave_us(tile: Tile, few: bool) -> float:
    """What it takes to leave a tile's sums to another cluster; a few times, before other tiles, or often."""
    return _LEAVE_US if few else _LEAVE_ALONE_US + sum_bytes(tile) * _LEAVE_BYTE_US


def least_batch(problem: Problem) -> int:
    """Batch rows from which on this core may be faster than the decode core. Weights stored as whole matrices
    are left out: what changes x for them takes a launch of its own here."""
    fmt, numbers = problem.fmt, problem.n * problem.k * problem.matrices
    if fmt.whole_matrices or numbers < _LARGE or _part_of_few(fmt) is None:
        return WGMMA_BATCH
    return 1 if fmt.bits == 8 and numbers >= _VERY_LARGE else 5


def few_rows(problem: Problem) -> tuple[float, Gemm]:
    """Predicted microseconds, and the launch that should be fastest of up to 8 batch rows."""
    best, part = min(ways(problem)), _part_of_few(problem.fmt)
    assert part is not None
    return part * best.us, _of_way(problem, best)


def _part_of_few(fmt: Format) -> float | None:
    """Part of the predicted times that up to 8 batch rows take (_FEW_ROWS); None where the decode core is as
    fast or faster."""
    if kernels_of(fmt).lookup:
        return _FEW_LOOKUPS if looked_up(fmt) > 2 else None
    return _FEW_ROWS.get(fmt.bits)


def wgmma(problem: Problem, signs: bool = False) -> Gemm:
    """The wgmma core, as measured times predict it to be fastest; W takes `signs` of columns where it can."""
    found = _of_way(problem, min(ways(problem, signs)))
    return signed(found) if signs else found


def variants(problem: Problem) -> Iterator[Gemm]:
    """Every way of this core, those first that should be fastest."""
    for way in sorted(ways(problem)):
        yield _of_way(problem, way)


def _of_way(problem: Problem, way: WgmmaWay) -> Gemm:
    _, tile, split, outputs, streamed, stages, passing = way
    gemm = planned(problem.fmt, tile, split, streamed > 0, stages)
    places = places_of(problem.gpu, tile.pair) * tile.resident
    blocks = outputs * split if split > 1 else (places if streamed else min(outputs, places)) * tile.pair
    partials = blocks * sum_bytes(tile) if streamed else 0
    grid = replace(gemm.plan, grid=(blocks, 1, 1))
    return replace(gemm, plan=grid, streamed=streamed, passing=passing, partials=partials)
