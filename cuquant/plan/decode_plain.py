"""The decode core's ordinary products: tiles for small batches times one matrix, or each of a stack."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ..formats import Format
from .cores import Gemm, table_of
from .decode_core import (
    Blocks,
    Work,
    blocks_along_k,
    has_roomy_tables,
    most_rows,
    paired_rows,
    planned,
    ring_bytes,
    rounds_of,
    row_tiles,
    sized,
    stages_all_x,
)
from .launch import Gpu, shared_limit
from .planes import has_minimum, integer_scales

_LONG_X = 96 << 10
"""Bytes of x from which on pairs of blocks share it, of up to _FEW_TILES a multiprocessor. Measured."""
_LONG_K = 192
"""Tiles along K from which on they do so of 8-bit codes, however short x is. Measured."""
_FEW_TILES = 4
_PAIRED_X, _PAIRED_X_FEW = 24 << 10, 8 << 10
"""Bytes of x up to which a multiprocessor with up to _FEW_TILES has two blocks; the latter on sm_90 of codes
that take few instructions, or are looked up. Measured."""
_ONE_WARP = 3
"""What `_one_warp` is on sm_90: 5120 x 5120 takes an H200 5.8 us in place of 6.9 with two warps along N, of
two row tiles each (q4_0, one row)."""
_SAVED_STEPS = 72
"""Steps of a row tile that a multiprocessor must have less for pairs of blocks to split K, which takes 1 us.
Measured."""
_SHORT_K = 64
"""Tiles along K below which 8 warps have too few each to hide how long they wait for them. Measured."""


class _Pace(NamedTuple):
    """How tiles are weighed against each other."""

    start_steps: int
    """Steps of a row tile that count as much as a block's start and end."""
    less: float
    """Part of the usual tile's time that another's must be below."""


_FAST, _SLOW = _Pace(384, 0.85), _Pace(40, 0.97)
"""Of sm_90, sm_100 and sm_103, whose multiprocessors get 18 to 55 GB/s from memory each (an H200's 34), so
that nearly all weights keep the tiles that were measured there; and of others, which get 5 to 19."""


class _Tall(NamedTuple):
    """Warps of a block, those along N, up to seven row tiles of each; and blocks that split K."""

    warps: int
    row_warps: int
    rows: int
    cluster: int


def _pace(gpu: Gpu) -> _Pace:
    return _FAST if gpu.capability in (90, 100, 103) else _SLOW


def decode(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    matrices: int,
    gpu: Gpu,
    in_half: bool = True,
    converted: bool = False,
) -> Gemm:
    """The decode core: as many blocks as the GPU holds at once, each with an equal share of W's rows.

    Weights that are not `in_half`, that float16 does not hold, have no factors of rows. If x is
    to be quantized, every block does so for itself if it is one short row; likewise it is turned for walks.
    Up to 8 batch rows a codebook's table is a large one where all of x has room beside it (four rows take an
    H200 4 to 6% less).
    """
    work = Work(fmt, m, n, k, matrices, gpu)

    def made(roomy: bool) -> Gemm:
        table = table_of(fmt, gpu.capability, roomy)
        blocks, tall = _blocks(work, table[1])
        tile = (tall.row_warps, tall.rows) if tall else _row_tiles(work, blocks, table[1])
        return planned(work, table, in_half, blocks, tile, converted)

    if has_roomy_tables(work):
        gemm = made(True)
        if stages_all_x(work, gemm):
            return gemm
    return made(False)


def _blocks(work: Work, table: int) -> tuple[Blocks, _Tall | None]:
    """Blocks, and tall tiles if they have some.

    Of one or two batch rows two small blocks for each multiprocessor, where there is work for them, x is
    short and shared memory has room, hide each other's start and end; with more rows one large block, which
    reads x once.

    On sm_90 pairs of blocks split K, which halves what each reads of x, where x leaves no room for the ring
    or is long and W's rows are few, where the busiest multiprocessor has much less to do then, and of more
    than 8 rows; and tiles are tall (`_tall`) where that leaves fewer multiprocessors idle.
    """
    fmt, m, capability = work.fmt, work.m, work.gpu.capability
    half, ring = shared_limit(capability, 2) - table, ring_bytes(capability)
    cluster, tall = _split(work)
    x_bytes, share = work.x_bytes(cluster), work.share(cluster)
    # Of little work two blocks must not read much of x twice.
    soon = capability == 90 and (fmt.lookup or _few_instructions(fmt))
    short = share > _FEW_TILES or work.batch * work.k * 2 <= (_PAIRED_X_FEW if soon else _PAIRED_X)
    two = tall is None and cluster == 1 and m <= 2 and short and ring + x_bytes < half
    two = two and share > max(2 * m, _one_warp(work.gpu))
    blocks = _laid_out(work, table, cluster, two)
    return (blocks._replace(warps=tall.warps, tall=True) if tall else blocks), tall


