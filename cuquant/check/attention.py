"""Attention over caches of keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import device
from .caches import broadcast, in_cache, int32_on_gpu, integers, number_of, on_gpu_integers
from .common import FLOAT_NAMES, FLOATS, LARGEST_INDEX, a_or_an, array, readable

MOST_QUERIES = 4096
LARGEST_SCALE, LEAST_SCALE = 2e38, 2.0**-126
"""Bounds of a scale of scores: kernels take it times log2(e), in float32, and GPUs numbers that are not
normal for 0."""


def require_kv_cache(value: Any) -> None:
    """A KVCache (known by a class attribute: that module imports this one)."""
    if not getattr(type(value), "is_kv_cache", False):
        raise TypeError(f"cache is {a_or_an(value)}; a cuquant.KVCache is needed")


def require_queries(q: tuple[int, ...], cache: tuple[int, int, int]) -> None:
    """Queries fit a cache of (batch, n_kv_heads, head_dim)."""
    batch, heads, dim = cache
    if len(q) != 4 or (q[0], q[3]) != (batch, dim):
        raise ValueError(f"q has shape {q}; {_taken(batch, dim)}")
    if not 1 <= q[1] <= MOST_QUERIES:
        raise ValueError(f"q has {q[1]} queries in a sequence; allowed are 1 to {MOST_QUERIES}")
    if q[2] == 0 or q[2] % heads:
        own, shared = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((q[2], "head"), (heads, "key head")))
        raise ValueError(
            f"q has {own}, which cannot share {shared} evenly: its shape is {q}; {_taken(batch, dim)}"
        )


def _taken(batch: int, dim: int) -> str:
    return f"this cache takes ({batch}, q_len, heads, {dim}): (batch, queries of a sequence, heads, head_dim)"


def score_scale(value: Any, dim: int) -> float:
    """What scores are multiplied by: 1 / sqrt(head_dim) for None."""
    if value is None:
        return float(dim**-0.5)
    number = number_of(value, "scale")
    if not abs(number) <= LARGEST_SCALE:
        raise ValueError(f"scale is {number}; a finite number, up to {LARGEST_SCALE:g}, is needed")
    if 0 < abs(number) < LEAST_SCALE:
        raise ValueError(f"scale is {number}; 0, or a magnitude from {LEAST_SCALE:g} on, is needed")
    return number


def attention_mask(value: Any, q: tuple[int, ...], slots: int, place: str) -> Any:
    """bool or floats (batch, heads, q_len, slots or more), broadcast; None stays None."""
    if value is None:
        return None
    mask = in_cache(array(value, "mask", f"bool, {FLOAT_NAMES}"), "mask", place)
    if mask.dtype != bool and mask.dtype not in FLOATS:
        remedies = dict.fromkeys("iu", ": pass mask != 0") | {"f": ": pass mask.astype(numpy.float32)"}
        remedy = remedies.get(mask.dtype.kind, "")
        raise TypeError(f"mask has dtype {mask.dtype}; allowed are bool, {FLOAT_NAMES}{remedy}")
    readable(mask, "mask")
    lead = (q[0], q[2], q[1])
    if mask.ndim == 0 or mask.shape[-1] < slots:
        raise ValueError(
            f"mask has shape {mask.shape}; its last axis needs {slots} columns, one for each slot"
        )
    try:
        xp = np if place == "cpu" else device.cupy()
        return xp.broadcast_to(mask, (*lead, mask.shape[-1]))
    except ValueError:
        raise ValueError(f"mask has shape {mask.shape}; it does not broadcast to {(*lead, slots)}") from None


def positions(value: Any, q: tuple[int, ...], place: str) -> Any:
    """Positions of queries (batch, q_len), int64, on the GPU int32; None stays None."""
    if value is None:
        return None
    axes = "(batch, q_len)"
    if device.is_cuda(value):
        given = on_gpu_integers(in_cache(value, "positions", place), "positions", q[:2], axes)
        return int32_on_gpu(given, "positions", LARGEST_INDEX)
    result = broadcast(integers(value, "positions"), q[:2], "positions", axes)
    if place == "cpu":
        return result
    return int32_on_gpu(np.clip(result, -1, LARGEST_INDEX), "positions")
