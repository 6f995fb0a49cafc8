"""q4_1: 4-bit codes above a minimum, one scale and one minimum per 32 weights (ggml type 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import by_importance, ggml
from .by_importance import ByImportance
from .kernels import Coding, Encoder, Kernels, Scaling


class Q4_1(ByImportance):
    """32 weights in 20 bytes: float16 d, float16 m, then 16 bytes of nibbles; W = d * q + m.

    d = (max - min) / 15 and m = min; by an importance d, and m of 0 at most, are searched for. Source:
    quantize_row_q4_1_ref and quantize_row_q4_1_impl of ggml.
    """

    name = "q4_1"
    bits = 4
    storage = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))])
    scales = ("d", "m")
    formula = "W = d * q + m"
    kernels = Kernels(
        "q4_1", Coding.INTEGERS, Scaling.HALF_AND_MIN, encoder=Encoder(), by_importance=by_importance.SEARCH
    )
    ggml_type = 3
    file_type = 3

    def encode(self, x: NDArray[np.float32], w: NDArray[np.float32] | None = None) -> NDArray[Any]:
        if w is None:
            low, high = ggml.extremes(x)
            d = (high - low) / np.float32(15)
            q = np.minimum(((x - low) * ggml.inverse(d) + ggml.HALF).astype(np.uint8), 15)
        else:
            d, low, q = by_importance.above_minimum(x, w, 15)
        return ggml.records_of(self.storage, d=d, m=low, qs=ggml.pack_nibbles(q))

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        q = ggml.unpack_nibbles(records["qs"]).astype(np.float32)
        return q * ggml.scale_of(records) + ggml.scale_of(records, "m")
