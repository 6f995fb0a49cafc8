"""Launches of attention over a cache."""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ..kv.codes import BITS
from .launch import WARP, Kernel, Plan, beside, lone, shared_limit

GROUP_ROWS = 8
"""Rows of queries, a key head's of all positions, in a group: the columns of a product."""
STAGES = 3
"""Half steps of the widest bucket that a warp's ring holds: more were slower, 43.4 us in place of 42.7."""
BLOCK_HEADS = 2
"""Most key heads of a block. Of more, rows lie side by side and share sectors of scales; of fewer, there are
fewer shares of a sequence to be added up. 131072 tokens of 4 bits take an H200 42.9 us, and 45.3 with 8
heads, 4096 tokens 10.6 and 15.8."""
MERGES_BESIDE = 4
"""Blocks that have room on a multiprocessor beside one of attention (kernels/attention/merge.cuh)."""
MERGE_SHARED = 18 << 10
"""Bytes that these ask for where launches overlap, if there is room beside attention: at most 11 on one
multiprocessor then.

They go where there is room first, up to 32 on each that attention leaves idle, and hinder each other there:
4096 tokens of 4 bits take an H200 9.2 us in place of 8.3 with 16 key heads, which have 128 blocks, and 9.5 in
place of 7.9 with 10. With more they keep attention's next blocks waiting where few tokens leave many idle.
"""
LEAST_CHANNELS = 16
"""Minimum channels in a part of a row that is merged on its own. 4096 tokens of 4 bits take 7.9 us where
parts have 16 channels, 8.2 where they have 8, and 8.6 where they have 32."""
MANY_SHARES, MERGE_WARPS, MERGE_PARTS = 32, 8, 4
"""Shares of boxes beyond which so many warps merge each of so many parts of a row; of fewer half of the warps
merge it whole. 32768 tokens of 2 bits take 15.9 us, and 16.6 where 16 warps merge whole rows; 32 sequences of
1024 tokens 16.5, and 25.5."""
BUSY = 0.9
"""Share of a launch's streams that sequences of one length should use, if they can."""
STREAMS_EACH = 2
"""Streams for a sequence, at least, if one query each meets sequences whose lengths may differ: one with more
tokens than others has more. (Of several queries blocks take longer to begin and end, so they are as few as
may be: 16 of each of 32 sequences of 128 to 4096 tokens take an H200 86 us, and 94 with twice as many.)"""
LEAST, BOX_LEAST = 64, 128
"""Cost (kernels/attention/split.cuh) times key heads that a block is worth; shorter sequences are not split
so far. 1024 tokens of 4 bits take an H200 6.9 us, and 7.8 with twice as much; 4096 of 2 bits, in boxes, 9.0
and 11.5 with half as much."""
BOX_HEADS = 8
"""Key heads of which the copy engine takes rows at once, for as many warps."""
MANY_HEADS = 32
"""Key heads from which on boxes are faster for 4 and 8 bits as well: a head's rows are far apart in memory.

8 x 131072 tokens of 4 bits take an H200 1027 us in place of 1258, of 8 bits 1964 in place of 2274. Rows of 2
and 3 bits are less than half of a line each; of others and fewer heads shares of one sequence in more blocks
cost more than whole lines save (131072 tokens of 4 bits and 8 heads 43.7 us in place of 40.7).
"""
BOX_RING, BOX_BARRIERS = 100 << 10, 1 << 10
"""Most bytes of a ring of boxes, and of its barriers (kernels/attention/boxes.cuh)."""
COPYING_WARPS = 4
"""Warps that copy beside those that compute: a warpgroup, which gives them its registers."""
PANEL_ROWS = 32
"""Rows of a key head's queries from which on tokens become panels, once for 64 or 128 rows, where there are
warpgroups' products (sm_90). With 16 rows 8 x 4096 tokens of 4 bits take an H200 33 us, without panels 26;
with 32 rows 34 and 38, with 256 rows 82 and 219."""
LAUNCH_QUERIES = 64
"""Queries of each sequence in a launch without panels: any group of its rows has all tokens of a cache."""
PANEL_TOKENS, PANEL_SLOTS, PANEL_CODES = 64, 8, 90 << 10
"""Tokens of a panel; panels of keys or values in shared memory, and bytes of codes that wait to be converted
(kernels/attention/panels.cuh)."""
MERGE_ROWS = 16
"""Rows that a block merges which waits until attention of panels is done, a warp each."""


