"""EXL3 weights of random steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import cuquant as cq

GENERATORS = ("3inst", "mcg", "mul1")
PRODUCT_BITS = (2, 3, 4, 5, 6, 8)
"""Of steps that products read as they are."""


def random_exl3(
    bits: int, shape: tuple[int, ...], generator: str = "mcg", seed: int = 0
) -> cq.QuantizedArray:
    """On the CPU: every ring of bits is some weights. suh and svh as exllamav3 has them, signs and sizes."""
    rng, fmt = np.random.default_rng(seed), cq.Exl3(bits, generator)
    *lead, n, k = shape
    blocks = rng.integers(0, 256, fmt.stored(shape), np.uint8)
    stored = fmt.parts(blocks, shape)
    stored.suh[...] = _sides(rng, (*lead, k), 1.0)
    stored.svh[...] = _sides(rng, (*lead, n), 0.02)
    return cq.from_blocks(blocks, fmt, shape)


def _sides(rng: Any, shape: tuple[int, ...], size: float) -> NDArray[np.float16]:
    return (rng.choice([-size, size], shape) * rng.uniform(0.5, 2, shape)).astype(np.float16)
