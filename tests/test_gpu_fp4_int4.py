"""FP4 and int4 on a GPU: numbers and bytes as on the CPU, products of every range of scales."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from formats_table import FLOATS, random_blocks
from products import assert_products, assert_quantized_as_on_the_cpu, assert_read_back, cuda_weight, gauss

import cuquant as cq
from cuquant import cpu, device, testing
from cuquant.cuda import backend as cuda
from cuquant.formats.kernels import kernels_of
from cuquant.testing import as_numpy, nmse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.* of the weights are too small"),
]
F = np.float32
INT4 = [cq.Int4(group, symmetric) for group in (32, 64, 128, 96, 192, 256, -1) for symmetric in (True, False)]
FORMATS = [cq.formats.get("mxfp4"), cq.formats.get("nvfp4"), cq.NvFp4(0.003), *INT4]
SHAPES = [(1, 192), (16, 384), (33, 960), (130, 1152), (3, 17, 192)]


def weight(fmt: cq.Format, shape: tuple[int, ...], scale: float = 1) -> cq.QuantizedArray:
    return cq.quantize(gauss(shape, 1) * F(scale), fmt)


def whole(fmt: cq.Format, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with whole blocks."""
    size = max(128, fmt.block_size)
    return (*shape[:-1], shape[-1] // size * size or size) if shape[-1] % fmt.block_size else shape


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_bytes_and_numbers_are_those_of_the_cpu(fmt: cq.Format) -> None:
    cupy = device.cupy()
    for shape in SHAPES:
        shape = whole(fmt, shape)
        w = weight(fmt, shape)
        raw = random_blocks(w.format, shape)
        for blocks in (w.blocks, raw):
            assert_read_back(blocks, w.format, shape)
        np.testing.assert_array_equal(
            as_numpy(cq.quantize(cupy.asarray(gauss(shape, 1)), fmt).blocks), w.blocks
        )


SCALED = [
    "nvfp4",
    cq.NvFp4(1e30),
    "kbit2",
    "kbit3",
    "kbit4",
    "kbit5",
    cq.KBit(2, scale="decoded"),
    cq.KBit(5, scale="decoded"),
    cq.KBit(4, absmax="float16"),
    "mxfp4",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
]
SCALED += [
    "int4-32",
    "int4-64",
    "int4-128-zeros",
    cq.Int4(160),
    cq.Int4(1280, symmetric=False),
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_nl",
]


@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_weights_that_are_too_small_are_counted_as_on_the_cpu(fmt: str | cq.Format) -> None:
    """In every group but those of zeros, whatever the strides, and of scales about half a step below the
    least that is fine, which become it or not; a last block of threads is not full."""
    cupy, found = device.cupy(), cq.formats.get(fmt)
    x = gauss((39, 1280)) * np.geomspace(1e-9, 1, 1280, dtype=F)
    x[5:9], x[20, ::64], x[30] = 0, -0.0, 1e-40
    step = (
        2.0**-24
        if found.storage[found.scales[0]] == np.float16
        else 2.0**-14
        if kernels_of(found).lookup
        else 2.0**-9
    )
    near = F((found.fine_from - 0.5) * step) * (1 + np.arange(-20, 20, dtype=F) * 2**-23)
    for row, steps in enumerate((1, 6, 7, 8, 15, 16, 31, 127), 31):
        x[row] = (steps * near).repeat(32) * (np.arange(1280) % 2)
    for dtype in FLOATS:
        for given in (x.astype(dtype), x.astype(dtype)[::-2]):
            blocks, lost = cpu.quantize(given, found)
            assert (lost > 0) == (found != "mxfp4") or found.block_size == 1280  # a row without zeros
            for source in (cupy.asarray(given), cupy.asarray(given.repeat(2, axis=1))[:, ::2]):
                made, count = cuda.quantize(source, found)
                np.testing.assert_array_equal(as_numpy(made), blocks)
                assert count == lost
    if lost:
        said = f"about 100% of the weights are too small for the scales of {re.escape(str(found))}"
        with pytest.warns(UserWarning, match=said):
            cq.quantize(cupy.asarray(gauss((8, 1280)) * F(1e-9)), found)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products(fmt: cq.Format) -> None:
    for n, k in ((70, 384), (200, 1920)):
        w = weight(fmt, whole(fmt, (n, k))).to_device("cuda")
        assert w.fragments().half
        assert_products(w)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_beyond_float16(group: int, symmetric: bool) -> None:
    """Rows that are kept in float16's range hold greater weights; where scales of a row are too far apart for
    that, these multiply float32 sums."""
    cupy = device.cupy()
    fmt, halves = cq.Int4(group, symmetric), set()
    for small in (1, 1e-6):
        numbers = gauss((40, 512)) * F(5e4)
        numbers[:, group : 2 * group] *= F(small)
        w = cq.quantize(numbers, fmt).to_device("cuda")
        halves.add(w.fragments().half)
        np.testing.assert_array_equal(as_numpy(w.prepare().blocks), cq.quantize(numbers, fmt).blocks)
        for m in (1, 5, 20, 70):
            x = np.zeros((m, 512), np.float16)
            x[:, group : 2 * group] = gauss((m, group))
            y = cq.matmul(cupy.asarray(x), w.T, dtype=F)
            assert nmse(y, testing.linear(x, w)) < 1e-6, (small, m)
    assert halves == {True, False}


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


@pytest.mark.parametrize("exponents", [(120, 240), (0, 254), (0, 255), (3, 220), (100, 235), (0, 130)])
def test_mxfp4_scales_that_are_far_apart(exponents: tuple[int, int]) -> None:
    """Sums are finite where products are, and no power of two is lost."""
    cupy, shape = device.cupy(), (32, 1024)
    raw = random_blocks("mxfp4", shape)
    records = raw.view(cq.formats.get("mxfp4").storage)
    records["e"] = np.repeat(exponents, 16)[:, None]
    if max(exponents) > 250:
        records["qs"] &= 0x99  # float32 holds halves of it alone
    w = cq.from_blocks(raw, "mxfp4", shape)
    there = w.to_device("cuda")
    assert not there.fragments().half
    np.testing.assert_array_equal(as_numpy(there.blocks), raw)
    for size in (1e-3, 1e-10) if max(exponents) > 230 else (1.0, 1e-3, 1e-10):
        for m in (2, 40):
            x = cupy.asarray(gauss((m, 1024), 2) * F(size))
            y, exact = as_numpy(cq.matmul(x, there.T)), testing.linear(x, w)
            assert np.isfinite(y).all()
            for rows in (slice(16), slice(16, 32)):
                lost = np.abs(exact[:, rows]).max() < 1e-30  # parts of it are not normal
                assert lost or nmse(y[:, rows], exact[:, rows]) < 1e-6, (size, m)


def test_mxfp4_scales_that_fit_are_not_kept_besides() -> None:
    """Rows and blocks beyond the matrix, which no tile is full of, do not count."""
    for shape in [(32, 256), (33, 96), (3, 17, 160)]:
        w = cuda_weight("mxfp4", shape)
        raw = as_numpy(w.blocks)
        assert w.fragments().kept is None
        np.testing.assert_array_equal(as_numpy(w.blocks), raw)


@pytest.mark.parametrize("exponents", [(60, 80), (102, 126), (103, 127), (100, 160)], ids=str)
def test_mxfp4_scales_that_several_blocks_move(exponents: tuple[int, int]) -> None:
    """Or that stay, or that float16 does not hold; the extremes are in the last of them."""
    shape = (1024, 1024)
    raw = random_blocks("mxfp4", shape)
    scales = raw.view(cq.formats.get("mxfp4").storage)["e"]
    scales[...] = np.random.default_rng(0).integers(exponents[0] + 1, exponents[1], scales.shape)
    scales[-1, -2:] = exponents
    w = cq.from_blocks(raw, "mxfp4", shape)
    there = w.to_device("cuda").prepare()
    assert (there.fragments().offset == 0) == (exponents in [(102, 126), (100, 160)])
    np.testing.assert_array_equal(as_numpy(there.blocks), raw)
    a = gauss((3, 1024), 2) * F(2.0 ** (127 - exponents[1]))
    assert nmse(cq.matmul(device.cupy().asarray(a), there.T), testing.linear(a, w)) < 1e-6


def test_mxfp4_blocks_of_zeros_keep_their_scales() -> None:
    """Above and below the scales that count, and 255, which float32 has no number for."""
    cupy = device.cupy()
    for rest in ([1, 1e-38, 1], [1, 1e-10, 1.5e-38], [1, 1.5e-38, 1.5e-38], [0, 1e-38, 0]):
        x = np.ones((16, 96), F) * np.repeat(np.array(rest, F), 32)
        w = cq.quantize(x, "mxfp4")
        there = cq.quantize(cupy.asarray(x), "mxfp4").prepare()
        np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)
        for m in (2, 40):
            a = cupy.asarray(gauss((m, 96), 2).astype(np.float16))
            assert nmse(cq.matmul(a, there.T, dtype=F), testing.linear(a, w)) < 1e-6
    raw = cq.quantize(np.full((3, 64), 0.01, F), "mxfp4").blocks.copy()
    raw.view(cq.formats.get("mxfp4").storage)[1, 1] = (127, 0)
    there = cq.from_blocks(cupy.asarray(raw), "mxfp4", (3, 64)).prepare()
    np.testing.assert_array_equal(as_numpy(there.blocks), raw)


