"""Trellis weights: the layout against a loop written from its description, the quantizer, arrays of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import TRELLIS
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing

F = np.float32
BITS = (2, 3, 4)
SHAPES = [(16, 16), (1, 1), (17, 33), (40, 128), (33, 130), (3, 300), (130, 31)]
Parts = dict[str, Any]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gauss(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return rng(seed).standard_normal(shape, F)


def random_parts(
    bits: int, shape: tuple[int, ...], group: int = 32, levels: int | None = None, seed: int = 0
) -> Parts:
    """Random bytes of every part; scales of both signs."""
    *lead, n, k = shape
    r = rng(seed)
    return {
        "packed": r.integers(0, 256, (*lead, -(-k // 16), -(-n // 16), 32 * bits), np.uint8),
        "scales": r.standard_normal((*lead, -(-k // group), n), F),
        "grid": r.standard_normal(levels or 1 << bits, F),
        "su": r.choice(np.array([-1, 1], F), (*lead, k)),
        "sv": r.choice(np.array([-1, 1], F), (*lead, n)),
        "shape": shape,
        "group_size": group,
    }


def stored(w: cq.QuantizedArray, raw: NDArray[np.uint8] | None = None) -> Any:
    """Views of the parts of an array's storage bytes, or of others like them."""
    assert isinstance(w.format, cq.Trellis)
    return w.format.parts(w.blocks if raw is None else raw, w.shape)


def grid_of(w: cq.QuantizedArray) -> NDArray[np.float32]:
    return np.asarray(cq.trellis_parts(w)[2])


