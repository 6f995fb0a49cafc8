"""Codes that are points of a grid: iq1_s, iq2_xxs, iq3_xxs and iq3_s of llama.cpp, and tq2_0; only read.

A stored index stands for four or eight magnitudes at once, whose signs are beside it, so that a weight takes
1.6 to 3.4 bits. Kernels have them as iq4_xs has its weights, 4.25 bits each: a format has 16 levels, and its
scales are odd. Nothing is rounded, and the stored bytes come back.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant
from .base import Format
from .int4 import pack_pairs
from .iq4_xs import IQ4_XS
from .kquant import F, Floats

_BLOCK, _SCALES = 256, 8
_ZERO = 32
"""What iq4_xs takes off its scales."""
_MIDDLE = 8
"""The code of the least positive level; those of negative ones are below it, the least magnitude last."""


class Grid(Format):
    """256 weights in a block: W = d * (2 s + 1) * level[q], with s per 32 weights; d is a float16.

    A format says how its bytes hold d, s and q (`split`), and how these become its bytes (`joined`), of
    NumPy's or CuPy's arrays. Sources: dequantize_row_iq1_s and so on of ggml; grids are the gguf package's.
    """

    bits = 4
    block_size = _BLOCK
    lookup = True
    read_only = True
    encodes_on_gpu = False
    formula = "W = d * (2 s + 1) * level[q]"
    magnitudes: ClassVar[tuple[float, ...]]
    """Of levels, ascending."""

    def __init__(self) -> None:
        missing = _MIDDLE - len(self.magnitudes)
        upper = np.array([*self.magnitudes, *self.magnitudes[-1:] * missing], F)
        self.codebook = np.concatenate([-upper[::-1], upper])
        self.codebook.flags.writeable = False

    @property
    def for_kernels(self) -> Format:
        return _as_iq4_xs(self)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        """Bytes [n, bytes of a block] -> bytes of d [n, 2], s [n, 8] and codes q [n, 256], all of uint8."""
        raise NotImplementedError

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        """The way back from `split`."""
        raise NotImplementedError

    def to_kernels(self, blocks: Any, xp: Any) -> Any:
        return _by_parts(blocks, self.block_bytes, IQ4_XS.storage.itemsize, xp, self._as_iq4_xs)

    def from_kernels(self, blocks: Any, xp: Any) -> Any:
        return _by_parts(blocks, IQ4_XS.storage.itemsize, self.block_bytes, xp, self._from_iq4_xs)

    def _as_iq4_xs(self, blocks: Any, xp: Any) -> Any:
        d, s, codes = self.split(blocks, xp)
        made = xp.empty((len(blocks), IQ4_XS.storage.itemsize), np.uint8)
        scales = s * 2 + (_ZERO + 1)
        upper = (scales >> 4).reshape(-1, 2, 4) << xp.arange(0, 8, 2, dtype=np.uint8)
        made[:, :2] = d
        made[:, 2:4] = upper[..., 0] | upper[..., 1] | upper[..., 2] | upper[..., 3]
        made[:, 4:8] = pack_pairs(scales & 15)
        made[:, 8:] = ggml.pack_nibbles(codes.reshape(-1, 32)).reshape(-1, 128)
        return made

    def _from_iq4_xs(self, blocks: Any, xp: Any) -> Any:
        upper = (blocks[:, 2:4, None] >> xp.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, _SCALES)
        scales = _nibbles(blocks[:, 4:8], xp) | upper << 4
        bytes_of = blocks[:, 8:].reshape(-1, _SCALES, 16)
        codes = xp.stack([bytes_of & 15, bytes_of >> 4], axis=2).reshape(-1, _BLOCK)
        return self.joined(blocks[:, :2], scales - (_ZERO + 1) >> 1, codes, xp)

    def encode(self, x: Floats) -> NDArray[Any]:
        raise TypeError(f"{self} is only read: see fitted()")

    def fitted(self, x: Any) -> Format:
        raise ValueError(f"nothing here quantizes to {self}: llama.cpp does, and GGUF files of it are read")

    def decode(self, records: NDArray[Any]) -> Floats:
        raw = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1)
        d, s, codes = self.split(raw, np)
        assert self.codebook is not None
        scales = kquant.scaled(np.ascontiguousarray(d).view("<f2")[:, 0], (2 * s + 1).astype(np.int8))
        return kquant.read(self.codebook[codes], scales)


class _AsIq4Xs(IQ4_XS):
    """iq4_xs with the levels of another format."""

    def __init__(self, levels: Floats, name: str) -> None:
        self.codebook, self.name = levels, name

    header = "iq4_xs"


@cache
def _as_iq4_xs(fmt: Grid) -> _AsIq4Xs:
    assert fmt.codebook is not None
    return _AsIq4Xs(fmt.codebook, f"{fmt.name}-as-iq4_xs")


def _by_parts(blocks: Any, size: int, made_size: int, xp: Any, made_of: Any) -> Any:
    """Blocks (..., row bytes) to others of another size, as many at a time as need little meanwhile."""
    *lead, row_bytes = blocks.shape
    per_row = row_bytes // size
    flat = xp.ascontiguousarray(blocks).reshape(-1, size)
    made = xp.empty((len(flat), made_size), np.uint8)
    for start in range(0, len(flat), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        made[part] = made_of(flat[part], xp)
    return made.reshape(*lead, per_row * made_size)


_AT_ONCE = 1 << 16
"""Blocks, of which each needs a few kilobytes meanwhile."""


def _nibbles(raw: Any, xp: Any) -> Any:
    """Bytes [n, m] -> the nibbles of each, the lower one first: [n, 2 m]."""
    return xp.stack([raw & 15, raw >> 4], axis=2).reshape(len(raw), -1)


def _bits(raw: Any, xp: Any) -> Any:
    """Bytes [n, m] -> the bits of each, the last one first: [n, 8 m]."""
    return (raw[:, :, None] >> xp.arange(8, dtype=np.uint8) & 1).reshape(len(raw), -1)


def _bytes(bits: Any, xp: Any) -> Any:
    """The way back: [n, 8 m] -> [n, m]."""
    weighted = bits.reshape(len(bits), -1, 8) << xp.arange(8, dtype=np.uint8)
    return weighted.sum(axis=2, dtype=np.uint8)


def _words(raw: Any, dtype: type, xp: Any) -> Any:
    """Bytes [n, m] as little-endian words."""
    return xp.ascontiguousarray(raw).view(dtype)


class _Points:
    """The points of a grid of the gguf package, each of several levels, counted from the least one."""

    def __init__(self, name: str) -> None:
        from gguf import quants  # which takes a while

        kind = getattr(quants, name)
        kind.init_grid()
        values = kind.grid.reshape(kind.grid_shape)
        self.levels = np.searchsorted(sorted(kind.grid_map), values).astype(np.uint8)
        """[points, weights of a point]"""
        self._weights = self.levels.shape[1]
        self._base = len(kind.grid_map)
        keys = self.levels.astype(np.int64) @ self._powers(np)
        self._numbers = np.zeros(self._base**self._weights, np.uint16)
        self._numbers[keys] = np.arange(len(keys))

    def _powers(self, xp: Any) -> Any:
        return xp.asarray(np.int64(self._base) ** np.arange(self._weights))

    def of(self, numbers: Any, xp: Any) -> Any:
        """Numbers [n, m] of points -> levels [n, m * weights of a point]."""
        return xp.asarray(self.levels)[numbers.astype(np.int32)].reshape(len(numbers), -1)

    def numbers(self, levels: Any, xp: Any) -> Any:
        """The way back, uint16."""
        groups = levels.reshape(len(levels), -1, self._weights).astype(np.int64)
        return xp.asarray(self._numbers)[(groups * self._powers(xp)).sum(axis=2)]


_points = cache(_Points)


def _signed(levels: Any, negative: Any, xp: Any) -> Any:
    """Codes of magnitudes' levels with signs (1 where negative)."""
    return xp.where(negative != 0, _MIDDLE - 1 - levels, _MIDDLE + levels).astype(np.uint8)


