"""Blocks of one kind made of blocks of another, so many at a time that little memory is taken meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def by_parts(blocks: Any, size: int, made_size: int, xp: Any, made_of: Callable[[Any], Any]) -> Any:
    """Blocks (..., row bytes) of `size` bytes to others of `made_size`: `made_of` takes [n, size] bytes.

    `xp` is the module of their arrays, NumPy or CuPy.
    """
    *lead, row_bytes = blocks.shape
    per_row = row_bytes // size
    flat = xp.ascontiguousarray(blocks).reshape(-1, size)
    made = xp.empty((len(flat), made_size), np.uint8)
    for start in range(0, len(flat), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        made[part] = made_of(flat[part])
    return made.reshape(*lead, per_row * made_size)


_AT_ONCE = 1 << 15
"""Blocks, of which each needs a few kilobytes meanwhile, and a GPU some thirty launches."""
