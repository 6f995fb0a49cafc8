"""`cuquant compare`: two files, tensor by tensor."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run
from gguf import GGMLQuantizationType as Type, GGUFValueType as Value, quants
from gguf_files import NANO, entry, gguf_file, string, tensor, write
from numpy.typing import NDArray

import cuquant as cq
from cuquant.eval.errors import error_of
from cuquant.eval.scores import tensor_error

RNG = np.random.default_rng(0)
W = RNG.standard_normal((6, 64)).astype(np.float32)
NORM = RNG.standard_normal(64).astype(np.float32)


def q8_0(w: NDArray[np.float32]) -> tuple[NDArray[np.uint8], Type]:
    return quants.quantize(w, Type.Q8_0), Type.Q8_0


def test_a_file_and_itself(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W, "norm.weight": NORM}, name="x")
    found = cq.compare(a, a)
    assert found.identical
    assert [(t.name, t.identical, t.nmse, t.max_abs_error) for t in found.tensors] == [
        ("w.weight", True, 0, 0),
        ("norm.weight", True, 0, 0),
    ]
    assert found.summary() == (
        "2 tensors identical, 0 different, 0 only in A, 0 only in B; "
        "1,792 and 1,792 bytes of tensors; 0 keys differ"
    )
    shown = "2 tensors, 2 identical; print shows the table"
    assert repr(found) == f"Comparison(a.gguf, a.gguf: {shown})"


def test_an_open_file_that_was_changed(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W})
    with cq.open(a, "cpu") as model:
        assert cq.compare(model, model).identical
        os.utime(a, (1, 1))
        with pytest.raises(
            ValueError, match=r"a\.gguf was changed since it was opened: open the model again"
        ):
            cq.compare(a, model)
    with pytest.raises(ValueError, match=r"a\.gguf: the file is closed: open the model again"):
        cq.compare(model, a)


def test_bars_in_names_split_no_cell(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w|x.weight": W})
    assert "| w\\|x.weight |" in " ".join(cq.compare(a, a).render("md").split())
    assert "w|x.weight" in cq.compare(a, a).render("table")


def test_errors_are_those_of_an_evaluation(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W})
    b = write(tmp_path / "b.gguf", {"w.weight": q8_0(W)})
    (found,) = cq.compare(a, b, device="cpu").tensors
    expected = tensor_error("w.weight", W, cq.quantize(W, "q8_0"))
    assert (found.nmse, found.sqnr_db, found.max_abs_error) == (
        expected.nmse,
        expected.sqnr_db,
        expected.max_abs_error,
    )
    assert (found.a, found.b, found.a_bits, found.b_bits, found.shape) == ("F32", "Q8_0", 32, 8.5, "6x64")
    assert not found.identical


def test_what_one_file_lacks_and_what_cannot_be_compared(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W, "old": NORM, "norm": NORM}, name="A", author="me")
    b = write(tmp_path / "b.gguf", {"norm": NORM + 1, "w.weight": W[:3], "new": NORM}, name="B")
    found = cq.compare(a, b)
    assert [(t.name, t.shape, t.a, t.b) for t in found.tensors] == [
        ("w.weight", "6x64 / 3x64", "F32", "F32"),
        ("old", "64", "F32", None),
        ("norm", "64", "F32", "F32"),
        ("new", "64", None, "F32"),
    ]
    assert [t.nmse is None for t in found.tensors] == [True, True, False, True]
    assert found.tensors[2].max_abs_error == pytest.approx(1, rel=1e-6)
    assert found.metadata == {"general.name": ("A", "B"), "general.author": ("me", "")}
    assert "1 only in A, 1 only in B" in found.summary()


def test_the_same_numbers_in_other_bytes(tmp_path: Path) -> None:
    half = W.astype(np.float16)
    a = write(tmp_path / "a.gguf", {"w": half}, name="A")
    b = write(tmp_path / "b.gguf", {"w": half.astype(np.float32)}, name="B")
    assert cq.compare(a, b).summary().endswith("; 1 key differs")
    (found,) = cq.compare(a, b).tensors
    assert (found.identical, found.nmse, found.sqnr_db, found.max_abs_error) == (False, 0, None, 0)


NAN, INF = np.nan, np.inf
i32, i64, f32, f64 = (partial(np.array, dtype=f"{kind}{size}") for kind in "if" for size in (4, 8))


@pytest.mark.parametrize(
    ("a", "b", "nmse", "largest"),
    [
        (i32([1 << 24]), i32([(1 << 24) + 1]), 2.0**-48, 1),
        (i64([1 << 53]), i64([(1 << 53) + 1]), 2.0**-106, 1),
        (i64([(1 << 53) + 1]), f64([1 << 53]), 2.0**-106, 1),
        (i64([(1 << 63) - 1]), i64([-(1 << 63)]), 4, 2.0**64),
        (i64([-1]), f64([2.0**-53 - 1]), 2.0**-106, 2.0**-53),
        (f64([1]), f64([1 + 1e-10]), 1e-20, 1e-10),
        (f64([1e300]), f64([2e300]), 1, 1e300),
        (f64([1e-300]), f64([2e-300]), 1, 1e-300),
        (f32([3e38]), f32([-3e38]), 4, 6e38),
        (f64([1.5e308]), f64([-1.5e308]), INF, INF),
        (f32([NAN, 1]), f32([NAN, 9]), 64, 8),
        (f32([INF, 1]), f32([INF, 9]), 64, 8),
        (f32([NAN, -INF, 1]), f64([NAN, -INF, 1]), 0, 0),
        (f32([NAN, 1]), f32([2, 1]), NAN, NAN),
        (f32([2, 1]), f32([NAN, 9]), NAN, NAN),
        (f32([INF, 1]), f32([-INF, 1]), INF, INF),
        (f32([3, 1]), f32([INF, 1]), INF, INF),
    ],
)
def test_no_difference_is_hidden(
    tmp_path: Path, a: NDArray[Any], b: NDArray[Any], nmse: float, largest: float
) -> None:
    files = [write(tmp_path / f"{name}.gguf", {"w": w}) for name, w in zip("ab", (a, b), strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = cq.compare(*files).tensors
    assert found.nmse == pytest.approx(nmse, rel=1e-6, abs=0, nan_ok=True)
    assert found.max_abs_error == pytest.approx(largest, rel=1e-6, abs=0, nan_ok=True)


@pytest.mark.parametrize("later", [NAN, 5])
def test_slabs_hide_no_difference_of_one_another(monkeypatch: pytest.MonkeyPatch, later: float) -> None:
    monkeypatch.setattr("cuquant.cpu.SLAB", 1)
    monkeypatch.setattr("cuquant.cpu.slabs.__defaults__", (1, 1))
    _, _, largest = error_of(np.ones((3, 1)), np.array([[1], [NAN], [later]]))
    assert np.isnan(largest)


@pytest.mark.usefixtures("foreign_types")
def test_foreign_types_are_not_rounded(tmp_path: Path) -> None:
    """Numbers that float16 lacks, and others that are beyond it."""
    raw = np.random.default_rng(0).integers(0, 256, (2, 74), np.uint8)
    raw.view(np.float16)[:, 0] = 1.001, 60000
    numbers = quants.dequantize(raw, Type.IQ2_XS)
    a = write(tmp_path / "a.gguf", {"w.weight": (raw, Type.IQ2_XS)})
    b = write(tmp_path / "b.gguf", {"w.weight": numbers})
    with pytest.warns(cq.FallbackWarning):
        (found,) = cq.compare(a, b).tensors
    assert (found.a, found.nmse, found.max_abs_error) == ("IQ2_XS", 0, 0)


def test_scales_of_experts_are_not_rounded(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 127, (2, 2, 36), np.uint8)
    scales = f32([1.001, 1e9])
    stored = {"w.weight": (raw, Type.NVFP4), "w.scale": scales}
    numbers = quants.dequantize(raw, Type.NVFP4) * scales[:, None, None]
    a, b = write(tmp_path / "a.gguf", stored), write(tmp_path / "b.gguf", {"w.weight": numbers})
    with pytest.warns(cq.FallbackWarning):
        found, _ = cq.compare(a, b).tensors
    assert (found.a, found.nmse, found.max_abs_error) == ("NVFP4", 0, 0)


@pytest.mark.parametrize("other", [f32([3]), None], ids=["another", "none"])
def test_blocks_with_another_scale_are_not_the_same(
    tmp_path: Path, other: NDArray[np.float32] | None
) -> None:
    blocks = np.random.default_rng(0).integers(0, 127, (2, 36), np.uint8), Type.NVFP4
    a = write(tmp_path / "a.gguf", {"w.weight": blocks, "w.scale": f32([2])})
    b = write(tmp_path / "b.gguf", {"w.weight": blocks} | ({} if other is None else {"w.scale": other}))
    weight, _ = cq.compare(a, b).tensors
    assert not weight.identical
    assert weight.nmse == pytest.approx(0.25)
    assert cq.compare(a, a).identical


@pytest.mark.parametrize("style", ["table", "md", "csv", "json"])
def test_what_a_terminal_would_obey(tmp_path: Path, capsys: pytest.CaptureFixture[str], style: str) -> None:
    names = [f"blk.0.\x1b[31mattn\x1b]0;title\x07{end}.weight" for end in ("", "\n")]
    files = [tmp_path / f"{name}.gguf" for name in "ab"]
    for path, value in zip(files, ("v\x1b[2J", "w\x9b2J\n"), strict=True):
        path.write_bytes(
            gguf_file(
                [entry("k\x1b[35m", Value.STRING, string(value))],
                [tensor(name, [8], offset=32 * i) for i, name in enumerate(names)],
                bytes(64),
            )
        )
    assert run("compare", *files, "-o", style) == 0
    out, err = capsys.readouterr()
    assert not {*out, *err} & {*map(chr, range(10)), *map(chr, range(11, 32)), "\x9b"}
    assert r"k\x1b[35m: v\x1b[2J -> w\x9b2J\n" in out + err
    if style != "json":
        assert r"blk.0.\x1b[31mattn\x1b]0;title\x07\n.weight" in out
    assert list(cq.compare(*files).to_pandas()["name"]) == names


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "q4_0.gguf"
    cq.quantize_file(NANO, made, "q4_0")
    for style in ("table", "md", "csv", "json"):
        assert run("compare", NANO, made, "-o", style) == 0
        out, err = capsys.readouterr()
        told = out if style in ("table", "md") else err
        assert "only in B" in told
        assert "general.file_type: 1 -> 2" in told
        if style == "csv":
            rows = list(csv.DictReader(io.StringIO(out)))
            assert {row["b"] for row in rows if row["a"] == "F16"} == {"Q4_0"}
        elif style == "json":
            assert json.loads(out)["tensors"][0].keys() >= {"name", "identical", "nmse"}
        else:
            assert "blk.0.ffn_up.weight" in out


def test_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W})
    with pytest.raises(ValueError, match=r"unknown device 'cuda:0'; allowed are 'cpu' and 'cuda'"):
        cq.compare(a, a, device="cuda:0")
    monkeypatch.setattr(cq.device, "gpu_problem", lambda: "there is none")
    cq.device.cupy.cache_clear()
    with pytest.raises(RuntimeError, match="no CUDA device can be used: there is none"):
        cq.compare(a, a, device="cuda")
    assert cq.compare(a, a).identical


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", NANO, tmp_path / "none.gguf", "--device", "cpu") == 1
    assert "none.gguf" in capsys.readouterr().err


def test_in_a_notebook(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W})
    found = cq.compare(a, a)
    assert "<table>" in found._repr_html_()
    assert list(found.to_pandas()["name"]) == ["w.weight"]


@pytest.mark.parametrize("fmt", ["kbit4", "q4_0", "int4-32-zeros", "trellis3", cq.NvFp4(), "nvfp4"], ids=str)
def test_files_of_saved_arrays(tmp_path: Path, fmt: str | cq.Format) -> None:
    """With the float original, with themselves, and, of types that GGUF has, with a GGUF file."""
    source = write(tmp_path / "s.gguf", {"w.weight": W, "norm.weight": NORM})
    target, gguf_target = tmp_path / "t.safetensors", tmp_path / "t.gguf"
    cq.quantize_file(source, target, fmt)
    found = cq.compare(source, target, device="cpu")
    first, second = found.tensors
    w = cq.load(target, "cpu")["w.weight"]
    expected = tensor_error("w.weight", W, w)
    assert (first.nmse, first.max_abs_error) == (expected.nmse, expected.max_abs_error)
    assert (first.a, first.b, second.identical) == (
        "F32",
        "NVFP4" if isinstance(fmt, cq.NvFp4) else w.format.name.upper(),
        True,
    )
    assert first.b_bits == pytest.approx(8 * w.nbytes / W.size)
    assert found.metadata is not None
    assert found.metadata.keys() <= {"general.file_type", "general.quantization_version"}
    assert cq.compare(target, target).identical
    if fmt in ("q4_0", "nvfp4"):
        cq.quantize_file(source, gguf_target, fmt)
        assert cq.compare(gguf_target, target).identical


def test_a_model_and_arrays_without_metadata(tmp_path: Path) -> None:
    model, arrays = write(tmp_path / "m.gguf", {"w.weight": W}), tmp_path / "a.safetensors"
    cq.save(arrays, {"w.weight": W})
    for pair in ((model, arrays), (arrays, model)):
        found = cq.compare(*pair)
        assert ([tensor.identical for tensor in found.tensors], found.metadata) == ([True], None)


def test_saved_arrays_of_other_parameters(tmp_path: Path) -> None:
    """Equal bytes of other codebooks, or scales, are no equal tensors."""
    for number, factor in enumerate((1, 2)):
        codebook = np.linspace(-1, 1, 16) ** 3 * factor / 2
        kbit = cq.quantize(W * np.float32(factor), cq.KBit(4, codebook=codebook, absmax="float16"))
        cq.save(
            tmp_path / f"{number}.safetensors",
            {"x": cq.quantize(W * np.float32(factor), cq.NvFp4()), "y": kbit},
        )
    found = cq.compare(tmp_path / "0.safetensors", tmp_path / "1.safetensors")
    assert not any(tensor.identical for tensor in found.tensors)
    assert found.tensors[0].nmse == pytest.approx(1)
