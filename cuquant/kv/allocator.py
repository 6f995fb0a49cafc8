"""Which bit width each token gets: the least expected error at an average width, and stable."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


def allocate(
    importance: NDArray[np.floating[Any]],
    held: NDArray[np.integer[Any]],
    slots: NDArray[np.integer[Any]],
    rooms: dict[int, int],
    average_bits: float,
    hysteresis: float,
) -> NDArray[np.int64]:
    """Bit widths [T] of the tokens of a sequence.

    The error of b-bit codes falls as 4^-b. A step from a width b to the next, c, is worth
    importance * (4^-b - 4^-c) / (c - b) per bit; the most valuable steps of all tokens are taken until the
    average is reached. As a token's first steps are always worth more than its later ones, this is the least
    sum of importance * error. Of equal steps lower widths go first, then newer tokens.

    Parameters
    ----------
    importance : float [T]
        Not negative.
    held : int [T]
        The widths that the tokens have now.
    slots : int [T]
        Their positions.
    rooms : {bits: int}
        How many tokens each width takes. It comes before the average: a width's least important tokens too
        many go below, the lowest one's most important above.
    average_bits : float
        The result's mean is at most this, and within a step of it.
    hysteresis : float
        Steps that a token has already taken are worth 1 + hysteresis times as much: it moves only when
        importances have changed by more than that.
    """
    widths = np.array(sorted(rooms))
    cost = np.diff(widths)
    gain = (4.0 ** -widths[:-1] - 4.0 ** -widths[1:]) / cost
    taken_before = held[:, None] >= widths[1:]
    value = importance[:, None].astype(np.float64) * gain * np.where(taken_before, 1 + hysteresis, 1.0)
    step = np.broadcast_to(np.arange(len(cost)), value.shape)
    newest = np.broadcast_to(-slots.astype(np.int64)[:, None], value.shape)
    order = np.lexsort((newest.ravel(), step.ravel(), -value.ravel()))
    budget = np.floor((average_bits - widths[0]) * len(held) + 1e-6)  # 0.4 * 30 is a little below 12
    taken = order[np.cumsum(cost[step.ravel()[order]]) <= budget]
    level = np.bincount(taken // max(len(cost), 1), minlength=len(held))
    return _fitted(widths[level], np.lexsort((slots, importance)), rooms)


def _fitted(bits: NDArray[np.int64], ascending: NDArray[np.intp], rooms: dict[int, int]) -> NDArray[np.int64]:
    """Widths whose counts are within the rooms; `ascending` are the tokens from the least important one."""
    down = sorted(rooms, reverse=True)
    moves: list[tuple[Sequence[int], NDArray[np.intp]]] = [(down, ascending), (down[::-1], ascending[::-1])]
    for widths, order in moves:
        for width, following in pairwise(widths):
            here = order[bits[order] == width]
            bits[here[: max(0, len(here) - rooms[width])]] = following
    return bits
