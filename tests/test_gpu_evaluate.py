"""The evaluator and quantized files on a GPU, and the memory that they take."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allocations import allocated
from formats_table import NAMES
from gguf import GGMLQuantizationType as Type
from products import cuda_weight, gauss
from synthetic import EXPERTS, QWEN3, Spec, some_tokens, tensors, write

import cuquant as cq
from cuquant import device
from cuquant.cuda import buffers
from cuquant.eval import config
from cuquant.eval.kv import HALVES, KVBits
from cuquant.eval.llama import Llama

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent


def test_weights_stay_packed_in_an_evaluation() -> None:
    """Device memory never holds a dense weight: the peak stays near the packed bytes."""
    cupy = device.cupy()
    w = cuda_weight("q4_0", (8192, 4096)).prepare()
    x = cupy.asarray(gauss((4, 4096)).astype(np.float16))
    x @ w.T
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    for _ in range(3):
        x @ w.T
    assert pool.total_bytes() - before < w.nbytes // 8
    assert w.storage.nbytes == w.nbytes + 2 * 8192  # a factor for every row


@pytest.mark.parametrize("activations", ["f16", "q8_1"])
def test_evaluator_on_the_gpu(activations: str) -> None:
    path = ROOT / "examples/data/nano-llama-f16.gguf"
    text = (ROOT / "examples/data/heldout-public.txt").read_text()[:20000]
    kwargs: Any = {"text": text, "formats": NAMES, "activations": activations}
    cpu, gpu = (cq.evaluate(path, device=where, **kwargs) for where in ("cpu", "cuda"))
    assert cpu.backend == "numpy"
    assert "NVIDIA" in gpu.backend
    assert cq.open(path).device == "cuda"  # by default
    for a, b in zip(cpu.rows, gpu.rows, strict=True):
        assert b.ppl == pytest.approx(a.ppl, rel=2e-3)
        if a.mean_kld:
            assert b.mean_kld == pytest.approx(a.mean_kld, rel=0.05)


def assert_close(cpu: cq.Evaluation, gpu: cq.Evaluation, ppl: float, kld: float) -> None:
    """Of each row perplexity and divergence: a rounding before a key is quantized may turn its code.

    The GPU rounds softmax's weights to float16, of which alone a divergence below 1e-6 comes. Its base has
    float16 keys and values, too, so that a row of 16 bits does not diverge from it.
    """
    assert [row.kv_bits for row in gpu.rows] == [row.kv_bits for row in cpu.rows]
    for a, b in zip(cpu.rows, gpu.rows, strict=True):
        assert b.ppl == pytest.approx(a.ppl, rel=ppl)
        if b.kv_bits == "16":
            assert (b.mean_kld, b.ppl) == (0, gpu.rows[0].ppl)
        else:
            assert b.mean_kld == pytest.approx(a.mean_kld, rel=kld, abs=1e-6)


KV_BITS = ["8", "4", "8:64,4:256,2+rotate", "3+scales"]


def test_keys_and_values_in_few_bits() -> None:
    text = (ROOT / "examples/data/heldout-public.txt").read_text(encoding="utf-8")[:20000]
    cpu, gpu = (
        cq.evaluate(ROOT / "examples/data/nano-llama-f16.gguf", text=text, kv_bits=KV_BITS, device=where)
        for where in ("cpu", "cuda")
    )
    assert "NVIDIA" in gpu.backend
    assert_close(cpu, gpu, 1e-3, 0.05)


@pytest.mark.parametrize("spec", [Spec(head_dim=32), QWEN3, EXPERTS], ids=["heads of 32", "qwen3", "experts"])
def test_keys_and_values_of_a_small_model(tmp_path: Path, spec: Spec) -> None:
    """Rotary pairs and halves, several sequences at once, tokens that move twice as they age."""
    path, tokens = write(tmp_path / "model.gguf", spec), some_tokens(400)
    kinds = ["16", "8", "4", "8:16,4:24,2", "3+scales", *(["4+rotate"] if spec.head_dim % 32 == 0 else [])]
    cpu, gpu = (
        cq.evaluate(path, tokens=tokens, ctx=64, kv_bits=kinds, device=where) for where in ("cpu", "cuda")
    )
    assert_close(cpu, gpu, 5e-3, 0.05)


@pytest.mark.parametrize(
    ("spec", "factor"),
    [(Spec(), 1), (EXPERTS, 1), (Spec(n_heads=8, head_dim=20), 1), (Spec(), 1e6)],
    ids=["dense", "experts", "heads that no cache takes", "values beyond float16"],
)
def test_chunks_of_many_queries(tmp_path: Path, spec: Spec, factor: float) -> None:
    """More than attention takes at a time; by float32 numbers where it cannot take them."""
    values = tensors(spec)["blk.1.attn_v.weight"] * np.float32(factor)
    path = write(tmp_path / "model.gguf", spec, **{"blk.1.attn_v.weight": values})
    cpu, gpu = (
        cq.evaluate(path, tokens=some_tokens(600), ctx=150, formats="q8_0", device=where)
        for where in ("cpu", "cuda")
    )
    assert cpu.rows[1].ppl != cpu.rows[0].ppl
    for a, b in zip(cpu.rows, gpu.rows, strict=True):
        assert b.ppl == pytest.approx(a.ppl, rel=5e-3)  # a rounding may choose another expert


def load(path: Path, where: str, kv: KVBits | None = None) -> Llama:
    model = cq.open(path, where)
    return Llama(config.read(model.metadata), dict(model), kv=kv)


@pytest.mark.parametrize("name", ["attn_k", "attn_v"])
@pytest.mark.parametrize("spec", [Spec(), EXPERTS], ids=["dense", "experts"])
def test_keys_and_values_beyond_float16(tmp_path: Path, spec: Spec, name: str) -> None:
    """They are float32 from then on, and only from then on."""
    name = f"blk.0.{name}.weight"
    large: dict[str, Any] = {name: tensors(spec)[name] * np.float32(1e6)}
    for changes, kept in (({}, HALVES), (large, None)):
        path = write(tmp_path / f"{len(changes)}.gguf", spec, **changes)
        cpu, gpu = load(path, "cpu"), load(path, "cuda")
        assert (cpu.kv, gpu.kv) == (None, HALVES)
        states, expected = (model.hidden(some_tokens(3, 70), 35) for model in (gpu, cpu))
        assert gpu.kv is kept
        difference = np.abs(device.as_numpy(states) - expected)
        assert np.median(difference) < 0.01 * np.abs(expected).max()  # a rounding may choose another expert


@pytest.mark.parametrize("widths", ["", "16", "8", "8:16,4"])
@pytest.mark.parametrize("factor", [1e6, 1 / 4096])
def test_queries_that_float16_does_not_hold(tmp_path: Path, widths: str, factor: float) -> None:
    """Neither large ones nor small ones: they are float32 from then on, whatever keys and values are."""
    changes: dict[str, Any] = {
        f"blk.1.attn_{name}.weight": tensors(Spec())[f"blk.1.attn_{name}.weight"] * np.float32(by)
        for name, by in (("q", factor), ("k", 1 / factor))
    }
    path, kv = write(tmp_path / "model.gguf", Spec(), **changes), KVBits(widths) if widths else None
    cpu, gpu = load(path, "cpu", kv), load(path, "cuda", kv)
    tokens = some_tokens(3, 70)
    states, expected = (model.hidden(tokens, 35) for model in (gpu, cpu))
    assert (gpu.kv, gpu._has_half_queries) == (kv, False)
    difference = np.abs(device.as_numpy(states) - expected)
    assert np.median(difference) < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("query", [-1.0, -1.1, -1.2, -1.3])
def test_keys_beyond_float16_that_may_hide_their_tokens(tmp_path: Path, query: float) -> None:
    """In a channel that RoPE passes by: by negative queries scores may be -infinity, and states finite."""
    spec = Spec(biases=("attn_q", "attn_k"), keys={"rope.dimension_count": 8})
    changes: dict[str, Any] = {}
    for name, value in (("attn_q", query), ("attn_k", 1e5)):
        weight, bias = (tensors(spec)[f"blk.0.{name}.{kind}"] for kind in ("weight", "bias"))
        weight.reshape(-1, spec.head_dim, spec.d_model)[:, -1] = 0
        bias.reshape(-1, spec.head_dim)[:, -1] = value
        changes |= {f"blk.0.{name}.weight": weight, f"blk.0.{name}.bias": bias}
    path = write(tmp_path / "model.gguf", spec, **changes)
    cpu, gpu = load(path, "cpu"), load(path, "cuda")
    states, expected = (model.hidden(some_tokens(3, 70), 35) for model in (gpu, cpu))
    assert gpu.kv is None
    assert np.median(np.abs(device.as_numpy(states) - expected)) < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("spec", [Spec(), EXPERTS], ids=["dense", "experts"])
def test_weights_that_are_no_numbers(tmp_path: Path, spec: Spec) -> None:
    """They are told as on the CPU, though they are not what float16 does not hold."""
    name = "blk.1.attn_q.weight"
    bad: dict[str, Any] = {name: tensors(spec)[name]}
    bad[name][-1, -1] = np.nan
    path = write(tmp_path / "model.gguf", spec, **bad)
    given: dict[str, Any] = {"tokens": some_tokens(256), "ctx": 64, "device": "cuda"}
    flaw = f"that are NaN or infinite: tensor '{name}' has weights that are"
    for kv_bits in ([], [16]):
        with pytest.raises(ValueError, match=rf"model\.gguf \(f16\) has scores {flaw}"):
            cq.evaluate(path, kv_bits=kv_bits, **given)
    with pytest.raises(ValueError, match=f"'blk.1.attn_output.weight' in chunk 1 of 4 {flaw}"):
        cq.measure_importance(path, **given)


def test_a_layer_gives_its_cache_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next has one: no collector of garbage is needed."""
    caches: list[weakref.ref[cq.KVCache]] = []
    kept: list[int] = []
    make = Llama._cache

    def watched(self: Llama, batch: int, length: int) -> cq.KVCache | None:
        kept.append(sum(cache() is not None for cache in caches))
        made = make(self, batch, length)
        assert made is not None
        caches.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Llama, "_cache", watched)
    model = load(write(tmp_path / "model.gguf", Spec(n_layers=3)), "cuda")
    gc.disable()
    try:
        model.hidden(some_tokens(2, 100), 50)
        kept.append(sum(cache() is not None for cache in caches))
    finally:
        gc.enable()
    assert kept == [0, 0, 0, 0]


