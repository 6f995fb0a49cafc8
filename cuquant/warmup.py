"""Compiling kernels before they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import prod
from typing import Any

from . import check, device, formats, plan
from .array import QuantizedArray
from .cuda import jit, problem
from .formats import Format
from .formats.kernels import kernels_of
from .io.model import Model, open as open_model
from .plan.blocks import activation_kernels
from .render import progress_bar

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of x that are prepared for, unless others are asked for: decoding and a prompt."""
TOP_K = 2
"""Experts of a token, where nothing says how many."""


def warmup(
    weights: str | os.PathLike[str] | Model | QuantizedArray | Iterable[QuantizedArray],
    batches: Iterable[int] = BATCHES,
    *,
    progress: bool = False,
) -> int:
    """Compile the kernels that products with some weights need, on all processors.

    Without it a kernel is compiled by the first call that needs it, in a second or two. Compiled kernels are
    kept on disk (`cuquant info` says where), so that this is quick in every later process, and so are first
    calls.

    Parameters
    ----------
    weights : path of a model, Model, QuantizedArray, or several QuantizedArrays
        Only formats and shapes count; no tensor is read. Those that no product reads, as vectors, and those
        without kernels are passed over.
    batches : ints
        Rows of x, all leading axes together.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    int: how many were compiled, or read from disk; those that this process had are not counted.

    Raises
    ------
    TypeError
        `weights` are none of these (a Transposed, a plain array); rows are no integers.
    ValueError
        Rows are below 1; or nothing is left to warm up: no weight is a quantized matrix with kernels, as in a
        model of floats.
    OSError, GGUFError
        As `cuquant.open`, of a path.
    RuntimeError
        There is no GPU to compile for; or a kernel does not compile (`KernelError`, with the log).
    """
    device.cupy()  # says why there is none
    batches = check.batches_to_warm_up(batches)
    found, top_k = _weights(weights)
    needed = [
        kernel
        for fmt, shape in dict.fromkeys(found)
        for kernel in kernels(fmt, shape, batches, jit.gpu(), top_k)
    ]
    needed = list(dict.fromkeys(needed))
    made = jit.compile_ahead(needed)
    with progress_bar(progress, "kernel", made, len(needed)) as bar:
        return sum(1 for _ in bar)


def kernels(
    fmt: Format, shape: tuple[int, ...], batches: Iterable[int], gpu: plan.Gpu, top_k: int = TOP_K
) -> list[plan.Kernel]:
    """What products of float16, bfloat16, float32 and q8_1 activations with one weight (..., N, K) launch,
    and mixtures of so many experts for a token with a stack (E, N, K)."""
    kept, told, q8_1 = fmt.for_kernels, kernels_of(fmt), formats.get("q8_1")
    *lead, n, k = shape
    floats = {plan.per_block("dequantize", q8_1, 1).kernel} if told.turned else set()  # of x in q8_1
    if told.walks and not told.in_float16:  # products make floats of them, too
        return sorted({plan.exl3.dequantize(kept, prod(lead), n, k).kernel} | floats, key=repr)
    found = set(floats)
    if not kept.whole_matrices:
        found |= plan.prepare_kernels(kept, gpu)
    else:
        found |= (plan.exl3 if told.walks else plan.trellis).prepare_kernels(kept)
    for m in batches:
        for to_convert in (False, True):
            # Those with a stack that are turned are of one matrix after the other.
            matrices = 1 if told.turned else prod(lead)
            for signs in {False, told.signed_columns}:
                how = {"to_convert": to_convert, "signs": signs}
                product = plan.Problem(kept, m, n, problem.whole_pieces(k), gpu, matrices)
                found.add(plan.gemm(product, **how).plan.kernel)
        found |= activation_kernels(q8_1, m, k)
        if len(lead) == 1 and k % plan.moe.WHOLE == 0:
            load = plan.moe.Load(m, min(top_k, lead[0]), lead[0])
            found.add(plan.moe.gather(load, k).kernel)
            if told.turned:
                found.add(plan.exl3.turn_entries(load.rows, k).kernel)
            for gated in plan.moe.gated_ways(kept):
                made = plan.moe.product(kept, load, n, k, gpu, gated=gated)
                found |= {made.gemm.plan.kernel} if made is not None else set()
    return sorted(found, key=repr)


def _weights(source: Any) -> tuple[list[tuple[Format, tuple[int, ...]]], int]:
    """Formats and shapes of the weights of something, as far as there are kernels, at least one; experts of a
    token."""
    if isinstance(source, (str, os.PathLike)):
        with open_model(source, "cpu") as model:
            return _weights(model)
    top_k, none = TOP_K, "none of the weights"
    if isinstance(source, Model):
        none = f"no tensor of {source.path.name}"
        found = [(t.format, t.shape) for t in source.tensors.values()]
        used = source.metadata.get(f"{source.metadata.get('general.architecture')}.expert_used_count")
        top_k = used if isinstance(used, int) and used > 0 else TOP_K
    else:
        found = [(w.format, w.shape) for w in check.weights_to_warm_up(source)]
    known = [(fmt, shape) for fmt, shape in found if fmt is not None and _has_kernels(fmt, shape)]
    check.require_something_to_warm_up(known, none)
    return known, top_k


def _has_kernels(fmt: Format, shape: tuple[int, ...]) -> bool:
    """Whether products with such an array as the weight launch some."""
    return fmt.on_gpu and not fmt.for_activations and len(shape) > 1 and prod(shape) > 0
