"""mxfp4 and int4 on a GPU: numbers and bytes as on the CPU, products of every range of scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from formats_table import FLOATS, random_blocks
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, testing
from cuquant.testing import as_numpy, nmse, worst_element

pytestmark = pytest.mark.gpu
F = np.float32
INT4 = [cq.Int4(group, symmetric) for group in (32, 64, 128, 96, -1) for symmetric in (True, False)]
FORMATS = [cq.formats.get("mxfp4"), *INT4]
SHAPES = [(1, 192), (16, 384), (33, 960), (130, 1152), (3, 17, 192)]


def gauss(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, F)


def weight(fmt: cq.Format, shape: tuple[int, ...], scale: float = 1) -> cq.QuantizedArray:
    return cq.quantize(gauss(shape, 1) * F(scale), fmt)


def whole(fmt: cq.Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with whole blocks."""
    return (*shape[:-1], shape[-1] // 128 * 128 or 128) if shape[-1] % fmt.block_size else shape


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_and_numbers_are_those_of_the_cpu(fmt: cq.Format) -> None:
    cupy = device.cupy()
    for shape in SHAPES:
        shape = whole(fmt, shape)
        w = weight(fmt, shape)
        raw = random_blocks(w.format, shape)
        for blocks in (w.blocks, raw):
            own = cq.from_blocks(blocks, w.format, shape)
            for dtype in FLOATS:
                with np.errstate(all="ignore"):
                    expected = own.dequantize(dtype).astype(F)
                np.testing.assert_array_equal(
                    as_numpy(own.to_device("cuda").dequantize(dtype)).astype(F), expected
                )
            there = own.to_device("cuda").prepare()
            np.testing.assert_array_equal(as_numpy(there.blocks), blocks)
            np.testing.assert_array_equal(as_numpy(there[0].blocks), blocks[0])
        np.testing.assert_array_equal(
            as_numpy(cq.quantize(cupy.asarray(gauss(shape, 1)), fmt).blocks), w.blocks
        )


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products(fmt: cq.Format) -> None:
    cupy = device.cupy()
    for n, k in ((70, 384), (200, 1920)):
        w = weight(fmt, (n, k)).to_device("cuda")
        assert w.fragments().half
        for m in (1, 8, 12, 40, 300):
            for dtype in FLOATS:
                x = cupy.asarray(gauss((m, k), 2)).astype(dtype)
                y, exact = cq.matmul(x, w.T, dtype=F), testing.linear(x, w)
                assert nmse(y, exact) < 1e-6, (m, n, dtype)
                assert worst_element(y, exact) < 0.01
            q = cq.quantize(x, "q8_1")
            assert nmse(q @ w.T, testing.linear(q, w)) < 1e-6


@pytest.mark.parametrize("magnitude", [1e-36, 1e-20, 1e-4, 1, 1e4, 1e30])
def test_mxfp4_of_any_magnitude(magnitude: float) -> None:
    """Exponents are brought into float16's range, and blocks of zeros do not count."""
    cupy = device.cupy()
    x = gauss((96, 256), 1)
    x[5], x[7, 32:64] = 0, 0
    w = cq.quantize(x * F(magnitude), "mxfp4")
    there = w.to_device("cuda")
    assert there.fragments().half
    np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)
    for m in (2, 40, 200):
        a = cupy.asarray(gauss((m, 256), 2)).astype(ml_dtypes.bfloat16)
        assert nmse(cq.matmul(a, there.T, dtype=F), testing.linear(a, w)) < 1e-6, m


def test_mxfp4_scales_of_every_kind() -> None:
    """What float16 does not hold goes to float32 sums."""
    cupy = device.cupy()
    raw = random_blocks("mxfp4", (48, 256))
    raw.view(cq.formats.get("mxfp4").storage)["e"] = np.random.default_rng(0).integers(100, 150, (48, 8))
    w = cq.from_blocks(raw, "mxfp4", (48, 256))
    there = w.to_device("cuda")
    assert not there.fragments().half
    np.testing.assert_array_equal(as_numpy(there.blocks), raw)
    for m in (2, 40):
        x = cupy.asarray(gauss((m, 256), 2).astype(np.float16))
        y, exact = as_numpy(cq.matmul(x, there.T, dtype=F)), testing.linear(x, w)
        for column in range(48):
            assert nmse(y[:, column], exact[:, column]) < 1e-6
