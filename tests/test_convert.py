"""Quantizing files: llama-quantize's bytes, all metadata, and no trace of what did not succeed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from formats_table import NAMES, random_blocks
from gguf import GGMLQuantizationType as Type, GGUFValueType as Value
from gguf_files import NANO, Stored, array, entry, gguf_file, string, tensor, u32, write
from numpy.typing import NDArray

import cuquant as cq
from cuquant.io.convert import is_weight_matrix, quantize_file, select
from cuquant.io.header import TensorInfo, ValueType

SHA256 = json.loads((Path(__file__).parent / "data" / "nano-llama-quantized-sha256.json").read_text())
REWRITTEN = ("general.file_type", "general.quantization_version")


def weights(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def small(path: Path, **more: Stored) -> Path:
    """A source of two matrices and a norm, and more."""
    tensors: dict[str, Stored] = {
        "blk.0.ffn_up.weight": weights(8, 64),
        "blk.0.ffn_norm.weight": weights(64),
        "output.weight": weights(4, 32, seed=1),
    }
    return write(path, tensors | {name.replace("__", "."): value for name, value in more.items()})


# What is written.


def test_a_warning_names_the_tensor(tmp_path: Path) -> None:
    """Of weights that are too small for the format."""
    source = small(tmp_path / "s.gguf", tiny__weight=weights(8, 64) * np.float32(1e-4))
    with pytest.warns(
        UserWarning,
        match=r"^tensor 'tiny\.weight': about 100% of the weights are too small for the scales of nvfp4",
    ):
        cq.quantize_file(source, tmp_path / "q.gguf", "nvfp4", keep="output.weight")


@pytest.mark.parametrize("name", NAMES)
def test_real_model(tmp_path: Path, name: str) -> None:
    target = tmp_path / "q.gguf"
    done = quantize_file(NANO, target, name)
    source, made = gguf.GGUFReader(NANO), gguf.GGUFReader(target)
    digests = {
        t.name: [t.tensor_type.name, hashlib.sha256(t.data.tobytes()).hexdigest()] for t in made.tensors
    }
    assert digests == SHA256[name]
    assert [t.name for t in made.tensors] == [t.name for t in source.tensors]
    before = {key: field.contents() for key, field in source.fields.items() if key not in REWRITTEN}
    after = {key: field.contents() for key, field in made.fields.items()}
    assert after.pop("general.file_type") == gguf.LlamaFileType[f"MOSTLY_{name.upper()}"]
    assert after.pop("general.quantization_version") == gguf.GGML_QUANT_VERSION
    assert after.keys() == before.keys()
    del before["GGUF.kv_count"], after["GGUF.kv_count"]
    assert after == before
    assert done.format == name
    assert (
        repr(done)
        == f"Selection({name}: {len(done.quantized)} tensors quantized, {len(done.kept)} as they are)"
    )
    assert done.quantized == {n for n, (kind, _) in SHA256[name].items() if kind != "F32"}
    assert done.kept == {n for n, (kind, _) in SHA256[name].items() if kind == "F32"}
    assert not done.ragged


# Values of every type, at an end of its range; as they stand in a file.
VALUES = {
    Value.UINT8: b"\xff",
    Value.INT8: b"\x80",
    Value.UINT16: b"\xff\xff",
    Value.INT16: b"\0\x80",
    Value.UINT32: u32(2**32 - 1),
    Value.INT32: u32(2**31),
    Value.FLOAT32: np.float32(2.0**-149).tobytes(),
    Value.BOOL: b"\1",
    Value.STRING: string("naïve ☃ \0 🦙"),
    Value.UINT64: b"\xff" * 8,
    Value.INT64: bytes(7) + b"\x80",
    Value.FLOAT64: np.float64(-np.inf).tobytes(),
}


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_every_value_type_survives(tmp_path: Path, alignment: int | None) -> None:
    entries = [entry("general.architecture", Value.STRING, string("test"))]
    entries += [entry(f"one.{kind.name}", kind, raw) for kind, raw in VALUES.items()]
    entries += [array(f"many.{kind.name}", kind, 3, raw * 3) for kind, raw in VALUES.items()]
    entries += [entry("empty", Value.STRING, string("")), entry("general.file_type", Value.UINT32, u32(1))]
    if alignment is not None:
        entries.append(entry("general.alignment", Value.UINT32, u32(alignment)))
    bias, matrix = weights(5), weights(3, 32)
    gap = max(alignment or 32, 32)  # 20 bytes and padding
    tensors = [tensor("a.bias", [5]), tensor("b.weight", [32, 3], offset=gap)]
    data = bias.tobytes().ljust(gap, b"\0") + matrix.tobytes()
    source, target = tmp_path / "s.gguf", tmp_path / "t.gguf"
    source.write_bytes(gguf_file(entries, tensors, data, alignment=alignment or 32))
    quantize_file(source, target, "q8_0")
    before, made = cq.open(source).metadata, cq.open(target)
    for key in before.keys() - {*REWRITTEN}:
        assert made.metadata.value_type(key) == before.value_type(key)
        assert np.array_equal(made.metadata[key], before[key])
    assert made.metadata.keys() - before.keys() == {"general.quantization_version"}
    assert made.metadata.value_type("general.file_type") == (ValueType.UINT32, None)
    assert made.alignment == (alignment or 32)
    assert all(info.offset % made.alignment == 0 for info in made.tensors.values())
    reader = gguf.GGUFReader(target)
    assert reader.tensors[0].data.tobytes() == bias.tobytes()
    assert np.array_equal(reader.tensors[1].data, gguf.quants.quantize(matrix, Type.Q8_0))


def test_empty_arrays_survive(tmp_path: Path) -> None:
    source, target = tmp_path / "s.gguf", tmp_path / "t.gguf"
    data = weights(3, 32).tobytes()
    source.write_bytes(gguf_file([array("none", Value.STRING, 0)], [tensor("b.weight", [32, 3])], data))
    quantize_file(source, target, "q8_0")
    assert cq.open(target).metadata["none"] == []


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_float_sources(tmp_path: Path, dtype: Any) -> None:
    matrix = weights(6, 96).astype(dtype)
    bfloat16 = dtype is ml_dtypes.bfloat16
    stored: Stored = (matrix.view(np.uint8), Type.BF16) if bfloat16 else matrix
    quantize_file(write(tmp_path / "s.gguf", {"w.weight": stored}), tmp_path / "t.gguf", "q5_1")
    expected = gguf.quants.quantize(matrix.astype(np.float32), Type.Q5_1)
    assert np.array_equal(cq.open(tmp_path / "t.gguf")["w.weight"].blocks, expected)


def test_a_stack_of_experts_is_quantized_matrix_by_matrix(tmp_path: Path) -> None:
    stack = weights(3, 4, 64)
    done = quantize_file(
        small(tmp_path / "s.gguf", blk__0__ffn_up_exps__weight=stack), tmp_path / "t.gguf", "q4_1"
    )
    assert "blk.0.ffn_up_exps.weight" in done.quantized
    made = cq.open(tmp_path / "t.gguf")["blk.0.ffn_up_exps.weight"]
    assert made.shape == (3, 4, 64)
    for matrix, blocks in zip(stack, made.blocks, strict=True):
        assert np.array_equal(blocks, gguf.quants.quantize(matrix, Type.Q4_1))


def test_a_split_source_becomes_one_file(tmp_path: Path) -> None:
    tensors: dict[str, Stored] = {f"{name}.weight": weights(4, 32, seed=i) for i, name in enumerate("abc")}
    whole = write(tmp_path / "whole.gguf", tensors, name="n")
    write(tmp_path / "m.gguf", tensors, split=1, name="n")
    quantize_file(whole, tmp_path / "from whole.gguf", "q4_0")
    quantize_file(tmp_path / "m-00002-of-00003.gguf", tmp_path / "from parts.gguf", "q4_0")
    assert (tmp_path / "from parts.gguf").read_bytes() == (tmp_path / "from whole.gguf").read_bytes()


def test_a_kernel_of_four_axes_and_other_types_are_copied(tmp_path: Path) -> None:
    more: dict[str, Stored] = {
        "conv__weight": weights(2, 3, 4, 32),
        "ids": np.arange(6).reshape(2, 3),
        "table": (random_blocks("q8_0", (2, 64)), Type.Q8_0),
        "norms__bias": weights(2, 32).astype(np.float16),
    }
    source = small(tmp_path / "s.gguf", **more)
    done = quantize_file(source, tmp_path / "t.gguf", "q4_0")
    before, after = cq.open(source), cq.open(tmp_path / "t.gguf")
    assert done.quantized == {"blk.0.ffn_up.weight", "output.weight"}
    assert done.kept == before.keys() - done.quantized
    for name in done.kept:
        assert (after.tensors[name].ggml_type, after.tensors[name].shape) == (
            before.tensors[name].ggml_type,
            before.tensors[name].shape,
        )
        assert after.raw(name).tobytes() == before.raw(name).tobytes()


# Which tensors.


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


def test_a_model_is_a_source_too(tmp_path: Path) -> None:
    with cq.open(small(tmp_path / "s.gguf"), "cpu") as model:
        quantize_file(model, tmp_path / "t.gguf", "q4_0")
        quantize_file(model.path, tmp_path / "u.gguf", "q4_0")
        assert model["output.weight"].shape == (4, 32)
        cq.dequantize_file(model, tmp_path / "v.gguf")
    assert (tmp_path / "t.gguf").read_bytes() == (tmp_path / "u.gguf").read_bytes()


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


@pytest.mark.parametrize("split", [0, 1])
def test_an_open_model_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: int
) -> None:
    """By a path that leads to another file now, as it is relative, or that file has been replaced."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        own: dict[str, Stored] = {"w.weight": weights(8, 64, seed=ord(folder)), "x.weight": weights(8, 64)}
        write(tmp_path / folder / "m.gguf", own, split=split)
    name = "m-00001-of-00002.gguf" if split else "m.gguf"
    monkeypatch.chdir(tmp_path / "a")
    model = cq.open(name, "cpu")
    expected = cq.quantize(model["w.weight"], "q4_0").blocks
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ValueError, match="is the file being read"):
        quantize_file(model, tmp_path / "a" / name, "q4_0", force=True)
    quantize_file(model, tmp_path / "q.gguf", "q4_0")
    for part in (tmp_path / "b").iterdir():
        part.replace(tmp_path / "a" / part.name)
    done = quantize_file(model, tmp_path / "again.gguf", "q4_0")
    cq.dequantize_file(model, "f.safetensors", "f16", keep="x.weight")
    for path in ("q", "again"):
        assert np.array_equal(cq.open(tmp_path / f"{path}.gguf", "cpu")["w.weight"].blocks, expected)
    assert np.array_equal(cq.load("f.safetensors", "cpu")["w.weight"], model["w.weight"].astype(np.float16))
    assert done.source_bytes == sum(status.st_size for _, status in model._stamps)


