"""Launches of mixtures of experts: plans that fit the hardware and every routing; kernels that compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import nvrtc
import pytest
from hardware import SHARED, assert_staged
from test_compile import ELSEWHERE, FORMATS, OTHERS, check

import cuquant as cq
from cuquant import plan
from cuquant.cuda import jit, moe, moe_memory, problem
from cuquant.cuda.templates import Place
from cuquant.plan.moe import Load
from cuquant.plan.wgmma_core import Tile
from cuquant.plan.wgmma_timed import wgmma_grouped

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (test extra)")
NAMES = (
    "q4_0",
    "q5_1",
    "q8_0",
    "kbit2",
    "kbit4",
    "kbit5",
    "iq4_nl",
    "mxfp4",
    "nvfp4",
    "int4-128-zeros",
    "trellis3",
)
EVERY = tuple(str(f) for f in FORMATS if f.on_gpu and not f.for_activations)
UNLIKE = ["q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "kbit3", "nvfp4", "int4-128-zeros", "trellis3", "iq2_s"]
UNLIKE += ["tq2_0", "exl3-4-mcg"]
"""Formats whose kernels have little in common."""
LOADS = [Load(t, k, e) for t in (1, 2, 5, 16, 33, 512, 4096) for k, e in ((1, 1), (2, 8), (8, 64), (8, 256))]


def kernels(arch: str, names: Sequence[str]) -> list[plan.Kernel]:
    """Every kernel that plans ask for on an architecture, one of those that share a module."""
    capability = int("".join(c for c in arch if c.isdigit()))
    found = plan.moe.all_kernels([cq.formats.get(name) for name in names], plan.Gpu(capability))
    return list({(k.op, k.format, k.constants): k for k in found}.values())


def one_of_each(arch: str, names: Sequence[str] = ("q4_0", "kbit3", "exl3-4-mcg")) -> list[plan.Kernel]:
    """One tile of each core, gated and not, of an integer format, a codebook and walks."""
    chosen = {}
    for kernel in kernels(arch, names):
        constants = dict(kernel.constants)
        chosen[kernel.op, kernel.format, constants.get("CORE"), constants.get("GATED")] = kernel
    return list(chosen.values())


def test_tiles_of_the_wgmma_core_were_fast() -> None:
    """Of the tiles that were measured the one that is predicted to take the least costs a call less than 0.2%
    in the mean; those that were not measured would not be taken."""
    path = Path(__file__).parent / "data" / "mixture-wgmma-tiles.txt"
    slower = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, *words = line.split()
        (experts, top_k, width, k, tokens), which, times = map(int, words[:5]), words[5], words[6:]
        known = {tile: float(us) for us, tile in (each.split(":") for each in times)}
        shape = (width, k) if which == "both" else (k, width)
        load, fmt = Load(tokens, top_k, experts), cq.formats.get(name).for_kernels
        made = plan.moe.product(fmt, load, *shape, plan.Gpu(90), gated=which == "both")
        assert made is not None
        c = dict(made.gemm.plan.kernel.constants)
        fields = ("BATCH", "GROUPS", "ROW_BLOCKS", "K_GROUPS", "K_TILES", "PAIR")
        slower.append(known["x".join(str(c[field]) for field in fields)] / min(known.values()) - 1)
    assert len(slower) > 180
    assert np.mean(slower) < 0.002
    assert max(slower) < 0.05


@needs_nvrtc
@pytest.mark.long
def test_kernels_for_the_h200() -> None:
    """Of some formats, one or another: every fifth tile of the wgmma core, every twelfth of the decode core
    (all of every format under `compile_all`)."""
    tiles = dict[tuple[Any, ...], list[plan.Kernel]]()
    for kernel in sorted(kernels("sm_90a", UNLIKE), key=str):
        apart = ("BLOCK_BYTES", "COPIES", "ROW_FACTORS", "STAGES", "ROOM", "DEPTH", "TOGETHER", "CLUSTER")
        tile = tuple(item for item in kernel.constants if item[0] not in apart)
        tiles.setdefault(tile, []).append(kernel)
    todo = [
        of_formats[turn % len(of_formats)]
        for turn, of_formats in enumerate(tiles.values())
        if turn % (5 if dict(of_formats[0].constants).get("CORE") == 2 else 12) == 0
    ]
    check(todo, "sm_90a")


@needs_nvrtc
@pytest.mark.parametrize("arch", ELSEWHERE)
def test_every_core_elsewhere(arch: str) -> None:
    check(one_of_each(arch), arch)


@needs_nvrtc
@pytest.mark.compile_all
@pytest.mark.parametrize("arch", ["sm_90a", *OTHERS])
def test_every_kernel(arch: str) -> None:
    check(kernels(arch, EVERY), arch)


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 100, 120])
@pytest.mark.parametrize("half", [False, True])
def test_plans_fit(capability: int, half: bool) -> None:
    """Tiles cover all rows of the weights, and the hardware has room for each block and enough blocks."""
    shapes = ((16, 4096), (200, 4096), (14336, 4096), (768, 2048), (4096, 14336))
    for name, load, (n, k), gated in product(NAMES, LOADS, shapes, (False, True)):
        made = plan.moe.product(
            cq.formats.get(name).for_kernels, load, n, k, plan.Gpu(capability), half, gated
        )
        if made is None:
            assert gated
            continue
        launch, c = made.gemm.plan, dict(made.gemm.plan.kernel.constants)
        assert launch.shared <= launch.kernel.max_shared <= SHARED.get(f"sm_{capability}", 227 << 10)
        assert launch.overlaps
        assert c["GATED"] == gated
        core, (x, y, z) = plan.core_of(launch.kernel), launch.grid
        assert y == 1
        assert made.works == load.most_works(made.batch)
        if core == "wgmma":
            assert (c["SPLIT"], c["STREAM"], z) == (1, 1, 1)
            assert (c["PAIR"], x % launch.cluster) == (launch.cluster, 0)
            assert 0 <= made.gemm.streamed < plan.LARGE_GPU // c["PAIR"]
            if made.gemm.streamed:
                rows = c["GROUPS"] * c["ROW_BLOCKS"] * 64
                assert (x, made.gemm.partials) == (plan.LARGE_GPU, x * rows * c["BATCH"] * 4)
            assert made.batch == c["BATCH"]
            assert made.gemm.box_steps == c["K_GROUPS"] * c["K_TILES"]
            assert made.gemm.box * c["PAIR"] == made.batch == made.gemm.rows_behind
            assert c["PAIR"] == 1 or made.gemm.box_steps == 1
            continue
        assert z == made.works <= plan.MOST_BLOCKS
        if core == "decode":
            assert 1 <= made.batch <= 8 * c["GROUPS"]
            assert not gated or c["ROW_WARPS"] % 2 == 0
            rows = c["ROW_TILES"] * c["ROW_WARPS"] * 16 // (1 + gated)
            assert n <= x // launch.cluster * rows < n + rows
            assert made.gemm.chunk % (c["WARPS"] // c["ROW_WARPS"]) == 0
            assert_staged(cq.formats.get(name), made.gemm, made.batch, capability)
            assert made.gemm.chunk >= min(8, ceil(k / 64) // launch.cluster)
        else:
            assert made.batch == 8 * c["GROUPS"] * c["WARPS"] // c["ROW_WARPS"]
            assert not gated


def test_tiles_are_shared_out_where_that_takes_less_than_it_leaves_idle() -> None:
    fmt = cq.formats.get("q4_0")
    for load, shape, tile in (
        (Load(512, 2, 8), (14336, 4096), 144),
        (Load(256, 2, 8), (14336, 4096), 96),
        (Load(4096, 2, 8), (14336, 4096), 128),
    ):
        made: Any = plan.moe.product(fmt, load, *shape, plan.Gpu(90), gated=True)
        assert made.batch == tile
        assert 90 <= made.gemm.streamed < plan.LARGE_GPU
    short: Any = plan.moe.product(fmt, Load(512, 2, 8), 14336, 128, plan.Gpu(90), gated=True)
    assert (short.gemm.streamed, short.gemm.partials) == (0, 0)


def test_gate_and_up_are_one_launch_where_all_of_x_has_room() -> None:
    """Beside the tables of codebooks, or integers, which have none; and where it takes no longer than two."""
    for name, tokens, k, joined in (
        ("kbit4", 8, 4096, True),
        ("kbit4", 16, 14336, True),  # in clusters
        ("trellis4", 8, 4096, True),
        ("trellis4", 16, 14336, False),
        ("q4_0", 16, 14336, True),
    ):
        fmt, load = cq.formats.get(name).for_kernels, Load(tokens, 2, 8)
        made = plan.moe.product(fmt, load, 14336, k, plan.Gpu(90), gated=True)
        assert (made is not None) == joined, (name, tokens)
        both = plan.moe.gate_and_up(fmt, load, 14336, k, plan.Gpu(90))
        single = plan.moe.product(fmt, load, 14336, k, plan.Gpu(90))
        assert single is not None
        assert both is None or both.us < 1.1 * 2 * single.us


def test_no_routing_has_more_works_than_the_list_holds() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        tokens, top_k, experts, batch = (int(n) for n in generator.integers(1, (40, 5, 20, 17)))
        load = Load(tokens, top_k, experts)
        ids = generator.integers(0, generator.integers(1, experts + 1), tokens * top_k)
        counts = np.bincount(ids, minlength=experts)
        works = sum(ceil(count / batch) for count in counts)
        assert works <= load.most_works(batch) <= load.rows


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 2, 8), (4, 2, 8), (64, 8, 64), (4096, 2, 8)])
def test_expected_loads(tokens: int, top_k: int, experts: int) -> None:
    """Next to many random routings."""
    generator = np.random.default_rng(0)
    load = Load(tokens, top_k, experts)
    counts = []
    for _ in range(200):
        ids = np.argsort(generator.random((tokens, experts)), axis=1)[:, :top_k]
        counts.append(np.bincount(ids.reshape(-1), minlength=experts))
    hit = [(c > 0).sum() for c in counts]
    assert np.mean(hit) == pytest.approx(load.hit, rel=0.03)
    numbers, likely = np.transpose(load.hits.numbers)
    assert sum(likely) == pytest.approx(1)
    assert load.hits.mean == pytest.approx(load.hit, rel=0.03)
    spread = np.sqrt(likely @ (numbers - load.hits.mean) ** 2)
    assert spread == pytest.approx(np.std(hit), rel=0.35, abs=0.3)
    assert numbers.min() >= top_k
    assert numbers.max() <= min(experts, tokens * top_k)
    for batch, narrow in ((8, 3), (128, 32)):
        rows = [
            np.concatenate([[min(batch, n - first) for first in range(0, n, batch)] for n in c])
            for c in counts
        ]
        works, narrow_ones = np.mean([(len(r), (r <= narrow).sum()) for r in rows], axis=0)
        expected = load.works(batch, narrow)
        assert works == pytest.approx(expected[0], rel=0.25)
        assert narrow_ones == pytest.approx(expected[1], rel=0.25, abs=0.5)
    assert np.mean([(c > load.likely).mean() for c in counts]) < 0.06


def test_numbers_are_those_of_the_struct() -> None:
    """What kernels/core/problem.cuh asserts of its size, and that a launch is packed to it."""
    fmt = cq.formats.get("q4_0")
    made: Any = plan.moe.product(fmt, Load(64, 2, 8), 256, 512, plan.Gpu(90))
    group = problem.group(problem.Weight(fmt, (8, 256, 512)), 128, made.gemm, "silu", 512, False)
    codes, values = group.members(bytes(128), plan.Planes(*range(5)), 5, 0, (6, 7, 8, 9, 10, 11), *range(15))
    assert len(jit.layout(codes)[0].pack(*values)) == 768 + 128


def test_which_rows_blocks_find_by_themselves() -> None:
    rows = moe_memory.half_rows(Place(moe_memory.X), 64, 0)
    assert rows.halves
    for other in ({"dtype": 2}, {"aligned": False}, {"row": 68}, {"column": 2}):
        assert not rows._replace(**other).halves, other


@pytest.mark.parametrize(("width", "k", "n"), [(256, 64, 512), (256, 512, 64), (512, 64, 256)])
@pytest.mark.parametrize("kind", ["floats", "blocks", "levels", "turned"])
def test_arrays_between_launches_hold_all_that_is_kept_there(width: int, k: int, n: int, kind: str) -> None:
    """Of projections that are wider than what comes before them, and narrower; rows that a box reads behind
    the last one; sums that blocks leave of any product."""
    fmt, load = cq.formats.get("q4_0"), Load(700, 2, 64)
    singles = [plan.moe.product(fmt, load, *shape, plan.Gpu(90)) for shape in ((width, k), (n, width))]
    gate, down = (product for product in singles if product is not None)
    both = plan.moe.product(fmt, load, width, k, plan.Gpu(90), gated=True) if kind == "levels" else None
    most = gate._replace(gemm=replace(gate.gemm, partials=1 << 20))
    shapes = SimpleNamespace(shape=(64, width, k)), SimpleNamespace(shape=(64, n, width))
    mixture: Any = SimpleNamespace(
        gate=shapes[0], down=shapes[1], turns=kind == "turned", blocks=kind == "blocks"
    )
    mixture.levels = lambda product: product is not None
    first = (both, gate, gate) if both else (None, most, gate)
    made = moe_memory.arrays(mixture, load, (*first, down))
    starts = [*sorted(place.offset for place in made.at.values()), made.size]
    sizes = {name: starts[starts.index(at.offset) + 1] - at.offset for name, at in made.at.items()}
    assert not any(start % 256 for start in starts)
    rows = load.rows + max(each.gemm.rows_behind for each in (gate, down))
    assert rows > load.rows
    needs: dict[str, int] = {"factors": 4, "places": 4, "halves": 2 * k, "sums": 4 * max(width, n)}
    if kind in ("floats", "blocks"):
        needs["halves"] = 2 * max(k, width)
    if kind == "blocks":
        needs["blocks"] = width // 32 * 36
    if kind == "levels":
        needs |= {"halves": max(2 * k, 4 * n), "sums": 2 * width, "levels": width // plan.moe.LEVEL_COLUMNS}
    if kind == "turned":
        needs |= {"turned": 2 * max(k, width), "sums of up": 4 * width, "turned factors": 4}
    for name, row in needs.items():
        assert sizes[name] >= rows * row, name
    assert sizes["starts"] >= 65 * 4
    assert min(sizes[f"of {name}"] for name in ("gate", "up", "down")) >= 16 * load.most_works(1)
    assert sizes["partials"] >= (both.gemm.partials if both else 1 << 20)


@pytest.mark.parametrize(
    ("k", "dims", "strides", "steps"),
    [(512, (64, 160, 8, 1, 1), (1024, 128, 16, 16), 2), (480, (480, 160, 1, 1, 1), (960, 16, 16, 16), 1)],
)
def test_all_steps_of_a_stage_come_in_one_box(
    k: int, dims: tuple[int, ...], strides: tuple[int, ...], steps: int
) -> None:
    """Where the last is whole: beyond a row is not its end, but the next one's beginning."""
    fmt, tile = cq.formats.get("q4_0"), Tile(32, 4, k_tiles=2)
    gemm = wgmma_grouped(plan.Problem(fmt, 128, 256, k, plan.Gpu(90), 8, grouped=True), tile)
    assert gemm is not None
    group = problem.group(problem.Weight(fmt, (8, 256, k)), 128, gemm, None, k, False)
    assert group.map == (dims, strides, (64, 32, steps, 1, 1))
    assert group.box_steps == steps


