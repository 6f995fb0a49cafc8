"""Figures of the README and of docs/performance.md against the committed records."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README, PERFORMANCE = ((ROOT / f).read_text(encoding="utf-8") for f in ("README.md", "docs/performance.md"))


OF_H100 = ("matmul", "kbit", "fp4-int4", "trellis", "moe", "attention")
"""Records with floors of an H100's own."""


@pytest.fixture(scope="module")
def h100() -> dict[str, list[dict[str, Any]]]:
    """Their cells."""
    path = ROOT / "examples/benchmarks"
    return {name: json.loads((path / f"h100-{name}.json").read_text())["cells"] for name in OF_H100}


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    """Committed records, by what their files are called."""
    paths = (ROOT / "examples/benchmarks").glob("h200-*.json")
    return {path.stem.removeprefix("h200-"): json.loads(path.read_text()) for path in paths}


def table(text: str, header: str, labels: int = 1) -> dict[str, list[float]]:
    """The rows below a header: numbers, by the cells before them."""
    lines = text[text.index(f"{header}\n") + len(header) :].split("\n")[2:]
    rows = {}
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines):
        cells = line.strip("|").split("|")
        rows["|".join(cell.strip() for cell in cells[:labels])] = [float(cell) for cell in cells[labels:]]
    return rows


def test_records_are_listed_with_their_commits(records: dict[str, Any]) -> None:
    assert len(records) == 13
    more = ("exl3", "exl3-moe", "grids", "kquants", "two-bits", "weights")
    others = {f"h100-{name}" for name in (*OF_H100, *more)}
    paths = sorted((ROOT / "examples/benchmarks").glob("*.json"))
    assert {path.stem for path in paths} == others | {f"h200-{name}" for name in records}
    for path in paths:
        record = json.loads(path.read_text())
        assert record["device"].startswith(f"NVIDIA {path.stem[:4].upper()}")
        (line,) = (
            line
            for line in PERFORMANCE.split("\n")
            if line.startswith(f"| [JSON](../examples/benchmarks/{path.name})")
        )
        assert line.endswith(f"`{record['commit'][:12]}` |")
        assert all(cell["nmse"] <= 5e-6 for cell in record["cells"] if "nmse" in cell)
    assert f"`{records['matmul']['commit'][:12]}`" in README


@pytest.mark.parametrize(
    ("text", "batches", "names", "rows"),
    [
        (README, (1, 4, 16, 64, 256, 4096), ("matmul", "kbit"), 16),
        (PERFORMANCE, (1, 4, 16, 64, 512, 4096), ("kquants", "fp4-int4", "trellis-moe", "exl3"), 20),
    ],
    ids=["README", "performance"],
)
def test_times_of_products(
    records: dict[str, Any], text: str, batches: tuple[int, ...], names: tuple[str, ...], rows: int
) -> None:
    cells = {
        (c["format"], c["activation"], c["M"]): c
        for c in itertools.chain(*(records[name]["cells"] for name in names))
        if (c["op"], c["N"], c.get("K")) == ("matmul", 14336, 4096)
    }
    shown = table(text, f"| format | x | M = {' | '.join(map(str, batches))} |", 2)
    assert len(shown) == rows
    for label, times in shown.items():
        name, activation = label.split("|")
        kind = {"cuBLAS, dense": "cublas_us", "floor, q4_0": "floor_us"}.get(name, "us")
        like = name if kind == "us" else {"matmul": "q4_0", "kquants": "q2_k"}[names[0]]
        measured = [cells[like, activation, m][kind] for m in batches]
        assert times == pytest.approx(measured, abs=0.051)


def test_times_of_weights_of_models(records: dict[str, Any]) -> None:
    cells = {(c["format"], f"{c['N']} x {c['K']}", c["M"]): c for c in records["models"]["cells"]}
    names = ("q4_0", "q8_0", "q4_k")
    header = " | ".join(f"{name}, {m}" for name in names for m in (1, 4))
    rows = table(PERFORMANCE, f"| W, by one and four rows | {header} | cuBLAS, 1 |")
    assert len(rows) == 15
    for shape, times in rows.items():
        own = [cells[name, shape, m]["us"] for name in names for m in (1, 4)]
        assert times == pytest.approx([*own, cells["q4_0", shape, 1]["cublas_us"]], abs=0.051)
    over = [[c["us"] / c["floor_us"] for c in cells.values() if c["format"] == name] for name in names]
    said = [f"{min(times):.2f} to {max(times):.2f}" for times in over]
    faster = [c["cublas_us"] / c["us"] for c in cells.values()]
    text = f"These are {said[0]} times the floor of q4_0, {said[1]} of q8_0 and {said[2]} of q4_k, and "
    text += f"{min(faster):.1f} to {max(faster):.1f} times as fast as dense cuBLAS."
    assert text in " ".join(PERFORMANCE.split())
    assert f"({min(faster):.1f} to {max(faster):.1f} times as fast)" in " ".join(README.split())


