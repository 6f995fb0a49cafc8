"""The mma core, for larger batches without wgmma."""

from __future__ import annotations

from math import ceil

from ..formats import Format
from .cores import Core, Gemm, gemm_kernel, table_of
from .launch import LARGE_GPU, WARP, Plan
from .planes import TILE_COLUMNS, TILE_ROWS, has_minimum, layout, row_factors


def mma(fmt: Format, m: int, n: int, matrices: int, capability: int) -> Gemm:
    """The mma core: tiles so small that several blocks hide each other's latencies, as registers allow.

    Codes that take more instructions get tiles of twice the rows, where that leaves enough of them. Chosen on
    an H200 without wgmma; elsewhere by registers (no spills) and shared memory: with 163 KB three blocks per
    multiprocessor, with 99 KB two.
    """
    row_tiles, warps = ceil(n / TILE_ROWS), 4
    cheap = fmt.bits == 4 and not fmt.lookup and not has_minimum(fmt)
    spared = 80 <= capability < 100  # elsewhere more registers are taken by the same code
    groups, rows, resident = (
        4 if m <= 32 else 8,
        2,
        (4 if cheap and not row_factors(fmt) else 3) if spared else 2,
    )
    scarce = fmt.has_zero_points or fmt.bits == 6  # which take more registers again
    if fmt.bits == 6:
        resident = 2
    wide = spared and not cheap and not scarce
    if m > 128 and wide and ceil(row_tiles / 16) * ceil(m / 64) * matrices >= LARGE_GPU:
        rows, resident = 4, 2
    stages = 3 if capability >= 80 else 2
    stage = groups * 8 * (2 * TILE_COLUMNS + 16) + warps * rows * layout(fmt).step(1)
    copies, table = table_of(fmt, Core.MMA, capability)
    factors, sums = warps * rows * layout(fmt).row, 16 * (warps * rows * TILE_ROWS + 4) * 4
    shared = table + factors + max(stages * stage, sums)
    tile = {"GROUPS": groups, "ROW_TILES": rows, "WARPS": warps, "STAGES": stages, "RESIDENT": resident}
    grid = (ceil(row_tiles / (warps * rows)), ceil(m / (groups * 8)), matrices)
    kernel = gemm_kernel(fmt, Core.MMA, copies, tile, shared)
    return Gemm(Plan(kernel, grid, warps * WARP, shared, overlaps=True))
