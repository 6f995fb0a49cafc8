"""Mixtures of many tokens on a GPU: hidden numbers in levels, and an expert's last rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any

import numpy as np
import pytest
from mixtures import F, close, gauss, on_gpu, reference, routed, stacks

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit
from cuquant.plan import mma_core
from cuquant.plan.wgmma_core import Tile
from cuquant.plan.wgmma_timed import MOST_PARTS, WGMMA_TILES, wgmma_grouped

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("grouped")]


@pytest.mark.parametrize("format", ["q4_0", "q4_k", "q8_0"])
def test_hidden_numbers_of_many_magnitudes(format: str) -> None:
    """Within a row, from row to row, and rows of which a number is far above all others."""
    w = stacks(format, 4, k=256, hidden=512, n=64)
    spread = np.ldexp(F(1), np.random.default_rng(1).integers(-9, 10, (4, 512, 1))).astype(F)
    up = cq.quantize(testing.as_numpy(w.up) * spread, format).to_device("cuda")
    experts = w._replace(up=up)
    x, ids, probs = gauss(300, 256), *routed(300, 4, 2)
    x *= np.ldexp(F(1), np.arange(300) % 41 - 20).astype(F)[:, None]
    x[::5, ::64] *= 3000
    x[7] = 0
    y = testing.as_numpy(cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:]))
    expected = reference(x, experts, ids, probs)
    assert not y[7].any()
    for row in (*range(7), *range(8, 300)):
        assert testing.nmse(y[row], expected[row]) <= 1e-5, row


def test_rows_in_levels() -> None:
    """The kernel that brings the columns of a row to one level."""
    cupy, generator = device.cupy(), np.random.default_rng(2)
    rows, k, columns = 11, 160, plan.moe.LEVEL_COLUMNS
    x = generator.integers(-2048, 2048, (rows, k // columns, columns)).astype(np.float16)
    zero = 16  # the byte of level 0
    levels = generator.integers(14, 19, (rows, k // columns)).astype(np.uint8)
    levels[1], levels[2] = 17, 0
    levels[3, ::2] = 0
    x[levels == 0] = 0
    levels[4, 0] = 31
    given, factors = cupy.asarray(x.reshape(rows, k)), cupy.empty(rows, F)
    numbers = (np.int32(k), cupy.asarray(levels), np.int32(rows), factors)
    jit.launch(plan.moe.level(rows), given, *numbers)
    made, factor = testing.as_numpy(given).astype(np.float64), testing.as_numpy(factors).astype(np.float64)
    expected = np.ldexp(x.astype(np.float64), 8 * (levels[..., None].astype(int) - zero)).reshape(rows, k)
    highest = levels.max(axis=1).astype(int)
    np.testing.assert_array_equal(factor, np.where(highest, np.ldexp(1.0, 8 * (highest - zero)), 1))
    # Numbers of lower levels are subnormal in the highest, if anything.
    made *= factor[:, None]
    assert (np.abs(made - expected) <= 2.0**-25 * factor[:, None]).all()
    np.testing.assert_array_equal(made[1:3], expected[1:3])


FORMATS = ("q4_0", "kbit4", "mxfp4", "int4-32-zeros")


def has_tile(format: str, tile: Tile) -> bool:
    fmt = cq.formats.get(format).for_kernels
    problem = plan.Problem(fmt, tile.batch, 1024, 1024, plan.Gpu(90), sides=2, grouped=True)
    return wgmma_grouped(problem, tile) is not None


TILES = [tile for tile in WGMMA_TILES if has_tile("q4_0", tile)]
BY_TURNS = [
    (tile, next(f for f in (*FORMATS[turn % len(FORMATS) :], *FORMATS) if has_tile(f, tile)))
    for turn, tile in enumerate(t for t in WGMMA_TILES if any(has_tile(f, t) for f in FORMATS))
]
"""All tiles, with formats of several kinds."""
COUNTS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 161, 256, 257, 289, 320, 321)
"""Rows of experts next to whole and narrow tiles."""


Plans = Callable[..., None]


@pytest.fixture
def planned_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    """Plans anew with other things in the place of those of these names."""

    def plan_by(module: Any, **things: Any) -> None:
        for name, thing in things.items():
            monkeypatch.setattr(module, name, thing)
        plan.moe.product.cache_clear()

    yield plan_by
    plan.moe.product.cache_clear()


@pytest.fixture
def tiled_by(planned_by: Plans) -> Plans:
    """Plans by one tile of the wgmma core alone."""
    if jit.capability() != 90:
        pytest.skip("the wgmma core is for sm_90")
    return lambda tile, **others: planned_by(plan.moe, WGMMA_TILES=(tile,), **others)


def check(format: str, counts: tuple[int, ...], k: int, hidden: int, n: int, times: int = 1) -> None:
    """Experts with so many rows each give what they should, and the same each time."""
    ids = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts)[:, None])
    x, probs = gauss(len(ids), k), gauss(len(ids), 1, seed=3)
    experts = stacks(format, len(counts), k=k, hidden=hidden, n=n)
    given = on_gpu(x, ids, probs)
    y, *more = (testing.as_numpy(cq.moe(given[0], experts, *given[1:])) for _ in range(times))
    for other in more:
        np.testing.assert_array_equal(other, y)
    close(y, reference(x, experts, ids, probs))


@pytest.mark.parametrize("tile", [t for t in WGMMA_TILES if t.batch >= 96], ids=str)
def test_last_rows_of_experts(tile: Tile, tiled_by: Plans) -> None:
    """Of large tiles: up to a third of one, which the tensor cores take in narrower steps, and more."""
    tiled_by(tile)
    check("q4_0", COUNTS, k=256, hidden=384, n=72)


def check_shared(tile: Tile, format: str, counts: tuple[int, ...], k: int, hidden: int) -> None:
    """The same, where blocks share what the product with gate or up leaves: with so many columns, or as many
    more as that takes."""
    load = plan.moe.Load(sum(counts), 1, len(counts))
    tiles = sum(ceil(count / tile.batch) for count in counts) * ceil(hidden * 2 / (tile.rows * tile.pair))
    clusters = jit.gpu().multiprocessors // tile.pair
    rest = tiles % clusters
    helpers = min(clusters - rest, MOST_PARTS * rest)
    for wide in (k, 2 * k, 4 * k, 8 * k):
        fmt = cq.formats.get(format).for_kernels
        made = plan.moe.product(fmt, load, hidden, wide, jit.gpu(), gated=True)
        assert made is not None
        assert 0 < rest <= made.gemm.streamed
        # As kernels/core/schedule.cuh decides.
        given = (wide // 64 * helpers // (rest + helpers) - made.gemm.passing) // tile.width
        if given > 0 and rest * given >= helpers:
            return check(format, counts, wide, hidden, n=200, times=6)
    raise AssertionError("nothing is shared")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_that_blocks_share(tile: Tile, tiled_by: Plans) -> None:
    """What is left after whole rounds."""
    tiled_by(tile, leave_us=lambda *a: 0, most_shared=int, GET_US=0.5)
    check_shared(tile, "q4_0", COUNTS, k=1024, hidden=1536)


@pytest.mark.parametrize(("tile", "format"), BY_TURNS, ids=str)
def test_few_tiles_that_blocks_share(
    tile: Tile, format: str, tiled_by: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them or some, of which several blocks may have a part each, on a small GPU."""
    tiled_by(tile, leave_us=lambda *a: 0, most_shared=int, GET_US=0)
    monkeypatch.setattr(jit, "gpu", lambda: plan.Gpu(90, 13))
    check_shared(tile, format, (40,), k=2048, hidden=512)


