"""Open a GGUF file, quantize one of its matrices, multiply by it."""

from pathlib import Path

import cuquant as cq

model = cq.open(Path(__file__).parent / "data/nano-llama-f16.gguf")  # on the GPU where there is one
xp = model.xp  # numpy or cupy
print(model)

w = model["blk.0.ffn_up.weight"]  # float16 (768, 256); in a quantized file a QuantizedArray at once
W = cq.quantize(w, "q4_0")
print(W)

x = xp.random.default_rng(0).standard_normal((8, 256), dtype=xp.float32)
y = x @ W.T  # (8, 768), as NumPy shapes it
exact = x @ w.T.astype(xp.float32)
noise = float(((y - exact) ** 2).sum() / (exact**2).sum())
print(f"y: {y.shape} {y.dtype}; {noise:.2%} of its power is quantization noise")
