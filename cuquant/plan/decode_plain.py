"""The decode core's ordinary products: tiles for small batches times one matrix, or each of a stack.

On sm_90 measured times choose (decode_timed.py); the rules for other GPUs are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ..formats import Format
from . import decode_timed
from .cores import Gemm, table_of
from .decode_core import (
    Blocks,
    Work,
    has_roomy_tables,
    most_rows,
    planned,
    ring_bytes,
    rounds_of,
    row_tiles,
    sized,
    stages_all_x,
)
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
"""Of sm_100 and sm_103, whose multiprocessors get 50 GB/s from memory each, and keep nearly all tiles that
were measured on sm_90 at first; and of others, which get 5 to 19."""


def decode(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    matrices: int,
    gpu: Gpu,
    in_half: bool = True,
    to_convert: bool = False,
) -> Gemm:
    """The decode core: as many blocks as the GPU holds at once, each with an equal share of W's rows.

    Weights that are not `in_half`, that float16 does not hold, have no factors of rows. If x is
    to be quantized, every block does so for itself if it is one short row; likewise it is turned.
    """
    work = Work(fmt, m, n, k, matrices, gpu)
    if gpu.capability == 90:
        return decode_timed.fastest(work, in_half, to_convert)[1]

    def made(roomy: bool) -> Gemm:
        table = table_of(fmt, gpu.capability, roomy)
        blocks = _blocks(work, table[1])
        return planned(work, table, in_half, blocks, _row_tiles(work, blocks, table[1]), to_convert)

    if has_roomy_tables(work):
        gemm = made(True)
        if stages_all_x(work, gemm.chunk, gemm.plan.cluster):
            return gemm
    return made(False)


def _blocks(work: Work, table: int) -> Blocks:
    """Of one or two batch rows two small blocks for each multiprocessor, where there is work for them, x is
    short and shared memory has room, hide each other's start and end; with more rows one large block, which
    reads x once."""
    capability, m, share, x_bytes = work.gpu.capability, work.m, work.share(1), work.x_bytes(1)
    short = share > _FEW_TILES or work.batch * work.k * 2 <= _PAIRED_X
    room = ring_bytes(capability) + x_bytes < shared_limit(capability, 2) - table
    return _laid_out(work, table, m <= 2 and short and room and share > max(2 * m, _ONE_WARP))


def _laid_out(work: Work, table: int, two: bool) -> Blocks:
    """Blocks that share things so, with their share of W's rows."""
    share = work.share(1)
    blocks = sized(work, table, 1, two, two and share > 8)
    return blocks._replace(share=ceil(share / 2) if two else share)


def _limits(work: Work, blocks: Blocks, table: int) -> tuple[int, int, int]:
    """Of a block's warps along N the fewest and the most, and the most row tiles of each."""
    warps = blocks.warps
    # As registers allow, and two slots of a ring of half the shared memory.
    if blocks.two:
        ring = blocks.room - min(work.x_bytes(1), blocks.room // 2)
        most = ring // (2 * warps * work.step_bytes)
    else:
        most = (shared_limit(work.gpu.capability) - table) // (4 * warps * work.step_bytes)
    # Warps along N read the same columns of x: more of them where it has many rows.
    least = 2 if warps == 16 and blocks.share > _ONE_WARP and not work.fmt.lookup else 1
    return least, warps if work.m > 2 else warps // 2, min(most_rows(work), max(1, most))


def _row_tiles(work: Work, blocks: Blocks, table: int) -> tuple[int, int]:
    """Warps of a block along N, and row tiles of each."""
    least, most_warps, most = _limits(work, blocks, table)
    row_warps = max(least, min(most_warps, 1 << (ceil(blocks.share / most) - 1).bit_length()))
    usual = row_warps, min(most, ceil(blocks.share / row_warps))
    best = min(row_tiles(least, most_warps, most), key=lambda tile: _busiest(work, blocks, tile))
    pace = _pace(work.gpu)
    return best if _busiest(work, blocks, best) < pace.less * _busiest(work, blocks, usual) else usual


def _pace(gpu: Gpu) -> _Pace:
    return _FAST if gpu.capability in (100, 103) else _SLOW


def _busiest(work: Work, blocks: Blocks, tile: tuple[int, int]) -> float:
    """What the busiest multiprocessor has to do, in row tiles.

    Powers of two suit an H200's 132 multiprocessors. 108 have 9 row tiles each of 14336 rows; blocks of 12,
    the next that there are, keep 75 of them busy.
    """
    made = ceil(work.row_tiles / prod(tile)) * work.matrices * work.batch_tiles
    rounds, most = rounds_of(work.gpu, made, 1 + blocks.two)
    return most * prod(tile) + rounds * _pace(work.gpu).start_steps / work.steps


def variants(fmt: Format, m: int, n: int, k: int, matrices: int, gpu: Gpu) -> Iterator[Gemm]:
    """Other ways to do an ordinary product, those first that should be fastest, or keep the busiest
    multiprocessor the least busy: small blocks or one large one, with more or fewer warps, in tiles of all
    heights that registers are sure to allow."""
    work = Work(fmt, m, n, k, matrices, gpu)
    if gpu.capability == 90:
        yield from decode_timed.variants(work)
        return
    found = []
    for table in {table_of(fmt, gpu.capability), table_of(fmt, gpu.capability, has_roomy_tables(work))}:
        for two, eight in product((False, True), (False, True)):
            room = shared_limit(gpu.capability, 2) - table[1]
            crowded = ring_bytes(gpu.capability) // 2 + work.x_bytes(1) > room
            if two and (eight or work.groups == 2 or crowded):
                continue
            blocks = _laid_out(work, table[1], two)
            if eight:
                blocks = blocks._replace(warps=8)
            least, _, most = _limits(work, blocks, table[1])
            for tile in row_tiles(least, blocks.warps, most):
                found.append((_busiest(work, blocks, tile), table, blocks, tile))
    found.sort(key=lambda each: each[0])
    for _, table, blocks, tile in found:
        yield planned(work, table, True, blocks, tile)
