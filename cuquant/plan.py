"""From a problem and a device to a launch: the only place that knows kernels, tiles, grids and shared memory.

A Plan yields the compiler's defines and the launch from the same numbers, so that host and device cannot
disagree. Nothing here needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import product
from math import ceil

from .formats import Format

WARP = 32
TILE_ROWS, TILE_COLUMNS = 16, 64
"""Rows of N and columns of K in a tile of the fragment layout."""

LARGE_GPU = 132
"""Multiprocessors that a launch should keep busy: an H200's."""


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
        Defined as CUQUANT_name.
    max_shared : int
        Bytes of dynamic shared memory that a launch may ask for.
    """

    op: str
    entry: str
    format: str | None = None
    constants: tuple[tuple[str, int], ...] = ()
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
    """Bytes of the fragment layout of a format: planes of tiles, each as long as all tiles need."""

    low: int
    fifth: int
    scale: int

    @property
    def tile(self) -> int:
        """Bytes of a tile in all planes."""
        return self.low + self.fifth + self.scale

    def offsets(self, tiles: int) -> tuple[int, int, int, int]:
        """Where the planes of that many tiles start in one buffer, and its size; aligned to 256 bytes."""
        ends, start = [], 0
        for size in (self.low, self.fifth, self.scale):
            ends.append(start)
            start += ceil(tiles * size / 256) * 256
        return ends[0], ends[1], ends[2], start


def layout(fmt: Format) -> Layout:
    """Planes of a format's fragment layout, as kernels/formats/ggml.cuh has them.

    Codes of 5 bits are a plane of 4 and one of 1; scales and minimums are float16, one per 32 weights.
    NotImplementedError for formats that are no weights.
    """
    if fmt.for_activations:
        raise NotImplementedError(f"{fmt} has no fragment layout: it cannot be a weight on the GPU")
    weights = TILE_ROWS * TILE_COLUMNS
    scales = weights // fmt.block_size * 2 * len(fmt.scales)
    return Layout(weights * (fmt.bits & 12) // 8, weights * (fmt.bits & 3) // 8, scales)


def tiles(matrices: int, n: int, k: int) -> int:
    """Tiles of a stack of matrices."""
    return matrices * ceil(n / TILE_ROWS) * ceil(k / TILE_COLUMNS)


def _per_format(op: str, entry: str, fmt: Format) -> Kernel:
    return Kernel(op, entry, fmt.name, (("BLOCK_BYTES", fmt.block_bytes),))


@lru_cache(maxsize=1024)
def per_block(op: str, fmt: Format, threads: int) -> Plan:
    """Quantize or dequantize, with as many threads as the operation wants for its blocks."""
    return Plan(_per_format(op, op, fmt), (ceil(threads / 256), 1, 1), 256, overlaps=op == "quantize")


@lru_cache(maxsize=1024)
def repack(fmt: Format, entry: str, count: int) -> Plan:
    """To or from the fragment layout (`entry`): 16 tiles a block, which strides over what is left."""
    return Plan(_per_format("repack", entry, fmt), (ceil(count / 16), 1, 1), 256)


@lru_cache(maxsize=1024)
def activations(entry: str, fmt: Format, rows: int) -> Plan:
    """Prepare operand B: a block of threads per row."""
    return Plan(_per_format("activations", entry, fmt), (rows, 1, 1), 256, overlaps=True)


@dataclass(frozen=True)
class Gemm:
    """A plan of the matrix product.

    `box` are the batch rows that the copy engine brings at a time (wgmma core), `chunk` the tiles of 64
    columns that the decode core stages at a time; 0 for the other cores.
    """

    plan: Plan
    box: int = 0
    chunk: int = 0


DECODE_BATCH = 16
"""Batch rows up to which the decode core wins on an H200."""


@lru_cache(maxsize=4096)
def gemm(fmt: Format, m: int, n: int, k: int, matrices: int, half: bool, capability: int) -> Gemm:
    """The product of `matrices` pairs of [m, k] activations and [n, k] weights.

    `half` tells whether the weights fit float16: those that do not are multiplied by the decode core, whose
    scales multiply float32 sums.
    """
    if m <= DECODE_BATCH or not half:
        return decode(fmt, m, n, k, matrices, capability)
    if capability == 90:
        return wgmma(fmt, m, n, k, matrices)
    return mma(fmt, m, n, matrices, capability)


class Core(IntEnum):
    """Numbers of the cores, as kernels/ops/gemm.cu has them."""

    DECODE = 0
    MMA = 1
    WGMMA = 2


def _gemm_kernel(fmt: Format, core: Core, tile: dict[str, int], shared: int) -> Kernel:
    constants = (("BLOCK_BYTES", fmt.block_bytes), ("CORE", int(core)), *tile.items())
    return Kernel("gemm", "gemm", fmt.name, constants, shared)


def core_of(kernel: Kernel) -> str:
    """Name of the core that a kernel of the matrix product is made of."""
    return Core(dict(kernel.constants)["CORE"]).name.lower()


_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 120: 99, 121: 99}
"""Kilobytes of shared memory that a block may have, where that is less than 227."""
_STATIC = 1 << 10
"""Bytes of shared memory beside the dynamic: barriers, and the driver's own."""