def test_trellis_takes_about_as_long_as_codebooks() -> None:
    """The bytes of their rows are counted alike, though a trellis weight has no rows of blocks."""
    load = Load(4096, 2, 8)
    for n, k, gated in ((14336, 4096, False), (14336, 4096, True), (4096, 14336, False)):
        made, like = (
            plan.moe.product(cq.formats.get(name).for_kernels, load, n, k, plan.Gpu(90), gated=gated)
            for name in ("trellis3", "kbit3")
        )
        assert made is not None
        assert like is not None
        assert made.us < 1.05 * like.us


def test_few_multiprocessors_wait_for_the_experts_that_are_likely_hit() -> None:
    """The busiest multiprocessor has at most a quarter more rows than if all had as many; a third where the
    tiles that are predicted to be fastest leave that much over."""
    found = []
    for tokens, n, name in product((1, 2, 3, 4, 6, 8, 12, 16), (4096, 11008, 14336), ("q4_0", "trellis3")):
        load = Load(tokens, 2, 8)
        for gated in (False, True):
            made = plan.moe.product(
                cq.formats.get(name).for_kernels, load, n, 4096, plan.Gpu(90), gated=gated
            )
            if made is None:
                assert gated
                continue
            launch, c = made.gemm.plan, dict(made.gemm.plan.kernel.constants)
            rounds = ceil(launch.grid[0] * round(load.hit) / (plan.LARGE_GPU * c["RESIDENT"]))
            busiest = rounds * c["RESIDENT"] * c["ROW_TILES"] * c["ROW_WARPS"] / launch.cluster
            left_over = n == 11008 and tokens in (6, 8) and not gated
            found.append(busiest / ((1 + gated) * ceil(n / 16) * round(load.hit) / plan.LARGE_GPU))
            assert found[-1] <= (1.32 if left_over else 1.25), (tokens, n, name, gated)
    assert np.mean(found) < 1.12


