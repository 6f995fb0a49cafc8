"""Plans: they cover the problem and fit the hardware, on GPUs that are not there."""

from __future__ import annotations

from itertools import pairwise, product as combinations
from math import ceil

import pytest
from formats_table import K_QUANTS, NAMES, ON_GPU, TRELLIS
from hardware import SHARED, assert_staged

import cuquant as cq
from cuquant import plan
from cuquant.cuda import sources
from cuquant.formats.kernels import kernels_of
from cuquant.plan import mma_core, wgmma_timed
from cuquant.plan.cores import table_of


@pytest.mark.parametrize("name", [*NAMES, *(row.name for row in K_QUANTS)])
def test_layout_holds_every_code_and_scale(name: str) -> None:
    """The planes have the storage's bytes, of 16 x 256 weights; but integer scales of 6 bits take bytes, and
    rows of integers a factor."""
    fmt = cq.formats.get(name)
    layout = plan.layout(fmt)
    wider = {"q3_k": 4, "q4_k": 4, "q5_k": 4, "iq4_xs": 2}.get(name, 0)
    assert layout.step(4) == 16 * (fmt.row_bytes(256) + wider)
    starts, size = layout.offsets(2, 3)
    groups = ceil(3 / layout.group_tiles)
    sizes = [6 * layout.low, 6 * layout.high, 6 * layout.scale, 2 * groups * layout.group, 2 * layout.row]
    assert layout.row == (0 if kernels_of(fmt).lookup else 32)
    assert starts[0] == 0
    for start, nbytes, end in zip(starts, sizes, [*starts[1:], size], strict=True):
        assert start % 256 == 0
        assert start + nbytes <= end


