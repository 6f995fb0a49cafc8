"""The storage of a bit width: fixed buffers for every sequence, filled from the start."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import device
from . import codes


class Bucket(NamedTuple):
    """T tokens of one sequence at one bit width, in no particular order.

    Attributes
    ----------
    token_ids : int32 [T]
        The caller's names of the tokens.
    global_slots : int32 [T]
        Positions in the sequence: what causality compares, and the tokens' columns in a mask.
    importance : float32 [T]
        Attention that the tokens received, where the cache tracks it.
    k_qx, v_qx : [T, n_kv_heads, packed_dim]
        Codes: int8; uint8, packed, for 4, 3 and 2 bits; for 16 bits float16 numbers.
    k_scale, v_scale : float16 [T, n_kv_heads]
        A number is its code times this; [T, 0] for 16 bits.
    """

    token_ids: NDArray[np.int32]
    global_slots: NDArray[np.int32]
    importance: NDArray[np.float32]
    k_qx: NDArray[Any]
    k_scale: NDArray[np.float16]
    v_qx: NDArray[Any]
    v_scale: NDArray[np.float16]

    def select(self, index: Any) -> Bucket:
        """Tokens, selected as NumPy selects along the first axis."""
        return Bucket(*(array[index] for array in self))

    def on_cpu(self) -> Bucket:
        """The bucket with NumPy's arrays."""
        return Bucket(*map(device.as_numpy, self))


def of_a_token(bits: int, n_kv_heads: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and type of what a Bucket holds of one token of a width, by field."""
    numbers = (n_kv_heads, codes.packed_dim(head_dim, bits)), codes.dtype(bits)
    scale = (n_kv_heads if bits < 16 else 0,), np.float16
    kinds = ((), np.int32), ((), np.int32), ((), np.float32), numbers, scale, numbers, scale
    return dict(zip(Bucket._fields, kinds, strict=True))


class Tier:
    """Buffers of one bit width for a batch of sequences; allocated once, tokens move in and out.

    They are NumPy's, or CuPy's (`where` is "cuda"), and so is what the methods give. Lengths on a GPU change
    there: what needs them waits for it.

    Attributes
    ----------
    bits, room : int
        The width, and how many tokens of a sequence the buffers hold.
    buffers : Bucket
        Arrays [batch, room, ...] of what a Bucket holds; what lies beyond a sequence's length is no token.
    lengths : int32 [batch]
    """

    def __init__(
        self, bits: int, batch: int, room: int, n_kv_heads: int, head_dim: int, where: str = "cpu"
    ) -> None:
        self.xp: Any = np if where == "cpu" else device.cupy()
        zeros = self.xp.zeros
        self.bits, self.room = bits, room
        kinds = of_a_token(bits, n_kv_heads, head_dim).values()
        self.buffers = Bucket(*(zeros((batch, room, *shape), dtype) for shape, dtype in kinds))
        self.lengths = zeros(batch, np.int32)

    @property
    def held(self) -> NDArray[np.int32]:
        """`lengths` on the CPU."""
        lengths: NDArray[np.int32] = device.as_numpy(self.lengths)
        return lengths

    def bucket(self, sequence: int) -> Bucket:
        """The tokens of a sequence: views."""
        return self.buffers.select((sequence, slice(int(self.lengths[sequence]))))

    def add(self, sequence: int, tokens: Bucket) -> None:
        """Append tokens, of either device; there is room for them."""
        start = int(self.lengths[sequence])
        stop = start + len(tokens.token_ids)
        for name in Bucket._fields:
            getattr(self.buffers, name)[sequence, start:stop] = self.xp.asarray(getattr(tokens, name))
        self.lengths[sequence] = stop

    def copy(self) -> Tier:
        """A tier of the same tokens in buffers of their own, on the current GPU."""
        made = copy.copy(self)
        made.buffers = Bucket(*(buffer.copy() for buffer in self.buffers))
        made.lengths = self.lengths.copy()
        return made

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's codes and scales, of all heads."""
        b = self.buffers
        return sum(a.nbytes // (a.shape[0] * self.room) for a in (b.k_qx, b.k_scale, b.v_qx, b.v_scale))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def __repr__(self) -> str:
        batch, tokens = len(self.lengths), int(self.held.sum())
        return f"Tier(bits={self.bits}, batch={batch}, room={self.room}, tokens={tokens})"


def held_of(tiers: Mapping[int, Tier]) -> dict[int, NDArray[np.int64]]:
    """Tokens [batch] that each width holds."""
    return {bits: tier.held.astype(np.int64) for bits, tier in tiers.items()}


def rooms_of(tiers: Mapping[int, Tier]) -> dict[int, int]:
    """Tokens of a sequence that each width has room for."""
    return {bits: tier.room for bits, tier in tiers.items()}


def capacity_argument(rooms: dict[int, int], capacity: int) -> int | dict[int, int]:
    """What KVCache takes for `capacity` to have these rooms: the number itself where every width has it."""
    return capacity if {*rooms.values()} == {capacity} else rooms
