"""The fragment layout: bytes of its planes, tiles of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ..formats import Format
from ..formats.kernels import Coding, kernels_of

TILE_ROWS, TILE_COLUMNS = 16, 64
"""Rows of N and columns of K in a tile of the fragment layout."""
MOST_COLUMNS = 1 << 24
"""Most columns of a weight: the row tiles of a block, of which there are 16 at most, lie less than 2^32 bytes
apart (kernels/core/tile.cuh)."""


def whole_lines(nbytes: int) -> int:
    """Bytes of the lines of 128 that so many bytes take."""
    return ceil(nbytes / 128) * 128


class Planes(NamedTuple):
    """Where planes start: bytes from a buffer's beginning, or addresses."""

    low: int
    high: int
    scale: int
    group: int
    row: int


@dataclass(frozen=True)
class Layout:
    """Bytes of the fragment layout of a format: of a tile in its planes, and of `group_tiles` along K in the
    group plane."""

    low: int
    high: int
    scale: int
    group: int = 0
    group_tiles: int = 1
    row: int = 0
    """Bytes of a row tile in the row plane."""

    def step(self, tiles: int) -> int:
        """Bytes of that many tiles along K, as the rings of kernels have them."""
        return tiles * (self.low + self.high + self.scale) + ceil(tiles / self.group_tiles) * self.group

    def slot(self, row_tiles: int) -> int:
        """Bytes of a step of one tile along K in a ring of the decode core, where planes are whole lines."""
        codes = row_tiles * (self.low + self.high)
        return codes + whole_lines(row_tiles * self.scale) + whole_lines(row_tiles * self.group)

    def offsets(self, row_tiles: int, tiles_k: int) -> tuple[Planes, int]:
        """Where the planes start in one buffer, and its size; aligned to 256 bytes."""
        tiles, groups = row_tiles * tiles_k, row_tiles * ceil(tiles_k / self.group_tiles)
        starts, end = [], 0
        counts = (tiles, tiles, tiles, groups, row_tiles)
        sizes = (self.low, self.high, self.scale, self.group, self.row)
        for count, size in zip(counts, sizes, strict=True):
            starts.append(end)
            end += ceil(count * size / 256) * 256
        return Planes(*starts), end


@lru_cache(maxsize=256)
def layout(fmt: Format) -> Layout:
    """Planes of a format's fragment layout, as kernels/core/tile.cuh has them.

    Of codes of 3, 5 and 6 bits as many words as bits beyond 2 or 4 make are a plane of their own.
    NotImplementedError for formats that are no weights, or have no kernels.
    """
    kernels = kernels_of(fmt)
    if fmt.for_activations:
        raise NotImplementedError(f"{fmt} has no fragment layout: it cannot be a weight on the GPU")
    weights = TILE_ROWS * TILE_COLUMNS
    high = fmt.bits - (1 << fmt.bits.bit_length() - 1)
    scales, group = TILE_ROWS * kernels.scale_bytes(TILE_COLUMNS), TILE_ROWS * kernels.group_bytes
    low, high = weights * (fmt.bits - high) // 8, weights * high // 8
    row = 2 * TILE_ROWS * row_factors(fmt)
    return Layout(low, high, scales, group, kernels.group_size // TILE_COLUMNS if group else 1, row)


def row_factors(fmt: Format) -> bool:
    """Whether kernels have a factor for every row (ROW_FACTORS in kernels/core/types.cuh): of codes that are
    integers."""
    return kernels_of(fmt).coding is Coding.INTEGERS and not fmt.for_activations


def tiles(matrices: int, n: int, k: int) -> tuple[int, int]:
    """Row tiles of a stack of matrices, and the tiles of each along K."""
    return matrices * ceil(n / TILE_ROWS), ceil(k / TILE_COLUMNS)
