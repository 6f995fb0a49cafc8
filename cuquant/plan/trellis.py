"""Launches of the kernels that convert trellis matrices; their products are planned as all others."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from ..formats import Format
from ..formats.kernels import kernels_of
from .launch import MOST_BLOCKS, STRIDING_BLOCKS, Kernel, Plan
from .planes import TILE_COLUMNS, TILE_ROWS

_WARPS, _RUN = 8, 8
"""Row tiles of a block of threads that repacks, and its tiles along K."""
_DEQUANTIZED = 32, 512
"""Rows and columns of a block that dequantizes."""
_QUANTIZE_THREADS = 128
_ROWS = _QUANTIZE_THREADS // 8
"""Rows of a block that quantizes: eight threads have a group."""


def _kernel(op: str, entry: str, fmt: Format) -> Kernel:
    return Kernel(f"{op}_trellis", entry, kernels_of(fmt).header, (("BLOCK_BYTES", fmt.block_bytes),))


def _plan(op: str, entry: str, fmt: Format, blocks: int, threads: int = 256) -> Plan:
    return Plan(_kernel(op, entry, fmt), (min(blocks, STRIDING_BLOCKS), 1, 1), threads)


@lru_cache(maxsize=1024)
def survey(fmt: Format, matrices: int, n: int, k: int) -> Plan:
    """Find out what must be known of matrices before they are repacked."""
    numbers = max(k, n * ceil(k / kernels_of(fmt).scale_columns))
    grid = (min(ceil(numbers / 256), 256), min(matrices, MOST_BLOCKS), 1)
    return Plan(_kernel("repack", "survey", fmt), grid, 256)


def sign_bits(fmt: Format, numbers: int) -> Plan:
    """Pack so many signs of columns, as rows of x take them, and as W does."""
    return _plan("repack", "sign_bits", fmt, ceil(numbers / 256))


@lru_cache(maxsize=1024)
def repack(fmt: Format, entry: str, matrices: int, n: int, k: int) -> Plan:
    """Repack to or from the fragment layout (`entry`)."""
    bands = ceil(ceil(n / TILE_ROWS) / _WARPS)
    return _plan("repack", entry, fmt, matrices * bands * ceil(ceil(k / TILE_COLUMNS) / _RUN))


def take_rows(fmt: Format, rows: int, k: int) -> Plan:
    """Take rows of a stack as a matrix: a thread for a row of a tile, and for each scale and sign."""
    in_tiles = ceil(k / TILE_ROWS) * 16 * ceil(rows / TILE_ROWS)
    threads = max(in_tiles, rows * ceil(k / kernels_of(fmt).scale_columns), k)
    return Plan(_kernel("repack", "take_rows", fmt), (ceil(threads / 256), 1, 1), 256)


@lru_cache(maxsize=1024)
def dequantize(fmt: Format, matrices: int, n: int, k: int) -> Plan:
    """Dequantize 32 rows and 512 columns a block."""
    rows, columns = _DEQUANTIZED
    bands = matrices * ceil(n / rows)
    grid = (ceil(k / columns), min(bands, MOST_BLOCKS), ceil(bands / MOST_BLOCKS))
    return Plan(_kernel("dequantize", "dequantize", fmt), grid, 256)


@lru_cache(maxsize=1024)
def quantize(fmt: Format, matrices: int, n: int, k: int) -> Plan:
    """Quantize 16 rows and a group's columns a block."""
    blocks = matrices * ceil(n / TILE_ROWS) * ceil(k / kernels_of(fmt).scale_columns)
    return _plan("quantize", "quantize", fmt, blocks, _QUANTIZE_THREADS)


def nearest(fmt: Format, groups: int) -> Plan:
    """Find the nearest indices of 16 groups a block."""
    grid = (ceil(groups / _ROWS), 1, 1)
    return Plan(_kernel("quantize", "nearest", fmt), grid, _QUANTIZE_THREADS)


def prepare_kernels(fmt: Format) -> set[Kernel]:
    """What repacks matrices, and what is asked of them before; and what takes rows of them."""
    entries = ("survey", "sign_bits", "to_fragments", "from_fragments", "take_rows")
    return {_kernel("repack", entry, fmt) for entry in entries}


def kernels(fmt: Format) -> set[Kernel]:
    """All kernels of trellis weights."""
    others = (("dequantize", "dequantize"), ("quantize", "quantize"), ("quantize", "nearest"))
    return prepare_kernels(fmt) | {_kernel(op, entry, fmt) for op, entry in others}
