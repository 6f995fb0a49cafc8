"""What weights take apart from products: quantizing, dequantizing, preparing them, the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from .. import cpu, device, formats
from ..array import QuantizedArray
from ..cuda import backend as cuda, trellis as cuda_trellis
from ..cuda.fragments import fill, from_fragments, nothing_found
from ..formats.kernels import kernels_of
from ..formats.trellis import Trellis
from ..ops.quantize import quantize
from .operands import random_weight
from .record import Floor, Record, rounded
from .timing import call_us, graph_us, warm_up

SHAPES = ((32768, 8192),)
"""2^28 numbers: many times what an L2 cache holds."""
CHECKED_ROWS = 128
KERNELS = ("encode", "repack")
"""Work that is measured in a replayed graph."""


@dataclass(frozen=True)
class WeightCell:
    """One measurement of a weight of N x K, in microseconds.

    `work` is "quantize" (of float16), "dequantize" (to float16), "prepare" (storage bytes to the fragment
    layout), "restore" (back to them), all as their caller sees them once the stream comes to them, waiting
    for the GPU included; or "encode" and "repack", the kernels of quantize and prepare alone, which do wait.
    The floor counts what must be read and written once.
    """

    op: str
    work: str
    format: str
    N: int
    K: int
    us: float
    floor_us: float | None
    gbps: float

    def __str__(self) -> str:
        return f"{self.work} {self.format} {self.N}x{self.K}"


def weights(
    record: Record,
    names: Iterable[str],
    shapes: Iterable[tuple[int, int]] = SHAPES,
) -> Iterator[WeightCell]:
    """Measure what the record lacks, cell by cell, adding each to it.

    Bytes and numbers are compared with NumPy's, or with those that were prepared. Formats that search
    (trellis), and those without a kernel that quantizes, are not timed quantizing.
    RuntimeError where a result is wrong: nothing is recorded then.
    """
    warm_up()
    for (n, k), name in product(shapes, names):
        fmt = formats.get(name)
        shared = {"op": "weights", "format": name, "N": n, "K": k}
        todo = [key for work in works(fmt) if (key := {"work": work, **shared}) not in record]
        if not todo:
            continue
        given = _Given(fmt, n, k)
        for key in todo:
            cell = _cell(key, given, record.floor_us)
            record.add(cell)
            yield cell


def works(fmt: formats.Format) -> tuple[str, ...]:
    """What is measured of a format; no kernel alone repacks walks, or grids."""
    encoding = ("quantize", "encode") if _quantizes(fmt) else ()
    repacking = () if fmt.read_only else ("repack",)
    return (*encoding, "dequantize", "prepare", *repacking, "restore")


def _quantizes(fmt: formats.Format) -> bool:
    """Whether quantizing is a pass over the numbers, on the GPU."""
    return fmt.encodes_on_gpu and not fmt.whole_matrices


class _Given:
    """What is worked on: a weight, the float16 numbers that it was made of, if it was, and the same weight,
    prepared."""

    def __init__(self, fmt: formats.Format, n: int, k: int) -> None:
        if _quantizes(fmt):
            random = device.cupy().random.default_rng(0)
            dense = random.standard_normal((n, k), dtype=np.float32) * np.float32(0.02)
            self.dense = dense.astype(np.float16)
            self.weight = quantize(self.dense, fmt)
        else:
            self.weight = random_weight(fmt.name, n, k)
        self.prepared = self.prepare()

    def prepare(self) -> QuantizedArray:
        w = self.weight  # stays as it is
        return QuantizedArray._made(w.format, w.blocks, shape=w.shape).prepare()

    def restore(self) -> Any:
        return from_fragments(self.prepared.fragments())

    def quantize(self) -> QuantizedArray:
        return quantize(self.dense, self.weight.format)

    def encode(self) -> QuantizedArray:
        made, fmt = self._encoded, self.weight.format
        cuda.encode(self.dense, fmt, made.blocks, self._found)
        return made

    def repack(self) -> Any:
        w, made = self.weight, self.prepared
        if isinstance(w.format, Trellis):
            cuda_trellis.fill(made.fragments(), w.blocks)
        else:
            fill(made.fragments(), kernels_of(w.format).to_kept(w.blocks, device.cupy()), self._found)
        return made

    @cached_property
    def _encoded(self) -> QuantizedArray:
        return QuantizedArray._made(self.weight.format, device.cupy().empty_like(self.weight.blocks))

    @cached_property
    def _found(self) -> Any:
        """What kernels may leave words in that nobody reads."""
        return nothing_found()

    def dequantize(self) -> Any:
        return self.weight.dequantize(np.float16)


def _cell(key: dict[str, Any], given: _Given, floor_us: Floor) -> WeightCell:
    run: Callable[[], Any] = getattr(given, key["work"])
    _CHECKS[key["work"]](key, given, run())
    us = graph_us([run]).us if key["work"] in KERNELS else call_us(run)
    numbers = key["N"] * key["K"] * 2
    repacked = key["work"] in ("prepare", "repack", "restore")
    moved = given.weight.nbytes + (given.prepared.storage.nbytes if repacked else numbers)
    floor = rounded(floor_us(moved))
    return WeightCell(**key, us=rounded(us), floor_us=floor, gbps=rounded(moved / us * 1e-3))


def _require(same: bool, key: dict[str, Any]) -> None:
    if not same:
        raise RuntimeError(f"wrong result: {key['work']} of {key['format']}, {key['N']}x{key['K']}")


def _check_quantized(key: dict[str, Any], given: _Given, made: QuantizedArray) -> None:
    cupy = device.cupy()
    rows = cupy.asnumpy(given.dense[:CHECKED_ROWS])
    expected, _ = cpu.quantize(rows, made.format)
    _require(np.array_equal(cupy.asnumpy(made.blocks[:CHECKED_ROWS]), expected), key)


def _check_dequantized(key: dict[str, Any], given: _Given, made: Any) -> None:
    cupy = device.cupy()
    expected = given.weight[:CHECKED_ROWS].to_device("cpu").dequantize(np.float16)
    _require(np.array_equal(cupy.asnumpy(made[:CHECKED_ROWS]), expected), key)


def _check_prepared(key: dict[str, Any], given: _Given, made: QuantizedArray) -> None:
    _require(bool((made.blocks == given.weight.blocks).all()), key)


def _check_restored(key: dict[str, Any], given: _Given, made: Any) -> None:
    _require(bool((made == given.weight.blocks).all()), key)


_CHECKS: dict[str, Callable[[dict[str, Any], _Given, Any], None]] = {
    "quantize": _check_quantized,
    "encode": _check_quantized,
    "dequantize": _check_dequantized,
    "prepare": _check_prepared,
    "repack": _check_prepared,
    "restore": _check_restored,
}
