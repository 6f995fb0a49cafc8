"""Loading files that are damaged, or something else: words for each."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from test_convert import small
from test_safetensors import gauss

import cuquant as cq


def rewrite(path: Path, note: Any) -> None:
    """The same tensors under other metadata, by another program."""
    tensors = safetensors.numpy.load_file(path)
    text = note if isinstance(note, str) else json.dumps(note)
    safetensors.numpy.save_file(tensors, path, {"cuquant": text})


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(FileNotFoundError, match=r"w\.safetensors"):
        cq.load(path, "cpu")
    with pytest.raises(IsADirectoryError):
        cq.load(tmp_path, "cpu")
    small(path)  # a GGUF file
    contents = b"", b"GGUF", b"\xff" * 100, (10**6).to_bytes(8, "little") + b"{}", path.read_bytes()
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"w\.safetensors is not a safetensors file that can be read: "):
            cq.load(path, "cpu")
    for metadata in (None, {"format": "pt"}):
        safetensors.numpy.save_file({"w": gauss(3)}, path, metadata)
        with pytest.raises(
            ValueError,
            match=r"is not a file of cuquant\.save: its metadata has no 'cuquant'.*convert_hf_to_g",
        ):
            cq.load(path, "cpu")
        other = r"not a GGUF file, but a safetensors file: cuquant\.read_safetensors .*convert_hf_to_gguf\.py"
        with pytest.raises(cq.GGUFError, match=other) as error:
            cq.open(path, "cpu")
        assert "cuquant.load" not in str(error.value)


KBIT4 = {"name": "kbit", "bits": 4}
DAMAGED_NOTES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "the metadata 'cuquant' is damaged: '{'"),
    "nested": ("[" * 10**5, r"the metadata 'cuquant' is damaged: '\[{80}'"),
    "a list": ([], r"the metadata 'cuquant' is damaged: '\[\]'"),
    "a weight twice": ('{"version": 1, "weights": {"w": {}, "w": {}}}', r"the metadata 'cuquant' is damaged"),
    "a key twice": ('{"version": 1, "weights": {}, "version": 1}', r"the metadata 'cuquant' is damaged"),
    "no version": ({"weights": {}}, "is damaged"),
    "weights are a number": ({"version": 1, "weights": 3}, "is damaged"),
    "long version": (
        {"version": "x" * 10**5, "weights": {}},
        r"has version 'x{68}\.\.\.; this cuquant reads",
    ),
    "another version": ({"version": 2, "weights": {}}, "has version 2; this cuquant reads version 1"),
    "no such tensor": ({"version": 1, "weights": {"v": {}}}, "'v' is listed, but there is no such tensor"),
}
DAMAGED_WEIGHTS: dict[str, tuple[Any, str]] = {
    "no format": ({"shape": [2, 32]}, "no 'format' is given"),
    "no shape": ({"format": KBIT4}, "no 'shape' is given"),
    "not a weight": (3, "3 is not a shape and a format"),
    "a list": ([2, 32], r"\[2, 32\] is not a shape and a format"),
    "format is a word": ({"shape": [2, 32], "format": "kbit4"}, "by a mapping, not by 'kbit4'"),
    "unknown format": ({"shape": [2, 32], "format": {"name": "q9"}}, "unknown format 'q9'"),
    "no name": ({"shape": [2, 32], "format": {}}, "a format is a name"),
    "parameters of none": (
        {"shape": [2, 32], "format": {"name": "q4_0", "bits": 4}},
        "'q4_0' is no format with parameters; known are exl3, int4",
    ),
    "bits": ({"shape": [2, 32], "format": KBIT4 | {"bits": 9}}, "bits is 9"),
    "unknown parameter": (
        {"shape": [2, 32], "format": KBIT4 | {"colour": 1}},
        "'kbit' has no parameter 'colour'; its own are bits, codebook",
    ),
    "long parameter": (
        {"shape": [2, 32], "format": {"name": "int4", "x" * 10**5: 1}},
        "'int4' has no parameter 'x{79}; ",
    ),
    "no bits": (
        {"shape": [2, 32], "format": {"name": "kbit"}},
        "'kbit' needs the parameter 'bits'; its own are",
    ),
    "codebook": ({"shape": [2, 32], "format": KBIT4 | {"codebook": [1, 0]}}, r"codebook has shape \(2,\)"),
    "large entry": ({"shape": [2, 32], "format": KBIT4 | {"codebook": [10**400] * 16}}, "too large"),
    "shape": ({"shape": [3, 32], "format": KBIT4}, r"raw has 34 bytes; kbit4 of shape \(3, 32\) has 51"),
    "large shape": ({"shape": [2**70, 32], "format": KBIT4}, "raw has 34 bytes"),
    "shape of words": ({"shape": ["a"], "format": KBIT4}, "is not a tuple of integers"),
    "shape is a number": ({"shape": 64, "format": KBIT4}, "is not a shape and a format"),
    "shape is a text": ({"shape": "x" * 10**5, "format": KBIT4}, "is not a shape and a format"),
    "long shape": ({"shape": ["x"] * 10**5, "format": KBIT4}, r"shape \('x', 'x', "),
    "no axes": ({"shape": [], "format": KBIT4}, "at least one axis"),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cq.save(tmp_path / "w.safetensors", {"w": cq.quantize(gauss(2, 32), "kbit4")})
    return tmp_path / "w.safetensors"


@pytest.mark.parametrize("case", DAMAGED_NOTES)
def test_damaged_notes(saved: Path, case: str) -> None:
    note, message = DAMAGED_NOTES[case]
    rewrite(saved, note)
    with pytest.raises(ValueError, match=rf"w\.safetensors.*{message}"):
        cq.load(saved, "cpu")


@pytest.mark.parametrize("case", DAMAGED_WEIGHTS)
def test_damaged_weights(saved: Path, case: str) -> None:
    weight, message = DAMAGED_WEIGHTS[case]
    rewrite(saved, {"version": 1, "weights": {"w": weight}})
    with pytest.raises(
        ValueError, match=rf"w\.safetensors: the weight 'w' is damaged: .*({message})"
    ) as error:
        cq.load(saved, "cpu")
    assert len(str(error.value)) < 600


def test_a_weight_that_is_no_bytes(saved: Path) -> None:
    cq.save(saved, {"w": gauss(17)})
    rewrite(saved, {"version": 1, "weights": {"w": {"shape": [128], "format": KBIT4}}})
    with pytest.raises(ValueError, match="the weight 'w' is damaged: raw has dtype float32"):
        cq.load(saved, "cpu")


def test_types_that_are_not_read(saved: Path) -> None:
    content = saved.read_bytes().replace(b'"dtype": "U8"', b'"dtype":"F8_E5M2"')
    size = int.from_bytes(content[:8], "little") + len('"dtype":"F8_E5M2"') - len('"dtype": "U8"')
    saved.write_bytes(size.to_bytes(8, "little") + content[8:])
    with pytest.raises(ValueError, match="tensor 'w' has the type F8_E5M2; read are F64, F32"):
        cq.load(saved, "cpu")


def test_what_a_file_says_is_cut(saved: Path) -> None:
    header = {"w": {"dtype": "x" * 10**5, "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    saved.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    for read in (cq.load, cq.read_safetensors, cq.KVCache.load):
        with pytest.raises(ValueError, match=r"unknown variant `x+\.\.\.") as error:
            read(saved)
        assert len(str(error.value)) < 600


def test_what_a_file_says_is_escaped(saved: Path) -> None:
    """The message of the safetensors package cites it."""
    content = saved.read_bytes().replace(b'"dtype": "U8"', b'"dtype":"\\u001b[2"')
    size = int.from_bytes(content[:8], "little") + len('"dtype":"\\u001b[2"') - len('"dtype": "U8"')
    saved.write_bytes(size.to_bytes(8, "little") + content[8:])
    for read in (cq.load, cq.read_safetensors):
        with pytest.raises(ValueError, match=r"unknown variant `\\x1b\[2`"):
            read(saved)


def test_a_cut_file(saved: Path) -> None:
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert header > 100
    places = {0: "it is empty", 7: "7 bytes of 9", 100: f"100 bytes of {header}"}
    for size in (header, len(content) - 1):
        places[size] = f"{size} bytes of {len(content)}"
    for size, found in places.items():
        saved.write_bytes(content[:size])
        said = found if size == 0 else f"{found} or more are there: it is cut short, perhaps an incomplete"
        for read in (cq.load, cq.read_safetensors):
            with pytest.raises(ValueError, match=rf"safetensors file that can be read: {said}"):
                read(saved)


@pytest.mark.parametrize("read", [cq.load, cq.read_safetensors, cq.open])
def test_a_file_that_is_replaced_while_it_is_opened(
    saved: Path, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two openings of its name show is of one file."""
    safe_open = safetensors.safe_open

    def replaced(path: Path, *args: Any, **kwargs: Any) -> Any:
        cq.save(path, {"before": gauss(100), "w": cq.quantize(gauss(2, 32), "kbit4")})
        return safe_open(path, *args, **kwargs)

    monkeypatch.setattr(safetensors, "safe_open", replaced)
    with pytest.raises(
        ValueError, match=r"w\.safetensors was replaced or changed while it was opened: read it a"
    ):
        read(saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_cannot_be_mapped(tmp_path: Path) -> None:
    """A pipe, or a device among a checkpoint's files: nobody waits for what one may bring."""
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)
    try:
        for path, read in ((pipe, cq.load), (pipe, cq.KVCache.load), (tmp_path, cq.read_safetensors)):
            with pytest.raises(
                ValueError, match=r"pipe\.safetensors is no ordinary file: nothing else can be"
            ):
                read(path)
    finally:
        os.close(held)


