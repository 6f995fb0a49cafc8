"""Compiling ahead: what is compiled, and that products then find it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import Run, assert_one_line_error
from gguf_files import NANO

import cuquant as cq
from cuquant import device, formats, jit, plan
from cuquant.warmup import BATCHES, kernels


def test_kernels_of_a_weight() -> None:
    found = kernels(formats.get("q4_0"), (14336, 4096), (1, 256), plan.Gpu(90))
    for m in (1, 256):
        assert plan.gemm(formats.get("q4_0"), m, 14336, 4096, 1, True, plan.Gpu(90)).plan.kernel in found
    assert {kernel.op for kernel in found} == {"repack", "activations", "gemm"}
    assert {"prepare_rows", "prepare_halves", "round_halves"} <= {kernel.entry for kernel in found}
    assert len(found) == len(set(found))


def test_larger_groups_are_those_that_the_gpu_keeps() -> None:
    found = kernels(formats.get("int4-128"), (256, 512), BATCHES, plan.Gpu(80))
    assert {k.format for k in found if k.op == "gemm"} == {formats.get("int4-128").for_kernels.header}


def test_kernels_of_tiles_and_of_experts() -> None:
    trellis = kernels(formats.get("trellis3"), (256, 300), (1, 64), plan.Gpu(90))
    assert {k.op for k in trellis} == {"repack_trellis", "activations", "gemm"}
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
def test_command_on_a_gpu(run: Run) -> None:
    done = run("warmup", NANO, "--batches", "1")
    assert (done.status, done.out) == (0, "")
    assert "0 kernels ready" in done.err


@pytest.mark.gpu
def test_a_batch_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        cq.warmup([], (0,))


def test_what_is_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cupy", lambda: None)
    with pytest.raises(TypeError, match="are QuantizedArrays, not ndarray"):
        cq.warmup([np.zeros((4, 4))])  # type: ignore[list-item]
