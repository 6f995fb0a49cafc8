"""Quantizing files: llama-quantize's bytes, all metadata, and no trace of what did not succeed."""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
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
from cuquant.io import convert
from cuquant.io.convert import quantize_file
from cuquant.io.header import ValueType

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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"^tensor 'tiny\.weight': about 100% of the weights"):
            cq.quantize_file(source, tmp_path / "r.gguf", "nvfp4", keep="output.weight")
        cq.quantize(weights(2, 64), "nvfp4")
    assert not (tmp_path / "r.gguf").exists()
    with pytest.warns(UserWarning, match=r"^about 100% of the weights") as said:
        cq.quantize(weights(2, 64) * np.float32(1e-4), "nvfp4")
    assert [each.filename for each in said] == [__file__]


def test_threads_hear_of_their_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And warnings of all others go where they went before."""
    together = threading.Barrier(3, timeout=60)

    def quantize(*args: Any) -> Any:
        together.wait()
        made = cq.quantize(*args)
        together.wait()
        return made

    def one(name: str) -> None:
        source = write(tmp_path / f"{name}.gguf", {f"{name}.weight": weights(8, 64) * np.float32(1e-4)})
        cq.quantize_file(source, tmp_path / f"{name}-q.gguf", "nvfp4", device="cpu")

    monkeypatch.setattr(convert, "quantize", quantize)
    with warnings.catch_warnings(record=True) as said, ThreadPoolExecutor(3) as pool:
        warnings.simplefilter("always")
        list(pool.map(one, "abc"))
        warnings.warn("another", stacklevel=1)
    heard = sorted(str(each.message)[:17] for each in said)
    assert heard == ["another", *(f"tensor '{name}.weight'" for name in "abc")]


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
    assert cq.open(target).metadata["general.architecture"] == "unknown"  # as no GGUF file is without


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


# Models that are open.


def test_a_model_is_a_source_too(tmp_path: Path) -> None:
    with cq.open(small(tmp_path / "s.gguf"), "cpu") as model:
        quantize_file(model, tmp_path / "t.gguf", "q4_0")
        quantize_file(model.path, tmp_path / "u.gguf", "q4_0")
        assert model["output.weight"].shape == (4, 32)
        cq.dequantize_file(model, tmp_path / "v.gguf")
    assert (tmp_path / "t.gguf").read_bytes() == (tmp_path / "u.gguf").read_bytes()


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
