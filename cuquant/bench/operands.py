"""Weights to measure with: random ones of any format."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .. import device, formats
from ..array import QuantizedArray
from ..formats import Format
from ..formats.exl3 import Exl3
from ..formats.grid import Grid
from ..ops.quantize import quantize
from .timing import rotation

_ROWS = 256
"""Rows that are made of formats that no kernel quantizes to: again and again, in random order."""


def random_weight(name: str, n: int, k: int) -> QuantizedArray:
    """A weight of n x k random numbers."""
    return _maker(formats.get(name), n, k)()


def random_weights(name: str, n: int, k: int, count: int | None = None) -> list[QuantizedArray]:
    """Different random weights, prepared: so many, or more than the L2 cache holds."""
    fmt = formats.get(name)
    make = _maker(fmt, n, k)
    made = []  # one by one, as what is prepared leaves its blocks' memory to the next
    for _ in range(rotation(math.prod(fmt.stored((n, k)))) if count is None else count):
        made.append(make().prepare())
    return made


def random_stack(name: str, count: int, n: int, k: int) -> QuantizedArray:
    """A stack of random weights, prepared."""
    make = _maker(formats.get(name), n, k, k**-0.5)
    made = [make() for _ in range(count)]
    blocks = device.cupy().stack([each.blocks for each in made])
    return QuantizedArray._made(made[0].format, blocks, shape=(count, n, k)).prepare()


def _maker(fmt: Format, n: int, k: int, size: float = 0.02) -> Callable[[], QuantizedArray]:
    """What makes weights of random numbers of about that size: walks, or the same rows in another order."""
    cupy = device.cupy()
    if isinstance(fmt, Exl3):
        return lambda: _walks(fmt, (n, k))
    count = n if fmt.encodes_on_gpu else min(n, _ROWS)
    if isinstance(fmt, Grid):
        rows = _points(fmt, count, k, size)
    elif fmt.read_only:
        rows = _codes(fmt, count, k, size)
    else:
        rows = quantize(cupy.random.standard_normal((count, k), dtype=np.float32) * np.float32(size), fmt)
    return lambda: rows[cupy.random.permutation(n) % count]


def _points(fmt: Grid, n: int, k: int, size: float) -> QuantizedArray:
    """Random points and scales; of both signs, as no codebook's half is preferred."""
    cupy = device.cupy()
    random = cupy.random.randint(0, 256, (n * k // fmt.block_size, fmt.block_bytes), dtype=np.uint8)
    _, scales, codes = fmt.split(random, cupy)
    d = cupy.random.uniform(0.5, 2, (len(random), 1)) * (
        size / float(2 * scales.mean() + 1) / fmt.magnitudes[-1]
    )
    blocks = fmt.joined(d.astype(np.float16).view(np.uint8), scales, codes, cupy)
    return QuantizedArray._made(fmt, blocks.reshape(n, -1), shape=(n, k))


def _codes(fmt: Format, n: int, k: int, size: float) -> QuantizedArray:
    """Random codes of a format whose blocks have one scale."""
    cupy = device.cupy()
    blocks = cupy.random.randint(0, 256, (n * k // fmt.block_size, fmt.block_bytes), dtype=np.uint8)
    assert fmt.storage.fields is not None
    _, at, *_ = fmt.storage.fields["d"]
    d = cupy.random.uniform(0.5, 2, (len(blocks), 1)) * size
    blocks[:, at : at + 2] = d.astype(np.float16).view(np.uint8)
    return QuantizedArray._made(fmt, blocks.reshape(n, -1), shape=(n, k))


def _walks(fmt: Exl3, shape: tuple[int, ...]) -> QuantizedArray:
    """A weight (N, K) of random steps, which are all numbers."""
    random = device.cupy().random
    blocks = random.randint(0, 256, fmt.stored(shape), dtype=np.uint8)
    _, suh, svh = fmt.parts(blocks, shape)
    for side, size in ((suh, 1), (svh, 0.02)):
        side[...] = random.choice(np.array([-size, size]), side.shape) * random.uniform(0.5, 2, side.shape)
    return QuantizedArray._made(fmt, blocks, shape=shape)
