"""Commands that Ctrl-C ends: what they say is left, and that it is."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells import RECORD, cell
from commands import FEW, Run, assert_interrupted, finish, interrupted, python
from gguf_files import NANO

import cuquant as cq
from cuquant.bench import Cell, Record, record as records


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_quantize(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    target = tmp_path / f"q.{suffix}"
    monkeypatch.setattr("cuquant.io.convert.quantize", interrupted)
    command = ("quantize", NANO, target, "--format", "q4_0", "--device", "cpu")
    assert_interrupted(run(*command), f"{target} was not written, and no part of it is left")
    assert not list(tmp_path.iterdir())
    target.write_text("precious")
    assert_interrupted(run(*command, "--force"), f"{target} is as it was")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("before", [None, "precious"])
def test_quantize_after_the_file_is_in_place(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    target = tmp_path / "q.gguf"
    if before is not None:
        target.write_text(before)

    def put_in_place(*args: Any, **kwargs: Any) -> Any:
        cq.quantize_file(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr("cuquant.io.convert.quantize_file", put_in_place)
    done = run("quantize", NANO, target, "--format", "q4_0", "--device", "cpu", "--force")
    assert_interrupted(done, f"{target} is the new file, and whole")
    assert "Q4_0" in {t.type_name for t in cq.open(target).tensors.values()}
    assert list(tmp_path.iterdir()) == [target]


def test_eval(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "r.json"
    other = tmp_path / "other.gguf"
    other.write_bytes(NANO.read_bytes())
    command = ("eval", NANO, other, *FEW, "--device", "cpu")
    real = cq.evaluate

    def second(model: Any, **options: Any) -> cq.Evaluation:
        return interrupted() if model == str(other) else real(model, **options)

    monkeypatch.setattr("cuquant.eval.files.evaluate", interrupted)
    hint = "nothing was written; --results FILE.json keeps the result of every model that is done"
    assert_interrupted(run(*command), hint)
    left = f"no model is done, and {results} was not written"
    assert_interrupted(run(*command, "--results", results), left)
    monkeypatch.setattr("cuquant.eval.files.evaluate", second)
    left = f"{results} has every result so far, and the same command goes on from there"
    assert_interrupted(run(*command, "--results", results), left)

    def not_the_first(model: Any, **options: Any) -> cq.Evaluation:
        assert model != str(NANO)  # its result is there
        return real(model, **options)

    monkeypatch.setattr("cuquant.eval.files.evaluate", not_the_first)
    assert run(*command, "--results", results).status == 0


def test_bench(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"device": "a GPU", "versions": {}, "commit": "0123"}
    monkeypatch.setattr(records, "environment", lambda packages=(), by_tuned=True: facts)
    monkeypatch.setattr("cuquant.cli.bench._needs_a_gpu", lambda: None)
    path = tmp_path / "r.json"

    def one(record: Record, *args: Any) -> Iterator[Cell]:
        record.add(cell())
        yield cell()
        raise KeyboardInterrupt

    command = ("bench", "--peers", "none", "--batches", "1,2")
    monkeypatch.setattr("cuquant.bench.matmul", interrupted)
    hint = "nothing was written; --record FILE.json keeps every cell that is measured"
    assert_interrupted(run(*command), hint)
    assert_interrupted(run(*command, "--record", path), f"no cell is measured, and {path} was not written")
    monkeypatch.setattr("cuquant.bench.matmul", one)
    done = run(*command, "--record", path)
    assert (done.status, done.out) == (130, "")
    left = f"{path} has every cell so far, and the same command goes on from there"
    assert done.err.splitlines()[1:] == [f"cuquant: interrupted: {left}"]
    assert len(Record.read(path).cells) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (("compare", NANO, NANO), "cuquant.eval.compare"),
        (("dump", NANO), "cuquant.io.dump.as_text"),
        (("bench", "--from", RECORD), "cuquant.bench.record.Record.only"),
    ],
)
def test_what_writes_no_file(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...], where: str
) -> None:
    monkeypatch.setattr(where, interrupted)
    assert_interrupted(run(*command), "nothing was written")


SCRIPT = """
import os, signal, sys
from cuquant import cli
from cuquant.io import convert

def terminated(*args):
    assert len(os.listdir(sys.argv[1])) == 1  # the file that is being written
    signal.raise_signal(getattr(signal, sys.argv[2]))

convert.quantize = terminated
sys.exit(cli.main(sys.argv[3:]))
"""


ENDING = [
    pytest.param("SIGTERM", 143),
    pytest.param("SIGHUP", 129, marks=pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP")),
]


@pytest.mark.parametrize(("name", "status"), ENDING)
def test_signals(tmp_path: Path, name: str, status: int) -> None:
    """What `timeout`, systemd and schedulers of clusters send, and a terminal that closes."""
    target = tmp_path / "q.gguf"
    command = ("-c", SCRIPT, tmp_path, name, "quantize", NANO, target, "--format", "q4_0", "--device", "cpu")
    # A test run under nohup inherits an ignored SIGHUP.
    heed = partial(signal.signal, getattr(signal, name), signal.SIG_DFL)
    done = finish(python(*command, preexec_fn=heed))
    left = f"{target} was not written, and no part of it is left"
    assert done == (status, "", f"cuquant: interrupted: {left}\n")
    gone, stderr = os.pipe()
    os.close(gone)
    assert finish(python(*command, preexec_fn=heed, stderr=stderr)).status == status
    os.close(stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "status"), ENDING)
def test_signals_that_others_handle(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, status: int
) -> None:
    """A command in a program's process leaves the handlers as they are."""
    seen, number = [], getattr(signal, name)
    monkeypatch.setattr("cuquant.io.dump.as_text", lambda model: seen.append(signal.getsignal(number)))
    before = signal.getsignal(number)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, handler)
            assert run("dump", NANO).status == 0
            assert signal.getsignal(number) == handler
    finally:
        signal.signal(number, before)
    assert seen[0] == signal.SIG_IGN
    assert seen[1] != signal.SIG_DFL


EARLY = """
import runpy, sys

class Finder:
    @staticmethod
    def find_spec(name, *args):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

import cuquant
sys.meta_path.insert(0, Finder)
{}
"""


PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


@pytest.mark.parametrize("module", ["cuquant.cli", "cuquant.cli.bench"])
@pytest.mark.parametrize("installed", [False, True])
def test_while_modules_are_imported(module: str, installed: bool) -> None:
    """Of `python -m cuquant`, and of the command that is installed."""
    start = "runpy.run_module('cuquant', run_name='__main__')"
    if installed:
        where = re.search(
            r'^cuquant = "([\w.]+):(\w+)"$', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert where is not None
        start = f"from {where[1]} import {where[2]}\nsys.exit({where[2]}())"
    done = finish(python("-c", EARLY.format(start), module))
    assert_interrupted(done, "nothing was written")
