"""Launches of a mixture of experts: which core multiplies rows that are grouped by expert, in which tiles.

How many rows an expert gets, only the GPU knows. Plans go by what a router that likes all experts equally
would give; grids by the most that there can be: blocks without a work end at once. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product as product_of
from math import ceil, erfc, exp, floor, sqrt
from typing import NamedTuple

from ..formats import Format
from ..formats.kernels import kernels_of
from .blocks import threads_of
from .cores import DECODE_BATCH, WGMMA_BATCH, Gemm, Problem, core_of, tables
from .decode_core import Hits
from .decode_grouped import decode_grouped
from .launch import WARP, Gpu, Kernel, Plan, places_of
from .mma_core import batch_of, mma_grouped
from .planes import TILE_COLUMNS, TILE_ROWS, layout
from .wgmma_core import sum_bytes
from .wgmma_timed import (
    GET_US,
    MOST_PARTS,
    WGMMA_TILES,
    leave_us,
    most_shared,
    narrow,
    tile_us,
    wgmma_grouped,
)

MOST_EXPERTS, MOST_SLOTS = 1024, 256
"""Experts, and of them a token's, that kernels/ops/moe.cu takes."""
WHOLE = 32
"""Columns of rows made by moe.cu are multiples of this."""
FEW_TOKENS = 512
"""Tokens up to which every block of `gather` finds the place of its own entry."""
LEVEL_COLUMNS = 16
"""Columns that have a level of their own (kernels/core/levels.cuh)."""
_ROUTE_WARPS, _GROUP_WARPS, _LEVEL_WARPS = 4, 16, 4
_GATHER_THREADS, _SIGN_THREADS, _HIDDEN_THREADS, _COMBINE_THREADS = 512, 256, 512, 256
"""Maximum threads per block (COMBINE: exactly)."""
_GATHER_KEPT, _HIDDEN_KEPT = 2, 8
"""Pieces of a row that a thread has at once, of eight numbers and of four."""
_COMBINE_COLUMNS = 4 * _COMBINE_THREADS
"""Columns summed by one block."""
_CONSTANTS = (
    ("ROUTE_WARPS", _ROUTE_WARPS),
    ("GROUP_WARPS", _GROUP_WARPS),
    ("LEVEL_WARPS", _LEVEL_WARPS),
    ("GATHER_THREADS", _GATHER_THREADS),
    ("GATHER_KEPT", _GATHER_KEPT),
    ("SIGN_THREADS", _SIGN_THREADS),
    ("HIDDEN_THREADS", _HIDDEN_THREADS),
    ("HIDDEN_KEPT", _HIDDEN_KEPT),
    ("COMBINE_THREADS", _COMBINE_THREADS),
    ("COMBINE_COLUMNS", _COMBINE_COLUMNS),
    ("MOST_EXPERTS", MOST_EXPERTS),
    ("MOST_SLOTS", MOST_SLOTS),
)
"""Constants of all kernels of kernels/ops/moe.cu, which are one module as they have the same."""
_BYTES_US, _RESULTS_US = 4.46e6, 1e6
"""Bytes in a microsecond on an H200: of weights, which are read meanwhile; and of float32 results."""
_LAUNCH_US = 2.0
_WIDE, _FEW_WIDE = {1: 1.1, 2: 1.03}, 3 * 256
"""How many times as long as predicted tiles of 256 batch rows take, by the blocks that share x; of pairs
where experts have fewer rows than so many, as expected. (96 mixtures of seven models, 64 to 4096 tokens.
Pairs are as fast as predicted where 8 experts have 1024 rows each.)"""
_FAR = 28
"""Spreads from the mean behind which erfc is 0."""
_APART = 1.03
"""How many times as long as two launches, as predicted, gate and up in one must take for two to be used:
those were up to 3% slower than that."""


