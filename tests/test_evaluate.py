"""Evaluation: what is scored and how, against float64 formulas and the published scores of a real model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import HELD_OUT, NANO
from scoring import (
    FORMATS,
    TEXT,
    Ids,
    agree,
    check_errors,
    chunked,
    log_probabilities,
    same,
    scores,
)
from synthetic import BOS, EXPERTS, VOCABULARY, Spec, metadata, some_tokens, write

import cuquant as cq
from cuquant.eval import Evaluation, evaluate
from cuquant.eval.scores import Tokens, log_softmax
from cuquant.eval.tokenizer import Tokenizer

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference.json").read_text(encoding="utf-8"))


# What is scored.


def test_probabilities_of_large_logits() -> None:
    """No sum of their exponentials overflows."""
    logits = np.array([[-1000, 0, 1000], [200, 200, 0]], np.float32)
    expected = [[-2000, -1000, 0], [-np.log(2), -np.log(2), -200 - np.log(2)]]
    np.testing.assert_allclose(log_softmax(logits), expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [None, "probability", "divergence"])
def test_one_score_that_is_no_number_is_seen(bad: str | None) -> None:
    """Of any token, also if only the divergence is none."""
    logp, base = np.log(np.full((2, 3, 4), 0.25, np.float32))
    if bad == "probability":
        logp[1] = np.nan
    elif bad == "divergence":
        logp[1, 3] = -np.inf
    found = Tokens()
    found.add(logp, np.array([0, 1, 2]), base)
    assert found.finite == (bad is None)


@pytest.mark.parametrize(
    ("count", "ctx", "chunks", "used"),
    [
        (169, 32, None, 5),
        (160, 32, None, 5),
        (169, 32, 2, 2),
        (169, 32, 99, 5),
        (32, 32, None, 1),
        (5, 4, 1, 1),
    ],
)
def test_chunks(model: Path, count: int, ctx: int, chunks: int | None, used: int) -> None:
    ids = some_tokens(count)
    result = evaluate(model, tokens=ids, ctx=ctx, chunks=chunks)
    assert (result.ctx, result.chunks, result.backend) == (ctx, used, "numpy")
    if result.scored_tokens > 1:
        agree(result.rows[0], scores(model, chunked(ids, ctx)[:used]), "ppl", "ppl_stderr")


@pytest.mark.parametrize(
    ("ctx", "scored"),
    [(512, range(257, 512)), (33, range(17, 33)), (32, range(17, 32)), (5, range(3, 5)), (4, [3])],
)
def test_scored_tokens_are_the_second_half(model: Path, ctx: int, scored: Sequence[int]) -> None:
    """Predictions of these tokens of a chunk count, and no others."""
    ids = some_tokens(ctx)
    result = evaluate(model, tokens=ids, ctx=ctx)
    logp = log_probabilities(model, ids)
    assert result.scored_tokens == len(scored)
    assert np.log(result.rows[0].ppl) == pytest.approx(
        np.mean([-logp[t - 1, ids[t]] for t in scored]), rel=1e-5
    )


def test_one_scored_token_has_no_standard_error(model: Path) -> None:
    assert evaluate(model, tokens=some_tokens(4), ctx=4).rows[0].ppl_stderr is None


def test_chunks_are_contexts_of_their_own(model: Path) -> None:
    """Their order does not matter, nor does what a chunk before them holds."""
    first, second, other = chunked(some_tokens(96), 32)
    both, swapped, one, two = (
        evaluate(model, tokens=np.concatenate(parts), ctx=32).rows[0].ppl
        for parts in ([first, second], [second, first], [first, other], [other, second])
    )
    assert both == pytest.approx(swapped, rel=1e-6)
    alone = evaluate(model, tokens=other, ctx=32).rows[0].ppl
    assert one * two == pytest.approx(both * alone, rel=1e-5)


# Texts.


def spelled(text: str) -> Ids:
    return Tokenizer.from_metadata(metadata(Spec())).encode(text)


@pytest.mark.parametrize("given", ["string", "path"])
def test_text(model: Path, tmp_path: Path, given: str) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT + "é☃", encoding="utf-8")
    text: Any = file if given == "path" else TEXT + "é☃"
    result = evaluate(model, text=text, ctx=32)
    same(result, evaluate(model, tokens=spelled(TEXT + "é☃"), ctx=32))
    assert result.chunks > 3
    assert result.text == (str(file) if given == "path" else f"text of {len(TEXT) + 2} characters")


def test_a_byte_order_mark_is_no_part_of_a_text(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "bom.txt"
    file.write_text(TEXT, encoding="utf-8-sig")
    marked = evaluate(model, text=file, ctx=32)
    same(marked, evaluate(model, text=TEXT, ctx=32))
    same(marked, evaluate(model, tokens=spelled(TEXT), ctx=32))


def test_line_ends_are_part_of_a_text(model: Path, tmp_path: Path) -> None:
    text, file = TEXT.replace(";", "\r\n").replace(".", "\r"), tmp_path / "crlf.txt"
    file.write_bytes(text.encode())
    same(evaluate(model, text=file, ctx=32), evaluate(model, text=text, ctx=32))


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_replaces_the_first_token_of_every_chunk_of_a_text(folder: Path, add_bos: bool) -> None:
    bos = VOCABULARY.index(BOS)
    keys = {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": add_bos}
    path = write(folder / f"bos-{add_bos}.gguf", Spec(keys=keys))
    ids = spelled(TEXT)
    if add_bos:
        ids = np.concatenate([[bos], ids])
        ids[::32] = bos
    same(evaluate(path, text=TEXT, ctx=32), evaluate(path, tokens=ids, ctx=32))


def test_token_ids_get_no_bos(folder: Path) -> None:
    bos = VOCABULARY.index(BOS)
    keys = {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.add_bos_token": True}
    path, ids = write(folder / "bos.gguf", Spec(keys=keys)), some_tokens(64)
    agree(evaluate(path, tokens=ids, ctx=32).rows[0], scores(path, chunked(ids, 32)), "ppl")


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.uint32, np.uint64, ">i4"])
def test_token_ids_of_any_integer_type(model: Path, dtype: Any) -> None:
    ids = some_tokens(64) % 128
    result = evaluate(model, tokens=ids.astype(dtype), ctx=32, formats="q4_0")
    same(result, evaluate(model, tokens=ids.tolist(), ctx=32, formats="q4_0"))
    assert result.text == "token ids"


# Scores.


@pytest.mark.parametrize("activations", ["f16", "q8_1"])
@pytest.mark.parametrize("spec", [Spec(), EXPERTS], ids=["dense", "experts"])
def test_scores_of_every_format(tmp_path: Path, spec: Spec, activations: str) -> None:
    path, ids = write(tmp_path / "model.gguf", spec), some_tokens(70)
    result = evaluate(path, tokens=ids, ctx=32, formats=FORMATS, activations=activations)
    assert [row.format for row in result.rows] == ["f16", *FORMATS]
    original, *quantized = result.rows
    agree(original, scores(path, chunked(ids, 32)))
    assert (original.mean_kld, original.max_kld, original.rms_dp_percent) == (0, 0, 0)
    assert (original.same_top_percent, original.tensors) == (100, [])
    for row in quantized:
        file = tmp_path / f"{row.format}.gguf"
        cq.quantize_file(path, file, row.format)
        # A rounding may turn an activation at the border of two codes.
        agree(
            row, scores(file, chunked(ids, 32), path, activations), rel=3e-4 if activations == "f16" else 0.03
        )
        assert row.mean_kld is not None
        assert row.mean_kld > 1e-5


@pytest.mark.parametrize(
    ("name", "value"),
    [("BATCH_TOKENS", 1), ("BATCH_TOKENS", 100), ("LOGIT_BLOCK", 1), ("LOGIT_BLOCK", 7 * 299)],
)
def test_batches_and_blocks_change_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    def result() -> Evaluation:
        return evaluate(model, tokens=some_tokens(170), ctx=32, formats=["q8_0", "q4_0"])

    expected = result()
    monkeypatch.setattr(importlib.import_module("cuquant.eval.evaluate"), name, value)
    same(result(), expected)


def test_a_recipe_is_evaluated_as_the_file_made_by_it(model: Path, tmp_path: Path) -> None:
    recipe, ids = {"*.attn_*": "q8_0", "*ffn_down*": "q4_0"}, some_tokens(96)
    cq.quantize_file(model, tmp_path / "q.gguf", recipe)
    direct = evaluate(model, formats=recipe, tokens=ids, ctx=32).rows[1]
    made = evaluate(tmp_path / "q.gguf", base=model, tokens=ids, ctx=32).rows[1]
    assert direct.format == made.format == "q8_0+q4_0"
    assert (direct.ppl, direct.mean_kld, direct.tensors) == (made.ppl, made.mean_kld, made.tensors)


def test_rows_of_one_name_are_numbered(model: Path) -> None:
    recipes = [{"*.attn_*": "q8_0", "*": "q4_0"}, {"*.attn_q*": "q8_0", "*": "q4_0"}]
    rows = evaluate(model, formats=[*recipes, "q8_0"], tokens=some_tokens(64), ctx=32, kv_bits=8).rows
    names = ["f16", "q4_0+q8_0", "q4_0+q8_0 (2)", "q8_0"]
    assert [row.format for row in rows] == [name for name in names for _ in "12"]


def test_a_file_is_called_after_all_its_formats(model: Path, tmp_path: Path) -> None:
    """Not where its type says more, nor after floats, where something is quantized."""
    for label, recipe in (("q4_0", {"*ffn_down*": "q4_0"}), ("q8_0+q4_0", {"output*": "q4_0", "*": "q8_0"})):
        cq.quantize_file(model, tmp_path / "q.gguf", recipe, force=True)
        (row,) = evaluate(tmp_path / "q.gguf", tokens=some_tokens(64), ctx=32).rows
        assert row.format == label


def test_base_is_the_other_way_to_compare(model: Path, q4_0: Path) -> None:
    ids = some_tokens(100)
    files = evaluate(q4_0, base=model, tokens=ids, ctx=32)
    formats = evaluate(model, formats="q4_0", tokens=ids, ctx=32)
    same(files, formats)
    assert (files.model, formats.model) == (str(q4_0), str(model))


def test_models_that_are_open_already(model: Path, q4_0: Path) -> None:
    with cq.open(model) as base, cq.open(q4_0) as quantized:
        result = evaluate(quantized, base=base, tokens=some_tokens(64), ctx=32)
    same(result, evaluate(str(q4_0), base=str(model), tokens=some_tokens(64), ctx=32))


def test_a_base_may_be_quantized_too(model: Path, q4_0: Path, tmp_path: Path) -> None:
    q8_0, ids = tmp_path / "q8_0.gguf", some_tokens(100)
    cq.quantize_file(model, q8_0, "q8_0")
    base, row = evaluate(q4_0, base=q8_0, tokens=ids, ctx=32).rows
    assert (base.format, row.format) == ("q8_0", "q4_0")
    agree(row, scores(q4_0, chunked(ids, 32), q8_0))
    check_errors(row.tensors, q8_0, q4_0)


def test_nothing_to_compare_with(model: Path) -> None:
    (row,) = evaluate(model, tokens=some_tokens(64), ctx=32).rows
    assert (row.mean_kld, row.max_kld, row.same_top_percent, row.rms_dp_percent) == (None,) * 4
    assert row.tensors == []


def test_a_model_is_called_after_most_of_its_weights(folder: Path) -> None:
    for kind, name in [(Type.F32, "f32"), (Type.BF16, "bf16"), (Type.Q5_1, "q5_1")]:
        path = write(folder / f"{name}.gguf", Spec(matrices=kind))
        assert evaluate(path, tokens=some_tokens(8), ctx=8).rows[0].format == name


def test_progress_is_for_terminals(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(model, tokens=some_tokens(64), ctx=32, progress=True)
    assert capsys.readouterr() == ("", "")


# A real model, on all of a real text.

SCORED = ["kbit3"]
"""It takes 6 s, on a slow machine 25. Of ggml's formats the bytes are held, whose scores agreed
(test_formats.py, test_mixtures.py)."""


@pytest.mark.long
def test_real_model() -> None:
    result = evaluate(NANO, text=HELD_OUT, formats=SCORED)
    assert (result.ctx, result.chunks, result.scored_tokens) == (512, 119, 119 * 255)
    for row in result.rows:
        expected = REFERENCE["float32"][row.format]
        assert row.ppl == pytest.approx(expected["ppl"], rel=1e-5)
        assert row.mean_kld == pytest.approx(expected["mean_kld"], rel=1e-4, abs=1e-9)
        assert row.max_kld == pytest.approx(expected["max_kld"], rel=0.02)
        assert row.same_top_percent == pytest.approx(expected["same_top_percent"], abs=0.05)


@pytest.mark.long
def test_real_model_with_quantized_activations(tmp_path: Path) -> None:
    cq.quantize_file(NANO, tmp_path / "q.gguf", "q4_0", device="cpu")
    (row,) = evaluate(tmp_path / "q.gguf", text=HELD_OUT, activations="q8_1").rows
    assert row.ppl == pytest.approx(REFERENCE["llama.cpp"][row.format]["ppl"], rel=2e-3)
