"""What only a GPU can show: bits as on the CPU, layouts, magnitudes, memory."""

from __future__ import annotations

import itertools
from math import ceil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import CODEBOOKS, FLOATS, NAMES, ON_GPU, random_blocks
from pictures import assert_pictured
from products import assert_quantized_as_on_the_cpu, cuda_weight, gauss
from walks import random_exl3

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit
from cuquant.testing import as_numpy, nmse, worst_element

pytestmark = pytest.mark.gpu
F = np.float32


@pytest.mark.parametrize("name", [*ON_GPU, "q8_1"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantize_gives_the_bytes_of_numpy(name: str, dtype: np.dtype[Any]) -> None:
    x = gauss((200, 256))
    x[3], x[4] = 0, -0.0
    x[5] *= F(1e-38)
    x[6] *= F(1e-41)
    x[7] = np.round(x[7] * 4) / 4
    x[8] = np.where(x[8] < 0, F(0), F(-0.0))
    if name not in CODEBOOKS:
        x[9] = x[9] / np.abs(x[9]).max() * F(60000)
    x = x.astype(dtype)
    assert_quantized_as_on_the_cpu(x, name)
    assert cq.quantize(device.cupy().asarray(x[:0]), name).shape == (0, 256)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("value", "message"), [(np.nan, "nan in row"), (1e30, "overflows float16")])
def test_quantize_refuses_in_the_same_words(name: str, value: float, message: str) -> None:
    x = gauss((3, 5, 64))
    x[1, 2, 40] = x[2, 1, 3] = value
    with pytest.raises(ValueError, match=message) as on_cpu:
        cq.quantize(x, name)
    with pytest.raises(ValueError, match=message) as on_gpu:
        cq.quantize(device.cupy().asarray(x), name)
    assert str(on_cpu.value) == str(on_gpu.value)
    assert "(1, 2)" in str(on_gpu.value)


@pytest.mark.parametrize("name", [*ON_GPU, "q8_1"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dequantize_gives_the_numbers_of_numpy(name: str, dtype: np.dtype[Any]) -> None:
    w = cq.from_blocks(random_blocks(name, (64, 512)), name, (64, 512))
    with np.errstate(all="ignore"):
        expected = w.dequantize(dtype)
    got = as_numpy(w.to_device("cuda").dequantize(dtype))
    np.testing.assert_array_equal(got.astype(F), expected.astype(F))
    numbers = ~np.isnan(expected)  # a NaN's sign and payload are the processor's own
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))


SHAPES = [(1, 32), (16, 64), (33, 96), (130, 2048), (3, 17, 160), (2, 3, 40, 64)]


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_repack_is_exact_both_ways(name: str, shape: tuple[int, ...]) -> None:
    cupy = device.cupy()
    raw = random_blocks(name, shape)
    w = cq.from_blocks(cupy.asarray(raw), name, shape)
    assert w.prepare() is w
    assert w.storage is not w.blocks
    assert (w.shape, w.device, w.nbytes) == (shape, "cuda", raw.nbytes)
    np.testing.assert_array_equal(as_numpy(w.blocks), raw)
    np.testing.assert_array_equal(as_numpy(w[0].blocks), raw[0]) if len(shape) > 1 else None
    np.testing.assert_array_equal(w.to_device("cpu").blocks, raw)


@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("at", [2, 8])
def test_storage_starts_at_any_even_address(name: str, at: int) -> None:
    """And nothing that is beside it in memory counts: of rows that end within a tile, too."""
    cupy = device.cupy()
    for shape in [(33, 96), (17, 2048)]:
        raw = random_blocks(name, shape)
        memory = cupy.full(raw.nbytes + 32, 0xFF, np.uint8)
        blocks = memory[at : at + raw.nbytes].reshape(raw.shape)
        blocks[...] = cupy.asarray(raw)
        w = cq.from_blocks(blocks, name, shape)
        dense = as_numpy(w.dequantize())
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(dense, cq.from_blocks(raw, name, shape).dequantize())
        elsewhere = cq.from_blocks(cupy.asarray(raw), name, shape)
        x = cupy.asarray(gauss((1, shape[1])).astype(np.float16))
        np.testing.assert_array_equal(as_numpy(x @ w.T), as_numpy(x @ elsewhere.T))
        np.testing.assert_array_equal(as_numpy(w.blocks), raw)


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q6_k", "q2_k", "kbit2", "kbit3", "mxfp4", "int4-128"])
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
def test_repack_takes_several_runs(name: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs and more for each block, which has room for two, or parts of a row tile, unequal ones of
    several runs too, where there are more multiprocessors; row tiles that do not end with a run."""
    gpu = plan.Gpu(jit.capability(), multiprocessors)
    monkeypatch.setattr(jit, "gpu", lambda: gpu)
    fmt = cq.formats.get(name)
    shape = (272, 17408)
    row_tiles, tiles = plan.tiles(1, *shape)
    step = plan.repack(fmt.for_kernels, "to_fragments", row_tiles, tiles, gpu)
    run = dict(step.kernel.constants)["RUN"]
    assert tiles % run
    factors = plan.row_factors(fmt.for_kernels)
    assert step.grid[1] > 1 if multiprocessors > 1 and not factors else ceil(tiles / run) >= 3 * step.grid[1]
    raw = random_blocks(name, shape)
    w = cq.from_blocks(device.cupy().asarray(raw), name, shape).prepare()
    np.testing.assert_array_equal(as_numpy(w.blocks), raw)


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q4_k", "int4-32", "int4-64-zeros", "int4-128"])
def test_repack_where_scales_have_no_room(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows too long for shared memory they wait in global memory until they are lifted."""
    shape = (40, 1024)
    raw = random_blocks(name, shape)
    cupy, usual = device.cupy(), cq.from_blocks(device.cupy().asarray(raw), name, shape).prepare()
    monkeypatch.setattr(plan.blocks, "_kept", lambda *sizes: 0)
    plan.repack.cache_clear()
    w = cq.from_blocks(cupy.asarray(raw), name, shape).prepare()
    monkeypatch.undo()
    plan.repack.cache_clear()
    end = w.fragments().planes.row + 3 * plan.layout(w.format.for_kernels).row
    made, expected = (as_numpy(each.fragments().buffer[:end]) for each in (w, usual))
    np.testing.assert_array_equal(made, expected)
    np.testing.assert_array_equal(as_numpy(w.blocks), raw)


@pytest.mark.parametrize("name", ["q4_0", "q5_0"])
def test_the_fragment_layout_is_the_picture(name: str) -> None:
    raw = random_blocks(name, (32, 128))
    w = cq.from_blocks(raw, name, (32, 128)).to_device("cuda")
    records = raw.view(w.format.storage).reshape(32, 4)
    codes = np.concatenate([records["qs"] & 15, records["qs"] >> 4], axis=2)
    if name == "q5_0":
        fifths = np.ascontiguousarray(records["qh"]).view(np.uint8).reshape(32, 4, 4)
        codes |= np.unpackbits(fifths, axis=2, bitorder="little") << 4
    codes = codes.reshape(2, 16, 2, 64)
    f, layout = w.fragments(), plan.layout(w.format)
    buffer = as_numpy(f.buffer)
    for tile, (row_tile, k_tile) in enumerate(np.ndindex(2, 2)):
        low = buffer[f.planes.low + tile * layout.low :][: layout.low]
        high = buffer[f.planes.high + tile * layout.high :][: layout.high]
        assert_pictured(w.format.bits, codes[row_tile, :, k_tile], low, high)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_1", "q8_0"])
def test_scales_and_factors_of_rows_are_those_of_the_picture(name: str) -> None:
    """Scales times 2^L, minimums times 2^(L - C), factors 2^(C - L): C is 24, in rows g + 8 less the bits."""
    rng = np.random.default_rng(3)
    rows = 2.0 ** rng.integers(-10, 10, (32, 1))
    w = cq.quantize((gauss((32, 128)) * rows).astype(F), name)
    records = w.blocks.view(w.format.storage).reshape(2, 2, 8, 2, 2)  # row tile, row / 8, g, tile, block
    d = records["d"].astype(np.float64)
    peaks = np.abs(d).max(axis=(3, 4), keepdims=True)
    if "m" in w.format.scales:
        peaks = np.maximum(
            peaks, np.abs(records["m"].astype(np.float64)).max(axis=(3, 4), keepdims=True) / 2**18
        )
    lift = 2.0 ** (15 - np.floor(np.log2(peaks)))
    codes = 2.0 ** np.array([24, 24 - (w.format.bits % 8)]).reshape(1, 2, 1, 1, 1)
    f = w.to_device("cuda").fragments()
    kept = [d * lift] + ([records["m"] * lift / codes] if "m" in w.format.scales else [])
    layout, buffer = plan.layout(f.fmt), as_numpy(f.buffer)
    stored = buffer[f.planes.scale :][: 4 * layout.scale].view(np.float16).reshape(2, 2, 8, 2, 2, len(kept))
    for word, expected in enumerate(kept):
        np.testing.assert_array_equal(stored[..., word].transpose(0, 3, 2, 1, 4), expected)
    factors = buffer[f.planes.row :][: 2 * layout.row].view(ml_dtypes.bfloat16).reshape(2, 8, 2)
    np.testing.assert_array_equal(factors.transpose(0, 2, 1).astype(np.float64), (codes / lift)[..., 0, 0])


@pytest.mark.parametrize("kind", ["float16", "q8_1"])
@pytest.mark.parametrize("name", ON_GPU)
def test_every_step_of_k_counts(name: str, kind: str) -> None:
    """Activations that are zero but in 16 columns, for every such step: a lost or doubled one shows."""
    cupy = device.cupy()
    for m, k in ((1, 576), (12, 576), (40, 576), (40, 512)):
        w = cuda_weight(name, (48, k))
        for step in range(k // 16):
            x = np.zeros((m, k), F)
            x[:, step * 16 : step * 16 + 16] = gauss((m, 16), step)
            a: Any = cupy.asarray(x.astype(np.float16))
            a = cq.quantize(a, "q8_1") if kind == "q8_1" else a
            assert nmse(a @ w.T, testing.linear(a, w)) < 1e-6, (m, step)


@pytest.mark.parametrize("name", ON_GPU)
def test_large_shapes_on_sampled_columns(name: str) -> None:
    """Long rows of W and many of them, at many batch sizes, 64 random columns in float64."""
    cupy = device.cupy()
    for n, k, batches in (
        (256, 28672, (1, 7, 16, 100)),  # 7: blocks of the decode core split K
        (25600, 256, (2, 5, 9, 16)),  # few columns: small blocks of a few row tiles
        (14336, 1024, (1, 4, 7, 16, 33, 256, 1000)),
        (4096, 4096, (4096,)),
    ):
        w = cq.quantize(cupy.random.standard_normal((n, k), dtype=F), name)
        columns = np.random.default_rng(0).choice(n, 64, replace=False)
        dense = as_numpy(w[columns].dequantize()).astype(np.float64)
        for m in batches:
            for kind in ("float16", "float32", "bfloat16", "q8_1"):
                x = cupy.random.standard_normal((m, k), dtype=F)
                a: Any = cq.quantize(x, "q8_1") if kind == "q8_1" else x
                if kind in ("float16", "bfloat16"):
                    a = x.astype(np.float16 if kind == "float16" else ml_dtypes.bfloat16)
                y = as_numpy(cq.matmul(a, w.T, dtype=F)[:, columns])
                reference = as_numpy(a).astype(np.float64) @ dense.T
                assert nmse(y, reference) < 1e-6
                assert worst_element(y, reference) < 0.01


def test_more_than_two_billion_elements() -> None:
    """The last rows of a weight beyond 2^31 elements, and outputs beyond 2^31."""
    cupy = device.cupy()
    n, k = 2**31 // 1024 + 4096, 1024
    fmt = cq.formats.get("q4_0")
    raw = cupy.random.randint(0, 256, (n, fmt.row_bytes(k)), dtype=np.uint8)
    raw.reshape(n, -1, fmt.block_bytes)[..., 1] = 0x2C
    w = cq.from_blocks(raw, "q4_0", (n, k))
    tail = w[-64:]
    x = cupy.asarray(gauss((17, k)).astype(np.float16))
    for m in (1, 17):
        y = as_numpy((x[:m] @ w.T)[:, -64:])
        assert nmse(y, testing.linear(x[:m], tail)) < 1e-6
    np.testing.assert_array_equal(as_numpy(w.blocks[-64:]), as_numpy(raw[-64:]))
    del w, raw
    small = cuda_weight("q8_0", (1 << 20, 32))
    big = cupy.asarray(gauss((2100, 32)).astype(np.float16))
    y = cq.matmul(big, small.T)
    assert y.size > 2**31
    assert nmse(y[-1:, -1000:], testing.linear(big[-1:], small[-1000:])) < 1e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_any_length_and_stride(dtype: np.dtype[Any]) -> None:
    """Blocks of threads keep up to 16384 numbers that they convert, and read more again; of many rows their
    threads have more of each."""
    cupy = device.cupy()
    for k in (1, 70, 96, 4096, 16384, 16416, 20_003, 40_000):
        w = cuda_weight("q8_0" if k % 32 == 0 else "trellis3", (16, k))
        for m in {4096: (1, 300, 600)}.get(k, (1, 5) if k < 10_000 else (2,)):
            x = gauss((m, k * 2))
            x[m // 2] *= F(1e-3)
            x[0, k - 1] = 1000 if dtype == np.float16 else 1e30
            whole = cupy.asarray(x).astype(dtype)
            for view in (whole[:, :k], whole[:, ::2], whole[:, 1 : k + 1], whole[::-1, k - 1 :: -1]):
                y, expected = cq.matmul(view, w.T, dtype=F), testing.linear(view, w)
                for row in {0, m // 2, m - 1}:
                    assert nmse(y[row], expected[row]) < 1e-6
                assert nmse(y[1:-1], expected[1:-1]) < 1e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_are_quantized_as_in_two_steps(dtype: np.dtype[Any]) -> None:
    """The float16 rows made with the blocks give the bits of those made of the blocks."""
    cupy = device.cupy()
    for k in (32, 96, 4096, 14336, plan.LONGEST_ROW, plan.LONGEST_ROW + 32):
        w = cuda_weight("q4_0", (40, k))
        for m in (1, 3, 200) if k < 10_000 else (2,):
            x = gauss((m, k * 2))
            x[0] *= F(3e-4)
            x[-1] *= F(1e3)
            x[m // 2, k // 2 : k // 2 + 32] = 0
            whole = cupy.asarray(x).astype(dtype)
            for view in (whole[:, :k], whole[:, ::2], whole[:, 1 : k + 1]):
                q = cq.quantize(view, "q8_1")
                assert (q.rows is not None) == (dtype == np.float16 or k <= plan.LONGEST_ROW)
                assert np.array_equal(as_numpy(q.blocks), cq.quantize(cupy.asnumpy(view), "q8_1").blocks)
                again = cq.from_blocks(q.blocks, "q8_1", (m, k))
                assert cupy.array_equal(cq.matmul(q, w.T), cq.matmul(again, w.T))
    bad = cupy.ones((4, 64), dtype)
    bad[1, 40], bad[2, 50], bad[3, :40] = np.nan, np.inf, 65504 if dtype == np.float16 else 1
    q, w = cq.quantize(bad, "q8_1"), cuda_weight("q4_0", (40, 64))
    y = as_numpy(cq.matmul(q, w.T))
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()
    assert nmse(y[[0, 3]], testing.linear(q, w)[[0, 3]]) < 1e-6
    vector = cq.quantize(bad[0], "q8_1")
    assert cupy.array_equal(cq.matmul(vector, cuda_weight("q4_0", (40, 64)).T), cupy.asarray(y[0]))


@pytest.mark.parametrize("name", ON_GPU)
def test_quantized_activations_of_any_magnitude(name: str) -> None:
    cupy = device.cupy()
    w = cuda_weight(name, (70, 160))
    for m in (1, 8, 9, 16, 40):
        for magnitude in (1e-3, 1, 1e3):
            x = cq.quantize(cupy.asarray(gauss((m, 160)) * F(magnitude)), "q8_1")
            assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_weights_beyond_float16(name: str) -> None:
    """Codes times scales that float16 does not hold: rows that are kept in its range hold them nevertheless,
    as do sums that are scaled in float32."""
    cupy = device.cupy()
    assert cuda_weight(name, (96, 256)).fragments().half
    assert not cq.from_blocks(cupy.asarray(random_blocks(name, (96, 256))), name, (96, 256)).fragments().half
    peak = F(1.5e4 if "m" in cq.formats.get(name).scales else 5e4)
    large = cq.quantize(gauss((96, 256)) * peak, name)
    large = large.to_device("cuda")
    assert large.fragments().half == plan.row_factors(cq.formats.get(name).for_kernels)
    for m in (3, 16, 50):
        x = cupy.asarray(gauss((m, 256)).astype(np.float16))
        y = cq.matmul(x, large.T, dtype=np.float32)
        assert nmse(y, testing.linear(x, large)) < 1e-6


@pytest.mark.filterwarnings("ignore:.* of the weights are too small")
@pytest.mark.parametrize("name", NAMES)
def test_small_blocks_beside_large_ones(name: str) -> None:
    """Activations that meet one block alone get all its bits, however much greater the others of its row are:
    where float16 does not hold both, scales multiply float32 sums."""
    cupy = device.cupy()
    rng = np.random.default_rng(5)
    halves = set()
    for exponent in range(0, 15):
        numbers = gauss((40, 128))
        numbers[:, 32:64] *= F(2.0**-exponent)
        # Of one sign and about one size: steps are small beside the minimum.
        numbers[:, 64:96] = rng.uniform(0.9, 1.1, (40, 32)) * 2.0**-exponent
        w = cq.quantize(numbers, name).to_device("cuda")
        halves.add(w.fragments().half)
        for m, block in ((1, 1), (20, 1), (20, 2), (70, 1)):
            x = np.zeros((m, 128), np.float16)
            x[:, block * 32 : block * 32 + 32] = gauss((m, 32))
            y = cq.matmul(cupy.asarray(x), w.T, dtype=np.float32)
            exact = testing.linear(x, w)
            assert nmse(y, exact) < 1e-6, (exponent, m, block)
    assert halves == {False, True}


@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
def test_minimums_that_lose_bits_come_back(name: str) -> None:
    """Small ones beside large scales, and what is made of them on another stream."""
    cupy = device.cupy()
    numbers = gauss((33, 256))
    numbers[5, 64:96] = np.linspace(1.2345e-4, 2, 32)
    w = cq.quantize(numbers, name)
    stored = w.blocks.copy()
    w = w.to_device("cuda")
    kept = w.fragments().kept
    assert kept is not None
    assert len(kept.scales) < 8
    with cupy.cuda.Stream(non_blocking=True) as stream:
        again = w.blocks
        stream.synchronize()
    assert np.array_equal(as_numpy(again), stored)


@pytest.mark.filterwarnings("ignore:.* of the weights are too small")
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_blocks_of_any_magnitude(name: str) -> None:
    """Every row is as exact as it would be alone, whatever the others are; blocks come back as they were."""
    cupy = device.cupy()
    rng = np.random.default_rng(7)
    rows, blocks = F(10) ** rng.uniform(-5, 2, (150, 1)), F(10) ** rng.uniform(-3, 0, (150, 8))
    numbers = gauss((150, 256)) * (rows * np.repeat(blocks, 32, 1)).astype(F)
    numbers[3], numbers[5, 32:64] = 0, 0
    w = cq.quantize(numbers.astype(F), name)
    stored = w.blocks.copy()
    w = w.to_device("cuda")
    for m in (1, 7, 16, 50, 200):
        x = cupy.asarray(gauss((m, 256)).astype(np.float16))
        y, exact = as_numpy(cq.matmul(x, w.T, dtype=np.float32)), testing.linear(x, w)
        assert not y[:, 3].any()
        for n in range(150):
            if exact[:, n].any():
                assert nmse(y[:, n], exact[:, n]) < (1e-6 if m >= 7 else 1e-5), (m, n)
    assert np.array_equal(as_numpy(w.blocks), stored)


@pytest.mark.parametrize("name", ["q4_0", "kbit4", "exl3-4-mcg"])
def test_a_bias_with_gaps(name: str) -> None:
    """Of any strides, for matrices and stacks, with few rows and many; not remembered, nor captured."""
    cupy = device.cupy()
    wide = np.arange(512, dtype=np.float32) / 100
    for lead in ((), (2,)):
        shape = (*lead, 128, 128)
        w = random_exl3(4, shape) if name.startswith("exl3") else cq.quantize(gauss(shape), name)
        there = w.to_device("cuda").prepare()
        given = cupy.asarray(wide)
        biases = [given[:256:2], given[127::-1], cupy.broadcast_to(given[5:6], (128,))]
        if lead:
            biases += [given[:256].reshape(128, 2).T, given.reshape(4, 128)[::2]]
        for m, bias in itertools.product((1, 40), biases):
            x = gauss((*lead, m, 128), 2)
            for _ in range(2):
                y = cq.linear(cupy.asarray(x), there, bias=bias)
                assert nmse(y, testing.linear(x, w, bias=as_numpy(bias))) < 1e-6
        assert not there.fragments().repeats
        xs = cupy.asarray(x)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with pytest.raises(RuntimeError, match="bias is not contiguous"):
                cq.linear(xs, there, bias=bias)
            stream.end_capture()
