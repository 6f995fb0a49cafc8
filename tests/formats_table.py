"""The table that drives the tests of formats: a new format is one row more."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cuquant as cq


class Row(NamedTuple):
    name: str
    block_bytes: int
    ggml_type: int
    sqnr_db: float  # signal to quantization noise of Gaussian weights, at least


WEIGHTS = [
    Row("q4_0", 18, 2, 20.5),
    Row("q4_1", 20, 3, 21.5),
    Row("q5_0", 22, 6, 26.5),
    Row("q5_1", 24, 7, 28.0),
    Row("q8_0", 34, 8, 42.0),
]
FP4 = [Row("mxfp4", 17, 39, 18.5), Row("nvfp4", 36, 40, 20.0)]
"""On the CPU tested in test_fp4.py."""
K_QUANTS = [
    Row("q2_k", 84, 10, 10.5),
    Row("q3_k", 110, 11, 16.2),
    Row("q4_k", 144, 12, 22.7),
    Row("q5_k", 176, 13, 28.6),
    Row("q6_k", 210, 14, 34.8),
    Row("iq4_nl", 18, 20, 22.2),
    Row("iq4_xs", 136, 23, 22.1),
]
"""Tested in test_kquants.py."""
CODEBOOKS = ["kbit2", "kbit3", "kbit4", "kbit5"]
"""On the CPU tested in test_kbit.py."""
INT4 = [f"int4-{group}{zeros}" for zeros in ("", "-zeros") for group in (32, 64, 128)]
"""On the CPU tested in test_int4.py."""
TRELLIS = [f"trellis{bits}{group}" for bits in (2, 3, 4) for group in ("", "-32")]
"""On the CPU tested in test_trellis.py."""
OWN: list[str] = []
"""Of no family of the above."""
ACTIVATIONS = [Row("q8_1", 36, 9, 42.0)]
NAMES = [row.name for row in WEIGHTS]
ON_GPU = [*NAMES, *CODEBOOKS, *(name for name in OWN if cq.formats.get(name).on_gpu)]
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def random_blocks(
    name: str | cq.Format, shape: tuple[int, ...], seed: int = 0, *, finite: bool = False
) -> np.ndarray[Any, Any]:
    """Random bytes (of tq1_0 those that ggml writes); with `finite`, float16 scales are kept between 2^-8
    and 2^-3 (and of both signs)."""
    fmt = cq.formats.get(name)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], fmt.row_bytes(shape[-1])), np.uint8)
    records = raw.view(fmt.storage)
    if fmt == "tq1_0":
        for field, least in (("qs", 1), ("qh", 3)):
            number = records[field] * np.uint16(243) >> 8
            records[field] = (number // least * least * np.uint32(256) + 242) // 243
    if finite:
        for field in (field for field in fmt.scales if fmt.storage[field] == np.float16):
            bits = np.ascontiguousarray(records[field]).view(np.uint16)
            records[field] = ((bits & 0x83FF) | (0x1C00 + (bits & 0x0C00))).view(np.float16)
        if fmt == "iq1_m":  # of d the first four bits are in front of the last word
            words = records["scales"]
            words[..., 3] = (words[..., 3] & 0x8FFF) | 0x2000
    return raw
