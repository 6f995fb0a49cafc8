"""Calls that are repeated: what was checked of one is not checked again of others like it.

Types, shapes, strides and dtypes of all operands, the words beside them, and whether x starts on 16 bytes
decide whether a call is right and how its kernels are launched. They are a key, in a table of each weight (of
gate, for mixtures of experts), or of this module where there is none. What is asked again is where the arrays
lie: on the current GPU, and the result apart from what is read. Where first and last bytes leave that open,
the call is checked as a new one is. In a loop over small products the host sets the pace.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import device
from .array import QuantizedArray

if TYPE_CHECKING:
    from .fragments import Fragments

MOST, FEW = 64, 4
"""Calls of a table; then it starts anew. Of one of many matrices."""


class Repeat(NamedTuple):
    """What is known of calls that are alike."""

    work: Any
    """What the backend does; it takes addresses."""
    shape: tuple[int, ...]
    """Of the result, as its dtype."""
    dtype: np.dtype[Any]
    weights: tuple[tuple[int, int], ...]
    """Addresses between which each weight lies."""
    out: tuple[int, int, int]
    """Of `out`: bytes from its first element's address to its lowest byte, and to behind its highest; and the
    bits that the address of a number does not have."""
    reads: tuple[tuple[int, int, int], ...]
    """The same of x, of what else is read, and of the residual."""
    in_place: bool
    """Whether the residual, if it starts where `out` does, is `out`."""

    def takes(self, x: Any, reads: tuple[Any, ...], residual: Any, out: Any) -> bool:
        """Whether arrays that are like the first ones lie as they may, too: on this GPU, at multiples of
        their numbers' size, and no byte of `out` is one of the others'."""
        here = device.cupy().cuda.runtime.getDevice()
        first = end = 0
        if out is not None:
            data = out.data
            start = data.ptr
            low, high, odd = self.out
            first, end = start + low, start + high
            if data.device_id != here or start & odd:
                return False
            for low, high in self.weights:
                if first < high and low < end:
                    return False
            if self.in_place and residual.data.ptr == start:
                residual = None
        for read, (low, high, odd) in zip((x, *reads, residual), self.reads, strict=True):
            if read is not None:
                data = read.data
                start = data.ptr
                if data.device_id != here or start & odd or (first < start + high and start + low < end):
                    return False
        return True


Known = dict[tuple[Any, ...], Repeat]


class Some(Known):
    """Calls of one of many matrices, whose tables would be large together."""


quantized: Known = {}
"""Of activations that were quantized."""
routed: Known = {}
"""Of logits by which experts were chosen."""


def of(w: Any) -> Known | None:
    """Of a weight that was prepared for kernels: products with it."""
    return w._fragments.repeats if type(w) is QuantizedArray and w._fragments is not None else None


def prepared(experts: Any) -> tuple[Fragments, Fragments, Fragments] | None:
    """The weights of a mixture, if all were prepared for kernels; gate knows the mixtures."""
    try:
        gate, up, down = [w._fragments for w in (experts.gate, experts.up, experts.down)]
    except AttributeError:
        return None
    return None if gate is None or up is None or down is None else (gate, up, down)


def find(
    known: Known | None,
    words: tuple[Any, ...],
    x: Any,
    reads: tuple[Any, ...] = (),
    residual: Any = None,
    out: Any = None,
) -> Repeat | None:
    """What is known of a call with these operands, if it can be done so. `reads` are those that are no
    activations: as many in all calls of these words."""
    if not known:
        return None
    given, kind = _blocks(x) if type(x) is QuantizedArray else (x, None)
    if not device.is_cuda(given):
        return None
    try:
        found = known.get(_key(words, kind, given, reads, residual, out))
    except (AttributeError, TypeError):  # others are not CuPy's; words that no key can have
        return None
    return found if found is not None and found.takes(given, reads, residual, out) else None


def remember(
    known: Known,
    words: tuple[Any, ...],
    work: Any,
    x: Any,
    reads: tuple[Any, ...] = (),
    residual: Any = None,
    out: Any = None,
    *,
    result: Any,
    weights: tuple[Any, ...] = (),
) -> None:
    """That a call was checked and done, by `work`, with weights in this memory."""
    given, kind = _blocks(x) if type(x) is QuantizedArray else (x, None)
    repeat = Repeat(
        work,
        result.shape,
        result.dtype,
        tuple((weight.data.ptr, weight.data.ptr + weight.nbytes) for weight in weights),
        _span(result),
        tuple(_span(array) for array in (given, *reads, residual)),
        residual is not None and (residual.strides, residual.dtype) == (result.strides, result.dtype),
    )
    if len(known) >= (FEW if isinstance(known, Some) else MOST):
        known.clear()
    with suppress(TypeError):
        known[_key(words, kind, given, reads, residual, out)] = repeat


def _blocks(x: QuantizedArray) -> tuple[Any, Any]:
    """The array of the blocks of activations, and what they mean."""
    return x._blocks, (x._format.name, x._shape, x.rows is None)


def _key(
    words: tuple[Any, ...], kind: Any, x: Any, reads: tuple[Any, ...], residual: Any, out: Any
) -> tuple[Any, ...]:
    data = x.data
    arrays = (x, *reads, residual, out)
    return (
        words,
        kind,
        (data.device_id, data.ptr % 16 == 0),
        *[None if a is None else (type(a), a.shape, a.strides, a.dtype) for a in arrays],
    )


def _span(array: Any) -> tuple[int, int, int]:
    """Bytes that the elements of an array take, from the first one's address, and the bits that this does not
    have."""
    if array is None or array.size == 0:
        return 0, 0, 0
    ends = [(extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True)]
    size = array.itemsize
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + size, size - 1
