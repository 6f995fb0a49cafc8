"""A cache as a safetensors file, or as a pickle: the tokens of every bucket, sequence after sequence, and the
settings."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from ..io.atomic import replacing
from ..io.safetensors import KEY as ARRAYS_KEY, why_unreadable
from ..render import cut
from . import codes
from .tiers import Bucket, capacity_argument, of_a_token, rooms_of

if TYPE_CHECKING:
    from .cache import KVCache

VERSION = 1
KEY = "cuquant.kv_cache"
_TYPES = ("I32", "F32", "F16", "I8", "U8")
"""Types of arrays, as a file calls them."""
_SETTINGS = ("n_kv_heads", "head_dim", "batch", "rotate", "track_attention")


State = tuple[dict[str, Any], dict[str, Any]]
"""Settings, and NumPy arrays by name."""


def state(cache: KVCache) -> State:
    """What `restored` makes the cache of again.

    ValueError where an append was refused, or an id is none that a cache is restored with.
    """
    with cache._appender.copying(cache):
        return _state(cache)


def _state(cache: KVCache) -> State:
    arrays: dict[str, Any] = {"next_slots": device.as_numpy(cache.next_slots)}
    if cache.key_scales is not None:
        arrays["key_scales"] = device.as_numpy(cache.key_scales)
    for bits, tier in cache.tiers.items():
        arrays[f"{bits}.lengths"] = tier.held
        buckets = [tier.bucket(sequence).on_cpu() for sequence in range(cache.batch)]
        for sequence, bucket in enumerate(buckets):
            check.require_saved_ids(bucket.token_ids, sequence)
        for name, parts in zip(Bucket._fields, zip(*buckets, strict=True), strict=True):
            arrays[f"{bits}.{name}"] = np.concatenate(parts)
    settings = {name: getattr(cache, name) for name in _SETTINGS}
    settings |= {
        "version": VERSION,
        "capacity": cache.capacity,
        "rooms": [*rooms_of(cache.tiers).items()],
        "auto_scales": cache.auto_scales,
    }
    return settings, arrays


def save(cache: KVCache, path: str | os.PathLike[str]) -> None:
    """See KVCache.save."""
    from safetensors.numpy import save as to_bytes

    target = check.safetensors_path(path)
    settings, arrays = state(cache)
    raw = to_bytes(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, {KEY: json.dumps(settings)}
    )
    with replacing(target) as temporary:
        temporary.write_bytes(raw)


def load(kind: type[KVCache], path: str | os.PathLike[str], where: str) -> KVCache:
    """See KVCache.load."""
    from safetensors import SafetensorError, safe_open

    path = check.path(path)
    check.require_mappable(path)
    try:
        with path.open("rb"), safe_open(path, framework="numpy") as stored:
            metadata = stored.metadata() or {}
            if ARRAYS_KEY in metadata:
                raise ValueError("it has the arrays that cuquant.save wrote, and cuquant.load reads them")
            settings = _settings(metadata[KEY])
            arrays = {name: _array(stored, name) for name in stored.keys()}  # noqa: SIM118
        cache = restored(kind, (settings, arrays), "cpu")
    except KeyError as error:
        problem = f"it has no {error}"
    except SafetensorError as error:
        problem = why_unreadable(path, error)
    except (TypeError, ValueError) as error:
        problem = str(error)
    except MemoryError as error:
        raise MemoryError(f"the cache of {path}, with all the tokens it has room for: {error}") from None
    else:
        return cache.to_device(where)  # a GPU's errors are CuPy's
    raise ValueError(f"{path} is no cache that cuquant saved: {problem}")


def _settings(text: str) -> dict[str, Any]:
    """What a file says of a cache."""
    try:
        settings = json.loads(text)
    except RecursionError:
        raise ValueError("its settings are nested too deeply") from None
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"its settings are damaged: {cut(repr(text))}")
    return settings


def _array(stored: Any, name: str) -> Any:
    """A tensor of a file, of a type that some array of a cache has."""
    if (kind := stored.get_slice(name).get_dtype()) not in _TYPES:
        raise ValueError(f"{name} has the type {kind}; the arrays of a cache have {', '.join(_TYPES)}")
    return stored.get_tensor(name)


def restored(kind: type[KVCache], saved: State, where: str) -> KVCache:
    """The cache of such a state, on "cpu" or "cuda".

    Raises
    ------
    KeyError, TypeError, ValueError
        It is none; of its tokens that is found before memory is taken for all that it has room for.
    MemoryError
        There is no such memory.
    RuntimeError
        There is no GPU.
    """
    settings, arrays = saved
    if settings["version"] != VERSION:
        raise ValueError(
            f"the cache's version is {cut(repr(settings['version']))}; this is version {VERSION}"
        )
    rooms = _rooms(settings["rooms"])
    whole, widths = check.count(settings["capacity"], "capacity"), tuple(rooms)
    capacity = capacity_argument(rooms, whole)
    rooms = check.rooms(capacity, widths, codes.BITS)
    _sized(settings, arrays)
    slots = _like(arrays, "next_slots", (settings["batch"],), np.int32)
    buckets = {bits: _tokens(settings, arrays, bits, room) for bits, room in rooms.items()}
    auto_scales = settings["auto_scales"]
    cache = kind(
        settings["n_kv_heads"],
        settings["head_dim"],
        capacity,
        settings["batch"],
        widths,
        key_scales=arrays.get("key_scales") if auto_scales is None else arrays["key_scales"],
        rotate=settings["rotate"],
        track_attention=settings["track_attention"],
    )
    if auto_scales is not None:
        cache.auto_scales = check.choice(auto_scales, "auto_scales", ("pairs", "halves"))
    cache._next_slots[:] = slots
    for bits, (lengths, tokens) in buckets.items():
        for sequence, stop in enumerate(np.cumsum(lengths)):
            cache.tiers[bits].add(sequence, tokens.select(slice(stop - lengths[sequence], stop)))
    check.require_sound_cache(cache)
    return cache.to_device(where)


def _rooms(listed: Any) -> dict[int, int]:
    """Rooms by width, from pairs of both."""
    try:
        return {bits: check.count(room, "a room") for bits, room in listed}
    except (TypeError, ValueError):
        raise ValueError(f"rooms are {cut(repr(listed))}; pairs of bits and tokens are needed") from None


def _sized(settings: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Sizes are those of arrays, before memory is taken for them."""
    heads = {array.shape[1:2] for name, array in arrays.items() if name.endswith("_qx")}
    for name, shapes in (("batch", {arrays["next_slots"].shape}), ("n_kv_heads", heads)):
        size = check.count(settings[name], name)
        if shapes != {(size,)}:
            raise ValueError(f"{name} is {size}, but that of arrays is another")


def _tokens(
    settings: dict[str, Any], arrays: dict[str, Any], bits: int, room: int
) -> tuple[NDArray[np.int32], Bucket]:
    """How many tokens of a width each sequence has, and all of them."""
    lengths = _like(arrays, f"{bits}.lengths", (settings["batch"],), np.int32)
    if ((lengths < 0) | (lengths > room)).any():
        raise ValueError(f"{bits}.lengths are beyond the {room} tokens that the bucket has room for")
    total, head_dim = int(lengths.sum()), check.head_dim(settings["head_dim"], 8)
    kinds = of_a_token(bits, settings["n_kv_heads"], head_dim).items()
    return lengths, Bucket(
        *(_like(arrays, f"{bits}.{name}", (total, *shape), dtype) for name, (shape, dtype) in kinds)
    )


def _like(arrays: dict[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """The stored array of that name, which has this shape and type."""
    stored = arrays[name]
    if (stored.shape, stored.dtype) != (shape, dtype):
        wanted = f"{np.dtype(dtype)} {shape}"
        raise ValueError(f"{name} is {stored.dtype} {stored.shape}; {wanted} is needed")
    return stored