def by_the_document(p: Parts, bits: int) -> NDArray[np.float32]:
    """W[n, k] = grid[idx] * scale * su[k] * sv[n], one weight and one bit at a time."""
    n_rows, n_columns = p["shape"]
    w = np.empty((n_rows, n_columns), F)
    for n in range(n_rows):
        for k in range(n_columns):
            tile, index = p["packed"][k // 16, n // 16], 0
            for bit in range(bits):
                at = ((k % 16) * 16 + n % 16) * bits + bit
                index |= ((int(tile[at // 8]) >> (at % 8)) & 1) << bit
            level = p["grid"][index if index < len(p["grid"]) else 0]
            w[n, k] = level * p["scales"][k // p["group_size"], n] * p["su"][k] * p["sv"][n]
    return w


def sqnr(w: Any, x: NDArray[Any]) -> float:
    return float(-10 * np.log10(max(testing.nmse(w, x), 1e-30)))


# Storage


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 128])
def test_parts_read_as_the_document_says(bits: int, shape: tuple[int, int], group: int) -> None:
    p = random_parts(bits, shape, group)
    w = cq.trellis_from_parts(**p)
    assert (w.shape, w.format) == (shape, cq.Trellis(bits, group, p["grid"]))
    expected = by_the_document(p, bits)
    np.testing.assert_array_equal(w.dequantize().view(np.uint32), expected.view(np.uint32))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        np.testing.assert_array_equal(w.dequantize(dtype), expected.astype(dtype))


@pytest.mark.parametrize(("bits", "levels"), [(2, 1), (2, 3), (3, 5), (3, 7), (4, 9), (4, 15)])
def test_an_index_beyond_the_grid_reads_as_index_0(bits: int, levels: int) -> None:
    p = random_parts(bits, (20, 40), levels=levels)
    np.testing.assert_array_equal(cq.trellis_from_parts(**p).dequantize(), by_the_document(p, bits))


def test_three_bit_indices_run_across_bytes() -> None:
    """0 .. 7 twice, from the least significant bit on: 0x88 0xC6 0xFA."""
    packed = np.tile(np.array([0x88, 0xC6, 0xFA], np.uint8), 32)[None, None]
    ones = np.ones((1, 16), F)
    w = cq.trellis_from_parts(packed, ones, np.arange(8), ones[0], ones[0], (16, 16))
    np.testing.assert_array_equal(w.dequantize(), np.tile(np.arange(16) % 8, (16, 1)).T)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(33, 130), (2, 3, 17, 40)])
@pytest.mark.parametrize("kind", [F, np.float16, np.int8, np.int64])
def test_parts_come_back(bits: int, shape: tuple[int, ...], kind: Any) -> None:
    p = random_parts(bits, shape)
    w = cq.trellis_from_parts(**(p | {"su": p["su"].astype(kind), "sv": p["sv"].astype(kind)}))
    names = ("packed", "scales", "grid", "su", "sv")
    for name, part in zip(names, cq.trellis_parts(w), strict=True):
        assert part.dtype == p[name].dtype
        np.testing.assert_array_equal(part, p[name])
    stack = w.dequantize().reshape(-1, *shape[-2:])
    flat = {name: p[name].reshape(-1, *p[name].shape[len(shape) - 2 :]) for name in ("packed", "scales")}
    flat |= {name: p[name].reshape(-1, p[name].shape[-1]) for name in ("su", "sv")}
    for i, matrix in enumerate(stack):
        one = p | {name: part[i] for name, part in flat.items()} | {"shape": shape[-2:]}
        np.testing.assert_array_equal(matrix, cq.trellis_from_parts(**one).dequantize())


def test_group_sizes_follow_from_scales() -> None:
    p = random_parts(3, (4, 256), 128)
    del p["group_size"]
    assert cq.trellis_from_parts(**p).format == cq.Trellis(3, 128, p["grid"])
    p = random_parts(3, (4, 20), 128)
    assert cq.trellis_from_parts(**p).format == cq.Trellis(3, 128, p["grid"])
    del p["group_size"]
    assert cq.trellis_from_parts(**p).format == cq.Trellis(3, 32, p["grid"])


def refused(message: str, kind: type[Exception] = ValueError, **changes: Any) -> None:
    with pytest.raises(kind, match=message):
        cq.trellis_from_parts(**(random_parts(3, (17, 40)) | changes))


def changed(name: str, value: float) -> Parts:
    part = random_parts(3, (17, 40))[name].copy()
    part.reshape(-1)[-1] = value
    return {name: part}


def test_parts_that_do_not_fit_are_refused() -> None:
    p = random_parts(3, (17, 40))
    for bad in (0, 2, 0.5, np.nan):
        refused(f"su holds {float(bad)}; signs are", **changed("su", bad))
        refused("sv holds", **changed("sv", bad))
    for bad in (np.nan, np.inf, -np.inf):
        refused(f"scales holds {bad}; scales must be finite", **changed("scales", bad))
        refused(f"grid holds {bad}", **changed("grid", bad))
    refused(r"packed has shape \(3, 2, 80\)", packed=p["packed"][..., :80])
    refused(r"packed has shape \(2, 2, 96\); .*\(17, 40\) has \(3, 2\) tiles", packed=p["packed"][:2])
    refused(r"packed has shape \(2, 3, 96\)", packed=p["packed"].swapaxes(0, 1))
    refused("packed has dtype int8", TypeError, packed=p["packed"].view(np.int8))
    refused(r"scales has shape \(17, 2\); \(2, 17\) for groups of 32 is needed", scales=p["scales"].T)
    refused(
        r"\(2, 17\) for groups of 32 or \(1, 17\) for groups of 128", scales=p["scales"].T, group_size=None
    )
    refused(r"\(1, 17\) for groups of 128", group_size=128)
    refused("group_size is 64; allowed are 32 and 128", group_size=64)
    refused("scales has dtype float16", TypeError, scales=p["scales"].astype(np.float16))
    refused(r"su has shape \(17,\); \(40,\) is needed", su=p["sv"])
    refused(r"sv has shape \(40,\); \(17,\) is needed", sv=p["su"])
    refused(r"grid has shape \(9,\); 1 to 8 numbers", grid=np.arange(9))
    refused(r"grid has shape \(0,\)", grid=[])
    refused("grid is no array of numbers", TypeError, grid=["x"])
    refused(r"shape is \(40,\)", shape=(40,))
    refused(r"shape is \(0, 40\)", shape=(0, 40))
    with pytest.raises(TypeError, match=r"w is q4_0 array .* of a format cuquant.Trellis is needed"):
        cq.trellis_parts(cq.quantize(np.ones((2, 32), F), "q4_0"))


def test_bytes_are_checked_where_an_array_is_made_of_them() -> None:
    w = cq.quantize(gauss(17, 40), cq.Trellis(3))
    same = cq.from_blocks(w.blocks.tobytes(), w.format, w.shape)
    np.testing.assert_array_equal(same.dequantize(), w.dequantize())
    raw = w.blocks.copy()
    stored(w, raw).su[3] = 0
    with pytest.raises(ValueError, match=r"trellis3 of shape \(17, 40\): su holds 0"):
        cq.from_blocks(raw, w.format, w.shape)
    raw = w.blocks.copy()
    stored(w, raw).scales[0, 5] = np.nan
    with pytest.raises(ValueError, match="scales holds nan"):
        cq.from_blocks(raw, w.format, w.shape)
    with pytest.raises(ValueError, match="the format has no grid"):
        cq.from_blocks(w.blocks, "trellis3", w.shape)
    with pytest.raises(ValueError, match="raw has 1 bytes; trellis3 of shape"):
        cq.from_blocks(b"1", w.format, w.shape)


# The format


def test_formats_by_name() -> None:
    for name in TRELLIS:
        fmt = cq.formats.get(name)
        assert isinstance(fmt, cq.Trellis)
        assert str(fmt) == name
        assert eval(repr(fmt), {"Trellis": cq.Trellis}) == fmt
        assert fmt.bits_per_weight == fmt.bits + 32 / fmt.group_size
    assert cq.Trellis(3, group_size=128) == "trellis3"
    assert cq.Trellis(3, group_size=32) == "trellis3-32"
    a, b = (cq.Trellis(2, grid=[0, scale, 1]) for scale in (0.5, 0.25))
    assert a != b
    assert a == cq.Trellis(2, grid=[0, 0.5, 1]) != cq.Trellis(2)
    assert {a: 1, b: 2}[b] == 2
    assert eval(repr(b), {"Trellis": cq.Trellis}) == pickle.loads(pickle.dumps(b)) == b


def test_parameters_are_checked() -> None:
    for bits in (1, 5):
        with pytest.raises(ValueError, match=f"bits is {bits}; allowed are 2, 3, 4"):
            cq.Trellis(bits)
    with pytest.raises(ValueError, match="group_size is 64; allowed are 32 and 128"):
        cq.Trellis(3, 64)
    with pytest.raises(TypeError, match="group_size is a str"):
        cq.Trellis(3, "all")  # type: ignore[arg-type]


# The quantizer


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
    for same in (moments * F(1e-30), moments.astype(ml_dtypes.bfloat16)):
        np.testing.assert_allclose(
            cq.trellis_quantize(x, moments=same).dequantize(),
            cq.trellis_quantize(x, moments=moments).dequantize(),
            atol=0.5,
        )
    nothing = cq.trellis_quantize(x, moments=np.zeros(256, F))
    assert sqnr(nothing, x) > 14


def test_arguments_of_the_quantizer() -> None:
    x = gauss(24, 64)
    for message, kind, arguments in (
        ("format is q4_0; a cuquant.Trellis", TypeError, {"format": "q4_0"}),
        (r"moments has shape \(24,\); one for each of K = 64", ValueError, {"moments": np.ones(24, F)}),
        ("moments must be finite", ValueError, {"moments": np.full(64, -1, F)}),
        ("moments has dtype float64", TypeError, {"moments": np.ones(64)}),
        (r"su has shape \(24,\); \(64,\)", ValueError, {"su": np.ones(24)}),
        ("sv holds 3; signs are", ValueError, {"sv": np.full(24, 3)}),
        ("seed is -1", ValueError, {"seed": -1}),
    ):
        with pytest.raises(kind, match=message):
            cq.trellis_quantize(x, **arguments)


# As a QuantizedArray


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "k"), [(40, 128), (33, 130), (1, 1), (700, 1600)])
@pytest.mark.parametrize("m", [1, 7])
def test_products_against_float64(bits: int, n: int, k: int, m: int) -> None:
    p = random_parts(bits, (n, k))
    w = cq.trellis_from_parts(**p)
    x = gauss(m, k, seed=2)
    plain = cq.trellis_from_parts(**(p | {"su": np.ones(k), "sv": np.ones(n)}))
    formula = ((x * p["su"]).astype(np.float64) @ plain.dequantize().T.astype(np.float64)) * p["sv"]
    for dtype, most in ((F, 1e-6), (np.float16, 1e-6), (ml_dtypes.bfloat16, 1e-5)):
        y = x.astype(dtype) @ w.T
        assert (y.shape, y.dtype) == ((m, n), np.dtype(dtype))
        assert testing.nmse(y, testing.linear(x.astype(dtype), w)) <= most
    assert testing.nmse(x @ w.T, formula) <= 1e-6
    np.testing.assert_array_equal(w @ x.T, (x @ w.T).T)


