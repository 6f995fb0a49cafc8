"""Trellis weights on a GPU: bits as on the CPU, the fragment layout and back, products of all cores."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from formats_table import FLOATS, TRELLIS
from numpy.typing import NDArray
from products import plan_anew, share_small_tiles
from test_trellis import BITS, F, Parts, gauss, random_parts, rng

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit, problem
from cuquant.formats.kernels import kernels_of
from cuquant.plan import wgmma_timed
from cuquant.testing import as_numpy, nmse, worst_element

pytestmark = pytest.mark.gpu
GROUPS = (32, 128)
BATCHES = (1, 3, 8, 9, 16, 17, 33, 64, 130, 300)
SHAPES = [(70, 160), (200, 1024), (33, 130), (65, 31), (1, 1)]
"""Whole pieces of x in rows that the kernels can read, and others."""


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    gpu = jit.gpu()
    formats = [cq.formats.get(name) for name in TRELLIS]
    shapes = [(n, k, 1) for n, k in SHAPES] + [(40, 96, 3), (96, 256, 1)]
    todo = {
        plan.gemm(plan.Problem(fmt, m, n, k + -k % 8, gpu, count, half)).plan.kernel
        for fmt, m, (n, k, count), half in product(formats, BATCHES, shapes, (True, False))
    }
    todo |= {kernel for kernel in plan.all_kernels(formats, [gpu]) if kernel.op != "gemm"}
    compile_ahead(todo)


def on_gpu(x: Any, fmt: Any) -> cq.QuantizedArray:
    return cq.quantize(device.cupy().asarray(x), fmt)


def made(p: Parts) -> tuple[cq.QuantizedArray, cq.QuantizedArray]:
    """A weight of these parts on the CPU, and the same on the GPU."""
    w = cq.trellis_from_parts(**p)
    return w, w.to_device("cuda")


def agrees(y: Any, exact: NDArray[np.float64], most: float = 1e-6, worst: float = 0.01) -> None:
    assert nmse(y, exact) < most
    assert worst_element(y, exact) < worst


# Numbers


@pytest.mark.parametrize("name", TRELLIS)
def test_quantize_gives_the_bytes_of_numpy(name: str) -> None:
    """Fitted grids too; ragged sides, zeros, tiny and large numbers, other types and strides."""
    cupy = device.cupy()
    x = gauss(70, 300)
    x[3], x[:, 128:256], x[5, :50] = 0, 0, -0.0
    x[6:12] *= np.array([1e-38, 1e-41, 1e-30, 1e20, 1e-8, 1e-3], F)[:, None]
    x[12:20] **= 5
    for dtype in FLOATS:
        given = (x * F(1e-19) if dtype == np.float16 else x).astype(dtype)
        expected, got = cq.quantize(given, name), on_gpu(given, name)
        assert got.format == expected.format
        np.testing.assert_array_equal(as_numpy(got.blocks), expected.blocks)
    strided = cupy.zeros((70, 600), F)
    strided[:, ::2] = cupy.asarray(x)
    got = cq.quantize(strided[:, ::2], name)
    np.testing.assert_array_equal(as_numpy(got.blocks), cq.quantize(x, name).blocks)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("grid", [[0.0], [-1, 1], [-3.0, 5.0, 1], [1e-30, 1, 3, 2], [0.5, -0.5, -1, 1]])
def test_grids_signs_and_moments_as_on_the_cpu(grid: list[float], group: int) -> None:
    x, fmt = gauss(3, 17, 200), cq.Trellis(2, group, grid)
    signs = {"su": rng(1).choice([-1, 1], 200), "sv": rng(2).choice([-1, 1], 17)}
    for more in ({}, signs, {"moments": np.square(gauss(200, seed=3)), "seed": 5}):
        expected = cq.trellis_quantize(x, fmt, **more)
        got = cq.trellis_quantize(device.cupy().asarray(x), fmt, **more)
        np.testing.assert_array_equal(as_numpy(got.blocks), expected.blocks)
    fitted = cq.trellis_quantize(x, "trellis3", moments=np.square(gauss(200, seed=3)))
    got = cq.trellis_quantize(device.cupy().asarray(x), "trellis3", moments=np.square(gauss(200, seed=3)))
    assert got.format == fitted.format
    np.testing.assert_array_equal(as_numpy(got.blocks), fitted.blocks)


@pytest.mark.parametrize("name", ["trellis3"])
def test_importance_on_either_host(name: str) -> None:
    cupy, x, importance = device.cupy(), gauss(3, 17, 200), np.square(gauss(200, seed=3))
    expected = cq.quantize(x, name, importance)
    there = cupy.asarray(importance)
    for w, given in ((x, there), (cupy.asarray(x), there), (cupy.asarray(x), importance)):
        for made in (cq.quantize(w, name, given), cq.trellis_quantize(w, name, moments=given)):
            assert made.device == device.of(w)
            assert made.format == expected.format
            np.testing.assert_array_equal(as_numpy(made.blocks), expected.blocks)


@pytest.mark.parametrize("method", ["encode", "encode_with", "rows"])
@pytest.mark.parametrize("by_importance", [False, True])
def test_a_derived_class_quantizes_as_on_the_cpu(method: str, by_importance: bool) -> None:
    """By its own methods, not by the kernels of the class from which it derives."""

    def negative(self: Any, x: Any, *more: Any) -> Any:
        return getattr(cq.Trellis, method)(self, -x, *more)

    def negated(self: Any, *given: Any) -> Any:
        return -cq.Trellis.rows(self, *given)

    own = type("Own", (cq.Trellis,), {method: negated if method == "rows" else negative})
    fmt, x = own(3, 128, np.linspace(-1, 1, 8)), gauss(32, 256)
    importance = [np.arange(1, 257)] if by_importance else []
    made = cq.quantize(device.cupy().asarray(x), fmt, *importance)
    np.testing.assert_array_equal(as_numpy(made.blocks), cq.quantize(x, fmt, *importance).blocks)
    if method == "rows":
        with pytest.raises(NotImplementedError, match="works on NumPy arrays only"):
            made.dequantize()


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40), (50,), (2, 3, 5, 40)])
def test_shapes(shape: tuple[int, ...]) -> None:
    expected, got = cq.quantize(gauss(*shape), "trellis3"), on_gpu(gauss(*shape), "trellis3")
    assert got.shape == shape
    np.testing.assert_array_equal(as_numpy(got.blocks), expected.blocks)
    np.testing.assert_array_equal(as_numpy(got.dequantize()), expected.dequantize())


def test_refuses_in_the_same_words() -> None:
    x = gauss(3, 5, 130)
    x[1, 2, 77] = x[2, 1, 3] = np.nan
    large, tiny = gauss(4, 128) * F(1e30), cq.Trellis(2, grid=[-1e-20, 1e-20])
    for given, fmt in ((x, "trellis3"), (large, tiny)):
        with pytest.raises(ValueError, match=r"row|overflows float32") as on_cpu:
            cq.quantize(given, fmt)
        with pytest.raises(ValueError, match=r"row|overflows float32") as on_cuda:
            on_gpu(given, fmt)
        assert str(on_cpu.value) == str(on_cuda.value)


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
@pytest.mark.parametrize("shape", [(40, 128), (33, 130), (2, 3, 17, 333), (1, 1)])
def test_dequantize_gives_the_numbers_of_numpy(bits: int, group: int, shape: tuple[int, ...]) -> None:
    p = random_parts(bits, shape, group, (1 << bits) - 1)
    p["scales"] *= F(10) ** rng(1).integers(-44, 38, p["scales"].shape)
    with np.errstate(over="ignore"):
        p["scales"][~np.isfinite(p["scales"])] = 0
    p["grid"][0] = 0
    w, there = made(p)
    for dtype in FLOATS:
        with np.errstate(all="ignore"):
            expected = w.dequantize(dtype)
        got = as_numpy(there.dequantize(dtype))
        np.testing.assert_array_equal(got.astype(F), expected.astype(F))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


# The fragment layout


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
@pytest.mark.parametrize("shape", [*SHAPES, (3, 40, 96), (700, 1600)])
def test_blocks_are_rebuilt_exactly(bits: int, group: int, shape: tuple[int, ...]) -> None:
    """Indices beyond N and K and the grid, scales of 0, -0 and of all magnitudes."""
    for magnitudes in ((0, 1), (-3, 3), (-44, 37)):
        p = random_parts(bits, shape, group, (1 << bits) - 1)
        p["scales"] *= F(10) ** rng(1).integers(*magnitudes, p["scales"].shape)
        p["scales"].reshape(-1)[::7], p["scales"].reshape(-1)[::11] = 0, -0.0
        w, there = made(p)
        there.prepare()
        np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)
        np.testing.assert_array_equal(as_numpy(there.dequantize()), w.dequantize())
        for index in (slice(0, None, 3), slice(1, 1)):
            np.testing.assert_array_equal(as_numpy(there[index].dequantize()), w[index].dequantize())


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
def test_rows_are_selected_exactly(bits: int, group: int) -> None:
    w = cq.quantize(gauss(5, 37, 70), cq.Trellis(bits, group))
    there = w.to_device("cuda")
    some = rng().integers(0, 37, 500)
    for index in (
        1,
        slice(1, 4),
        (2, 3),
        (2, slice(5, 20)),
        (slice(None), 3),
        (Ellipsis, 0, slice(None)),
        (2, 3, slice(None)),
        (0, Ellipsis, [1, 2], slice(None)),
        (1, [5, 5, 36, 0]),
        (slice(None, None, -1), slice(None, None, 2)),
        (2, some),
        (0, slice(0, 0)),
    ):
        np.testing.assert_array_equal(as_numpy(there[index].blocks), w[index].blocks)
    np.testing.assert_array_equal(as_numpy(there[2][device.cupy().asarray(some)].blocks), w[2][some].blocks)
    several = cq.trellis_from_parts(**random_parts(3, (2, 17, 40))).to_device("cuda")
    with pytest.raises(IndexError, match="whose su differ cannot be one matrix"):
        several[:, 3]


# Products


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
@pytest.mark.parametrize("shape", SHAPES)
def test_products_against_float64(bits: int, group: int, shape: tuple[int, int]) -> None:
    """All batch sizes, and so all cores, with signs of columns and without."""
    cupy = device.cupy()
    n, k = shape
    w = on_gpu(gauss(*shape, seed=1), cq.Trellis(bits, group))
    plain = cq.trellis_quantize(
        cupy.asarray(gauss(*shape, seed=1)), w.format, su=np.ones(k), sv=rng(3).choice([-1, 1], n)
    )
    before = as_numpy(w.blocks)
    dense, dense_plain = (as_numpy(v.dequantize()).astype(np.float64) for v in (w, plain))
    for m in BATCHES:
        x = cupy.asarray(gauss(m, k, seed=2)).astype(np.float16)
        exact = as_numpy(x).astype(np.float64) @ dense.T
        agrees(x @ w.T, exact)
        agrees(x @ plain.T, as_numpy(x).astype(np.float64) @ dense_plain.T)
        if m in (3, 17, 130):
            for dtype in FLOATS:
                z = cupy.asarray(gauss(m, k, seed=2)).astype(dtype)
                agrees(cq.matmul(z, w.T, dtype=F), as_numpy(z).astype(np.float64) @ dense.T)
            if k % 32 == 0:
                q = cq.quantize(x, "q8_1")
                agrees(q @ w.T, as_numpy(q.dequantize()).astype(np.float64) @ dense.T)
                q.rows = None
                agrees(q @ w.T, as_numpy(q.dequantize()).astype(np.float64) @ dense.T)
    np.testing.assert_array_equal(as_numpy(w.blocks), before)
    assert w.fragments().half
    assert plain.fragments().signs is None


@pytest.mark.parametrize("name", TRELLIS)
def test_every_step_of_k_counts(name: str) -> None:
    """Activations that are zero but in sixteen columns."""
    cupy = device.cupy()
    w = on_gpu(gauss(200, 1024, seed=1), name)
    dense = as_numpy(w.dequantize()).astype(np.float64)
    for m in (1, 16, 64, 300):
        for step in range(0, 64, 7):
            x = np.zeros((m, 1024), np.float16)
            x[:, 16 * step : 16 * step + 16] = gauss(m, 16)
            agrees(cq.matmul(cupy.asarray(x), w.T, dtype=F), x.astype(np.float64) @ dense.T)


@pytest.mark.parametrize(("bits", "group"), list(product(BITS, GROUPS)))
@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e-8, 1e8, 1e30])
def test_magnitudes_of_scales_and_activations(bits: int, group: int, magnitude: float) -> None:
    cupy = device.cupy()
    p = random_parts(bits, (96, 256), group)
    p["scales"] *= F(magnitude)
    w, there = made(p)
    for m in (2, 40, 130):
        for inverse in (1, 1e-30 if magnitude > 1 else 1e30):
            x = gauss(m, 256, seed=2) * F(inverse)
            agrees(cupy.asarray(x) @ there.T, testing.linear(x, w))


@pytest.mark.parametrize("group", GROUPS)
def test_scales_far_apart(group: int) -> None:
    """What float16 does not hold takes the core that scales float32 sums: every row keeps its bits."""
    cupy = device.cupy()
    p = random_parts(3, (64, 256), group)
    p["scales"] *= np.logspace(-20, 15, 64, dtype=F)
    w, there = made(p)
    assert not there.fragments().half
    for m in (2, 40, 130):
        x = gauss(m, 256, seed=2)
        y, exact = as_numpy(cupy.asarray(x) @ there.T), testing.linear(x, w)
        assert nmse(y, exact) < 1e-6  # one column is nearly all of a row's mean square, and may cancel
        assert m < 40 or max(nmse(y[:, n], exact[:, n]) for n in range(64)) < 1e-6
    np.testing.assert_array_equal(as_numpy(there.blocks), w.blocks)


GRIDS = [
    [0.0],
    [0.0, 0.0, 1.0],
    [5.0],
    [1e-30, 2e-30, -3e-30, 1e-29],
    [-7e29, 1e30, 3e30],
    [-1, -0.004, 1e-4, 0.3],
    [1e-7, 1.0, -0.5],
    [1e-30, 1, 3],
    [-3e38, 1e38],
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_grids(grid: list[float], group: int) -> None:
    """Of any magnitude and spread; groups of the least level alone keep its bits."""
    cupy = device.cupy()
    p = random_parts(2, (40, 160), group) | {"grid": grid}
    p["packed"][::2] = 0
    if max(map(abs, grid)) > 1e30:
        p["scales"] *= F(1e-3)
    w, there = made(p)
    assert kernels_of(w.format).in_float16 == (grid != [1e-30, 1, 3])
    for m in (1, 12, 40):
        x = gauss(m, 160, seed=2) * F(1e-3)
        x[:, np.arange(160) // 16 % 2 == 1] = 0
        for columns in (x, gauss(m, 160, seed=3) * F(1e-3)):
            exact = testing.linear(columns, w)
            got = cupy.asarray(columns) @ there.T
            agrees(got, exact) if exact.any() else np.testing.assert_array_equal(as_numpy(got), 0)
    np.testing.assert_array_equal(as_numpy(there.prepare().blocks), w.blocks)


@pytest.mark.parametrize("name", ["trellis2", "trellis3-32"])
def test_stacks_broadcast_and_fuse(name: str) -> None:
    """One su for all matrices, or each its own."""
    cupy = device.cupy()
    w, fmt = on_gpu(gauss(3, 40, 96), name), cq.formats.get(name)
    assert isinstance(fmt, cq.Trellis)
    p = random_parts(fmt.bits, (3, 40, 96), fmt.group_size)
    own = cq.trellis_from_parts(**p).to_device("cuda")
    ragged = cq.trellis_from_parts(**random_parts(3, (3, 40, 90))).to_device("cuda")
    for m in (2, 40, 150):
        for lead in ((), (3,), (2, 1), (2, 3)):
            x = cupy.asarray(gauss(*lead, m, 96, seed=1)).astype(np.float16)
            for weight in (w, own):
                agrees(cq.matmul(x, weight.T, dtype=F), testing.linear(x, weight))
            q = cq.quantize(x, "q8_1")
            agrees(q @ own.T, testing.linear(q, own))
            agrees(q @ w.T, testing.linear(q, w))
            short = x[..., :90]
            agrees(cq.matmul(short, ragged.T, dtype=F), testing.linear(short, ragged))
    x, bias, residual = gauss(2, 3, 7, 96), gauss(3, 40), gauss(2, 3, 7, 40)
    given = {"bias": bias, "residual": residual}
    for activation in (None, "relu", "gelu", "gelu_erf", "silu"):
        y = cq.linear(
            cupy.asarray(x), w, activation=activation, **{k: cupy.asarray(v) for k, v in given.items()}
        )
        agrees(y, testing.linear(x, w, activation=activation, **given))


def test_activations_in_odd_places() -> None:
    """Strides, addresses that are not aligned, NaN beyond the columns, and NaN in a row."""
    cupy = device.cupy()
    w = on_gpu(gauss(70, 130, seed=1), "trellis3")
    wide = on_gpu(gauss(70, 160, seed=1), "trellis3")
    for m in (3, 40):
        for weight, k in ((w, 130), (wide, 160)):
            room = cupy.full((m, 2 * k + 9), np.nan, np.float16)
            for x in (room[:, :k], room[:, 1 : k + 1], room[:, : 2 * k : 2], room[::-1, 3 : 3 + k]):
                x[...] = cupy.asarray(gauss(m, k, seed=2))
                agrees(cq.matmul(x, weight.T, dtype=F), testing.linear(x, weight))
        x = cupy.asarray(gauss(m, 130)).astype(np.float16)
        x[1, 7] = np.nan
        y = as_numpy(x @ w.T)
        assert np.isnan(y[1]).all()
        assert np.isfinite(np.delete(y, 1, axis=0)).all()


def test_storage_bytes_in_odd_places() -> None:
    """Which kernels cannot read where they lie."""
    cupy = device.cupy()
    w, x = cq.quantize(gauss(33, 130), "trellis3"), cupy.asarray(gauss(3, 130)).astype(np.float16)
    for start in (0, 1, 2, 8):
        room = cupy.zeros(w.nbytes + 16, np.uint8)
        room[start : start + w.nbytes] = cupy.asarray(w.blocks.reshape(-1))
        there = cq.from_blocks(room[start : start + w.nbytes], w.format, w.shape)
        np.testing.assert_array_equal(as_numpy(there.dequantize()), w.dequantize())
        agrees(cq.matmul(x, there.T, dtype=F), testing.linear(x, w))


@pytest.mark.parametrize("name", TRELLIS)
def test_same_bits_and_graphs(name: str) -> None:
    cupy = device.cupy()
    w = on_gpu(gauss(200, 1024, seed=1), name).prepare()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for m in (1, 16, 40, 300):
            x, out = cupy.asarray(gauss(m, 1024)).astype(np.float16), cupy.empty((m, 200), np.float16)
            first = as_numpy(x @ w.T)
            for _ in range(20):
                np.testing.assert_array_equal(as_numpy(cq.matmul(x, w.T, out=out)), first)
            stream.begin_capture()
            cq.matmul(x, w.T, out=out)
            graph = stream.end_capture()
            out.fill(np.nan)
            graph.launch(stream)
            np.testing.assert_array_equal(as_numpy(out), first)


@pytest.mark.parametrize("bits", BITS)
def test_signs_of_columns_are_given_to_w(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles that are bound by the tensor cores: some multiprocessors have several each, share them out or
    split K. K is ragged; matrices of a stack have their own, even if x is one for all."""
    if jit.capability() != 90:
        pytest.skip("wgmma is sm_90a's")
    cupy, ways, taken = device.cupy(), wgmma_timed.ways, set()
    monkeypatch.setattr(wgmma_timed, "places_of", lambda gpu, cluster=1: 3 if cluster > 1 else 4)
    share_small_tiles(monkeypatch)
    for shape, lead in (((300, 520), ()), ((140, 72), ()), ((3, 140, 136), ()), ((3, 140, 136), (3,))):
        _, w = made(random_parts(bits, shape))
        signs = w.fragments().signs
        assert signs is not None
        assert signs.differ == (len(shape) > 2)
        m, n, k = 270, *shape[-2:]
        x = cupy.asarray(gauss(*lead, m, k).astype(np.float16))
        expected = testing.linear(x, w)
        problem = plan.Problem(w.format.for_kernels, m, n, k, jit.gpu(), int(np.prod(shape[:-2])))
        for way in ways(problem):
            if (way.tile.batch, way.tile.groups) != (256, 2):
                continue
            taken.add((way.tile.pair, way.split, way.streamed > 0))
            monkeypatch.setattr(wgmma_timed, "ways", lambda *given, way=way: [way])
            plan_anew(w)
            agrees(x @ w.T, expected)
            (known,) = w.fragments().repeats.values()
            assert known.work.launch.signs_go_to == "W"
            agrees(x.astype(F) @ w.T, expected)  # x is converted, and takes them
    assert {(pair, 1, shares) for pair in (1, 2) for shares in (False, True)} <= taken
    monkeypatch.undo()
    plan_anew()


def test_the_core_follows_the_batch() -> None:
    w = on_gpu(gauss(2000, 1024), "trellis3").fragments()
    taken = []
    for m in (1, 8, 300, 4096):
        source = problem.source((m, 1024), (2048, 2), True)
        out, end = problem.Output((m, 2000), (2000, 1), 0), problem.Epilogue(0, False, None, 0, None)
        taken.append(problem.resolve(w.weight, source, out, end, plan.Gpu(90)).signs_go_to)
    assert taken == ["x", "x", "", "W"]


def test_files_and_devices(tmp_path: Any) -> None:
    w = on_gpu(gauss(17, 40), cq.Trellis(3, 32))
    cq.save(tmp_path / "w.safetensors", {"w": w.prepare()})
    loaded = cq.load(tmp_path / "w.safetensors", "cuda")["w"]
    assert loaded.format == w.format
    np.testing.assert_array_equal(as_numpy(loaded.blocks), as_numpy(w.blocks))
    np.testing.assert_array_equal(w.to_device("cpu").blocks, cq.quantize(gauss(17, 40), w.format).blocks)
    assert w.validate() is w
