"""Mixtures of experts on a GPU: every core's grouped launches against float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from mixtures import (
    BF16,
    F,
    check_in_a_graph,
    close,
    gauss,
    kernels_of,
    leveled,
    on_gpu,
    reference,
    routed,
    stacks,
)

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.cuda import moe as cuda_moe, moe_memory
from cuquant.plan.moe import Load

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("grouped")]
FORMATS = ("q4_0", "q5_1", "q8_0", "kbit3", "mxfp4", "int4-128-zeros")
MIXED = ("kbit3", "q5_1", "q8_0")


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    loads = [Load(t, 2, 5) for t in (3, 6, 12, 60, 150)] + [Load(t, 2, 8) for t in (1, 4, 16, 200, 300)]
    loads += [Load(t, 3, 9) for t in (5, 40, 600)] + [Load(t, 2, 2) for t in (4, 90, 400)]
    kernels = set()
    for load, name in product(loads, (*FORMATS, *MIXED)):
        if name == "q4_0" or load.tokens in (3, 6, 60, 150):
            kernels |= kernels_of(name, load, True, (384, 256), (72, 384))
    compile_ahead(kernels)


@pytest.mark.parametrize("format", [*FORMATS, MIXED], ids=str)
@pytest.mark.parametrize("tokens", [3, 150], ids=["few", "many"])
def test_formats_and_types(format: Any, tokens: int) -> None:
    """The decode core, and the wgmma core (elsewhere the mma core)."""
    experts = stacks(format, k=256, hidden=384, n=72)
    ids, probs = routed(tokens, 5, 2)
    for dtype in (F, np.dtype(np.float16), BF16):
        x, there_ids, there_probs = on_gpu(gauss(tokens, 256).astype(dtype), ids, probs)
        y = cq.moe(x, experts, there_ids, there_probs)
        close(y, reference(x, experts, ids, probs), dtype)
    x = cq.quantize(device.cupy().asarray(gauss(tokens, 256)), "q8_1")
    expected = reference(x, experts, ids, probs)
    y = testing.as_numpy(cq.moe(x, experts, there_ids, there_probs))
    # What `down` multiplies is rounded to q8_1, too: on the CPU to the same blocks.
    same = cq.moe(x.to_device("cpu"), cq.Experts(*(w.to_device("cpu") for w in experts)), ids, probs)
    assert testing.nmse(y, same) <= 1e-5
    assert testing.nmse(y, expected) <= 1e-3
    rebuilt = cq.from_blocks(x.blocks, "q8_1", x.shape)  # without the rows that came with the blocks
    np.testing.assert_array_equal(testing.as_numpy(cq.moe(rebuilt, experts, there_ids, there_probs)), y)


@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 257, 1500])
@pytest.mark.parametrize(
    ("count", "top_k"), [(1, 1), (2, 2), (8, 2), (8, 8), (64, 1), (64, 8), (256, 8), (700, 2)]
)
def test_sizes(tokens: int, count: int, top_k: int) -> None:
    experts = stacks("q4_0", count, k=64, hidden=96, n=24)
    x, ids, probs = gauss(tokens, 64), *routed(tokens, count, top_k)
    y = cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:])
    close(y, reference(x, experts, ids, probs))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0", "kbit3", "kbit4", "mxfp4"])
@pytest.mark.parametrize("shape", [(14_336, 64), (64, 14_336)], ids=["gate", "down"])
def test_as_many_rows_as_models_have(name: str, shape: tuple[int, int]) -> None:
    """Tiles that are chosen by how many experts are likely hit: tall ones, and blocks that are left over."""
    hidden, n = shape
    experts = stacks(name, 8, k=64, hidden=hidden, n=n)
    for tokens in (1, 2, 4, 6, 16):
        x, ids, probs = gauss(tokens, 64), *routed(tokens, 8, 2)
        there = on_gpu(x, ids, probs)
        close(cq.moe(there[0], experts, *there[1:]), reference(x, experts, ids, probs))


def test_many_tokens() -> None:
    experts = stacks("q4_0", 8, k=256, hidden=512, n=256)
    x, ids, probs = on_gpu(gauss(4096, 256).astype(np.float16), *routed(4096, 8, 2))
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs), np.float16)


@pytest.mark.parametrize("tokens", [5, 40, 600])
@pytest.mark.parametrize("kind", ["one", "two", "last", "repeated", "out of range", "lost"])
def test_skewed_routing(tokens: int, kind: str) -> None:
    experts = stacks("q4_0", 9)
    x, probs = gauss(tokens, 128), gauss(tokens, 3, seed=3)
    ids = np.zeros((tokens, 3), np.int64) + {"two": [1, 4, 1], "last": [8, 8, 7]}.get(kind, [2, 2, 2])
    if kind == "repeated":
        ids = np.random.default_rng(0).integers(0, 3, ids.shape)
    if kind == "out of range":
        ids = np.random.default_rng(0).integers(0, 9, ids.shape)
        ids[::4, 1], ids[1, 0], ids[2, 2] = -1, 9, 2**40
    if kind == "lost":
        ids[:] = [2, -5, 3]
    there = on_gpu(x, ids, probs)
    close(cq.moe(there[0], experts, *there[1:]), reference(x, experts, ids, probs))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
@pytest.mark.parametrize("probs_dtype", [np.dtype(np.float16), BF16], ids=str)
def test_ids_and_probabilities_of_any_type(dtype: Any, probs_dtype: Any) -> None:
    experts = stacks("q4_0")
    x, ids, probs = gauss(6, 128), *routed(6, 5, 2)
    ids, probs = ids.astype(dtype), probs.astype(probs_dtype)
    expected = reference(x, experts, ids.astype(int), probs)
    there, there_ids, there_probs = on_gpu(x, ids, probs)
    close(cq.moe(there, experts, there_ids, there_probs), expected)
    close(cq.moe(there, experts, ids, probs), expected)  # NumPy's
    close(cq.moe(there, experts, there_ids[:, ::-1], there_probs[:, ::-1]), expected)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_erf", "silu"])
@pytest.mark.parametrize("tokens", [4, 90, 400])
def test_activations(activation: str | None, tokens: int) -> None:
    experts = stacks("q4_0", 2)
    x, ids, probs = gauss(tokens, 128), *routed(tokens, 2, 2)
    y = cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:], activation)
    close(y, reference(x, experts, ids, probs, activation))


@pytest.mark.parametrize("magnitude", [1e-12, 1e-8, 1.0, 1e8])
def test_magnitudes(magnitude: float) -> None:
    experts = stacks("q8_0")
    for tokens in (6, 60):
        x, ids, probs = gauss(tokens, 128) * F(magnitude), *routed(tokens, 5, 3)
        y = cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:])
        close(y, reference(x, experts, ids, probs))


@pytest.mark.parametrize("factors", [(1, 1, 1), (12, 0.1, 1), (1e-3, 5, 0.02)])
def test_numbers_that_masks_make(factors: tuple[float, float, float]) -> None:
    """kbit2, lifted alike or as each magnitude wants it: gate and up in one launch, or in two."""
    parts = (part.dequantize() * F(by) for part, by in zip(stacks("kbit2"), factors, strict=True))
    experts = cq.Experts(*(cq.quantize(part, "kbit2") for part in parts))
    gate, up, _ = (part.fragments().lift for part in experts)
    assert (gate == up) == (factors[0] == factors[1])
    for tokens in (1, 8, 60):
        x, ids, probs = gauss(tokens, 128), *routed(tokens, 5, 2)
        y = cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:])
        close(y, reference(x, experts, ids, probs))


def test_rows_with_nan_touch_no_others() -> None:
    experts = stacks("q4_0")
    assert leveled(600, 2, 5)
    for tokens in (6, 60, 600):
        x, ids, probs = on_gpu(gauss(tokens, 128), *routed(tokens, 5, 2))
        clean = testing.as_numpy(cq.moe(x, experts, ids, probs))
        x[2, 5], probs[4, 1], x[5, 1] = np.nan, np.nan, np.inf
        y = testing.as_numpy(cq.moe(x, experts, ids, probs))
        assert not np.isfinite(y[[2, 4, 5]]).any()
        rest = np.setdiff1d(np.arange(tokens), [2, 4, 5])
        np.testing.assert_array_equal(y[rest], clean[rest])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [F, np.dtype(np.float16), BF16], ids=str)
def test_results_go_where_they_should(strided: bool, dtype: Any) -> None:
    cupy = device.cupy()
    experts = stacks("q4_0", n=50)
    x, (ids, probs) = gauss(12, 128), routed(12, 5, 2)
    expected = reference(x, experts, ids, probs)
    guarded = testing.Guarded((3, 4, 50), dtype, strided=strided, xp=cupy)
    there = cupy.zeros((3, 4, 256), F)[..., ::2]
    there[...] = cupy.asarray(x).reshape(3, 4, 128)
    ids, probs = (cupy.asarray(a.reshape(3, 4, 2)) for a in (ids, probs))
    assert cq.moe(there, experts, ids, probs, out=guarded.array) is guarded.array
    close(guarded.array.reshape(12, 50), expected, dtype)
    assert guarded.intact()
    one = cq.moe(there[1, 2], experts, ids[1, 2], probs[1, 2])
    close(one[None], expected[6:7])


@pytest.mark.parametrize("tokens", [4, 300])
def test_the_same_call_gives_the_same_bits(tokens: int) -> None:
    cupy = device.cupy()
    experts = stacks("q4_0", 8, k=512, hidden=768, n=256)
    x, ids, probs = on_gpu(gauss(tokens, 512).astype(np.float16), *routed(tokens, 8, 2))
    first = cq.moe(x, experts, ids, probs)
    out = cupy.empty_like(first)
    different = cupy.zeros((), bool)
    for _ in range(100):
        cq.moe(x, experts, ids, probs, out=out)
        different |= (out.view(np.uint16) != first.view(np.uint16)).any()
    assert not different


@pytest.mark.parametrize("format", ["q4_0", "trellis3"])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_a_step_in_a_graph(tokens: int, format: str) -> None:
    check_in_a_graph(stacks(format, 8, k=256, hidden=512, n=256), tokens, 4)


def test_more_tokens_than_the_workspace_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_memory, "WORKSPACE", 1 << 20)
    assert leveled(600, 2, 5)  # of which about as many are taken at a time
    experts = stacks("q4_0")
    x, ids, probs = on_gpu(gauss(4000, 128), *routed(4000, 5, 2))
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))
    quantized = cq.quantize(x, "q8_1")
    y = cq.moe(quantized, experts, ids, probs)
    assert testing.nmse(testing.as_numpy(y), reference(quantized, experts, ids, probs)) <= 1e-3


def test_float_experts_fallback() -> None:
    cupy = device.cupy()
    quantized = stacks("q4_0")
    floats = quantized._replace(up=quantized.up.dequantize())
    x, ids, probs = gauss(30, 128), *routed(30, 5, 2)
    ids[3, 0] = 9
    there = on_gpu(x, ids, probs)
    assert not cuda_moe.takes(cupy.asarray(x), *floats, 2)
    close(cq.moe(there[0], floats, *there[1:]), reference(x, quantized, ids, probs))


def test_ids_of_the_gpu_need_x_there() -> None:
    cupy = device.cupy()
    experts = cq.Experts(*(w.to_device("cpu") for w in stacks("q4_0")))
    ids, probs = routed(6, 5, 2)
    with pytest.raises(TypeError, match="expert_ids is a CuPy array"):
        cq.moe(gauss(6, 128), experts, cupy.asarray(ids), probs)


def test_more_experts_than_the_kernels_take_fallback() -> None:
    count = plan.moe.MOST_EXPERTS + 1
    experts = stacks("q4_0", count, k=32, hidden=32, n=16)
    x, ids, probs = on_gpu(gauss(3, 32), *routed(3, count, 2))
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))
