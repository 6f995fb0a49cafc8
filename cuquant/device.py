"""Where arrays live, and why the GPU is or is not available.

Not having CuPy, or having it without a usable GPU, is a state to explain, never an import error: CuPy is
imported when something first asks for it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import sys
import tempfile
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

OLDEST_GPU = 75
"""Compute capability of the oldest GPU that kernels run on."""
DRIVER_HINT = "no NVIDIA driver, or one older than this CuPy's CUDA: cuda13x needs driver 580, cuda12x 525"
INSTALL_HINT = (
    "pip install '.[cuda12x]' in a checkout of cuquant, or 'cupy-cuda12x[ctk]' anywhere "
    "(cuda13x for a CUDA 13 driver)"
)


@cache
def gpu_problem() -> str | None:
    """Why CUDA arrays cannot be used here, in one sentence; None where they can.

    That is found once in a process: CuPy is imported, and asked for GPUs, a driver and NVRTC.
    """
    _spare_kernel_cache()
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error}): {INSTALL_HINT}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        old = f" ({DRIVER_HINT})" if "InsufficientDriver" in str(error) else ""
        return f"CuPy {cupy.__version__} finds no usable GPU: {error}{old}"
    if not count:
        return f"CuPy {cupy.__version__} finds no GPU on this machine"
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        gpu = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        found = f"CuPy {cupy.__version__} finds the {gpu}, but no NVRTC to compile kernels"
        return f"{found} ({error}): {INSTALL_HINT}"
    return _too_old([cupy.cuda.runtime.getDeviceProperties(number) for number in range(count)])


def _too_old(gpus: list[dict[str, Any]]) -> str | None:
    """What is said where kernels run on none of these GPUs."""
    if any(gpu["major"] * 10 + gpu["minor"] >= OLDEST_GPU for gpu in gpus):
        return None
    first = gpus[0]
    return (
        f"the {first['name'].decode()} is an sm_{first['major']}{first['minor']}, "
        f"and kernels need an sm_{OLDEST_GPU} (Turing) or a later GPU"
    )


def kernel_cache() -> str:
    """The folder where CuPy keeps compiled kernels."""
    return os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")


def tuned_file(gpu: str | None = None) -> Path:
    """Where the products are kept that were tuned on GPUs of a name, by default the current one's: beside the
    compiled kernels."""
    words = re.findall("[a-z0-9]+", (gpu or name("cuda")).lower())
    return Path(kernel_cache()) / f"cuquant-tuned-{'-'.join(words)}.json"


def _spare_kernel_cache() -> None:
    """Give CuPy a temporary folder for compiled kernels where it has none and cannot make one, else it could
    not be imported."""
    if "cupy" in sys.modules or find_spec("cupy") is None:
        return
    folder = kernel_cache()
    try:
        os.makedirs(folder, exist_ok=True)
        return  # what is in it can be read, even where nothing can be written (`jit` says so then)
    except OSError as error:
        problem = error
    os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cuquant-kernels-")
    atexit.register(shutil.rmtree, os.environ["CUPY_CACHE_DIR"], ignore_errors=True)
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({problem}): every process will compile them anew; "
        "set CUPY_CACHE_DIR to a folder that can be written",
        stacklevel=2,
    )


def default() -> str:
    """Where models are opened unless asked otherwise: "cuda" where it can be used, else "cpu"."""
    return "cpu" if gpu_problem() else "cuda"


@cache
def cupy() -> ModuleType:
    """The cupy module; RuntimeError with the reason where there is no GPU to use it on."""
    problem = gpu_problem()
    if problem is not None:
        raise RuntimeError(f"no CUDA device can be used: {problem}")
    import cupy

    module: ModuleType = cupy
    return module


def is_cuda(array: Any) -> bool:
    """Whether an array is CuPy's. Imports nothing: an array of CuPy's means that CuPy is loaded, or that
    another thread has begun to, and has come to its arrays."""
    kind = type(array)
    known = _is_cuda.get(kind)  # asked of every operand of every call
    if known is None:
        arrays = getattr(sys.modules.get("cupy"), "ndarray", None)
        known = _is_cuda[kind] = arrays is not None and issubclass(kind, arrays)
    return known


_is_cuda: dict[type, bool] = {}


@cache
def driver() -> Any:
    """The CUDA driver's library, which is there where CuPy has found a GPU."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


_INVALID_CONTEXT = 201


def once_more(status: int, function: Any, *arguments: Any) -> None:
    """Repeat a call of the driver whose status is not 0: in a thread's first use of CUDA, which has no
    context, with one; CUDADriverError where that fails, too, or the status is another."""
    if status == _INVALID_CONTEXT:
        cupy().cuda.runtime.free(0)  # takes the device's context for this thread
        status = function(*arguments)
    if status:
        raise cupy().cuda.driver.CUDADriverError(status)


def is_capturing() -> bool:
    """Whether the current stream is capturing a CUDA graph."""
    return bool(cupy().cuda.get_current_stream().is_capturing())


def as_numpy(array: Any) -> Any:
    """A NumPy array of a NumPy or CuPy array."""
    return array.get() if is_cuda(array) else array


def name(where: str) -> str:
    """What computes on "cpu" or "cuda", for people: "numpy", or the current GPU's name."""
    if where == "cpu":
        return "numpy"
    runtime = cupy().cuda.runtime
    return str(runtime.getDeviceProperties(runtime.getDevice())["name"].decode())


def of(array: Any) -> str:
    """ "cpu" for a NumPy array, "cuda" for a CuPy array."""
    return "cuda" if is_cuda(array) else "cpu"


def is_current(array: Any) -> bool:
    """Whether an array is where work is done now: NumPy's always, CuPy's on the current GPU."""
    return not is_cuda(array) or array.data.device_id == cupy().cuda.runtime.getDevice()


def wait_for(array: Any) -> None:
    """Wait until what the current stream of an array's GPU has been given is done: another GPU's is to read
    it."""
    cuda = cupy().cuda
    with cuda.Device(array.data.device_id):
        cuda.get_current_stream().synchronize()


def synchronize() -> None:
    """Wait for what all streams of the current GPU have been given."""
    cupy().cuda.Device().synchronize()


def backend(on_gpu: bool) -> ModuleType:
    """The module that computes there: cuquant.cuda.backend or cuquant.cpu, of the same functions."""
    return _cuda() if on_gpu else _cpu()


@cache
def _cuda() -> ModuleType:
    from .cuda import backend as cuda

    return cuda


@cache
def _cpu() -> ModuleType:
    from . import cpu

    return cpu
