"""The decode core's ordinary products: tiles for small batches times one matrix, or each of a stack.

On sm_90 measured times choose (decode_timed.py); the rules for other GPUs are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from . import decode_timed
from .cores import Gemm, Problem, table_of
from .decode_core import (
    Blocks,
    DecodeProblem,
    has_roomy_tables,
    planned,
    ring_bytes,
    rounds_of,
    sized,
    stages_all_x,
    tiles_within,
)
from .decode_registers import sure_rows
from .launch import Gpu, shared_limit

_FEW_TILES = 4
"""Row tiles of a multiprocessor up to which two blocks must not read much of x twice."""
_PAIRED_X = 24 << 10
"""Bytes of x that are not much."""
_ONE_WARP = 2
"""Row tiles of a multiprocessor up to which all are those of warps that split K."""


class _Pace(NamedTuple):
    """How tiles are weighed against each other."""

    start_steps: int
    """Steps of a row tile that count as much as a block's start and end."""
    less: float
    """Part of the usual tile's time that another's must be below."""


_FAST, _SLOW = _Pace(384, 0.85), _Pace(40, 0.97)
"""Pace of sm_100 and sm_103, whose multiprocessors get 50 GB/s from memory each, and keep nearly all tiles
that were measured on sm_90 at first; and of others, which get 5 to 19."""


def decode(problem: Problem, to_convert: bool = False) -> Gemm:
    """The decode core: as many blocks as the GPU holds at once, each with an equal share of W's rows.

    If x is to be quantized, every block does so for itself if it is one short row; likewise it is turned.
    """
    if problem.gpu.capability == 90:
        return decode_timed.fastest(problem, to_convert)[1]
    own = DecodeProblem(*problem)

    def made(roomy: bool) -> Gemm:
        table = table_of(own.fmt, own.gpu.capability, roomy)
        blocks = _blocks(own, table[1])
        return planned(own, table, blocks, _tile(own, blocks, table[1]), to_convert)

    if has_roomy_tables(own):
        gemm = made(True)
        if stages_all_x(own, gemm.chunk, gemm.plan.cluster):
            return gemm
    return made(False)


def _blocks(problem: DecodeProblem, table: int) -> Blocks:
    """How blocks share multiprocessors: with one or two batch rows two small blocks on each, where there is
    work for them, x is short and shared memory has room, as they hide each other's start and end; with more
    rows one large block, which reads x once."""
    capability, m, share, x_bytes = problem.gpu.capability, problem.m, problem.share(1), problem.x_bytes(1)
    short = share > _FEW_TILES or problem.batch * problem.k * 2 <= _PAIRED_X
    room = ring_bytes(capability) + x_bytes < shared_limit(capability, 2) - table
    return _laid_out(problem, table, m <= 2 and short and room and share > max(2 * m, _ONE_WARP))


def _laid_out(problem: DecodeProblem, table: int, two: bool) -> Blocks:
    """Blocks that share things so, with their share of W's rows."""
    share = problem.share(1)
    blocks = sized(problem, table, 1, two, two and share > 8)
    return blocks._replace(share=ceil(share / 2) if two else share)


def _limits(problem: DecodeProblem, blocks: Blocks, table: int) -> tuple[int, int, int]:
    """The fewest and the most warps of a block along N, and the most row tiles of each."""
    warps = blocks.warps
    # As registers allow, and two slots of a ring of half the shared memory.
    if blocks.two:
        ring = blocks.room - min(problem.x_bytes(1), blocks.room // 2)
        most = ring // (2 * warps * problem.step_bytes)
    else:
        most = (shared_limit(problem.gpu.capability) - table) // (4 * warps * problem.step_bytes)
    # Warps along N read the same columns of x: more of them where it has many rows.
    least = 2 if warps == 16 and blocks.share > _ONE_WARP and not problem.kernels.lookup else 1
    return least, warps if problem.m > 2 else warps // 2, min(sure_rows(problem), max(1, most))


def _tile(problem: DecodeProblem, blocks: Blocks, table: int) -> tuple[int, int]:
    """Warps of a block along N, and row tiles of each."""
    least, most_warps, most = _limits(problem, blocks, table)
    row_warps = max(least, min(most_warps, 1 << (ceil(blocks.share / most) - 1).bit_length()))
    usual = row_warps, min(most, ceil(blocks.share / row_warps))
    best = min(tiles_within(least, most_warps, most), key=lambda tile: _busiest(problem, blocks, tile))
    pace = _pace(problem.gpu)
    return best if _busiest(problem, blocks, best) < pace.less * _busiest(problem, blocks, usual) else usual


def _pace(gpu: Gpu) -> _Pace:
    return _FAST if gpu.capability in (100, 103) else _SLOW


def _busiest(problem: DecodeProblem, blocks: Blocks, tile: tuple[int, int]) -> float:
    """What the busiest multiprocessor has to do, in row tiles.

    Powers of two suit an H200's 132 multiprocessors. 108 have 9 row tiles each of 14336 rows; blocks of 12,
    the next that there are, keep 75 of them busy.
    """
    made = ceil(problem.row_tiles / prod(tile)) * problem.matrices * problem.batch_tiles
    rounds, most = rounds_of(problem.gpu, made, 1 + blocks.two)
    return most * prod(tile) + rounds * _pace(problem.gpu).start_steps / problem.steps


def variants(problem: Problem) -> Iterator[Gemm]:
    """Other ways to do an ordinary product, those first that should be fastest, or keep the busiest
    multiprocessor the least busy: small blocks or one large one, with more or fewer warps, in tiles of all
    heights that registers are sure to allow."""
    fmt, capability = problem.fmt, problem.gpu.capability
    if capability == 90:
        yield from decode_timed.variants(problem)
        return
    own, found = DecodeProblem(*problem), []
    for table in {table_of(fmt, capability), table_of(fmt, capability, has_roomy_tables(own))}:
        for two, eight in product((False, True), (False, True)):
            room = shared_limit(capability, 2) - table[1]
            crowded = ring_bytes(capability) // 2 + own.x_bytes(1) > room
            if two and (eight or own.groups == 2 or crowded):
                continue
            blocks = _laid_out(own, table[1], two)
            if eight:
                blocks = blocks._replace(warps=8)
            least, _, most = _limits(own, blocks, table[1])
            for tile in tiles_within(least, blocks.warps, most):
                found.append((_busiest(own, blocks, tile), table, blocks, tile))
    found.sort(key=lambda each: each[0])
    for _, table, blocks, tile in found:
        yield planned(own, table, blocks, tile)
