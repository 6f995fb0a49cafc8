"""Machine code of kernels: the size of their loops, where NVIDIA's disassembler is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from .. import device
from ..cuda import jit, sources
from ..plan import Kernel

_NAME = "nvdisasm"
_LABEL = re.compile(r"^(\.L\w+):", re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")


class Loop(NamedTuple):
    """An innermost loop: its instructions, and how many of them are those that were asked for."""

    instructions: int
    marked: int


def disassembler() -> str | None:
    """Where nvdisasm is: on the path, in the CUDA toolkit, or in triton's wheel."""
    folders = [Path("/usr/local/cuda/bin")]
    if (toolkit := device.cupy().cuda.get_cuda_path()) is not None:
        folders.insert(0, Path(toolkit) / "bin")
    spec = find_spec("triton")
    for root in spec.submodule_search_locations or () if spec else ():
        folders.append(Path(root) / "backends" / "nvidia" / "bin")
    candidates = (shutil.which(_NAME), *(shutil.which(_NAME, path=str(folder)) for folder in folders))
    return next((found for found in candidates if found), None)


def hot_loops(marks: Mapping[Kernel, str]) -> dict[Kernel, Loop]:
    """For each kernel, the loop with the most of the marked instructions, "HMMA" or so, as compiled for the
    current GPU.

    Kernels without such a loop are left out, and all of them where there is no disassembler.
    """
    program = disassembler()
    if program is None:
        return {}
    found = jit.in_threads(lambda kernel: (kernel, _hot_loop(program, kernel, marks[kernel])), marks)
    return {kernel: loop for kernel, loop in found if loop is not None}


def _hot_loop(program: str, kernel: Kernel, mark: str) -> Loop | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(_cubin(kernel))
        done = subprocess.run((program, "-c", str(path)), capture_output=True, text=True, check=False)
    found = list(loops(done.stdout, kernel.entry, mark)) if done.returncode == 0 else []
    return max(found, key=lambda loop: loop.marked, default=None)


def loops(text: str, entry: str, mark: str) -> Iterator[Loop]:
    """Innermost loops with such instructions, in what nvdisasm says of a function."""
    start = text.find(f"\n.text.{entry}:")
    if start < 0:
        return
    lines = text[start : text.find("//-----", start)].splitlines()
    labels = {match[1]: at for at, line in enumerate(lines) if (match := _LABEL.match(line))}
    spans = []
    for at, line in enumerate(lines):
        match = _INSTRUCTION.search(line)
        if match and match[1].startswith("BRA"):
            target = re.search(r"`\((\.L\w+)\)", match[2])
            begin = labels.get(target[1], at) if target else at
            if begin < at and _count(lines[begin : at + 1], mark).marked:
                spans.append((begin, at + 1))
    for begin, end in spans:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans):
            yield _count(lines[begin:end], mark)


def _count(lines: list[str], mark: str) -> Loop:
    names = [match[1] for line in lines if (match := _INSTRUCTION.search(line))]
    return Loop(sum(name != "NOP" for name in names), sum(name.startswith(mark) for name in names))


def _cubin(kernel: Kernel) -> bytes:
    """A kernel compiled with the options that CuPy and `jit` compile it with."""
    nvrtc, capability = device.cupy().cuda.nvrtc, jit.capability()
    target = f"-arch=sm_{capability}{'a' if capability == 90 else ''}"
    program = nvrtc.createProgram(sources.flatten(kernel.op, kernel.format), f"{kernel.op}.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("--std=c++17", "-ftz=true", target, *kernel.defines))
        return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy takes the last byte for a string's end
    finally:
        nvrtc.destroyProgram(program)
