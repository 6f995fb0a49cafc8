"""The cores of the matrix product: every tile and way to run them, whatever plans make of a shape."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import ON_GPU
from products import check_way, cuda_weight, gauss, plan_anew, share_small_tiles

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit
from cuquant.formats.kernels import kernels_of
from cuquant.plan import mma_core, wgmma_core, wgmma_timed
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
F = np.float32


@pytest.mark.parametrize("capability", [75, 80, 86])
def test_the_cores_of_older_gpus(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    """What a GPU without wgmma and clusters takes, with the tiles that fit its shared memory."""
    cupy = device.cupy()
    monkeypatch.setattr(jit, "capability", lambda: capability)
    for name in ON_GPU:
        for shape in ((70, 160), (300, 4096)):
            w = cuda_weight(name, shape)
            for m in (1, 8, 9, 16, 40, 200):
                x = cupy.asarray(gauss((m, shape[1])).astype(np.float16))
                assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6, (name, shape, m)


MANY_ROWS = (
    (3072, 192),
    (5120, 192),
    (11_008, 192),
    (17_408, 192),
    (18_944, 64),
    (28_672, 192),
    (2560, 9728),
    (520, 6144),
    (5128, 8192),
)


@pytest.mark.parametrize(
    "name", ["q4_0", "q4_1", "q5_1", "q8_0", "q3_k", "q4_k", "q6_k", "kbit2", "kbit3", "kbit5", "nvfp4"]
)
def test_the_decode_core_with_as_many_rows_as_models_have(name: str) -> None:
    """Tall tiles of one block or of two small ones, two or four blocks that split K, with rows left over."""
    cupy = device.cupy()
    for n, k in MANY_ROWS:
        k = -(-k // 256) * 256
        few = cq.quantize(gauss((48, k)), name)
        rows = np.random.default_rng(0).integers(0, len(few), n)
        w, expected = few[rows].to_device("cuda"), as_numpy(few).astype(np.float64)[rows]
        for m in (1, 2, 4, 8):
            x = cupy.asarray(gauss((m, k), m).astype(np.float16))
            assert nmse(x @ w.T, as_numpy(x).astype(np.float64) @ expected.T) < 1e-6, (n, k, m)


MMA_TILES = [
    (4, 1, 4, 1, 2, 8),
    (8, 1, 4, 1, 2, 7),
    (8, 2, 4, 1, 2, 5),
    (4, 2, 4, 1, 4, 3),
    (8, 2, 4, 1, 3, 3),
]
MMA_TILES += [
    (8, 2, 4, 1, 2, 2),
    (8, 2, 4, 2, 1, 4),
    (8, 4, 4, 1, 2, 3),
    (16, 2, 8, 1, 1, 2),
    (16, 2, 8, 1, 1, 4),
]


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "kbit3", "q4_k", "mxfp4"])
@pytest.mark.parametrize("tile", MMA_TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile_of_the_mma_core(
    monkeypatch: pytest.MonkeyPatch, name: str, tile: tuple[int, ...]
) -> None:
    """Whatever shape asks for it, where there is no wgmma; without columns that blocks share, with those of
    all tiles, and of the last one."""
    cupy = device.cupy()
    monkeypatch.setattr(jit, "capability", lambda: 80)
    own = mma_core.MmaTile(*tile)
    for parts, least in ((1, 0), (3, 99), (2, 1)):

        def fastest(problem: plan.Problem, parts: int = parts, least: int = least) -> mma_core.MmaWay:
            return mma_core.MmaWay(own, min(least, prod(own.grid(problem))), parts)

        monkeypatch.setattr(mma_core, "_fastest", fastest)
        plan_anew()
        # Few steps along K, fewer than blocks; and many times those of a ring, with some left over.
        for (n, k), m in product(((70, 256), (300, 2816)), (17, 150)):
            w, x = cuda_weight(name, (n, k)), cupy.asarray(gauss((m, k), 1).astype(np.float16))
            bias, residual = cupy.asarray(gauss((n,), 2)), cupy.asarray(gauss((m, n), 3))
            expected = testing.linear(x, w, bias=bias, activation="relu", residual=residual)
            y = cq.linear(x, w, bias=bias, activation="relu", residual=residual, dtype=F)
            assert nmse(y, expected) < 1e-6, (n, m, parts)
            assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6, (n, m, parts)
    monkeypatch.undo()
    plan_anew()


@pytest.mark.parametrize(("m", "n", "k", "times"), [(40, 520, 8192, 20), (20, 70, 4096, 5)])
def test_blocks_that_share_columns_make_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, times: int
) -> None:
    """Whichever comes last: in calls of several streams and in a graph that is replayed, too."""
    cupy = device.cupy()
    monkeypatch.setattr(jit, "capability", lambda: 80)
    plan_anew()
    w, x = cuda_weight("q4_0", (n, k)), cupy.asarray(gauss((m, k), 1).astype(np.float16))
    gemm = plan.gemm(plan.Problem(w.format, m, n, k, jit.gpu()))
    assert gemm.plan.grid[0] > 3 * gemm.streamed > 0
    first = cq.matmul(x, w.T)
    assert nmse(first, testing.linear(x, w)) < 1e-6
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)):
        with stream:
            out = cupy.empty_like(first)
            for _ in range(times):
                cq.matmul(x, w.T, out=out)
                assert (out == first).all()
            stream.begin_capture()
            cq.matmul(x, w.T, out=out)
            graph = stream.end_capture()
            for _ in range(times):
                out[...] = 0
                graph.launch(stream)
                assert (out == first).all()
            stream.synchronize()
    monkeypatch.undo()
    plan_anew()


TILES = list(wgmma_timed.STEP_US)


def by_turns() -> Iterator[tuple[wgmma_core.Tile, str]]:
    """All tiles, with formats of several kinds that have them."""
    names = ["q8_0", "q5_1", "q4_0", "kbit3", "kbit5"]  # their kernels are those of the test below
    for i, tile in enumerate(TILES):
        turned = names[i % len(names) :] + names
        # Without a split, if there is one that has it so.
        ways = ((split, n) for split in (1, 2) for n in turned)
        yield tile, next(n for split, n in ways if wgmma_core.stages_of(cq.formats.get(n), tile, split) >= 3)


@pytest.mark.parametrize(("tile", "name"), list(by_turns()), ids=str)
def test_edges_of_every_tile(monkeypatch: pytest.MonkeyPatch, name: str, tile: Any) -> None:
    """Whole ones, and parts of those beside them, in all ways to run them: a few multiprocessors have several
    each, or share them out."""
    cupy = device.cupy()
    if jit.capability() != 90:
        pytest.skip("wgmma is sm_90a's")
    monkeypatch.setattr(wgmma_timed, "places_of", lambda gpu, cluster=1: 3 if cluster == tile.pair else 4)
    share_small_tiles(monkeypatch)
    m, n, k = tile.batch + 9, tile.rows * tile.pair + 40, 512 * max(1, tile.width // 2)
    w, x = cuda_weight(name, (n, k)), cupy.asarray(gauss((m, k)).astype(np.float16))
    bias, residual = cupy.asarray(gauss((n,), 1)), cupy.asarray(gauss((m, n), 2))
    reference = cupy.asarray(testing.linear(x, w))
    found = [
        c for c in wgmma_timed.ways(plan.Problem(cq.formats.get(name), m, n, k, jit.gpu())) if c.tile == tile
    ]
    for way in found:
        check_way(monkeypatch, way, w, x, bias, residual, reference)
    for way in found:
        if way.streamed:
            continue
        # One tile, with twice as many turns as there are stages, and one more.
        k = (2 * way.stages + 1) * tile.width * way.split * plan.TILE_COLUMNS
        w, x = cuda_weight(name, (tile.rows * tile.pair, k)), cupy.asarray(gauss((8, k)).astype(np.float16))
        only = way._replace(outputs=1)
        monkeypatch.setattr(wgmma_timed, "ways", lambda *a, only=only: [only])
        plan_anew(w)
        for _ in range(3):
            assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6, only
    whole = {c.streamed > 0 for c in found if c.split == 1}
    assert whole == {False, wgmma_core.shares_tiles(cq.formats.get(name), tile)} or not whole
    assert found
    monkeypatch.undo()
    plan_anew()


SPLIT_TILES = [tile for tile in TILES if tile.batch in (16, 64) and tile.k_tiles < 4 and tile.resident == 1]


@pytest.mark.parametrize(
    ("tile", "name"),
    [
        *((tile, "q8_0") for tile in SPLIT_TILES),
        *((tile, "q4_k") for tile in SPLIT_TILES if tile.width % 4 == 0),  # turns of whole blocks
    ],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_parts_of_a_split_need_not_be_equal(monkeypatch: pytest.MonkeyPatch, name: str, tile: Any) -> None:
    """Of nine turns of the loop five and four, of 17 five and three times four: as of K = 43 x 256."""
    cupy = device.cupy()
    if jit.capability() != 90:
        pytest.skip("wgmma is sm_90a's")
    fmt, splits = cq.formats.get(name), set()
    for turns in (9, 17):
        k = turns * tile.width * plan.TILE_COLUMNS
        w, x = cuda_weight(name, (70, k)), cupy.asarray(gauss((9, k), 1).astype(np.float16))
        for way in wgmma_timed.ways(plan.Problem(fmt, 9, 70, k, jit.gpu())):
            if way.tile == tile and way.split > 1:
                splits.add(way.split)
                monkeypatch.setattr(wgmma_timed, "ways", lambda *a, way=way: [way])
                plan_anew(w)
                assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6, way
                monkeypatch.undo()
    plan_anew()
    assert splits == ({2, 4} if wgmma_core.stages_of(fmt, tile, 2) >= 3 else set())


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "kbit3", "kbit5"])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_way_of_the_wgmma_core(monkeypatch: pytest.MonkeyPatch, name: str, tile: Any) -> None:
    """Whatever the measured times make of them: splits, shared tiles, edges, every epilogue."""
    cupy = device.cupy()
    if jit.capability() != 90:
        pytest.skip("wgmma is sm_90a's")
    fmt = cq.formats.get(name)
    ways = set()
    shapes = [
        (3000, 2570, 1024),
        (3000, 2560, 512),
        (100, 200, 2048),
        (9, 2570, 1024),
        (300, 2570, 1056),
        (60, 6000, max(2048, 512 * tile.width)),  # fewer tiles than clusters: a tile may be three's
        *((9, 2570, 64 * tile.width * turns) for turns in (9, 17)),  # unequal halves, and quarters
    ]
    if tile.resident > 1:  # as many blocks as run at once, of splits in 1, 2 and 4
        shapes = [(9, 9002, 512), (13, 9000, 992), (13, 4306, 1024), (9, 2570, 1024), (40, 3000, 1024)]
        shapes += [(13, 4306, 1280), (9, 2570, 1344)]
    for m, n, k in shapes:
        share_small_tiles(monkeypatch)
        found = [way for way in wgmma_timed.ways(plan.Problem(fmt, m, n, k, jit.gpu())) if way.tile == tile]
        w = cq.quantize(cupy.random.standard_normal((n, k), dtype=F), name)
        x = cupy.random.standard_normal((m, k), dtype=F).astype(np.float16)
        bias, residual = cupy.random.standard_normal(n, dtype=F), cupy.random.standard_normal((m, n), dtype=F)
        reference = x.astype(np.float64) @ w.dequantize().astype(np.float64).T
        for way in found:
            ways.add((way.split, way.streamed > 0))
            check_way(monkeypatch, way, w, x, bias, residual, reference)
        monkeypatch.undo()
    plan_anew()
    if not ways:  # no room for three stages, or registers
        assert max(wgmma_core.stages_of(fmt, tile, split) for split in (1, 2)) < 3
        return
    assert (1, False) in ways or kernels_of(fmt).lookup  # tables take room, and lookups registers
    assert ((1, True) in ways) == ((1, False) in ways and wgmma_core.shares_tiles(fmt, tile))
    assert ((2, False) in ways) == (tile.pair == 1 and wgmma_core.stages_of(fmt, tile, 2) >= 3)
    assert tile.resident == 1 or tile.k_tiles == 4 or {split for split, _ in ways} == {1, 2, 4}


@pytest.mark.parametrize(
    ("name", "m"),
    [("q8_0", 1), ("q8_0", 2), ("q8_0", 5), ("q8_0", 8), ("q5_1", 5), ("kbit3", 6), ("kbit4", 7)],
)
def test_few_rows_of_large_weights(monkeypatch: pytest.MonkeyPatch, name: str, m: int) -> None:
    """By the wgmma core, as if all weights were large."""
    cupy = device.cupy()
    if jit.capability() != 90:
        pytest.skip("wgmma is sm_90a's")
    monkeypatch.setattr(wgmma_timed, "_LARGE", 0)
    monkeypatch.setattr(wgmma_timed, "_VERY_LARGE", 0)
    monkeypatch.setattr(wgmma_timed, "_FEW_ROWS", dict.fromkeys(wgmma_timed._FEW_ROWS, 0.0))
    monkeypatch.setattr(wgmma_timed, "_FEW_LOOKUPS", 0.0)
    plan_anew()
    for shape in ((70, 160), (2570, 1056), (300, 4096), (3, 200, 512)):
        *lead, n, k = shape
        problem = plan.Problem(cq.formats.get(name), m, n, k, jit.gpu(), int(np.prod(lead)))
        gemm = plan.gemm(problem)
        assert plan.core_of(gemm.plan.kernel) == "wgmma"
        w, x = cuda_weight(name, shape), cupy.asarray(gauss((*lead, m, k), 2))
        bias, residual = cupy.asarray(gauss((n,), 3)), cupy.asarray(gauss((*lead, m, n), 4))
        for a in (x, x.astype(np.float16), x.astype(ml_dtypes.bfloat16), cq.quantize(x, "q8_1")):
            assert nmse(cq.matmul(a, w.T, dtype=F), testing.linear(a, w)) < 1e-6, (shape, m)
        y = cq.linear(x, w, bias=bias, activation="gelu", residual=residual, dtype=F)
        expected = testing.linear(x, w, bias=bias, activation="gelu", residual=residual)
        assert nmse(y, expected) < 1e-6, (shape, m)
        frame = cupy.full((*lead, m + 2, n + 24), np.nan, np.float16)
        view = frame[..., 1 : m + 1, 1 : n + 1]
        assert nmse(cq.matmul(x, w.T, out=view), testing.linear(x, w)) < 1e-6, (shape, m)
        view.fill(np.nan)
        assert cupy.isnan(frame).all(), (shape, m)
    plan_anew()
