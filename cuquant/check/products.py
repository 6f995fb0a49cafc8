"""Operands of products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import memory
from .common import (
    FLOAT32,
    FLOAT_NAMES,
    LARGEST_INDEX,
    count,
    described,
    float_dtype,
    floats,
    is_quantized,
    is_transposed,
)
from .formats import whole_blocks

if TYPE_CHECKING:
    from ..formats import Format

ACTIVATIONS = ("relu", "gelu", "gelu_erf", "silu")


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
        instead = "; cuquant.linear(x, W) computes x @ W.T itself: pass W of shape {}, or write x @ W.T"
        if what != "W":
            instead = ", and products transpose it themselves: pass what it is the transpose of, of shape {}"
        raise TypeError(
            f"{what} is a transposed {w.format} array of shape {w.shape}{instead.format(w.T.shape)}"
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


def require_activation(name: Any) -> None:
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


def require_activation_format(x: Any, given: Any, fmt: Format) -> None:
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
    return FLOAT32 if quantizes or is_quantized(x) else x.dtype


def require_output_shape(out: Any, shape: tuple[int, ...]) -> None:
    """`out` has the result's shape."""
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the result has {shape}")


def require_output(
    out: Any, shape: tuple[int, ...], reads: dict[str, Any], residual: Any, on_gpu: bool
) -> None:
    """`out` can take the result: its shape, writable, and apart from what is read while it is written.

    The residual may be `out` itself (an update in place), as every element is read before it is written.
    """
    require_output_shape(out, shape)
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
    """Whether a value is a quantized array of a weight format, or the transpose of one."""
    return is_weight(value.T if is_transposed(value) else value)


def require_preparable(stream: Any) -> None:
    """A weight is not brought into its layout while a graph is captured: the graph would repeat it."""
    if stream.is_capturing():
        raise RuntimeError("the weight must be prepared before a CUDA graph is captured: call W.prepare()")


def require_columns(k: int, most: int) -> None:
    """Columns of a weight that is prepared for a GPU."""
    if k > most:
        raise ValueError(f"a weight of {k} columns (K) cannot be used on a GPU: at most {most} are possible")


def require_batch_axes(count: int, most: int, shape: tuple[int, ...]) -> None:
    """Leading axes that a kernel can walk, those counted as one that strides join."""
    if count > most:
        raise ValueError(
            f"the result {shape} has {count} leading axes that do not merge; at most {most} are possible"
        )


def require_launch_size(blocks: int, most: int, shape: tuple[int, ...]) -> None:
    """Blocks along an axis of a launch: matrices of a stack, or tiles of batch rows."""
    if blocks > most:
        raise ValueError(
            f"the result {shape} takes {blocks} blocks along an axis of one launch; "
            f"at most {most} are possible"
        )


@lru_cache(maxsize=4096)
def require_right_operand(x: tuple[int, ...], w: tuple[int, ...]) -> None:
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


def require_right_activations(x: Any, w: Any) -> None:
    """Quantized x of W @ x: a vector, of which there is no other layout."""
    if x.ndim < 2:
        return
    k = w.shape[-1]
    fits = x.shape[-2] != k and _shape(x.shape, w.shape) is not None
    instead = "write W @ x.T" if fits else f"quantize q, rows (..., {k}) of x.T, and write W @ q.T"
    raise TypeError(
        f"x is quantized along its last axis, but {described(w)} @ {described(x)} contracts the one before: "
        f"{instead}"
    )


def _shape(x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of x @ W.T; None if these shapes do not fit in it."""
    try:
        return product_shape(x, w)
    except ValueError:
        return None


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with its last two axes swapped; a vector's as it is."""
    return (*shape[:-2], *shape[:-3:-1])


def product_error(a: Any, b: Any) -> TypeError:
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


def weights_to_warm_up(value: Any) -> list[Any]:
    """Quantized arrays, one or several."""
    one = is_quantized(value) or is_transposed(value) or not isinstance(value, Iterable)
    weights = [value] if one else list(value)
    for other in weights:
        if not is_quantized(other):
            raise TypeError(f"weights to warm up for are QuantizedArrays, not {type(other).__name__}")
    return weights


def batches_to_warm_up(batches: Iterable[Any]) -> list[int]:
    """Rows of activations, of one product or several."""
    rows = [count(m, "a batch", least=-LARGEST_INDEX) for m in batches]
    if any(m < 1 for m in rows):
        raise ValueError(f"batches are {rows}; a product has at least one row")
    return rows


def require_something_to_warm_up(found: Sequence[Any], none: str) -> None:
    """At least one weight has kernels; `none` says of which."""
    if not found:
        raise ValueError(f"nothing to warm up: {none} is a quantized matrix (..., N, K) with kernels")
