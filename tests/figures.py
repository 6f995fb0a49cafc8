"""Figures of the README and of docs/performance.md that come from committed records.

Each is a line of text with numbers in it. Tests compare these with the records; after a new record,
`python tests/figures.py` writes them anew, and says what it does not find.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
README, PERFORMANCE = "README.md", "docs/performance.md"
NUMBER = r"(-?\d+(?:\.\d+)?)"

Cell = dict[str, Any]


class Figure(NamedTuple):
    """Words that stand in a file once, with {} for each number."""

    file: str
    words: str
    numbers: tuple[str, ...]
    below: str = ""
    """The header of the table that they are a row of."""

    def find(self, text: str) -> re.Match[str]:
        """Where they stand, with any numbers, and lines that end anywhere."""
        parts = (re.escape(part).replace(r"\ ", r"\s+") for part in self.words.split("{}"))
        pattern = re.compile(NUMBER.join(parts))
        start, end = table_lines(text, self.below) if self.below else (0, len(text))
        found = list(pattern.finditer(text, start, end))
        assert len(found) == 1, f"{self.file} has {len(found)} times: {self.words}"
        assert len(found[0].groups()) == len(self.numbers), self.words
        return found[0]


def table_lines(text: str, header: str) -> tuple[int, int]:
    """Where the rows below a header begin and end."""
    assert f"{header}\n" in text, f"no table begins with: {header}"
    start = text.index(f"{header}\n") + len(header) + 1
    rows = itertools.takewhile(lambda line: line.startswith("|"), text[start:].splitlines(keepends=True))
    return start, start + sum(map(len, rows))


def read_record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / f"examples/benchmarks/{name}.json").read_text())
    return record


def read_cells(name: str, op: str | None = None, activation: str | None = None) -> list[Cell]:
    return [
        cell
        for cell in read_record(name)["cells"]
        if (op is None or cell["op"] == op) and (activation is None or cell["activation"] == activation)
    ]


def span(values: Iterable[float], digits: int) -> tuple[str, str]:
    """The least and the most."""
    every = list(values)
    return f"{min(every):.{digits}f}", f"{max(every):.{digits}f}"


def over(cells: Iterable[Cell], other: str) -> list[float]:
    """Times as multiples of another one of the same cell."""
    return [cell["us"] / cell[other] for cell in cells]


def between(cells: Iterable[Cell], first: int, last: int) -> list[Cell]:
    """Those with so many rows of x, or tokens."""
    return [cell for cell in cells if first <= cell["M"] <= last]


def table(
    file: str,
    header: str,
    rows: int,
    number: Callable[..., float | str],
    columns: Iterable[Any],
    labels: int = 1,
) -> Iterator[Figure]:
    """A table's figures: number(label, ..., column) for each of its rows, as they are labelled there."""
    text = (ROOT / file).read_text(encoding="utf-8")
    start, end = table_lines(text, header)
    lines = text[start:end].splitlines()[1:]
    assert len(lines) == rows, f"{len(lines)} rows in place of {rows} below: {header}"
    for line in lines:
        label = [cell.strip() for cell in line.strip("|").split("|")[:labels]]
        try:
            found = [number(*label, column) for column in columns]
        except KeyError as missing:
            raise AssertionError(f"no record has {missing}, of the row: {line}") from None
        numbers = tuple(each if isinstance(each, str) else f"{each:.1f}" for each in found)
        yield Figure(file, f"| {' | '.join([*label, *['{}'] * len(numbers)])} |", numbers, header)


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


TOKENS = (1, 2, 4, 8, 16, 64, 512, 4096)


