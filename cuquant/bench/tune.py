"""The fastest launch of a product on this GPU, by trying all that may be."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from .. import device, formats, plan
from ..cuda import backend as cuda, jit
from ..cuda.problem import whole_pieces
from ..io.atomic import rewrite
from ..ops.matmul import Product
from ..plan import tuning
from .matmul import SHAPES, sample_error
from .operands import random_weights
from .record import Record, rounded
from .timing import graph_us, warm_up

__all__ = ["BATCHES", "SHAPES", "TunedCell", "problems", "tune"]

BATCHES = (1, 2, 4, 8, 16)
_WORTH = 0.98
"""Part of the usual launch's time that another's must be below to be kept: times differ that much by
themselves."""


@dataclass(frozen=True)
class TunedCell:
    """What tuning a product has found; times in microseconds.

    `usual_us` is what the launch takes that goes by an H200's measurements; `us` the one, of those `tried`,
    that is used now: the fastest, or the usual one if that is as fast to 2%. `tile` are the constants in
    which it differs from the usual one.
    """

    op: str
    format: str
    M: int
    N: int
    K: int
    us: float
    usual_us: float
    tried: int
    core: str
    tile: str
    nmse: float

    def __str__(self) -> str:
        return f"{self.format} {self.M}x{self.N}x{self.K} ({self.usual_us} before)"


def problems(
    names: Iterable[str], shapes: Iterable[tuple[int, int]] = SHAPES, batches: Iterable[int] = BATCHES
) -> list[dict[str, Any]]:
    """What there is to tune, each once. More than 16 batch rows stand for all that have the same next power
    of two, at which they are measured."""
    rows = dict.fromkeys(map(tuning.rows_of, batches))
    return [
        {"op": "tune", "format": name, "M": m, "N": n, "K": k}
        for (n, k), name, m in product(dict.fromkeys(shapes), dict.fromkeys(names), rows)
    ]


def tune(record: Record, keys: Iterable[dict[str, Any]]) -> Iterator[TunedCell]:
    """Find the fastest launches of those `problems` that the record lacks, or that are not kept any more, and
    keep them for this GPU.

    Products are of single weights and float16 x; with bfloat16 and float32, and x quantized beforehand, they
    are launched likewise.

    Of each product every candidate's result is checked in float64 before it is timed: RuntimeError where one
    is wrong. What is found is in `device.tuned_file()` after each product (PermissionError at once where that
    cannot be written, ValueError where a later version wrote it), and plans of this process go by it, too,
    but for calls that it has made before.
    """
    folder = device.tuned_file().parent
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written: what is tuned could not be kept")
    _held()
    warm_up()
    weights: tuple[Any, ...] = (None, [])
    for key in keys:
        if key in record and not _is_lost(record, key):
            continue
        record.forget(key)
        which = key["format"], key["N"], key["K"]
        if weights[0] != which:
            weights = (None, [])  # those before are freed first
            weights = (which, random_weights(*which))
        cell = _tuned(key, weights[1])
        record.add(cell)
        yield cell


def _is_lost(record: Record, key: dict[str, Any]) -> bool:
    """Whether a launch that the record tells of is not among those that are kept: their file was removed, or
    plans do not have it any more."""
    held = record.only(**{name: [value] for name, value in key.items()}).cells
    gpu = jit.gpu()
    kept = (gpu.tuned or tuning.Tuned()).choice(_problem(key, gpu))
    return any(cell["tile"] for cell in held) and kept is None


def _problem(key: dict[str, Any], gpu: plan.Gpu) -> plan.Problem:
    """The problem as products ask for it: with whole pieces of K."""
    fmt = formats.get(key["format"]).for_kernels
    return plan.Problem(fmt, key["M"], key["N"], whole_pieces(key["K"]), gpu)


def _tuned(key: dict[str, Any], weights: list[Any]) -> TunedCell:
    """Try all candidates, and keep the fastest if it is worth it; a former choice is forgotten otherwise."""
    gpu = jit.gpu()._replace(tuned=None)
    problem = _problem(key, gpu)
    usual = plan.gemm(problem)
    found = tuning.candidates(usual, problem)
    signs = problem.kernels.signed_columns  # random weights have some
    own = (plan.signed(gemm) if signs else gemm for gemm in found)
    for _ in jit.compile_ahead({gemm.plan.kernel for gemm in own}):
        pass
    x = device.cupy().random.standard_normal((key["M"], key["K"]), dtype=np.float32).astype(np.float16)
    out = device.cupy().empty((key["M"], key["N"]), np.float16)
    kind = tuning.ProblemKind.of(problem)
    times, errors = [], []
    for gemm in found:
        tuned = None if gemm is usual else tuning.Tuned().with_one(kind, gemm)
        with jit.planned_for(gpu._replace(tuned=tuned)):

            def call(w: Any) -> None:
                cuda.product(Product(x, w, None, None, None), out)

            errors.append(sample_error(call, x, weights[-1], out, "f16"))
            times.append(graph_us([lambda w=w, call=call: call(w) for w in weights]).us)  # type: ignore[misc]
    best = int(np.argmin(times))
    if times[best] > _WORTH * times[0]:
        best = 0
    _keep(kind, None if best == 0 else found[best])
    chosen, before = (dict(gemm.plan.kernel.constants) for gemm in (found[best], usual))
    tile = ", ".join(f"{name.lower()} {value}" for name, value in chosen.items() if before.get(name) != value)
    core = plan.core_of(found[best].plan.kernel)
    us, usual_us = rounded(times[best]), rounded(times[0])
    return TunedCell(
        **key, us=us, usual_us=usual_us, tried=len(found), core=core, tile=tile, nmse=errors[best]
    )


def _held() -> tuning.Tuned:
    """What this GPU's file has; nothing of one that is damaged, ValueError where it is a later version's."""
    file = device.tuned_file()
    try:
        return tuning.Tuned.read(file)
    except tuning.NewerVersion as error:
        raise ValueError(f"{file}: {error}, and it is not replaced: remove it, or tune with that") from None
    except ValueError:
        return tuning.Tuned()


def _keep(kind: tuning.ProblemKind, gemm: plan.Gemm | None) -> None:
    """Write the file of this GPU anew, with this choice for a kind; one that is damaged is replaced."""

    def changed() -> str | None:
        tuned = _held()  # read again: another GPU of this name may be tuned at the same time
        return tuned.with_one(kind, gemm).to_json() if gemm is not None or kind in tuned else None

    rewrite(device.tuned_file(), changed)
    jit.read_tuned()
