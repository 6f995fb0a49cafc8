"""A forward pass written from the definitions: float64, one position and one head at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

import cuquant as cq

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


def error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative root mean square deviation; infinite where the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(np.square(expected))))
