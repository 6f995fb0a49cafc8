"""What a cache holds, as people look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import device
from ..render import html_facts
from . import codes

if TYPE_CHECKING:
    from .cache import KVCache


class CachedTokens(NamedTuple):
    """T tokens of a sequence.

    Attributes
    ----------
    token_ids, slots, bits : int32 [T]
        Ids, positions in the sequence, and the widths of their keys and values.
    importance : float32 [T]
        The attention that they received, where the cache tracks it; else 0.
    """

    token_ids: NDArray[np.int32]
    slots: NDArray[np.int32]
    bits: NDArray[np.int32]
    importance: NDArray[np.float32]


def tokens(cache: KVCache, sequence: int) -> CachedTokens:
    """Those of a sequence, in the order of positions."""
    parts: list[tuple[NDArray[Any], ...]] = []
    for bits, tier in cache.tiers.items():
        b = tier.bucket(sequence)
        ids, slots, importance = map(device.as_numpy, (b.token_ids, b.global_slots, b.importance))
        parts.append((ids, slots, np.full(len(ids), bits, np.int32), importance))
    held = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    order = np.argsort(held[1])
    return CachedTokens(*(array[order] for array in held))


def numbers(
    cache: KVCache, sequence: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
    """Token ids and slots of a sequence, in their order, and what keys and values stand for."""
    buckets = [(bits, tier.bucket(sequence).on_cpu()) for bits, tier in cache.tiers.items()]
    ids, slots = (np.concatenate([b[part] for _, b in buckets]) for part in (0, 1))
    k = np.concatenate([codes.decode(b.k_qx, b.k_scale, bits) for bits, b in buckets])
    v = np.concatenate([codes.decode(b.v_qx, b.v_scale, bits) for bits, b in buckets])
    with np.errstate(all="ignore"):  # NaN and infinity are tokens, too
        if cache.rotate:
            k = codes.rotate(k)
        if cache.key_scales is not None:
            k = k * device.as_numpy(cache.key_scales[sequence])
    order = np.argsort(slots)
    return ids[order], slots[order], k[order], v[order]


def text(cache: KVCache) -> str:
    """For a prompt."""
    held = ", ".join(f"{bits}: {int(tier.held.sum())}" for bits, tier in cache.tiers.items())
    return (
        f"KVCache(n_kv_heads={cache.n_kv_heads}, head_dim={cache.head_dim}, capacity={cache.capacity}, "
        f"batch={cache.batch}, tokens={{{held}}}, average_bits={cache.average_bits:.4g}, "
        f"nbytes={cache.nbytes})"
    )


def html(cache: KVCache) -> str:
    """For a notebook."""
    held = (f"{int(tier.held.sum()):,} of {bits} bits" for bits, tier in cache.tiers.items())
    return html_facts(
        {
            "key heads": f"{cache.n_kv_heads} of {cache.head_dim} channels",
            "sequences": f"{cache.batch}, of {cache.capacity:,} tokens at most",
            "tokens": ", ".join(held),
            "average bits": f"{cache.average_bits:.4g}",
            "bytes": f"{cache.nbytes:,}",
            "device": cache.device,
        }
    )
