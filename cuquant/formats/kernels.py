"""What kernels are told of a format: its header, what codes and scales are to them, and how a GPU keeps it.

A format that GPUs know has a `Kernels` beside what NumPy needs; all that plans and launches ask of a format
follows from it. The enumerations are those of kernels/core/types.cuh, by which a header says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .base import Format


class Coding(IntEnum):
    """What codes stand for (kernels/core/codec.cuh)."""

    INTEGERS = 0
    CODEBOOK = 1
    """Entries of `Format.codebook`, ascending: 2^bits numbers, in float16 times a power of two that puts the
    largest magnitude between 1/2 and 1."""
    SIGNED_CODEBOOK = 2
    """A codebook whose lower half is its upper half with signs, backwards: a bit is not looked up."""
    MASKED_CODEBOOK = 3
    """A codebook half of whose numbers are made by masks: `Kernels.masked`."""
    E2M1 = 4
    PROCEDURE = 5
    """Steps of a walk, of which numbers are computed (kernels/core/procedure.cuh)."""


class Scaling(IntEnum):
    """How scales are stored in the fragment layout (kernels/core/tile.cuh)."""

    UNSCALED = 0
    HALF = 1
    HALF_AND_MIN = 2
    HALF_AND_ZERO = 3
    E4M4 = 4
    E8M0 = 5
    E4M3 = 6
    SINGLE = 7
    BYTES = 8
    BYTES_AND_MIN = 9
    STEP_BYTES = 10
    STEP_NIBBLES_AND_MIN = 11

    @property
    def integers(self) -> bool:
        """Whether scales are integers, which float16 numbers of the group plane multiply."""
        return self >= Scaling.BYTES

    @property
    def minimums(self) -> bool:
        """Whether a minimum or a zero point is beside every scale."""
        return self.name.endswith(("_AND_MIN", "_AND_ZERO"))


_BYTES = {
    Scaling.UNSCALED: 0,
    Scaling.HALF: 2,
    Scaling.HALF_AND_MIN: 4,
    Scaling.HALF_AND_ZERO: 4,
    Scaling.E4M4: 1,
    Scaling.E8M0: 1,
    Scaling.E4M3: 2,
    Scaling.SINGLE: 4,
    Scaling.BYTES: 1,
    Scaling.BYTES_AND_MIN: 2,
    Scaling.STEP_BYTES: 2,
    Scaling.STEP_NIBBLES_AND_MIN: 2,
}
"""Bytes that 32 weights of a row have of scales, and of what is beside them."""
_OF_STEPS = (Scaling.E4M3, Scaling.STEP_BYTES, Scaling.STEP_NIBBLES_AND_MIN)
"""Scales of 16 weights."""


class Encoder(NamedTuple):
    """The kernel that quantizes arrays on a GPU."""

    op: str = "quantize"
    """Name of the kernel's file in kernels/ops, and of the kernel."""
    each: int = 16
    """Weights that each of its threads takes."""
    divides_by_stored: bool = False
    """Whether a codebook's divides weights by the stored scale, not by what it was made of."""
    of_rows: bool = False
    """Whether it is told mean squares of rows, by which errors of weights count, too."""


class MaskedValues(NamedTuple):
    """A codebook of two magnitudes with signs, in the units of kernels/core/masked.cuh."""

    halves: NDArray[np.float16]
    """The four values in float16, ascending."""
    unit: float
    """What 1 is, in units of 2^-24."""


def _unchanged(blocks: Any, xp: Any) -> Any:
    return blocks


class KeptAs(NamedTuple):
    """Another format, as which a GPU keeps weights of one, and how blocks become its own, and again what they
    were: arrays (..., row bytes), of the module that is the second argument."""

    format: Format
    to: Callable[[Any, Any], Any] = _unchanged
    back: Callable[[Any, Any], Any] = _unchanged


