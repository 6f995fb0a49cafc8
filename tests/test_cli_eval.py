"""`cuquant eval`, mostly of a tiny model with 14 matrices and its own vocabulary."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import FEW, Run, assert_one_line_error, finish, start
from gguf import GGUFValueType as Value
from gguf_files import HELD_OUT, NANO, entry, gguf_file, string, tensor
from synthetic import Spec, some_tokens, write as write_llama

import cuquant as cq
from cuquant.eval.tokenizer import Tokenizer


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


def test_csv_is_one_table(run: Run, model: Path, some: tuple[object, ...], evaluation: cq.Evaluation) -> None:
    done = run("eval", model, *some, "--formats", "q8_0,q4_0", "--tensors", "-o", "csv")
    assert done.out == f"{evaluation.render('csv', tensors=True)}\n"
    rows = list(csv.DictReader(io.StringIO(done.out), strict=True))
    assert [row["format"] for row in rows] == ["q8_0"] * 15 + ["q4_0"] * 15
    assert all(float(row["nmse"]) > 0 and None not in row for row in rows)


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


@pytest.mark.parametrize("formats", ["q8_0, Q4_0", " q8_0,q4_0 ", "q8_0,q4_0,Q8_0,q4_0"])
def test_a_list_of_formats(run: Run, model: Path, some: tuple[object, ...], formats: str) -> None:
    done = run("eval", model, *some, "--formats", formats, "-o", "csv")
    assert [line.split(",")[0] for line in done.out.splitlines()[1:]] == ["f16", "q8_0", "q4_0"]


def test_one_chunk_is_no_chunks(run: Run, model: Path, some: tuple[object, ...]) -> None:
    assert run("eval", model, *some[:-1], "1").err.startswith(f"{model}: 1 chunk of 64 tokens, ")


def test_activations_change_only_quantized_products(
    run: Run, model: Path, some: tuple[object, ...], evaluation: cq.Evaluation
) -> None:
    done = run("eval", model, *some, "--formats", "q8_0,q4_0", "-o", "csv", "--activations", "q8_1")
    plain, quantized = (list(csv.reader(io.StringIO(text))) for text in (evaluation.render("csv"), done.out))
    assert [row.pop(1) for row in quantized] == ["activations", "f16", "q8_1", "q8_1"]
    assert [a == b for a, b in zip(plain, quantized, strict=True)] == [True, True, False, False]
    done = run("eval", model, *some, "-o", "json", "--activations", "q8_1")
    assert json.loads(done.out)["activations"] == "q8_1"


def test_help_says_what_options_concern(run: Run) -> None:
    text = " ".join(run("eval", "--help").out.split())
    assert "--activations {f16,q8_1} of products with quantized weights, which alone they concern" in text
    assert "all options but MODEL.gguf must be the same then, formats too" in text


def test_a_recipe_is_for_quantize(run: Run, model: Path, some: tuple[object, ...]) -> None:
    done = run("eval", model, *some, "--formats", "*ffn_down*=q6_k,*=q4_k")
    assert done.status == 2
    assert "'*ffn_down*=q6_k,*=q4_k' is a recipe: make a file by cuquant quantize --format" in done.err
    assert 'cuquant.evaluate(formats={"*": "q4_k"})' in done.err


def shaped(ids: bytes, end: str) -> bytes:
    """A file of NumPy's whose header has another end, from the shape on."""
    head, data = ids[:128], ids[128:]
    return head[: head.index(b"(")] + end.encode().ljust(127 - head.index(b"(")) + b"\n" + data


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
        "other.npy": b"\x93HDF\r\n",
        "huge.npy": ids.replace(b"(4,), }" + b" " * 12, b"(1000000000000,), }"),
        "text.npy": b"1 2 3",
        "open.npy": shaped(ids, "(4,, }"),
        "words.npy": shaped(ids, "{[]:1}, }"),
        "indented.npy": shaped(ids, "\n\t1\n  2"),
        "typeless.npy": ids.replace(b"'<i8'", b"()   "),
        "true.npy": shaped(ids, "(True,), }"),
        "negative.npy": shaped(ids, "(-400,), }"),
        "beyond.npy": shaped(ids, f"({2**62},), }}"),
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
    np.savez(tmp_path / "ids.npz", np.ones(512, int))
    np.savez(tmp_path / "none.npz")
    np.save(tmp_path / "strangers.npy", np.full(512, 4096))
    write_llama(tmp_path / "other.gguf", Spec())
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("none.gguf --text TEXT", "No such file or directory: '.*none.gguf'"),
        (
            "--formats q4_0 kbit4 NANO --text TEXT",
            "No such file or directory: 'kbit4'; formats are separated by commas: --formats q4_0,q8_0",
        ),
        (". --text TEXT", "is a folder, not a file"),
        ("short.txt --text TEXT", r"short\.txt: not a GGUF file: it starts with b'too ' instead of b'GGUF'$"),
        ("magic.gguf --text TEXT", "not a GGUF file: it starts with b'GGML'"),
        ("cut.gguf --text TEXT", "tensor 'output.weight' ends at byte"),
        ("bert.gguf --tokens ids.npy", "architecture 'bert' is not supported; known are llama, mistral"),
        ("vocabulary.gguf --tokens ids.npy", "error: ."),
        ("NANO --text none.txt", "No such file or directory: '.*none.txt'"),
        ("NANO --text .", "Is a directory"),
        ("NANO --text short.txt", "the text has .* tokens; at least one chunk of 512 tokens is needed"),
        ("NANO --text latin1.txt", r"latin1\.txt.*(UTF-8|utf-8)"),
        ("NANO --tokens none.npy", "No such file or directory: '.*none.npy'"),
        ("NANO --tokens empty.npy", r"empty\.npy is not a \.npy file of token ids"),
        ("NANO --tokens cut.npy", r"cut\.npy is not a \.npy file of token ids"),
        *(
            (
                f"NANO --tokens {name}",
                f"{name} is not a .npy file .* but an .npz archive: save one array with numpy.save$",
            )
            for name in ("zip.npy", "ids.npz", "none.npz")
        ),
        (
            "NANO --tokens other.npy",
            r"other\.npy is not a .*: it starts with b'\\x93HDF\\r\\n' instead of b'\\x93NUMPY'$",
        ),
        ("NANO --tokens text.npy", r"it starts with b'1 2 3' instead of b'\\x93NUMPY'$"),
        ("NANO --tokens huge.npy", r"huge\.npy is not a \.npy file of token ids"),
        ("NANO --tokens text.npy", r"text\.npy is not a \.npy file of token ids"),
        ("NANO --tokens objects.npy", r"objects\.npy is not a \.npy file of token ids"),
        *(
            (
                f"NANO --tokens {name}.npy",
                rf"{name}\.npy is not a \.npy file of token ids: its header is damaged$",
            )
            for name in ("open", "words", "indented", "typeless", "true", "negative")
        ),
        ("NANO --tokens beyond.npy", r"beyond\.npy is not a \.npy file of token ids"),
        ("NANO --tokens floats.npy", r"floats\.npy: tokens are a 1-D integer array, not 1-D float64"),
        ("NANO --tokens matrix.npy", "tokens are a 1-D integer array, not 2-D int64"),
        ("NANO --tokens strangers.npy", "token ids run from 4096 to 4096, but the vocabulary of nano-llama"),
        ("NANO --tokens ids.npy --ctx 3", "ctx is 3; allowed are 4 to"),
        ("NANO --tokens ids.npy --formats q8_1", "q8_1 is a format of activations"),
        ("NANO --tokens ids.npy --base NANO --formats q8_0", "give base or formats, not both"),
        ("NANO --tokens ids.npy --base other.gguf", "(the vocabulary of other.gguf|vocabularies differ)"),
    ],
)
def test_eval_fails_in_one_line(run: Run, folder: Path, arguments: str, problem: str) -> None:
    known = {"NANO": NANO, "TEXT": HELD_OUT}
    words = arguments.split()
    paths = [known.get(word, folder / word if "." in word else word) for word in words]
    done = run("eval", *paths)
    assert_one_line_error(done)
    assert re.search(problem, done.err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_results_in_a_device(run: Run, model: Path, some: tuple[object, ...]) -> None:
    """Which could be read without end."""
    done = run("eval", model, *some, "--results", "/dev/full")
    assert_one_line_error(done)
    assert done.err.endswith("/dev/full is no ordinary file: nothing can take its place\n")


def test_a_warning_is_one_line_on_stderr(model: Path, some: tuple[object, ...]) -> None:
    done = finish(start("eval", model, *some[:2], "--ctx", "1026"))
    assert done.status == 0
    assert done.err.startswith("cuquant: warning: ctx 1026 is longer than the 1024 tokens")
    assert done.err.count("\n") == 2


def test_a_text_from_standard_input(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--ctx", "64", "--chunks", "2", "-o", "json", "--text")
    text = "The quick brown fox jumps over the lazy dog. " * 40

    def given(raw: bytes | None) -> Any:
        stdin = None if raw is None else io.TextIOWrapper(io.BytesIO(raw), encoding="ascii")
        monkeypatch.setattr("sys.stdin", stdin)
        return run("eval", model, *options, "-")

    done = given(b"\xef\xbb\xbf" + text.encode())
    result = cq.evaluate(model, text=text, chunks=2, ctx=64).to_dict() | {"text": "standard input"}
    assert (done.status, json.loads(done.out)) == (0, result)
    for raw, told in (
        (b"caf\xe9 ", "standard input is not UTF-8 text: "),
        (b"", "the text has 0 tokens; at least one chunk of 64"),
        (None, "standard input is closed: name a file of the text\n"),
    ):
        failed = given(raw)
        assert_one_line_error(failed)
        assert failed.err.startswith(f"cuquant: error: {told}")
    assert "- for standard input" in " ".join(run("eval", "--help").out.split())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_token_ids_in_a_pipe(run: Run, model: Path, tmp_path: Path) -> None:
    ids, pipe, options = tmp_path / "ids.npy", tmp_path / "pipe", ("--ctx", "16", "-o", "csv", "--tokens")
    np.save(ids, some_tokens(32))
    os.mkfifo(pipe)
    for content in (ids.read_bytes(), b"nothing"):
        threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True).start()
        done = run("eval", model, *options, pipe)
        if content == b"nothing":
            assert_one_line_error(done)
            assert f"{pipe} is not a .npy file of token ids" in done.err
        else:
            assert (done.status, done.out) == (0, run("eval", model, *options, ids).out)
