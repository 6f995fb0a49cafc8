"""How many numbers of a kind floats have: by their bits, as NumPy compares float16 numbers one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import cpu

_AT_ONCE = 1 << 17
"""Numbers that are looked at together: what is made of them stays in a core's own cache."""


def not_finite(x: NDArray[Any]) -> int:
    """How many are NaN or infinite."""
    infinite = _bits(np.array(np.inf, x.dtype))
    return sum(int(np.count_nonzero(part >= infinite)) for part in _magnitudes(x))


def below(x: NDArray[Any], least: float) -> int:
    """How many have a smaller magnitude than a number of their type."""
    bits = _bits(np.array(least, x.dtype))
    return sum(int(np.count_nonzero(part < bits)) for part in _magnitudes(x))


def _magnitudes(x: NDArray[Any]) -> Iterator[NDArray[np.unsignedinteger[Any]]]:
    """Bits of magnitudes, in whose order these are."""
    bits = _bits(x)
    but_signs = np.array(np.iinfo(bits.dtype).max >> 1, bits.dtype)
    return (bits[part] & but_signs for part in cpu.slabs(len(bits), 1, _AT_ONCE))


def _bits(x: NDArray[Any]) -> NDArray[np.unsignedinteger[Any]]:
    return np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")
