"""Operands of products and of mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import device, memory
from .common import (
    FLOAT_NAMES,
    FLOATS,
    a_or_an,
    array,
    count,
    described,
    float_dtype,
    floats,
    is_quantized,
    is_transposed,
    readable,
)
from .formats import whole_blocks

if TYPE_CHECKING:
    from ..formats import Format

ACTIVATIONS = ("relu", "gelu", "gelu_erf", "silu")


def row_index(index: Any, shape: tuple[int, ...], on_gpu: bool) -> tuple[Any, ...]:
    """An index of every axis but the last, which must stay whole."""
    parts = tuple(map(_index_part, index if isinstance(index, tuple) else (index,)))
    if any(p is None for p in parts):
        raise IndexError("a QuantizedArray takes no new axes: dequantize first, or reshape the other operand")
    dots = [i for i, p in enumerate(parts) if p is Ellipsis]
    used = sum(
        p.ndim if getattr(p, "dtype", None) == np.dtype(bool) else 1 for p in parts if p is not Ellipsis
    )
    reaches_last = used >= len(shape) or bool(dots and dots[-1] != len(parts) - 1)
    if reaches_last and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        raise IndexError(
            f"the last axis of shape {shape} is stored in blocks and cannot be indexed: "
            "index the axes before it, or dequantize first"
        )
    if on_gpu and not all(p is Ellipsis or isinstance(p, slice) for p in parts):
        _within(parts, shape)
    return parts


def _index_part(part: Any) -> Any:
    """One axis' index: lists and CUDA arrays of other libraries are arrays here."""
    if isinstance(part, list):
        return np.asarray(part, None if part else np.intp)
    if hasattr(part, "__cuda_array_interface__") and not device.is_cuda(part):
        return device.cupy().asarray(part)
    return part


