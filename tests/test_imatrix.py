"""Importance matrices of llama.cpp: both formats are read, and files are quantized by them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import Run, assert_one_line_error
from gguf import GGUFValueType as Value
from gguf_files import entry, gguf_file, string, tensor, u32, untouched, write
from hypothesis import given, settings, strategies as st
from imatrix_files import F, i32, in_gguf, metadata, older, older_entry, text
from numpy.typing import NDArray

import cuquant as cq
from cuquant.io.convert import quantize_file

K = 256
EXPERTS = 3
UP, DOWN, OUTPUT, NORM = "blk.0.ffn_up.weight", "blk.0.ffn_down_exps.weight", "output.weight", "a_norm.weight"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return rng(seed).standard_normal(shape, F)


def squares(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Sums of squares that differ much."""
    return np.exp(rng(seed).normal(0, 2, shape)).astype(F)


TENSORS = {
    UP: normal(16, K, seed=1),
    DOWN: normal(EXPERTS, 8, K, seed=2),
    OUTPUT: normal(8, K, seed=3),
    NORM: normal(K, seed=4),
}


def model(path: Path) -> Path:
    return write(path, dict(TENSORS))


def importances() -> dict[str, NDArray[np.float32]]:
    return {UP: squares(K, seed=5), DOWN: squares(EXPERTS, K, seed=6), "other.weight": squares(7)}


def bytes_of(path: Path, name: str) -> NDArray[np.uint8]:
    with cq.open(path, device="cpu") as made:
        return np.array(made[name].blocks)


# Reading.


def test_gguf(tmp_path: Path) -> None:
    sums, stack = squares(K), squares(EXPERTS, K, seed=1)
    weights = {UP: (sums, [48.0]), DOWN: (stack, [512.0, 0.0, 3.0])}
    path = in_gguf(tmp_path / "i.gguf", weights, more={f"{UP}.in_sum": -sums, "x": sums})
    made = cq.read_imatrix(path)
    assert list(made) == [UP, DOWN]
    assert all(values.dtype == F for values in made.values())
    np.testing.assert_array_equal(made[UP], sums / F(48))
    np.testing.assert_array_equal(made[DOWN], [stack[0] / F(512), np.ones(K, F), stack[2] / F(3)])
    path.unlink()  # nothing of it is mapped any more
    assert made[UP].sum() > 0


def test_gguf_by_the_package(tmp_path: Path) -> None:
    """A file that the gguf package wrote."""
    path, sums = tmp_path / "i.gguf", squares(EXPERTS, K)
    writer = gguf.GGUFWriter(path, "unknown")
    writer.add_type("imatrix")
    writer.add_tensor(f"{DOWN}.in_sum2", sums)
    writer.add_tensor(f"{DOWN}.counts", np.array([[1], [2], [4]], F))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(cq.read_imatrix(path)[DOWN], sums / np.array([[1], [2], [4]], F))


def test_gguf_of_a_stack_with_one_count(tmp_path: Path) -> None:
    """Stacks that are no experts' are one row."""
    sums = squares(EXPERTS * K)
    made = cq.read_imatrix(in_gguf(tmp_path / "i.gguf", {DOWN: (sums, [5.0])}))
    np.testing.assert_array_equal(made[DOWN], sums / F(5))


@pytest.mark.parametrize(("counts", "means"), [([0.4], 1), ([0.6], 8), ([2.5], 8 / 3), ([0.0], 1)])
def test_counts_are_whole(tmp_path: Path, counts: list[float], means: float) -> None:
    made = cq.read_imatrix(in_gguf(tmp_path / "i.gguf", {"w": (np.full(3, 8, F), counts)}))
    np.testing.assert_array_equal(made["w"], np.full(3, means, F))


@pytest.mark.parametrize("end", [None, b"", i32(0) + text("")])
def test_older(tmp_path: Path, end: bytes | None) -> None:
    path, sums, stack = tmp_path / "imatrix.dat", squares(K), squares(EXPERTS * K)
    path.write_bytes(older(older_entry(UP, 3, sums), older_entry(DOWN, 0, stack), end=end))
    made = cq.read_imatrix(str(path))
    assert list(made) == [UP, DOWN]
    assert all(values.dtype == F for values in made.values())
    np.testing.assert_array_equal(made[UP], sums / F(3))
    np.testing.assert_array_equal(made[DOWN], stack)  # no calls: as it is