def _laid_out(work: Work, table: int, cluster: int, two: bool) -> Blocks:
    """Blocks that share things so, with their share of W's rows."""
    share = work.share(cluster)
    blocks = sized(work, table, cluster, two, two and share > 8)
    return blocks._replace(share=ceil(share / 2) if two else share)


def _one_warp(gpu: Gpu) -> int:
    """Row tiles of a multiprocessor up to which all are those of warps that split K."""
    return _ONE_WARP if gpu.capability == 90 else 2


def _split(work: Work) -> tuple[int, _Tall | None]:
    """Blocks that split K, and tall tiles if there are any."""
    cluster = blocks_along_k(work)
    if work.gpu.capability != 90 or work.groups == 2:
        return cluster, None
    tall, x_bytes = _tall(work, cluster), work.batch * work.k * 2
    long = x_bytes >= _LONG_X or (work.large_codes and work.steps >= _LONG_K)
    if tall is None and work.share(1) <= _FEW_TILES:
        own, halves = work.share(1), _usual_rows(work.share(2)) / 2
        saves = work.matrices == 1 and (own - halves) * work.steps >= _SAVED_STEPS
        if long or saves:
            return 2, None
    return tall.cluster if tall else cluster, tall


def _usual_rows(share: int) -> int:
    """Row tiles of a block that is to have at least so many."""
    warps = 1 << (ceil(share / 4) - 1).bit_length()
    return warps * ceil(share / warps)


