"""One file of a checkpoint of several: tensors that change its weights may lie in another."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_import import F, assert_is, awq, gptq, pack_quantized, weight
from test_import_fp4 import nvfp4, save

import cuquant as cq
from cuquant.formats.exl3 import GENERATORS

read_safetensors = partial(cq.read_safetensors, device="cpu")

FIRST, SECOND = "m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"
ELSEWHERE = r"another file of the checkpoint may: pass its folder, or its \*\.safetensors\.index\.json$"
W = weight(8, 64, 32, (1, 16))


def exl3() -> dict[str, Any]:
    g = np.random.default_rng(0)
    signs = np.ones(128, np.float16)
    return {"trellis": g.integers(-9, 9, (8, 8, 32), np.int16), "suh": signs, "svh": signs}


def modelopt() -> dict[str, Any]:
    packed, scales, _ = nvfp4((8, 64))
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": np.array(1, F)}


def compressed_nvfp4() -> dict[str, Any]:
    packed, scales, _ = nvfp4((8, 64))
    return {"weight_packed": packed, "weight_scale": scales}


def factor(codebook: str) -> Any:
    return np.array(GENERATORS[codebook], np.uint32).view(np.int32)


ORDER = (np.arange(64, dtype=np.int32)[::-1] // 32).copy()
SYMMETRIC = {key: value for key, value in pack_quantized(W).items() if key != "weight_zero_point"}
CASES: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    # What may be in another file: the other tensors, itself, and why the whole is refused, if it is.
    "g_idx": (gptq(W), ORDER, "act-order"),
    "weight_zero_point": (SYMMETRIC, pack_quantized(W)["weight_zero_point"], None),
    "weight_g_idx": (pack_quantized(W), ORDER, "act-order"),
    "mcg": (exl3(), factor("mcg"), None),
    "mul1": (exl3(), factor("mul1"), None),
    "weight_global_scale": (compressed_nvfp4(), np.array(8, F), None),
    "pre_quant_scale": (modelopt(), np.full(64, 0.5, F), "pre_quant_scale"),
}


def split(folder: Path, end: str) -> tuple[Path, Path]:
    """A layer "l" in one file, and its tensor of this end in the other."""
    tensors, value, _ = CASES[end]
    first = save(folder / FIRST, {f"l.{key}": array for key, array in tensors.items()})
    return first, save(folder / SECOND, {f"l.{end}": value, "norm.weight": np.ones(3, F)})


def index(folder: Path, *files: Path) -> Path:
    """An index of these files as they are."""
    homes: dict[str, str] = {}
    for file in files:
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        homes |= dict.fromkeys(header, file.name)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": homes}))
    return path


@pytest.mark.parametrize("known_by", ["other file", "index", "index alone"])
@pytest.mark.parametrize("end", CASES)
def test_a_tensor_that_changes_a_weight_is_in_another_file(tmp_path: Path, end: str, known_by: str) -> None:
    """Neither of the files is read alone."""
    first, second = split(tmp_path, end)
    if known_by != "other file":
        index(tmp_path, first, second)
    if known_by == "index alone":
        second.unlink()
    else:
        with pytest.raises(ValueError, match=rf"{SECOND}: l\.{end} has no .* beside it; {ELSEWHERE}"):
            read_safetensors(second)
    told = rf"{FIRST}: l\.\w+ has no {end} beside it; {ELSEWHERE}"
    with pytest.raises(ValueError, match=told):
        read_safetensors(first)


@pytest.mark.parametrize("end", CASES)
def test_the_folder_of_both_files_is_read(tmp_path: Path, end: str) -> None:
    split(tmp_path, end)
    problem = CASES[end][2]
    if problem is None:
        assert list(read_safetensors(tmp_path)) == ["l.weight"]
    else:
        with pytest.raises(ValueError, match=problem):
            read_safetensors(tmp_path)


def test_zero_points_in_another_file(tmp_path: Path) -> None:
    """The weight is that of the whole, or none: not a symmetric one."""
    split(tmp_path, "weight_zero_point")
    assert_is(read_safetensors(tmp_path)["l.weight"], W)


@pytest.mark.parametrize("known_by", ["other files", "index"])
@pytest.mark.parametrize("end", [end for end in CASES if end != "weight_global_scale"])
def test_a_file_that_has_all_of_its_weights(tmp_path: Path, end: str, known_by: str) -> None:
    """Where the others are known nothing warns; what they have of other weights does not matter."""
    tensors, value, problem = CASES[end]
    there = {} if problem else {end: value}
    first = save(tmp_path / FIRST, {f"l.{key}": array for key, array in (tensors | there).items()})
    both = first, save(tmp_path / SECOND, {f"m.{key}": array for key, array in (tensors | there).items()})
    if known_by == "index":
        index(tmp_path, *both)
        both[1].unlink()
    assert list(read_safetensors(first)) == ["l.weight"]


def test_weights_that_are_not_read_do_not_matter(tmp_path: Path) -> None:
    tensors = {f"{name}.{key}": array for name in "ab" for key, array in SYMMETRIC.items()}
    first = save(tmp_path / FIRST, tensors)
    save(tmp_path / SECOND, {"b.weight_zero_point": pack_quantized(W)["weight_zero_point"]})
    with pytest.raises(ValueError, match=r"b\.weight_packed has no weight_zero_point beside it"):
        read_safetensors(first)
    assert list(read_safetensors(first, names="a.*")) == ["a.weight"]


@pytest.mark.parametrize("beside", ["nothing", "damaged", "no index", "an index of others", "another count"])
@pytest.mark.parametrize("end", [end for end in CASES if end != "weight_global_scale"])
def test_the_other_files_are_not_known(tmp_path: Path, end: str, beside: str) -> None:
    """The weights are read, and a warning says what could be missing."""
    first, second = split(tmp_path, end)
    if beside == "an index of others":
        index(tmp_path, second)
    elif beside == "no index":
        (tmp_path / "m.safetensors.index.json").write_text('{"weight_map": 3}')
    elif beside == "another count":
        save(tmp_path / "m-00002-of-00003.safetensors", {"norm.weight": np.ones(3, F)})
    if beside == "damaged":
        second.write_bytes(second.read_bytes()[:-1])
    else:
        second.unlink()
    words = {
        "mcg": "mcg or mul1",
        "mul1": "mcg or mul1",
        "weight_zero_point": "weight_g_idx or weight_zero_point",
    }.get(end, end)
    told = rf"{FIRST}: neither an index .* they may have {words} of .*\(1 weight, the first is l\), and would"
    with pytest.warns(UserWarning, match=told) as warned:
        assert list(read_safetensors(first)) == ["l.weight"]
    assert [each.filename for each in warned] == [__file__]


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = split(tmp_path, "g_idx")

    def refuse(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.warns(UserWarning, match=r"they may have g_idx of"):
        assert list(read_safetensors(first)) == ["l.weight"]


def test_weights_that_nothing_could_change_do_not_warn(tmp_path: Path) -> None:
    """AWQ's, a codebook that is named, an order that is there, FP4 of compressed-tensors with one."""
    packed, _, _ = nvfp4((8, 64))
    in_order = {"weight_g_idx": np.full(64, -1, np.int32)}
    layers: dict[str, dict[str, Any]] = {
        "awq": awq(W),
        "gptq": gptq(W) | {"g_idx": np.arange(64, dtype=np.int32) // 32},
        "exl3": exl3() | {"mul1": factor("mul1")},
        "int4": pack_quantized(W) | in_order,
        "nvfp4": compressed_nvfp4() | {"weight_global_scale": np.array(8, F)} | in_order,
        "mxfp4": {"weight_packed": packed, "weight_scale": np.full((8, 2), 127, np.uint8)} | in_order,
        "modelopt": modelopt() | {"pre_quant_scale": np.ones(64, F)},
    }
    tensors = {f"{name}.{key}": array for name, layer in layers.items() for key, array in layer.items()}
    first = save(tmp_path / FIRST, tensors)
    assert len(read_safetensors(first)) == len(layers)
    save(first, tensors | {f"other.{key}": array for key, array in SYMMETRIC.items()})
    with pytest.warns(
        UserWarning, match=r"weight_g_idx or weight_zero_point .*\(1 weight, the first is other\)"
    ):
        read_safetensors(first)
    del tensors["mxfp4.weight_g_idx"]
    save(first, tensors)
    with pytest.warns(UserWarning, match=r"they may have weight_g_idx of .*\(1 weight, the first is mxfp4\)"):
        read_safetensors(first)


def test_files_of_other_names_in_an_index(tmp_path: Path) -> None:
    """The index alone says that they are parts."""
    tensors, zeros, _ = CASES["weight_zero_point"]
    codes = save(tmp_path / "codes.safetensors", {f"l.{key}": array for key, array in tensors.items()})
    rest = save(tmp_path / "rest.safetensors", {"l.weight_zero_point": zeros})
    norms = save(tmp_path / "norms.safetensors", {"norm.weight": np.ones(3, F)})
    assert list(read_safetensors(codes)) == ["l.weight"]
    listing = index(tmp_path, codes, rest, norms)
    with pytest.raises(
        ValueError, match=rf"l\.weight_packed has no weight_zero_point beside it; {ELSEWHERE}"
    ):
        read_safetensors(codes)
    assert read_safetensors(norms) == {}
    assert_is(read_safetensors(listing)["l.weight"], W)
    index(tmp_path, norms)
    with pytest.raises(ValueError, match=r"norms\.safetensors has no weight of GPTQ"):
        read_safetensors(norms)


def test_tensors_of_weights_that_are_not_read(tmp_path: Path) -> None:
    """Integers of 8 bits of compressed-tensors, and int4 of ModelOpt, beside what others have of them too."""
    tensors = {
        "a.weight": np.ones((8, 64), np.uint8),
        "a.weight_scale": np.ones((8, 2), F),
        "a.weight_zero_point": np.zeros((8, 2), np.int32),
        "a.weight_g_idx": np.zeros(64, np.int32),
        "b.weight": np.ones((8, 32), np.uint8),
        "b.pre_quant_scale": np.ones(64, F),
        "c.mcg": np.ones(3, F),
        "c.scales": np.ones(3, ml_dtypes.float8_e4m3fn),
    }
    assert read_safetensors(save(tmp_path / FIRST, tensors)) == {}
