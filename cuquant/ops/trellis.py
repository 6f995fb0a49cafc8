"""Trellis weights: from and to their separate arrays, and quantizing with all that can be chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import check, cpu, device, formats
from ..array import QuantizedArray
from ..debug import shown
from ..formats import Format
from ..formats.base import sides
from ..formats.trellis import GROUP_SIZES, Parts, Trellis, random_signs


@shown
def trellis_from_parts(
    packed: Any,
    scales: Any,
    grid: Any,
    su: Any,
    sv: Any,
    shape: tuple[int, ...],
    group_size: int | None = None,
) -> QuantizedArray:
    """A weight of the format `Trellis` from its separate arrays: W[n, k] = grid[q] * scale * su[k] * sv[n].

    Parameters
    ----------
    packed : NumPy array of uint8, shape (..., ceil(K / 16), ceil(N / 16), 32 * bits)
        Indices q of 2, 3 or 4 bits in 16 x 16 tiles, row-major: that of (k, n) is at bit
        bits * (16 * (k % 16) + n % 16) of its tile, from the least significant bit of byte 0 on. What lies
        beyond N and K is not read; an index beyond the grid reads as index 0.
    scales : NumPy array of float32, shape (..., ceil(K / group_size), N)
        Of (k, n): scales[k // group_size, n].
    grid : 1 to 2^bits finite numbers
    su, sv : NumPy arrays of +1 and -1, any type, shapes (..., K) and (..., N)
    shape : tuple of int
        (..., N, K), of any lengths from 1 on.
    group_size : 32 or 128, optional
        By default what the shape of scales says; 32 for K up to 32.

    Returns
    -------
    QuantizedArray of `shape`, of the format Trellis(bits, group_size, grid); the arrays are copied.

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; a scale or the grid is not finite, a sign not +1 or -1.
    """
    shape = check.shape(shape)
    packed, scales, su, sv, bits, size = check.trellis_parts(
        packed, scales, su, sv, shape, GROUP_SIZES, group_size
    )
    fmt = Trellis(bits, size, grid)
    blocks = np.zeros(fmt.stored(shape), np.uint8)
    for field, given in zip(fmt.parts(blocks, shape), (packed, scales, su, sv), strict=True):
        field[...] = given
    return QuantizedArray._made(fmt, blocks, shape=shape)


def trellis_parts(w: QuantizedArray) -> tuple[Any, Any, Any, Any, Any]:
    """Packed indices, scales, grid, su and sv of a trellis weight: copies of what `trellis_from_parts` takes.

    Parameters
    ----------
    w : QuantizedArray of a format `Trellis`, of NumPy, shape (..., N, K)

    Returns
    -------
    packed : uint8 (..., ceil(K / 16), ceil(N / 16), 32 * bits)
    scales : float32 (..., ceil(K / group_size), N)
    grid : float32 (n_levels,)
    su, sv : float32 (..., K) and (..., N)

    Raises
    ------
    TypeError
        w is no such array.
    """
    fmt = check.format_of(w, Trellis)
    parts: Parts = fmt.parts(w.blocks, w.shape)
    signs = (a.astype(np.float32) for a in (parts.su, parts.sv))
    return parts.packed.copy(), parts.scales.copy(), fmt.grid.copy(), *signs


@shown
def trellis_quantize(
    w: Any,
    format: str | Format = "trellis3",
    *,
    moments: Any = None,
    su: Any = None,
    sv: Any = None,
    seed: int = 0,
) -> QuantizedArray:
    """Quantize a weight to a trellis format, with importances of its inputs and signs of one's own.

    Parameters
    ----------
    w : NumPy or CuPy array (..., N, K) of float32, float16 or bfloat16
    format : "trellis2", "trellis3", "trellis4", the same with "-32", or a `Trellis`
    moments : array of numbers (K,), optional
        Mean squares of the inputs, over calibration data: the error of column k counts as much. By default
        all columns count the same. A CuPy array is read by the host.
    su, sv : arrays of +1 and -1, (K,) and (N,), optional
        By default drawn with the seed; su is then the same for all weights of K inputs.
    seed : int

    Returns
    -------
    QuantizedArray of w's shape, where w lives; ``cuquant.quantize(w, format, moments)`` is this with the
    signs of seed 0.

    Raises
    ------
    TypeError, ValueError
        As `cuquant.quantize`; or the format is another, or moments or signs do not fit.
    """
    fmt = check.of_kind(formats.get(format), Trellis)
    w = check.floats(w, "w")
    check.whole_blocks(w.shape, fmt, "w")
    n, k = sides(w.shape)
    moments = check.moments(moments, k)
    drawn = random_signs(n, k, check.count(seed, "seed", 0))
    su = drawn[0] if su is None else check.signs(su, "su", (k,))
    sv = drawn[1] if sv is None else check.signs(sv, "sv", (n,))
    return quantized(w, fmt, moments, (su, sv))


def by_importance(x: Any, format: Format, importance: Any) -> QuantizedArray:
    """Checked floats (..., N, K) in a trellis format by an importance of columns: see `quantize`."""
    fmt, (n, k) = check.of_kind(format, Trellis), sides(x.shape)
    return quantized(x, fmt, check.importance_of_inputs(importance, k), random_signs(n, k))


def quantized(w: Any, fmt: Trellis, moments: Any, signs: tuple[Any, Any]) -> QuantizedArray:
    """Floats (..., N, K) in that format, with a grid of their own if it has none, by moments, float32 [K] or
    None, and signs su [K] and sv [N]."""
    if fmt.grid is None:
        fmt = fmt.with_grid_for(w, moments)
    on_gpu = device.is_cuda(w)
    if on_gpu and fmt.encodes_on_gpu:
        from ..cuda import trellis as cuda_trellis

        return QuantizedArray._made(fmt, cuda_trellis.quantize(w, fmt, signs, moments), shape=w.shape)
    blocks = cpu.quantize_matrices(device.as_numpy(w), fmt, lambda x: fmt.encode_with(x, *signs, moments))
    return QuantizedArray._made(fmt, device.cupy().asarray(blocks) if on_gpu else blocks, shape=w.shape)
