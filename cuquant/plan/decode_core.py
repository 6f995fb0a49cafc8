"""The decode core: tiles, rings and shared memory for small batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil, prod
from typing import NamedTuple

from ..formats import Format
from .cores import Core, Gemm, gemm_kernel, table_of
from .launch import WARP, Gpu, Plan, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, has_minimum, layout, whole_lines

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


class _Pace(NamedTuple):
    """How tiles are weighed against each other."""

    start_steps: int
    """Steps of a row tile that count as much as a block's start and end."""
    less: float
    """Part of the usual tile's time that another's must be below."""


_FAST, _SLOW = _Pace(384, 0.85), _Pace(40, 0.97)
"""Of sm_90, sm_100 and sm_103, whose multiprocessors get 18 to 55 GB/s from memory each (an H200's 34), so
that nearly all weights keep the tiles that were measured there; and of others, which get 5 to 19."""
_QUANTIZED = 6 << 10
"""Numbers of one row, for each block of a cluster, that blocks quantize themselves: of more a kernel before
takes less.

What it costs an H200, in us of q4_0: 0.4 at 4096 x 4096 and 14336 x 4096 with one row, but 0.7 and 1.5 with
two, and 1.4 at 4096 x 14336 with one; a kernel before 0.6 and 1.0 with four rows, and 0.5.
"""
_TURNED = 4 << 10
"""The same of numbers that blocks turn: 4096 x 4096 takes 8.9 us in place of 9.5, but 4096 x 14336 as long as
with a kernel before, or longer."""


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
        blocks = _blocks(work, table[1])
        return planned(work, table, in_half, blocks, _row_tiles(work, blocks, table[1]), converted)

    if has_roomy_tables(work):
        gemm = made(True)
        if stages_all_x(work, gemm):
            return gemm
    return made(False)


def has_roomy_tables(work: Work) -> bool:
    """Whether a block may have a table of 64 KB, if all of x has room beside it."""
    return work.groups == work.sides == 1 and shared_limit(work.gpu.capability) > _ROOMY


def stages_all_x(work: Work, gemm: Gemm) -> bool:
    """Whether codes are not looked up, or blocks have all that they need of x at once beside the table."""
    return not work.fmt.lookup or gemm.chunk >= ceil(work.steps / gemm.plan.cluster)


class Work(NamedTuple):
    """A product, as this core has it to do."""

    fmt: Format
    m: int
    n: int
    k: int
    matrices: int
    gpu: Gpu
    sides: int = 1
    """Weights of which a block has the same rows."""

    @property
    def row_tiles(self) -> int:
        """Of all sides of a matrix."""
        return self.sides * ceil(self.n / TILE_ROWS)

    @property
    def steps(self) -> int:
        """Of 64 columns."""
        return ceil(self.k / TILE_COLUMNS)

    @property
    def groups(self) -> int:
        """Of eight batch rows, of a block."""
        return 1 if self.m <= 8 else 2

    @property
    def batch(self) -> int:
        """Batch rows of a block, at most."""
        return min(self.m, self.groups * 8)

    @property
    def batch_tiles(self) -> int:
        return ceil(self.m / (self.groups * 8))

    @property
    def step_bytes(self) -> int:
        """Of a row tile's step of 64 columns."""
        return layout(self.fmt).step(1)

    @property
    def pace(self) -> _Pace:
        return _FAST if self.gpu.capability in (90, 100, 103) else _SLOW

    @property
    def large_codes(self) -> bool:
        """Whether two slots of a ring are too few."""
        return self.fmt.bits == 8 and self.groups == 1 and self.gpu.capability == 90

    def x_bytes(self, cluster: int) -> int:
        """Of a block's rows of x in shared memory."""
        columns = ceil(self.steps / (8 * cluster)) * 8 * TILE_COLUMNS
        return self.batch * (columns * 2 + 16)

    def share(self, cluster: int) -> int:
        """Row tiles of a multiprocessor, or of a cluster.

        A block has rows of one matrix: what is left over of each must not be a block too many.
        """
        places = self.gpu.multiprocessors // (self.matrices * cluster)
        if places:
            return ceil(self.row_tiles / places)
        return ceil(self.row_tiles * self.matrices * cluster / self.gpu.multiprocessors)


