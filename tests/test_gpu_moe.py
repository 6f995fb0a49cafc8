"""Mixtures of experts on a GPU: routing, grouping, and every core's grouped launches against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from formats_table import TRELLIS
from numpy.typing import NDArray
from test_trellis import random_parts

import cuquant as cq
from cuquant import check, cuda_moe, device, jit, plan, testing
from cuquant.ops import moe as module
from cuquant.plan.moe import Load
from cuquant.plan.wgmma_core import WGMMA_TILES

pytestmark = pytest.mark.gpu
F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("q4_0", "q5_1", "q8_0", "kbit3", "mxfp4", "int4-128")
MIXED = ("kbit3", "q5_1", "q8_0")
TOKENS = (3, 70)
"""Of trellis experts: the decode core, and others, whose rows have signs when they come."""


def gauss(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, F)


def stacks(formats: Any, count: int = 5, k: int = 128, hidden: int = 160, n: int = 48) -> cq.Experts:
    """Experts on the GPU; of one format, or of three."""
    names = formats if isinstance(formats, tuple) else (formats,) * 3
    shapes = [(count, hidden, k), (count, hidden, k), (count, n, hidden)]
    floats = [gauss(*shape, seed=i) / F(np.sqrt(shape[-1])) for i, shape in enumerate(shapes)]
    return cq.Experts(
        *(cq.quantize(w, name).to_device("cuda") for w, name in zip(floats, names, strict=True))
    )


KINDS = ("alike", "signs", "grid", "bare_gate", "bare_up", "apart")


def trellis_stacks(name: str, kind: str, k: int = 160, hidden: int = 192, n: int = 24) -> cq.Experts:
    """Five experts, each with signs of its own. Gate and up are alike or differ in signs or the grid, or one
    has no signs; or scales are too far apart for float16."""
    fmt = cq.formats.get(name)
    made: list[dict[str, Any]] = []
    assert isinstance(fmt, cq.Trellis)
    for seed, shape in enumerate(((5, hidden, k), (5, hidden, k), (5, n, hidden))):
        parts = random_parts(fmt.bits, shape, fmt.group_size, seed=seed)
        parts["grid"] = np.linspace(-1, 2 if (seed, kind) == (1, "grid") else 1, 1 << fmt.bits)
        sizes = np.random.default_rng(seed).uniform(0.5, 1, parts["scales"].shape) / np.sqrt(shape[-1])
        if kind == "apart":
            sizes *= 10.0 ** -(2.5 * np.arange(5)[:, None, None])
        parts["scales"] = np.copysign(sizes, parts["scales"]).astype(F)
        if seed == 1 and kind != "signs":
            parts["su"] = made[0]["su"]
        made.append(parts)
    for i, bare in enumerate(("bare_gate", "bare_up")):
        if kind == bare:
            made[i]["su"] = np.ones((5, k), F)
    return cq.Experts(*(cq.trellis_from_parts(**parts).to_device("cuda") for parts in made))


def routed(tokens: int, count: int, top_k: int, seed: int = 7) -> tuple[NDArray[Any], NDArray[Any]]:
    return cq.route(gauss(tokens, count, seed=seed), top_k)


def reference(x: Any, experts: cq.Experts, ids: Any, probs: Any, activation: str | None = "silu") -> Any:
    """Expert by expert in float64, of tokens whose ids are all good; NaN for the others."""
    x, ids, probs = (testing.as_numpy(a) for a in (x, ids, probs))
    gate, up, down = (testing.as_numpy(w).astype(np.float64) for w in experts)
    y = np.zeros((len(x), down.shape[1]))
    for e in np.intersect1d(ids, np.arange(len(gate))):
        token, slot = np.nonzero(ids == e)
        rows = x[token].astype(np.float64)
        act = testing.linear(rows, gate[e], activation=activation) * (rows @ up[e].T)
        np.add.at(y, token, probs[token, slot, None].astype(np.float64) * (act @ down[e].T))
    y[((ids < 0) | (ids >= len(gate))).any(axis=1)] = np.nan
    return y


def on_gpu(x: Any, ids: Any, probs: Any) -> tuple[Any, Any, Any]:
    cupy = device.cupy()
    return cupy.asarray(x), cupy.asarray(ids), cupy.asarray(probs)


def close(y: Any, expected: Any, dtype: Any = F) -> None:
    y = testing.as_numpy(y)
    assert y.dtype == dtype
    lost = np.isnan(expected).all(axis=-1)
    assert np.isnan(y[lost].astype(F)).all()
    y, expected = y[~lost], expected[~lost]
    assert testing.nmse(y, expected) <= (5e-5 if dtype == BF16 else 1e-5)
    assert y.size == 0 or testing.worst_element(y, expected) <= (0.05 if dtype == BF16 else 0.01)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What most tests need, compiled at once on all cores: into CuPy's cache, and this process's."""
    loads = [Load(t, 2, 5) for t in (3, 6, 12, 60, 150)] + [Load(t, 2, 8) for t in (1, 4, 16, 200, 300)]
    loads += [Load(t, 3, 9) for t in (5, 40, 600)] + [Load(t, 2, 2) for t in (4, 90, 400)]
    kernels = set()

    def needs(name: str, load: Load, half: bool, *shapes: tuple[int, int]) -> None:
        fmt = cq.formats.get(name).for_kernels
        for gated, shape in product((True, False), shapes):
            made = plan.moe.product(fmt, load, *shape, half, gated, jit.capability())
            if made is not None:
                kernels.add(made.gemm.plan.kernel)

    for load, name in product(loads, (*FORMATS, *MIXED)):
        if name == "q4_0" or load.tokens in (3, 6, 60, 150):
            needs(name, load, True, (384, 256), (72, 384))
    for name, tokens, half in product(TRELLIS, TOKENS, (True, False)):
        needs(name, Load(tokens, 2, 5), half, (192, 160), (24, 192))
    list(jit.compile_ahead(kernels))


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No mixture may fall back to the host unless a test says so."""
    real = module._mixed

    def mixed(x: Any, *others: Any) -> Any:
        assert "fallback" in request.node.name or not device.is_cuda(check.storage(x))
        return real(x, *others)

    monkeypatch.setattr(module, "_mixed", mixed)


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


def agree(tokens: int, experts: cq.Experts) -> None:
    """Of floats and of q8_1, the same bits again; every fourth token is lost."""
    cupy, (ids, probs) = device.cupy(), routed(tokens, 5, 2)
    ids[2::4, 1] = 5
    x, there_ids, there_probs = on_gpu(gauss(tokens, experts.gate.shape[2]), ids, probs)
    for operand, most in ((x, 1e-5), (cq.quantize(x, "q8_1"), 1e-3)):
        y = cq.moe(operand, experts, there_ids, there_probs)
        again = cq.moe(operand, experts, there_ids, there_probs)
        assert (y.view(np.uint32) == again.view(np.uint32)).all()
        expected = reference(operand, experts, ids, probs)
        lost = np.isnan(expected).all(axis=1)
        assert (cupy.asnumpy(cupy.isnan(y)).all(axis=1) == lost).all()
        assert testing.nmse(testing.as_numpy(y)[~lost], expected[~lost]) <= most


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRELLIS)
def test_signs_of_columns(name: str, kind: str, tokens: int) -> None:
    experts = trellis_stacks(name, kind)
    agree(tokens, experts)
    gate, up = (w.fragments() for w in (experts.gate, experts.up))
    prepared = cuda_moe._Mixture(gate, up, experts.down.fragments(), "silu", False)
    assert prepared.alike() == (kind in ("alike", "apart"))
    assert gate.half == (kind != "apart")
    assert (gate.signs is None, up.signs is None) == (kind == "bare_gate", kind == "bare_up")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("whole", ["gate", "up", "down"])
def test_signs_of_some_projections(whole: str, tokens: int) -> None:
    experts = stacks("q4_0", k=160, hidden=192, n=24)
    own = getattr(trellis_stacks("trellis3-32", "alike"), whole)
    agree(tokens, experts._replace(**{whole: own}))


def test_trellis_beyond_the_kernels_fallback() -> None:
    """Sides that are no whole pieces, and a grid that float16 does not hold."""
    odd = trellis_stacks("trellis3-32", "alike", k=40, hidden=72)
    parts = random_parts(2, (5, 24, 192)) | {"grid": [1e-30, 1, 3]}
    wide = stacks("q4_0", k=160, hidden=192)._replace(down=cq.trellis_from_parts(**parts).to_device("cuda"))
    for experts in (odd, wide):
        x, ids, probs = gauss(6, experts.gate.shape[2]), *routed(6, 5, 2)
        assert not cuda_moe.takes(x, *experts, 2)
        there = on_gpu(x, ids, probs)
        close(cq.moe(there[0], experts, *there[1:]), reference(x, experts, ids, probs))


@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 257, 1500])
@pytest.mark.parametrize(
    ("count", "top_k"), [(1, 1), (2, 2), (8, 2), (8, 8), (64, 1), (64, 8), (256, 8), (700, 2)]
)
def test_sizes(tokens: int, count: int, top_k: int) -> None:
    experts = stacks("q4_0", count, k=64, hidden=96, n=24)
    x, ids, probs = gauss(tokens, 64), *routed(tokens, count, top_k)
    y = cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:])
    close(y, reference(x, experts, ids, probs))


def test_many_tokens() -> None:
    experts = stacks("q4_0", 8, k=256, hidden=512, n=256)
    x, ids, probs = on_gpu(gauss(4096, 256).astype(np.float16), *routed(4096, 8, 2))
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs), np.float16)


@pytest.mark.parametrize("format", ["q4_0", "q4_k", "q8_0"])
def test_hidden_numbers_of_many_magnitudes(format: str) -> None:
    """Within a row, from row to row, and rows of which a number is far above all others."""
    w = stacks(format, 4, k=256, hidden=512, n=64)
    spread = np.ldexp(F(1), np.random.default_rng(1).integers(-9, 10, (4, 512, 1))).astype(F)
    up = cq.quantize(testing.as_numpy(w.up) * spread, format).to_device("cuda")
    experts = w._replace(up=up)
    x, ids, probs = gauss(300, 256), *routed(300, 4, 2)
    x *= np.ldexp(F(1), np.arange(300) % 41 - 20).astype(F)[:, None]
    x[::5, ::64] *= 3000
    x[7] = 0
    y = testing.as_numpy(cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:]))
    expected = reference(x, experts, ids, probs)
    assert not y[7].any()
    for row in (*range(7), *range(8, 300)):
        assert testing.nmse(y[row], expected[row]) <= 1e-5, row


def test_rows_in_levels() -> None:
    """The kernel that brings the columns of a row to one level."""
    cupy, generator = device.cupy(), np.random.default_rng(2)
    rows, k, columns = 11, 160, plan.moe.LEVEL_COLUMNS
    x = generator.integers(-2048, 2048, (rows, k // columns, columns)).astype(np.float16)
    zero = 16  # the byte of level 0
    levels = generator.integers(14, 19, (rows, k // columns)).astype(np.uint8)
    levels[1], levels[2] = 17, 0
    levels[3, ::2] = 0
    x[levels == 0] = 0
    levels[4, 0] = 31
    given, factors = cupy.asarray(x.reshape(rows, k)), cupy.empty(rows, F)
    numbers = (np.int32(k), cupy.asarray(levels), np.int32(rows), factors)
    jit.launch(plan.moe.level(rows), given, *numbers)
    made, factor = testing.as_numpy(given).astype(np.float64), testing.as_numpy(factors).astype(np.float64)
    expected = np.ldexp(x.astype(np.float64), 8 * (levels[..., None].astype(int) - zero)).reshape(rows, k)
    highest = levels.max(axis=1).astype(int)
    np.testing.assert_array_equal(factor, np.where(highest, np.ldexp(1.0, 8 * (highest - zero)), 1))
    # Numbers of lower levels are subnormal in the highest, if anything.
    made *= factor[:, None]
    assert (np.abs(made - expected) <= 2.0**-25 * factor[:, None]).all()
    np.testing.assert_array_equal(made[1:3], expected[1:3])


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


def leveled(tokens: int, top_k: int, count: int, width: int = 160, k: int = 128) -> bool:
    """Whether q4_0's gate and up make levels: on Hopper they have to, if a test is to see it."""
    fmt = cq.formats.get("q4_0").for_kernels
    both = plan.moe.gate_and_up(fmt, Load(tokens, top_k, count), width, k, True, jit.capability())
    return (both is not None and both.levels) or jit.capability() != 90