def test_stacks_broadcast_and_fuse() -> None:
    w, x = cq.quantize(gauss(3, 40, 96), "trellis3"), gauss(2, 3, 7, 96, seed=1)
    assert testing.nmse(x @ w.T, testing.linear(x, w)) <= 1e-6
    bias, residual = gauss(3, 40), gauss(2, 3, 7, 40)
    out = np.empty_like(residual)
    assert cq.linear(x, w, bias=bias, activation="silu", residual=residual, out=out) is out
    assert testing.nmse(out, testing.linear(x, w, bias=bias, activation="silu", residual=residual)) <= 1e-6
    q = cq.quantize(x, "q8_1")
    assert testing.nmse(q @ w.T, testing.linear(q, w)) <= 1e-6
    one = w[0]
    with pytest.raises(ValueError, match="out may share memory with W"):
        cq.linear(gauss(1, 96), one, out=stored(one).scales)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 128])
def test_rows_are_selected_exactly(bits: int, group: int) -> None:
    w = cq.quantize(gauss(5, 37, 70), cq.Trellis(bits, group))
    d = w.dequantize()
    for index in (
        1,
        slice(1, 4),
        (2, 3),
        (2, slice(5, 20)),
        (slice(None), 3),
        (Ellipsis, slice(None)),
        (1, [5, 5, 36, 0]),
        ([4, 0], [1, 2]),
        (slice(None, None, -1), slice(None, None, 2)),
        np.array([True, False, True, True, False]),
        (0, slice(0, 0)),
    ):
        chosen = w[index]
        np.testing.assert_array_equal(chosen.dequantize(), d[index])
        assert chosen.format == w.format
    many = rng().integers(0, 37, 500)
    np.testing.assert_array_equal(w[2][many].dequantize(), d[2][many])
    for matrix, expected in zip(w, d, strict=True):
        np.testing.assert_array_equal(matrix.dequantize(), expected)
    w.blocks[...] = 0  # they were copies
    np.testing.assert_array_equal(chosen.dequantize(), d[index])


