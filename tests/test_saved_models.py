"""Models in safetensors files: opened, evaluated and written anew as GGUF files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run
from gguf_files import HELD_OUT, NANO, untouched, write
from test_convert import REWRITTEN, small, weights
from test_safetensors import same

import cuquant as cq
from cuquant import formats
from cuquant.io.safetensors import KEY, METADATA
from cuquant.warmup import _weights as matrices_of

RECIPE = {"blk.0.*": cq.KBit(3, np.linspace(-1, 1, 8) ** 3), "*": "int4-32-zeros"}
WEIGHT = {"shape": [8, 64], "format": formats.describe(cq.KBit(4))}
CASES = ["kbit4", "trellis3", "q4_0", cq.NvFp4(), RECIPE]


def saved(folder: Path, fmt: Any = "kbit4", **more: Any) -> Path:
    """A quantized model."""
    source, target = small(folder / "s.gguf", **more), folder / "t.safetensors"
    cq.quantize_file(source, target, fmt, device="cpu")
    return target


def rewrite(path: Path, note: Any = None, **infos: Any) -> None:
    """Change what a file says of itself, and of tensors."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    told = json.loads(header["__metadata__"][KEY])
    header["__metadata__"][KEY] = json.dumps(told | (note or {}))
    for name, info in infos.items():
        header[name] |= info
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_tensors_and_metadata(tmp_path: Path, fmt: Any) -> None:
    path = saved(tmp_path, fmt, embd=weights(8, 64).astype(np.float16))
    source, model, arrays = cq.open(tmp_path / "s.gguf", "cpu"), cq.open(path, "cpu"), cq.load(path, "cpu")
    assert list(model) == list(source) == list(arrays)
    for name, array in arrays.items():
        same(model[name], array)
        info = model.tensors[name]
        assert (info.shape, info.nbytes) == (array.shape, array.nbytes)
        numbers = array.dequantize() if isinstance(array, cq.QuantizedArray) else array
        np.testing.assert_array_equal(model.floats(name), numbers)
    up = model["blk.0.ffn_up.weight"]
    assert model.tensors["blk.0.ffn_up.weight"].type_name == up.format.type_name
    assert model.format("blk.0.ffn_up.weight") == up.format
    x = weights(3, 64)
    np.testing.assert_array_equal(x @ up.T, x @ arrays["blk.0.ffn_up.weight"].T)
    assert {k: v for k, v in model.metadata.items() if k not in REWRITTEN} == {
        k: v for k, v in source.metadata.items() if k not in REWRITTEN
    }
    assert up.format.type_name in repr(model)
    model.close()
    with pytest.raises(ValueError, match=r"t\.safetensors: tensor 'embd': the file is closed"):
        model["embd"]


def test_a_real_model_is_evaluated_as_its_formats_are(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"text": HELD_OUT, "ctx": 64, "chunks": 1, "device": "cpu"}
    path = tmp_path / "m.safetensors"
    cq.quantize_file(NANO, path, "kbit3", device="cpu")
    result = cq.evaluate(path, base=NANO, **settings)
    expected = cq.evaluate(NANO, formats="kbit3", **settings)
    assert [row.format for row in result.rows] == ["f16", "kbit3"]
    assert result.rows == expected.rows
    several = cq.evaluate_files([path, NANO], results=tmp_path / "r.json", **settings)
    assert [each.rows[0].format for each in several.each] == ["kbit3", "f16"]
    model = cq.open(path, "cpu")
    ids, expected_ids = (cq.Tokenizer.from_metadata(each).encode("a text") for each in (path, NANO))
    np.testing.assert_array_equal(ids, expected_ids)
    assert len(matrices_of(model)[0]) == 30


