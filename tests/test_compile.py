"""Every kernel compiles, for GPUs that are not there, without spilling registers."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product as combinations
from pathlib import Path
from typing import Any

import nvrtc
import pytest
from formats_table import NAMES
from hardware import SHARED

import cuquant as cq
from cuquant import plan
from cuquant.bench.conversions import CONVERSIONS
from cuquant.bench.dequant import conversion_kernel, product
from cuquant.cuda import fragments, sources, trellis as cuda_trellis
from cuquant.plan import attention as kv_plan, caches, launch, wgmma_core, wgmma_timed
from cuquant.plan.decode_core import Hits
from cuquant.plan.decode_grouped import decode_grouped

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (test extra)")
WALKS = [cq.Exl3(2, "mcg"), cq.Exl3(4), cq.Exl3(6, "mcg"), cq.Exl3(8, "mul1")]
READ_ONLY = ("iq2_s", "q2_0", "q2_0-128", "tq2_0")
"""As whose kernels all of that kind are multiplied."""
FORMATS = [*map(cq.formats.get, (*cq.formats.names(), *READ_ONLY)), *WALKS]
UNUSUAL = [
    cq.Int4(96),
    cq.Int4(96, symmetric=False),
    cq.KBit(2, absmax="float16"),
    cq.KBit(2, [-1, 0, 0.5, 1]),
]
"""Formats without a name: kernels for groups of any size encode the former, the latter's codes are all
looked up."""
OTHERS = ["sm_75", "sm_80", "sm_89", "sm_100a", "sm_120"]
EVERY = ["sm_90a", "sm_86", *OTHERS]
"""sm_86 is compiled only when asked for: it has sm_89's kernels, from the same lines."""
ELSEWHERE = ["sm_75", "sm_80", "sm_120"]
"""sm_89 has the lines of sm_80, and sm_100a those of sm_120."""
ALIKE_ARCHS = [pytest.param(arch, marks=pytest.mark.compile_all) for arch in OTHERS if arch not in ELSEWHERE]
SIZES = (132, 46, 82, 108, 114, 170)
"""Multiprocessors of GPUs that are small, or that many people have."""
FEW = 5
"""Of shapes each so many-th: no divisor of how many batches, rows and columns there are."""
ROOT = Path(__file__).parent.parent


def kernels(arch: str, *multiprocessors: int, every: int = 1) -> list[plan.Kernel]:
    """Every kernel that a plan asks for on an architecture, one of those that share a module; on GPUs with so
    many multiprocessors, by default an H200's; by all shapes, or `every` so many-th.

    Of those that differ in the slots of decode's rings alone, which registers hardly depend on, one too.
    """
    capability = int("".join(c for c in arch if c.isdigit()))
    gpus = [plan.Gpu(capability, count) for count in (multiprocessors or [plan.LARGE_GPU])]
    modules = {
        (k.op, k.format, *(c for c in k.constants if c[0] != "DEPTH")): k
        for k in plan.all_kernels([*FORMATS, *UNUSUAL], gpus, every)
    }
    return list(modules.values())


CHOSEN = {None, "q4_0", "q5_1", "q8_0", "q8_1", "q4_k", "q6_k", "kbit4", "nvfp4", "trellis"}
CHOSEN |= {"exl3_mcg", "exl3_mul1"}


def one_of_each(arch: str) -> list[plan.Kernel]:
    """One tile of each core and codec: integers of 4, 5, 8 bits, scales, a codebook, E2M1, walks, none."""
    chosen = {}
    for kernel in kernels(arch, every=FEW):
        constants = dict(kernel.constants)
        route = (kernel.op, kernel.format, constants.get("CORE"))
        if kernel.format in CHOSEN:
            chosen[route] = kernel
    return list(chosen.values())


SPILLED = {"sm_75": 64, "sm_120": 176}
"""Bytes of registers for which attention of float32 queries of 256 channels has no room."""
CROWDED = {1: 24, 0: 40}
"""The same of caches of all five widths in boxes, with more than four queries for a key head, of one sequence
or several."""
WIDE_IMPORTANCE = 16
"""The same of sums of importance of 256 channels."""
PANELS = {0: 0, 1: 0, 2: 24}
"""The same of panels, where no product waits: of tiles in which nothing, positions or a mask hide tokens."""
BY_ERF = 16
"""The same of the largest gated tile of experts where results go through gelu by erf, and nowhere else."""