@pytest.mark.parametrize(("w", "x"), [(1e34, 1e-30), (1e-36, 1e30), (1e-30, 1e-5), (1e30, 1e-36)])
def test_factors_that_only_together_fit_float32(w: float, x: float) -> None:
    cupy = device.cupy()
    there = cq.quantize(gauss((300, 64), 1) * F(w), "mxfp4").to_device("cuda")
    for m in (2, 40, 300):
        a = cupy.asarray(gauss((m, 64), 2) * F(x)).astype(ml_dtypes.bfloat16)
        exact = testing.linear(a, there)
        assert nmse(cq.matmul(a, there.T, dtype=F), exact) < 1e-6
        bias = cupy.ones(300, F) * F(np.abs(exact).max())
        y = cq.linear(a, there, bias=bias, activation="relu", dtype=F)
        assert nmse(y, np.maximum(exact + as_numpy(bias), 0)) < 1e-6


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_empty_stacked_and_strided(fmt: cq.Format) -> None:
    cupy = device.cupy()
    empty = cq.quantize(cupy.zeros((0, 768), F), fmt)
    assert empty.dequantize().shape == (0, 768)
    assert empty.prepare().blocks.shape == empty.blocks.shape
    w = weight(fmt, (3, 40, 768))
    there = w.to_device("cuda")
    for m in (3, 40):
        x = cupy.asarray(gauss((3, m, 768), 2).astype(np.float16))
        assert nmse(cq.matmul(x, there.T, dtype=F), testing.linear(x, w)) < 1e-6
    wide = cupy.zeros((40, 2 * w.blocks.shape[-1] + 1), np.uint8)
    for start in (0, 1):
        part = wide[:, start : start + w.blocks.shape[-1]]
        part[...] = cupy.asarray(w.blocks[0])
        again = cq.from_blocks(part, w.format, (40, 768))
        np.testing.assert_array_equal(as_numpy(again.dequantize()), w[0].dequantize())
        assert nmse(cq.matmul(x[0], again.T, dtype=F), testing.linear(x[0], w[0])) < 1e-6


