"""Files quantized by an importance matrix of llama.cpp: tensors, metadata, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import Run, assert_one_line_error
from gguf import GGUFValueType as Value
from gguf_files import entry, string, untouched, write
from imatrix_files import (
    DOWN,
    EXPERTS,
    OUTPUT,
    TENSORS,
    UP,
    F,
    K,
    bytes_of,
    importances,
    in_gguf,
    metadata,
    model,
    normal,
    older,
    older_entry,
    squares,
)

import cuquant as cq
from cuquant.io.convert import quantize_file


@pytest.mark.parametrize(
    "name", ["q2_k", "q3_k_s", "q4_k_m", "q5_k_s", "q6_k", "iq4_nl", "iq4_xs", "q4_0", "q5_1"]
)
@pytest.mark.parametrize("kind", ["gguf", "older", "mapping", "flat mapping"])
def test_a_file_by_importance(tmp_path: Path, name: str, kind: str) -> None:
    """Each tensor is what `quantize` makes of it, each expert by its own row."""
    source, target, given_path = model(tmp_path / "s.gguf"), tmp_path / "q.gguf", tmp_path / "imatrix"
    rows: Any = importances()
    if kind == "gguf":
        sums = {weight: (values, [2.0] * len(np.atleast_2d(values))) for weight, values in rows.items()}
        rows = {weight: values / F(2) for weight, values in rows.items()}
        in_gguf(given_path, sums)
    elif kind == "older":
        given_path.write_bytes(older(*(older_entry(weight, 1, values) for weight, values in rows.items())))
    elif kind == "flat mapping":
        rows = {weight: values.reshape(-1) for weight, values in rows.items()}
    done = quantize_file(
        source, target, name, importance=rows if "mapping" in kind else given_path, device="cpu"
    )
    assert done.by_importance == {UP, DOWN}
    up = cq.quantize(TENSORS[UP], done.formats[UP], rows[UP])
    np.testing.assert_array_equal(bytes_of(target, UP), up.blocks)
    for expert, (w, row) in enumerate(zip(TENSORS[DOWN], rows[DOWN].reshape(EXPERTS, K), strict=True)):
        expected = cq.quantize(w, done.formats[DOWN], row).blocks
        np.testing.assert_array_equal(bytes_of(target, DOWN)[expert], expected)
    without = cq.quantize(TENSORS[OUTPUT], done.formats[OUTPUT]).blocks
    np.testing.assert_array_equal(bytes_of(target, OUTPUT), without)
    assert (cq.quantize(TENSORS[UP], done.formats[UP]).blocks != up.blocks).any()


@pytest.mark.parametrize("fmt", ["trellis3", "q4_k", "kbit4"])
def test_a_safetensors_file_by_importance(tmp_path: Path, fmt: str) -> None:
    source, target, rows = model(tmp_path / "s.gguf"), tmp_path / "q.safetensors", importances()
    done = quantize_file(source, target, fmt, importance=rows, device="cpu")
    assert done.by_importance == (set() if fmt == "kbit4" else {UP, DOWN})
    with cq.open(target, device="cpu") as made:
        expected = cq.quantize(TENSORS[UP], fmt, *([] if fmt == "kbit4" else [rows[UP]]))
        assert made[UP].format == expected.format
        np.testing.assert_array_equal(made[UP].blocks, expected.blocks)
        for expert, (w, row) in enumerate(zip(TENSORS[DOWN], rows[DOWN], strict=True)):
            part = made[DOWN][expert]
            again = cq.quantize(w, part.format, *([] if fmt == "kbit4" else [row]))
            np.testing.assert_array_equal(part.blocks, again.blocks)
        np.testing.assert_array_equal(made[OUTPUT].blocks, cq.quantize(TENSORS[OUTPUT], fmt).blocks)
        assert made.metadata["quantize.imatrix.entries_count"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q4_k", "iq4_nl", "q5_0", "q4_1", "trellis3"])
def test_a_file_by_importance_on_a_gpu(tmp_path: Path, name: str) -> None:
    """ggml's formats have the CPU's bytes; a trellis stack is in the format of one grid."""
    suffix = "safetensors" if name == "trellis3" else "gguf"
    source, rows = model(tmp_path / "s.gguf"), importances()
    targets = {device: tmp_path / f"{device}.{suffix}" for device in ("cpu", "cuda")}
    for device, target in targets.items():
        done = quantize_file(source, target, name, importance=rows, device=device)
        assert done.by_importance == {UP, DOWN}
    if name == "trellis3":
        with cq.open(targets["cuda"], device="cpu") as made:
            assert cq.testing.nmse(made[DOWN], TENSORS[DOWN]) < 0.1
    else:
        assert targets["cuda"].read_bytes() == targets["cpu"].read_bytes()


def test_formats_that_take_none_and_what_is_kept(tmp_path: Path) -> None:
    source, target = model(tmp_path / "s.gguf"), tmp_path / "q.gguf"
    done = quantize_file(source, target, {UP: "q8_0", "*": "q4_k"}, keep=DOWN, importance=importances())
    assert done.by_importance == set()
    np.testing.assert_array_equal(bytes_of(target, UP), cq.quantize(TENSORS[UP], "q8_0").blocks)
    odd = write(tmp_path / "odd.gguf", {"w.weight": normal(4, 96)})
    other = tmp_path / "o.gguf"
    done = quantize_file(odd, other, "q6_k", importance={"w.weight": squares(5)}, device="cpu")
    assert (len(done.by_importance), str(done.formats["w.weight"])) == (0, "q8_0")


@pytest.mark.parametrize(("mixture", "name"), [("q2_k", "q4_0"), ("q4_k_m", "q5_0"), ("q5_k_m", "q5_1")])
def test_what_stands_in_for_k_quants_is_quantized_by_importance(
    tmp_path: Path, mixture: str, name: str
) -> None:
    """Rows that are no multiple of 256."""
    w, row, target = normal(4, 96), squares(96), tmp_path / "t.gguf"
    source = write(tmp_path / "s.gguf", {"w.weight": w})
    done = quantize_file(source, target, mixture, importance={"w.weight": row}, device="cpu")
    assert (len(done.by_importance), str(done.formats["w.weight"])) == (1, name)
    np.testing.assert_array_equal(bytes_of(target, "w.weight"), cq.quantize(w, name, row).blocks)


def test_a_row_of_zeros_counts_as_one_of_ones(tmp_path: Path) -> None:
    source, target, rows = model(tmp_path / "s.gguf"), tmp_path / "q.gguf", importances()
    rows[DOWN][1] = 0
    quantize_file(source, target, "q4_k", importance=rows, device="cpu")
    expected = cq.quantize(TENSORS[DOWN][1], "q4_k", np.ones(K)).blocks
    np.testing.assert_array_equal(bytes_of(target, DOWN)[1], expected)
    assert not rows[DOWN][1].any()  # what was passed is as it was


@pytest.mark.parametrize(
    ("rows", "error", "problem"),
    [
        (
            {UP: squares(K + 1)},
            ValueError,
            r"^importance\['blk\.0.*'\] has shape \(257,\); \(256,\) is needed",
        ),
        ({UP: squares(2, K // 2)}, ValueError, r"has shape \(2, 128\)"),
        (
            {DOWN: squares(K)},
            ValueError,
            r"has shape \(256,\); \(3, 256\) is needed for a weight of shape \(3,",
        ),
        ({DOWN: squares(EXPERTS + 1, K)}, ValueError, r"has shape \(4, 256\); \(3, 256\) is needed"),
        ({UP: -squares(K)}, ValueError, r"\] holds -.*; numbers must be finite and not negative"),
        ({UP: np.full(K, np.nan)}, ValueError, r"\] holds nan"),
        ({UP: np.full(K, 1e39)}, ValueError, r"\] holds inf"),
        ({UP: np.full(K, 1e-60)}, ValueError, r"\] holds 1e-60 at most, which is 0 in float32: multiply all"),
        ({UP: ["a"] * K}, TypeError, r"^importance\['blk\.0\.ffn_up\.weight'\] is a list"),
        ({UP: np.full(K, 1j)}, TypeError, "has dtype complex128; numbers are needed"),
        ({1: squares(K)}, TypeError, "importance has the key 1"),
        ({}, ValueError, "importance is an empty mapping"),
        (squares(K), TypeError, "importance is an ndarray; the path of an imatrix file, or a mapping"),
        (
            {"blk.9.weight": squares(K)},
            ValueError,
            r"another model: no tensor of s\.gguf is .*, as 'blk\.9\.we",
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
def test_an_importance_that_does_not_fit(
    tmp_path: Path, rows: Any, error: type[Exception], problem: str, suffix: str
) -> None:
    source, target = model(tmp_path / "s.gguf"), tmp_path / f"t.{suffix}"
    target.write_text("precious")
    with untouched(tmp_path), pytest.raises(error, match=problem):
        quantize_file(source, target, "q4_k", importance=rows, force=True)


def test_an_open_model_is_no_importance(tmp_path: Path) -> None:
    with cq.open(model(tmp_path / "s.gguf"), "cpu") as opened, untouched(tmp_path):
        for source in (opened, tmp_path / "none.gguf"):
            with pytest.raises(
                TypeError, match="importance is an open model, not an importance matrix, which "
            ):
                quantize_file(source, tmp_path / "t.gguf", "q4_k", importance=opened)


def test_files_of_importance_that_are_none(tmp_path: Path) -> None:
    source, target, bad = model(tmp_path / "s.gguf"), tmp_path / "t.gguf", tmp_path / "bad.dat"
    bad.write_bytes(older(older_entry("a", 1, [1], 9), end=b""))  # of nine values one is there
    for path, error in ((bad, ValueError), (source, ValueError), (tmp_path / "none", FileNotFoundError)):
        with untouched(tmp_path), pytest.raises(error):
            quantize_file(source, target, "q4_k", importance=path)
    taken = in_gguf(tmp_path / "i.gguf", {UP: (squares(K), [1.0])})
    with (
        untouched(tmp_path),
        pytest.raises(ValueError, match=r"i\.gguf is the file of the importance matrix"),
    ):
        quantize_file(source, taken, "q4_k", importance=taken, force=True)


def test_an_expert_that_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    w = TENSORS[DOWN].copy()
    w[2, 5, 7] = np.nan
    source, target = write(tmp_path / "s.gguf", {DOWN: w}), tmp_path / "t.gguf"
    with (
        untouched(tmp_path),
        pytest.raises(ValueError, match=r"^tensor 'blk.*': expert 2: cannot quantize nan in row 5"),
    ):
        quantize_file(source, target, "q4_k", importance={DOWN: squares(EXPERTS, K)}, device="cpu")


def test_a_warning_of_lost_weights_counts_those_of_all_experts(tmp_path: Path) -> None:
    w = normal(EXPERTS + 1, 8, K)
    w[2] *= 1e-8
    source, target = write(tmp_path / "s.gguf", {DOWN: w}), tmp_path / "t.gguf"
    with pytest.warns(
        UserWarning, match=r"^tensor 'blk\.0.*': about 25% of the weights are too small"
    ) as told:
        quantize_file(source, target, "q4_k", importance={DOWN: squares(EXPERTS + 1, K)}, device="cpu")
    assert len(told) == 1


# Metadata.


def keys_of(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    made = {key.removeprefix("quantize.imatrix."): f for key, f in fields.items() if "imatrix" in key}
    kinds = {key: field.types for key, field in made.items()}
    assert all(
        kind == [Value.STRING if key in ("file", "dataset") else Value.UINT32] for key, kind in kinds.items()
    )
    return {key: field.contents() for key, field in made.items()}


def test_metadata(tmp_path: Path) -> None:
    """As llama-quantize writes them, in place of those that the source has."""
    source, target = model(tmp_path / "s.gguf"), tmp_path / "q.gguf"
    path = in_gguf(tmp_path / "i.gguf", {UP: (squares(K), [1.0]), "x": (squares(3), [1.0])})
    quantize_file(source, target, "q4_k", importance=path)
    wanted = {"file": str(path)[:127], "dataset": "text.txt", "entries_count": 2, "chunks_count": 9}
    assert keys_of(target) == wanted
    again, once_more = tmp_path / "r.gguf", tmp_path / "t.gguf"
    cq.dequantize_file(target, again)
    assert keys_of(again) == wanted
    quantize_file(again, once_more, "q8_0")
    assert keys_of(once_more) == wanted
    quantize_file(again, once_more, "q4_k", importance={UP: squares(K)}, force=True)
    assert keys_of(once_more) == {"entries_count": 1}
    path = tmp_path / "i.dat"
    path.write_bytes(older(older_entry(UP, 1, squares(K))))
    quantize_file(source, target, "q4_k", importance=path, force=True)
    assert keys_of(target) == {
        "file": str(path)[:127],
        "dataset": "calibration.txt",
        "entries_count": 1,
        "chunks_count": 7,
    }


def test_metadata_of_long_names_and_of_none(tmp_path: Path) -> None:
    source, target = model(tmp_path / "s.gguf"), tmp_path / "q.gguf"
    one_weight, kind = {UP: (squares(K), [1.0])}, entry("general.type", Value.STRING, string("imatrix"))
    path = in_gguf(tmp_path / "i.gguf", one_weight, keys=metadata(datasets=("é" * 100,)))
    quantize_file(source, target, "q4_k", importance=path)
    assert keys_of(target)["dataset"] == "é" * 63  # in 126 of 127 bytes
    path = in_gguf(tmp_path / "i.gguf", one_weight, keys=[kind])
    quantize_file(source, target, "q4_k", importance=path, force=True)
    assert keys_of(target) == {"file": str(path)[:127], "entries_count": 1}
    path = in_gguf(tmp_path / "i.gguf", one_weight, keys=metadata(datasets=(), chunks=0))
    quantize_file(source, target, "q4_k", importance=path, force=True)
    assert keys_of(target) == {"file": str(path)[:127], "entries_count": 1}


# The command line.


def test_the_command(run: Run, tmp_path: Path) -> None:
    source, target, path = model(tmp_path / "s.gguf"), tmp_path / "q.gguf", tmp_path / "i.gguf"
    in_gguf(path, {UP: (squares(K), [4.0]), DOWN: (squares(EXPERTS, K), [4.0, 0.0, 1.0])})
    done = run("quantize", source, target, "--format", "q4_k_m", "--imatrix", path, "--device", "cpu")
    assert (done.status, done.out) == (0, "")
    assert done.err.startswith(f"{target}: 3 tensors to q4_k_m, 1 copied, ")
    assert done.err.endswith("\nby importance: 2 of 3 tensors\n")
    expected = tmp_path / "r.gguf"
    quantize_file(source, expected, "q4_k_m", importance=path, device="cpu")
    assert target.read_bytes() == expected.read_bytes()
    done = run("quantize", source, target, "--format", "q8_0", "--imatrix", path, "--force")
    others = "k-quants (q4_k, ...), iq4_nl, iq4_xs, q4_0, q4_1, q5_0, q5_1 and trellis formats take one"
    assert done.err.endswith(f"\nby importance: 0 of 3 tensors ({others})\n")


def test_the_command_refuses(run: Run, tmp_path: Path) -> None:
    source, target, path = model(tmp_path / "s.gguf"), tmp_path / "q.gguf", tmp_path / "i.dat"
    path.write_bytes(older(older_entry(UP, 1, squares(K - 1))))
    with untouched(tmp_path):
        done = run("quantize", source, target, "--format", "q4_k", "--imatrix", path)
        assert_one_line_error(done)
        assert "has shape (255,); (256,) is needed" in done.err
        done = run("quantize", source, target, "--format", "q4_k", "--imatrix", tmp_path / "none.dat")
        assert_one_line_error(done)
        assert "none.dat" in done.err
    assert json.loads(run("dump", source, "--json").out)["tensors"]
