"""k-quants and IQ4 on a GPU: numbers and bytes as on the CPU, the layout's picture, every core."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import FLOATS, K_QUANTS, random_blocks
from numpy.typing import NDArray
from pictures import assert_pictured
from products import assert_read_back, gauss, plan_anew

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit
from cuquant.formats import ggml, kquant
from cuquant.formats.kernels import kernels_of
from cuquant.plan import wgmma_core, wgmma_timed
from cuquant.testing import as_numpy, nmse, worst_element

pytestmark = pytest.mark.gpu
F = np.float32
NAMES = [row.name for row in K_QUANTS]
SHAPES = [(1, 256), (16, 768), (33, 1280), (130, 2304), (3, 17, 512), (2, 3, 16, 8448)]
BATCHES = (1, 3, 8, 9, 16, 17, 33, 64, 130, 300)
PRODUCT = (200, 2048)


def weight(name: str, shape: tuple[int, ...], seed: int = 1, factor: float = 1) -> cq.QuantizedArray:
    """Any codes and integer scales, on the GPU; float16 scales from 2^-8 to 2^-3 times a power of two."""
    raw = random_blocks(name, shape, seed, finite=True)
    records = raw.view(cq.formats.get(name).storage)
    for field in cq.formats.get(name).scales:
        records[field] = (records[field].astype(F) * F(factor)).astype(np.float16)
    return cq.from_blocks(raw, name, shape).to_device("cuda")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_numbers_are_those_of_the_cpu(name: str) -> None:
    for seed, shape in enumerate((*SHAPES, *([(5, 32), (40, 1056)] if name == "iq4_nl" else []))):
        assert_read_back(random_blocks(name, shape, seed), cq.formats.get(name), shape)


def codes_of(name: str, records: NDArray[Any]) -> NDArray[Any]:
    """Codes [n, 256]."""
    if name == "q2_k":
        return kquant.unpack_pairs_of_bits(records["qs"].reshape(-1, 32)).reshape(-1, 256)
    if name == "q3_k":
        low = kquant.unpack_pairs_of_bits(records["qs"].reshape(-1, 32)).reshape(-1, 256)
        return low | (kquant.unpack_bits(records["hmask"]) << 2)
    if name == "q6_k":
        low = ggml.unpack_nibbles(records["ql"].reshape(-1, 64))
        high = kquant.unpack_pairs_of_bits(records["qh"].reshape(-1, 32))
        return (low | (high << 4)).reshape(-1, 256)
    low = ggml.unpack_nibbles(records["qs"].reshape(-1, 32)).reshape(-1, 256)
    return low | (kquant.unpack_bits(records["qh"]) << 4) if name == "q5_k" else low


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_the_fragment_layout_is_the_picture(name: str) -> None:
    """Words of each lane, and scales d times 2^L, dmin too, of rows g + 8 by as much more as codes stand
    higher; the factors of rows are 2^(C - L), C being 24 less that (kernels/core/tile.cuh)."""
    w = weight(name, (16, 256), factor=2.0**-14)
    fmt, f, records = w.format, w.fragments(), as_numpy(w.blocks).view(w.format.storage)[:, 0]
    codes, layout, buffer = codes_of(name, records).astype(int), plan.layout(fmt), as_numpy(f.buffer)
    for tile in range(4):
        low = buffer[f.planes.low + tile * layout.low :][: layout.low]
        high = buffer[f.planes.high + tile * layout.high :][: layout.high]
        assert_pictured(fmt.bits, codes[:, 64 * tile : 64 * tile + 64], low, high)
    higher = 2.0 ** np.where(np.arange(16) < 8, 0, {6: 4}.get(fmt.bits, fmt.bits))
    most = {"q2_k": 16, "q3_k": 32, "q6_k": 128}.get(name, 64)  # the power of two that bounds integer scales
    d = records["d"].astype(np.float64)
    peaks, kept = np.abs(d) * most, [d]
    if "dmin" in fmt.scales:
        minimum = records["dmin"].astype(np.float64)
        peaks = np.maximum(peaks, np.abs(minimum) * higher)
        kept.append(-minimum * higher)
    lift = 2.0 ** (15 - np.floor(np.log2(peaks)))
    stored = buffer[f.planes.group :][: layout.group].view(np.float16).reshape(8, len(kept), 2)
    for word, expected in enumerate(kept):
        np.testing.assert_array_equal(stored[:, word].T.reshape(-1), expected * lift)
    factors = buffer[f.planes.row :][: layout.row].view(ml_dtypes.bfloat16).reshape(8, 2)
    np.testing.assert_array_equal(factors.T.reshape(-1).astype(np.float64), 2.0**24 / higher / lift)


@pytest.mark.parametrize("name", NAMES)
def test_products_of_every_batch(name: str) -> None:
    cupy = device.cupy()
    n, k = PRODUCT
    w = weight(name, (n, k))
    before = as_numpy(w.blocks)
    for m in BATCHES:
        for dtype in FLOATS:
            x = cupy.asarray(gauss((m, k), 2)).astype(dtype)
            y, exact = cq.matmul(x, w.T, dtype=F), testing.linear(x, w)
            assert nmse(y, exact) < 1e-6, (m, dtype)
            assert worst_element(y, exact) < 0.01, (m, dtype)
        q = cq.quantize(x, "q8_1")
        y = q @ w.T
        assert nmse(y, testing.linear(q, w)) < 1e-6, m
        np.testing.assert_array_equal(as_numpy(q @ w.T), as_numpy(y))
    np.testing.assert_array_equal(as_numpy(w.blocks), before)


@pytest.mark.parametrize("name", NAMES)
def test_edges_stacks_and_every_step_of_k(name: str) -> None:
    """Ragged rows, one group of columns, several matrices; activations of zero but for 16 columns."""
    cupy = device.cupy()
    for n, k, batches in ((70, 256, (1, 12, 40)), (48, 768, (1, 40))):
        w = weight(name, (n, k), 3)
        for m in batches:
            for step in range(k // 16):
                x = np.zeros((m, k), F)
                x[:, step * 16 : step * 16 + 16] = gauss((m, 16), step)
                a = cupy.asarray(x.astype(np.float16))
                assert nmse(cq.matmul(a, w.T, dtype=F), testing.linear(a, w)) < 1e-6, (n, m, step)
    w = weight(name, (3, 70, 256), 4)
    for m in (2, 40):
        x = cupy.asarray(gauss((3, m, 256), 5).astype(np.float16))
        y = cq.matmul(x, w.T, dtype=F)
        assert nmse(y, testing.linear(x, w)) < 1e-6, m


@pytest.mark.parametrize("name", NAMES)
def test_scales_at_both_ends(name: str) -> None:
    """Float16 scales that are subnormal, or large: what float16 does not hold is scaled in float32."""
    cupy = device.cupy()
    fmt = cq.formats.get(name)
    for factor in (2.0**-16, 2.0**-8, 1e-3, 32, 2.0**18):
        w = weight(name, (70, 256), 6, factor)
        assert w.fragments().half == (factor <= 32 or kernels_of(fmt).group_size == 0), factor
        for m in (2, 40):
            for dtype in (np.float16, ml_dtypes.bfloat16):
                x = cupy.asarray(gauss((m, 256), 7)).astype(dtype)
                y, exact = cq.matmul(x, w.T, dtype=F), testing.linear(x, w)
                assert nmse(y, exact) < 1e-6, (factor, m)
                assert worst_element(y, exact) < 0.01, (factor, m)


@pytest.mark.filterwarnings("ignore:.* of the weights are too small")
@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_small_blocks_beside_large_ones(name: str) -> None:
    """Activations that meet one block alone get its bits, however much greater the others of its row are:
    where float16 does not hold both, scales multiply float32 sums. (The last have less steps still.)"""
    cupy, halves = device.cupy(), []
    for exponent in range(0, 13):
        numbers = gauss((40, 768))
        numbers[:, 256:512] *= F(2.0**-exponent)
        # Of one sign and about one size: steps are small beside the minimum.
        numbers[:, 512:] = np.random.default_rng(5).uniform(0.9, 1.1, (40, 256)) * 2.0**-exponent
        w = cq.quantize(numbers, name).to_device("cuda")
        halves.append(w.fragments().half)
        for m, block in ((2, 1), (20, 1), (20, 2), (70, 1)):
            x = np.zeros((m, 768), np.float16)
            x[:, block * 256 : block * 256 + 256] = gauss((m, 256))
            y, exact = cq.matmul(cupy.asarray(x), w.T, dtype=F), testing.linear(x, w)
            for rows in (slice(0, 8), slice(8, 16)):
                assert nmse(y[:, rows], exact[:, rows]) < 1.5e-6, (exponent, m, block, rows)
    first = {"q2_k": 4, "q3_k": 6, "q6_k": 8}.get(name, 7)
    assert halves == [exponent < first for exponent in range(13)]


@pytest.mark.parametrize("name", NAMES)
def test_foreign_scales_stay_in_their_rows(name: str) -> None:
    fmt = cq.formats.get(name)
    raw = random_blocks(name, (40, 512), finite=True)
    raw.view(fmt.storage)["d"][7, 1] = np.inf
    w = cq.from_blocks(raw, name, (40, 512)).to_device("cuda")
    assert not w.fragments().half
    for m in (4, 40):
        y = as_numpy(device.cupy().asarray(gauss((m, 512))) @ w.T)
        assert not np.isfinite(y[:, 7]).any()
        assert np.isfinite(np.delete(y, 7, axis=1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_cores_of_older_gpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cupy = device.cupy()
    monkeypatch.setattr(jit, "capability", lambda: 80)
    for (n, k), batches in (((70, 256), (1, 9, 40)), ((300, 2048), (8, 200))):
        w = weight(name, (n, k), 8)
        for m in batches:
            x = cupy.asarray(gauss((m, k), 9).astype(np.float16))
            assert nmse(cq.matmul(x, w.T, dtype=F), testing.linear(x, w)) < 1e-6, (n, m)


@pytest.mark.parametrize("tile", list(wgmma_timed.STEP_US), ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile_of_the_wgmma_core(monkeypatch: pytest.MonkeyPatch, tile: Any) -> None:
    """Stages of one and of several groups of columns, splits and shared tiles that start within a group."""
    cupy = device.cupy()
    if jit.capability() != 90:
        pytest.skip("wgmma is sm_90a's")
    tried = 0
    shapes = [("q4_k", (3000, 2570, 1024)), ("q6_k", (100, 200, 1536))]
    if tile.resident > 1:  # as many blocks as run at once
        shapes = [("q4_k", (9, 9002, 1024)), ("q6_k", (13, 4306, 1024)), ("q4_k", (9, 2570, 1024))]
    for name, (m, n, k) in shapes:
        w = weight(name, (n, k), 10)
        x = cupy.asarray(gauss((m, k), 11).astype(np.float16))
        reference = x.astype(np.float64) @ w.dequantize().astype(np.float64).T
        for way in wgmma_timed.ways(plan.Problem(w.format, m, n, k, jit.gpu())):
            if way.tile != tile:
                continue
            monkeypatch.setattr(wgmma_timed, "ways", lambda *a, way=way: [way])
            plan_anew(w)
            assert nmse(cq.matmul(x, w.T, dtype=F), reference) < 1e-6, way
            monkeypatch.undo()
            tried += 1
    room = any(wgmma_core.stages_of(cq.formats.get(name), tile, 1) >= 3 for name, _ in shapes)
    assert tried or tile.resident == 1 or not room
    plan_anew()


def test_quantized_weights_and_their_products() -> None:
    """What quantizers make: the spread of scales of real weights, offsets included."""
    cupy = device.cupy()
    for name in NAMES:
        w = cq.quantize(cupy.asarray(gauss((64, 512), 12) * F(0.02)), name)
        np.testing.assert_array_equal(
            as_numpy(w.blocks), cq.quantize(gauss((64, 512), 12) * F(0.02), name).blocks
        )
        for m, mean in ((2, 0), (40, 0), (200, 2)):
            x = cupy.asarray((gauss((m, 512), 13) + F(mean)).astype(np.float16))
            assert nmse(cq.matmul(x, w.T, dtype=F), testing.linear(x, w)) < 1e-6, (name, m)


def hard_weights() -> NDArray[np.float32]:
    """Weights of all magnitudes, zeros of both signs, equal ones, ties, subnormal numbers."""
    rng = np.random.default_rng(14)
    x = gauss((640, 1024), 14)
    x[:64] *= F(0.02)
    x[64:128] *= 10 ** rng.uniform(-30, 3, (64, 1)).astype(F)
    x[128:160] *= 10 ** rng.uniform(-6, 0, (32, 1024)).astype(F)
    x[160], x[161], x[162], x[163] = 0, -0.0, 1, -0.5
    for row, magnitude in enumerate((1e-38, 1e-41, 1e-44, 9e-16, 1.1e-15, 1e-7, 6e-8, 1e-10), 164):
        x[row] *= F(magnitude)
    x[180:200] = rng.integers(-8, 8, (20, 1024))
    x[200:220] = rng.integers(-4, 5, (20, 1024)) * F(0.125)
    x[220:240] = np.abs(x[220:240])
    x[240:260] = -np.abs(x[240:260])
    x[260:280, ::7] = 0
    x[280:300] = np.where(rng.uniform(size=(20, 1024)) < 0.02, x[280:300], 0)
    x[300:310, 40:300] = 0
    x[310:320] = rng.standard_t(2, (10, 1024))
    return x


@pytest.mark.filterwarnings("ignore:.* of the weights are too small")
@pytest.mark.parametrize("name", NAMES)
def test_quantizing_as_on_the_cpu(name: str) -> None:
    cupy = device.cupy()
    x = hard_weights()
    for dtype in FLOATS:
        given = x.astype(dtype)
        expected = cq.quantize(given, name).blocks
        np.testing.assert_array_equal(as_numpy(cq.quantize(cupy.asarray(given), name).blocks), expected)
    expected = cq.quantize(x[:, :768], name).blocks
    for strided in (cupy.zeros((640, 2048), F)[:, ::2], cupy.zeros((640, 1027), F)[:, 3:]):
        strided[:] = cupy.asarray(x)
        np.testing.assert_array_equal(as_numpy(cq.quantize(strided[:, :768], name).blocks), expected)
    few = cq.quantize(cupy.asarray(x[:3, :256]), name)
    np.testing.assert_array_equal(as_numpy(few.blocks), cq.quantize(x[:3, :256], name).blocks)


@pytest.mark.filterwarnings("ignore:.* of the weights are too small")
@pytest.mark.parametrize("name", NAMES)
def test_quantizing_by_importance_as_on_the_cpu(name: str) -> None:
    """Columns of no importance, and some that matter much more than others; either host's array."""
    cupy, x, rng = device.cupy(), hard_weights(), np.random.default_rng(15)
    importance = 10 ** rng.uniform(-6, 3, 1024).astype(F)
    importance[5:40] = importance[700] = 0
    for dtype in FLOATS:
        given = x.astype(dtype)
        expected = cq.quantize(given, name, importance).blocks
        assert (expected != cq.quantize(given, name).blocks).any()
        made = cq.quantize(cupy.asarray(given), name, cupy.asarray(importance))
        assert made.device == "cuda"
        np.testing.assert_array_equal(as_numpy(made.blocks), expected)
    for part in (x[:30].reshape(2, 3, 5, 1024), x[7]):
        made, expected = (
            cq.quantize(cupy.asarray(part), name, importance),
            cq.quantize(part, name, importance),
        )
        assert made.shape == expected.shape
        np.testing.assert_array_equal(as_numpy(made.blocks), expected.blocks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e9, 1e30])
def test_quantizing_refuses_in_the_same_words(name: str, value: float) -> None:
    x = gauss((3, 5, 512))
    x[1, 2, 300] = x[2, 1, 3] = value
    for importance in (None, np.arange(1, 513)):
        with pytest.raises(ValueError, match="row") as on_cpu:
            cq.quantize(x, name, importance)
        with pytest.raises(ValueError, match="row") as on_cuda:
            cq.quantize(device.cupy().asarray(x), name, importance)
        assert str(on_cpu.value) == str(on_cuda.value)
