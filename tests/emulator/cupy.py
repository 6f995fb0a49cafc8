"""CuPy's part, of NumPy arrays: what this library and its GPU tests use of it, on one GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import driver

__version__ = "of the emulator"
_captured_memory: list[Any] = []
"""What a graph's capture has made so far: it lives as long as the graph."""
EDGE = 256
"""Bytes that an array's address is a multiple of, as of CuPy's memory; so many follow it."""


class ndarray(np.ndarray[Any, Any]):
    """An array that NumPy computes with, and that the library takes for a GPU's."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data if self.size else 0, device_id=0)

    def get(self, stream: Any = None, out: Any = None) -> np.ndarray[Any, Any]:
        if out is None:
            return np.array(self.view(np.ndarray))
        out[...] = self
        return out

    def set(self, values: Any) -> None:
        self.view(np.ndarray)[...] = values

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        """NumPy's, never a scalar; arrays of the CPU are refused as CuPy refuses them, and what would have
        none is left to its own operators."""
        if any(getattr(a, "__array_ufunc__", ufunc) is None for a in inputs):
            return NotImplemented
        if any(type(a) is np.ndarray for a in (*inputs, *out)):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if out:
            options["out"] = tuple(np.asarray(a) for a in out)
        result = getattr(ufunc, method)(
            *(np.asarray(a) if isinstance(a, ndarray) else a for a in inputs), **options
        )
        return out[0] if out else _wrapped(result)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """As np.concatenate: of arrays of the GPU it makes one of the GPU."""
        result = super().__array_function__(function, types, args, kwargs)
        return result.view(ndarray) if type(result) is np.ndarray else result

    def __getitem__(self, index: Any) -> Any:
        """As CuPy has it, which takes integers of arrays modulo an axis' extent."""
        parts = index if isinstance(index, tuple) else (index,)
        if not any(part is None or part is Ellipsis for part in parts):
            index = tuple(map(_modulo, parts, self.shape))
        return np.asarray(super().__getitem__(index)).view(ndarray)


def _modulo(part: Any, extent: int) -> Any:
    integers = isinstance(part, np.ndarray) and part.dtype.kind in "iu"
    return np.asarray(part).astype(np.int64) % extent if integers and extent else part


def asarray(array: Any, dtype: Any = None) -> ndarray:
    if isinstance(array, ndarray) and dtype in (None, array.dtype):
        return array
    if hasattr(array, "__cuda_array_interface__"):
        return np.asarray(SimpleNamespace(__array_interface__=array.__cuda_array_interface__)).view(ndarray)
    if driver.captured is not None and not isinstance(array, ndarray):
        raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")
    given = np.asarray(array, dtype)
    made = empty(given.shape, given.dtype)
    made.set(given)
    return made


def asnumpy(array: Any) -> np.ndarray[Any, Any]:
    return np.array(np.asarray(array))


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Filled with bytes 0xFF: NaN in every float type."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(count + 2 * EDGE, 0xFF, np.uint8)
    if driver.captured is not None:
        _captured_memory.append(memory)
    start = -memory.ctypes.data % EDGE
    return memory[start : start + count].view(dtype).reshape(shape).view(ndarray)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    made = empty(shape, np.asarray(value).dtype if dtype is None else dtype)
    made.set(value)
    return made


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def empty_like(array: Any) -> ndarray:
    return empty(array.shape, array.dtype)


def __getattr__(name: str) -> Any:
    """All else is NumPy's, with results that are arrays of this module."""
    found = getattr(np, name)
    if not callable(found) or isinstance(found, type):
        return found

    def function(*arguments: Any, **options: Any) -> Any:
        return _wrapped(found(*arguments, **options))

    return function


def _wrapped(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_wrapped, result))
    return np.asarray(result).view(ndarray) if isinstance(result, np.ndarray | np.generic) else result


