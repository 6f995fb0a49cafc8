"""tq1_0, tq2_0: digits, each -1, 0 or 1, times one number for 256 (ggml types 34, 35); only read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from .chunks import by_parts
from .kernels import Coding, KeptAs, Kernels, Scaling, kept_as
from .kquant import SUPER
from .q2_0 import TwoBits


class _Digits(TwoBits):
    """Digits, each -1, 0 or 1. Sources: dequantize_row_tq1_0 and dequantize_row_tq2_0 of ggml."""

    block_size = SUPER
    made_by = "llama.cpp does, and GGUF files of it are read"


class TQ2_0(_Digits):
    """66 bytes: 64 of four codes of 2 bits, each of another 32 weights, then d. (A code of 3 reads 2 d.)"""

    name = "tq2_0"
    ggml_type, file_type = 35, 37
    storage = np.dtype([("qs", "u1", (64,)), ("d", "<f2")])
    kernels = Kernels("tq2_0", Coding.INTEGERS, Scaling.HALF, group_size=SUPER)

    def codes(self, blocks: Any, xp: Any) -> Any:
        shifts = xp.arange(0, 8, 2, dtype=np.uint8)[:, None]
        return (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, SUPER)

    def joined(self, digits: Any, d: Any, xp: Any) -> Any:
        """Inverse of `codes`: blocks of digits [n, 256] and bytes of d [n, 2]."""
        quarters = digits.reshape(-1, 2, 4, 32) << xp.arange(0, 8, 2, dtype=np.uint8)[:, None]
        return xp.concatenate([quarters.sum(axis=2, dtype=np.uint8).reshape(-1, 64), d], axis=1)


_TWO_BITS = TQ2_0()


class TQ1_0(_Digits):
    """54 bytes: 32, 16 and 4 of five digits of another 32, 16 or 4 weights each, the last 4 of four; then d.

    A byte is 256/243 of the number whose digits to the base 3 these are, the first in front, rounded up. (13
    of 256 bytes, which ggml does not write, stand for the digits of others, and come back as these.) On a GPU
    it is kept as tq2_0.
    """

    name = "tq1_0"
    ggml_type, file_type = 34, 36
    storage = np.dtype([("qs", "u1", (48,)), ("qh", "u1", (4,)), ("d", "<f2")])

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        return kept_as(KeptAs(_TWO_BITS, self._in_two_bits, self._in_digits))

    def codes(self, blocks: Any, xp: Any) -> Any:
        parts = []
        for start, size, digits in _PARTS:
            left = (
                blocks[:, None, start : start + size] * xp.asarray(3 ** np.arange(digits), np.uint8)[:, None]
            )
            parts.append((left.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
        return xp.concatenate(parts, axis=1)

    def joined(self, digits: Any, d: Any, xp: Any) -> Any:
        """Inverse of `codes`: blocks of digits [n, 256] and bytes of d [n, 2]."""
        left, parts = digits, []
        for _, size, places in _PARTS:
            own, left = left[:, : size * places], left[:, size * places :]
            powers = xp.asarray(3 ** (4 - np.arange(places)), np.uint16)[:, None]
            numbers = (own.reshape(-1, places, size) * powers).sum(axis=1, dtype=np.uint16)
            parts.append(((numbers.astype(np.uint32) * 256 + 242) // 243).astype(np.uint8))
        return xp.concatenate([*parts, d], axis=1)

    def _in_two_bits(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            return _TWO_BITS.joined(self.codes(part, xp), part[:, 52:], xp)

        return by_parts(blocks, self.block_bytes, _TWO_BITS.block_bytes, xp, made_of)

    def _in_digits(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            return self.joined(_TWO_BITS.codes(part, xp), part[:, 64:], xp)

        return by_parts(blocks, _TWO_BITS.block_bytes, self.block_bytes, xp, made_of)


_PARTS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
"""Parts of a block of tq1_0: where bytes start, how many there are, and digits of each."""
