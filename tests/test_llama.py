"""The forward pass against one written from the definitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from llama_oracle import Oracle, error
from synthetic import EXPERTS, LINEAR, QWEN3, QWEN3_MOE, YARN, Spec, some_tokens, write

import cuquant as cq
from cuquant.eval import config, llama
from cuquant.eval.llama import Llama


def load(path: Path, activations: str = "f16") -> Llama:
    model = cq.open(path)
    return Llama(config.read(model.metadata), dict(model), activations)


QKV = ("attn_q", "attn_k", "attn_v")
EVERYWHERE = (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")


MODELS = {
    "llama": Spec(),
    "mistral": Spec(architecture="mistral"),
    "qwen2": Spec(architecture="qwen2", biases=QKV),
    "qwen3": QWEN3,
    "one layer": Spec(n_layers=1),
    "float32": Spec(matrices=Type.F32),
    "bfloat16": Spec(matrices=Type.BF16),
    "large epsilon": Spec(keys={"attention.layer_norm_rms_epsilon": 0.1}),
    "all heads have keys": Spec(n_kv_heads=4, keys={"attention.head_count_kv": None}),
    "all heads share keys": Spec(n_kv_heads=1),
    "head size by default": Spec(keys={"attention.key_length": None, "attention.value_length": None}),
    "large heads": replace(QWEN3, head_dim=32),
    "biases everywhere": Spec(biases=EVERYWHERE),
    "tied output": Spec(tied=True),
    "two of four experts": EXPERTS,
    "qwen3moe": QWEN3_MOE,
    "one expert": replace(EXPERTS, n_experts_used=1),
    "all experts": replace(EXPERTS, n_experts_used=4),
    "rotary base": Spec(keys={"rope.freq_base": 5e5}),
    "partly rotary pairs": Spec(keys={"rope.dimension_count": 8}),
    "partly rotary halves": replace(QWEN3, keys={"rope.dimension_count": 8}),
    "rotary factors": Spec(rope_factors=True),
    "linear": Spec(keys=LINEAR),
    "linear by default": Spec(keys={"rope.scaling.factor": 4.0}),
    "linear by its old name": Spec(keys={"rope.scale_linear": 4.0}),
    "linear, factors": Spec(keys=LINEAR, rope_factors=True),
    "linear, attention factor": Spec(keys=LINEAR | {"rope.scaling.attn_factor": 0.75}),
    "linear, factor 0": Spec(keys=LINEAR | {"rope.scaling.factor": 0.0}),
    "no scaling": Spec(keys=LINEAR | {"rope.scaling.type": "none"}),
    "no scaling, attention factor": Spec(keys={"rope.scaling.attn_factor": 1.25}),
    "yarn": Spec(keys=YARN),
    "yarn, halves": replace(QWEN3, keys=YARN),
    "yarn, partly": Spec(keys=YARN | {"rope.dimension_count": 8}),
    "yarn, factors": Spec(keys=YARN, rope_factors=True),
    "yarn, short original": Spec(keys=YARN | {"rope.scaling.original_context_length": 100}),
    "yarn, long original": Spec(keys=YARN | {"rope.scaling.original_context_length": 1 << 16}),
    "yarn, steep ramp": Spec(keys=YARN | {"rope.scaling.original_context_length": 4}),
    "yarn, small base": Spec(keys=YARN | {"rope.freq_base": 10.0}),
    "yarn, betas": Spec(keys=YARN | {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}),
    "yarn, attention factor": Spec(keys=YARN | {"rope.scaling.attn_factor": 0.75}),
    "yarn, factor 1": Spec(keys=YARN | {"rope.scaling.factor": 1.0}),
}


@pytest.mark.parametrize("name", MODELS)
def test_states_and_logits(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", MODELS[name])
    model, oracle, tokens = load(path), Oracle(path), some_tokens(2, 21)
    expected = np.stack([oracle.states(sequence) for sequence in tokens])
    states = model.hidden(tokens, 0)
    assert states.dtype == np.float32
    assert error(states, expected) < 1e-5
    logits = model.logits(states.reshape(-1, states.shape[-1]))
    assert error(logits, oracle.logits(expected.reshape(-1, expected.shape[-1]))) < 1e-5


@pytest.mark.parametrize("length", [llama.QUERY_BLOCK, llama.QUERY_BLOCK + 1, 150])
def test_more_queries_than_a_block(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.gguf", Spec(n_layers=1))
    tokens = some_tokens(1, length)
    assert error(load(path).hidden(tokens, 0)[0], Oracle(path).states(tokens[0])) < 1e-5


@pytest.mark.parametrize("spec", [Spec(), QWEN3, EXPERTS], ids=["llama", "qwen3", "experts"])
@pytest.mark.parametrize("first", [1, 20, 75, 149])
def test_later_positions_only(tmp_path: Path, spec: Spec, first: int) -> None:
    model, tokens = load(write(tmp_path / "model.gguf", spec)), some_tokens(2, 150)
    assert error(model.hidden(tokens, first), model.hidden(tokens, 0)[:, first:]) < 1e-5


@pytest.mark.parametrize("block", [1, 7, 64])
def test_block_of_queries_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    model, tokens = load(write(tmp_path / "model.gguf", Spec())), some_tokens(2, 50)
    expected = model.hidden(tokens, 10)
    monkeypatch.setattr(llama, "QUERY_BLOCK", block)
    assert error(model.hidden(tokens, 10), expected) < 1e-5


def test_sequences_of_a_batch_are_independent(tmp_path: Path) -> None:
    model, tokens = load(write(tmp_path / "model.gguf", EXPERTS)), some_tokens(3, 40)
    together = model.hidden(tokens, 0)
    for i in range(3):
        assert error(together[i], model.hidden(tokens[i : i + 1], 0)[0]) < 1e-5


@pytest.mark.parametrize("spec", [Spec(), QWEN3, EXPERTS], ids=["llama", "qwen3", "experts"])
@pytest.mark.parametrize("changed", [1, 100, 149])
def test_later_tokens_change_nothing_before_them(tmp_path: Path, spec: Spec, changed: int) -> None:
    model, tokens = load(write(tmp_path / "model.gguf", spec)), some_tokens(1, 150)
    before = model.hidden(tokens, 0)[0]
    tokens[0, changed] = (tokens[0, changed] + 1) % len(spec.vocabulary)
    after = model.hidden(tokens, 0)[0]
    assert error(after[:changed], before[:changed]) < 1e-5
    assert (np.abs(after - before).max(axis=1)[changed:] > 1e-3).all()


QUANTIZED = [Type.Q8_0, Type.Q5_1, Type.Q5_0, Type.Q4_1, Type.Q4_0]


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [Spec(tied=True), EXPERTS], ids=["llama", "experts"])
def test_quantized_weights(tmp_path: Path, spec: Spec, kind: Type) -> None:
    path = write(tmp_path / "model.gguf", replace(spec, matrices=kind))
    model, oracle, tokens = load(path), Oracle(path), some_tokens(1, 12)
    expected = oracle.states(tokens[0])
    assert error(model.hidden(tokens, 0)[0], expected) < 1e-5
    assert error(model.logits(expected.astype(np.float32)), oracle.logits(expected)) < 1e-5


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [Spec(biases=QKV), EXPERTS], ids=["llama", "experts"])
def test_quantized_activations(tmp_path: Path, spec: Spec, kind: Type) -> None:
    """A value at the border of two codes may fall to the other side, hence the median over positions."""
    path = write(tmp_path / "model.gguf", replace(spec, matrices=kind))
    model, oracle, tokens = load(path, "q8_1"), Oracle(path, "q8_1"), some_tokens(1, 12)
    states, expected = model.hidden(tokens, 0)[0], oracle.states(tokens[0])
    deviations = [error(state, wanted) for state, wanted in zip(states, expected, strict=True)]
    assert np.median(deviations) < 1e-5 < 1e-2 < error(states, Oracle(path).states(tokens[0]))
    logits = model.logits(expected.astype(np.float32))
    assert error(logits, oracle.logits(expected)) < 1e-5


@pytest.mark.parametrize(
    ("quantized", "d_model"), [("down", 64), ("down", 80), ("up", 64), ("gate", 64), ("[gu]*", 64)]
)
def test_quantized_activations_of_some_experts_stacks(tmp_path: Path, quantized: str, d_model: int) -> None:
    """Those of float stacks are not quantized, so their rows need not be whole blocks."""
    source, path = write(tmp_path / "f16.gguf", replace(EXPERTS, d_model=d_model)), tmp_path / "some.gguf"
    cq.quantize_file(source, path, {f"*ffn_{quantized}_exps*": "q8_0"})
    model, oracle, tokens = load(path, "q8_1"), Oracle(path, "q8_1"), some_tokens(1, 12)
    states, expected = model.hidden(tokens, 0)[0], oracle.states(tokens[0])
    deviations = [error(state, wanted) for state, wanted in zip(states, expected, strict=True)]
    assert np.median(deviations) < 1e-5 < 1e-3 < error(states, Oracle(path).states(tokens[0]))


def test_float_weights_take_activations_as_they_are(tmp_path: Path) -> None:
    path, tokens = write(tmp_path / "model.gguf", Spec()), some_tokens(1, 12)
    assert error(load(path, "q8_1").hidden(tokens, 0), load(path).hidden(tokens, 0)) < 1e-6
