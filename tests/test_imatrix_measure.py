"""Importance matrices that are measured: against sums in float64 over another forward pass, as files, by the
command, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import interrupted
from gguf import GGMLQuantizationType as Type
from gguf_files import HELD_OUT, NANO, untouched
from imatrix_files import RARE, F, with_a_rare_token
from llama_oracle import F64, Oracle
from scoring import TEXT, chunked
from synthetic import EXPERTS, QWEN3, QWEN3_MOE, Spec, some_tokens, tensors, write

import cuquant as cq
from cuquant.eval import config
from cuquant.eval.llama import Llama
from cuquant.io import imatrix


class Listening(Oracle):
    """A forward pass of one position at a time, which sums up what matrices are multiplied by."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.squares: dict[tuple[str, int], F64] = defaultdict(lambda: np.zeros(1))
        self.counts: dict[tuple[str, int], int] = defaultdict(int)

    def note(self, x: F64, name: str, expert: int | None) -> None:
        key = f"{name}.weight", expert or 0
        self.squares[key] = self.squares[key] + x * x
        self.counts[key] += 1

    def project(self, x: F64, name: str, expert: int | None = None) -> F64:
        self.note(x, name, expert)
        return super().project(x, name, expert)

    def feed_forward(self, prefix: str, x: F64) -> F64:
        if f"{prefix}ffn_gate_inp.weight" in self.weights:
            self.note(x, f"{prefix}ffn_gate_inp", None)
        return super().feed_forward(prefix, x)


