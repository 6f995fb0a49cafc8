"""From a problem and a device to a launch: the only place that knows kernels, tiles, grids and shared memory.

A Plan yields the compiler's defines and the launch from the same numbers, so that host and device cannot
disagree. Nothing here needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layout:
    """Bytes of the fragment layout of a format: planes of tiles, each as long as all tiles need."""

    low: int
    fifth: int
    scale: int

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
def per_block(op: str, fmt: Format, blocks: int) -> Plan:
    """Quantize or dequantize `blocks` blocks: a warp each, enough to fill any GPU, striding over the rest."""
    return Plan(_per_format(op, op, fmt), (min(ceil(blocks / 8), 1 << 16), 1, 1), 256)


@lru_cache(maxsize=1024)
def repack(fmt: Format, entry: str, count: int) -> Plan:
    """To or from the fragment layout (`entry`), a warp per tile."""
    return Plan(_per_format("repack", entry, fmt), (ceil(count / 8), 1, 1), 256)


@lru_cache(maxsize=1024)
def activations(entry: str, fmt: Format, rows: int) -> Plan:
    """Prepare operand B: a block of threads per row, or for 8-bit codes a warp per block (`rows` blocks)."""
    grid = ceil(rows / 8) if entry == "blocks_to_int8" else rows
    return Plan(_per_format("activations", entry, fmt), (grid, 1, 1), 256)


def integer_products(capability: int) -> bool:
    """Whether a GPU multiplies 8-bit activations as integers (m16n8k32, sm_80 and later)."""
    return capability >= 80


@dataclass(frozen=True)
class Gemm:
    """A plan of the matrix product; `batch_tile` batch rows are padded to."""

    plan: Plan
    batch_tile: int


@lru_cache(maxsize=4096)
def gemm(fmt: Format, m: int, n: int, matrices: int, integer: bool, capability: int) -> Gemm:
    """The product of `matrices` pairs of [m, K] activations and [n, K] weights.

    Up to 16 batch rows the decode core, above the mma core. sm_75, with 64 KB of shared memory per block,
    takes the decode core up to 8.
    """
    tile: tuple[tuple[str, int], ...]
    element, row_tiles = 1 if integer else 2, ceil(n / TILE_ROWS)
    if m <= (16 if capability >= 80 else 8):
        # More row tiles per block share X, fewer give every SM of a large GPU a block.
        rows, groups, warps, turns = 4 if m > 2 else 2, ceil(m / 8), 4, 2
        while rows > 1 and row_tiles * matrices < LARGE_GPU * rows:
            rows //= 2
        row_bytes = turns * warps * TILE_COLUMNS * element + 16
        sums = warps * rows * TILE_ROWS * groups * 8 * 4
        most, shared = (max((2 * batch + 1) * row_bytes, sums) for batch in (groups * 8, m))
        tile = (("GROUPS", groups), ("ROW_TILES", rows), ("WARPS", warps), ("DEPTH", 2), ("TURNS", turns))
        tile = (("DECODE", 1), *tile)
        grid = (ceil(row_tiles / rows), matrices, 1)
    else:
        # A small tile where large ones would not give every SM of a large GPU a few blocks.
        # Products with minimums or integers need more registers, which leaves room for 32 batch rows.
        large = m > 32 and row_tiles * ceil(m / 64) >= 8 * LARGE_GPU and len(fmt.scales) == 1
        groups, warps = (4 if integer else 8, 8) if large else (4, 4)
        stages = 4
        most = shared = stages * groups * 8 * (TILE_COLUMNS * element + 16)
        tile = (("DECODE", 0), ("GROUPS", groups), ("ROW_TILES", 1), ("WARPS", warps), ("STAGES", stages))
        grid = (ceil(row_tiles / warps), ceil(m / (groups * 8)), matrices)
    constants = (("BLOCK_BYTES", fmt.block_bytes), ("INT8", int(integer)), *tile)
    kernel = Kernel("gemm", "gemm", fmt.name, constants, most)
    return Gemm(Plan(kernel, grid, warps * WARP, shared), groups * 8)


def all_kernels(formats: list[Format], capability: int) -> list[Kernel]:
    """Every kernel that any plan can ask for on a GPU, for tests that compile them all."""
    found: set[Kernel] = set()
    for fmt in formats:
        found |= {per_block(op, fmt, 1).kernel for op in ("quantize", "dequantize")}
        if fmt.for_activations:
            found |= {
                activations(e, fmt, 1).kernel for e in ("rows_to_half", "blocks_to_half", "blocks_to_int8")
            }
            continue
        found |= {repack(fmt, entry, 1).kernel for entry in ("to_fragments", "from_fragments")}
        problems = product((1, 3, 9, 17, 4096), (16, 1 << 12, 1 << 16), {False, integer_products(capability)})
        found |= {gemm(fmt, m, n, 1, integer, capability).plan.kernel for m, n, integer in problems}
    return sorted(found, key=repr)
