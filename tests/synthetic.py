"""Tiny models of the Llama family with random weights, written by the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf_files import Stored
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

BYTES = sorted(ByteLevel.alphabet())
MERGES = [f"{left} {right}" for left in "aeiou" for right in "bdlmnrst"] + ["t h", "th e"]
BOS = "<s>"
VOCABULARY = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), BOS]
"""299 tokens of a byte-level vocabulary; the last one begins a text."""


@dataclass(frozen=True)
class Spec:
    """What a model is made of. `keys` add to its metadata or replace it, None leaves a key out; those that
    do not begin with "general." or "tokenizer." get the architecture's prefix."""

    architecture: str = "llama"
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    n_ff: int = 96
    n_experts: int = 0
    n_experts_used: int = 0
    vocabulary: tuple[str, ...] = tuple(VOCABULARY)
    biases: tuple[str, ...] = ()
    qk_norms: bool = False
    tied: bool = False
    rope_factors: bool = False
    matrices: Type = Type.F16
    keys: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


QWEN3 = Spec(architecture="qwen3", qk_norms=True)
EXPERTS = Spec(n_experts=4, n_experts_used=2)
QWEN3_MOE = Spec(architecture="qwen3moe", qk_norms=True, n_experts=4, n_experts_used=2)
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
"""Keys that stretch rotary embeddings."""


def some_tokens(*shape: int) -> NDArray[np.int64]:
    """Random token ids of the vocabulary."""
    return np.random.default_rng(1).integers(0, len(VOCABULARY), shape)


def write(path: Path, spec: Spec, *, split: int = 0, **changes: Stored | None) -> Path:
    """A model file, or parts of `split` tensors; `changes` are float32 tensors to add or replace, or rows of
    bytes and their type; None leaves a tensor out."""
    writer = gguf.GGUFWriter(path, spec.architecture, split_max_tensors=split)
    for key, value in metadata(spec).items():
        if key != "general.architecture":  # the writer's own
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in (tensors(spec) | changes).items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        elif tensor is not None:
            is_float32 = tensor.ndim == 1 or name.endswith("ffn_gate_inp.weight") or name in changes
            kind = Type.F32 if is_float32 else spec.matrices
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(spec: Spec) -> dict[str, Any]:
    """The metadata of a model."""
    keys = {
        "general.architecture": spec.architecture,
        "block_count": spec.n_layers,
        "context_length": 1024,
        "embedding_length": spec.d_model,
        "feed_forward_length": spec.n_ff,
        "attention.head_count": spec.n_heads,
        "attention.head_count_kv": spec.n_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*spec.vocabulary],
        "tokenizer.ggml.token_type": [3 if token == BOS else 1 for token in spec.vocabulary],
        "tokenizer.ggml.merges": MERGES,
    }
    if spec.n_experts:
        keys |= {"expert_count": spec.n_experts, "expert_used_count": spec.n_experts_used}
    keys |= spec.keys
    return {
        key if key.startswith(("general.", "tokenizer.")) else f"{spec.architecture}.{key}": value
        for key, value in keys.items()
        if value is not None
    }


def tensors(spec: Spec) -> dict[str, NDArray[np.float32]]:
    """Random float32 tensors, in NumPy's axis order."""
    rng = np.random.default_rng(spec.seed)
    d, kv_rows, q_rows = spec.d_model, spec.n_kv_heads * spec.head_dim, spec.n_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(spec.vocabulary), d), "output_norm": (d,)}
    if not spec.tied:
        shapes["output"] = (len(spec.vocabulary), d)
    stack = (spec.n_experts,) if spec.n_experts else ()
    suffix = "_exps" if spec.n_experts else ""
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (d,),
        "attn_q": (q_rows, d),
        "attn_k": (kv_rows, d),
        "attn_v": (kv_rows, d),
        "attn_output": (d, q_rows),
        "ffn_norm": (d,),
        f"ffn_gate{suffix}": (*stack, spec.n_ff, d),
        f"ffn_up{suffix}": (*stack, spec.n_ff, d),
        f"ffn_down{suffix}": (*stack, d, spec.n_ff),
    }
    if spec.n_experts:
        block["ffn_gate_inp"] = (spec.n_experts, d)
    if spec.qk_norms:
        block |= {"attn_q_norm": (spec.head_dim,), "attn_k_norm": (spec.head_dim,)}
    for i in range(spec.n_layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    made = {f"{name}.weight": _weight(rng, shape) for name, shape in shapes.items()}
    for i in range(spec.n_layers):
        for name in spec.biases:
            made[f"blk.{i}.{name}.bias"] = rng.normal(0, 0.5, block[name][0]).astype(np.float32)
    if spec.rope_factors:
        rotary = spec.keys.get("rope.dimension_count", spec.head_dim)
        made["rope_freqs.weight"] = rng.uniform(1, 8, rotary // 2).astype(np.float32)
    return made


def _weight(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms near 1; matrices that keep the size of what they multiply, twice over to sharpen attention."""
    if len(shape) == 1:
        return rng.normal(1, 0.2, shape).astype(np.float32)
    return rng.normal(0, 2 / np.sqrt(shape[-1]), shape).astype(np.float32)
