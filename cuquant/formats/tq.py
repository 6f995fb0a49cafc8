"""tq1_0, tq2_0: digits, each -1, 0 or 1, times one number for 256 (ggml types 34, 35); only read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .grid import Grid
from .kquant import SUPER


class _Digits(Grid):
    """W = d * (q - 1)."""

    formula = "W = d * (q - 1)"

    def _codes(self, digits: Any, xp: Any) -> tuple[Any, Any]:
        """Scales, which are 1, and codes: q - 1 of -1 is the second magnitude, negative, and that of 0 is the
        first."""
        codes = digits + (self.middle - 2) + (digits > 0).astype(np.uint8)
        return xp.zeros((len(digits), 8), np.uint8), codes

    def _digits(self, codes: Any) -> Any:
        """The way back."""
        return codes - (self.middle - 2) - (codes >= self.middle).astype(np.uint8)


class TQ2_0(_Digits):
    """66 bytes: 64 of four codes of 2 bits, each of another 32 weights, then d."""

    name = "tq2_0"
    ggml_type, file_type = 35, 37
    storage = np.dtype([("qs", "u1", (64,)), ("d", "<f2")])
    magnitudes = (0, 1, 2)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        shifts = xp.arange(0, 8, 2, dtype=np.uint8)[:, None]
        quarters = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, SUPER)
        return blocks[:, 64:], *self._codes(quarters, xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        quarters = self._digits(codes).reshape(-1, 2, 4, 32) << xp.arange(0, 8, 2, dtype=np.uint8)[:, None]
        return xp.concatenate([quarters.sum(axis=2, dtype=np.uint8).reshape(-1, 64), d], axis=1)


class TQ1_0(_Digits):
    """54 bytes: 32, 16 and 4 of five digits of another 32, 16 or 4 weights each, the last 4 of four; then d.

    A byte is 256/243 of the number whose digits to the base 3 these are, the first in front, rounded up. (13
    of 256 bytes, which ggml does not write, stand for the digits of others, and come back as these.)
    """

    name = "tq1_0"
    ggml_type, file_type = 34, 36
    storage = np.dtype([("qs", "u1", (48,)), ("qh", "u1", (4,)), ("d", "<f2")])
    magnitudes = (0, 1)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        parts = []
        for start, size, digits in _PARTS:
            left = (
                blocks[:, None, start : start + size] * xp.asarray(3 ** np.arange(digits), np.uint8)[:, None]
            )
            parts.append((left.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
        return blocks[:, 52:], *self._codes(xp.concatenate(parts, axis=1), xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        left, parts = self._digits(codes), []
        for _, size, digits in _PARTS:
            own, left = left[:, : size * digits], left[:, size * digits :]
            places = xp.asarray(3 ** (4 - np.arange(digits)), np.uint16)[:, None]
            numbers = (own.reshape(-1, digits, size) * places).sum(axis=1, dtype=np.uint16)
            parts.append(((numbers.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8))
        return xp.concatenate([*parts, d], axis=1)


_PARTS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
"""Of a block of tq1_0: where bytes start, how many there are, and digits of each."""
