"""Products with quantized weights against float64, on every backend."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import NAMES, random_blocks
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing
from cuquant.testing import BOUNDS, as_numpy, nmse, worst_element

F = np.float32
KINDS = ["float16", "bfloat16", "float32", "q8_1"]


def dtype_of(kind: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if kind == "bfloat16" else np.dtype(kind)


@cache
def weight(name: str, shape: tuple[int, ...]) -> cq.QuantizedArray:
    return cq.quantize(np.random.default_rng(1).standard_normal(shape, F), name)


def on(xp: ModuleType, w: cq.QuantizedArray) -> cq.QuantizedArray:
    return cq.from_blocks(xp.asarray(w.blocks), w.format, w.shape)


def activations(
    kind: str, shape: tuple[int, ...], xp: ModuleType, magnitude: float = 1, seed: int = 0
) -> Any:
    x = np.random.default_rng(seed).standard_normal(shape, F) * F(magnitude)
    if kind == "q8_1":
        return on(xp, cq.quantize(x, "q8_1"))
    return xp.asarray(x.astype(dtype_of(kind)))


def check(y: Any, reference: NDArray[Any], kind: str) -> None:
    """The promise of the activation type, where there are enough outputs for a mean to mean something."""
    bound, element = BOUNDS[dtype_of("float32" if kind == "q8_1" else kind)]
    if reference.size >= 64:
        assert nmse(y, reference) <= bound
    assert worst_element(y, reference) <= element or reference.shape[-1] < 8
    assert not testing.is_poison(y).any()


SHAPES = [
    (1, 1, 32),
    (1, 64, 96),
    (3, 33, 128),
    (8, 130, 256),
    (9, 300, 64),
    (16, 48, 2112),
    (17, 100, 160),
    (70, 257, 320),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_activation_and_shape(name: str, kind: str, xp: ModuleType) -> None:
    for m, n, k in SHAPES:
        w, x = on(xp, weight(name, (n, k))), activations(kind, (m, k), xp)
        y = x @ w.T
        assert isinstance(y, xp.ndarray)
        assert y.dtype == (F if kind == "q8_1" else x.dtype)
        check(y, testing.linear(x, w), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_several_slabs(kind: str, xp: ModuleType) -> None:
    w, x = on(xp, weight("q4_0", (700, 2048))), activations(kind, (5, 2048), xp)
    check(x @ w.T, testing.linear(x, w), kind)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_magnitudes_of_activations(name: str, magnitude: float, xp: ModuleType) -> None:
    w = on(xp, weight(name, (96, 256)))
    for kind in ("float32", "bfloat16"):
        for m in (2, 40):
            x = activations(kind, (m, 256), xp, magnitude)
            check(x @ w.T, testing.linear(x, w), kind)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [6e-8, 3e-5, 6e4])
def test_magnitudes_of_scales(name: str, scale: float, xp: ModuleType) -> None:
    """Scales at both ends of float16: subnormal, small, and near its largest."""
    blocks = random_blocks(name, (64, 256), finite=True)
    records = blocks.view(cq.formats.get(name).storage)
    for field in cq.formats.get(name).scales:
        records[field] = np.float16(scale)
    w = on(xp, cq.from_blocks(blocks, name, (64, 256)))
    for kind in ("float32", "q8_1"):
        for m in (2, 40):
            x = activations(kind, (m, 256), xp)
            check(x @ w.T, testing.linear(x, w), kind)


@pytest.mark.parametrize("name", NAMES)
def test_q8_1_activations_lose_what_8_bits_lose(name: str, xp: ModuleType) -> None:
    w = on(xp, weight(name, (256, 512)))
    x = np.random.default_rng(3).standard_normal((32, 512), F)
    error = nmse(cq.quantize(xp.asarray(x), "q8_1") @ w.T, testing.linear(x, w))
    assert 5e-6 < error < 5e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_sum_is_never_read(name: str, xp: ModuleType) -> None:
    w, x = (
        on(xp, weight(name, (64, 256))),
        cq.quantize(np.random.default_rng(3).standard_normal((3, 256), F), "q8_1"),
    )
    poisoned = x.blocks.copy()
    poisoned.view(x.format.storage)["s"] = [np.nan, np.inf] * 4
    y, z = on(xp, x) @ w.T, on(xp, cq.from_blocks(poisoned, "q8_1", x.shape)) @ w.T
    np.testing.assert_array_equal(as_numpy(y), as_numpy(z))


LEADING = [
    ((64,), (5, 64)),
    ((4, 64), (5, 64)),
    ((2, 3, 4, 64), (5, 64)),
    ((64,), (3, 5, 64)),
    ((4, 64), (3, 5, 64)),
    ((3, 4, 64), (3, 5, 64)),
    ((1, 4, 64), (3, 5, 64)),
    ((3, 4, 64), (1, 5, 64)),
    ((2, 1, 4, 64), (3, 5, 64)),
    ((2, 3, 1, 64), (2, 3, 5, 64)),
    ((2, 3, 4, 64), (2, 1, 5, 64)),
    ((2, 3, 20, 64), (3, 5, 64)),
    ((0, 64), (5, 64)),
    ((2, 0, 64), (5, 64)),
    ((4, 64), (0, 64)),
    ((0, 4, 64), (0, 5, 64)),
]


@pytest.mark.parametrize(("left", "right"), LEADING, ids=str)
def test_leading_axes_as_in_numpy(left: tuple[int, ...], right: tuple[int, ...], xp: ModuleType) -> None:
    w = on(xp, weight("q5_1", right))
    for kind in ("float16", "float32", "q8_1"):
        x = activations(kind, left, xp)
        y, reference = x @ w.mT, testing.linear(x, w)
        assert y.shape == reference.shape
        check(y, reference, kind)


def test_weight_on_the_left(xp: ModuleType) -> None:
    w = on(xp, weight("q8_0", (40, 96)))
    stack = on(xp, weight("q4_0", (3, 40, 96)))
    x = activations("float32", (96, 7), xp)
    dense = as_numpy(w).astype(np.float64)
    check((w @ x).T, (dense @ as_numpy(x)).T, "float32")
    check(w @ x[:, 0], dense @ as_numpy(x)[:, 0], "float32")
    check((stack @ x).swapaxes(-1, -2), testing.linear(as_numpy(x).T, stack), "float32")
    q = activations("q8_1", (7, 96), xp)
    check((w @ q.T).T, testing.linear(q, w), "q8_1")
    out = xp.full((40, 7), np.nan, F)
    assert cq.matmul(w, x, out=out) is out
    check(out.T, (dense @ as_numpy(x)).T, "float32")


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_erf", "silu"])
@pytest.mark.parametrize("m", [1, 5, 16, 50])
def test_epilogue(activation: str | None, m: int, xp: ModuleType) -> None:
    g = np.random.default_rng(5)
    w = on(xp, weight("q4_1", (72, 128)))
    x = activations("float32", (m, 128), xp, 0.2)
    bias = xp.asarray(g.standard_normal(72, F).astype(np.float16))
    residual = xp.asarray(g.standard_normal((m, 72), F).astype(ml_dtypes.bfloat16))
    reference = testing.linear(x, w, bias=bias, activation=activation, residual=residual)
    y = cq.linear(x, w, bias=bias, activation=activation, residual=residual)
    check(y, reference, "float32")
    half = cq.linear(x, w, bias=bias, activation=activation, residual=residual, dtype=np.float16)
    np.testing.assert_array_equal(as_numpy(half), as_numpy(y).astype(np.float16))


def test_biases_of_a_stack(xp: ModuleType) -> None:
    w, x = on(xp, weight("q8_0", (3, 40, 64))), activations("float32", (3, 4, 64), xp)
    bias = xp.asarray(np.random.default_rng(0).standard_normal((3, 40), F))
    check(cq.linear(x, w, bias=bias), testing.linear(x, w, bias=bias), "float32")
    check(cq.linear(x, w, bias=bias[0]), testing.linear(x, w, bias=bias[0]), "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("m", "n"), [(1, 33), (16, 100), (40, 70)])
def test_out_is_written_and_nothing_else(m: int, n: int, strided: bool, kind: str, xp: ModuleType) -> None:
    w, x = on(xp, weight("q5_0", (n, 96))), activations(kind, (m, 96), xp)
    for dtype in BOUNDS:
        guarded = testing.Guarded((m, n), dtype, strided=strided, xp=xp)
        assert cq.matmul(x, w.T, out=guarded.array) is guarded.array
        assert not testing.is_poison(guarded.array).any()
        reference = as_numpy(cq.matmul(x, w.T, dtype=dtype))
        np.testing.assert_array_equal(as_numpy(guarded.array), reference)
        assert guarded.intact()


def test_residual_may_be_out(xp: ModuleType) -> None:
    w, x = on(xp, weight("q8_0", (64, 64))), activations("float32", (5, 64), xp)
    h = activations("float32", (5, 64), xp, seed=9)
    expected = testing.linear(x, w, residual=h)
    assert cq.linear(x, w, residual=h, out=h) is h
    check(h, expected, "float32")


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("m", [4, 40])
def test_strided_activations(kind: str, m: int, xp: ModuleType) -> None:
    w = on(xp, weight("q4_0", (48, 64)))
    base = activations(kind, (2 * m, 160), xp)
    views = {
        "rows": base[::2, :64],
        "columns": base[:m, 1:129:2],
        "offset": base[:m, 3:67],
        "reversed": base[::-2, 63::-1],
        "transposed": activations(kind, (64, m), xp).T,
        "broadcast": xp.broadcast_to(base[:1, :64], (m, 64)),
        "batch": xp.moveaxis(activations(kind, (64, 3, m), xp), 0, -1),
    }
    for how, x in views.items():
        before = as_numpy(x).copy()
        y = as_numpy(x @ w.T)
        np.testing.assert_array_equal(y, as_numpy(xp.ascontiguousarray(x) @ w.T), err_msg=how)
        check(y, testing.linear(x, w), kind)
        np.testing.assert_array_equal(as_numpy(x), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [4, 40])
def test_nan_and_infinity_stay_in_their_rows(kind: str, m: int, xp: ModuleType) -> None:
    x = np.random.default_rng(0).standard_normal((m, 128), F)
    x[1, 5], x[2, 77] = np.nan, np.inf
    a = cq.quantize(xp.asarray(x), "q8_1") if kind == "q8_1" else xp.asarray(x.astype(dtype_of(kind)))
    for name in NAMES:
        y = as_numpy(a @ on(xp, weight(name, (40, 128))).T).astype(F)
        assert not np.isfinite(y[[1, 2]]).any()
        assert np.isfinite(np.delete(y, [1, 2], axis=0)).all()


def test_infinite_scales_stay_in_their_rows(xp: ModuleType) -> None:
    for name in NAMES:
        blocks = weight(name, (40, 64)).blocks.copy()
        blocks.view(weight(name, (40, 64)).format.storage)["d"][7, 1] = np.nan
        for m in (4, 40):
            y = as_numpy(
                activations("float32", (m, 64), xp) @ on(xp, cq.from_blocks(blocks, name, (40, 64))).T
            )
            assert np.isnan(y[:, 7]).all()
            assert np.isfinite(np.delete(y, 7, axis=1)).all()


def test_same_bits_every_time(xp: ModuleType) -> None:
    for m in (1, 16, 64):
        w, x = on(xp, weight("q4_0", (128, 1024))), activations("float16", (m, 1024), xp)
        first = as_numpy(x @ w.T)
        for _ in range(100 if xp is not np else 3):
            np.testing.assert_array_equal(as_numpy(x @ w.T), first)


def test_dense_weights(xp: ModuleType) -> None:
    for dtype in BOUNDS:
        w = activations("float32", (3, 40, 64), xp).astype(dtype)
        x = activations("float32", (3, 7, 64), xp)
        bias = activations("float32", (3, 40), xp)
        y = cq.linear(x, w, bias=bias, activation="silu", residual=xp.ones((3, 7, 40), F))
        check(y, testing.linear(x, w, bias=bias, activation="silu", residual=np.ones((3, 7, 40))), "float32")
        check(cq.linear(x[0], w[1]), testing.linear(x[0], w[1]), "float32")
        q = activations("q8_1", (7, 64), xp)
        check(cq.linear(q, w[0]), testing.linear(q, w[0]), "q8_1")


W, X = weight("q4_0", (6, 64)), np.zeros((3, 64), F)
OVERLAP = np.zeros((6, 64), F)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "contracts N": (lambda: np.zeros((3, 6), F) @ W, TypeError, "contracts the weight along N"),
    "W.T on the left": (lambda: W.T @ np.zeros((6, 3), F), TypeError, "contracts the weight along N"),
    "two weights": (lambda: W @ W.T, TypeError, "x is quantized to q4_0; activations are"),
    "q8_1 as weight": (lambda: X @ cq.quantize(X, "q8_1").T, TypeError, "a format of activations"),
    "plain @ plain": (lambda: cq.matmul(X, X.T), TypeError, "no quantized weight on either side"),
    "float64": (lambda: X.astype(float) @ W.T, TypeError, "x has dtype float64"),
    "integers": (lambda: X.astype(int) @ W.T, TypeError, "x has dtype int64"),
    "a list": (lambda: cq.linear([[0.0] * 64], W), TypeError, "x is a list"),
    "a scalar": (lambda: cq.linear(np.array(1, F), W), ValueError, "x is a scalar"),
    "K differs": (lambda: X[:, :32] @ W.T, ValueError, r"x \(3, 32\) and W \(6, 64\) differ in K"),
    "batch differs": (
        lambda: np.zeros((2, 3, 64), F) @ weight("q4_0", (3, 6, 64)).T,
        ValueError,
        "do not broadcast",
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
        r"bias has shape \(7,\); .* \(6,\)",
    ),
    "bias dtype": (lambda: cq.linear(X, W, bias=np.zeros(6)), TypeError, "bias has dtype float64"),
    "residual shape": (lambda: cq.linear(X, W, residual=np.zeros((6,), F)), ValueError, "residual has shape"),
    "dtype": (lambda: cq.linear(X, W, dtype="float64"), TypeError, "dtype float64 is not one of"),
    "out shape": (lambda: cq.linear(X, W, out=np.zeros((6, 3), F)), ValueError, r"out has shape \(6, 3\)"),
    "out dtype": (lambda: cq.linear(X, W, out=np.zeros((3, 6))), TypeError, "out has dtype float64"),
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


class Foreign:
    """An array of another library, known by DLPack alone."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_foreign_arrays() -> None:
    x, out = np.random.default_rng(0).standard_normal((3, 64), F), np.full((3, 6), np.nan, F)
    given = Foreign(out)
    assert cq.linear(Foreign(x), W, out=given) is given
    np.testing.assert_array_equal(out, x @ W.T)
    np.testing.assert_array_equal(cq.quantize(Foreign(x), "q8_0").blocks, cq.quantize(x, "q8_0").blocks)


@pytest.mark.gpu
def test_mixed_devices_are_refused(xp: ModuleType) -> None:
    cupy = cq.device.cupy()
    with pytest.raises(TypeError, match="operands are on different devices: x on cpu, W on cuda"):
        cq.linear(X, W.to_device("cuda"))
    with pytest.raises(TypeError, match="different devices"):
        cq.linear(cupy.asarray(X), W)
