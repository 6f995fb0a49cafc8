"""Codes that are points of a grid: iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs and iq3_s of llama.cpp; and
ternary numbers, tq1_0 and tq2_0. Only read.

A stored index stands for four or eight magnitudes at once, whose signs are beside it, so that a weight takes
1.6 to 3.4 bits. Kernels look up every weight's level by itself, of 16 or of 8, and scales are odd integers.
Nothing is rounded, and the stored bytes come back.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant
from .base import Format, ReadOnly
from .int4 import pack_pairs
from .iq4_xs import IQ4_XS
from .kquant import F, Floats, KQuant

_BLOCK = 256


class Grid(ReadOnly):
    """256 weights in a block: W = d * (2 s + 1) * level[q], with s per 16 or 32 weights; d is a float16.

    A format says how its bytes hold d, s and q (`split`), and how these become its bytes (`joined`), of
    NumPy's or CuPy's arrays. Sources: dequantize_row_iq1_s and so on of ggml; grids are the gguf package's.
    """

    block_size = _BLOCK
    lookup = True
    made_by = "llama.cpp does, and GGUF files of it are read"
    formula = "W = d * (2 s + 1) * level[q]"
    magnitudes: ClassVar[tuple[float, ...]]
    """Of levels, ascending."""
    points: ClassVar[str] = ""
    """The type whose grid it has, as the gguf package names it."""

    def __init__(self) -> None:
        self.bits = 3 if len(self.magnitudes) <= 4 else 4
        self.middle = 1 << self.bits - 1
        """The code of the least positive level; those of negative ones are below it, the least magnitude
        last."""
        missing = self.middle - len(self.magnitudes)
        upper = np.array([*self.magnitudes, *self.magnitudes[-1:] * missing], F)
        self.codebook = np.concatenate([-upper[::-1], upper])
        self.codebook.flags.writeable = False

    @property
    def for_kernels(self) -> Format:
        return self._kept

    @cached_property
    def _kept(self) -> _SixteenLevels | _EightLevels:
        assert self.codebook is not None
        return (_EightLevels if self.bits == 3 else _SixteenLevels)(self.codebook, f"{self.name}-by-levels")

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        """Bytes [n, bytes of a block] -> bytes of d [n, 2], s [n, 8 or 16] and codes q [n, 256], of uint8."""
        raise NotImplementedError

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        """The way back from `split`."""
        raise NotImplementedError

    def to_kernels(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            d, s, codes = self.split(part, xp)
            return self._kept.packed(d, 2 * s + 1, codes, xp)

        return _by_parts(blocks, self.block_bytes, self._kept.block_bytes, xp, made_of)

    def from_kernels(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            d, scales, codes = self._kept.unpacked(part, xp)
            return self.joined(d, scales[:, :: scales.shape[1] * self.scale_size // _BLOCK] >> 1, codes, xp)

        return _by_parts(blocks, self._kept.block_bytes, self.block_bytes, xp, made_of)

    def decode(self, records: NDArray[Any]) -> Floats:
        raw = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1)
        d, s, codes = self.split(raw, np)
        return _read(self, d, 2 * s + 1, codes)

    def _signed(self, numbers: Any, signs: Any, xp: Any) -> Any:
        """Codes [n, 256] of numbers of points, and of bytes [n, 32] of signs, the last bits first."""
        levels = _points(self.points).of(numbers, xp)
        return xp.where(_bits(signs, xp) != 0, self.middle - 1 - levels, self.middle + levels).astype(
            np.uint8
        )

    def _unsigned(self, codes: Any, xp: Any) -> tuple[Any, Any]:
        """The way back; numbers are uint16."""
        negative = codes < self.middle
        levels = xp.where(negative, self.middle - 1 - codes, codes - self.middle)
        return _points(self.points).numbers(levels, xp), _bytes(negative.astype(np.uint8), xp)


def _read(fmt: Format, d: NDArray[np.uint8], scales: NDArray[np.uint8], codes: NDArray[np.uint8]) -> Floats:
    assert fmt.codebook is not None
    factors = kquant.scaled(np.ascontiguousarray(d).view("<f2")[:, 0], scales.astype(np.int8))
    return kquant.read(fmt.codebook[codes], factors)


class _SixteenLevels(IQ4_XS):
    """iq4_xs with the levels of another format."""

    header = "iq4_xs"

    def __init__(self, levels: Floats, name: str) -> None:
        self.codebook, self.name = levels, name

    def packed(self, d: Any, scales: Any, codes: Any, xp: Any) -> Any:
        """Blocks of bytes of d [n, 2], scales [n, 8] and codes [n, 256]."""
        made = xp.empty((len(codes), self.block_bytes), np.uint8)
        stored = scales + np.uint8(_ZERO)
        upper = (stored >> 4).reshape(-1, 2, 4) << xp.arange(0, 8, 2, dtype=np.uint8)
        made[:, :2] = d
        made[:, 2:4] = upper[..., 0] | upper[..., 1] | upper[..., 2] | upper[..., 3]
        made[:, 4:8] = pack_pairs(stored & 15)
        made[:, 8:] = ggml.pack_nibbles(codes.reshape(-1, 32)).reshape(-1, 128)
        return made

    def unpacked(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        """The way back."""
        upper = (blocks[:, 2:4, None] >> xp.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 8)
        scales = (_nibbles(blocks[:, 4:8], xp) | upper << 4) - np.uint8(_ZERO)
        return blocks[:, :2], scales, _codes(blocks[:, 8:], xp)


_ZERO = 32
"""What iq4_xs takes off its scales."""


class _EightLevels(KQuant):
    """256 weights in 146 bytes; W = d * s * level[q], with s of a byte per 16 weights.

    float16 d, 16 bytes of s, codes of 3 bits in nibbles, as iq4_xs has them.
    """

    bits = 3
    scale_size = 16
    storage = np.dtype([("d", "<f2"), ("scales", "u1", (16,)), ("qs", "u1", (128,))])
    integer_scales = 16
    lookup = True
    header = "grid"

    def __init__(self, levels: Floats, name: str) -> None:
        self.codebook, self.name = levels, name

    def packed(self, d: Any, scales: Any, codes: Any, xp: Any) -> Any:
        """Blocks of bytes of d [n, 2], scales [n, 8 or 16] and codes [n, 256]."""
        made = xp.empty((len(codes), self.block_bytes), np.uint8)
        made[:, :2] = d
        made[:, 2:18] = xp.repeat(scales, 16 // scales.shape[1], axis=1)
        made[:, 18:] = ggml.pack_nibbles(codes.reshape(-1, 32)).reshape(-1, 128)
        return made

    def unpacked(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        """The way back, with all 16 scales."""
        return blocks[:, :2], blocks[:, 2:18], _codes(blocks[:, 18:], xp)

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        raise TypeError(f"{self} is only read")

    def decode(self, records: NDArray[Any]) -> Floats:
        raw = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1)
        return _read(self, *self.unpacked(raw, np))


def _by_parts(blocks: Any, size: int, made_size: int, xp: Any, made_of: Any) -> Any:
    """Blocks (..., row bytes) to others of another size, as many at a time as need little meanwhile."""
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


def _nibbles(raw: Any, xp: Any) -> Any:
    """Bytes [n, m] -> the nibbles of each, the lower one first: [n, 2 m]."""
    return xp.stack([raw & 15, raw >> 4], axis=2).reshape(len(raw), -1)


def _codes(raw: Any, xp: Any) -> Any:
    """Bytes [n, 128] of nibbles as iq4_xs has them -> [n, 256]."""
    bytes_of = raw.reshape(-1, 8, 16)
    return xp.stack([bytes_of & 15, bytes_of >> 4], axis=2).reshape(len(raw), -1)


def _bits(raw: Any, xp: Any) -> Any:
    """Bytes [n, m] -> the bits of each, the last one first: [n, 8 m]."""
    return (raw[:, :, None] >> xp.arange(8, dtype=np.uint8) & 1).reshape(len(raw), -1)


def _bytes(bits: Any, xp: Any) -> Any:
    """The way back: [n, 8 m] -> [n, m]."""
    weighted = bits.reshape(len(bits), -1, 8) << xp.arange(8, dtype=np.uint8)
    return weighted.sum(axis=2, dtype=np.uint8)


def _words(raw: Any, dtype: type, xp: Any) -> Any:
    """Bytes [n, m] as little-endian words, which a GPU must have in places of their own."""
    return xp.array(raw, order="C").view(dtype)


class _Points:
    """The points of a grid of the gguf package, each of several levels, counted from the least one."""

    def __init__(self, name: str) -> None:
        from gguf import quants  # which takes a while

        kind = getattr(quants, name)
        kind.init_grid()
        values = kind.grid.reshape(kind.grid_shape)
        assert set(np.unique(values)) == set(kind.grid_map), f"another grid of {name} than is known here"
        self.levels = np.searchsorted(sorted(kind.grid_map), values).astype(np.uint8)
        """[points, weights of a point]"""
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
        """The way back, uint16."""
        groups = levels.reshape(len(levels), -1, self._weights)
        return xp.asarray(self._numbers)[(groups * self._powers(xp)).sum(axis=2, dtype=np.uint16)]


_points = cache(_Points)


def _quarters(raw: Any, xp: Any) -> Any:
    """Bytes [n, m] -> pairs of bits of each, the last ones first: [n, 4 m]."""
    return (raw[:, :, None] >> xp.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(raw), -1)


def _two_bytes(numbers: Any) -> tuple[Any, Any]:
    """The lower and the upper byte of numbers, uint16."""
    return (numbers & 255).astype(np.uint8), (numbers >> 8).astype(np.uint8)


def _eighth(sevens: Any) -> Any:
    """Seven signs each, and in front an eighth, so that an even number are set."""
    parity = sevens ^ sevens >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return sevens | (parity & 1) << 7


class _SignsInWords(Grid):
    """Words for 32 weights: four times 7 signs, the last bits first, and the scale."""

    def _of_words(self, numbers: Any, words: Any, xp: Any) -> tuple[Any, Any]:
        """Scales and codes of bytes of numbers of points, and words [n, 8]."""
        sevens = (words[:, :, None] >> xp.arange(0, 28, 7, dtype=np.uint32) & 127).astype(np.uint8)
        signs = _eighth(sevens).reshape(len(words), -1)
        return (words >> 28).astype(np.uint8), self._signed(numbers, signs, xp)

    def _to_words(self, s: Any, codes: Any, xp: Any) -> tuple[Any, Any]:
        """The way back."""
        numbers, signs = self._unsigned(codes, xp)
        sevens = (signs & 127).reshape(len(codes), -1, 4).astype(np.uint32)
        words = (sevens << xp.arange(0, 28, 7, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
        return numbers.astype(np.uint8), words | s.astype(np.uint32) << 28


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
        numbers = blocks[:, 2:66].astype(np.uint16) | _bits(blocks[:, 66:74], xp).astype(np.uint16) << 8
        codes = self._signed(numbers, blocks[:, 74:106], xp)
        return blocks[:, :2], _nibbles(blocks[:, 106:], xp), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, signs = self._unsigned(codes, xp)
        lower, upper = _two_bytes(numbers)
        return xp.concatenate([d, lower, _bytes(upper, xp), signs, pack_pairs(s)], axis=1)


class IQ3_XXS(_SignsInWords):
    """98 bytes: d, 64 indices, and for 32 weights a word of 4 times 7 signs and, in front, the scale."""

    name = "iq3_xxs"
    ggml_type, file_type = 18, 23
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (64,)), ("signs", "<u4", (8,))])
    magnitudes, points = (1, 3, 5, 7, 9, 11, 13, 15.5), "IQ3_XXS"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = _words(blocks[:, 66:], np.uint32, xp)
        return blocks[:, :2], *self._of_words(blocks[:, 2:66], words, xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, words = self._to_words(s, codes, xp)
        return xp.concatenate([d, numbers, _words(words, np.uint8, xp)], axis=1)


class IQ2_XXS(_SignsInWords):
    """66 bytes: d, and for 32 weights a word of 4 indices and one of 4 times 7 signs and the scale."""

    name = "iq2_xxs"
    ggml_type, file_type = 16, 19
    storage = np.dtype([("d", "<f2"), ("qs", "<u4", (8, 2))])
    magnitudes, points = (1, 3.125, 5.375), "IQ2_XXS"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        pairs = _words(blocks[:, 2:], np.uint32, xp).reshape(-1, 8, 2)
        numbers = _words(pairs[:, :, 0], np.uint8, xp)
        return blocks[:, :2], *self._of_words(numbers, pairs[:, :, 1], xp)

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, words = self._to_words(s, codes, xp)
        pairs = xp.stack([_words(numbers, np.uint32, xp), words], axis=2).reshape(len(d), -1)
        return xp.concatenate([d, _words(pairs, np.uint8, xp)], axis=1)


class IQ2_XS(Grid):
    """74 bytes: d, 32 words of an index of 9 bits and, in front, 7 signs; 8 bytes of scales."""

    name = "iq2_xs"
    ggml_type, file_type = 17, 20
    scale_size = 16
    storage = np.dtype([("d", "<f2"), ("qs", "<u2", (32,)), ("scales", "u1", (8,))])
    magnitudes, points = (1, 3.125, 5.375), "IQ2_XS"

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = _words(blocks[:, 2:66], np.uint16, xp)
        codes = self._signed(words & 511, _eighth((words >> 9).astype(np.uint8)), xp)
        return blocks[:, :2], _nibbles(blocks[:, 66:], xp), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, signs = self._unsigned(codes, xp)
        words = numbers | (signs & 127).astype(np.uint16) << 9
        return xp.concatenate([d, _words(words, np.uint8, xp), pack_pairs(s)], axis=1)


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
        upper = _quarters(blocks[:, 66:74], xp).astype(np.uint16)
        codes = self._signed(blocks[:, 2:34] | upper << 8, blocks[:, 34:66], xp)
        return blocks[:, :2], _nibbles(blocks[:, 74:], xp), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, signs = self._unsigned(codes, xp)
        lower, upper = _two_bytes(numbers)
        four = upper.reshape(len(upper), -1, 4) << xp.arange(0, 8, 2, dtype=np.uint8)
        return xp.concatenate([d, lower, signs, four.sum(axis=2, dtype=np.uint8), pack_pairs(s)], axis=1)


class _Ternary(Grid):
    """Points are of -1, 0 and 1, and an eighth is added to all numbers of some, and taken off the others'."""

    magnitudes, points = (0.125, 0.875, 1.125), "IQ1_S"

    def _codes(self, numbers: Any, less: Any, xp: Any) -> Any:
        """Codes of numbers of points [n, 32], of which an eighth is taken off where `less` (as many) is 1."""
        levels = _points(self.points).of(numbers, xp).reshape(-1, 32, 8)
        # -7/8, 1/8, 9/8 are codes 2, 4, 6; -9/8, -1/8, 7/8 are 1, 3, 5.
        return (levels * 2 + 2 - less[:, :, None]).astype(np.uint8).reshape(-1, _BLOCK)

    def _numbers(self, codes: Any, xp: Any) -> tuple[Any, Any]:
        """The way back: uint16, and uint8."""
        return _points(self.points).numbers((codes - 1) >> 1, xp), codes[:, ::8] & 1