def shared_limit(capability: int) -> int:
    """Bytes of dynamic shared memory that a block may have."""
    return (_SHARED.get(capability, 227) << 10) - 2 * _STATIC


def decode(fmt: Format, m: int, n: int, k: int, matrices: int, capability: int) -> Gemm:
    """The decode core: as many blocks as a large GPU holds at once, each with an equal share of W's rows.

    Up to 8 batch rows two small blocks per multiprocessor, where its shared memory has room for them, hide
    each other's start and end. From 5 on, pairs of blocks split K, which halves what each reads of x.
    """
    row_tiles, tiles_k = ceil(n / TILE_ROWS), ceil(k / TILE_COLUMNS)
    groups, limit = 1 if m <= 8 else 2, shared_limit(capability)
    cluster = 2 if m > 4 and capability == 90 else 1
    share = max(
        1, ceil(row_tiles * matrices * cluster / LARGE_GPU)
    )  # row tiles of a multiprocessor, or of a pair
    warps = 16 if share <= 2 and m <= 4 and capability >= 80 else 8
    batch, ring = min(m, groups * 8), (72 if capability >= 90 else 24) << 10
    if groups == 1 and share > 2 and 2 * (ring + batch * ceil(k / cluster) * 2) < limit:
        share = ceil(share / 2)
    # Row tiles of a warp: as registers allow, and two slots of a ring of half the shared memory.
    most = 4 if groups == 1 or len(fmt.scales) > 1 else 7
    most = min(most, max(1, limit // (4 * warps * layout(fmt).tile)))
    row_warps = min(warps, 1 << (ceil(share / most) - 1).bit_length())
    rows = min(most, ceil(share / row_warps))
    # The ring holds a multiprocessor's share of the bytes in flight, twice over; older GPUs need less.
    slot = warps * rows * layout(fmt).tile
    depth = max(2, min(8, ring // slot))
    k_warps = warps // row_warps
    own = ceil(ceil(tiles_k / cluster) / k_warps) * k_warps
    fits = (limit - depth * slot - batch * 16) // (batch * 2 * TILE_COLUMNS) // k_warps * k_warps
    chunk = max(k_warps, min(own, fits))
    sums = warps * rows * TILE_ROWS * groups * 8 * 4
    shared = max(depth * slot + batch * (chunk * 2 * TILE_COLUMNS + 16), sums)
    tile = {"GROUPS": groups, "ROW_TILES": rows, "ROW_WARPS": row_warps, "WARPS": warps, "DEPTH": depth}
    tile |= {"CLUSTER": cluster, "RESIDENT": 2 if groups == 1 and warps == 8 else 1}
    grid = (ceil(row_tiles / (rows * row_warps)) * cluster, ceil(m / (groups * 8)), matrices)
    kernel = _gemm_kernel(fmt, Core.DECODE, tile, limit)
    return Gemm(Plan(kernel, grid, warps * WARP, shared, cluster, overlaps=True), chunk=chunk)


_STEP_US = {
    # (batch rows, warpgroups, 64-row blocks of each): microseconds
    (32, 1, 1): 0.20,
    (32, 4, 1): 0.43,
    (64, 1, 1): 0.23,
    (64, 2, 1): 0.27,
    (64, 2, 2): 0.50,
    (128, 1, 1): 0.24,
    (128, 2, 1): 0.36,
    (128, 2, 2): 0.65,
}
"""Tiles of the wgmma core, and what a step of 64 columns takes on a busy H200 (q4_0)."""
_TILE_US = 3.0
"""What a tile takes beyond its steps: filling the ring, and the epilogue."""
_SPLIT_US = 2.5
"""What it takes the blocks of a cluster to add up their sums."""
_PLACES = {1: LARGE_GPU, 2: LARGE_GPU, 4: 112}
"""Blocks that run at once on an H200, in clusters of so many."""


def wgmma(fmt: Format, m: int, n: int, k: int, matrices: int) -> Gemm:
    """The wgmma core, with the tile and the split of K that measured times predict to be fastest."""
    steps = ceil(k / TILE_COLUMNS)
    found: list[tuple[float, tuple[int, int, int], int, int]] = []
    for tile, step in _STEP_US.items():
        batch, groups, blocks = tile
        outputs = ceil(n / (groups * blocks * 64)) * ceil(m / batch) * matrices
        for split, places in _PLACES.items():
            if split == 1 or (outputs * split <= places and steps >= 4 * split):
                waves = ceil(outputs * split / places)
                cost = ceil(steps / split) * step + _TILE_US + (_SPLIT_US if split > 1 else 0)
                found.append((waves * cost, tile, split, outputs))
    _, (batch, groups, blocks), split, outputs = min(found)
    rows = groups * blocks * 64
    stage = ceil((batch * 2 * TILE_COLUMNS + rows // TILE_ROWS * layout(fmt).tile) / 1024) * 1024
    staged = (
        (batch if split > 1 else 32) * (rows + 4) * 4
    )  # sums on their way out; after a split in the ring's place
    limit = shared_limit(90)
    stages = min(8, (limit if split > 1 else limit - staged) // stage)
    shared = max(stages * stage, staged) if split > 1 else stages * stage + staged
    constants = {"BATCH": batch, "ROW_BLOCKS": blocks, "GROUPS": groups, "SPLIT": split, "STAGES": stages}
    grid = (outputs * split if split > 1 else min(outputs, LARGE_GPU), 1, 1)
    kernel = _gemm_kernel(fmt, Core.WGMMA, constants, shared)
    return Gemm(Plan(kernel, grid, (groups + 1) * 128, shared, split, overlaps=True), box=batch)


def mma(fmt: Format, m: int, n: int, matrices: int, capability: int) -> Gemm:
    """The mma core: large tiles where they fill the GPU and registers hold them.

    Chosen on an H200 without wgmma; elsewhere by registers and shared memory: two blocks per multiprocessor
    with 163 KB, one with 99 KB.
    """
    row_tiles, warps = ceil(n / TILE_ROWS), 4
    groups, rows = (4, 2) if m <= 32 else (8, 2)
    small = (
        capability >= 80 and fmt.bits == 4 and len(fmt.scales) == 1
    )  # leaves registers for more accumulators
    if m > 128 and small and ceil(row_tiles / 16) * ceil(m / 64) * matrices >= LARGE_GPU:
        rows = 4
    stages = 3 if capability >= 80 else 2
    stage = groups * 8 * (2 * TILE_COLUMNS + 16) + warps * rows * layout(fmt).tile
    shared = max(stages * stage, 16 * (warps * rows * TILE_ROWS + 4) * 4)
    tile = {"GROUPS": groups, "ROW_TILES": rows, "WARPS": warps, "STAGES": stages}
    grid = (ceil(row_tiles / (warps * rows)), ceil(m / (groups * 8)), matrices)
    kernel = _gemm_kernel(fmt, Core.MMA, tile, shared)
    return Gemm(Plan(kernel, grid, warps * WARP, shared, overlaps=True))


def all_kernels(formats: list[Format], capability: int) -> list[Kernel]:
    """Every kernel that any plan can ask for on a GPU, for tests that compile them all."""
    found: set[Kernel] = set()
    for fmt in formats:
        found |= {per_block(op, fmt, 1).kernel for op in ("quantize", "dequantize")}
        if fmt.for_activations:
            found |= {activations(e, fmt, 1).kernel for e in ("rows_to_half", "blocks_to_half")}
            continue
        found |= {repack(fmt, entry, 1).kernel for entry in ("to_fragments", "from_fragments")}
        batches, rows = (1, 9, 17, 33, 65, 129, 513, 4096), (16, 1 << 10, 1 << 12, 1 << 13, 14336, 1 << 16)
        for m, n, k, half in product(batches, rows, (1 << 10, 1 << 12), (True, False)):
            found.add(gemm(fmt, m, n, k, 1, half, capability).plan.kernel)
    return sorted(found, key=repr)
