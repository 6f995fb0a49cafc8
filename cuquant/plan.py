"""From a problem and a device to a launch: the only place that knows kernels, tiles, grids and shared memory.

A Plan yields the compiler's defines and the launch from the same numbers, so that host and device cannot
disagree. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from itertools import product
from math import ceil
from typing import Any, NamedTuple

from .formats import Format

WARP = 32
TILE_ROWS, TILE_COLUMNS = 16, 64
"""Rows of N and columns of K in a tile of the fragment layout."""

LARGE_GPU = 132
"""Multiprocessors that a launch should keep busy: an H200's."""
MOST_BLOCKS = 65_535
"""Of a launch, along its second and third axes."""


@dataclass(frozen=True)
class Kernel:
    """One compiled entry point: kernels/ops/`op`.cu, for a format, under constants.

    Attributes
    ----------
    op, entry : str
        File and function.
    format : str or None
        The format whose header the file includes.
    constants : tuple of (name, value)
        Defined as CUQUANT_name: integers, or names that the file knows.
    max_shared : int
        Bytes of dynamic shared memory that a launch may ask for.
    """

    op: str
    entry: str
    format: str | None = None
    constants: tuple[tuple[str, Any], ...] = ()
    max_shared: int = 0

    def __post_init__(self) -> None:
        # Looked up at every launch: hash the nested tuples once.
        object.__setattr__(self, "_hash", hash((self.op, self.entry, self.format, self.constants)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def defines(self) -> tuple[str, ...]:
        """The compiler's options."""
        return tuple(f"-DCUQUANT_{name}={value}" for name, value in self.constants)


@dataclass(frozen=True)
class Plan:
    """A kernel and its launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared: int = 0
    """Bytes of dynamic shared memory."""
    cluster: int = 1
    """Blocks along x that share their shared memory (sm_90)."""
    overlaps: bool = False
    """Whether the kernel itself waits for what comes before it in the stream, and may start earlier."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kernel, self.grid, self.block, self.shared)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Layout:
    """Bytes of the fragment layout of a format: of a tile in its planes, and of `group_tiles` along K in the
    group plane."""

    low: int
    high: int
    scale: int
    group: int = 0
    group_tiles: int = 1

    def step(self, tiles: int) -> int:
        """Bytes of that many tiles along K, as the rings of kernels have them."""
        return tiles * (self.low + self.high + self.scale) + ceil(tiles / self.group_tiles) * self.group

    def offsets(self, row_tiles: int, tiles_k: int) -> tuple[int, int, int, int, int]:
        """Where the planes start in one buffer, and its size; aligned to 256 bytes."""
        tiles, groups = row_tiles * tiles_k, row_tiles * ceil(tiles_k / self.group_tiles)
        starts, end = [], 0
        for count, size in ((tiles, self.low), (tiles, self.high), (tiles, self.scale), (groups, self.group)):
            starts.append(end)
            end += ceil(count * size / 256) * 256
        return starts[0], starts[1], starts[2], starts[3], end


def layout(fmt: Format) -> Layout:
    """Planes of a format's fragment layout, as kernels/core/tile.cuh has them.

    Of codes of 3, 5 and 6 bits what is beyond 2 or 4 has a plane of its own.
    NotImplementedError for formats that are no weights, or have no kernels.
    """
    _has_kernels(fmt)
    if fmt.for_activations:
        raise NotImplementedError(f"{fmt} has no fragment layout: it cannot be a weight on the GPU")
    weights = TILE_ROWS * TILE_COLUMNS
    scales = weights // fmt.kernel_block_size * fmt.kernel_scale_bytes
    high = fmt.bits - (1 << fmt.bits.bit_length() - 1)
    group = TILE_ROWS * fmt.kernel_group_bytes
    low, high = weights * (fmt.bits - high) // 8, weights * high // 8
    return Layout(low, high, scales, group, fmt.kernel_group_size // TILE_COLUMNS if group else 1)


def _has_minimum(fmt: Format) -> bool:
    """Whether kernels have a minimum or a zero point beside every scale."""
    return len(fmt.scales) > 1 or fmt.has_zero_points


def tiles(matrices: int, n: int, k: int) -> tuple[int, int]:
    """Row tiles of a stack of matrices, and the tiles of each along K."""
    return matrices * ceil(n / TILE_ROWS), ceil(k / TILE_COLUMNS)


def _has_kernels(fmt: Format) -> None:
    if not fmt.on_gpu:
        raise NotImplementedError(f"{fmt} has no kernels yet: it works on NumPy arrays only")


def _per_format(op: str, entry: str, fmt: Format) -> Kernel:
    _has_kernels(fmt)
    return Kernel(op, entry, fmt.header, (("BLOCK_BYTES", fmt.block_bytes),))


@lru_cache(maxsize=1024)
def per_block(op: str, fmt: Format, threads: int) -> Plan:
    """A kernel over the blocks of a format, with as many threads as the operation wants for them."""
    return Plan(_per_format(op, op, fmt), (ceil(threads / 256), 1, 1), 256, overlaps=op != "dequantize")


GROUPS_ENCODER = "quantize_int4"
"""The encoder of groups of any size: a thread takes 16 weights at a time, of large groups several times."""


def quantize(fmt: Format, blocks: int) -> Plan:
    """Quantize to that many blocks."""
    kernel, each = fmt.encoder
    if kernel == GROUPS_ENCODER:
        return _quantize_groups(fmt.has_zero_points, blocks * group_lanes(fmt))
    return per_block(kernel, fmt, blocks * fmt.block_size // each)


def group_lanes(fmt: Format) -> int:
    """Lanes of a warp that quantize a group: a power of two, so that they can exchange its extremes."""
    return min(WARP, 1 << (fmt.block_size // 16).bit_length() - 1)


@lru_cache(maxsize=1024)
def _quantize_groups(has_zero_points: bool, threads: int) -> Plan:
    constants = (("ASYMMETRIC", int(has_zero_points)),)
    kernel = Kernel(GROUPS_ENCODER, GROUPS_ENCODER, constants=constants)
    return Plan(kernel, (ceil(threads / 256), 1, 1), 256, overlaps=True)


@lru_cache(maxsize=1024)
def repack(fmt: Format, entry: str, count: int) -> Plan:
    """To or from the fragment layout (`entry`): 16 tiles a block, which strides over what is left."""
    return Plan(_per_format("repack", entry, fmt), (ceil(count / 16), 1, 1), 256)


LONGEST_ROW = 4 * 16 * 1024
"""Activations of a row that a block of threads can quantize at once: four times 16 of each thread."""


@lru_cache(maxsize=1024)
def activations(entry: str, fmt: Format, rows: int, k: int) -> Plan:
    """Quantize activations or prepare operand B (`entry`): a block of threads per row, or several.

    A thread takes 16 of a row; where a row's peak must be known, which needs the row in one block, up to four
    times as many if a large GPU could not hold so many threads.
    """
    each = next((each for each in (16, 32) if rows * k <= each * LARGE_GPU * 1024), 64)
    parts = 1
    if entry in ("quantize_half", "prepare_halves"):
        each = 16 if entry == "quantize_half" else 8
        parts = ceil(k / (each * 256))
    threads = min(1024, max(128, ceil(k / (each * parts * WARP)) * WARP))
    return Plan(_per_format("activations", entry, fmt), (rows, parts, 1), threads, overlaps=True)


@dataclass(frozen=True)
class Gemm:
    """A plan of the matrix product.

    `box` are the batch rows that the copy engine brings at a time (wgmma core), `chunk` the tiles of 64
    columns that the decode core stages at a time; 0 for the other cores. Of the output tiles the wgmma core
    shares out the last `streamed` evenly, for which it needs `partials` bytes. `out_box` are the batch rows
    of a box of results, where the kernel can store them so.
    """

    plan: Plan
    box: int = 0
    chunk: int = 0
    streamed: int = 0
    partials: int = 0
    out_box: int = 0


DECODE_BATCH, WGMMA_BATCH = 16, 9
"""Batch rows up to which the decode core wins over the mma core, and from which on the wgmma core wins."""


@lru_cache(maxsize=4096)
def gemm(fmt: Format, m: int, n: int, k: int, matrices: int, half: bool, capability: int) -> Gemm:
    """The product of `matrices` pairs of [m, k] activations and [n, k] weights.

    `half` tells whether the weights fit float16: those that do not are multiplied by the decode core, whose
    scales multiply float32 sums.
    """
    if half and capability == 90 and m >= WGMMA_BATCH:
        return wgmma(fmt, m, n, k, matrices)
    if not half or m <= DECODE_BATCH:
        return decode(fmt, m, n, k, matrices, capability)
    return mma(fmt, m, n, matrices, capability)


class Core(IntEnum):
    """Numbers of the cores, as kernels/ops/gemm.cu has them."""

    DECODE = 0
    MMA = 1
    WGMMA = 2


def _gemm_kernel(fmt: Format, core: Core, copies: int, tile: dict[str, int], shared: int) -> Kernel:
    constants = (("BLOCK_BYTES", fmt.block_bytes), ("CORE", int(core)), ("COPIES", copies))
    return Kernel("gemm", "gemm", fmt.header, (*constants, *tile.items()), shared)


def _table(fmt: Format, core: Core, capability: int, batch: int = 0) -> tuple[int, int]:
    """Copies of a codebook's table in shared memory (kernels/core/codebook.cuh), and its bytes; or 0, 0.

    Where weights are looked up at the speed of memory, so many copies that lanes (almost) never wait for
    another, in at most a third of the room. The mma core uses each weight so often that room matters more.
    The wgmma core spares instructions by rows of 256 bytes, twice the copies' size, while its tiles have
    room for them.
    """
    if not fmt.lookup:
        return 0, 0
    tables = {2: (16, 256, 8), 3: (32, 64, 4), 4: (32, 256, 4), 5: (16, 1024, 4)}
    copies, entries, size = tables[_looked_up(fmt)]
    if core is Core.WGMMA and entries == 256 and batch <= ROOMY_BATCH:
        return 256 // size, 256 * entries
    if core is Core.MMA:
        copies //= 4
    while copies * size > 16 and copies * entries * size > shared_limit(capability) // 3:
        copies //= 2
    return copies, copies * entries * size


def _looked_up(fmt: Format) -> int:
    """Bits of a code that are looked up."""
    return fmt.bits - fmt.sign_bits


def core_of(kernel: Kernel) -> str:
    """Name of the core that a kernel of the matrix product is made of."""
    return Core(dict(kernel.constants)["CORE"]).name.lower()


_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 120: 99, 121: 99}
"""Kilobytes of shared memory that a block may have, where that is less than 227."""
_GROUP_BYTES = 288 << 10
"""Of weights, for a block of a grouped product of up to four batch rows; measured."""
_STATIC = 1 << 10
"""Bytes of shared memory beside the dynamic: barriers, and the driver's own."""


def shared_limit(capability: int) -> int:
    """Bytes of dynamic shared memory that a block may have."""
    return (_SHARED.get(capability, 227) << 10) - 2 * _STATIC


def decode(
    fmt: Format,
    m: int,
    n: int,
    k: int,
    matrices: int,
    capability: int,
    sides: int = 1,
    grouped: bool = False,
) -> Gemm:
    """The decode core: as many blocks as a large GPU holds at once, each with an equal share of W's rows.

    Up to 8 batch rows two small blocks per multiprocessor, where its shared memory has room for them, hide
    each other's start and end. From 5 on, or where x is long, pairs of blocks split K, which halves what each
    reads of x. Of two `sides` a block has the same rows of two weights. If `grouped`, only the GPU knows how
    many matrices count: of few batch rows blocks are smaller, so that any number of matrices fills it.
    """
    row_tiles, tiles_k = sides * ceil(n / TILE_ROWS), ceil(k / TILE_COLUMNS)
    copies, table = _table(fmt, Core.DECODE, capability)
    groups, limit = 1 if m <= 8 else 2, shared_limit(capability) - table
    cluster = 2 if (m > 4 or m * k > 48 << 10) and capability == 90 else 1
    # Row tiles of a multiprocessor, or of a pair.
    share = max(1, ceil(row_tiles * matrices * cluster / LARGE_GPU))
    batch, ring = min(m, groups * 8), (72 if shared_limit(capability) > 160 << 10 else 24) << 10
    two = groups == 1 and share > 2 and 2 * (ring + batch * ceil(k / cluster) * 2) < limit - table
    small = grouped and m <= 4
    if small and ring > 24 << 10:
        two, limit = True, limit // 2 - table  # x may come in chunks
    many = (share <= 2 and m <= 4) or (fmt.lookup and groups == 1 and not two)
    warps = 16 if many and capability >= 80 else 8
    if two:
        share = ceil(share / 2)
    if small:
        share = max(1, min(share, round(_GROUP_BYTES * cluster / (tiles_k * layout(fmt).step(1)))))
    # Row tiles of a warp: as registers allow, and two slots of a ring of half the shared memory.
    most = 4 if groups == 1 or _has_minimum(fmt) else 7
    if fmt.lookup and _has_minimum(fmt) and capability >= 100:
        most = 3  # two words of scales a block, and more registers taken by the same code
    most = min(most, max(1, limit // (4 * warps * layout(fmt).step(1))))
    row_warps = max(sides, min(warps, 1 << (ceil(share / most) - 1).bit_length()))
    rows = min(most, ceil(share / row_warps))
    # The ring holds a multiprocessor's share of the bytes in flight, twice over; older GPUs need less.
    slot = warps * rows * layout(fmt).step(1)
    depth = max(2, min(8, ring // slot))
    k_warps = warps // row_warps
    own = ceil(ceil(tiles_k / cluster) / k_warps) * k_warps
    fits = (limit - depth * slot - batch * 16) // (batch * 2 * TILE_COLUMNS) // k_warps * k_warps
    chunk = max(k_warps, min(own, fits))
    sums = warps * rows * TILE_ROWS * groups * 8 * 4
    shared = table + max(depth * slot + batch * (chunk * 2 * TILE_COLUMNS + 16), sums)
    tile = {"GROUPS": groups, "ROW_TILES": rows, "ROW_WARPS": row_warps, "WARPS": warps, "DEPTH": depth}
    tile |= {"CLUSTER": cluster, "RESIDENT": 2 if groups == 1 and warps == 8 else 1}
    grid = (ceil(row_tiles / (rows * row_warps)) * cluster, ceil(m / (groups * 8)), matrices)
    kernel = _gemm_kernel(fmt, Core.DECODE, copies, tile, shared_limit(capability))
    return Gemm(Plan(kernel, grid, warps * WARP, shared, cluster, overlaps=True), chunk=chunk)


class _Tile(NamedTuple):
    """An output tile of a cluster of the wgmma core."""

    batch: int
    groups: int
    """Warpgroups of a block, one below the other."""
    blocks: int = 1
    """Times 64 rows of W for each of them."""
    k_groups: int = 1
    """Times as many warpgroups, for other columns of the same rows."""
    k_tiles: int = 1
    """Times 64 columns that each of them takes in a turn."""
    pair: int = 1
    """Blocks that share x, one's rows below the other's."""

    @property
    def rows(self) -> int:
        """Of W, of one block."""
        return self.groups * self.blocks * 64

    @property
    def width(self) -> int:
        """Of a stage, in steps of 64 columns."""
        return self.k_groups * self.k_tiles


_STEP_US = {
    _Tile(32, 1, k_groups=4, k_tiles=2): 0.097,
    _Tile(32, 2, k_groups=2, k_tiles=2): 0.180,
    _Tile(32, 4): 0.385,
    _Tile(64, 1): 0.212,
    _Tile(64, 1, k_groups=4): 0.137,
    _Tile(64, 2): 0.297,
    _Tile(64, 2, k_groups=2): 0.249,
    _Tile(64, 2, 2): 0.485,
    _Tile(128, 1): 0.229,
    _Tile(128, 1, k_groups=2): 0.202,
    _Tile(128, 2): 0.381,
    _Tile(128, 2, 2): 0.645,
    _Tile(256, 2): 0.500,
    _Tile(256, 2, pair=2): 0.500,
}
"""Tiles of the wgmma core, and what a step of 64 columns takes a busy H200's instructions (q4_0)."""
_INSTRUCTIONS = {2: 1.1, 3: 1.2, 4: 1.0, 5: 1.2, 6: 1.2, 8: 1.15}
_LOOKUPS = {2: 1.0, 3: 1.12, 4: 1.15, 5: 1.3}
"""How many times as many instructions codes of so many bits take, by their bits and in a codebook; a minimum
adds 0.05, so do scales that are products, a sign beside a code that is looked up 0.1, a scale for every 16
weights 0.15."""
_TENSOR_US = 0.645 / (128 * 256)
"""What the tensor cores take for a step of one output."""
_START_US, _PAIR_US, _SPLIT_US, _STREAM_US = 2.5, 1.0, 1.0, 3.0
"""Times of a launch: until the first stage is there; until a pair, or the blocks of a split, have met; of
leaving sums to another cluster, and adding another's."""
_TILE_US, _SPLIT_TILE_US = 2.8 / (128 * 256), 5.2 / (128 * 256)
"""What it takes to store an output, and to add it up first."""
_PLACES = {1: LARGE_GPU, 2: LARGE_GPU, 4: 112}
"""Blocks that run at once on an H200, in clusters of so many."""
_STREAM_BYTES = 32 << 20
"""Of x: clusters that are at different columns at a time must find them in the L2 cache."""
ROOMY_BATCH = 64
"""Batch rows of a tile up to which shared memory has room for tables of 64 KB."""
BOXED_BATCH = 128
"""Batch rows of a tile from which on the copy engine stores its results."""
FLAGS = 4 * LARGE_GPU
"""Flags of warpgroups that leave sums to another block's."""


class _Choice(NamedTuple):
    """A way to run the wgmma core, with the microseconds that the measured times predict."""

    us: float
    tile: _Tile
    split: int
    outputs: int
    streamed: int
    stages: int


def _step_us(fmt: Format, tile: _Tile) -> float:
    work = _LOOKUPS[_looked_up(fmt)] + 0.1 * fmt.sign_bits if fmt.lookup else _INSTRUCTIONS[fmt.bits]
    work += 0.15 * (fmt.scale_size < 32) + 0.05 * _has_minimum(fmt) + 0.05 * (fmt.kernel_group_bytes > 0)
    tensor = tile.batch * tile.rows * _TENSOR_US
    return max(_STEP_US[tile] * work, tensor * (0.985 if tile.pair > 1 else 1))


def _stage_bytes(fmt: Format, tile: _Tile) -> int:
    x, weights = tile.batch * 2 * TILE_COLUMNS, tile.rows // TILE_ROWS * layout(fmt).step(tile.width)
    return ceil((tile.width * x + weights) / 1024) * 1024


def _staged_bytes(tile: _Tile, split: int, room: int) -> int:
    """Of results, of sums on their way out, and of further k groups'; after a split in the ring's place."""
    rows = tile.batch if split > 1 else 32
    sums = tile.groups * rows * (tile.blocks * 64 + 4) * 4
    return max(sums, tile.rows * room * 2, tile.rows * (tile.k_groups - 1) * tile.batch * 4)


def _room(fmt: Format, tile: _Tile, split: int) -> int:
    """Batch rows for whose results a block has room: all, if four stages are left, or half, or none.

    Of little work the results are few, and registers scarce.
    """
    if split > 1 or tile.batch < BOXED_BATCH:
        return 0
    left = shared_limit(90) - _table(fmt, Core.WGMMA, 90, tile.batch)[1] - 4 * _stage_bytes(fmt, tile)
    return tile.batch if _staged_bytes(tile, split, tile.batch) <= left else tile.batch // 2


def _stages(fmt: Format, tile: _Tile, split: int) -> int:
    """Of the ring, as many as fit; 0 where registers do not."""
    if fmt.lookup and tile.batch == 64 and tile.k_groups == 4 and split == 1:
        return 0  # 640 threads have none left for a lookup, so many sums and results
    if fmt.bits == 6 and tile.batch == 32 and tile.groups * tile.k_groups == 4 and split > 1:
        return 0  # nor for the words of such codes
    ring = shared_limit(90) - _table(fmt, Core.WGMMA, 90, tile.batch)[1]
    ring -= 0 if split > 1 else _staged_bytes(tile, 1, _room(fmt, tile, 1))
    return min(8, ring // _stage_bytes(fmt, tile))


WGMMA_TILES = tuple(tile for tile in _STEP_US if tile.pair == 1)
"""Those that need no other block."""


def tile_us(fmt: Format, tile: _Tile, steps: int) -> float:
    """What an output tile takes, of so many steps of 64 columns."""
    return steps * _step_us(fmt, tile) + tile.rows * tile.batch * _TILE_US


def wgmma_unshared(fmt: Format, tile: _Tile, k: int) -> Gemm | None:
    """The wgmma core with a tile whose sums no other block shares; None where it has no place."""
    stages = _stages(fmt, tile, 1)
    fits = stages >= 3 and ceil(k / TILE_COLUMNS) % tile.width == 0
    return _wgmma(fmt, tile, 1, 0, stages) if fits else None


def _choices(fmt: Format, m: int, n: int, k: int, matrices: int) -> Iterator[_Choice]:
    """What the wgmma core can do: tiles, splits of K, and whether clusters share out the last tiles."""
    steps = ceil(k / TILE_COLUMNS)
    for tile, (split, blocks) in product(_STEP_US, _PLACES.items()):
        stages = _stages(fmt, tile, split)
        if steps % (split * tile.width) or stages < 3 or (split > 1 and tile.pair > 1):
            continue
        outputs = ceil(n / (tile.rows * tile.pair)) * ceil(m / tile.batch) * matrices
        places = blocks // (split * tile.pair)
        step, store = _step_us(fmt, tile), tile.rows * tile.batch * _TILE_US
        start = _START_US + (_PAIR_US if tile.pair > 1 else 0)
        waves, rest = divmod(outputs, places)
        rounds = waves + (rest > 0)
        if split > 1:
            if rounds == 1 and steps >= 4 * split:
                us = start + steps / split * step + _SPLIT_US + tile.rows * tile.batch * _SPLIT_TILE_US
                yield _Choice(us, tile, split, outputs, 0, stages)
            continue
        yield _Choice(start + rounds * (steps * step + store), tile, 1, outputs, 0, stages)
        if fmt.lookup and fmt.bits == 2 and fmt.kernel_group_bytes and tile.blocks > 1:
            continue  # too few registers for shares of tiles, by a handful
        if waves and rest and tile.batch >= 128 and tile.width == 1 and m * k * 2 <= _STREAM_BYTES:
            us = start + outputs / places * steps * step + rounds * store + _STREAM_US
            yield _Choice(us, tile, 1, outputs, places + rest, stages)


def wgmma(fmt: Format, m: int, n: int, k: int, matrices: int) -> Gemm:
    """The wgmma core, as measured times predict it to be fastest."""
    _, tile, split, outputs, streamed, stages = min(_choices(fmt, m, n, k, matrices))
    gemm = _wgmma(fmt, tile, split, streamed, stages)
    batch, pair = tile.batch, tile.pair
    grid = (outputs * split if split > 1 else min(outputs, LARGE_GPU // pair) * pair, 1, 1)
    partials = grid[0] * tile.rows * batch * 4 if streamed else 0
    # Rows of the tile beyond the batch stay what they are: they make results that nobody stores.
    box = min(batch // pair, ceil(m / 8) * 8)
    return replace(gemm, plan=replace(gemm.plan, grid=grid), box=box, partials=partials)


def _wgmma(fmt: Format, tile: _Tile, split: int, streamed: int, stages: int) -> Gemm:
    """The wgmma core with a tile, but for what the batch decides."""
    batch, groups, blocks, k_groups, k_tiles, pair = tile
    room = _room(fmt, tile, split)
    stage, staged = _stage_bytes(fmt, tile), _staged_bytes(tile, split, room)
    shared = max(stages * stage, staged) if split > 1 else stages * stage + staged
    copies, table = _table(fmt, Core.WGMMA, 90, tile.batch)
    constants = {"BATCH": batch, "ROW_BLOCKS": blocks, "GROUPS": groups, "K_GROUPS": k_groups}
    constants |= {"K_TILES": k_tiles, "SPLIT": split, "PAIR": pair, "STREAM": int(streamed > 0)}
    constants |= {"STAGES": stages, "ROOM": room}
    kernel = _gemm_kernel(fmt, Core.WGMMA, copies, constants, table + shared)
    threads = (groups * k_groups + 1) * 128
    plan = Plan(kernel, (1, 1, 1), threads, table + shared, split * pair, overlaps=True)
    return Gemm(plan, streamed=streamed, out_box=room if room == batch else room // 2)


def mma(fmt: Format, m: int, n: int, matrices: int, capability: int) -> Gemm:
    """The mma core: tiles so small that several blocks hide each other's latencies, as registers allow.

    Codes that take more instructions get tiles of twice the rows, where that leaves enough of them. Chosen on
    an H200 without wgmma; elsewhere by registers (no spills) and shared memory: with 163 KB three blocks per
    multiprocessor, with 99 KB two.
    """
    row_tiles, warps = ceil(n / TILE_ROWS), 4
    cheap = fmt.bits == 4 and not fmt.lookup and not _has_minimum(fmt)
    spared = 80 <= capability < 100  # elsewhere more registers are taken by the same code
    groups, rows, resident = 4 if m <= 32 else 8, 2, (4 if cheap else 3) if spared else 2
    scarce = fmt.has_zero_points or fmt.bits == 6  # which take more registers again
    if fmt.bits == 6:
        resident = 2
    wide = spared and not cheap and not scarce
    if m > 128 and wide and ceil(row_tiles / 16) * ceil(m / 64) * matrices >= LARGE_GPU:
        rows, resident = 4, 2
    stages = 3 if capability >= 80 else 2
    stage = groups * 8 * (2 * TILE_COLUMNS + 16) + warps * rows * layout(fmt).step(1)
    copies, table = _table(fmt, Core.MMA, capability)
    shared = table + max(stages * stage, 16 * (warps * rows * TILE_ROWS + 4) * 4)
    tile = {"GROUPS": groups, "ROW_TILES": rows, "WARPS": warps, "STAGES": stages, "RESIDENT": resident}
    grid = (ceil(row_tiles / (warps * rows)), ceil(m / (groups * 8)), matrices)
    kernel = _gemm_kernel(fmt, Core.MMA, copies, tile, shared)
    return Gemm(Plan(kernel, grid, warps * WARP, shared, overlaps=True))


def _block_kernels(fmt: Format) -> set[Kernel]:
    """What converts blocks of a format."""
    found = {per_block("dequantize", fmt, 1).kernel} | (
        {quantize(fmt, 1).kernel} if fmt.encodes_on_gpu else set()
    )
    if not fmt.for_activations:
        return found | {repack(fmt, entry, 1).kernel for entry in ("to_fragments", "from_fragments")}
    entries = (
        "rows_to_half",
        "prepare_rows",
        "prepare_halves",
        "blocks_to_half",
        "quantize_rows",
        "quantize_half",
    )
    return found | {activations(entry, fmt, 1, fmt.block_size).kernel for entry in entries}


def all_kernels(formats: list[Format], capability: int) -> list[Kernel]:
    """Every kernel that any plan can ask for on a GPU, for tests that compile them all."""
    from . import plan_trellis

    found: set[Kernel] = set()
    for fmt in (f.for_kernels for f in formats if f.on_gpu):
        found |= plan_trellis.kernels(fmt) if fmt.whole_matrices else _block_kernels(fmt)
        if fmt.for_activations:
            continue
        batches, rows = (1, 9, 17, 33, 65, 129, 513, 4096), (16, 1 << 10, 1 << 12, 1 << 13, 14336, 1 << 16)
        for m, n, k, half in product(batches, rows, (1 << 10, 1 << 12), (True, False)):
            found.add(gemm(fmt, m, n, k, 1, half, capability).plan.kernel)
    return sorted(found, key=repr)
