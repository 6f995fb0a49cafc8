"""q1_0: signs with one scale per 128 weights (ggml type 41), of models of one bit; only read."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml
from .base import ReadOnly
from .chunks import by_parts
from .kernels import KeptAs, Kernels, kept_as
from .q2_0 import Q2_0

_TWO_BITS = Q2_0(128)


class Q1_0(ReadOnly):
    """128 weights in 18 bytes: float16 d, then a bit for each weight, the first in the lowest bit of a byte.

    W = d * (2 q - 1). On a GPU codes have two bits: those of q2_0 that stand for -1 and 1. Source:
    dequantize_row_q1_0 of ggml.
    """

    name = "q1_0"
    bits = 1
    block_size = 128
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
    formula = "W = d * (2 q - 1)"
    ggml_type = 41
    file_type = 40
    made_by = "those who train such models do, and GGUF files of it are read"

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        return kept_as(KeptAs(_TWO_BITS, self._doubled, self._halved))

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        d = ggml.scale_of(records)
        return np.where(np.unpackbits(records["qs"], axis=1, bitorder="little") != 0, d, -d)

    def _doubled(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            # Bits of a nibble, two places apart, above the zeros that make 2 of 1.
            raw = part[:, 2:]
            nibbles = xp.stack([raw & 15, raw >> 4], axis=-1).reshape(len(part), -1)
            fours = nibbles << 1 & 2 | nibbles << 2 & 8 | nibbles << 3 & 32 | nibbles << 4 & 128
            return xp.concatenate([part[:, :2], fours], axis=1)

        return by_parts(blocks, self.block_bytes, _TWO_BITS.block_bytes, xp, made_of)

    def _halved(self, blocks: Any, xp: Any) -> Any:
        def made_of(part: Any) -> Any:
            fours = part[:, 2:]
            nibbles = fours >> 1 & 1 | fours >> 2 & 2 | fours >> 3 & 4 | fours >> 4 & 8
            return xp.concatenate([part[:, :2], nibbles[:, ::2] | nibbles[:, 1::2] << 4], axis=1)

        return by_parts(blocks, _TWO_BITS.block_bytes, self.block_bytes, xp, made_of)
