"""How kernels/attention/split.cuh shares sequences out, in NumPy: float32 numbers, one sequence after the
other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
GRAIN = 16
COSTS = {16: F32(15), 8: F32(8.4), 4: F32(4.4), 3: F32(4.8), 2: F32(4.3)}
"""Of a grain of tokens, by bits."""
STEPS, MOST = 4, 128
"""Numbers of streams that are tried, beside the last; sequences up to which they are."""


FIELDS = ("sequence", "first", "split", "splits", "start", "count")
"""What a block has of a sequence, as `Share` there names it."""


def costs_of(lengths: Mapping[int, NDArray[Any]]) -> NDArray[np.float32]:
    """Of sequences with so many tokens [batch] of each width, the widest first."""
    total = np.zeros(len(next(iter(lengths.values()))), F32)
    for bits, tokens in lengths.items():
        grains = (tokens + GRAIN - 1) // GRAIN
        total = (grains * np.float64(COSTS[bits]) + total).astype(F32)  # rounded once, as by fmaf
    return total


def streams_of(costs: NDArray[Any], streams: int, finest: float) -> NDArray[np.int64]:
    """How many of the streams each sequence gets."""
    batch = len(costs)
    lanes = np.zeros(32, F32)
    for base in range(0, batch, 32):
        lanes[: batch - base] += costs[base : base + 32]
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    share = F32(F32(1) / lanes[0]) * F32(1 - 2**-12) if lanes[0] else F32(np.inf)
    for step in range(STEPS * (batch > MOST), STEPS + 1):
        with np.errstate(invalid="ignore"):
            rate = np.fmin(F32(F32(streams + 0.5) - F32(batch / STEPS) * step) * share, F32(finest))
        counts = np.maximum(1, np.ceil(costs * rate)).astype(np.int64)
        if counts.sum() <= streams:
            return counts
    raise AssertionError(f"{counts.sum()} streams are wanted of {streams}")


def shares_of(counts: NDArray[Any], block: int, block_streams: int) -> list[tuple[int, ...]]:
    """A block's, in the order of FIELDS, where sequences have so many streams."""
    found: list[tuple[int, ...]] = []
    begin, end, start = block * block_streams, (block + 1) * block_streams, 0
    for sequence, count in enumerate(map(int, counts)):
        if start < end and start + count > begin:
            own, last = start // block_streams, (start + count - 1) // block_streams
            first, stop = max(start, begin), min(start + count, end)
            found.append((sequence, sequence + own, block - own, last - own + 1, first - begin, stop - first))
        start += count
    return found


def cut(lengths: Mapping[int, int], bits: int, stream: int, streams: int) -> int:
    """Where a sequence's stream, or one behind its last, begins in a bucket: at a whole step of it."""
    if stream >= streams:
        return lengths[bits]
    total, before = costs_of({b: np.array([n]) for b, n in lengths.items()})[0], F32(0)
    for wider in lengths:
        if wider == bits:
            break
        before += F32(-(-lengths[wider] // GRAIN)) * COSTS[wider]
    step = 16 if bits >= 8 else 32
    at = total * (F32(stream) * (F32(1) / F32(streams)))
    steps = np.rint((at - before) * (F32(GRAIN) / (F32(step) * COSTS[bits])))
    return min(int(max(steps, F32(0))) * step, lengths[bits])
