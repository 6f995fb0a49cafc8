"""Caches on the GPU, and attention over them against float64 on the dequantized cache."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, testing
from cuquant.cuda import jit, sources
from cuquant.plan import Kernel, attention as plan

F = np.float32
WIDTHS = (16, 8, 4, 3, 2)
DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(F))
Array = NDArray[Any]


def kernels_of_few_queries() -> set[Kernel]:
    """Those that most tests have, compiled once for all of them."""
    kernels = set()
    for dim, heads in ((64, 2), (96, 2), (128, 2), (256, 2), (40, 2), (128, 8), (128, 1)):
        for q_len, masked, halves in ((1, False, 1), (1, False, 2), (3, True, 1), (3, True, 2)):
            shape = plan.Shape(1, q_len, 4 * heads, heads, dim, WIDTHS, masked, halves)
            kernels.add(plan.attention(shape, jit.capability(), 132).attention.kernel)
    return kernels


def kernels_of_panels(dims: tuple[int, ...]) -> set[Kernel]:
    """Of all widths: for each size, half of a block's rows or all, hidden by nothing, positions, a mask."""
    shapes = (
        plan.Shape(1, q_len, 8, 2, dim, WIDTHS, masked, 1)
        for dim, q_len, masked in product(dims, (16, 64), (0, 1, 2))
    )
    return {plan.attention(shape, jit.capability(), 132).attention.kernel for shape in shapes}


def normal(*shape: int, seed: int = 0, dtype: Any = F) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, F).astype(dtype)


def queries(*shape: int, dtype: Any = np.float16, seed: int = 3) -> Array:
    return normal(*shape, seed=seed, dtype=dtype)


def filled(
    n: int = 50,
    batch: int = 2,
    widths: Any = WIDTHS,
    heads: int = 2,
    dim: int = 64,
    bits: Any = None,
    **options: Any,
) -> cq.KVCache:
    """n random tokens in each sequence, spread over some widths of a cache on the GPU."""
    cache = cq.KVCache(heads, dim, max(n + 70, 1), batch, widths, **options)
    chosen = np.random.default_rng(2).choice(cache.bits if bits is None else bits, (batch, n))
    cache.append(normal(batch, n, heads, dim), normal(batch, n, heads, dim, seed=1), chosen)
    return cache.to_device("cuda")


def shuffled(cache: cq.KVCache) -> cq.KVCache:
    """The cache, on the GPU, with the tokens of each bucket in any order."""
    random = np.random.default_rng(0)
    for tier in cache.tiers.values():
        for b in range(cache.batch):
            slots = tier.buffers.global_slots[b, : int(tier.lengths[b])]
            slots[...] = slots[random.permutation(slots.size)]
    return cache


def of_unequal_lengths(batch: int, longest: int, others: int) -> tuple[cq.KVCache, Array]:
    """Sequences of fewer than `others` random tokens each, but for one of `longest`, over all widths; and how
    many each has."""
    lengths = np.random.default_rng(0).integers(0, others, batch)
    lengths[batch // 2] = longest
    cache = cq.KVCache(2, 64, longest, batch, WIDTHS)
    k, v = normal(batch, longest, 2, 64), normal(batch, longest, 2, 64, seed=1)
    cache.append(k, v, np.resize(WIDTHS, longest), lengths=lengths)
    return cache.to_device("cuda"), lengths


def changed_kernel(patch: pytest.MonkeyPatch, op: str, line: str, after: str) -> None:
    """Kernels of a file from now on have something more after a line."""
    flatten = sources.flatten
    text = flatten(op, None)
    assert text.count(line) == 1
    changed = {op: text.replace(line, f"{line}\n{after}")}
    patch.setattr(sources, "flatten", lambda op, fmt: changed.get(op) or flatten(op, fmt))
    fresh: dict[str, Any] = {"_modules": {}, "_functions": {}, "_prepared": jit._Prepared()}
    for name, value in fresh.items():
        patch.setattr(jit, name, value)


def on_gpu(**arguments: Any) -> dict[str, Any]:
    return {
        name: device.cupy().asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def agree(q: Array, cache: cq.KVCache, largest_score: float = 0, **arguments: Any) -> Array:
    """The result, after it is compared with the float64 reference.

    Scores are sums in float32: what they lack, at most 2^-18 of the largest, is a relative error of weights.
    """
    guarded = testing.Guarded(q.shape, q.dtype, strided=True, xp=device.cupy())
    given = device.cupy().asarray(q)
    assert cq.attention(given, cache, out=guarded.array, **on_gpu(**arguments)) is guarded.array
    assert guarded.intact()
    y = testing.as_numpy(guarded.array)
    reference = testing.attention(q, cache, **arguments)
    nmse, element = testing.BOUNDS[q.dtype]
    assert testing.nmse(y, reference) <= nmse
    assert testing.worst_element(y, reference) <= element + largest_score * 2**-18
    return y