class Launch(NamedTuple):
    """A planned attention."""

    attention: Plan
    merge: Plan
    """Launch that merges the blocks' partial results."""
    streams: int
    """Streams of tokens of all blocks (kernels/attention/split.cuh), of each group of heads."""
    finest: float
    """Streams for a unit of cost, at most."""
    shares: int
    """Most shares of sequences that blocks may have."""
    boxes: bool
    """Whether the copy engine brings tokens, in boxes."""
    direct: bool
    """Whether it brings panels."""
    counted: bool
    """Whether shares are counted for what merges them; else it waits until attention is done."""
    alone: bool
    """Whether each sequence has but one block for its rows, so that there is nothing to merge."""


class Shape(NamedTuple):
    """What a launch depends on. `masked`: whether tokens may be hidden, and 2 where a mask says so.
    `halves`: float16 numbers that a query's channel becomes."""

    batch: int
    q_len: int
    heads: int
    kv_heads: int
    head_dim: int
    bits: tuple[int, ...]
    masked: int
    halves: int

    @property
    def rows(self) -> int:
        """Queries, of all positions, that meet a key head."""
        return self.heads // self.kv_heads * self.q_len


def padded(head_dim: int) -> int:
    """Channels of a head in registers: 64, 128 or 256."""
    return next(size for size in (64, 128, 256) if head_dim <= size)


def slot(bits: int, head_dim: int, masked: int) -> int:
    """Bytes of half a step in a warp's ring: `Layout` in kernels/attention/ring.cuh."""
    tokens = 16 if bits >= 8 else 32
    return ceil(tokens * (padded(head_dim) * bits / 8 + 8 + 4 * (masked > 0)) / 16) * 16


def box_tokens(bits: int) -> int:
    """Tokens of a step: `Box` in kernels/attention/boxes.cuh."""
    return 16 if bits >= 8 else 32


def box_slot(bits: int, head_dim: int) -> int:
    """Bytes of half a step of eight heads; the copy engine wants multiples of 1024."""
    scales = 0 if bits == 16 else 4
    return ceil(box_tokens(bits) * BOX_HEADS * (head_dim * bits / 8 + scales) / 1024) * 1024


def has_panels(shape: Shape, capability: int) -> bool:
    """Whether tokens become panels."""
    many = capability == 90 and shape.rows >= PANEL_ROWS
    return many and shape.halves == 1 and shape.head_dim in (64, 96, 128)


def queries_at_once(shape: Shape, capability: int, track: bool) -> int:
    """How many of each sequence's queries a launch takes: with panels all of them, as a block leaves out what
    its rows do not see, unless attention is tracked, for which queries are left in memory, too."""
    return shape.q_len if has_panels(shape, capability) and not track else min(shape.q_len, LAUNCH_QUERIES)


