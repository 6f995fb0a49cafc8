"""Quantized arrays that are to be one: of one format, on one device, alike in all axes but one."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from .common import a_or_an, is_quantized, is_transposed, require_one_device


def joined(arrays: Any, axis: Any, name: str, *, new: bool) -> tuple[list[Any], int]:
    """The arrays, and the axis along which they are joined, or which is new: any but the last, whose weights
    are packed, and none of the two of matrices that are stored whole."""
    if not isinstance(arrays, Iterable) or not (given := list(arrays)):
        raise TypeError(f"{name} takes a sequence of quantized arrays, not {a_or_an(arrays)}")
    for number, w in enumerate(given):
        if not is_quantized(w):
            kind = "a transpose, of which .T is the array" if is_transposed(w) else a_or_an(w)
            raise TypeError(
                f"{name}: number {number} is {kind}, and quantized arrays hold packed blocks, not numbers: "
                "call .dequantize() for these"
            )
    first, *others = given
    ndim = first.ndim + new
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TypeError(f"{name}: axis is {a_or_an(axis)}; an integer is needed") from None
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name}: axis {axis} is out of range for arrays of {first.ndim} axes")
    axis %= ndim
    packed = 2 if first.format.whole_matrices else 1
    if axis >= ndim - packed:
        what = "matrices are stored whole" if packed == 2 else "the last axis is packed in blocks"
        rows = packed == 2 and not new and axis == ndim - 2
        raise ValueError(
            f"{name}: arrays of {first.format} cannot be joined along axis {axis}, as {what}"
            + (_rows_apart(first.format) if rows else "")
        )
    for number, w in enumerate(others, 1):
        if not is_same_format(first.format, w.format):
            raise ValueError(
                f"{name} takes arrays of one format; number {number} is {w.format}, the first {first.format}"
                + _difference(first.format, w.format)
            )
    require_one_device(**{f"number {number}": w.storage for number, w in enumerate(given)})
    for number, w in enumerate(others, 1):
        shapes = [tuple(n for i, n in enumerate(v.shape) if new or i != axis) for v in (first, w)]
        if shapes[0] != shapes[1]:
            besides = "" if new else f" in all axes but {axis}"
            raise ValueError(
                f"{name} takes arrays of one shape{besides}; number {number} is {w.shape}, "
                f"the first {first.shape}"
            )
    for w in given:
        w._may_make_blocks()
    return given, axis


def _rows_apart(fmt: Any) -> str:
    """Why rows of several matrices that are stored whole are not put into one, and what to do."""
    again = "" if fmt.read_only else ", or quantize the joined floats"
    return (
        f", in tiles, with signs or factors of rows and columns: multiply by each, and join products{again}"
    )


def _difference(first: Any, other: Any) -> str:
    """How two formats differ that are alike else, and how weights get the same one."""
    alike = type(other) is type(first) and (other.bits, other.block_bytes) == (first.bits, first.block_bytes)
    if alike and first.of_each:
        return f", but {first.of_each}"
    return ", with other parameters" if str(other) == str(first) else ""


def is_same_format(one: Any, other: Any) -> bool:
    """Whether bytes mean the same: formats of one name may have codebooks, grids or scales of their own."""
    from ..formats import describe

    return one is other or (one == other and bool(describe(one) == describe(other)))
