"""What is held of every weight on a GPU: its bytes and numbers, and products against float64."""

from __future__ import annotations

import numpy as np
from formats_table import FLOATS
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, testing
from cuquant.testing import as_numpy, nmse, worst_element


def assert_read_back(raw: NDArray[np.uint8], fmt: cq.Format, shape: tuple[int, ...]) -> None:
    """Numbers are the CPU's, bit for bit, and a prepared weight and its rows give the bytes back."""
    own = cq.from_blocks(raw, fmt, shape)
    for dtype in FLOATS:
        with np.errstate(all="ignore"):
            expected = own.dequantize(dtype).astype(np.float32)
        got = as_numpy(own.to_device("cuda").dequantize(dtype)).astype(np.float32)
        np.testing.assert_array_equal(got, expected)
    there = own.to_device("cuda").prepare()
    np.testing.assert_array_equal(as_numpy(there.blocks), raw)
    for row in (0, -1):
        np.testing.assert_array_equal(as_numpy(there[row].blocks), raw[row])


def assert_products(w: cq.QuantizedArray) -> None:
    """x @ w.T is right for batches of every core, every type of activations, and those of 8 bits."""
    cupy = device.cupy()
    for m in (1, 8, 12, 40, 300):
        given = cupy.asarray(np.random.default_rng(2).standard_normal((m, w.shape[-1]), np.float32))
        for dtype in FLOATS:
            x = given.astype(dtype)
            y, exact = cq.matmul(x, w.T, dtype=np.float32), testing.linear(x, w)
            assert nmse(y, exact) < 1e-6, (m, w.shape, dtype)
            assert worst_element(y, exact) < 0.01, (m, w.shape, dtype)
        q = cq.quantize(x, "q8_1")
        assert nmse(q @ w.T, testing.linear(q, w)) < 1e-6, (m, w.shape)
