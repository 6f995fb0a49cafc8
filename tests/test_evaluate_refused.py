"""Evaluations that are refused, and in what words."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring import TEXT, same
from synthetic import EXPERTS, VOCABULARY, Spec, some_tokens, write

from cuquant.device import gpu_problem
from cuquant.eval import config, evaluate, evaluate_files
from cuquant.io.model import open as open_model

MODEL = Path(__file__).parents[1] / "examples/data/nano-llama-f16.gguf"


@pytest.mark.parametrize("given", [{}, {"text": "a", "tokens": [1]}], ids=["neither", "both"])
def test_either_text_or_tokens(model: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either text or tokens"):
        evaluate(model, **given)


@pytest.mark.parametrize("tokens", [[0.5] * 64, [True] * 64, ["a"] * 64, [[1] * 64], 5, []])
def test_tokens_are_a_vector_of_integers(model: Path, tokens: Any) -> None:
    with pytest.raises(TypeError, match="1-D integer array"):
        evaluate(model, tokens=tokens, ctx=32)


@pytest.mark.parametrize("run", [evaluate, evaluate_files])
def test_a_model_is_no_mapping_of_tensors(run: Any) -> None:
    message = r"a model is the path of a file, or a cuquant\.Model that is open, not a dict"
    with pytest.raises(TypeError, match=message):
        run({"w": np.zeros((2, 32))}, tokens=some_tokens(64), ctx=32)


@pytest.mark.parametrize("run", [evaluate, evaluate_files])
def test_an_open_model_is_evaluated_where_is_asked_for(model: Path, run: Any) -> None:
    """Or not at all: not where it is."""
    with open_model(model, "cpu") as source:
        for device in ("bogus", "", 0):
            with pytest.raises(ValueError, match=r"unknown device .*; allowed are 'cpu' and 'cuda'"):
                run(source, tokens=some_tokens(64), ctx=32, device=device)
        if gpu_problem() is not None:
            with pytest.raises(RuntimeError, match="no CUDA device can be used"):
                run(source, tokens=some_tokens(64), ctx=32, device="cuda")


@pytest.mark.parametrize("text", [b"bytes", 5, ["a", "b"]])
def test_text_is_a_string_or_a_path(model: Path, text: Any) -> None:
    with pytest.raises(TypeError, match="text"):
        evaluate(model, text=text, ctx=4)


def test_the_name_of_a_file_is_no_text(model: Path) -> None:
    with pytest.raises(ValueError, match=r"for the file pass pathlib\.Path\('wiki\.test\.raw'\)"):
        evaluate(model, text="wiki.test.raw", ctx=4)


@pytest.mark.parametrize("bad", [-1, len(VOCABULARY), 2**40])
@pytest.mark.parametrize("formats", [(), "q4_0"])
def test_tokens_out_of_range(model: Path, bad: int, formats: Any) -> None:
    ids = some_tokens(64)
    ids[40] = bad
    with pytest.raises(ValueError, match=rf"{bad}.* vocabulary of dense\.gguf has {len(VOCABULARY)}"):
        evaluate(model, tokens=ids, ctx=32, formats=formats)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ctx": 3}, "ctx is 3; allowed are 4 to"),
        ({"ctx": -512}, "ctx is -512"),
        ({"chunks": 0}, "chunks is 0; allowed are 1 to"),
        ({"chunks": -1}, "chunks is -1"),
        ({"ctx": 65}, "64 tokens; at least one chunk of 65 tokens is needed$"),
        ({"activations": "q8_0"}, "unknown activations 'q8_0'; allowed are 'f16' and 'q8_1'"),
        ({"formats": "q4_7"}, "q4_7"),
        ({"formats": ["q4_0", "q8_1"]}, "q8_1 is a format of activations"),
        ({"formats": "q4_0", "base": "other.gguf"}, "give base or formats, not both"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_arguments_that_do_not_fit(model: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(model, tokens=some_tokens(64), **{"ctx": 32, **arguments})


@pytest.mark.parametrize("given", [{"ctx": 32.0}, {"ctx": "32"}, {"chunks": 1.5}, {"chunks": "1"}])
def test_counts_are_integers(folder: Path, given: dict[str, Any]) -> None:
    """Which is said before a file is opened."""
    ((name, value),) = given.items()
    with pytest.raises(TypeError, match=f"{name} is a {type(value).__name__}; an integer is needed"):
        evaluate(folder / "none.gguf", tokens=some_tokens(64), **{"ctx": 32} | given)


def test_half_a_character_is_no_text(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"text is no text in Unicode: .* position 4"):
        evaluate(folder / "none.gguf", text="some\udcff text", ctx=4)


@pytest.mark.parametrize("spec", [Spec(d_model=80), Spec(n_ff=80), replace(EXPERTS, n_ff=80)])
def test_weights_whose_inputs_are_no_whole_blocks(
    folder: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trellis takes rows of any length, q8_1 does not."""
    path = write(folder / "ragged.gguf", spec)
    monkeypatch.setattr(importlib.import_module("cuquant.eval.evaluate"), "quantize", None)
    with pytest.raises(ValueError, match=r"tensor '.*' in trellis2 has no q8_1 activations: .* 80 elements"):
        evaluate(path, tokens=some_tokens(64), ctx=32, formats=["q8_0", "trellis2"], activations="q8_1")


