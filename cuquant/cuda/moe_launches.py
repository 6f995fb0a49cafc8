"""The launches of a mixture of experts, planned: one for each projection of all experts, and those between.

    gather -> gate and up -> hidden, or level -> down -> combine        (kernels/ops/moe.cu and gemm.cu)

Of few tokens each block of a product finds its rows of x itself, and `gather` is spared. Where the wgmma core
multiplies by gate and up in one launch, and x is not of q8_1, it makes float16 numbers in levels
(kernels/core/levels.cuh), of which `level` has less to do than `hidden` of float32. Where columns have signs
(trellis), a block that finds its rows gives them these, one that makes numbers in levels those of `down`, and
`change_signs` gives them to other rows in the order of their experts.

Rows and sums are turned between the launches where EXL3 weights want it (kernels/ops/moe_exl3.cu).

Every launch overlaps the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .. import check, plan
from ..formats import get
from ..plan.blocks import ACTIVATION_KERNELS
from ..plan.moe import GroupedGemm, Load
from . import buffers, problem
from .fragments import Fragments
from .moe_memory import (
    FLAGS,
    IDS,
    OUT,
    PROBS,
    SCRATCH,
    Address,
    Given,
    Mixture,
    PlacedRows,
    Products,
    X,
    arrays,
    half_rows,
    tokens_at_once,
)
from .templates import Place, Template, Tensor, template

Routing = tuple[Place, int, int, int, int]
"""Ids, whether they are wide, tokens, top_k, experts."""
_ROUTING = ("Q", *"iiii")
_ROWS = ("Q", "i", "q", "q")


def planned(mixture: Mixture, given: Given) -> tuple[int, tuple[Template, ...]]:
    """Bytes of scratch memory, and all launches; of more tokens than there is room for, in rounds."""
    tokens, top_k, (experts, _, k) = given.tokens, given.top_k, mixture.gate.shape
    step = tokens_at_once(mixture, top_k)
    firsts = range(0, tokens, step)
    loads = [Load(min(step, tokens - first), top_k, experts) for first in firsts]
    plans = {load: mixture.products(load) for load in loads}
    between = {load: arrays(mixture, load, plans[load]) for load in loads}
    size = max(each.size for each in between.values())
    steps: list[Template] = []
    x = given.x
    if x is None:
        halves, more = buffers.rows_bytes((tokens, k))
        x = half_rows(Place(SCRATCH, size), k, Place(SCRATCH, size + halves))
        steps.append(_activations("blocks_to_half", tokens, k, Place(X), k, x.start, x.factors))
        size += more
    for first, load in zip(firsts, loads, strict=True):
        entry = first * top_k
        ids = Place(IDS, entry * (8 if given.wide else 4))
        routing = (ids, int(given.wide), load.tokens, load.top_k, experts)
        part = Round(mixture, load, plans[load], routing, between[load].at)
        steps += part.sums(x.skip(first))
        steps.append(part.combine(given, first))
    return size, tuple(steps)


def _activations(entry: str, rows: int, k: int, *values: Address) -> Template:
    """A launch of a kernel of kernels/ops/activations.cu."""
    step = plan.activations(entry, get("q8_1"), rows, k)
    return template(step, tuple(ACTIVATION_KERNELS[entry]), *values)


class _Group(NamedTuple):
    """Where products find their rows: lists of works of gate, up and down, or zeros and the ids."""

    lists: tuple[Address, Address, Address]
    x_row: int
    """Stride of x from row to row, in elements."""
    share: int
    """Entries that read the same row of x, where there are no lists."""


class Round(NamedTuple):
    """Some tokens, as many as the workspace holds."""

    mixture: Mixture
    load: Load
    products: Products
    routing: Routing
    at: dict[str, Place]

    def sums(self, x: PlacedRows) -> Iterator[Template]:
        """All launches up to the results of `down`, float32 rows in the order of `places`."""
        mixture, load, at = self.mixture, self.load, self.at
        if mixture.turns:
            yield from self._turned_sums(x)
            return
        _, width, k = mixture.gate.shape
        both, gate, up, down = self.products
        placed = not self.finds_rows
        rows: tuple[Address, Address]
        if placed:
            yield from self._gather(x, k)
            yield from self._change_signs(at["halves"], k, None, mixture.gate)
            lists = (at["of gate"], at["of up"], at["of down"])
            rows, given = (at["halves"], at["factors"]), _Group(lists, k, 1)
            then = given._replace(x_row=width)
        else:
            if not x.halves:
                yield self._converted(x, k)
                x = half_rows(at["halves"], k, at["factors"])
            rows, given = (x.start, x.factors), _Group((0, 0, 0), x.row, load.top_k)
            then = _Group((0, 0, 0), width, 1)
        halves, sums, activation, levels = at["halves"], at["sums"], mixture.activation, at.get("levels", 0)
        if both is not None:
            apart = mixture.up.addresses[0] - mixture.gate.addresses[0]
            place = (rows, sums, given, 0, activation)
            yield self._product(mixture.gate, both, *place, apart=apart, levels=levels)
        else:
            yield self._product(mixture.gate, gate, rows, sums, given, 0, activation)
            if placed:
                yield from self._change_signs(halves, k, mixture.gate, mixture.up)
            yield self._product(mixture.up, up, rows, sums, given, 1, factor=sums, early=True)
        if levels:
            values = (sums, width, levels, load.rows, at["factors"])
            yield template(plan.moe.level(load.rows), ("Q", "i", "Q", "i", "Q"), *values)
            halves, sums = sums, halves
        else:
            yield self._hidden(width)
            if placed:
                yield from self._change_signs(halves, width, None, mixture.down)
        rows = (halves, at["factors"])
        yield self._product(mixture.down, down, rows, sums, then, 2, early=True)

    def _turned_sums(self, x: PlacedRows) -> Iterator[Template]:
        """All launches up to the results of `down` for EXL3 weights, whose rows and sums are turned."""
        (gate, up, down, activation, _), at = self.mixture, self.at
        (_, width, k), n = gate.shape, down.shape[1]
        entries = (*self.routing, at["places"])
        codes = (*_ROUTING, "Q")
        rows = (at["turned"], at["turned factors"])
        yield from self._gather(x, k)
        sums = (at["sums"], at["sums of up"])
        _, *firsts, last_product = self.products
        for which, (w, product) in enumerate(zip((gate, up), firsts, strict=True)):
            given = (at["halves"], at["factors"], k, *entries, *rows, w.exl3_vectors.suh.data.ptr)
            yield template(plan.exl3.turn_entries(self.load.rows, k), ("Q", "Q", "i", *codes, *"QQQ"), *given)
            group = _Group((at["of gate"], at["of up"], 0), k, 1)
            yield self._product(w, product, rows, sums[which], group, which, early=which > 0)
        factors = (
            gate.exl3_vectors.svh.data.ptr,
            up.exl3_vectors.svh.data.ptr,
            down.exl3_vectors.suh.data.ptr,
        )
        last = (2.0**gate.lift, 2.0**up.lift, problem.ACTIVATIONS[activation])
        yield template(
            plan.exl3.turn_hidden(self.load.rows, width),
            ("Q", "Q", "i", *codes, *"QQQQQ", *"ffi"),
            *(*sums, width, *entries, *rows, *factors, *last),
        )
        group = _Group((0, 0, at["of down"]), width, 1)
        yield self._product(down, last_product, rows, sums[0], group, 2, early=True)
        yield template(
            plan.exl3.turn_sums(self.load.rows, n),
            ("Q", "i", *codes, "Q", "f"),
            *(sums[0], n, *entries, down.exl3_vectors.svh.data.ptr, 2.0**down.lift),
        )

    @property
    def finds_rows(self) -> bool:
        """Whether blocks of all products find their rows themselves."""
        if self.mixture.turns:
            return False
        both, gate, up, down = self.products
        first = (both,) if both is not None else (gate, up)
        return self.load.rows <= plan.WARP and all(product.finds_rows for product in (*first, down))

    def combine(self, given: Given, first: int) -> Template:
        """The sums of tokens, from number `first` on, to the result."""
        n, (dtype, row, column) = self.mixture.down.shape[1], given.out
        sums = self.at["halves" if "levels" in self.at else "sums"]
        places = 0 if self.finds_rows else self.at["places"]
        probs = Place(PROBS, first * given.top_k * given.probs.itemsize)
        out = Place(OUT, first * row * dtype.itemsize)
        return template(
            plan.moe.combine(self.load.tokens, n),
            ("Q", "i", "Q", *_ROUTING, "Q", "i", *_ROWS),
            *(sums, n, places, *self.routing, probs, problem.DTYPES[given.probs]),
            *(out, problem.DTYPES[dtype], row, column),
        )

    def _converted(self, x: PlacedRows, k: int) -> Template:
        """Rows of floats as float16."""
        entry = "prepare_rows" if x.dtype else "prepare_halves"
        to = (k, self.at["halves"], self.at["factors"], 0, 1)
        return _activations(entry, self.load.tokens, k, x.start, x.dtype, x.row, x.column, *to)

    def _gather(self, x: PlacedRows, k: int) -> Iterator[Template]:
        """Rows of x in the order of their experts, and every product's works."""
        load, at, (both, gate, up, down) = self.load, self.at, self.products
        starts: Address = 0
        if load.tokens > plan.moe.FEW_TOKENS:
            starts = at["starts"]
            ends = (*self.routing, at["places"], starts)
            yield template(plan.moe.group(load.experts), (*_ROUTING, "Q", "Q"), *ends)
        lists = [(at["of gate"], both or gate), (at["of up"], up), (at["of down"], down)]
        works = [value for start, product in lists for value in (start, product.batch, product.works)]
        yield template(
            plan.moe.gather(load, k),
            (*_ROWS, "Q", "i", *_ROUTING, *"QQQQ", *("Q", "i", "i") * 3),
            *(x.start, x.dtype, x.row, x.column, x.factors, k, *self.routing),
            *(at["places"], starts, at["halves"], at["factors"], *works),
        )

    def _product(
        self,
        w: Fragments,
        product: GroupedGemm,
        x: tuple[Address, Address],
        out: Place,
        group: _Group,
        which: int,
        activation: str | None = None,
        *,
        factor: Address = 0,
        apart: int = 0,
        early: bool = False,
        levels: Address = 0,
    ) -> Template:
        """A grouped product: float16 rows of x and their factors to float32 rows, or to float16 rows in
        levels."""
        known = problem.group(w.weight, self.load.rows, product.gemm, activation, group.x_row, levels != 0)
        signs = 0 if group.lists[which] else w.signs_address
        tensor: Tensor | bytes = problem.NO_MAP
        if known.map is not None:
            assert isinstance(x[0], Place)
            tensor = Tensor(known.map, x[0])
        shared: tuple[Address, Address] = (0, 0)
        if product.gemm.partials:
            shared = (self.at["partials"], Place(FLAGS))
        rows = product.batch, group.share
        up, then = self.mixture.up, self.mixture.down.signs_address if levels else 0
        of_v = (up.values, up.weight.factor)
        ends = (group.lists[which], apart, *self.routing, *rows, early, known.box_steps, levels, then, *of_v)
        codes, values = known.members(tensor, w.addresses, w.values, signs, (*x, out, factor, *shared), *ends)
        return template(known.plan, codes, *values, whole=True)

    def _change_signs(
        self, halves: Place, k: int, before: Fragments | None, after: Fragments
    ) -> Iterator[Template]:
        """Give rows that have places the signs of a weight's columns, instead of those they have of
        another."""
        if after.signs != (before and before.signs):
            signs = (before.signs_address if before else 0, after.signs_address)
            step = plan.moe.change_signs(self.load.rows, k)
            codes = ("Q", "i", *_ROUTING, "Q", "Q", "Q")
            yield template(step, codes, halves, k, *self.routing, self.at["places"], *signs)

    def _hidden(self, width: int) -> Template:
        """Hidden numbers to the float16 rows that `down` multiplies, through q8_1 if x is of it."""
        at, rows = self.at, self.load.rows
        to = (at["halves"], at["factors"])
        if not self.mixture.blocks:
            step = plan.moe.hidden(rows, width)
            return template(step, ("Q", "i", "Q", "Q"), at["sums"], width, *to)
        source = (at["sums"], problem.DTYPES[check.FLOAT32], width, 1, width)
        return _activations("quantize_rows", rows, width, *source, at["blocks"], *to)