def check(todo: list[plan.Kernel], arch: str) -> None:
    with ThreadPoolExecutor(2) as pool:  # NVRTC releases the lock; CI has two cores
        reports = list(pool.map(lambda kernel: nvrtc.compile(kernel, arch), todo))
    for kernel, report in zip(todo, reports, strict=True):
        constants = set(kernel.constants) if kernel.op == "attention" else set()
        crowded = {("TIERS", 31), ("BOXES", 1), ("SPREAD", 0)} <= constants
        wide = {("DIM", 256), ("HALVES", 2)} <= constants
        spilled = (
            SPILLED.get(arch, 0)
            if wide
            else CROWDED[dict(kernel.constants)["ONE_SEQUENCE"]]
            if crowded
            else 0
        )
        if kernel.op == "importance" and ("DIM", 256) in kernel.constants:
            spilled = WIDE_IMPORTANCE
        if kernel.op == "attention_panels":
            spilled = PANELS[dict(kernel.constants)["MASKED"]]
            assert kernel.entry == "merge" or report.registers == 128, "as many as its warpgroups share out"
        if {("GATED", 1), ("BATCH", 144), ("ROW_BLOCKS", 2)} <= set(kernel.constants):
            spilled = BY_ERF
        assert max(report.stack, report.spills) <= spilled, f"{kernel} on {arch}: {report}"
        if ("BOXES", 1) in constants and kernel.entry == "attention":
            assert report.registers == 96, "as many as its warpgroups share out (kernels/ops/attention.cu)"
        assert kernel.max_shared + report.shared <= SHARED.get(arch, 227 << 10), f"{kernel} on {arch}"


ALIKE = {
    "q4_1",
    "q5_0",
    "kbit2",
    "kbit3",
    "kbit4",
    "nvfp4",
    "q3_k",
    "q5_k",
    "iq4_nl",
    "iq4_xs",
    "grid",
    "tq2_0",
}
"""Headers of formats that differ in widths alone from others, or take fewer registers than one like them."""
ALIKE_BLOCKS = {("int4", 18), ("q2_0", 34), *(("trellis", size) for size in (12, 16, 20, 68))}
"""The same of headers that several formats share, with the bytes of blocks: to products symmetric int4 is
q4_0; trellis weights of 2 and 3 bits with scales of 128 columns take more registers than others."""
SLIGHT = ("DEPTH", "STAGES", "ROOM", "TOGETHER", "PAIR")
"""What matters little to a tile's registers: slots of rings, room for results, the pieces of x (decode core)
or sums (mma core) that a thread has at once, whether a pair of blocks shares x. With most of the latter two
it takes most."""


def telling(todo: list[plan.Kernel]) -> list[plan.Kernel]:
    """Those that can fail where others compile: of formats like others one tile of each core, and one of the
    tiles that differ in what matters little, or in how many warps there are along N, or blocks of a split, if
    several. Of a product's tile that many formats have the formats take turns to be the one (under
    `compile_all` all are)."""
    chosen: dict[tuple[Any, ...], plan.Kernel] = {}
    for kernel in sorted(todo, key=lambda kernel: [dict(kernel.constants).get(c, 0) for c in SLIGHT[-2:]]):
        c: dict[str, Any] = dict(kernel.constants)
        size = c.get("BLOCK_BYTES")
        alike = kernel.format in ALIKE or (kernel.format, size) in ALIKE_BLOCKS
        tile = {name: n for name, n in c.items() if name not in SLIGHT}
        tile |= {name: min(2, c[name]) for name in ("ROW_WARPS", "SPLIT", "CLUSTER") if name in c}
        own = (c.get("CORE"), c.get("ROW_FACTORS")) if alike else tuple(tile.items())
        chosen[kernel.op, kernel.entry, kernel.format, size, own] = kernel
    found, tiles = [], dict[tuple[Any, ...], list[plan.Kernel]]()
    for (op, _, _, _, own), kernel in sorted(chosen.items(), key=str):
        if op == "gemm" and len(own) > 3:
            shape = tuple(item for item in own if item[0] not in ("BLOCK_BYTES", "COPIES", "ROW_FACTORS"))
            tiles.setdefault(shape, []).append(kernel)
        else:
            found.append(kernel)
    found += [of_formats[turn % len(of_formats)] for turn, of_formats in enumerate(tiles.values())]
    return thinned(found)


