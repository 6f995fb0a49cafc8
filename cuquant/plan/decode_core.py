"""The decode core: tiles, rings and shared memory for small batches."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ..formats import Format
from .cores import Core, Gemm, gemm_kernel, table_of
from .launch import LARGE_GPU, WARP, Plan, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, has_minimum, layout

_GROUP_BYTES = 288 << 10
"""Of weights, for a block of a grouped product of two sides with up to four batch rows; of more rows twice as
many. Measured."""
_LONG_X = 96 << 10
"""Bytes of x from which on pairs of blocks share it, of up to _FEW_TILES a multiprocessor. Measured."""
_LONG_K = 192
"""Tiles along K from which on they do so of 8-bit codes, however short x is. Measured."""
_FEW_TILES = 4
_PAIRED_X, _PAIRED_X_FEW = 24 << 10, 8 << 10
"""Bytes of x up to which a multiprocessor with up to _FEW_TILES has two blocks; the latter on sm_90 of codes
that take few instructions, or are looked up. Measured."""
_ROOMY = 200 << 10
"""Bytes of shared memory beyond which a block may have a table of 64 KB."""
_QUANTIZED_ROWS, _QUANTIZED = 3, 24 << 10
"""Rows of x, and numbers of them for each block of a cluster, that blocks quantize themselves: of more a
kernel before takes less.

