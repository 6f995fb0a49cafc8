"""Mixtures of experts over formats, activations and tokens, next to dense cuBLAS float16 and the floor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from .. import device, plan, testing
from ..cuda import jit
from ..ops.moe import Experts, moe as mixture_of, route
from ..ops.quantize import quantize
from ..testing import CANARY, as_numpy, nmse
from .matmul import X_DTYPES, some_columns
from .operands import random_stack
from .record import Floor, Record, rounded
from .timing import graph_us, rotation, stream_us, warm_up

SHAPES = ((14336, 4096),)
BATCHES = (1, 2, 4, 8, 16, 64, 512, 4096)
CHECKED_TOKENS = 64
BOUNDS = {"bf16": 5e-5}
"""Largest NMSE of a result, by the activations; 1e-5 for all others. With q8_1 what `down` multiplies is
rounded, too: 1e-3."""
_OTHERS, _ROUNDED = 1e-5, 1e-3


@dataclass(frozen=True)
class MoeCell:
    """One measurement of M tokens; times in microseconds.

    Gates and ups are N x K, downs K x N. `hit` is how many experts the tokens lead to, on average over the
    routings gone through: the floor counts their bytes. cuBLAS multiplies each one's tokens by dense weights.
    `mhz` is the GPU's mean clock meanwhile.
    """

    op: str
    format: str
    activation: str
    experts: int
    top_k: int
    M: int
    N: int
    K: int
    us: float
    floor_us: float | None
    cublas_us: float | None
    gbps: float
    tflops: float
    hit: float
    nmse: float
    core: str
    mhz: float | None = None

    def __str__(self) -> str:
        return f"{self.format} {self.activation} {self.M} tokens, {self.top_k} of {self.experts} experts"


def moe(
    record: Record,
    names: Iterable[str],
    activations: Iterable[str] = ("f16",),
    shapes: Iterable[tuple[int, int]] = SHAPES,
    batches: Iterable[int] = BATCHES,
    experts: int = 8,
    top_k: int = 2,
) -> Iterator[MoeCell]:
    """Measure what the record lacks, cell by cell, adding each to it; every result is checked in float64.

    Logits are random, so that experts are about equally liked; choosing them is not counted, quantizing x to
    q8_1 is. RuntimeError where a result is wrong: nothing is recorded then.
    """
    names, activations, batches = list(names), list(activations), list(batches)
    warm_up()
    for n, k in shapes:
        shared = {"op": "moe", "experts": experts, "top_k": top_k, "N": n, "K": k}
        keys: list[dict[str, Any]] = [
            {"format": f, "activation": a, "M": m, **shared}
            for f, a, m in product(names, activations, batches)
        ]
        missing = [key for key in keys if key not in record]
        routings = {m: _routings(m, experts, top_k, n * k) for m in {key["M"] for key in missing}}
        dense = {m: _cublas_us(own[0], n, k) for m, own in routings.items()}
        for name in names:
            todo = [key for key in missing if key["format"] == name]
            stacks = random_experts(name, experts, n, k) if todo else None
            for key in todo:
                cell = _cell(key, stacks, routings[key["M"]], dense[key["M"]], record.floor_us)
                record.add(cell)
                yield cell


Routing = tuple[Any, Any]


def _routings(tokens: int, experts: int, top_k: int, size: int) -> list[Routing]:
    """Ids and probabilities of as many calls as read more than the L2 cache holds, of 4-bit weights."""
    cupy = device.cupy()
    calls = rotation(min(experts, tokens * top_k) * size)
    generator = np.random.default_rng(tokens)
    logits = generator.standard_normal((calls, tokens, experts), np.float32)
    return [route(cupy.asarray(one), top_k) for one in logits]


def random_experts(name: str, count: int, n: int, k: int) -> Experts:
    """Stacks of which every expert has the same rows in another order, prepared."""
    return Experts(*(random_stack(name, count, *shape) for shape in ((n, k), (n, k), (k, n))))


def _cell(
    key: dict[str, Any],
    experts: Any,
    routings: list[Routing],
    cublas_us: float | None,
    floor_us: Floor,
) -> MoeCell:
    cupy = device.cupy()
    m, n, k, top_k = key["M"], key["N"], key["K"], key["top_k"]
    dtype = X_DTYPES[key["activation"]]
    x = cupy.random.standard_normal((m, k), dtype=np.float32).astype(dtype)
    out = cupy.empty((m, k), dtype)

    def call(routing: Routing) -> Any:
        given = quantize(x, "q8_1") if key["activation"] == "q8_1" else x
        return mixture_of(given, experts, *routing, out=out)

    error = mixture_error(call, x, experts, routings[0], out, key["activation"])
    us, mhz = graph_us([lambda own=own: call(own) for own in routings])  # type: ignore[misc]
    hit = float(np.mean([len(np.unique(as_numpy(ids))) for ids, _ in routings]))
    moved = hit / key["experts"] * sum(w.nbytes for w in experts) + x.nbytes + out.nbytes
    operations = 2 * m * top_k * 3 * n * k
    rates = (moved / us * 1e-3, operations / us * 1e-6)
    load = plan.moe.Load(m, top_k, key["experts"])
    own = experts.down.fragments().weight
    made = plan.moe.product(own.format, load, k, n, jit.gpu(), own.half)
    assert made is not None
    values = (us, mhz, floor_us(moved, operations), cublas_us, *rates, hit)
    names = ("us", "mhz", "floor_us", "cublas_us", "gbps", "tflops", "hit")
    measured = dict(zip(names, map(rounded, values), strict=True))
    return MoeCell(**key, **measured, nmse=error, core=plan.core_of(made.gemm.plan.kernel))


def mixture_error(call: Any, x: Any, experts: Any, routing: Routing, out: Any, activation: str) -> float:
    """NMSE over random columns and some tokens, in float64; RuntimeError where it is no correct mixture."""
    cupy = device.cupy()
    out.view(np.uint8).fill(CANARY)
    call(routing)
    generator = np.random.default_rng(0)
    tokens = np.sort(generator.choice(len(out), min(CHECKED_TOKENS, len(out)), replace=False))
    columns = some_columns(experts.down.format, out.shape[1])
    ids, probs = (a[tokens] for a in routing)
    operand = quantize(x, "q8_1") if activation == "q8_1" else x
    rows = cupy.asarray(as_numpy(operand)[tokens].astype(np.float64))
    expected = cupy.zeros((len(tokens), len(columns)))
    for e in np.unique(as_numpy(ids)):
        token, slot = cupy.nonzero(ids == e)
        gate, up, down = (stack[int(e)] for stack in experts)
        hidden = rows[token] @ gate.dequantize().astype(np.float64).T
        hidden = hidden / (1 + cupy.exp(-hidden)) * (rows[token] @ up.dequantize().astype(np.float64).T)
        result = hidden @ down[columns].dequantize().astype(np.float64).T
        cupy.add.at(expected, token, result * probs[token, slot].astype(np.float64)[:, None])
    error = nmse(as_numpy(out)[np.ix_(tokens, columns)], testing.as_numpy(expected))
    if not error <= (_ROUNDED if activation == "q8_1" else BOUNDS.get(activation, _OTHERS)):
        raise RuntimeError(f"wrong result: NMSE {error} for {experts.gate.format}, x {x.shape} {activation}")
    return float(f"{error:.3g}")


def _cublas_us(routing: Routing, n: int, k: int) -> float | None:
    """Each expert's tokens by dense float16 gate, up and down."""
    cupy = device.cupy()
    counts = [int(count) for count in np.unique(as_numpy(routing[0]), return_counts=True)[1]]
    made = []
    for count in counts:
        shapes = ((count, k), (n, k), (n, k), (k, n), (count, n), (count, k))
        made.append([cupy.random.standard_normal(s, dtype=np.float32).astype(np.float16) for s in shapes])

    def call() -> None:
        for x, gate, up, down, hidden, y in made:
            cupy.matmul(x, gate.T, out=hidden)
            cupy.matmul(x, up.T, out=hidden)
            cupy.matmul(hidden, down.T, out=y)

    return stream_us([call])
