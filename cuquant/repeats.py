"""Calls that are repeated: what was checked of one is not checked again of others like it.

Types, shapes, strides and dtypes of all operands, the words beside them, and whether x starts on 16 bytes
decide whether a call is right and how its kernels are launched. They are a key, in a table of each weight (of
gate, for mixtures of experts) or cache, or of this module where there is none. What is asked again is where
the arrays lie: on the current GPU, and the result apart from what is read. Where first and last bytes leave
that open, the call is checked as a new one is. In a loop over small products the host sets the pace.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import device
from .array import QuantizedArray

if TYPE_CHECKING:
    from .cuda.fragments import Fragments

MOST, FEW = 64, 4
"""Most calls of a table; and of that of one of many matrices, whose tables would be large together."""


_Span = tuple[int, int, int]
"""Where an array lies: bytes from its first element's address to its lowest byte, and to behind its highest;
and the bits that the address of a number does not have."""
_NOWHERE = 0, 0, 0


class Repeat(NamedTuple):
    """What is known of calls that are alike."""

    work: Any
    """What the backend does; it takes addresses."""
    shape: tuple[int, ...]
    """Shape of the result, as its dtype; what is appended to a cache has none."""
    dtype: np.dtype[Any] | None
    weights: tuple[tuple[int, int], ...]
    """Addresses between which each weight lies."""
    x: _Span
    out: _Span
    others: tuple[tuple[int, _Span], ...]
    """Numbers and spans of what else is read, and the residual behind it, of those that are there."""
    nowhere: list[int]
    """Zeros for what else is read and the residual, there or not."""
    in_place: bool
    """Whether the residual, if it starts where `out` does, is `out`."""

    def result(self) -> Any:
        """A new array for the result; `cupy.empty` would take a third longer."""
        return device.cupy().ndarray(self.shape, self.dtype)

    def places(self, x: Any, reads: tuple[Any, ...], residual: Any, out: Any) -> list[int] | None:
        """Where x, what else is read, the residual and `out` start, 0 for those that are not there; None
        where arrays that are like the first ones do not lie as they may, too: on this GPU, at multiples of
        their numbers' size, and no byte of `out` is one of the others'."""
        here = device.cupy().cuda.runtime.getDevice()
        data = x.data
        start = data.ptr
        low, high, odd = self.x
        if data.device_id != here or start & odd:
            return None
        to = first = end = 0
        if out is not None:
            data = out.data
            to = data.ptr
            below, above, odd = self.out
            first, end = to + below, to + above
            if data.device_id != here or to & odd or (first < start + high and start + low < end):
                return None
            for low, high in self.weights:
                if first < high and low < end:
                    return None
        found = [start, *self.nowhere, to]
        for at, (low, high, odd) in self.others:
            is_residual = at == len(self.nowhere) - 1
            data = (residual if is_residual else reads[at]).data
            start = data.ptr
            if data.device_id != here or start & odd:
                return None
            itself = is_residual and self.in_place and start == to
            if not itself and first < start + high and start + low < end:
                return None
            found[1 + at] = start
        return found


class CallTable(dict[tuple[Any, ...], Repeat]):
    """Calls that were checked, by what their operands look like; with `most` of them it starts anew."""

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most

    def keep(self, key: tuple[Any, ...], call: Repeat) -> None:
        """Put a call in the place of one that is alike, or behind all others."""
        self.pop(key, None)
        if len(self) >= self.most:
            self.clear()
        self[key] = call


quantized = CallTable()
"""Table of activations that were quantized."""
routed = CallTable()
"""Table of logits by which experts were chosen."""


def of(w: Any) -> CallTable | None:
    """Table of products with a weight, if it was prepared for kernels."""
    return w._fragments.repeats if type(w) is QuantizedArray and w._fragments is not None else None


def of_cache(cache: Any) -> CallTable | None:
    """Table of a cache on a GPU: appends to it, and attention over it."""
    return getattr(getattr(cache, "_appender", None), "repeats", None)


def prepared(experts: Any) -> tuple[Fragments, Fragments, Fragments] | None:
    """The weights of a mixture, if all were prepared for kernels; gate knows the mixtures."""
    try:
        gate, up, down = [w._fragments for w in (experts.gate, experts.up, experts.down)]
    except AttributeError:
        return None
    return None if gate is None or up is None or down is None else (gate, up, down)


def find(
    known: CallTable | None,
    words: tuple[Any, ...],
    x: Any,
    reads: tuple[Any, ...] = (),
    residual: Any = None,
    out: Any = None,
) -> tuple[Repeat, list[int]] | None:
    """What is known of a call with these operands, if it can be done so, and where they start
    (`Repeat.places`). `reads` are those that are no activations: as many in all calls of these words."""
    if not known:
        return None
    given, kind = _blocks(x) if type(x) is QuantizedArray else (x, None)
    if not device.is_cuda(given):
        return None
    try:
        found = known.get(_key(words, kind, given, reads, residual, out))
        places = None if found is None else found.places(given, reads, residual, out)
    except (AttributeError, TypeError):  # others are not CuPy's; words that no key can have
        return None
    return None if found is None or places is None else (found, places)


def remember(
    known: CallTable,
    words: tuple[Any, ...],
    work: Any,
    x: Any,
    reads: tuple[Any, ...] = (),
    residual: Any = None,
    out: Any = None,
    *,
    result: Any = None,
    weights: tuple[Any, ...] = (),
) -> None:
    """Record that `work` handles calls like this one, which was checked and done with weights in this
    memory."""
    given, kind = _blocks(x) if type(x) is QuantizedArray else (x, None)
    others = *reads, residual
    repeat = Repeat(
        work,
        () if result is None else result.shape,
        None if result is None else result.dtype,
        tuple((weight.data.ptr, weight.data.ptr + weight.nbytes) for weight in weights),
        _span(given),
        _NOWHERE if result is None else _span(result),
        tuple((at, _span(array)) for at, array in enumerate(others) if array is not None),
        [0] * len(others),
        residual is not None and (residual.strides, residual.dtype) == (result.strides, result.dtype),
    )
    key = _key(words, kind, given, reads, residual, out)
    with suppress(TypeError):  # words that no key can have
        known.keep(key, repeat)


def _blocks(x: QuantizedArray) -> tuple[Any, Any]:
    """The array of the blocks of activations, and what they mean."""
    return x._blocks, (x._format.name, x._shape, x.rows is None)


def _key(
    words: tuple[Any, ...], kind: Any, x: Any, reads: tuple[Any, ...], residual: Any, out: Any
) -> tuple[Any, ...]:
    data = x.data
    key: tuple[Any, ...]
    key = (words, kind, data.device_id, data.ptr & 15 == 0, type(x), x.shape, x.strides, x.dtype)
    if out is not None:
        key += (type(out), out.shape, out.strides, out.dtype)
    for at, array in enumerate((*reads, residual)):
        if array is not None:
            key += (at, type(array), array.shape, array.strides, array.dtype)
    return key


def _span(array: Any) -> _Span:
    if array.size == 0:
        return _NOWHERE
    ends = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    size = array.itemsize
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + size, size - 1
