"""Evaluations that are refused, and in what words."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from scoring import TEXT, same
from synthetic import EXPERTS, MERGES, VOCABULARY, Spec, some_tokens, tensors, write

from cuquant.device import gpu_problem
from cuquant.eval import config, evaluate, evaluate_files
from cuquant.formats.nvfp4 import NvFp4
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


@pytest.mark.parametrize("run", [evaluate, evaluate_files])
def test_an_open_model_whose_file_was_changed(model: Path, tmp_path: Path, run: Any) -> None:
    """On its own device, too; or that is closed."""
    path = tmp_path / "m.gguf"
    shutil.copy(model, path)
    source = open_model(path, "cpu")
    os.utime(path, (1, 1))
    for device in (None, "cpu"):
        with pytest.raises(
            ValueError, match=r"m\.gguf was changed since it was opened: open the model again"
        ):
            run(source, tokens=some_tokens(64), ctx=32, device=device)
        with pytest.raises(ValueError, match=r"m\.gguf was changed since it was opened"):
            run(model, base=source, tokens=some_tokens(64), ctx=32, device=device)
    source.close()
    with pytest.raises(ValueError, match=r"m\.gguf: the file is closed: open the model again"):
        run(source, tokens=some_tokens(64), ctx=32)


@pytest.mark.parametrize("text", [b"bytes", 5, ["a", "b"]])
def test_text_is_a_string_or_a_path(model: Path, text: Any) -> None:
    with pytest.raises(TypeError, match="text"):
        evaluate(model, text=text, ctx=4)


def test_the_name_of_a_file_is_no_text(model: Path) -> None:
    with pytest.raises(ValueError, match=r"for the file pass pathlib\.Path\('wiki\.test\.raw'\)"):
        evaluate(model, text="wiki.test.raw", ctx=4)
    with pytest.raises(ValueError, match=r"too few|tokens"):
        evaluate(model, text="see\nwiki.test.raw", ctx=512)


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
    monkeypatch.setattr(importlib.import_module("cuquant.eval.contenders"), "quantize", None)
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
        config.UnsupportedModel, match=f"hostile.gguf: .*without a place in a llama forward pass: {shown}"
    ):
        evaluate(path, tokens=some_tokens(64), ctx=32, formats="q4_0")


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        (Spec(keys={"attention.clamp_kqv": 8.0}), {}, "attention.clamp_kqv, which is not implemented"),
        (Spec(n_layers=3, keys={"block_count": 2}), {}, "9 tensors without a place in a llama forward pass"),
        (Spec(keys={"attention.sliding_window": 16}), {}, "slides over 16 tokens"),
        (Spec(), {"tokens": [len(VOCABULARY)] * 64}, "token ids run from"),
        (Spec(head_dim=20), {"kv_bits": 4}, "head_dim"),
    ],
)
def test_what_can_be_told_before_quantizing(
    folder: Path, spec: Spec, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder / "refused.gguf", spec)
    monkeypatch.setattr(importlib.import_module("cuquant.eval.contenders"), "quantize", None)
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


@pytest.mark.parametrize(
    "keys",
    [
        {"add_bos_token": True, "bos_token_id": len(VOCABULARY) - 1},
        {"pre": "default"},
        {"merges": MERGES[:-4]},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_a_base_that_tokenizes_otherwise(model: Path, folder: Path, keys: dict[str, Any]) -> None:
    """The same vocabulary, but the text is other ids: none of the two could be scored on those of the other.
    Keys that differ are no matter where the ids do not, nor are they of ids that the caller gives."""
    named = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    other = write(folder / "otherwise.gguf", Spec(keys=named))
    key, text = next(iter(named)), f"x'ver {TEXT}"  # which "default" cuts elsewhere
    told = (
        rf"otherwise\.gguf tokenizes the text otherwise than dense\.gguf \({key}.*\): a text is not the same"
    )
    for run in (evaluate, evaluate_files):
        with pytest.raises(ValueError, match=told):
            run(model, base=other, text=text, ctx=32)
    evaluate(model, base=other, tokens=some_tokens(64), ctx=32)
    # Those that do not say how a text becomes ids, or say it in part, have a vocabulary that is compared.
    for missing in (
        {"model": None},
        {"merges": None},
        {"pre": "own"},
        {"add_bos_token": True, "bos_token_id": None},
    ):
        more = {f"tokenizer.ggml.{key}": value for key, value in missing.items()}
        mute = write(folder / "mute.gguf", Spec(keys=named | more))
        evaluate(model, base=mute, text=TEXT, ctx=32)


def test_a_base_that_tokenizes_alike_by_other_keys(model: Path, folder: Path) -> None:
    keys = {"tokenizer.ggml.pre": "olmo", "tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.eos_token_id": 7}
    alike = write(folder / "alike.gguf", Spec(keys=keys))
    assert len(evaluate(model, base=alike, text=TEXT, ctx=32).rows) == 2


def test_a_base_to_which_a_text_is_no_chunk(model: Path, folder: Path) -> None:
    """Fewer tokens to one than to the other."""
    other = write(folder / "letters.gguf", Spec(keys={"tokenizer.ggml.merges": MERGES[:1]}))
    with pytest.raises(ValueError, match=r"dense\.gguf tokenizes the text otherwise than letters\.gguf"):
        evaluate(other, base=model, text="the lazy dog and the", ctx=18)


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


def test_formats_that_are_none(model: Path) -> None:
    wrong: Any
    for wrong, said in ((3, "an int"), (None, "None"), (2.5, "a float")):
        for run in (evaluate, evaluate_files):
            with pytest.raises(
                TypeError, match=f"formats is {said}; a format, its name, a mapping, or several"
            ):
                run(model, tokens=some_tokens(64), ctx=32, formats=wrong)


def test_no_tokens(model: Path) -> None:
    with pytest.raises(TypeError, match="tokens are a 1-D integer array, not an empty list"):
        evaluate(model, tokens=[], ctx=32)


def bad(name: str, value: float) -> dict[str, Any]:
    """A tensor of the model `Spec(rope_factors=True)` with one such number."""
    made = tensors(Spec(rope_factors=True))[name].copy()
    made.flat[-1] = value
    return {name: made}


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.attn_norm.weight", "output.weight"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_no_numbers(folder: Path, name: str, value: float) -> None:
    """The model and the tensor are named, whether it is compared with another or not."""
    path = write(folder / "bad.gguf", Spec(rope_factors=True), **bad(name, value))
    good = write(folder / "good.gguf", Spec(rope_factors=True))
    said = rf"bad\.gguf \(f16.*\) has scores that are NaN or infinite: tensor '{name}' has weights that are"
    arguments: dict[str, Any] = {"tokens": some_tokens(64), "ctx": 32, "device": "cpu"}
    for each, base in ((path, None), (good, path), (path, good)):
        with pytest.raises(ValueError, match=said):
            evaluate(each, base=base, **arguments)
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    with pytest.raises(ValueError, match=said):
        evaluate_files([good, path], results=results, kv_bits=4, **arguments)
    assert [Path(e["file"][0]) for e in json.loads(results.read_text())["evaluations"]] == [good.resolve()]


def test_scores_that_overflow(folder: Path) -> None:
    """Of weights that are all finite."""
    large = {"output.weight": tensors(Spec())["output.weight"] * np.float32(1e38)}
    path = write(folder / "large.gguf", Spec(), **large)
    with pytest.raises(
        ValueError, match="NaN or infinite: its weights are not, but what they make of the text"
    ):
        evaluate(path, tokens=some_tokens(64), ctx=32)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0])
def test_rotary_factors_that_cannot_divide(folder: Path, value: float) -> None:
    path = write(folder / "bad.gguf", Spec(rope_factors=True), **bad("rope_freqs.weight", value))
    with pytest.raises(config.UnsupportedModel, match=r"bad\.gguf: 'rope_freqs\.weight' has the factor"):
        evaluate(path, tokens=some_tokens(64), ctx=32)


@pytest.mark.parametrize("fmt", ["q4_0", "trellis3", NvFp4(), {"*": "nvfp4"}], ids=str)
def test_a_tensor_that_cannot_be_quantized(folder: Path, fmt: Any) -> None:
    path = write(folder / "bad.gguf", Spec(n_ff=128), **bad("blk.1.attn_q.weight", np.nan))
    with pytest.raises(ValueError, match=r"^tensor 'blk\.1\.attn_q\.weight': .*nan in row 63"):
        evaluate(path, tokens=some_tokens(64), ctx=32, formats=fmt)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.attn_norm.weight", "output_norm.weight"])
@pytest.mark.parametrize("kind", ["int8", "int32"])
def test_tensors_of_integers(folder: Path, name: str, kind: str) -> None:
    stored = np.ones_like(tensors(Spec())[name], kind), Type[f"I{8 * np.dtype(kind).itemsize}"]
    path = write(folder / "integers.gguf", Spec(), **{name: stored})  # type: ignore[arg-type]
    with pytest.raises(
        config.UnsupportedModel, match=rf"integers\.gguf: tensor '{name}' holds {kind} numbers"
    ):
        evaluate(path, tokens=some_tokens(64), ctx=32)


@pytest.mark.parametrize("reads", [evaluate, evaluate_files])
def test_a_vocabulary_that_is_malformed(folder: Path, reads: Any) -> None:
    """Whose it is, of several models."""
    path = write(folder / "bad.gguf", Spec(keys={"tokenizer.ggml.pre": "kimi-k2"}))
    with pytest.raises(ValueError, match=r"bad\.gguf: tokenizer\.ggml\.pre is 'kimi-k2'"):
        reads(path, text="some text", ctx=32)


def test_a_model_that_is_changed_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, module = write(folder / "m.gguf", Spec()), importlib.import_module("cuquant.eval.evaluate")

    def scored(*args: Any, **kwargs: Any) -> Any:
        os.utime(path, ns=(0, 0))
        return score(*args, **kwargs)

    score = module._score
    monkeypatch.setattr(module, "_score", scored)
    with pytest.raises(ValueError, match=r"m\.gguf was changed since it was opened"):
        evaluate(path, tokens=some_tokens(64), ctx=32)
