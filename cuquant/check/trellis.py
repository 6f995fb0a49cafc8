"""Grids, signs and parts of trellis weights, and sides of EXL3's, which are turned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .. import device
from .common import FLOATS, array, numbers, on_cpu, one_of, typed
from .formats import new_floats

if TYPE_CHECKING:
    from ..formats import Format


def grid(value: Any, most: int) -> Any:
    """1 to `most` finite numbers, as a new float32 array."""
    result = new_floats(value, "grid", "numbers")
    if result.ndim != 1 or not 1 <= result.size <= most:
        raise ValueError(f"grid has shape {result.shape}; 1 to {most} numbers are needed")
    if not np.isfinite(result).all():
        raise ValueError(f"grid holds {result[~np.isfinite(result)][0]}; its numbers must be finite")
    return result


def require_trellis_scales(scales: Any, fmt: Format) -> None:
    """No scale of quantized weights is beyond float32, as with tiny grids."""
    if not np.isfinite(scales).all():
        raise ValueError(
            f"{fmt}: a scale overflows float32: the weights are too large for this grid; "
            "pass one of larger numbers"
        )


def wrong_signs(**arrays: Any) -> list[tuple[str, Any]]:
    """Names of arrays with an element that is neither +1 nor -1, and the first such element."""
    bad = {name: a[np.abs(a.astype(np.float32)) != 1] for name, a in arrays.items()}
    return [(name, elements[0]) for name, elements in bad.items() if elements.size]


def require_same_signs(su: Any) -> None:
    """Matrices whose signs along K, su [n, K], are one: rows of theirs can be put into one matrix."""
    if (su != su[0]).any():
        raise IndexError(
            "rows of several trellis matrices whose su differ cannot be one matrix: dequantize, then index"
        )


def require_hadamard_sides(shape: tuple[int, ...], side: int) -> None:
    """A weight (..., N, K) whose sides are multiples of that of a Hadamard matrix."""
    if len(shape) < 2 or shape[-2] % side or shape[-1] % side:
        raise ValueError(
            f"EXL3 weights are turned {side} by {side}: (..., N, K) of multiples of {side}, not {shape}"
        )


def runs_of_rows(rows: Any, run: int, fmt: Format) -> Any:
    """The first of every run of rows (..., n), which are made so many at a time."""
    if rows.ndim and rows.shape[-1] % run == 0:
        runs = rows.reshape(*rows.shape[:-1], rows.shape[-1] // run, run)
        firsts = runs[..., 0]
        if (firsts % run == 0).all() and (runs == firsts[..., None] + np.arange(run)).all():
            return firsts
    raise IndexError(
        f"rows of {fmt} are made {run} at a time: select whole runs of {run}, or dequantize, then index"
    )


def require_same_sides(suh: Any, fmt: Format) -> None:
    """Matrices whose factors of columns, suh [n, K], are one: rows of theirs can be put into one matrix."""
    if (suh.view(np.int16) != suh[0].view(np.int16)).any():
        raise IndexError(
            f"rows of several {fmt} matrices whose suh differ cannot be one: dequantize, then index"
        )


def trellis_parts(
    packed: Any, scales: Any, su: Any, sv: Any, shape: tuple[int, ...], groups: tuple[int, ...], given: Any
) -> tuple[Any, Any, Any, Any, int, int]:
    """The arrays of a trellis weight (..., N, K) as NumPy's, bits of its indices, and the group size.

    That is the one given, or the first of `groups` that fits the shape of scales.
    """
    packed, scales = typed(packed, "packed", np.uint8), typed(scales, "scales", np.float32)
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(f"shape is {shape}; a trellis weight is (..., N, K), with N and K from 1 on")
    *lead, n, k = shape
    tiles = (*lead, -(-k // 16), -(-n // 16))
    if packed.shape[:-1] != tiles or packed.shape[-1] not in (64, 96, 128):
        raise ValueError(
            f"packed has shape {packed.shape}; a weight {shape} has {tiles} tiles of 64, 96 or 128 bytes "
            "(2, 3 or 4 bits)"
        )
    sizes = groups if given is None else (one_of(given, "group_size", groups),)
    fits = [size for size in sizes if scales.shape == (*lead, -(-k // size), n)]
    if not fits:
        wanted = " or ".join(f"{(*lead, -(-k // size), n)} for groups of {size}" for size in sizes)
        raise ValueError(f"scales has shape {scales.shape}; {wanted} is needed")
    su, sv = signs(su, "su", (*lead, k)), signs(sv, "sv", (*lead, n))
    if not np.isfinite(scales).all():
        raise ValueError(f"scales holds {scales[~np.isfinite(scales)][0]}; scales must be finite")
    return packed, scales, su, sv, packed.shape[-1] // 32, fits[0]


def importance_of_inputs(value: Any, k: int) -> Any:
    """Importance of k inputs, as `moments`, but not all 0."""
    result = moments(value, k, "importance")
    if not result.any():
        raise ValueError("importance must be above 0 somewhere, in float32")
    return result


def moments(value: Any, k: int, what: str = "moments") -> Any:
    """Second moments of k inputs in float32 on the host, or None."""
    if value is None:
        return None
    given = device.as_numpy(numbers(value, what))
    if given.shape != (k,):
        raise ValueError(f"{what} has shape {given.shape}; one for each of K = {k} inputs is needed")
    with np.errstate(over="ignore", under="ignore"):
        result = given.astype(np.float32)
    if not (np.isfinite(result) & (result >= 0)).all():
        raise ValueError(f"{what} must be not negative, and finite in float32")
    return result


def signs(value: Any, what: str, shape: tuple[int, ...]) -> Any:
    """+1 and -1 as NumPy's int8."""
    result = on_cpu(array(value, what, "+1 and -1"), what)
    if result.dtype.kind not in "iuf" and result.dtype not in FLOATS:
        raise TypeError(f"{what} has dtype {result.dtype}; +1 and -1 are integers or floats")
    if result.shape != shape:
        raise ValueError(f"{what} has shape {result.shape}; {shape} is needed")
    for _, bad in wrong_signs(**{what: result}):
        raise ValueError(f"{what} holds {bad}; signs are +1 and -1")
    return result.astype(np.int8)
