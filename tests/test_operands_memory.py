"""Operands of a product in memory of others: of other libraries, and results between the elements of x."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from test_matmul import weight

import cuquant as cq
from cuquant import device, memory

F = np.float32
W = weight("q4_0", (6, 64))


class Foreign:
    """An array of another library, known by DLPack alone."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_foreign_arrays() -> None:
    g = np.random.default_rng(0)
    x, bias, residual = (g.standard_normal(shape, F) for shape in ((3, 64), 6, (3, 6)))
    y = cq.linear(Foreign(x), W, bias=Foreign(bias), residual=Foreign(residual))
    np.testing.assert_array_equal(y, cq.linear(x, W, bias=bias, residual=residual))
    np.testing.assert_array_equal(Foreign(x[:, ::-1]) @ W.T, x[:, ::-1] @ W.T)
    dense = W.dequantize()
    np.testing.assert_array_equal(cq.linear(x, Foreign(dense)), cq.linear(x, dense))
    np.testing.assert_array_equal(cq.quantize(Foreign(x), "q8_0").blocks, cq.quantize(x, "q8_0").blocks)
    raw = cq.from_blocks(Foreign(W.blocks), "q4_0", (6, 64))
    assert np.shares_memory(raw.blocks, W.blocks)
    with pytest.raises(TypeError, match="x has dtype float64"):
        cq.linear(Foreign(x.astype(float)), W)


def test_foreign_output() -> None:
    x, out = np.random.default_rng(0).standard_normal((3, 64), F), np.full((3, 6), np.nan, F)
    given = Foreign(out)
    assert cq.linear(x, W, out=given) is given
    np.testing.assert_array_equal(out, x @ W.T)


WIDE = np.zeros((6, 128), F)
APART: dict[str, tuple[Any, Any]] = {
    "columns": (WIDE[:3, :64], WIDE[:3, 64:70]),
    "rows": (WIDE[::2, :64], WIDE[1::2, :6]),
    "backwards": (WIDE[2::-1, :64], WIDE[:3, 100:106]),
    "every other column": (WIDE[:3, ::2], WIDE[:3, 1:13:2]),
}


@pytest.mark.parametrize(("x", "out"), APART.values(), ids=APART.keys())
def test_out_may_lie_between_the_elements_of_x(x: NDArray[Any], out: NDArray[Any]) -> None:
    assert np.may_share_memory(x, out)
    x[...] = np.random.default_rng(0).standard_normal(x.shape, F)
    expected = x.copy() @ W.T
    assert cq.linear(x, W, out=out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", APART)
def test_out_may_lie_between_the_elements_of_x_on_a_gpu(name: str) -> None:
    cupy = cq.device.cupy()
    buffer = cupy.zeros(WIDE.shape, F)
    x, out = (
        cupy.ndarray(a.shape, F, buffer.data + (a.ctypes.data - WIDE.ctypes.data), strides=a.strides)
        for a in APART[name]
    )
    x[...] = cupy.random.default_rng(0).standard_normal(x.shape, F)
    expected = x.copy() @ W.to_device("cuda").T
    cq.linear(x, W.to_device("cuda"), out=out)
    cupy.testing.assert_array_equal(out, expected)
    with pytest.raises(ValueError, match="may share memory with x"):
        cq.linear(x, W.to_device("cuda"), out=x[:, 1:7])


class OnGpu:
    """What is asked of a CuPy array, of a NumPy array."""

    def __init__(self, a: NDArray[Any]) -> None:
        self.shape, self.strides, self.itemsize, self.nbytes = a.shape, a.strides, a.itemsize, a.nbytes
        self.flags, self.data = a.flags, SimpleNamespace(ptr=a.ctypes.data)


SLICES = st.builds(slice, st.integers(0, 9), st.integers(1, 12), st.sampled_from([1, 2, 3, -1]))


@given(st.tuples(SLICES, SLICES), st.tuples(SLICES, SLICES), st.sampled_from([np.float32, np.float16]))
def test_overlap_is_exact_on_both_devices(one: Any, other: Any, dtype: Any) -> None:
    buffer = np.zeros((9, 12), F)
    a, b = buffer[one], buffer.view(dtype)[other]
    expected = np.shares_memory(a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "is_cuda", lambda a: True)
        if a.size and b.size:
            assert memory.may_overlap(OnGpu(a), OnGpu(b), True) == expected
    assert memory.may_overlap(a, b, False) == expected