q4_0, one row: an H200 takes 5.5 us in place of 6.0 at 4096 x 4096 (5.2 if x is not quantized), 10.0 in place
of 11.6 at 14336 x 4096, 11.5 in place of 12.4 at 4096 x 14336; three rows 6.5 and 6.6, 12.3 and 12.7, but
15.4 and 14.6.
"""


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
    quantizes: bool = False,
    roomy: bool = True,
) -> Gemm:
    """The decode core: as many blocks as a large GPU holds at once, each with an equal share of W's rows.

    Of one or two batch rows two small blocks per multiprocessor, where there is work for them, x is short
    and shared memory has room, hide each other's start and end; with more rows one large block, which reads x
    once. On sm_90 pairs of blocks split K, which halves what each reads of x, where x leaves no room for the
    ring or is long and W's rows are few, and of more than 8 rows; and tiles are tall (`_tall`) where that
    leaves fewer multiprocessors idle. Weights that are not `in_half`, that float16 does not hold, have no
    factors of rows. Of two `sides` a block has the same rows of two weights. If `grouped`, only the GPU knows
    how many matrices count: blocks of two sides are small then, so that any number of matrices fills it. If
    x is to be quantized, every block does so for itself where rows are few. A codebook's table may be `roomy`
    where all of x has room beside it (measured up to 8 rows: four take an H200 4 to 6% less).
    """
    row_tiles, tiles_k = sides * ceil(n / TILE_ROWS), ceil(k / TILE_COLUMNS)
    groups, limit = 1 if m <= 8 else 2, shared_limit(capability)
    batch, ring = min(m, groups * 8), (72 if limit > 160 << 10 else 24) << 10
    copies, table = table_of(fmt, capability, sides=sides)
    least_x = batch * k * 2 + (40 << 10 if fmt.lookup else 0)
    cluster = 2 if (groups == 2 or least_x > limit - table - ring) and capability == 90 else 1
    if roomy := roomy and groups == sides == 1 and limit > _ROOMY:
        copies, table = table_of(fmt, capability, True)
    whole, half = limit - table, shared_limit(capability, 2) - table
    step = layout(fmt).step(1)
    wide = fmt.bits == 8 and groups == 1 and capability == 90  # of large codes two slots are too few
    tall = None
    if capability == 90 and groups == sides == 1 and not grouped:
        tall = _tall(fmt, m, row_tiles, matrices, cluster)
        long = batch * k * 2 >= _LONG_X or (wide and tiles_k >= _LONG_K)
        few_rows = _share(row_tiles, matrices, 1) <= _FEW_TILES
        cluster = tall.cluster if tall else 2 if few_rows and long else cluster
    x_bytes = batch * (ceil(tiles_k / (8 * cluster)) * 8 * TILE_COLUMNS * 2 + 16)
    share = _share(row_tiles, matrices, cluster)
    # Of little work two blocks must not read much of x twice.
    soon = capability == 90 and (fmt.lookup or _few_instructions(fmt))
    short = share > _FEW_TILES or batch * k * 2 <= (_PAIRED_X_FEW if soon else _PAIRED_X)
    two = tall is None and cluster == 1 and m <= 2 and share > 2 * m and short and ring + x_bytes < half
    # Of more rows where two blocks can stage a quarter of x at a time.
    small = grouped and sides > 1 and groups == 1 and (m <= 4 or half - (36 << 10) > x_bytes // 4)
    two = two or (small and ring > 24 << 10)
    room = half if two else whole
    warps = 16 if groups == 1 and not two and capability >= 80 else 8
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
    if tall:
        warps, row_warps, rows = tall.warps, tall.row_warps, tall.rows
    # The ring holds a multiprocessor's share of the bytes in flight, twice over; older GPUs need less.
    slot = warps * rows * step
    depth = max(2, min(8, ring // slot))
    k_warps = warps // row_warps
    own = ceil(ceil(tiles_k / cluster) / k_warps) * k_warps
    factors = rows * row_warps * layout(fmt).row if in_half else 0
    fits = (room - factors - depth * slot - batch * 16) // (batch * 2 * TILE_COLUMNS) // k_warps * k_warps
    chunk = max(k_warps, min(own, fits))
    if roomy and fmt.lookup and chunk < own:
        given = (fmt, m, n, k, matrices, capability, in_half, sides, grouped, quantizes)
        return decode(*given, roomy=False)
    sums = warps * rows * TILE_ROWS * groups * 8 * 4
    shared = table + factors + max(depth * slot + batch * (chunk * 2 * TILE_COLUMNS + 16), sums)
    tile = {"GROUPS": groups, "ROW_TILES": rows, "ROW_WARPS": row_warps, "WARPS": warps, "DEPTH": depth}
    tile |= {"CLUSTER": cluster, "RESIDENT": 2 if groups == 1 and warps == 8 and not tall else 1}
    # Pieces of x that a thread asks for at once. With four, tall tiles are compiled to wait for each; but 16
    # warps that look codes up have few registers, and of one or two batch rows few pieces.
    many = batch * chunk * 8 > 4 * warps * WARP and (groups == 2 or not fmt.lookup)
    scarce = fmt.lookup and warps == 16 and cluster == 1
    tile["TOGETHER"] = 8 if many or (tall and not scarce) else 4
    # x of weights with signs of columns is quantized before it takes them.
    quantizes = quantizes and not fmt.whole_matrices and m <= _QUANTIZED_ROWS
    quantizes = quantizes and m * k <= _QUANTIZED * cluster
    tile |= {"QUANTIZES": 1} if quantizes else {}
    grid = (ceil(row_tiles / (rows * row_warps)) * cluster, ceil(m / (groups * 8)), matrices)
    kernel = gemm_kernel(fmt, Core.DECODE, copies, tile, shared_limit(capability), in_half)
    return Gemm(
        Plan(kernel, grid, warps * WARP, shared, cluster, overlaps=True), chunk=chunk, quantizes=quantizes
    )


def _share(row_tiles: int, matrices: int, cluster: int) -> int:
    """Row tiles of a multiprocessor, or of a cluster.

    A block has rows of one matrix: what is left over of each must not be a block too many.
    """
    places = LARGE_GPU // (matrices * cluster)
    return ceil(row_tiles / places) if places else ceil(row_tiles * matrices * cluster / LARGE_GPU)


def _few_instructions(fmt: Format) -> bool:
    """Whether codes soon are numbers: not looked up, and with plain scales for 32 or more of them."""
    return not (fmt.lookup or fmt.scale_size < 32 or fmt.kernel_group_bytes)


class _Tall(NamedTuple):
    """Warps of a block, those along N, up to seven row tiles of each; and blocks that split K."""

    warps: int
    row_warps: int
    rows: int
    cluster: int


def _tall(fmt: Format, m: int, row_tiles: int, matrices: int, cluster: int) -> _Tall | None:
    """Tiles that leave fewer multiprocessors idle than those of four row tiles a warp, if there are any.

    14336 rows of W are 7 row tiles for each of 128 multiprocessors, or 8 for each of 112. With 28672 rows an
    H200 takes up to 14% less, most of codebooks and k-quants. Where instructions are few, fewer warps, or
    only one block for a multiprocessor, cost as much: of up to 7 row tiles a multiprocessor these formats
    have tall tiles at 3 and 4 batch rows only, and those with minimums none at 1 and 2. There are none where
    x is so long that a `cluster` must share it, nor of 8 bits, of which two slots of seven do not fit.
    """
    share, few = _share(row_tiles, matrices, 1), _few_instructions(fmt)
    short, pairs = share <= 7, share > 8 and m > 2
    if fmt.bits == 8 or not 4 < share <= 28 or (cluster > 1 and not pairs):
        return None
    if few and ((m <= 2 and (short or has_minimum(fmt))) or (short and m > 4)):
        return None
    if few and short and fmt.bits == 5 and has_minimum(fmt):
        return None
    # Whether 16 warps have registers enough, and win.
    if fmt.lookup:
        roomy = not fmt.whole_matrices and fmt.bits <= 4 and (pairs or (fmt.bits > 2 and not short))
    else:
        roomy = pairs and (fmt.bits == 4 or not (has_minimum(fmt) or fmt.scale_size < 32))
    row_warps = 1 if short else (2 if share <= 14 else 4) * (1 + pairs)
    rows = ceil(_share(row_tiles, matrices, 1 + pairs) / row_warps)
    usual_warps = 1 << (ceil(share / 4) - 1).bit_length()
    usual = usual_warps * ceil(share / usual_warps) * (1 + pairs)
    fewer = row_warps * rows < usual and row_warps * rows <= row_tiles
    return _Tall(16 if roomy else 8, row_warps, rows, 1 + pairs) if fewer else None
