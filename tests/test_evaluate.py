"""Evaluation: what is scored and how, against float64 formulas and the published scores of a real model."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from synthetic import BOS, VOCABULARY, Spec, metadata, write

import cuquant as cq
from cuquant.eval import Evaluation, Row, TensorError, config, evaluate
from cuquant.eval.llama import Llama
from cuquant.eval.scores import tensor_error
from cuquant.eval.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "examples" / "data"
REFERENCE = json.loads((Path(__file__).parent / "data" / "reference.json").read_text(encoding="utf-8"))
FORMATS = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
EXPERTS = Spec(n_experts=4, n_experts_used=2)
TEXT = "The quick brown fox jumps over the lazy dog; the end of the lane. " * 8

Ids = NDArray[np.integer[Any]]
F64 = NDArray[np.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A dense float16 model."""
    return write(folder / "dense.gguf", Spec())


@pytest.fixture(scope="module")
def q4_0(model: Path, folder: Path) -> Path:
    """The same model, quantized."""
    cq.quantize_file(model, folder / "q4_0.gguf", "q4_0")
    return folder / "q4_0.gguf"


def some_tokens(count: int) -> Ids:
    return np.random.default_rng(2).integers(0, len(VOCABULARY), count)


# Definitions, in float64 and one token at a time.


