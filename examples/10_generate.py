"""Text, token by token: a Llama model out of products, and a cache for each layer in which tokens age."""

from pathlib import Path

import numpy as np

import cuquant as cq

PROMPT, LENGTH = "A list can be sorted with", 40

model = cq.open(Path(__file__).parent / "data/nano-llama-f16.gguf")  # on the GPU where there is one
xp, facts = model.xp, model.metadata
tokenizer = cq.Tokenizer.from_metadata(facts)
layers, heads, kv_heads = (
    facts[f"llama.{key}"] for key in ("block_count", "attention.head_count", "attention.head_count_kv")
)
dim = facts["llama.embedding_length"] // heads
eps = xp.float32(facts["llama.attention.layer_norm_rms_epsilon"])
base = facts["llama.rope.freq_base"]
frequencies = xp.asarray(base ** (-np.arange(0, dim, 2) / dim))  # radians for each position

# Matrices to 6.6 bits a weight; norms stay float32. A file that is quantized needs none of this.
weights = {name: cq.quantize(w, "q6_k") if w.ndim == 2 else w.astype(xp.float32) for name, w in model.items()}
of_layer = [
    {n.split(".")[2]: w for n, w in weights.items() if n.startswith(f"blk.{i}.")} for i in range(layers)
]
# The newest 32 tokens of a layer in float16, the others with 4 bits a number.
caches = [cq.KVCache(kv_heads, dim, {16: 32, 4: 480}, device=model.device) for _ in range(layers)]


def norm(x, weight):
    return x / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x, first):
    """RoPE of heads (1, tokens, heads, dim) from position `first` on: Llama's GGUF files pair neighbours."""
    angles = ((first + xp.arange(x.shape[1]))[:, None, None] * frequencies).astype(xp.float32)
    a, b = x[..., 0::2], x[..., 1::2]
    turned = a * xp.cos(angles) - b * xp.sin(angles), a * xp.sin(angles) + b * xp.cos(angles)
    return xp.stack(turned, axis=-1).reshape(x.shape)


def logits(tokens, first):
    """What comes after tokens at positions from `first` on: numbers for the whole vocabulary."""
    h = weights["token_embd.weight"][tokens].dequantize()[None]  # (1, tokens, embedding)
    for w, cache in zip(of_layer, caches, strict=True):
        x = norm(h, w["attn_norm"])
        q, k, v = (
            cq.linear(x, w[f"attn_{name}"]).reshape(1, len(tokens), count, dim)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        cache.age({16: 32}, coming=len(tokens))  # makes room among the newest
        cache.append(rotate(k, first), v)
        y = cq.attention(rotate(q, first), cache)  # each query sees the tokens up to its own
        h = cq.linear(y.reshape(h.shape), w["attn_output"], residual=h)
        x = norm(h, w["ffn_norm"])
        gated = cq.linear(x, w["ffn_gate"], activation="silu") * cq.linear(x, w["ffn_up"])
        h = cq.linear(gated, w["ffn_down"], residual=h)
    return cq.linear(norm(h[0, -1], weights["output_norm.weight"]), weights["output.weight"])


tokens = tokenizer.encode(PROMPT).tolist()
if tokenizer.add_bos:
    tokens.insert(0, tokenizer.bos_id)
done = 0
while len(tokens) < LENGTH:
    for start in range(done, len(tokens), 32):  # the prompt in pieces that the 16-bit bucket has room for
        after = logits(tokens[start : start + 32], start)
    done = len(tokens)
    tokens.append(int(after.argmax()))
print(tokenizer.decode(tokens))
print({bits: int(tier.lengths[0]) for bits, tier in caches[0].tiers.items()}, "tokens by bits")