SPECS = {
    "dense": Spec(),
    "biases": Spec(architecture="qwen2", biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": QWEN3,
    "q8_0": Spec(matrices=Type.Q8_0),
    "experts": EXPERTS,
    "qwen3 with experts": QWEN3_MOE,
    "experts in q8_0": Spec(n_experts=4, n_experts_used=2, matrices=Type.Q8_0),
}
CTX = 16


@pytest.mark.parametrize("name", SPECS)
def test_sums_of_another_forward_pass(tmp_path: Path, name: str) -> None:
    """Of each weight in a product, over all tokens of whole chunks, and the right experts' alone."""
    path, ids = write(tmp_path / "m.gguf", SPECS[name]), some_tokens(3 * CTX + 5)
    made = cq.measure_importance(path, tmp_path / "i.gguf", tokens=ids, ctx=CTX)
    oracle = Listening(path)
    for chunk in chunked(ids, CTX):
        oracle.states(chunk)
    assert set(made) == {weight for weight, _ in oracle.squares}
    sums = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    assert set(sums) == {f"{weight}.{what}" for weight in made for what in ("in_sum2", "counts")}
    for (weight, expert), squares in oracle.squares.items():
        np.testing.assert_allclose(np.atleast_2d(sums[f"{weight}.in_sum2"])[expert], squares, rtol=1e-4)
        count = oracle.counts[weight, expert]
        assert sums[f"{weight}.counts"].reshape(-1)[expert] == count
        np.testing.assert_allclose(np.atleast_2d(made[weight])[expert], squares / count, rtol=1e-4)
    if "experts" in name:
        counts = sums["blk.1.ffn_down_exps.weight.counts"]
        assert (counts.shape, counts.sum()) == ((4, 1), 2 * 3 * CTX)


def test_names_are_the_file_s(model: Path) -> None:
    """Of all matrices, but for the embedding, and the output unless that is asked for."""
    matrices = {name for name, info in cq.open(model, "cpu").tensors.items() if len(info.shape) == 2}
    blocks, both = (
        cq.measure_importance(model, tokens=some_tokens(CTX), ctx=CTX, process_output=output)
        for output in (False, True)
    )
    assert set(both) == matrices - {"token_embd.weight"}
    assert set(blocks) == set(both) - {"output.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_inputs_of_the_output(tmp_path: Path, tied: bool) -> None:
    path, ids = write(tmp_path / "m.gguf", Spec(tied=tied)), some_tokens(CTX)
    made = cq.measure_importance(path, tokens=ids, ctx=CTX, process_output=True)
    states = Oracle(path).states(ids)
    name = "token_embd.weight" if tied else "output.weight"
    np.testing.assert_allclose(made[name], np.mean(states**2, axis=0), rtol=1e-4)


def test_what_passes_together_does_not_matter(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_tokens(5 * CTX)
    expected = cq.measure_importance(model, tokens=ids, ctx=CTX)
    other = np.concatenate(chunked(ids, CTX)[::-1])
    for tokens in (CTX, 2 * CTX):
        monkeypatch.setattr(sys.modules["cuquant.eval.evaluate"], "BATCH_TOKENS", tokens)
        made = cq.measure_importance(model, tokens=other, ctx=CTX)
        for name, mean in expected.items():
            np.testing.assert_allclose(made[name], mean, rtol=1e-5)
    assert set(made) == set(expected)


@pytest.mark.parametrize("matrices", [Type.F16, Type.Q8_0])
def test_a_model_that_is_observed_computes_the_same(tmp_path: Path, matrices: Type) -> None:
    source = cq.open(
        write(tmp_path / "m.gguf", Spec(n_experts=4, n_experts_used=2, matrices=matrices)), "cpu"
    )
    seen: list[str] = []
    settings, ids = config.read(source.metadata), some_tokens(2, CTX)
    observed = Llama(settings, dict(source), inputs=lambda weight, x: seen.append(weight.name))
    expected = Llama(settings, dict(source)).hidden(ids, 0)
    np.testing.assert_allclose(observed.hidden(ids, 0), expected, rtol=1e-4, atol=1e-4)
    assert {*seen} == {name for name in source if name.startswith("blk.") and "norm" not in name}


# Files.


@pytest.mark.parametrize("spec", [Spec(), EXPERTS], ids=["dense", "experts"])
def test_the_file_is_what_comes_back(tmp_path: Path, spec: Spec) -> None:
    path, text = write(tmp_path / "m.gguf", spec), tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    made = cq.measure_importance(path, tmp_path / "i.gguf", text=text, ctx=CTX, chunks=4)
    read = cq.read_imatrix(tmp_path / "i.gguf")
    assert list(read) == list(made)
    for name, values in made.items():
        assert values.dtype == F
        np.testing.assert_array_equal(read[name], values)
    by_ids = cq.measure_importance(path, text=TEXT, ctx=CTX, chunks=4)
    np.testing.assert_array_equal(by_ids["blk.1.attn_output.weight"], made["blk.1.attn_output.weight"])
    fields = gguf.GGUFReader(tmp_path / "i.gguf").fields
    keys = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert keys == {
        "general.type": "imatrix",
        "imatrix.datasets": [str(text)],
        "imatrix.chunk_count": 4,
        "imatrix.chunk_size": CTX,
    }


@pytest.mark.parametrize(
    "spec",
    [
        Spec(d_model=256, head_dim=64, n_ff=512),
        Spec(d_model=256, head_dim=64, n_ff=256, n_experts=3, n_experts_used=2),
    ],
    ids=["dense", "experts"],
)
def test_a_model_is_quantized_by_it(tmp_path: Path, spec: Spec) -> None:
    path, matrix = write(tmp_path / "m.gguf", spec), tmp_path / "i.gguf"
    made = cq.measure_importance(path, matrix, tokens=some_tokens(8 * CTX), ctx=CTX)
    a, b, without = (tmp_path / f"{name}.gguf" for name in "abc")
    done = cq.quantize_file(path, a, "q3_k_s", importance=matrix, device="cpu")
    assert done.by_importance == {name for name in done.formats if name.startswith("blk.")}
    cq.quantize_file(path, b, "q3_k_s", importance=made, device="cpu")
    cq.quantize_file(path, without, "q3_k_s", device="cpu")
    assert all(tensor.identical for tensor in cq.compare(a, b).tensors)
    assert {t.name for t in cq.compare(a, without).tensors if not t.identical} == done.by_importance


def test_experts_that_no_token_reaches(tmp_path: Path) -> None:
    """Of equal probabilities the first ones are taken: two of four are without inputs."""
    even: dict[str, Any] = {"blk.1.ffn_gate_inp.weight": np.zeros((4, 64), F)}
    path = write(tmp_path / "m.gguf", EXPERTS, **even)
    told = (
        r"to some experts of 3 tensors \('blk\.1\.ffn_gate_exps\.weight': 2 of 4\), whose columns count alike"
    )
    with pytest.warns(UserWarning, match=told) as caught:
        made = cq.measure_importance(path, tmp_path / "i.gguf", tokens=some_tokens(4 * CTX), ctx=CTX)
    assert caught[0].filename == __file__
    for mean in (made, cq.read_imatrix(tmp_path / "i.gguf")):
        down = mean["blk.1.ffn_down_exps.weight"]
        assert (down[2:] == 1).all()
        assert (down[:2] != 1).any()


# What is refused, before the model runs.


def short(model: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"tokens": some_tokens(CTX), "ctx": CTX}
    return cq.measure_importance(model, **(given | options))


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"tokens": None}, ValueError, "give either text or tokens"),
        ({"text": TEXT}, ValueError, "give either text or tokens"),
        ({"tokens": some_tokens(CTX - 1)}, ValueError, "the text has 15 tokens; at least one chunk of 16"),
        ({"tokens": None, "text": ""}, ValueError, "the text has 0 tokens; at least one chunk of 16"),
        (
            {"tokens": np.full(CTX, 9999)},
            ValueError,
            "token ids run from 9999 to 9999, but the vocabulary of",
        ),
        ({"ctx": 0}, ValueError, "ctx is 0"),
        ({"chunks": 0}, ValueError, "chunks is 0"),
        ({"process_output": "yes"}, TypeError, "process_output is"),
        ({"device": "tpu"}, ValueError, "'tpu'"),
        ({"target": 3}, TypeError, "target is an int; the path of the new file is needed"),
        ({"target": ""}, FileNotFoundError, "the path is empty"),
        ({"target": "there.gguf"}, FileExistsError, r"there\.gguf exists; force=True replaces it"),
        ({"target": "none/i.gguf"}, FileNotFoundError, "there is no folder"),
        ({"target": "dense.gguf", "force": True}, ValueError, r"dense\.gguf is the file being read"),
        ({"target": "i.gguf", "force": 1}, TypeError, "force is"),
    ],
)
def test_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    problem: str,
) -> None:
    model = write(tmp_path / "dense.gguf", Spec())
    (tmp_path / "there.gguf").write_text("precious")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Llama, "hidden", interrupted)
    with untouched(tmp_path), pytest.raises(error, match=problem):
        short(model, **options)