@pytest.mark.parametrize(
    ("group", "kept"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (256, 128), (384, 128)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_layout_of_int4_groups(group: int, kept: int, symmetric: bool) -> None:
    """Scales, and zero points in float16, once for the largest groups that kernels know."""
    fmt = cq.Int4(group, symmetric).for_kernels
    assert fmt == cq.Int4(kept, symmetric)
    layout = plan.layout(fmt)
    assert layout.step(4) == 16 * (128 + 256 // kept * (2 if symmetric else 4))
    assert (layout.scale > 0) == (kept == 32)
    assert layout.group_tiles == max(1, kept // 64)


@pytest.mark.parametrize("name", TRELLIS)
def test_layout_of_trellis_weights(name: str) -> None:
    """Indices and float32 scales, those of 128 columns once for two tiles."""
    fmt = cq.formats.get(name)
    layout = plan.layout(fmt)
    assert layout.low + layout.high == 128 * fmt.bits
    assert (layout.scale, layout.group, layout.group_tiles) == ((128, 0, 1) if "-32" in name else (0, 64, 2))
    assert layout.step(2) == 16 * 128 * fmt.bits // 8 + 16 * 4 * (4 if "-32" in name else 1)
    assert plan.trellis.repack(fmt, "to_fragments", 3, 129, 513).grid == (3 * 2 * 2, 1, 1)  # runs of 8 tiles
    assert plan.trellis.dequantize(fmt, 3, 33, 513).grid == (2, 3 * 2, 1)
    assert plan.trellis.dequantize(fmt, 65_536, 32, 32).grid == (1, 65_535, 2)
    assert plan.trellis.take_rows(fmt, 17, 33).grid == (1, 1, 1)


def test_activations_have_no_weight_layout() -> None:
    with pytest.raises(NotImplementedError, match="q8_1 has no fragment layout"):
        plan.layout(cq.formats.get("q8_1"))


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 100, 120])
@pytest.mark.parametrize("half", [False, True])
def test_plans_cover_the_problem(capability: int, half: bool) -> None:
    """The grid's tiles cover all rows of W and of the batch, and the hardware has room for each block."""
    names = [
        *ON_GPU,
        "kbit5",
        "mxfp4",
        "nvfp4",
        "int4-32-zeros",
        "q2_k",
        "q4_k",
        "q6_k",
        "iq4_xs",
        "trellis2",
    ]
    for name in [*names, "trellis3-32"]:
        for m, n, k in combinations(
            (1, 2, 3, 8, 9, 16, 17, 31, 64, 65, 1000, 4096),
            (1, 16, 17, 4096, 8704, 14336, 100_000),
            (32, 4096, 14336, 30_000),
        ):
            gemm = plan.gemm(plan.Problem(cq.formats.get(name), m, n, k, plan.Gpu(capability), 3, half))
            c, (x, y, z) = dict(gemm.plan.kernel.constants), gemm.plan.grid
            core = plan.core_of(gemm.plan.kernel)
            assert (
                gemm.plan.shared <= gemm.plan.kernel.max_shared <= SHARED.get(f"sm_{capability}", 227 << 10)
            )
            assert gemm.plan.overlaps
            if core == "wgmma":
                step, batch = c["GROUPS"] * c["ROW_BLOCKS"] * 64 * c["PAIR"], c["BATCH"]
                outputs = ceil(n / step) * ceil(m / batch) * 3
                assert gemm.plan.cluster == c["SPLIT"] * c["PAIR"]
                if gemm.streamed:
                    assert c["STREAM"]
                    assert x == plan.LARGE_GPU // c["PAIR"] * c["PAIR"]
                else:
                    assert x == outputs * c["SPLIT"] if c["SPLIT"] > 1 else 0 < x <= outputs * c["PAIR"]
                assert x % gemm.plan.cluster == 0
                assert gemm.box * c["PAIR"] == batch
                assert gemm.plan.block == (c["GROUPS"] * c["K_GROUPS"] + 1) * 128
                turns, rest = divmod(ceil(k / 64), c["K_GROUPS"] * c["K_TILES"])
                assert rest == 0
                assert turns >= c["SPLIT"]
                assert c["STAGES"] >= 3  # one that is read, one that waits, one on its way
                if c["RESIDENT"] > 1:  # the ring starts at a whole KB behind the barriers
                    assert 2 * (gemm.plan.shared + (2 << 10)) <= 228 << 10
                    assert plan.LARGE_GPU < x <= 2 * plan.LARGE_GPU
                assert (capability, half) == (90, True)
                continue
            assert gemm.plan.block == c["WARPS"] * 32
            assert z == 3
            batch, step = c["GROUPS"] * 8, c["ROW_TILES"] * c["ROW_WARPS"] * 16
            if core == "decode":
                assert gemm.plan.cluster == c["CLUSTER"]
                assert gemm.chunk > 0
                assert gemm.chunk % (c["WARPS"] // c["ROW_WARPS"]) == 0
                assert_staged(cq.formats.get(name), gemm, min(m, c["GROUPS"] * 8), capability)
                x //= c["CLUSTER"]
            else:
                batch = mma_core.batch_of(gemm.plan.kernel)
                assert batch == c["GROUPS"] * 8 * c["WARPS"] // c["ROW_WARPS"]
                assert (half, gemm.chunk) == (True, 0)
                assert c["STAGES"] >= 2
                # From sm_80 on a block takes 1 KB more, and registers for two of 4 warps or one of 8.
                if c["ROW_TILES"] == 4:
                    assert c["RESIDENT"] * c["WARPS"] == 8
                    blocks = c["RESIDENT"] * (gemm.plan.shared + (1 << 10))
                    assert blocks <= SHARED.get(f"sm_{capability}", 227 << 10) + (1 << 10)
            assert y == ceil(m / batch)
            assert n <= x * step < n + step


def test_large_weights_go_to_the_wgmma_core_sooner() -> None:
    """Where that was faster; if float16 holds them, and on sm_90 only. Elsewhere 9 rows and more times few
    rows of W go to the mma core, whose blocks share columns."""
    for name, n, k, sooner in (
        ("q8_0", 28672, 8192, {2, 4, 8}),
        ("q8_0", 14336, 4096, {8}),
        ("q8_0", 8192, 8192, {8}),
        ("q8_0", 11008, 4096, set[int]()),
        ("q8_0", 4096, 11008, {8}),
        ("q8_0", 4096, 4096, set[int]()),
        ("q5_0", 28672, 8192, set[int]()),
        ("q5_0", 8192, 8192, {8}),
        ("kbit4", 4096, 14336, {8}),
        ("q4_0", 4096, 14336, set[int]()),
        ("kbit2", 28672, 8192, set[int]()),
        ("kbit2", 4096, 14336, set[int]()),
        ("trellis3", 4096, 14336, set[int]()),
    ):
        for m, half, capability in combinations((1, 2, 4, 8, 9, 16), (True, False), (90, 80)):
            fmt, gpu = cq.formats.get(name).for_kernels, plan.Gpu(capability)
            gemm = plan.gemm(plan.Problem(fmt, m, n, k, gpu, half=half))
            wgmma = capability == 90 and (m in sooner or m >= 9)
            mma = capability == 80 and m >= 9 and n == 4096
            expected = "wgmma" if half and wgmma else "mma" if half and mma else "decode"
            assert plan.core_of(gemm.plan.kernel) == expected, (name, n, m)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_rings_of_the_mma_core_are_as_deep_as_there_is_room(capability: int) -> None:
    """For as many blocks as a multiprocessor is to have; up to eight stages of the small tile for few
    blocks, four of larger ones."""
    room = {80: 164, 86: 100, 89: 100, 120: 100}.get(capability, 228) << 10
    for name, groups in combinations(("q4_0", "q8_0", "q4_k", "kbit4", "mxfp4", "trellis3"), (4, 8)):
        fmt = cq.formats.get(name).for_kernels
        deep, square, small, *large = mma_core._tiles(fmt, groups, capability)
        assert (small.stages, deep.rows, square.batch) == (3, 1, 128)
        for tile, most in ((deep, 8), (square, 4), (small, 3), *((tile, 4) for tile in large)):
            problem = plan.Problem(fmt, 512, 4096, 4096, plan.Gpu(capability))
            gemm = mma_core._of_way(problem, mma_core.MmaWay(tile))
            own = tile.batch * 144 + tile.row_tiles * plan.layout(fmt).step(1)
            assert tile.resident * (gemm.plan.shared + (1 << 10)) <= room
            assert tile.stages == most or tile.resident * (gemm.plan.shared + own + (3 << 10)) > room


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_large_products_have_large_tiles(capability: int) -> None:
    """Of 256 rows of W by 128 batch rows, where that leaves few multiprocessors idle; but before sm_80.
    Of a mixture, whose rows its GPU alone counts."""
    for name, (m, n, large) in combinations(
        ("q4_0", "q8_0", "q4_k", "q6_k", "kbit4", "kbit5", "nvfp4"),
        ((256, 14336, True), (512, 8192, True), (2048, 4096, True), (128, 4096, False)),
    ):
        fmt, gpu = cq.formats.get(name).for_kernels, plan.Gpu(capability)
        gemm = mma_core.mma_grouped(plan.Problem(fmt, m, n, 4096, gpu, grouped=True))
        c = dict(gemm.plan.kernel.constants)
        is_large = c["ROW_TILES"] * c["ROW_WARPS"] == 16
        assert is_large == (large and capability >= 80), (name, m, n)
        assert not is_large or mma_core.batch_of(gemm.plan.kernel) == 128


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_rings_leave_room_for_copies_of_a_codebook(capability: int) -> None:
    """For every lane where there is much shared memory; never fewer than a quarter of that."""
    for name, (m, n) in combinations(("kbit2", "kbit3", "kbit4", "iq4_xs"), ((64, 4096), (512, 14336))):
        fmt = cq.formats.get(name).for_kernels
        gemm = mma_core.mma_grouped(plan.Problem(fmt, m, n, 4096, plan.Gpu(capability), grouped=True))
        copies, most = dict(gemm.plan.kernel.constants)["COPIES"], table_of(fmt, capability)[0]
        assert most // 4 <= copies <= most
        assert copies == most or capability != 90 or m == 64


def shared_out(outputs: int, rest: int, passing: int, tiles: int, width: int, clusters: int) -> bool:
    """The arithmetic of Shares in kernels/core/schedule.cuh, of output tiles that have `tiles` steps each.

    Every step of every tile belongs to one cluster. Those that take a tile's last columns have lower numbers
    than the one that waits for them, which finds their sums one after the other in places that are theirs.
    False where no tile is shared.
    """
    helpers, owners = min(clusters - rest, wgmma_timed.MOST_PARTS * rest), clusters - rest
    given = (tiles * helpers // (rest + helpers) - passing) // width if rest else 0
    if given <= 0 or rest * given < helpers:
        rest = 0
    whole, total = outputs - rest, rest * given
    done: dict[int, list[tuple[int, int, int]]] = {}
    places: dict[int, tuple[int, int]] = {}
    for cluster in range(helpers if rest else 0):
        start, stop = total * cluster // helpers, total * (cluster + 1) // helpers
        assert start < stop
        first, before = start // given, tiles - given * width
        for at in range(first, ceil(stop / given)):
            begin, end = max(start - at * given, 0), min(stop - at * given, given)
            done.setdefault(whole + at, []).append((before + begin * width, before + end * width, cluster))
            assert cluster + at not in places
            places[cluster + at] = (whole + at, cluster)
    assert all(place < clusters for place in places)
    for cluster in range(clusters):
        for i in range((whole - cluster + clusters - 1) // clusters):
            done.setdefault(cluster + i * clusters, []).append((0, tiles, cluster))
        if rest and cluster >= owners:
            at = cluster - owners
            done.setdefault(whole + at, []).append((0, tiles - given * width, cluster))
            helper = ((at * given + 1) * helpers - 1) // total
            parts = ((at + 1) * helpers + rest - 1) // rest - helper
            found = [places.pop(helper + at + j) for j in range(parts)]
            assert found == [(whole + at, helper + j) for j in range(parts)]
            assert helper + parts <= cluster
    assert not places
    assert sorted(done) == list(range(outputs))
    for columns in map(sorted, done.values()):
        assert (columns[0][0], columns[-1][1]) == (0, tiles)
        assert all(begin < until for begin, until, _ in columns)
        assert all(until == begin for (_, until, _), (begin, _, _) in pairwise(columns))
    return rest > 0


def test_streamed_tiles_are_shared_out_once() -> None:
    schedule = (sources.folder() / "core" / "schedule.cuh").read_text(encoding="utf-8")
    assert f"constexpr int MOST_PARTS = {wgmma_timed.MOST_PARTS};" in schedule
    seen = set()
    shapes = ((14336, 4096), (28672, 8192), (9000, 11008))
    for m, (n, k) in combinations((32, 64, 129, 256, 384, 512, 1000, 1024), shapes):
        gemm = plan.gemm(plan.Problem(cq.formats.get("kbit4"), m, n, k, plan.Gpu(90)))
        if not gemm.streamed:
            continue
        c = dict(gemm.plan.kernel.constants)
        clusters, tiles, width = (
            gemm.plan.grid[0] // gemm.plan.cluster,
            ceil(k / 64),
            c["K_GROUPS"] * c["K_TILES"],
        )
        rows = c["GROUPS"] * c["ROW_BLOCKS"] * 64 * c["PAIR"]
        outputs = ceil(n / rows) * ceil(m / c["BATCH"])
        seen.add(outputs > clusters)
        assert tiles % width == 0
        assert gemm.streamed == outputs % clusters
        assert gemm.streamed * tiles * clusters < 1 << 31
        assert gemm.plan.grid[0] * c["GROUPS"] <= plan.FLAGS
        assert gemm.partials == gemm.plan.grid[0] * rows // c["PAIR"] * c["BATCH"] * 4
        assert shared_out(outputs, gemm.streamed, gemm.passing, tiles, width, clusters)
    assert seen == {False, True}


@pytest.mark.parametrize("width", [1, 2, 4])
def test_tiles_of_grouped_products_are_shared_out_once(width: int) -> None:
    """What GroupSchedule in kernels/core/schedule.cuh decides, of any number of tiles."""
    clusters, limit, seen = plan.LARGE_GPU, 110, set()
    numbers = (0, 1, 7, 33, 34, 66, 110, 111, 131, 132, 133, 200, 250, 264, 700)
    for outputs, tiles, passing in combinations(numbers, (4, 16, 64, 224), (0, 1, 5)):
        rest = outputs % clusters
        shared = shared_out(outputs, 0 if rest > limit else rest, passing, tiles, width, clusters)
        seen.add((outputs > clusters, shared))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


def test_quantizing_plans_cover_all_threads() -> None:
    fmt, gpu = cq.formats.get("q4_0"), plan.Gpu(90)
    assert plan.quantize(fmt, 128, gpu).grid == (1, 1, 1)
    assert plan.quantize(fmt, 129, gpu).grid == (2, 1, 1)
    for size, lanes in ((32, 2), (64, 4), (96, 4), (128, 8), (512, 32), (14336, 32)):
        assert plan.group_lanes(cq.Int4(size)) == lanes
        assert plan.quantize(cq.Int4(size), 1000, gpu).grid == (ceil(1000 * lanes / 256), 1, 1)
    table = cq.formats.get("kbit4")
    assert plan.quantize(table, 129, gpu).grid == (2, 1, 1)
    assert plan.quantize(table, 1 << 20, gpu).grid == (20 * 132, 1, 1)  # which stay
    assert plan.quantize(table, 1 << 20, gpu, stay=False).grid == ((1 << 20) // 128, 1, 1)
    # A block for each row tile, and for parts of it where there are few, but not where rows have factors.
    assert plan.repack(table, "to_fragments", 1, 65, plan.Gpu(90)).grid == (1, 2, 1)  # runs of 64 tiles
    assert plan.repack(table, "to_fragments", 33, 1, plan.Gpu(90)).grid == (33, 1, 1)
    assert plan.repack(table, "to_fragments", 10, 64000, plan.Gpu(90)).grid == (10, 3 * 4 * 132 // 10, 1)
    assert plan.repack(table, "to_fragments", 2000, 1000, plan.Gpu(90)).grid == (2000, 1, 1)
    assert plan.repack(fmt, "to_fragments", 2, 65, plan.Gpu(90)).grid == (2, 1, 1)
    assert plan.repack(fmt, "to_fragments", 1000, 1000, plan.Gpu(90)).grid == (1000, 1, 1)
    assert plan.repack(fmt, "to_fragments", 1, 65, plan.Gpu(90), half=False).grid == (1, 2, 1)
    assert plan.repack(fmt, "from_fragments", 2, 33, plan.Gpu(90)).grid == (4, 1, 1)
    eight = plan.repack(cq.formats.get("q8_0"), "to_fragments", 1, 65, plan.Gpu(90), half=False)
    assert eight.grid == (1, 3, 1)  # runs of 32 tiles
    two_runs = plan.repack(fmt, "to_fragments", 1, 33, plan.Gpu(90), half=False).shared
    # Scales wait in shared memory, 64 bytes a tile, where a multiprocessor has room for two such blocks.
    assert plan.repack(fmt, "to_fragments", 1, 33, plan.Gpu(90)).shared == two_runs + 33 * 64
    room = (228 << 10) // 2
    longest = max(
        tiles
        for tiles in range(2000)
        if plan.repack(fmt, "to_fragments", 1, tiles, plan.Gpu(90)).shared > two_runs
    )
    assert room - 4096 < two_runs + longest * 64 < room
    assert plan.tiles(3, 17, 65) == (3 * ceil(17 / 16), ceil(65 / 64))
    for rows, k in combinations((1, 132, 133, 5000), (32, 96, 4096, 14336, plan.LONGEST_ROW)):
        launch = plan.activations("quantize_rows", cq.formats.get("q8_1"), rows, k)
        assert launch.grid == (rows, 1, 1)
        assert launch.block % 32 == 0
        assert launch.block <= 1024
        assert 4 * 16 * launch.block >= k
        for entry in ("prepare_halves", "round_halves"):
            halves = plan.activations(entry, cq.formats.get("q8_1"), rows, k)
            assert halves.block <= 256  # as their launch bound
            assert 8 * halves.block * halves.grid[1] >= k
        assert plan.activations("prepare_rows", cq.formats.get("q8_1"), rows, k).block <= 512


def test_kernels_are_keys() -> None:
    a, b = (plan.Kernel("gemm", "gemm", "q4_0", (("X", x),)) for x in (1, 2))
    assert a != b
    assert a == plan.Kernel("gemm", "gemm", "q4_0", (("X", 1),))
    assert len({a, b, plan.Kernel("gemm", "gemm", "q4_0", (("X", 1),))}) == 2