def log_probabilities(path: Path, chunk: Ids, activations: str = "f16") -> F64:
    """Natural log-probabilities [T, vocabulary] of the successors in one chunk."""
    source = cq.open(path)
    llama = Llama(config.read(source.metadata), dict(source), activations)
    logits = llama.logits(llama.hidden(chunk[None], 0)[0]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def scores(path: Path, chunks: Sequence[Ids], base: Path | None = None, activations: str = "f16") -> Row:
    """What llama-perplexity reports, by its definitions."""
    nll, kld, dp, same = [], [], [], []
    for chunk in chunks:
        logp = log_probabilities(path, chunk, activations)
        reference = logp if base is None else log_probabilities(base, chunk, activations)
        for position in range(len(chunk) // 2, len(chunk) - 1):
            successor = chunk[position + 1]
            p, q = reference[position], logp[position]
            nll.append(-q[successor])
            kld.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            dp.append(math.exp(q[successor]) - math.exp(p[successor]))
            same.append(int(p.argmax()) == int(q.argmax()))
    n, mean = len(nll), sum(nll) / len(nll)
    variance = sum(x * x for x in nll) / n - mean * mean
    return Row(
        format="",
        ppl=math.exp(mean),
        ppl_stderr=math.exp(mean) * math.sqrt(variance / (n - 1)),
        mean_kld=sum(kld) / n,
        max_kld=max(kld),
        same_top_percent=100 * sum(same) / n,
        rms_dp_percent=100 * math.sqrt(sum(x * x for x in dp) / n),
        bits_per_weight=math.nan,
    )


def agree(row: Row, expected: Row, *names: str, rel: float = 3e-4) -> None:
    names = names or ("ppl", "ppl_stderr", "mean_kld", "max_kld", "same_top_percent", "rms_dp_percent")
    for name in names:
        actual, wanted = getattr(row, name), getattr(expected, name)
        assert actual == (None if wanted is None else pytest.approx(wanted, rel=rel, abs=1e-6)), name


def same(result: Evaluation, expected: Evaluation) -> None:
    """Two ways to ask for one thing."""
    assert [row.format for row in result.rows] == [row.format for row in expected.rows]
    assert result.scored_tokens == expected.scored_tokens
    for row, wanted in zip(result.rows, expected.rows, strict=True):
        agree(row, wanted)
        assert row.bits_per_weight == wanted.bits_per_weight
        assert row.tensors == wanted.tensors


def chunked(ids: Ids, ctx: int) -> list[Ids]:
    return [ids[start : start + ctx] for start in range(0, len(ids) - ctx + 1, ctx)]


# What is scored.


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


# Errors and sizes of tensors.


def read_tensors(path: Path) -> dict[str, tuple[Type, F64, int]]:
    """Type, numbers and bytes of all tensors of a file, by the gguf package."""
    return {
        t.name: (
            t.tensor_type,
            gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64),
            int(t.n_bytes),
        )
        for t in gguf.GGUFReader(path).tensors
    }


def bits_per_weight(path: Path) -> float:
    stored = read_tensors(path).values()
    return 8 * sum(nbytes for *_, nbytes in stored) / sum(numbers.size for _, numbers, _ in stored)


def check_errors(errors: Sequence[TensorError], base: Path, quantized: Path) -> None:
    originals, results = read_tensors(base), read_tensors(quantized)
    expected = [name for name, (kind, *_) in results.items() if kind not in (Type.F32, Type.F16)]
    assert [e.name for e in errors] == expected
    for e in errors:
        original, (kind, result, nbytes) = originals[e.name][1], results[e.name]
        noise, signal = np.sum((result - original) ** 2), np.sum(original**2)
        assert e.nmse == pytest.approx(noise / signal, rel=1e-5)
        assert e.sqnr_db == pytest.approx(10 * np.log10(signal / noise), abs=1e-4)
        assert e.max_abs_error == pytest.approx(np.abs(result - original).max(), rel=1e-6)
        assert (e.format, e.bits_per_weight) == (kind.name.lower(), 8 * nbytes / result.size)


@pytest.mark.parametrize("spec", [Spec(tied=True), EXPERTS], ids=["dense", "experts"])
def test_tensor_errors_and_bits_per_weight(tmp_path: Path, spec: Spec) -> None:
    path = write(tmp_path / "model.gguf", spec)
    for row in evaluate(path, tokens=some_tokens(8), ctx=8, formats=FORMATS).rows:
        file = path
        if row.format != "f16":
            file = tmp_path / f"{row.format}.gguf"
            cq.quantize_file(path, file, row.format)
            check_errors(row.tensors, path, file)
        assert row.bits_per_weight == pytest.approx(bits_per_weight(file), rel=1e-12)


@pytest.mark.parametrize("original", [np.zeros((3, 64)), np.tile(np.arange(-8, 8), (2, 4)) / 4])
def test_exact_tensor(original: NDArray[Any]) -> None:
    w = original.astype(np.float32)
    error = tensor_error("w", w, cq.quantize(w, "q4_0"))
    assert (error.nmse, error.sqnr_db, error.max_abs_error) == (0, None, 0)


def test_tensor_larger_than_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.random.default_rng(0).standard_normal((2, 3, 7, 64), np.float32)
    quantized = cq.quantize(w, "q4_1")
    whole = tensor_error("w", w, quantized)
    monkeypatch.setattr("cuquant.cpu.SLAB", 128)
    parts = tensor_error("w", w, quantized)
    assert parts.nmse == pytest.approx(whole.nmse, rel=1e-12)
    assert parts.max_abs_error == whole.max_abs_error


def test_ragged_matrices_stay_float(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", Spec(n_ff=80))
    with pytest.warns(
        UserWarning, match=r"^q4_0: kept in float.*: blk\.0\.ffn_down\.weight, blk\.1\.ffn_down"
    ):
        row = evaluate(path, tokens=some_tokens(64), ctx=32, formats="q4_0").rows[1]
    assert {e.name for e in row.tensors} & {"blk.0.ffn_down.weight", "blk.0.ffn_up.weight"} == {
        "blk.0.ffn_up.weight"
    }


def test_types_without_a_format_here(folder: Path) -> None:
    """They are dequantized, so no error is theirs; their size is what the file stores."""
    spec = Spec(d_model=256, head_dim=64, n_ff=256)
    base = write(folder / "large.gguf", spec)
    path = write(folder / "ternary.gguf", replace(spec, matrices=Type.TQ2_0))
    with pytest.warns(cq.FallbackWarning, match="TQ2_0"):
        row = evaluate(path, base=base, tokens=some_tokens(64), ctx=32).rows[1]
    assert (row.format, row.tensors) == ("tq2_0", [])
    assert row.bits_per_weight == pytest.approx(bits_per_weight(path), rel=1e-12)


def test_base_of_other_tensors(model: Path, folder: Path) -> None:
    """Errors are those of the tensors that both models have, in the same shape."""
    base = write(folder / "narrow.gguf", Spec(tied=True, n_ff=64))
    quantized = write(folder / "wide.gguf", Spec(matrices=Type.Q4_0))
    errors = evaluate(quantized, base=base, tokens=some_tokens(64), ctx=32).rows[1].tensors
    names = {e.name for e in errors}
    assert "blk.0.attn_q.weight" in names
    assert not names & {"output.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"}


def test_progress_is_for_terminals(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(model, tokens=some_tokens(64), ctx=32, progress=True)
    assert capsys.readouterr() == ("", "")


# Refusals.


@pytest.mark.parametrize("given", [{}, {"text": "a", "tokens": [1]}], ids=["neither", "both"])
def test_either_text_or_tokens(model: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either text or tokens"):
        evaluate(model, **given)


@pytest.mark.parametrize("tokens", [[0.5] * 64, [True] * 64, ["a"] * 64, [[1] * 64], 5, []])
def test_tokens_are_a_vector_of_integers(model: Path, tokens: Any) -> None:
    with pytest.raises(TypeError, match="1-D integer array"):
        evaluate(model, tokens=tokens, ctx=32)


@pytest.mark.parametrize("text", [b"bytes", 5, ["a", "b"]])
def test_text_is_a_string_or_a_path(model: Path, text: Any) -> None:
    with pytest.raises(TypeError, match="text"):
        evaluate(model, text=text, ctx=4)


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
        ({"ctx": 3}, "ctx is 3; a chunk needs at least 4 tokens"),
        ({"ctx": -512}, "ctx is -512"),
        ({"chunks": 0}, "chunks is 0; at least 1"),
        ({"chunks": -1}, "chunks is -1"),
        ({"ctx": 65}, "64 tokens; one chunk of 65"),
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


def test_quantized_models_are_not_quantized_again(q4_0: Path) -> None:
    with pytest.raises(ValueError, match=r"q4_0\.gguf is quantized already: token_embd\.weight \(Q4_0\)"):
        evaluate(q4_0, tokens=some_tokens(64), ctx=32, formats="q8_0")


def test_vocabularies_of_different_size(model: Path, folder: Path) -> None:
    larger = write(folder / "larger.gguf", Spec(vocabulary=(*VOCABULARY, "<pad>")))
    with pytest.raises(ValueError, match=r"vocabularies differ in size: \[300, 299\]"):
        evaluate(model, base=larger, tokens=some_tokens(64), ctx=32)


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
    with pytest.raises(config.UnsupportedModel, match=r"slides over 32 tokens.*not 33"):
        evaluate(path, tokens=ids, ctx=33)


def test_context_beyond_training(folder: Path) -> None:
    path = write(folder / "short.gguf", Spec(keys={"context_length": 32}))
    evaluate(path, tokens=some_tokens(66), ctx=32)
    with pytest.warns(
        UserWarning, match="ctx 33 is longer than the 32 tokens the model was trained on"
    ) as seen:
        evaluate(path, tokens=some_tokens(66), ctx=33, formats=["q8_0", "q4_0"])
    assert [warning.filename for warning in seen] == [__file__]


# A real model, on all of a real text.


def test_real_model() -> None:
    result = evaluate(DATA / "nano-llama-f16.gguf", text=DATA / "heldout-public.txt", formats=FORMATS)
    assert (result.ctx, result.chunks, result.scored_tokens) == (512, 119, 119 * 255)
    for row in result.rows:
        expected = REFERENCE["float32"][row.format]
        assert row.ppl == pytest.approx(expected["ppl"], rel=5e-4)
        assert row.mean_kld == pytest.approx(expected["mean_kld"], rel=0.02)
        assert row.max_kld == pytest.approx(expected["max_kld"], rel=0.02)
        assert row.same_top_percent == pytest.approx(expected["same_top_percent"], abs=0.05)


def test_real_model_with_quantized_activations() -> None:
    result = evaluate(
        DATA / "nano-llama-f16.gguf",
        text=DATA / "heldout-public.txt",
        formats=["q8_0", "q4_0"],
        activations="q8_1",
    )
    for row in result.rows:
        assert row.ppl == pytest.approx(REFERENCE["llama.cpp"][row.format]["ppl"], rel=2e-3)
