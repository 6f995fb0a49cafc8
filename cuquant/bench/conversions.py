"""The conversions of kernels/ops/convert.cu: what codes their words hold, and what their registers then are.

A lane's words for two steps of 16 columns, 16 codes, become eight registers with two 16-bit floats each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..formats import e2m1

_E2M1 = (e2m1.TWICE / 2).astype(np.float16)
_E2M1[8] = -0.0
_Q = np.arange(16)


@dataclass(frozen=True)
class Conversion:
    """One way to convert codes.

    Attributes
    ----------
    codec : str
        The struct in kernels/ops/convert.cu.
    kind, method : str
        What codes it takes, and how.
    order : function
        Words uint32 [..., w] to codes [..., 8, 2], by register and half.
    registers : uint16 [2, number of codes]
        The bits that a code becomes, in registers of even and of odd numbers.
    weights : float16 [16], or None
        What codes are in the decode core, which takes back what `registers` are uncorrected by; None where
        it has no use for them.
    table : int
        Bytes of its table in shared memory, of one copy.
    copied : bool
        Whether there are copies of the table (kernels/core/codebook.cuh).
    sums : bool
        Whether the decode core sums up activations for it.
    """

    codec: str
    kind: str
    method: str
    order: Callable[[NDArray[np.uint32]], NDArray[np.uint32]]
    registers: NDArray[np.uint16]
    weights: NDArray[np.float16] | None = None
    table: int = 0
    copied: bool = False
    sums: bool = False

    @property
    def words(self) -> int:
        """Words of a lane's 16 codes."""
        return 2 if self.registers.shape[1] == 16 else 4

    @property
    def values(self) -> NDArray[np.float16]:
        """The table's numbers: of other conversions nothing reads them."""
        return _E2M1 if self.weights is None else self.weights

    def convert(self, words: NDArray[np.uint32]) -> NDArray[np.uint16]:
        """The registers' halves [..., 8, 2] of words [..., w]."""
        odd = np.arange(8)[:, None] % 2
        return self.registers[odd, self.order(words)]


def _split(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Codes [..., w, 32 / bits], the lowest bits first."""
    return words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)


def _apart(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes [..., 8, 2] in pairs: nibbles r and r + 4 of a word are a pair."""
    return np.moveaxis(_split(words, 4).reshape(*words.shape[:-1], 2, 2, 4), -2, -1).reshape(
        *words.shape[:-1], 8, 2
    )


def _neighbours(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes [..., 8, 2] in pairs: nibbles 2 r and 2 r + 1 of a word are a pair."""
    return _split(words, 4).reshape(*words.shape[:-1], 8, 2)


def _interleaved(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes [..., 8, 2] in pairs: a byte has a pair bit by bit; bytes 4 j + 2 h + t are register 4 h + 2 t +
    j (core/codebook.cuh)."""
    pairs = _split(words, 8).reshape(*words.shape[:-1], 2, 2, 2)
    pairs = np.moveaxis(pairs, -3, -1).reshape(*words.shape[:-1], 8)
    bits = pairs[..., None, None] >> np.array([[0, 2, 4, 6], [1, 3, 5, 7]], np.uint32) & np.uint32(1)
    return (bits << np.arange(4, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)


def _scattered(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes [..., 8, 2] in pairs: signs of half a word together, and the other bits by threes
    (core/e2m1.cuh)."""
    halves = _split(words, 16)[..., None, :]
    signs, others = (np.array(at, np.uint32)[:, None] for at in ((15, 12, 14, 13), (9, 6, 3, 0)))
    codes = (halves >> others & np.uint32(7)) | (halves >> signs & np.uint32(1)) << np.uint32(3)
    return codes.reshape(*words.shape[:-1], 8, 2)


def _bytes(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Codes [..., 8, 2] in pairs: register 4 h + 2 t + j has bytes t and t + 2 of word 2 h + j."""
    codes = _split(words, 8).reshape(*words.shape[:-1], 2, 2, 2, 2)  # h, j, element, t
    return np.moveaxis(codes, (-1, -3), (-3, -2)).reshape(*words.shape[:-1], 8, 2)


def _halves(even: NDArray[np.generic], odd: NDArray[np.generic] | None = None) -> NDArray[np.uint16]:
    """Bits of float16 numbers, of registers of even and of odd numbers."""
    return np.stack([np.asarray(x, np.float16).view(np.uint16) for x in (even, even if odd is None else odd)])


def _bfloats(x: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Bits of bfloat16 numbers that float32 numbers are exactly."""
    bits = (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.stack([bits, bits])


_WIDE = _E2M1.astype(np.float64)
_BYTES = np.arange(256).astype(np.int8).astype(np.int64)
_U4B8 = (_Q - 8).astype(np.float16)
_SHIFTED = _halves(np.ldexp(_E2M1, -14))

CONVERSIONS = {
    conversion.codec: conversion
    for conversion in (
        Conversion("E2m1", "e2m1", "bits", _apart, _halves(_E2M1), _E2M1),
        Conversion("E2m1Uncorrected", "e2m1", "bits, uncorrected", _apart, _SHIFTED, _E2M1),
        Conversion("FragmentE2m1", "e2m1", "bits of the fragment layout", _scattered, _SHIFTED, _E2M1),
        Conversion("E2m1Permutes", "e2m1", "byte permutes", _apart, _halves(_E2M1), _E2M1),
        Conversion("E2m1Bfloat", "e2m1", "bits, to bfloat16", _apart, _bfloats(_WIDE)),
        Conversion(
            "E2m1BfloatUncorrected",
            "e2m1",
            "bits, to bfloat16, uncorrected",
            _apart,
            _bfloats(np.ldexp(_WIDE, -126)),
        ),
        Conversion("U4b8", "u4b8", "bits", _apart, _halves(_U4B8), _U4B8),
        Conversion("U4", "u4", "bits", _apart, _halves(_Q)),
        Conversion("U4Uncorrected", "u4", "bits, uncorrected", _apart, _halves(1024 + _Q, 1024 + 16 * _Q)),
        Conversion(
            "FragmentIntegers",
            "u4b8",
            "bits, masked",
            _apart,
            _halves(np.ldexp(_Q, -24), np.ldexp(_Q, -20)),
            _U4B8,
            sums=True,
        ),
        Conversion("Permutes", "any 16", "byte-permute table", _neighbours, _halves(_E2M1), _E2M1),
        Conversion("Values", "any 16", "shared table of values", _apart, _halves(_E2M1), _E2M1, table=64),
        Conversion(
            "Pairs",
            "any 16",
            "shared table of pairs",
            _interleaved,
            _halves(_E2M1),
            _E2M1,
            table=1024,
            copied=True,
        ),
        Conversion("Int8", "int8", "byte permutes", _bytes, _halves(_BYTES)),
        Conversion("Int8Uncorrected", "int8", "byte permutes, uncorrected", _bytes, _halves(1152 + _BYTES)),
    )
}
"""All conversions, by the names of their structs."""