def test_nvfp4_scales_of_every_kind() -> None:
    """All bytes, signs that do not count and 0x7F, which reads as 0, among them."""
    cupy = device.cupy()
    raw = random_blocks("nvfp4", (64, 256))
    raw.view(cq.formats.get("nvfp4").storage)["d"] = np.arange(1024, dtype=np.uint8).reshape(64, 4, 4)
    w = cq.from_blocks(raw, "nvfp4", (64, 256))
    there = w.to_device("cuda").prepare()
    np.testing.assert_array_equal(as_numpy(there.blocks), raw)
    for m in (2, 40):
        x = cupy.asarray(gauss((m, 256), 2).astype(np.float16))
        y, exact = as_numpy(cq.matmul(x, there.T, dtype=F)), testing.linear(x, w)
        for row in range(64):
            assert nmse(y[:, row], exact[:, row]) < 1e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 0.02, 300, 1e30])
def test_nvfp4_with_scales_of_tensors(magnitude: float, dtype: np.dtype[np.generic]) -> None:
    """Fitted, divided by and multiplied by as on the CPU; any range of both factors in products."""
    cupy = device.cupy()
    if dtype == np.float16 and not 1e-7 < magnitude < 1e4:
        pytest.skip("beyond float16")
    x = (gauss((300, 384), 1) * F(magnitude)).astype(dtype)
    w, there = cq.quantize(x, cq.NvFp4()), cq.quantize(cupy.asarray(x), cq.NvFp4())
    assert there.format == w.format
    np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)
    np.testing.assert_array_equal(as_numpy(there.dequantize()), w.dequantize())
    strided = cq.quantize(cupy.asarray(x.repeat(2, axis=1))[:, ::2], cq.NvFp4())
    np.testing.assert_array_equal(as_numpy(strided.blocks), w.blocks)
    there.prepare()
    np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)
    for m in (2, 40, 300):
        for a in (1, 1e-4 / magnitude):
            given = cupy.asarray(gauss((m, 384), 2) * F(a)).astype(ml_dtypes.bfloat16)
            exact = testing.linear(given, w)
            assert nmse(cq.matmul(given, there.T, dtype=F), exact) < 1e-6, (m, a)
    x[7, 9] = np.nan
    with pytest.raises(ValueError, match="cannot quantize nan in row 7"):
        cq.quantize(cupy.asarray(x), cq.NvFp4())


