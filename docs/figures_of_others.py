"""Figures of mixtures, attention, what is done once for a weight, the host, and conversions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median
from typing import Any

from figures_of_products import FAMILIES
from recorded import (
    PERFORMANCE,
    Figure,
    between,
    over,
    read_cells,
    span,
    table,
)

TOKENS = (1, 2, 4, 8, 16, 64, 512, 4096)
LAUNCH_US = 2.4
"""Of a floor, what is not its bytes'."""


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


def of_equal_lengths(record: str) -> list[dict[str, Any]]:
    """Cells of attention whose sequences are equally long, as all were before there were others."""
    return [cell for cell in read_cells(record) if cell.get("lengths", "equal") == "equal"]


def attention() -> Iterator[Figure]:
    sizes = list(itertools.product((1, 8), (4096, 32768, 131072)))
    for gpu, label in (("h200", "bits"), ("h100", "bits, on an H100")):
        every = of_equal_lengths(f"{gpu}-attention")
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
    yield from several_queries()
    yield from prompts()
    yield from unequal_lengths()
    every = of_equal_lengths("h200-attention")
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
    short = [cells["4", 8, (1, context)] for context in (32768, 65536)]
    yield Figure(
        PERFORMANCE,
        "(of 32k tokens {}, of 64k {})",
        tuple(f"{times:.2f}" for times in over(short, "floor_us")),
    )
    start = [c["us"] - c["floor_us"] + LAUNCH_US for c in every if c["batch"] == 1 and c["context"] <= 4096]
    yield Figure(
        PERFORMANCE, "Launch, start and merge, which short caches pay, take {} to {} µs", span(start, 1)
    )
    narrow = [cells[bits, 8, (1, 1024)] for bits in ("3", "2", "mixed")]
    exact = [c["us"] / c["sdpa_us"] for c in every if c["bits"] == "16"]
    slower = [times for times in exact if times > 1]
    assert all(c in narrow for c in every if c["bits"] != "16" and c["us"] > c["sdpa_us"])
    yield Figure(
        PERFORMANCE,
        "Slower than torch are one sequence of 1024 tokens with 8 key heads at 3 bits, 2 bits and mixed "
        "(by {}, {} and {}%), and {} of {} caches of 16 bits, by up to {}%, in the median {}.",
        (
            *(f"{100 * times - 100:.0f}" for times in over(narrow, "sdpa_us")),
            str(len(slower)),
            str(len(exact)),
            f"{100 * max(slower) - 100:.0f}",
            f"{100 * median(slower) - 100:.0f}",
        ),
    )
    many = [[cells[bits, 8, (32, n)] for bits in ("4", "3", "2", "mixed")] for n in (1024, 4096)]
    yield Figure(
        PERFORMANCE,
        "32 sequences of 1024 tokens with 8 key heads take {} to {} µs (torch: {}), of 4096 tokens {} to {} "
        "({}).",
        (
            *span((c["us"] for c in many[0]), 1),
            f"{many[0][0]['sdpa_us']:.1f}",
            *span((c["us"] for c in many[1]), 0),
            f"{many[1][0]['sdpa_us']:.0f}",
        ),
    )


def unequal_lengths() -> Iterator[Figure]:
    """Times, and behind each how many floors it is."""
    cells = {
        (c["bits"], c["batch"], c["context"], c["lengths"]): c
        for c in read_cells("h200-attention")
        if c.get("lengths", "equal") != "equal"
    }
    batches = [(8, 8192, "spread"), (8, 8192, "one-long"), (32, 8192, "spread"), (100, 1024, "spread")]

    def number(bits: str, column: tuple[tuple[int, int, str], bool]) -> str:
        (batch, context, lengths), floors = column
        cell = cells[bits, batch, context, lengths]
        return f"{cell['us'] / cell['floor_us']:.2f}" if floors else f"{cell['us']:.1f}"

    header = (
        "| bits | 8 x 8192, spread | floors | 8 x 8192, one long | floors | 32 x 8192, spread | floors | "
        "100 x 1024, spread | floors |"
    )
    yield from table(PERFORMANCE, header, 3, number, itertools.product(batches, (False, True)))


def several_queries() -> Iterator[Figure]:
    cells = {
        (c["bits"], c["batch"], c["context"], c["queries"]): c for c in read_cells("h200-attention-queries")
    }
    columns = list(itertools.product(((1, 4096), (1, 32768), (8, 4096)), (2, 4, 16, 64)))

    def time(bits: str, column: tuple[tuple[int, int], int]) -> float:
        kind = {"torch SDPA, float16": "sdpa_us", "floor, 4 bits": "floor_us"}.get(bits, "us")
        (batch, context), queries = column
        return cells[bits if kind == "us" else "4", batch, context, queries][kind]

    header = "| bits | 4k tokens: 2 queries | 4 | 16 | 64 | 32k: 2 | 4 | 16 | 64 | 8 x 4k: 2 | 4 | 16 | 64 |"
    yield from table(PERFORMANCE, header, 6, time, columns)


def prompts() -> Iterator[Figure]:
    cells = {
        (c["bits"], c["batch"], c["context"]): c
        for c in read_cells("h200-attention-queries")
        if c["queries"] == c["context"]
    }

    def time(bits: str, column: tuple[int, int]) -> float:
        kind = {"torch SDPA, float16": "sdpa_us", "floor, 4 bits": "floor_us"}.get(bits, "us")
        batch, context = column
        return cells[bits if kind == "us" else "4", batch, context][kind]

    header = "| prompts, bits | 1 x 512 tokens | 1 x 4096 | 8 x 512 | 8 x 4096 |"
    yield from table(PERFORMANCE, header, 6, time, itertools.product((1, 8), (512, 4096)))
    shares = [cell["sdpa_us"] / cell["us"] for cell in cells.values()]
    yield Figure(PERFORMANCE, "it takes {} to {} of our time", span(shares, 2))


def appends() -> Iterator[Figure]:
    cells = {(c["bits"], c["kv_heads"], c["batch"], c["tokens"]): c for c in read_cells("h200-append")}
    sizes = itertools.product(((8, 1), (32, 1), (8, 8)), (1, 16, 512))
    columns = [(heads, batch, tokens) for (heads, batch), tokens in sizes]

    def time(bits: str, column: tuple[int, int, int]) -> float:
        kind = "floor_us" if bits == "floor, 4 bits" else "us"
        heads, batch, tokens = column
        return cells[bits if kind == "us" else "4", heads, batch, tokens][kind]

    header = (
        "| appended, bits | 1 token | 16 | 512 | 32 key heads: 1 | 16 | 512 | 8 sequences: 1 | 16 | 512 |"
    )
    yield from table(PERFORMANCE, header, 6, time, columns)


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
    near = {
        work: sum(times <= 1.18 for times in over((c for c in every if c["work"] == work), "floor_us"))
        for work in ("dequantize", "repack", "restore")
    }
    yield Figure(PERFORMANCE, "for {} of 30 kernels that dequantize", (str(near["dequantize"]),))
    yield Figure(PERFORMANCE, "{} of 30 of those that prepare", (str(near["repack"]),))
    yield Figure(PERFORMANCE, "and {} of 30 of those that restore.", (str(near["restore"]),))
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


PARTS = (mixtures, attention, appends, once_for_a_weight, host, conversions)
