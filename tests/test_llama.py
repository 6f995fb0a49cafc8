"""The forward pass against one written from the definitions: float64, one position and one head at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from synthetic import Spec, metadata, tensors, write

import cuquant as cq
from cuquant.eval import config, llama
from cuquant.eval.config import UnsupportedModel
from cuquant.eval.llama import Llama

F64 = NDArray[np.float64]
FLOATS = (Type.F32, Type.F16, Type.BF16)


class Oracle:
    """A Llama-family model as its papers and llama.cpp define it; reads files with the gguf package."""

    def __init__(self, path: Path, activations: str = "f16") -> None:
        reader = gguf.GGUFReader(path)
        self.keys = {name: entry.contents() for name, entry in reader.fields.items()}
        self.arch = self.keys["general.architecture"]
        self.types = {t.name: t.tensor_type for t in reader.tensors}
        self.weights: dict[str, F64] = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }
        self.q8_1 = activations == "q8_1"
        self.d_model, self.n_heads = self.key("embedding_length"), self.key("attention.head_count")
        self.n_kv_heads = self.key("attention.head_count_kv", self.n_heads)
        self.head_dim = self.key("attention.key_length", self.d_model // self.n_heads)
        self.rotary = self.key("rope.dimension_count", self.head_dim)

    def key(self, name: str, default: Any = None) -> Any:
        return self.keys.get(f"{self.arch}.{name}", default)

    def states(self, tokens: NDArray[np.integer[Any]]) -> F64:
        """Final normalised states [T, d] of one sequence."""
        h = self.weights["token_embd.weight"][tokens]
        for i in range(self.key("block_count")):
            h = h + self.attention(f"blk.{i}.", [self.norm(x, f"blk.{i}.attn_norm") for x in h])
            h = h + np.stack([self.feed_forward(f"blk.{i}.", self.norm(x, f"blk.{i}.ffn_norm")) for x in h])
        return np.stack([self.norm(x, "output_norm") for x in h])

    def logits(self, states: F64) -> F64:
        output = "output" if "output.weight" in self.weights else "token_embd"
        return np.stack([self.project(x, output) for x in states])

    def norm(self, x: F64, name: str) -> F64:
        mean_square = sum(value * value for value in x) / len(x)
        eps = self.key("attention.layer_norm_rms_epsilon")
        return x / math.sqrt(mean_square + eps) * self.weights[f"{name}.weight"]

    def project(self, x: F64, name: str, expert: int | None = None) -> F64:
        w = self.weights[f"{name}.weight"]
        if self.q8_1 and self.types[f"{name}.weight"] not in FLOATS:
            x = cq.quantize(x.astype(np.float32), "q8_1").dequantize().astype(np.float64)
        return (w if expert is None else w[expert]) @ x + self.weights.get(f"{name}.bias", 0.0)

    def attention(self, prefix: str, xs: list[F64]) -> F64:
        """Outputs [T, d]: every position looks at itself and those before it."""
        q, k, v = ([self.project(x, f"{prefix}attn_{part}") for x in xs] for part in "qkv")
        out = []
        for t in range(len(xs)):
            heads = []
            for head in range(self.n_heads):
                shared = head // (self.n_heads // self.n_kv_heads)
                query = self.turned(q[t], head, t, f"{prefix}attn_q_norm")
                keys = [self.turned(k[s], shared, s, f"{prefix}attn_k_norm") for s in range(t + 1)]
                scores = np.array([query @ key / math.sqrt(self.head_dim) for key in keys])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                heads.append(weights @ np.stack([self.head(v[s], shared) for s in range(t + 1)]))
            out.append(self.project(np.concatenate(heads), f"{prefix}attn_output"))
        return np.stack(out)

    def head(self, x: F64, index: int) -> F64:
        return x[index * self.head_dim : (index + 1) * self.head_dim]

    def turned(self, x: F64, index: int, position: int, norm: str) -> F64:
        """One head, normalised where the model does so, with rotary embedding."""
        y = self.head(x, index)
        if f"{norm}.weight" in self.weights:
            y = self.norm(y, norm)
        y = y.copy()
        half = self.rotary // 2
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if self.arch in ("llama", "mistral") else (i, i + half)
            angle, scale = self.angle(position, i)
            cos, sin = scale * math.cos(angle), scale * math.sin(angle)
            y[a], y[b] = y[a] * cos - y[b] * sin, y[a] * sin + y[b] * cos
        return y

    def angle(self, position: int, i: int) -> tuple[float, float]:
        """Rotary angle of pair i and factor of the vectors, as ggml's rope_yarn with llama.cpp's defaults."""
        kind = self.key("rope.scaling.type", "linear")
        factor = self.key("rope.scaling.factor", self.key("rope.scale_linear", 0.0)) or 1.0
        if kind == "none":
            factor = 1.0
        base, d = self.key("rope.freq_base", 10000.0), self.rotary
        extrapolated = position * base ** (-2 * i / d)
        if "rope_freqs.weight" in self.weights:
            extrapolated /= self.weights["rope_freqs.weight"][i]
        interpolated, scale = extrapolated / factor, self.key("rope.scaling.attn_factor", 1.0)
        if kind != "yarn":
            return interpolated, scale
        original = self.key("rope.scaling.original_context_length", self.key("context_length"))
        fast = self.key("rope.scaling.yarn_beta_fast", 32.0)
        slow = self.key("rope.scaling.yarn_beta_slow", 1.0)
        low, high = (
            d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow)
        )
        low, high = max(0, math.floor(low)), min(d - 1, math.ceil(high))
        mix = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
        return interpolated * (1 - mix) + extrapolated * mix, scale * (1 + 0.1 * math.log(max(factor, 1)))

    def feed_forward(self, prefix: str, x: F64) -> F64:
        if f"{prefix}ffn_gate_inp.weight" not in self.weights:
            return self.swiglu(prefix, x, "", None)
        router = self.weights[f"{prefix}ffn_gate_inp.weight"] @ x
        probabilities = np.exp(router - np.max(router))
        probabilities /= probabilities.sum()
        top = sorted(range(len(router)), key=lambda e: -probabilities[e])[: self.key("expert_used_count")]
        shares = probabilities[top] / probabilities[top].sum()
        return shares @ np.stack([self.swiglu(prefix, x, "_exps", e) for e in top])

    def swiglu(self, prefix: str, x: F64, suffix: str, expert: int | None) -> F64:
        gate = self.project(x, f"{prefix}ffn_gate{suffix}", expert)
        up = self.project(x, f"{prefix}ffn_up{suffix}", expert)
        return self.project(gate / (1 + np.exp(-gate)) * up, f"{prefix}ffn_down{suffix}", expert)


def load(path: Path, activations: str = "f16") -> Llama:
    model = cq.open(path)
    return Llama(config.read(model.metadata), dict(model), activations)


def error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative root mean square deviation; infinite where the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(np.square(expected))))


QKV = ("attn_q", "attn_k", "attn_v")
EVERYWHERE = (*QKV, "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
QWEN3 = Spec(architecture="qwen3", qk_norms=True)
EXPERTS = Spec(n_experts=4, n_experts_used=2)

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


def some_tokens(*shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, len(Spec().vocabulary), shape)


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


def test_float_weights_take_activations_as_they_are(tmp_path: Path) -> None:
    path, tokens = write(tmp_path / "model.gguf", Spec()), some_tokens(1, 12)
    assert error(load(path, "q8_1").hidden(tokens, 0), load(path).hidden(tokens, 0)) < 1e-6


def read(keys: Mapping[str, Any]) -> config.Config:
    """The configuration of a model with experts; `keys` as in Spec."""
    return config.read(metadata(replace(EXPERTS, keys=keys)))


def test_configuration() -> None:
    read_back = read({})
    assert (read_back.n_layers, read_back.d_model, read_back.n_ctx, read_back.window) == (2, 64, 1024, None)
    assert (read_back.n_heads, read_back.n_kv_heads, read_back.head_dim) == (4, 2, 16)
    assert (read_back.n_experts, read_back.n_experts_used) == (4, 2)
    assert read({"attention.sliding_window": 100}).window == 100


@pytest.mark.parametrize("architecture", ["gemma", "qwen2moe", "", None, 5, ["llama"], np.zeros(2, np.int32)])
def test_unknown_architecture_is_refused(architecture: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"architecture .*known are llama, mistral, qwen2, qwen3"):
        read({"general.architecture": architecture})


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
        "expert_used_count",
    ],
)
def test_missing_key_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"has no llama.{key}$"):
        read({key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", "2"),
        ("block_count", 2.0),
        ("block_count", True),
        ("block_count", 0),
        ("block_count", -1),
        ("embedding_length", ["64"]),
        ("attention.head_count", np.array([4, 4], np.int32)),
        ("attention.head_count_kv", np.array([2, 2], np.int32)),
        ("attention.head_count_kv", 0),
        ("attention.key_length", 0),
        ("attention.sliding_window", -1),
        ("attention.layer_norm_rms_epsilon", "1e-5"),
        ("attention.layer_norm_rms_epsilon", True),
        ("expert_count", 4.0),
        ("expert_used_count", 5),  # of 4
        ("rope.freq_base", "10000"),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", -1.0),
        ("rope.scaling.type", 2),
        ("rope.scaling.factor", -4.0),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 18),  # of 16
    ],
)
def test_impossible_value_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read(LINEAR | {key: value})


def test_impossible_ramp_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="yarn_beta_fast"):
        read(YARN | {"rope.scaling.yarn_beta_fast": 0.0})


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="4 query heads cannot share 3 key heads"):
        read({"attention.head_count_kv": 3})
    with pytest.raises(UnsupportedModel, match="value_length differs from the key length 16"):
        read({"attention.value_length": 32})


@pytest.mark.parametrize("factor", [None, 8.0])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_unknown_rope_scaling_is_refused(kind: str, factor: float | None) -> None:
    with pytest.raises(UnsupportedModel, match=f"rope.scaling.type '{kind}'"):
        read({"rope.scaling.type": kind, "rope.scaling.factor": factor})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.scale", 0.1),
        ("attn_logit_softcapping", 50.0),
        ("embedding_scale", 12.0),
        ("expert_group_count", 2),
        ("expert_shared_count", 1),
        ("expert_weights_scale", 2.5),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("logit_scale", np.array([0.5, 0.25], np.float32)),
        ("residual_scale", 0.2),
        ("use_parallel_residual", True),
    ],
)
def test_key_that_changes_the_model_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", True),
        ("expert_shared_count", 0),
        ("logit_scale", 0.0),
        ("final_logit_softcapping", 0.0),
    ],
)
def test_key_that_changes_nothing_is_accepted(key: str, value: Any) -> None:
    assert read({key: value}).n_layers == 2


def build(spec: Spec, **changes: Any) -> Llama:
    """A model of float32 tensors; `changes` as for synthetic.write."""
    given = tensors(spec) | changes
    return Llama(config.read(metadata(spec)), {n: t for n, t in given.items() if t is not None})


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (Spec(), "token_embd.weight"),
        (Spec(), "output_norm.weight"),
        (Spec(), "blk.0.attn_norm.weight"),
        (Spec(), "blk.0.attn_q.weight"),
        (Spec(), "blk.1.attn_output.weight"),
        (Spec(), "blk.1.ffn_up.weight"),
        (EXPERTS, "blk.1.ffn_gate_inp.weight"),
        (EXPERTS, "blk.0.ffn_down_exps.weight"),
        (QWEN3, "blk.0.attn_q_norm.weight"),
        (QWEN3, "blk.1.attn_k_norm.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_tensor_is_refused(spec: Spec, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"has no tensor '{name}'"):
        build(spec, **{name: None})


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (Spec(), "output.bias"),
        (Spec(), "blk.0.attn_post_norm.weight"),
        (Spec(), "blk.2.attn_norm.weight"),
        (Spec(), "rope_factors_long.weight"),
        (Spec(), "blk.0.ffn_gate_inp.weight"),
        (EXPERTS, "blk.0.ffn_up_shexp.weight"),
        (EXPERTS, "blk.0.ffn_up_exps.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unused_tensor_is_refused(spec: Spec, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"^1 tensors have no place .*: {name}$"):
        build(spec, **{name: np.ones(64, np.float32)})


@pytest.mark.parametrize(
    ("spec", "name", "shape"),
    [
        (Spec(), "token_embd.weight", (64,)),
        (Spec(), "output.weight", (10, 64)),
        (Spec(), "blk.1.attn_k.weight", (64, 64)),
        # These would broadcast.
        (Spec(), "blk.0.attn_norm.weight", (1,)),
        (Spec(), "blk.0.attn_v.weight", (2, 64)),
        (Spec(), "blk.0.ffn_up.weight", (1, 64)),
        (EXPERTS, "blk.0.ffn_up_exps.weight", (4, 1, 64)),
        (EXPERTS, "blk.0.ffn_down_exps.weight", (4, 1, 96)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensor_of_another_shape_is_refused(spec: Spec, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        build(spec, **{name: np.ones(shape, np.float32)})
