"""Caches of keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import device
from .common import (
    LARGEST_INDEX,
    a_or_an,
    array,
    choice,
    count,
    floats,
    numbers,
    on_cpu,
    readable,
    require_memory,
    require_one_device,
)


def head_dim(value: Any, multiple: int) -> int:
    """Whole groups of codes and rotations, up to 256."""
    number = count(value, "head_dim")
    if number % multiple or number > 256:
        raise ValueError(
            f"head_dim is {number}; a multiple of {multiple} up to 256 is needed"
            + " to rotate keys" * (multiple > 8)
        )
    return number


def rooms(capacity: Any, bits: Any, allowed: tuple[int, ...]) -> dict[int, int]:
    """Tokens that each width has room for, widest first."""
    given = isinstance(capacity, Mapping)
    widths, what = (list(capacity), "capacity has the bits") if given else (_widths(bits), "bits are")
    if given and bits is not None and [b for b in allowed if b in widths] != _widest_first(bits):
        raise ValueError(f"bits is {bits!r}, but {what} {widths}: leave bits out beside a mapping")
    known = all(isinstance(width, (int, float, np.number)) and width in allowed for width in widths)
    if not widths or not known or len({*widths}) < len(widths):
        choices = ", ".join(map(str, allowed))
        raise ValueError(f"{what} {widths}; one or more of {choices}, each once, are needed")
    sizes = capacity if given else dict.fromkeys(widths, capacity)
    needed = "an integer is needed" + ", or a mapping of bits to tokens, as {8: 64, 4: 256}" * (not given)
    names = {b: f"capacity[{b}]" if given else "capacity" for b in allowed if b in sizes}
    result = {b: count(sizes[b], name, needed=needed) for b, name in names.items()}
    if given:
        count(sum(result.values()), "the capacity of all widths")
    return result


def _widest_first(bits: Any) -> Any:
    """A sequence of widths in order; anything else as it is."""
    try:
        return sorted(bits, reverse=True)
    except TypeError:
        return bits


def _widths(bits: Any) -> list[Any]:
    """What a sequence of widths holds; a text's letters and a mapping's keys are not taken for that. None
    stands for all but 16."""
    if bits is None:
        return [8, 4, 3, 2]
    if not isinstance(bits, (str, Mapping)):
        with contextlib.suppress(TypeError):
            return list(bits)
    raise TypeError(
        f"bits is {bits!r}; widths are needed, as (4,) or (8, 4), or capacity={{8: 64, 4: 256}}: how many "
        "tokens each width has room for"
    )


def key_scales(value: Any, shape: tuple[int, int, int]) -> Any:
    """float32 (batch, n_kv_heads, head_dim), a copy, ones for automatic ones; None stays None."""
    if value is None:
        return None
    if isinstance(value, str):
        choice(value, "key_scales", ("pairs", "halves"))
        return np.ones(shape, np.float32)
    given = on_cpu(floats(value, "key_scales"), "key_scales")
    if given.shape not in (shape, shape[1:]):
        raise ValueError(f"key_scales has shape {given.shape}; {shape[1:]} or {shape} is needed")
    result = np.broadcast_to(given, shape).astype(np.float32, order="C")
    if not (np.isfinite(result) & (result > 0)).all():
        raise ValueError("key_scales must be finite and positive: keys are divided by them")
    return result


def in_cache(value: Any, what: str, place: str) -> Any:
    """An array on the device of the cache."""
    if device.of(value) != place:
        raise TypeError(
            f"{what} is on {device.of(value)}, the cache on {place}: move one with {_MOVES[place]}"
        )
    return value


_MOVES = {
    "cpu": ".get(), or the cache with to_device('cuda')",
    "cuda": "cupy.asarray, or the cache with to_device('cpu')",
}


def on_gpu_integers(value: Any, what: str, shape: tuple[int, ...], axes: str = "(batch, tokens)") -> Any:
    """Integers of a CuPy array on the current GPU, broadcast to a shape; they are not looked at."""
    if value.dtype.kind not in "iu":
        raise TypeError(f"{what} has dtype {value.dtype}; integers are needed")
    if not device.is_current(value):
        require_one_device(**{what: value})
    return broadcast(value, shape, what, axes)


def int32_on_gpu(value: Any, what: str, most: int = LARGEST_INDEX + 1) -> Any:
    """Integers on the GPU as kernels read them, int32 without gaps: others are copied.

    Of those on a GPU what is below -1 counts as -1, and what is above `most` as that, which by default turns
    negative: nothing beyond int32 looks like a number that it holds. RuntimeError where a copy would be made
    while a graph is captured.
    """
    cupy = device.cupy()
    if not device.is_cuda(value):
        require_memory(f"{what} is not on the GPU, and is copied there", "pass a CuPy array of int32")
        return cupy.asarray(np.ascontiguousarray(value, np.int32))
    if value.dtype == np.int32 and value.flags.c_contiguous:
        return readable(value, what)
    kind = f"contiguous int32 of shape {value.shape}"
    require_memory(f"{what} is not {kind}, and is copied", "pass an array that is")
    if np.can_cast(value.dtype, np.int32):
        return cupy.ascontiguousarray(value, np.int32)
    result = cupy.empty(value.shape, np.int32)
    if value.dtype.kind == "u":
        cupy.minimum(value, most, out=result)
    else:
        cupy.clip(value, -1, most, out=result)
    return result


def require_tokens(k: tuple[int, ...], v: tuple[int, ...], cache: tuple[int, int, int]) -> None:
    """Shapes of new keys and values fit a cache of (batch, n_kv_heads, head_dim)."""
    batch, heads, dim = cache
    for what, shape in (("k", k), ("v", v)):
        if len(shape) != 4 or (shape[0], *shape[2:]) != cache:
            raise ValueError(
                f"{what} has shape {shape}; this cache takes ({batch}, n, {heads}, {dim}): "
                "(batch, tokens, n_kv_heads, head_dim)"
            )
    if k != v:
        raise ValueError(f"k {k} and v {v} differ in their number of tokens")


def lengths(value: Any, batch: int, n: int) -> Any:
    """int64 [batch], 0 to n each; n for None."""
    if value is None:
        return np.full(batch, n)
    result = integers(value, "lengths")
    _of_sequences(result.shape, batch)
    if ((result < 0) | (result > n)).any():
        given = _on_host(value, "lengths", "integers").tolist()
        raise ValueError(f"lengths are {given}; allowed are 0 to {n}, the tokens given")
    return result


def lengths_on_gpu(value: Any, batch: int) -> Any:
    """int32 [batch] of a CuPy array: the kernel refuses what is not 0 to n, so also numbers beyond int32."""
    _of_sequences(value.shape, batch)
    return int32_on_gpu(on_gpu_integers(value, "lengths", (batch,)), "lengths")


def _of_sequences(shape: tuple[int, ...], batch: int) -> None:
    if shape != (batch,):
        raise ValueError(f"lengths has shape {shape}; one for each of {batch} sequences is needed")


def token_bits(value: Any, shape: tuple[int, int], allowed: tuple[int, ...], used: Any = True) -> Any:
    """Widths that a cache has, int64 of `shape`; of several those that are used (bool, of that shape)."""
    given = integers(value, "bits")
    result = broadcast(given, shape, "bits")
    named = result[np.broadcast_to(used, shape)] if given.ndim else given[None]
    bad = named[~np.isin(named, allowed)]
    if bad.size:
        raise ValueError(f"bits is {bad[0]}; this cache has {', '.join(map(str, allowed))}")
    return result


def token_ids(value: Any, shape: tuple[int, int], used: Any = True) -> Any:
    """Names of new tokens, int64 of `shape`; checked are those that are used (bool, of that shape)."""
    result = broadcast(integers(value, "token_ids"), shape, "token_ids")
    bad = ((result < 0) | (result > LARGEST_INDEX)) & used
    if bad.any():
        given = np.broadcast_to(_on_host(value, "token_ids", "integers"), shape)[bad][0]
        raise ValueError(f"token_ids has {given}; they are int32, not negative")
    return result


def named_tokens(value: Any, batch: int) -> tuple[Any, bool]:
    """Ids int64 (batch, n), and whether each sequence has its own; one is taken for a list of it."""
    ids = np.atleast_1d(integers(value, "token_ids"))
    own = ids.ndim == 2
    if ids.ndim not in (1, 2) or (own and len(ids) != batch):
        raise ValueError(f"token_ids has shape {ids.shape}; (n,) or ({batch}, n) is needed")
    if own and (ids < -1).any():
        raise ValueError(
            f"token_ids has {ids.min()}; in a sequence's own row -1 names none, and no id is negative"
        )
    return np.broadcast_to(ids, (batch, ids.shape[-1])), own


def require_known_ids(ids: Any, seen: Any, own: bool) -> None:
    """Every id (batch, n) names a token: of its sequence, or of any for ids that are all sequences'."""
    missing = ~seen & (ids >= 0) if own else ~seen.any(axis=0, keepdims=True)
    if missing.any():
        sequence, index = (int(i) for i in np.argwhere(missing)[0])
        where = f"sequence {sequence}" if own else "the cache"
        raise ValueError(f"{where} holds no token of id {ids[sequence, index]}")


