"""The wgmma core: its tiles, what a block of one has room for, and the launch. Which one is taken,
wgmma_timed.py says."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ..formats import Format
from ..formats.exl3 import HADAMARD
from ..formats.kernels import kernels_of
from .cores import Core, Gemm, gemm_kernel, table_of, tables
from .launch import WARP, Plan, lone, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, layout, row_factors


class Tile(NamedTuple):
    """An output tile of a cluster of the wgmma core."""

    batch: int
    groups: int
    """Warpgroups of a block, one below the other."""
    blocks: int = 1
    """Blocks of 64 rows of W of each warpgroup."""
    k_groups: int = 1
    """Groups of as many warpgroups, for other columns of the same rows."""
    k_tiles: int = 1
    """Tiles of 64 columns that each warpgroup takes in a turn."""
    pair: int = 1
    """Blocks that share x, one's rows below the other's."""
    resident: int = 1
    """Blocks of a multiprocessor."""

    @property
    def rows(self) -> int:
        """Rows of W of one block."""
        return self.groups * self.blocks * 64

    @property
    def width(self) -> int:
        """Width of a stage, in steps of 64 columns."""
        return self.k_groups * self.k_tiles


ROOMY_BATCH = 64
"""Batch rows of a tile up to which shared memory has room for tables of 64 KB."""
_BESIDE, _ENOUGH = 32, 4
"""Batch rows up to which the sums that a split's blocks send have a place beside the ring, if that leaves so
many stages."""
_BOXED_BATCH = 128
"""Batch rows of a tile from which on the copy engine stores its results."""


def _shared_room(tile: Tile) -> int:
    """Bytes of shared memory of a block; whole KB of one that is to share it, as the ring starts at one."""
    return shared_limit(90) if tile.resident == 1 else shared_limit(90, 2) >> 10 << 10


def _table(fmt: Format, tile: Tile, sides: int = 0) -> tuple[int, int]:
    """Copies of a codebook's table, and bytes: 64 KB have room beside few batch rows, if nobody shares it."""
    return table_of(fmt, 90, tile.batch <= ROOMY_BATCH and tile.resident == 1, sides)


def _stage_bytes(fmt: Format, tile: Tile) -> int:
    x, weights = tile.batch * 2 * TILE_COLUMNS, tile.rows // TILE_ROWS * layout(fmt).step(tile.width)
    return ceil((tile.width * x + weights) / 1024) * 1024


def _staged(fmt: Format, tile: Tile, split: int, sides: int) -> tuple[int, int]:
    """Batch rows for whose results a block has room: all, if four stages are left, or half, or none; and
    bytes of these, of sums on their way out, and of K groups'. Of a split all take the ring's place, or, if
    what is sent is beside it, K groups' alone, which then do not count.

    Of little work the results are few, and registers scarce. A grouped product, which has `sides`, stores its
    results at once; with two sides and one row block, when warps have traded half of a chunk's, twice.
    """
    gathered = tile.rows * (tile.k_groups - 1) * tile.batch * 4
    if sides:
        chunk = WARP if tile.batch % WARP == 0 else WARP // 2
        return 0, max(gathered, tile.rows * chunk * 4) if _trades(tile, sides) else gathered
    turned = turns_sums(fmt, tile, split)
    # Few sums of K groups are added up where those of a split are (MEET in kernels/core/wgmma.cuh).
    together = tile.batch == 16 and not turned
    meeting = _meeting_bytes(tile)
    if split > 1 and together:
        return 0, tile.k_groups * meeting
    if split > 1:
        return 0, meeting + gathered * (not _sends_beside(fmt, tile, split))
    if together and tile.k_groups > 1:
        sums = tile.k_groups * meeting
    else:
        sums = max(gathered, tile.groups * WARP * (tile.blocks * 64 + 4) * 4)
    if turned:
        sums = max(sums, tile.rows * tile.batch * 2)
    if tile.batch < _BOXED_BATCH:
        return 0, sums
    left = _shared_room(tile) - _table(fmt, tile)[1] - 4 * _stage_bytes(fmt, tile)
    room = tile.batch if max(sums, tile.rows * tile.batch * 2) <= left else tile.batch // 2
    return room, max(sums, tile.rows * room * 2)


def _meeting_bytes(tile: Tile) -> int:
    """Bytes of a tile's sums where they are added up: batch rows, and 4 floats between banks."""
    return tile.batch * (tile.rows + 4) * 4


def _sends_beside(fmt: Format, tile: Tile, split: int) -> bool:
    """Whether the sums that blocks of a split send each other have a place beside the ring, so that they need
    not wait until others have read their stages: of few batch rows, unless a short ring were shorter yet."""
    if split == 1 or tile.batch > _BESIDE:
        return False
    sent = _meeting_bytes(tile) * (tile.k_groups if tile.batch == 16 else 1)
    room, stage = _shared_room(tile) - _table(fmt, tile)[1], _stage_bytes(fmt, tile)
    return (room - sent) // stage >= min(_ENOUGH, room // stage)


def _trades(tile: Tile, sides: int) -> bool:
    """Whether warps of a warpgroup have different sides' rows."""
    return sides == 2 and tile.blocks == 1


