"""Perplexity and divergence of a model in some formats: what `cuquant eval` prints, as data."""

from pathlib import Path

import cuquant as cq

data = Path(__file__).parent / "data"
result = cq.evaluate(
    data / "nano-llama-f16.gguf",
    text=data / "heldout-public.txt",  # a path is a file, a str the text itself
    formats=["q8_0", "q5_0", "q4_0", "kbit4"],
    chunks=4,  # of 512 tokens; without it the whole text
)
print(result)  # result.render("md"), "csv", "json"; result.to_pandas()

worst = max(result.rows[-1].tensors, key=lambda tensor: tensor.nmse)
print(f"\nkbit4 loses most in {worst.name}: {worst.sqnr_db:.1f} dB")