@pytest.mark.parametrize("tile", [t for t in WGMMA_TILES if t.batch >= 128], ids=str)
def test_last_rows_of_experts(tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large tiles: up to a quarter of one, which the tensor cores take in narrower steps, and more."""
    if jit.capability() != 90:
        pytest.skip("the wgmma core is for sm_90")
    counts = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160, 161, 256, 257, 289, 320, 321)
    ids = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts)[:, None])
    x, probs = gauss(len(ids), 256), gauss(len(ids), 1, seed=3)
    experts = stacks("q4_0", len(counts), k=256, hidden=384, n=72)
    plan.moe.product.cache_clear()
    try:
        with monkeypatch.context() as m:
            m.setattr(plan.moe, "WGMMA_TILES", (tile,))
            y = cq.moe(*on_gpu(x, ids, probs)[:1], experts, ids, probs)
    finally:
        plan.moe.product.cache_clear()
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
    """Routing and mixture follow the graph's inputs, whichever experts they lead to."""
    cupy = device.cupy()
    experts = stacks(format, 8, k=256, hidden=512, n=256)
    x, logits = cupy.zeros((tokens, 256), np.float16), cupy.zeros((tokens, 8), F)
    out = cupy.empty((tokens, 256), np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)

    def step() -> None:
        ids, probs = cq.route(logits, 2)
        cq.moe(x, experts, ids, probs, out=out)

    with stream:
        for _ in range(2):
            step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for seed in range(4):
            given, scores = gauss(tokens, 256, seed=seed).astype(np.float16), gauss(tokens, 8, seed=seed)
            x.set(given)
            logits.set(scores)
            graph.launch(stream)
            stream.synchronize()
            close(out, reference(given, experts, *cq.route(scores, 2)), np.float16)


def test_more_tokens_than_the_workspace_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_moe, "WORKSPACE", 1 << 20)
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


