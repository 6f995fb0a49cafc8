"""EXL3 weights on a GPU: numbers as on the CPU, the fragment layout and back, products of all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import FLOATS
from numpy.typing import NDArray
from products import check_way, plan_anew, share_small_tiles
from walks import GENERATORS, PRODUCT_BITS, random_exl3

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import backend as cuda, jit
from cuquant.formats.exl3 import HADAMARD
from cuquant.plan import wgmma_core, wgmma_timed
from cuquant.plan.wgmma_core import Tile
from cuquant.testing import as_numpy, nmse, worst_element
from cuquant.warmup import kernels

pytestmark = pytest.mark.gpu
BATCHES = (1, 3, 8, 9, 16, 17, 33, 64, 130, 300)
SHAPES = [(128, 128), (384, 1024), (256, 640)]
F = np.float32
SOME = [(4, "3inst"), (4, "mul1"), *((bits, "mcg") for bits in PRODUCT_BITS)]


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    gpu = jit.gpu()
    formats = [cq.Exl3(*given) for given in SOME]
    todo = {
        plan.gemm(plan.Problem(fmt, m, n, k, gpu)).plan.kernel
        for fmt in formats
        for m in BATCHES
        for n, k in SHAPES
    }
    every = [cq.Exl3(bits, generator) for bits in range(1, 9) for generator in GENERATORS]
    compile_ahead(todo | {kernel for fmt in every for kernel in plan.matrix_kernels(fmt)})


def gauss(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, F)


def agrees(y: Any, exact: Any, most: float = 1e-6) -> None:
    assert nmse(y, exact) < most
    assert worst_element(y, exact) < 10 * most**0.5


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_and_bytes(bits: int, generator: str) -> None:
    w = random_exl3(bits, (384, 256), generator)
    there = w.to_device("cuda")
    for dtype in FLOATS:
        got = as_numpy(there.dequantize(dtype))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, w.dequantize(dtype))
    there.prepare()
    np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)
    some = there[128:384]
    np.testing.assert_array_equal(as_numpy(some.blocks), w[128:384].blocks)


def test_stacks() -> None:
    """Each matrix of a stack has its own sides; products with one after the other, where they lie."""
    cupy = device.cupy()
    w = random_exl3(3, (2, 128, 256))
    there, dense = w.to_device("cuda").prepare(), w.dequantize().astype(float).swapaxes(1, 2)
    np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)
    np.testing.assert_array_equal(as_numpy(there[1].blocks), w[1].blocks)
    for number in (0, 1):
        one = there._of_stack(number)
        assert one is not None
        assert (one.shape, one.storage) == ((128, 256), there.storage)
        np.testing.assert_array_equal(as_numpy(one.blocks), w[number].blocks)
    for shape in ((2, 5, 256), (5, 256), (3, 1, 20, 256), (3, 2, 4, 256)):
        x = gauss(*shape)
        agrees(cupy.asarray(x) @ there.mT, x.astype(float) @ dense)
    q = cq.quantize(cupy.asarray(x), "q8_1")
    agrees(q @ there.mT, as_numpy(q.dequantize()).astype(float) @ dense)
    x, bias, residual = gauss(2, 20, 256), gauss(2, 128, seed=1), gauss(2, 20, 128, seed=2)
    given = {"bias": cupy.asarray(bias), "residual": cupy.asarray(residual)}
    out = cupy.zeros((2, 20, 256), F)[..., ::2]
    for more in ({}, {"out": out}):
        y = cq.linear(cupy.asarray(x), there, activation="relu", **given, **more)
        agrees(y, np.maximum(x.astype(float) @ dense + bias[:, None], 0) + residual)
    of_four = random_exl3(4, (3, 1, 128, 128))
    for bias in (gauss(3, 1, 128, seed=3), gauss(3, 1, 256, seed=3)[..., ::2], gauss(256)[::-2]):
        x = gauss(3, 1, 5, 128)
        y = cq.linear(
            cupy.asarray(x), of_four.to_device("cuda"), bias=cupy.asarray(np.ascontiguousarray(bias))
        )
        agrees(y, testing.linear(x, of_four, bias=bias))
    own = cupy.asarray(residual)
    cq.linear(cupy.asarray(gauss(2, 20, 256)), there, residual=own, out=own)
    agrees(own, gauss(2, 20, 256).astype(float) @ dense + residual)
    x = gauss(2, 5, 128)
    expected = x.astype(float) @ of_four.dequantize().astype(float).swapaxes(-1, -2)
    agrees(cupy.asarray(x) @ of_four.to_device("cuda").mT, expected)


def test_stacks_like_one_before_are_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = device.cupy()
    w = random_exl3(3, (2, 128, 256))
    there, dense = w.to_device("cuda").prepare(), w.dequantize().astype(float).swapaxes(1, 2)
    for seed in range(3):
        sizes = ((2, 20, 256), (2, 128), (2, 20, 128))
        x, bias, residual = (gauss(*size, seed=3 * seed + i) for i, size in enumerate(sizes))
        ends = {"bias": cupy.asarray(bias), "residual": cupy.asarray(residual)}
        y = cq.linear(cupy.asarray(x), there, activation="relu", **ends)
        agrees(y, np.maximum(x.astype(float) @ dense + bias[:, None], 0) + residual)
        monkeypatch.setattr(cuda, "_turned", None)
    monkeypatch.undo()
    agrees(cupy.asarray(x) @ there.mT, x.astype(float) @ dense)


def test_stacks_in_a_graph() -> None:
    cupy = device.cupy()
    w = random_exl3(4, (3, 128, 256)).to_device("cuda").prepare()
    # Rows of a matrix's part of x do not merge here: none are copied.
    x, y = cupy.asarray(gauss(2, 3, 2, 256)).astype(np.float16), cupy.empty((2, 3, 2, 128), np.float16)
    expected = as_numpy(cq.matmul(x, w.mT, out=y))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cq.matmul(x, w.mT, out=y)
        stream.begin_capture()
        cq.matmul(x, w.mT, out=y)
        graph = stream.end_capture()
        y[...] = 0
        graph.launch()
        np.testing.assert_array_equal(as_numpy(y), expected)


@pytest.mark.parametrize(("bits", "generator"), SOME)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_against_float64(bits: int, generator: str, shape: tuple[int, int]) -> None:
    """All batch sizes, and so all cores; all types of x, and x in q8_1."""
    cupy = device.cupy()
    w = random_exl3(bits, shape, generator)
    there, dense = w.to_device("cuda"), w.dequantize().astype(np.float64)
    for m in BATCHES:
        given = cupy.asarray(gauss(m, shape[1], seed=2))
        for dtype in FLOATS if m in (3, 17, 130) else (np.float16,):
            x = given.astype(dtype)
            y = cq.matmul(x, there.T, dtype=F)
            agrees(y, as_numpy(x).astype(np.float64) @ dense.T)
    q = cq.quantize(given, "q8_1")
    agrees(q @ there.T, as_numpy(q.dequantize()).astype(np.float64) @ dense.T)
    np.testing.assert_array_equal(as_numpy(cq.matmul(given, there.T, x_format="q8_1")), as_numpy(q @ there.T))
    np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)


@pytest.mark.parametrize("bits", PRODUCT_BITS)
def test_every_step_of_k_counts(bits: int) -> None:
    """Activations that are zero but in one column: H spreads it over 128."""
    w = random_exl3(bits, (128, 256))
    there, dense = w.to_device("cuda"), w.dequantize().astype(np.float64)
    for m in (1, 16, 130):
        for first in range(0, 256, 37):
            x = np.zeros((m, 256), np.float16)
            x[:, first] = gauss(m)
            agrees(cq.matmul(device.cupy().asarray(x), there.T, dtype=F), x.astype(np.float64) @ dense.T)


def by_turns() -> Iterator[tuple[wgmma_core.Tile, cq.Exl3]]:
    """The tiles that the wgmma core has for walks, with steps of so many bits."""
    for i, tile in enumerate(wgmma_timed.STEP_US):
        for bits in (*PRODUCT_BITS[i % len(PRODUCT_BITS) :], *PRODUCT_BITS):
            fmt = cq.Exl3(bits, "mcg")
            if max(wgmma_core.stages_of(fmt, tile, split) for split in (1, 2)) >= 3:
                yield tile, fmt
                break


@pytest.mark.parametrize(("tile", "fmt"), list(by_turns()), ids=str)
def test_every_tile_of_the_wgmma_core(monkeypatch: pytest.MonkeyPatch, tile: Any, fmt: cq.Exl3) -> None:
    """Those that turn their sums and those that do not; parts of tiles, several of a block, shared ones."""
    cupy, gpu = device.cupy(), jit.gpu()
    if gpu.capability != 90:
        pytest.skip("wgmma is sm_90a's")
    monkeypatch.setattr(wgmma_timed, "places_of", lambda gpu, cluster=1: 3 if cluster == tile.pair else 4)
    share_small_tiles(monkeypatch)
    m, k = tile.batch + 9, 512 * max(1, tile.width // 2)
    n = (tile.rows * tile.pair // HADAMARD + 1) * HADAMARD
    w = random_exl3(fmt.bits, (n, k))
    there, x = w.to_device("cuda"), cupy.asarray(gauss(m, k)).astype(np.float16)
    bias, residual = cupy.asarray(gauss(n, seed=1)), cupy.asarray(gauss(m, n, seed=2))
    reference = cupy.asarray(testing.linear(x, w))
    ways = [c for c in wgmma_timed.ways(plan.Problem(fmt, m, n, k, gpu)) if c.tile == tile and c.split < 4]
    for way in ways:
        check_way(monkeypatch, way, there, x, bias, residual, reference)
    whole = wgmma_core.stages_of(fmt, tile, 1) >= 3  # else only halves of K
    expected = {False, wgmma_core.shares_tiles(fmt, tile)} if whole else set[bool]()
    assert ways
    assert {c.streamed > 0 for c in ways if c.split == 1} == expected
    monkeypatch.undo()
    plan_anew()


@pytest.mark.parametrize("tile", [Tile(128, 2), Tile(128, 2, 2), Tile(256, 2), Tile(64, 2)], ids=str)
def test_tiles_of_few_columns(monkeypatch: pytest.MonkeyPatch, tile: Any) -> None:
    """Warpgroups begin the next tile while others store: what they turn and store lies in the same memory."""
    cupy, gpu, m = device.cupy(), jit.gpu(), 2 * tile.batch
    if gpu.capability != 90:
        pytest.skip("wgmma is sm_90a's")
    monkeypatch.setattr(wgmma_timed, "places_of", lambda gpu, cluster=1: 2)
    w = random_exl3(4, (1024, 128))
    there, x = w.to_device("cuda"), cupy.asarray(gauss(m, 128)).astype(np.float16)
    residual = cupy.asarray(gauss(m, 1024, seed=2))
    exact = testing.linear(x, w)
    for way in wgmma_timed.ways(plan.Problem(cq.Exl3(4, "mcg"), m, 1024, 128, gpu)):
        if way.tile != tile or way.split > 1:
            continue
        monkeypatch.setattr(wgmma_timed, "ways", lambda *a, way=way: [way])
        plan_anew(there)
        for added, expected in ((None, exact), (residual, exact + as_numpy(residual))):
            first = cq.linear(x, there, residual=added)
            agrees(first, expected)
            for _ in range(20):
                np.testing.assert_array_equal(as_numpy(cq.linear(x, there, residual=added)), as_numpy(first))
        monkeypatch.undo()
        monkeypatch.setattr(wgmma_timed, "places_of", lambda gpu, cluster=1: 2)
    monkeypatch.undo()
    plan_anew()


@pytest.mark.parametrize("m", [1, 8, 40])
def test_infinity_and_more_than_float32_holds(m: int) -> None:
    """A row is turned as a whole, so that all of its results are spoilt, but no other's."""
    fmt = cq.Exl3(4, "mcg")
    w = random_exl3(fmt.bits, (384, 256))
    there, dense = w.to_device("cuda"), w.dequantize().astype(np.float64)
    for bad in (np.inf, np.nan, 3e38):
        x = gauss(m, 256)
        x[m // 2, 5] = bad
        if bad == 3e38:
            x[m // 2, :128] = bad * np.sign(fmt.parts(w.blocks, w.shape).suh[:128].astype(F))
        y = as_numpy(device.cupy().asarray(x) @ there.T)
        assert not np.isfinite(y[m // 2]).any()
        rest = np.arange(m) != m // 2
        if rest.any():
            agrees(y[rest], x[rest].astype(np.float64) @ dense.T)


@pytest.mark.parametrize("bits", [1, 7])
def test_bits_that_become_floats_first(bits: int) -> None:
    w = random_exl3(bits, (256, 128))
    x = gauss(5, 128)
    agrees(device.cupy().asarray(x) @ w.to_device("cuda").T, x.astype(float) @ w.dequantize().astype(float).T)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-5, 1e4, 1e30])
def test_magnitudes_of_activations(magnitude: float) -> None:
    """Rows are float16 numbers times a power of two of their own; one channel a thousand times others."""
    w = random_exl3(4, (256, 512))
    there, dense = w.to_device("cuda"), w.dequantize().astype(np.float64)
    x = gauss(20, 512) * F(magnitude)
    x[3] = 0
    x[4:8, 5] *= 1000
    x[8] *= F(1e-3)
    for m in (2, 20):
        y = as_numpy(device.cupy().asarray(x[:m]) @ there.T)
        exact = x[:m].astype(np.float64) @ dense.T
        for row, own in zip(y, exact, strict=True):
            assert nmse(row, own) < 1e-6 or not own.any()
        assert not y[3:4].any()


def test_what_follows_the_sums() -> None:
    """Bias, activation and residual, of any type; results in any place, in x's or another type."""
    cupy = device.cupy()
    w = random_exl3(4, (384, 256), "3inst")
    there = w.to_device("cuda")
    for m in (1, 8, 40):
        for dtype, most in ((np.float16, 1e-6), (ml_dtypes.bfloat16, 1e-5), (F, 1e-6)):
            x, residual = (gauss(2, m, side, seed=side).astype(dtype) for side in (256, 384))
            bias = gauss(384, seed=3).astype(dtype)
            exact = testing.linear(x, w, bias=bias, activation="silu", residual=residual)
            added = {"bias": cupy.asarray(bias), "residual": cupy.asarray(residual), "activation": "silu"}
            whole = cupy.asarray(x)
            agrees(cq.linear(whole, there, **added), exact, most)
            for place in (
                cupy.zeros((2, m, 768), dtype)[..., ::2],
                cupy.zeros((2, 384, m), dtype).swapaxes(1, 2),
            ):
                assert cq.linear(whole, there, out=place, **added) is place
                agrees(place, exact, most)
            own = added["residual"]
            cq.linear(whole, there, out=own, **added)
            agrees(own, exact, most)
    x = gauss(256)
    agrees(cupy.asarray(x) @ there.T, testing.linear(x, w))
    agrees(there @ cupy.asarray(gauss(256, 3)), testing.linear(gauss(256, 3).T.copy(), w).T)


def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of many rows, where the product turns none, are in memory a part at a time: the same numbers."""
    w = random_exl3(4, (256, 128)).to_device("cuda")
    x = device.cupy().asarray(gauss(21, 128))
    residual = device.cupy().asarray(gauss(21, 256))
    expected = as_numpy(cq.linear(x, w, residual=residual))
    monkeypatch.setattr(cuda, "_SUMS_BYTES", 2 * 256 * 8)
    w.fragments().repeats.clear()
    with jit.planned_for(plan.Gpu(80, 108)):
        assert nmse(cq.linear(x, w, residual=residual), expected) < 1e-6  # other cores
    assert not w.fragments().repeats
    if jit.capability() == 90:  # those of x, where the product turns sums
        monkeypatch.setattr(cuda, "_TURNED_BYTES", 0)
        x = device.cupy().asarray(gauss(600, 128))
        agrees(x @ w.T, testing.linear(x, w))
        assert not w.fragments().repeats


def test_again_and_in_a_graph() -> None:
    """Repeated calls take the short way; the same bits, also where x, and memory, are others."""
    cupy = device.cupy()
    w = random_exl3(4, (384, 512)).to_device("cuda").prepare()
    for m in (1, 20):
        x, y = cupy.asarray(gauss(m, 512)).astype(np.float16), cupy.empty((m, 384), np.float16)
        w.fragments().repeats.clear()
        expected = cq.matmul(x, w.T)
        cq.matmul(x, w.T, out=y)
        assert len(w.fragments().repeats) == 2
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            cq.matmul(x, w.T, out=y)
            stream.begin_capture()
            cq.matmul(x, w.T, out=y)
            graph = stream.end_capture()
            for _ in range(20):
                y[...] = 0
                graph.launch()
                np.testing.assert_array_equal(as_numpy(y), as_numpy(expected))
        other = cupy.asarray(gauss(m, 512, seed=5)).astype(np.float16)
        agrees(
            cq.matmul(other, w.T), as_numpy(other).astype(float) @ as_numpy(w.dequantize()).astype(float).T
        )


def test_operands_of_any_place() -> None:
    """x between 16 bytes, or backwards; K that 16 rows stage in parts; what a graph has no memory for."""
    cupy = device.cupy()
    w = random_exl3(2, (128, 16384))
    there, dense = w.to_device("cuda").prepare(), w.dequantize().astype(np.float64)
    for m in (1, 16):
        wide = cupy.asarray(gauss(m, 2 * 16384, seed=6)).astype(np.float16)
        for x in (wide[:, 3:16387], wide[:, ::2], wide[::-1, :16384], wide[:, 16384:]):
            agrees(cq.matmul(x, there.T), as_numpy(x).astype(np.float64) @ dense.T)
    stream, q = cupy.cuda.Stream(non_blocking=True), cq.quantize(wide[:, :16384], "q8_1")
    apart = cupy.zeros((2, 9, 128), np.float16)[:, :8]  # no single stride leads through 2 x 8 rows
    x = wide[:, :16384].reshape(2, 8, 16384)
    with stream:
        stream.begin_capture()
        for given, more in ((q, {}), (x, {"out": apart}), (x, {"residual": apart})):
            with pytest.raises(RuntimeError, match="a CUDA graph has no memory"):
                cq.linear(given, there, **more)
        stream.end_capture()


def forget() -> None:
    """What this thread's launches start."""
    jit._prepared.launch.cache_clear()
    jit._prepared.known.clear()


@pytest.mark.parametrize("bits", [1, 4, 7])
def test_warmup(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows all that is compiled for products, of x in q8_1 too, after a weight was prepared."""
    for shape in ((128, 256), (2, 128, 256)):
        w, x = random_exl3(bits, shape), gauss(20, 256)
        cq.warmup([w], batches=[20])
        known = {jit._key(0, kernel) for kernel in kernels(w.format, shape, [20], jit.gpu())}
        there, given = w.to_device("cuda").prepare(), device.cupy().asarray(x)
        q = cq.quantize(given, "q8_1")
        modules: dict[Any, Any] = {}
        with monkeypatch.context() as patch:
            patch.setattr(jit, "_modules", modules)
            patch.setattr(jit, "_functions", {})
            forget()
            found = [operand @ there.mT for operand in (given, q)]
            device.cupy().cuda.Device().synchronize()
            forget()  # what they start goes with its module
        assert modules.keys() <= known
        dense = w.dequantize().astype(np.float64).swapaxes(-1, -2)
        for y, numbers in zip(found, (x, as_numpy(q.dequantize())), strict=True):
            agrees(y, numbers.astype(np.float64) @ dense)


def test_no_experts() -> None:
    """Ids of none of them give NaN."""
    cupy = device.cupy()
    there = cq.Experts(*(random_exl3(4, (0, 128, 128)).to_device("cuda") for _ in range(3)))
    y = cq.moe(cupy.asarray(gauss(2, 128)), there, cupy.zeros((2, 1), np.int32), cupy.ones((2, 1), F))
    assert y.shape == (2, 128)
    assert np.isnan(as_numpy(y)).all()
