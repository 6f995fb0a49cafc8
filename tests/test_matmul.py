"""Products with quantized weights against float64, on every backend."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import NAMES, ON_GPU, random_blocks
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, testing
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
    """The promise of the activation type; the mean only where it is over enough outputs to mean much."""
    bound, element = BOUNDS[dtype_of("float32" if kind == "q8_1" else kind)]
    if not device.is_cuda(y) and y.dtype == F:
        bound = 1e-11  # float32 throughout: the NumPy backend rounds nothing below it
    if reference.size >= 64:
        assert nmse(y, reference) <= bound
    assert worst_element(y, reference) <= element
    assert not testing.is_poison(y).any()


def test_measures_of_error() -> None:
    ref = np.array([[3, 4], [0, 0]], F)
    assert nmse(ref + F(0.5), ref) == pytest.approx(4 * 0.25 / 25)
    assert worst_element(np.where(ref == 4, F(4.5), ref), ref) == pytest.approx(0.5 / np.sqrt(12.5))
    assert worst_element(ref + F(1e-9), ref) == np.inf  # a row that must be exactly zero
    assert nmse(0 * ref, 0 * ref) == worst_element(ref, ref) == 0
    assert nmse(ref, 0 * ref) == np.inf
    for bad in (np.nan, np.inf):
        broken = np.where(ref == 4, F(bad), ref)
        for y, r in ((broken, ref), (ref, broken), (broken, broken), (broken, 0 * ref)):
            assert not nmse(y, r) <= 1e30
            assert not worst_element(y, r) <= 1e30
    for measure in (nmse, worst_element):
        with pytest.raises(ValueError, match=r"y has shape \(1, 2\), the reference \(2, 2\)"):
            measure(ref[:1], ref)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (0, 4)], ids=str)
def test_guarded_arrays(shape: tuple[int, ...], strided: bool, xp: ModuleType) -> None:
    for dtype in BOUNDS:
        guarded = testing.Guarded(shape, dtype, strided=strided, xp=xp)
        assert guarded.array.shape == shape
        assert guarded.array.dtype == dtype
        assert testing.is_poison(guarded.array).all()
        assert np.isnan(as_numpy(guarded.array).astype(F)).all()
        guarded.array[...] = 0
        assert guarded.intact()
        assert not testing.is_poison(guarded.array).any()


@pytest.mark.parametrize("strided", [False, True])
def test_writes_beyond_a_guarded_array_show(strided: bool, xp: ModuleType) -> None:
    for offset, noticed in ((3, False), (4, strided), (12 + 10 * strided, True), (-1, True)):
        guarded = testing.Guarded((3, 4), F, padding=5, strided=strided, xp=xp)
        step = 4 if offset > 0 else -4
        xp.lib.stride_tricks.as_strided(guarded.array, (abs(offset) + 1,), (step,))[-1] = 0
        assert guarded.intact() != noticed


ACTIVATION_VALUES = {  # at -1, 1 and 3, from the definitions' series to ten digits
    "relu": (0, 1, 3),
    "gelu": (-0.1588079931, 0.8411920069, 2.9963626304),
    "gelu_erf": (-0.1586552539, 0.8413447461, 2.9959503059),
    "silu": (-0.2689414214, 0.7310585786, 2.8577223804),
}


@pytest.mark.parametrize("name", ACTIVATION_VALUES)
def test_activations_of_known_values(name: str, xp: ModuleType) -> None:
    x = xp.asarray(np.array([[-1], [1], [3]], F) * np.eye(1, 32, dtype=F))
    w = on(xp, cq.from_blocks(b"\x00\x3c\x01" + bytes(31), "q8_0", (1, 32)))  # 1, 0, 0, ...
    for y in (testing.linear(x, w, activation=name), as_numpy(cq.linear(x, w, activation=name))):
        np.testing.assert_allclose(y[:, 0], ACTIVATION_VALUES[name], rtol=2e-6)


SHAPES = [
    (1, 1, 32),
    (9, 1, 128),
    (1, 64, 96),
    (2, 17, 32),
    (3, 33, 128),
    (8, 130, 256),
    (9, 300, 64),
    (16, 48, 2112),
    (17, 100, 160),
    (70, 257, 320),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ON_GPU)
def test_every_format_activation_and_shape(name: str, kind: str, xp: ModuleType) -> None:
    for m, n, k in SHAPES:
        w, x = on(xp, weight(name, (n, k))), activations(kind, (m, k), xp)
        y = x @ w.T
        assert isinstance(y, xp.ndarray)
        assert y.dtype == (F if kind == "q8_1" else x.dtype)
        check(y, testing.linear(x, w), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_several_slabs(kind: str, xp: ModuleType) -> None:
    """The NumPy backend converts 512 rows of this K at a time: each slab has its part of every operand."""
    w, x = on(xp, weight("q4_0", (2, 700, 2048))), activations(kind, (2, 5, 2048), xp)
    bias = activations("float32", (2, 700), xp, 50, seed=3)
    residual = activations("float32", (2, 5, 700), xp, 50, seed=4)
    y = cq.linear(x, w, bias=bias, residual=residual)
    check(y, testing.linear(x, w, bias=bias, residual=residual), kind)
    check(cq.linear(x[0], w[1]), testing.linear(x[0], w[1]), kind)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1, 1e30])
@pytest.mark.parametrize("name", ON_GPU)
def test_magnitudes_of_activations(name: str, magnitude: float, xp: ModuleType) -> None:
    w = on(xp, weight(name, (96, 256)))
    for kind in ("float32", "bfloat16"):
        for m in (2, 40):
            x = activations(kind, (m, 256), xp, magnitude)
            check(x @ w.T, testing.linear(x, w), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_give_zeros(kind: str, xp: ModuleType) -> None:
    w = on(xp, weight("q4_1", (40, 64)))
    for m in (1, 20):
        assert not as_numpy(activations(kind, (m, 64), xp, 0) @ w.T).astype(F).any()


def test_results_beyond_float16_are_infinite_as_in_numpy(xp: ModuleType) -> None:
    x = xp.asarray(np.array([[1000], [-1000], [2000], [1e-8]], np.float16) * np.ones((1, 64), np.float16))
    w = on(xp, cq.quantize(np.ones((3, 64), F), "q8_0"))
    y, exact = as_numpy(x @ w.T), as_numpy(cq.matmul(x, w.T, dtype=F))
    assert np.isfinite(exact).all()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, exact.astype(np.float16))
    assert (np.isposinf(y[2]) & np.isfinite(y[:2]).all()).all()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_erf", "silu"])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_numpy_s_strictest_errors_change_nothing(kind: str, activation: str | None) -> None:
    """Infinity and 0 of what is too large or small are results, which `numpy.seterr` makes no errors of."""
    w = weight("q4_0", (40, 64))
    for size in (1e-38, 1e-7, 1, 100, 1e4, 1e30):
        with np.errstate(all="ignore"):
            x = activations(kind, (3, 64), np, size)
            expected = [cq.linear(x, w, activation=activation), cq.matmul(x, w.T, dtype=np.float16)]
        with np.errstate(all="raise"):
            made = [cq.linear(x, w, activation=activation), cq.matmul(x, w.T, dtype=np.float16)]
        assert [y.tobytes() for y in made] == [y.tobytes() for y in expected]
        assert np.isfinite(made[1]).all() == (size < 1e4)


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


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_a_product_can_quantize_x(kind: str, xp: ModuleType) -> None:
    w, x = on(xp, weight("q4_1", (10, 64))), activations(kind, (3, 64), xp)
    q = cq.quantize(x, "q8_1")
    for y, expected in (
        (cq.matmul(x, w.T, x_format="q8_1"), q @ w.T),
        (cq.matmul(x[1], w.T, x_format=q.format), q[1] @ w.T),
        (cq.matmul(w, x.T, x_format="q8_1"), (q @ w.T).T),
        (
            cq.linear(x, w.dequantize(F), x_format="q8_1", dtype="float16"),
            cq.linear(q, w.dequantize(F), dtype="float16"),
        ),
    ):
        assert y.dtype == expected.dtype
        np.testing.assert_array_equal(as_numpy(y), as_numpy(expected))
    out = xp.empty((10, 3), F)
    assert cq.matmul(w, x.T, out=out, x_format="q8_1") is out
    np.testing.assert_array_equal(as_numpy(out).T, as_numpy(q @ w.T))


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
        y, reference = x @ w.mT, np.matmul(as_numpy(x), as_numpy(w).swapaxes(-1, -2), dtype=np.float64)
        assert y.shape == reference.shape
        check(y, reference, kind)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((5, 64), (64,)),
        ((5, 64), (64, 3)),
        ((5, 64), (2, 64, 3)),
        ((2, 5, 64), (64,)),
        ((2, 5, 64), (64, 3)),
        ((2, 1, 5, 64), (3, 64, 4)),
        ((5, 64), (64, 0)),
    ],
    ids=str,
)
def test_leading_axes_with_the_weight_on_the_left(
    left: tuple[int, ...], right: tuple[int, ...], xp: ModuleType
) -> None:
    w, x = on(xp, weight("q5_0", left)), activations("float32", right, xp)
    reference = np.matmul(as_numpy(w), as_numpy(x), dtype=np.float64)
    out = xp.full(reference.shape, np.nan, F)
    assert cq.matmul(w, x, out=out) is out
    for y in (w @ x, out):
        assert y.shape == reference.shape
        check(by_row(y, len(right)), by_row(reference, len(right)), "float32")
    half = cq.matmul(w, x, dtype=np.float16)
    assert half.dtype == np.float16
    check(by_row(half, len(right)), by_row(reference, len(right)), "float16")


def by_row(y: Any, axes_of_x: int) -> Any:
    """W @ x as the bounds see it: a row of outputs for each column of x."""
    return y if axes_of_x == 1 else y.swapaxes(-1, -2)


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
        y = x @ w.T
        np.testing.assert_array_equal(as_numpy(y), as_numpy(xp.ascontiguousarray(x) @ w.T), err_msg=how)
        check(y, testing.linear(x, w), kind)
        np.testing.assert_array_equal(as_numpy(x), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [4, 40])
def test_nan_and_infinity_stay_in_their_rows(kind: str, m: int, xp: ModuleType) -> None:
    x = np.random.default_rng(0).standard_normal((m, 128), F)
    x[1, 5], x[2, 77] = np.nan, np.inf
    a = cq.quantize(xp.asarray(x), "q8_1") if kind == "q8_1" else xp.asarray(x.astype(dtype_of(kind)))
    for name in ON_GPU:
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


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("batch", [3, 20])
def test_a_row_of_each_sequence(kind: str, batch: int, xp: ModuleType) -> None:
    """Last states, which are rows far from each other; a vector; rows of a stack of weights."""
    states, w = activations(kind, (batch, 4, 96), xp), on(xp, weight("q4_0", (70, 96)))
    for x in (states[:, -1:], states[:, 1][:, None], states[0, 0]):
        check(x @ w.T, testing.linear(x, w), kind)
    stack = on(xp, weight("q4_0", (batch, 70, 96)))
    check(states[:, -1:] @ stack.T, testing.linear(states[:, -1:], stack), kind)


@pytest.mark.parametrize(
    ("x", "w"), [((2, 0), (3, 0)), ((0,), (3, 0)), ((4, 2, 0), (4, 3, 0)), ((0, 0), (3, 0))]
)
def test_plain_weights_of_no_columns(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    """Sums of nothing, as NumPy's are."""
    y = cq.linear(np.ones(x, F), np.ones(w, F))
    np.testing.assert_array_equal(y, np.ones(x, F) @ np.ones(w, F).swapaxes(-1, -2))
    bias = np.arange(3, dtype=F)
    np.testing.assert_array_equal(cq.linear(np.ones(x, F), np.ones(w, F), bias=bias), y + bias)


def test_quantized_vectors_on_the_right(xp: ModuleType) -> None:
    """W @ q of a vector, as of floats; rows are transposed first."""
    rng = np.random.default_rng(0)
    w = cq.quantize(xp.asarray(rng.standard_normal((2, 6, 64), np.float32)), "q4_0")
    q = cq.quantize(xp.asarray(rng.standard_normal((3, 64), np.float32)), "q8_1")
    for each in (w, w[0]):
        out = xp.empty((*each.shape[:-1],), np.float32)
        assert cq.matmul(each, q[1], out=out) is out
        for y in (each @ q[1], out):
            assert (y == q[1] @ each.T).all()
        assert (each @ q.T == (q @ each.T).swapaxes(-1, -2)).all()
