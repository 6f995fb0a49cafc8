"""What a mixture of experts is planned by: its operands, and the memory between its launches."""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from .. import check, plan
from ..formats import get
from ..formats.kernels import kernels_of
from ..plan.moe import GroupedGemm, Load
from . import jit, problem
from .fragments import Fragments
from .templates import Place

WORKSPACE = 1 << 30
"""Bytes between the launches that more tokens than one may fill; more tokens take several rounds."""
SCRATCH, X, FACTORS, IDS, PROBS, OUT, FLAGS = range(7)
"""Pieces of memory: the stream's scratch, rows of x (or its blocks) and their factors, and the others; the
stream's flags."""

Address = Place | int
"""A place in a piece of memory, or an address that stays: 0 of what lies nowhere."""


class PlacedRows(NamedTuple):
    """Rows of activations: where they start, whether on 16 bytes, number of the dtype and its bytes, strides
    in elements, where their factors start or 0."""

    start: Place
    aligned: bool
    dtype: int
    size: int
    row: int
    column: int
    factors: Address

    def skip(self, rows: int) -> PlacedRows:
        factors = self.factors.behind(4 * rows) if isinstance(self.factors, Place) else 0
        return self._replace(start=self.start.behind(rows * self.row * self.size), factors=factors)

    @property
    def halves(self) -> bool:
        """Whether products can read the rows as they are."""
        half = self.dtype == problem.DTYPES[check.FLOAT16]
        return half and self.aligned and self.row % 8 == 0 and self.column == 1


def half_rows(start: Place, k: int, factors: Address) -> PlacedRows:
    """Rows of float16 as kernels make them."""
    return PlacedRows(start, True, problem.DTYPES[check.FLOAT16], 2, k, 1, factors)


class Given(NamedTuple):
    """Operands of a mixture, but for the weights: where they start is known when it is called."""

    tokens: int
    top_k: int
    x: PlacedRows | None
    """Rows of x; None for q8_1 blocks, of which rows have to be made."""
    wide: bool
    """Whether ids are of 8 bytes, not 4."""
    probs: np.dtype[Any]
    out: tuple[np.dtype[Any], int, int]
    """Dtype of the result, and its strides in elements."""


class Arrays:
    """Where arrays between the launches lie in the scratch memory, by the names that they are given: one
    after the other."""

    def __init__(self) -> None:
        self.size = 0
        self.at: dict[str, Place] = {}

    def add(self, name: str, nbytes: int) -> None:
        self.at[name] = Place(SCRATCH, self.size)
        self.size += ceil(nbytes / 256) * 256


Products = tuple[GroupedGemm | None, GroupedGemm, GroupedGemm, GroupedGemm]
"""Products with gate and up together or None, with each on its own, and with down."""


class Mixture(NamedTuple):
    """Prepared weights, and what is done between them."""

    gate: Fragments
    up: Fragments
    down: Fragments
    activation: str | None
    blocks: bool
    """Whether what `down` multiplies is quantized to q8_1, as x is."""

    @property
    def turns(self) -> bool:
        """Whether rows and sums are turned around products, as EXL3 weights want it; of all three or none."""
        return kernels_of(self.gate.fmt).turned

    def alike(self) -> bool:
        """Whether one launch can multiply by gate and up."""
        if self.turns:  # by sides of its own
            return False
        a, b = self.gate, self.up
        same = a.weight.unscaled == b.weight.unscaled and a.signs == b.signs
        return same and (a.values == b.values or plan.cores.tables(a.weight.format, 2) == 2)

    def products(self, load: Load) -> Products:
        """The products with gate and up together or None, then with each on its own, and with down."""
        gpu, (_, width, k) = jit.gpu(), self.gate.shape
        both = None
        if self.alike():
            own = self.gate.weight
            both = plan.moe.gate_and_up(own.format, load, width, k, gpu, own.half)
        singles = (_single(w, load, gpu) for w in (self.gate, self.up, self.down))
        return (both, *singles)  # type: ignore[return-value]

    def levels(self, both: GroupedGemm | None) -> bool:
        """Whether gate and up together make float16 numbers in levels."""
        return both is not None and both.levels and not self.blocks


def _single(w: Fragments, load: Load, gpu: plan.Gpu) -> GroupedGemm:
    own = w.weight
    product = plan.moe.product(own.format, load, *w.shape[1:], gpu, own.half)
    assert product is not None
    return product


def tokens_at_once(mixture: Mixture, top_k: int) -> int:
    """Tokens whose rows the workspace holds; at least one."""
    row = max(sum(_row_bytes(mixture, levels).values()) for levels in (False, True))
    # Of rows at least 8 have a block of the launch's third axis.
    most = 8 * (plan.MOST_BLOCKS - mixture.gate.shape[0])
    return max(1, min(WORKSPACE // row, most) // top_k)


def _row_bytes(mixture: Mixture, levels: bool) -> dict[str, int]:
    """Bytes of a row in each array between the launches: what is over makes room for what comes."""
    (_, width, k), n = mixture.gate.shape, mixture.down.shape[1]
    if mixture.turns:  # x; x or hidden numbers, turned; sums of gate, then of down; those of up
        own = {
            "halves": 2 * k,
            "turned": 2 * max(k, width),
            "sums": 4 * max(width, n),
            "sums of up": 4 * width,
        }
        return {**own, "factors": 4, "turned factors": 4, "places": 4}
    if levels:  # x, then results; hidden numbers, which `down` multiplies where they are
        sizes = {"halves": max(2 * k, 4 * n), "sums": 2 * width, "levels": width // plan.moe.LEVEL_COLUMNS}
    else:  # x, then hidden numbers in float16; in float32, then results
        sizes = {"halves": 2 * max(k, width), "sums": 4 * max(width, n)}
    if mixture.blocks:
        sizes["blocks"] = get("q8_1").row_bytes(width)
    return {**sizes, "factors": 4, "places": 4}


def arrays(mixture: Mixture, load: Load, products: Products) -> Arrays:
    """Where these arrays, those of works, and sums that blocks leave for others are."""
    count = mixture.gate.shape[0]
    made = Arrays()
    both, *single, down = products
    used = [one for one in ([both] if both else single) + [down] if one]
    rows = load.rows + max(one.gemm.rows_behind for one in used)
    for name, row in _row_bytes(mixture, mixture.levels(both)).items():
        made.add(name, rows * row)
    made.add("starts", (count + 1) * 4)
    for name in ("of gate", "of up", "of down"):  # lists of works
        made.add(name, load.most_works(1) * 16)
    made.add("partials", max(one.gemm.partials for one in used))
    return made
