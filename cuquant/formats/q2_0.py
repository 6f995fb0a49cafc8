"""q2_0: codes of 2 bits around zero with one scale (ggml type 42), of ternary models; only read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml
from .base import ReadOnly, register

_PLACES = np.arange(0, 8, 2, dtype=np.uint8)
"""Bits of a byte from which on its codes are."""


class Q2_0(ReadOnly):
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

    bits = 2
    formula = "W = d * (q - 1)"
    header = "q2_0"
    made_by = "those who train such models do, and GGUF files of it are read"
    kernel_scale_bytes = 0
    kernel_group_bytes = 2

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        codes = (records["qs"][..., None] >> _PLACES & 3).reshape(len(records), -1)
        return (codes.astype(np.float32) - np.float32(1)) * ggml.scale_of(records)


register(Q2_0())
register(Q2_0(128))
