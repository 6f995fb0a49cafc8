"""kbit2 to kbit5: indices into a codebook, as bit planes, and one scale per 32 weights."""

from __future__ import annotations

import zlib
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import check
from . import e4m4
from .base import Format, register
from .kernels import Coding, Encoder, Kernels, MaskedValues, Scaling

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

BITS = (2, 3, 4, 5)
NEGLIGIBLE = np.float32(2**-99)
"""Magnitudes of codebook entries, thresholds and normalised weights that count as 0.

A subnormal weight is below it after its division by at least 1e-8, and an entry above it times a scale, at
least 2^-24, is no subnormal: whether a GPU flushes subnormals to 0 makes no difference.
"""
_LEAST_DIVISOR = np.float32(1e-8)


def normal_float_codebook(k: int) -> NDArray[np.float32]:
    """Codebook for normally distributed weights: 2^k quantiles, at the midpoints of equal probabilities.

    ppf((i + 1/2) / 2^k) for i = 0 .. 2^k - 1 with the normal distribution's quantile function ppf, divided by
    the largest: from -1 to 1, ascending, antisymmetric (so that 0 is no entry), rounded once from float64.

    Parameters
    ----------
    k : int
        Bits of an index, 2 to 5.

    Returns
    -------
    float32 array [2^k], read-only.

    Raises
    ------
    TypeError, ValueError
        k is none of 2, 3, 4, 5.
    """
    return _normal(check.one_of(k, "k", BITS))