@lru_cache(maxsize=1024)
def attention(shape: Shape, capability: int, multiprocessors: int, even: bool = False) -> Launch:
    """Plan attention: a block per multiprocessor, whose warps stream tokens each on its own.

    `even`: whether sequences probably have the same length.

    On an H200 16 warps where 128 registers do for a thread (with boxes 112, and warps that copy): decoding
    with one query a sequence. Else 8, or as many as shared memory has room for.
    """
    rows = shape.rows
    if has_panels(shape, capability):
        return _panels(shape, capability, multiprocessors, even)
    wide = padded(shape.head_dim) > 128
    groups = 2 if rows > GROUP_ROWS and shape.halves == 1 and not wide else 1
    sums = groups * GROUP_ROWS * (8 + padded(shape.head_dim) * 4)
    slots = [slot(bits, shape.head_dim, shape.masked) for bits in shape.bits]
    limit = shared_limit(capability)
    light = capability == 90 and groups == shape.halves == 1 and not wide and not shape.masked
    ring = max(*slots, ceil(sums / STAGES / 16) * 16) * STAGES
    parts_of_lines = min(shape.bits) < 4 or (min(shape.bits) < 16 and shape.kv_heads >= MANY_HEADS)
    boxes = light and shape.head_dim == 128 and shape.kv_heads % BOX_HEADS == 0 and parts_of_lines
    if boxes:
        warps, block_heads = 2 * BOX_HEADS, BOX_HEADS
        largest = max(box_slot(bits, shape.head_dim) for bits in shape.bits)
        depth = min(8, BOX_RING // largest)
        ring, rings = depth * largest, warps // BOX_HEADS
    else:
        rings = warps = next(n for n in ((16, 8, 4, 2, 1) if light else (8, 4, 2, 1)) if n * ring <= limit)
        block_heads = max(n for n in range(1, min(BLOCK_HEADS, warps) + 1) if shape.kv_heads % n == 0)
    tiles, head_groups = ceil(rows / (groups * GROUP_ROWS)), shape.kv_heads // block_heads
    block_streams = warps // block_heads
    room = multiprocessors // (tiles * head_groups)
    streams = _streams(shape, room, block_streams, even)
    blocks = ceil(streams / block_streams)
    spread = rows <= GROUP_ROWS // 2 and not shape.masked
    registers_to_spare = shape.head_dim == padded(shape.head_dim) and len(shape.bits) <= (3 if spread else 1)
    many = blocks // shape.batch > MANY_SHARES
    merge_warps = (MERGE_WARPS if many else MERGE_WARPS // 2) if boxes else 1
    constants = {
        "DIM": shape.head_dim,
        "TIERS": sum(1 << BITS.index(bits) for bits in shape.bits),
        "GROUPS": groups,
        "HALVES": shape.halves,
        "SPREAD": int(spread),
        "MASKED": int(shape.masked > 0),
        "HEADS": shape.kv_heads,
        "BLOCK_HEADS": block_heads,
        "BLOCK_STREAMS": block_streams,
        "ONE_SEQUENCE": int(shape.batch == 1),
        "WARPS": warps,
        "RING": ring,
        "BOXES": int(boxes),
        "DIRECT": 0,
        "COUNTED": int(not boxes),
        "BESIDE": int(registers_to_spare and not boxes),
        "MERGE_WARPS": merge_warps,
        "MERGE_ROWS": 1,
    }
    if boxes:
        constants["DEPTH"] = depth
    shared = rings * (ring + BOX_BARRIERS * boxes)
    # Where launches overlap, masked queries take up to 70% longer with two blocks on one multiprocessor and
    # none on another, or not, as it happens; others come with too many registers for two.
    largest = lone(shared, capability) if shape.masked and capability >= 90 else shared
    kernels = [
        Kernel("attention", entry, None, tuple(constants.items()), size)
        for entry, size in (("attention", largest), ("merge", 0))
    ]
    if blocks * tiles * head_groups <= multiprocessors:
        shared = largest
    return Launch(
        Plan(
            kernels[0],
            (blocks * head_groups, tiles, 1),
            (warps + COPYING_WARPS * boxes) * WARP,
            shared,
            overlaps=True,
        ),
        _merge(kernels[1], shape, merge_warps, multiprocessors, capability, shared),
        streams,
        block_streams * block_heads / (BOX_LEAST if boxes else LEAST),
        blocks + shape.batch - 1,
        boxes,
        False,
        not boxes,
        shape.batch == blocks == 1,
    )


def _panels(shape: Shape, capability: int, multiprocessors: int, even: bool) -> Launch:
    """Plan attention of many rows: 64 for each of two warpgroups or, if there are no more, the same 64 for
    both, which share the tokens."""
    streams, direct = 2 if shape.rows <= 64 else 1, shape.bits == (16,)
    tiles = ceil(shape.rows / (128 // streams))
    blocks = _streams(shape, multiprocessors // (tiles * shape.kv_heads), 1, even)
    constants = {
        "DIM": shape.head_dim,
        "TIERS": sum(1 << BITS.index(bits) for bits in shape.bits),
        "GROUPS": 2,
        "HALVES": 1,
        "SPREAD": 0,
        "MASKED": shape.masked,
        "HEADS": shape.kv_heads,
        "BLOCK_HEADS": 1,
        "BLOCK_STREAMS": 1,
        "ONE_SEQUENCE": int(shape.batch == 1),
        "BOXES": 0,
        "DIRECT": int(direct),
        "COUNTED": 0,
        "MERGE_WARPS": 1,
        "MERGE_ROWS": MERGE_ROWS,
        "STREAMS": streams,
        "CODES": PANEL_CODES,
    }
    panel = ceil(shape.head_dim / 64) * 64 * PANEL_TOKENS * 2
    shared = lone(PANEL_SLOTS * panel + PANEL_CODES, capability)
    attention, merge = (
        Kernel("attention_panels", entry, None, tuple(constants.items()), size)
        for entry, size in (("attention", shared), ("merge", 0))
    )
    return Launch(
        Plan(attention, (blocks * shape.kv_heads, tiles, 1), 4 * 4 * WARP, shared, overlaps=True),
        Plan(
            merge,
            (shape.batch, ceil(shape.heads * shape.q_len / MERGE_ROWS), 1),
            MERGE_ROWS * WARP,
            overlaps=True,
        ),
        blocks,
        1 / LEAST,
        blocks + shape.batch - 1,
        False,
        direct,
        False,
        blocks <= shape.batch,  # of which each has one at least
    )


def _merge(
    kernel: Kernel, shape: Shape, warps: int, multiprocessors: int, capability: int, shared: int
) -> Plan:
    """Plan a merge: a warp for each part of each row's channels, as many parts as have room at once, beside
    attention's blocks; of boxes a block of several (kernels/attention/merge.cuh)."""
    rows = shape.heads * shape.q_len
    if warps > 1:
        parts = MERGE_PARTS if warps == MERGE_WARPS else 1
        return Plan(kernel, (shape.batch, rows, parts), warps * WARP, overlaps=True)
    fits = (n for n in (1, 2, 4, 8) if n == 1 or shape.head_dim % (LEAST_CHANNELS * n) == 0)
    parts = max(n for n in fits if n == 1 or n * rows * shape.batch <= multiprocessors * MERGES_BESIDE)
    blocks, size = shape.batch * rows * parts, 0
    if capability >= 90 and blocks <= multiprocessors * MERGES_BESIDE:
        size = min(MERGE_SHARED, beside(shared, ceil(blocks / multiprocessors), capability))
    return Plan(kernel, (shape.batch, rows, parts), WARP, size, overlaps=True)


def _streams(shape: Shape, room: int, block: int, even: bool) -> int:
    """Streams of tokens of all blocks, which have `block` each: as many blocks as have room at once or a
    multiple, so that sequences find enough streams, and those of one length use most of them.

    These have whole blocks, if that leaves few without tokens.
    """
    wave, batch = max(1, room) * block, shape.batch
    if batch == 1:
        return wave

    def used(streams: int) -> float:
        return streams // batch * batch / streams

    fewest = ceil(batch * (1 if even or shape.q_len > 1 else STREAMS_EACH) / wave)
    tried = [wave * waves for waves in range(fewest, fewest + 8)]
    streams = next((n for n in tried if used(n) >= BUSY), max(tried, key=used))
    whole = streams // batch // block * block * batch
    return whole if even and whole >= BUSY * streams else streams


@lru_cache(maxsize=64)
def importance(batch: int, head_dim: int, rows: int, multiprocessors: int) -> Plan:
    """Plan the sums of importance: two blocks for each multiprocessor, shared by the sequences; `rows` is as
    in `Shape`."""
    groups = 1 if rows <= 4 or head_dim > 128 else 2
    kernel = Kernel("importance", "importance", None, (("DIM", head_dim), ("GROUPS", groups)))
    return Plan(kernel, (max(1, 2 * multiprocessors // batch), batch, 1), 8 * WARP, overlaps=True)
