"""What trellis weights are quantized with: grids fitted to weights, and the best scale of every group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .kbit import normal_float_codebook

F32 = NDArray[np.float32]

_FIT_STEPS, _FIT_SEARCHES = 24, 4
"""Steps of fitting a grid; in every so many scales are searched anew, else refined."""
CANDIDATES = np.geomspace(0.15, 1.5, 20, dtype=np.float32)
"""Scales tried for a group, over the one at which the grid just covers its largest weight."""
_REFINEMENTS = 3


def fit(groups: F32, h: F32, bits: int, elsewhere: Callable[..., Any] | None = None) -> F32:
    """A grid of 2^bits levels, ascending, for groups [m, group_size] of importances h of that shape.

    `elsewhere` does what `nearest` does.
    """
    grid, count = normal_float_codebook(bits), 1 << bits
    peak = np.abs(groups).max(axis=1, initial=0.0)
    usable = (peak > 0) & np.isfinite(peak)  # what is not finite is refused later
    groups = groups[usable] / peak[usable].max(initial=0.0)
    h = h[usable]
    scales = None
    for step in range(_FIT_STEPS if len(groups) else 0):
        codes, scales = (elsewhere or nearest)(groups, h, grid, scales if step % _FIT_SEARCHES else None)
        importance = h * np.square(scales)[:, None]
        total = np.bincount(codes.reshape(-1), importance.reshape(-1), count)
        moment = np.bincount(codes.reshape(-1), (h * groups * scales[:, None]).reshape(-1), count)
        grid = np.sort(np.where(total > 0, moment / np.where(total > 0, total, 1), grid)).astype(np.float32)
        grid /= np.abs(grid).max()
    return grid


class Search(NamedTuple):
    """What scales and indices of groups are searched for with."""

    order: NDArray[np.int64]
    """Index of each of the levels, which are ascending."""
    levels: F32
    middles: F32
    """Means of neighbouring levels."""
    largest: np.float32
    """Magnitude of the largest level, by which they are divided."""
    candidates: F32
    """Scales to try, in units of a group's peak over the largest level."""


def search_of(grid: F32) -> Search:
    """The levels of a grid, and the scales to try: of both signs where it is not symmetric."""
    order = np.argsort(grid, kind="stable")
    largest = np.abs(grid).max() or np.float32(1)
    levels = (grid / largest)[order]
    both = not np.allclose(levels, -levels[::-1])
    candidates = np.concatenate([CANDIDATES, -CANDIDATES]) if both else CANDIDATES
    return Search(order, levels, (levels[1:] + levels[:-1]) / 2, largest, candidates)


def nearest(groups: F32, h: F32, grid: F32, start: F32 | None = None) -> tuple[NDArray[np.uint8], F32]:
    """Indices [m, group_size] and scales [m] that lose little of groups [m, group_size], by importances h.

    Scales are searched for, or refined from `start`.
    """
    order, levels, middles, largest, candidates = search_of(grid)
    peak = np.abs(groups).max(axis=1, initial=0.0)
    # In units of their largest weight, no square of a group over- or underflows.
    v = groups / np.where(peak > 0, peak, np.float32(1))[:, None]
    hv, g, products, above = h * v, np.empty_like(v), np.empty_like(v), np.empty(v.shape, np.bool_)

    def codes(scales: F32) -> NDArray[np.uint8]:
        usable = np.where(scales != 0, scales, np.float32(1))[:, None]
        np.divide(v, usable, out=products)
        q = np.zeros(v.shape, np.uint8)
        for middle in middles:  # searchsorted takes ten times as long
            np.add(q, np.greater(products, middle, out=above).view(np.uint8), out=q)
        return q

    def solved(q: NDArray[np.uint8]) -> tuple[F32, F32]:
        """Least squares scales of those indices, and how much of the groups' power each explains."""
        np.take(levels, q, out=g, mode="wrap")  # all are there, and this mode looks for none that is not
        cross = np.multiply(hv, g, out=products).sum(axis=1)
        np.multiply(h, g, out=products)
        power = np.multiply(products, g, out=products).sum(axis=1)
        scales = np.divide(cross, power, out=np.zeros_like(cross), where=power > 0)
        return scales, scales * cross

    with np.errstate(over="ignore"):
        unit = peak / largest
    best, gain = np.zeros(len(v), np.float32), np.full(len(v), -1, np.float32)
    tried: list[Any] = [*candidates]
    if start is not None:
        tried = [np.divide(start, unit, out=np.zeros_like(unit), where=unit > 0)]
    for scale in (*tried, *(None,) * _REFINEMENTS):
        scales, explained = solved(codes(best if scale is None else np.broadcast_to(scale, best.shape)))
        better = explained > gain
        best, gain = np.where(better, scales, best), np.where(better, explained, gain)
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float32 with tiny grids: the caller refuses
        return order.astype(np.uint8)[codes(best)], best * unit
