"""The command line: results on stdout and nothing else there, one line for an error, exit codes."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from gguf_files import array, entry, gguf_file, string, tensor
from synthetic import Spec
from synthetic import write as write_llama
from test_model import NANO, write

import cuquant as cq
from cuquant import cli
from cuquant.eval.tokenizer import Tokenizer

TEXT = NANO.with_name("heldout-public.txt")
FEW = ("--text", TEXT, "--chunks", "2", "--ctx", "64")


class Done(NamedTuple):
    status: int | str | None
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def command(*arguments: object) -> Done:
        try:
            status: int | str | None = cli.main([str(argument) for argument in arguments])
        except SystemExit as leaving:  # argparse
            status = leaving.code
        return Done(status, *capsys.readouterr())

    return command


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A command in a process of its own, its output in pipes."""
    command = [sys.executable, "-m", "cuquant", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, errors="replace", encoding="utf-8", **(pipes | options))


def finish(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=60)
    return Done(process.returncode, out, err)


def assert_one_line_error(done: Done) -> None:
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("cuquant: error: ")
    assert done.err.count("\n") == 1


# eval, mostly of a tiny model with 14 matrices and its own vocabulary


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("cli") / "tiny.gguf", Spec(tied=True))


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Arguments that evaluate two chunks of a short text."""
    text = tmp_path_factory.mktemp("cli") / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    return "--text", text, "--ctx", "64", "--chunks", "2"


@pytest.fixture(scope="module")
def evaluation(model: Path, some: tuple[Any, ...]) -> cq.Evaluation:
    return cq.evaluate(model, text=some[1], formats=["q8_0", "q4_0"], chunks=2, ctx=64)


@pytest.mark.parametrize("style", ["table", "md", "csv", "json"])
def test_eval_prints_the_result_and_nothing_else(
    run: Run, model: Path, some: tuple[object, ...], evaluation: cq.Evaluation, style: str
) -> None:
    done = run("eval", model, *some, "--formats", "q8_0,q4_0", "-o", style)
    assert done.status == 0
    assert done.out == f"{evaluation.render(style)}\n"
    assert done.err.startswith(f"{model}: 2 chunks of 64 tokens, 62 scored, numpy, ")
    assert done.err.count("\n") == 1


def test_eval_in_a_process_of_its_own() -> None:
    """JSON in one pipe, one line and no progress bar in the other."""
    done = finish(start("eval", NANO, *FEW, "--formats", "q4_0", "-o", "json"))
    assert done.status == 0
    result = json.loads(done.out)
    assert [row["format"] for row in result["rows"]] == ["f16", "q4_0"]
    assert len(result["rows"][1]["tensors"]) == 30
    assert done.err.count("\n") == 1
    assert "\r" not in done.err
    assert "%" not in done.err


def test_eval_shows_progress_on_a_terminal_and_keeps_stdout_clean(
    model: Path, some: tuple[object, ...]
) -> None:
    pty = pytest.importorskip("pty")
    fcntl, termios = (pytest.importorskip(name) for name in ("fcntl", "termios"))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    process = start("eval", model, *some, "-o", "json", stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert len(json.loads(finish(process).out)["rows"]) == 1
    assert b"2/2" in shown
    assert b"chunk/s" in shown


def test_token_ids_give_what_their_text_gives(
    run: Run, model: Path, some: tuple[Any, ...], tmp_path: Path
) -> None:
    ids = Tokenizer.from_metadata(cq.open(model).metadata).encode(some[1].read_text(encoding="utf-8"))
    np.save(tmp_path / "ids.npy", ids)
    by_text, by_ids, other = (
        run("eval", model, *source, *some[2:], "-o", "csv", *more).out
        for source, more in (
            (some[:2], ()),
            (("--tokens", tmp_path / "ids.npy"), ()),
            (("--tokens", tmp_path / "ids.npy"), ("--chunks", "3")),
        )
    )
    assert by_ids == by_text
    assert other != by_text


@pytest.mark.parametrize("style", ["table", "md"])
def test_tensors_adds_a_second_table(
    run: Run, model: Path, some: tuple[object, ...], evaluation: cq.Evaluation, style: str
) -> None:
    done = run("eval", model, *some, "--formats", "q8_0,q4_0", "--tensors", "-o", style)
    scores, tensors = done.out.rstrip("\n").split("\n\n")
    assert scores == evaluation.render(style)
    assert tensors == evaluation.render(style, tensors=True)
    assert len(tensors.splitlines()) == 2 + 2 * 15


def test_json_has_the_tensors_anyway(
    run: Run, model: Path, some: tuple[object, ...], evaluation: cq.Evaluation
) -> None:
    done = run("eval", model, *some, "--formats", "q8_0,q4_0", "--tensors", "-o", "json")
    assert done.out == f"{evaluation.render('json')}\n"
    assert len(json.loads(done.out)["rows"][2]["tensors"]) == 15


def test_base_compares_with_another_file(
    run: Run, model: Path, some: tuple[object, ...], tmp_path: Path, evaluation: cq.Evaluation
) -> None:
    cq.quantize_file(model, tmp_path / "q.gguf", "q4_0")
    done = run("eval", tmp_path / "q.gguf", *some, "--base", model, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [row["format"] for row in rows] == ["f16", "q4_0"]
    for key in ("ppl", "mean_kld", "same_top_percent", "bits_per_weight"):
        assert float(rows[1][key]) == pytest.approx(getattr(evaluation.rows[2], key), rel=1e-5)


@pytest.mark.parametrize("formats", ["q8_0, Q4_0", " q8_0,q4_0 "])
def test_a_list_of_formats(run: Run, model: Path, some: tuple[object, ...], formats: str) -> None:
    done = run("eval", model, *some, "--formats", formats, "-o", "csv")
    assert [line.split(",")[0] for line in done.out.splitlines()[1:]] == ["f16", "q8_0", "q4_0"]


def test_activations_change_only_quantized_products(
    run: Run, model: Path, some: tuple[object, ...], evaluation: cq.Evaluation
) -> None:
    done = run("eval", model, *some, "--formats", "q8_0,q4_0", "-o", "csv", "--activations", "q8_1")
    plain, quantized = evaluation.render("csv").splitlines(), done.out.splitlines()
    assert [a == b for a, b in zip(plain, quantized, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("eval", NANO, *FEW, "--formats", "q4_0,zz"), "unknown format 'zz'; known are q4_0, q4_1, q5_0"),
        (("eval", NANO, *FEW, "--formats", "q4_0,"), "unknown format ''"),
        (("eval", NANO, *FEW, "--formats", ""), "unknown format ''"),
        (("eval", NANO), "one of the arguments --text --tokens is required"),
        (("eval", NANO, *FEW, "--tokens", "ids.npy"), "--tokens: not allowed with argument --text"),
        (("eval", *FEW), "the following arguments are required: MODEL.gguf"),
        (("eval", NANO, *FEW, "-o", "xml"), "invalid choice: 'xml'"),
        (("eval", NANO, *FEW, "--ctx", "many"), "argument --ctx: invalid int value: 'many'"),
        (("eval", NANO, *FEW, "--device", "tpu"), "argument --device: invalid choice: 'tpu'"),
        (("quantize", NANO, "out.gguf"), "the following arguments are required: --format"),
        (("quantize", NANO, "out.gguf", "--format", "q8_1"), "argument --format: invalid choice: 'q8_1'"),
        (("quantize", NANO, "--format", "q8_0"), "the following arguments are required: OUT.gguf"),
        (("dump",), "the following arguments are required: MODEL.gguf"),
        (("info", "more"), "unrecognized arguments: more"),
        (("convert",), "invalid choice: 'convert'"),
        ((), "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[object, ...], problem: str) -> None:
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert problem in done.err
    assert done.err.startswith("usage: cuquant")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that are not what they are taken for."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(4))
    ids = buffer.getvalue()
    for name, raw in {
        "empty.npy": b"",
        "cut.npy": ids[:-8],
        "zip.npy": b"PK\3\4" + bytes(40),
        "huge.npy": ids.replace(b"(4,), }" + b" " * 12, b"(1000000000000,), }"),
        "text.npy": b"1 2 3",
        "short.txt": b"too short",
        "latin1.txt": b"caf\xe9 " * 1000,
        "magic.gguf": b"GGML" + bytes(20),
        "cut.gguf": NANO.read_bytes()[:-1],
        "vocabulary.gguf": gguf_file([entry("general.architecture", Value.STRING, string("llama"))]),
        "bert.gguf": gguf_file(
            [entry("general.architecture", Value.STRING, string("bert"))], [tensor("w", [8])], bytes(32)
        ),
    }.items():
        (tmp_path / name).write_bytes(raw)
    np.save(tmp_path / "objects.npy", np.array([1, None]), allow_pickle=True)
    np.save(tmp_path / "floats.npy", np.ones(512))
    np.save(tmp_path / "matrix.npy", np.ones((2, 512), int))
    np.save(tmp_path / "ids.npy", np.ones(512, int))
    np.save(tmp_path / "strangers.npy", np.full(512, 4096))
    write_llama(tmp_path / "other.gguf", Spec())
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("none.gguf --text TEXT", "No such file or directory: '.*none.gguf'"),
        (". --text TEXT", "Is a directory"),
        ("short.txt --text TEXT", r"short\.txt: not a GGUF file: it starts with b'too '"),
        ("magic.gguf --text TEXT", "not a GGUF file: it starts with b'GGML'"),
        ("cut.gguf --text TEXT", "tensor 'output.weight' ends at byte"),
        ("bert.gguf --tokens ids.npy", "architecture 'bert' is not supported; known are llama, mistral"),
        ("vocabulary.gguf --tokens ids.npy", "error: ."),
        ("NANO --text none.txt", "No such file or directory: '.*none.txt'"),
        ("NANO --text .", "Is a directory"),
        ("NANO --text short.txt", "the text has .* tokens; one chunk of 512 is the least"),
        ("NANO --text latin1.txt", r"latin1\.txt.*(UTF-8|utf-8)"),
        ("NANO --tokens none.npy", "No such file or directory: '.*none.npy'"),
        ("NANO --tokens empty.npy", r"empty\.npy is not a \.npy file of token ids"),
        ("NANO --tokens cut.npy", r"cut\.npy is not a \.npy file of token ids"),
        ("NANO --tokens zip.npy", r"zip\.npy is not a \.npy file of token ids"),
        ("NANO --tokens huge.npy", r"huge\.npy is not a \.npy file of token ids"),
        ("NANO --tokens text.npy", r"text\.npy is not a \.npy file of token ids"),
        ("NANO --tokens objects.npy", r"objects\.npy is not a \.npy file of token ids"),
        ("NANO --tokens floats.npy", "tokens are a 1-D integer array, not 1-D float64"),
        ("NANO --tokens matrix.npy", "tokens are a 1-D integer array, not 2-D int64"),
        ("NANO --tokens strangers.npy", "token ids run from 4096 to 4096, but the vocabulary of nano-llama"),
        ("NANO --tokens ids.npy --ctx 3", "ctx is 3; a chunk needs at least 4 tokens"),
        ("NANO --tokens ids.npy --chunks 0", "chunks is 0; at least 1 is needed"),
        ("NANO --tokens ids.npy --formats q8_1", "q8_1 is a format of activations"),
        ("NANO --tokens ids.npy --base NANO --formats q8_0", "give base or formats, not both"),
        ("NANO --tokens ids.npy --base other.gguf", "(the vocabulary of other.gguf|vocabularies differ)"),
    ],
)
def test_eval_fails_in_one_line(run: Run, folder: Path, arguments: str, problem: str) -> None:
    known = {"NANO": NANO, "TEXT": TEXT}
    words = arguments.split()
    paths = [known.get(word, folder / word if "." in word else word) for word in words]
    done = run("eval", *paths)
    assert_one_line_error(done)
    assert re.search(problem, done.err)


def test_a_warning_is_one_line_on_stderr(model: Path, some: tuple[object, ...]) -> None:
    done = finish(start("eval", model, *some[:2], "--ctx", "1026"))
    assert done.status == 0
    assert done.err.startswith("cuquant: warning: ctx 1026 is longer than the 1024 tokens")
    assert done.err.count("\n") == 2


# quantize


def test_quantize(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    done = run("quantize", NANO, target, "--format", "q4_0", "--keep", "output.*", "--keep", "blk.3.*")
    assert (done.status, done.out) == (0, "")
    sizes = f"{NANO.stat().st_size:,} -> {target.stat().st_size:,} bytes"
    assert done.err == f"{target}: 22 tensors to q4_0, 17 copied, {sizes}\n"
    kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(target).tensors}
    assert kinds["output.weight"] == kinds["blk.3.attn_q.weight"] == Type.F16
    assert kinds["token_embd.weight"] == kinds["blk.2.attn_q.weight"] == Type.Q4_0


def test_quantize_shows_no_progress_in_a_pipe(tmp_path: Path) -> None:
    done = finish(start("quantize", NANO, tmp_path / "q.gguf", "--format", "q8_0"))
    assert (done.status, done.out) == (0, "")
    assert done.err.count("\n") == 1
    assert "\r" not in done.err


def test_quantize_says_what_would_replace_a_file(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    target.write_text("precious")
    done = run("quantize", NANO, target, "--format", "q4_0")
    assert_one_line_error(done)
    assert f"{target} exists; --force replaces it" in done.err
    assert target.read_text() == "precious"
    assert run("quantize", NANO, target, "--format", "q4_0", "--force").status == 0
    assert cq.open(target)["output.weight"].format == "q4_0"


def test_quantize_names_the_tensors_of_ragged_rows(run: Run, tmp_path: Path) -> None:
    tensors = {"even.weight": np.ones((2, 64)), "odd.weight": np.ones((2, 40)), "b.weight": np.ones((2, 1))}
    source = write(tmp_path / "s.gguf", {name: t.astype(np.float32) for name, t in tensors.items()})
    done = run("quantize", source, tmp_path / "t.gguf", "--format", "q4_0")
    assert done.status == 0
    assert "1 tensors to q4_0, 2 copied" in done.err
    assert done.err.endswith("kept in float, rows are not whole blocks: b.weight, odd.weight\n")


def test_quantize_counts_the_bytes_of_all_parts(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {f"{n}.weight": np.ones((64, 64), np.float32) for n in "abc"}, split=1)
    parts = sorted(tmp_path.iterdir())
    done = run("quantize", parts[0], tmp_path / "t.gguf", "--format", "q4_0")
    assert f" {sum(path.stat().st_size for path in parts):,} -> " in done.err


def test_quantize_names_the_weight_that_it_cannot_quantize(run: Run, tmp_path: Path) -> None:
    bad = np.ones((4, 32), np.float32)
    bad[2, 7] = np.nan
    source = write(tmp_path / "s.gguf", {"bad.weight": bad})
    done = run("quantize", source, tmp_path / "t.gguf", "--format", "q4_0")
    assert_one_line_error(done)
    assert "tensor 'bad.weight': cannot quantize nan in row 2" in done.err
    assert list(tmp_path.iterdir()) == [source]


# dump and info


def test_dump_shows_every_key_and_tensor(run: Run) -> None:
    done, reader = run("dump", NANO), gguf.GGUFReader(NANO)
    assert (done.status, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines() if line]
    assert "llama.embedding_length uint32 256" in lines
    assert "tokenizer.ggml.token_type int32[4096] 3, 1, 1, 1, 1, 1, 1, 1, ..." in lines
    assert "blk.0.ffn_up.weight F16 768 x 256 393216" in lines
    first_words = [line.split()[0] for line in lines]
    for name in [*(k for k in reader.fields if not k.startswith("GGUF.")), *(t.name for t in reader.tensors)]:
        assert first_words.count(name) == 1
    assert lines[-1] == "39 tensors, 10494976 bytes"


def test_dump_of_a_quantized_file_does_not_warn(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "k.gguf", {"w": (np.zeros((2, 144), np.uint8), Type.Q4_K)})
    done = run("dump", path)
    assert (done.status, done.err) == (0, "")
    assert "Q4_K" in done.out


def test_dump_json_has_arrays_in_full(run: Run) -> None:
    done, reader = run("dump", NANO, "--json"), gguf.GGUFReader(NANO)
    assert (done.status, done.err) == (0, "")
    content = json.loads(done.out)
    fields = {k: field.contents() for k, field in reader.fields.items() if not k.startswith("GGUF.")}
    assert content["metadata"] == fields
    assert (content["files"], content["alignment"]) == ([str(NANO)], 32)
    for shown, stored in zip(content["tensors"], reader.tensors, strict=True):
        assert shown == {
            "name": stored.name,
            "type": stored.tensor_type.name,
            "shape": stored.shape.tolist()[::-1],
            "offset": stored.data_offset,
            "nbytes": stored.n_bytes,
        }


def test_dump_json_has_null_for_what_json_cannot_say(run: Run, tmp_path: Path) -> None:
    nan, infinity = np.float32(np.nan).tobytes(), np.float64(-np.inf).tobytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf_file(
            [
                entry("nan", Value.FLOAT32, nan),
                array("many", Value.FLOAT64, 2, infinity + bytes(8)),
                array("none", Value.STRING, 0),
                entry("most", Value.UINT64, b"\xff" * 8),
                array("bools", Value.BOOL, 2, b"\0\1"),
            ]
        )
    )
    content = json.loads(run("dump", path, "--json").out, parse_constant=pytest.fail)
    assert content["metadata"] == {
        "nan": None,
        "many": [None, 0.0],
        "none": [],
        "most": 2**64 - 1,
        "bools": [False, True],
    }


def test_dump_shortens_long_values(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([entry("long", Value.STRING, string("x" * 10_000 + "\nend"))]))
    lines = run("dump", path).out.splitlines()
    assert max(map(len, lines)) < 100
    assert any(line.endswith("xxx...") for line in lines)


def test_dump_sends_no_control_characters_to_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    value = entry("key\x1b[31m\n", Value.STRING, string("value\x1b[32m\n"))
    strings = array("strings", Value.STRING, 1, string("\x1b[33m"))
    path.write_bytes(gguf_file([value, strings], [tensor("w\x1b[2J", [8])], bytes(32)))
    done = run("dump", path)
    assert done.status == 0
    assert "\x1b" not in done.out


def test_dump_fails_in_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([entry("name", Value.STRING, string(b"\xff"))]))
    done = run("dump", path)
    assert_one_line_error(done)
    assert "key 'name' is not valid UTF-8" in done.err


def test_info(run: Run) -> None:
    done = run("info")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("cuquant")
    assert cq.__version__ in done.out.splitlines()[0]


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"cuquant {cq.__version__}\n", "")


@pytest.mark.parametrize("command", [[], ["eval"], ["quantize"], ["dump"], ["info"]])
def test_help(run: Run, command: list[str]) -> None:
    done = run(*command, "--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("usage: cuquant")


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
        assert finish(process) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = finish(start("dump", NANO, stdout=full))
    assert done.status == 1
    assert done.err == "cuquant: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", [("dump", NANO), ("eval", NANO, *FEW)])
def test_output_in_a_pipe_of_another_encoding(command: tuple[object, ...]) -> None:
    """Windows gives pipes and files its own code page."""
    done = finish(start(*command, env=os.environ | {"PYTHONIOENCODING": "cp1252"}))
    assert "cuquant: error" not in done.err
    assert done.status == 0
