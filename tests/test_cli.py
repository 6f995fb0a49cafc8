"""The command line: usage, help, exit codes, and being a process among others."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import FEW, Run, finish, start
from gguf_files import NANO, write

import cuquant as cq
from cuquant import cli


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ("eval", NANO, *FEW, "--formats", "q4_0,zz"),
            "unknown format 'zz'; known are int4-128, int4-128-zeros",
        ),
        (("eval", NANO, *FEW, "--formats", "q4_0,"), "argument --formats: 'q4_0,' has an empty name; names"),
        (("eval", NANO, *FEW, "--formats", ""), "argument --formats: '' has an empty name"),
        (
            ("eval", NANO, *FEW, "--formats", "f16,q4_0"),
            "--formats: 'f16' is no format to quantize to: the first row is of the original as it is\n",
        ),
        (
            ("quantize", NANO, "out.gguf", "--format", "F16"),
            "'F16' is no format to quantize to: tensors that --keep names, or no PATTERN matches, are copied",
        ),
        (
            ("quantize", NANO, "out.gguf", "--format", "*up*=q4_0,*=bf16"),
            "'bf16' is no format to quantize to: tensors that --keep names, or no PATTERN matches, are ",
        ),
        (
            ("eval", NANO, *FEW, "--formats", "q4_0", "kbit4"),
            "unrecognized arguments: kbit4; formats are separated by commas: --formats q4_0,q8_0\n",
        ),
        (("eval", NANO, *FEW, "--formats=q4_k_m", "kbit4"), ": kbit4; formats are separated by commas"),
        (("bench", "matmul", "--form", "q4_0", "q8_0"), "q8_0; formats are separated by commas"),
        (("eval", NANO, *FEW, "--formats", "q4_0", "other.gguf"), "unrecognized arguments: other.gguf\n"),
        (("bench", "matmul", "--shapes", "64x64", "q8_0"), "unrecognized arguments: q8_0\n"),
        (("eval", NANO, *FEW, "--formats", "q4_0", "--fast"), "unrecognized arguments: --fast\n"),
        (("eval", NANO, *FEW, "--fromats", "q4_0"), "unrecognized arguments: --fromats q4_0\n"),
        (("eval", NANO, *FEW, "other.gguf"), "unrecognized arguments: other.gguf\n"),
        (
            ("eval", NANO, *FEW, "--kv-bits", "16,4"),
            "; several evaluations are --kv-bits 16 --kv-bits 4\n",
        ),
        (("eval", NANO), "one of the arguments --text --tokens is required"),
        (("eval", NANO, *FEW, "--tokens", "ids.npy"), "--tokens: not allowed with argument --text"),
        (("eval", *FEW), "the following arguments are required: MODEL.gguf"),
        (("eval", NANO, *FEW, "-o", "xml"), "invalid choice: 'xml'"),
        (("eval", NANO, *FEW, "--ctx", "many"), "argument --ctx: 'many' is not a positive whole number"),
        (("eval", NANO, *FEW, "--ctx", "0"), "argument --ctx: '0' is not a positive whole number"),
        (("eval", NANO, *FEW, "--chunks", "0"), "argument --chunks: '0' is not a positive whole number"),
        (("eval", NANO, *FEW, "--chunks=-1"), "argument --chunks: '-1' is not a positive whole number"),
        (("dump", NANO, "-o", "csv"), "argument -o: invalid choice: 'csv'"),
        (("eval", NANO, *FEW, "--device", "tpu"), "argument --device: invalid choice: 'tpu'"),
        (("quantize", NANO, "out.gguf"), "the following arguments are required: --format"),
        (("quantize", NANO, "out.gguf", "--format", "zz"), "argument --format: unknown format 'zz'; known"),
        (("quantize", NANO, "--format", "q8_0"), "the following arguments are required: OUT"),
        (("dump",), "the following arguments are required: MODEL"),
        (("bench", "--shapes", "1x"), "--shapes: invalid shapes '1x': a shape is NxK, as 14336x4096"),
        (("bench", "--shapes", "0x32"), "--shapes: invalid shapes '0x32': a shape is NxK, as 14336x4096"),
        (("bench", "moe", "--experts", "x"), "argument --experts: 'x' is not a positive whole number"),
        (("info", "more"), "unrecognized arguments: more\n"),
        (("info", "q4_0"), "unrecognized arguments: q4_0\n"),
        (("convert",), "invalid choice: 'convert'"),
        ((), "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[object, ...], problem: str) -> None:
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert problem in done.err
    assert done.err.startswith("usage: cuquant")


def test_info(run: Run) -> None:
    done = run("info")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("cuquant")
    assert cq.__version__ in done.out.splitlines()[0]


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"cuquant {cq.__version__}\n", "")


@pytest.mark.parametrize("command", [[], ["eval"], ["quantize"], ["dump"], ["bench"], ["info"]])
def test_help(run: Run, command: list[str]) -> None:
    done = run(*command, "--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("usage: cuquant")


@pytest.mark.parametrize(
    ("error", "said"), [(MemoryError("1 TiB"), "out of memory: 1 TiB"), (MemoryError(), "out of memory")]
)
def test_no_memory_is_told_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: MemoryError, said: str
) -> None:
    """Of NumPy or CuPy, whose errors are this one's."""

    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr("cuquant.io.dump.as_text", fails)
    assert run("dump", NANO) == (1, "", f"cuquant: error: {said}\n")