@pytest.mark.parametrize(
    ("name", "label", "count"),
    [("grids", "format", 8), ("two-bits", "codes", 7), ("matmul", "on an H100", 6)],
)
def test_times_on_an_h100(name: str, label: str, count: int) -> None:
    record = json.loads((ROOT / f"examples/benchmarks/h100-{name}.json").read_text())
    own = [c for c in record["cells"] if c["N"] == 14336 and c["activation"] == "f16"]
    cells = {(c["format"], c["M"]): c for c in own}
    batches = (1, 4, 16, 64, 512, 4096)
    rows = table(PERFORMANCE, f"| {label} | M = {' | '.join(map(str, batches))} |")
    assert len(rows) == count
    for fmt, times in rows.items():
        kind, like = ("cublas_us", own[0]["format"]) if fmt.startswith("cuBLAS") else ("us", fmt)
        assert times == pytest.approx([cells[like, m][kind] for m in batches], abs=0.051)


def test_aims_on_an_h100(h100: dict[str, list[dict[str, Any]]]) -> None:
    kinds = {"q4_0 to q8_0": "matmul", "k-bit": "kbit", "FP4, int4": "fp4-int4", "trellis": "trellis"}
    own = {kind: [c for c in h100[name] if c["activation"] == "f16"] for kind, name in kinds.items()}
    aims = {"1 to 16": 1.1, "32": 1.2, "64": 1.3, "128": 1.15, "256, 512": 1.08, "1024 and more": 1.05}
    last = [16, 32, 64, 128, 512, 4096]
    for (rows, aim), first, most in zip(aims.items(), [0, *last], last, strict=False):
        found = [c for c in itertools.chain(*own.values()) if first < c["M"] <= most]
        reached = sum(c["us"] <= aim * c["floor_us"] for c in found)
        faster = sum(c["us"] <= c["cublas_us"] for c in found)
        assert f"| {rows} | {aim} | {reached} of {len(found)} | {faster} of {len(found)} |" in PERFORMANCE
    for kind, cells in own.items():
        assert f"| {kind} | {ranges(cells)} |" in PERFORMANCE


def test_k_quants_and_exl3_on_an_h100() -> None:
    kquants, exl3 = (
        json.loads((ROOT / f"examples/benchmarks/h100-{name}.json").read_text())["cells"]
        for name in ("kquants", "exl3")
    )
    short = [c["us"] <= c["cublas_us"] for c in kquants if c["M"] <= 512]
    assert f"Of k-quants and IQ4 {sum(short)} of {len(short)} products of up to 512 rows" in PERFORMANCE
    times = [c["us"] / c["floor_us"] for c in exl3 if c["M"] <= 16]
    assert f"EXL3's walks take {min(times):.1f} to {max(times):.1f} times the floor" in PERFORMANCE


def test_attention_near_its_floor_on_an_h100(h100: dict[str, list[dict[str, Any]]]) -> None:
    long = [c for c in h100["attention"] if c["context"] >= 32768]
    near = sum(c["us"] <= 1.2 * c["floor_us"] for c in long)
    assert f"from 32k tokens on {near} of {len(long)} caches are within 1.2 times" in PERFORMANCE


def test_how_many_times_as_fast_as_tinygemm(records: dict[str, Any]) -> None:
    cells = {(c["format"], f"{c['N']} x {c['K']}", c["M"]): c for c in records["peers"]["cells"]}
    batches = (1, 2, 4, 8, 16, 32, 64)
    rows = table(PERFORMANCE, f"| W | M = {' | '.join(map(str, batches))} |")
    assert len(rows) == 4
    for shape, times in rows.items():
        own = [cells["q4_0", shape, m] for m in batches]
        assert times == pytest.approx([c["tinygemm_us"] / c["us"] for c in own], abs=0.051)


@pytest.mark.parametrize(
    ("name", "label", "count"), [("h200-trellis-moe", "format", 7), ("h100-moe", "on an H100", 8)]
)
def test_times_of_mixtures(name: str, label: str, count: int) -> None:
    every = json.loads((ROOT / f"examples/benchmarks/{name}.json").read_text())["cells"]
    cells = {(c["format"], c["M"]): c for c in every if c["op"] == "moe"}
    batches = (1, 2, 4, 8, 16, 64, 512, 4096)
    rows = table(PERFORMANCE, f"| {label} | 1 token | {' | '.join(map(str, batches[1:]))} |")
    assert len(rows) == count
    for name, times in rows.items():
        kind = {"cuBLAS, dense": "cublas_us", "floor, q4_0": "floor_us"}.get(name, "us")
        measured = [cells[name if kind == "us" else "q4_0", m][kind] for m in batches]
        assert times == pytest.approx(measured, abs=0.51)


