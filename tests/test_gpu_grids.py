"""Weights of grids, and of one and two bits, on a GPU: numbers and bytes of the CPU, products, mixtures."""

from __future__ import annotations

import numpy as np
import pytest
from formats_table import random_blocks
from products import assert_products, assert_read_back, gauss
from test_grids import NAMES as GRIDS

import cuquant as cq
from cuquant import device, testing
from cuquant.formats.kernels import kernels_of
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
NAMES = [*GRIDS, "q1_0", "q2_0", "q2_0-128"]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_bytes_are_those_of_the_cpu(name: str) -> None:
    for shape in ((1, 256), (33, 768), (3, 17, 512)):
        for finite in (False, True):
            assert_read_back(random_blocks(name, shape, finite=finite), cq.formats.get(name), shape)


@pytest.mark.parametrize("name", NAMES)
def test_products(name: str) -> None:
    for shape in ((70, 512), (208, 1792)):
        w = cq.from_blocks(random_blocks(name, shape, finite=True), name, shape).to_device("cuda")
        assert w.fragments().half
        assert_products(w)
    own = w.format.for_kernels
    bits = {2: 2 + 16 / own.block_size, 3: 3.5625, 4: 4.3125}[own.bits]
    assert bits <= w.fragments().buffer.nbytes * 8 / w.size < bits + 0.02


@pytest.mark.parametrize("name", NAMES)
def test_experts(name: str) -> None:
    """All projections of a mixture."""
    cupy, (experts, hidden, inner, tokens) = device.cupy(), (4, 512, 256, 9)

    def weight(n: int, k: int, seed: int) -> cq.QuantizedArray:
        raw = random_blocks(name, (experts, n, k), seed, finite=True)
        return cq.from_blocks(raw, name, (experts, n, k))

    gate, up, down = weight(inner, hidden, 1), weight(inner, hidden, 2), weight(hidden, inner, 3)
    x, logits = gauss((tokens, hidden), 4) * np.float32(0.01), gauss((tokens, experts), 5)
    ids, probs = cq.route(logits, 2)
    expected = cq.moe(x, cq.Experts(gate, up, down), ids, probs)
    there = cq.Experts(*(w.to_device("cuda") for w in (gate, up, down)))
    y = cq.moe(cupy.asarray(x), there, cupy.asarray(ids), cupy.asarray(probs))
    assert nmse(y, expected) < 1e-5


@pytest.mark.parametrize("name", ["iq3_s", "iq2_s"])
def test_rows_are_taken(name: str) -> None:
    """As a model takes those of its tokens."""
    shape = (100, 512)
    w = cq.from_blocks(random_blocks(name, shape, finite=True), name, shape)
    there, ids = w.to_device("cuda").prepare(), [3, 99, 3, 0]
    np.testing.assert_array_equal(as_numpy(there[ids].dequantize()), w.dequantize()[ids])
    assert testing.nmse(as_numpy(there.dequantize()), w.dequantize()) == 0


@pytest.mark.parametrize("name", ["iq2_s", "iq1_m"])
def test_what_float16_does_not_hold(name: str) -> None:
    """The greatest scale of 16 weights counts, and the least, whichever these are."""
    cupy, fmt, shape = device.cupy(), cq.formats.get(name), (32, 512)
    x = cupy.asarray(gauss((20, 512), 1))
    of_kernels = kernels_of(fmt).to_kept(random_blocks(name, shape), np).view(fmt.for_kernels.storage)
    of_kernels["d"], of_kernels["scales"] = 4, 15
    for row, number, d, s in (
        (0, 0, 4, 1),
        (9, 5, 5000, 15),
        (1, 2, 5000, 15),
        (12, 15, 2**-14, 1),
        (3, 6, 2**-14, 1),
    ):
        records = of_kernels.copy()
        records["d"][row, 1], records["scales"][row, 1] = d, 1 if d > 4 else 15
        records["scales"][row, 1, number] = s
        w = cq.from_blocks(kernels_of(fmt).from_kept(records.view(np.uint8), np), name, shape).to_device(
            "cuda"
        )
        assert w.fragments().half == (d == 4), (row, d)
        assert nmse(cq.matmul(x, w.T), testing.linear(x, w)) < 1e-6
