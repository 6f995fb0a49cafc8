"""Quantizing files: which tensors are quantized, by the model, by patterns of names, and by recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import NANO, write
from test_convert import small, weights

import cuquant as cq
from cuquant.io.convert import is_weight_matrix, quantize_file, select
from cuquant.io.header import TensorInfo


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("token_embd.weight", (100, 64), True),
        ("output.weight", (100, 64), True),
        ("blk.0.attn_q.weight", (64, 64), True),
        ("blk.0.ffn_down_exps.weight", (4, 64, 64), True),
        ("blk.0.attn_norm.weight", (64,), False),
        ("blk.0.attn_q_norm.weight", (8, 64), False),
        ("output_norm.weight", (64,), False),
        ("blk.0.ffn_gate_inp.weight", (8, 64), False),
        ("blk.0.attn_q.bias", (64,), False),
        ("blk.0.attn_q.bias", (2, 64), False),
        ("weight", (2, 64), False),
        ("position_embd.weight", (100, 64), False),
        ("token_types.weight", (2, 64), False),
        ("v.patch_embd.weight", (8, 3, 32, 32), False),
    ],
)
def test_weight_matrices(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_weight_matrix(TensorInfo(name, shape, 1, "F16", 0, 0)) is expected


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ssm_conv1d.weight",
        "blk.0.time_mix_first.weight",
        "blk.0.time_mix_w1.weight",
        "blk.0.altup_router.weight",
        "blk.0.laurel_l.weight",
        "per_layer_model_proj.weight",
        "enc.blk.0.attn_rel_b.weight",
        "v.position_embd.weight",
    ],
)
def test_small_matrices_that_llama_quantize_keeps_in_float(name: str) -> None:
    """Names in tensor_allows_quantization, llama.cpp's src/llama-quant.cpp."""
    assert not is_weight_matrix(TensorInfo(name, (64, 64), 1, "F16", 0, 0))


@pytest.mark.parametrize(
    ("shape", "quantized"),
    [((1, 64), False), ((1, 1, 64), False), ((1, 4, 64), True), ((4, 1, 64), True)],
)
def test_one_row_is_a_vector(shape: tuple[int, ...], quantized: bool) -> None:
    """llama-quantize asks ggml_n_dims, which drops trailing axes of 1."""
    assert is_weight_matrix(TensorInfo("a.weight", shape, 1, "F16", 0, 0)) is quantized


def test_ragged_rows_stay_float_and_are_told(tmp_path: Path) -> None:
    model = cq.open(small(tmp_path / "s.gguf", odd__weight=weights(4, 48), tiny__weight=weights(4, 4)))
    chosen = select(model, "q4_0")
    assert chosen.ragged == {"odd.weight", "tiny.weight"}
    assert chosen.quantized == {"blk.0.ffn_up.weight", "output.weight"}
    assert chosen.kept == {"odd.weight", "tiny.weight", "blk.0.ffn_norm.weight"}


@pytest.mark.parametrize(
    ("keep", "quantized"),
    [
        (["output.weight"], {"blk.0.ffn_up.weight"}),
        (["blk.*"], {"output.weight"}),
        (["blk.?.ffn_up.weight", "*norm*"], {"output.weight"}),
    ],
)
def test_keep_patterns(tmp_path: Path, keep: list[str], quantized: set[str]) -> None:
    model = cq.open(small(tmp_path / "s.gguf"))
    chosen = select(model, "q4_0", iter(keep))
    assert chosen.quantized == quantized
    assert chosen.kept == model.keys() - quantized
    assert not chosen.ragged


@pytest.mark.parametrize("pattern", ["blk.[1-9].*", "OUTPUT.weight", "none"])
def test_a_pattern_that_keeps_nothing_is_a_mistake(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"no tensor of s\.gguf is named like"):
        select(cq.open(small(tmp_path / "s.gguf")), "q4_0", [pattern, "output.weight"])


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("ffn_up", r"; patterns match whole names: write '\*ffn_up\*'$"),
        ("blk.?.ffn", r"; patterns match whole names: write '\*blk\.\?\.ffn\*'$"),
        ("blk.0.ffn_u.weight", r"; did you mean blk\.0\.ffn_up\.weight or blk\.0\.ffn_norm\.weight\?$"),
        ("*.bias", r": one that is there is 'blk\.0\.ffn_up\.weight'$"),
    ],
)
def test_a_pattern_that_matches_nothing(tmp_path: Path, pattern: str, hint: str) -> None:
    model, said = cq.open(small(tmp_path / "s.gguf")), "no tensor of s.gguf is named like .* \\(%s\\)"
    for argument, given in (
        ("keep", {"format": "q4_0", "keep": pattern}),
        ("format", {"format": {pattern: "q4_0"}}),
    ):
        with pytest.raises(ValueError, match=said % argument + hint):
            select(model, **given)