def test_arrays_with_metadata_are_a_model(tmp_path: Path) -> None:
    """Of formats with parameters of one's own."""
    source = cq.open(NANO, "cpu")
    lloyd = cq.KBit(2, [-1, -0.25, 0.25, 1])
    made = {name: cq.quantize(t, lloyd) if t.ndim > 1 else t for name, t in source.items()}
    cq.save(tmp_path / "m.safetensors", made, source.metadata)
    model = cq.open(tmp_path / "m.safetensors", "cpu")
    kept = {key: value for key, value in source.metadata.items() if key != "general.file_type"}
    assert model.metadata == kept | {"general.quantization_version": 2}
    assert model["output.weight"].format == lloyd
    assert cq.evaluate(model, tokens=np.arange(64), ctx=64).rows[0].format == lloyd.name
    with pytest.raises(TypeError, match=r"metadata are those of a model, model\.metadata, not a dict"):
        cq.save(tmp_path / "n.safetensors", made, dict(source.metadata))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"can have no tensor named {METADATA!r}"):
        cq.save(tmp_path / "n.safetensors", {METADATA: np.ones(3)})
    assert not (tmp_path / "n.safetensors").exists()


@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_floats_of_it(tmp_path: Path, fmt: Any) -> None:
    path = saved(tmp_path, fmt)
    model = cq.open(path, "cpu")
    for suffix in (".gguf", ".safetensors"):
        done = cq.dequantize_file(path, tmp_path / f"f{suffix}", "f32", device="cpu")
        assert done.made >= {"blk.0.ffn_up.weight"}
        floats = cq.open(tmp_path / f"f{suffix}", "cpu")
        assert floats.metadata["general.file_type"] == 0
        for name in model:
            np.testing.assert_array_equal(floats[name], model.floats(name))
    again = cq.quantize_file(tmp_path / "f.safetensors", tmp_path / "q.gguf", "q8_0", device="cpu")
    assert again.quantized == {"blk.0.ffn_up.weight", "output.weight"}


