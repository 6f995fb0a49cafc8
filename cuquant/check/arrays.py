"""What is asked of quantized arrays: rows by an index, and what arrays of numbers do, and blocks do not."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import device
from .common import a_or_an, is_quantized, is_transposed


def row_index(index: Any, shape: tuple[int, ...], on_gpu: bool) -> tuple[Any, ...]:
    """An index of every axis but the last, which must stay whole."""
    parts = tuple(map(_index_part, index if isinstance(index, tuple) else (index,)))
    if any(p is None for p in parts):
        raise IndexError("a QuantizedArray takes no new axes: .dequantize() first")
    for p in parts:
        of_kind = p is Ellipsis or any(hasattr(p, name) for name in _OF_INDICES)
        if not of_kind or isinstance(p, (str, bytes, np.inexact)):
            raise IndexError(
                f"an index of a QuantizedArray is {a_or_an(p)}; integers, slices, ... and arrays of integers "
                "or booleans are allowed"
            )
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


_OF_INDICES = ("__index__", "__array__", "__dlpack__", "__getitem__", "indices")
"""Attributes of which integers, arrays, sequences and slices have one each."""


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


def require_iterable(shape: tuple[int, ...]) -> None:
    """At least two axes: rows to go through."""
    if len(shape) < 2:
        raise TypeError(
            f"a QuantizedArray of shape {shape} has no rows to iterate over, and its numbers are packed in "
            "blocks: iterate over .dequantize()"
        )


def require_transposable(shape: tuple[int, ...]) -> None:
    """At least two axes."""
    if len(shape) < 2:
        raise ValueError(f"shape {shape} has no rows and columns to swap")


def is_multiplying_itself(value: Any) -> bool:
    """Whether the right operand of W @ value is no array that is known here, and has a product of its own."""
    if isinstance(value, np.ndarray) or is_quantized(value) or is_transposed(value):
        return False
    kind = type(value)
    known = ("__cuda_array_interface__", "__dlpack__", "to_numpy")  # as tables of pandas have
    return hasattr(kind, "__rmatmul__") and not any(hasattr(kind, name) for name in known)


def arithmetic_error(w: Any, operator: str) -> TypeError:
    """The error for an operator other than @ on a quantized array, or its transpose."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) holds packed blocks, which have no {operator}: "
        "call .dequantize() for the numbers"
    )


def numbers_error(w: Any) -> TypeError:
    """The error for a quantized array as one of numbers, which tables of pandas ask for in a product, too."""
    pandas = "; in a product x is an array, no table of pandas: write x.to_numpy(numpy.float32) @ W.T"
    return TypeError(
        f"a {type(w).__name__} ({w.format}) holds packed blocks, not numbers: "
        "products are x @ W.T; call .dequantize() for the numbers, .blocks for the bytes"
        + (pandas if "pandas" in sys.modules else "")
    )


def comparison_error(w: Any, name: str) -> TypeError:
    """The error for what would find nothing equal, where numbers may be."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) holds packed blocks, which {name} does not compare: "
        f"compare what .dequantize() or {'.T' * is_transposed(w)}.blocks gives"
    )


def truth_error(w: Any) -> ValueError:
    """The error for a quantized array, or its transpose, as a condition: NumPy's for arrays of numbers."""
    return ValueError(
        f"the truth value of a {type(w).__name__} ({w.format}) is ambiguous: compare with None (W is None), "
        "or call .any() or .all() of what .dequantize() gives"
    )


def ufunc_error(w: Any, name: str, method: str, options: Iterable[str]) -> TypeError:
    """The error for a function of NumPy's elements, called or by another method (`reduce`, `outer`); for
    `x @= W.T` and numpy.matmul with options, too."""
    if method != "__call__":
        reduces = method == "reduce" and name in _REDUCTIONS
        return arithmetic_error(w, f"numpy.{_REDUCTIONS[name] if reduces else f'{name}.{method}'}")
    if name == "matmul":
        taken = [option for option in ("out", "dtype") if option in options] or ["out"]
        return TypeError(
            f"numpy.matmul with options, and @=, cannot write a product with a {type(w).__name__} "
            f"({w.format}): write x @ W.T, or "
            f"cuquant.matmul(x, W.T, {', '.join(f'{option}={option}' for option in taken)})"
        )
    if name in ("vecdot", "matvec", "vecmat"):
        return TypeError(f"numpy.{name} takes no {type(w).__name__} ({w.format}): write x @ W.T, or W @ x")
    return arithmetic_error(w, _SIGNS.get(name, f"numpy.{name}"))


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
"""What to use in place of attributes that arrays of numbers have; .dequantize() in place of all others."""


_FUNCTIONS = dict.fromkeys(
    ("vstack", "append"), "numpy.concatenate joins the rows of quantized arrays of one format"
)
_FUNCTIONS |= dict.fromkeys(("split", "array_split", "vsplit"), "take rows of W: W[:n], W[n:]")
_FUNCTIONS |= dict.fromkeys(("transpose", "matrix_transpose", "swapaxes"), _INSTEAD["transpose"])
"""What to use in place of NumPy's functions that packed blocks are not for, by their names."""


def require_no_other_function(w: Any, name: str) -> None:
    """TypeError for a function of NumPy's in whose place another takes quantized arrays, or their .T is."""
    if name in _FUNCTIONS:
        raise TypeError(f"numpy.{name} takes no {type(w).__name__} ({w.format}): {_FUNCTIONS[name]}")


def require_no_array_attribute(w: Any, name: str) -> None:
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


def transpose_index_error(w: Any) -> TypeError:
    """The error for an index of a transpose: blocks run along what are its columns."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) has no rows of blocks: index W, its .T, or .dequantize()"
    )


def assignment_error(w: Any) -> TypeError:
    """The error for an assignment to a part of a quantized array."""
    return TypeError(
        f"a {type(w).__name__} ({w.format}) cannot be changed: change numbers, and quantize them"
    )