def mixtures() -> Iterator[Figure]:
    for record, label, rows in (
        ("h200-trellis-moe", "format", 7),
        ("h100-moe", "on an H100", 8),
        ("h200-exl3-moe", "EXL3", 2),
    ):
        cells = {(c["format"], c["M"]): c for c in read_cells(record, "moe")}

        def time(name: str, m: int, cells: Any = cells) -> str:
            kind = {"cuBLAS, dense": "cublas_us", "floor, q4_0": "floor_us"}.get(name, "us")
            return f"{cells[name if kind == 'us' else 'q4_0', m][kind]:.0f}"

        header = f"| {label} | 1 token | {' | '.join(map(str, TOKENS[1:]))} |"
        yield from table(PERFORMANCE, header, rows, time, TOKENS)
    every = read_cells("h200-trellis-moe", "moe")

    def near(names: tuple[str, ...], first: int, last: int, digits: int = 2) -> tuple[str, str]:
        own = (c for c in between(every, first, last) if c["format"] in names)
        return span(over(own, "floor_us"), digits)

    plain = ("q4_0", "mxfp4", "q4_k", "q8_0", "kbit4")
    dense = {c["format"]: c["us"] / c["cublas_us"] for c in every if c["M"] == 4096}
    yield Figure(
        PERFORMANCE,
        "Mixtures of experts take {} to {} times the floor of the experts hit at 1 to 16 tokens of q4_0, "
        "{} to {} of q8_0 and {} to {}"
        " of mxfp4 (the aim is 1.25), but {} to {} of q4_k and kbit4; {} to {} at 64, {} to {} at 512;"
        " and {} to {} times as long as dense cuBLAS at 4096 (the aim is 1.18: q8_0 takes {}).",
        (
            *near(("q4_0",), 1, 16),
            *near(("q8_0",), 1, 16),
            *near(("mxfp4",), 1, 16),
            *near(("q4_k", "kbit4"), 1, 16),
            *near(plain, 64, 64),
            *near(plain, 512, 512),
            *span((dense[name] for name in plain), 2),
            f"{dense['q8_0']:.2f}",
        ),
    )
    yield Figure(
        PERFORMANCE,
        "Trellis experts take {} to {} times their floor at 1 to 16 tokens, {} at 64, {} at 512, and at "
        "4096 {} times as long",
        (
            *near(("trellis3",), 1, 16),
            near(("trellis3",), 64, 64, 1)[0],
            near(("trellis3",), 512, 512, 1)[0],
            f"{dense['trellis3']:.2f}",
        ),
    )
    exl3 = read_cells("h200-exl3-moe")
    few = between(exl3, 1, 16)
    yield Figure(
        PERFORMANCE,
        "EXL3 experts take {} to {} times theirs at 1 to 16 tokens, where they are {} to {} times as "
        "fast as dense cuBLAS,"
        " {} and {} at 64; from 512 on dense cuBLAS is faster, at 4096 {} and {} times.",
        (
            *span(over(few, "floor_us"), 1),
            *span((c["cublas_us"] / c["us"] for c in few), 1),
            *span(over(between(exl3, 64, 64), "floor_us"), 1),
            *span(over(between(exl3, 4096, 4096), "cublas_us"), 1),
        ),
    )


