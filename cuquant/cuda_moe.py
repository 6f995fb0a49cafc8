"""Mixtures of experts on the GPU: tokens sorted by expert, one launch for each projection of all experts.

    gather -> gate and up -> hidden, or level -> down -> combine        (kernels/ops/moe.cu and gemm.cu)

Of few tokens each block of a product finds its rows of x itself, and `gather` is spared. Where the wgmma core
multiplies by gate and up in one launch, and x is not of q8_1, it makes float16 numbers in levels
(kernels/core/levels.cuh), of which `level` has less to do than `hidden` of float32. Where columns have signs
(trellis), a block that finds its rows gives them these, and `change_signs` gives them to rows in the order of
their experts.

Nothing synchronises, and every launch overlaps the one before it. Memory between them is the stream's
scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from . import buffers, check, cuda, device, jit, plan, problem
from .array import QuantizedArray
from .formats import get
from .fragments import Fragments
from .plan.moe import Load, Product

WORKSPACE = 1 << 30
"""Bytes between the launches that more tokens than one may fill; more tokens take several rounds."""


def takes(x: Any, gate: Any, up: Any, down: Any, top_k: int) -> bool:
    """Whether there are kernels for checked operands."""
    experts, width, k = gate.shape
    formats = [w.format for w in (gate, up, down) if check.is_quantized(w)]
    return (
        len(formats) == 3
        and all(fmt.on_gpu and fmt.in_float16 for fmt in formats)
        and width % plan.moe.WHOLE == k % plan.moe.WHOLE == 0
        and 1 <= experts <= plan.moe.MOST_EXPERTS
        and 1 <= top_k <= plan.moe.MOST_SLOTS
        and min(gate.shape + down.shape) > 0
        and (width <= plan.LONGEST_ROW or not check.is_quantized(x))
    )


def route(logits: Any, top_k: int, normalize: bool) -> tuple[Any, Any]:
    """Ids and probabilities of floats (..., E)."""
    cupy = device.cupy()
    lead = logits.shape[:-1]
    ids, probs = cupy.empty((*lead, top_k), np.int32), cupy.empty((*lead, top_k), np.float32)
    if ids.size:
        rows = logits.reshape(-1, logits.shape[-1])
        numbers = (np.int64(len(rows)), np.int32(rows.shape[1]), np.int32(top_k), np.int32(normalize))
        jit.launch(plan.moe.route(len(rows)), *buffers.float_rows(rows), *numbers, ids, probs)
    return ids, probs


class _Rows(NamedTuple):
    """Rows of activations: address, number of the dtype, strides in elements, address of factors or 0."""

    address: int
    dtype: int
    row: int
    column: int
    factors: int

    def skip(self, rows: int, size: int) -> _Rows:
        factors = self.factors and self.factors + 4 * rows
        return self._replace(address=self.address + rows * self.row * size, factors=factors)

    @property
    def halves(self) -> bool:
        """Whether products can read them as they are."""
        whole = self.address % 16 == 0 and self.row % 8 == 0 and self.column == 1
        return self.dtype == _HALF and whole


_HALF, _FLOAT = problem.DTYPES[check.FLOATS[0]], problem.DTYPES[check.FLOATS[2]]


class _Layout:
    """Where arrays lie in the scratch memory, by the names that they are given, one after the other."""

    def __init__(self) -> None:
        self.size = 0
        self._offsets: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        self._offsets[name] = self.size
        self.size += ceil(nbytes / 256) * 256

    def at(self, start: int) -> dict[str, int]:
        return {name: start + offset for name, offset in self._offsets.items()}


_Products = tuple[Product | None, Product, Product, Product]
"""With gate and up together or None, with each on its own, and with down."""


class _Mixture(NamedTuple):
    """Prepared operands, but for x and the result."""

    gate: Fragments
    up: Fragments
    down: Fragments
    activation: str | None
    blocks: bool
    """Whether what `down` multiplies is quantized to q8_1, as x is."""

    def alike(self) -> bool:
        """Whether one launch can multiply by gate and up."""
        a, b = self.gate, self.up
        return (a.weight, a.codebook) == (b.weight, b.codebook) and a.signs == b.signs

    def products(self, load: Load) -> _Products:
        """Gate and up together or None, then each on its own, and down."""
        capability, (_, width, k) = jit.capability(), self.gate.shape
        both = None
        if self.alike():
            own = self.gate.weight
            both = plan.moe.gate_and_up(own.format, load, width, k, own.half, capability)
        singles = (_single(w, load, capability) for w in (self.gate, self.up, self.down))
        return (both, *singles)  # type: ignore[return-value]

    def levels(self, both: Product | None) -> bool:
        """Whether gate and up together make float16 numbers in levels."""
        return both is not None and both.levels and not self.blocks


def _single(w: Fragments, load: Load, capability: int) -> Product:
    own = w.weight
    product = plan.moe.product(own.format, load, *w.shape[1:], own.half, False, capability)
    assert product is not None
    return product


def mixture(x: Any, experts: Any, ids: Any, probs: Any, activation: str | None, out: Any) -> None:
    """Write the mixture of checked operands, which `takes` has let through, to out (..., N)."""
    cupy = device.cupy()
    tokens, top_k, n = prod(ids.shape[:-1]), ids.shape[-1], out.shape[-1]
    if tokens == 0:
        return
    gate, up, down = (w.fragments() for w in experts)
    quantized = check.is_quantized(x)
    prepared = _Mixture(gate, up, down, activation, quantized)
    ids = cupy.asarray(ids)
    if ids.dtype not in (np.int32, np.int64):
        ids = ids.astype(np.int64)
    ids = cupy.ascontiguousarray(ids).reshape(tokens, top_k)
    probs = cupy.ascontiguousarray(cupy.asarray(probs)).reshape(tokens, top_k)
    rows = out.reshape(tokens, n)  # a copy if no two strides lead through it
    x = x if quantized else buffers.as_rows(x)
    with buffers.scratch() as scratch:
        step = _tokens_at_once(prepared, top_k)
        parts = [slice(first, min(first + step, tokens)) for first in range(0, tokens, step)]
        loads = [Load(part.stop - part.start, top_k, gate.shape[0]) for part in parts]
        plans = {load: prepared.products(load) for load in loads}
        layouts = {load: _layout(prepared, load, prepared.levels(plans[load][0])) for load in loads}
        size = max(layout.size for layout in layouts.values())
        converted = sum(buffers.rows_bytes((tokens, gate.shape[2]))) if quantized and x.rows is None else 0
        start = scratch.take(size + converted)
        source = _source(x, start + size)
        for part, load in zip(parts, loads, strict=True):
            given = source.skip(part.start, 2 if quantized else x.dtype.itemsize)
            at = layouts[load].at(start)
            _run(prepared, load, plans[load], given, ids[part], probs[part], rows[part], at)
    if rows.data.ptr != out.data.ptr:
        out[...] = rows.reshape(out.shape)


def _source(x: Any, converted: int) -> _Rows:
    """Activations as `gather` reads them: rows of floats, or the float16 rows of blocks (made there)."""
    if not check.is_quantized(x):
        _, dtype, row, column = buffers.float_rows(x)
        return _Rows(x.data.ptr, int(dtype), int(row), int(column), 0)
    k = x.shape[-1]
    if x.rows is not None:
        start = x.rows.buffer.data.ptr
        return _Rows(start, _HALF, k, 1, start + x.rows.factors)
    blocks = x.blocks.reshape(-1, x.blocks.shape[-1])
    shape = (len(blocks), k)
    operand = cuda.Operand(QuantizedArray(x.format, blocks), problem.quantized_source(shape, False))
    address, factors = cuda.convert(operand, converted)
    return _Rows(address, _HALF, k, 1, factors)


def _tokens_at_once(mixture: _Mixture, top_k: int) -> int:
    """Tokens whose rows the workspace holds; at least one."""
    row = max(sum(_row_bytes(mixture, levels).values()) for levels in (False, True))
    # Of rows at least 8 have a block of the launch's third axis.
    most = 8 * (plan.MOST_BLOCKS - mixture.gate.shape[0])
    return max(1, min(WORKSPACE // row, most) // top_k)


def _row_bytes(mixture: _Mixture, levels: bool) -> dict[str, int]:
    """Bytes of a row in each array between the launches: what is over makes room for what comes."""
    (_, width, k), n = mixture.gate.shape, mixture.down.shape[1]
    if levels:  # x, then results; hidden numbers, which `down` multiplies where they are
        sizes = {"halves": max(2 * k, 4 * n), "sums": 2 * width, "levels": width // plan.moe.LEVEL_COLUMNS}
    else:  # x, then hidden numbers in float16; in float32, then results
        sizes = {"halves": 2 * max(k, width), "sums": 4 * max(width, n)}
    if mixture.blocks:
        sizes["blocks"] = get("q8_1").row_bytes(width)
    return {**sizes, "factors": 4, "places": 4}


def _layout(mixture: _Mixture, load: Load, levels: bool) -> _Layout:
    """Where these arrays and those of works are."""
    count = mixture.gate.shape[0]
    layout = _Layout()
    for name, row in _row_bytes(mixture, levels).items():
        layout.add(name, load.rows * row)
    layout.add("starts", (count + 1) * 4)
    for name in ("of gate", "of up", "of down"):  # lists of works
        layout.add(name, load.most_works(1) * 16)
    return layout


def _run(
    mixture: _Mixture,
    load: Load,
    products: _Products,
    x: _Rows,
    ids: Any,
    probs: Any,
    out: Any,
    at: dict[str, int],
) -> None:
    """All launches for some tokens."""
    (count, width, k), n = mixture.gate.shape, mixture.down.shape[1]
    both, gate, up, down = products
    wide = np.int32(ids.dtype.itemsize == 8)
    routing = (ids, wide, np.int32(load.tokens), np.int32(load.top_k), np.int32(count))
    numbers = (ids.data.ptr, int(wide), load.tokens, load.top_k, count)
    first = (both,) if both is not None else (gate, up)
    few = load.rows <= plan.WARP and all(product.finds_rows for product in (*first, down))
    if few:
        if not x.halves:
            x = _convert(x, load.tokens, k, at)
        places = 0
        rows, given = (x.address, x.factors), _Group((0, 0, 0), numbers, x.row, load.top_k)
        then = _Group((0, 0, 0), numbers, width, 1)
    else:
        _gather(load, x, k, routing, (both or gate, up, down), at)
        places = at["places"]
        _change_signs(at["halves"], k, load, routing, places, None, mixture.gate)
        lists = (at["of gate"], at["of up"], at["of down"])
        rows, given = (at["halves"], at["factors"]), _Group(lists, numbers, k, 1)
        then = given._replace(x_row=width)
    halves, sums, activation, levels = at["halves"], at["sums"], mixture.activation, at.get("levels", 0)
    if both is not None:
        apart = mixture.up.addresses[0] - mixture.gate.addresses[0]
        _multiply(mixture.gate, load, both, rows, sums, given, 0, activation, apart=apart, levels=levels)
    else:
        _multiply(mixture.gate, load, gate, rows, sums, given, 0, activation)
        _change_signs(at["halves"], k, load, routing, places, mixture.gate, mixture.up)
        _multiply(mixture.up, load, up, rows, sums, given, 1, factor=sums, early=True)
    if levels:
        own = (np.uint64(sums), np.int32(width), np.uint64(levels), np.int32(load.rows))
        jit.launch(plan.moe.level(load.rows), *own, np.uint64(at["factors"]))
        halves, sums = sums, halves
    else:
        _hidden(mixture, load.rows, width, at)
    _change_signs(halves, width, load, routing, places, None, mixture.down)
    _multiply(mixture.down, load, down, (halves, at["factors"]), sums, then, 2, early=True)
    jit.launch(
        plan.moe.combine(load.tokens, n),
        *(np.uint64(sums), np.int32(n), np.uint64(places), *routing),
        *(probs, np.int32(problem.DTYPES[probs.dtype])),
        *buffers.float_rows(out),
    )


def _convert(x: _Rows, tokens: int, k: int, at: dict[str, int]) -> _Rows:
    """Rows of floats as float16."""
    step = plan.activations("rows_to_half", get("q8_1"), tokens, k)
    to = (np.int32(k), np.uint64(at["halves"]), np.uint64(at["factors"]))
    jit.launch(step, np.uint64(x.address), np.int32(x.dtype), np.int64(x.row), np.int64(x.column), *to)
    return _Rows(at["halves"], _HALF, k, 1, at["factors"])


def _gather(
    load: Load,
    x: _Rows,
    k: int,
    routing: tuple[Any, ...],
    products: tuple[Product, ...],
    at: dict[str, int],
) -> None:
    """Rows of x in the order of their experts, and every product's works."""
    starts = 0
    if load.tokens > plan.moe.FEW_TOKENS:
        starts = at["starts"]
        jit.launch(plan.moe.group(load.experts), *routing, np.uint64(at["places"]), np.uint64(starts))
    jit.launch(
        plan.moe.gather(load, k),
        *(np.uint64(x.address), np.int32(x.dtype), np.int64(x.row), np.int64(x.column)),
        *(np.uint64(x.factors), np.int32(k), *routing, np.uint64(at["places"]), np.uint64(starts)),
        *(np.uint64(at["halves"]), np.uint64(at["factors"])),
        *_works(at["of gate"], products[0]),
        *_works(at["of up"], products[1]),
        *_works(at["of down"], products[2]),
    )