def test_the_caller_s_output_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program that calls main: how warnings are shown, and what its streams do with characters."""
    shown = warnings.showwarning
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="xmlcharrefreplace")
        monkeypatch.setattr(sys, name, stream)
    for words, status in ((["info"], 0), (["dump", "none.gguf"], 1)):
        assert cli.main(words) == status
        assert warnings.showwarning is shown
        assert sys.stdout.errors == sys.stderr.errors == "xmlcharrefreplace"


def test_stderr_that_is_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by 2>&-: the work is done, and stdout has results alone."""
    source = write(tmp_path / "s.gguf", {"a.weight": np.ones((4, 32), np.float16)})
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["quantize", str(source), str(tmp_path / "t.gguf"), "--format", "q4_0"]) == 0
    assert cli.main(["dump", str(tmp_path / "none.gguf")]) == 1
    assert capsys.readouterr().out == ""
    assert cli.main(["compare", str(source), str(tmp_path / "t.gguf"), "-o", "csv"]) == 0
    assert capsys.readouterr().out.startswith("name,shape")
    assert sys.stderr is None
    assert cq.open(tmp_path / "t.gguf", "cpu")["a.weight"].format == "q4_0"


# Processes


@pytest.mark.parametrize("command", [["dump", NANO], ["dump", NANO, "--json"], ["info"]])
def test_a_reader_that_has_seen_enough(command: list[object]) -> None:
    process = start(*command)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert finish(process).err == ""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_control_c(tmp_path: Path) -> None:
    """The text is a pipe: once the command opens it, it waits for what never comes."""
    os.mkfifo(tmp_path / "text")
    # A test run in the background of a shell inherits an ignored SIGINT.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start("eval", NANO, "--text", tmp_path / "text", preexec_fn=heed)
    with (tmp_path / "text").open("w"):
        time.sleep(0.5)  # between the opening and the waiting a signal would be noticed only after the wait
        process.send_signal(signal.SIGINT)
        done = finish(process)
    assert (done.status, done.out) == (130, "")
    assert done.err.startswith("cuquant: interrupted: nothing was written; ")
    assert done.err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = finish(start("dump", NANO, stdout=full))
    assert done.status == 1
    assert done.err == "cuquant: error: No space left on device\n"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_in_a_pipe_of_any_encoding(tmp_path: Path, encoding: str) -> None:
    said = "\xe9 \u4e16 \U0001f600"
    path = write(tmp_path / "m.gguf", {}, name=said)
    done = finish(start("dump", path, "--json", env=os.environ | {"PYTHONIOENCODING": encoding}))
    assert json.loads(done.out)["metadata"]["general.name"] == said


@pytest.mark.parametrize("command", [("dump", NANO), ("eval", NANO, *FEW)])
def test_output_in_a_pipe_of_another_encoding(command: tuple[object, ...]) -> None:
    """Windows gives pipes and files its own code page."""
    done = finish(start(*command, env=os.environ | {"PYTHONIOENCODING": "cp1252"}))
    assert "cuquant: error" not in done.err
    assert done.status == 0
