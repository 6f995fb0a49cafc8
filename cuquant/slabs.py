"""Tensors a slab of their rows at a time, so that none is dense as a whole."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from . import check, cpu, device
from .array import QuantizedArray

GPU_SLAB = 1 << 22
"""Numbers of a tensor that a GPU has in float32 at a time: 16 MB."""


class Slabs:
    """Tensors of one shape (..., N, K) or (K,), quantized or arrays: the same rows of each at a time.

    On a GPU rows are float32, wherever the tensors are. On the host they are as arrays have them, or float32.
    """

    def __init__(self, *tensors: Any, on_gpu: bool) -> None:
        shape = tensors[0].shape if tensors[0].ndim > 1 else (1, *tensors[0].shape)
        formats = [each.format for each in tensors if check.is_quantized(each)]
        if not any(fmt.whole_matrices for fmt in formats):
            shape = (prod(shape[:-1]), shape[-1])  # of a stack of many small matrices slabs would be small
        *lead, n, k = shape
        size, together = GPU_SLAB if on_gpu else cpu.SLAB, max((f.rows_together for f in formats), default=1)
        self._on_gpu = on_gpu
        self._tensors = [_shaped(each, shape, on_gpu) for each in tensors]
        self.rows = prod(shape[:-1])
        self.places = [
            (index, part) for index in np.ndindex(*lead) for part in cpu.slabs(n, k, size, together)
        ]
        """Where slabs are: a matrix of a stack, and rows of it."""

    def at(self, index: tuple[int, ...], part: slice) -> list[Any]:
        """The rows [n, K] of each tensor."""
        take = _on_gpu if self._on_gpu else _on_host
        return [take(each, index, part) for each in self._tensors]


def can_be_on_gpu(tensor: Any) -> bool:
    """Whether the current GPU can have the rows of a tensor, of the numbers that it has."""
    if check.is_quantized(tensor):
        return tensor.format.on_gpu and device.is_current(tensor.storage)
    return tensor.dtype in check.FLOATS and device.is_current(tensor)


def _shaped(tensor: Any, shape: tuple[int, ...], on_gpu: bool) -> Any:
    """A tensor in a shape that differs in leading axes, where its slabs are taken from."""
    if not check.is_quantized(tensor):
        return (tensor if on_gpu else device.as_numpy(tensor)).reshape(shape)
    fmt = tensor.format
    if not on_gpu:
        tensor = tensor.to_device("cpu")
    elif fmt.whole_matrices:  # of which NumPy takes rows slowly
        tensor = tensor.to_device("cuda")
    blocks = tensor.blocks  # once: on a GPU they may have to be made
    return QuantizedArray._made(fmt, blocks.reshape(fmt.stored(shape)), shape=shape)


def _on_host(tensor: Any, index: tuple[int, ...], part: slice) -> Any:
    if isinstance(tensor, np.ndarray):
        return tensor[index][part]
    return cpu.weight_rows(tensor, index, part)[:, : tensor.shape[-1]]


def _on_gpu(tensor: Any, index: tuple[int, ...], part: slice) -> Any:
    if check.is_quantized(tensor):
        here = *index, part
        return tensor[here].to_device("cuda").dequantize(np.float32)
    return device.cupy().asarray(tensor[index][part]).astype(np.float32, copy=False)
