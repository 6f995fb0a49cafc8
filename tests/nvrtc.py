"""NVRTC without CuPy or a GPU, by ctypes: compile for any architecture and read the resource report."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cuquant.cuda import sources
from cuquant.plan import Kernel


class Report(NamedTuple):
    """The worst of a module's functions: registers per thread, bytes of stack and of spills, and bytes of
    shared memory beside the dynamic."""

    registers: int
    stack: int
    spills: int
    shared: int
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
    status, log = _compiled(text, arch, ("--ptxas-options=-v", *options))
    assert status == 0, f"{what}:\n{log}"
    assert "instructions are serialized" not in log, f"products of {what} wait for each other:\n{log}"
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert registers, f"no resource report in the log:\n{log}"
    frames = [(int(a), int(b)) for a, b in re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", log)]
    shared = [int(n) for n in re.findall(r"(\d+) bytes smem", log)]
    return Report(
        max(registers), max(a for a, _ in frames), max(b for _, b in frames), max(shared, default=0), arch
    )


def unequal(kernel: Kernel, values: Mapping[str, int], after: str = "", more: str = "") -> list[str]:
    """Those constants of a kernel's file that have other values, as the compiler sees them for sm_90a before
    it makes code.

    They are asked for, behind `more` lines, where the file ends, or behind the one line that begins with
    `after`.
    """
    text = sources.flatten(kernel.op, kernel.format)
    lines = [f'static_assert(({name}) == {value}, "{name}");' for name, value in values.items()]
    places = [match.end() for match in re.finditer(rf"^ *{re.escape(after)}.*$", text, re.M)]
    assert not after or len(places) == 1, f"{after} begins {len(places)} lines of {kernel.op}.cu"
    place = places[0] if after else len(text)
    text = "\n".join([text[:place], more, *lines, text[place:]])
    status, log = _compiled(text, "sm_90a", ("-fdevice-syntax-only", *kernel.defines))
    found = re.findall(r'error: static assertion failed with "(.*)"', log)
    count = re.search(r"(\d+) errors? detected", log)
    assert len(found) == (int(count[1]) if count else status), f"{kernel}:\n{log}"
    return list(dict.fromkeys(found))


def _compiled(text: str, arch: str, options: tuple[str, ...]) -> tuple[int, str]:
    """NVRTC's status and log."""
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    flags = ("--std=c++17", f"-arch={arch}", *options)
    argv = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    status = nvrtc.nvrtcCompileProgram(program, len(flags), argv)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, buffer.value.decode()
