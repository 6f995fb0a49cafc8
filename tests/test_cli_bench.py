"""`cuquant bench`: records that it shows, and what it refuses."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tqdm
from cells import RECORD, attention_cell, cell
from commands import Run, assert_one_line_error

from cuquant import device
from cuquant.bench import AttentionCell, Record, record as records
from cuquant.bench.attention import CONTEXTS, SIZES


def test_bench_shows_a_record(run: Run) -> None:
    done = run("bench", "--from", RECORD, "-o", "md")
    assert done.status == 0
    assert done.out == RECORD.with_suffix(".md").read_text(encoding="utf-8")
    commit = json.loads(RECORD.read_text())["commit"][:12]
    assert done.err == (
        f"{RECORD}: 650 of 650 cells, NVIDIA H200, commit {commit} (cuquant 0.1.0, CuPy 14.2.0, "
        "CUDA runtime 13.2, CUDA driver 13.0, NVRTC 13.0, NumPy 2.5.2, Python 3.12.3); "
        "floors by 4460 GB/s, 770 TFLOP/s\n"
    )


def test_bench_shows_some_of_a_record(run: Run) -> None:
    some = ("--formats", "q4_0,q8_0", "--activations", "f16", "--shapes", "4096x4096", "--batches", "1,64")
    done = run("bench", "--from", RECORD, *some, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [(row["format"], row["M"]) for row in rows] == [
        (f, m) for f in ("q4_0", "q8_0") for m in ("1", "64")
    ]
    assert done.err.startswith(f"{RECORD}: 4 of 650 cells, NVIDIA H200, commit ")
    assert done.err.count("\n") == 1
    done = run("bench", "--from", RECORD, *some[2:-1], "1,3,5", "--formats", "q4_0,kbit2", "-o", "csv")
    assert len(done.out.splitlines()) == 2
    assert done.err.startswith(
        f"{RECORD}: among these cells is no format kbit2; no M 3, 5\n{RECORD}: 1 of 650"
    )
    done = run("bench", "--from", RECORD, "--batches", "3")
    assert_one_line_error(done)
    assert "the record has no such cells; it has M 1, 2, 4, 8, " in done.err
    done = run("bench", "moe", "--from", RECORD)
    assert_one_line_error(done)
    assert "the record has no such cells; it has op matmul" in done.err
    both = RECORD.with_name("h200-trellis-moe.json")
    done = run("bench", "moe", "--from", both, "--batches", "1", "-o", "csv")
    assert {(row["op"], row["M"]) for row in csv.DictReader(io.StringIO(done.out))} == {("moe", "1")}


@pytest.mark.parametrize(
    ("name", "some", "key", "value"),
    [
        ("attention", ("--bits", "mixed"), "bits", "mixed"),
        ("attention", ("--contexts", "131072"), "context", "131072"),
        ("attention", ("--heads", "32/32"), "kv_heads", "32"),
        ("attention", ("--batches", "8"), "batch", "8"),
        ("attention", ("--lengths", "equal", "--contexts", "1024"), "context", "1024"),
        ("append", ("--tokens", "16"), "tokens", "16"),
        ("append", ("--heads", "32/8"), "kv_heads", "8"),
        ("trellis-moe", ("--experts", "8"), "op", "moe"),
        ("trellis-moe", ("--top-k", "2", "--batches", "4"), "M", "4"),
    ],
)
def test_options_select_what_a_record_holds(
    run: Run, name: str, some: tuple[str, ...], key: str, value: str
) -> None:
    done = run("bench", "--from", RECORD.with_name(f"h200-{name}.json"), *some, "-o", "csv")
    assert {row[key] for row in csv.DictReader(io.StringIO(done.out))} == {value}


def test_batches_of_products_and_of_attention_in_one_record(run: Run, tmp_path: Path) -> None:
    record = Record(tmp_path / "r.json", {"device": "a GPU", "versions": {}, "commit": None})
    for made in (cell(M=1), cell(M=8), attention_cell(batch=1), attention_cell(batch=8)):
        record.add(made)
    done = run("bench", "--from", record.path, "--batches", "8", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [(row["op"], row["M"], row["batch"]) for row in rows] == [
        ("matmul", "8", ""),
        ("attention", "", "8"),
    ]


@pytest.mark.parametrize(
    ("name", "some", "problem"),
    [
        ("matmul", ("--bits", "4"), "has cells of matmul, which take no --bits"),
        ("trellis-moe", ("--contexts", "1024"), "has cells of matmul, moe, which take no --contexts"),
        ("attention", ("--top-k", "2"), "has cells of attention, which take no --top-k"),
        ("attention", ("--batches", "3"), "the record has no such cells; it has batch 1, 8, 32"),
        ("attention", ("--tokens", "1"), "has cells of attention, which take no --tokens"),
        ("attention-queries", ("--lengths", "spread"), "the record has no such cells; it has lengths equal"),
        ("append", ("--lengths", "equal"), "has cells of append, which take no --lengths"),
        ("append", ("--batches", "3"), "the record has no such cells; it has batch 1, 8"),
        ("append", ("--bits", "mixed"), "the record has no such cells; it has bits 16, 8, 4, 3, 2"),
    ],
)
def test_options_that_fit_no_cell_of_a_record(
    run: Run, name: str, some: tuple[str, ...], problem: str
) -> None:
    done = run("bench", "--from", RECORD.with_name(f"h200-{name}.json"), *some)
    assert_one_line_error(done)
    assert problem in done.err


def test_tokens_of_several_widths_are_not_appended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuquant.cli.bench._needs_a_gpu", lambda: None)
    done = run("bench", "append", "--bits", "4,mixed")
    assert done.status == 2
    assert "append takes tokens of one width: 16, 8, 4, 3, 2 bits" in done.err


def test_help_has_contexts_as_they_are_given(run: Run) -> None:
    text = run("bench", "--help").out
    assert f"attention: cached tokens ({CONTEXTS[0]} to {CONTEXTS[-1]})" in " ".join(text.split())


def test_help_has_the_kinds_of_lengths(run: Run) -> None:
    text = " ".join(run("bench", "attention", "--help").out.split()).replace("- ", "-")
    assert all(f" {kind}; " in text or f" {kind}, " in text for kind in SIZES)
    assert "context is the mean of the sequences' lengths" in text


def test_attention_of_lengths_that_are_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are measured once, recorded and shown; a bar counts them before."""
    measured, counts = [], []

    def made(key: dict[str, Any], others: dict[str, Any], floor_us: Any) -> AttentionCell:
        measured.append(key["lengths"])
        return attention_cell(**key, **others)

    bar: Any = tqdm.tqdm

    def counted(cells: Iterable[Any], total: int, **options: Any) -> Any:
        counts.append(total)
        return bar(cells, total=total, **options)

    monkeypatch.setattr("cuquant.cli.bench._needs_a_gpu", lambda: None)
    monkeypatch.setattr("tqdm.tqdm", counted)
    facts: dict[str, Any] = {"device": "a GPU", "versions": {}, "commit": None}
    monkeypatch.setattr(records, "environment", lambda packages, by_tuned: facts)
    module = importlib.import_module("cuquant.bench.attention")
    for name, value in {"warm_up": lambda: None, "_cell": made, "_PEERS": {"sdpa_us": None}}.items():
        monkeypatch.setattr(module, name, value)
    command = ("bench", "attention", "--record", tmp_path / "r.json", "-o", "csv", "--batches", "8")
    some = ("--contexts", "64", "--bits", "4,mixed", "--heads", "8/2")
    for kinds in ("spread", "spread,one-long"):
        done = run(*command, *some, "--lengths", kinds)
        assert done.status == 0, done.err
    assert measured == ["spread"] * 2 + ["one-long"] * 2
    assert counts == [2, 4]
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [(row["lengths"], row["context"], row["sdpa_us"]) for row in rows] == [
        (kind, "64", "") for kind in measured
    ]
    done = run("bench", "attention", "--lengths", "spread", "--batches", "1")
    assert_one_line_error(done)
    assert "lengths of a single sequence are equal, not spread" in done.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--activations", "f8"), "activations are f16, bf16, f32, q8_1"),
        (("--peers", "marlin"), "peers are tinygemm, gemlite, or none"),
        (("--shapes", "5"), "a shape is NxK, as 14336x4096"),
        (("--shapes", "axb"), "argument --shapes: invalid"),
        (("--batches", "4k"), "argument --batches: '4k' is not a list of positive whole numbers"),
        (("--from", RECORD, "--record", "r.json"), "not allowed with argument --from"),
        (("--from", RECORD, "--peers", "none"), "--peers are timed, and --from times nothing"),
        (("--from", RECORD, "--plot", "p.jpg"), r"p.jpg: a plot is a .png, .svg or .pdf file"),
        (("--from", RECORD, "--plot", "none/p.png"), "there is no folder none"),
        (("moe", "--peers", "none"), "moe takes no --peers"),
        (("--top-k", "2"), "matmul takes no --top-k"),
        (("weights", "--batches", "1"), "weights takes no --batches"),
        (("mixture",), "invalid choice: 'mixture'"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[object, ...], problem: str) -> None:
    done = run("bench", *arguments)
    assert (done.status, done.out) == (2, "")
    assert problem in done.err


