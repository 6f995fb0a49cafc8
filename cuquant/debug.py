"""Debugging: what goes into every operation and comes out, on stderr."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from . import check, device

P = ParamSpec("P")
R = TypeVar("R")

_state = {"debug": os.environ.get("CUQUANT_DEBUG", "0") not in ("", "0")}
_FEW = 16
"""Numbers, or bytes, of an array that are shown."""


class config:
    """Settings of this library, for the whole process; those that are not given stay as they are.

    A call sets them at once; used in a ``with`` statement, they are what they were at its end:

        cuquant.config(debug=True)
        with cuquant.config(debug=False): ...

    Parameters
    ----------
    debug : bool, optional
        Print to stderr, before and after each operation, the type, shape and range of every operand, how many
        NaNs and infinities it has, and of quantized ones the same for all parts of their blocks. Operations
        are quantizing, products, mixtures and attention, and of a `KVCache` `append`, moves, `evict`, `trim`,
        `dequantize` and `tokens`. It waits for the GPU, but in a stream that captures a graph, where only
        types and shapes are printed.
        CUQUANT_DEBUG=1 in the environment turns it on at import.

    Attributes
    ----------
    debug : bool
        The setting after the call.

    Raises
    ------
    TypeError
        debug is not a bool.
    """

    def __init__(self, *, debug: bool | None = None) -> None:
        self._before = dict(_state)
        if debug is not None:
            _state["debug"] = check.flag(debug, "debug")
        self.debug = _state["debug"]

    def __enter__(self) -> config:
        return self

    def __exit__(self, *exc: object) -> None:
        _state.update(self._before)

    def __repr__(self) -> str:
        return f"config(debug={self.debug})"


def is_on() -> bool:
    """Whether operations print."""
    return _state["debug"]


def shown(operation: Callable[P, R]) -> Callable[P, R]:
    """An operation that prints its operands and its result while debugging is on."""
    signature = inspect.signature(operation)

    @functools.wraps(operation)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _state["debug"]:
            return operation(*args, **kwargs)
        name = operation.__qualname__
        _print(f"{name} before", signature.bind(*args, **kwargs).arguments)
        start = time.perf_counter()
        result = operation(*args, **kwargs)
        _print(f"{name} after {1e3 * (time.perf_counter() - start):.3f} ms", {"result": result})
        return result

    return call


def _print(title: str, values: Mapping[str, Any]) -> None:
    lines = [line for name, value in values.items() for line in _lines(name, value)]
    print(f"=== cuquant.{title} ===", *lines, sep="\n", file=sys.stderr, flush=True)


def _lines(name: str, value: Any) -> Iterator[str]:
    """What there is to say of a value, and of its parts."""
    if check.is_quantized(value):
        yield f"{name}: {value!r}"
        if not (device.is_cuda(value.storage) and device.is_capturing()):
            parts = value.format.numbers(device.as_numpy(value.blocks), value.shape)
            for part, numbers in parts.items():
                yield from _lines(f"  {name}.{part}", numbers)
    elif isinstance(value, tuple) and not all(isinstance(v, int) for v in value):
        for field, item in zip(getattr(value, "_fields", range(len(value))), value, strict=True):
            yield from _lines(f"{name}.{field}", item)
    elif getattr(type(value), "is_kv_cache", False) and value.device == "cuda" and device.is_capturing():
        yield f"{name}: KVCache of {value.bits} bits, batch={value.batch}, {value.device}"
    elif isinstance(value, np.ndarray) or device.is_cuda(value):
        yield f"{name}: {value.dtype} {value.shape}, {device.of(value)}" + _numbers(value)
    else:
        yield f"{name}: {value!r:.200}"


def _numbers(value: Any) -> str:
    """Range of an array's numbers, what is not finite, and the first bytes or the few different values."""
    if value.size == 0 or (device.is_cuda(value) and device.is_capturing()):
        return ""
    array = np.asarray(device.as_numpy(value))  # a matrix has two axes whatever is done to it
    if array.dtype.kind not in "biuf" and array.dtype not in check.FLOATS:
        return ""  # the call says so
    if array.dtype == np.uint8:
        return f", first {array.reshape(-1)[:_FEW].tolist()}"
    if array.dtype == np.int8:
        return f", unique {np.unique(array)[:_FEW].tolist()}"
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    low, high = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
    nans = int(np.isnan(numbers).sum())
    listed = " ".join(f"{number:.6g}" for number in numbers.reshape(-1)[:_FEW])
    few = f", values {listed}" if numbers.size <= _FEW else ""
    return f", min={low:.6g} max={high:.6g} nan={nans} inf={numbers.size - finite.size - nans}{few}"
