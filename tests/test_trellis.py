"""Trellis weights: the layout against a loop written from its description, the format, what kernels take."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import TRELLIS
from numpy.typing import NDArray

import cuquant as cq
from cuquant.formats.kernels import kernels_of

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
    refused("su has dtype bool; .1 and -1 are integers or floats", TypeError, su=p["su"] > 0)
    refused(r"sv has shape \(40,\); \(17,\) is needed", sv=p["su"])
    refused(r"grid has shape \(9,\); 1 to 8 numbers", grid=np.arange(9))
    refused(r"grid has shape \(0,\)", grid=[])
    refused(r"grid has shape \(2, 4\); 1 to 8 numbers are needed", grid=np.zeros((2, 4)))
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
    assert kernels_of(fmt).in_float16
    assert halves.lift == lift
    assert halves.least == pytest.approx(least, rel=1e-6)
    np.testing.assert_allclose(halves.levels.astype(F), np.ldexp(fmt.codebook, lift), rtol=2**-11)


def test_grids_beyond_float16() -> None:
    assert not kernels_of(cq.Trellis(2, grid=[1e-30, 1, 3])).in_float16
    assert kernels_of(cq.Trellis(2)).in_float16
    assert kernels_of(cq.Trellis(2, grid=[2.0**-28, 0.75])).in_float16
    assert not kernels_of(cq.Trellis(2, grid=[2.0**-30, 0.75])).in_float16


def test_scales_in_float16() -> None:
    """Powers of two for them: all products are normal float16 numbers, or float32 takes the scales."""
    from cuquant.cuda.trellis import _levels, _scale_lift

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
    from cuquant.cuda import jit

    assert jit.layout(("Q", "q", "i", "i", "Q", "i", "64s"))[1] == (0, 8, 16, 20, 24, 32, 36)
    assert jit._packed(bytes(64)) == ("64s", bytes(64))


def test_arrays_of_different_grids_share_their_plans() -> None:
    a, b = cq.Trellis(3, 32, [0.0, 1.0]), cq.Trellis(3, 32, [2.0])
    assert a.for_kernels is b.for_kernels
    assert a.for_kernels.block_bytes == 16
    assert cq.Trellis(4).for_kernels.block_bytes == 68
