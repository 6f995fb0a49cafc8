"""Launches around products with EXL3 weights, which are planned as all others, and of what converts them."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from ..formats import Format
from ..formats.exl3 import HADAMARD
from ..formats.kernels import kernels_of
from .blocks import row_threads
from .launch import STRIDING_BLOCKS, WARP, Kernel, Plan
from .planes import TILE_COLUMNS, TILE_ROWS

_SQUARE_BYTES = 4 * HADAMARD**2
"""Bytes of the float32 weights that a block of threads makes."""
_WARPS = 8
"""Tiles that a block repacks at a time."""
_RESULTS = 128
"""Threads of a block, each of which has eight results of a row."""
ARGUMENTS = {"turn_rows": "QiqqiQQQ", "turn_results": "QiiqqqqiiiifQQQQQ"}
"""Types of what entries of kernels/ops/exl3.cu take, as `struct` has them."""


@lru_cache(maxsize=1024)
def turn_rows(rows: int, k: int) -> Plan:
    """Turn rows of x times suh: a block of threads for each."""
    return Plan(Kernel("exl3", "turn_rows"), (rows, 1, 1), row_threads(rows, k), overlaps=True)


@lru_cache(maxsize=1024)
def turn_results(rows: int, n: int) -> Plan:
    """Turn rows of sums, and multiply them by svh."""
    grid = (rows, ceil(n / (8 * _RESULTS)), 1)
    return Plan(Kernel("exl3", "turn_results"), grid, _RESULTS, overlaps=True)


@lru_cache(maxsize=1024)
def turn_entries(rows: int, k: int) -> Plan:
    """Turn rows of a mixture times their experts' suh: a block of threads for each."""
    return Plan(Kernel("moe_exl3", "turn_entries"), (rows, 1, 1), row_threads(rows, k), overlaps=True)


@lru_cache(maxsize=1024)
def turn_hidden(rows: int, k: int) -> Plan:
    """Turn sums of gate and up, and make of them the rows that `down` multiplies: a block for each."""
    return Plan(Kernel("moe_exl3", "turn_hidden"), (rows, 1, 1), row_threads(rows, k), overlaps=True)


@lru_cache(maxsize=1024)
def turn_sums(rows: int, n: int) -> Plan:
    """Turn sums of a mixture's rows, and multiply them by their experts' svh."""
    return Plan(Kernel("moe_exl3", "turn_sums"), (rows, ceil(n / (8 * _RESULTS)), 1), _RESULTS, overlaps=True)


@lru_cache(maxsize=1024)
def repack(fmt: Format, entry: str, matrices: int, n: int, k: int) -> Plan:
    """Repack to or from the fragment layout (`entry`)."""
    tiles = matrices * (n // TILE_ROWS) * (k // TILE_COLUMNS)
    grid = (min(ceil(tiles / _WARPS), STRIDING_BLOCKS), 1, 1)
    return Plan(_kernel("repack_exl3", entry, fmt), grid, _WARPS * WARP)


@lru_cache(maxsize=1024)
def dequantize(fmt: Format, matrices: int, n: int, k: int) -> Plan:
    """Dequantize 128 rows and 128 columns a block."""
    squares = matrices * (n // HADAMARD) * (k // HADAMARD)
    kernel = _kernel("dequantize_exl3", "dequantize", fmt, _SQUARE_BYTES)
    return Plan(kernel, (min(squares, STRIDING_BLOCKS), 1, 1), 256, _SQUARE_BYTES)


def _kernel(op: str, entry: str, fmt: Format, shared: int = 0) -> Kernel:
    return Kernel(op, entry, kernels_of(fmt).header, (("BLOCK_BYTES", fmt.block_bytes),), shared)


def prepare_kernels(fmt: Format) -> set[Kernel]:
    """What repacks weights, and surrounds their products."""
    both = {repack(fmt, entry, 1, HADAMARD, HADAMARD).kernel for entry in ("to_fragments", "from_fragments")}
    return both | {turn_rows(1, HADAMARD).kernel, turn_results(1, HADAMARD).kernel}


def kernels(fmt: Format) -> set[Kernel]:
    """All kernels of EXL3 weights."""
    others = {turn_sums(1, HADAMARD).kernel, dequantize(fmt, 1, HADAMARD, HADAMARD).kernel}
    return prepare_kernels(fmt) | others