EVERY_NTH = {("gemm", 0): 10, ("gemm", 2): 7, ("repack", None): 5, ("dequantize", None): 3}
EVERY_NTH |= {("quantize", None): 3, ("quantize_int4", None): 4, ("quantize_trellis", None): 3}
EVERY_NTH |= {("repack_trellis", None): 3, ("dequantize_trellis", None): 3}
"""Of so many that are alike one is compiled: by what they do, and the core."""


def thinned(todo: list[plan.Kernel]) -> list[plan.Kernel]:
    """Every so many of those that do the same."""
    groups = dict[tuple[Any, ...], list[plan.Kernel]]()
    for kernel in todo:
        groups.setdefault((kernel.op, dict(kernel.constants).get("CORE")), []).append(kernel)
    return [k for kind, alike in groups.items() for k in alike[:: EVERY_NTH.get(kind, 1)]]


@needs_nvrtc
@pytest.mark.long
def test_every_core_and_format_for_the_h200() -> None:
    """In all tiles, but for formats and tiles like others."""
    check(telling(kernels("sm_90a", every=FEW)), "sm_90a")


def tiles_of(name: str, tile: wgmma_core.Tile) -> list[plan.Kernel]:
    """Kernels of one of the wgmma core's tiles, splitting K and not, where it has room for them."""
    fmt = cq.formats.get(name).for_kernels
    return [
        wgmma_core.planned(
            fmt, tile, split, split == 1 and wgmma_core.shares_tiles(fmt, tile), stages
        ).plan.kernel
        for split in (1, 2)
        if (stages := wgmma_core.stages_of(fmt, tile, split)) >= 3
    ]


@needs_nvrtc
@pytest.mark.long
def test_blocks_that_share_a_multiprocessor_start_with_half_of_its_registers() -> None:
    """To the register: with fewer its warpgroups would wait for more for ever."""
    names = ("q4_0", "q5_1", "q4_k", "q6_k", "kbit4", "trellis3")
    shared = [tile for tile in wgmma_timed.STEP_US if tile.resident > 1]
    todo = list({k for name, tile in combinations(names, shared) for k in tiles_of(name, tile)})
    assert len(todo) >= 20
    with ThreadPoolExecutor(2) as pool:
        for kernel, report in zip(todo, pool.map(lambda k: nvrtc.compile(k, "sm_90a"), todo), strict=True):
            assert (report.registers, report.stack, report.spills) == (80, 0, 0), kernel


@needs_nvrtc
def test_signs_of_columns_have_registers() -> None:
    """Of trellis weights with the most scales, and with the most bits; under `compile_all` all of them."""
    todo = []
    for name in ("trellis2-32", "trellis4"):
        problem = plan.Problem(cq.formats.get(name).for_kernels, 4096, 4096, 4096, plan.Gpu(90))
        gemm = plan.gemm(problem, signs=True)
        assert gemm.signs_go_to == "W"
        todo.append(gemm.plan.kernel)
    check(todo, "sm_90a")


@needs_nvrtc
@pytest.mark.compile_all
@pytest.mark.parametrize("name", [str(f) for f in FORMATS if f.on_gpu and not f.for_activations])
def test_products_of_every_format(name: str) -> None:
    """Of the wgmma core all small tiles that plans may choose, of whatever shapes, and the largest; of the
    others those of some shapes."""
    largest = max(tile.batch for tile in wgmma_timed.STEP_US)
    chosen = [t for t in wgmma_timed.STEP_US if (t.batch in (16, largest) and t.pair == 1) or t.resident > 1]
    fmt = cq.formats.get(name).for_kernels
    gpu = plan.Gpu(90)
    decoded = {
        plan.decode(plan.Problem(fmt, m, n, 4096, gpu, count)).plan.kernel
        for m, n, count in combinations((1, 4, 8, 16), (1024, 4096, 14336, 28672), (1, 8))
    }
    for m, n, hit, sides in combinations((1, 4, 8), (768, 2048, 14336), (2, 30), (1, 2)):
        problem = plan.Problem(fmt, m, n, 1024, gpu, sides=sides, grouped=True)
        grouped = decode_grouped(problem, Hits(1.0, ((hit, 1.0),)))
        decoded |= set() if grouped is None else {grouped[1].plan.kernel}
    check([*decoded, *(kernel for tile in chosen for kernel in tiles_of(name, tile))], "sm_90a")


