"""iq2_xxs, iq2_xs, iq2_s: a point of a grid for eight magnitudes (ggml types 16, 17, 22); only read."""

from __future__ import annotations

from typing import Any

import numpy as np

from .grid import Grid, SignsInWords
from .grid_points import quarters_of, two_bytes, with_eighth, words_of
from .int4 import pack_pairs, unpack_pairs


class IQ2_XXS(SignsInWords):
    """66 bytes: d, and for 32 weights a word of 4 indices and one of 4 times 7 signs and the scale."""

    name = "iq2_xxs"
    ggml_type, file_type = 16, 19
    storage = np.dtype([("d", "<f2"), ("qs", "<u4", (8, 2))])
    magnitudes, points = (1, 3.125, 5.375), "IQ2_XXS"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        pairs = words_of(blocks[:, 2:], np.uint32, xp).reshape(-1, 8, 2)
        numbers = words_of(pairs[:, :, 0], np.uint8, xp)
        return blocks[:, :2], *self.of_words(numbers, pairs[:, :, 1], xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, words = self.to_words(s, codes, xp)
        pairs = xp.stack([words_of(numbers, np.uint32, xp), words], axis=2).reshape(len(d), -1)
        return xp.concatenate([d, words_of(pairs, np.uint8, xp)], axis=1)


class IQ2_XS(Grid):
    """74 bytes: d, 32 words of an index of 9 bits and, in front, 7 signs; 8 bytes of scales."""

    name = "iq2_xs"
    ggml_type, file_type = 17, 20
    scale_size = 16
    storage = np.dtype([("d", "<f2"), ("qs", "<u2", (32,)), ("scales", "u1", (8,))])
    magnitudes, points = (1, 3.125, 5.375), "IQ2_XS"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = words_of(blocks[:, 2:66], np.uint16, xp)
        codes = self.signed(words & 511, with_eighth((words >> 9).astype(np.uint8)), xp)
        return blocks[:, :2], unpack_pairs(blocks[:, 66:]), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, signs = self.unsigned(codes, xp)
        words = numbers | (signs & 127).astype(np.uint16) << 9
        return xp.concatenate([d, words_of(words, np.uint8, xp), pack_pairs(s)], axis=1)


class IQ2_S(Grid):
    """82 bytes: d, 32 indices' lower 8 bits, 32 bytes of signs, the indices' upper 2 bits in 8 bytes, 8 of
    scales."""

    name = "iq2_s"
    ggml_type, file_type = 22, 28
    scale_size = 16
    storage = np.dtype(
        [
            ("d", "<f2"),
            ("qs", "u1", (32,)),
            ("signs", "u1", (32,)),
            ("qh", "u1", (8,)),
            ("scales", "u1", (8,)),
        ]
    )
    magnitudes, points = (1, 3.125, 5.375), "IQ2_S"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        upper = quarters_of(blocks[:, 66:74], xp).astype(np.uint16)
        codes = self.signed(blocks[:, 2:34] | upper << 8, blocks[:, 34:66], xp)
        return blocks[:, :2], unpack_pairs(blocks[:, 74:]), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, signs = self.unsigned(codes, xp)
        lower, upper = two_bytes(numbers)
        four = upper.reshape(len(upper), -1, 4) << xp.arange(0, 8, 2, dtype=np.uint8)
        return xp.concatenate([d, lower, signs, four.sum(axis=2, dtype=np.uint8), pack_pairs(s)], axis=1)
