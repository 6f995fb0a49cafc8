"""A cache of keys and values whose tokens have different widths, and attention over it."""

import numpy as np

import cuquant as cq
from cuquant.testing import nmse

rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 1, 500, 2, 64), np.float32)  # 1 sequence, 500 tokens, 2 key heads of 64
q = 3 * rng.standard_normal((1, 1, 8, 64), np.float32)  # a new token, 8 query heads that know what they want
exact = cq.KVCache(2, 64, capacity=512, bits=(16,))
exact.append(k, v)
expected = cq.attention(q, exact)

for bits in (8, 4, 3, 2):
    cache = cq.KVCache(2, 64, capacity=512, bits=(bits,))
    cache.append(k, v)
    print(f"{bits} bits: NMSE of attention {nmse(cq.attention(q, cache), expected):.4f}")

mixed = cq.KVCache(2, 64, capacity=512, bits=(16, 8, 4, 3, 2), track_attention=True)
mixed.append(k, v)
cq.attention(q, mixed)  # notes how much attention each token gets
mixed.allocate(average_bits=4)
print(f"4 bits on average, by attention: NMSE {nmse(cq.attention(q, mixed), expected):.4f}")
print("tokens by bits:", {bits: int(tier.lengths[0]) for bits, tier in mixed.tiers.items()})
