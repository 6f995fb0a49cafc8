"""What q4_0, q4_1, q5_0 and q5_1 share: by an importance scales are searched for, as k-quants' are.

Without one they follow from a block's largest weights. Errors count by the mean square of the row that a
weight is of, where those of k-quants count by their block's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import kquant
from .base import Format
from .kquant import Codes, F, Floats

SEARCH = kquant.SEARCH._replace(of_rows=True)


class ByImportance(Format):
    """A format whose `encode` searches where it is told weights of errors."""

    takes_importance = True

    def weights_of_errors(self, rows: Floats, importance: Floats) -> Floats:
        return kquant.spread_over_rows(rows, importance)


def around_zero(x: Floats, w: Floats, most: int) -> tuple[Floats, Codes]:
    """Scales [n], and codes [n, b] from 0 to 2 * most - 1, of blocks: x = scale * (q - most)."""
    scale, q = _by_parts(lambda x, w: kquant.symmetric(x, w, most), x, w)
    return scale, q


def above_minimum(x: Floats, w: Floats, most: int) -> tuple[Floats, Floats, Codes]:
    """Scales and minimums [n], and codes [n, b] up to `most`, of blocks: x = scale * q + minimum.

    A minimum of zero is +0: which zero is the least of both depends on the processor.
    """
    scale, below, q = _by_parts(lambda x, w: kquant.affine(x, w, most, -0.9, 0.05, 36), x, w)
    return scale, F(0) - below, q


def _by_parts(search: Callable[[Floats, Floats], tuple[Any, ...]], x: Floats, w: Floats) -> tuple[Any, ...]:
    """What a search finds of blocks [n, b], so many at a time as stay in a core's cache."""
    size = x.shape[1]
    step = kquant.PIECE // size
    parts = (slice(start, start + step) for start in range(0, len(x), step))
    found = [search(kquant.groups(x[part], size), kquant.groups(w[part], size)) for part in parts]
    *numbers, q = (np.concatenate(each, axis=-1) for each in zip(*found, strict=True))
    return *numbers, q.T