def one(name: str = "w", **changes: Any) -> bytes:
    """The parts of a GGUF file of one weight with 4 columns; None leaves a tensor out."""
    tensors = {f"{name}.in_sum2": np.ones(4, F), f"{name}.counts": np.ones(1, F)}
    tensors |= {f"{name}.{key}": value for key, value in changes.items() if value is not None}
    kept = {key: value for key, value in tensors.items() if changes.get(key.split(".")[1], 1) is not None}
    infos, data = [], b""
    for key, value in kept.items():
        kind = {"f": {4: 0, 2: 1}}[value.dtype.kind][value.itemsize]
        infos.append(tensor(key, value.shape[::-1], kind, len(data)))
        data += value.tobytes() + bytes(-value.nbytes % 32)
    return gguf_file(metadata(), infos, data)


def with_nan(value: float) -> NDArray[np.float32]:
    return np.array([1, value, 2, 3], F)


OLDER = older(older_entry("a", 1, [1, 2]), older_entry("b", 1, [3]))
GGUF = one()
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "few bytes": (b"\1\0", "the number of entries needs 4 bytes, but 2 are left"),
    "no entries": (i32(0), "would have 0 entries here, in 0 bytes"),
    "entries below 0": (i32(-1) + bytes(99), "would have -1 entries here"),
    "absurd entries": (i32(2**31 - 1) + bytes(999), "would have 2147483647 entries here, in 999 bytes"),
    "one entry too many": (older(older_entry("a", 1, [1]), count=2, end=b""), "would have 2 entries here"),
    "a text": (b"plain words that are no matrix at all", "no importance matrix: no GGUF file, and one of"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "matrix, but a Git LFS pointer"),
    "name below 0": (older(text("a", -5) + bytes(60)), "name of entry 0 has -5 bytes; 1 to 63 are allowed"),
    "name of nothing": (older(older_entry("", 1, [1, 2])), "name of entry 0 has 0 bytes"),
    "absurd name": (older(text("a", 2**31 - 1) + bytes(60)), "has 2147483647 bytes; 1 to 63 are allowed"),
    "name cut": (i32(1) + text("abc", 40) + bytes(20), "name of entry 0 needs 40 bytes, but 23 are left"),
    "name in other bytes": (older(older_entry(b"caf\xe9", 1, [1])), r"is not valid UTF-8: b'caf\\xe9'"),
    "name twice": (older(*[older_entry("a", 1, [1])] * 2), "entry 1 is 'a', which an entry before it has"),
    "values below 0": (older(older_entry("a", 1, [1], -1)), "entry 'a' has -1 values; 1 to"),
    "no values": (older(older_entry("a", 1, [1], 0)), "entry 'a' has 0 values"),
    "absurd values": (older(older_entry("a", 1, [1], 2**31 - 1)), "entry 'a' has 2147483647 values"),
    "values cut": (older(older_entry("a", 1, [1], 9), end=b""), "entry 'a' needs 36 bytes, but 4 are left"),
    "NaN": (older(older_entry("a", 1, [1, np.nan])), "entry 'a' holds nan; numbers must be finite and not"),
    "infinity": (older(older_entry("a", 1, [np.inf])), "entry 'a' holds inf"),
    "negative": (older(older_entry("a", 1, [1, -2])), r"entry 'a' holds -2\.0"),
    "end cut": (OLDER[:-1], "the dataset's name needs 15 bytes, but 14 are left"),
    "chunk alone": (
        older(older_entry("a", 1, [1]), end=i32(3)),
        "length of the dataset's name needs 4 bytes",
    ),
    "chunk cut": (older(older_entry("a", 1, [1]), end=b"\1"), "last chunk needs 4 bytes, but 1 are left"),
    "dataset below 0": (older(older_entry("a", 1, [1]), end=i32(3, -1)), "dataset's name has -1 bytes"),
    "absurd dataset": (older(older_entry("a", 1, [1]), end=i32(3, 2**31 - 1)), "has 2147483647 bytes"),
    "bytes behind": (OLDER + b"x", "1 bytes follow the dataset's name"),
    # GGUF.
    "GGUF cut": (GGUF[:-40], "cut short"),
    "GGUF of a model": (
        gguf_file(metadata("model"), [tensor("w.in_sum2", [1])], bytes(4)),
        "'model', not 'im",
    ),
    "GGUF of no kind": (gguf_file(), "its general.type is None, not 'imatrix'"),
    "GGUF of a number": (gguf_file([entry("general.type", Value.UINT32, u32(3))]), "general.type is 3, not"),
    "no tensors": (gguf_file(metadata()), r"it has no tensors \*\.in_sum2 and \*\.counts"),
    "no counts": (one(counts=None), r"'w' has no tensor 'w\.counts'"),
    "no sums": (one(in_sum2=None), r"'w' has no tensor 'w\.in_sum2'"),
    "sums in halves": (one(in_sum2=np.ones(4, np.float16)), r"'w\.in_sum2' is of type F16, not F32"),
    "counts in halves": (one(counts=np.ones(1, np.float16)), r"'w\.counts' is of type F16, not F32"),
    "too many counts": (one(counts=np.ones(3, F)), r"'w\.in_sum2' has the shape \(4,\), 'w\.counts' \(3,\)"),
    "counts below 0": (one(counts=-np.ones(1, F)), r"'w\.counts' holds -1\.0; numbers must be"),
    "counts of NaN": (one(counts=np.full(1, np.nan, F)), r"'w\.counts' holds nan"),
    "sums of NaN": (one(in_sum2=with_nan(np.nan)), r"'w\.in_sum2' holds nan"),
    "infinite sums": (one(in_sum2=with_nan(np.inf)), r"'w\.in_sum2' holds inf"),
    "sums below 0": (one(in_sum2=with_nan(-1)), r"'w\.in_sum2' holds -1\.0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(tmp_path: Path, name: str) -> None:
    raw, problem = HOSTILE[name]
    path = tmp_path / "i.dat"
    path.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(ValueError, match=problem) as caught:
        cq.read_imatrix(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("raw", [OLDER, GGUF], ids=["older", "GGUF"])
def test_every_cut_is_refused(tmp_path: Path, raw: bytes) -> None:
    """But the one of the older format that leaves all entries."""
    path = tmp_path / "i.dat"
    whole = len(OLDER) - 4 - 4 - len("calibration.txt") if raw is OLDER else -1
    end = len(raw) if raw is OLDER else len(raw) - 28  # padding behind the last tensor
    for length in set(range(end)) - {whole}:
        path.write_bytes(raw[:length])
        with pytest.raises(ValueError, match=r"i\.dat"):
            cq.read_imatrix(path)


@given(st.integers(0, len(OLDER) - 1), st.binary(min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_other_bytes(tmp_path_factory: pytest.TempPathFactory, at: int, other: bytes) -> None:
    """Whatever they are, what is read is an importance."""
    path = tmp_path_factory.getbasetemp() / "other.dat"
    path.write_bytes(OLDER[:at] + other + OLDER[at + len(other) :])
    try:
        made = cq.read_imatrix(path)
    except ValueError:
        return
    assert all((values >= 0).all() and np.isfinite(values).all() for values in made.values())


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cq.read_imatrix(tmp_path / "none.dat")
    with pytest.raises(FileNotFoundError, match="the path is empty"):
        cq.read_imatrix("")
    with pytest.raises(IsADirectoryError, match="is a folder, not the file of an importance matrix"):
        cq.read_imatrix(tmp_path)


# Quantizing.


@pytest.mark.parametrize("name", ["q2_k", "q3_k_s", "q4_k_m", "q5_k_s", "q6_k", "iq4_nl", "iq4_xs"])
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
@pytest.mark.parametrize("name", ["q4_k", "iq4_nl", "trellis3"])
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
    done = quantize_file(source, target, {UP: "q4_0", "*": "q4_k"}, keep=DOWN, importance=importances())
    assert done.by_importance == set()
    np.testing.assert_array_equal(bytes_of(target, UP), cq.quantize(TENSORS[UP], "q4_0").blocks)
    # Rows that are no multiple of 256 get a format that takes none.
    odd = write(tmp_path / "odd.gguf", {"w.weight": normal(4, 96)})
    other = tmp_path / "o.gguf"
    done = quantize_file(odd, other, "q4_k_m", importance={"w.weight": squares(5)}, device="cpu")
    assert (len(done.by_importance), str(done.formats["w.weight"])) == (0, "q5_0")


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


def test_files_of_importance_that_are_none(tmp_path: Path) -> None:
    source, target, bad = model(tmp_path / "s.gguf"), tmp_path / "t.gguf", tmp_path / "bad.dat"
    bad.write_bytes(HOSTILE["values cut"][0])
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
    done = run("quantize", source, target, "--format", "q4_0", "--imatrix", path, "--force")
    others = "k-quants, iq4_nl, iq4_xs and trellis formats take one"
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
