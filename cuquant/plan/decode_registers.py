"""Row tiles for which the decode core has registers: what compiles without spills, by format, and is fast.

How many a thread may have follows from the launch: 16 warps share all of a multiprocessor's, or two blocks of
8 do; of tall tiles 8 warps have them all.
"""

from __future__ import annotations

from ..formats import Format
from ..formats.kernels import kernels_of
from .decode_core import Blocks, DecodeProblem

MOST_ROWS = 7
"""Row tiles of a warp, at most."""
_CLUSTERED_ROWS = 3
"""Row tiles of small blocks in clusters, at most, but for grouped products."""
_TALL_ROWS = 4
"""Row tiles from which on 8 warps may have all of a multiprocessor."""


def sure_rows(problem: DecodeProblem) -> int:
    """Row tiles of a warp for which there are registers everywhere."""
    kernels = problem.kernels
    words = kernels.lookup and (kernels.has_minimum or problem.fmt.whole_matrices)
    if words and problem.gpu.capability >= 100:
        return 3  # two words of scales a block, or signs of x, and more registers taken by the same code
    return 4 if problem.groups == 1 or kernels.has_minimum else 7


def has_registers(problem: DecodeProblem, blocks: Blocks, tile: tuple[int, int]) -> bool:
    """Whether there are registers for tiles of this height. Grouped products take some more with clusters."""
    row_warps, rows = tile
    fewer = 1 + problem.fmt.whole_matrices if problem.grouped and blocks.cluster > 1 else 0
    if problem.groups == 2:
        return rows <= sure_rows(problem) - fewer
    if blocks.two:  # a row tile alone took up to 30% more; of clusters taller ones were not measured
        most = _rows_of_two(problem.fmt, row_warps, problem.grouped)
        most = most if problem.grouped or blocks.cluster == 1 else _CLUSTERED_ROWS
        return (1 if problem.fmt.bits == 8 else 2) <= rows <= most - fewer
    return rows >= _TALL_ROWS if blocks.tall else rows <= _rows_of_one(problem.fmt, row_warps) - fewer


def _rows_of_one(fmt: Format, row_warps: int) -> int:
    """Row tiles of a warp, of 16 that share a multiprocessor's registers."""
    kernels = kernels_of(fmt)
    if fmt.whole_matrices and not kernels.walks:
        return 5 if kernels.group_size else 4
    if fmt.bits == 6 and not kernels.walks:
        return 4
    if fmt.bits == 3 and kernels.integer_scales:
        return 5
    if fmt.bits == 5 and (kernels.lookup or kernels.has_minimum):
        return 5
    if fmt.bits == 8 and not kernels.walks:
        return 6
    return MOST_ROWS - (row_warps > 1 and (kernels.has_minimum or fmt.bits == 6))


def _rows_of_two(fmt: Format, row_warps: int, grouped: bool) -> int:
    """Row tiles of a warp, where two blocks of 8 warps share a multiprocessor's registers."""
    kernels = kernels_of(fmt)
    if fmt.bits == 2 and fmt.whole_matrices:
        return 5 if kernels.group_size else 4
    scarce = fmt.bits == 3 and kernels.group_size > 0
    many = scarce or fmt.bits == 6 or fmt.whole_matrices or (fmt.bits == 5 and kernels.lookup)
    if row_warps > 1 or grouped:
        if fmt.bits == 6 or (grouped and fmt.bits == 3 and fmt.whole_matrices and not scarce):
            return 4
        many |= kernels.has_zero_points or (kernels.has_minimum and not kernels.integer_scales)
        many |= grouped and fmt.bits == 5 and kernels.group_size > 0
    return MOST_ROWS - many - (fmt.bits == 6 or (scarce and not grouped))