def require_room(
    adds: Mapping[int, Any], held: Mapping[int, Any], rooms: Mapping[int, int], capacity: int
) -> None:
    """Room for what comes to each width's bucket (less what leaves) beside what it holds, [batch] tokens."""
    total, new = sum(held.values()), sum(adds.values())
    _room(total, new, capacity, "this cache", "evict some, or make the cache larger")
    for bits, room in rooms.items():
        hint = (
            "move or evict some (before an append cache.age(..., coming=n) does), append fewer at a time or "
            "with other bits, or give the width a larger capacity"
        )
        _room(held[bits], adds[bits], room, f"its {bits}-bit bucket", hint)


def require_appended(sequence: int, capacity: int) -> None:
    """Tokens that came without a check, in a graph or with widths or lengths on the GPU, have found room."""
    raise ValueError(
        "an earlier append, replayed by a graph or with bits or lengths on the GPU, was refused and changed "
        f"nothing: sequence {sequence} or one of its buckets had no room (the cache takes {capacity} tokens) "
        "or no such width, or its length was below 0 or above the tokens given; evict some, or make the "
        "cache larger"
    )


def ages(newest: Any, allowed: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Widths by age, the narrowest of the cache last, and the greatest age of each but the last."""
    if not isinstance(newest, Mapping):
        raise TypeError(f"newest is {a_or_an(newest)}; a mapping of bits to numbers of tokens is needed")
    widths = [*newest]
    if not {*widths} <= {*allowed} or widths != sorted(widths, reverse=True):
        raise ValueError(
            f"newest has the widths {widths}; they must be widths of this cache "
            f"({', '.join(map(str, allowed))}), the widest first"
        )
    counts = [count(value, f"newest[{bits}]", least=0) for bits, value in newest.items()]
    return np.array([*widths, min(allowed)], np.int64), np.cumsum(counts, dtype=np.int64)


def sequence(value: Any, batch: int) -> int:
    """The number of a sequence."""
    number = count(value, "sequence", least=-LARGEST_INDEX)
    if not 0 <= number < batch:
        raise ValueError(f"sequence is {number}; the sequences of this cache are 0 to {batch - 1}")
    return number


def require_copyable(capturing: bool) -> None:
    """No graph is being captured, which a copy would be a part of."""
    if capturing:
        raise RuntimeError(
            "a cache cannot be copied while a CUDA graph is captured, which would fill the copy anew "
            "whenever it is replayed: copy it before or after"
        )


def require_movable(capturing: bool) -> None:
    """No graph is being captured: the host tells which tokens move, of those that are there now."""
    if capturing:
        raise RuntimeError(
            "tokens cannot be moved, evicted or cleared while a CUDA graph is captured, which would do so "
            "with the same ones whenever it is replayed: do it before or after"
        )


def _room(held: Any, new: Any, room: int, place: str, hint: str) -> None:
    full = (held + new > room) & (new > 0)
    if full.any():
        sequence = int(full.argmax())
        raise ValueError(
            f"sequence {sequence} holds {held[sequence]} tokens of the {room} that {place} has room for: "
            f"{new[sequence]} more do not fit; {hint}"
        )


def require_slot_range(after: int) -> None:
    """Slots are int32, and so is the one after those that are given out, which `next_slots` holds."""
    if after > LARGEST_INDEX:
        raise ValueError(f"slot {after} is beyond int32: clear the cache")


def importance(value: Any, shape: tuple[int, int]) -> Any:
    """Weights by global slot, (batch, slots) or more columns; None stays None."""
    if value is None:
        return None
    result = numbers(_on_host(value, "importance", "numbers"), "importance")
    batch, slots = shape
    if result.ndim not in (1, 2) or result.shape[-1] < slots or result.shape[:-1] not in ((), (batch,)):
        raise ValueError(f"importance has shape {result.shape}; {(slots,)} or {shape} is needed, or wider")
    if not ((result >= 0) & (result < np.inf)).all():
        raise ValueError("importance must be finite and not negative")
    return np.broadcast_to(result, (batch, result.shape[-1]))


def average_bits(value: Any, bits: tuple[int, ...]) -> float:
    """A mean that a cache's widths can have."""
    number = number_of(value, "average_bits")
    if not bits[-1] <= number <= bits[0]:
        raise ValueError(f"average_bits is {number:g}; this cache's widths allow {bits[-1]} to {bits[0]}")
    return number


def not_negative(value: Any, what: str) -> float:
    """A finite number, 0 or above."""
    number = number_of(value, what)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{what} is {number}; a finite number, 0 or above, is needed")
    return number


def require_saved_ids(ids: Any, sequence: int) -> None:
    """Ids of a sequence's tokens that are to be in a file."""
    least = int(ids.min(initial=0))
    if least < 0:
        raise ValueError(
            f"sequence {sequence} has the token id {least}, and no file may have a negative one (append does "
            "not look at token_ids that are on the GPU; those beyond int32 become negative): "
            f"evict([{least}]) removes its tokens"
        )


def require_sound_cache(cache: Any) -> None:
    """A cache read from a file: its capacity holds, slots are given out and used once, no id is negative, and
    importances are what can be compared."""
    if (cache.lengths > cache.capacity).any():
        raise ValueError(f"a sequence has {cache.lengths.max()} tokens, beyond the capacity {cache.capacity}")
    for sequence in range(cache.batch):
        buckets = [tier.bucket(sequence) for tier in cache.tiers.values()]
        slots = np.concatenate([b.global_slots for b in buckets])
        if len(np.unique(slots)) < len(slots) or ((slots < 0) | (slots >= cache.next_slots[sequence])).any():
            raise ValueError(f"global slots of sequence {sequence} are out of range, or taken twice")
        if any((b.token_ids < 0).any() for b in buckets):
            raise ValueError(f"sequence {sequence} has a negative token id")
        if not all(((b.importance >= 0) & (b.importance < np.inf)).all() for b in buckets):
            raise ValueError(f"sequence {sequence} has an importance that is negative or not finite")


def number_of(value: Any, what: str) -> float:
    """A float, also of one beyond floats: an infinite one."""
    try:
        if isinstance(value, (str, bytes, bool, np.bool_)):
            raise TypeError
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {a_or_an(value)}; a number is needed") from None


def integers(value: Any, what: str) -> Any:
    """int64 numbers on the host; an empty list is such an array too."""
    result = _on_host(value, what, "integers")
    if result.dtype.kind not in "iu" and result.size:
        raise TypeError(f"{what} has dtype {result.dtype}; integers are needed")
    if result.dtype == np.uint64:
        result = np.minimum(result, np.uint64(np.iinfo(np.int64).max))  # else they would turn negative
    return result.astype(np.int64)


def _on_host(value: Any, what: str, of: str) -> Any:
    """NumPy's array of numbers, lists of them, and arrays of a GPU, which the host waits for."""
    if hasattr(value, "__cuda_array_interface__"):
        value = array(value, what, of)
    return np.asarray(device.as_numpy(value))


def broadcast(value: Any, shape: tuple[int, ...], what: str, axes: str = "(batch, tokens)") -> Any:
    """An array in that shape, of which the axes are these."""
    if value.shape == shape:
        return value
    xp = device.cupy() if device.is_cuda(value) else np
    try:
        return xp.broadcast_to(value, shape)
    except ValueError:
        raise ValueError(
            f"{what} has shape {value.shape}, which does not broadcast to {shape}, {axes}"
        ) from None
