"""A mixture of experts: quantized stacks of matrices, of which each token passes two."""

import numpy as np

import cuquant as cq
from cuquant.testing import nmse

rng = np.random.default_rng(0)
experts, width, hidden, tokens = 8, 128, 256, 32
gate, up = rng.standard_normal((2, experts, hidden, width), np.float32) / width**0.5  # (E, N, K)
down = rng.standard_normal((experts, width, hidden), np.float32) / hidden**0.5
x = rng.standard_normal((tokens, width), np.float32)
router = rng.standard_normal((experts, width), np.float32) / width**0.5
ids, probabilities = cq.route(x @ router.T, 2)  # softmax, then the best two of each token


def stacks(name):
    return cq.Experts(*(cq.quantize(w, name) for w in (gate, up, down)))


y8, y4 = (cq.moe(x, stacks(name), ids, probabilities) for name in ("q8_0", "q4_0"))
print(f"{x.shape} -> {y4.shape}, q4_0 against q8_0: NMSE {nmse(y4, y8):.4f}")
print("tokens of each expert:", np.bincount(ids.reshape(-1), minlength=experts))
