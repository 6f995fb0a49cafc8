"""Quantizing files: llama-quantize's bytes, all metadata, and no trace of what did not succeed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from formats_table import NAMES, random_blocks
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from gguf_files import NANO, Stored, array, entry, gguf_file, string, tensor, u32, write
from numpy.typing import NDArray

import cuquant as cq
from cuquant.formats.q4_0 import Q4_0
from cuquant.io import convert
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


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Whatever happens inside changes no file below `folder` and leaves none behind."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing a tensor fails the test."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a tensor was quantized before the refusal")

    monkeypatch.setattr(convert, "quantize", refuse)


# What is written.


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


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"blk.9.*": "q4_0", "*": "q8_0"}, r"no tensor of s\.gguf is named like 'blk\.9\.\*' \(format\)"),
        ({"*": "q8_1"}, "q8_1 is a format of activations"),
        ({"*": "q4_k_m"}, "unknown format 'q4_k_m'"),
        ({}, "no weight matrix to quantize"),
    ],
)
def test_a_wrong_recipe(tmp_path: Path, recipe: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        select(cq.open(small(tmp_path / "s.gguf")), recipe)


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


# Refusals.


@pytest.mark.parametrize(
    ("fmt", "error", "problem"),
    [
        ("q8_1", ValueError, "q8_1 is a format of activations, not of weights"),
        ("q9_9", ValueError, "unknown format 'q9_9'; known are .*q4_0, q4_1"),
        (4, TypeError, "a format is a name or a Format, not int"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_a_wrong_format(tmp_path: Path, fmt: Any, error: type[Exception], problem: str) -> None:
    source = small(tmp_path / "s.gguf")
    with untouched(tmp_path), pytest.raises(error, match=problem):
        quantize_file(source, tmp_path / "t.gguf", fmt)


@pytest.mark.usefixtures("no_work")
def test_a_format_without_a_gguf_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Q4_0, "ggml_type", None)
    source = small(tmp_path / "s.gguf")
    with untouched(tmp_path), pytest.raises(ValueError, match="q4_0 has no GGUF type"):
        quantize_file(source, tmp_path / "t.gguf", "q4_0")


@pytest.mark.usefixtures("no_work")
def test_an_existing_target(tmp_path: Path) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    target.write_text("precious")
    with untouched(tmp_path), pytest.raises(FileExistsError, match=r"t\.gguf exists"):
        quantize_file(source, target, "q4_0")


def test_force_replaces_an_existing_target(tmp_path: Path) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    target.write_text("old")
    quantize_file(str(source), str(target), "q4_0", force=True)
    assert cq.open(target)["output.weight"].format == "q4_0"


@pytest.mark.parametrize("link", ["itself", "symlink", "hard link", "part"])
@pytest.mark.usefixtures("no_work")
def test_the_source_is_no_target(tmp_path: Path, link: str) -> None:
    tensors: dict[str, Stored] = {f"{name}.weight": weights(4, 32) for name in "ab"}
    write(tmp_path / "m.gguf", tensors, split=1)
    source, other = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    target = {"itself": source, "part": other}.get(link, tmp_path / "link.gguf")
    if link == "symlink":
        target.symlink_to(source)
    elif link == "hard link":
        target.hardlink_to(other)
    with untouched(tmp_path), pytest.raises(ValueError, match=f"{target.name} is the file being read"):
        quantize_file(source, target, "q4_0", force=True)


@pytest.mark.usefixtures("no_work")
def test_a_quantized_source(tmp_path: Path) -> None:
    stored: dict[str, Stored] = {
        f"blk.{i}.attn_q.weight": (random_blocks("q8_0", (4, 32)), Type.Q8_0) for i in range(4)
    }
    source = write(tmp_path / "s.gguf", {"output.weight": weights(4, 32)} | stored)
    problem = r"s\.gguf is quantized already: blk\.0\.attn_q\.weight \(Q8_0\), .*, \.\.\.; quantize from a fl"
    with untouched(tmp_path), pytest.raises(ValueError, match=problem):
        quantize_file(source, tmp_path / "t.gguf", "q4_0")


@pytest.mark.parametrize("keep", [["*"], ["output.weight", "blk.*"]])
@pytest.mark.usefixtures("no_work")
def test_nothing_to_quantize(tmp_path: Path, keep: list[str]) -> None:
    source = small(tmp_path / "s.gguf")
    with untouched(tmp_path), pytest.raises(ValueError, match="no weight matrix to quantize to q4_0"):
        quantize_file(source, tmp_path / "t.gguf", "q4_0", keep=keep)


@pytest.mark.usefixtures("no_work")
def test_a_target_in_a_missing_folder(tmp_path: Path) -> None:
    source = small(tmp_path / "s.gguf")
    with untouched(tmp_path), pytest.raises(FileNotFoundError, match="missing"):
        quantize_file(source, tmp_path / "missing" / "t.gguf", "q4_0")


@pytest.mark.usefixtures("no_work")
def test_a_folder_is_no_target(tmp_path: Path) -> None:
    source = small(tmp_path / "s.gguf")
    (tmp_path / "folder").mkdir()
    with untouched(tmp_path), pytest.raises(OSError, match="folder"):
        quantize_file(source, tmp_path / "folder", "q4_0", force=True)


# Failures in the middle.


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("shape", "at", "value", "problem"),
    [
        ((8, 64), (5, 3), np.nan, "cannot quantize nan in row 5:"),
        ((3, 4, 32), (1, 2, 0), -np.inf, r"cannot quantize -inf in row \(1, 2\):"),
        ((8, 64), (7, 63), 1e30, "the scale 'd' of a block in row 7 overflows float16"),
    ],
    ids=["nan", "infinity", "scale"],
)
def test_a_weight_that_cannot_be_quantized(
    tmp_path: Path, shape: tuple[int, ...], at: Any, value: float, problem: str, existing: bool
) -> None:
    bad = weights(*shape)
    bad[at] = value
    source, target = small(tmp_path / "s.gguf", bad__weight=bad), tmp_path / "t.gguf"
    if existing:
        target.write_text("precious")
    with untouched(tmp_path), pytest.raises(ValueError, match=rf"tensor 'bad\.weight': .*{problem}"):
        quantize_file(source, target, "q4_0", force=existing)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["write_kv_data_to_file", "write_tensor_data"])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interruption_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException], existing: bool
) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    if existing:
        target.write_text("precious")
    original, calls = getattr(gguf.GGUFWriter, method), []

    def interrupted(self: gguf.GGUFWriter, *args: Any) -> None:
        original(self, *args)
        calls.append(sorted(tmp_path.iterdir()))
        if len(calls) == 2 or method != "write_tensor_data":
            raise error

    monkeypatch.setattr(gguf.GGUFWriter, method, interrupted)
    with untouched(tmp_path), pytest.raises(error):
        quantize_file(source, target, "q4_0", force=existing)
    assert len(calls[-1]) == 2 + existing  # the unfinished file was there


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_follows_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    before = os.umask(mask)
    try:
        quantize_file(source, target, "q4_0")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == mode
    assert sorted(tmp_path.iterdir()) == [source, target]
