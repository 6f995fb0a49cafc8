"""Copies of a KVCache: on its own device, and on another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import device as gpu
from .tiers import capacity_argument, rooms_of

if TYPE_CHECKING:
    from .cache import KVCache


def copied(cache: KVCache) -> KVCache:
    """See KVCache.copy."""
    made: KVCache = object.__new__(type(cache))
    vars(made).update(vars(cache))
    with cache._appender.copying(cache):
        made.tiers = {bits: tier.copy() for bits, tier in cache.tiers.items()}
        made._next_slots = cache._next_slots.copy()
        made.key_scales = None if cache.key_scales is None else cache.key_scales.copy()
        made._appender = cache._backend.Appender(made)
        made._refresh()
    return made


def on_device(cache: KVCache, device: str) -> KVCache:
    """See KVCache.to_device."""
    from .cache import KVCache

    if device == cache.device and gpu.is_current(cache.next_slots):
        return cache
    with cache._appender.copying(cache):
        if cache.device == "cuda":
            gpu.wait_for(cache.next_slots)
    made = KVCache(
        cache.n_kv_heads,
        cache.head_dim,
        capacity_argument(rooms_of(cache.tiers), cache.capacity),
        cache.batch,
        cache.bits,
        key_scales=gpu.as_numpy(cache.key_scales),
        rotate=cache.rotate,
        track_attention=cache.track_attention,
        device=device,
    )
    made.auto_scales = cache.auto_scales
    for target, source in zip(made.tiers.values(), cache.tiers.values(), strict=True):
        for sequence in range(cache.batch):
            target.add(sequence, source.bucket(sequence).on_cpu())
    made._next_slots[:] = made._xp.asarray(gpu.as_numpy(cache.next_slots))
    made._refresh()
    return made
