"""k-bit formats on a GPU: every variant's bits as on the CPU, the layout, products of all magnitudes."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from formats_table import FLOATS, random_blocks
from numpy.typing import NDArray
from products import assert_products, gauss

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit
from cuquant.formats.kernels import kernels_of
from cuquant.testing import as_numpy, nmse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.* of the weights are too small"),
]
F = np.float32
SKEWED = np.array([-0.1, -0.02, 0.0, 1e-3, 0.2, 0.5, 0.9, 1.0], F)
SCALES: list[Literal["absmax", "decoded"]] = ["absmax", "decoded"]
STORED: list[Literal["e4m4", "float16"]] = ["e4m4", "float16"]
FORMATS = [
    *(cq.KBit(k, scale=scale, absmax=absmax) for k, scale, absmax in product((2, 3, 4, 5), SCALES, STORED)),
    cq.KBit(2, [0.25, 0.5, 0.75, 1.0]),
    cq.KBit(3, SKEWED),
    cq.KBit(3, np.sort(SKEWED)[::-1] * -1, absmax="float16"),
    cq.KBit(4, np.linspace(0, 1, 16)),
    cq.KBit(5, np.sort(np.random.default_rng(1).uniform(-1, 1, 32)) ** 3),
    cq.KBit(2, [0, 0, 0, 1]),
    cq.KBit(2, [-0.8, -0.24, 0.24, 0.8]),
]


def on_gpu(x: Any, fmt: Any) -> cq.QuantizedArray:
    return cq.quantize(device.cupy().asarray(x), fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_quantize_and_dequantize_as_on_the_cpu(fmt: cq.KBit) -> None:
    """Ties, zeros, subnormal numbers, magnitudes at both ends of the scales."""
    x = gauss((600, 512))
    x[3], x[4] = 0, -0.0
    for row, magnitude in enumerate((1e-38, 1e-41, 2.0**-15, 1.7 * 2.0**-14, 1e-5, 1e-8, 3e-9, 1e-12), 5):
        x[row] *= F(magnitude)
    x[20, 0] = x[21, 40] = 31.5
    x[22, 5], x[23, 70] = np.nextafter(F(31.5), F(0)), -31
    grid = np.concatenate([fmt.codebook, fmt.thresholds, np.nextafter(fmt.thresholds, F(2))])
    x[30:40] = np.resize(grid, (10, 512))
    x[30:40, ::32] = 1
    x[40:60] = np.resize(grid, (20, 512)) * np.exp2(np.arange(20)).astype(F)[:, None] / F(2**17)
    x[40:60, 7::32] = (np.exp2(np.arange(20)) / 2**17).astype(F)[:, None]
    x[60:80] *= 10 ** np.random.default_rng(2).uniform(-30, 0, (20, 512)).astype(F)
    if fmt.absmax == "float16":
        x[80:90] *= F(1e4)
    for dtype in FLOATS:
        with np.errstate(all="ignore"):
            given = x.astype(dtype)
        expected = cq.quantize(given, fmt)
        got = on_gpu(given, fmt)
        np.testing.assert_array_equal(as_numpy(got.blocks), expected.blocks)
        for wanted in FLOATS:
            numbers = as_numpy(got.dequantize(wanted))
            np.testing.assert_array_equal(numbers.astype(F), expected.dequantize(wanted).astype(F))
    strided = device.cupy().zeros((600, 1024), F)
    strided[:, ::2] = device.cupy().asarray(x)
    np.testing.assert_array_equal(
        as_numpy(cq.quantize(strided[:, ::2], fmt).blocks), cq.quantize(x, fmt).blocks
    )


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_many_weights_as_on_the_cpu(k: int) -> None:
    """Division and search of four million weights, bit for bit."""
    x = gauss((1024, 4096), k) * F(0.02)
    np.testing.assert_array_equal(as_numpy(on_gpu(x, f"kbit{k}").blocks), cq.quantize(x, f"kbit{k}").blocks)


@pytest.mark.parametrize("stay", [1, 3])
@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(7, 4096), (13, 3104), (1, 4096), (3, 20512), (1, 32)])
def test_blocks_that_quantize_chunk_after_chunk(
    shape: tuple[int, int], k: int, stay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks of threads, so that each has several chunks; what is said of bad rows and lost weights."""
    cupy, fmt = device.cupy(), cq.KBit(k, absmax="float16" if stay > 1 else "e4m4")
    monkeypatch.setattr(jit, "gpu", lambda: plan.Gpu(jit.capability(), 1))
    monkeypatch.setattr(plan.blocks, "_STAYING", stay)
    plan.quantize.cache_clear()
    exponents = np.random.default_rng(5).integers(-26, 3, (shape[0], shape[1] // 32)).repeat(32, 1)
    x = np.clip(gauss(shape) * 2.0**exponents, -31, 31)
    for dtype in FLOATS:
        given = x.astype(dtype)
        bad = given.copy()
        bad[shape[0] // 2, 20] = np.nan
        bad[-1, -1] = np.inf
        padded = cupy.zeros((shape[0], shape[1] + 3), given.dtype)
        padded[:, 1:-2] = cupy.asarray(given)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = [cq.quantize(each, fmt) for each in (given, cupy.asarray(given), padded[:, 1:-2])]
        for other in made[1:]:
            np.testing.assert_array_equal(as_numpy(other.blocks), made[0].blocks)
        assert len({str(warning.message) for warning in told}) <= 1
        assert len(told) in (0, 3)
        errors = []
        for each in (bad, cupy.asarray(bad)):
            with pytest.raises(ValueError, match="must be finite") as refused:
                cq.quantize(each, fmt)
            errors.append(str(refused.value))
        assert errors[0] == errors[1]
    monkeypatch.undo()
    plan.quantize.cache_clear()


@pytest.mark.parametrize("value", [np.nan, -np.inf, 31.500002, -40, 1e30])
@pytest.mark.parametrize("absmax", STORED)
def test_refuses_in_the_same_words(value: float, absmax: Any) -> None:
    fmt = cq.KBit(4, absmax=absmax)
    x = gauss((3, 5, 64))
    x[1, 2, 40] = x[2, 1, 3] = value
    if absmax == "float16" and abs(value) < 100:
        np.testing.assert_array_equal(as_numpy(on_gpu(x, fmt).blocks), cq.quantize(x, fmt).blocks)
        return
    with pytest.raises(ValueError, match="row") as on_cpu:
        cq.quantize(x, fmt)
    with pytest.raises(ValueError, match="row") as on_cuda:
        on_gpu(x, fmt)
    assert str(on_cpu.value) == str(on_cuda.value)


def pair(codes: NDArray[np.integer[Any]], k: int, lane: int, p: int) -> int:
    """Pair 8 b + 4 j + m: rows g + 8 j, columns 2i and 2i + 1 of the m-th 8 of block b, bit by bit."""
    (g, i), (b, j, m) = divmod(lane, 4), (p // 8, p // 4 % 2, p % 4)
    two = codes[g + 8 * j, 32 * b + 8 * m + 2 * i : 32 * b + 8 * m + 2 * i + 2]
    return sum((int(q) >> bit & 1) << (2 * bit + e) for e, q in enumerate(two) for bit in range(k))


ONE_SIDED = cq.KBit(5, np.linspace(-0.9, 1, 32))
"""Of 5 bits, with a codebook that is not its upper half with signs."""


ODD = cq.KBit(2, [-0.9, -0.25, 0.5, 1])
"""Of 2 bits, with more than two magnitudes."""


def masked(codes: NDArray[np.integer[Any]], lane: int) -> list[int]:
    """Words of two magnitudes with signs: pairs of steps 0 and 2, and signs and sizes of 1 and 3
    (kernels/core/masked.cuh)."""
    words = [0, 0]
    for b, t, j in product((0, 1), (0, 1), (0, 1)):
        words[0] |= pair(codes, 2, lane, 8 * b + 4 * j + t) << (8 * (2 * b + t) + 4 * j)
        two = pair(codes, 2, lane, 8 * b + 4 * j + 2 + t)
        for e in (0, 1):
            q = (two >> e & 1) | (two >> (1 + e) & 2)
            first = 16 * e + 8 * t + 2 * (2 * b + j)
            words[1] |= (q < 2) << (first + 1) | (q in (0, 3)) << ((first - 4) % 32)
    return words


@pytest.mark.parametrize("fmt", [*map(cq.KBit, (2, 3, 4, 5)), ONE_SIDED, ODD], ids=str)
def test_the_fragment_layout_is_the_picture(fmt: cq.KBit) -> None:
    """Words of each lane, made anew from kernels/core/codebook.cuh's description."""
    raw = random_blocks(fmt, (32, 128))
    w = cq.from_blocks(raw, fmt, (32, 128)).to_device("cuda")
    planes = raw.view(w.format.storage)["planes"].reshape(32, 4, fmt.bits)
    bits = planes[..., None] >> np.arange(32, dtype=np.uint32) & 1
    codes = (bits << np.arange(fmt.bits)[:, None]).sum(axis=2).reshape(32, 128)
    signs = (codes < 16).astype(int)
    kernels = kernels_of(fmt)
    signed, k = bool(kernels.sign_bits), fmt.bits - kernels.sign_bits
    if signed:
        codes = np.where(signs, 15 - codes, codes - 16)
    f = w.fragments()
    low, high = fmt.bits // 2 * 64, fmt.bits % 2 * 32  # words of a tile
    buffer = as_numpy(f.buffer)
    lows = buffer[: 4 * low * 4].view(np.uint32).reshape(2, 2, low)
    highs = buffer[f.planes.high :][: 4 * high * 4].view(np.uint32).reshape(2, 2, high)
    for rows, columns, lane in product((0, 1), (0, 1), range(32)):
        here = np.s_[rows * 16 : rows * 16 + 16, columns * 64 : columns * 64 + 64]
        if kernels.masked or k > 3:  # a lane's words lie together
            at = [k // 2 * 2 * lane + word for word in range(k // 2 * 2)]
        else:
            at = [32 * word + lane for word in (0, 1)]
        words = [int(lows[rows, columns, place]) for place in at]
        if fmt.bits % 2:
            words.append(int(highs[rows, columns, lane]))
        pairs = [pair(codes[here], k, lane, p) for p in range(16)]
        expected = [0] * fmt.bits
        if kernels.masked:
            expected = masked(codes[here], lane)
        elif k == 2:
            for p, bits_of_pair in enumerate(pairs):
                expected[p // 8] |= bits_of_pair << (8 * (p % 4) + 4 * (p // 4 % 2))
        elif k == 3:
            for p, bits_of_pair in enumerate(pairs):
                (b, j, m) = (p // 8, p // 4 % 2, p % 4)
                step, byte = 2 * b + m // 2, 2 * (m % 2) + j
                for word in range(3):
                    part = bits_of_pair >> 2 * word & 3 if step == 3 else bits_of_pair * (word == step)
                    expected[word] |= part << (8 * byte + 6 * (step == 3))
        else:
            fit = 32 // (2 * k)
            for p in range(fit * k):
                expected[p // fit] |= pairs[p] << (p % fit * 2 * k)
            if k % 2:
                for word in range(k):
                    expected[word] |= (pairs[15] >> (2 * word) & 3) << 30
        if signed:
            for p in range(16):
                two = pair(signs[here], 1, lane, p)
                expected[4] |= (two & 1) << (15 - p) | (two >> 1) << (31 - p)
        assert words == expected


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products_of_every_variant(fmt: cq.KBit) -> None:
    for n, k in ((70, 160), (200, 2048)):
        w = on_gpu(gauss((n, k), 1), fmt)
        before = as_numpy(w.blocks)
        assert_products(w)
        np.testing.assert_array_equal(as_numpy(w.blocks), before)


@pytest.mark.parametrize("absmax", STORED)
@pytest.mark.parametrize("magnitude", [2e-4, 1e-3, 1e-2, 1, 5])
@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_magnitudes_of_weights(k: int, magnitude: float, absmax: Any) -> None:
    """Small weights are lifted in float16: nothing of them is lost, in any core."""
    cupy = device.cupy()
    fmt = cq.KBit(k, absmax=absmax)
    w = on_gpu(gauss((96, 256), 1) * F(magnitude), fmt)
    if kernels_of(fmt).masked:  # by a multiple of 5, and 5 more would be more than scales have room for
        lift = w.fragments().lift + 13
        assert lift % 5 == 0
        assert 1 <= 31.5 / np.abs(as_numpy(w.dequantize())).max() / 2.0**lift < 32
    else:
        assert (w.fragments().lift > 0) == (magnitude < 5e-3)
    assert w.fragments().half
    for m in (2, 40, 200):
        for dtype in (np.float16, ml_dtypes.bfloat16):
            x = cupy.asarray(gauss((m, 256), 2)).astype(dtype)
            y = cq.linear(x, w, bias=cupy.ones(96, F) * F(magnitude), dtype=F)
            assert nmse(y, testing.linear(x, w, bias=np.ones(96) * magnitude)) < 1e-6, m


def test_scales_beyond_float16() -> None:
    """A foreign float16 scale of NaN or infinity stays in its row."""
    fmt = cq.KBit(4, absmax="float16")
    raw = cq.quantize(gauss((40, 64)), fmt).blocks.copy()
    raw.view(fmt.storage)["absmax"][7, 1] = np.inf
    w = cq.from_blocks(device.cupy().asarray(raw), fmt, (40, 64))
    assert not w.fragments().half
    for m in (4, 40):
        y = as_numpy(device.cupy().asarray(gauss((m, 64))) @ w.T)
        assert not np.isfinite(y[:, 7]).any()
        assert np.isfinite(np.delete(y, 7, axis=1)).all()


def test_small_experts_beside_large_ones() -> None:
    """Magnitudes far apart in a stack: float16 keeps what counts, or is not used."""
    cupy = device.cupy()
    for fmt, spread in (
        (cq.KBit(2), 1e-4),
        (cq.KBit(4), 1e-4),
        *((cq.KBit(k, absmax="float16"), 1e-6) for k in (2, 4, 5)),
    ):
        for scale in (1, 100 if fmt.absmax == "float16" else 5):
            w = gauss((2, 64, 256), 1) * F(scale)
            w[1] *= F(spread)
            there = on_gpu(w, fmt)
            for m in (2, 40, 200):
                x = cupy.asarray(gauss((m, 256), 2).astype(np.float16))
                y, exact = as_numpy(cq.matmul(x, there.T, dtype=F)), testing.linear(x, there)
                for expert in (0, 1):
                    assert nmse(y[expert], exact[expert]) < 2e-6, (str(fmt), scale, m)


def test_codebooks_of_tiny_entries() -> None:
    cupy = device.cupy()
    for absmax in STORED:
        w = on_gpu(gauss((64, 256), 1), cq.KBit(2, [0, 1e-6, 2e-6, 3e-6], absmax=absmax))
        for m in (2, 40):
            x = cupy.asarray(gauss((m, 256), 2).astype(np.float16))
            assert nmse(cq.matmul(x, w.T, dtype=F), testing.linear(x, w)) < 1e-6


def test_captured_in_a_graph() -> None:
    """The codebook is on the GPU before, and the captured product needs nothing more."""
    cupy = device.cupy()
    w = on_gpu(gauss((200, 512), 1), cq.KBit(3, SKEWED)).prepare()
    x, out = cupy.asarray(gauss((40, 512)).astype(np.float16)), cupy.empty((40, 200), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cq.matmul(x, cq.quantize(gauss((200, 512), 2), "kbit3").to_device("cuda").T, out=out)  # compile
        stream.begin_capture()
        cq.matmul(x, w.T, out=out)
        graph = stream.end_capture()
        out.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
    assert nmse(out, testing.linear(x, w)) < 1e-6
