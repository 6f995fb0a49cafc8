"""`cuquant imatrix`, the command."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import Run, assert_interrupted, assert_one_line_error, interrupted
from gguf_files import untouched
from imatrix_files import RARE, with_a_rare_token
from scoring import TEXT
from synthetic import some_tokens

import cuquant as cq
from cuquant import cli
from cuquant.eval.llama import Llama

CTX = 16


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_command(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    target = tmp_path / "i.gguf"
    done = run("imatrix", model, "--text", text, "-o", target, "--ctx", CTX, "--chunks", 3)
    assert (done.status, done.out) == (0, "")
    assert done.err.startswith(f"{target}: importance of 14 tensors, by 3 chunks of 16 tokens, ")
    assert done.err.count("\n") == 1
    expected = cq.measure_importance(model, text=text, ctx=CTX, chunks=3)
    made = cq.read_imatrix(target)
    assert list(made) == list(expected)
    assert all(np.array_equal(made[name], expected[name]) for name in made)
    with untouched(tmp_path):
        again = run("imatrix", model, "--text", text, "-o", target, "--ctx", CTX)
    assert_one_line_error(again)
    assert again.err == f"cuquant: error: {target} exists; --force replaces it\n"
    done = run(
        "imatrix",
        model,
        "--text",
        text,
        "-o",
        target,
        "--ctx",
        CTX,
        "--chunks",
        1,
        "--force",
        "--process-output",
    )
    assert f"{target}: importance of 15 tensors, by 1 chunk of 16 tokens, " in done.err


def test_the_ids_are_not_replaced(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, some_tokens(CTX))
    monkeypatch.setattr(Llama, "hidden", interrupted)
    with untouched(tmp_path):
        done = run("imatrix", model, "--tokens", ids, "-o", ids, "--ctx", CTX, "--force")
    assert_one_line_error(done)
    assert done.err == f"cuquant: error: {ids} is the file of the token ids that is being read\n"


@pytest.mark.parametrize("source", ["stdin", "ids"])
def test_other_texts_of_the_command(
    run: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    target, ids = tmp_path / "i.gguf", tmp_path / "ids.npy"
    np.save(ids, cq.Tokenizer.from_metadata(cq.open(model, "cpu")).encode(TEXT))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    given = ("--text", "-") if source == "stdin" else ("--tokens", ids)
    assert run("imatrix", model, *given, "-o", target, "--ctx", CTX).status == 0
    expected = cq.measure_importance(model, text=text, ctx=CTX)
    made = cq.read_imatrix(target)
    assert all(np.array_equal(made[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("m.gguf",), "the following arguments are required: -o"),
        (("m.gguf", "-o", "i.gguf"), "one of the arguments --text --tokens is required"),
        (("m.gguf", "--text", "t.txt", "--tokens", "i.npy", "-o", "i.gguf"), "not allowed with argument"),
        (
            ("m.gguf", "--text", "t.txt", "-o", "i.gguf", "--ctx", "0"),
            "argument --ctx: '0' is not a positive whole",
        ),
    ],
)
def test_wrong_usage(run: Run, arguments: tuple[str, ...], problem: str) -> None:
    done = run("imatrix", *arguments)
    assert (done.status, done.out) == (2, "")
    assert problem in done.err


def test_a_text_is_given_as_to_eval() -> None:
    (commands,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    names = ("text", "tokens", "ctx", "chunks", "device")
    ours, evals = (
        [
            vars(action) | {"container": None}
            for action in commands.choices[name]._actions
            if action.dest in names
        ]
        for name in ("imatrix", "eval")
    )
    assert len(ours) == len(names)
    assert ours == evals


@pytest.mark.parametrize("file", ["model", "text"])
def test_files_that_are_missing(run: Run, model: Path, text: Path, tmp_path: Path, file: str) -> None:
    given = (tmp_path / "none", text) if file == "model" else (model, tmp_path / "none")
    with untouched(tmp_path):
        done = run("imatrix", given[0], "--text", given[1], "-o", tmp_path / "i.gguf")
    assert_one_line_error(done)
    assert f"{tmp_path / 'none'}" in done.err


def test_an_overflow_is_one_line(run: Run, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.where(np.arange(2 * CTX) == CTX, RARE, 9))
    path = with_a_rare_token(tmp_path / "m.gguf")
    with untouched(tmp_path):
        done = run("imatrix", path, "--tokens", ids, "-o", tmp_path / "i.gguf", "--ctx", CTX)
    assert_one_line_error(done)
    assert "'blk.0.attn_q.weight' in chunk 2 of 2 that are NaN or infinite" in done.err


def test_an_interruption_leaves_nothing(
    run: Run, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Llama, "hidden", interrupted)
    target = tmp_path / "i.gguf"
    with untouched(tmp_path):
        done = run("imatrix", model, "--text", text, "-o", target, "--ctx", CTX)
    assert_interrupted(done, f"{target} was not written, and no part of it is left")
