"""q5_1: 5-bit codes above a minimum, one scale and one minimum per 32 weights (ggml type 7)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import by_importance, ggml
from .by_importance import ByImportance
from .kernels import Coding, Encoder, Kernels, Scaling


class Q5_1(ByImportance):
    """32 weights in 24 bytes: float16 d, float16 m, 4 bytes of fifth bits, 16 of nibbles; W = d * q + m.

    d = (max - min) / 31 and m = min; by an importance d, and m of 0 at most, are searched for. Source:
    quantize_row_q5_1_ref and quantize_row_q5_1_impl of ggml.
    """

    name = "q5_1"
    bits = 5
    storage = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])
    scales = ("d", "m")
    formula = "W = d * q + m"
    kernels = Kernels(
        "q5_1", Coding.INTEGERS, Scaling.HALF_AND_MIN, encoder=Encoder(), by_importance=by_importance.SEARCH
    )
    ggml_type = 7
    file_type = 9

    def encode(self, x: NDArray[np.float32], w: NDArray[np.float32] | None = None) -> NDArray[Any]:
        if w is None:
            low, high = ggml.extremes(x)
            d = (high - low) / np.float32(31)
            q = ((x - low) * ggml.inverse(d) + ggml.HALF).astype(np.uint8)
        else:
            d, low, q = by_importance.above_minimum(x, w, 31)
        return ggml.records_of(
            self.storage,
            d=d,
            m=low,
            qh=ggml.pack_fifth_bits(q),
            qs=ggml.pack_nibbles(q),
        )

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        q = ggml.unpack_nibbles(records["qs"]) | ggml.unpack_fifth_bits(records["qh"])
        return q.astype(np.float32) * ggml.scale_of(records) + ggml.scale_of(records, "m")