def stages_of(fmt: Format, tile: Tile, split: int, sides: int = 0) -> int:
    """Stages of the ring, as many as fit; 0 where registers do not, or splits of long turns would be few.
    `sides` are those of a grouped product; 0: of another."""
    if not _fits_registers(fmt, tile, split) or (tile.k_tiles == 4 and split > 1):
        return 0
    ring = _shared_room(tile) - _table(fmt, tile, sides)[1]
    if split == 1 or _sends_beside(fmt, tile, split):
        ring -= _staged(fmt, tile, split, sides)[1]
    return min(8, ring // _stage_bytes(fmt, tile))


def turns_sums(fmt: Format, tile: Tile, split: int) -> bool:
    """Whether the kernel turns sums: those of one block, and of as many rows as are turned."""
    return kernels_of(fmt).turned and split == 1 and tile.rows % HADAMARD == 0


def _fits_registers(fmt: Format, tile: Tile, split: int) -> bool:
    """Whether a kernel spills none: 640 threads have few, and so have two blocks, where codes of 8 bits take
    too many; and two row blocks have many sums and codes."""
    kernels = kernels_of(fmt)
    if tile.resident == 2:
        return fmt.bits != 8
    if tile.groups * tile.k_groups == 4:
        if kernels.walks and (
            fmt.bits in {32: (6, 8), 64: (2,)}.get(tile.batch, ()) or (split, tile.batch) == (1, 64)
        ):
            return False
        if tile.batch == 64:  # there is no room for the factors of rows, nor for more than one output tile
            return split > 1 and not row_factors(fmt)
        if fmt.bits == 6:
            return tile.groups == 1 or (split == 1 and tile.groups == 2 and tile.k_tiles < 4)
        if fmt.bits == 8 and tile.groups == 4 and (tile.batch == 16 or split > 1):
            return False
        shared = kernels.group_size > 0 and not (kernels.lookup or kernels.integer_scales)
        return tile.k_tiles < 4 or not (
            kernels.has_minimum or (tile.batch == 16 and (shared or fmt.bits in (2, 5)))
        )
    if (tile.batch, tile.blocks, tile.k_tiles) == (64, 2, 2):
        return not (fmt.bits > 4 or kernels.has_minimum or fmt.whole_matrices)
    return True


def fits_grouped(fmt: Format, tile: Tile, sides: int) -> bool:
    """Whether a kernel of a grouped product spills none: work after work takes registers, too."""
    kernels = kernels_of(fmt)
    few = fmt.bits == 2 or (kernels.has_minimum and not kernels.integer_scales)
    few = tables(fmt, sides) > 1 or (sides == 2 and few)
    scarce = kernels.lookup and (tile.batch, tile.blocks) == (128, 2)
    scarce |= few and tile.blocks == 2 and tile.batch > 128
    scarce |= fmt.bits == 8 and tile.blocks * tile.k_tiles == 4
    scarce |= fmt.bits == 3 and kernels.group_size > 0 and tile.k_tiles == 4
    return not scarce


def sum_bytes(tile: Tile) -> int:
    """Bytes of a tile's float32 sums."""
    return tile.rows * tile.batch * 4


def shares_tiles(fmt: Format, tile: Tile) -> bool:
    """Whether there are registers enough to share tiles out, which takes a few more, and threads to do it."""
    if tile.resident > 1:
        return False
    if tile.groups * tile.k_groups == 4:
        if tile.batch == 16:
            return True
        return tile.batch < 64 and fmt.bits != 6 and not (fmt.bits == 5 and row_factors(fmt))
    kernels = kernels_of(fmt)
    if kernels.lookup and (fmt.bits == 2 or kernels.group_size) and tile.blocks > 1:
        return False
    return tile.batch < 256 or tile.groups > 1


def takes_signs(batch: int, groups: int) -> bool:
    """Whether W takes signs of columns in tiles of so many batch rows and warpgroups; x then stays as it is.

    That is 24 instructions more for a row tile and 64 columns (3 bits have 65), which cost little where the
    tensor cores set the pace. Other tiles take up to a fifth longer, more than a kernel that gives x the
    signs.
    """
    return (batch, groups) == (256, 2)


def signed(gemm: Gemm) -> Gemm:
    """The launch for a weight whose columns have signs, which W takes if it does so in this tile."""
    kernel = gemm.plan.kernel
    constants = dict(kernel.constants)
    if not gemm.box or not takes_signs(constants["BATCH"], constants["GROUPS"]):
        return gemm
    own = replace(kernel, constants=(*kernel.constants, ("SIGNS", 1)))
    return replace(gemm, plan=replace(gemm.plan, kernel=own), signs_weights=True)


def planned(fmt: Format, tile: Tile, split: int, shares: bool, stages: int, sides: int = 0) -> Gemm:
    """The wgmma core with a tile, but for what the batch decides; `sides` as for `stages_of`."""
    batch, groups, blocks, k_groups, k_tiles, pair, resident = tile
    stage, (room, staged) = _stage_bytes(fmt, tile), _staged(fmt, tile, split, sides)
    copies, table = _table(fmt, tile, sides)
    beside = _sends_beside(fmt, tile, split)
    shared = table + (stages * stage + staged if split == 1 or beside else max(stages * stage, staged))
    shared = lone(shared, 90) if resident == 1 else shared
    constants = {"BATCH": batch, "ROW_BLOCKS": blocks, "GROUPS": groups, "K_GROUPS": k_groups}
    constants |= {"K_TILES": k_tiles, "SPLIT": split, "BESIDE": int(beside), "PAIR": pair}
    constants |= {"STREAM": int(shares)}
    constants |= {"STAGES": stages, "ROOM": room, "RESIDENT": resident}
    kernel = gemm_kernel(fmt, Core.WGMMA, copies, constants, shared)
    threads = (groups * k_groups + 1) * 128
    plan = Plan(kernel, (1, 1, 1), threads, shared, split * pair, overlaps=True)
    out_box = room if room == batch else room // 2
    return Gemm(plan, box=batch // pair, out_box=out_box, turns_sums=turns_sums(fmt, tile, split))