def test_times_of_mixtures_of_exl3(records: dict[str, Any]) -> None:
    cells = {(c["format"], c["M"]): c for c in records["exl3-moe"]["cells"]}
    batches = (1, 2, 4, 8, 16, 64, 512, 4096)
    rows = table(PERFORMANCE, f"| EXL3 | 1 token | {' | '.join(map(str, batches[1:]))} |")
    assert len(rows) == 2
    for name, times in rows.items():
        assert times == pytest.approx([cells[name, m]["us"] for m in batches], abs=0.51)
    few = [c for c in cells.values() if c["M"] <= 16]
    over, faster = ([c[a] / c[b] for c in few] for a, b in (("us", "floor_us"), ("cublas_us", "us")))
    said = f"experts take {min(over):.1f} to {max(over):.1f} times theirs at 1 to 16 tokens, where they are "
    said += f"{min(faster):.1f} to {max(faster):.1f} times as fast as dense cuBLAS"
    assert said in " ".join(PERFORMANCE.split())


@pytest.mark.parametrize(("gpu", "label"), [("h200", "bits"), ("h100", "bits, on an H100")])
def test_times_of_attention(gpu: str, label: str) -> None:
    every = json.loads((ROOT / f"examples/benchmarks/{gpu}-attention.json").read_text())["cells"]
    cells = {(c["bits"], c["batch"], c["context"]): c for c in every if c["kv_heads"] == 8}
    rows = table(PERFORMANCE, f"| {label} | 4k tokens | 32k | 128k | 8 x 4k | 8 x 32k | 8 x 128k |")
    assert len(rows) == 8
    for bits, times in rows.items():
        kind = {"torch SDPA, float16": "sdpa_us", "floor, 4 bits": "floor_us"}.get(bits, "us")
        sizes = itertools.product((1, 8), (4096, 32768, 131072))
        keys = ((bits if kind == "us" else "4", *size) for size in sizes)
        measured = [cells[key][kind] for key in keys]
        assert times == pytest.approx(measured, abs=0.051)


