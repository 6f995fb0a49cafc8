"""Figures of products: their times, and how near they come to the floor and to cuBLAS."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from recorded import (
    AIMS,
    LAST,
    PERFORMANCE,
    README,
    Cell,
    Figure,
    between,
    no_slower,
    over,
    reached,
    read_cells,
    span,
    table,
)


def products() -> Iterator[Figure]:
    """Times of x @ W.T, W of 14336 x 4096."""
    few, others = ("matmul", "kbit"), ("kquants", "fp4-int4", "trellis-moe", "exl3")
    for file, rows, batches, names, floor in (
        (README, 16, (1, 4, 16, 64, 256, 4096), few, "q4_0"),
        (PERFORMANCE, 20, (1, 4, 16, 64, 512, 4096), others, "q2_k"),
    ):
        cells = {
            (c["format"], c["activation"], c["M"]): c
            for c in itertools.chain(*(read_cells(f"h200-{name}", "matmul") for name in names))
            if (c["N"], c["K"]) == (14336, 4096)
        }

        def time(name: str, activation: str, m: int, cells: Any = cells, floor: str = floor) -> float:
            kind = {"cuBLAS, dense": "cublas_us", f"floor, {floor}": "floor_us"}.get(name, "us")
            return cells[name if kind == "us" else floor, activation, m][kind]

        header = f"| format | x | M = {' | '.join(map(str, batches))} |"
        yield from table(file, header, rows, time, batches, labels=2)
    for name, label, rows in (("grids", "format", 8), ("two-bits", "codes", 7), ("matmul", "on an H100", 6)):
        own = {
            (c["format"], c["M"]): c
            for c in read_cells(f"h100-{name}", "matmul", "f16")
            if (c["N"], c["K"]) == (14336, 4096)
        }
        like = next(iter(own))[0]

        def of_h100(name: str, m: int, own: Any = own, like: str = like) -> float:
            return own[like, m]["cublas_us"] if name == "cuBLAS, dense" else own[name, m]["us"]

        header = f"| {label} | M = 1 | 4 | 16 | 64 | 512 | 4096 |"
        yield from table(PERFORMANCE, header, rows, of_h100, (1, 4, 16, 64, 512, 4096))


def models() -> Iterator[Figure]:
    """Weights of more models."""
    every = read_cells("h200-models")
    cells = {(c["format"], f"{c['N']} x {c['K']}", c["M"]): c for c in every}
    names = ("q4_0", "q8_0", "q4_k")
    columns = [*itertools.product(names, (1, 4)), ("cuBLAS", 1)]

    def time(shape: str, column: tuple[str, int]) -> float:
        name, m = column
        return cells["q4_0", shape, m]["cublas_us"] if name == "cuBLAS" else cells[name, shape, m]["us"]

    header = f"| W, by one and four rows | {' | '.join(f'{name}, {m}' for name, m in columns)} |"
    yield from table(PERFORMANCE, header, 15, time, columns)
    by_format = (span(over((c for c in every if c["format"] == name), "floor_us"), 2) for name in names)
    faster = span((c["cublas_us"] / c["us"] for c in every), 1)
    words = (
        "These are {} to {} times the floor of q4_0, {} to {} of q8_0 and {} to {} of q4_k, and {} "
        "to {} times as fast"
    )
    yield Figure(PERFORMANCE, words, (*itertools.chain(*by_format), *faster))
    yield Figure(README, "({} to {} times as fast)", faster)


def peers() -> Iterator[Figure]:
    cells = {(c["format"], f"{c['N']} x {c['K']}", c["M"]): c for c in read_cells("h200-peers")}
    batches = (1, 2, 4, 8, 16, 32, 64)

    def times_as_fast(shape: str, m: int) -> float:
        return cells["q4_0", shape, m]["tinygemm_us"] / cells["q4_0", shape, m]["us"]

    header = f"| W | M = {' | '.join(map(str, batches))} |"
    yield from table(PERFORMANCE, header, 4, times_as_fast, batches)


FAMILIES = {
    "q4_0 to q8_0": ("matmul", ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")),
    "k-bit": ("kbit", ("kbit2", "kbit3", "kbit4", "kbit5")),
    "FP4, int4": ("fp4-int4", ("mxfp4", "nvfp4", "int4-32", "int4-128", "int4-128-zeros")),
    "k-quants": ("kquants", ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")),
    "IQ4": ("kquants", ("iq4_nl", "iq4_xs")),
    "trellis": ("trellis-moe", ("trellis2", "trellis3", "trellis4")),
    "EXL3": ("exl3", ("exl3-2-mcg", "exl3-3-mcg", "exl3-4-mcg", "exl3-6-mcg", "exl3-4-mul1")),
}
ON_AN_H100 = {"q4_0 to q8_0": "matmul", "k-bit": "kbit", "FP4, int4": "fp4-int4", "trellis": "trellis"}


def floors() -> Iterator[Figure]:
    """How far products are from the floor and from cuBLAS, and how many reach their aims."""
    bounds = (
        *(("floor_us", first, last) for first, last in ((1, 16), (32, 64), (128, 512), (1024, 4096))),
        *(("cublas_us", first, last) for first, last in ((256, 512), (1024, 4096))),
    )

    def ranges(family: str, cells: list[Cell], header: str) -> Figure:
        numbers = (span(over(between(cells, first, last), other), 2) for other, first, last in bounds)
        row = f"| {family}{' | {} to {}' * len(bounds)} |"
        return Figure(PERFORMANCE, row, tuple(itertools.chain(*numbers)), header)

    columns = "floor: 1 to 16 rows | 32, 64 | 128 to 512 | 1024 and more | cuBLAS: 256, 512 | 1024 and more |"
    every, named = [], {name for _, names in FAMILIES.values() for name in names}
    for family, (record, names) in FAMILIES.items():
        cells = read_cells(f"h200-{record}", "matmul", "f16")
        assert {c["format"] for c in cells} <= named, f"a format of h200-{record} has no family"
        own = [c for c in cells if c["format"] in names]
        every += own
        yield ranges(family, own, f"| formats | {columns}")
    rows = {"1 to 64": (1, 64), "128 to 512": (128, 512), "1024 and more": (1024, 4096)}
    for label, (first, last) in rows.items():
        found, large = between(every, first, last), between(every, max(first, 256), last)
        numbers = (str(reached(found)), str(len(found)))
        target = {1: "1.1 (32 rows: 1.2, 64: 1.3)", 128: "1.08 (128 rows: 1.15)", 1024: "1.05"}[first]
        ends = "| {} of {} |" if large else "| |"
        more = (str(no_slower(large)), str(len(large))) if large else ()
        yield Figure(README, f"| {label} | {target} | {{}} of {{}} {ends}", (*numbers, *more))
    of_h100 = []
    for family, record in ON_AN_H100.items():
        own = read_cells(f"h100-{record}", "matmul", "f16")
        of_h100 += own
        yield ranges(family, own, f"| formats, on an H100 | {columns}")
    for (label, times), first, last in zip(AIMS.items(), [1, *(m + 1 for m in LAST)], LAST, strict=False):
        found = between(of_h100, first, last)
        counts = (str(reached(found)), str(len(found)), str(no_slower(found)), str(len(found)))
        yield Figure(PERFORMANCE, f"| {label} | {times} | {{}} of {{}} | {{}} of {{}} |", counts)
    same = {(c["format"], c["M"], c["N"], c["K"]) for c in of_h100}
    of_h200 = [c for c in every if (c["format"], c["M"], c["N"], c["K"]) in same]
    numbers_of = [
        tuple(str(n) for n in (reached(here), len(here), reached(there), len(there)))
        for first, last in ((1, 16), (256, 512), (1024, 4096))
        for here, there in [(between(of_h100, first, last), between(of_h200, first, last))]
    ]
    first_rows, middle, last_rows = numbers_of
    yield Figure(
        PERFORMANCE,
        "with up to 16 rows {} of {} are at their aim, on the H200 {} of {}. At 256 and 512 rows {} and {} "
        "of {} are",
        (*first_rows, middle[0], middle[2], middle[3]),
    )
    yield Figure(PERFORMANCE, "from 1024 on {} and {} of {}.", (last_rows[0], last_rows[2], last_rows[3]))


def faster_than_dense() -> Iterator[Figure]:
    matmul, kquants = (read_cells(f"h200-{name}", "matmul", "f16") for name in ("matmul", "kquants"))
    for words, cells in (
        ("with q4_0 to q8_0 weights are {} to {} times", matmul),
        ("those with k-quants and IQ4 {} to {} times", kquants),
    ):
        yield Figure(README, words, span((c["cublas_us"] / c["us"] for c in between(cells, 1, 16)), 2))
    q4_0 = [c for c in matmul if c["format"] == "q4_0"]
    numbers = (str(sum(c["us"] < c["cublas_us"] for c in q4_0)), str(len(q4_0)))
    yield Figure(README, "With q4_0 weights, {} of the {} combinations measured", numbers)

    def count(cells: list[Cell]) -> tuple[str, str]:
        return str(no_slower(cells)), str(len(cells))

    yield Figure(
        PERFORMANCE,
        "Of {} cells of k-quants and IQ4 with float16 x {} take no longer than cuBLAS: {} of {} of up to "
        "256 rows, and {} of {} above.",
        (*count(kquants)[::-1], *count(between(kquants, 1, 256)), *count(between(kquants, 257, 4096))),
    )
    ours = read_cells("h100-matmul", "matmul", "f16")
    yield Figure(
        PERFORMANCE,
        "All {} cells of up to 512 rows are faster than cuBLAS with float16 x, up to 16 rows {} to {} "
        "times as fast, and {} of {} above",
        (
            str(len(between(ours, 1, 512))),
            *span((c["cublas_us"] / c["us"] for c in between(ours, 1, 16)), 1),
            *count(between(ours, 513, 4096)),
        ),
    )
    there = read_cells("h100-kquants", "matmul", "f16")
    words = "Of k-quants and IQ4 {} of {} products of up to 512 rows are faster"
    yield Figure(PERFORMANCE, words, count(between(there, 1, 512)))
    walks = over(between(read_cells("h100-exl3"), 1, 16), "floor_us")
    yield Figure(PERFORMANCE, "EXL3's walks take {} to {} times the floor up to 16 rows", span(walks, 1))


def converted() -> Iterator[Figure]:
    """What it costs to have x in 8 bits, and EXL3's numbers computed."""
    cells = {
        (c["format"], c["activation"], (c["M"], c["N"], c["K"])): c["us"] for c in read_cells("h200-matmul")
    }
    more: dict[int, list[float]] = defaultdict(list)
    part = []
    for (name, activation, size), us in cells.items():
        if activation == "q8_1":
            plain = cells[name, "f16", size]
            more[size[0]].append(us - plain)
            part += [us / plain - 1] if size[0] == 4096 else []
    some = [*itertools.chain(*(more[m] for m in (16, 32, 64, 128)))]
    yield Figure(
        PERFORMANCE,
        "activations in 8 bits cost up to {} µs at one row (in the median {}), which the product "
        "quantizes itself if it is short,"
        " {} to {} at four ({}), where a launch of its own does, up to {} at 16 to 128 ({}), and at "
        "4096, in the median, {} µs or {}%",
        (
            f"{max(more[1]):.1f}",
            f"{median(more[1]):.1f}",
            *span(more[4], 1),
            f"{median(more[4]):.1f}",
            f"{max(some):.1f}",
            f"{median(some):.1f}",
            f"{median(more[4096]):.0f}",
            f"{100 * median(part):.0f}",
        ),
    )
    exl3 = read_cells("h200-exl3")
    square = [c for c in exl3 if (c["M"], c["N"], c["K"]) == (256, 4096, 4096)]
    at_64, above = between(exl3, 64, 64), between(exl3, 128, 4096)
    yield Figure(
        PERFORMANCE,
        "up to 8 rows {} to {} times the floor. At 64 rows {} of {} products are no slower than dense "
        "cuBLAS, from 128 on {} of {}; 256 rows of 4096 x 4096 take {} to {} times as long.",
        (
            *span(over(between(exl3, 1, 8), "floor_us"), 1),
            *(str(n) for cells in (at_64, above) for n in (no_slower(cells), len(cells))),
            *span(over(square, "cublas_us"), 2),
        ),
    )


