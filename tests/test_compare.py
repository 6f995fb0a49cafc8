"""`cuquant compare`: two files, tensor by tensor."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from commands import run
from gguf import GGMLQuantizationType as Type
from gguf import quants
from gguf_files import NANO, write
from numpy.typing import NDArray

import cuquant as cq
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


def test_errors_are_those_of_an_evaluation(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W})
    b = write(tmp_path / "b.gguf", {"w.weight": q8_0(W)})
    (found,) = cq.compare(a, b).tensors
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


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", NANO, tmp_path / "none.gguf") == 1
    assert "none.gguf" in capsys.readouterr().err


def test_in_a_notebook(tmp_path: Path) -> None:
    a = write(tmp_path / "a.gguf", {"w.weight": W})
    found = cq.compare(a, a)
    assert "<table>" in found._repr_html_()
    assert list(found.to_pandas()["name"]) == ["w.weight"]
