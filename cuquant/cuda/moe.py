"""Mixtures of experts on the GPU: tokens sorted by expert, planned once for all calls that are alike.

Nothing synchronises. Memory between the launches is the stream's scratch.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from .. import check, device, plan
from ..formats import Format
from ..formats.kernels import kernels_of
from ..repeats import Repeat
from . import buffers, jit, problem, templates
from .activations import addresses
from .fragments import Fragments
from .moe_launches import planned
from .moe_memory import FACTORS, Given, Mixture, PlacedRows, X, half_rows
from .templates import Place, Template


def takes(x: Any, gate: Any, up: Any, down: Any, top_k: int) -> bool:
    """Whether there are kernels for checked operands."""
    experts, width, k = gate.shape
    formats = [w.format for w in (gate, up, down) if check.is_quantized(w)]
    return (
        len(formats) == 3
        and all(fmt.on_gpu and kernels_of(fmt).in_float16 for fmt in formats)
        and (not any(kernels_of(fmt).turned for fmt in formats) or _turns(x, formats))
        and width % plan.moe.WHOLE == k % plan.moe.WHOLE == 0
        and 1 <= experts <= plan.moe.MOST_EXPERTS
        and 1 <= top_k <= plan.moe.MOST_SLOTS
        and min(gate.shape + down.shape) > 0
        and (width <= plan.LONGEST_ROW or not check.is_quantized(x))
    )


def _turns(x: Any, formats: list[Format]) -> bool:
    """Whether rows are turned for all three weights, between which there is no q8_1 then."""
    return all(kernels_of(fmt).turned for fmt in formats) and not check.is_quantized(x)


class Routing(NamedTuple):
    """How experts are chosen by logits like those before."""

    call: jit.Call

    def again(self, known: Repeat, places: list[int]) -> tuple[Any, Any]:
        """Route logits like those before; returns ids and probabilities."""
        ids, probs = known.result(), device.cupy().ndarray(known.shape, check.FLOAT32)
        self.call(places[0], ids.data.ptr, probs.data.ptr)
        return ids, probs


def route(logits: Any, top_k: int, normalize: bool) -> tuple[Any, Any, Routing | None]:
    """Ids and probabilities of floats (..., E), and how those of others like them are found; None where a
    copy of them was read."""
    rows = buffers.as_rows(logits, "logits")
    empty, shape = device.cupy().empty, (*logits.shape[:-1], top_k)
    ids, probs = empty(shape, np.int32), empty(shape, check.FLOAT32)
    if not ids.size:
        return ids, probs, None
    count, experts = rows.shape
    numbers = (
        problem.DTYPES[rows.dtype],
        *buffers.element_strides(rows),
        count,
        experts,
        int(top_k),
        int(normalize),
    )
    call = jit.call(plan.moe.route(count), "QiqqqiiiQQ", numbers)
    call(rows.data.ptr, ids.data.ptr, probs.data.ptr)
    return ids, probs, Routing(call) if rows.data.ptr == logits.data.ptr else None


class Ready(NamedTuple):
    """A mixture that is planned: all that is left to know is where its operands lie."""

    size: int
    """Bytes of scratch memory."""
    steps: tuple[Template, ...]
    others: tuple[ref[Fragments], ref[Fragments]]
    """Up and down, whose addresses are in the steps. What gate knows must keep none of them alive."""

    def of(self, gate: Fragments, up: Fragments, down: Fragments) -> bool:
        """Whether the mixture is of these weights, and not of dead ones whose `id` they have; gate is."""
        known_up, known_down = self.others
        return known_up() is up and known_down() is down

    def again(self, known: Repeat, places: list[int], x: Any, out: Any) -> Any:
        """Run the mixture again, to `out` or, if that is None, to a new array; returns it."""
        start, ids, probs, _, to = places
        if out is None:
            out = known.result()
            to = out.data.ptr
        self.run((start, 0) if device.is_cuda(x) else _addresses(x), ids, probs, to)
        return out

    def run(self, x: tuple[int, int], ids: int, probs: int, out: int) -> None:
        """Start the mixture with operands at these addresses.

        Scratch memory may have grown or be another stream's: where it is, is asked each time.
        """
        with buffers.scratch() as scratch:
            templates.launch(self.steps, (scratch.take(self.size), *x, ids, probs, out, scratch.flags()))


def mixture(x: Any, experts: Any, ids: Any, probs: Any, activation: str | None, out: Any) -> Ready | None:
    """Write the mixture of checked operands, which `takes` has let through, to out (..., N).

    Returns how others like it are computed, if it was computed from the operands' own memory, into out's.
    """
    tokens, top_k = prod(ids.shape[:-1]), ids.shape[-1]
    if tokens == 0:
        return None
    gate, up, down = (w.fragments() for w in experts)
    taken = ids.dtype if ids.dtype in (np.int32, np.int64) else np.dtype(np.int64)
    routed = _on_gpu(ids, "expert_ids", taken)
    weights = _on_gpu(probs, "expert_probs", probs.dtype)
    rows = buffers.as_rows(out, "out")
    held, start, source = _source(x)  # held: it may be a copy
    to = (rows.dtype, *buffers.element_strides(rows))
    given = Given(tokens, top_k, source, routed.dtype.itemsize == 8, weights.dtype, to)
    size, steps = planned(Mixture(gate, up, down, activation, check.is_quantized(x)), given)
    ready = Ready(size, steps, (ref(up), ref(down)))
    ready.run(start, routed.data.ptr, weights.data.ptr, rows.data.ptr)
    del held
    if rows.data.ptr != out.data.ptr:
        out[...] = rows.reshape(out.shape)
        return None
    own = all(device.is_cuda(a) and a.data.ptr == b.data.ptr for a, b in ((ids, routed), (probs, weights)))
    return ready if own and start == _addresses(x) else None


def _on_gpu(array: Any, what: str, dtype: np.dtype[Any]) -> Any:
    """A contiguous CuPy array: the one that is given, if it is one of this dtype, or a copy."""
    if device.is_cuda(array) and array.dtype == dtype and array.flags.c_contiguous:
        return array
    kind = f"contiguous CuPy array of {dtype}"
    check.require_memory(f"{what} is no {kind}, and is copied", "pass one")
    return device.cupy().ascontiguousarray(device.cupy().asarray(array), dtype)


def _addresses(x: Any) -> tuple[int, int]:
    """Addresses (x, row factors) that kernels read, of floats or blocks; 0 without row factors."""
    return addresses(x, None) if device.is_cuda(x) else addresses(x.blocks, x.rows)


def _source(x: Any) -> tuple[Any, tuple[int, int], PlacedRows | None]:
    """What is read of x, its addresses, and as which rows; None for blocks that have none."""
    if device.is_cuda(x):
        rows = buffers.as_rows(x)
        start = rows.data.ptr
        row, column = buffers.element_strides(rows)
        number, size = problem.DTYPES[rows.dtype], rows.itemsize
        return rows, (start, 0), PlacedRows(Place(X), start % 16 == 0, number, size, row, column, 0)
    if x.rows is None:
        blocks = x.blocks.reshape(-1, x.blocks.shape[-1])
        return blocks, (blocks.data.ptr, 0), None
    return x.rows, addresses(x.blocks, x.rows), half_rows(Place(X), x.shape[-1], Place(FACTORS))
