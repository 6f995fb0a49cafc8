"""Checks of what checkpoints of others hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import array, on_cpu, one_of, typed
from .formats import group_of


def packed(qweight: Any, qzeros: Any, scales: Any, along_k: int) -> tuple[Any, Any, Any, int]:
    """Tensors of GPTQ or AWQ as NumPy arrays, with `along_k` codes along K in a word, and the group size."""
    qweight, qzeros = typed(qweight, "qweight", np.int32), typed(qzeros, "qzeros", np.int32)
    scales = typed(scales, "scales", np.float16)
    given = qweight.shape, qzeros.shape, scales.shape
    if any(len(extents) != 2 for extents in given) or not (
        given[1][0] == given[2][0] and 8 * given[1][1] == given[2][1] == 8 // along_k * given[0][1]
    ):
        words = "(K / 8, N)" if along_k == 8 else "(K, N / 8)"
        raise ValueError(
            f"qweight {given[0]}, qzeros {given[1]} and scales {given[2]} are not codes of 4 bits in words: "
            f"{words}, (G, N / 8) and (G, N)"
        )
    return qweight, qzeros, scales, group_of(along_k * given[0][0], given[2][0])


def exl3(trellis: Any, suh: Any, svh: Any) -> tuple[Any, Any, Any]:
    """Tensors of EXL3 as NumPy arrays; signs that are packed become float16 numbers."""
    trellis = typed(trellis, "trellis", np.int16)
    extents = trellis.shape
    if len(extents) != 3:
        raise ValueError(f"trellis has shape {extents}; it has three axes: (K / 16, N / 16, 16 * bits)")
    for side, tiles in zip("KN", extents, strict=False):
        if tiles % 8 or tiles == 0:
            raise ValueError(f"trellis has shape {extents}: {side} is {16 * tiles}, no multiple of 128")
    if extents[2] not in range(16, 129, 16):
        raise ValueError(f"trellis has shape {extents}; its last axis is 16 times bits, 1 to 8")
    signs = []
    for value, name, side in ((suh, "suh", 16 * extents[0]), (svh, "svh", 16 * extents[1])):
        given = on_cpu(array(value, name, "float16, or int16 with a bit for each"), name)
        if given.dtype == np.int16:
            given = np.unpackbits(np.ascontiguousarray(given, "<i2").view(np.uint8), bitorder="little")
            given = 1 - 2 * given.astype(np.float16)
        if given.dtype != np.float16:
            raise TypeError(
                f"{name} has dtype {given.dtype}; float16, or int16 with a bit for each, is needed"
            )
        if given.shape != (side,):
            raise ValueError(f"{name} stands for {given.shape} numbers; trellis {extents} has {side} there")
        signs.append(given)
    return trellis, *signs


def gptq_version(value: Any) -> int:
    """Of a GPTQ checkpoint: 1 or 2."""
    return one_of(value, "version", (1, 2))


def group_index(value: Any, k: int, group: int) -> None:
    """Group of each of k weights, in their own order; None says so too."""
    if value is None:
        return
    g_idx = on_cpu(array(value, "g_idx", "integers"), "g_idx")
    if g_idx.dtype.kind not in "iu":
        raise TypeError(f"g_idx has dtype {g_idx.dtype}; groups are numbered by integers")
    if g_idx.shape != (k,):
        raise ValueError(f"g_idx has shape {g_idx.shape}; there are {k} weights along K")
    other = g_idx != np.arange(k) // group
    if other.any():
        at = int(other.argmax())
        raise ValueError(
            f"g_idx puts weight {at} into group {g_idx[at]}, not {at // group}: weights permuted along K "
            "(act-order, desc_act) cannot be read"
        )