class Blocks(NamedTuple):
    """How blocks share multiprocessors, columns and shared memory."""

    cluster: int
    """Blocks that split K."""
    two: bool
    """Whether a multiprocessor has two."""
    warps: int
    room: int
    """Bytes of a block's shared memory beside a codebook's table."""
    ring: int
    """Bytes of its warps' rings together."""
    tall: Tall | None = None
    share: int = 0
    """Row tiles, if all blocks have as many."""


def planned(
    work: Work,
    table: tuple[int, int],
    in_half: bool,
    blocks: Blocks,
    tile: tuple[int, int],
    converts: bool = False,
) -> Gemm:
    """The launch, with so many copies and bytes of a codebook's table; of these blocks, with these warps
    along N and row tiles of each."""
    (copies, table_bytes), (fmt, m) = table, work[:2]
    cluster, warps, tall = blocks.cluster, blocks.warps, blocks.tall
    row_warps, rows = tile
    # The ring holds a multiprocessor's share of the bytes in flight, twice over; older GPUs need less.
    slot = warps * layout(fmt).slot(rows)
    depth = max(2, min(8, blocks.ring // slot))
    k_warps = warps // row_warps
    own = ceil(ceil(work.steps / cluster) / k_warps) * k_warps
    factors = whole_lines(rows * row_warps * layout(fmt).row) if in_half else 0
    left = blocks.room - factors - depth * slot - work.batch * 16
    chunk = max(k_warps, min(own, left // (work.batch * 2 * TILE_COLUMNS) // k_warps * k_warps))
    sums = warps * rows * TILE_ROWS * work.groups * 8 * 4
    ring_and_x = depth * slot + work.batch * (chunk * 2 * TILE_COLUMNS + 16)
    shared = table_bytes + factors + max(ring_and_x, sums)
    constants = {"GROUPS": work.groups, "ROW_TILES": rows, "ROW_WARPS": row_warps, "WARPS": warps}
    constants |= {"DEPTH": depth, "CLUSTER": cluster}
    constants |= {"RESIDENT": 2 if work.groups == 1 and warps == 8 and not tall else 1}
    # Pieces of x that a thread asks for at once. With four, tall tiles are compiled to wait for each; but 16
    # warps that look codes up have few registers, and of one or two batch rows few pieces.
    many = work.batch * chunk * 8 > 4 * warps * WARP and (work.groups == 2 or not fmt.lookup)
    scarce = fmt.lookup and warps == 16 and cluster == 1
    constants["TOGETHER"] = 8 if many or (tall and not scarce) else 4
    # x of weights with signs of columns is quantized before it takes them.
    if fmt.walks:
        converts = converts and m == cluster == 1 and work.k <= min(_TURNED, chunk * TILE_COLUMNS)
    else:
        converts = converts and not fmt.whole_matrices and m == 1 and work.k <= _QUANTIZED * cluster
    constants |= {"CONVERTS": 1} if converts else {}
    grid = (ceil(work.row_tiles / (rows * row_warps)) * cluster, work.batch_tiles, work.matrices)
    kernel = gemm_kernel(fmt, Core.DECODE, copies, constants, shared_limit(work.gpu.capability), in_half)
    return Gemm(
        Plan(kernel, grid, warps * WARP, shared, cluster, overlaps=True), chunk=chunk, converts_x=converts
    )


def _blocks(work: Work, table: int) -> Blocks:
    """Of one or two batch rows two small blocks for each multiprocessor, where there is work for them, x is
    short and shared memory has room, hide each other's start and end; with more rows one large block, which
    reads x once.

    On sm_90 pairs of blocks split K, which halves what each reads of x, where x leaves no room for the ring
    or is long and W's rows are few, and of more than 8 rows; and tiles are tall (`_tall`) where that leaves
    fewer multiprocessors idle.
    """
    fmt, m, capability = work.fmt, work.m, work.gpu.capability
    half, ring = shared_limit(capability, 2) - table, ring_bytes(capability)
    cluster, tall = _split(work)
    x_bytes, share = work.x_bytes(cluster), work.share(cluster)
    # Of little work two blocks must not read much of x twice.
    soon = capability == 90 and (fmt.lookup or _few_instructions(fmt))
    short = share > _FEW_TILES or work.batch * work.k * 2 <= (_PAIRED_X_FEW if soon else _PAIRED_X)
    two = tall is None and cluster == 1 and m <= 2 and share > 2 * m and short and ring + x_bytes < half
    share = ceil(share / 2) if two else share
    return sized(work, table, cluster, two, two and work.share(1) > 8, tall)._replace(share=share)


def ring_bytes(capability: int) -> int:
    """Bytes of a multiprocessor's rings, unless there is a reason for more or less."""
    return (72 if shared_limit(capability) > 160 << 10 else 24) << 10


def sized(
    work: Work, table: int, cluster: int, two: bool, long: bool = False, tall: Tall | None = None
) -> Blocks:
    """What blocks that share things so have of shared memory; of two that run `long`, more bytes in flight
    only wait for each other, or x would not fit."""
    capability, x_bytes = work.gpu.capability, work.x_bytes(cluster)
    room, ring = shared_limit(capability, 1 + two) - table, ring_bytes(capability)
    if long and ring > 48 << 10:
        ring = 48 << 10
    elif work.large_codes:
        ring = 96 << 10 if two else max(ring, min(104 << 10, room - x_bytes))
    if two:
        ring = min(ring, max(room - x_bytes, room // 2))
    warps = 16 if work.groups == 1 and not two and capability >= 80 else 8
    return Blocks(cluster, two, tall.warps if tall else warps, room, ring, tall)


def blocks_along_k(work: Work) -> int:
    """Blocks that have to split K, for want of room beside a ring or of registers."""
    if work.gpu.capability != 90:
        return 1
    table = table_of(work.fmt, 90, sides=work.sides)[1]
    least = work.batch * work.k * 2 + (40 << 10 if work.fmt.lookup else 0)
    return 2 if work.groups == 2 or least > shared_limit(90) - table - ring_bytes(90) else 1


def _split(work: Work) -> tuple[int, Tall | None]:
    """Blocks that split K, and tall tiles if there are any."""
    cluster = blocks_along_k(work)
    if work.gpu.capability != 90 or work.groups == 2:
        return cluster, None
    tall, x_bytes = _tall(work, cluster), work.batch * work.k * 2
    long = x_bytes >= _LONG_X or (work.large_codes and work.steps >= _LONG_K)
    if tall is None and long and work.share(1) <= _FEW_TILES:
        return 2, None
    return tall.cluster if tall else cluster, tall


def most_rows(work: Work) -> int:
    """Row tiles of a warp for which there are registers everywhere."""
    fmt = work.fmt
    if fmt.lookup and (has_minimum(fmt) or fmt.whole_matrices) and work.gpu.capability >= 100:
        return 3  # two words of scales a block, or signs of x, and more registers taken by the same code
    return 4 if work.groups == 1 or has_minimum(fmt) else 7


def _limits(work: Work, blocks: Blocks, table: int) -> tuple[int, int, int]:
    """Of a block's warps along N the fewest and the most, and the most row tiles of each."""
    fmt, warps = work.fmt, blocks.warps
    # As registers allow, and two slots of a ring of half the shared memory.
    most = most_rows(work)
    if work.large_codes and blocks.two and blocks.ring > 72 << 10:
        most = 2
    room = shared_limit(work.gpu.capability) - table
    most = min(most, max(1, room // (4 * warps * work.step_bytes)))
    if blocks.two:
        ring = blocks.room - min(work.x_bytes(blocks.cluster), blocks.room // 2)
        most = min(most, max(1, ring // (2 * warps * work.step_bytes)))
    # Warps along N read the same columns of x: more of them where it has many rows.
    least = 2 if warps == 16 and blocks.share > 2 and not fmt.lookup else 1
    return least, warps if work.m > 2 else warps // 2, most


def _row_tiles(work: Work, blocks: Blocks, table: int) -> tuple[int, int]:
    """Warps of a block along N, and row tiles of each."""
    if blocks.tall:
        return blocks.tall.row_warps, blocks.tall.rows
    least, most_warps, most = _limits(work, blocks, table)
    row_warps = max(least, min(most_warps, 1 << (ceil(blocks.share / most) - 1).bit_length()))
    usual = row_warps, min(most, ceil(blocks.share / row_warps))
    tiles = list(row_tiles(least, most_warps, most))
    best = min(tiles, key=lambda tile: _busiest(work, blocks, tile))
    less = _busiest(work, blocks, best) < work.pace.less * _busiest(work, blocks, usual)
    return best if less else usual


def row_tiles(least: int, most_warps: int, most: int) -> Iterator[tuple[int, int]]:
    """Warps along N and row tiles of each, within limits."""
    return product((w for w in (1, 2, 4, 8, 16) if least <= w <= most_warps), range(1, most + 1))


def _busiest(work: Work, blocks: Blocks, tile: tuple[int, int]) -> float:
    """What the busiest multiprocessor has to do, in row tiles.

    Powers of two suit an H200's 132 multiprocessors. 108 have 9 row tiles each of 14336 rows; blocks of 12,
    the next that there are, keep 75 of them busy.
    """
    count, start = work.gpu.multiprocessors, work.pace.start_steps / work.steps
    made = ceil(work.row_tiles / prod(tile)) * work.matrices * blocks.cluster * work.batch_tiles
    return ceil(made / count) * prod(tile) / blocks.cluster + ceil(made / (count * (1 + blocks.two))) * start


def variants(fmt: Format, m: int, n: int, k: int, matrices: int, gpu: Gpu) -> Iterator[Gemm]:
    """Other ways to do an ordinary product, those first that should keep the busiest multiprocessor the least
    busy: small blocks or one large one, with more or fewer warps, split along K or not, in tiles of all
    heights that registers are sure to allow."""
    work = Work(fmt, m, n, k, matrices, gpu)
    found = []
    roomy = work.groups == 1 and shared_limit(gpu.capability) > _ROOMY
    for table in {table_of(fmt, gpu.capability), table_of(fmt, gpu.capability, roomy)}:
        for cluster, two, eight in product((1, 2), (False, True), (False, True)):
            if (cluster == 2 and gpu.capability != 90) or (two and (cluster == 2 or work.groups == 2)):
                continue
            if (
                two
                and ring_bytes(gpu.capability) // 2 + work.x_bytes(1)
                > shared_limit(gpu.capability, 2) - table[1]
            ):
                continue
            share = work.share(cluster)
            blocks = sized(work, table[1], cluster, two, two and share > 8)
            blocks = blocks._replace(share=ceil(share / 2) if two else share)
            if eight:
                blocks = blocks._replace(warps=8)
            least, _, most = _limits(work, blocks, table[1])
            for tile in row_tiles(least, blocks.warps, most):
                found.append((_busiest(work, blocks, tile), table, blocks, tile))
    found.sort(key=lambda each: each[0])
    for _, table, blocks, tile in found:
        yield planned(work, table, True, blocks, tile)


def _few_instructions(fmt: Format) -> bool:
    """Whether codes soon are numbers: not looked up, and with plain scales for 32 or more of them."""
    return not (fmt.lookup or fmt.walks or fmt.scale_size < 32 or fmt.kernel_group_bytes)


class Tall(NamedTuple):
    """Warps of a block, those along N, up to seven row tiles of each; and blocks that split K."""

    warps: int
    row_warps: int
    rows: int
    cluster: int


def _tall(work: Work, cluster: int) -> Tall | None:
    """Tiles that leave fewer multiprocessors idle than those of four row tiles a warp, if there are any.

    14336 rows of W are 7 row tiles for each of 128 multiprocessors, or 8 for each of 112. With 28672 rows an
    H200 takes up to 14% less, most of codebooks and k-quants. Where instructions are few, fewer warps, or
    only one block for a multiprocessor, cost as much: of up to 7 row tiles a multiprocessor these formats
    have tall tiles at 3 and 4 batch rows only, and those with minimums none at 1 and 2. There are none where
    x is so long that a `cluster` must share it, nor of 8 bits, of which two slots of seven do not fit.
    """
    fmt, m, share, few = work.fmt, work.m, work.share(1), _few_instructions(work.fmt)
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
        roomy = pairs and not fmt.walks and (fmt.bits == 4 or not (has_minimum(fmt) or fmt.scale_size < 32))
    row_warps = 1 if short else (2 if share <= 14 else 4) * (1 + pairs)
    rows = ceil(work.share(1 + pairs) / row_warps)
    usual_warps = 1 << (ceil(share / 4) - 1).bit_length()
    usual = usual_warps * ceil(share / usual_warps) * (1 + pairs)
    fewer = row_warps * rows < usual and row_warps * rows <= work.row_tiles
    return Tall(16 if roomy else 8, row_warps, rows, 1 + pairs) if fewer else None