def test_bench_without_a_gpu_says_why(run: Run) -> None:
    if device.gpu_problem() is None:
        pytest.skip("there is a GPU")
    done = run("bench", "--peers", "none")
    assert_one_line_error(done)
    assert "no CUDA device can be used" in done.err
    assert "; --from RECORD.json shows a record of another machine's GPU\n" in done.err


def test_bench_needs_a_gpu_before_what_draws(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise ImportError("a plot needs matplotlib")

    monkeypatch.setattr(device, "gpu_problem", lambda: "there is none")
    monkeypatch.setattr(records, "plotter", nothing)
    done = run("bench", "--shapes", "64x64", "--plot", "p.svg")
    assert_one_line_error(done)
    assert "no CUDA device can be used: there is none; --from RECORD.json" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "32/7"], "heads are H/K"),
        (["--heads", "8"], "heads are H/K"),
        (["--heads", "0/8"], "heads are H/K"),
        (["--heads=-8/8"], "heads are H/K"),
        (["--bits", "5"], "bits are"),
        (["--lengths", "even"], "lengths are equal, spread, one-long"),
    ],
)
def test_what_attention_cannot_be_timed_for(run: Run, arguments: list[str], message: str) -> None:
    done = run("bench", "attention", *arguments)
    assert done.status == 2
    assert message in done.err