def _works(address: int, product: Product) -> Iterator[Any]:
    return iter((np.uint64(address), np.int32(product.batch), np.int32(product.works)))


class _Group(NamedTuple):
    """Where products find their rows: lists of works of gate, up and down, or zeros and the ids."""

    lists: tuple[int, int, int]
    routing: tuple[int, ...]
    x_row: int
    """Stride of x."""
    share: int
    """Entries of a row of x, without lists."""


def _multiply(
    w: Fragments,
    load: Load,
    product: Product,
    x: tuple[int, int],
    out: int,
    group: _Group,
    which: int,
    activation: str | None = None,
    *,
    factor: int = 0,
    apart: int = 0,
    early: bool = False,
    levels: int = 0,
) -> None:
    """Launch a grouped product: float16 rows of x and their factors to float32 rows, or to float16 rows in
    levels, at these addresses."""
    launch = problem.group(w.weight, load.rows, product.gemm, activation, group.x_row, levels != 0)
    signs = 0 if group.lists[which] else w.signs_address
    tensor = problem.NO_MAP if launch.map is None else buffers.tensor_map(x[0], launch.map)
    ends = (group.lists[which], apart, *group.routing, product.batch, group.share, early, levels)
    packed = launch.packed(tensor, w.addresses, w.values, signs, (*x, out, factor), *ends)
    jit.launch_packed(launch.plan, packed)


