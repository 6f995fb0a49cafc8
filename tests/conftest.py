"""Tests that run on both backends take `xp`: NumPy always, CuPy under the mark `gpu` where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

# Before NumPy is imported: of processes that have a core each, more threads would wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Before they are imported: their asserts then explain themselves as those of test files do.
pytest.register_assert_rewrite(
    "attending", "caches_there", "commands", "mixtures", "pictures", "products", "scoring"
)

from commands import (  # noqa: E402
    Done,
    Run,
    run as run_here,
)
from synthetic import Spec, write  # noqa: E402

import cuquant as cq  # noqa: E402
from cuquant import check, device  # noqa: E402
from cuquant.cuda import jit  # noqa: E402
from cuquant.plan import Kernel  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Under xdist tests are handed out one by one: none waits for its process while another is idle.

    Not where there is a GPU: every process would read the kernels of every file.
    """
    if device.gpu_problem() is not None:
        config.option.maxschedchunk = 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if device.gpu_problem() is not None:
        items.sort(key=lambda item: item.get_closest_marker("long") is None)
        skip = pytest.mark.skip(reason=f"needs a GPU: {device.gpu_problem()}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def untuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans do not go by what was tuned on this GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "tuned_file", lambda gpu=None: tmp_path_factory.getbasetemp() / "tuned.json")
        yield


@pytest.fixture
def foreign_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some types of GGUF files have no format, as a new one of the gguf package would not."""
    for name in ("iq1_m", "iq2_xs", "iq2_s", "tq1_0"):
        monkeypatch.delitem(cq.formats.base._READ_ONLY, name)


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of xdist's processes one compiles a kernel; others that need it wait, and find it in CuPy's cache."""
    if device.gpu_problem() is not None or "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder, compiled = tmp_path_factory.getbasetemp().parent, jit._compiled

    def once(device_id: int, kernel: Kernel) -> Any:
        name = sha256(repr((kernel.op, kernel.format, kernel.constants)).encode()).hexdigest()
        with FileLock(folder / f"{name}.lock"):
            return compiled(device_id, kernel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_compiled", once)
        yield


@pytest.fixture(scope="module")
def compile_ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Iterable[Kernel]], None]:
    """Compiles what most tests of a file need, on all cores at once.

    Of xdist's processes the first compiles, and the others wait.
    """
    lock = FileLock(tmp_path_factory.getbasetemp().parent / f"{request.module.__name__}.lock")

    def compiled(kernels: Iterable[Kernel]) -> None:
        with lock:
            list(jit.compile_ahead(kernels))

    return compiled


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """The array module of a backend."""
    if request.param == "cuda":
        return device.cupy()
    import numpy

    return numpy


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No mixture on the GPU may fall back to the host, but in tests that say so."""
    from cuquant.ops import moe

    real = moe._mixed

    def mixed(x: Any, *others: Any) -> Any:
        assert "fallback" in request.node.name or not device.is_cuda(check.storage(x))
        return real(x, *others)

    monkeypatch.setattr(moe, "_mixed", mixed)


@pytest.fixture
def own_stream() -> Iterator[None]:
    """A stream that can be captured is the current one."""
    made = device.cupy().cuda.Stream(non_blocking=True)
    device.cupy().cuda.Device().synchronize()
    with made:
        yield
        made.synchronize()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write(folder / f"{name}.gguf", Spec(seed=seed)) for seed, name in enumerate("ab")]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Models that are evaluated, as it happens."""
    seen: list[Path] = []
    real = cq.evaluate

    def counted(model: Path, **options: Any) -> cq.Evaluation:
        seen.append(model)
        return real(model, **options)

    monkeypatch.setattr("cuquant.eval.files.evaluate", counted)
    return seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A dense float16 model."""
    return write(folder / "dense.gguf", Spec())


@pytest.fixture(scope="module")
def q4_0(model: Path, folder: Path) -> Path:
    """The same model, quantized."""
    cq.quantize_file(model, folder / "q4_0.gguf", "q4_0")
    return folder / "q4_0.gguf"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def command(*arguments: object) -> Done:
        return Done(run_here(*arguments), *capsys.readouterr())

    return command