def test_what_gguf_has_no_types_for_is_not_copied_there(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with (
        untouched(tmp_path),
        pytest.raises(cq.GGUFError, match=r"tensor 'output\.weight' is in kbit4, for which GGUF has no type"),
    ):
        cq.dequantize_file(path, tmp_path / "f.gguf", keep="output.weight", device="cpu")
    with untouched(tmp_path), pytest.raises(ValueError, match=r"quantized already: .*KBIT4"):
        cq.quantize_file(path, tmp_path / "q.gguf", "q4_0", device="cpu")
    cq.dequantize_file(path, tmp_path / "f.safetensors", keep="output.weight", device="cpu")
    same(cq.open(tmp_path / "f.safetensors", "cpu")["output.weight"], cq.load(path, "cpu")["output.weight"])
    with pytest.raises(ValueError, match="is the file being read"):
        cq.dequantize_file(path, path, force=True, device="cpu")


def test_a_type_of_gguf_s_is_copied_there(tmp_path: Path) -> None:
    path = saved(tmp_path, {"output.weight": "q4_0", "*": "kbit4"})
    cq.dequantize_file(path, tmp_path / "f.gguf", keep="output.weight", device="cpu")
    copied = cq.open(tmp_path / "f.gguf", "cpu")
    assert copied.tensors["output.weight"].type_name == "Q4_0"
    same(copied["output.weight"], cq.load(path, "cpu")["output.weight"])


@pytest.mark.parametrize(
    ("note", "infos", "message"),
    [
        ({"metadata": "gone"}, {}, "it has no metadata under the name 'gone': it is damaged"),
        ({"metadata": "blk.0.ffn_norm.weight"}, {}, "no metadata under the name 'blk.0.ffn_norm.weight'"),
        ({"metadata": "output.weight"}, {}, "no metadata under the name 'output.weight'"),
        ({"metadata": 5}, {}, "the metadata 'cuquant' is damaged"),
        ({"weights": 5}, {}, "the metadata 'cuquant' is damaged"),
        ({"weights": {"gone": {}}}, {}, "the weight 'gone' is listed, but there is no such tensor"),
        ({"weights": {"output.weight": {"shape": [4, 32]}}}, {}, "'output.weight' is damaged: no 'format'"),
        (
            {"weights": {"output.weight": {"shape": [8, 32], "format": WEIGHT["format"]}}},
            {},
            "'output.weight' is damaged: 68 of uint8 are there, kbit4 of shape .8, 32. has 136 bytes",
        ),
        (
            {"weights": {"output.weight": {"shape": [4, 32], "format": {"name": "nvfp4", "scale": None}}}},
            {},
            "'output.weight' is damaged: nvfp4.*: the format has no scale",
        ),
        ({}, {"blk.0.ffn_norm.weight": {"shape": [1] * 70 + [64]}}, "norm.weight' has the shape"),
        ({}, {"blk.0.ffn_norm.weight": {"shape": [1, 1, 1, 1, 64]}}, "norm.weight' has the shape"),
        (
            {},
            {"blk.0.ffn_norm.weight": {"dtype": "U32"}},
            "'blk.0.ffn_norm.weight' has the type U32, which no",
        ),
    ],
)
def test_damage(tmp_path: Path, note: Any, infos: dict[str, Any], message: str) -> None:
    path = saved(tmp_path)
    if "output.weight" in str(note.get("weights")):
        note = {"weights": {"blk.0.ffn_up.weight": WEIGHT} | note["weights"]}
    rewrite(path, note, **infos)
    with pytest.raises(cq.GGUFError, match=rf"t\.safetensors: .*{message}"):
        cq.open(path, "cpu")


def test_damaged_metadata(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"GGUF", b"GGUE"))
    with pytest.raises(cq.GGUFError, match=r"t\.safetensors: metadata: not a GGUF file"):
        cq.open(path, "cpu")
    assert len(cq.load(path, "cpu")) == 3
    rng, refused = np.random.default_rng(0), []
    for place in rng.integers(0, len(content), 300):
        bits = bytes([content[place] ^ 1 << rng.integers(8)])
        path.write_bytes(content[:place] + bits + content[place + 1 :])
        try:
            model = cq.open(path, "cpu")
            for name in model:
                model.floats(name)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("t.safetensors" in error or "tensor" in error for error in refused)


def test_a_damaged_weight(tmp_path: Path) -> None:
    """Which is found when it is read: a sign that is none."""
    path = saved(tmp_path, "trellis3")
    content = np.fromfile(path, np.uint8)
    model = cq.open(path, "cpu")
    info, fmt = model.tensors["output.weight"], model.format("output.weight")
    assert isinstance(fmt, cq.Trellis)
    stored = content[info.offset :][: info.nbytes].reshape(fmt.stored(info.shape))
    fmt.parts(stored, info.shape).sv[-1] = 9
    content.tofile(path)
    model = cq.open(path, "cpu")
    for read in (model.__getitem__, model.floats):
        with pytest.raises(cq.GGUFError, match=r"t\.safetensors: tensor 'output\.weight': trellis.* 9"):
            read("output.weight")