def attention() -> Iterator[Figure]:
    sizes = list(itertools.product((1, 8), (4096, 32768, 131072)))
    for gpu, label in (("h200", "bits"), ("h100", "bits, on an H100")):
        every = read_cells(f"{gpu}-attention")
        cells = {(c["bits"], c["kv_heads"], (c["batch"], c["context"])): c for c in every}

        def time(bits: str, size: tuple[int, int], cells: Any = cells) -> float:
            kind = {"torch SDPA, float16": "sdpa_us", "floor, 4 bits": "floor_us"}.get(bits, "us")
            return cells[bits if kind == "us" else "4", 8, size][kind]

        header = f"| {label} | 4k tokens | 32k | 128k | 8 x 4k | 8 x 32k | 8 x 128k |"
        yield from table(PERFORMANCE, header, 8, time, sizes)
        long = [c for c in every if c["context"] >= 32768]
        near = sum(c["us"] <= 1.2 * c["floor_us"] for c in long)
        words = {
            "h200": "From 32k tokens on {} of {} caches are within 1.2 times their floors",
            "h100": "from 32k tokens on {} of {} caches are within 1.2 times their floor.",
        }
        yield Figure(PERFORMANCE, words[gpu], (str(near), str(len(long))))
    every = read_cells("h200-attention")
    cells = {(c["bits"], c["kv_heads"], (c["batch"], c["context"])): c for c in every}
    compared = [(8, (1, 131072)), (8, (8, 32768)), (8, (8, 131072)), (32, (1, 131072)), (32, (8, 131072))]

    def ratio(label: str, column: tuple[int, tuple[int, int]]) -> str:
        heads, size = column
        kind = label.split(",")[1].split("(")[0].strip()
        own, mixed = cells["4", heads, size], cells["mixed", heads, size]
        found = {
            "over the floor": own["us"] / own["floor_us"],
            "times as fast as torch": own["sdpa_us"] / own["us"],
            "times as fast as 8 bits": cells["8", heads, size]["us"] / mixed["us"],
        }
        return f"{found[kind]:.2f}"

    header = "| compared | 128k tokens | 8 x 32k | 8 x 128k | 128k, 32 key heads | 8 x 128k, 32 key heads |"
    yield from table(PERFORMANCE, header, 3, ratio, compared)
    first, *others = (cells["4", heads, size] for heads, size in compared)
    yield Figure(
        PERFORMANCE,
        "Attention over 128k tokens of 4 bits takes {} times its floor (the aim is 1.2), and is {} times as "
        "fast as torch's in float16 (the aim is 3); with 32 key heads, or eight sequences, {} to {} and "
        "{} to {}.",
        (
            f"{over([first], 'floor_us')[0]:.2f}",
            f"{first['sdpa_us'] / first['us']:.2f}",
            *span(over(others, "floor_us"), 2),
            *span((c["sdpa_us"] / c["us"] for c in others), 2),
        ),
    )
    two = [c for c in every if c["bits"] == "2" and c["context"] >= 32768]
    yield Figure(
        PERFORMANCE,
        "of 2 bits {} of {} ({} to {})",
        (
            str(sum(c["us"] <= 1.2 * c["floor_us"] for c in two)),
            str(len(two)),
            *span(over(two, "floor_us"), 2),
        ),
    )
    longest = [cells[bits, 8, (1, 131072)] for bits in ("3", "2")]
    yield Figure(
        PERFORMANCE,
        "One sequence of 128k tokens takes {} times its floor at 3 bits and {} at 2.",
        tuple(f"{times:.2f}" for times in over(longest, "floor_us")),
    )
    short = [cells[bits, 8, (1, context)] for bits, context in (("8", 32768), ("4", 32768), ("4", 65536))]
    yield Figure(
        PERFORMANCE,
        "(of 32k tokens {} at 8 bits and {} at 4, of 64k {} at 4)",
        tuple(f"{times:.2f}" for times in over(short, "floor_us")),
    )


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
AIMS = {"1 to 16": 1.1, "32": 1.2, "64": 1.3, "128": 1.15, "256, 512": 1.08, "1024 and more": 1.05}
"""Times over the floor, by rows of x."""
LAST = (16, 32, 64, 128, 512, 4096)


def aim(rows: int) -> float:
    """Times over the floor that so many rows may take."""
    return next(times for times, last in zip(AIMS.values(), LAST, strict=True) if rows <= last)


def reached(cells: Iterable[Cell]) -> int:
    return sum(c["us"] <= aim(c["M"]) * c["floor_us"] for c in cells)


def no_slower(cells: Iterable[Cell]) -> int:
    """Cells that take no longer than dense cuBLAS."""
    return sum(c["us"] <= c["cublas_us"] for c in cells)


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
    yield Figure(README, "With q4_0 weights and 1 to 4096 rows {} of {} measured cells", numbers)

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


WEIGHTS = {
    "q4_0 to q8_0": FAMILIES["q4_0 to q8_0"][1],
    "k-bit": FAMILIES["k-bit"][1],
    "mxfp4, nvfp4": ("mxfp4", "nvfp4"),
    "int4": tuple(f"int4-{group}{zeros}" for group in (32, 64, 128) for zeros in ("", "-zeros")),
    "k-quants": FAMILIES["k-quants"][1],
    "IQ4": FAMILIES["IQ4"][1],
    "trellis": tuple(f"trellis{bits}{group}" for bits in (2, 3, 4) for group in ("", "-32")),
}


def once_for_a_weight() -> Iterator[Figure]:
    header = "| formats | quantize | its kernel | dequantize | prepare | its kernels | restore |"
    every = read_cells("h200-weights")
    assert {c["format"] for c in every} == set(itertools.chain(*WEIGHTS.values()))
    for family, names in WEIGHTS.items():
        cells = [c for c in every if c["format"] in names]
        words = f"| {family}"
        numbers: list[str] = []
        for work in ("quantize", "encode", "dequantize", "prepare", "repack", "restore"):
            times = over((c for c in cells if c["work"] == work), "floor_us")
            words += " | {} to {}" if len(times) > 1 else " | {}" if times else " |"
            numbers += span(times, 2)[: len(times)] if times else ()
        yield Figure(PERFORMANCE, f"{words} |", tuple(numbers), header)
    prepared = {c["format"]: c for c in every if c["work"] == "repack"}
    yield Figure(
        PERFORMANCE,
        "(q4_0 takes {}, q5_0 {}, q5_1 {})",
        tuple(f"{times:.3f}" for times in over((prepared[n] for n in ("q4_0", "q5_0", "q5_1")), "floor_us")),
    )


