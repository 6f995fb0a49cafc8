"""q4_0, q4_1, q5_0 and q5_1 by importance on a GPU: bytes and errors as on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from formats_table import FLOATS
from kquants_oracle import OF_ROWS
from numpy.typing import NDArray
from products import gauss

import cuquant as cq
from cuquant import device
from cuquant.testing import as_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.* of the weights are too small")]
F = np.float32
NAMES = [*OF_ROWS]


def importance_of(k: int) -> NDArray[np.float32]:
    """Columns of no importance, and some that matter much more than others."""
    importance = 10 ** np.random.default_rng(15).uniform(-6, 3, k).astype(F)
    importance[5:20] = importance[k // 2] = 0
    return importance


def hard_weights() -> NDArray[np.float32]:
    """Weights of all magnitudes, zeros of both signs, equal ones, ties, subnormal numbers."""
    rng = np.random.default_rng(14)
    x = gauss((77, 416), 14)
    x[:8] *= F(0.02)
    x[8:16] *= 10 ** rng.uniform(-30, 3, (8, 1)).astype(F)
    x[16:24] *= 10 ** rng.uniform(-6, 0, (8, 416)).astype(F)
    x[24], x[25], x[26], x[27] = 0, -0.0, 1, -0.5
    for row, magnitude in enumerate((1e-38, 1e-41, 1e-44, 9e-16, 1.1e-15, 1e-7, 6e-8, 1e-10, 1e4), 28):
        x[row] *= F(magnitude)
    x[37:43] = rng.integers(-8, 8, (6, 416))
    x[43:47] = np.abs(x[43:47])
    x[47:51] = -np.abs(x[47:51])
    x[51:55, ::7] = 0
    x[55:58] = np.where(rng.uniform(size=(3, 416)) < 0.02, x[55:58], 0)
    x[58:61, 40:300] = 0
    x[61:64] = rng.standard_t(2, (3, 416))
    x[64, :32] *= F(1e4)  # whose row's mean square is the others' too
    x[65] = np.where(np.arange(416) % 2, F(-0.0), F(0))
    return x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bytes_are_those_of_the_cpu(name: str, dtype: np.dtype[Any]) -> None:
    """Either host's importance."""
    cupy, x, importance = device.cupy(), hard_weights(), importance_of(416)
    x = x.astype(dtype)
    expected = cq.quantize(x, name, importance).blocks
    assert (expected != cq.quantize(x, name).blocks).any()
    made = cq.quantize(cupy.asarray(x), name, cupy.asarray(importance))
    assert made.device == "cuda"
    np.testing.assert_array_equal(as_numpy(made.blocks), expected)
    again = cq.quantize(cupy.asarray(x), name)
    np.testing.assert_array_equal(as_numpy(again.blocks), cq.quantize(x, name).blocks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(32,), (2080,), (1, 64), (33, 96), (3, 17, 160), (2, 3, 5, 32)], ids=str)
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    """Few rows and many, that are no multiple of what a block of threads has; stacks; vectors."""
    x, importance = gauss(shape, 3), importance_of(shape[-1])
    made = cq.quantize(device.cupy().asarray(x), name, importance)
    assert made.shape == shape
    np.testing.assert_array_equal(as_numpy(made.blocks), cq.quantize(x, name, importance).blocks)
    none = device.cupy().asarray(x)[..., None, :][..., :0, :]
    assert cq.quantize(none, name, importance).shape == none.shape


@pytest.mark.parametrize("name", NAMES)
def test_strides(name: str) -> None:
    cupy, x, importance = device.cupy(), gauss((40, 96), 4), importance_of(96)
    expected = cq.quantize(x, name, importance).blocks
    turned, wide, odd = cupy.zeros((96, 40), F).T, cupy.zeros((40, 192), F)[:, ::2], cupy.zeros((40, 99), F)
    for strided in (turned, wide, odd[:, 3:], cupy.zeros((80, 96), F)[::-2]):
        strided[:] = cupy.asarray(x)
        np.testing.assert_array_equal(as_numpy(cq.quantize(strided, name, importance).blocks), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e9, 1e30])
def test_refuses_in_the_same_words(name: str, value: float) -> None:
    x = gauss((3, 5, 64))
    x[1, 2, 40] = x[2, 1, 3] = value
    with pytest.raises(ValueError, match=r"row \(1, 2\)") as on_cpu:
        cq.quantize(x, name, np.arange(1, 65))
    with pytest.raises(ValueError, match=r"row \(1, 2\)") as on_gpu:
        cq.quantize(device.cupy().asarray(x), name, np.arange(1, 65))
    assert str(on_cpu.value) == str(on_gpu.value)


@pytest.mark.parametrize("name", NAMES)
def test_lost_weights_are_counted_as_on_the_cpu(name: str) -> None:
    x = gauss((40, 256)) * F(2.0) ** -np.arange(40, dtype=F)[:, None]
    said = []
    for given in (x, device.cupy().asarray(x)):
        with pytest.warns(UserWarning, match="too small") as told:
            cq.quantize(given, name, importance_of(256))
        said.append(str(told[0].message))
    assert said[0] == said[1]