def test_a_cut_file_of_several_tensors(tmp_path: Path) -> None:
    """As many bytes as the last of them needs are missing."""
    path = tmp_path / "two.safetensors"
    cq.save(path, {"a": np.zeros(1000, np.float32), "b": np.zeros(10, np.float32)})
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"{len(content) - 1:,} bytes of {len(content):,} or more are there"):
        cq.load(path)


def test_a_pointer_in_place_of_a_file(saved: Path) -> None:
    saved.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    for read in (cq.load, cq.read_safetensors):
        with pytest.raises(ValueError, match=r"that can be read: it is a Git LFS pointer, .*git lfs pull"):
            read(saved)


def test_any_damage_is_a_value_error(saved: Path) -> None:
    """Or goes unseen, as other numbers do."""
    content, g = saved.read_bytes(), np.random.default_rng(0)
    header = 8 + int.from_bytes(content[:8], "little")
    refused = []
    for _ in range(500):
        damaged = bytearray(content)
        for at in g.integers(0, header, 2):
            damaged[at] = g.choice([*b'0123456789"[]{},:.-eE', *g.integers(0, 256, 4)])
        saved.write_bytes(damaged)
        try:
            for tensor in cq.load(saved, "cpu").values():
                if isinstance(tensor, cq.QuantizedArray):
                    tensor.dequantize()
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 400
    assert all(str(saved) in error for error in refused)


def test_files_of_the_other_kind_say_so(tmp_path: Path) -> None:
    cq.save(tmp_path / "w.safetensors", {"w": cq.quantize(np.ones((2, 32), np.float32), "q4_0")})
    advice = (
        r"w\.safetensors: not a model, but arrays that cuquant wrote, and cuquant\.load reads: it has no "
        r"metadata \(what cuquant\.quantize_file writes has them, and cuquant\.save can be given them\)$"
    )
    for read in (cq.open, partial(cq.evaluate, text="some text")):
        with pytest.raises(cq.GGUFError, match=advice):
            read(tmp_path / "w.safetensors", device="cpu")
    with pytest.raises(ValueError, match=r"cuquant\.open reads GGUF files"):
        cq.load(Path(__file__).parents[1] / "examples/data/nano-llama-f16.gguf")


@pytest.mark.parametrize("read", [cq.open, cq.load])
def test_folders(tmp_path: Path, read: Any) -> None:
    with pytest.raises(IsADirectoryError, match=r"is a folder, not a file; cuquant\.read_safetensors reads"):
        read(tmp_path)
