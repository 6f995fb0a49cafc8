"""iq1_s, iq1_m: a point of a grid for eight of -1, 0 and 1, and an eighth (ggml types 19, 29); only read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .grid import Grid
from .grid_points import points_of, two_bytes, words_of
from .int4 import pack_pairs, unpack_pairs
from .kquant import SUPER


class _Ternary(Grid):
    """Points are of -1, 0 and 1, and an eighth is added to all numbers of some, and taken off the others'."""

    magnitudes, points = (0.125, 0.875, 1.125), "IQ1_S"

    def _codes(self, numbers: Any, less: Any, xp: Any) -> Any:
        """Codes of numbers of points [n, 32], of which an eighth is taken off where `less` (as many) is 1."""
        levels = points_of(self.points).of(numbers, xp).reshape(-1, 32, 8)
        # -7/8, 1/8, 9/8 are codes 2, 4, 6; -9/8, -1/8, 7/8 are 1, 3, 5.
        return (levels * 2 + 2 - less[:, :, None]).astype(np.uint8).reshape(-1, SUPER)

    def _numbers(self, codes: Any, xp: Any) -> tuple[Any, Any]:
        """Inverse of `_codes`: numbers of points, uint16, and `less`, uint8."""
        return points_of(self.points).numbers((codes - 1) >> 1, xp), codes[:, ::8] & 1


class IQ1_S(_Ternary):
    """50 bytes: d, 32 indices' lower 8 bits, and for 32 weights a word of their upper 3 bits, the scale in 3,
    and whether an eighth is taken off all of them, -1, 0 and 1, in place of being added."""

    name = "iq1_s"
    ggml_type, file_type = 19, 24
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (32,)), ("qh", "<u2", (8,))])

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = words_of(blocks[:, 34:], np.uint16, xp)
        upper = (words[:, :, None] >> xp.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
        less = xp.repeat((words >> 15).astype(np.uint8), 4, axis=1)
        codes = self._codes(blocks[:, 2:34].astype(np.uint16) | upper << 8, less, xp)
        return blocks[:, :2], (words >> 12 & 7).astype(np.uint8), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, less = self._numbers(codes, xp)
        lower, upper = two_bytes(numbers)
        threes = upper.reshape(-1, 8, 4).astype(np.uint16) << xp.arange(0, 12, 3, dtype=np.uint16)
        words = threes.sum(axis=2, dtype=np.uint16) | s.astype(np.uint16) << 12
        words |= less[:, ::4].astype(np.uint16) << 15
        return xp.concatenate([d, lower, words_of(words, np.uint8, xp)], axis=1)


class IQ1_M(_Ternary):
    """56 bytes: 32 indices' lower 8 bits, nibbles of their upper 3 and of whether an eighth is taken off, and
    four words of four scales in 3 bits each and, in front, a nibble of d, the last one first."""

    name = "iq1_m"
    ggml_type, file_type = 29, 31
    scale_size = 16
    scales = ()
    storage = np.dtype([("qs", "u1", (32,)), ("qh", "u1", (16,)), ("scales", "<u2", (4,))])

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = words_of(blocks[:, 48:], np.uint16, xp)
        upper = unpack_pairs(blocks[:, 32:48])
        codes = self._codes(blocks[:, :32] | (upper & 7).astype(np.uint16) << 8, upper >> 3, xp)
        parts = (words >> 12) << xp.arange(0, 16, 4, dtype=np.uint16)
        s = (words[:, :, None] >> xp.arange(0, 12, 3, dtype=np.uint16) & 7).astype(np.uint8)
        d = words_of(parts.sum(axis=1, dtype=np.uint16)[:, None], np.uint8, xp)
        return d, s.reshape(-1, 16), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, less = self._numbers(codes, xp)
        lower, upper = two_bytes(numbers)
        parts = words_of(d, np.uint16, xp) >> xp.arange(0, 16, 4, dtype=np.uint16)
        threes = s.reshape(-1, 4, 4).astype(np.uint16) << xp.arange(0, 12, 3, dtype=np.uint16)
        words = threes.sum(axis=2, dtype=np.uint16) | parts << 12
        return xp.concatenate([lower, pack_pairs(upper | less << 3), words_of(words, np.uint8, xp)], axis=1)