def test_rows_that_are_looked_up_need_no_blocks(folder: Path) -> None:
    path, recipe = write(folder / "ragged.gguf", Spec(d_model=80)), {"token_embd.weight": "trellis4"}
    result = evaluate(path, tokens=some_tokens(64), ctx=32, formats=[recipe], activations="q8_1")
    assert [row.activations for row in result.rows] == ["f16", "f16"]


def test_quantized_models_are_not_quantized_again(q4_0: Path) -> None:
    with pytest.raises(ValueError, match=r"q4_0\.gguf is quantized already: token_embd\.weight \(Q4_0\)"):
        evaluate(q4_0, tokens=some_tokens(64), ctx=32, formats="q8_0")


def test_names_that_a_terminal_would_obey(folder: Path) -> None:
    hostile: Any = {"odd\x1b[2J.weight": np.zeros((2, 40), np.float32)}
    path = write(folder / "hostile.gguf", Spec(), **hostile)
    shown = r"odd\\x1b\[2J\.weight"
    with pytest.raises(
        config.UnsupportedModel, match=f"hostile.gguf: .*no place in a llama forward pass: {shown}"
    ):
        evaluate(path, tokens=some_tokens(64), ctx=32, formats="q4_0")


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        (Spec(keys={"attention.clamp_kqv": 8.0}), {}, "attention.clamp_kqv, which is not implemented"),
        (Spec(n_layers=3, keys={"block_count": 2}), {}, "tensors have no place in a llama forward pass"),
        (Spec(keys={"attention.sliding_window": 16}), {}, "slides over 16 tokens"),
        (Spec(), {"tokens": [len(VOCABULARY)] * 64}, "token ids run from"),
        (Spec(head_dim=20), {"kv_bits": 4}, "head_dim"),
    ],
)
def test_what_can_be_told_before_quantizing(
    folder: Path, spec: Spec, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder / "refused.gguf", spec)
    monkeypatch.setattr(importlib.import_module("cuquant.eval.evaluate"), "quantize", None)
    with pytest.raises(ValueError, match=message):
        evaluate(path, **{"tokens": some_tokens(64), "ctx": 32, "formats": "q4_0", **arguments})


def test_vocabularies_of_different_size(model: Path, folder: Path) -> None:
    larger = write(folder / "larger.gguf", Spec(vocabulary=(*VOCABULARY, "<pad>")))
    with pytest.raises(ValueError, match=r"vocabularies differ in size: \[300, 299\]"):
        evaluate(model, base=larger, tokens=some_tokens(64), ctx=32)


def test_a_base_of_another_vocabulary(model: Path, folder: Path) -> None:
    """Of the same size. Token ids mean what the caller says; a model that says nothing may have the same."""
    first, second, *others = VOCABULARY
    other = write(folder / "other.gguf", Spec(vocabulary=(second, first, *others)))
    mute = write(folder / "mute.gguf", Spec(keys={"tokenizer.ggml.tokens": None}))
    with pytest.raises(
        ValueError, match=r"other\.gguf has another vocabulary \(tokenizer.ggml.tokens\) than"
    ):
        evaluate(model, base=other, text=TEXT, ctx=32)
    evaluate(model, base=other, tokens=some_tokens(64), ctx=32)
    evaluate(model, base=mute, text=TEXT, ctx=32)


def test_text_needs_a_vocabulary(folder: Path) -> None:
    path = write(folder / "mute.gguf", Spec(keys={"tokenizer.ggml.model": None}))
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model"):
        evaluate(path, text=TEXT, ctx=32)
    assert evaluate(path, tokens=some_tokens(64), ctx=32).chunks == 2


def test_context_beyond_a_sliding_window(folder: Path) -> None:
    path = write(folder / "window.gguf", Spec(keys={"attention.sliding_window": 32}))
    whole = write(folder / "whole.gguf", Spec())
    ids = some_tokens(66)
    same(evaluate(path, tokens=ids, ctx=32), evaluate(whole, tokens=ids, ctx=32))
    with pytest.raises(config.UnsupportedModel, match=r"window\.gguf: .* slides over 32 tokens.*not 33"):
        evaluate(path, tokens=ids, ctx=33)


def test_context_beyond_training(folder: Path) -> None:
    path = write(folder / "short.gguf", Spec(keys={"context_length": 32}))
    evaluate(path, tokens=some_tokens(66), ctx=32)
    with pytest.warns(
        UserWarning, match="ctx 33 is longer than the 32 tokens the model was trained on"
    ) as seen:
        evaluate(path, tokens=some_tokens(66), ctx=33, formats=["q8_0", "q4_0"])
    assert [warning.filename for warning in seen] == [__file__]


def test_a_file_s_name_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some words")
    with pytest.raises(ValueError, match=r"text is a str, and so the text itself: .*pathlib\.Path"):
        evaluate(MODEL, text=str(path), device="cpu")
