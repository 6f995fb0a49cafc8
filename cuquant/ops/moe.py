"""Mixtures of experts: routing, and feed-forward networks of which each token passes a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .. import check, cpu, device, repeats
from ..array import QuantizedArray
from ..debug import shown
from .matmul import linear
from .quantize import quantize

_HIDDEN = 1 << 24
"""Hidden numbers of an expert's tokens that are held at a time: 64 MB of float32, for gate and up each."""


class _Stacks(NamedTuple):
    gate: Any
    up: Any
    down: Any


class Experts(_Stacks):
    """The weights of E gated feed-forward networks, down(act(gate x) * up x), as stacks: a named tuple.

    Each is a QuantizedArray of any weight format or a float array; formats may differ. What `_replace` makes
    is checked by `moe`.

    Parameters
    ----------
    gate, up : arrays (E, F, K)
    down : array (E, N, F)
        N is K in a transformer.

    Raises
    ------
    TypeError, ValueError
        One is no weight, or shapes or devices do not fit (the message says how).
    """

    __slots__ = ()

    def __new__(cls, gate: Any, up: Any, down: Any) -> Experts:
        made = super().__new__(cls, gate, up, down)
        check.require_one_place(
            **{f"experts.{name}": a for name, a in zip(cls._fields, check.experts(made), strict=True)}
        )
        return made


@shown
def route(logits: Any, top_k: int, normalize: bool = True) -> tuple[Any, Any]:
    """Choose the experts of each token: softmax over all experts, then the top_k most probable.

    Parameters
    ----------
    logits : NumPy or CuPy array (..., E) of float16, bfloat16 or float32
    top_k : int
        1 to E.
    normalize : bool
        Divide the probabilities of the chosen by their sum.

    Returns
    -------
    ids : int32 array (..., top_k)
        Most probable first; of equal logits the lower index first.
    probs : float32 array (..., top_k)
        A row whose logits hold NaN, positive infinity or nothing above negative infinity gives NaN.

    Raises
    ------
    TypeError, ValueError
        Dtype, shape, device or top_k do not fit.
    """
    words = top_k, type(top_k), normalize, type(normalize)  # 1 equals True, but is not taken for it
    found = repeats.find(repeats.routed, words, logits)
    if found is not None:
        ids, probs = found[0].work.again(*found)
        return ids, probs
    logits = check.floats(logits, "logits")
    check.require_top_k(top_k, logits.shape)
    check.flag(normalize, "normalize")
    if check.is_on_gpu(logits=logits):
        from ..cuda.moe import route as on_gpu

        ids, probs, work = on_gpu(logits, top_k, normalize)
        if work is not None:
            repeats.remember(repeats.routed, words, work, logits, result=ids)
        return ids, probs
    logits = logits.astype(np.float32)
    # By logits, not by probabilities: the softmax rounds different ones to one number.
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :top_k]
    with cpu.silent():
        probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        chosen = np.take_along_axis(probs, ids, axis=-1)
        if normalize:
            chosen /= chosen.sum(axis=-1, keepdims=True)
    return ids.astype(np.int32), chosen


@shown
def moe(
    x: Any,
    experts: Experts,
    expert_ids: Any,
    expert_probs: Any,
    activation: str | None = "silu",
    out: Any = None,
) -> Any:
    """A mixture of experts: sum over j of probs[t, j] * down_e(act(gate_e x[t]) * up_e x[t]), e = ids[t, j].

    Tokens are grouped by expert; one without tokens costs nothing. All sums are float32, over a token's
    experts in ascending order of their ids, and y is rounded once: the same call gives the same bits.

    On a GPU, for quantized experts, all experts of a projection are one launch; nothing synchronises, and
    after a warm-up call it can be captured in a CUDA graph. Experts are products of their own, for which the
    host reads ids and probabilities, if some are floats, or of a grid that float16 does not hold, or of EXL3
    with 1 or 7 bits, if some are of EXL3 and others not, or x is of q8_1 (of EXL3, or with F above 65536), if
    there are more than 1024 or a token has more than 256, or if K or F (of trellis) is no multiple of 32.

    Parameters
    ----------
    x : array (..., K)
        float16, bfloat16 or float32; or a QuantizedArray of format q8_1: then what `down` multiplies is
        quantized to q8_1 too, if `down` is quantized.
    experts : Experts
    expert_ids : array (..., top_k) of integers, leading axes as x's
        A token with an id below 0 or from E on gives NaN; an id may stand several times.
    expert_probs : array (..., top_k) of float16, bfloat16 or float32
        For CuPy's x ids and probabilities may be CuPy's or NumPy's, which are copied over.
    activation : None, "relu", "gelu" (tanh form), "gelu_erf" or "silu"
    out : float array (..., N), optional
        Written in place, whatever its strides, and returned; must not overlap an operand.

    Returns
    -------
    y : array (..., N) of out's dtype, else x's (float32 for q8_1), where x is.

    Raises
    ------
    TypeError, ValueError
        Before any work: dtypes, shapes, devices or memory of the operands do not fit (the message says how).
    """
    weights = repeats.prepared(experts)
    if weights is not None:
        words = _words(activation, weights)
        found = repeats.find(weights[0].repeats, words, x, (expert_ids, expert_probs), None, out)
        if found is not None and found[0].work.of(*weights):
            return found[0].work.again(*found, x, out)
    x = check.activations(x)
    gate, up, down = check.experts(experts)
    if check.is_quantized(x) and check.is_quantized(down):
        check.whole_blocks(down.shape, x.format)  # as what it multiplies is quantized
    ids, probs = check.routing(expert_ids, expert_probs, x.shape, gate.shape)
    check.require_activation(activation)
    shape = (*x.shape[:-1], down.shape[1])
    y = None if out is None else check.floats(out, "out")
    arrays = {"x": x, "experts.gate": gate, "experts.up": up, "experts.down": down}
    arrays = {name: check.storage(array) for name, array in arrays.items()}
    on_gpu = check.is_on_gpu(**arrays, out=y)
    routed = {"expert_ids": ids, "expert_probs": probs}
    if on_gpu:
        check.require_one_device(
            x=arrays["x"], **{n: array for n, array in routed.items() if device.is_cuda(array)}
        )
    else:
        routed = {name: check.on_cpu(array, name) for name, array in routed.items()}
    if y is None:
        y = device.backend(on_gpu).empty(shape, check.result_dtype(x, None, None))
    else:
        reads = {name: array for name, array in routed.items() if device.is_cuda(array) == on_gpu}
        check.require_output(y, shape, arrays | reads, None, on_gpu)
    if on_gpu:
        from ..cuda import moe as cuda_moe

        if cuda_moe.takes(x, gate, up, down, ids.shape[-1]):
            work = cuda_moe.mixture(x, (gate, up, down), ids, probs, activation, y)
            if work is not None:
                own = [w.fragments() for w in (gate, up, down)]
                given = None if out is None else y
                alike = own[0].repeats, _words(activation, own), work, x, (ids, probs), None, given
                repeats.remember(*alike, result=y, weights=tuple(w.buffer for w in own))
            return y if out is None else out
        why = "experts that are products of their own are chosen by the host"
        check.require_memory(why, "take quantized ones, as moe's docstring says")
    ids, probs = device.as_numpy(ids), device.as_numpy(probs)
    mixed = _mixed(x, Experts._make((gate, up, down)), ids, probs, activation)
    with cpu.silent():
        y[...] = mixed.reshape(shape)
    return y if out is None else out


