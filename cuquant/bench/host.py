"""What one call takes the host: in a loop over small products it, not the GPU, sets the pace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from .. import device
from ..kv import KVCache, attention
from ..ops.matmul import matmul as product_of
from ..ops.moe import moe as mixture_of, route
from ..testing import as_numpy
from .attention import HEAD_DIM, WIDTHS, random_cache, sampled_error, tokens_of
from .matmul import X_DTYPES, sample_error
from .moe import mixture_error, random_experts
from .operands import random_weights
from .record import Record, rounded
from .timing import REPEATS, host_us, warm_up

SHAPES = ((4096, 4096),)
EXPERTS, TOP_K, EXPERT = 8, 2, (768, 2048)
"""Experts of a mixture, experts of a token, and rows and columns of each gate: small, so that the GPU is done
first."""
CONTEXT, HEADS = 1024, (32, 8)
"""Tokens of a cache, and heads of queries and keys."""
CALLS = 500
"""Calls in a row in each timed run. A stream's queue takes about twice as many launches; of calls that start
more than two the GPU is done before the host comes to the next one."""


@dataclass(frozen=True)
class HostCell:
    """One measurement: microseconds from when the host begins a call to when it is back from it.

    `work` is a "matmul" x @ W.T of one row, W of N x K, into `out=`, or "matmul, new result" without; x of
    `activation`, where q8_1 counts quantizing; a "moe" of a token over EXPERTS with gates of N x K; "route",
    which chooses them; "append" of a token to a cache, and "attention" over it into `out=`, of `bits`. Next
    to them, as all of that depends on the processor: "CuPy kernel", an empty one that CuPy launches, and
    "CuPy empty", an array of 4096 numbers.
    """

    op: str
    work: str
    format: str | None
    activation: str | None
    bits: str | None
    N: int | None
    K: int | None
    us: float

    def __str__(self) -> str:
        return " ".join(str(part) for part in (self.work, self.format or self.bits, self.activation) if part)


def host(
    record: Record, names: Iterable[str], shapes: Iterable[tuple[int, int]] = SHAPES
) -> Iterator[HostCell]:
    """Measure what the record lacks, cell by cell, adding each to it; every result is checked.

    RuntimeError where a result is wrong: nothing is recorded then.
    """
    warm_up()
    for key, call_of in _works(list(names), list(shapes)):
        if key not in record:
            cell = HostCell(**key, us=rounded(host_us(call_of(), CALLS)))
            record.add(cell)
            yield cell


def count(names: list[str], shapes: list[tuple[int, int]]) -> int:
    """How many cells there are."""
    return len(_works(names, shapes))


def _works(
    names: list[str], shapes: list[tuple[int, int]]
) -> list[tuple[dict[str, Any], Callable[[], Callable[[], Any]]]]:
    """Keys of all cells, and what makes what is timed, once its result was checked."""
    found: list[tuple[dict[str, Any], Any]] = []

    def add(work: str, make: Callable[..., Any], *given: Any, **facts: Any) -> None:
        none = dict.fromkeys(("format", "activation", "bits", "N", "K"))
        found.append(({"op": "host", "work": work} | none | facts, lambda: make(*given)))

    add("CuPy kernel", _kernel)
    add("CuPy empty", _empty)
    for (n, k), name in product(shapes, names):
        for x in X_DTYPES:
            add("matmul", _product, name, n, k, x, True, format=name, activation=x, N=n, K=k)
        add("matmul, new result", _product, name, n, k, "f16", False, format=name, activation="f16", N=n, K=k)
    for name in names:
        n, k = EXPERT
        add("moe", _mixture, name, format=name, activation="f16", N=n, K=k)
    add("route", _route)
    for bits in ("4", "mixed"):
        add("append", _append, bits, bits=bits)
        add("attention", _attention, bits, bits=bits)
    return found


def _kernel() -> Callable[[], Any]:
    kernel = device.cupy().RawKernel('extern "C" __global__ void nothing(int n) {}', "nothing")
    return lambda: kernel((1,), (32,), (np.int32(0),))


def _empty() -> Callable[[], Any]:
    empty = device.cupy().empty
    return lambda: empty((1, 4096), np.float16)


def _product(name: str, n: int, k: int, activation: str, given: bool) -> Callable[[], Any]:
    cupy = device.cupy()
    (w,), dtype = random_weights(name, n, k, 1), X_DTYPES[activation]
    x = cupy.random.standard_normal((1, k), dtype=np.float32).astype(dtype)
    out = cupy.empty((1, n), dtype)
    x_format = "q8_1" if activation == "q8_1" else None
    sample_error(lambda w: product_of(x, w.T, out=out, x_format=x_format), x, w, out, activation)
    if not given:
        _require(bool((product_of(x, w.T) == out).all()), f"{name} {n}x{k}")
        return lambda: product_of(x, w.T)
    if x_format is None:
        return lambda: product_of(x, w.T, out=out)
    return lambda: product_of(x, w.T, out=out, x_format=x_format)


def _mixture(name: str) -> Callable[[], Any]:
    cupy, (n, k) = device.cupy(), EXPERT
    experts = random_experts(name, EXPERTS, n, k)
    x = cupy.random.standard_normal((1, k), dtype=np.float32).astype(np.float16)
    out, routing = cupy.empty_like(x), route(_logits(), TOP_K)
    mixture_error(
        lambda own: mixture_of(x, experts, own[0], own[1], out=out), x, experts, routing, out, "f16"
    )
    return lambda: mixture_of(x, experts, routing[0], routing[1], out=out)


def _route() -> Callable[[], Any]:
    logits = _logits()
    ids, probs = (as_numpy(a) for a in route(logits, TOP_K))
    expected = route(as_numpy(logits), TOP_K)
    _require(np.array_equal(ids, expected[0]) and np.allclose(probs, expected[1], rtol=1e-5), "route")
    return lambda: route(logits, TOP_K)


def _logits() -> Any:
    return device.cupy().asarray(np.random.default_rng(0).standard_normal((1, EXPERTS), np.float32))


def _append(bits: str) -> Callable[[], Any]:
    """One append to a cache with room for all calls; to the widest bucket of mixed widths."""
    cupy, (_, heads) = device.cupy(), HEADS
    widths, room = tuple(WIDTHS[bits]), (REPEATS + 1) * CALLS
    cache = KVCache(heads, HEAD_DIM, dict.fromkeys(widths, room), device="cuda")
    shape = (1, 1, heads, HEAD_DIM)
    k, v = (cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(2))
    cache.append(k, v)
    on_cpu = KVCache(heads, HEAD_DIM, dict.fromkeys(widths, 1))
    on_cpu.append(as_numpy(k), as_numpy(v))
    same = (np.array_equal(a, b) for a, b in zip(cache.dequantize(), on_cpu.dequantize(), strict=True))
    _require(all(same), f"append of {bits} bits")
    return lambda: cache.append(k, v)


def _attention(bits: str) -> Callable[[], Any]:
    cupy, (heads, kv_heads) = device.cupy(), HEADS
    cache = random_cache(kv_heads, [tokens_of(bits, CONTEXT)], 0)
    q = cupy.random.standard_normal((1, 1, heads, HEAD_DIM), dtype=np.float32).astype(np.float16)
    out = cupy.empty_like(q)
    sampled_error(q, cache, out)
    return lambda: attention(q, cache, out=out)


def _require(same: bool, what: str) -> None:
    if not same:
        raise RuntimeError(f"wrong result: {what}")
