"""What plans of the three cores have in common."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..formats import Format
from ..formats.kernels import Kernels, kernels_of
from .launch import Gpu, Kernel, Plan, shared_limit
from .planes import row_factors


class Problem(NamedTuple):
    """A matrix product to plan: activations x, [m, k], times quantized weights W, [n, k], or a stack of such
    pairs. How x comes, and what follows the sums, is not of it."""

    fmt: Format
    """Format of W, as kernels have it."""
    m: int
    """Batch rows: of x, and of the result. Of a grouped product as many as a matrix is expected to have at
    most, or as a block has at most if those are fewer."""
    n: int
    """Rows of W, which are columns of the result."""
    k: int
    """Columns of x and W, in whole pieces of 16 bytes of x."""
    gpu: Gpu
    """GPU on which the product is done."""
    matrices: int = 1
    """Matrices of W, each with batch rows of its own."""
    half: bool = True
    """Whether float16 holds W's numbers. Others are multiplied by the decode core, whose scales multiply
    float32 sums, and have no factors of rows."""
    sides: int = 1
    """How many weights a launch multiplies by the same x, of which a block has the same rows: 2 of gate and
    up together, else 1."""
    grouped: bool = False
    """Whether the product is a mixture's (`moe`): which rows of x are for which matrix, only the GPU
    knows."""

    @property
    def kernels(self) -> Kernels:
        """What kernels are told of `fmt`."""
        return kernels_of(self.fmt)


@dataclass(frozen=True)
class Gemm:
    """A plan of the matrix product. What a core has nothing of is 0."""

    plan: Plan
    box: int = 0
    """Batch rows that the copy engine brings at a time (wgmma core)."""
    box_steps: int = 1
    """Steps of 64 columns of x that the copy engine brings at a time, if it can, for a grouped product."""
    chunk: int = 0
    """Tiles of 64 columns that the decode core stages at a time."""
    streamed: int = 0
    """The last output tiles, which blocks share; of a grouped product, of which only the GPU knows the tiles,
    as many as there may be of these at most."""
    passing: int = 0
    """Steps of 64 columns that the wgmma core could do while blocks pass sums on."""
    parts: int = 0
    """Blocks of the mma core that share each of the `streamed` tiles."""
    partials: int = 0
    """Bytes of global memory for the sums that blocks pass on."""
    out_box: int = 0
    """Batch rows of a box of results, where the kernel can store them through the copy engine."""
    converts_x: bool = False
    """Whether the kernel itself makes of x what q8_1 blocks of it stand for, or turns it."""
    turns_sums: bool = False
    """Whether the kernel itself turns sums, so that it stores results."""
    signs_weights: bool = False
    """Whether the kernel itself gives W the signs of its columns."""

    @property
    def signs_go_to(self) -> str:
        """Operand to which the kernel itself gives the signs of W's columns, "x" (decode core) or "W"; or ""
        where rows of x must have them."""
        return "W" if self.signs_weights else "x" if self.chunk else ""

    @property
    def rows_behind(self) -> int:
        """Rows behind the last one that boxes of a grouped product may have: a cluster's lie one after the
        other."""
        return self.box * self.plan.cluster


DECODE_BATCH, WGMMA_BATCH = 16, 9
"""Batch rows up to which the decode core wins over the mma core, and from which on the wgmma core wins (of
large weights maybe from fewer: `wgmma_timed.least_batch`)."""


class Core(IntEnum):
    """Numbers of the cores, as kernels/ops/gemm.cu has them."""

    DECODE = 0
    MMA = 1
    WGMMA = 2


def gemm_kernel(
    fmt: Format, core: Core, copies: int, tile: dict[str, int], shared: int, half: bool = True
) -> Kernel:
    """The matrix product by a core, with so many `copies` of a codebook's table, and the constants of a tile.

    `half` tells whether float16 holds the weights, which have factors of rows only then.
    """
    kind = {"BLOCK_BYTES": fmt.block_bytes, "CORE": int(core), "COPIES": copies}
    kind["ROW_FACTORS"] = int(half and row_factors(fmt))
    return Kernel("gemm", "gemm", kernels_of(fmt).header, (*kind.items(), *tile.items()), shared)


class _Table(NamedTuple):
    """A codebook's table in shared memory: `Codebook` in kernels/core/codebook.cuh."""

    copies: int
    """Copies of the table with which lanes (almost) never wait for another: COPIES, at most."""
    entries: int
    """Entries, one for each pair of codes, of 2 bits for each two pairs: 2^PAIR_BITS."""
    size: int
    """Bytes of a copy of an entry: ENTRY."""


_TABLES = {2: _Table(16, 256, 8), 3: _Table(32, 64, 4), 4: _Table(32, 256, 4), 5: _Table(16, 1024, 4)}
"""Tables by the bits of a code that are looked up."""
_ROW, _ROWS, _TABLE_AT = 256, 256, 2048
"""Bytes of a table's rows where an index is a byte of an address (BYTES in codebook.cuh), how many there are,
and bytes before the first (AT)."""


def tables(fmt: Format, sides: int) -> int:
    """Codebooks of a product: trellis weights have one each, so that the two sides of a gated one differ."""
    return 2 if sides == 2 and fmt.whole_matrices else 1


def table_of(fmt: Format, capability: int, roomy: bool = False, sides: int = 1) -> tuple[int, int]:
    """Copies of a codebook's table in shared memory (kernels/core/codebook.cuh), and the bytes of all that a
    product needs; or 0, 0.

    As many as are of use, in at most a third of the room; those of an entry take 16 bytes at least, which is
    a store. Where there is `roomy` shared memory, instructions are spared by rows of 256 bytes, twice the
    copies' size, that start at the same place in every kernel; two tables share these.
    """
    if not kernels_of(fmt).lookup:
        return 0, 0
    (copies, entries, size), count = _TABLES[looked_up(fmt)], tables(fmt, sides)
    while copies * size > 16 and copies * entries * size * count > shared_limit(capability) // 3:
        copies //= 2
    if entries <= _ROWS and (roomy or (entries == _ROWS and copies * size * count == _ROW)):
        return _ROW // size, _TABLE_AT + _ROWS * _ROW
    return copies, copies * entries * size * count


def looked_up(fmt: Format) -> int:
    """Bits of a code that are looked up."""
    return fmt.bits - kernels_of(fmt).sign_bits


def core_of(kernel: Kernel) -> str:
    """Name of the core that a kernel of the matrix product is made of."""
    return Core(dict(kernel.constants)["CORE"]).name.lower()
