"""q2_0: codes of 2 bits around zero with one scale (ggml type 42), of ternary models; only read.

And what tq1_0 and tq2_0 share with it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml
from .base import ReadOnly, register
from .kernels import Coding, Kernels, Scaling


class TwoBits(ReadOnly):
    """Integers q of 2 bits with a float16 scale d for a block, of which the group plane has one, too."""

    bits = 2
    formula = "W = d * (q - 1)"

    def codes(self, blocks: Any, xp: Any) -> Any:
        """q [n, block_size], uint8, of blocks [n, bytes]; `xp` is the module of these arrays."""
        raise NotImplementedError

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        raw = np.ascontiguousarray(records).view(np.uint8).reshape(len(records), -1)
        return (self.codes(raw, np).astype(np.float32) - np.float32(1)) * ggml.scale_of(records)


class Q2_0(TwoBits):
    """Groups of weights with a scale: float16 d, then bytes of four codes each, the first in the lowest bits.

    W = d * (q - 1), of which models with the weights -d, 0 and d never use 3. Of llama.cpp groups are of 64
    weights, 18 bytes; "q2_0-128" are those of PrismML's fork, 34 bytes for 128, whose files have the same
    number of the type. Source: dequantize_row_q2_0 of ggml.
    """

    def __init__(self, group_size: int = 64) -> None:
        self.block_size = group_size
        self.storage = np.dtype([("d", "<f2"), ("qs", "u1", (group_size // 4,))])
        if group_size == 64:
            self.name, self.ggml_type, self.file_type = "q2_0", 42, 41
        else:
            self.name, self.ggml_type_elsewhere = f"q2_0-{group_size}", 42

    made_by = "those who train such models do, and GGUF files of it are read"

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        return Kernels("q2_0", Coding.INTEGERS, Scaling.HALF, self.block_size)

    def codes(self, blocks: Any, xp: Any) -> Any:
        return (blocks[:, 2:, None] >> xp.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(len(blocks), -1)


register(Q2_0())
register(Q2_0(128))