def test_a_source_that_was_written_to_or_closed(tmp_path: Path) -> None:
    source = small(tmp_path / "s.gguf")
    with cq.open(source, "cpu") as model:
        quantize_file(model, tmp_path / "t.gguf", "q4_0")
        assert model["output.weight"].shape == (4, 32)  # it is still open
    with pytest.raises(ValueError, match=r"s\.gguf: the file is closed: open the model again"):
        quantize_file(model, tmp_path / "u.gguf", "q4_0")
    model = cq.open(source, "cpu")
    with source.open("ab") as file:
        file.write(bytes(32))
    with pytest.raises(ValueError, match=r"s\.gguf was changed since it was opened: open the model again"):
        cq.dequantize_file(model, tmp_path / "u.gguf")
    assert not (tmp_path / "u.gguf").exists()


def test_a_source_that_is_gone_is_still_open(tmp_path: Path) -> None:
    """Also where another file has its name."""
    model = cq.open(small(tmp_path / "s.gguf"), "cpu")
    (tmp_path / "s.gguf").unlink()
    cq.dequantize_file(model, tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"s\.gguf is the file being read"):
        cq.dequantize_file(model, tmp_path / "s.gguf")
    (tmp_path / "s.gguf").write_bytes(b"another")
    cq.dequantize_file(model, tmp_path / "b.gguf")
    with pytest.raises(ValueError, match=r"s\.gguf is the file being read"):
        cq.dequantize_file(model, tmp_path / "s.gguf", force=True)
    assert (tmp_path / "s.gguf").read_bytes() == b"another"
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


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