def test_nvfp4_refuses_what_a_scale_cannot_hold() -> None:
    cupy = device.cupy()
    for scale in 10 ** np.random.default_rng(0).uniform(-20, 20, 20):
        fmt, x = cq.NvFp4(scale), np.zeros((9, 64), F)
        assert fmt.largest is not None
        x[7, 9] = fmt.largest
        np.testing.assert_array_equal(
            as_numpy(cq.quantize(cupy.asarray(x), fmt).dequantize())[7, 9], F(2688) * F(scale)
        )
        x[7, 9] = np.nextafter(F(fmt.largest), F(np.inf))
        with pytest.raises(ValueError, match="row 7") as on_cpu:
            cq.quantize(x, fmt)
        with pytest.raises(ValueError, match="row 7") as on_cuda:
            cq.quantize(cupy.asarray(x), fmt)
        assert str(on_cpu.value) == str(on_cuda.value)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fp4_is_quantized_as_on_the_cpu(name: str, dtype: np.dtype[np.generic]) -> None:
    """Ties, zeros, powers of two and just below them, subnormal numbers, scales at both ends."""
    cupy = device.cupy()
    x = gauss((400, 512))
    x[3], x[4] = 0, -0.0
    x[5:205] *= 10 ** np.random.default_rng(2).uniform(-44, 3 if name == "nvfp4" else 38, (200, 1)).astype(F)
    x[5:205] = np.clip(x[5:205], F(-2600), F(2600)) if name == "nvfp4" else x[5:205]
    powers = np.exp2(np.arange(-30, 11)).astype(F)
    for row, peak in enumerate([*powers, *np.nextafter(powers, F(0)), *np.nextafter(powers, F(1e9))], 210):
        x[row] = np.resize(np.arange(-24, 25) / F(24), 512) * peak
    x[340] = np.resize([0, 0.25, 0.5, 0.75, 1, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -5, -6], 512)
    with np.errstate(over="ignore"):
        given = x.astype(dtype)
    given[~np.isfinite(given.astype(F))] = 1
    assert_quantized_as_on_the_cpu(given, name)
    for bad in (np.nan, np.inf, *([2700.0] if name == "nvfp4" else [])):
        given[7, 9] = bad
        with pytest.raises(ValueError, match="row 7") as on_cpu:
            cq.quantize(given, name)
        with pytest.raises(ValueError, match="row 7") as on_cuda:
            cq.quantize(cupy.asarray(given), name)
        assert str(on_cpu.value) == str(on_cuda.value)


@pytest.mark.parametrize(
    "fmt", [*INT4, *(cq.Int4(size, sym) for size in (512, 1536) for sym in (True, False))], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_int4_is_quantized_as_on_the_cpu(fmt: cq.Int4, dtype: np.dtype[np.generic]) -> None:
    """Ties, zeros of both signs, one sign only, peaks where lanes end, scales at both ends of float16."""
    cupy = device.cupy()
    x = gauss((400, 1536))
    x[3], x[4], x[5, ::2] = 0, -0.0, -0.0
    x[6], x[7] = np.abs(x[6]), -np.abs(x[7])
    x[8:40] = np.resize(np.arange(-16, 16) / F(2), 1536) * np.exp2(np.arange(-26, 6)).astype(F)[:, None]
    x[40:72, ::32] = np.resize([7, -8, 15], 48)
    for lane in range(32):
        x[72 + lane, lane::32] = -9 if lane % 2 else 9
    x[104:304] *= 10 ** np.random.default_rng(2).uniform(-44, 5, (200, 1)).astype(F)
    with np.errstate(over="ignore"):
        given = x.astype(dtype)
    given[~np.isfinite(given.astype(F))] = 1
    assert_quantized_as_on_the_cpu(given, fmt)
    for bad in (np.nan, -np.inf, *([F(1e6)] if dtype != np.float16 else [])):
        given[7, 1009] = bad
        with pytest.raises(ValueError, match="row 7") as on_cpu:
            cq.quantize(given, fmt)
        with pytest.raises(ValueError, match="row 7") as on_cuda:
            cq.quantize(cupy.asarray(given), fmt)
        assert str(on_cpu.value) == str(on_cuda.value)