def test_the_text_is_not_replaced(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(Llama, "hidden", interrupted)
    with (
        untouched(tmp_path),
        pytest.raises(ValueError, match=r"text\.txt is the file of the text that is being"),
    ):
        short(model, tokens=None, text=text, target=text, force=True)


def test_a_text_whose_name_is_no_utf_8(model: Path, tmp_path: Path) -> None:
    """It is what the file calls its data."""
    text, target = tmp_path / os.fsdecode(b"bad\xff.txt"), tmp_path / "i.gguf"
    text.write_text(TEXT, encoding="utf-8")
    made = cq.measure_importance(model, target, text=text, ctx=CTX, chunks=1)
    assert list(cq.read_imatrix(target)) == list(made)
    assert imatrix.read(target).dataset.endswith("bad\ufffd.txt")


@pytest.mark.parametrize("ctx", [0, 1, 3])
def test_chunks_as_short_as_evaluate_refuses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ctx: int
) -> None:
    monkeypatch.setattr(Llama, "hidden", interrupted)
    with untouched(tmp_path), pytest.raises(ValueError, match=f"ctx is {ctx}; allowed are 4 to "):
        short(model, ctx=ctx)


def test_models_that_cannot_run(tmp_path: Path) -> None:
    """As one whose layers have nothing to multiply."""
    names = [f"blk.{i}.{part}.weight" for i in range(2) for part in ("attn_q", "attn_k", "attn_v", "ffn_up")]
    none: dict[str, Any] = dict.fromkeys(names)
    path = write(tmp_path / "m.gguf", Spec(), **none)
    with pytest.raises(cq.UnsupportedModel, match=r"the model has no tensor 'blk\.0\.attn_q\.weight'"):
        short(path)


def test_a_long_context_warns(model: Path) -> None:
    with pytest.warns(UserWarning, match="ctx 2000 is longer than the 1024 tokens the model was") as caught:
        short(model, tokens=some_tokens(2000), ctx=2000)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("target", [None, "i.gguf"])
def test_weights_that_are_no_numbers(tmp_path: Path, target: str | None) -> None:
    weights: dict[str, Any] = {"blk.1.attn_q.weight": np.full((64, 64), np.nan, F)}
    path = write(tmp_path / "m.gguf", Spec(), **weights)
    problem = (
        r"m\.gguf \(f16\) has sums of squared inputs of 'blk\.1\.attn_output\.weight' in chunk 1 of 2 "
        r"that are NaN or infinite: tensor 'blk\.1\.attn_q\.weight' has weights that are NaN or infinite: c"
    )
    with untouched(tmp_path), pytest.raises(ValueError, match=problem):
        short(path, tokens=some_tokens(2 * CTX), target=None if target is None else tmp_path / target)


def test_states_that_are_no_numbers(tmp_path: Path) -> None:
    """Which nothing that is measured is multiplied by."""
    weights: dict[str, Any] = {"output_norm.weight": np.full(64, np.inf, F)}
    path = write(tmp_path / "m.gguf", Spec(), **weights)
    with pytest.raises(ValueError, match="has states in chunk 1 of 1 that are NaN or infinite: tensor 'outp"):
        short(path)