class IQ1_S(_Ternary):
    """50 bytes: d, 32 indices' lower 8 bits, and for 32 weights a word of their upper 3 bits, the scale in 3,
    and whether an eighth is taken off all of them, -1, 0 and 1, in place of being added."""

    name = "iq1_s"
    ggml_type, file_type = 19, 24
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (32,)), ("qh", "<u2", (8,))])

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = _words(blocks[:, 34:], np.uint16, xp)
        upper = (words[:, :, None] >> xp.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(-1, 32)
        less = xp.repeat((words >> 15).astype(np.uint8), 4, axis=1)
        codes = self._codes(blocks[:, 2:34].astype(np.uint16) | upper << 8, less, xp)
        return blocks[:, :2], (words >> 12 & 7).astype(np.uint8), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, less = self._numbers(codes, xp)
        lower, upper = _two_bytes(numbers)
        threes = upper.reshape(-1, 8, 4).astype(np.uint16) << xp.arange(0, 12, 3, dtype=np.uint16)
        words = threes.sum(axis=2, dtype=np.uint16) | s.astype(np.uint16) << 12
        words |= less[:, ::4].astype(np.uint16) << 15
        return xp.concatenate([d, lower, _words(words, np.uint8, xp)], axis=1)


class IQ1_M(_Ternary):
    """56 bytes: 32 indices' lower 8 bits, nibbles of their upper 3 and of whether an eighth is taken off, and
    four words of four scales in 3 bits each and, in front, a nibble of d, the last one first."""

    name = "iq1_m"
    ggml_type, file_type = 29, 31
    scale_size = 16
    scales = ()
    storage = np.dtype([("qs", "u1", (32,)), ("qh", "u1", (16,)), ("scales", "<u2", (4,))])

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        words = _words(blocks[:, 48:], np.uint16, xp)
        upper = _nibbles(blocks[:, 32:48], xp)
        codes = self._codes(blocks[:, :32] | (upper & 7).astype(np.uint16) << 8, upper >> 3, xp)
        parts = (words >> 12) << xp.arange(0, 16, 4, dtype=np.uint16)
        s = (words[:, :, None] >> xp.arange(0, 12, 3, dtype=np.uint16) & 7).astype(np.uint8)
        d = _words(parts.sum(axis=1, dtype=np.uint16)[:, None], np.uint8, xp)
        return d, s.reshape(-1, 16), codes

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        numbers, less = self._numbers(codes, xp)
        lower, upper = _two_bytes(numbers)
        parts = _words(d, np.uint16, xp) >> xp.arange(0, 16, 4, dtype=np.uint16)
        threes = s.reshape(-1, 4, 4).astype(np.uint16) << xp.arange(0, 12, 3, dtype=np.uint16)
        words = threes.sum(axis=2, dtype=np.uint16) | parts << 12
        return xp.concatenate([lower, pack_pairs(upper | less << 3), _words(words, np.uint8, xp)], axis=1)


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
        quarters = (blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, _BLOCK)
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
