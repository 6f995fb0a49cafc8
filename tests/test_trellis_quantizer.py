"""The quantizer of trellis weights."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from test_trellis import BITS, SHAPES, F, gauss, rng

import cuquant as cq
from cuquant import formats, testing


def grid_of(w: cq.QuantizedArray) -> NDArray[np.float32]:
    return np.asarray(cq.trellis_parts(w)[2])


def sqnr(w: Any, x: NDArray[Any]) -> float:
    return float(-10 * np.log10(max(testing.nmse(w, x), 1e-30)))


@pytest.mark.parametrize(("bits", "db"), [(2, 9.5), (3, 15.1), (4, 21.1)])
def test_normally_distributed_weights(bits: int, db: float) -> None:
    """Without bounds on rates, the best quantizers of 4, 8 and 16 levels have 9.30, 14.62 and 20.22 dB."""
    x = gauss(256, 1024)
    fine, coarse = (sqnr(cq.quantize(x, cq.Trellis(bits, group)), x) for group in (32, 128))
    assert coarse > db
    assert fine > coarse + 0.4
    assert coarse > sqnr(cq.quantize(x, cq.KBit(bits, absmax="float16")), x)


@pytest.mark.parametrize("bits", BITS)
def test_scales_are_nearly_the_best(bits: int) -> None:
    """Against a fine scan of scales of both signs, each with the nearest levels."""
    x = gauss(8, 256, seed=3)
    x[4:] **= 3  # with a few large ones
    w = cq.quantize(x, cq.Trellis(bits, 32))
    grid = grid_of(w)
    *_, su, sv = cq.trellis_parts(w)
    groups = (x * su * sv[:, None]).reshape(-1, 32)
    least = np.full(len(groups), np.inf)
    for factor in np.linspace(0.02, 1.5, 400):
        for scale in (factor, -factor):
            levels = scale * np.abs(groups).max(axis=1)[:, None, None] * grid
            error = np.square(groups[..., None] - levels).min(axis=-1).sum(axis=-1)
            least = np.minimum(least, error)
    assert np.square(w.dequantize() - x).sum() <= 1.005 * least.sum()


def test_a_grid_fits_what_it_is_given() -> None:
    levels = np.array([-1, -0.25, 0.5, 1], F)
    x = rng().choice(levels, (64, 128)) * rng(1).uniform(0.5, 2, (64, 1)).astype(F)
    assert sqnr(cq.quantize(x, cq.Trellis(2, grid=levels)), x) > 8
    su, sv = np.ones(128, np.int8), np.ones(64, np.int8)
    w = cq.trellis_quantize(x, cq.Trellis(2, grid=levels[[2, 0, 3, 1]]), su=su, sv=sv)
    assert sqnr(w, x) > 120
    np.testing.assert_array_equal(grid_of(w), levels[[2, 0, 3, 1]])


@pytest.mark.parametrize("grid", [[0.0], [1.0], [-3.0, 5.0], [0, 0, 1], [1e-30, 1, 3], [-7e29, 1e30, 3e30]])
def test_any_grid(grid: list[float]) -> None:
    x = gauss(17, 200)
    w = cq.quantize(x, cq.Trellis(2, grid=grid))
    nmse = testing.nmse(w, x)
    assert nmse <= 1.0001
    assert (nmse == 1) == (grid == [0.0])
    assert len(grid) < 2 or nmse < 0.7


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-8, 1e30, 3e37])
def test_magnitudes(magnitude: float) -> None:
    x = gauss(32, 256)
    plain, scaled = sqnr(cq.quantize(x, "trellis3"), x), cq.quantize(x * F(magnitude), "trellis3")
    assert sqnr(scaled.dequantize() / F(magnitude), x) == pytest.approx(plain, abs=0.3)


def test_weights_of_very_different_rows() -> None:
    x = gauss(64, 256) * np.logspace(-20, 15, 64, dtype=F)[:, None]
    d = cq.quantize(x, "trellis4").dequantize()
    for row, expected in zip(d, x, strict=True):
        assert testing.nmse(row, expected) < 0.02


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 0, 5, 40), (0, 40), (3, 2, 17, 40), (50,)])
def test_shapes(bits: int, group: int, shape: tuple[int, ...]) -> None:
    x = gauss(*shape)
    w = cq.quantize(x, cq.Trellis(bits, group))
    d = w.dequantize()
    assert (w.shape, d.shape) == (shape, shape)
    assert x.size == 0 or testing.nmse(d, x) < (0.15, 0.05, 0.02)[bits - 2]


def test_zeros() -> None:
    x = gauss(32, 256)
    x[3], x[:, 128:] = 0, 0
    d = cq.quantize(x, "trellis3").dequantize()
    assert not d[3].any()
    assert not d[:, 128:].any()
    assert not cq.quantize(np.zeros((5, 40), F), "trellis2").dequantize().any()


def test_strides_types_and_repetition() -> None:
    x = gauss(40, 130)
    w = cq.quantize(x, "trellis3")
    for same in (np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2], x.copy()):
        again = cq.quantize(same, "trellis3")
        assert again.format == w.format
        np.testing.assert_array_equal(again.blocks, w.blocks)
    half = x.astype(np.float16)
    np.testing.assert_array_equal(
        cq.quantize(half, w.format).blocks, cq.quantize(half.astype(F), w.format).blocks
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    x = gauss(3, 4, 130)
    x[2, 1, 77] = bad
    with pytest.raises(ValueError, match=rf"cannot quantize {bad} in row \(2, 1\)"):
        cq.quantize(x, "trellis3")
    with pytest.raises(ValueError, match="a scale overflows float32"):
        cq.quantize(gauss(4, 128) * F(1e30), cq.Trellis(2, grid=[-1e-20, 1e-20]))


def test_signs_are_drawn_or_given() -> None:
    x = gauss(24, 64)
    *_, su, sv = cq.trellis_parts(cq.quantize(x, "trellis3"))
    assert {*su, *sv} == {-1, 1}
    np.testing.assert_array_equal(cq.trellis_parts(cq.quantize(gauss(9, 64), "trellis2"))[3], su)
    other = cq.trellis_quantize(x, "trellis3", seed=5)
    assert (cq.trellis_parts(other)[3] != su).any()
    np.testing.assert_array_equal(cq.trellis_quantize(x).blocks, cq.quantize(x, "trellis3").blocks)
    mine = cq.trellis_quantize(x, su=-su, sv=sv.astype(np.int64))
    np.testing.assert_array_equal(cq.trellis_parts(mine)[3], -su)
    np.testing.assert_array_equal(cq.trellis_parts(mine)[4], sv)
    assert sqnr(mine, x) > 14


def test_moments_move_the_error_to_columns_that_matter_less() -> None:
    x, moments = gauss(64, 256), np.repeat([1, 100], 128)[rng(2).permutation(256)].astype(F)
    weighted = [
        float((np.square(w.dequantize() - x) * moments).sum())
        for w in (cq.trellis_quantize(x), cq.trellis_quantize(x, moments=moments))
    ]
    assert weighted[1] < 0.93 * weighted[0]
    for same in (moments * F(1e-30), moments.astype(ml_dtypes.bfloat16), moments.astype(np.float64)):
        np.testing.assert_allclose(
            cq.trellis_quantize(x, moments=same).dequantize(),
            cq.trellis_quantize(x, moments=moments).dequantize(),
            atol=0.5,
        )
    nothing = cq.trellis_quantize(x, moments=np.zeros(256, F))
    assert sqnr(nothing, x) > 14


@pytest.mark.parametrize("fmt", ["trellis3", cq.Trellis(2, 32, [-1, -0.3, 0.3, 1])])
@pytest.mark.parametrize("shape", [(48, 256), (2, 24, 256), (256,), (0, 256)])
def test_an_importance_of_columns_is_their_moments(fmt: Any, shape: tuple[int, ...]) -> None:
    x, importance = gauss(*shape), np.repeat([1, 100], 128)[rng(2).permutation(256)]
    made, same = cq.quantize(x, fmt, importance), cq.trellis_quantize(x, fmt, moments=importance)
    assert formats.describe(made.format) == formats.describe(same.format)
    np.testing.assert_array_equal(made.blocks, same.blocks)
    if x.size:
        assert (made.blocks != cq.quantize(x, fmt).blocks).any()


def test_importance_that_is_refused() -> None:
    for wrong, kind, message in (
        (np.ones(24), ValueError, r"importance has shape \(24,\); one for each of K = 64"),
        (np.full(64, -1), ValueError, "importance must be not negative, and finite in float32"),
        (np.ones(64, complex), TypeError, "importance has dtype complex128"),
        (np.zeros(64), ValueError, "importance must be above 0 somewhere, in float32"),
        (np.full(64, 1e-60), ValueError, "importance must be above 0 somewhere, in float32"),
    ):
        with pytest.raises(kind, match=message):
            cq.quantize(gauss(24, 64), "trellis3", importance=wrong)


def test_arguments_of_the_quantizer() -> None:
    x = gauss(24, 64)
    for message, kind, arguments in (
        ("format is q4_0; a cuquant.Trellis", TypeError, {"format": "q4_0"}),
        (r"moments has shape \(24,\); one for each of K = 64", ValueError, {"moments": np.ones(24, F)}),
        ("moments must be not negative", ValueError, {"moments": np.full(64, -1, F)}),
        ("and finite in float32", ValueError, {"moments": np.full(64, 1e39)}),
        ("moments has dtype complex128", TypeError, {"moments": np.ones(64, complex)}),
        (r"su has shape \(24,\); \(64,\)", ValueError, {"su": np.ones(24)}),
        ("sv holds 3; signs are", ValueError, {"sv": np.full(24, 3)}),
        ("seed is -1", ValueError, {"seed": -1}),
    ):
        with pytest.raises(kind, match=message):
            cq.trellis_quantize(x, **arguments)


def test_small_moments_count() -> None:
    w = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    moments = np.full(256, 1e-30, np.float32)
    moments[130] = 1e16
    error = cq.trellis_quantize(w, "trellis4", moments=moments).dequantize() - w
    assert (error[:, :128] ** 2).mean() < 0.05


def test_numpy_s_strictest_errors_change_nothing() -> None:
    """Of moments and weights so small that parts of sums are 0."""
    x, importance = gauss(32, 256) * np.geomspace(1e-36, 1, 256, dtype=F), np.geomspace(1e-60, 1, 256)
    expected = cq.quantize(x, "trellis2", importance)
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(cq.quantize(x, "trellis2", importance).blocks, expected.blocks)
