"""k-bit weights in the tiles of other programs' kernels, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import check, device
from ..array import QuantizedArray
from ..formats.kbit import KBit

_BLOCK = 32


def kbit_tiles(w: QuantizedArray, tile_n: int = 128, tile_k: int = 64) -> tuple[Any, Any]:
    """A k-bit weight's bit planes and scales, tile by tile, as GEMM kernels with such tiles read them.

    Parameters
    ----------
    w : QuantizedArray of a format `KBit`, shape (N, K), on either device
    tile_n, tile_k : int
        Rows and columns of W in a tile; tile_k is a multiple of 32.

    Returns
    -------
    packed : NumPy uint32 [k tiles, n tiles, tile_n, tile_k / 32, bits]
        Bit j of word p is bit p of the index of weight j of the block. What is beyond N and K is 0.
    absmax : NumPy uint8 (E4M4) or float16 [k tiles, n tiles, tile_n, tile_k / 32]
        Scales of the blocks, 0 beyond N and K.

    Raises
    ------
    TypeError, ValueError
        w is no k-bit matrix; tiles are not of those sizes.
    """
    fmt = check.kbit_matrix(w, KBit)
    check.require_tile_sizes(tile_n, tile_k, _BLOCK)
    n, k = w.shape
    blocks = device.as_numpy(w.blocks).reshape(n, k // _BLOCK, fmt.block_bytes)
    shape = (-(-k // tile_k), -(-n // tile_n), tile_n, tile_k // _BLOCK)

    def tiles(part: Any, dtype: Any) -> Any:
        """Numbers [N, K / 32, bytes] in tiles: shape + (numbers,)."""
        whole = np.zeros((shape[1] * tile_n, shape[0] * shape[3], part.shape[-1]), np.uint8)
        whole[:n, : k // _BLOCK] = part
        sides = (shape[1], tile_n, shape[0], shape[3], part.shape[-1])
        ordered = whole.reshape(sides).transpose(2, 0, 1, 3, 4)
        return np.ascontiguousarray(ordered).view(dtype)

    planes = fmt.bits * 4
    scale = fmt.storage["absmax"]
    return tiles(blocks[..., :planes], np.uint32), tiles(blocks[..., planes:], scale)[..., 0]


def kbit_from_tiles(packed: Any, absmax: Any, format: KBit, shape: tuple[int, int]) -> QuantizedArray:
    """Make a k-bit weight of tiles: the inverse of `kbit_tiles`.

    Parameters
    ----------
    packed, absmax : NumPy arrays as `kbit_tiles` returns them
    format : KBit
        Its bits and scales are those of the arrays.
    shape : (N, K)
        K is a multiple of 32.

    Raises
    ------
    TypeError, ValueError
        Shapes and dtypes are not those of such a weight.
    """
    fmt = check.of_kind(format, KBit)
    n, k = check.kbit_tiled(packed, absmax, fmt, check.shape(shape))

    def rows(part: Any) -> Any:
        """Tiles of numbers, five axes -> [n tiles * tile_n, k tiles * blocks, bytes]."""
        raw = np.ascontiguousarray(part).view(np.uint8)
        k_tiles, n_tiles, tile_n, blocks, width = raw.shape
        return raw.transpose(1, 2, 0, 3, 4).reshape(n_tiles * tile_n, k_tiles * blocks, width)

    whole = np.concatenate([rows(packed), rows(absmax[..., None])], axis=2)
    blocks = np.ascontiguousarray(whole[:n, : k // _BLOCK]).reshape(n, fmt.row_bytes(k))
    return QuantizedArray._made(fmt, blocks)
