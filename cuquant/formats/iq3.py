"""iq3_xxs, iq3_s: a point of a grid for four magnitudes (ggml types 18, 21); only read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .grid import Grid, SignsInWords
from .grid_points import bits_of, bytes_of, two_bytes, words_of
from .int4 import pack_pairs, unpack_pairs


class IQ3_S(Grid):
    """110 bytes: d, 64 indices' lower 8 bits, and their ninth in 8 bytes, 32 bytes of signs, 4 of scales."""

    name = "iq3_s"
    ggml_type, file_type = 21, 26
    storage = np.dtype(
        [
            ("d", "<f2"),
            ("qs", "u1", (64,)),
            ("qh", "u1", (8,)),
            ("signs", "u1", (32,)),
            ("scales", "u1", (4,)),
        ]
    )
    magnitudes, points = (1, 3, 5, 7, 9, 11, 13, 15), "IQ3_S"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        numbers = blocks[:, 2:66].astype(np.uint16) | bits_of(blocks[:, 66:74], xp).astype(np.uint16) << 8
        codes = self.signed(numbers, blocks[:, 74:106], xp)
        return blocks[:, :2], unpack_pairs(blocks[:, 106:]), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, signs = self.unsigned(codes, xp)
        lower, upper = two_bytes(numbers)
        return xp.concatenate([d, lower, bytes_of(upper, xp), signs, pack_pairs(s)], axis=1)


class IQ3_XXS(SignsInWords):
    """98 bytes: d, 64 indices, and for 32 weights a word of 4 times 7 signs and, in front, the scale."""

    name = "iq3_xxs"
    ggml_type, file_type = 18, 23
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (64,)), ("signs", "<u4", (8,))])
    magnitudes, points = (1, 3, 5, 7, 9, 11, 13, 15.5), "IQ3_XXS"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = words_of(blocks[:, 66:], np.uint32, xp)
        return blocks[:, :2], *self.of_words(blocks[:, 2:66], words, xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, words = self.to_words(s, codes, xp)
        return xp.concatenate([d, numbers, words_of(words, np.uint8, xp)], axis=1)