HOST = {
    "product, float16 x": ("matmul", "f16", None),
    "product, float16 x, a new result": ("matmul, new result", "f16", None),
    "product, bfloat16 x": ("matmul", "bf16", None),
    "product, float32 x": ("matmul", "f32", None),
    "product, x quantized to q8_1": ("matmul", "q8_1", None),
    "mixture of experts": ("moe", "f16", None),
    "choosing experts": ("route", None, None),
    "a token appended to a cache": ("append", None, "4"),
    "attention": ("attention", None, "4"),
    "CuPy: an empty kernel": ("CuPy kernel", None, None),
    "CuPy: an array of 4096 numbers": ("CuPy empty", None, None),
}


def host() -> Iterator[Figure]:
    for label, kind in HOST.items():
        times = [c["us"] for c in read_cells("h200-host") if (c["work"], c["activation"], c["bits"]) == kind]
        middle = f"{median(times):.1f}"
        if len(times) == 1:
            yield Figure(PERFORMANCE, f"| {label} | {{}} | |", (middle,))
            continue
        numbers = (middle, *span(times, 1))
        yield Figure(PERFORMANCE, f"| {label} | {{}} | {{}} to {{}} |", numbers)
        if label == "product, float16 x":
            words = "A product with float16 x takes the host {} µs in the median, {} to {} (the aim is 15)"
            yield Figure(PERFORMANCE, words, numbers)


CONVERSIONS = {
    "E2M1: masks and shifts of plain nibbles": ("e2m1", "bits, uncorrected"),
    "E2M1: masks and shifts, in the fragment layout's order": ("e2m1", "bits of the fragment layout"),
    "E2M1: byte permutes": ("e2m1", "byte permutes"),
    "any 16 numbers: shared table of pairs, one for each lane": ("any 16", "shared table of pairs"),
    "any 16 numbers: shared table of single ones": ("any 16", "shared table of values"),
    "any 16 numbers: byte-permute table": ("any 16", "byte-permute table"),
    "integers − 8: magic number, subtracted": ("u4b8", "bits"),  # noqa: RUF001
    "integers − 8: masks alone, offset by sums of x": ("u4b8", "bits, masked"),  # noqa: RUF001
}


def conversions() -> Iterator[Figure]:
    cells = {((c["codes"], c["method"]), c["M"]): c for c in read_cells("h200-dequant")}

    def number(label: str, column: str | int) -> str:
        if isinstance(column, int):
            return f"{cells[CONVERSIONS[label], column]['us']:.1f}"
        return f"{cells[CONVERSIONS[label], None][column]:.{0 if column == 'values_per_ns' else 1}f}"

    columns = "values per ns in registers | instructions per value | decode, M = 1, µs | M = 8"
    header = f"| codes of 4 bits, by | {columns} |"
    yield from table(PERFORMANCE, header, 8, number, ("values_per_ns", "instructions", 1, 8))


def every_figure() -> list[Figure]:
    parts = (
        products, models, peers, mixtures, attention, floors, faster_than_dense, converted, measuring,
        once_for_a_weight, host, conversions,
    )  # fmt: skip
    return [figure for part in parts for figure in part()]


def write() -> int:
    """Put the records' numbers into the texts; how many were not found."""
    missing = 0
    figures = every_figure()
    for file in (README, PERFORMANCE):
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        for figure in (each for each in figures if each.file == file):
            try:
                found = figure.find(text)
            except AssertionError as error:
                print(error)
                missing += 1
                continue
            for group in range(len(figure.numbers), 0, -1):
                start, end = found.span(group)
                text = text[:start] + figure.numbers[group - 1] + text[end:]
        path.write_text(text, encoding="utf-8")
    return missing


if __name__ == "__main__":
    sys.exit(write() > 0)