@pytest.mark.parametrize("dtype", [F, np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (11, 11), (64, 8), (300, 40)])
def test_routing(dtype: Any, experts: int, top_k: int) -> None:
    logits = (gauss(70, experts) * 3).astype(dtype)
    logits[5:20] = np.round(logits[5:20])  # equal ones
    for normalize in (True, False):
        ids, probs = cq.route(device.cupy().asarray(logits), top_k, normalize)
        expected_ids, expected_probs = cq.route(logits, top_k, normalize)
        assert (ids.dtype, probs.dtype) == (np.int32, F)
        np.testing.assert_array_equal(ids.get(), expected_ids)
        np.testing.assert_allclose(probs.get(), expected_probs, rtol=1e-5)


def test_routing_of_extreme_logits() -> None:
    cupy = device.cupy()
    inf, nan = np.inf, np.nan
    logits = [[3e38, -3e38, 0], [-inf, 1, 1], [0.0, -0.0, 0.0], [1e-45, 0, -1e-45]]
    logits += [[nan, 1, 2], [inf, 1, 2], [-inf] * 3]
    given = np.array(logits, F)
    ids, probs = (a.get() for a in cq.route(cupy.asarray(given), 2))
    expected = cq.route(given, 2)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(probs[:4], expected[1][:4])
    assert np.isnan(probs[4:]).all()
    assert cq.route(cupy.zeros((0, 4), F), 4)[0].shape == (0, 4)
    assert cq.route(cupy.zeros(4, F), 2)[0].shape == (2,)


def test_more_experts_than_the_kernels_take_fallback() -> None:
    count = plan.moe.MOST_EXPERTS + 1
    experts = stacks("q4_0", count, k=32, hidden=32, n=16)
    x, ids, probs = on_gpu(gauss(3, 32), *routed(3, count, 2))
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))