@needs_nvrtc
@pytest.mark.long
@pytest.mark.parametrize("arch", ELSEWHERE)
def test_every_core_and_codec_elsewhere(arch: str) -> None:
    """Products on sm_80, and each on one of the others; of the other kernels each on one."""
    todo = one_of_each(arch)
    products, others = ([k for k in todo if (k.op == "gemm") == wanted] for wanted in (True, False))
    if arch != "sm_80":  # one core of each format
        formats = sorted({str(k.format) for k in products})
        own = int(arch == "sm_75")
        products = [
            k for k in products if (formats.index(str(k.format)) + dict(k.constants)["CORE"]) % 2 == own
        ]
    check([*products, *others[ELSEWHERE.index(arch) :: len(ELSEWHERE)]], arch)


@needs_nvrtc
@pytest.mark.compile_all
@pytest.mark.parametrize("arch", EVERY)
def test_every_kernel_of_every_format(arch: str) -> None:
    check(kernels(arch, *SIZES), arch)


@pytest.mark.parametrize("every", [FEW, pytest.param(1, marks=pytest.mark.compile_all)])
def test_sm_86_has_the_kernels_of_sm_89(every: int) -> None:
    """No line asks for anything between sm_80 and sm_90."""
    assert kernels("sm_86", every=every) == kernels("sm_89", every=every)
    assert caches.all_kernels(86) == caches.all_kernels(89)
    lines = "\n".join(path.read_text(encoding="utf-8") for path in sources.folder().rglob("*.cu*"))
    asked = {int(number) for number in re.findall(r"__CUDA_ARCH__ [=<>!]+ (\d+)", lines)}
    assert {number for number in asked if number < 900} == {800}


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", *ELSEWHERE, *ALIKE_ARCHS])
def test_conversions(arch: str) -> None:
    """Each in registers and, where there is one, as the decode core's codec."""
    capability = int("".join(c for c in arch if c.isdigit()))
    todo = []
    for conversion in CONVERSIONS.values():
        todo.append(conversion_kernel("registers", conversion, capability))
        if conversion.weights is not None:
            todo.append(product(conversion, 1, 14336, 4096, plan.Gpu(capability)).plan.kernel)
    check(todo, arch)


@needs_nvrtc
@pytest.mark.long
def test_attention_for_the_h200() -> None:
    """Heads of 64 have the code of these with fewer registers; others, which are rare, may spill a little. Of
    two that differ in the columns of queries alone the one with more, and every third of these (under
    `compile_all` all)."""
    chosen = dict[tuple[Any, ...], plan.Kernel]()
    for kernel in caches.all_kernels(90, (128, 256)):
        chosen.setdefault((kernel.entry, *(c for c in kernel.constants if c[0] != "SPREAD")), kernel)
    check(list(chosen.values())[::3], "sm_90a")


@needs_nvrtc
@pytest.mark.parametrize(("arch", "streams"), [("sm_90a", 16), ("sm_80", 8)])
def test_blocks_of_the_most_streams_have_room_for_their_shares(arch: str, streams: int) -> None:
    """In what plans keep free beside the dynamic shared memory. (No plan has more streams in a block.)"""
    capability = int("".join(c for c in arch if c.isdigit()))
    shape = kv_plan.Shape(8, 1, 28, 7, 128, (4,), 0, 1)
    kernel = kv_plan.attention(shape, capability, plan.LARGE_GPU).attention.kernel
    assert dict(kernel.constants)["BLOCK_STREAMS"] == streams
    assert 0 < nvrtc.compile(kernel, arch).shared <= 2 * launch._STATIC


