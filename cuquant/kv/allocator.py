"""Which bit width each token gets: the least expected error for the bits that it takes, and stable."""

from __future__ import annotations

from itertools import accumulate
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
    next one would exceed the average. As a token's first steps are always worth more than its later ones, no
    widths that take as few bits as the result have a smaller sum of importance * error. Those that use what
    is left of the average, which is less than that next step takes, may have one: smaller by less than the
    step would save. Cheaper steps that still fit are not taken: few tokens would gain by it, and the result
    would no longer be the best of its size. (A step into a full width goes together with those that make room
    for it, as one, worth their mean. If only some of them fit these are taken: then even widths of the same
    size may be better, by less than all of them would save.) Of equal steps lower widths go first, then newer
    tokens.

    Parameters
    ----------
    importance : float [T]
        Not negative.
    held : int [T]
        The widths that the tokens have now.
    slots : int [T]
        Their positions.
    rooms : {bits: int}
        How many tokens each width takes. It comes before the average: tokens that the lowest width has no
        room for, the most important ones, are wider in any case.
    average_bits : float
        The result's mean is at most this, and less than a step of one token below it, as far as there is
        room.
    hysteresis : float
        Steps that a token has already taken are worth 1 + hysteresis times as much: it moves only when
        importances have changed by more than that.
    """
    widths = np.array(sorted(rooms))
    cost = np.diff(widths)
    gain = (4.0 ** -widths[:-1] - 4.0 ** -widths[1:]) / cost
    weight = importance.astype(np.float64) * np.where(held >= widths[1:, None], 1 + hysteresis, 1.0)
    value = -np.sort(-weight * gain[:, None], axis=1)
    budget = np.floor((average_bits - widths[0]) * len(held) + 1e-6)  # 0.4 * 30 is a little below 12
    counts = _counts(value, cost, [min(rooms[b], len(held)) for b in widths.tolist()], budget)
    bits, chosen = np.full(len(held), widths[0]), np.arange(len(held))
    for width, count, own in zip(widths[1:], counts, weight, strict=True):
        chosen = chosen[np.lexsort((-slots[chosen].astype(np.int64), -own[chosen]))[:count]]
        bits[chosen] = width
    return bits


def _counts(
    value: NDArray[np.float64], cost: NDArray[np.int64], rooms: list[int], budget: float
) -> NDArray[np.int64]:
    """How many tokens take each step. `value` [steps, T] is what it is worth for them, falling.

    Where a width has room for r, the j-th token to reach it waits until the (j - r)-th has taken the next
    step, and that one for another: a chain, of one from each width. What is worth more than what it waits for
    is taken together with that, at their mean.
    """
    steps, n = value.shape
    first = np.array([*accumulate(rooms[1:-1], initial=0)][:steps], np.int64)[:, None]
    waits = min(rooms[1:-1], default=n) < n  # else chains are of one token each
    chains = np.arange(n + first.max(initial=0)) if waits else np.arange(n) + first
    place = chains - first  # in `value`
    worth = np.take_along_axis(value, place.clip(0, n - 1), axis=1)
    worth[place >= n], worth[place < 0] = 0, np.inf  # no such token: none is missed, and none waited for
    worth[:1, : n - rooms[0]] = np.inf  # must
    worth[-1:][place[-1:] >= rooms[-1]] = -np.inf  # must not
    if waits:
        worth = _pooled(worth, cost)
    known = (place >= 0) & (place < n) & (worth > -np.inf)
    step, chain, worth = np.nonzero(known)[0], np.broadcast_to(chains, place.shape)[known], worth[known]
    order = np.lexsort((-step, chain, -worth))
    step = step[order]
    taken = (np.cumsum(cost[step]) <= budget) | (worth[order] == np.inf)
    return np.bincount(step[taken], minlength=steps)


def _pooled(worth: NDArray[np.float64], cost: NDArray[np.int64]) -> NDArray[np.float64]:
    """Isotonic regression of columns, weighted by cost: entries that fall become the mean of both."""
    rows, pooled = range(len(cost)), np.empty_like(worth)
    mean = {
        (i, j): np.average(worth[i : j + 1], axis=0, weights=cost[i : j + 1]) for i in rows for j in rows[i:]
    }
    for k in rows:
        least = [np.min([mean[i, j] for j in rows[k:]], axis=0) for i in rows[: k + 1]]
        pooled[k] = np.max(least, axis=0)
    return pooled
