"""Checkpoints of int4 weights in files: one or several, with and without what a weight needs."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from test_import import F, Weight, assert_is, awq, gptq, pack_quantized, weight

import cuquant as cq
from cuquant import device

read_safetensors = partial(cq.read_safetensors, device="cpu")


def save(path: Path, tensors: dict[str, NDArray[Any]]) -> Path:
    save_file(tensors, path)
    return path


def named(name: str, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {f"{name}.{key}": value for key, value in tensors.items()}


def test_a_checkpoint_of_both_layouts(tmp_path: Path) -> None:
    a, b, c = weight(16, 128, 32, (1, 16)), weight(8, 64, 64, seed=1), weight(8, 256, 128, (8, 9), seed=2)
    tensors = named("model.layers.1.q_proj", gptq(a)) | named("model.layers.0.k_proj", awq(b))
    tensors |= named("lm_head", gptq(c)) | {"lm_head.g_idx": np.arange(256, dtype=np.int32) // 128}
    tensors |= {"model.norm.weight": np.ones(4, F), "model.layers.1.q_proj.bias": np.ones(16, np.float16)}
    made = read_safetensors(save(tmp_path / "m.safetensors", tensors))
    assert list(made) == ["lm_head.weight", "model.layers.0.k_proj.weight", "model.layers.1.q_proj.weight"]
    assert_is(made["model.layers.1.q_proj.weight"], a)
    assert_is(made["model.layers.0.k_proj.weight"], b)
    assert_is(made["lm_head.weight"], c, symmetric=True)


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    """The zero points and order of a weight are not always there."""
    a, b = weight(16, 128, 32), weight(8, 64, 64, (8, 9), seed=1)
    tensors = named("a", pack_quantized(a)) | named("b.q_proj", pack_quantized(b))
    del tensors["b.q_proj.weight_zero_point"]
    tensors |= {"a.weight_g_idx": np.full(128, -1, np.int32), "a.input_scale": np.ones(1, F)}
    made = read_safetensors(save(tmp_path / "m.safetensors", tensors))
    assert list(made) == ["a.weight", "b.q_proj.weight"]
    assert_is(made["a.weight"], a)
    assert_is(made["b.q_proj.weight"], b, symmetric=True)
    part = save(tmp_path / "m-00001-of-00002.safetensors", {"a.weight_shape": np.array([16, 128])})
    with pytest.raises(ValueError, match=r"a\.weight_shape has no weight_packed beside it; another file"):
        read_safetensors(part)


def test_codes_of_8_bits_of_compressed_tensors(tmp_path: Path) -> None:
    """Without a shape they look like twice as many of 4 bits, of groups that are twice as long."""
    codes = named("a", {"weight_packed": np.ones((8, 16), np.int32), "weight_scale": np.ones((8, 2), F)})
    shape = {"a.weight_shape": np.array([8, 64])}
    path = save(tmp_path / "m.safetensors", codes | shape)
    with pytest.raises(ValueError, match=r"a\.weight_packed: .*; codes of 8 bits cannot be read"):
        read_safetensors(path)
    told = r"a\.weight_packed has no weight_shape beside it, which tells codes of 4 bits from those of 8"
    with pytest.raises(ValueError, match=rf"{told}$"):
        read_safetensors(save(path, codes))
    with pytest.raises(ValueError, match=rf"{told}; another file of the checkpoint may"):
        read_safetensors(save(tmp_path / "m-00001-of-00002.safetensors", codes))
    path.unlink()
    save(tmp_path / "m-00002-of-00002.safetensors", shape)
    with pytest.raises(ValueError, match="codes of 8 bits cannot be read"):
        read_safetensors(tmp_path)


def test_scales_in_bfloat16(tmp_path: Path) -> None:
    a, b = (weight(8, 64, 32, (1, 16), seed=seed) for seed in (0, 1))
    a, b = (w._replace(scales=w.scales.astype(ml_dtypes.bfloat16).astype(np.float16)) for w in (a, b))
    tensors = named("a", gptq(a)) | named("b", awq(b))
    for name in ("a.scales", "b.scales"):
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    made = read_safetensors(save(tmp_path / "m.safetensors", tensors))
    assert_is(made["a.weight"], a)
    assert_is(made["b.weight"], b)


def test_some_weights_of_a_checkpoint(tmp_path: Path) -> None:
    a, b = weight(8, 64, 32), weight(8, 64, 32, seed=1)
    tensors = named("layers.0.k", gptq(a)) | named("layers.0.v", awq(b)) | named("layers.1.k", gptq(b))
    path = save(tmp_path / "m.safetensors", tensors | {"broken.qweight": np.ones((8, 8), np.int32)})
    made = read_safetensors(path, names="layers.0.*")
    assert list(made) == ["layers.0.k.weight", "layers.0.v.weight"]
    assert_is(made["layers.0.v.weight"], b)
    assert list(read_safetensors(path, names=["*.1.k.weight", "*.0.v.*"])) == [
        "layers.0.v.weight",
        "layers.1.k.weight",
    ]
    said = r"no weight of m\.safetensors is named like 'layers\.2\.\*' \(names\): one that is there is '.+'"
    with pytest.raises(ValueError, match=said):
        read_safetensors(path, names=["layers.0.*", "layers.2.*"])
    wrong: Any
    for wrong, told in ((3, "is an int"), (None, "is None"), ([None], "has None in it")):
        with pytest.raises(TypeError, match=f"^names {told}; a pattern of names, or several, is needed"):
            read_safetensors(tmp_path / "none.safetensors", names=wrong)


def test_a_checkpoint_of_version_2(tmp_path: Path) -> None:
    w = weight(8, 64, 32)
    path = save(tmp_path / "m.safetensors", named("a", gptq(w, 2)))
    assert_is(read_safetensors(str(path), version=2)["a.weight"], w)
    wrong: Any
    for wrong, kind in ((3, ValueError), ("2", TypeError)):
        with pytest.raises(kind, match=r"^version is .*; allowed are 1 and 2"):
            read_safetensors(tmp_path / "none.safetensors", version=wrong)


V1, V2 = {"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}


@pytest.mark.parametrize(
    ("file", "said", "version"),
    [
        ("quantize_config.json", V2 | {"bits": 4}, 2),
        ("quantize_config.json", V1, 1),
        ("config.json", {"quantization_config": V2}, 2),
        ("config.json", {"quantization_config": V1 | {"quant_method": "gptq"}}, 1),
        ("quantize_config.json", {"format": "GPTQ_V2"}, 2),
        ("quantize_config.json", V2 | {"format": "gptq"}, 2),
        ("config.json", V2, None),  # of the model
        ("config.json", {"quantization_config": None}, None),
        ("config.json", {"quantization_config": {"format": "pack-quantized"}}, None),
        ("quantize_config.json", {"checkpoint_format": 2}, None),
        ("quantize_config.json", [V2], None),
        ("other.json", V2, None),
    ],
)
def test_a_configuration_says_the_version(tmp_path: Path, file: str, said: Any, version: int | None) -> None:
    """Beside a file, in a folder or beside an index; without one it is 1."""
    w = weight(8, 64, 32, (1, 16))
    path = save(tmp_path / "m.safetensors", named("a", gptq(w, version or 1)) | named("b", awq(w)))
    index = {"weight_map": {f"{name}.{part}": path.name for name in "ab" for part in gptq(w)}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / file).write_text(json.dumps(said))
    for each in (path, tmp_path, tmp_path / "m.safetensors.index.json"):
        made = read_safetensors(each)
        assert_is(made["a.weight"], w)
        assert_is(made["b.weight"], w)
    other = 3 - (version or 1)
    assert_is(read_safetensors(path, names="b.*", version=other)["b.weight"], w)
    if version is None:
        assert len(read_safetensors(path, version=other)) == 2
        return
    name = {1: "gptq", 2: "gptq_v2"}[version]
    told = rf"version is {other}, but .*{file} says '{name}' \(version {version}\): leave it out$"
    with pytest.raises(ValueError, match=told):
        read_safetensors(path, version=other)
    assert_is(read_safetensors(path, version=version)["a.weight"], w)


def test_two_configurations(tmp_path: Path) -> None:
    w = weight(8, 64, 32)
    path = save(tmp_path / "m.safetensors", named("a", gptq(w, 2)))
    (tmp_path / "quantize_config.json").write_text(json.dumps(V2))
    for said in ({}, {"quantization_config": V2}):
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert_is(read_safetensors(path)["a.weight"], w)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": V1}))
    told = r"quantize_config\.json says 'gptq_v2' \(version 2\) and .*: pass version=1 or version=2$"
    with pytest.raises(ValueError, match=told):
        read_safetensors(path)
    assert_is(read_safetensors(path, version=2)["a.weight"], w)


@pytest.mark.parametrize("text", [b"{", b"", b"\xff\xfe\xff", b"[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "quantize_config.json"])
def test_a_configuration_that_is_no_json(tmp_path: Path, file: str, text: bytes) -> None:
    """Of no interest where no weight is GPTQ's, or the version is given."""
    w = weight(8, 64, 32)
    path = save(tmp_path / "m.safetensors", named("a", gptq(w, 2)) | named("b", awq(w)))
    (tmp_path / file).write_bytes(text)
    with pytest.raises(ValueError, match=rf"{file} is no JSON, .*: pass version=1 or version=2$"):
        read_safetensors(path)
    assert_is(read_safetensors(path, version=2)["a.weight"], w)
    assert_is(read_safetensors(path, names="b.*")["b.weight"], w)