def _change_signs(
    halves: int,
    k: int,
    load: Load,
    routing: tuple[Any, ...],
    places: int,
    before: Fragments | None,
    after: Fragments,
) -> None:
    """Give rows that have places the signs of a weight's columns, instead of those they have of another."""
    if not places or after.signs == (before and before.signs):
        return
    signs = (np.uint64(before.signs_address if before else 0), np.uint64(after.signs_address))
    given = (np.uint64(halves), np.int32(k), *routing, np.uint64(places))
    jit.launch(plan.moe.change_signs(load.rows, k), *given, *signs)


def _hidden(mixture: _Mixture, rows: int, width: int, at: dict[str, int]) -> None:
    """Hidden numbers to the float16 rows that `down` multiplies, through q8_1 if x is of it."""
    to = (np.uint64(at["halves"]), np.uint64(at["factors"]))
    if not mixture.blocks:
        jit.launch(plan.moe.hidden(rows, width), np.uint64(at["sums"]), np.int32(width), *to)
        return
    step = plan.activations("quantize_rows", get("q8_1"), rows, width)
    source = (np.uint64(at["sums"]), np.int32(_FLOAT), np.int64(width), np.int64(1))
    jit.launch(step, *source, np.int32(width), np.uint64(at["blocks"]), *to)
