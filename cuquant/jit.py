"""Compile a kernel on first use, and launch it.

CuPy compiles through NVRTC and keeps the result on disk; here a kernel is compiled once per process and
device, also when threads ask for it together.
"""

from __future__ import annotations

import threading
from typing import Any

from . import device, sources
from .plan import Kernel, Plan

_functions: dict[tuple[int, Kernel], Any] = {}
_modules: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()


class KernelError(RuntimeError):
    """A kernel did not compile; the message has its name, its options and the compiler's log."""


def launch(plan: Plan, *arguments: Any) -> None:
    """Start a plan's kernel on the current device and stream. Arguments are arrays and NumPy scalars."""
    cupy = device.cupy()
    key = (cupy.cuda.runtime.getDevice(), plan.kernel)
    function = _functions.get(key)
    if function is None:
        function = _function(*key)
    function(plan.grid, (plan.block, 1, 1), arguments, shared_mem=plan.shared)


def _function(device_id: int, kernel: Kernel) -> Any:
    """The compiled function, compiled now if no thread has done so."""
    with _lock:
        function = _functions.get((device_id, kernel))
        if function is None:
            function = _module(device_id, kernel).get_function(kernel.entry)
            if kernel.max_shared > 48 << 10:  # beyond this a function must ask
                function.max_dynamic_shared_size_bytes = kernel.max_shared
            _functions[device_id, kernel] = function
    return function


def _module(device_id: int, kernel: Kernel) -> Any:
    """The compiled module; kernels of one file with the same constants share it."""
    key = (device_id, kernel.op, kernel.format, kernel.constants)
    if key not in _modules:
        cupy = device.cupy()
        code = sources.flatten(kernel.op, kernel.format)
        module = cupy.RawModule(code=code, options=("--std=c++17", *kernel.defines))
        try:
            module.compile()
        except cupy.cuda.compiler.CompileException as error:
            options = " ".join(kernel.defines)
            raise KernelError(
                f"{kernel.op}.cu for {kernel.format} did not compile ({options}):\n{error}"
            ) from None
        _modules[key] = module
    return _modules[key]
