"""q4_0: 4-bit codes around zero, one scale per 32 weights (ggml type 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import by_importance, ggml
from .by_importance import ByImportance
from .kernels import Coding, Encoder, Kernels, Scaling


class Q4_0(ByImportance):
    """32 weights in 18 bytes: float16 d, then 16 bytes of nibbles; W = d * (q - 8).

    d = peak / -8, where peak is the weight of the largest magnitude with its sign: it gets code 0 exactly.
    By an importance d is searched for. Source: quantize_row_q4_0_ref and quantize_row_q4_0_impl of ggml.
    """

    name = "q4_0"
    bits = 4
    storage = np.dtype([("d", "<f2"), ("qs", "u1", (16,))])
    formula = "W = d * (q - 8)"
    kernels = Kernels(
        "q4_0", Coding.INTEGERS, Scaling.HALF, encoder=Encoder(), by_importance=by_importance.SEARCH
    )
    ggml_type = 2
    file_type = 2

    def encode(self, x: NDArray[np.float32], w: NDArray[np.float32] | None = None) -> NDArray[Any]:
        if w is None:
            d = ggml.signed_absmax(x) / np.float32(-8)
            q = np.minimum((x * ggml.inverse(d) + np.float32(8.5)).astype(np.uint8), 15)
        else:
            d, q = by_importance.around_zero(x, w, 8)
        return ggml.records_of(self.storage, d=d, qs=ggml.pack_nibbles(q))

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        q = ggml.unpack_nibbles(records["qs"]).astype(np.float32) - np.float32(8)
        return q * ggml.scale_of(records)