@cache
def _normal(k: int) -> NDArray[np.float32]:
    from scipy.special import ndtri

    count = 1 << k
    upper = ndtri((np.arange(count // 2, count) + 0.5) / count)
    positive = (upper / upper[-1]).astype(np.float32)
    return _frozen(np.concatenate([-positive[::-1], positive]))


class KBit(Format):
    """32 weights as k bit planes and a scale: W = codebook[q] * absmax, with q of 2 to 5 bits.

    A block is k little-endian 32-bit words, then absmax as an E4M4 byte or a float16, unaligned. Bit j of
    word p is bit p of weight j's index. "kbit2" .. "kbit5" are `KBit(2)` .. `KBit(5)`.

    Quantizing, in float32, every operation rounded to nearest:

    1. a = the largest magnitude of the block; its code is a rounded to nearest even.
    2. d = a, or with ``scale="decoded"`` the number that the code stands for.
    3. v = x / max(d, 1e-8), and 0 where abs(v) < 2^-99.
    4. q = how many of `thresholds` v is above: the nearest entry, the lower one of two equally near (of equal
       entries the first for a v up to them, the last for one above).

    Reading back: codebook[q] * absmax, one float32 multiplication.

    Parameters
    ----------
    bits : 2, 3, 4 or 5
    codebook : "normal" or 2^bits numbers
        Ascending, in [-1, 1], rounded to float32; magnitudes below 2^-99 become 0. "normal" is
        `normal_float_codebook(bits)`.
    scale : "absmax" or "decoded"
        What weights are divided by before the nearest entry is looked up: the block's largest magnitude, or
        that number as it is stored, which loses less.
    absmax : "e4m4" or "float16"
        How it is stored. E4M4 takes weights of magnitudes up to 31.5, and blocks at or below 2^-15 read as 0;
        float16 takes up to 65504, and has smaller rounding errors for a byte more.

    Raises
    ------
    TypeError, ValueError
        An argument is none of these.
    """

    def __init__(
        self,
        bits: int,
        codebook: Literal["normal"] | ArrayLike = "normal",
        scale: Literal["absmax", "decoded"] = "absmax",
        absmax: Literal["e4m4", "float16"] = "e4m4",
    ) -> None:
        self.bits = check.one_of(bits, "bits", BITS)
        self.scale = check.choice(scale, "scale", ("absmax", "decoded"))
        self.absmax = check.choice(absmax, "absmax", ("e4m4", "float16"))
        self._own = None if isinstance(codebook, str) and codebook == "normal" else self._checked(codebook)
        self.storage = np.dtype(
            [("planes", "<u4", (self.bits,)), ("absmax", "u1" if self.absmax == "e4m4" else "<f2")]
        )
        if self.absmax == "e4m4":
            self.largest = e4m4.LARGEST
            self.beyond = 'use cuquant.KBit(..., absmax="float16")'
        parts = [f"kbit{self.bits}"]
        parts += [] if self._own is None else [f"{zlib.crc32(self._own.tobytes()):08x}"]
        parts += [given for given in (self.scale, self.absmax) if given not in ("absmax", "e4m4")]
        self.name = "-".join(parts)

    scales = ("absmax",)
    formula = "W = codebook[q] * absmax"
    ragged_vectors = True

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        header, coding, masked, own = f"kbit{self.bits}", Coding.CODEBOOK, None, self._own
        scaling = Scaling.E4M4 if self.absmax == "e4m4" else Scaling.HALF
        if self.bits == 2 and scaling is Scaling.E4M4 and (masked := _masked(self.codebook)):
            header, coding = "kbit2_masked", Coding.MASKED_CODEBOOK
        elif self.bits == 5 and (own is None or np.array_equal(own[:16], -own[:15:-1])):
            header, coding = "kbit5_signed", Coding.SIGNED_CODEBOOK  # whose table is small
        encoder = Encoder(divides_by_stored=self.scale == "decoded")
        return Kernels(header, coding, scaling, encoder=encoder, masked=masked)

    @property
    def codebook(self) -> NDArray[np.float32]:  # type: ignore[override]
        """float32 [2^bits], ascending, read-only."""
        return normal_float_codebook(self.bits) if self._own is None else self._own

    @cached_property
    def thresholds(self) -> NDArray[np.float32]:  # type: ignore[override]
        """float32 [2^bits - 1]: the means of neighbouring entries, rounded down, small ones to 0 as entries.

        Rounded down, since then a float32 is above the threshold just where it is above the mean.
        """
        exact = [Fraction(float(c)) for c in self.codebook]
        return _frozen(_flushed(np.array([_rounded_down((a + b) / 2) for a, b in pairwise(exact)])))

    @property
    def fine_from(self) -> int:
        """Least scale that is fine: less where entries are chosen for the scale as it is stored, which makes
        up for its rounding."""
        return max(1, self.bits - 3) if self.scale == "decoded" else super().fine_from

    def coarse_scales(self, blocks: Any) -> Any:
        if self.absmax == "float16":
            return super().coarse_scales(blocks)
        return blocks.reshape(*blocks.shape[:-1], -1, self.block_bytes)[..., -1] < self.fine_from

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        peak = np.abs(x).max(axis=1)
        stored = e4m4.codes(peak) if self.absmax == "e4m4" else peak.astype(np.float16)
        divisor = peak if self.scale == "absmax" else self._numbers(stored)
        v = _flushed(x / np.maximum(divisor, _LEAST_DIVISOR)[:, None])
        records = np.empty(len(x), self.storage)
        records["planes"] = _to_planes(np.searchsorted(self.thresholds, v).astype(np.uint8), self.bits)
        records["absmax"] = stored
        return records

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        return self.codebook.take(_from_planes(records["planes"])) * self._numbers(records["absmax"])[:, None]

    def _numbers(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        return e4m4.values(stored) if self.absmax == "e4m4" else stored.astype(np.float32)

    def _checked(self, codebook: ArrayLike) -> NDArray[np.float32] | None:
        """The codebook in float32; None for the normal one, so that equal formats have equal names."""
        own = _frozen(_flushed(check.codebook(codebook, 1 << self.bits)))
        return None if np.array_equal(own, normal_float_codebook(self.bits)) else own

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KBit):
            return super().__eq__(other)
        same = self._own is other._own or np.array_equal(self.codebook, other.codebook)
        return same and self.name == other.name

    __hash__ = Format.__hash__

    def __repr__(self) -> str:
        codebook = "" if self._own is None else f", codebook={self._own.tolist()}"
        scale = "" if self.scale == "absmax" else f", scale={self.scale!r}"
        absmax = "" if self.absmax == "e4m4" else f", absmax={self.absmax!r}"
        return f"KBit({self.bits}{codebook}{scale}{absmax})"

    def __reduce__(self) -> tuple[Any, ...]:
        return KBit, (self.bits, "normal" if self._own is None else self._own, self.scale, self.absmax)


_CLOSE = 2.0**-11
"""How near to their own numbers those must be that masks make, of the larger magnitude; of the smaller, which
counts less, half as near. Rounding to float16 is up to 2^-11 off."""


def _masked(codebook: NDArray[np.float32]) -> MaskedValues | None:
    """-b, -a, a and b in the units of kernels/core/masked.cuh: a is about c, and b about 1024 + c, for one
    integer c. The unit is that of the least sum of squared errors."""
    a, b = codebook[2:].astype(np.float64)
    if not (np.array_equal(codebook[:2], -codebook[:1:-1]) and 0 < a < b / 2):
        return None
    c = round(1024 * a / (b - a))
    unit = (a * c + b * (1024 + c)) / (a * a + b * b)
    if c > 1023 or abs(c / unit - a) > 2 * _CLOSE * a or abs((1024 + c) / unit - b) > _CLOSE * b:
        return None
    halves = np.array([0x8400 | c, 0x8000 | c, c, 0x400 | c], np.uint16).view(np.float16)
    return MaskedValues(halves, unit)


def _to_planes(q: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Indices [n, 32] -> little-endian words [n, bits]: bit j of word p is bit p of index j."""
    planes = (q[:, None] >> np.arange(bits, dtype=np.uint8)[:, None]) & np.uint8(1)
    return np.packbits(planes, axis=2, bitorder="little").view("<u4")[..., 0]


def _from_planes(planes: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Little-endian words [n, bits] -> indices [n, 32] (see _to_planes)."""
    count, bits = planes.shape
    flat = np.unpackbits(np.ascontiguousarray(planes).view(np.uint8), axis=1, bitorder="little")
    one = flat.reshape(count, bits, 32)
    indices = one[:, -1].copy()
    for plane in range(
        bits - 2, -1, -1
    ):  # in place: all planes' shifted bits at once take four times as long
        indices <<= 1
        indices |= one[:, plane]
    return indices


def _flushed(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.abs(x) < NEGLIGIBLE, np.float32(0), x)


def _frozen(x: NDArray[np.float32]) -> NDArray[np.float32]:
    x.flags.writeable = False
    return x


def _rounded_down(x: Fraction) -> np.float32:
    """The largest float32 that is not above x."""
    nearest = np.float32(float(x))
    return np.nextafter(nearest, np.float32(-np.inf)) if Fraction(float(nearest)) > x else nearest


for _bits in BITS:
    register(KBit(_bits))