def _within(parts: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """IndexError for integers beyond an axis, in NumPy's words: CuPy takes those of arrays modulo its extent.
    CuPy's own are read for it, but not while a graph is captured."""
    if any(map(device.is_cuda, parts)) and device.is_capturing():
        return
    nothing = np.broadcast_to(np.empty((), bool), (*shape[:-1], 1))  # an axis' elements are all one byte
    nothing[tuple(device.as_numpy(p) if device.is_cuda(p) else p for p in parts)]


def can_iterate(shape: tuple[int, ...]) -> None:
    """At least two axes: rows to go through."""
    if len(shape) < 2:
        raise TypeError(
            f"a QuantizedArray of shape {shape} has no rows to iterate over, and its numbers are packed in "
            "blocks: iterate over .dequantize()"
        )


def can_transpose(shape: tuple[int, ...]) -> None:
    """At least two axes."""
    if len(shape) < 2:
        raise ValueError(f"shape {shape} has no rows and columns to swap")


def activations(x: Any, w: Any = None) -> Any:
    """The left operand of a product with w: floats, or activations quantized to q8_1."""
    if not is_quantized(x) and not is_transposed(x):
        return floats(x, "x")
    if not x.format.for_activations:
        if _of_weight(w):
            raise TypeError(
                f"both operands are quantized weights, {described(x)} and {described(w)}: "
                "dequantize the one that is to be the activations"
            )
        raise TypeError(
            f"x is quantized to {x.format}, a format of weights, but activations come first: the operands "
            f"may be swapped (activations are {FLOAT_NAMES}, or q8_1 by cuquant.quantize(x, 'q8_1'))"
        )
    return x if is_quantized(x) else floats(x, "x")


def weights(w: Any, what: str = "W") -> Any:
    """The right operand, not transposed: a quantized weight, or a plain float one."""
    if is_quantized(w):
        if w.format.for_activations:
            raise TypeError(
                f"{what} is quantized to {w.format}, a format of activations: weights are quantized otherwise"
            )
    elif is_transposed(w):
        raise TypeError(
            f"{what} is a transposed {w.format} array of shape {w.shape}; cuquant.linear(x, W) computes "
            f"x @ W.T itself: pass W of shape {w.T.shape}, or write x @ W.T"
        )
    elif isinstance(w, (list, tuple)):
        raise TypeError(
            f"{what} is a {type(w).__name__}; an array is needed, of several weights a stack (numpy.stack)"
        )
    else:
        w = floats(w, what)
    if w.ndim < 2:
        raise ValueError(f"{what} has shape {w.shape}; a weight is (..., N, K)")
    return w


@lru_cache(maxsize=4096)
def product_shape(x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of x (..., M, K) @ W (..., N, K) transposed: leading axes broadcast as in numpy.matmul."""
    if not x:
        raise ValueError("x is a scalar; activations are (..., K)")
    if x[-1] != w[-1]:
        raise ValueError(f"x {x} and W {w} differ in K, their last axis: {x[-1]} and {w[-1]}")
    try:
        lead = np.broadcast_shapes(x[:-2], w[:-2])
    except ValueError:
        raise ValueError(f"the leading axes of x {x} and W {w} do not broadcast") from None
    return (*lead, *x[-2:-1], w[-2])


def activation(name: Any) -> None:
    """None or one of ACTIVATIONS."""
    if name is not None and (not isinstance(name, str) or name not in ACTIVATIONS):
        raise ValueError(
            f"unknown activation {name!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS))}"
        )


def bias(value: Any, w: tuple[int, ...]) -> Any:
    """Floats of shape (N,), or (..., N) with the leading axes of W; None stays None."""
    if value is None:
        return None
    value = floats(value, "bias")
    if value.shape not in {w[-2:-1], w[:-1]}:
        raise ValueError(
            f"bias has shape {value.shape}; for W {w} it is {w[-2:-1]}" + f" or {w[:-1]}" * (len(w) > 2)
        )
    return value


def residual(value: Any, shape: tuple[int, ...]) -> Any:
    """Floats of the result's shape; None stays None."""
    if value is None:
        return None
    value = floats(value, "residual")
    if value.shape != shape:
        raise ValueError(f"residual has shape {value.shape}; the result has {shape}")
    return value


def activation_format(x: Any, given: Any, fmt: Format) -> None:
    """What is given names the format that floats x can be quantized to by a product."""
    if str(given).lower() != fmt:
        raise ValueError(f"x_format is {str(given)!r}; for activations there is '{fmt}'")
    if is_quantized(x):
        raise TypeError(f"x is quantized to {x.format} already: x_format is for floats")
    whole_blocks(x.shape, fmt, "x")


def result_dtype(x: Any, out: Any, dtype: Any, quantizes: bool = False) -> np.dtype[Any]:
    """`dtype` if given, else that of out, else the activations' own (float32 for quantized ones)."""
    if dtype is not None:
        wanted = float_dtype(dtype)
        if out is not None and out.dtype != wanted:
            raise TypeError(f"out has dtype {out.dtype}, but dtype={wanted} was asked for")
        return wanted
    if out is not None:
        return out.dtype
    return FLOATS[2] if quantizes or is_quantized(x) else x.dtype


def output_shape(out: Any, shape: tuple[int, ...]) -> None:
    """`out` has the result's shape."""
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the result has {shape}")


def output(out: Any, shape: tuple[int, ...], reads: dict[str, Any], residual: Any, on_gpu: bool) -> None:
    """`out` can take the result: its shape, writable, and apart from what is read while it is written.

    The residual may be `out` itself (an update in place), as every element is read before it is written.
    """
    output_shape(out, shape)
    if not getattr(out.flags, "writeable", True):
        raise ValueError("out is read-only")
    if not out.flags.c_contiguous and memory.overlaps_itself(out):
        raise ValueError(f"out has strides {out.strides} that put several elements in one place")
    if residual is not None and not memory.same_view(out, residual):
        reads = {**reads, "residual": residual}
    for name, operand in reads.items():
        if operand is not None and memory.may_overlap(out, operand, on_gpu):
            raise ValueError(
                f"out may share memory with {name}: the result would overwrite what is still read"
            )


def is_weight(value: Any) -> bool:
    """Whether a value is a quantized array of a weight format."""
    return is_quantized(value) and not value.format.for_activations


def _of_weight(value: Any) -> bool:
    """Whether it is such a one, or the transpose of one."""
    return is_weight(value.T if is_transposed(value) else value)


def may_prepare(stream: Any) -> None:
    """A weight is not brought into its layout while a graph is captured: the graph would repeat it."""
    if stream.is_capturing():
        raise RuntimeError("the weight must be prepared before a CUDA graph is captured: call W.prepare()")


def batch_axes(count: int, most: int, shape: tuple[int, ...]) -> None:
    """Leading axes that a kernel can walk, those counted as one that strides join."""
    if count > most:
        raise ValueError(
            f"the result {shape} has {count} leading axes that do not merge; at most {most} are possible"
        )


def launch_size(blocks: int, most: int, shape: tuple[int, ...]) -> None:
    """Blocks along an axis of a launch: matrices of a stack, or tiles of batch rows."""
    if blocks > most:
        raise ValueError(
            f"the result {shape} takes {blocks} blocks along an axis of one launch; "
            f"at most {most} are possible"
        )


@lru_cache(maxsize=4096)
def right_operand(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    """x of W @ x: (K,), or (..., K, M), with leading axes that broadcast."""
    k = w[-1]
    if x and x[-2:][0] == k:
        if _shape(_swapped(x), w) is None:
            raise ValueError(f"the leading axes of W {w} and x {x} do not broadcast")
        return
    shape = _shape(x, w)
    if shape is not None:
        other = f": write x @ W.T, which is {shape}"
    elif x[-1:] == (k,):
        other = ", nor in x @ W.T, where their leading axes do not broadcast"
    else:
        other = f", nor in x @ W.T, where it is (..., {k})"
    raise ValueError(f"W {w} and x {x} do not fit in W @ x, where x is ({k},) or (..., {k}, M){other}")


def _shape(x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of x @ W.T; None if these shapes do not fit in it."""
    try:
        return product_shape(x, w)
    except ValueError:
        return None


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its last two axes swapped; a vector's as it is."""
    return (*shape[:-2], *shape[:-3:-1])


def no_arithmetic(w: Any, operator: str) -> TypeError:
    """The error for an operator other than @ on a quantized array, or its transpose."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) holds packed blocks, which have no {operator}: "
        "call .dequantize() for the numbers"
    )


def not_compared(w: Any, name: str) -> TypeError:
    """The error for what would find nothing equal, where numbers may be."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) holds packed blocks, which {name} does not compare: "
        f"compare what .dequantize() or {'.T' * is_transposed(w)}.blocks gives"
    )


def no_truth(w: Any) -> ValueError:
    """The error for a quantized array, or its transpose, as a condition: NumPy's for arrays of numbers."""
    return ValueError(
        f"the truth value of a {type(w).__name__} ({w.format}) is ambiguous: compare with None (W is None), "
        "or call .any() or .all() of what .dequantize() gives"
    )


def no_ufunc(w: Any, name: str, method: str, options: Iterable[str]) -> TypeError:
    """The error for a function of NumPy's elements, called or by another method (`reduce`, `outer`); for
    `x @= W.T` and numpy.matmul with options, too."""
    if method != "__call__":
        reduces = method == "reduce" and name in _REDUCTIONS
        return no_arithmetic(w, f"numpy.{_REDUCTIONS[name] if reduces else f'{name}.{method}'}")
    if name == "matmul":
        taken = [option for option in ("out", "dtype") if option in options] or ["out"]
        return TypeError(
            f"numpy.matmul with options, and @=, cannot write a product with a {type(w).__name__} "
            f"({w.format}): write x @ W.T, or "
            f"cuquant.matmul(x, W.T, {', '.join(f'{option}={option}' for option in taken)})"
        )
    if name in ("vecdot", "matvec", "vecmat"):
        return TypeError(f"numpy.{name} takes no {type(w).__name__} ({w.format}): write x @ W.T, or W @ x")
    return no_arithmetic(w, _SIGNS.get(name, f"numpy.{name}"))


_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//", "remainder": "%"}
_SIGNS |= {"power": "**", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
"""Operators of NumPy's functions."""
_REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
_REDUCTIONS |= {"logical_or": "any", "logical_and": "all"}
"""What people call to reduce by these."""
_INSTEAD = {
    "dtype": ".format says how it is stored; .dequantize(dtype) makes float32, float16 or bfloat16",
    "astype": "call .dequantize(dtype), or quantize the numbers to another format",
    "reshape": "reshape numbers before they are quantized, or .dequantize()",
    "transpose": ".T swaps the last two axes, of a stack too",
    "swapaxes": ".T swaps the last two axes, of a stack too",
    "copy": "it never changes, and needs none; .dequantize() makes numbers that may",
    "to": "W.to_device(device) moves W; .dequantize(dtype) makes numbers",
    "cpu": "W.to_device('cpu') moves W",
    "cuda": "W.to_device('cuda') moves W",
    "numpy": "W.to_device('cpu').dequantize() makes NumPy's numbers",
    "get": "W.to_device('cpu') moves W; W.to_device('cpu').dequantize() makes NumPy's numbers",
}
"""Of attributes that arrays have; of others, .dequantize()."""


def is_no_attribute(w: Any, name: str) -> None:
    """AttributeError for what arrays of numbers have, and a quantized one, or its transpose, has not."""
    if name.startswith("_") or hasattr(type(w), name):
        return
    instead = _INSTEAD.get(name)
    if instead is None and is_transposed(w) and hasattr(type(w.T), name):
        instead = f"W has, of which it is the transpose: .T.{name}"
    elif instead is None and hasattr(np.ndarray, name):
        instead = "call .dequantize() for the numbers"
    if instead is not None:
        raise AttributeError(f"a {type(w).__name__} has no {name}: {instead}", name=name, obj=w)


def no_rows(w: Any) -> TypeError:
    """The error for an index of a transpose: blocks run along what are its columns."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) has no rows of blocks: index W, its .T, or .dequantize()"
    )


def immutable(w: Any) -> TypeError:
    """The error for an assignment to a part of a quantized array."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) cannot be changed: change numbers, and quantize them"
    )


def not_a_product(a: Any, b: Any) -> TypeError:
    """The error for a product that no quantized operand makes possible."""
    given = f"{described(a)} @ {described(b)}"
    if is_weight(b) and b.ndim < 2:
        return TypeError(f"{given}: a quantized vector has no rows to multiply by; dequantize it first")
    if is_weight(b) or (is_transposed(a) and is_weight(a.T)):
        return TypeError(
            f"{given} contracts the weight along N, but its blocks run along K: {_along_k(a, b)}"
        )
    instead = "x @ W.T or W @ x is needed"
    if not any(is_quantized(operand) or is_transposed(operand) for operand in (a, b)):
        instead = "of plain arrays write a @ b, or cuquant.linear(x, w), which is x @ w.T"
    return TypeError(f"{given} has no quantized weight on either side: {instead}")


def _along_k(a: Any, b: Any) -> str:
    """What to write instead of x @ W or W.T @ x.

    x @ W.T is what was meant only where the product given fits in no way: with N equal to K both can fit.
    """
    left = is_weight(b)
    x, w = (a, b.shape) if left else (b, a.T.shape)
    shape = () if is_transposed(x) else tuple(getattr(x, "shape", ()))  # x.T of quantized x is in no product
    instead = _shape(shape, w)
    if _shape(shape if left else _swapped(shape), _swapped(w)) is None:
        fits = [] if instead is None else [f"x @ W.T, which is {instead}"]
        right = None if len(shape) < 2 or is_quantized(x) else _shape(_swapped(shape), w)
        if right is not None:
            fits.append(f"W @ x, which is {_swapped(right)} for x {shape}")
        return f"write {' or '.join(fits)}" if fits else "x @ W.T and W @ x do not"
    plain = "x.dequantize()" if is_quantized(x) else "x"
    meant, dense = (
        ("x @ W", f"{plain} @ W.dequantize()") if left else ("W.T @ x", f"W.T.dequantize() @ {plain}")
    )
    other = "" if instead is None else f"x @ W.T is another product, of shape {instead}; "
    return f"{other}for {meant} write {dense}, or quantize the transpose of W"


def experts(value: Any) -> tuple[Any, Any, Any]:
    """Stacks gate (E, F, K), up (E, F, K) and down (E, N, F) of weights, as an `Experts` has them."""
    if not all(hasattr(value, name) for name in ("gate", "up", "down")):
        raise TypeError(f"experts is {a_or_an(value)}; a cuquant.Experts(gate, up, down) is needed")
    gate, up, down = (weights(getattr(value, name), f"experts.{name}") for name in ("gate", "up", "down"))
    shapes = gate.shape, up.shape, down.shape
    if any(len(s) != 3 for s in shapes) or up.shape != gate.shape or down.shape[::2] != gate.shape[:2]:
        raise ValueError(
            f"experts have gate {shapes[0]}, up {shapes[1]} and down {shapes[2]}; "
            "(E, F, K), (E, F, K) and (E, N, F) are needed"
        )
    return gate, up, down


def routing(ids: Any, probs: Any, x: tuple[int, ...], gate: tuple[int, ...]) -> tuple[Any, Any]:
    """Ids and probabilities (..., top_k) of the tokens x (..., K), which gates (E, F, K) take."""
    ids = readable(array(ids, "expert_ids", "integers", in_place=True), "expert_ids")
    given = array(probs, "expert_probs", in_place=True)
    if ids.dtype.kind not in "iub" and given.dtype.kind in "iu":
        raise TypeError(
            f"expert_ids has dtype {ids.dtype}, expert_probs {given.dtype}: they are swapped; "
            "moe(x, experts, expert_ids, expert_probs) has the ids first"
        )
    probs = floats(given, "expert_probs")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"expert_ids has dtype {ids.dtype}; experts are numbered by integers")
    if not x or x[-1] != gate[-1]:
        raise ValueError(f"x {x} and experts.gate {gate} differ in K, their last axis")
    if ids.shape[:-1] != x[:-1] or ids.ndim != len(x) or probs.shape != ids.shape:
        raise ValueError(
            f"expert_ids {ids.shape} and expert_probs {probs.shape} do not fit x {x}: both are (..., top_k), "
            "with the leading axes of x"
        )
    return ids, probs


def top_k(value: Any, logits: tuple[int, ...]) -> None:
    """An integer from 1 to the number of experts."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"top_k is {value}; an integer is needed")
    if not logits:
        raise ValueError("logits is a scalar; (..., E) is needed")
    count(value, "top_k", most=logits[-1])
