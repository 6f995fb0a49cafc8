"""Mixtures of experts for tests on a GPU, and what they should be."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import jit
from cuquant.plan.moe import Load

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)


def gauss(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, F)


def stacks(formats: Any, count: int = 5, k: int = 128, hidden: int = 160, n: int = 48) -> cq.Experts:
    """Experts on the GPU; of one format, or of three."""
    names = formats if isinstance(formats, tuple) else (formats,) * 3
    shapes = [(count, hidden, k), (count, hidden, k), (count, n, hidden)]
    floats = [gauss(*shape, seed=i) / F(np.sqrt(shape[-1])) for i, shape in enumerate(shapes)]
    return cq.Experts(
        *(cq.quantize(w, name).to_device("cuda") for w, name in zip(floats, names, strict=True))
    )


def routed(tokens: int, count: int, top_k: int, seed: int = 7) -> tuple[NDArray[Any], NDArray[Any]]:
    return cq.route(gauss(tokens, count, seed=seed), top_k)


def reference(x: Any, experts: cq.Experts, ids: Any, probs: Any, activation: str | None = "silu") -> Any:
    """Expert by expert in float64, of tokens whose ids are all good; NaN for the others."""
    x, ids, probs = (testing.as_numpy(a) for a in (x, ids, probs))
    gate, up, down = (testing.as_numpy(w).astype(np.float64) for w in experts)
    y = np.zeros((len(x), down.shape[1]))
    for e in np.intersect1d(ids, np.arange(len(gate))):
        token, slot = np.nonzero(ids == e)
        rows = x[token].astype(np.float64)
        act = testing.linear(rows, gate[e], activation=activation) * (rows @ up[e].T)
        np.add.at(y, token, probs[token, slot, None].astype(np.float64) * (act @ down[e].T))
    y[((ids < 0) | (ids >= len(gate))).any(axis=1)] = np.nan
    return y


def on_gpu(x: Any, ids: Any, probs: Any) -> tuple[Any, Any, Any]:
    cupy = device.cupy()
    return cupy.asarray(x), cupy.asarray(ids), cupy.asarray(probs)


def close(y: Any, expected: Any, dtype: Any = F) -> None:
    y = testing.as_numpy(y)
    assert y.dtype == dtype
    lost = np.isnan(expected).all(axis=-1)
    assert np.isnan(y[lost].astype(F)).all()
    y, expected = y[~lost], expected[~lost]
    assert testing.nmse(y, expected) <= (5e-5 if dtype == BF16 else 1e-5)
    assert y.size == 0 or testing.worst_element(y, expected) <= (0.05 if dtype == BF16 else 0.01)


def kernels_of(name: str, load: Load, half: bool, *shapes: tuple[int, int]) -> set[plan.Kernel]:
    """Those of products of a load with weights of these shapes, gated and not."""
    fmt = cq.formats.get(name).for_kernels
    made = (
        plan.moe.product(fmt, load, *shape, jit.gpu(), half, gated)
        for gated in (True, False)
        for shape in shapes
    )
    return {product.gemm.plan.kernel for product in made if product is not None}


def leveled(tokens: int, top_k: int, count: int, width: int = 160, k: int = 128) -> bool:
    """Whether q4_0's gate and up make levels: on Hopper they have to, if a test is to see it."""
    fmt = cq.formats.get("q4_0").for_kernels
    both = plan.moe.gate_and_up(fmt, Load(tokens, top_k, count), width, k, jit.gpu())
    return (both is not None and both.levels) or jit.capability() != 90


def check_in_a_graph(experts: cq.Experts, tokens: int, seeds: int) -> None:
    """Routing and mixture follow a graph's inputs, whichever experts they lead to."""
    cupy, (count, _, k), n = device.cupy(), experts.gate.shape, experts.down.shape[1]
    x, logits = cupy.zeros((tokens, k), np.float16), cupy.zeros((tokens, count), F)
    out = cupy.empty((tokens, n), np.float16)
    stream, kept = cupy.cuda.Stream(non_blocking=True), []

    def step() -> None:
        ids, probs = cq.route(logits, 2)
        kept.append((ids, probs))  # the graph writes to them
        cq.moe(x, experts, ids, probs, out=out)

    with stream:
        for _ in range(2):
            step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for seed in range(seeds):
            given, scores = gauss(tokens, k, seed=seed).astype(np.float16), gauss(tokens, count, seed=seed)
            x.set(given)
            logits.set(scores)
            graph.launch(stream)
            stream.synchronize()
            close(out, reference(given, experts, *cq.route(scores, 2)), np.float16)
