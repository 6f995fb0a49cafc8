"""Importance matrices of llama.cpp: both formats are read, and what is damaged is refused."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import Run, assert_one_line_error
from gguf import GGUFValueType as Value
from gguf_files import entry, gguf_file, tensor, u32, untouched, write
from hypothesis import given, settings, strategies as st
from imatrix_files import (
    DOWN,
    EXPERTS,
    TENSORS,
    UP,
    F,
    K,
    i32,
    in_gguf,
    metadata,
    model,
    older,
    older_entry,
    squares,
    text,
)
from numpy.typing import NDArray

import cuquant as cq


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
    "GGUF of an adapter": (
        gguf_file(metadata("adapter"), [tensor("w.in_sum2", [1])], bytes(4)),
        "its general.type is 'adapter', not 'imatrix'",
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


# Files that are taken for each other.


@pytest.fixture(params=["GGUF", "older"])
def matrix(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An importance matrix of either format."""
    path = tmp_path / "i.imatrix"
    if request.param == "GGUF":
        return in_gguf(path, {UP: (squares(K), [4.0])})
    path.write_bytes(older(older_entry(UP, 4, squares(K))))
    return path


IN_PLACE_OF_A_MODEL = (
    r"i\.imatrix: an importance matrix, not a model: cuquant quantize --imatrix takes it, and "
    r"quantize_file\(importance=\)$"
)


def test_an_importance_matrix_is_no_model(tmp_path: Path, matrix: Path) -> None:
    source, new = model(tmp_path / "s.gguf"), tmp_path / "new.gguf"
    ids: dict[str, Any] = {"tokens": np.zeros(8, int), "ctx": 4}
    for refused in (
        lambda: cq.open(matrix),
        lambda: cq.evaluate(matrix, **ids),
        lambda: cq.evaluate(source, base=matrix, **ids),
        lambda: cq.evaluate_files([source, matrix], **ids),
        lambda: cq.measure_importance(matrix, new, **ids),
        lambda: cq.quantize_file(matrix, new, "q4_k"),
        lambda: cq.dequantize_file(matrix, new),
        lambda: cq.compare(source, matrix),
        lambda: cq.compare(matrix, source),
    ):
        with untouched(tmp_path), pytest.raises(cq.GGUFError, match=IN_PLACE_OF_A_MODEL):
            refused()


@pytest.mark.parametrize(
    "words",
    [
        "eval MATRIX --tokens IDS",
        "eval SOURCE MATRIX --tokens IDS",
        "eval SOURCE --base MATRIX --tokens IDS",
        "imatrix MATRIX --tokens IDS -o NEW",
        "quantize MATRIX NEW --format q4_k",
        "quantize MATRIX NEW --format q4_k --imatrix SOURCE",
        "dequantize MATRIX NEW",
        "compare MATRIX SOURCE",
        "compare SOURCE MATRIX",
    ],
)
@pytest.mark.usefixtures("matrix")
def test_commands_say_where_it_belongs(run: Run, tmp_path: Path, words: str) -> None:
    names = {"MATRIX": "i.imatrix", "SOURCE": "s.gguf", "IDS": "ids.npy", "NEW": "new.gguf"}
    model(tmp_path / names["SOURCE"])
    np.save(tmp_path / names["IDS"], np.zeros(512, int))
    with untouched(tmp_path):
        done = run(*(tmp_path / names[word] if word in names else word for word in words.split()))
    assert_one_line_error(done)
    assert re.search(IN_PLACE_OF_A_MODEL, done.err.rstrip("\n"))


def test_dump_shows_what_is_in_it(run: Run, tmp_path: Path) -> None:
    done = run("dump", in_gguf(tmp_path / "i.gguf", {UP: (squares(K), [4.0])}))
    assert (done.status, done.err) == (0, "")
    assert "imatrix.chunk_count" in done.out
    assert f"{UP}.in_sum2" in done.out


@pytest.mark.parametrize(
    ("kind", "told"), [("GGUF", "a model"), ("typed", "a model"), ("safetensors", "a safetensors file")]
)
def test_a_model_is_no_importance_matrix(run: Run, tmp_path: Path, kind: str, told: str) -> None:
    """Whether its metadata say what it is or not."""
    source, given = model(tmp_path / "s.gguf"), tmp_path / "m"
    if kind == "safetensors":
        given = tmp_path / "m.safetensors"
        cq.quantize_file(source, given, "kbit4")
    else:
        keys: dict[str, Any] = {"type": "model"} if kind == "typed" else {}
        write(given, dict(TENSORS), **keys)
    problem = f"{given}: {told}, not an importance matrix, which cuquant imatrix or llama-imatrix makes of a "
    with untouched(tmp_path):
        with pytest.raises(ValueError, match=re.escape(problem)):
            cq.read_imatrix(given)
        done = run("quantize", source, tmp_path / "new.gguf", "--format", "q4_k", "--imatrix", given)
    assert_one_line_error(done)
    assert problem in done.err
