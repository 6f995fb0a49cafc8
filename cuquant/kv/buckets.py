"""Where a cache's buckets lie on the GPU, as its kernels take that."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from .. import device
from ..cuda import jit
from ..plan.attention import BOX_HEADS, PANEL_TOKENS, box_tokens
from ..plan.caches import bucket_bytes
from .codes import BITS
from .tiers import Tier

_TIER = struct.Struct("<9q")
_ABSENT = _TIER.pack(*(0,) * 9)


class Packed:
    """Buckets as kernels take them. They live as long as this, so that no others have their identity."""

    def __init__(self, objects: list[Any], tiers: Mapping[int, Tier]) -> None:
        self.objects = objects
        self.tiers = b"".join([_tier(tiers.get(bits)) for bits in BITS])
        """`struct Tier` of every width (kernels/attention/cache.cuh)."""
        self._maps = {False: b"", True: b""}

    def maps(self, tiers: Mapping[int, Tier], panels: bool) -> bytes:
        """`struct Maps` of the cache's own widths (kernels/attention/boxes.cuh), which are these still, or
        `struct PanelMaps` (direct.cuh)."""
        if not self._maps[panels]:
            self._maps[panels] = b"".join([(_panel_maps if panels else _maps)(t) for t in tiers.values()])
        return self._maps[panels]


class Buckets:
    """The buckets of one cache: packed once, and again if others have taken their place, of which the former
    ones are kept until then."""

    def __init__(self) -> None:
        self._last = Packed([], {})

    def packed(self, tiers: Mapping[int, Tier]) -> Packed:
        """The buckets as they are now."""
        objects: list[Any] = [*tiers]
        for tier in tiers.values():
            objects += (tier.buffers, tier.lengths)
        last = self._last  # read once: another thread may look, too
        if len(objects) != len(last.objects) or not all(map(is_, objects, last.objects)):
            last = self._last = Packed(objects, tiers)
        return last


class Between(NamedTuple):
    """Buckets of no cache, which live as long as this."""

    packed: bytes
    """`struct Tier` of every width; without lengths."""
    memory: Any


def between(counts: Sequence[int], kv_heads: int, head_dim: int) -> Between:
    """Room for so many tokens of each width, on the current GPU."""
    sizes = [bucket_bytes(bits, n, kv_heads, head_dim) for bits, n in zip(BITS, counts, strict=True)]
    arrays = len(sizes[0])
    *starts, size = accumulate((ceil(each / 16) * 16 for tier in sizes for each in tier), initial=0)
    memory = device.cupy().empty(size, np.uint8)
    places = [memory.data.ptr + start for start in starts]
    packed = [_TIER.pack(*places[i * arrays :][:arrays], 0, n) for i, n in enumerate(counts)]
    return Between(b"".join(packed), memory)


def _tier(tier: Tier | None) -> bytes:
    if tier is None:
        return _ABSENT
    b = tier.buffers
    arrays: tuple[Any, ...] = (
        *(b.k_qx, b.v_qx, b.k_scale, b.v_scale),
        *(b.token_ids, b.global_slots, b.importance, tier.lengths),
    )
    return _TIER.pack(*(a.data.ptr for a in arrays), tier.room)


def _maps(tier: Tier) -> bytes:
    """Maps of keys, values, and scales of keys and values."""
    b = tier.buffers
    arrays: tuple[Any, ...] = (b.k_qx, b.v_qx, b.k_scale, b.v_scale)
    batch, room, heads, packed = b.k_qx.shape
    dim = packed * b.k_qx.itemsize * 8 // tier.bits
    return _encoded(tuple(a.data.ptr for a in arrays), tier.bits, batch * room, heads, dim)


def _panel_maps(tier: Tier) -> bytes:
    """Maps of float16 keys and values."""
    b = tier.buffers
    batch, room, heads, dim = b.k_qx.shape
    arrays: tuple[Any, ...] = (b.k_qx, b.v_qx)
    axes = (dim, batch * room, heads, 1, 1), (heads * dim * 2, *(dim * 2,) * 3), (64, PANEL_TOKENS, 1, 1, 1)
    return b"".join([jit.encode_map(array.data.ptr, *axes) for array in arrays])


@lru_cache(maxsize=4096)
def _encoded(addresses: tuple[int, ...], bits: int, tokens: int, heads: int, dim: int) -> bytes:
    step, row = box_tokens(bits), heads * dim * bits // 8
    box = (64, step, BOX_HEADS * dim * bits // 1024, 1, 1)
    lines = (64, tokens, row // 128, 1, 1), (row, 128, row, row), box
    if heads == BOX_HEADS:
        scales = (heads * tokens, 1, 1, 1, 1), (16,) * 4, (heads * step, 1, 1, 1, 1)
    else:
        scales = (heads, tokens, 1, 1, 1), (heads * 2,) * 4, (BOX_HEADS, step, 1, 1, 1)
    codes_maps = [jit.encode_map(address, *lines) for address in addresses[:2]]
    if bits == 16:
        return b"".join(codes_maps) + bytes(2 * 128)
    return b"".join(codes_maps + [jit.encode_map(address, *scales, False) for address in addresses[2:]])