def test_rows_of_many_tiles_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuquant.formats import trellis

    w, x, chosen = cq.quantize(gauss(200, 70), "trellis3"), gauss(90, 70), rng().integers(0, 200, 77)
    whole, rows, made = w.dequantize(), w[chosen].blocks, cq.quantize(x, w.format).blocks
    monkeypatch.setattr(trellis, "_SLAB", 40 * 70)
    monkeypatch.setattr("cuquant.cpu.SLAB", 7 * 70)
    monkeypatch.setattr("cuquant.cpu.slabs", lambda n, k: (slice(i, min(i + 7, n)) for i in range(0, n, 7)))
    np.testing.assert_array_equal(w.dequantize(), whole)
    np.testing.assert_array_equal(w[chosen].blocks, rows)
    np.testing.assert_array_equal(cq.quantize(x, w.format).blocks, made)


def test_rows_of_matrices_with_other_signs() -> None:
    w = cq.trellis_from_parts(**random_parts(3, (2, 17, 40)))
    np.testing.assert_array_equal(w[1, 3:].dequantize(), w.dequantize()[1, 3:])
    with pytest.raises(IndexError, match="whose su differ cannot be one matrix"):
        w[:, 3]


def test_sizes_and_words() -> None:
    w = cq.quantize(gauss(256, 1024), cq.Trellis(3))
    parts = cq.trellis_parts(w)
    assert parts[0].nbytes == 256 * 1024 * 3 // 8
    assert w.nbytes == w.blocks.nbytes == parts[0].nbytes + parts[1].nbytes + 1024 + 256
    assert w.bits_per_weight == pytest.approx(3.25 + 8 * 1280 / 2**18)
    assert repr(w).startswith("QuantizedArray(shape=(256, 1024), format=trellis3, bits_per_weight=3.28906")
    assert "W = grid[q] * scale * su * sv" in w._repr_html_()
    assert (w.T.shape, w.size, w.ndim, len(w), w.device) == ((1024, 256), 1 << 18, 2, 256, "cpu")
    assert w.to_device("cpu") is w
    assert w.prepare() is w
    np.testing.assert_array_equal(w.T.dequantize(), w.dequantize().T)
    with pytest.raises(TypeError, match=r"call .dequantize\(\)"):
        np.asarray(w)
    with pytest.raises(IndexError, match="the last axis"):
        w[:, 3]
    loaded = pickle.loads(pickle.dumps(w))
    assert loaded.format == w.format
    np.testing.assert_array_equal(loaded.dequantize(), w.dequantize())