class Load(NamedTuple):
    """`rows` of tokens times top_k that go to `experts`."""

    tokens: int
    top_k: int
    experts: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def hit(self) -> float:
        """Experts that are hit at all, as expected."""
        return self.experts * (1 - max(0, 1 - self.top_k / self.experts) ** self.tokens)

    @property
    def hits(self) -> Hits:
        """Numbers of experts that may be hit, with probabilities: of the normal distribution of their mean
        and spread, at most nine numbers within two standard deviations."""
        count, tokens = self.experts, self.tokens
        one = max(0.0, 1 - self.top_k / count) ** tokens  # that nobody takes an expert; that nobody takes two
        two = max(0.0, 1 - self.top_k / count) * max(0.0, 1 - self.top_k / max(1, count - 1))
        spread = sqrt(max(0.0, count * (count - 1) * two**tokens + count * one - (count * one) ** 2))
        least, most = floor(self.hit - 2 * spread + 1e-9), ceil(self.hit + 2 * spread - 1e-9)
        least, most = max(self.top_k, least), min(count, self.rows, most)
        steps = range(least, most + 1, max(1, ceil((most - least) / 8)))
        weights = [exp(-(((number - self.hit) / max(spread, 0.3)) ** 2) / 2) for number in steps]
        numbers = zip(steps, (weight / sum(weights) for weight in weights), strict=True)
        return Hits(self.rows / self.hit, tuple(numbers))

    @property
    def likely(self) -> int:
        """Rows that few experts exceed."""
        mean = self.rows / self.hit
        return min(self.tokens, ceil(mean + 2 * sqrt(max(0, mean - 1))))

    @lru_cache(maxsize=1024)  # noqa: B019 -- of a tuple
    def works(self, batch: int, narrow: int) -> tuple[float, float]:
        """Batch tiles, as expected, and how many of them are last ones of `narrow` rows or fewer: of the
        normal distribution next to the binomial one."""
        mean = self.rows / self.experts
        spread = sqrt(2 * mean * (1 - 1 / self.experts)) or 1e-9

        def more(rows: int) -> float:  # experts that have more
            return self.experts * erfc((rows + 0.5 - mean) / spread) / 2 if rows else self.hit

        most = min(self.rows, ceil(mean + _FAR * spread))
        tiles = [j * batch for j in range(ceil(most / batch))]
        return sum(map(more, tiles)), sum(more(rows) - more(rows + narrow) for rows in tiles)

    def most_works(self, batch: int) -> int:
        """Batch tiles that there can be."""
        hit = min(self.experts, self.rows)
        return hit + (self.rows - hit) // batch

    def problem(self, fmt: Format, n: int, k: int, gpu: Gpu, half: bool, gated: bool) -> Problem:
        """The product with a stack (E, n, k), or with two of them that are gate and up."""
        return Problem(fmt, self.likely, n, k, gpu, self.experts, half, 1 + gated, grouped=True)


class GroupedGemm(NamedTuple):
    """A plan of a grouped product, how many rows a work has at most, and how long the list of works is."""

    gemm: Gemm
    batch: int
    works: int
    us: float = 0

    @property
    def levels(self) -> bool:
        """Whether its results, if it is gated, may be float16 numbers in levels, of LEVEL_COLUMNS each."""
        return core_of(self.gemm.plan.kernel) == "wgmma"

    @property
    def finds_rows(self) -> bool:
        """Whether blocks can find their rows by the ids of a warp's lanes."""
        return core_of(self.gemm.plan.kernel) == "decode"


@lru_cache(maxsize=4096)
def product(
    fmt: Format, load: Load, n: int, k: int, gpu: Gpu, half: bool = True, gated: bool = False
) -> GroupedGemm | None:
    """The rows of a load times (E, n, k), gated or not, of weights that float16 holds (`half`) or not; None
    where no kernel can do it gated, or two launches take less."""
    problem = load.problem(fmt, n, k, gpu, half, gated)
    rows, us = problem.m, 0.0
    if half and gpu.capability == 90 and rows >= WGMMA_BATCH:
        # Of those that wait for memory alike the one that copies fewer rows of x.
        tiles = _wgmma(problem, load)
        return min(tiles, key=lambda each: (round(each.us), each.batch), default=None)
    if not half or rows <= DECODE_BATCH:
        batch = min(rows, DECODE_BATCH)
        found = decode_grouped(problem._replace(m=batch), load.hits)
        if found is None:
            return None
        us, gemm = found
    elif gated:
        return None
    else:
        gemm = mma_grouped(problem)
        batch = batch_of(gemm.plan.kernel)
    works = load.most_works(batch)
    return GroupedGemm(_grouped(problem, gemm, (gemm.plan.grid[0], 1, works)), batch, works, us)


def _wgmma(problem: Problem, load: Load) -> Iterator[GroupedGemm]:
    """The wgmma core's tiles, with the microseconds that measured times predict."""
    fmt, n, sides, steps = problem.fmt, problem.n, problem.sides, ceil(problem.k / TILE_COLUMNS)
    weights = sides * load.hit * ceil(n / TILE_ROWS) * layout(fmt).step(steps)
    for tile in WGMMA_TILES:
        gemm, places = wgmma_grouped(problem, tile), places_of(problem.gpu, tile.pair)
        if gemm is None or not places:
            continue
        wide = tile.batch == 256 and (tile.pair == 1 or load.rows < load.hit * _FEW_WIDE)
        each, few = (us * (_WIDE[tile.pair] if wide else 1) for us in tile_us(fmt, tile, steps))
        blocks_n, works = ceil(n * sides / (tile.rows * tile.pair)), load.most_works(tile.batch)
        tiles, narrow_ones = load.works(tile.batch, narrow(tile))
        streamed = 0
        busy = blocks_n * (tiles - narrow_ones * (1 - few / each)) / places  # rounds of whole tiles
        us, read = ceil(busy) * each, weights / _BYTES_US
        leave = leave_us(tile, busy > 1)
        passing = round(leave / each * steps)
        if us > read and steps * MOST_PARTS // (MOST_PARTS + 1) >= passing + tile.width:
            passed = leave + GET_US
            # The last round's tiles are shared if that takes less than it leaves idle, and parts are few.
            streamed = max(0, min(int(places * (1 - passed / each)), most_shared(places)))
            us = min(us, busy * each + passed)
        partials = places * tile.pair * sum_bytes(tile) if streamed else 0
        gemm = replace(gemm, streamed=streamed, passing=passing, partials=partials)
        us = max(us, read) + _LAUNCH_US
        grid = ((places if streamed else min(places, blocks_n * works)) * tile.pair, 1, 1)
        yield GroupedGemm(_grouped(problem, gemm, grid), tile.batch, works, us)


