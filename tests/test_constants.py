"""Numbers that plans and kernels both have are the same, as the compiler sees them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import nvrtc
import pytest
import sharing

import cuquant as cq
from cuquant import plan
from cuquant.cuda import problem, sources
from cuquant.formats import exl3 as exl3_format, trellis_search
from cuquant.formats.kernels import Coding, Scaling, kernels_of
from cuquant.kv import codes
from cuquant.plan import attention as kv_plan, blocks, cores, exl3, moe, trellis, wgmma_timed

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (test extra)")

GPU = plan.Gpu(90)
Q4_0, Q8_1, WALK = cq.formats.get("q4_0"), cq.formats.get("q8_1"), cq.Exl3(4, "mcg")
TRELLIS = cq.formats.get("trellis3").for_kernels
ONE = (1, 128, 128)  # matrix, N, K
BOXES = kv_plan.attention(kv_plan.Shape(1, 1, 32, 8, 128, codes.BITS, False, 1), 90, plan.LARGE_GPU)
SINGLE = kv_plan.attention(kv_plan.Shape(1, 1, 32, 8, 64, codes.BITS, True, 1), 90, plan.LARGE_GPU)
BOX_SLOT = "(Box<{0}>::SCALES + 2 * Box<{0}>::SCALE_BYTES + 1023) / 1024 * 1024"
PANELS = kv_plan.attention(kv_plan.Shape(1, 64, 32, 8, 96, codes.BITS, 1, 1), 90, plan.LARGE_GPU)
RESULTS = exl3.turn_results(1, 128)
SUMS = exl3.turn_sums(1, 128)
QUANTIZE = plan.quantize(Q4_0, 1, GPU)
CENTERED = max(n for n in range(16, 1 << 16, 16) if plan.center(n).grid[0] == 1)
"""Bytes of scales that a block of threads moves."""
SQUARES = exl3.dequantize(WALK, *ONE)
SEARCH = trellis.quantize(TRELLIS, *ONE)
IMPORTANCE = kv_plan.importance(1, 64, 4, 1)

Case = tuple[plan.Kernel, Mapping[str, int]]
SHARED: list[Case] = [
    (
        moe.route(1).kernel,
        {"levels::COLUMNS": moe.LEVEL_COLUMNS, "BATCH_AXES": problem._BATCH_AXES, "WARP": plan.WARP},
    ),
    (
        plan.activations("prepare_rows", Q8_1, 1, 32).kernel,
        {
            "MOST_THREADS": blocks._MOST_THREADS,
            "ROW_THREADS": blocks._ROW_THREADS,
            "PIECES * MINE * MOST_THREADS": plan.LONGEST_ROW,
        }
        | {str(dtype).upper(): number for dtype, number in problem.DTYPES.items()},
    ),
    (QUANTIZE.kernel, {"THREADS": QUANTIZE.block}),
    (plan.center(1).kernel, {"THREADS": plan.center(1).block, "16 * OWN * THREADS": CENTERED}),
    (
        RESULTS.kernel,
        {"HADAMARD": exl3_format.HADAMARD, "RESULT_THREADS": RESULTS.block}
        | {str(name or "none").upper(): number for name, number in problem.ACTIVATIONS.items()},
    ),
    (SUMS.kernel, {"HADAMARD": exl3_format.HADAMARD, "RESULT_THREADS": SUMS.block}),
    (exl3.repack(WALK, "to_fragments", *ONE).kernel, {"WARPS": exl3._WARPS}),
    (SQUARES.kernel, {"THREADS": SQUARES.block, "SIDE * SIDE * 4": exl3._SQUARE_BYTES}),
    (
        trellis.repack(TRELLIS, "to_fragments", *ONE).kernel,
        {"WARPS": trellis._WARPS, "RUN": trellis._RUN, "THREADS": trellis.sign_bits(TRELLIS, 1).block},
    ),
    (
        trellis.dequantize(TRELLIS, *ONE).kernel,
        dict(zip(("ROWS", "COLUMNS"), trellis._DEQUANTIZED, strict=True))
        | {"THREADS": trellis.dequantize(TRELLIS, *ONE).block},
    ),
    (
        SEARCH.kernel,
        {
            "THREADS": SEARCH.block,
            "ROWS": trellis._ROWS,
            "GROUP": kernels_of(TRELLIS).scale_columns,
            "CANDIDATES": len(trellis_search.CANDIDATES),
        },
    ),
    (IMPORTANCE.kernel, {"WARPS": IMPORTANCE.block // plan.WARP}),
    (
        BOXES.attention.kernel,
        {
            "TIERS": len(codes.BITS),
            "ROWS / GROUPS": kv_plan.GROUP_ROWS,
            "COPYING_WARPS": kv_plan.COPYING_WARPS,
            "BOX_HEADS": kv_plan.BOX_HEADS,
            "Place::BARRIERS": kv_plan.BOX_BARRIERS,
        }
        | {f"bits_of({tier})": bits for tier, bits in enumerate(codes.BITS)}
        | {f"Box<{bits}>::TOKENS": kv_plan.box_tokens(bits) for bits in codes.BITS}
        | {BOX_SLOT.format(bits): kv_plan.box_slot(bits, 128) for bits in codes.BITS},
    ),
    (
        PANELS.attention.kernel,
        {
            "THREADS": PANELS.attention.block,
            "MERGE_ROWS * MERGE_WARPS * WARP": PANELS.merge.block,
            "PANEL_TOKENS": kv_plan.PANEL_TOKENS,
            "PANEL_SLOTS": kv_plan.PANEL_SLOTS,
            "PANEL_SLOTS * PANEL + CUQUANT_CODES": kv_plan.PANEL_SLOTS * 128 * 128 + kv_plan.PANEL_CODES,
            "BLOCK_ROWS": 128,
        },
    ),
    (
        SINGLE.attention.kernel,
        {f"Layout<{bits}>::SLOT": kv_plan.slot(bits, 64, True) for bits in codes.BITS}
        | {"PADDED": kv_plan.padded(64)},
    ),
    (
        plan.wgmma(plan.Problem(Q4_0, 512, 4096, 4096, GPU)).plan.kernel,
        {"Shares<1, true>::MOST_PARTS": wgmma_timed.MOST_PARTS},
    ),
]
"""Kernels, and what their files say that Python says too."""


def same(kernel: plan.Kernel, values: Mapping[str, int], after: str = "") -> None:
    """Numbers that are one larger must all be others, lest a check be none."""
    assert nvrtc.unequal(kernel, values, after) == []
    larger = {name: value + 1 for name, value in values.items()}
    assert nvrtc.unequal(kernel, larger, after) == list(values)


@pytest.mark.parametrize("number", range(len(SHARED)), ids=[kernel.op for kernel, _ in SHARED])
def test_numbers_of_both(number: int) -> None:
    same(*SHARED[number])


@pytest.mark.parametrize("kind", [Coding, Scaling])
def test_what_codes_and_scales_may_be(kind: type[Coding] | type[Scaling]) -> None:
    """Names and order; so numbers."""
    text = (sources.folder() / "core/types.cuh").read_text()
    found = re.search(rf"^enum {kind.__name__} {{([^}}]*)}};$", text, re.M)
    assert found is not None
    assert re.split(r",\s*", found[1].strip()) == [each.name for each in kind]
    assert [int(each) for each in kind] == list(range(len(kind)))


NAMES = (*cq.formats.names(), *cq.formats.names_of_read_only())
MORE = (
    cq.KBit(2, [-1, 0, 0.5, 1]),
    cq.KBit(5, [(i + 1) / 32 for i in range(32)]),
    cq.KBit(4, absmax="float16"),
)
TOLD = {
    (kernels_of(fmt).header, fmt.for_kernels.block_bytes): fmt.for_kernels
    for fmt in (*map(cq.formats.get, NAMES), *MORE)
}
"""One format of those that are the same to kernels."""


@pytest.mark.parametrize("fmt", TOLD.values(), ids=str)
def test_what_kernels_are_told_of_a_format_is_what_its_header_says(fmt: cq.Format) -> None:
    kernels = kernels_of(fmt)
    if fmt.whole_matrices:
        kernel = next(each for each in sorted(plan.matrix_kernels(fmt), key=repr) if each.format)
    else:
        kernel = plan.per_block("dequantize", fmt, 1).kernel
    told = {"BITS": fmt.bits, "CODING": kernels.coding, "SCALING": kernels.scaling}
    told |= {"BLOCK_BYTES": fmt.block_bytes, "HAS_MIN": kernels.has_minimum}
    if not fmt.for_activations:
        planes = plan.layout(fmt)
        told |= {"LOW_BYTES": planes.low, "HIGH_BYTES": planes.high, "SCALE_BYTES": planes.scale}
        told |= {"GROUP_BYTES": planes.group, "GROUP_TILES": planes.group_tiles}
    values = {f"Format::{name}": int(value) for name, value in told.items()}
    same(kernel, values)


SEARCHED = [
    fmt
    for fmt in TOLD.values()
    if fmt.takes_importance and kernels_of(fmt).encoder_for(True) is not None and not fmt.read_only
]


@pytest.mark.parametrize("fmt", SEARCHED, ids=str)
def test_by_what_errors_count(fmt: cq.Format) -> None:
    encoder = kernels_of(fmt).encoder_for(True)
    assert encoder is not None
    same(plan.quantize(fmt, 1, GPU, by_importance=True).kernel, {"BY_ROW<Format>": int(encoder.of_rows)})


LOOKED_UP = {
    "2": cq.KBit(2, [-1, 0, 0.5, 1]),
    "3": cq.formats.get("kbit3"),
    "4": cq.formats.get("kbit4"),
    "5": cq.KBit(5, [(i + 1) / 32 for i in range(32)]),
    "5-signed": cq.formats.get("kbit5"),
    "trellis2": cq.formats.get("trellis2"),
    "trellis4": cq.formats.get("trellis4"),
}
"""Formats with codebooks, by bits that are looked up."""


@pytest.mark.parametrize("name", LOOKED_UP)
def test_tables_of_codebooks(name: str) -> None:
    fmt = LOOKED_UP[name].for_kernels
    table = cores._TABLES[cores.looked_up(fmt)]
    values = {"1 << Values::PAIR_BITS": table.entries, "Values::ENTRY": table.size}
    for roomy in (False, True):
        copies, size = cores.table_of(fmt, 90, roomy)
        values[f"Codec<Format, {copies}>::TABLE_BYTES"] = size
        if cores.tables(fmt, 2) > 1:
            copies, size = cores.table_of(fmt, 90, roomy, sides=2)
            values[f"Codec<Format, {copies}>::TWO_BYTES"] = size
    same(plan.gemm(plan.Problem(fmt, 1, 4096, 4096, GPU)).plan.kernel, values)


def test_what_sequences_are_shared_out_by() -> None:
    """Numbers of the reckoning that plans are tested by; how many are tried is known in a function alone."""
    kernel = kv_plan.attention(kv_plan.Shape(8, 1, 32, 8, 128, codes.BITS, 0, 1), 80, 108).attention.kernel
    costs = {f"cost({tier}) == {sharing.COSTS[bits]}f": 1 for tier, bits in enumerate(codes.BITS)}
    steps = {f"step_of({tier})": kv_plan.box_tokens(bits) for tier, bits in enumerate(codes.BITS)}
    same(kernel, {"GRAIN": sharing.GRAIN, **costs, **steps})
    same(kernel, {"STEPS": sharing.STEPS, "MOST": sharing.MOST}, after="constexpr int STEPS = ")


def test_last_rows_of_experts() -> None:
    """What the kernel takes for few rows is no constant of the file, but of a function."""
    load = moe.Load(64, 2, 8)
    products = moe._wgmma(load.problem(Q4_0, 1024, 4096, GPU, True, False), load)
    kernels = {product.batch: product.gemm.plan.kernel for product in products}
    tiles = {tile.batch: tile for tile in wgmma_timed.WGMMA_TILES if tile.batch in kernels}
    assert len({wgmma_timed.narrow(tile) == batch for batch, tile in tiles.items()}) == 2
    for batch, tile in tiles.items():
        same(kernels[batch], {"NARROW": wgmma_timed.narrow(tile)}, after="constexpr int NARROW = ")


def test_there_are_formats_for_all_tables() -> None:
    assert {cores.looked_up(fmt.for_kernels) for fmt in LOOKED_UP.values()} == set(cores._TABLES)
