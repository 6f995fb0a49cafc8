"""q5_0: 5-bit codes around zero, one scale per 32 weights (ggml type 6)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import by_importance, ggml
from .by_importance import ByImportance
from .kernels import Coding, Encoder, Kernels, Scaling


class Q5_0(ByImportance):
    """32 weights in 22 bytes: float16 d, 4 bytes of fifth bits, 16 bytes of nibbles; W = d * (q - 16).

    d = peak / -16, where peak is the weight of the largest magnitude with its sign: it gets code 0 exactly.
    By an importance d is searched for. Source: quantize_row_q5_0_ref and quantize_row_q5_0_impl of ggml.
    """

    name = "q5_0"
    bits = 5
    storage = np.dtype([("d", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))])
    formula = "W = d * (q - 16)"
    kernels = Kernels(
        "q5_0", Coding.INTEGERS, Scaling.HALF, encoder=Encoder(), by_importance=by_importance.SEARCH
    )
    ggml_type = 6
    file_type = 8

    def encode(self, x: NDArray[np.float32], w: NDArray[np.float32] | None = None) -> NDArray[Any]:
        if w is None:
            d = ggml.signed_absmax(x) / np.float32(-16)
            q = np.minimum((x * ggml.inverse(d) + np.float32(16.5)).astype(np.uint8), 31)
        else:
            d, q = by_importance.around_zero(x, w, 16)
        return ggml.records_of(self.storage, d=d, qh=ggml.pack_fifth_bits(q), qs=ggml.pack_nibbles(q))

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        q = ggml.unpack_nibbles(records["qs"]) | ggml.unpack_fifth_bits(records["qh"])
        return (q.astype(np.float32) - np.float32(16)) * ggml.scale_of(records)
