"""The decode core's grouped products: few rows of x for each of some matrices (a mixture of experts).

A block has rows of one matrix, and how many matrices there are, only the GPU knows. Tiles are those that
leave multiprocessors the least to do if as many are hit as expected. On an H200, times of 28 tiles each for
gate and up, and down, 8 experts of 14336 x 4096, top 2, 1 to 16 tokens of q4_0, q4_k and kbit4: what is
chosen so was the best, or within 5% (0.5% in the mean), where tiles of equal shares took 6% more.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, prod

from ..formats import Format
from .cores import Gemm, table_of
from .decode_core import (
    MOST_ROWS,
    Blocks,
    Work,
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
from .planes import layout

_SHORT = {1: 1.3, 2: 1.12, 3: 1.05}
"""What a row tile takes of a warp that has so few, as all read x."""
_FEWER_WARPS = 1.05
"""The same of 8 warps on a multiprocessor, in place of 16."""
_START = 1.0
"""Row tiles that take as long as a block's start and end."""
_TWO_LAUNCHES, _LAUNCH_STEPS = 1.2, 120
"""How many times as long gate and up take as launches of their own, of which up reads what gate has stored;
and steps of a row tile that take as long as a launch."""


def decode_grouped(
    fmt: Format, m: int, n: int, k: int, hit: float, gpu: Gpu, in_half: bool, sides: int
) -> Gemm | None:
    """The decode core for up to m rows each of `hit` matrices, as expected; of two `sides` a block has the
    same rows of two weights. Weights that are not `in_half`, that float16 does not hold, have no factors of
    rows.

    None where codes are looked up, and blocks of two sides have no room for all of x beside a table, or only
    with tiles that take longer than two launches of large blocks do.
    """
    work = Work(fmt, m, n, k, 1, gpu, sides)

    def made(work: Work, roomy: bool = False) -> list[tuple[float, Blocks, tuple[int, int]]]:
        """What should be fastest first, and what it takes."""
        table = table_of(fmt, gpu.capability, roomy, work.sides)[1]
        return sorted(_candidates(work, table, hit), key=lambda each: each[0])

    def launch(of: tuple[float, Blocks, tuple[int, int]], roomy: bool = False) -> Gemm:
        return planned(work, table_of(fmt, gpu.capability, roomy, sides), in_half, *of[1:])

    if has_roomy_tables(work):
        gemm = launch(made(work, True)[0], True)
        if stages_all_x(work, gemm.chunk, gemm.plan.cluster):
            return gemm
    found = made(work)
    if sides == 1 or not fmt.lookup:
        return launch(found[0])
    most = 2 * _TWO_LAUNCHES * made(work._replace(sides=1))[0][0] + _LAUNCH_STEPS / work.steps
    gemms = (launch(each) for each in found if each[0] <= most)
    return next((gemm for gemm in gemms if stages_all_x(work, gemm.chunk, gemm.plan.cluster)), None)


def _candidates(work: Work, table: int, hit: float) -> Iterator[tuple[float, Blocks, tuple[int, int]]]:
    """Ways to lay out blocks, with what they take."""
    cluster, small = _blocks_along_k(work), _small(work)
    lone = work.groups == 1 and work.gpu.capability == 90 and not small  # one block of 8 warps, too
    for two, tall in ((True, False),) if small else ((False, False), (False, True))[: 1 + lone]:
        blocks = sized(work, table, cluster, two, long=two and work.m > 4)
        if tall:
            blocks = blocks._replace(warps=8, tall=True)
        most = MOST_ROWS if tall else most_rows(work)
        if two and work.gpu.capability == 90:
            most = paired_rows(work, work.sides)
        for tile in row_tiles(work.sides, blocks.warps if work.m > 2 else blocks.warps // 2, most):
            if _fits(work, blocks, tile):
                yield _cost(work, blocks, tile, hit), blocks, tile


def _blocks_along_k(work: Work) -> int:
    """Blocks that have to split K, for want of room beside a ring or of registers."""
    if work.gpu.capability != 90:
        return 1
    table = table_of(work.fmt, 90, sides=work.sides)[1]
    least = work.batch * work.k * 2 + (40 << 10 if work.fmt.lookup else 0)
    return 2 if work.groups == 2 or least > shared_limit(90) - table - ring_bytes(90) else 1


def _small(work: Work) -> bool:
    """Whether a multiprocessor has two blocks, which hide each other's start and end: of two sides, where
    both can stage a quarter of x at a time."""
    if work.sides == 1 or work.groups > 1 or ring_bytes(work.gpu.capability) <= 24 << 10:
        return False
    table = table_of(work.fmt, work.gpu.capability, sides=work.sides)[1]
    left = shared_limit(work.gpu.capability, 2) - table - (36 << 10)
    return work.m <= 4 or left > work.x_bytes(_blocks_along_k(work)) // 4


def _fits(work: Work, blocks: Blocks, tile: tuple[int, int]) -> bool:
    """Whether there is room for a ring of two slots and as much again; or, of two blocks, for two slots or
    three of large codes, beside x or a third of all."""
    slot = blocks.warps * layout(work.fmt).slot(tile[1])
    if not blocks.two:
        return 4 * slot <= blocks.room
    left = blocks.room - min(work.x_bytes(blocks.cluster), blocks.room // 3)
    return (2 + work.large_codes) * slot <= left


def _cost(work: Work, blocks: Blocks, tile: tuple[int, int], hit: float) -> float:
    """What the busiest multiprocessor takes, in row tiles, on average of the numbers of matrices next to what
    is expected."""
    size, least = prod(tile), floor(max(1.0, hit))

    def of(matrices: int) -> float:
        made = ceil(work.row_tiles / size) * matrices * blocks.cluster * work.batch_tiles
        rounds, most = rounds_of(work.gpu, made, 1 + blocks.two)
        return most * size / blocks.cluster + _START * rounds * (1 + blocks.two)

    slower = _SHORT.get(tile[1], 1.0) * (_FEWER_WARPS if blocks.warps == 8 and not blocks.two else 1.0)
    return slower * (of(least) + (hit - least) * (of(least + 1) - of(least)))