class RawModule:
    """A module of kernels, compiled for the CPU."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self._source, self._options = code, options

    def compile(self) -> None:
        self._library = driver.build(self._source, self._options)

    def get_function(self, name: str) -> driver.Function:
        return driver.Function(self._library, name)


class _Elements:
    """A kernel of one thread that goes through float numbers. `params`: "float32 x, float32 y"."""

    def __init__(self, params: str, results: str, name: str, preamble: str = "") -> None:
        self._operands, self._results, self._name = _types(params), _types(results), name
        self._preamble = preamble

    def _run(
        self, body: str, given: Any, shape: tuple[int, ...], result: tuple[int, ...], k: int = 0
    ) -> list[ndarray]:
        """Results of a shape, n numbers each, of operands that are broadcast to another; `all_x` has x."""
        assert driver.captured is None, "what is captured is launched later"
        assert [np.asarray(array).dtype for array in given] == [*self._operands.values()]
        made = [empty(result, dtype) for dtype in self._results.values()]
        arrays = [*(np.broadcast_to(array, shape).copy() for array in given), *made]
        pointers = [f"const {_C[kind]}* all_{name}" for name, kind in self._operands.items()]
        pointers += [f"{_C[kind]}* all_{name}" for name, kind in self._results.items()]
        parameters = ", ".join(["long long n", "long long k", *pointers])
        kernel = f"__global__ void {self._name}({parameters}) {{ if (threadIdx.x == 0) {{ {body} }} }}"
        module = RawModule(f'{self._preamble} extern "C" {kernel}', ())
        module.compile()
        numbers = (int(np.prod(result)), k, *(array.ctypes.data for array in arrays))
        values = [ctypes.c_longlong(number) for number in numbers]
        config = SimpleNamespace(count=0, shared=0, grid=(1, 1, 1), block=(32, 1, 1), attributes=[])
        module.get_function(self._name).launch(config, [*map(ctypes.addressof, values)])
        return made

    def _given_and_out(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return arrays[: len(self._operands)], arrays[len(self._operands) :]

    def _reads(self, at: str) -> str:
        each = self._operands.items()
        return " ".join(f"const {_C[kind]} {name} = all_{name}[{at}];" for name, kind in each)

    def _writes(self) -> str:
        each = self._results.items()
        return " ".join(f"{_C[kind]}& {name} = all_{name}[i];" for name, kind in each)


class ElementwiseKernel(_Elements):
    def __init__(self, params: str, results: str, operation: str, name: str) -> None:
        super().__init__(params, results, name)
        self._body = (
            f"for (long long i = 0; i < n; i++) {{ {self._reads('i')} {self._writes()} {operation}; }}"
        )

    def __call__(self, *arrays: Any) -> Any:
        given, out = self._given_and_out(arrays)
        shape = np.broadcast_shapes(*map(np.shape, arrays))
        return _written(self._run(self._body, given, shape, shape), out)


class ReductionKernel(_Elements):
    """Along the last axis, or all. The post-map knows those operands that are numbers, too."""

    def __init__(
        self,
        params: str,
        results: str,
        mapped: str,
        reduced: str,
        post: str,
        identity: str,
        name: str,
        reduce_type: str | None = None,
        preamble: str = "",
    ) -> None:
        super().__init__(params, results, name, preamble)
        kind = reduce_type or _C[next(iter(self._results.values()))]
        each = f"{self._reads('at')} const {kind} b = {mapped}; const {kind} next = {reduced}; a = next;"
        rows = f"for (long long at = i * k; at < i * k + k; at++) {{ {each} }}"
        last = f"{self._reads('i * k')} {self._writes()} {post};"
        self._body = f"for (long long i = 0; i < n; i++) {{ {kind} a = {identity}; {rows} {last} }}"

    def __call__(self, *arrays: Any, axis: int | None = None, keepdims: bool = False) -> Any:
        given, out = self._given_and_out(arrays)
        if axis is None:
            assert not keepdims
            given = tuple(array.reshape(-1) for array in np.broadcast_arrays(*given))
        *rows, k = np.broadcast_shapes(*map(np.shape, given))
        assert axis in (None, -1, len(rows))
        result = (*rows, 1) if keepdims else tuple(rows)
        return _written(self._run(self._body, given, (*rows, k), result, k), out)


def _written(made: list[ndarray], out: tuple[Any, ...]) -> Any:
    """The first of a kernel's results, which are written to what is there for them."""
    for to, values in zip(out, made, strict=bool(out)):
        assert (to.shape, to.dtype) == (values.shape, values.dtype)
        to[...] = values
    return out[0] if out else made[0]


def _types(parameters: str) -> dict[str, np.dtype[Any]]:
    """Names of operands or results, and their types."""
    pairs = [each.split() for each in parameters.split(",")]
    return {name: np.dtype(kind) for kind, name in pairs}


_C = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


class _Context:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Graph:
    def __init__(self, launches: list[Callable[[], None]], memory: list[Any]) -> None:
        self._launches, self._memory = launches, memory

    def launch(self, stream: Any = None) -> None:
        for launch in self._launches:
            launch()


class Stream(_Context):
    """All of them are one: what is launched has run."""

    ptr = 0

    def __init__(self, non_blocking: bool = False) -> None:
        pass

    def is_capturing(self) -> bool:
        return driver.captured is not None

    def begin_capture(self) -> None:
        from cuquant.cuda import buffers

        buffers.scratch().captured = True  # the default stream's, of which no GPU makes a graph
        driver.captured = []
        _captured_memory.clear()

    def end_capture(self) -> Graph:
        launches, driver.captured = driver.captured, None
        assert launches is not None
        # CuPy would give that memory to others, to which the graph would write.
        kept = [sys.getrefcount(memory) > 3 for memory in _captured_memory]
        assert all(kept) or not launches, "memory was taken and given back while a graph was captured"
        return Graph(launches, _captured_memory.copy())


class Device(_Context):
    compute_capability = "80"
    attributes = {"MultiProcessorCount": 108}  # noqa: RUF012

    def __init__(self, number: int = 0) -> None:
        self.id = number

    def synchronize(self) -> None:
        pass

    @classmethod
    def version(cls) -> dict[str, int]:
        return dict(zip(("major", "minor"), map(int, cls.compute_capability), strict=True))


class Pinned(ctypes.Array[ctypes.c_char]):
    """Memory that holds what others left there."""

    _length_, _type_ = 4096, ctypes.c_char

    @classmethod
    def made(cls) -> Pinned:
        return cls.from_buffer(bytearray(b"\xa5" * cls._length_))

    @property
    def ptr(self) -> int:
        return ctypes.addressof(self)


class CUDARuntimeError(Exception):
    """CuPy's, never raised."""


random = SimpleNamespace(
    standard_normal=lambda shape, dtype=float: asarray(
        np.random.default_rng(0).standard_normal(shape, dtype)
    ),
)
cuda = SimpleNamespace(
    Device=Device,
    Stream=Stream,
    alloc_pinned_memory=lambda size: Pinned.made(),
    compiler=SimpleNamespace(CompileException=driver.CompileError),
    get_current_stream=Stream,
    nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
    runtime=SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda number: {"name": b"emulated GPU", **Device.version()},
    ),
)