@needs_nvrtc
@pytest.mark.parametrize("arch", ELSEWHERE)
def test_attention_elsewhere(arch: str) -> None:
    capability = int("".join(c for c in arch if c.isdigit()))
    shape = kv_plan.Shape(1, 1, 32, 8, 128, (16, 8, 4, 3, 2), False, 1)
    check(
        [
            caches.append(1, 1, 1, 64, capability, 1)[0].kernel,
            kv_plan.attention(shape, capability, 1).attention.kernel,
        ],
        arch,
    )


@needs_nvrtc
@pytest.mark.compile_all
@pytest.mark.parametrize("arch", EVERY)
def test_all_attention(arch: str) -> None:
    check(caches.all_kernels(int("".join(c for c in arch if c.isdigit()))), arch)


def test_sources_are_self_contained() -> None:
    """No include is left, each header stands in once, and messages name the files."""
    for name in NAMES:
        text = sources.flatten("gemm", name)
        assert not re.search(r"^\s*#\s*include", text, re.MULTILINE)
        assert "#pragma once" not in text
        assert text.count("struct GgmlBlock") == text.count("struct Problem {") == 1
        assert '#line 1 "decode.cuh"' in text
        assert re.search(r'^#line \d+ "gemm.cu"$', text, re.MULTILINE)


def test_no_pragma_follows_a_discarded_loop() -> None:
    """NVRTC 12.9 leaves out a loop with a #pragma behind `if constexpr (false) for (...) {...}`."""
    for path in sources.folder().rglob("*.cu*"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines[:-1], 1):
            statement = line.split("  //")[0]
            if not statement.lstrip().startswith("if constexpr") or statement.endswith(("{", ";")):
                continue
            inner = " " * (len(line) - len(line.lstrip()) + 4)
            body = lines[number:]
            length = next(
                at for at, row in enumerate(body) if not row.startswith(inner) and (at or row[0] != "#")
            )
            bad = body[length].startswith("#") and body[length - 1].strip() == "}"
            assert not bad, f"{path.name}:{number}"


def test_line_numbers_are_those_of_the_files() -> None:
    text = sources.flatten("gemm", "q4_0").splitlines()
    where: dict[str, int] = {}
    name = ""
    for line in text:
        directive = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if directive:
            name = directive[2]
            where[name] = int(directive[1]) - 1
            continue
        where[name] += 1
        (path,) = sources.folder().glob(f"*/{name}")
        original = path.read_text().splitlines()
        if where[name] <= len(original) and "#pragma" not in original[where[name] - 1]:
            assert line == original[where[name] - 1] or "#include" in original[where[name] - 1]


@needs_nvrtc
def test_what_kernels_found_out_is_read_in_their_order() -> None:
    places = [f"{name.upper()} == {i}" for i, name in enumerate(fragments._Found._fields)]
    places.append(f"LEAST_EXPONENT < {fragments._NUMBERS}")
    lines = (f"static_assert({place});" for place in places)
    nvrtc.compile_text("\n".join((sources.flatten("center", None), *lines)), "sm_80")
    surveyed = {name.upper(): i for i, name in enumerate(cuda_trellis._Surveyed._fields)}
    survey = plan.trellis.survey(cq.formats.get("trellis3").for_kernels, 1, 16, 16).kernel
    assert nvrtc.unequal(survey, surveyed) == []
    assert len(surveyed) == len(cuda_trellis._NOTHING_FOUND)


@needs_nvrtc
def test_the_header_of_a_new_format_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q8_0's relative, in what dequantizes, repacks and multiplies."""
    found = re.search(
        r"```cuda\n(// offset8:.*?)```", (ROOT / "docs/adding-a-format.md").read_text(), re.DOTALL
    )
    assert found is not None
    shutil.copytree(sources.folder(), tmp_path / "kernels")
    (tmp_path / "kernels/formats/offset8.cuh").write_text(found[1])
    monkeypatch.setattr(sources, "folder", lambda: tmp_path / "kernels")
    like = cq.formats.get("q8_0")
    kernels = [
        plan.per_block("dequantize", like, 1).kernel,
        plan.repack(like, "to_fragments", 1, 1, plan.Gpu(90)).kernel,
        plan.gemm(plan.Problem(like, 1, 1024, 1024, plan.Gpu(90))).plan.kernel,
    ]
    monkeypatch.setattr(sources, "flatten", sources.flatten.__wrapped__)
    check([replace(kernel, format="offset8") for kernel in kernels], "sm_90a")