def test_files(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "a": cq.quantize(gauss(17, 40), "trellis3"),
        "b": cq.quantize(gauss(3, 20, 200), cq.Trellis(2, 32)),
        "row": cq.quantize(gauss(17, 40), "trellis4")[3],
        "plain": np.arange(3),
    }
    cq.save(tmp_path / "w.safetensors", tensors)
    loaded = cq.load(tmp_path / "w.safetensors", "cpu")
    for name in ("a", "b", "row"):
        assert loaded[name].format == tensors[name].format
        assert loaded[name].shape == tensors[name].shape
        np.testing.assert_array_equal(loaded[name].blocks, tensors[name].blocks)
        np.testing.assert_array_equal(loaded[name].dequantize(), tensors[name].dequantize())


def test_a_model_file(model: Path, tmp_path: Path) -> None:
    cq.quantize_file(model, tmp_path / "m.safetensors", cq.Trellis(3, 32), device="cpu")
    source, loaded = cq.open(model, "cpu"), cq.load(tmp_path / "m.safetensors", "cpu")
    name = "blk.0.ffn_up.weight"
    expected = cq.quantize(source[name], cq.Trellis(3, 32))
    assert loaded[name].format == expected.format
    np.testing.assert_array_equal(loaded[name].blocks, expected.blocks)
    with pytest.raises(ValueError, match="trellis3 has no GGUF type"):
        cq.quantize_file(model, tmp_path / "m.gguf", "trellis3")


def test_a_model_is_evaluated_in_them(model: Path) -> None:
    tokens = rng().integers(3, 40, 130)
    formats: list[str | cq.Format] = ["trellis4-32", "trellis3", cq.Trellis(2)]
    result = cq.evaluate(model, tokens=tokens, formats=formats, ctx=64, device="cpu")
    assert [row.format for row in result.rows] == ["f16", "trellis4-32", "trellis3", "trellis2"]
    klds = [row.mean_kld or 0.0 for row in result.rows]
    assert klds == sorted(klds)
    assert {error.format for error in result.rows[2].tensors} == {"trellis3"}