@pytest.mark.parametrize("matrices", [Type.F16, Type.Q8_0])
@pytest.mark.parametrize("spec", [Spec(), EXPERTS], ids=["dense", "experts"])
def test_importance_as_on_the_cpu(tmp_path: Path, spec: Spec, matrices: Type) -> None:
    """Of a token whose experts have nearly equal probabilities a rounding may choose another."""
    path = write(tmp_path / "model.gguf", replace(spec, matrices=matrices))
    cpu, gpu = (
        cq.measure_importance(path, tokens=some_tokens(256), ctx=64, process_output=True, device=where)
        for where in ("cpu", "cuda")
    )
    assert list(gpu) == list(cpu)
    for name, expected in cpu.items():
        np.testing.assert_allclose(gpu[name], expected, rtol=0.05, err_msg=name)


def test_inputs_whose_squares_float32_does_not_hold(tmp_path: Path) -> None:
    weights: dict[str, Any] = {"output_norm.weight": np.full(64, 1e19, np.float32)}
    path = write(tmp_path / "model.gguf", Spec(), **weights)
    problem = (
        r"sums of squared inputs of 'output\.weight' in chunk 1 of 4 that are NaN or infinite: its weights"
    )
    with pytest.raises(ValueError, match=problem):
        cq.measure_importance(path, tokens=some_tokens(256), ctx=64, process_output=True, device="cuda")


