"""Quantizing a file: what is refused before any work."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import Stored, untouched, write
from test_convert import small, weights

import cuquant as cq
from cuquant.formats.q4_0 import Q4_0
from cuquant.io import convert
from cuquant.io.convert import quantize_file


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing a tensor fails the test."""

    def refuse(*args: Any) -> None:
        raise AssertionError("a tensor was quantized before the refusal")

    monkeypatch.setattr(convert, "quantize", refuse)


# Refusals.


@pytest.mark.parametrize(
    ("fmt", "error", "problem"),
    [
        ("q8_1", ValueError, "q8_1 is a format of activations, not of weights"),
        ("q9_9", ValueError, "unknown format 'q9_9'; known are .*q4_0, q4_1"),
        ("BF16", ValueError, r"'BF16' is no format to quantize to: tensors that keep names, or no pattern"),
        ({"output.weight": "f16", "*": "q4_0"}, ValueError, "'f16' is no .* no pattern of a mapping matches"),
        (4, TypeError, "format is an int; a format is a name or a Format"),
        *(
            (
                name,
                ValueError,
                r"; it looks like the name of a file \(quantize_file takes source, target and format",
            )
            for name in ("a.gguf", "A.SAFETENSORS", "models/q4_0", Path("q4_0"))
        ),
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
@pytest.mark.parametrize("fmt", [cq.NvFp4(), cq.NvFp4(0.5), {"*": cq.NvFp4()}])
def test_a_scale_for_the_tensor(tmp_path: Path, fmt: Any) -> None:
    source = small(tmp_path / "s.gguf")
    problem = (
        r"^NvFp4\((0\.5)?\) has no GGUF type: nvfp4 tensors .* are read from GGUF files, .*\"nvfp4\", without"
    )
    with untouched(tmp_path), pytest.raises(ValueError, match=problem):
        quantize_file(source, tmp_path / "t.gguf", fmt)


@pytest.mark.usefixtures("no_work")
def test_an_existing_target(tmp_path: Path) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    target.write_text("precious")
    with untouched(tmp_path), pytest.raises(FileExistsError, match=r"t\.gguf exists; force=True replaces it"):
        quantize_file(source, target, "q4_0")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_a_target_that_appears_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, links: bool
) -> None:
    """What another program has written there is not lost, on file systems without hard links either."""
    source, target = small(tmp_path / "s.gguf"), tmp_path / f"t.{suffix}"

    def quantize(*args: Any) -> Any:
        target.write_text("precious")
        return cq.quantize(*args)

    def no_links(*args: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(convert, "quantize", quantize)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(FileExistsError, match=rf"t\.{suffix} exists; force=True replaces it"):
        quantize_file(source, target, "q4_0")
    assert target.read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [source, target]
    quantize_file(source, target, "q4_0", force=True)
    assert target.stat().st_size > 100
    target.unlink()
    monkeypatch.setattr(convert, "quantize", cq.quantize)
    quantize_file(source, target, "q4_0")
    assert sorted(tmp_path.iterdir()) == [source, target]


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
@pytest.mark.parametrize("write", [quantize_file, cq.dequantize_file])
def test_a_source_that_is_changed_meanwhile(tmp_path: Path, write: Any, suffix: str) -> None:
    """As one that is still being downloaded: some tensors would be of its former state."""
    source, target = small(tmp_path / "s.gguf"), tmp_path / f"t.{suffix}"

    def changed(message: Any, *args: Any, **kwargs: Any) -> Any:
        os.utime(source, ns=(0, 0))
        return raw(message, *args, **kwargs)

    raw = cq.Model.raw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cq.Model, "raw", changed)
        with pytest.raises(
            ValueError, match=r"s\.gguf was changed since it was opened: open the model again"
        ):
            write(source, target, "q4_0" if write is quantize_file else "f16")
    assert sorted(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.usefixtures("no_work")
def test_a_link_to_itself_is_no_target(tmp_path: Path, force: bool) -> None:
    source, target, other = small(tmp_path / "s.gguf"), tmp_path / "t.gguf", tmp_path / "u.gguf"
    target.symlink_to(other)
    other.symlink_to(target)
    with pytest.raises(OSError, match=r"t\.gguf is a symbolic link that leads back to itself"):
        quantize_file(source, target, "q4_0", force=force)
    assert target.is_symlink()


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


@pytest.mark.parametrize("dtype", ["f8", "i1", "i4"])
@pytest.mark.usefixtures("no_work")
def test_a_source_of_other_numbers(tmp_path: Path, dtype: str) -> None:
    odd: Any = weights(4, 32).astype(dtype)
    source = write(tmp_path / "s.gguf", {"a.weight": odd, "b.weight": weights(4, 32)})
    kind = cq.open(source).tensors["a.weight"].type_name
    problem = rf"s\.gguf: only float16, bfloat16 and float32 can be quantized, not a\.weight \({kind}\); "
    with untouched(tmp_path), pytest.raises(ValueError, match=problem):
        quantize_file(source, tmp_path / "t.gguf", "q4_0")
    assert convert.select(cq.open(source), "q4_0", "a.*").quantized == {"b.weight"}


@pytest.mark.parametrize("keep", ["*", ["*"], ["output.weight", "blk.*"]])
@pytest.mark.usefixtures("no_work")
def test_nothing_to_quantize(tmp_path: Path, keep: str | list[str]) -> None:
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
    (tmp_path / "folder.gguf").mkdir()
    with untouched(tmp_path), pytest.raises(OSError, match="folder"):
        quantize_file(source, tmp_path / "folder.gguf", "q4_0", force=True)


@pytest.mark.parametrize(
    ("target", "error", "problem"),
    [
        (None, TypeError, "target is None; the path of the new file is needed"),
        (4, TypeError, "target is an int; the path of the new file is needed"),
        ("", FileNotFoundError, "the path is empty"),
        ("t", ValueError, r"target is 't'; its name must end in \.gguf or \.safetensors"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_what_is_no_target(tmp_path: Path, target: Any, error: type[Exception], problem: str) -> None:
    source = small(tmp_path / "s.gguf")
    with pytest.raises(error, match=problem):
        quantize_file(source, target, "q4_0")
    with pytest.raises(error, match=problem):
        cq.dequantize_file(source, target)


@pytest.mark.usefixtures("no_work")
def test_target_and_format_are_swapped(tmp_path: Path) -> None:
    source = small(tmp_path / "s.gguf")
    with pytest.raises(ValueError, match="takes source, target and format in this order"):
        quantize_file(source, "q4_0", "t.gguf")


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
