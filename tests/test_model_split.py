"""Models in several files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType as Value
from gguf_files import array, entry, gguf_file, string, tensor, u32, write

import cuquant as cq
from cuquant import GGUFError
from cuquant.io.gguf import File

PARTS = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model of the tensors a, b, c, one to a part."""
    tensors = {name: np.full((2, 2), i, np.float32) for i, name in enumerate("abc")}
    write(tmp_path / "m.gguf", tensors, split=1, name="in the first part")
    paths = [tmp_path / name for name in PARTS]
    assert sorted(tmp_path.iterdir()) == paths
    return paths


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_split_model_opens_by_any_part(parts: list[Path], number: int) -> None:
    model = cq.open(parts[number])
    assert list(model) == ["a", "b", "c"]
    assert [float(model[name].max()) for name in model] == [0, 1, 2]
    assert (model.path, model.paths, model.nbytes) == (parts[0], parts, 3 * 16)
    assert model.metadata["general.name"] == "in the first part"
    with model:
        b = model["b"]
    assert b.tolist() == [[1, 1], [1, 1]]


def test_a_missing_part(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(GGUFError, match=r"parts .* missing beside it: m-00002-of-00003\.gguf$"):
        cq.open(parts[2])


@pytest.mark.parametrize("damage", ["other tensors", "cut short", "one of 4"])
def test_a_failed_open_leaves_no_file_mapped(
    parts: list[Path], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    made: list[File] = []

    def kept(path: Path) -> File:
        made.append(File(path))
        return made[-1]

    monkeypatch.setattr("cuquant.io.parts.File", kept)
    if damage == "other tensors":
        parts[2].write_bytes(parts[1].read_bytes())
    elif damage == "cut short":
        parts[2].write_bytes(parts[2].read_bytes()[:-40])
    else:
        parts[0] = parts[0].rename(parts[0].with_name("m-00001-of-00004.gguf"))
    with pytest.raises(GGUFError):
        cq.open(parts[0], "cpu")
    assert made
    assert all(file.buffer.closed for file in made)


def test_a_part_under_another_name(parts: list[Path]) -> None:
    other = parts[1].rename(parts[1].with_name("other.gguf"))
    with pytest.raises(GGUFError, match=r"other\.gguf: one of 3 parts, but its name does not end in"):
        cq.open(other)
    with pytest.raises(GGUFError, match=r"missing beside it: m-00002-of-00003\.gguf"):
        cq.open(parts[0])


def test_a_part_named_for_another_count(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("m-00001-of-00002.gguf"))
    with pytest.raises(GGUFError, match="one of 3 parts, but its name does not end in -00001-of-00003"):
        cq.open(other)


def test_a_single_part(tmp_path: Path) -> None:
    entries = [entry("split.no", Value.UINT16, b"\0\0"), entry("split.count", Value.UINT16, b"\1\0")]
    path = tmp_path / "any name.gguf"
    path.write_bytes(gguf_file(entries, [tensor("w", [8])], bytes(32)))
    assert list(cq.open(path)) == ["w"]


PART_OF_TWO = [f"m-0000{i}-of-00002.gguf" for i in (1, 2)]


def write_part(folder: Path, number: int, keys: Mapping[str, int], name: str, *more: bytes) -> Path:
    """Part `number` (from 0) of two with one tensor; `keys` are uint32 under "split.", `more` are others."""
    entries = [entry(f"split.{key}", Value.UINT32, u32(value)) for key, value in keys.items()] + [*more]
    path = folder / PART_OF_TWO[number]
    path.write_bytes(gguf_file(entries, [tensor(name, [8])], bytes(32)))
    return path


@pytest.mark.parametrize(
    ("keys", "name", "problem"),
    [
        ({"no": 0, "count": 2}, "b", "says it is part 0 of 2, but is named as part 1 of 2"),
        ({"no": 1, "count": 3}, "b", "says it is part 1 of 3, but is named as part 1 of 2"),
        ({"count": 2}, "b", "says it is part None of 2"),
        ({}, "b", "says it is part None of None"),
        ({"no": 1, "count": 2}, "a", "tensor 'a' is in an earlier part too"),
    ],
)
def test_a_second_part_that_does_not_belong(
    tmp_path: Path, keys: dict[str, int], name: str, problem: str
) -> None:
    first = write_part(tmp_path, 0, {"no": 0, "count": 2}, "a")
    second = write_part(tmp_path, 1, keys, name)
    with pytest.raises(GGUFError, match=problem) as error:
        cq.open(first)
    assert second.name in str(error.value)


@pytest.mark.parametrize("total", [1, 3])
def test_a_wrong_count_of_tensors(tmp_path: Path, total: int) -> None:
    first = write_part(tmp_path, 0, {"no": 0, "count": 2, "tensors.count": total}, "a")
    write_part(tmp_path, 1, {"no": 1, "count": 2}, "b")
    with pytest.raises(GGUFError, match=f"{total} tensors are announced, the parts hold 2"):
        cq.open(first)


@pytest.mark.parametrize(
    "count",
    [
        array("split.count", Value.UINT16, 2, bytes(4)),
        array("split.count", Value.STRING, 1, string("x")),
        entry("split.count", Value.FLOAT32, np.float32(2).tobytes()),
        entry("split.count", Value.STRING, string("2")),
        entry("split.count", Value.INT32, b"\xff" * 4),
        entry("split.count", Value.UINT32, u32(2**32 - 1)),
    ],
    ids=["array", "strings", "float", "string", "negative", "huge"],
)
def test_a_hostile_count_of_parts(tmp_path: Path, count: bytes) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(gguf_file([count], [tensor("w", [8])], bytes(32)))
    with pytest.raises(GGUFError, match=r"m-00001-of-00002\.gguf"):
        cq.open(path)


@pytest.mark.parametrize(("number", "key"), [(1, "no"), (1, "count"), (0, "tensors.count")])
@pytest.mark.parametrize(("count", "said"), [(0, "[]"), (2, "[1, 1]")])
def test_arrays_in_place_of_a_part_s_numbers(
    tmp_path: Path, number: int, key: str, count: int, said: str
) -> None:
    for part in (0, 1):
        keys = {each: value for each, value in (("no", part), ("count", 2)) if (part, each) != (number, key)}
        more = [array(f"split.{key}", Value.UINT32, count, u32(1) * count)] * (part == number)
        write_part(tmp_path, part, keys, "ab"[part], *more)
    with pytest.raises(GGUFError, match=rf"{PART_OF_TWO[number]}: .*{re.escape(said)}"):
        cq.open(tmp_path / PART_OF_TWO[0])


@pytest.mark.parametrize(
    ("count", "said"),
    [("2\n", r"is '2\n',"), ("2" * 100, f"is '{'2' * 68}...,"), ("'", 'is "\'",')],
    ids=["line", "long", "quote"],
)
def test_a_count_that_is_text_is_escaped_once(tmp_path: Path, count: str, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([entry("split.count", Value.STRING, string(count))], [], b""))
    with pytest.raises(GGUFError, match=re.escape(said)):
        cq.open(path)


def test_many_missing_parts_are_told_in_few_words(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-02000.gguf"
    path.write_bytes(gguf_file([entry("split.count", Value.UINT32, u32(2000))]))
    with pytest.raises(GGUFError, match=r"missing beside it: m-00002-of-02000\.gguf") as error:
        cq.open(path)
    assert len(str(error.value)) < 1000
