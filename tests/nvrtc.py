"""NVRTC without CuPy or a GPU, by ctypes: compile for any architecture and read the resource report."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cuquant import sources
from cuquant.plan import Kernel


class Report(NamedTuple):
    """The worst of a module's functions: registers per thread, bytes of stack and of spills."""

    registers: int
    stack: int
    spills: int
    arch: str


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC from NVIDIA's wheels (CUDA 12 or 13), or from where the system's loader looks."""
    candidates = ["libnvrtc.so.13", "libnvrtc.so.12"]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        candidates = [*map(str, sorted(Path(root).glob("*/lib/libnvrtc.so.1[0-9]"))), *candidates]
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    return None


def compile(kernel: Kernel, arch: str) -> Report:
    """Compile as the loader does, for "sm_90a" and the like; AssertionError with the log where that fails."""
    source = sources.flatten(kernel.op, kernel.format)
    return compile_text(source, arch, ("-ftz=true", *kernel.defines), f"{kernel} for {arch}")


def compile_text(text: str, arch: str, options: tuple[str, ...] = (), what: str = "") -> Report:
    """The same for a source of one's own."""
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    flags = ("--std=c++17", f"-arch={arch}", "--ptxas-options=-v", *options)
    argv = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    status = nvrtc.nvrtcCompileProgram(program, len(flags), argv)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    log = buffer.value.decode()
    assert status == 0, f"{what}:\n{log}"
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert registers, f"no resource report in the log:\n{log}"
    frames = [(int(a), int(b)) for a, b in re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", log)]
    return Report(max(registers), max(a for a, _ in frames), max(b for _, b in frames), arch)
