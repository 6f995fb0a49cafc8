"""Ways to convert small codes to 16-bit floats, alone in registers and inside the decode core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import device, formats, plan, testing
from ..cuda import jit, problem
from ..formats.kbit import KBit
from ..plan.cores import table_of
from .conversions import CONVERSIONS, Conversion
from .record import Floor, Record, rounded
from .sass import Loop, hot_loops
from .timing import graph_us, rotation, warm_up

SHAPES = ((14336, 4096),)
BATCHES = (1, 8)
ROUNDS = 1024
"""Rounds of 16 codes that each thread converts."""
THREADS, RESIDENT = 256, 4
"""Threads of a block, and blocks of a multiprocessor."""
VALUES_PER_ROUND, VALUES_PER_TURN = 16, 64
CHECKED_THREADS, CHECKED_TILES = 128, 4


@dataclass(frozen=True)
class DequantCell:
    """One measurement.

    `where` is "registers" (without N and K) or "decode", a product of M rows of x by an (N, K) weight with
    float16 scales for every 32 codes. `instructions` are those of the loop per value: in registers without
    what the loop takes by itself (which is the cell of codes "none"), in decode with all that goes with the
    product. None where there is no disassembler.
    """

    op: str
    where: str
    codes: str
    method: str
    M: int | None
    N: int | None
    K: int | None
    us: float
    values_per_ns: float
    instructions: float | None
    floor_us: float | None = None

    def __str__(self) -> str:
        place = self.where if self.M is None else f"{self.where} {self.M}x{self.N}x{self.K}"
        return f"{self.codes} by {self.method}, {place}"


def dequant(
    record: Record,
    shapes: Iterable[tuple[int, int]] = SHAPES,
    batches: Iterable[int] = BATCHES,
    conversions: Iterable[Conversion] = tuple(CONVERSIONS.values()),
) -> Iterator[DequantCell]:
    """Measure what the record lacks, cell by cell, adding each to it, and the verdict at the end.

    RuntimeError where what a kernel computed is wrong: nothing is recorded then.
    """
    conversions, gpu = list(conversions), jit.gpu()
    shapes, batches = dict.fromkeys(shapes), dict.fromkeys(batches)
    alone = [c for c in (None, *conversions) if _key("registers", c) not in record]
    in_decode = [
        (c, m, n, k)
        for (n, k), c, m in combinations(shapes, conversions, batches)
        if c.weights is not None and _key("decode", c, m, n, k) not in record
    ]
    compared = (None, *alone) if alone else ()
    marks = {conversion_kernel("registers", c, gpu.capability): "HFMA2" for c in compared}
    marks |= {product(*case, gpu).plan.kernel: "HMMA" for case in in_decode}
    for _ in jit.compile_ahead(marks):
        pass
    loops = hot_loops(marks)
    warm_up()
    for conversion in alone:
        cell = _in_registers(conversion, loops)
        record.add(cell)
        yield cell
    for case in in_decode:
        cell = _in_decode(*case, loops, record.floor_us)
        record.add(cell)
        yield cell
    record.conclude(verdict(record.cells))


def _key(where: str, c: Conversion | None, *sizes: int) -> dict[str, Any]:
    m, n, k = sizes or (None, None, None)
    kind, method = ("none", "the loop alone") if c is None else (c.kind, c.method)
    return {"op": "dequant", "where": where, "codes": kind, "method": method, "M": m, "N": n, "K": k}


def verdict(cells: list[dict[str, Any]]) -> str:
    """How the document's bits compare with tables and byte permutes: one sentence a line."""
    bits = CONVERSIONS["E2m1Uncorrected"]
    others = [CONVERSIONS[c] for c in ("FragmentE2m1", "Pairs", "Values", "E2m1Permutes", "Permutes")]
    places = dict.fromkeys((c["where"], c["M"], c["N"], c["K"]) for c in cells)
    lines = []
    for place in places:
        us = {
            c["codes"] + c["method"]: c["us"] for c in cells if (c["where"], c["M"], c["N"], c["K"]) == place
        }
        own = us.get(bits.kind + bits.method)
        compared = [
            f"{us[o.kind + o.method] / own:.2f} {o.kind} by {o.method}"
            for o in others
            if own and o.kind + o.method in us
        ]
        if compared:
            where, m, n, k = place
            name = "in registers" if where == "registers" else f"in the decode core, {m} x {n} x {k}"
            lines.append(f"{name}, times over that of {bits.kind} by {bits.method}: {'; '.join(compared)}")
    return "\n".join(lines)


