"""The decode core's grouped products: few rows of x for each of some matrices (a mixture of experts).

A block has rows of one matrix, and how many matrices there are, only the GPU knows. On sm_90 measured times
choose tiles (decode_timed.py); elsewhere they are those that leave multiprocessors the least to do if as many
are hit as expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, prod

from . import decode_timed
from .cores import Gemm, Problem, table_of
from .decode_core import (
    Blocks,
    DecodeProblem,
    Hits,
    has_roomy_tables,
    planned,
    ring_bytes,
    rounds_of,
    sized,
    stages_all_x,
    tiles_within,
)
from .decode_registers import sure_rows
from .launch import shared_limit

_SHORT = {1: 1.3, 2: 1.12, 3: 1.05}
"""What a row tile takes of a warp that has so few, as all read x."""
_START = 1.0
"""Row tiles that take as long as a block's start and end."""
_TWO_LAUNCHES, _LAUNCH_STEPS = 1.2, 120
"""How many times as long gate and up take as launches of their own, of which up reads what gate has stored;
and steps of a row tile that take as long as a launch."""


def decode_grouped(problem: Problem, hits: Hits) -> tuple[float, Gemm] | None:
    """The decode core for up to m rows each of the matrices that are hit, as expected. With the microseconds
    that measured times predict, or 0 where none were measured.

    None where codes are looked up, and blocks of two sides have no room for all of x beside a table, or only
    with tiles that take longer than two launches of large blocks do.
    """
    fmt, capability = problem.fmt, problem.gpu.capability
    if capability == 90:
        return decode_timed.fastest_grouped(problem, hits)
    own = DecodeProblem(*problem)

    def made(own: DecodeProblem, roomy: bool = False) -> list[tuple[float, Blocks, tuple[int, int]]]:
        """What should be fastest first, and what it takes."""
        table = table_of(fmt, capability, roomy, own.sides)[1]
        return sorted(_candidates(own, table, hits.mean), key=lambda each: each[0])

    def launch(of: tuple[float, Blocks, tuple[int, int]], roomy: bool = False) -> tuple[float, Gemm]:
        return 0, planned(own, table_of(fmt, capability, roomy, own.sides), *of[1:])

    if has_roomy_tables(own):
        us, gemm = launch(made(own, True)[0], True)
        if stages_all_x(own, gemm.chunk, gemm.plan.cluster):
            return us, gemm
    found = made(own)
    if own.sides == 1 or not own.kernels.lookup:
        return launch(found[0])
    most = 2 * _TWO_LAUNCHES * made(own._replace(sides=1))[0][0] + _LAUNCH_STEPS / own.steps
    gemms = (launch(each) for each in found if each[0] <= most)
    return next((one for one in gemms if stages_all_x(own, one[1].chunk, one[1].plan.cluster)), None)


def _candidates(
    problem: DecodeProblem, table: int, hit: float
) -> Iterator[tuple[float, Blocks, tuple[int, int]]]:
    """Ways to lay out blocks, with what they take."""
    two = _small(problem)
    blocks = sized(problem, table, 1, two, long=two and problem.m > 4)
    most_warps = blocks.warps if problem.m > 2 else blocks.warps // 2
    for tile in tiles_within(problem.sides, most_warps, sure_rows(problem)):
        if _fits(problem, blocks, tile):
            yield _cost(problem, blocks, tile, hit), blocks, tile


def _small(problem: DecodeProblem) -> bool:
    """Whether a multiprocessor has two blocks, which hide each other's start and end: of two sides, where
    both can stage a quarter of x at a time."""
    if problem.sides == 1 or problem.groups > 1 or ring_bytes(problem.gpu.capability) <= 24 << 10:
        return False
    table = table_of(problem.fmt, problem.gpu.capability, sides=problem.sides)[1]
    left = shared_limit(problem.gpu.capability, 2) - table - (36 << 10)
    return problem.m <= 4 or left > problem.x_bytes(1) // 4


def _fits(problem: DecodeProblem, blocks: Blocks, tile: tuple[int, int]) -> bool:
    """Whether there is room for a ring of two slots and as much again; or, of two blocks, beside x or a third
    of all."""
    slot = blocks.warps * problem.layout.slot(tile[1])
    if not blocks.two:
        return 4 * slot <= blocks.room
    return 2 * slot <= blocks.room - min(problem.x_bytes(1), blocks.room // 3)


def _cost(problem: DecodeProblem, blocks: Blocks, tile: tuple[int, int], hit: float) -> float:
    """What the busiest multiprocessor takes, in row tiles, on average of the numbers of matrices next to what
    is expected."""
    size, least = prod(tile), floor(max(1.0, hit))

    def of(matrices: int) -> float:
        made = ceil(problem.row_tiles / size) * matrices * problem.batch_tiles
        rounds, most = rounds_of(problem.gpu, made, 1 + blocks.two)
        return most * size + _START * rounds * (1 + blocks.two)

    return _SHORT.get(tile[1], 1.0) * (of(least) + (hit - least) * (of(least + 1) - of(least)))
