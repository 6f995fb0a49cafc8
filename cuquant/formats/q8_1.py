"""q8_1: signed 8-bit activations with their block sum, for integer products (ggml type 9)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ggml
from .base import Format
from .kernels import Coding, Encoder, Kernels, Scaling


class Q8_1(Format):
    """32 activations in 36 bytes: float16 d, float16 s, then 32 signed bytes; X = d * q, s = d * sum(q).

    s is written for programs that read the format and is never read here: it may be rounded, foreign or
    infinite (d * sum(q) reaches 32 times the block's peak). Values are not checked, since activations are
    quantized in the hot path: a block with NaN or infinity, or with a peak above 127 * 65504, reads back as
    NaN or infinity; a scale below float16's range (peaks under about 4e-6) reads back as zero.
    """

    name = "q8_1"
    bits = 8
    storage = np.dtype([("d", "<f2"), ("s", "<f2"), ("qs", "i1", (32,))])
    scales = ("d", "s")
    formula = "X = d * q"
    kernels = Kernels("q8_1", Coding.INTEGERS, Scaling.HALF, encoder=Encoder())
    ggml_type = 9
    for_activations = True

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        d, q = ggml.absmax_codes(x)
        s = q.sum(axis=1, keepdims=True, dtype=np.int32).astype(np.float32) * d
        return ggml.records_of(self.storage, d=d, s=s, qs=q)

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        return records["qs"].astype(np.float32) * ggml.scale_of(records)