def test_a_configuration_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight(8, 64, 32)
    path = save(tmp_path / "m.safetensors", named("a", gptq(w, 2)))
    (tmp_path / "config.json").write_text("{}")

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match=r"config\.json"):
        read_safetensors(path)
    assert_is(read_safetensors(path, version=2)["a.weight"], w)


def test_zero_points_that_are_those_of_version_2(tmp_path: Path) -> None:
    """A warning where a symmetric checkpoint of version 2 is read as one of 1, as nothing says which."""
    symmetric, other = weight(8, 64, 32, (8, 9)), weight(8, 64, 32, (9, 10), seed=1)
    both = {**named("a", gptq(symmetric, 2)), **named("b", gptq(symmetric, 2)), **named("c", awq(other))}
    path = save(tmp_path / "m.safetensors", both)
    told = r"m\.safetensors: no configuration .* all zero points are 9; .*: pass version=2, or version=1"
    with pytest.warns(UserWarning, match=told) as warned:
        made = read_safetensors(path)
    assert [each.filename for each in warned] == [__file__]
    assert_is(made["a.weight"], symmetric._replace(zeros=symmetric.zeros + np.uint8(1)))
    for version, is_symmetric in ((1, False), (2, True)):
        w = read_safetensors(path, version=version)["a.weight"]
        assert (w.format == cq.Int4(32)) == is_symmetric
    read_safetensors(path, names="c.*")
    save(path, both | named("d", gptq(weight(8, 64, 32, (8, 9)))))
    read_safetensors(path)
    save(path, both)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": V1}))
    read_safetensors(path)


