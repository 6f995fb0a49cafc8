"""The CUDA driver's part: libraries of kernels, made by g++, and launches on this thread."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .translate import translate

HERE = Path(__file__).parent
COMPILER = ["g++", "--std=c++17", "-Og", "-w", "-fPIC", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing"]
COMPILER += ["-fno-exceptions", "-fno-threadsafe-statics"]
COMPILER += ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]  # device.h has their part
LIBRARY = ["-shared", "-nodefaultlibs", "-x", "c++", "-", "-lm", "-lc", "-o"]
STACKS = 4096 * (256 << 10)
"""Bytes of the stacks of a cluster's threads (device.h)."""
CLUSTERS = 4
"""The launch attribute that asks for them."""
capability = 80
"""Of the GPU. Those before 90 take no launch attributes."""
_one_at_a_time = threading.Lock()
_functions: list[Function] = []
captured: list[Callable[[], None]] | None = None
"""Launches of the graph that is being captured."""


@cache
def _stacks() -> Any:
    return (ctypes.c_char * STACKS).from_buffer(mmap.mmap(-1, STACKS))


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="emulated-kernels-")


class CompileError(Exception):
    """The compiler's messages."""


def build(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a kernel source; kept in CUPY_CACHE_DIR if that is set, else until the end."""
    arch = f"-D__CUDA_ARCH__={900 if '-arch=sm_90a' in options else 800}"
    flags = [option for option in options if not option.startswith("-arch")]
    expanded = _output(["g++", "-x", "c++", "-E", arch, *flags, "-"], source)
    text = f"namespace {{\n{translate(expanded)}\n}}\n"
    header = _made(".h.gch", [*COMPILER, arch, "-x", "c++-header", str(HERE / "ptx.h"), "-o"], "")
    command = [*COMPILER, arch, "-include", str(header.with_suffix("")), *LIBRARY]
    return ctypes.CDLL(str(_made(".so", command, text)))


def _made(suffix: str, command: list[str], text: str) -> Path:
    """The file that the compiler makes of a text and the emulator's headers; kept, and made once."""
    headers = [path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.h"))]
    key = hashlib.sha256("\0".join((text, *command, *headers)).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or _own_folder().name)
    result = folder / f"{key}{suffix}"
    if not result.exists():
        file, made = tempfile.mkstemp(suffix, dir=folder)
        os.close(file)
        try:
            _output([*command, made], text)
        except CompileError:
            os.unlink(made)
            raise
        os.replace(made, result)
    return result


def _output(command: list[str], text: str) -> str:
    """Of the compiler."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr[:4000])
    return done.stdout


class Function:
    """A kernel of a library, with what CuPy's has. Its address is its number."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.max_dynamic_shared_size_bytes = self.preferred_shared_memory_carveout = 0
        self.shared_size_bytes = 1 << 10  # more than most kernels declare
        self._start = library[f"emulated_{name}"]
        self._start.restype = ctypes.c_char_p
        sizes = library[f"emulated_sizes_{name}"]
        sizes.restype = ctypes.POINTER(ctypes.c_uint)
        self._sizes: list[int] = []
        while size := sizes()[len(self._sizes)]:
            self._sizes.append(size)
        _functions.append(self)
        self.kernel = SimpleNamespace(ptr=len(_functions))

    def launch(self, config: Any, arguments: Any) -> None:
        """Now, or with the graph that is being captured."""
        attributes = [config.attributes[i] for i in range(config.count)]
        assert not attributes or capability >= 90
        cluster = next((a.value[0] for a in attributes if a.id == CLUSTERS), 1)
        assert config.shared <= max((48 << 10) - self.shared_size_bytes, self.max_dynamic_shared_size_bytes)
        given = [
            ctypes.create_string_buffer(ctypes.string_at(address, size), size)
            for address, size in zip(arguments, self._sizes, strict=True)
        ]
        grid = (ctypes.c_uint * 3)(*config.grid)
        threads, shared = config.block[0], config.shared

        def start() -> None:
            pointers = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
            with _one_at_a_time:
                problem = self._start(pointers, grid, threads, shared, cluster, _stacks())
            if problem is not None:
                raise RuntimeError(f"a kernel failed: {problem.decode()}")

        start() if captured is None else captured.append(start)


class Driver:
    """Of libcuda what kernels need."""

    @staticmethod
    def cuLaunchKernelEx(config: Any, function: ctypes.c_void_p, arguments: Any, extra: None) -> int:
        assert function.value is not None
        _functions[function.value - 1].launch(config._obj, arguments)
        return 0

    @staticmethod
    def cuTensorMapEncodeTiled(
        to: ctypes.c_void_p, kind: int, rank: int, address: ctypes.c_void_p, *given: Any
    ) -> int:
        """A map as hopper.h takes it; 1 (invalid value) where the driver refuses."""
        dims, strides, box, steps, interleave, swizzle, _, fill = given
        assert (kind, rank, list(steps), interleave, fill) == (6, 5, [1] * 5, 0, 0)
        assert to.value is not None
        if (address.value or 0) % 16 or any(s % 16 for s in strides) or not all(0 < b <= 256 for b in box):
            return 1
        if to.value % 64 or box[0] * 2 % 16 or (swizzle and box[0] * 2 > 128) or 0 in dims:
            return 1
        packed = struct.pack("=Q4QI5I5I", address.value or 0, *strides, int(swizzle == 3), *dims, *box)
        ctypes.memmove(to.value, packed, len(packed))
        return 0
