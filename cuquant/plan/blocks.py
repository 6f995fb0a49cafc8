"""Launches of what converts blocks: quantize, dequantize, repack, and activations."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil

from ..formats import Format
from ..formats.kernels import Scaling, kernels_of
from .launch import LARGE_GPU, WARP, Gpu, Kernel, Plan, shared_limit
from .planes import TILE_COLUMNS, TILE_ROWS, layout, row_factors

_RUN_TILES, _LONGER, _ROW_READ, _ROW_WRITTEN = 16, (2, 4), 2500, 1600
"""Tiles along K that a block of threads repacks at a time, or some times as many, while what is read of a row
in storage, or written, stays below so many bytes, and two blocks of a multiprocessor have room for two each.
An H200's memory is the faster the more lies together: to fragments int4-128 takes 82 us with 0.6 KB, 78 with
1.1 KB, and 77 with 2.1 KB."""
_ALIGNED = 512
"""Bytes that ptxas adds to few static ones, so that what follows begins on 1 KB."""
_ROUNDS = 12
"""Blocks for each multiprocessor, at most, where row tiles are so few that several blocks share one."""
_THREADS, _MORE_THREADS = 512, 1024
"""Threads of a multiprocessor that repack to fragments, at most; more where rows have no factors. These have
half of the registers each: 32768 x 8192 then takes an H200 80 us of mxfp4 in place of 86, but 114 of q5_1 in
place of 107: its scales, which are to be lifted, have no room in shared memory."""


def per_format(op: str, entry: str, fmt: Format) -> Kernel:
    """A kernel that is compiled for each format. NotImplementedError for formats without kernels."""
    return Kernel(op, entry, kernels_of(fmt).header, (("BLOCK_BYTES", fmt.block_bytes),))


@lru_cache(maxsize=1024)
def per_block(op: str, fmt: Format, threads: int) -> Plan:
    """A kernel over the blocks of a format, with as many threads as the operation wants for them."""
    return Plan(per_format(op, op, fmt), (ceil(threads / 256), 1, 1), 256, overlaps=op != "dequantize")


GROUPS_ENCODER = "quantize_int4"
"""The encoder of groups of any size: a thread takes 16 weights at a time, of large groups several times."""
SEARCHING_ENCODER = "search"
"""The encoder that searches for scales, which knows importance, too."""
_USUAL_GROUPS = (32, 64, 128)
"""Group sizes that have kernels of their own, which need half as many instructions."""


_STAYING = 20
"""Blocks for each multiprocessor that quantize float16 numbers to a codebook, each as long as there is work.
Five run at once; an H200 takes up to 8% longer with just these (kbit4 192 us in place of 178 for 2^28)."""


@lru_cache(maxsize=1024)
def quantize(fmt: Format, blocks: int, gpu: Gpu, stay: bool = True, by_importance: bool = False) -> Plan:
    """Quantize to that many blocks. Blocks of threads `stay` where they ask for numbers ahead: for dense
    float16 ones, to a codebook. (Others would wait for each chunk's numbers in turn.)"""
    kernels = kernels_of(fmt)
    encoder = kernels.encoder_for(by_importance)
    assert encoder is not None
    op = encoder.op
    if op == GROUPS_ENCODER:
        usual = fmt.block_size if fmt.block_size in _USUAL_GROUPS else 0
        return _quantize_groups(kernels.has_zero_points, fmt.fine_from, usual, blocks * group_lanes(fmt))
    step = per_block(op, fmt, blocks * fmt.block_size // encoder.each)
    constants = (*step.kernel.constants, ("FINE_FROM", fmt.fine_from))
    if op == SEARCHING_ENCODER:
        constants += (("BY_IMPORTANCE", int(by_importance)),)
    step = replace(step, kernel=replace(step.kernel, constants=constants))
    if op == "quantize" and kernels.lookup and stay:
        return replace(step, grid=(min(step.grid[0], _STAYING * gpu.multiprocessors), 1, 1))
    return step


@lru_cache(maxsize=1024)
def mean_squares(rows: int) -> Plan:
    """Mean squares of so many rows, of which a block has one for each lane of its warp."""
    return Plan(Kernel("mean_squares", "mean_squares"), (ceil(rows / WARP), 1, 1), WARP, overlaps=True)


def group_lanes(fmt: Format) -> int:
    """Lanes of a warp that quantize a group: a power of two, so that they can exchange its extremes."""
    return min(WARP, 1 << (fmt.block_size // 16).bit_length() - 1)


@lru_cache(maxsize=1024)
def _quantize_groups(has_zero_points: bool, fine_from: int, group: int, threads: int) -> Plan:
    constants = (("ASYMMETRIC", int(has_zero_points)), ("GROUP", group), ("FINE_FROM", fine_from))
    kernel = Kernel(GROUPS_ENCODER, GROUPS_ENCODER, constants=constants)
    return Plan(kernel, (ceil(threads / 256), 1, 1), 256, overlaps=True)


@lru_cache(maxsize=1024)
def repack(fmt: Format, entry: str, row_tiles: int, tiles: int, gpu: Gpu, half: bool = True) -> Plan:
    """Repack to or from the fragment layout (`entry`), so many `tiles` a row tile: a run of them at a time.

    On the way back each run has a block of threads. On the way there a row tile has one, which has the next
    run fetched while it works on one; or more, if there are few row tiles, and rows have no factors. (Weights
    that are not `half`, that float16 does not hold, have none.)
    """
    threads = 256 if fmt.block_size < 256 else 128
    factors = half and row_factors(fmt)
    row = _RUN_TILES * TILE_COLUMNS // fmt.block_size * fmt.block_bytes

    def kernel(longer: int, most_shared: int = 0, **more: int) -> Kernel:
        constants = {"THREADS": threads, "ROW_FACTORS": int(factors), **more, "RUN": longer * _RUN_TILES}
        made = per_format("repack", entry, fmt)
        defined = (*made.constants, *constants.items(), ("TO_FRAGMENTS", int(entry == "to_fragments")))
        return replace(made, constants=defined, max_shared=most_shared)

    if entry == "from_fragments":
        longer = max((n for n in _LONGER if n * row < _ROW_WRITTEN), default=1)
        blocks = row_tiles * ceil(tiles / (longer * _RUN_TILES))
        return Plan(kernel(longer), (blocks, 1, 1), threads)
    room = shared_limit(gpu.capability, 2) - _ALIGNED
    fits = (n for n in _LONGER if n * row < _ROW_READ and 2 * _image(n * row) <= room)
    longer = max(fits, default=1)
    shared, most = 2 * _image(longer * row), (_THREADS if factors else _MORE_THREADS) // threads
    resident = max(n for n in range(1, most + 1) if n == 1 or shared <= shared_limit(gpu.capability, n))
    alone = shared_limit(gpu.capability)
    made = kernel(longer, alone, RESIDENT=resident, IMAGE=shared // 2)
    if factors:
        kept = _kept(fmt, tiles, (room if shared <= room else alone) - shared)
        return Plan(made, (row_tiles, 1, 1), threads, shared + kept)
    runs, places = ceil(tiles / (longer * _RUN_TILES)), _ROUNDS * gpu.multiprocessors
    return Plan(made, (row_tiles, max(1, min(runs, places // max(1, row_tiles))), 1), threads, shared)


def _image(row: int) -> int:
    """Bytes of a run's rows in shared memory, so many of each in storage: whole words of 16 bytes, an odd
    number of them a row, and some behind the last row."""
    return TILE_ROWS * (ceil(row / 16) + 1 | 1) * 16 + 16


def _kept(fmt: Format, tiles: int, room: int) -> int:
    """Bytes of a row tile's group plane, or else of its scales, which wait in shared memory to be lifted, if
    they have room."""
    planes = layout(fmt)
    kept = ceil(tiles / planes.group_tiles) * planes.group or tiles * planes.scale
    return kept if kept <= room else 0


_CENTER_THREADS = 256


@lru_cache(maxsize=1024)
def center(nbytes: int) -> Plan:
    """Bring scales that are exponents to what products take, that many bytes: 64 a thread."""
    blocks = ceil(nbytes / (64 * _CENTER_THREADS))
    return Plan(Kernel("center", "center"), (blocks, 1, 1), _CENTER_THREADS, overlaps=True)


def prepare_kernels(fmt: Format, gpu: Gpu) -> set[Kernel]:
    """What storage bytes go through before the first product, of a format as it is repacked."""
    repacked = {repack(fmt, "to_fragments", 1, 1, gpu).kernel}
    return repacked | ({center(1).kernel} if kernels_of(fmt).scaling is Scaling.E8M0 else set())


ACTIVATION_KERNELS = {
    "prepare_rows": "QiqqiQQQi",
    "prepare_halves": "QiqqiQQQi",
    "round_halves": "QiqqiQQ",
    "blocks_to_half": "QiQQ",
    "quantize_rows": "QiqqiQQQ",
    "quantize_half": "QiqqiQQQ",
}
"""Entries of kernels/ops/activations.cu, and types of what they take, as `struct` has them."""
_MOST_THREADS = 1024
LONGEST_ROW = 4 * 16 * _MOST_THREADS
"""Activations of a row that a block of threads can quantize at once: four times 16 of each thread."""
_ROW_THREADS = 512
"""Threads of a block that keeps up to 16384 numbers of a row in registers, at most."""
_BY_16 = ("blocks_to_half", "quantize_rows", "quantize_half")
"""Kernels whose threads take half a block of q8_1 at a time."""
_WITHOUT_PEAK = ("prepare_halves", "round_halves", "quantize_half")
"""Kernels for which the parts of a row have nothing in common."""


@lru_cache(maxsize=1024)
def activations(entry: str, fmt: Format, rows: int, k: int) -> Plan:
    """Quantize activations or prepare operand B (`entry`): a block of threads per row, or several.

    A thread takes 8 or 16 numbers of a row. Where a row's peak must be known, which needs the row in one
    block, it may take more (`row_threads`); `prepare_rows` has rows of any length.
    """
    each, most = (16, _MOST_THREADS) if entry in _BY_16 else (8, _ROW_THREADS)
    if entry in _WITHOUT_PEAK:
        parts = ceil(k / (each * 256))
        threads = threads_of(k, each * parts, most)
    else:
        parts, threads = 1, row_threads(rows, k, each, most)
    return Plan(per_format("activations", entry, fmt), (rows, parts, 1), threads, overlaps=True)


def row_threads(rows: int, k: int, each: int = 8, most: int = _ROW_THREADS) -> int:
    """Threads of a block that has a row of k numbers, of so many rows: each takes so many numbers, or up to
    four times as many if a large GPU could not hold so many threads."""
    each *= next((n for n in (1, 2) if rows * k <= n * each * LARGE_GPU * 1024), 4)
    return threads_of(k, each, most)


def threads_of(k: int, each: int, most: int) -> int:
    """Threads of a block, whole warps of them, that take so many of k numbers `each`."""
    return min(most, max(128, ceil(k / (each * WARP)) * WARP))


def block_kernels(fmt: Format, gpu: Gpu) -> set[Kernel]:
    """What converts blocks of a format on a GPU."""
    stored = fmt.for_kernels
    found = {per_block("dequantize", stored, 1).kernel}
    for by_importance in {False, fmt.takes_importance} if fmt.encodes_on_gpu else ():
        found.add(quantize(fmt, 1, gpu, by_importance=by_importance).kernel)
        encoder = kernels_of(fmt).encoder_for(by_importance)
        if encoder is not None and encoder.of_rows:
            found.add(mean_squares(1).kernel)
    if not fmt.for_activations:
        for entry, half in product(("to_fragments", "from_fragments"), (True, False)):
            found.add(repack(stored, entry, 1, 1, gpu, half).kernel)
        return found | prepare_kernels(stored, gpu)
    return found | activation_kernels(fmt, 1, fmt.block_size)


def activation_kernels(fmt: Format, rows: int, k: int) -> set[Kernel]:
    """All kernels of activations, for so many rows of k numbers."""
    return {activations(entry, fmt, rows, k).kernel for entry in ACTIVATION_KERNELS}
