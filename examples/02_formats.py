"""One matrix in every format: its size, and the error of its weights."""

from pathlib import Path

from tabulate import tabulate

import cuquant as cq
from cuquant.testing import nmse

model = cq.open(Path(__file__).parent / "data/nano-llama-f16.gguf")
w = model["blk.0.attn_q.weight"]
rows = []
for name in cq.formats.names():
    fmt = cq.formats.get(name)
    usable = fmt.on_gpu or model.device == "cpu"  # a GPU refuses formats without kernels by name
    if usable and not fmt.for_activations:
        W = cq.quantize(w, fmt)
        rows.append((name, W.bits_per_weight, nmse(W, w), fmt.formula))
rows.sort(key=lambda row: row[1])
print(tabulate(rows, ["format", "bits per weight", "NMSE", "a weight is read as"], floatfmt=".4f"))
