"""Models that the forward pass refuses: their metadata, their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic import EXPERTS, LINEAR, QWEN3, QWEN3_MOE, YARN, Spec, metadata, tensors

from cuquant.eval import config
from cuquant.eval.config import UnsupportedModel
from cuquant.eval.llama import Llama


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
        ("attention.head_count", np.array([4, 8], np.int32)),
        ("attention.head_count_kv", np.array([2, 1], np.int32)),
        ("attention.head_count_kv", np.array([2, 2, 2], np.int32)),  # of 2 layers
        ("attention.head_count_kv", np.array([2.0, 2.0], np.float32)),
        ("attention.head_count_kv", np.array([0, 0], np.int32)),
        ("attention.head_count_kv", np.array([], np.int32)),
        ("embedding_length", np.array([64, 64], np.int32)),
        ("attention.head_count_kv", 0),
        ("attention.key_length", 0),
        ("attention.sliding_window", -1),
        ("attention.layer_norm_rms_epsilon", "1e-5"),
        ("attention.layer_norm_rms_epsilon", True),
        ("attention.layer_norm_rms_epsilon", -1e-5),
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


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_one_number_of_heads_for_each_layer(dtype: Any) -> None:
    """Which layers share is a number of the model."""
    given = {"attention.head_count": np.full(2, 4, dtype), "attention.head_count_kv": np.full(2, 1, dtype)}
    found = read(given)
    assert (found.n_heads, found.n_kv_heads, type(found.n_heads)) == (4, 1, int)


@pytest.mark.parametrize(
    "value", ["x\n" * 10**5, np.arange(300), ["x" * 10**5]], ids=["text", "array", "texts"]
)
@pytest.mark.parametrize("key", ["attention.head_count", "rope.scaling.type", "general.architecture"])
def test_a_long_value_is_told_in_a_line(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"\.\.\.") as error:
        read({key: value})
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"attention.key_length": 2**63, "attention.value_length": None},
        {"embedding_length": 2**40, "attention.key_length": None, "attention.value_length": None},
    ],
    ids=["key_length", "embedding_length"],
)
def test_the_widest_heads_take_no_memory(keys: dict[str, Any]) -> None:
    """Before tensors tell that there are none of them."""
    with pytest.raises(
        UnsupportedModel, match=r"^llama heads of \d+ channels; at most 65536 are implemented"
    ):
        read(keys)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_frequencies_that_are_not_finite(key: str, kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"llama\.rope\.scaling makes .* not finite"):
        read({"rope.scaling.type": kind, key: 1e-320})


def test_impossible_ramp_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="yarn_beta_fast"):
        read(YARN | {"rope.scaling.yarn_beta_fast": 0.0})


@pytest.mark.parametrize(
    ("scaling", "key", "value"),
    [
        (YARN, "yarn_ext_factor", 0.0),
        (YARN, "yarn_ext_factor", 0.5),
        (LINEAR, "yarn_ext_factor", 1.0),
        (YARN, "yarn_attn_factor", 0.75),
        (YARN, "yarn_log_multiplier", 0.1),
        (YARN, "yarn_log_multiplier", "0.1"),
    ],
)
def test_yarn_that_is_not_computed_is_refused(scaling: Mapping[str, Any], key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"rope.scaling.{key} is "):
        read({**scaling, f"rope.scaling.{key}": value})


@pytest.mark.parametrize("ext_factor", [1.0, -1.0, None])
def test_yarn_by_its_neutral_keys(ext_factor: float | None) -> None:
    neutral = {"ext_factor": ext_factor, "attn_factor": 1.0, "log_multiplier": 0.0}
    given = read(YARN | {f"rope.scaling.yarn_{name}": value for name, value in neutral.items()})
    assert given.rope_scale == read(YARN).rope_scale


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
        (QWEN3_MOE, "blk.1.attn_q_norm.weight"),
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
    with pytest.raises(UnsupportedModel, match=f"^1 tensor without a place in a .*: {name}$"):
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
