"""Launches around products with EXL3 weights, which are planned as all others, and of what converts them."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from ..formats import Format
from ..formats.exl3 import HADAMARD
from .blocks import row_threads
from .launch import STRIDING_BLOCKS, WARP, Kernel, Plan
from .planes import TILE_COLUMNS, TILE_ROWS

_SQUARE_BYTES = 4 * HADAMARD**2
"""Of the weights that a block of threads makes floats of."""
_WARPS = 8
"""Tiles that a block repacks at a time."""
_RESULTS = 128
"""Threads of a block, each of which has eight results of a row."""
ARGUMENTS = {"turn_rows": "QiqqiQQQ", "turn_results": "QiiqqqqiiiifQQQQQ"}
"""Types of what entries of kernels/ops/exl3.cu take, as `struct` has them."""


@lru_cache(maxsize=1024)
def turn_rows(rows: int, k: int) -> Plan:
    """Rows of x times suh, turned: a block of threads for each."""
    return Plan(Kernel("exl3", "turn_rows"), (rows, 1, 1), row_threads(rows, k), overlaps=True)


@lru_cache(maxsize=1024)
def turn_results(rows: int, n: int) -> Plan:
    """Rows of sums turned, times svh."""
    grid = (rows, ceil(n / (8 * _RESULTS)), 1)
    return Plan(Kernel("exl3", "turn_results"), grid, _RESULTS, overlaps=True)


@lru_cache(maxsize=1024)
def turn_entries(rows: int, k: int) -> Plan:
    """Rows of a mixture times their experts' suh, turned: a block of threads for each."""
    return Plan(Kernel("moe_exl3", "turn_entries"), (rows, 1, 1), row_threads(rows, k), overlaps=True)


@lru_cache(maxsize=1024)
def turn_hidden(rows: int, k: int) -> Plan:
    """Sums of gate and up turned, and what follows, up to rows that `down` multiplies: a block for each."""
    return Plan(Kernel("moe_exl3", "turn_hidden"), (rows, 1, 1), row_threads(rows, k), overlaps=True)


@lru_cache(maxsize=1024)
def turn_sums(rows: int, n: int) -> Plan:
    """Sums of a mixture's rows turned, times their experts' svh."""
    return Plan(Kernel("moe_exl3", "turn_sums"), (rows, ceil(n / (8 * _RESULTS)), 1), _RESULTS, overlaps=True)


@lru_cache(maxsize=1024)
def repack(fmt: Format, entry: str, matrices: int, n: int, k: int) -> Plan:
    """To or from the fragment layout (`entry`)."""
    tiles = matrices * (n // TILE_ROWS) * (k // TILE_COLUMNS)
    grid = (min(ceil(tiles / _WARPS), STRIDING_BLOCKS), 1, 1)
    return Plan(_kernel("repack_exl3", entry, fmt), grid, _WARPS * WARP)


@lru_cache(maxsize=1024)
def dequantize(fmt: Format, matrices: int, n: int, k: int) -> Plan:
    """128 rows and 128 columns a block."""
    squares = matrices * (n // HADAMARD) * (k // HADAMARD)
    kernel = _kernel("dequantize_exl3", "dequantize", fmt, _SQUARE_BYTES)
    return Plan(kernel, (min(squares, STRIDING_BLOCKS), 1, 1), 256, _SQUARE_BYTES)


def _kernel(op: str, entry: str, fmt: Format, shared: int = 0) -> Kernel:
    return Kernel(op, entry, fmt.header, (("BLOCK_BYTES", fmt.block_bytes),), shared)


def prepare_kernels(fmt: Format) -> set[Kernel]:
    """What repacks weights, and surrounds their products."""
    both = {repack(fmt, entry, 1, HADAMARD, HADAMARD).kernel for entry in ("to_fragments", "from_fragments")}
    return both | {turn_rows(1, HADAMARD).kernel, turn_results(1, HADAMARD).kernel}


def kernels(fmt: Format) -> set[Kernel]:
    """All of them."""
    others = {turn_sums(1, HADAMARD).kernel, dequantize(fmt, 1, HADAMARD, HADAMARD).kernel}
    return prepare_kernels(fmt) | others
