"""Operands of a product: which are refused, in what words."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_matmul import weight

import cuquant as cq
from cuquant.testing import nmse

F = np.float32
W, X = weight("q4_0", (6, 64)), np.zeros((3, 64), F)


class Table:
    """As pandas has them."""

    def to_numpy(self, dtype: Any = None) -> NDArray[Any]:
        return X


Q = cq.quantize(X, "q8_1")
SQUARE, SQUARE_X = weight("q4_0", (64, 64)), np.zeros((64, 64), F)
STACK = weight("q4_0", (2, 6, 64))
OVERLAP = np.zeros((6, 64), F)
WEIGHT_BYTES = np.zeros(6 * 36, np.uint8)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "contracts N": (
        lambda: np.zeros((3, 6), F) @ W,
        TypeError,
        r"contracts the weight along N, .*: for x @ W write x @ W\.dequantize\(\), or quantize the transpose",
    ),
    "W.T on the left": (
        lambda: W.T @ np.zeros((6, 3), F),
        TypeError,
        r"contracts the weight along N, .*: for W\.T @ x write W\.T\.dequantize\(\) @ x, or quantize the",
    ),
    "W.T of a stack on the left": (lambda: STACK.T @ np.zeros((6, 3), F), TypeError, r"for W\.T @ x write"),
    "two weights": (
        lambda: W @ W.T,
        TypeError,
        r"^both operands are quantized weights, q4_0 array \(6, 64\) and q4_0 array \(6, 64\): dequantize",
    ),
    "two weights of linear": (lambda: cq.linear(W.T, W.T), TypeError, "both operands are quantized weights"),
    "operands swapped": (
        lambda: cq.linear(W, X),
        TypeError,
        r"x is quantized to q4_0, a format of weights, but activations come first: the operands may be "
        r"swapped \(activations are .*, or q8_1 by cuquant\.quantize\(x, 'q8_1'\)\)$",
    ),
    "transposed and swapped": (lambda: cq.linear(W.T, X), TypeError, "the operands may be swapped"),
    "swapped beside q8_1": (lambda: cq.linear(W, Q.T), TypeError, "the operands may be swapped"),
    "transposed activations": (
        lambda: cq.linear(Q.T, W),
        TypeError,
        r"x is a Transposed; .*: its \.dequantize\(\) is one$",
    ),
    "q8_1 as weight": (lambda: X @ Q.T, TypeError, "a format of activations"),
    "q8_1 twice": (lambda: Q @ Q.T, TypeError, "a format of activations"),
    "q8_1 contracts N": (lambda: Q @ W, TypeError, "contracts the weight along N"),
    "q8_1 not transposed": (
        lambda: W @ Q,
        TypeError,
        r"x is quantized along its last axis, but q4_0 array \(6, 64\) @ q8_1 array \(3, 64\) contracts the "
        r"one before: write W @ x\.T$",
    ),
    "q8_1 along M": (
        lambda: W @ cq.quantize(np.ones((64, 96), F), "q8_1"),
        TypeError,
        r"contracts the one before: quantize q, rows \(\.\.\., 64\) of x\.T, and write W @ q\.T$",
    ),
    "a square of q8_1": (
        lambda: W @ cq.quantize(np.ones((64, 64), F), "q8_1"),
        TypeError,
        r"quantize q, rows \(\.\.\., 64\) of x\.T, and write W @ q\.T$",
    ),
    "W.T where W is meant": (
        lambda: cq.linear(X, W.T),
        TypeError,
        r"W is a transposed q4_0 array of shape \(64, 6\); .*: pass W of shape \(6, 64\), or write x @ W\.T",
    ),
    "quantized twice": (
        lambda: cq.linear(Q, W, x_format="q8_1"),
        TypeError,
        "x is quantized to q8_1 already: x_format is for floats",
    ),
    "x in a weight's format": (
        lambda: cq.matmul(X, W.T, x_format="q4_0"),
        ValueError,
        "x_format is 'q4_0'; for activations there is 'q8_1'",
    ),
    "x in no format": (
        lambda: cq.matmul(X, W.T, x_format="q8"),
        ValueError,
        "x_format is 'q8'; for activations",
    ),
    "x of no whole blocks": (
        lambda: cq.linear(np.zeros((2, 40), F), np.zeros((6, 40), F), x_format="q8_1"),
        ValueError,
        r"x has shape \(2, 40\): q8_1 stores blocks of 32 along the last axis, which has 40 elements",
    ),
    "plain @ plain": (
        lambda: cq.matmul(X, X.T),
        TypeError,
        r"no quantized weight on either side: of plain arrays write a @ b, or cuquant\.linear\(x, w\)",
    ),
    "float64": (
        lambda: X.astype(float) @ W.T,
        TypeError,
        r"x has dtype float64; allowed are float16, bfloat16 or float32: pass x\.astype\(numpy\.float32\)",
    ),
    "integers": (
        lambda: X.astype(int) @ W.T,
        TypeError,
        r"x has dtype int64; .* x\.astype\(numpy\.float32\)",
    ),
    "a list": (
        lambda: cq.linear([[0.0] * 64], W),
        TypeError,
        r"x is a list; a NumPy or CuPy array of .*: pass numpy\.asarray\(x, numpy\.float32\)$",
    ),
    "a list of results": (lambda: cq.linear(X, W, out=[0.0]), TypeError, "out is a list; .* is needed$"),
    "complex": (lambda: X.astype(complex) @ W.T, TypeError, "x has dtype complex128"),
    "other byte order": (lambda: X.astype(">f4") @ W.T, TypeError, "x has dtype >f4"),
    "a scalar of NumPy's": (
        lambda: np.float32(1) @ W.T,
        TypeError,
        "x is a scalar of float32; a NumPy or CuPy array of float16, bfloat16 or float32 is needed$",
    ),
    "an integer": (lambda: cq.linear(1, W), TypeError, "x is an int; a NumPy"),
    "a table": (
        lambda: cq.linear(Table(), W),
        TypeError,
        r"x is a Table; .* is needed: pass x\.to_numpy\(numpy\.float32\)",
    ),
    "masked": (lambda: cq.linear(np.ma.masked_array(X), W), TypeError, "x is a masked array"),
    "a scalar": (lambda: cq.linear(np.array(1, F), W), ValueError, "x is a scalar"),
    "K differs": (lambda: X[:, :32] @ W.T, ValueError, r"x \(3, 32\) and W \(6, 64\) differ in K"),
    "K differs on the right": (
        lambda: W @ np.zeros((32, 3), F),
        ValueError,
        r"W \(6, 64\) and x \(32, 3\) do not fit in W @ x, where x is \(64,\) or \(\.\.\., 64, M\), nor in",
    ),
    "x on the wrong side": (
        lambda: W @ X,
        ValueError,
        r"W \(6, 64\) and x \(3, 64\) do not fit in W @ x, .*: write x @ W\.T, which is \(3, 6\)$",
    ),
    "a vector on the left": (lambda: weight("q4_0", (64,)) @ X, ValueError, r"a weight is \(\.\.\., N, K\)"),
    "a scalar on the right": (lambda: W @ np.array(1, F), ValueError, r"W \(6, 64\) and x \(\) do not fit"),
    "W, where W.T is meant": (
        lambda: X @ W,
        TypeError,
        r"ndarray \(3, 64\) @ q4_0 array \(6, 64\) contracts .*: write x @ W\.T, which is \(3, 6\)$",
    ),
    "W.T on the wrong side": (lambda: W.T @ X, TypeError, r"write x @ W\.T, which is \(3, 6\)$"),
    "x @ W of a square W": (
        lambda: X @ SQUARE,
        TypeError,
        r"K: x @ W\.T is another product, of shape \(3, 64\); "
        r"for x @ W write x @ W\.dequantize\(\), or quantize the transpose of W$",
    ),
    "q8_1 @ W of a square W": (
        lambda: Q @ SQUARE,
        TypeError,
        r"K: x @ W\.T is another product, .* write x\.dequantize\(\) @ W\.dequantize\(\), or",
    ),
    "W.T of a square W on the left": (
        lambda: SQUARE.T @ SQUARE_X,
        TypeError,
        r"K: x @ W\.T is another product, .*; for W\.T @ x write W\.T\.dequantize\(\) @ x, or",
    ),
    "W.T of a square W on the wrong side": (
        lambda: SQUARE.T @ X,
        TypeError,
        r"K: write x @ W\.T, which is \(3, 64\)$",
    ),
    "W.T, where W is meant": (
        lambda: W.T @ X.T,
        TypeError,
        r"K: write W @ x, which is \(6, 3\) for x \(64, 3\)$",
    ),
    "x on the wrong side of W": (lambda: X.T @ W, TypeError, r"K: write W @ x, which is \(6, 3\) for"),
    "W.T, where either may be meant": (
        lambda: W.T @ SQUARE_X,
        TypeError,
        r"K: write x @ W\.T, which is \(64, 6\) or W @ x, which is \(6, 64\) for x \(64, 64\)$",
    ),
    "W.T of a stack, where W is meant": (
        lambda: STACK.T @ X.T,
        TypeError,
        r"K: write W @ x, which is \(2, 6, 3\) for x \(64, 3\)$",
    ),
    "W.T and transposed q8_1": (
        lambda: W.T @ cq.quantize(np.zeros((64, 32), F), "q8_1"),
        TypeError,
        r"K: x @ W\.T and W @ x do not$",
    ),
    "neither fits": (lambda: W.T @ np.zeros((5, 7), F), TypeError, r"K: x @ W\.T and W @ x do not$"),
    "a weight as x": (lambda: W.T @ W, TypeError, r"x @ W\.T and W @ x do not$"),
    "a square weight as x": (lambda: SQUARE.T @ SQUARE, TypeError, r"K: x @ W\.T and W @ x do not$"),
    "transposed q8_1": (
        lambda: cq.quantize(SQUARE_X, "q8_1").T @ SQUARE,
        TypeError,
        r"K: x @ W\.T and W @ x do not$",
    ),
    "batch differs on the right": (
        lambda: STACK @ np.zeros((3, 64, 5), F),
        ValueError,
        r"^the leading axes of W \(2, 6, 64\) and x \(3, 64, 5\) do not broadcast$",
    ),
    "batch differs, and x on the wrong side": (
        lambda: STACK @ np.zeros((3, 5, 64), F),
        ValueError,
        r"do not fit in W @ x, .*, nor in x @ W\.T, where their leading axes do not broadcast$",
    ),
    "batch differs": (
        lambda: np.zeros((2, 3, 64), F) @ weight("q4_0", (3, 6, 64)).T,
        ValueError,
        r"axes of x \(2, 3, 64\) and W \(3, 6, 64\) do not broadcast",
    ),
    "a vector as weight": (
        lambda: cq.linear(X, weight("q4_0", (64,))),
        ValueError,
        r"a weight is \(\.\.\., N, K\)",
    ),
    "activation": (
        lambda: cq.linear(X, W, activation="tanh"),
        ValueError,
        "unknown activation 'tanh'; allowed",
    ),
    "bias shape": (
        lambda: cq.linear(X, W, bias=np.zeros(7, F)),
        ValueError,
        r"bias has shape \(7,\); for W \(6, 64\) it is \(6,\)$",
    ),
    "bias of another stack": (
        lambda: cq.linear(X, weight("q4_0", (3, 6, 64)), bias=np.zeros((2, 6), F)),
        ValueError,
        r"bias has shape \(2, 6\); .* \(6,\) or \(3, 6\)",
    ),
    "bias dtype": (lambda: cq.linear(X, W, bias=np.zeros(6)), TypeError, "bias has dtype float64"),
    "residual shape": (lambda: cq.linear(X, W, residual=np.zeros((6,), F)), ValueError, "residual has shape"),
    "residual dtype": (
        lambda: cq.linear(X, W, residual=np.zeros((3, 6))),
        TypeError,
        "residual has dtype float64",
    ),
    "dtype": (lambda: cq.linear(X, W, dtype="float64"), TypeError, "dtype float64 is not one of"),
    "out shape": (lambda: cq.linear(X, W, out=np.zeros((6, 3), F)), ValueError, r"out has shape \(6, 3\)"),
    "out of a product from the left": (
        lambda: cq.matmul(W, X.T, out=np.zeros((3, 6), F)),
        ValueError,
        r"out has shape \(3, 6\); the result has \(6, 3\)",
    ),
    "out of one axis": (
        lambda: cq.matmul(W, X.T, out=np.zeros(6, F)),
        ValueError,
        r"out has shape \(6,\); the result has \(6, 3\)",
    ),
    "activations": (
        lambda: cq.linear(X, W, activation=np.array(["relu", "silu"])),  # type: ignore[arg-type]
        ValueError,
        "unknown activation array",
    ),
    "out dtype": (
        lambda: cq.linear(X, W, out=np.zeros((3, 6))),
        TypeError,
        r"out has dtype float64; allowed are .* float32: make it with dtype=numpy\.float32$",
    ),
    "a dtype's NumPy name": (
        lambda: cq.linear(X, W, dtype="f8"),
        TypeError,
        r"dtype 'f8' \(NumPy's float64\) is not one of",
    ),
    "out and dtype": (
        lambda: cq.linear(X, W, out=np.zeros((3, 6), F), dtype=np.float16),
        TypeError,
        "out has dtype float32, but dtype=float16",
    ),
    "out read-only": (
        lambda: cq.linear(X, W, out=np.broadcast_to(F(0), (3, 6))),
        ValueError,
        "out is read-only",
    ),
    "out is x": (
        lambda: cq.linear(OVERLAP[:, :64], W, out=OVERLAP[:, :6]),
        ValueError,
        "may share memory with x",
    ),
    "out is x of W @ x": (
        lambda: cq.matmul(W, OVERLAP.T[:, :3], out=OVERLAP.reshape(-1)[100:118].reshape(6, 3)),
        ValueError,
        "may share memory with x",
    ),
    "out overlaps itself": (
        lambda: cq.linear(X, W, out=np.lib.stride_tricks.as_strided(np.zeros(6, F), (3, 6), (0, 4))),
        ValueError,
        "several elements in one place",
    ),
    "out is q8_1 x": (
        lambda: cq.linear(Q, W, out=Q.storage.reshape(-1)[:72].view(F).reshape(3, 6)),
        ValueError,
        "may share memory with x",
    ),
    "out is W": (
        lambda: cq.linear(
            X, cq.from_blocks(WEIGHT_BYTES, "q4_0", (6, 64)), out=WEIGHT_BYTES[72:144].view(F).reshape(3, 6)
        ),
        ValueError,
        "may share memory with W",
    ),
    "out is dense W": (
        lambda: cq.linear(X, OVERLAP, out=OVERLAP[:3, :6]),
        ValueError,
        "may share memory with W",
    ),
    "out is residual of another type": (
        lambda: cq.linear(X, W, residual=OVERLAP.view(np.float16)[:3, :12:2], out=OVERLAP[:3, :6]),
        ValueError,
        "may share memory with residual",
    ),
    "out is bias": (
        lambda: cq.linear(X, W, bias=OVERLAP[0, :6], out=OVERLAP[:3, :6]),
        ValueError,
        "may share memory with bias",
    ),
    "out shifted residual": (
        lambda: cq.linear(X, W, residual=OVERLAP[:3, 1:7], out=OVERLAP[:3, :6]),
        ValueError,
        "may share memory with residual",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_what_is_advised_instead_can_be_computed() -> None:
    x = np.random.default_rng(0).standard_normal((3, 64), F)
    q, expected = cq.quantize(x, "q8_1"), x @ SQUARE.dequantize()
    transpose = cq.quantize(SQUARE.T.dequantize(), "q8_0")
    for y in (x @ transpose.T, q @ transpose.T, q.dequantize() @ SQUARE.dequantize()):
        assert nmse(y, expected) < 1e-3
    np.testing.assert_allclose(SQUARE.T.dequantize() @ x.T, expected.T, rtol=0, atol=1e-4)
    assert (STACK.T.dequantize() @ np.zeros((6, 3), F)).shape == (2, 64, 3)


@pytest.mark.gpu
def test_mixed_devices_are_refused(xp: ModuleType) -> None:
    cupy = cq.device.cupy()
    with pytest.raises(TypeError, match="operands are on different devices: x on cpu, W on cuda"):
        cq.linear(X, W.to_device("cuda"))
    with pytest.raises(TypeError, match="different devices"):
        cq.linear(cupy.asarray(X), W)


PRODUCTS: list[Any] = [lambda df, w: df @ w.T, lambda df, w: np.matmul(df, w.T), lambda df, w: df.T @ w]


@pytest.mark.parametrize("product", PRODUCTS)
def test_tables_of_pandas_are_named(product: Any) -> None:
    """They ask for W's numbers: the error says what x has to be."""
    table = pytest.importorskip("pandas").DataFrame(X)
    with pytest.raises(
        TypeError, match=r"packed blocks, .*x is an array, no table of pandas: write x\.to_numpy"
    ):
        product(table, W)


