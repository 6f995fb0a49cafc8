"""q8_0: signed 8-bit codes, one scale per 32 weights (ggml type 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml
from .base import Format
from .kernels import Coding, Encoder, Kernels, Scaling


class Q8_0(Format):
    """32 weights in 34 bytes: float16 d, then 32 signed bytes; W = d * q with d = absmax / 127."""

    name = "q8_0"
    bits = 8
    storage = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])
    formula = "W = d * q"
    kernels = Kernels("q8_0", Coding.INTEGERS, Scaling.HALF, encoder=Encoder())
    ggml_type = 8
    file_type = 7

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        d, q = ggml.absmax_codes(x)
        return ggml.records_of(self.storage, d=d, qs=q)

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        return records["qs"].astype(np.float32) * ggml.scale_of(records)