@dataclass(frozen=True, eq=False)
class Kernels:
    """What kernels are told of a format. Of one that is kept as another (`kept`) this is about the other."""

    header: str
    """Name of its file in kernels/formats."""
    coding: Coding
    scaling: Scaling
    group_size: int = 0
    """Weights of a row, a multiple of 64, that share numbers of the group plane: scales, or what scales that
    are integers are multiplied by. 0 where there is no such plane."""
    encoder: Encoder | None = None
    """What quantizes to it; arrays on a GPU are quantized by NumPy where there is none."""
    by_importance: Encoder | None = None
    """What does so by the importance of columns, where that is another one."""
    in_float16: bool = True
    """Whether float16 holds what codes stand for, and kernels multiply by them; other weights become float32
    numbers first."""
    masked: MaskedValues | None = None
    """What a masked codebook's numbers are to kernels."""
    kept: KeptAs | None = None

    def encoder_for(self, by_importance: bool) -> Encoder | None:
        """What quantizes to it, by the importance of columns or without."""
        return (by_importance and self.by_importance) or self.encoder

    @property
    def lookup(self) -> bool:
        """Whether codes are looked up in a codebook, or some of them; else they are taken by their bits."""
        return self.coding in (Coding.CODEBOOK, Coding.SIGNED_CODEBOOK, Coding.MASKED_CODEBOOK)

    @property
    def sign_bits(self) -> int:
        """Bits of a code that are not looked up."""
        return int(self.coding is Coding.SIGNED_CODEBOOK)

    @property
    def walks(self) -> bool:
        """Whether codes are steps of a walk."""
        return self.coding is Coding.PROCEDURE

    @property
    def turned(self) -> bool:
        """Whether x passes a Hadamard transform before a product, and sums pass one after it, which is of one
        matrix then."""
        return self.scaling is Scaling.UNSCALED

    @property
    def signed_columns(self) -> bool:
        """Whether columns of a matrix have signs, which products give to x or to W."""
        return self.scaling is Scaling.SINGLE

    @property
    def integer_scales(self) -> bool:
        return self.scaling.integers

    @property
    def has_minimum(self) -> bool:
        """Whether there is a minimum or a zero point beside every scale."""
        return self.scaling.minimums

    @property
    def has_zero_points(self) -> bool:
        return self.scaling is Scaling.HALF_AND_ZERO

    @property
    def scale_unit(self) -> float:
        """What a scale of 1 reads as when its bits are taken for a float16 number's."""
        return 2.0**-4 if self.scaling is Scaling.E4M4 else 1.0

    @property
    def _group_scales(self) -> bool:
        """Whether the group plane has the scales themselves, and tiles have none."""
        return self.group_size > 0 and not self.integer_scales

    @property
    def scale_columns(self) -> int:
        """Weights of a row that a scale is for."""
        return self.group_size if self._group_scales else 16 if self.scaling in _OF_STEPS else 32

    def scale_bytes(self, columns: int) -> int:
        """Bytes that so many columns of a row have in the plane of scales."""
        return 0 if self._group_scales else columns // 32 * _BYTES[self.scaling]

    @property
    def group_bytes(self) -> int:
        """Bytes that a row has for `group_size` columns in the group plane."""
        if self.integer_scales:
            return 4 if self.has_minimum else 2
        return _BYTES[self.scaling] if self._group_scales else 0

    def to_kept(self, blocks: Any, xp: Any) -> Any:
        """Blocks (..., row bytes) of the format in that as which it is kept; `xp` is their arrays' module."""
        return blocks if self.kept is None else self.kept.to(blocks, xp)

    def from_kept(self, blocks: Any, xp: Any) -> Any:
        """The inverse of `to_kept`."""
        return blocks if self.kept is None else self.kept.back(blocks, xp)


def kernels_of(fmt: Format) -> Kernels:
    """What kernels are told of a format. NotImplementedError for one that GPUs do not know."""
    if fmt.kernels is None or not fmt.on_gpu:
        raise NotImplementedError(f"{fmt} has no kernels yet: it works on NumPy arrays only")
    return fmt.kernels


def kept_as(kept: KeptAs) -> Kernels:
    """What kernels are told of a format that a GPU keeps as another."""
    return replace(kernels_of(kept.format), kept=kept)
