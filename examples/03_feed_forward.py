"""A feed-forward block: bias, activation and residual belong to the product, and are rounded once with it."""

from pathlib import Path

import cuquant as cq
from cuquant.testing import nmse

model = cq.open(Path(__file__).parent / "data/nano-llama-f16.gguf")
xp = model.xp
gate, up, down = (cq.quantize(model[f"blk.0.ffn_{part}.weight"], "q8_0") for part in ("gate", "up", "down"))


def block(x):
    """x + down(silu(gate(x)) * up(x))"""
    hidden = cq.linear(x, gate, activation="silu") * cq.linear(x, up)
    return cq.linear(hidden, down, residual=x)


x = xp.random.default_rng(0).standard_normal((2, 16, 256), dtype=xp.float32)  # any leading axes
y = block(x)
print(f"{x.shape} -> {y.shape}, NMSE of {nmse(block(x.astype(xp.float16)), y):.1e} with float16 activations")

y8 = cq.linear(cq.quantize(x, "q8_1"), up)  # activations in 8 bits
print(f"q8_1 activations: NMSE of {nmse(y8, cq.linear(x, up)):.1e}")