def test_the_whole_text_on_the_gpu_against_an_independent_program() -> None:
    reference = json.loads((ROOT / "tests/data/reference.json").read_text())["float32"]
    text = ROOT / "examples/data/heldout-public.txt"
    result = cq.evaluate(ROOT / "examples/data/nano-llama-f16.gguf", text=text, formats=NAMES, device="cuda")
    assert result.scored_tokens == 119 * 255
    for row in result.rows:
        assert row.ppl == pytest.approx(reference[row.format]["ppl"], rel=2e-3)
        assert row.mean_kld == pytest.approx(reference[row.format]["mean_kld"], rel=0.05, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_quantized_files_on_the_gpu_as_llama_quantize(name: str, tmp_path: Path) -> None:
    expected = json.loads((ROOT / "tests/data/nano-llama-quantized-sha256.json").read_text())[name]
    cq.quantize_file(ROOT / "examples/data/nano-llama-f16.gguf", tmp_path / "q.gguf", name, device="cuda")
    model = cq.open(tmp_path / "q.gguf")
    for tensor, (kind, digest) in expected.items():
        assert model.tensors[tensor].type_name == kind
        assert hashlib.sha256(model.raw(tensor).tobytes()).hexdigest() == digest


def test_evaluating_makes_no_dense_weight(tmp_path: Path) -> None:
    """Of a quantized model on the GPU nothing as large as the largest packed weight is ever allocated."""
    cq.quantize_file(ROOT / "examples/data/nano-llama-f16.gguf", tmp_path / "q.gguf", "q4_0")
    tokens = np.arange(64) % 4096
    largest = 4096 * 256 // 32 * 18
    model = cq.open(tmp_path / "q.gguf", device="cuda")
    tensors = {name: t.prepare() if isinstance(t, cq.QuantizedArray) else t for name, t in model.items()}
    llama = Llama(config.read(model.metadata), tensors)
    with buffers.scratch() as scratch:
        scratch.take(4 << 20)  # so that the stream's memory for partial sums need not grow
    with allocated() as sizes:
        hidden = llama.hidden(tokens.reshape(4, 16), 8)
        llama.logits(hidden.reshape(-1, hidden.shape[-1])[:16])
    assert sizes
    # Looking up embeddings rebuilds the storage blocks of that one matrix: packed bytes, not numbers.
    assert max(sizes) <= largest
