"""A float GGUF file becomes a quantized one, which llama.cpp loads too."""

from pathlib import Path
from tempfile import TemporaryDirectory

import cuquant as cq

source = Path(__file__).parent / "data/nano-llama-f16.gguf"
recipes = {
    "one format": "q4_0",
    "llama.cpp's mixture": "q4_k_m",
    "by name": {"output.weight": "q8_0", "*.ffn_down.*": "q6_k", "*": "q4_k"},  # the first that matches
}
with TemporaryDirectory() as folder:
    for label, recipe in recipes.items():
        target = Path(folder) / f"{label}.gguf"
        done = cq.quantize_file(source, target, recipe)
        small, large = target.stat().st_size, source.stat().st_size
        print(f"{label}: {done.format}, {len(done.quantized)} tensors, {large:,} -> {small:,} bytes")
        with cq.open(target, "cpu") as model:
            print(f"   {model['blk.0.ffn_down.weight']}")