def _unsigned(codes: Any, xp: Any) -> tuple[Any, Any]:
    """The way back."""
    negative = codes < _MIDDLE
    levels = xp.where(negative, _MIDDLE - 1 - codes, codes - _MIDDLE)
    return levels.astype(np.uint8), negative.astype(np.uint8)


def _from_words(grid: str, numbers: Any, words: Any, xp: Any) -> tuple[Any, Any]:
    """Scales and codes: of bytes of numbers of points, and words [n, 8] of four times 7 signs, the last bits
    first, and a scale. The eighth sign is such that an even number are negative."""
    sevens = (words[:, :, None] >> xp.arange(0, 28, 7, dtype=np.uint32) & 127).astype(np.uint8)
    parity = sevens ^ sevens >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    signs = (sevens | (parity & 1) << 7).reshape(len(words), -1)
    codes = _signed(_points(grid).of(numbers, xp), _bits(signs, xp), xp)
    return (words >> 28).astype(np.uint8), codes


def _to_words(grid: str, s: Any, codes: Any, xp: Any) -> tuple[Any, Any]:
    """The way back."""
    levels, negative = _unsigned(codes, xp)
    sevens = (_bytes(negative, xp) & 127).reshape(len(codes), -1, 4).astype(np.uint32)
    signs = (sevens << xp.arange(0, 28, 7, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
    return _points(grid).numbers(levels, xp).astype(np.uint8), signs | s.astype(np.uint32) << 28


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
    magnitudes = (1, 3, 5, 7, 9, 11, 13, 15)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        numbers = blocks[:, 2:66].astype(np.uint16) | _bits(blocks[:, 66:74], xp).astype(np.uint16) << 8
        levels = _points("IQ3_S").of(numbers, xp)
        codes = _signed(levels, _bits(blocks[:, 74:106], xp), xp)
        return blocks[:, :2], _nibbles(blocks[:, 106:], xp), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        levels, negative = _unsigned(codes, xp)
        numbers = _points("IQ3_S").numbers(levels, xp)
        upper = _bytes((numbers >> 8).astype(np.uint8), xp)
        lower = (numbers & 255).astype(np.uint8)
        return xp.concatenate([d, lower, upper, _bytes(negative, xp), pack_pairs(s)], axis=1)


class IQ3_XXS(Grid):
    """98 bytes: d, 64 indices, and for 32 weights a word of 4 times 7 signs and, in front, the scale."""

    name = "iq3_xxs"
    ggml_type, file_type = 18, 23
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (64,)), ("signs", "<u4", (8,))])
    magnitudes = (1, 3, 5, 7, 9, 11, 13, 15.5)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = _words(blocks[:, 66:], np.uint32, xp)
        return blocks[:, :2], *_from_words("IQ3_XXS", blocks[:, 2:66], words, xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, words = _to_words("IQ3_XXS", s, codes, xp)
        return xp.concatenate([d, numbers, _words(words, np.uint8, xp)], axis=1)


class IQ2_XXS(Grid):
    """66 bytes: d, and for 32 weights a word of 4 indices and one of 4 times 7 signs and the scale."""

    name = "iq2_xxs"
    ggml_type, file_type = 16, 19
    storage = np.dtype([("d", "<f2"), ("qs", "<u4", (8, 2))])
    magnitudes = (1, 3.125, 5.375)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        pairs = _words(blocks[:, 2:], np.uint32, xp).reshape(-1, _SCALES, 2)
        numbers = _words(pairs[:, :, 0], np.uint8, xp)
        return blocks[:, :2], *_from_words("IQ2_XXS", numbers, pairs[:, :, 1], xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, words = _to_words("IQ2_XXS", s, codes, xp)
        pairs = xp.stack([_words(numbers, np.uint32, xp), words], axis=2).reshape(len(d), -1)
        return xp.concatenate([d, _words(pairs, np.uint8, xp)], axis=1)


class IQ1_S(Grid):
    """50 bytes: d, 32 indices' lower 8 bits, and for 32 weights a word of their upper 3 bits, the scale in 3,
    and whether an eighth is taken off all of them, -1, 0 and 1, in place of being added."""

    name = "iq1_s"
    ggml_type, file_type = 19, 24
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (32,)), ("qh", "<u2", (8,))])
    magnitudes = (0.125, 0.875, 1.125)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = _words(blocks[:, 34:], np.uint16, xp)
        upper = (words[:, :, None] >> xp.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
        numbers = blocks[:, 2:34].astype(np.uint16) | upper << 8
        levels = _points("IQ1_S").of(numbers, xp).reshape(-1, _SCALES, 32)
        # -7/8, 1/8, 9/8 are codes 6, 8, 10; -9/8, -1/8, 7/8 are 5, 7, 9.
        codes = (levels * 2 + 6 - (words >> 15)[:, :, None]).astype(np.uint8).reshape(-1, _BLOCK)
        return blocks[:, :2], (words >> 12 & 7).astype(np.uint8), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers = _points("IQ1_S").numbers((codes - 5) >> 1, xp)
        upper = (numbers >> 8).reshape(-1, _SCALES, 4) << xp.arange(0, 12, 3, dtype=np.uint16)
        less = (codes[:, ::32] & 1).astype(np.uint16)
        words = upper.sum(axis=2, dtype=np.uint16) | s.astype(np.uint16) << 12 | less << 15
        lower = (numbers & 255).astype(np.uint8)
        return xp.concatenate([d, lower, _words(words, np.uint8, xp)], axis=1)


class TQ2_0(Grid):
    """66 bytes: 64 of four codes of 2 bits, each of another 32 weights, then d."""

    name = "tq2_0"
    ggml_type, file_type = 35, 37
    storage = np.dtype([("qs", "u1", (64,)), ("d", "<f2")])
    formula = "W = d * (q - 1)"
    magnitudes = (0, 1, 2)

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        shifts = xp.arange(0, 8, 2, dtype=np.uint8)[:, None]
        quarters = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, _BLOCK)
        codes = quarters + (_MIDDLE - 2) + (quarters > 0).astype(np.uint8)
        return blocks[:, 64:], xp.zeros((len(blocks), _SCALES), np.uint8), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        quarters = codes - (_MIDDLE - 2) - (codes >= _MIDDLE).astype(np.uint8)
        shifted = quarters.reshape(-1, 2, 4, 32) << xp.arange(0, 8, 2, dtype=np.uint8)[:, None]
        return xp.concatenate([shifted.sum(axis=2, dtype=np.uint8).reshape(-1, 64), d], axis=1)
