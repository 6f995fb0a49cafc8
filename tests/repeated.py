"""What tests of repeated calls share: operands of every kind, and counts of what the backend is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from products import gauss

import cuquant as cq
from cuquant import device, repeats
from cuquant.cuda import backend as cuda
from cuquant.testing import as_numpy

N, K = 96, 512


def counting(monkeypatch: pytest.MonkeyPatch, *names: str, owners: Sequence[Any] = ()) -> list[int]:
    """How often each of these functions is called from now on: of the backend, or each of an owner."""
    counts = [0] * len(names)

    def counted(at: int, real: Any) -> Any:
        def called(*args: Any) -> Any:
            counts[at] += 1
            return real(*args)

        return called

    for at, (owner, name) in enumerate(zip(owners or [cuda] * len(names), names, strict=True)):
        monkeypatch.setattr(owner, name, counted(at, getattr(owner, name)))
    return counts


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products were checked, and how many repeated, with nothing known at first."""
    repeats.quantized.clear()
    return counting(monkeypatch, "product", "repeat")


def there(shape: tuple[int, ...], dtype: Any = np.float16, seed: int = 0) -> Any:
    return device.cupy().asarray(gauss(shape, seed)).astype(dtype)


def weight(fmt: Any = "q4_0", shape: tuple[int, ...] = (N, K)) -> cq.QuantizedArray:
    return cq.quantize(gauss(shape, 99), fmt).to_device("cuda").prepare()


def odd(x: Any) -> Any:
    """The same numbers 8 bytes from where they could be read as they are."""
    memory = device.cupy().zeros(x.size + 8, x.dtype)
    memory[4:-4] = x.reshape(-1)
    return memory[4:-4].reshape(x.shape)


def blocks(x: Any) -> cq.QuantizedArray:
    """q8_1 activations without the rows that are made with them."""
    return cq.from_blocks(cq.quantize(x, "q8_1").blocks, "q8_1", x.shape)


GIVEN: dict[str, Callable[[Any], Any]] = {
    "float16": lambda x: x.astype(np.float16),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "float32": lambda x: x,
    "unaligned": lambda x: odd(x.astype(np.float16)),
    "columns": lambda x: device.cupy().asarray(np.repeat(as_numpy(x), 2, -1))[..., ::2],
    "backwards": lambda x: device.cupy().asarray(as_numpy(x)[::-1].astype(np.float16))[::-1],
    "q8_1": lambda x: cq.quantize(x, "q8_1"),
    "blocks": blocks,
}
"""What becomes of float32 numbers before the product."""
