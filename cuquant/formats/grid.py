"""Weights whose codes are points of a grid, or digits: what iq1, iq2, iq3 and tq share. Only read.

A stored index stands for four or eight magnitudes at once, whose signs are beside it, so that a weight takes
1.6 to 3.4 bits. Kernels look up every weight's level by itself, of 16 or of 8, and scales are odd integers.
Nothing is rounded, and the stored bytes come back.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from . import ggml, kquant
from .base import Format, ReadOnly
from .chunks import by_parts
from .grid_points import bits_of, bytes_of, points_of, with_eighth
from .int4 import pack_pairs, unpack_pairs
from .iq4_xs import IQ4_XS
from .kernels import Coding, KeptAs, Kernels, Scaling, kept_as
from .kquant import SUPER, F, Floats, KQuant


class Grid(ReadOnly):
    """256 weights in a block: W = d * (2 s + 1) * level[q], with s per 16 or 32 weights; d is a float16.

    A format says how its bytes hold d, s and q (`split`), and how these become its bytes (`joined`), of
    NumPy's or CuPy's arrays. Sources: dequantize_row_iq1_s and so on of ggml; grids are the gguf package's.
    """

    block_size = SUPER
    made_by = "llama.cpp does, and GGUF files of it are read"
    formula = "W = d * (2 s + 1) * level[q]"
    magnitudes: ClassVar[tuple[float, ...]]
    """Magnitudes of levels, ascending."""
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

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        kept = kept_as(KeptAs(self.by_levels, self._to_levels, self._to_points))
        return replace(kept, encoder=None)  # levels may be quantized to, points are only read

    @cached_property
    def by_levels(self) -> _SixteenLevels | _EightLevels:
        """The format whose codes are levels, as kernels look them up."""
        assert self.codebook is not None
        return (_EightLevels if self.bits == 3 else _SixteenLevels)(self.codebook, f"{self.name}-by-levels")

    def split(self, blocks: Any, xp: Any) -> tuple[Any, Any, Any]:
        """Bytes [n, bytes of a block] -> bytes of d [n, 2], s [n, 8 or 16] and codes q [n, 256], of uint8."""
        raise NotImplementedError

    def joined(self, d: Any, s: Any, codes: Any, xp: Any) -> Any:
        """Inverse of `split`: bytes [n, bytes of a block] of d, s and codes."""
        raise NotImplementedError

    def _to_levels(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            d, s, codes = self.split(part, xp)
            return self.by_levels.packed(d, 2 * s + 1, codes, xp)

        return by_parts(blocks, self.block_bytes, self.by_levels.block_bytes, xp, made_of)

    def _to_points(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            d, scales, codes = self.by_levels.unpacked(part, xp)
            return self.joined(d, scales[:, :: scales.shape[1] * self.scale_size // SUPER] >> 1, codes, xp)

        return by_parts(blocks, self.by_levels.block_bytes, self.block_bytes, xp, made_of)

    def decode(self, records: NDArray[Any]) -> Floats:
        raw = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1)
        d, s, codes = self.split(raw, np)
        return _read(self, d, 2 * s + 1, codes)

    def signed(self, numbers: Any, signs: Any, xp: Any) -> Any:
        """Codes [n, 256] of numbers of points, and of bytes [n, 32] of signs, the last bits first."""
        levels = points_of(self.points).of(numbers, xp)
        return xp.where(bits_of(signs, xp) != 0, self.middle - 1 - levels, self.middle + levels).astype(
            np.uint8
        )

    def unsigned(self, codes: Any, xp: Any) -> tuple[Any, Any]:
        """Inverse of `signed`: numbers of points, uint16, and bytes [n, 32] of signs."""
        negative = codes < self.middle
        levels = xp.where(negative, self.middle - 1 - codes, codes - self.middle)
        return points_of(self.points).numbers(levels, xp), bytes_of(negative.astype(np.uint8), xp)


class SignsInWords(Grid):
    """Words for 32 weights: four times 7 signs, the last bits first, and the scale."""

    def of_words(self, numbers: Any, words: Any, xp: Any) -> tuple[Any, Any]:
        """Scales and codes of bytes of numbers of points, and words [n, 8]."""
        sevens = (words[:, :, None] >> xp.arange(0, 28, 7, dtype=np.uint32) & 127).astype(np.uint8)
        signs = with_eighth(sevens).reshape(len(words), -1)
        return (words >> 28).astype(np.uint8), self.signed(numbers, signs, xp)

    def to_words(self, s: Any, codes: Any, xp: Any) -> tuple[Any, Any]:
        """Inverse of `of_words`: bytes of numbers of points, and words [n, 8]."""
        numbers, signs = self.unsigned(codes, xp)
        sevens = (signs & 127).reshape(len(codes), -1, 4).astype(np.uint32)
        words = (sevens << xp.arange(0, 28, 7, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
        return numbers.astype(np.uint8), words | s.astype(np.uint32) << 28


def _read(fmt: Format, d: NDArray[np.uint8], scales: NDArray[np.uint8], codes: NDArray[np.uint8]) -> Floats:
    assert fmt.codebook is not None
    factors = kquant.scaled(np.ascontiguousarray(d).view("<f2")[:, 0], scales.astype(np.int8))
    return kquant.read(fmt.codebook[codes], factors)


class _SixteenLevels(IQ4_XS):
    """iq4_xs with the levels of another format."""

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
        """Inverse of `packed`: bytes of d [n, 2], scales [n, 8] and codes [n, 256]."""
        upper = (blocks[:, 2:4, None] >> xp.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 8)
        scales = (unpack_pairs(blocks[:, 4:8]) | upper << 4) - np.uint8(_ZERO)
        return blocks[:, :2], scales, _codes(blocks[:, 8:])


_ZERO = 32
"""What iq4_xs takes off its scales."""


def _codes(raw: Any) -> Any:
    """Bytes [n, 128] of nibbles as iq4_xs has them -> [n, 256]."""
    return ggml.unpack_nibbles(raw.reshape(-1, 16)).reshape(len(raw), -1)


class _EightLevels(KQuant):
    """256 weights in 146 bytes; W = d * s * level[q], with s of a byte per 16 weights.

    float16 d, 16 bytes of s, codes of 3 bits in nibbles, as iq4_xs has them.
    """

    bits = 3
    scale_size = 16
    storage = np.dtype([("d", "<f2"), ("scales", "u1", (16,)), ("qs", "u1", (128,))])
    kernels = Kernels("grid", Coding.CODEBOOK, Scaling.STEP_BYTES, SUPER)

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
        """Inverse of `packed`, with all 16 scales."""
        return blocks[:, :2], blocks[:, 2:18], _codes(blocks[:, 18:])

    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        raise TypeError(f"{self} is only read")

    def decode(self, records: NDArray[Any]) -> Floats:
        raw = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1)
        return _read(self, *self.unpacked(raw, np))
