"""Products like one before take a shorter way on the host: with the same results, and no error less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from products import gauss

import cuquant as cq
from cuquant import check, cuda, device, testing
from cuquant.testing import nmse

pytestmark = pytest.mark.gpu


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products were checked, and how many repeated."""
    counts = [0, 0]

    def counting(at: int, real: Any) -> Any:
        def called(*args: Any) -> Any:
            counts[at] += 1
            return real(*args)

        return called

    monkeypatch.setattr(cuda, "product", counting(0, cuda.product))
    monkeypatch.setattr(cuda, "repeat", counting(1, cuda.repeat))
    return counts


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0", "q4_k", "kbit3", "nvfp4", cq.Trellis(2)], ids=str)
def test_what_is_like_a_product_before_is_not_checked_again(counted: list[int], fmt: Any) -> None:
    cupy = device.cupy()
    w = cq.quantize(gauss((96, 512)), fmt).to_device("cuda")
    for m in (1, 3, 40):
        before = list(counted)
        for seed in range(4):
            x = cupy.asarray(gauss((m, 512), seed).astype(np.float16))
            y = cupy.full((m, 96), np.nan, np.float16)
            given = x @ w.T if seed % 2 else cq.matmul(x, w.T, out=y)
            assert (given is y) == (seed % 2 == 0)
            assert given.dtype == np.float16
            assert nmse(given, testing.linear(x, w)) < 1e-6, (m, seed)
        converted = m == 40 and not isinstance(fmt, str)  # signs: rows that are made first are always checked
        assert [counted[0] - before[0], counted[1] - before[1]] == ([4, 0] if converted else [1, 3])


def test_only_what_is_alike_is_repeated(counted: list[int]) -> None:
    """Other dtypes, strides, results, epilogues and memory are products, and errors, of their own."""
    cupy = device.cupy()
    w = cq.quantize(gauss((64, 256)), "q4_0").to_device("cuda")
    x = cupy.asarray(gauss((2, 256)).astype(np.float16))
    y = cupy.empty((2, 64), np.float16)
    expected = testing.linear(x, w)
    cq.matmul(x, w.T, out=y)
    wide = cupy.zeros((4, 256), np.float16)
    wide[::2] = x
    memory = cupy.zeros(2 * 256 + 8, np.float16)
    odd = memory[4:-4].reshape(2, 256)  # 8 bytes off
    odd[...] = x
    bias = cupy.ones(64, np.float16)
    for other, kwargs, add in (
        (x.astype(np.float32), {}, 0),
        (wide[::2], {}, 0),
        (odd, {}, 0),
        (x, {"bias": bias}, 1),
        (x, {"dtype": np.float32}, 0),
        (x, {"residual": cupy.ones((2, 64), np.float16)}, 1),
        (cq.quantize(x.astype(np.float32), "q8_1"), {}, None),
    ):
        got = cq.linear(other, w, **kwargs)
        reference = testing.linear(other, w) if add is None else expected + add
        assert nmse(got, reference) < 1e-6
    assert nmse(cq.matmul(x, w.T, out=cupy.empty((2, 128), np.float16)[:, ::2]), expected) < 1e-6
    assert counted[1] == 0
    assert nmse(cq.matmul(x, w.T, out=y), expected) < 1e-6
    assert counted[1] == 1
    both = cupy.zeros(2 * 256 + 2 * 64, np.float16)
    mine, result = both[:512].reshape(2, 256), both[384:512].reshape(2, 64)  # in x's last row
    mine[...] = x
    with pytest.raises(ValueError, match="share memory with x"):
        cq.matmul(mine, w.T, out=result)
    kept = w.storage[: 2 * 64 * 2].view(np.float16).reshape(2, 64)
    with pytest.raises(ValueError, match="share memory with W"):
        cq.matmul(x, w.T, out=kept)
    with pytest.raises(TypeError, match="different devices"):
        cq.matmul(x, w.T, out=np.empty((2, 64), np.float16))
    with pytest.raises(ValueError, match="out has shape"):
        cq.matmul(x, w.T, out=cupy.empty((2, 63), np.float16))
    assert counted[1] == 1
    assert nmse(mine @ w.T, expected) < 1e-6  # beside each other they may lie
    assert nmse(cq.matmul(mine, w.T, out=both[512:].reshape(2, 64)), expected) < 1e-6
    assert counted[1] == 3


def test_vectors_and_stacks(counted: list[int]) -> None:
    """A vector is checked each time, though its product as a row is known."""
    cupy = device.cupy()
    w = cq.quantize(gauss((3, 64, 256)), "q5_1").to_device("cuda")
    x = cupy.asarray(gauss((3, 2, 256)).astype(np.float16))
    for _ in range(2):
        assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6
    assert counted == [1, 1]
    row = x[0, 0]
    for _ in range(2):
        assert nmse(row @ w[0].T, testing.linear(row, w[0])) < 1e-6
    assert counted == [3, 1]


def test_a_weight_knows_so_many(counted: list[int]) -> None:
    from cuquant import repeats

    cupy = device.cupy()
    w = cq.quantize(gauss((16, 32)), "q4_0").to_device("cuda")
    known = w.fragments().repeats
    for m in range(1, repeats._MOST):
        y = cupy.empty((m, 16), check.FLOATS[0])
        cq.matmul(cupy.zeros((m, 32), np.float16), w.T, out=y)
        assert len(known) <= repeats._MOST + 1
    assert len(known) > 0