def measuring() -> Iterator[Figure]:
    """How far records agree, and what clocks they had."""
    names = ("matmul", "kbit", "fp4-int4", "kquants", "trellis-moe", "models", "exl3", "peers")
    dense: dict[tuple[int, int, int], dict[str, float]] = defaultdict(dict)
    for name in names:
        for c in read_cells(f"h200-{name}", "matmul"):
            dense[c["M"], c["N"], c["K"]][name] = c["cublas_us"]
    spread = [max(times.values()) / min(times.values()) - 1 for times in dense.values() if len(times) >= 3]
    yield Figure(
        PERFORMANCE,
        "of the {} products of cuBLAS that stand in three or more of these records the times differ by "
        "{}% (median), of {} by more than 2%,"
        " up to {}%",
        (
            str(len(spread)),
            f"{100 * median(spread):.1f}",
            str(sum(each > 0.02 for each in spread)),
            f"{100 * max(spread):.1f}",
        ),
    )
    matmul = read_cells("h200-matmul", "matmul", "f16")
    clocks = [median(c["mhz"] for c in matmul if c["M"] == m) for m in (1, 64, 128, 4096)]
    yield Figure(
        PERFORMANCE,
        "with float16 x the median is {} MHz at one row, {} at 64, {} at 128 and {} at 4096, the least {}.",
        (*(f"{mhz:.0f}" for mhz in clocks), f"{min(c['mhz'] for c in matmul):.0f}"),
    )
    slow = [
        [c["mhz"] for c in read_cells(f"h200-{name}", "matmul") if c["M"] <= 64 and c["mhz"] < 1620]
        for name in names
    ]
    yield Figure(
        PERFORMANCE,
        "at most {} of a record were measured at less than 1620 MHz, the least at {}:",
        (str(max(map(len, slow))), f"{min(itertools.chain(*slow)):.0f}"),
    )


PARTS = (products, models, peers, floors, faster_than_dense, converted, measuring)
