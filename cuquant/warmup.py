"""Compiling kernels before they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from math import prod
from typing import Any

from . import device, formats, plan
from .array import QuantizedArray
from .formats import Format
from .io.model import Model
from .io.model import open as open_model

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of x that are prepared for, unless others are asked for: decoding and a prompt."""
ACTIVATIONS = "q8_1"


def warmup(
    weights: str | os.PathLike[str] | Model | Iterable[QuantizedArray],
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
    weights : path of a GGUF file, Model, or QuantizedArrays
        Only formats and shapes count; no tensor is read.
    batches : ints
        Rows of x, all leading axes together.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    int: how many were compiled, or read from disk; those that this process had are not counted.

    Raises
    ------
    RuntimeError
        There is no GPU to compile for.
    KernelError
        A kernel does not compile.
    """
    from tqdm import tqdm

    from . import jit

    device.cupy()  # says why there is none
    batches = list(batches)
    if any(m < 1 for m in batches):
        raise ValueError(f"batches are {batches}; a product has at least one row")
    needed = [
        kernel
        for fmt, shape in dict.fromkeys(_weights(weights))
        for kernel in kernels(fmt, shape, batches, jit.capability())
    ]
    needed = list(dict.fromkeys(needed))
    bar = tqdm(
        jit.compile_ahead(needed), total=len(needed), unit="kernel", disable=None if progress else True
    )
    return sum(1 for _ in bar)


def kernels(
    fmt: Format, shape: tuple[int, ...], batches: Iterable[int], capability: int
) -> list[plan.Kernel]:
    """What products of float16, bfloat16, float32 and q8_1 activations with one weight (..., N, K) launch."""
    kept, activations = fmt.for_kernels, formats.get(ACTIVATIONS)
    *lead, n, k = shape
    found = {plan.repack(kept, "to_fragments", 1).kernel}
    for m in batches:
        found.add(plan.gemm(kept, m, n, k, prod(lead), True, capability).plan.kernel)
        entries = ("rows_to_half", "blocks_to_half", "quantize_rows", "quantize_half")
        found |= {plan.activations(entry, activations, m, k).kernel for entry in entries}
    return sorted(found, key=repr)


def _weights(source: Any) -> list[tuple[Format, tuple[int, ...]]]:
    """Formats that have kernels, and shapes, of the weights of something."""
    if isinstance(source, (str, os.PathLike)):
        with open_model(source, "cpu") as model:
            return _weights(model)
    if isinstance(source, Model):
        types = ((formats.by_ggml_type(t.ggml_type), t.shape) for t in source.tensors.values())
        found = [(fmt, shape) for fmt, shape in types if fmt is not None]
    else:
        found = [(w.format, w.shape) for w in source]
    return [(f, shape) for f, shape in found if f.on_gpu and not f.for_activations and len(shape) > 1]
