"""Weights to measure with: random ones of any format."""

from __future__ import annotations

import math

import numpy as np

from .. import device, formats
from ..array import QuantizedArray
from ..formats import Format
from ..formats.exl3 import Exl3
from ..formats.grids import Grid
from ..ops.quantize import quantize
from .timing import rotation

_ROWS = 256
"""Rows that are made of formats that no kernel quantizes to: again and again, in random order."""


def random_weight(name: str, n: int, k: int, size: float = 0.02) -> QuantizedArray:
    """A weight of n x k random numbers, of about that size."""
    return _shuffled(_rows(formats.get(name), n, k, size), n)


def random_weights(name: str, n: int, k: int, count: int | None = None) -> list[QuantizedArray]:
    """Different random weights, prepared: so many, or more than the L2 cache holds."""
    fmt = formats.get(name)
    count = rotation(math.prod(fmt.stored((n, k)))) if count is None else count
    if isinstance(fmt, Exl3):
        return [_walks(fmt, (n, k)).prepare() for _ in range(count)]
    rows = _rows(fmt, n, k, 0.02)
    made = []
    for _ in range(count):
        made.append(_shuffled(rows, n).prepare())
    return made


def random_stack(name: str, count: int, n: int, k: int) -> QuantizedArray:
    """A stack of weights with the same rows in another order, prepared."""
    fmt = formats.get(name)
    if isinstance(fmt, Exl3):
        return _walks(fmt, (count, n, k)).prepare()
    rows = _rows(fmt, n, k, k**-0.5)
    blocks = device.cupy().stack([_shuffled(rows, n).blocks for _ in range(count)])
    return QuantizedArray.made(rows.format, blocks, shape=(count, n, k)).prepare()


def _rows(fmt: Format, n: int, k: int, size: float) -> QuantizedArray:
    """As many rows as can be had at once."""
    random = device.cupy().random
    if isinstance(fmt, Exl3):
        return _walks(fmt, (n, k))
    if not fmt.encodes_on_gpu:
        n = min(n, _ROWS)
    if isinstance(fmt, Grid):
        return _points(fmt, n, k, size)
    return quantize(random.standard_normal((n, k), dtype=np.float32) * np.float32(size), fmt)


def _shuffled(rows: QuantizedArray, n: int) -> QuantizedArray:
    return rows if rows.format.walks else rows[device.cupy().random.permutation(n) % len(rows)]


def _points(fmt: Grid, n: int, k: int, size: float) -> QuantizedArray:
    """Random points and scales; of both signs, as no codebook's half is preferred."""
    cupy = device.cupy()
    random = cupy.random.randint(0, 256, (n * k // fmt.block_size, fmt.block_bytes), dtype=np.uint8)
    _, scales, codes = fmt.split(random, cupy)
    d = cupy.random.uniform(0.5, 2, (len(random), 1)) * (
        size / float(2 * scales.mean() + 1) / fmt.magnitudes[-1]
    )
    blocks = fmt.joined(d.astype(np.float16).view(np.uint8), scales, codes, cupy)
    return QuantizedArray.made(fmt, blocks.reshape(n, -1), shape=(n, k))


def _walks(fmt: Exl3, shape: tuple[int, ...]) -> QuantizedArray:
    """A weight (..., N, K) of random steps, which are all numbers."""
    random = device.cupy().random
    blocks = random.randint(0, 256, fmt.stored(shape), dtype=np.uint8)
    _, suh, svh = fmt.parts(blocks, shape)
    for side, size in ((suh, 1), (svh, 0.02)):
        side[...] = random.choice(np.array([-size, size]), side.shape) * random.uniform(0.5, 2, side.shape)
    return QuantizedArray.made(fmt, blocks, shape=shape)
