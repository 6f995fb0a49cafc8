"""Weights of EXL3 checkpoints (exllamav3), as floats.

A weight is stored transposed, W.T [K, N], turned by Hadamard matrices H of 128 on both sides, in tiles of
16 x 16. A tile is a closed path through a trellis: 256 steps of `bits` bits each, one behind the other in a
ring of bits, and a number of the tile is what a fixed codebook has for the last 16 bits.

    W.T = diag(suh) H V H diag(svh)          V [K, N]: codebook[16 bits that end with step t] for t = 8 l + j

    step 8 l + j is at row 2 (l mod 4) + j mod 2 + 8 (j div 2 mod 2), column l div 4 + 8 (j div 4) of its tile

The ring's bits are those of uint32 words, the highest first; the tensor has them as pairs of int16, low
halves first. Codebooks are computed: a 16-bit number is multiplied by a constant, and the product's halves
(under masks) are two float16 numbers that are added, or its bytes are added up (exllamav3's codebook.cuh,
exl3_dq.cuh, reconstruct.cu).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check

CODEBOOKS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""What 16-bit numbers are multiplied by, by the codebook's name."""
_HADAMARD, _TILE = 128, 16
_AT_ONCE = 1 << 22
"""Numbers that are looked up at a time."""


def from_exl3(trellis: Any, suh: Any, svh: Any, codebook: str = "3inst") -> NDArray[np.float32]:
    """A weight of an EXL3 checkpoint as the numbers that it stands for, computed in float32.

    ``cuquant.quantize`` makes one of any other format of it.

    Parameters
    ----------
    trellis : NumPy array of int16, shape (K / 16, N / 16, 16 * bits)
        K and N are multiples of 128, bits 1 to 8.
    suh, svh : NumPy arrays of float16, shapes (K,) and (N,)
        Or of int16, (K / 16,) and (N / 16,): a bit for each, from the lowest on, that is set for -1.
    codebook : "3inst", "mcg" or "mul1"
        "mcg" and "mul1" where the checkpoint has a tensor of that name beside these.

    Returns
    -------
    float32 array (N, K)

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; another codebook.
    """
    trellis, suh, svh = check.exl3(trellis, suh, svh)
    values = _values(check.choice(codebook, "codebook", tuple(CODEBOOKS)))
    tiles_k, tiles_n, words = trellis.shape
    bits, n = words // _TILE, tiles_n * _TILE
    # Sylvester's matrix, with which both sides are turned: it is its own inverse.
    from scipy.linalg import hadamard

    turn = (hadamard(_HADAMARD) / np.sqrt(_HADAMARD)).astype(np.float32)
    made = np.empty((n, tiles_k * _TILE), np.float32)
    rows = _HADAMARD // _TILE  # of tiles, that H takes together
    for first in range(0, tiles_k, rows):
        v = _tiles(trellis[first : first + rows], bits, values)
        v = (turn @ v) * suh[first * _TILE :][:_HADAMARD, None]
        v = (v.reshape(_HADAMARD, -1, _HADAMARD) @ turn).reshape(_HADAMARD, n) * svh
        made[:, first * _TILE : first * _TILE + _HADAMARD] = v.T
    return made


def _tiles(trellis: NDArray[np.int16], bits: int, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The numbers [rows, columns] of tiles."""
    tiles_k, tiles_n, _ = trellis.shape
    ring = np.ascontiguousarray(trellis, "<i2").view("<u4").astype(np.uint64)
    ends = np.arange(1, 257) * bits  # of each step's bits
    word, shift = np.divmod((ends - 16) % (256 * bits), 32)
    made = np.empty((tiles_k, tiles_n, 256), np.float32)
    step = max(1, _AT_ONCE // (256 * tiles_k))
    for first in range(0, tiles_n, step):
        part = ring[:, first : first + step]
        pairs = part[..., word] << np.uint64(32) | part[..., (word + 1) % (8 * bits)]
        made[:, first : first + step] = values[(pairs >> (48 - shift).astype(np.uint64)) & np.uint64(0xFFFF)]
    row, column = _places()
    result = np.empty((tiles_k, _TILE, tiles_n, _TILE), np.float32)
    result[:, row, :, column] = made.transpose(2, 0, 1)
    return result.reshape(tiles_k * _TILE, tiles_n * _TILE)


def _places() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each step within its tile."""
    lane, j = np.divmod(np.arange(256), 8)
    return 2 * (lane % 4) + j % 2 + 8 * (j // 2 % 2), lane // 4 + 8 * (j // 4)


@cache
def _values(codebook: str) -> NDArray[np.float32]:
    """What each of 65536 states stands for: float16 arithmetic, rounded once."""
    product = np.arange(1 << 16, dtype=np.uint32) * np.uint32(CODEBOOKS[codebook])
    if codebook == "mul1":
        total = product.view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.float64)
        scale, bias = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        return ((1024 + total) * scale + bias).astype(np.float16).astype(np.float32)
    if codebook == "3inst":
        product += np.uint32(64248484)
    halves = ((product & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return halves.astype(np.float32).sum(axis=1).astype(np.float16).astype(np.float32)
