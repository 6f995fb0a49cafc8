"""`cuquant info`: what was found here, and why there is no GPU, on machines that this one only plays."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuquant as cq
from cuquant import device, info
from cuquant.cuda import jit, sources

ROOT = Path(__file__).parents[1]

Machine = Callable[[Any], None]


class CUDARuntimeError(RuntimeError):
    """CuPy's error of the CUDA runtime."""


def fake_cupy(
    count: int = 1,
    error: Exception | None = None,
    nvrtc_error: Exception | None = None,
    capability: tuple[int, int] = (9, 0),
) -> Any:
    """As much of CuPy as is asked about a machine with an H200, CUDA 12.8 and a driver for 13.0."""

    def get_device_count() -> int:
        if error is not None:
            raise error
        return count

    def nvrtc_version() -> tuple[int, int]:
        if nvrtc_error is not None:
            raise nvrtc_error
        return 12, 8

    major, minor = capability
    properties = {"name": b"NVIDIA H200", "major": major, "minor": minor, "totalGlobalMem": 140 * 2**30}
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=get_device_count,
        getDeviceProperties=lambda number: properties,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12080,
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda: SimpleNamespace(id=0),
        nvrtc=SimpleNamespace(getVersion=nvrtc_version),
    )
    return SimpleNamespace(__version__="14.2.0", cuda=cuda, ndarray=type("ndarray", (), {}))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Call it with a module to be CuPy, or with None for a machine without."""

    def forget() -> None:
        device.gpu_problem.cache_clear()
        device.cupy.cache_clear()

    def become(module: Any) -> None:
        monkeypatch.setitem(sys.modules, "cupy", module)
        forget()

    yield become
    monkeypatch.undo()
    forget()


def test_versions_and_formats(machine: Machine) -> None:
    machine(None)
    facts = info.facts()
    assert facts["cuquant"] == cq.__version__
    assert facts["Python"].startswith(platform.python_version())
    assert facts["NumPy"].startswith(f"{np.__version__}, BLAS ")
    assert facts["gguf"] == version("gguf")
    assert facts["formats"] == ", ".join(cq.formats.names())
    only_read = facts["only read"].replace("exl3-*", "exl3-4").replace(" to ", ", ").split(", ")
    assert [cq.formats.get(name).name for name in only_read] == only_read
    assert facts["kernels"] == str(ROOT / "kernels")


def test_without_cupy_the_extra_to_install_is_named(machine: Machine) -> None:
    machine(None)
    facts = info.facts()
    assert facts["GPU"].startswith("none: CuPy is not installed (")
    assert "pip install '.[cuda12x]' in a checkout of cuquant, or 'cupy-cuda12x[ctk]'" in facts["GPU"]
    assert facts["x @ W.T runs on"] == "NumPy"
    with pytest.raises(RuntimeError, match=r"no CUDA device can be used: CuPy is not .*'\.\[cuda12x\]'"):
        device.cupy()


@pytest.mark.parametrize(
    ("cupy", "problem"),
    [
        (fake_cupy(count=0), "CuPy 14.2.0 finds no GPU on this machine"),
        (
            fake_cupy(error=CUDARuntimeError("cudaErrorInsufficientDriver: driver too old")),
            "CuPy 14.2.0 finds no usable GPU: cudaErrorInsufficientDriver: driver too old (no NVIDIA "
            "driver, or one older than this CuPy's CUDA: cuda13x needs driver 580, cuda12x 525)",
        ),
        (
            fake_cupy(error=CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")),
            "CuPy 14.2.0 finds no usable GPU: cudaErrorNoDevice: no CUDA-capable device is detected",
        ),
        (
            fake_cupy(capability=(7, 0)),
            "the NVIDIA H200 is an sm_70, and kernels need an sm_75 (Turing) or a later GPU",
        ),
    ],
    ids=["no GPU", "no driver", "no device", "old GPU"],
)
def test_cupy_without_a_gpu_is_explained(machine: Machine, cupy: Any, problem: str) -> None:
    machine(cupy)
    facts = info.facts()
    assert facts["GPU"] == f"none: {problem}"
    assert facts["x @ W.T runs on"] == "NumPy"
    assert problem in info.as_text()
    with pytest.raises(RuntimeError, match=re.escape(problem)):
        cq.quantize(np.ones((2, 32), np.float32), "q4_0").to_device("cuda")


def test_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", "/cache")
    machine(fake_cupy())
    facts = info.facts()
    assert facts["CuPy"] == "14.2.0"
    assert facts["GPU"] == "NVIDIA H200, sm_90, 140 GiB"
    assert (facts["CUDA driver"], facts["CUDA runtime"], facts["NVRTC"]) == ("13.0", "12.8", "12.8")
    assert facts["kernel cache"] == "/cache"
    assert "CUDA kernels for CuPy arrays" in facts["x @ W.T runs on"]


def test_a_gpu_without_a_compiler_is_explained(machine: Machine) -> None:
    """CuPy loads NVRTC when it is first asked for, and raises RuntimeError where it is not installed."""
    machine(fake_cupy(nvrtc_error=RuntimeError("CuPy failed to load libnvrtc.so.12: not found")))
    text = info.as_text()
    assert "NVIDIA H200" in text
    assert "CuPy failed to load libnvrtc.so.12" in text


def test_each_fact_has_a_line(machine: Machine) -> None:
    machine(None)
    lines = info.as_text().splitlines()
    assert [line.startswith(name) for name, line in zip(info.facts(), lines, strict=True)] == [True] * 9


def test_the_sources_of_this_checkout() -> None:
    assert sources.folder() == ROOT / "kernels"
    assert (sources.folder() / "ops" / "gemm.cu").is_file()


def test_the_sources_inside_an_installed_package_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "cuquant" / "cuda" / "sources.py"))
    with pytest.raises(FileNotFoundError, match=r"neither in .*cuquant nor beside it.* damaged"):
        sources.folder()
    for place in (tmp_path / "kernels", tmp_path / "cuquant" / "kernels"):
        place.mkdir(parents=True)
        (place / "README.md").touch()
        assert sources.folder() == place


def test_where_kernels_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy makes its folder when it is imported, and fails to be where it cannot."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(file / "kernels"))
    with pytest.warns(UserWarning, match=r"cannot be kept in .*kernels \(.*; set CUPY_CACHE_DIR"):
        device._spare_kernel_cache()
    spare = Path(os.environ["CUPY_CACHE_DIR"])
    assert spare.is_dir()
    device._spare_kernel_cache()  # which is there: no warning
    assert device.kernel_cache() == str(spare)
    spare.rmdir()


def test_kernels_that_can_be_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled and tuned before, as for an image that is mounted read-only."""
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(device, "find_spec", lambda name: name)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))

    def refused(**options: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)  # chmod does not stop root
    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    device._spare_kernel_cache()
    assert device.kernel_cache() == str(tmp_path)


