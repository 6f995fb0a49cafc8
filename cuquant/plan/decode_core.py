"""The decode core: tiles, rings and shared memory for small batches."""

from __future__ import annotations

from math import ceil

from ..formats import Format
from .cores import Core, Gemm, gemm_kernel, table_of
from .launch import LARGE_GPU, WARP, Plan, paired_limit, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, has_minimum, layout

_GROUP_BYTES = 288 << 10
"""Of weights, for a block of a grouped product of two sides with up to four batch rows; of more rows twice as
many. Measured."""


def decode(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    matrices: int,
    capability: int,
    in_half: bool = True,
    sides: int = 1,
    grouped: bool = False,
) -> Gemm:
    """The decode core: as many blocks as a large GPU holds at once, each with an equal share of W's rows.

    Of one or two batch rows two small blocks per multiprocessor, where there is work for them, x is short
    and shared memory has room, hide each other's start and end; with more rows one large block, which reads x
    once. On sm_90 pairs of blocks split K, which halves what each reads of x, where x leaves no room for the
    ring, and of more than 8 rows. Weights that are not `in_half`, that float16 does not hold, have no factors
    of rows. Of two `sides` a block has the same rows of two weights. If `grouped`, only the GPU knows how
    many matrices count: blocks of two sides are small then, so that any number of matrices fills it.
    """
    row_tiles, tiles_k = sides * ceil(n / TILE_ROWS), ceil(k / TILE_COLUMNS)
    copies, table = table_of(fmt, Core.DECODE, capability)
    groups, whole = 1 if m <= 8 else 2, shared_limit(capability) - table
    half = paired_limit(capability) - table
    step = layout(fmt).step(1)
    batch, ring = min(m, groups * 8), (72 if shared_limit(capability) > 160 << 10 else 24) << 10
    least_x = batch * k * 2 + (40 << 10 if fmt.lookup else 0)
    cluster = 2 if (groups == 2 or least_x > whole - ring) and capability == 90 else 1
    x_bytes = batch * (ceil(tiles_k / (8 * cluster)) * 8 * TILE_COLUMNS * 2 + 16)
    # Row tiles of a multiprocessor, or of a pair.
    share = max(1, ceil(row_tiles * matrices * cluster / LARGE_GPU))
    # Of little work two blocks must not read much of x twice.
    two = m <= 2 and share > 2 * m and (share > 4 or batch * k * 2 <= 24 << 10) and ring + x_bytes < half
    # Of more rows where two blocks can stage a quarter of x at a time.
    small = grouped and sides > 1 and groups == 1 and (m <= 4 or half - (36 << 10) > x_bytes // 4)
    two = two or (small and ring > 24 << 10)
    room = half if two else whole
    warps = 16 if groups == 1 and not two and capability >= 80 else 8
    wide = fmt.bits == 8 and groups == 1 and capability == 90  # of large codes two slots are too few
    if two and ring > 48 << 10 and (m > 4 if small else share > 8):
        ring = 48 << 10  # in the long run more bytes in flight only wait for each other, or x would not fit
    elif wide:
        ring = 96 << 10 if two else max(ring, min(104 << 10, room - x_bytes))
    if two:
        ring, share = min(ring, max(room - x_bytes, room // 2)), ceil(share / 2)
    if small:
        most_bytes = _GROUP_BYTES if m <= 4 else 2 * _GROUP_BYTES
        share = max(1, min(share, round(most_bytes * cluster / (tiles_k * step))))
    # Row tiles of a warp: as registers allow, and two slots of a ring of half the shared memory.
    most = 4 if groups == 1 or has_minimum(fmt) else 7
    if fmt.lookup and (has_minimum(fmt) or fmt.whole_matrices) and capability >= 100:
        most = 3  # two words of scales a block, or signs of x, and more registers taken by the same code
    if wide and two and ring > 72 << 10:
        most = 2
    most = min(most, max(1, (half if small else whole) // (4 * warps * step)))
    if two:
        most = min(most, max(1, (room - min(x_bytes, room // 2)) // (2 * warps * step)))
    # Warps along N read the same columns of x: more of them where it has many rows.
    least = 2 if warps == 16 and share > 2 and not fmt.lookup else 1
    most_warps = warps if m > 2 else warps // 2
    row_warps = max(sides, least, min(most_warps, 1 << (ceil(share / most) - 1).bit_length()))
    rows = min(most, ceil(share / row_warps))
    # The ring holds a multiprocessor's share of the bytes in flight, twice over; older GPUs need less.
    slot = warps * rows * step
    depth = max(2, min(8, ring // slot))
    k_warps = warps // row_warps
    own = ceil(ceil(tiles_k / cluster) / k_warps) * k_warps
    factors = rows * row_warps * layout(fmt).row if in_half else 0
    fits = (room - factors - depth * slot - batch * 16) // (batch * 2 * TILE_COLUMNS) // k_warps * k_warps
    chunk = max(k_warps, min(own, fits))
    sums = warps * rows * TILE_ROWS * groups * 8 * 4
    shared = table + factors + max(depth * slot + batch * (chunk * 2 * TILE_COLUMNS + 16), sums)
    tile = {"GROUPS": groups, "ROW_TILES": rows, "ROW_WARPS": row_warps, "WARPS": warps, "DEPTH": depth}
    tile |= {"CLUSTER": cluster, "RESIDENT": 2 if groups == 1 and warps == 8 else 1}
    grid = (ceil(row_tiles / (rows * row_warps)) * cluster, ceil(m / (groups * 8)), matrices)
    kernel = gemm_kernel(fmt, Core.DECODE, copies, tile, shared_limit(capability), in_half)
    return Gemm(Plan(kernel, grid, warps * WARP, shared, cluster, overlaps=True), chunk=chunk)


def decodes_long(fmt: Format, n: int, matrices: int) -> bool:
    """Whether the decode core is faster than the wgmma core also of 9 to 16 batch rows.

    So it is where a weight takes few instructions, and blocks have so many rows of W that staging x does not
    show. 16 rows of x take an H200 45.7 us by decode and 51.5 by wgmma at 28672 x 8192, but 16.6 and 15.7 at
    14336 x 4096 (q4_0).
    """
    few = fmt.bits <= 5 and not (has_minimum(fmt) or (fmt.lookup and fmt.bits > 3))
    return few and matrices == 1 and ceil(n / TILE_ROWS) >= 12 * LARGE_GPU