def _words(activation: Any, weights: Sequence[Any]) -> tuple[Any, ...]:
    """What gate knows mixtures by, beside their operands; whether up and down live, is asked then."""
    _, up, down = weights
    return activation, id(up), id(down)


def _mixed(x: Any, experts: Experts, ids: Any, probs: Any, activation: str | None) -> Any:
    """The mixture of checked operands in float32 [tokens, N], where x is."""
    xp: Any = device.cupy() if device.is_cuda(check.storage(x)) else np
    rows, tokens, top_k = _rows(x), math.prod(x.shape[:-1]), ids.shape[-1]
    ids, probs = ids.reshape(tokens, top_k), probs.astype(np.float32).reshape(-1)
    count, width = experts.gate.shape[:2]
    lost = ((ids < 0) | (ids >= count)).any(axis=1)
    # A token's slots by their experts: those of one number are of different tokens, and are added at once.
    number = np.argsort(np.argsort(ids, axis=1, kind="stable"), axis=1).reshape(-1)
    expert = np.where(lost[:, None], count, ids.astype(np.int64)).reshape(-1)  # count may be beyond ids' type
    pairs = np.argsort(expert, kind="stable")[: (tokens - lost.sum()) * top_k]
    matrices = [_matrices(stack) for stack in experts]
    y = xp.zeros((tokens, experts.down.shape[1]), np.float32)
    for part in cpu.slabs(len(pairs), width, _HIDDEN):
        mine = pairs[part]
        order = np.argsort(number[mine], kind="stable")
        there = xp.asarray(np.stack([mine // top_k, order, mine[order] // top_k]))
        with cpu.silent():
            result = _feed_forward(_taken(rows, there[0]), experts, matrices, expert[mine], activation)
            result *= xp.asarray(probs[mine, None])
            result = result[there[1]]
            ends = np.searchsorted(number[mine][order], np.arange(top_k + 1))
            for start, end in pairwise(ends.tolist()):
                if start < end:
                    y[there[2, start:end]] += result[start:end]
    if lost.any():
        y[xp.asarray(np.flatnonzero(lost))] = np.nan
    return y


def _matrices(stack: Any) -> Callable[[int], Any]:
    """What gives a stack's matrices: where they lie, if kernels read them there, else of its bytes, which of
    a prepared one have to be made, once for all."""
    if not check.is_quantized(stack):
        return lambda number: stack[number]
    if len(stack) and stack._of_stack(0) is not None:
        return lambda number: stack._of_stack(number)
    blocks = stack.blocks
    return lambda number: stack._selected(blocks, (number,))


def _feed_forward(
    x: Any, experts: Experts, matrices: Sequence[Callable[[int], Any]], numbers: Any, activation: str | None
) -> Any:
    """down(act(gate x) * up x), float32 [n, N], of rows and the ascending numbers of their experts, whose
    weights `matrices` give."""
    backend: Any = device.backend(device.is_cuda(check.storage(x)))
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    runs = [(int(numbers[start]), slice(start, end)) for start, end in pairwise(starts)]

    def products(x: Any, which: int, activation: str | None = None) -> Any:
        y = backend.empty((len(x), experts[which].shape[1]), np.float32)
        for number, rows in runs:
            linear(x[rows], matrices[which](number), activation=activation, out=y[rows])
        return y

    hidden = products(x, 0, activation)
    hidden *= products(x, 1)
    if check.is_quantized(x) and check.is_quantized(experts.down):
        hidden = quantize(hidden, x.format)
    return products(hidden, 2)


def _taken(rows: Any, numbers: Any) -> Any:
    """Rows of activations by their numbers, which are good."""
    return rows._selected(rows.blocks, (numbers,)) if check.is_quantized(rows) else rows[numbers]


def _rows(x: Any) -> Any:
    """Activations (..., K) as rows [n, K]."""
    if check.is_quantized(x):
        return QuantizedArray._made(x.format, x.blocks.reshape(-1, x.blocks.shape[-1]))
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
