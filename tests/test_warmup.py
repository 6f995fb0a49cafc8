"""Compiling ahead: what is compiled, and that products then find it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import Run, assert_one_line_error
from gguf_files import NANO

import cuquant as cq
from cuquant import device, formats, plan
from cuquant.cuda import jit
from cuquant.formats.kernels import kernels_of
from cuquant.warmup import BATCHES, kernels


def test_kernels_of_a_weight() -> None:
    found = kernels(formats.get("q4_0"), (14336, 4096), (1, 256), plan.Gpu(90))
    for m in (1, 256):
        problem = plan.Problem(formats.get("q4_0"), m, 14336, 4096, plan.Gpu(90))
        assert plan.gemm(problem).plan.kernel in found
    assert {kernel.op for kernel in found} == {"repack", "activations", "gemm"}
    assert {"prepare_rows", "prepare_halves", "round_halves"} <= {kernel.entry for kernel in found}
    assert len(found) == len(set(found))


def test_columns_that_rows_of_x_end_in_count() -> None:
    """Products plan with K in whole pieces, by which tuned ones are found."""
    seen: set[int] = set()

    class Tuned:
        def choice(self, problem: plan.Problem) -> None:
            seen.add(problem.k)

    tuned: Any = Tuned()
    kernels(formats.get("trellis3"), (4096, 4100), (1, 64), plan.Gpu(90, tuned=tuned))
    assert seen == {4104}


def test_larger_groups_are_those_that_the_gpu_keeps() -> None:
    found = kernels(formats.get("int4-128"), (256, 512), BATCHES, plan.Gpu(80))
    assert {k.format for k in found if k.op == "gemm"} == {kernels_of(formats.get("int4-128")).header}


def test_kernels_of_tiles_and_of_experts() -> None:
    trellis = kernels(formats.get("trellis3"), (256, 300), (1, 64), plan.Gpu(90))
    assert {k.op for k in trellis} == {"repack_trellis", "activations", "gemm"}
    large = kernels(formats.get("trellis3"), (4096, 4096), (4096,), plan.Gpu(90))
    assert {dict(k.constants).get("SIGNS", 0) for k in large if k.op == "gemm"} == {0, 1}
    stack = kernels(formats.get("q4_k"), (8, 256, 512), (1, 512), plan.Gpu(90))
    assert {dict(k.constants).get("GATED") for k in stack if k.op == "gemm"} == {None, 0, 1}
    assert any(k.op == "moe" for k in stack)


@pytest.mark.skipif(device.gpu_problem() is None, reason="there is a GPU")
def test_without_a_gpu(run: Run) -> None:
    with pytest.raises(RuntimeError, match="no CUDA device can be used"):
        cq.warmup(NANO)
    assert_one_line_error(run("warmup", NANO))


def test_an_interruption_waits_only_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_one(device_id: int, kernel: plan.Kernel) -> Any:
        compiled.append(kernel)
        time.sleep(0.1)

    def interrupted(futures: list[Future[Any]]) -> Any:
        raise KeyboardInterrupt

    gpu = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0), Device=nullcontext)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(jit, "_key", lambda device_id, kernel: (device_id, kernel))
    monkeypatch.setattr(jit, "_modules", {})
    monkeypatch.setattr(jit, "_compiled", compile_one)
    monkeypatch.setattr(jit, "as_completed", interrupted)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        list(jit.compile_ahead(kernels(formats.get("q4_0"), (14336, 4096), BATCHES, plan.Gpu(90))))
    assert len(compiled) <= 2


@pytest.mark.gpu
def test_products_compile_nothing_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = device.cupy()
    w = cq.quantize(cupy.random.standard_normal((48, 320), cupy.float32), "q5_1")
    cq.warmup([w], (1, 3, 40))
    assert cq.warmup([w], (1, 3, 40)) == 0

    def compiled(device_id: int, kernel: plan.Kernel) -> Any:
        raise AssertionError(kernel)

    monkeypatch.setattr(jit, "_compiled", compiled)
    for m in (1, 3, 40):
        for dtype in (np.float16, np.float32):
            x = cupy.random.standard_normal((m, 320), cupy.float32).astype(dtype)
            assert (x @ w.T).shape == (m, 48)
        assert (cq.quantize(x, "q8_1") @ w.T).shape == (m, 48)


@pytest.mark.gpu
def test_command_on_a_gpu(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "q4.gguf"
    cq.quantize_file(NANO, model, "q4_0")
    done = run("warmup", model, "--batches", "1")
    assert (done.status, done.out) == (0, "")
    assert re.search(r"q4\.gguf: \d+ kernels? ready", done.err)
    assert "0 kernels ready" in run("warmup", model, "--batches", "1").err
    failed = run("warmup", NANO)
    assert_one_line_error(failed)
    assert "nothing to warm up" in failed.err


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [(0, ValueError, "at least one row"), (1.5, TypeError, "a batch is a float; an integer is needed")],
)
def test_a_batch_of_nothing(
    batch: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cupy", lambda: None)
    with pytest.raises(error, match=message):
        cq.warmup([], (batch,))


def test_one_weight_is_a_list_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack too, which is not its matrices."""
    asked = []

    def ahead(kernels: Iterable[plan.Kernel]) -> Iterator[plan.Kernel]:
        asked.append(list(kernels))
        return iter(asked[-1])

    monkeypatch.setattr(device, "cupy", lambda: None)
    monkeypatch.setattr(jit, "gpu", lambda: plan.Gpu(90))
    monkeypatch.setattr(jit, "compile_ahead", ahead)
    for shape in ((64, 256), (4, 64, 256)):
        w = cq.quantize(np.ones(shape, np.float32), "q4_0")
        assert cq.warmup(w) == cq.warmup([w]) == len(asked[-1]) > 0
        assert asked[-1] == asked[-2]
        assert any(kernel.op == "moe" for kernel in asked[-1]) == (len(shape) == 3)


@pytest.mark.parametrize("wrong", [[np.zeros((4, 4))], np.zeros((4, 4)), 5, None, [[]]])
def test_what_is_no_weight(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cupy", lambda: None)
    kind = type(wrong[0] if isinstance(wrong, (list, np.ndarray)) else wrong).__name__
    with pytest.raises(TypeError, match=f"are QuantizedArrays, not {kind}"):
        cq.warmup(wrong)
    with pytest.raises(TypeError, match="are QuantizedArrays, not Transposed"):
        cq.warmup(cq.quantize(np.ones((2, 32), np.float32), "q4_0").T)  # type: ignore[arg-type]


def test_nothing_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cupy", lambda: None)
    ones = np.ones((2, 32), np.float32)
    vector, activations, empty = (
        cq.quantize(*given) for given in ((ones[0], "q4_0"), (ones, "q8_1"), (ones[:0], "q4_0"))
    )
    for nothing in ([], vector, activations, [vector, activations, empty]):
        with pytest.raises(ValueError, match="nothing to warm up: none of the weights is a quantized matrix"):
            cq.warmup(nothing)
    with pytest.raises(ValueError, match=r"to warm up: no tensor of nano-llama-f16\.gguf is a quantized"):
        cq.warmup(NANO)
