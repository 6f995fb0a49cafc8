"""What a cache holds, as people look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import device
from ..render import counted, html_facts
from . import codes
from .tiers import capacity_argument, held_of, rooms_of

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
    """Tokens of a sequence, in the order of positions."""
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
    """Text for a prompt: what makes such a cache, and what it holds."""
    capacity = capacity_argument(rooms_of(cache.tiers), cache.capacity)
    facts: dict[str, Any] = {name: getattr(cache, name) for name in ("n_kv_heads", "head_dim")}
    facts |= {"capacity": capacity, "batch": cache.batch}
    if not isinstance(capacity, dict):
        facts["bits"] = cache.bits
    if (scales := _key_scales(cache)) is not None:
        facts["key_scales"] = scales
    facts |= {name: True for name in ("rotate", "track_attention") if getattr(cache, name)}
    fullest, longest = _most_held(cache)
    if cache.batch == 1:
        facts["tokens"] = fullest
    else:
        facts |= {"fullest_buckets": fullest, "longest_sequence": longest}
    facts |= {"average_bits": f"{cache.average_bits:.4g}", "nbytes": cache.nbytes}
    return f"KVCache({', '.join(f'{name}={value}' for name, value in facts.items())})"


def html(cache: KVCache) -> str:
    """HTML table of a cache's facts, for notebooks."""
    capacity = capacity_argument(rooms_of(cache.tiers), cache.capacity)
    if isinstance(capacity, dict):
        room = _listed(capacity)
    else:
        room = f"{counted(capacity, 'token')} ({', '.join(map(str, cache.bits))} bits)"
    facts = {
        "key heads": f"{cache.n_kv_heads} of {cache.head_dim} channels",
        "sequences": f"{cache.batch:,}",
        "room of a sequence": room,
    }
    if (scales := _key_scales(cache)) is not None:
        facts["key scales"] = scales
    if cache.rotate:
        facts["rotated"] = "keys and queries"
    if cache.track_attention:
        facts["attention"] = "tracked"
    fullest, longest = _most_held(cache)
    if cache.batch == 1:
        facts["tokens"] = _listed(fullest)
    else:
        facts |= {"fullest buckets": _listed(fullest), "longest sequence": counted(longest, "token")}
    facts |= {
        "average bits": f"{cache.average_bits:.4g}",
        "bytes": f"{cache.nbytes:,}",
        "device": cache.device,
    }
    return html_facts(facts)


def _most_held(cache: KVCache) -> tuple[dict[int, int], int]:
    """The most tokens that a sequence holds of each width, and of all: what its rooms are compared with."""
    held = held_of(cache.tiers)
    return {bits: int(own.max()) for bits, own in held.items()}, int(np.sum([*held.values()], axis=0).max())


def _key_scales(cache: KVCache) -> str | None:
    """The argument `key_scales`, of an array the type and shape; None where there are none."""
    if cache.auto_scales is not None:
        return repr(cache.auto_scales)
    return None if cache.key_scales is None else f"<{cache.key_scales.dtype} {cache.key_scales.shape}>"


def _listed(tokens: dict[int, int]) -> str:
    """Numbers of tokens by width."""
    return ", ".join(f"{number:,} of {bits} bits" for bits, number in tokens.items())
