"""exl3-1 to exl3-8: weights of EXL3 checkpoints (exllamav3), walks through a trellis of 16-bit states.

A weight is stored transposed, W.T [K, N], turned by Hadamard matrices H of 128 on both sides, in tiles of
16 x 16. A tile is a closed path through a trellis: 256 steps of `bits` bits each, one behind the other in a
ring of bits, and a number of the tile is what a fixed procedure makes of the last 16 bits.

    W.T = diag(suh) H V H diag(svh)          V [K, N]: number[16 bits that end with step t] for t = 8 l + j

    step 8 l + j is at row 2 (l mod 4) + j mod 2 + 8 (j div 2 mod 2), column l div 4 + 8 (j div 4) of its tile

The ring's bits are those of uint32 words, the highest first; the tensor has them as pairs of int16, low
halves first. A 16-bit number is multiplied by a constant, and the product's halves (under masks) are two
float16 numbers that are added, or its bytes are added up (exllamav3's codebook.cuh, exl3_dq.cuh,
reconstruct.cu).
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from .base import ReadOnly, WholeMatrices, chosen_rows, register
from .kernels import Coding, Kernels, Scaling

F32 = NDArray[np.float32]

GENERATORS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""What states are multiplied by, by the procedure's name."""
HADAMARD, TILE = 128, 16
"""Sides of H and of a tile."""
BITS = tuple(range(1, 9))
_AT_ONCE = 1 << 22
"""Numbers that are looked up at a time."""


class Exl3Parts(NamedTuple):
    """The tensors of an EXL3 weight of shape (..., N, K), with leading axes."""

    trellis: Any
    """int16 (..., K / 16, N / 16, 16 * bits)"""
    suh: Any
    """float16 (..., K)"""
    svh: Any
    """float16 (..., N)"""