def _grouped(problem: Problem, gemm: Gemm, grid: tuple[int, int, int]) -> Gemm:
    kernel = gemm.plan.kernel
    ends = (("GATED", problem.sides - 1), ("TABLES", tables(problem.fmt, problem.sides)))
    kernel = replace(kernel, constants=(*kernel.constants, *ends))
    return replace(gemm, plan=replace(gemm.plan, kernel=kernel, grid=grid))


def gate_and_up(fmt: Format, load: Load, n: int, k: int, gpu: Gpu, half: bool = True) -> GroupedGemm | None:
    """Gate and up in one launch, where that is possible and no slower than two, of which the second reads
    what the first has stored."""
    both = product(fmt, load, n, k, gpu, half, True)
    single = product(fmt, load, n, k, gpu, half)
    assert single is not None
    results = load.rows * n * 4 / _RESULTS_US
    return None if both is None or both.us > _APART * 2 * (single.us + results) else both


def _kernel(entry: str) -> Kernel:
    return Kernel("moe", entry, constants=_CONSTANTS)


@lru_cache(maxsize=1024)
def gather(load: Load, k: int) -> Plan:
    """Plan `gather`: a block for every entry, and one for the lists of works."""
    threads = threads_of(k, 8 * _GATHER_KEPT, _GATHER_THREADS)
    return Plan(_kernel("gather"), (load.rows + 1, 1, 1), threads, overlaps=True)


@lru_cache(maxsize=1024)
def change_signs(rows: int, k: int) -> Plan:
    """Plan `change_signs`: a block for every entry."""
    return Plan(_kernel("change_signs"), (rows, 1, 1), threads_of(k, 8, _SIGN_THREADS), overlaps=True)


@lru_cache(maxsize=1024)
def hidden(rows: int, k: int) -> Plan:
    """Plan `hidden`: a block for every row."""
    threads = threads_of(k, 4 * _HIDDEN_KEPT, _HIDDEN_THREADS)
    return Plan(_kernel("hidden"), (rows, 1, 1), threads, overlaps=True)


@lru_cache(maxsize=1024)
def level(rows: int) -> Plan:
    """Plan `level`: a warp for every row."""
    grid = (ceil(rows / _LEVEL_WARPS), 1, 1)
    return Plan(_kernel("level"), grid, _LEVEL_WARPS * WARP, overlaps=True)


@lru_cache(maxsize=1024)
def group(experts: int) -> Plan:
    """Plan `group`: a block for every expert."""
    return Plan(_kernel("group"), (experts, 1, 1), _GROUP_WARPS * WARP, overlaps=True)


@lru_cache(maxsize=1024)
def combine(tokens: int, n: int) -> Plan:
    """Plan `combine`: blocks for every token."""
    grid = (tokens, ceil(n / _COMBINE_COLUMNS), 1)
    return Plan(_kernel("combine"), grid, _COMBINE_THREADS, overlaps=True)


@lru_cache(maxsize=1024)
def route(tokens: int) -> Plan:
    """Plan `route`: a warp for every token."""
    grid = (ceil(tokens / _ROUTE_WARPS), 1, 1)
    return Plan(_kernel("route"), grid, _ROUTE_WARPS * WARP, overlaps=True)


def gated_ways(fmt: Format) -> tuple[bool, ...]:
    """Whether a product is gated, in each way that there is: where sums are turned first, none is gated."""
    return (False,) if kernels_of(fmt).turned else (False, True)


def all_kernels(formats: list[Format], gpu: Gpu) -> list[Kernel]:
    """Every kernel that any of these plans can ask for on a GPU, for tests that compile them all."""
    found = {gather(Load(1, 1, 1), 32).kernel}  # the others are of the same module
    loads = [Load(t, k, e) for t in (1, 2, 8, 16, 64, 512, 4096) for k, e in ((1, 1), (2, 8), (8, 128))]
    for fmt in {f.for_kernels for f in formats if f.on_gpu and not f.for_activations}:
        ways = gated_ways(fmt)
        for load, n, half, gated in product_of(loads, (1024, 14336), {True, not kernels_of(fmt).walks}, ways):
            made = product(fmt, load, n, 4096, gpu, half, gated)
            if made is not None:
                found.add(made.gemm.plan.kernel)
        if gpu.capability == 90:
            found |= {
                made.gemm.plan.kernel
                for gated in ways
                for made in _wgmma(loads[0].problem(fmt, 1024, 4096, gpu, True, gated), loads[0])
            }
    return sorted(found, key=repr)