def test_a_kernel_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    class Module:
        def compile(self) -> None:
            compiled.append(os.environ.get("CUPY_CACHE_IN_MEMORY"))
            if not compiled[-1]:
                raise PermissionError("read-only")

    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")
    with pytest.warns(UserWarning, match=r"cannot be kept in .* \(read-only\)"):
        jit._compile(Module())
    jit._compile(Module())
    assert compiled == ["", "1", "1"]


def test_two_threads_cannot_write_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes second tries again, too, and says nothing."""
    compiled = []

    class Module:
        def compile(self) -> None:
            compiled.append(os.environ.get("CUPY_CACHE_IN_MEMORY"))
            if len(compiled) == 1:
                os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # the first one's doing meanwhile
                raise OSError("full")

    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")  # which CuPy takes for no
    jit._compile(Module())
    assert compiled == ["0", "1"]


def test_names_of_what_users_ask_for_or_catch() -> None:
    assert cq.gpu_problem() == device.gpu_problem()
    assert cq.KernelError is jit.KernelError
    with cq.open(ROOT / "examples/data/nano-llama-f16.gguf", "cpu") as model:
        assert type(model.metadata) is cq.Metadata
    assert {"KernelError", "Metadata", "gpu_problem"} <= {*cq.__all__} & {*dir(cq)}