@pytest.mark.parametrize(
    ("family", "record", "formats"),
    [
        ("q4_0 to q8_0", "matmul", ()),
        ("k-bit", "kbit", ()),
        ("FP4, int4", "fp4-int4", ()),
        ("k-quants", "kquants", ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")),
        ("IQ4", "kquants", ("iq4_nl", "iq4_xs")),
        ("trellis", "trellis-moe", ()),
        ("EXL3", "exl3", ()),
    ],
)
def test_ranges_over_the_floor(
    records: dict[str, Any], family: str, record: str, formats: tuple[str, ...]
) -> None:
    cells = [
        c
        for c in records[record]["cells"]
        if (c["op"], c["activation"]) == ("matmul", "f16") and (not formats or c["format"] in formats)
    ]
    assert f"| {family} | {ranges(cells)} |" in PERFORMANCE


def ranges(cells: list[dict[str, Any]]) -> str:
    """The least and the most of times over the floor's, and cuBLAS's, by rows of x: a table's row."""
    groups = [
        [c["us"] / c[other] for c in cells if first <= c["M"] <= last]
        for other, first, last in (
            ("floor_us", 1, 16),
            ("floor_us", 32, 64),
            ("floor_us", 128, 512),
            ("floor_us", 1024, 4096),
            ("cublas_us", 256, 512),
            ("cublas_us", 1024, 4096),
        )
    ]
    return " | ".join(f"{min(group):.2f} to {max(group):.2f}" for group in groups)


def test_how_many_cells_reach_their_aim(records: dict[str, Any]) -> None:
    """The README's table of aims, and its comparison with cuBLAS at few rows."""
    cells = {
        name: [c for c in records[name]["cells"] if (c["op"], c["activation"]) == ("matmul", "f16")]
        for name in ("matmul", "kbit", "fp4-int4", "kquants", "trellis-moe", "exl3")
    }
    aims = {16: 1.1, 32: 1.2, 64: 1.3, 128: 1.15, 512: 1.08, 4096: 1.05}  # up to so many rows
    rows = {
        "1 to 64 | 1.1 (32 rows: 1.2, 64: 1.3)": (1, 64),
        "128 to 512 | 1.08 (128 rows: 1.15)": (128, 512),
        "1024 and more | 1.05": (1024, 4096),
    }
    for label, (first, last) in rows.items():
        found = [c for c in itertools.chain(*cells.values()) if first <= c["M"] <= last]
        reached = [
            c for c in found if c["us"] <= next(a for m, a in aims.items() if c["M"] <= m) * c["floor_us"]
        ]
        no_slower = [c["us"] <= c["cublas_us"] for c in found if c["M"] >= 256]
        text = f"{sum(no_slower)} of {len(no_slower)}" if no_slower else ""
        assert f"| {label} | {len(reached)} of {len(found)} | {text} |".replace("|  |", "| |") in README
    for name, text in (
        ("matmul", "with q4_0 to q8_0 weights are {} times"),
        ("kquants", "those with k-quants and IQ4 {} times"),
    ):
        faster = [c["cublas_us"] / c["us"] for c in cells[name] if c["M"] <= 16]
        low, high = min(faster), max(faster)
        assert text.format(f"{low:.2f} to {high:.2f}") in " ".join(README.split())
    q4_0 = [c["us"] < c["cublas_us"] for c in cells["matmul"] if c["format"] == "q4_0"]
    assert f"With q4_0 weights and 1 to 4096 rows {sum(q4_0)} of {len(q4_0)} measured cells" in " ".join(
        README.split()
    )


FAMILIES = {
    "q4_0 to q8_0": ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
    "k-bit": ("kbit2", "kbit3", "kbit4", "kbit5"),
    "mxfp4, nvfp4": ("mxfp4", "nvfp4"),
    "int4": tuple(f"int4-{group}{zeros}" for group in (32, 64, 128) for zeros in ("", "-zeros")),
    "k-quants": ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    "IQ4": ("iq4_nl", "iq4_xs"),
    "trellis": tuple(f"trellis{bits}{group}" for bits in (2, 3, 4) for group in ("", "-32")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_done_once_for_a_weight(records: dict[str, Any], family: str) -> None:
    shown = []
    for work in ("quantize", "encode", "dequantize", "prepare", "repack", "restore"):
        times = [
            c["us"] / c["floor_us"]
            for c in records["weights"]["cells"]
            if c["work"] == work and c["format"] in FAMILIES[family]
        ]
        ends = [f"{end(times):.2f}" for end in (min, max)] if times else []
        shown.append(" to ".join(dict.fromkeys(ends)))
    assert re.sub(" +", " ", f"| {family} | {' | '.join(shown)} |") in PERFORMANCE


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


@pytest.mark.parametrize("label", HOST)
def test_what_a_call_takes_the_host(records: dict[str, Any], label: str) -> None:
    cells = records["host"]["cells"]
    times = [c["us"] for c in cells if (c["work"], c["activation"], c["bits"]) == HOST[label]]
    around = f"{min(times):.1f} to {max(times):.1f}" if len(times) > 1 else ""
    assert f"| {label} | {median(times):.1f} | {around} |".replace("|  |", "| |") in PERFORMANCE


def test_times_of_conversions(records: dict[str, Any]) -> None:
    cells = {(c["codes"], c["method"], c["M"]): c for c in records["dequant"]["cells"]}
    shown = {
        "E2M1: masks and shifts of plain nibbles": ("e2m1", "bits, uncorrected"),
        "E2M1: masks and shifts, in the fragment layout's order": ("e2m1", "bits of the fragment layout"),
        "E2M1: byte permutes": ("e2m1", "byte permutes"),
        "any 16 numbers: shared table of pairs, one for each lane": ("any 16", "shared table of pairs"),
        "any 16 numbers: shared table of single ones": ("any 16", "shared table of values"),
        "any 16 numbers: byte-permute table": ("any 16", "byte-permute table"),
        "integers − 8: magic number, subtracted": ("u4b8", "bits"),  # noqa: RUF001
        "integers − 8: masks alone, offset by sums of x": ("u4b8", "bits, masked"),  # noqa: RUF001
    }
    for label, (codes, method) in shown.items():
        (row,) = re.findall(rf"^\| {label} \| ([\d. |]+) \|$", PERFORMANCE, re.MULTILINE)
        rate, instructions, *us = (float(cell) for cell in row.split(" | "))
        alone = cells[codes, method, None]
        assert rate == pytest.approx(alone["values_per_ns"], abs=0.51)
        assert instructions == pytest.approx(alone["instructions"], abs=0.051)
        assert us == pytest.approx([cells[codes, method, m]["us"] for m in (1, 8)], abs=0.051)
