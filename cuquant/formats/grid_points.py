"""What weights of grids are packed with: points by their numbers, words, and bits; of NumPy or CuPy.

The last bits of a byte or a word come first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np


class _Points:
    """The points of a grid of the gguf package, each of several levels, counted from the least one."""

    def __init__(self, name: str) -> None:
        from gguf import quants  # which takes a while

        kind = getattr(quants, name)
        kind.init_grid()
        values = kind.grid.reshape(kind.grid_shape)
        assert set(np.unique(values)) == set(kind.grid_map), f"another grid of {name} than is known here"
        self.levels = np.searchsorted(sorted(kind.grid_map), values).astype(np.uint8)
        """Levels of each point: uint8 [points, weights of a point]."""
        self._weights = self.levels.shape[1]
        self._base = len(kind.grid_map)
        keys = self.levels.astype(np.uint16) @ self._powers(np)
        self._numbers = np.zeros(self._base**self._weights, np.uint16)
        self._numbers[keys] = np.arange(len(keys))

    def _powers(self, xp: Any) -> Any:
        return xp.asarray(self._base ** np.arange(self._weights), np.uint16)

    def of(self, numbers: Any, xp: Any) -> Any:
        """Numbers [n, m] of points -> levels [n, m * weights of a point]."""
        return xp.asarray(self.levels)[numbers].reshape(len(numbers), -1)

    def numbers(self, levels: Any, xp: Any) -> Any:
        """Inverse of `of`: levels [n, m * weights of a point] -> numbers [n, m], uint16."""
        groups = levels.reshape(len(levels), -1, self._weights)
        return xp.asarray(self._numbers)[(groups * self._powers(xp)).sum(axis=2, dtype=np.uint16)]


points_of = cache(_Points)
"""Points of the gguf package's grid of a name."""


def bits_of(raw: Any, xp: Any) -> Any:
    """Bytes [n, m] -> the bits of each, the last one first: [n, 8 m]."""
    return (raw[:, :, None] >> xp.arange(8, dtype=np.uint8) & 1).reshape(len(raw), -1)


def bytes_of(bits: Any, xp: Any) -> Any:
    """Inverse of `bits_of`: bits [n, 8 m] -> bytes [n, m]."""
    weighted = bits.reshape(len(bits), -1, 8) << xp.arange(8, dtype=np.uint8)
    return weighted.sum(axis=2, dtype=np.uint8)


def words_of(raw: Any, dtype: type, xp: Any) -> Any:
    """Bytes [n, m] as little-endian words, which a GPU must have in places of their own."""
    return xp.array(raw, order="C").view(dtype)


def quarters_of(raw: Any, xp: Any) -> Any:
    """Bytes [n, m] -> pairs of bits of each, the last ones first: [n, 4 m]."""
    return (raw[:, :, None] >> xp.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(raw), -1)


def two_bytes(numbers: Any) -> tuple[Any, Any]:
    """The lower and the upper byte of numbers, uint16."""
    return (numbers & 255).astype(np.uint8), (numbers >> 8).astype(np.uint8)


def with_eighth(sevens: Any) -> Any:
    """Seven signs each, and in front an eighth, so that an even number are set."""
    parity = sevens ^ sevens >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return sevens | (parity & 1) << 7