# In registers.


def _in_registers(conversion: Conversion | None, loops: Mapping[plan.Kernel, Loop]) -> DequantCell:
    cupy = device.cupy()
    capability = jit.capability()
    kernel = conversion_kernel("registers", conversion, capability)
    blocks = RESIDENT * jit.gpu().multiprocessors
    sums = cupy.full((blocks * THREADS, 8), 0xFFFFFFFF, np.uint32)
    values = None if conversion is None else cupy.asarray(conversion.values)
    shared = 0 if conversion is None else table_bytes(conversion, capability)
    launch = plan.Plan(kernel, (blocks, 1, 1), THREADS, shared)

    def call() -> None:
        jit.launch(launch, sums, np.int32(ROUNDS), values)

    call()
    if conversion is not None:
        threads = np.arange(CHECKED_THREADS) * (len(sums) // CHECKED_THREADS)
        if not np.array_equal(testing.as_numpy(sums[threads]), _expected_sums(conversion, threads)):
            raise RuntimeError(f"wrong result: {conversion.codec} in registers")
    us = graph_us([call]).us
    rate = len(sums) * ROUNDS * VALUES_PER_ROUND / us * 1e-3
    loop, alone = loops.get(kernel), loops.get(conversion_kernel("registers", None, capability))
    instructions = None
    if loop is not None and alone is not None:
        own = 0 if conversion is None else alone.instructions
        instructions = round((loop.instructions - own) / VALUES_PER_TURN, 3)
    measured = {"us": rounded(us), "values_per_ns": rounded(rate), "instructions": instructions}
    return DequantCell(**_key("registers", conversion), **measured)


def _expected_sums(conversion: Conversion, threads: NDArray[np.int64]) -> NDArray[np.uint32]:
    """What kernels/ops/convert.cu's `registers` leaves for these threads."""
    steps = np.arange(ROUNDS * conversion.words, dtype=np.uint64) * 0x9E3779B9
    words = ((threads.astype(np.uint64) * 0x85EBCA6B)[:, None] + steps).astype(np.uint32)
    converted = conversion.convert(words.reshape(len(threads), ROUNDS, conversion.words)).view(np.float16)
    total = np.zeros((len(threads), 8, 2), np.float16)
    for round_ in range(ROUNDS):  # exact in float64, so rounded once
        total = (total.astype(np.float64) / 2 + converted[:, round_]).astype(np.float16)
    return total.view(np.uint32)[..., 0]


def conversion_kernel(entry: str, conversion: Conversion | None, capability: int) -> plan.Kernel:
    """An entry of kernels/ops/convert.cu that is no product; without a conversion, one that does nothing."""
    name = "Nothing" if conversion is None else conversion.codec
    copies = 0 if conversion is None else _copies(conversion, capability)
    return plan.Kernel("convert", entry, constants=(("COPIES", copies), ("CONVERSION", name)))


def table_bytes(conversion: Conversion, capability: int) -> int:
    """Bytes of shared memory that a conversion's table takes."""
    return conversion.table * max(1, _copies(conversion, capability))


def _copies(conversion: Conversion, capability: int) -> int:
    """Copies of a conversion's table, as many as in products that need shared memory for other things."""
    return table_of(_format(conversion), capability)[0]


# In the decode core.


def _format(conversion: Conversion) -> formats.Format:
    """A format of as many bytes as a conversion's, with the same kind of codec."""
    return formats.get(KBit(4, absmax="float16") if conversion.copied else "q4_0")


def _in_decode(
    conversion: Conversion, m: int, n: int, k: int, loops: Mapping[plan.Kernel, Loop], floor_us: Floor
) -> DequantCell:
    cupy = device.cupy()
    x = cupy.random.standard_normal((m, k), dtype=np.float32).astype(np.float16)
    out = cupy.empty((m, n), np.float16)
    launch = product(conversion, m, n, k, jit.gpu())
    values = cupy.asarray(conversion.values)
    weights = [_RandomWeight(n, k) for _ in range(rotation(n * k // 2))]

    def call(w: _RandomWeight) -> None:
        known = launch.argument(w.addresses, values.data.ptr, 0)
        argument = bytearray(len(known))
        problem.fill(memoryview(argument), known, x.data.ptr, 0, out.data.ptr, 0, 0, 0, 0)
        jit.launch_packed(launch.plan, argument)

    out.fill(np.nan)
    call(weights[-1])
    exact = testing.as_numpy(x).astype(np.float64) @ weights[-1].rows(conversion).T
    error = testing.nmse(testing.as_numpy(out)[:, : exact.shape[1]], exact)
    if not error <= testing.BOUNDS[out.dtype][0]:
        raise RuntimeError(f"wrong result: NMSE {error:.3g} for {conversion.codec}, {m} x {n} x {k}")
    us = graph_us([lambda w=w: call(w) for w in weights]).us  # type: ignore[misc]
    instructions, loop = None, loops.get(launch.plan.kernel)
    if loop is not None:  # groups of 8 rows of x share the weights; some products sum up x
        tile, columns = dict(launch.plan.kernel.constants), 16 if jit.capability() >= 80 else 8
        products = loop.marked / tile["GROUPS"] * tile["ROW_TILES"] / (tile["ROW_TILES"] + conversion.sums)
        instructions = round(loop.instructions / (products * columns / 2), 3)
    moved = n * k // 2 + n * k // 32 * 2 + x.nbytes + out.nbytes
    rates = {"us": us, "values_per_ns": n * k / us * 1e-3, "floor_us": floor_us(moved)}
    measured = {name: rounded(value) for name, value in rates.items()}
    return DequantCell(**_key("decode", conversion, m, n, k), **measured, instructions=instructions)


def product(conversion: Conversion, m: int, n: int, k: int, gpu: plan.Gpu) -> problem.Launch:
    """The product, of float16 rows to float16 results, that `conversion` is the codec of: the core's tile for
    a format of that kind."""
    weight = problem.Weight(_format(conversion), (n, k), half=False)  # the decode core
    source = problem.source((m, k), (2 * k, 2), True)
    output = problem.Output((m, n), (n, 1), problem.DTYPES[np.dtype(np.float16)])
    end = problem.Epilogue(0, False, None, 0, None)
    found = problem.resolve(weight, source, output, end, gpu)
    kernel = found.plan.kernel
    constants = (*kernel.constants, ("CONVERSION", conversion.codec))
    shared = found.plan.shared + (0 if conversion.copied else conversion.table)
    return found._replace(
        plan=replace(
            found.plan,
            kernel=plan.Kernel("convert", "product", None, constants, kernel.max_shared),
            shared=shared,
        )
    )


class _RandomWeight:
    """Random codes and scales of an (N, K) weight in the fragment layout, 18 bytes for 32 of them."""

    def __init__(self, n: int, k: int) -> None:
        cupy = device.cupy()
        self._columns = -(-k // plan.TILE_COLUMNS)
        layout = plan.layout(formats.get("q4_0"))
        planes, size = layout.offsets(*plan.tiles(1, n, k))
        self._low, self._scale = planes.low, planes.scale
        self._buffer = cupy.random.randint(0, 256, size, np.uint8)
        scales = self._buffer[self._scale :].view(np.float16)
        scales[...] = cupy.random.uniform(0.01, 0.02, scales.size)
        start = int(self._buffer.data.ptr)
        self.addresses = plan.Planes(*(start + plane for plane in planes))

    def rows(self, conversion: Conversion) -> NDArray[np.float64]:
        """The first rows that a conversion makes of it, [CHECKED_TILES * 16, K]."""
        assert conversion.weights is not None
        tiles = CHECKED_TILES * self._columns
        words = testing.as_numpy(self._buffer[self._low :][: tiles * 512]).view(np.uint32)
        codes = conversion.order(words.reshape(tiles * 32, 2, 2))
        # Row tile, tile; lanes g, i; block, step, register / 2, row / 8, element (kernels/core/tile.cuh).
        w = conversion.weights[codes].reshape(CHECKED_TILES, self._columns, 8, 4, 2, 2, 2, 2, 2)
        w = w.transpose(0, 7, 2, 1, 4, 5, 6, 3, 8).reshape(CHECKED_TILES * 16, -1, 32)
        halves = testing.as_numpy(self._buffer[self._scale :][: tiles * 64]).view(np.float16)
        d = halves.reshape(CHECKED_TILES, self._columns, 8, 2, 2).transpose(0, 3, 2, 1, 4)
        return (w.astype(np.float64) * d.reshape(CHECKED_TILES * 16, -1, 1)).reshape(len(w), -1)
