"""Launches that are planned before it is known where their memory lies.

All but addresses is packed once. An address is told as so many bytes behind the start of one of a few pieces
of memory, whose numbers only those who plan have to know; a call says where each starts.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from .. import device
from ..plan import Plan
from . import buffers, jit, problem, streams

_ADDRESS = struct.Struct("=Q")


class Place(NamedTuple):
    """A byte of one of the pieces of memory."""

    memory: int
    offset: int = 0

    def behind(self, count: int) -> Place:
        """The byte so many behind it."""
        return Place(self.memory, self.offset + count)


class Tensor(NamedTuple):
    """A tensor that starts at a place, for the copy engine."""

    map: problem.Map
    place: Place


class Template(NamedTuple):
    """A launch: its argument with zeros for addresses, the offsets of its members, and where addresses go: an
    offset, the memory's number, and the bytes behind its start."""

    plan: Plan
    argument: bytes
    offsets: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]
    tensors: tuple[tuple[int, Tensor], ...]


def template(plan: Plan, codes: tuple[str, ...], *values: Any, whole: bool = False) -> Template:
    """A launch with these values of these types, as `struct` has them: one struct if it is `whole`, else each
    an argument. A Place is a "Q", a Tensor "128s"."""
    packing, offsets = jit.layout(codes)
    known = [0 if isinstance(v, Place) else b"" if isinstance(v, Tensor) else v for v in values]
    found = list(zip(offsets, values, strict=True))
    return Template(
        plan,
        packing.pack(*known),
        (0,) if whole else offsets,
        tuple((at, *value) for at, value in found if isinstance(value, Place)),
        tuple((at, value) for at, value in found if isinstance(value, Tensor)),
    )


def launch(steps: tuple[Template, ...], starts: tuple[int, ...]) -> None:
    """Start them one after the other, with pieces of memory that start at these addresses."""
    here, stream = device.cupy().cuda.runtime.getDevice(), streams.current()
    for plan, known, offsets, places, tensors in steps:
        maps = [(at, buffers.tensor_map(starts[to.memory] + to.offset, map)) for at, (map, to) in tensors]
        own = jit.prepared(here, plan, len(known), offsets)
        argument = own.arguments
        argument[:] = known
        for at, memory, offset in places:
            _ADDRESS.pack_into(argument, at, starts[memory] + offset)
        for at, tensor in maps:
            argument[at : at + 128] = tensor
        own(*stream)
