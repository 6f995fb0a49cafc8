"""Benchmarks: their records and tables."""

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
from cells import KEYS, RECORD, attention_cell, cell
from commands import Run
from gguf_files import forbid

from cuquant.bench import Record, WeightCell, record as records
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


@pytest.mark.parametrize("what", ["made", "listed"])
def test_a_folder_that_takes_no_record_is_told_before_anything_is_measured(
    header: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    forbid(monkeypatch, tmp_path, what)
    with pytest.raises(PermissionError, match=tmp_path.name):
        Record.start(tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


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
        {"ceilings": {"read_gbps": 10**400, "tflops": 1}},
        {"ceilings": {"read_gbps": 1, "tflops": float("nan")}},
        *(
            {"cells": [asdict(cell()) | wrong]}
            for wrong in (
                {"us": 0},
                {"us": None},
                {"us": "x"},
                {"us": 10**400},
                {"floor_us": "x"},
                {"M": [1]},
                {"M": "mixed"},
                {"M": None},
                {"N": 0},
                {"K": -64},
                {"K": 64.0},
                {"N": True},
                {"cublas_us": 0},
                {"cublas_us": False},
                {"gbps": "x"},
                {"tflops": -1.0},
                {"tflops": None},
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


def test_a_terminal_obeys_no_record() -> None:
    header = {"device": "a \x1b[2JGPU", "versions": {"cupy": "\r1"}, "commit": "\x07"}
    record = Record(None, header, [asdict(cell(format="\x1b[2J")) | {"\x1b[3J": "x"}], "<b>\x1b[4J")
    told = [record.render(style) for style in ("table", "md", "html")] + [record.origin]
    assert not any("\x1b" in text or "\r" in text or "\x07" in text for text in told)
    assert all(r"\x1b[2J" in text for text in told)
    assert r"<p>&lt;b&gt;\x1b[4J</p>" in told[2]


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


def test_records_in_a_notebook() -> None:
    record = Record(None, {}, [])
    record.add(cell(M=3))
    assert "<table>" in record._repr_html_()
    assert list(record.to_pandas()["M"]) == [3]


def test_cells_of_attention(header: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record = Record.start(path)
    record.add(attention_cell())
    record.add(attention_cell(bits="mixed", sdpa_us=None))
    record = Record.start(path)
    key = {"op": "attention", "bits": "4", "batch": 1, "heads": 32, "kv_heads": 8, "context": 1024}
    assert key in record
    assert key | {"context": 4096} not in record
    del record.cells[0]["queries"]  # as records before had no such
    assert key | {"queries": 1} in record
    assert key | {"queries": 4} not in record
    assert len(record.only(queries=[1]).cells) == 2
    assert [c["bits"] for c in record.only(bits=["mixed"], M=None).cells] == ["mixed"]
    shown, *rows = (line.split() for line in record.render("table").splitlines() if "--" not in line)
    assert shown[-6:] == ["time", "/", "floor", "speed", "/", "SDPA"]
    assert rows[0][-2:] == ["1.25", "3.00"]


def test_lengths_of_sequences_in_a_record(header: dict[str, Any], tmp_path: Path) -> None:
    """Cells of records without them are of equal ones; tables tell them apart."""
    path = tmp_path / "r.json"
    record = Record.start(path)
    record.add(attention_cell(batch=8, context=8192))
    assert "lengths" in record.cells[0]
    del record.cells[0]["lengths"]  # as records before had no such
    assert "lengths" not in record.render("table")
    for kind in ("spread", "one-long"):
        record.add(attention_cell(batch=8, context=8192, lengths=kind, sdpa_us=None))
    record = Record.start(path)
    key = {"op": "attention", "bits": "4", "batch": 8, "heads": 32, "kv_heads": 8, "context": 8192}
    assert all(key | {"lengths": kind} in record for kind in ("equal", "spread", "one-long"))
    assert key | {"context": 1024, "lengths": "spread"} not in record
    assert [len(record.only(lengths=[kind]).cells) for kind in ("equal", "one-long")] == [1, 1]
    assert record.lacking(lengths=["equal", "even"]) == "no lengths even"
    shown, *rows = (line.split() for line in record.render("table").splitlines() if "--" not in line)
    assert "lengths" in shown
    assert [row.count("spread") for row in rows] == [0, 1, 0]
    for style in ("table", "md", "csv"):
        lines = record.render(style).splitlines()
        assert [sum(kind in line for line in lines) for kind in ("spread", "one-long")] == [1, 1]
    csv_rows = list(csv.DictReader(io.StringIO(record.render("csv"))))
    assert [row["lengths"] for row in csv_rows] == ["", "spread", "one-long"]
    assert [row["speed / SDPA"] for row in csv_rows] == ["3.0", "", ""]


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