@pytest.mark.parametrize("together", [1, 3, 9])
@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_the_chunk_that_spoils_the_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int, chunk: int
) -> None:
    """Is named, however many pass through the model together, and none after them does."""
    path, ids = with_a_rare_token(tmp_path / "m.gguf"), np.where(some_tokens(6 * CTX) == RARE, 8, 9)
    ids[CTX * chunk - 1] = RARE
    seen: list[int] = []
    real = Llama.hidden

    def hidden(self: Llama, tokens: Any, first: int) -> Any:
        seen.append(len(tokens))
        states = real(self, tokens, first)
        assert np.isfinite(states).all()
        return states

    monkeypatch.setattr(Llama, "hidden", hidden)
    monkeypatch.setattr(sys.modules["cuquant.eval.evaluate"], "BATCH_TOKENS", together * CTX)
    before = chunk - 1
    advice = rf", or the chunks before \(chunks={before}, --chunks {before}\)" if before else ""
    problem = (
        rf"m\.gguf \(f32\) has sums of squared inputs of 'blk\.0\.attn_q\.weight' in chunk {chunk} of 6 "
        r"that are NaN or infinite: its weights are not, but what they make of the text: "
        rf"take another text{advice}$"
    )
    with untouched(tmp_path), pytest.raises(ValueError, match=problem):
        short(path, tokens=ids, target=tmp_path / "i.gguf")
    batches = [min(together, 6 - start) for start in range(0, chunk, together)]
    assert seen == [*batches, *[1] * (before % together + 1)]
    if before:
        short(path, tokens=ids, chunks=before, target=tmp_path / "i.gguf")


@pytest.mark.parametrize("together", [1, 2, 4, 6])
def test_sums_of_several_chunks_that_float32_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Though it holds those of each."""
    ids, plain = some_tokens(6 * CTX), write(tmp_path / "plain.gguf", Spec())
    four, five = (
        n * CTX * short(plain, tokens=ids, chunks=n, process_output=True)["output.weight"].max()
        for n in (4, 5)
    )
    factor = np.sqrt(np.finfo(F).max / np.sqrt(four * five))
    weights: dict[str, Any] = {"output_norm.weight": tensors(Spec())["output_norm.weight"] * factor}
    path = write(tmp_path / "m.gguf", Spec(), **weights)
    short(path, tokens=ids)
    short(path, tokens=ids, chunks=4, process_output=True)
    monkeypatch.setattr(sys.modules["cuquant.eval.evaluate"], "BATCH_TOKENS", together * CTX)
    problem = (
        r"sums of squared inputs of 'output\.weight' in chunk 5 of 6 that are .* before \(chunks=4, --chunks"
    )
    with untouched(tmp_path), pytest.raises(ValueError, match=problem):
        short(path, tokens=ids, process_output=True, target=tmp_path / "i.gguf")


# What it is good for.

K_QUANTS = Path(__file__).parents[1] / "docs/formats/k-quants.md"
RECORD = json.loads((Path(__file__).parent / "data" / "importance.json").read_text(encoding="utf-8"))


def test_the_table_of_the_page_is_the_record() -> None:
    page = K_QUANTS.read_text(encoding="utf-8")
    for name, ways in RECORD["formats"].items():
        bits = ways["without"]["bits_per_weight"]
        ppl, kld = (
            " | ".join(f"{ways[way][what]:{digits}}" for way in ("without", "with", "with output"))
            for what, digits in (("ppl", ".3f"), ("mean_kld", ".5f"))
        )
        assert f"| {name} | {bits:.3f} | {ppl} | {kld} |\n" in page
        fall = round(100 * (1 - ways["with"]["mean_kld"] / ways["without"]["mean_kld"]))
        assert (f"{fall}% at {name}" if fall else f"at {name} it does not") in page
    assert f"the perplexity of float16 is {RECORD['f16']:.3f}. " in page


def test_importance_of_another_text_lowers_the_perplexity(tmp_path: Path) -> None:
    """Measured and evaluated on little of what the record is of: where it falls from 24 to 19."""
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines(keepends=True)
    first, rest = "".join(lines[:1235]), "".join(lines[1235:])
    importance = cq.measure_importance(NANO, text=first, chunks=8, device="cpu")
    ppl: list[float] = []
    for given in (None, importance):
        target = tmp_path / f"{len(ppl)}.gguf"
        cq.quantize_file(NANO, target, cq.formats.get("q2_k"), importance=given, device="cpu")
        ppl.append(cq.evaluate(target, text=rest, chunks=4, device="cpu").rows[0].ppl)
    assert ppl[1] < 0.9 * ppl[0]
