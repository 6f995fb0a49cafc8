"""Random products, mixtures and caches against float64: what nobody thought of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attending import DTYPES, WIDTHS, agree
from formats_table import K_QUANTS, ON_GPU
from mixtures import close, on_gpu, reference, stacks
from numpy.typing import NDArray

import cuquant as cq
from cuquant import check, device, formats, testing

pytestmark = pytest.mark.gpu
F = np.float32
OTHERS = ("mxfp4", "nvfp4", "int4-32", "int4-64-zeros")
FORMATS = (*ON_GPU, *(row.name for row in K_QUANTS), *OTHERS)


class Random:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def size(self, least: int, most: int) -> int:
        """As likely to be of any magnitude."""
        return round(float(np.exp(self.rng.uniform(np.log(least), np.log(most)))))

    def one(self, values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def maybe(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def normal(self, *shape: int) -> NDArray[F]:
        return self.rng.standard_normal(shape, F)

    def placed(self, numbers: Any, dtype: Any) -> Any:
        """On the GPU, in memory of some layout whose other elements are NaN."""
        cupy, shape = device.cupy(), numbers.shape
        kind = self.one(("wide", "step", "turned", "odd", "whole"))
        gap, odd = self.one((1, 8, 40)), self.one((1, 2, 5))
        if kind == "wide":
            view = cupy.full((*shape[:-1], shape[-1] + gap), np.nan, F).astype(dtype)[..., : shape[-1]]
        elif kind == "step":
            view = cupy.full((*shape[:-1], shape[-1] * 2), np.nan, F).astype(dtype)[..., ::2]
        elif kind == "turned" and len(shape) > 1:
            view = cupy.full(shape[::-1], np.nan, F).astype(dtype).T
        elif kind == "odd":
            view = cupy.full(numbers.size + odd, np.nan, F).astype(dtype)[odd:].reshape(shape)
        else:
            return cupy.asarray(numbers.astype(dtype))
        view[...] = cupy.asarray(numbers.astype(dtype))
        return view


@pytest.mark.parametrize("seed", range(24))
def test_products(seed: int) -> None:
    random = Random(seed)
    name = random.one(FORMATS)
    k = formats.get(name).block_size * random.size(1, 3000 // formats.get(name).block_size)
    n = random.size(1, 200_000 // k)
    w = cq.quantize(random.normal(n, k), name).to_device("cuda")
    for _ in range(4):
        m = random.size(1, 200)
        x = random.placed(random.normal(m, k), random.one(check.FLOATS))
        given = cq.quantize(x, "q8_1") if k % 32 == 0 and random.maybe(0.3) else x
        bias = random.placed(random.normal(n), random.one(check.FLOATS)) if random.maybe(0.3) else None
        residual = random.placed(random.normal(m, n), random.one(check.FLOATS)) if random.maybe(0.3) else None
        ends: dict[str, Any] = {"bias": bias, "residual": residual, "activation": random.one((None, "silu"))}
        out = random.placed(np.full((m, n), np.nan, F), random.one(check.FLOATS))
        expected = testing.linear(given, w, **ends)
        for _ in range(2):
            cq.linear(given, w, out=out, **ends)
            assert testing.nmse(out, expected) <= 3 * testing.BOUNDS[out.dtype][0], (
                name,
                m,
                n,
                k,
            )  # few numbers


@pytest.mark.parametrize("seed", range(8))
def test_mixtures(seed: int) -> None:
    random = Random(seed)
    name = random.one(("q4_0", "q5_1", "q8_0", "q4_k", "kbit3", "mxfp4", "int4-32"))
    block = formats.get(name).block_size
    count, k, hidden, n = random.size(1, 12), *(random.size(1, 512 // block) * block for _ in range(2)), 33
    experts = stacks(name, count, k, hidden, n)
    for _ in range(3):
        tokens, top_k = random.size(1, 120), int(random.rng.integers(1, count + 1))
        x = random.placed(random.normal(tokens, k), np.float16)
        ids = random.rng.integers(0, count, (tokens, top_k))
        ids[random.rng.random(ids.shape) < 0.02] = -1
        probs = random.rng.random((tokens, top_k)).astype(F)
        y = cq.moe(x, experts, *on_gpu(x, ids, probs)[1:], out=device.cupy().empty((tokens, n), F))
        close(y, reference(x, experts, ids, probs))


@pytest.mark.parametrize("seed", range(24))
def test_caches(seed: int) -> None:
    random = Random(seed)
    heads, group, batch = random.one((1, 2, 3, 8)), random.one((1, 2, 4, 7)), random.size(1, 4)
    dim = random.one((32, 64, 96, 128, 256))
    widths = sorted(random.rng.choice(WIDTHS, random.rng.integers(1, 4), replace=False).tolist())
    cache = cq.KVCache(heads, dim, dict.fromkeys(widths, 700), batch, rotate=random.maybe(0.3), device="cuda")
    for _ in range(3):
        n = random.size(1, 200)
        k, v = (random.placed(random.normal(batch, n, heads, dim), random.one(DTYPES)) for _ in range(2))
        cache.append(k, v, bits=random.rng.choice(widths, (batch, n)))
        length = min(random.one((1, 1, 3, 20)), n)
        q = random.normal(batch, length, heads * group, dim).astype(random.one(DTYPES))
        agree(q, cache, causal=random.maybe(0.7))
