"""x @ W.T over formats, activations, shapes and batch sizes, next to dense cuBLAS float16 and the floor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from .. import check, device, formats, plan
from ..array import QuantizedArray
from ..cuda import jit, problem
from ..formats.kernels import kernels_of
from ..ops.matmul import matmul as product_of
from ..ops.quantize import quantize
from ..testing import BOUNDS, CANARY, nmse
from . import peers
from .operands import random_weights
from .record import Floor, Record, rounded
from .timing import graph_us, rotation, stream_us, warm_up

CHECKED_COLUMNS = 64
X_DTYPES = dict(zip(("f16", "bf16", "f32", "q8_1"), (*check.FLOATS, check.FLOAT16), strict=True))
"""What x is before the product; quantizing it to q8_1 is part of what is measured."""
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Cell:
    """One measurement; times in microseconds.

    `mhz` is the GPU's mean clock meanwhile. Times of peers are there where they are installed and take the
    shape, for formats of 4 bits and 16-bit x; older records lack the floor of some GPUs.
    """

    op: str
    format: str
    activation: str
    M: int
    N: int
    K: int
    us: float
    floor_us: float | None
    cublas_us: float | None
    gbps: float
    tflops: float
    nmse: float
    core: str
    mhz: float | None = None
    tinygemm_us: float | None = None
    gemlite_us: float | None = None

    def __str__(self) -> str:
        return f"{self.format} {self.activation} {self.M}x{self.N}x{self.K}"


def matmul(
    record: Record,
    names: Iterable[str],
    activations: Iterable[str] = ("f16", "q8_1"),
    shapes: Iterable[tuple[int, int]] = SHAPES,
    batches: Iterable[int] = BATCHES,
    others: Iterable[peers.Peer] = (),
) -> Iterator[Cell]:
    """Measure what the record lacks, cell by cell, adding each to it; every result is checked in float64.

    A q8_1 cell starts from float16 x, so that quantizing it is counted. cuBLAS multiplies by a dense float16
    weight of the same shape, `others` by an int4 weight of it, next to formats of 4 bits. RuntimeError where
    a result is wrong: nothing is recorded then.
    """
    names, activations, batches, others = list(names), list(activations), list(batches), list(others)
    by_shape: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for (n, k), f, a, m in product(dict.fromkeys(shapes), names, activations, batches):
        key: dict[str, Any] = {"op": "matmul", "format": f, "activation": a, "M": m, "N": n, "K": k}
        if key not in record:
            by_shape.setdefault((n, k), []).append(key)
    _compile(key for missing in by_shape.values() for key in missing)
    warm_up()
    for (n, k), missing in by_shape.items():
        dense = {m: _cublas_us(m, n, k) for m in _batches(missing)}
        compared = _batches([key for key in missing if _has_peers(key)])
        times = {peer.key: peers.measure(peer, n, k, compared) for peer in others if compared}
        for name in names:
            todo = [key for key in missing if key["format"] == name]
            weights = random_weights(name, n, k) if todo else []
            for key in todo:
                cell = _cell(key, weights, dense[key["M"]], record.floor_us)
                if _has_peers(key):
                    found = {name: rounded(by_batch.get(key["M"])) for name, by_batch in times.items()}
                    cell = replace(cell, **found)
                record.add(cell)
                yield cell


def _compile(keys: Iterable[dict[str, Any]]) -> None:
    """The products' kernels, all at once, on all processors."""
    for _ in jit.compile_ahead({_gemm(formats.get(key["format"]), key).plan.kernel for key in keys}):
        pass


def _gemm(fmt: formats.Format, key: dict[str, Any]) -> Any:
    how = {"to_convert": key["activation"] == "q8_1"}
    how["signs"] = (
        kernels_of(fmt).signed_columns and key["activation"] == "f16"
    )  # of random weights some are -1
    k = problem.whole_pieces(key["K"])
    return plan.gemm(plan.Problem(fmt.for_kernels, key["M"], key["N"], k, jit.gpu()), **how)


def _batches(keys: list[dict[str, Any]]) -> list[int]:
    return sorted({key["M"] for key in keys})


def _has_peers(key: dict[str, Any]) -> bool:
    """Whether a cell is comparable with the peers' int4 weights and 16-bit x."""
    return formats.get(key["format"]).bits == peers.BITS and key["activation"] != "f32"


def _cell(
    key: dict[str, Any], weights: list[QuantizedArray], cublas_us: float | None, floor_us: Floor
) -> Cell:
    cupy = device.cupy()
    m, n, k = key["M"], key["N"], key["K"]
    dtype = X_DTYPES[key["activation"]]
    x = cupy.random.standard_normal((m, k), dtype=np.float32).astype(dtype)
    out = cupy.empty((m, n), dtype)

    x_format = "q8_1" if key["activation"] == "q8_1" else None

    def call(w: QuantizedArray) -> Any:
        return product_of(x, w.T, out=out, x_format=x_format)

    error = sample_error(call, x, weights[-1], out, key["activation"])
    us, mhz = graph_us([lambda w=w: call(w) for w in weights])  # type: ignore[misc]
    moved, operations = weights[0].nbytes + x.nbytes + out.nbytes, 2 * m * n * k
    core = plan.core_of(_gemm(weights[0].format, key).plan.kernel)
    rates = (moved / us * 1e-3, operations / us * 1e-6)
    values = (us, mhz, floor_us(moved, operations), cublas_us, *rates)
    return Cell(**key, **dict(zip(_RATES, (rounded(v) for v in values), strict=True)), nmse=error, core=core)


_RATES = ("us", "mhz", "floor_us", "cublas_us", "gbps", "tflops")


def sample_error(call: Any, x: Any, w: QuantizedArray, out: Any, activation: str) -> float:
    """NMSE over random columns and all rows, in float64; RuntimeError where it is no correct product."""
    out.view(np.uint8).fill(CANARY)
    call(w)
    columns = some_columns(w.format, w.shape[0])
    operand = quantize(x, "q8_1").dequantize(np.float32) if activation == "q8_1" else x
    weight = w[columns].to_device("cpu").dequantize().astype(np.float64)  # what NumPy makes of its blocks
    reference = operand.astype(np.float64) @ device.cupy().asarray(weight).T
    error = nmse(out[:, columns], reference)
    if not error <= BOUNDS[out.dtype][0]:
        raise RuntimeError(f"wrong result: NMSE {error} for {w.format} {w.shape}, x {x.shape} {activation}")
    return float(f"{error:.3g}")


def some_columns(fmt: formats.Format, n: int) -> Any:
    """Numbers of random rows of W, of which there are n, or of a run where single ones cannot be had."""
    rng = np.random.default_rng(0)
    if (run := fmt.rows_together) > 1:
        return rng.integers(n // run) * run + np.arange(run)
    return np.sort(rng.choice(n, min(CHECKED_COLUMNS, n), replace=False))


def _cublas_us(m: int, n: int, k: int) -> float | None:
    cupy = device.cupy()
    x, out = (
        cupy.random.standard_normal((m, k), dtype=np.float32).astype(np.float16),
        cupy.empty((m, n), np.float16),
    )
    weights = [
        cupy.random.standard_normal((n, k), dtype=np.float32).astype(np.float16)
        for _ in range(rotation(2 * n * k))
    ]
    return stream_us([lambda w=w: cupy.matmul(x, w.T, out=out) for w in weights])  # type: ignore[misc]