def test_without_pandas_no_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    with pytest.raises(TypeError, match=r"\.dequantize\(\) for the numbers, \.blocks for the bytes$"):
        np.asarray(W)


class Own:
    """What has a product of its own."""

    def __matmul__(self, other: Any) -> Any:
        return self, other

    def __rmatmul__(self, other: Any) -> Any:
        return other, self


class Tensor(Own):
    """The same, whose memory is shared."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class NotShared(Tensor):
    """Memory that its library gives to nobody, as that of tensors that need gradients."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("call detach() first")


def test_memory_that_is_not_shared() -> None:
    with pytest.raises(TypeError, match=r"^x: NumPy cannot take this NotShared: call detach\(\) first$"):
        cq.linear(NotShared(X), W)


def test_other_classes_multiply_themselves() -> None:
    """As NumPy's arrays let them; but not arrays of other libraries."""
    own = Own()
    for w in (W, W.T):
        assert w @ own == (w, own)
        assert own @ w == (own, w)
    np.testing.assert_array_equal(W @ Tensor(X[0]), W @ X[0])
    with pytest.raises(TypeError, match="x is an Own"):
        cq.matmul(W, own)
    for other in (object(), [1.0], 3):
        with pytest.raises(TypeError, match=f"x is an? {type(other).__name__}; a NumPy or CuPy array"):
            W @ other