def test_no_rows(tmp_path: Path) -> None:
    w = cq.quantize(np.random.default_rng(0).standard_normal((4, 64), np.float32), "trellis3")
    cq.save(tmp_path / "w.safetensors", {"w": w[:0]})
    assert cq.load(tmp_path / "w.safetensors", "cpu")["w"].validate().shape == (0, 64)
    assert cq.quantize(np.ones((3, 0, 64), np.float32), "trellis3").validate().shape == (3, 0, 64)


def test_small_moments_count() -> None:
    w = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    moments = np.full(256, 1e-30, np.float32)
    moments[130] = 1e16
    error = cq.trellis_quantize(w, "trellis4", moments=moments).dequantize() - w
    assert (error[:, :128] ** 2).mean() < 0.05


# What the kernels are given


@pytest.mark.parametrize(
    ("grid", "lift", "least"),
    [
        ([-1.0, 0.5, 1.0, 0.25], -1, 0.125),
        ([0.0, 3.0], -2, 0.75),
        ([1e-5, 1.0], 14, 0.16384),
        ([0.0], 0, 0.0),
    ],
)
def test_levels_in_float16(grid: list[float], lift: int, least: float) -> None:
    """The largest below 1, or below 2^15 where the least needs it."""
    fmt = cq.Trellis(2, grid=grid)
    halves = fmt.half_levels
    assert halves is not None
    assert fmt.codebook is not None
    assert fmt.in_float16
    assert halves.lift == lift
    assert halves.least == pytest.approx(least, rel=1e-6)
    np.testing.assert_allclose(halves.levels.astype(F), np.ldexp(fmt.codebook, lift), rtol=2**-11)


def test_grids_beyond_float16() -> None:
    assert not cq.Trellis(2, grid=[1e-30, 1, 3]).in_float16
    assert cq.Trellis(2).in_float16
    assert cq.Trellis(2, grid=[2.0**-28, 0.75]).in_float16
    assert not cq.Trellis(2, grid=[2.0**-30, 0.75]).in_float16


def test_scales_in_float16() -> None:
    """Powers of two for them: all products are normal float16 numbers, or float32 takes the scales."""
    from cuquant.cuda_trellis import _levels, _scale_lift

    fmt = cq.Trellis(2, grid=[-1, -0.25, 0.5, 1])
    assert fmt.half_levels is not None
    for greatest, least in ((1.0, 1e-4), (3e38, 1e33), (1e-30, 1e-35), (7.0, 7.0)):
        half, lift = _scale_lift(greatest, least, fmt)
        assert half
        assert 2.0**14 <= greatest * 2.0**lift < 2.0**15
        assert least * 2.0**lift * fmt.half_levels.least >= 2.0**-14
    for greatest, least in ((1.0, 1e-9), (1e30, 1e-30), (2.0**-149, 2.0**-149)):
        half, lift = _scale_lift(greatest, least, fmt)
        assert not half
        assert abs(lift + fmt.half_levels.lift) <= 126
        assert greatest * 2.0**lift < 2.0**40
    assert _scale_lift(0.0, 0.0, fmt)[0]
    assert not _scale_lift(1.0, 1.0, cq.Trellis(2, grid=[0.0]))[0]
    from cuquant.formats.trellis_search import search_of

    assert len(_levels(search_of(np.array([-1, 0.5, 1], F)), 2)) == 224  # struct Levels


def test_arguments_of_kernels_have_their_offsets() -> None:
    from cuquant import jit

    assert jit._layout(("Q", "q", "i", "i", "Q", "i", "64s"))[1] == (0, 8, 16, 20, 24, 32, 36)
    assert jit._packed(bytes(64)) == ("64s", bytes(64))


def test_arrays_of_different_grids_share_their_plans() -> None:
    a, b = cq.Trellis(3, 32, [0.0, 1.0]), cq.Trellis(3, 32, [2.0])
    assert a.for_kernels is b.for_kernels
    assert a.for_kernels.block_bytes == 16
    assert cq.Trellis(4).for_kernels.block_bytes == 68