class Exl3(WholeMatrices, ReadOnly):
    """Steps of 1 to 8 bits, 256 in a ring: W.T = diag(suh) H V H diag(svh), V made of windows of 16 bits.

    A matrix (N, K), whose sides are multiples of 128, is one record: the tensors of `Exl3Parts` back to back.
    exllamav3 quantizes to it; `cuquant.from_exl3` and `cuquant.read_safetensors` read what it wrote. On a GPU
    products read the steps as they are, but of 1 and 7 bits, whose weights become floats first. Rows are made
    of 128 at a time: an index selects whole runs of 128, or the format's error says so.

    Parameters
    ----------
    bits : 1 to 8
    generator : "3inst", "mcg" or "mul1"
        What makes a number of 16 bits: the checkpoint has a tensor of the latter two's names.

    Raises
    ------
    TypeError, ValueError
        An argument is none of these.
    """

    def __init__(self, bits: int, generator: str = "3inst") -> None:
        self.bits = check.one_of(bits, "bits", BITS)
        self.generator = check.choice(generator, "generator", tuple(GENERATORS))
        self.name = f"exl3-{self.bits}" + ("" if generator == "3inst" else f"-{generator}")

    rows_together = HADAMARD
    made_by = "exllamav3 does, and from_exl3 and read_safetensors read it"
    formula = "W.T = suh * H V H * svh"

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        # Steps of 1 bit reach into two lanes before, and of 7 bits a tile's words have no place.
        multiplied = self.bits not in (1, 7)
        header = f"exl3_{self.generator}"
        return Kernels(header, Coding.PROCEDURE, Scaling.UNSCALED, in_float16=multiplied)

    @property
    def bits_per_weight(self) -> float:
        """Bits of a step; what suh and svh take depends on an array's shape."""
        return float(self.bits)

    @property
    def block_bytes(self) -> int:
        """Bytes of a ring."""
        return 32 * self.bits

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, k = _sides(shape)
        return (*shape[:-2], n * k * self.bits // 8 + 2 * (n + k))

    def parts(self, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> Exl3Parts:
        """The tensors that the storage bytes of an array of that shape hold: views."""
        n, k = _sides(shape)
        lead, trellis = blocks.shape[:-1], n * k * self.bits // 8
        steps = blocks[..., :trellis].view(np.int16)
        return Exl3Parts(
            steps.reshape(*lead, k // TILE, n // TILE, TILE * self.bits),
            blocks[..., trellis : trellis + 2 * k].view(np.float16),
            blocks[..., trellis + 2 * k :].view(np.float16),
        )

    def rows(self, blocks: NDArray[np.uint8], shape: tuple[int, ...], part: slice) -> F32:
        """H takes 128 rows together, so these are computed whole."""
        parts, k = self.parts(blocks, shape), shape[-1]
        first, end = part.start // HADAMARD * HADAMARD, -(-part.stop // HADAMARD) * HADAMARD
        trellis = parts.trellis[:, first // TILE : end // TILE]
        suh, svh = parts.suh.astype(np.float32), parts.svh[first:end].astype(np.float32)
        made = np.empty((end - first, k), np.float32)
        tiles = HADAMARD // TILE  # that H takes together
        for at in range(0, k, HADAMARD):
            v = _turned(self._numbers(trellis[at // TILE : at // TILE + tiles]))
            # The factors' product is exact, as 1 / 128 is, H's on both sides.
            v *= suh[at : at + HADAMARD, None] * (svh / HADAMARD)
            made[:, at : at + HADAMARD] = v.T
        return made[part.start - first : part.stop - first]

    def _numbers(self, trellis: NDArray[np.int16]) -> F32:
        """The numbers [rows, columns] of tiles."""
        tiles_k, tiles_n, _ = trellis.shape
        ring = np.ascontiguousarray(trellis, "<i2").view("<u4").astype(np.uint64)
        ends = np.arange(1, 257) * self.bits  # of each step's bits
        word, shift = np.divmod((ends - 16) % (256 * self.bits), 32)
        values = states(self.generator)
        made = np.empty((tiles_k, tiles_n, 256), np.float32)
        step = max(1, _AT_ONCE // (256 * tiles_k))
        for first in range(0, tiles_n, step):
            part = ring[:, first : first + step]
            pairs = part[..., word] << np.uint64(32) | part[..., (word + 1) % (8 * self.bits)]
            windows = (pairs >> (48 - shift).astype(np.uint64)) & np.uint64(0xFFFF)
            made[:, first : first + step] = values[windows]
        row, column = _places()
        result = np.empty((tiles_k, TILE, tiles_n, TILE), np.float32)
        result[:, row, :, column] = made.transpose(2, 0, 1)
        return result.reshape(tiles_k * TILE, tiles_n * TILE)

    def select(
        self, blocks: Any, shape: tuple[int, ...], index: tuple[Any, ...]
    ) -> tuple[Any, tuple[int, ...]]:
        n, k = _sides(shape)
        chosen = chosen_rows(shape, index)
        runs = check.runs_of_rows(chosen, HADAMARD, self)
        result, own = (*chosen.shape, k), n // HADAMARD
        xp = device.cupy() if device.is_cuda(blocks) else np
        out = xp.zeros(self.stored(result), np.uint8)
        sources, targets = blocks.reshape(-1, blocks.shape[-1]), out.reshape(-1, out.shape[-1])
        source = self.parts(sources, (len(sources), n, k))
        target = self.parts(targets, (len(targets), *result[-2:]))
        tiles = HADAMARD // TILE
        for i, firsts in enumerate(runs.reshape(len(targets), runs.shape[-1])):
            homes, rows = np.divmod(firsts, max(n, 1))
            if len(homes) == own > 0 and (rows == np.arange(own) * HADAMARD).all() and len(set(homes)) == 1:
                targets[i] = sources[homes[0]]
                continue
            if len(homes):
                check.require_same_sides(source.suh[np.unique(homes)], self)
                target.suh[i] = source.suh[homes[0]]
            for j, (home, row) in enumerate(zip(homes.tolist(), rows.tolist(), strict=True)):
                to, of = (slice(first // TILE, first // TILE + tiles) for first in (j * HADAMARD, row))
                target.trellis[i][:, to] = source.trellis[home][:, of]
                target.svh[i, j * HADAMARD : (j + 1) * HADAMARD] = source.svh[home, row : row + HADAMARD]
        return out, result

    def numbers(self, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        return dict(self.parts(blocks, shape)._asdict())


def _sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """N and K, which must be multiples of 128."""
    check.require_hadamard_sides(shape, HADAMARD)
    return shape[-2], shape[-1]


def _turned(v: F32) -> F32:
    """V [128, n] times Sylvester's matrix, along rows in runs of 128, then along the column.

    Sums and differences of pairs, those of neighbours first, as kernels add them, too: the same bits,
    however many rows there are.
    """
    for axis in (1, 0):
        for step in (1 << bit for bit in range(7)):
            inner = step if axis else step * v.shape[1]
            pairs = v.reshape(-1, 2, inner)
            v = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(v.shape)
    return v


def _places() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each step within its tile."""
    lane, j = np.divmod(np.arange(256), 8)
    return 2 * (lane % 4) + j % 2 + 8 * (j // 2 % 2), lane // 4 + 8 * (j // 4)


@cache
def states(generator: str) -> F32:
    """What each of 65536 states stands for: float16 arithmetic, rounded once."""
    product = np.arange(1 << 16, dtype=np.uint32) * np.uint32(GENERATORS[generator])
    if generator == "mul1":
        total = product.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.float64)
        scale, bias = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        return ((1024 + total) * scale + bias).astype(np.float16).astype(np.float32)
    if generator == "3inst":
        product += np.uint32(64248484)
    halves = ((product & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return halves.astype(np.float32).sum(axis=1).astype(np.float16).astype(np.float32)


for _bits in BITS:
    for _generator in GENERATORS:
        register(Exl3(_bits, _generator))
