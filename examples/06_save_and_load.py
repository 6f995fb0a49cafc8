"""Formats that GGUF has no type for are kept in safetensors files: arrays, and whole models."""

from pathlib import Path
from tempfile import TemporaryDirectory

import cuquant as cq

model = cq.open(Path(__file__).parent / "data/nano-llama-f16.gguf", "cpu")
w = model["blk.0.attn_q.weight"]
codebook = cq.normal_float_codebook(3)
weights = {
    "plain": cq.quantize(w, cq.KBit(3)),
    "finer": cq.quantize(w, cq.KBit(3, codebook=codebook, scale="decoded", absmax="float16")),
    "int4": cq.quantize(w, cq.Int4(64, symmetric=False)),
    "norm": model["blk.0.attn_norm.weight"],  # plain arrays too
}
with TemporaryDirectory() as folder:
    file = Path(folder) / "weights.safetensors"
    cq.save(file, weights)
    print(f"{file.stat().st_size:,} bytes")
    for name, array in cq.load(file).items():
        print(f"{name}: {array if isinstance(array, cq.QuantizedArray) else array.shape}")

    file = Path(folder) / "model.safetensors"
    cq.quantize_file(model, file, cq.KBit(3))  # with the model's metadata
    with cq.open(file, "cpu") as quantized:
        print(quantized)
        text = Path(__file__).parent / "data/heldout-public.txt"
        print(cq.evaluate(quantized, text=text, base=model, ctx=128, chunks=4))
