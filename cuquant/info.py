"""What `cuquant info` says: versions, the GPU or why there is none, and what would run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, device, formats
from .cuda import sources
from .formats.exl3 import BITS, GENERATORS, Exl3
from .plan.tuning import Tuned


def facts() -> dict[str, str]:
    """Facts by name, in reading order."""
    found = {
        "cuquant": __version__,
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "NumPy": f"{np.__version__}, BLAS {_blas()}",
        "gguf": _version("gguf"),
        "formats": ", ".join(formats.names()),
        "only read": ", ".join(_read_only()),
        "kernels": str(sources.folder()),
    }
    problem = device.gpu_problem()
    found |= _gpu() if problem is None else {"GPU": f"none: {problem}"}
    found["x @ W.T runs on"] = "NumPy" if problem else "NumPy for NumPy arrays, CUDA kernels for CuPy arrays"
    return found


def _read_only() -> list[str]:
    """Names, those of EXL3 in short."""
    _, *generators = GENERATORS
    others = [name for name in formats.names_of_read_only() if not isinstance(formats.get(name), Exl3)]
    return [f"{Exl3(BITS[0])} to {Exl3(BITS[-1])}", *(f"exl3-*-{each}" for each in generators), *others]


def as_text() -> str:
    """The facts, one a line."""
    from tabulate import tabulate

    return tabulate(facts().items(), tablefmt="plain", disable_numparse=True)


def _blas() -> str:
    config: dict[str, Any] = np.show_config(mode="dicts")  # type: ignore[call-overload, assignment, unused-ignore]
    blas = config.get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gpu() -> dict[str, str]:
    """The current GPU, the driver and the compiler that CuPy uses, and where compiled kernels are kept."""
    cupy = device.cupy()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    arch, memory = f"sm_{properties['major']}{properties['minor']}", properties["totalGlobalMem"] / 2**30
    return {
        "CuPy": cupy.__version__,
        "GPU": f"{properties['name'].decode()}, {arch}, {memory:.0f} GiB",
        "CUDA driver": cuda_version(runtime.driverGetVersion()),
        "CUDA runtime": cuda_version(runtime.runtimeGetVersion()),
        "NVRTC": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "kernel cache": device.kernel_cache(),
        "tuned products": _tuned(device.tuned_file(properties["name"].decode())),
    }


def _tuned(file: Path) -> str:
    try:
        count = len(Tuned.read(file))
    except (OSError, ValueError) as error:
        return f"{file} is not used: {error}"
    return f"{count}, in {file}" if count else "none"


def cuda_version(number: int) -> str:
    """13.2, of CUDA's 13020."""
    return f"{number // 1000}.{number % 1000 // 10}"