def test_arrays_without_metadata_are_no_model(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    cq.save(path, {"w": weights(2, 32)})
    message = (
        r"w\.safetensors: not a model, but arrays that cuquant wrote, and cuquant\.load reads: it has no"
    )
    for read in (cq.open, lambda p: cq.evaluate(p, text="some text")):
        with pytest.raises(cq.GGUFError, match=message):
            read(path)


def test_commands(run: Run, tmp_path: Path) -> None:
    source, target = write(tmp_path / "s.gguf", {"w.weight": weights(8, 64)}), tmp_path / "t.safetensors"
    assert run("quantize", source, target, "--format", "kbit2").status == 0
    shown = [" ".join(line.split()) for line in run("dump", target).out.splitlines()]
    assert "general.quantization_version uint32 2" in shown
    assert "w.weight KBIT2 8 x 64 144" in shown
    told = json.loads(run("dump", target, "--json").out)
    assert told["tensors"][0]["type"] == "KBIT2"
    assert run("dequantize", target, tmp_path / "f.gguf").status == 0
    assert "1 tensor identical" in run("compare", target, target).out
    assert "KBIT2" in run("compare", source, target).out


def test_models_that_gguf_s_rules_refuse_are_not_saved(tmp_path: Path) -> None:
    """They could be opened by nothing, or be written to no GGUF file."""
    metadata = cq.open(small(tmp_path / "s.gguf"), "cpu").metadata
    ones = np.ones((2, 32), np.float32)
    for tensors, message in (
        ({}, "a model has tensors"),
        ({"": ones}, "tensor '' has a name of 0 bytes"),
        ({"a" * 64: ones}, "has a name of 64 bytes; those of models have 1 to 63"),
        ({"a": ones.reshape(1, 1, 1, 2, 32)}, "shape .1, 1, 1, 2, 32.; those of models have up to 4 dim"),
        ({"a": ones[:0]}, "has the shape .0, 32.; .* none zero"),
        ({"a": ones > 0}, "'a' has the type BOOL; allowed are F64, F32"),
    ):
        with untouched(tmp_path), pytest.raises(ValueError, match=message):
            cq.save(tmp_path / "m.safetensors", tensors, metadata)
        cq.save(tmp_path / "m.safetensors", tensors)
        (tmp_path / "m.safetensors").unlink()


@pytest.mark.parametrize("name", [METADATA, "__metadata__"])
def test_names_that_are_taken(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "s.gguf", {"w.weight": weights(8, 64), name: weights(3)})
    with untouched(tmp_path), pytest.raises(ValueError, match=f"can have no tensor named '{name}'"):
        cq.quantize_file(source, tmp_path / "t.safetensors", "kbit4", device="cpu")


def test_metadata_that_are_a_model_themselves(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    place = 8 + int.from_bytes(content[:8], "little") + header[METADATA]["data_offsets"][0]
    size = header[METADATA]["data_offsets"][1] - header[METADATA]["data_offsets"][0]
    other = (tmp_path / "s.gguf").read_bytes()[:size]
    path.write_bytes(content[:place] + other + content[place + len(other) :])
    with pytest.raises(cq.GGUFError, match=r"t\.safetensors: metadata: "):
        cq.open(path, "cpu")


def test_scales_are_no_types(tmp_path: Path) -> None:
    """A tensor of nvfp4 has the same type whatever its scale, as in a GGUF file."""
    settings: dict[str, Any] = {"tokens": np.arange(64), "ctx": 64, "device": "cpu"}
    cq.quantize_file(NANO, tmp_path / "m.safetensors", cq.NvFp4(), device="cpu")
    model = cq.open(tmp_path / "m.safetensors", "cpu")
    assert "30 NVFP4" in repr(model)
    assert cq.evaluate(model, **settings).rows[0].format == "nvfp4"
    with pytest.raises(cq.GGUFError, match=r"is in nvfp4\*.*, for which GGUF has no type"):
        cq.dequantize_file(model, tmp_path / "f.gguf", keep="output.weight")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", CASES, ids=str)
def test_on_a_gpu(tmp_path: Path, fmt: Any) -> None:
    path = saved(tmp_path, fmt)
    here, there = (cq.open(path, device) for device in ("cpu", "cuda"))
    assert (there.device, list(there)) == ("cuda", list(here))
    for name in here:
        same(
            there[name].to_device("cpu") if hasattr(there[name], "format") else there[name].get(), here[name]
        )
        np.testing.assert_array_equal(there.floats(name), here.floats(name))
    w = there["blk.0.ffn_up.weight"]
    x = weights(3, 64)
    assert cq.testing.nmse((there.xp.asarray(x) @ w.T).get(), x @ here["blk.0.ffn_up.weight"].T) < 1e-6
    cq.save(path, dict(there), there.metadata)
    same(cq.open(path, "cpu")["output.weight"], here["output.weight"])