def test_a_file_without_such_weights(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", {"a.weight": np.ones(3, F)})
    with pytest.raises(
        ValueError, match=r"m\.safetensors has no weight of GPTQ, AWQ, EXL3, .* \*\.trellis, .* \*\.blocks$"
    ):
        read_safetensors(path)


def test_a_part_of_a_checkpoint_without_such_weights(tmp_path: Path) -> None:
    """The last file of many has the output matrix alone."""
    path = save(tmp_path / "m-00002-of-00002.safetensors", {"lm_head.weight": np.ones(3, F)})
    assert read_safetensors(path) == {}


def test_one_file_of_one_without_such_weights(tmp_path: Path) -> None:
    """It is the whole checkpoint, of which no other file has more."""
    path = save(tmp_path / "m-00001-of-00001.safetensors", {"lm_head.weight": np.ones(3, F)})
    with pytest.raises(ValueError, match=r"m-00001-of-00001\.safetensors has no weight of GPTQ, AWQ, EXL3"):
        read_safetensors(path)
    save(path, {"a.qweight": np.zeros((8, 8), np.int32)})
    with pytest.raises(ValueError, match=r"a\.qweight has no qzeros and no scales beside it$"):
        read_safetensors(path)


def sharded(folder: Path) -> tuple[Weight, Weight]:
    """Two files between which layers "a" and "b" are split, and an index of them."""
    a, b = weight(16, 64, 32, (1, 16)), weight(8, 64, 32, seed=1)
    tensors = named("a", gptq(a)) | named("b", awq(b)) | {"norm.weight": np.ones(3, F)}
    homes = {name: name in ("a.qzeros", "b.qweight", "norm.weight") for name in tensors}
    files = ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]
    for second, file in enumerate(files):
        save(folder / file, {name: value for name, value in tensors.items() if homes[name] == second})
    index = {"metadata": {}, "weight_map": {name: files[second] for name, second in homes.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return a, b


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    """Wherever a layer's tensors are; by an index other files of the folder are not its."""
    a, b = sharded(tmp_path)
    save(tmp_path / "consolidated.safetensors", named("a", gptq(b)))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json", str(tmp_path)):
        made = read_safetensors(path)
        assert list(made) == ["a.weight", "b.weight"]
        assert_is(made["a.weight"], a)
        assert_is(made["b.weight"], b)
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_is(read_safetensors(tmp_path)["b.weight"], b)


def test_a_checkpoint_that_lacks_files(tmp_path: Path) -> None:
    """Names tell where there is no index, however files are counted."""
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    for first, second in (("1", "2"), ("0", "1")):
        for old, new in zip(sorted(tmp_path.glob("m-*")), (first, second), strict=True):
            old.rename(tmp_path / f"m-0000{new}-of-00002.safetensors")
        assert len(read_safetensors(tmp_path)) == 2
    for old in sorted(tmp_path.glob("m-*")):
        old.rename(tmp_path / old.name.replace("-of-00002", "-of-00003"))
    lacks = r"has 2 of the 3 files m-\*-of-00003\.safetensors: files of this checkpoint are missing"
    with pytest.raises(ValueError, match=lacks):
        read_safetensors(tmp_path)


def test_a_file_that_lacks_what_the_index_says(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["c.qweight"] = "m-00002-of-00002.safetensors"
    index.write_text(json.dumps(said))
    for path in (tmp_path, index):
        with pytest.raises(
            ValueError, match=r"m-00002-of-00002\.safetensors has no tensor 'c\.qweight', which"
        ):
            read_safetensors(path)


def test_one_of_several_files_lacks_what_another_has(tmp_path: Path) -> None:
    sharded(tmp_path)
    elsewhere = r"another file of the checkpoint may: pass its folder, or its \*\.safetensors\.index\.json"
    first, second = sorted(tmp_path.glob("m-*"))
    with pytest.raises(ValueError, match=rf"{first.name}: b\.qzeros has no qweight beside it; {elsewhere}"):
        read_safetensors(first)
    with pytest.raises(ValueError, match=rf"{second.name}: a\.qzeros has no qweight beside it; {elsewhere}"):
        read_safetensors(second)
    part = save(tmp_path / "n-00001-of-00002.safetensors", {"a.qweight": np.zeros((8, 8), np.int32)})
    problem = rf"{part.name}: a\.qweight has no qzeros and no scales beside it; {elsewhere}"
    with pytest.raises(ValueError, match=problem):
        read_safetensors(part)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "index.json is no index of a checkpoint: it has no weight_map of files"),
        ("[]", "is no index"),
        ('{"weight_map": ["m"]}', "is no index"),
        (
            '{"weight_map": {"a": "../m.safetensors"}}',
            r"index.json: '\.\./m\.safetensors' is no file beside it",
        ),
        ('{"weight_map": {"a": ""}}', "index.json: '' is no file beside it"),
        (
            '{"weight_map": {"a": "x.safetensors", "b": "\\u001b[2J"}}',
            r"files of this checkpoint are missing beside it: \\x1b\[2J, x\.safetensors$",
        ),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: str, problem: str) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(index)
    for path in (tmp_path, tmp_path / "m.safetensors.index.json"):
        with pytest.raises(ValueError, match=problem):
            read_safetensors(path)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder without safetensors files"):
        read_safetensors(tmp_path)
    for name in "mn":
        save(tmp_path / f"{name}.safetensors", {"x": np.ones(3, F)})
    with pytest.raises(ValueError, match=r"n\.safetensors: tensor 'x' is in m\.safetensors, too"):
        read_safetensors(tmp_path)
    for name in "mn":
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has 2 files \*\.safetensors\.index\.json: pass the one of"):
        read_safetensors(tmp_path)


def test_a_weight_of_two_kinds(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", named("l", awq(weight(8, 64, 32))) | {"l.trellis": np.ones(3, F)})
    with pytest.raises(ValueError, match=r"m\.safetensors: l\.\w+: there is a qweight and a trellis of this"):
        read_safetensors(path)


def test_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", named("l", awq(weight(8, 64, 32))))
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header["l.scales"] |= {"dtype": "F8_E5M2", "shape": [2, 16]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :])
    with pytest.raises(TypeError, match=r"m\.safetensors: l\.scales has the type F8_E5M2, which NumPy lacks"):
        read_safetensors(path)


@pytest.mark.parametrize("name", ["m.safetensors", "m-00002-of-00002.safetensors"])
def test_a_file_of_this_library(tmp_path: Path, name: str) -> None:
    cq.save(tmp_path / name, {"a.weight": weight(8, 64, 32)[0]})
    with pytest.raises(ValueError, match=r"\*\.blocks; cuquant wrote it, and cuquant\.load reads it"):
        read_safetensors(tmp_path / name)


def test_a_file_s_errors_name_the_weight(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = named("good", awq(weight(8, 64, 32))) | named("x.bad", gptq(weight(8, 64, 32)))
    for change, kind, message in (
        (
            {"x.bad.g_idx": np.arange(64)[::-1] // 32},
            ValueError,
            r"x\.bad\.qweight: g_idx puts weight 0 into",
        ),
        (
            {"x.bad.scales": np.ones((2, 8))},
            TypeError,
            r"x\.bad\.qweight: scales has dtype float64",
        ),
        ({"x.bad.qzeros": np.ones((2, 2), np.int32)}, ValueError, r"x\.bad\.qweight: qweight .* 4 bits"),
    ):
        save(path, tensors | {k: np.ascontiguousarray(v) for k, v in change.items()})
        with pytest.raises(kind, match=message):
            read_safetensors(path)
    for missing, words in ((("scales",), "no scales"), (("qzeros", "scales"), "no qzeros and no scales")):
        save(path, {k: v for k, v in tensors.items() if k not in [f"x.bad.{m}" for m in missing]})
        with pytest.raises(ValueError, match=rf"x\.bad\.qweight has {words} beside it"):
            read_safetensors(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"m\.safetensors is not a safetensors file that can be read"):
        read_safetensors(path)
    with pytest.raises(FileNotFoundError):
        read_safetensors(tmp_path / "none.safetensors")


def test_where_weights_are_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models are: on the GPU, if there is one, or nobody says otherwise."""
    w = weight(16, 128, 32)
    path = save(tmp_path / "m.safetensors", named("a", gptq(w)))
    with pytest.raises(ValueError, match="unknown device 'tpu'; allowed are 'cpu' and 'cuda'"):
        cq.read_safetensors(tmp_path / "none", device="tpu")
    if device.gpu_problem() is not None:
        with pytest.raises(RuntimeError, match="no CUDA device can be used"):
            cq.read_safetensors(tmp_path / "none", device="cuda")
    monkeypatch.setattr(device, "cupy", lambda: None)
    monkeypatch.setattr(cq.QuantizedArray, "to_device", lambda w, name: name)
    for default in ("cpu", "cuda"):
        monkeypatch.setattr(device, "default", lambda default=default: default)
        assert cq.read_safetensors(path) == {"a.weight": default}
        assert cq.read_safetensors(path, device="cpu") == {"a.weight": "cpu"}