@pytest.mark.parametrize("missing", [0, 32])
@pytest.mark.parametrize("tile", [t for t in TILES if t.width > 1], ids=str)
def test_tiles_of_one_stage(tile: Tile, missing: int, tiled_by: Plans) -> None:
    """Many a block, told as far ahead as can be. A stage's steps come at once or, the last being half a one,
    each alone."""
    tiled_by(tile)
    check("q4_0", (1, 1023), tile.width * plan.TILE_COLUMNS - missing, hidden=6144, n=72, times=6)


@pytest.mark.parametrize("tile", [t for t in TILES if t.width > 1], ids=str)
def test_tiles_are_told_in_time(tile: Tile, tiled_by: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one stage, of which a few blocks have many."""
    tiled_by(tile)
    monkeypatch.setattr(jit, "gpu", lambda: plan.Gpu(90, 3))
    check("q4_0", (1, 40), tile.width * plan.TILE_COLUMNS, hidden=2048, n=72)


@pytest.mark.parametrize("format", ["q4_0", "kbit3", "q4_k"])
@pytest.mark.parametrize("tile", [(8, 2, 4, 1, 3, 3), (8, 4, 4, 1, 2, 3), (16, 2, 8, 1, 1, 3)], ids=str)
def test_rows_of_experts_by_the_mma_core(tile: tuple[int, ...], format: str, planned_by: Plans) -> None:
    """As many as a tile has, and more or fewer, where there is no wgmma."""
    planned_by(jit, capability=lambda: 80)
    planned_by(mma_core, _usable=lambda *a: [mma_core.MmaTile(*tile)])
    check(format, (1, 64, 65, 127, 128, 129), k=256, hidden=512, n=72)