def _limits(work: Work, blocks: Blocks, table: int) -> tuple[int, int, int]:
    """Of a block's warps along N the fewest and the most, and the most row tiles of each."""
    fmt, warps = work.fmt, blocks.warps
    # As registers allow, and two slots of a ring of half the shared memory, or three of large codes.
    most = most_rows(work)
    if blocks.two:
        most = paired_rows(work, 1) if work.gpu.capability == 90 else most
        slots, ring = 2, blocks.room - min(work.x_bytes(blocks.cluster), blocks.room // 2)
        if work.large_codes and blocks.ring > 72 << 10:
            slots, ring = 3, blocks.ring
        most = min(most, max(1, ring // (slots * warps * work.step_bytes)))
    else:
        room = shared_limit(work.gpu.capability) - table
        most = min(most, max(1, room // (4 * warps * work.step_bytes)))
    # Warps along N read the same columns of x: more of them where it has many rows.
    least = 2 if warps == 16 and blocks.share > _one_warp(work.gpu) and not fmt.lookup else 1
    return least, warps if work.m > 2 else warps // 2, most


def _row_tiles(work: Work, blocks: Blocks, table: int) -> tuple[int, int]:
    """Warps of a block along N, and row tiles of each."""
    least, most_warps, most = _limits(work, blocks, table)
    if blocks.two and work.gpu.capability == 90 and work.matrices == 1 and blocks.share <= most:
        return 1, blocks.share
    most_usual = min(most, most_rows(work))
    row_warps = max(least, min(most_warps, 1 << (ceil(blocks.share / most_usual) - 1).bit_length()))
    usual = row_warps, min(most_usual, ceil(blocks.share / row_warps))
    best = min(_tiles(work, blocks, least, most_warps, most), key=lambda tile: _busiest(work, blocks, tile))
    less = _busiest(work, blocks, best) < _pace(work.gpu).less * _busiest(work, blocks, usual)
    return best if less else usual


def _tiles(work: Work, blocks: Blocks, least: int, most_warps: int, most: int) -> Iterator[tuple[int, int]]:
    """Tiles within limits, which are those of one warp along N, for which registers suffice."""
    paired = blocks.two and work.gpu.capability == 90
    for row_warps, rows in row_tiles(least, most_warps, most):
        if not paired or rows <= paired_rows(work, row_warps):
            yield row_warps, rows


def _busiest(work: Work, blocks: Blocks, tile: tuple[int, int]) -> float:
    """What the busiest multiprocessor has to do, in row tiles.

    Powers of two suit an H200's 132 multiprocessors. 108 have 9 row tiles each of 14336 rows; blocks of 12,
    the next that there are, keep 75 of them busy.
    """
    made = ceil(work.row_tiles / prod(tile)) * work.matrices * blocks.cluster * work.batch_tiles
    rounds, most = rounds_of(work.gpu, made, 1 + blocks.two)
    return most * prod(tile) / blocks.cluster + rounds * _pace(work.gpu).start_steps / work.steps


def variants(fmt: Format, m: int, n: int, k: int, matrices: int, gpu: Gpu) -> Iterator[Gemm]:
    """Other ways to do an ordinary product, those first that should keep the busiest multiprocessor the least
    busy: small blocks or one large one, with more or fewer warps, split along K or not, in tiles of all
    heights that registers are sure to allow."""
    work = Work(fmt, m, n, k, matrices, gpu)
    found = []
    for table in {table_of(fmt, gpu.capability), table_of(fmt, gpu.capability, has_roomy_tables(work))}:
        for cluster, two, eight in product((1, 2), (False, True), (False, True)):
            if (cluster == 2 and gpu.capability != 90) or (
                two and (eight or cluster == 2 or work.groups == 2)
            ):
                continue
            if (
                two
                and ring_bytes(gpu.capability) // 2 + work.x_bytes(1)
                > shared_limit(gpu.capability, 2) - table[1]
            ):
                continue
            blocks = _laid_out(work, table[1], cluster, two)
            if eight:
                blocks = blocks._replace(warps=8)
            least, _, most = _limits(work, blocks, table[1])
            for tile in _tiles(work, blocks, least, blocks.warps, most):
                found.append((_busiest(work, blocks, tile), table, blocks, tile))
    found.sort(key=lambda each: each[0])
    for _, table, blocks, tile in found:
        yield planned(work, table, True, blocks, tile)


def _few_instructions(fmt: Format) -> bool:
    """Whether codes soon are numbers: not looked up, and with plain scales for 32 or more of them."""
    return not (fmt.lookup or fmt.walks or fmt.scale_size < 32 or integer_scales(fmt))


def _tall(work: Work, cluster: int) -> _Tall | None:
    """Tiles that leave fewer multiprocessors idle than those of four row tiles a warp, if there are any.

    14336 rows of W are 7 row tiles for each of 128 multiprocessors, or 8 for each of 112. With 28672 rows an
    H200 takes up to 14% less, most of codebooks and k-quants; codes that are looked up have one warp along N
    even if that leaves no fewer idle (11008 rows: 6 to 9% less). Where instructions are few, fewer warps, or
    only one block for a multiprocessor, cost as much: of up to 7 row tiles a multiprocessor these formats
    have tall tiles at 3 and 4 batch rows only (E2M1, whose numbers take more, at up to 8), and if K is not
    short; at 1 and 2 those with minimums have none, and others some beyond 12 row tiles, or where x is long:
    else two small blocks of one warp along N win (17408 x 5120, q4_0: 14.5 us, with one block 21.9). At one
    row, times one matrix of codes of 4 bits that are not looked up, they do so up to 14 row tiles, by 2%; at
    two rows they lose as much. There are none where x is so long that a `cluster` must share it, nor of 8
    bits, of which two slots of seven do not fit.
    """
    fmt, m, share, few = work.fmt, work.m, work.share(1), _few_instructions(work.fmt)
    short, pairs = share <= 7, share > 8 and m > 2
    if fmt.bits == 8 or not 4 < share <= 28 or (cluster > 1 and not pairs):
        return None
    paired = ring_bytes(90) + work.x_bytes(1) < shared_limit(90, 2)
    small = short or (share <= 12 and paired)
    if few and ((m <= 2 and (small or has_minimum(fmt))) or (short and m > 4 and fmt.codebook is None)):
        return None
    one = m == work.matrices == 1
    if one and paired and fmt.bits == 4 and not (fmt.lookup or fmt.walks) and 12 < share <= 14:
        return None
    if few and short and ((fmt.bits == 5 and has_minimum(fmt)) or work.steps < _SHORT_K):
        return None
    # Whether 16 warps have registers enough, and win.
    if fmt.lookup:
        roomy = not fmt.whole_matrices and fmt.bits <= 4 and (pairs or (fmt.bits > 2 and not short))
    else:
        roomy = pairs and not fmt.walks and (fmt.bits == 4 or not (has_minimum(fmt) or fmt.scale_size < 32))
    row_warps = 1 if short else (2 if share <= 14 else 4) * (1 + pairs)
    rows = ceil(work.share(1 + pairs) / row_warps)
    usual = _usual_rows(share) * (1 + pairs)
    fewer = row_warps * rows < usual + (fmt.lookup and short) and row_warps * rows <= work.row_tiles
    return _Tall(16 if roomy else 8, row_warps, rows, 1 + pairs) if fewer else None
