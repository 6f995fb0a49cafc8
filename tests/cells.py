"""A committed record of `cuquant bench`, and cells made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cuquant.bench import AttentionCell, Cell

RECORD = Path(__file__).parents[1] / "examples" / "benchmarks" / "h200-matmul.json"
KEYS = ["op", "format", "activation", "M", "N", "K", "us", "floor_us", "cublas_us", "gbps", "tflops"]
KEYS += ["nmse", "core", "mhz"]


def cell(**changes: Any) -> Cell:
    facts: dict[str, Any] = {"op": "matmul", "format": "q4_0", "activation": "f16", "M": 1, "N": 64, "K": 128}
    facts |= {"us": 4.0, "floor_us": 2.0, "cublas_us": 6.0, "gbps": 1.0, "tflops": 1.0}
    return Cell(**(facts | {"nmse": 1e-8, "core": "decode"} | changes))


def attention_cell(**changes: Any) -> AttentionCell:
    facts: dict[str, Any] = {"op": "attention", "bits": "4", "batch": 1, "heads": 32, "kv_heads": 8}
    facts |= {"context": 1024, "us": 10.0, "floor_us": 8.0, "sdpa_us": 30.0, "gbps": 1.0, "nmse": 1e-8}
    return AttentionCell(**(facts | changes))