def test_a_recipe_gives_each_matrix_the_first_format_that_its_name_matches(tmp_path: Path) -> None:
    recipe: dict[str, Any] = {"*.ffn_down.*": "Q6_K", "blk.[01].*": cq.formats.get("q8_0"), "blk.*": "q4_0"}
    done = quantize_file(NANO, tmp_path / "q.gguf", recipe, keep=["blk.3.attn_*"])
    expected = {
        info.name: "Q6_K" if "ffn_down" in info.name else "Q8_0" if info.name[4] in "01" else "Q4_0"
        for info in cq.open(NANO).tensors.values()
        if is_weight_matrix(info) and info.name.startswith("blk.") and "blk.3.attn_" not in info.name
    }
    with cq.open(tmp_path / "q.gguf") as made:
        types = {info.name: info.type_name for info in made.tensors.values()}
        assert "general.file_type" not in made.metadata
    assert {name: kind for name, kind in types.items() if kind not in ("F16", "F32")} == expected
    assert done.quantized == expected.keys()
    assert str(done.format) == "q6_k+q8_0+q4_0"
    assert done.label == "q8_0+q4_0+q6_k"


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"blk.9.*": "q4_0", "*": "q8_0"}, r"no tensor of s\.gguf is named like 'blk\.9\.\*' \(format\)"),
        ({"*": "q8_1"}, "q8_1 is a format of activations"),
        (
            {"*": "q4_k_m"},
            r"^'q4_k_m' is a mixture of formats for a whole file, to be given alone; the pattern '\*' takes "
            "one format, as q4_k$",
        ),
        ({"*": "q4_k_x"}, "unknown format 'q4_k_x': did you mean q4_k"),
        ({"*": "q6_k_m"}, "unknown format 'q6_k_m': did you mean q6_k"),
        ({}, "format is an empty mapping; patterns of tensor names and formats are needed"),
        (
            {"*norm*": "q4_0", "*": "q8_0"},
            r"pattern '\*norm\*' \(format\) matches only tensors that are never quantized, as "
            r"'blk\.0\.ffn_norm\.weight'$",
        ),
        (
            {"*": "q4_0", "*ffn*": "q8_0"},
            r"pattern '\*ffn\*' \(format\) decides nothing in s\.gguf: .*match '\*'; put '\*ffn\*' first$",
        ),
        (
            {"output*": "q4_0", "blk*": "q8_0", "*t.weight": "q5_0", "*.weight": "q5_1", "*": "q8_0"},
            r"pattern '\*t\.weight' .* tensors match 'output\*'; leave out one of them$",
        ),
        ({"*ffn*": "q4_0", "*ffn*weight": "q8_0"}, r"match '\*ffn\*'; leave out one of them$"),
    ],
)
def test_a_wrong_recipe(tmp_path: Path, recipe: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        select(cq.open(small(tmp_path / "s.gguf")), recipe)


def test_a_list_of_pairs_is_no_recipe() -> None:
    with pytest.raises(TypeError, match="format is a list; one format is needed, or a mapping of patterns"):
        quantize_file(NANO, "none.gguf", [("*", "q4_0")])  # type: ignore[arg-type]


def test_names_for_a_recipe_are_those_of_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown format 'q8': did you mean .*\? Known are") as error:
        select(cq.open(small(tmp_path / "s.gguf")), {"*": "q8"})
    assert "q8_1" not in str(error.value)


def test_a_default_may_have_nothing_left_to_take(tmp_path: Path) -> None:
    recipe = {"output*": "q4_0", "blk*": "q8_0", "*": "kbit4"}
    chosen = quantize_file(small(tmp_path / "s.gguf"), tmp_path / "t.gguf", recipe)
    assert (chosen.label, str(chosen.format)) == ("q8_0+q4_0", "q4_0+q8_0+kbit4")
    assert repr(chosen) == "Selection(q8_0+q4_0: 2 tensors quantized, 1 as they are)"


def test_a_recipe_is_called_after_formats_of_ragged_rows_too(tmp_path: Path) -> None:
    assert select(cq.open(small(tmp_path / "s.gguf")), {"blk*": "q4_k", "*": "q8_0"}).label == "q5_0+q8_0"


def test_kept_tensors_are_copied(tmp_path: Path) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    quantize_file(source, target, "q4_0", keep=["output*"])
    assert np.array_equal(cq.open(target)["output.weight"], cq.open(source)["output.weight"])
    assert cq.open(target)["blk.0.ffn_up.weight"].format == "q4_0"


def test_a_kept_matrix_may_be_quantized_already(tmp_path: Path) -> None:
    blocks = random_blocks("q8_0", (2, 64))
    source = small(tmp_path / "s.gguf", token_embd__weight=(blocks, Type.Q8_0))
    quantize_file(source, tmp_path / "t.gguf", "q4_0", keep=["token_embd.weight"])
    assert np.array_equal(cq.open(tmp_path / "t.gguf")["token_embd.weight"].blocks, blocks)


def test_all_is_kept(tmp_path: Path) -> None:
    source = small(tmp_path / "s.gguf")
    for fmt in ("q4_0", {"*": "q8_0"}):
        with pytest.raises(ValueError, match=r"^s\.gguf has no weight matrix to .* that is not to be kept$"):
            quantize_file(source, tmp_path / "q.gguf", fmt, keep="*")
    plain = write(tmp_path / "n.gguf", {"blk.0.ffn_norm.weight": weights(64)})
    with pytest.raises(ValueError, match=r"^n\.gguf has no weight matrix to quantize to q4_0$"):
        quantize_file(plain, tmp_path / "q.gguf", "q4_0", keep="*")


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (3, "keep is an int"),
        (None, "keep is None"),
        (b"*", "keep is a bytes"),
        ([3], "keep has an int in it"),
    ],
)
def test_what_is_no_pattern(tmp_path: Path, keep: Any, said: str) -> None:
    source = small(tmp_path / "s.gguf")
    for made in (quantize_file, cq.dequantize_file):
        with pytest.raises(TypeError, match=f"^{said}; a pattern of names, or several, is needed$"):
            made(source, tmp_path / "q.gguf", "q4_0" if made is quantize_file else "f32", keep=keep)
