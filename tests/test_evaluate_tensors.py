"""Evaluation: errors and sizes of tensors."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type, quants
from numpy.typing import NDArray
from scoring import (
    FORMATS,
    bits_per_weight,
    check_errors,
)
from synthetic import EXPERTS, Spec, some_tokens, tensors, write

import cuquant as cq
from cuquant.eval import evaluate
from cuquant.eval.scores import tensor_error


@pytest.mark.parametrize("spec", [Spec(tied=True), EXPERTS], ids=["dense", "experts"])
def test_tensor_errors_and_bits_per_weight(tmp_path: Path, spec: Spec) -> None:
    path = write(tmp_path / "model.gguf", spec)
    for row in evaluate(path, tokens=some_tokens(8), ctx=8, formats=FORMATS).rows:
        file = path
        if row.format != "f16":
            file = tmp_path / f"{row.format}.gguf"
            cq.quantize_file(path, file, row.format)
            check_errors(row.tensors, path, file)
        assert row.bits_per_weight == pytest.approx(bits_per_weight(file), rel=1e-12)


@pytest.mark.parametrize(
    ("spec", "scales"),
    [
        (Spec(n_ff=128, matrices=Type.F32), {"blk.0.ffn_up": [0.5], "blk.1.attn_q": [3.0]}),
        (replace(EXPERTS, n_ff=128, matrices=Type.F32), {"blk.0.ffn_up_exps": [0.5, 1.0, 2.0, 4.0]}),
    ],
    ids=["dense", "experts"],
)
@pytest.mark.filterwarnings("ignore::cuquant.FallbackWarning")
def test_scales_beside_tensors(tmp_path: Path, spec: Spec, scales: dict[str, list[float]]) -> None:
    """They are no tensors of the forward pass, but of the file's size."""
    whole = cq.open(write(tmp_path / "f32.gguf", spec), "cpu")
    stored: dict[str, Any] = {name: whole[name] for name in whole}
    for name, values in scales.items():
        blocks = cq.quantize(whole[f"{name}.weight"], "nvfp4").blocks
        stored[f"{name}.weight"] = blocks, Type.NVFP4
        stored[f"{name}.scale"] = np.array(values, np.float32)
    path = write(tmp_path / "nvfp4.gguf", spec, **stored)
    made = cq.open(path, "cpu")
    numbers: Any = {f"{name}.weight": made.floats(f"{name}.weight") for name in scales}
    same = write(tmp_path / "same.gguf", spec, **numbers)
    arguments: dict[str, Any] = {"tokens": some_tokens(64), "ctx": 32, "device": "cpu"}
    row, expected = (evaluate(each, **arguments).rows[0] for each in (path, same))
    assert row.ppl == pytest.approx(expected.ppl, rel=1e-4)
    assert row.bits_per_weight == pytest.approx(8 * made.nbytes / sum(w.size for w in whole.values()))


@pytest.mark.parametrize("original", [np.zeros((3, 64)), np.tile(np.arange(-8, 8), (2, 4)) / 4])
def test_exact_tensor(original: NDArray[Any]) -> None:
    w = original.astype(np.float32)
    error = tensor_error("w", w, cq.quantize(w, "q4_0"))
    assert (error.nmse, error.sqnr_db, error.max_abs_error) == (0, None, 0)


def test_tensor_larger_than_a_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.random.default_rng(0).standard_normal((2, 3, 7, 64), np.float32)
    quantized = cq.quantize(w, "q4_1")
    whole = tensor_error("w", w, quantized)
    monkeypatch.setattr("cuquant.cpu.SLAB", 128)
    parts = tensor_error("w", w, quantized)
    assert parts.nmse == pytest.approx(whole.nmse, rel=1e-12)
    assert parts.max_abs_error == whole.max_abs_error


def test_ragged_matrices_stay_float(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", Spec(n_ff=80))
    with pytest.warns(
        UserWarning, match=r"^q4_0: kept in float.*: blk\.0\.ffn_down\.weight, blk\.1\.ffn_down"
    ):
        row = evaluate(path, tokens=some_tokens(64), ctx=32, formats="q4_0").rows[1]
    assert {e.name for e in row.tensors} & {"blk.0.ffn_down.weight", "blk.0.ffn_up.weight"} == {
        "blk.0.ffn_up.weight"
    }


@pytest.mark.usefixtures("foreign_types")
def test_types_without_a_format_here(folder: Path) -> None:
    """They are dequantized, so no error is theirs; their size is what the file stores."""
    spec = Spec(d_model=256, head_dim=64, n_ff=256)
    base = write(folder / "large.gguf", spec)
    path = write(folder / "digits.gguf", replace(spec, matrices=Type.TQ1_0))
    with pytest.warns(cq.FallbackWarning, match="TQ1_0"):
        row = evaluate(path, base=base, tokens=some_tokens(64), ctx=32).rows[1]
    assert (row.format, row.tensors) == ("tq1_0", [])
    assert row.bits_per_weight == pytest.approx(bits_per_weight(path), rel=1e-12)


def test_formats_that_are_only_read(folder: Path) -> None:
    """They are formats as others: what they lose is theirs."""
    spec = Spec(d_model=256, head_dim=64, n_ff=256)
    base = write(folder / "before.gguf", spec)
    path = write(folder / "ternary.gguf", replace(spec, matrices=Type.TQ2_0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = evaluate(path, base=base, tokens=some_tokens(64), ctx=32).rows[1]
    assert row.format == "tq2_0"
    assert len(row.tensors) > 10
    assert all(0.1 < error.nmse < 1 for error in row.tensors)
    assert row.bits_per_weight == pytest.approx(bits_per_weight(path), rel=1e-12)


def test_base_of_other_tensors(model: Path, folder: Path) -> None:
    """Errors are those of the tensors that both models have, in the same shape."""
    base = write(folder / "narrow.gguf", Spec(tied=True, n_ff=64))
    quantized = write(folder / "wide.gguf", Spec(matrices=Type.Q4_0))
    errors = evaluate(quantized, base=base, tokens=some_tokens(64), ctx=32).rows[1].tensors
    names = {e.name for e in errors}
    assert "blk.0.attn_q.weight" in names
    assert not names & {"output.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"}


OTHER_TYPES = ["output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.bias", "rope_freqs.weight"]


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.F64, Type.F16, Type.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", [*OTHER_TYPES, "blk.0.ffn_up.weight"])
def test_tensors_of_other_types(folder: Path, kind: Type, name: str) -> None:
    """Norms, biases and factors may be quantized, and all may have 64 bits."""
    spec = Spec(
        rope_factors=True, biases=("attn_q",), head_dim=64, n_heads=1, n_kv_heads=1, matrices=Type.F32
    )
    numbers = tensors(spec)[name]
    stored: Any = (numbers.astype(np.float64) if kind == Type.F64 else quants.quantize(numbers, kind), kind)
    other: Any = {name: numbers if kind == Type.F64 else quants.dequantize(stored[0], kind)}
    path = write(folder / "types.gguf", spec, **{name: stored})
    plain = write(folder / "plain.gguf", spec, **other)
    arguments: dict[str, Any] = {"tokens": some_tokens(64), "ctx": 32, "device": "cpu"}
    row, expected = (evaluate(each, **arguments).rows[0] for each in (path, plain))
    assert row.ppl == pytest.approx(expected.ppl, rel=1e-5)
    if kind == Type.Q8_0:
        _, row = evaluate(path, base=plain, activations="q8_1", **arguments).rows
        assert [(error.name, error.nmse) for error in row.tensors] == [(name, 0)]
        assert row.activations == ("q8_1" if numbers.ndim > 1 else "f16")
