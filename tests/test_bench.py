"""Benchmarks: their records and tables, and the command."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cells import KEYS, RECORD, cell
from commands import Run, assert_one_line_error

from cuquant import device
from cuquant.bench import AttentionCell, Record, WeightCell, record as records
from cuquant.bench.attention import CONTEXTS
from cuquant.bench.ceilings import Ceilings
from cuquant.cuda import sources


@pytest.fixture
def header(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The environment of a GPU that is not there."""
    facts = {"device": "a GPU", "versions": {}, "commit": "0123"}
    monkeypatch.setattr(
        records,
        "environment",
        lambda packages=(), by_tuned=True: facts | {"versions": dict.fromkeys(packages)},
    )
    return facts


# Records.


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A repository with sources of its own, committed, which the package takes for its."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    for name in ("kernels/README.md", "kernels/ops/gemm.cu", "cuquant/plan.py", "docs/a.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.delenv("CUQUANT_COMMIT", raising=False)
    monkeypatch.setattr(sources, "folder", lambda: tmp_path / "kernels")
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "a")):
        subprocess.run((*git, *command), check=True)
    return tmp_path


def test_the_commit_is_that_of_the_checkout_itself(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = records.commit()
    assert head is not None
    assert re.fullmatch("[0-9a-f]{40}", head)
    (checkout / "docs" / "a.md").write_text("2")
    assert records.commit() == head
    installed = checkout / "lib" / "cuquant" / "kernels"
    installed.mkdir(parents=True)
    monkeypatch.setattr(sources, "folder", lambda: installed)
    assert records.commit() is None
    monkeypatch.setenv("CUQUANT_COMMIT", "0123")
    assert records.commit() == "0123"


@pytest.mark.parametrize("changed", ["kernels/ops/gemm.cu", "cuquant/plan.py", "cuquant/new.py"])
def test_changed_sources_are_another_commit(checkout: Path, changed: str) -> None:
    """And other changes another one: their cells are not of one record."""
    head, found = records.commit(), []
    for text in ("2", "3", "3"):
        (checkout / changed).write_text(text)
        found.append(records.commit())
    first, other, same = found
    assert re.fullmatch(f"{head}-[0-9a-f]{{8}}-dirty", str(first))
    assert first != other
    assert other == same
    assert f"commit {str(first)[:12]}-{str(first)[41:]} (" in Record(None, facts(first)).origin


def facts(commit: str | None) -> dict[str, Any]:
    """A record's header."""
    return {"device": "a GPU", "versions": {}, "commit": commit}


@pytest.mark.parametrize(("name", "cells"), [("matmul", 650), ("kbit", 260), ("fp4-int4", 650)])
def test_the_committed_records_read_and_write_as_they_are(name: str, cells: int) -> None:
    path = RECORD.with_name(f"h200-{name}.json")
    record = Record.read(path)
    assert [list(c)[: len(KEYS)] for c in record.cells] == [KEYS] * cells
    assert record.to_json() + "\n" == path.read_text(encoding="utf-8")
    assert record.render("md") + "\n" == path.with_suffix(".md").read_text(encoding="utf-8")


def test_a_record_without_peers_reads_and_writes_as_it_is(tmp_path: Path) -> None:
    text = re.sub(r', "(tinygemm|gemlite)_us": null', "", RECORD.read_text(encoding="utf-8"))
    (tmp_path / "old.json").write_text(text, encoding="utf-8")
    record = Record.read(tmp_path / "old.json")
    assert [list(c) for c in record.cells] == [KEYS] * 650
    assert record.to_json() + "\n" == text


def test_a_record_is_continued(header: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Record.start(path).add(cell())
    record = Record.start(path)
    assert {"op": "matmul", "format": "q4_0", "activation": "f16", "M": 1, "N": 64, "K": 128} in record
    assert {"op": "matmul", "format": "q4_0", "activation": "f16", "M": 2, "N": 64, "K": 128} not in record
    record.add(cell(M=2))
    assert [c["M"] for c in Record.read(path).cells] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match=r"r\.json is a record of another device, version, tuning or commit"):
        Record.start(path, ["torch"])
    Record.read(path).add(cell(M=3))
    with pytest.raises(OSError, match=r"r\.json has been changed by another process since"):
        record.add(cell(M=4))
    assert [c["M"] for c in Record.read(path).cells] == [1, 2, 3]
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none: r\.json cannot"):
        Record.start(tmp_path / "none" / "r.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "1", '{"cells": []}', "\xff", '{"cells": [1], "device": "x"}']
)
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"r\.json is not a record of cuquant bench$"):
        Record.read(path)
    path.write_text('{"cells": ' + "[" * 100_000)
    with pytest.raises(ValueError, match="is not a record"):
        Record.read(path)
    path.write_text(json.dumps({"device": "x", "versions": {}, "commit": None, "cells": [{"op": "matmul"}]}))
    with pytest.raises(ValueError, match="is not a record"):
        Record.read(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": 5},
        {"device": None},
        {"versions": None},
        {"versions": ["cupy"]},
        {"commit": 5},
        {"verdict": 5},
        {"ceilings": 5},
        {"ceilings": {"read_gbps": 1}},
        {"ceilings": {"read_gbps": 0, "tflops": 1}},
        {"ceilings": {"read_gbps": "1", "tflops": 1}},
        *(
            {"cells": [asdict(cell()) | wrong]}
            for wrong in (
                {"us": 0},
                {"us": None},
                {"us": "x"},
                {"us": 10**400},
                {"floor_us": "x"},
                {"M": [1]},
                {"gbps": float("nan")},
            )
        ),
        {"cells": {}},
        {"cells": ""},
    ],
    ids=lambda wrong: json.dumps(wrong)[:60],
)
def test_a_record_of_other_types(run: Run, tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "r.json"
    right: dict[str, Any] = {"device": "a GPU", "versions": {}, "commit": None, "cells": [asdict(cell())]}
    path.write_text(json.dumps(right), encoding="utf-8")
    assert run("bench", "--from", path).status == 0
    path.write_text(json.dumps(right | wrong), encoding="utf-8")
    assert run("bench", "--from", path) == (
        1,
        "",
        f"cuquant: error: {path} is not a record of cuquant bench\n",
    )


def test_some_cells_of_a_record() -> None:
    record = Record.read(RECORD)
    some = record.only(
        format=["q4_0", "q8_0"], activation=None, shape=[(4096, 4096), (8192, 8192)], M=[1, 16]
    )
    assert len(some.cells) == 2 * 2 * 2 * 2
    assert {(c["N"], c["K"]) for c in some.cells} == {(4096, 4096), (8192, 8192)}
    assert some.header == record.header
    problem = "the record has no such cells; it has shape 4096x4096, 14336x4096, .*8192; no bits"
    with pytest.raises(ValueError, match=problem):
        record.only(shape=[(1, 1)], bits=["4"], format=None)


def test_no_cells_of_a_record_without_any(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(Record(None, {"device": "a GPU", "versions": {}, "commit": None}).to_json())
    for some in ((), ("--formats", "q4_0")):
        assert run("bench", "--from", path, *some) == (1, "", "cuquant: error: the record has no cells\n")


def test_where_a_record_is_from() -> None:
    facts = {"device": "a GPU", "versions": {"cuda_runtime": 13020, "torch": "2.9"}, "commit": None}
    assert Record(None, facts).origin == "a GPU, an installed package (CUDA runtime 13.2, torch 2.9)"


def test_tables_compare_with_what_was_measured() -> None:
    record = Record(None, {}, [])
    record.add(cell(tinygemm_us=10.0))
    record.add(cell(M=2))
    shown, *rows = (line.split() for line in record.render("table").splitlines() if "--" not in line)
    assert shown[-10:] == [
        "tinygemm_us",
        "time",
        "/",
        "floor",
        "speed",
        "/",
        "cuBLAS",
        "speed",
        "/",
        "tinygemm",
    ]
    assert rows[0][-4:] == ["10.0", "2.00", "1.50", "2.50"]
    assert rows[1][-2:] == ["2.00", "1.50"]
    assert "gemlite" not in " ".join(shown)
    read = list(csv.DictReader(io.StringIO(record.render("csv"))))
    ratios = ["time / floor", "speed / cuBLAS", "speed / tinygemm", "speed / gemlite"]
    assert list(read[0]) == [*KEYS, "tinygemm_us", "gemlite_us", *ratios]
    assert [row["tinygemm_us"] for row in read] == ["10.0", ""]
    assert [[row[name] for name in ratios] for row in read] == [
        ["2.0", "1.5", "2.5", ""],
        ["2.0", "1.5", "", ""],
    ]
    assert list(record.to_pandas()["speed / cuBLAS"]) == [1.5, 1.5]
    assert Record(None, {}, []).render("table") == ""


def test_a_gpu_of_unknown_ceilings_has_no_floor() -> None:
    record = Record(None, {}, [])
    record.add(cell(floor_us=None))
    assert "floor" not in record.render("table")


def test_ceilings_are_measured_once_for_a_record(
    header: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def measured() -> Ceilings:
        asked.append(True)
        return Ceilings(1000.0, 100.0)

    monkeypatch.setattr(records, "measured", measured)
    record = Record.start(tmp_path / "r.json")
    assert record.ceilings is None
    assert record.floor_us(1e6) == 1 + 2.4
    assert record.floor_us(1e6, 1e9) == 10 + 2.4
    record.add(cell())
    again = Record.start(tmp_path / "r.json")
    assert again.ceilings == (1000.0, 100.0)
    assert again.floor_us(2e6) == 2 + 2.4
    assert len(asked) == 1
    assert "floors by 1000 GB/s, 100 TFLOP/s" in again.origin
    assert Record.read(RECORD).ceilings == (4460.0, 770.0)
    h200 = Record(None, {"device": "NVIDIA H200", "versions": {}, "commit": None})
    assert h200.floor_us(4.46e9) == pytest.approx(1000 + 2.4)


# The command, for a record.


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
    ],
)
def test_options_that_fit_no_cell_of_a_record(
    run: Run, name: str, some: tuple[str, ...], problem: str
) -> None:
    done = run("bench", "--from", RECORD.with_name(f"h200-{name}.json"), *some)
    assert_one_line_error(done)
    assert problem in done.err


def test_help_has_contexts_as_they_are_given(run: Run) -> None:
    text = run("bench", "--help").out
    assert f"attention: cached tokens ({CONTEXTS[0]} to {CONTEXTS[-1]})" in " ".join(text.split())


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


def test_records_in_a_notebook() -> None:
    record = Record(None, {}, [])
    record.add(cell(M=3))
    assert "<table>" in record._repr_html_()
    assert list(record.to_pandas()["M"]) == [3]


def attention_cell(**changes: Any) -> AttentionCell:
    facts: dict[str, Any] = {"op": "attention", "bits": "4", "batch": 1, "heads": 32, "kv_heads": 8}
    facts |= {"context": 1024, "us": 10.0, "floor_us": 8.0, "sdpa_us": 30.0, "gbps": 1.0, "nmse": 1e-8}
    return AttentionCell(**(facts | changes))


def test_cells_of_attention(header: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record = Record.start(path)
    record.add(attention_cell())
    record.add(attention_cell(bits="mixed", sdpa_us=None))
    record = Record.start(path)
    key = {"op": "attention", "bits": "4", "batch": 1, "heads": 32, "kv_heads": 8, "context": 1024}
    assert key in record
    assert key | {"context": 4096} not in record
    assert [c["bits"] for c in record.only(bits=["mixed"], M=None).cells] == ["mixed"]
    shown, *rows = (line.split() for line in record.render("table").splitlines() if "--" not in line)
    assert shown[-6:] == ["time", "/", "floor", "speed", "/", "SDPA"]
    assert rows[0][-2:] == ["1.25", "3.00"]


def test_cells_of_passes_over_weights_in_a_record(header: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    facts: dict[str, Any] = {"op": "weights", "format": "q4_0", "N": 64, "K": 128}
    record = Record.start(path)
    record.add(WeightCell(**facts, work="prepare", us=5.0, floor_us=4.0, gbps=1.0))
    record.add(WeightCell(**facts, work="repack", us=9.0, floor_us=None, gbps=1.0))
    record = Record.start(path)
    assert facts | {"work": "repack"} in record
    assert facts | {"work": "restore"} not in record
    shown, *rows = (line.split() for line in record.render("table").splitlines() if "--" not in line)
    assert shown[-3:] == ["time", "/", "floor"]
    assert [row[-1] for row in rows] == ["1.25", "1.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "32/7"], "heads are H/K"),
        (["--heads", "8"], "heads are H/K"),
        (["--bits", "5"], "bits are"),
    ],
)
def test_what_attention_cannot_be_timed_for(run: Run, arguments: list[str], message: str) -> None:
    done = run("bench", "attention", *arguments)
    assert done.status == 2
    assert message in done.err
