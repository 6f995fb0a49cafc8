"""Models quantized to safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import untouched
from test_convert import small
from test_safetensors import gauss, same

import cuquant as cq


@pytest.mark.parametrize("fmt", ["kbit4", "q4_0", cq.KBit(3, absmax="float16")], ids=str)
@pytest.mark.parametrize("suffix", [".safetensors", ".SafeTensors"])
def test_a_quantized_model(tmp_path: Path, fmt: Any, suffix: str) -> None:
    source, target = small(tmp_path / "s.gguf", odd__weight=gauss(4, 48)), tmp_path / f"t{suffix}"
    done = cq.quantize_file(source, target, fmt, device="cpu")
    assert done.ragged == {"odd.weight"}
    before, after = cq.open(source, "cpu"), cq.load(target, "cpu")
    assert list(after) == list(before)
    for name in before:
        same(after[name], cq.quantize(before[name], fmt) if name in done.quantized else before[name])


def test_kept_matrices_may_be_quantized_already(tmp_path: Path) -> None:
    stored = random_blocks("q8_0", (2, 64)), Type.Q8_0
    source = small(tmp_path / "s.gguf", token_embd__weight=stored)
    cq.quantize_file(source, tmp_path / "t.safetensors", "kbit4", keep=["token_embd.weight"], device="cpu")
    same(
        cq.load(tmp_path / "t.safetensors", "cpu")["token_embd.weight"],
        cq.open(source, "cpu")["token_embd.weight"],
    )


def test_a_model_for_gguf_needs_a_gguf_type(tmp_path: Path) -> None:
    source = small(tmp_path / "s.gguf")
    message = r"kbit4 has no GGUF type: .* \(in one named \*\.safetensors they can\)"
    for name in ("t.gguf", "t.GGUF", "safetensors.gguf"):
        with untouched(tmp_path), pytest.raises(ValueError, match=message):
            cq.quantize_file(source, tmp_path / name, "kbit4", device="cpu")


def test_a_model_does_not_replace_another(tmp_path: Path) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.safetensors"
    target.write_text("precious")
    with untouched(tmp_path), pytest.raises(FileExistsError, match=r"t\.safetensors exists"):
        cq.quantize_file(source, target, "kbit4", device="cpu")
    cq.quantize_file(source, target, "kbit4", force=True, device="cpu")
    assert cq.load(target, "cpu")["output.weight"].format == "kbit4"


def test_a_tensor_that_cannot_be_quantized_leaves_no_file(tmp_path: Path) -> None:
    bad = gauss(8, 64)
    bad[5, 3] = 32
    source = small(tmp_path / "s.gguf", bad__weight=bad)
    with untouched(tmp_path), pytest.raises(ValueError, match=r"tensor 'bad\.weight': .*beyond 31\.5"):
        cq.quantize_file(source, tmp_path / "t.safetensors", "kbit4", device="cpu")


def test_a_model_in_one_group_per_row(tmp_path: Path) -> None:
    model = Path(__file__).parents[1] / "examples/data/nano-llama-f16.gguf"
    cq.quantize_file(model, tmp_path / "m.safetensors", cq.Int4(-1), device="cpu")
    name = "blk.0.ffn_down.weight"
    w = cq.load(tmp_path / "m.safetensors", "cpu")[name]
    assert w.format == f"int4-{w.shape[-1]}"
    np.testing.assert_array_equal(w.blocks, cq.quantize(cq.open(model, "cpu")[name], cq.Int4(-1)).blocks)