def test_which_mixtures_have_kernels() -> None:
    """Of others each limit is passed alone."""

    def takes(
        width: int = 64, k: int = 64, n: int = 5, top_k: int = 2, x: Any = None, count: int = 3
    ) -> bool:
        shapes, fmt = [(count, width, k)] * 2 + [(count, n, width)], cq.formats.get("q4_0")
        zeros = [np.zeros(fmt.stored(shape), np.uint8) for shape in shapes]
        gate, up, down = (cq.from_blocks(*each) for each in zip(zeros, [fmt] * 3, shapes, strict=True))
        return moe.takes(x, gate, up, down, top_k)

    blocks = cq.quantize(np.zeros((1, 64), np.float32), "q8_1")
    longest = plan.LONGEST_ROW
    assert takes()
    assert takes(x=blocks)
    assert takes(longest, 32, 1, 1, blocks, 1)
    assert takes(longest + 32, 32, 1, 1, None, 1)
    assert not takes(longest + 32, 32, 1, 1, blocks, 1)
    assert takes(top_k=plan.moe.MOST_SLOTS)
    assert not takes(top_k=plan.moe.MOST_SLOTS + 1)
    assert not takes(top_k=0)
    assert not takes(n=0)
    assert not takes(count=0)
    for width, k, whole in ((96, 96, True), (80, 96, False), (96, 80, False)):
        shapes = ((1, width, k), (1, width, k), (1, 8, width))
        gate, up, down = (cq.quantize(np.zeros(shape, np.float32), "trellis2") for shape in shapes)
        assert moe.takes(None, gate, up, down, 1) == whole
