"""`cuquant dump`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from commands import Run, assert_one_line_error
from gguf import GGMLQuantizationType as Type, GGUFValueType as Value
from gguf_files import NANO, array, entry, gguf_file, string, tensor, write
from safetensors.numpy import save_file

import cuquant as cq


def test_dump_shows_every_key_and_tensor(run: Run) -> None:
    done, reader = run("dump", NANO), gguf.GGUFReader(NANO)
    assert (done.status, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines() if line]
    assert "llama.embedding_length uint32 256" in lines
    assert "tokenizer.ggml.token_type int32[4096] 3, 1, 1, 1, 1, 1, 1, 1, ..." in lines
    assert "blk.0.ffn_up.weight F16 768 x 256 393216" in lines
    first_words = [line.split()[0] for line in lines]
    for name in [*(k for k in reader.fields if not k.startswith("GGUF.")), *(t.name for t in reader.tensors)]:
        assert first_words.count(name) == 1
    assert lines[-1] == "39 tensors, 10,494,976 bytes"


@pytest.mark.usefixtures("foreign_types")
def test_dump_of_a_foreign_file_does_not_warn(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "k.gguf", {"w": (np.zeros((2, 54), np.uint8), Type.TQ1_0)})
    done = run("dump", path)
    assert (done.status, done.err) == (0, "")
    assert "TQ1_0" in done.out


def test_dump_of_a_safetensors_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    x = np.ones((8, 64), np.float32)
    cq.save(path, {"b\x1b": x[0], "w": cq.quantize(x, cq.KBit(3))})
    done = run("dump", path)
    assert (done.status, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines() if line]
    assert lines[2:] == ["b\\x1b float32 64 256", "w kbit3 8 x 64 208", "2 tensors, 464 bytes"]
    tensors = json.loads(run("dump", path, "--json").out)["tensors"]
    assert tensors[1] == {"name": "w", "type": "kbit3", "shape": [8, 64], "nbytes": 208}


def test_dump_shows_names_that_look_like_numbers(run: Run, tmp_path: Path) -> None:
    names = ["001", "1e2", "1_0", "nan"]
    path = write(tmp_path / "m.gguf", {name: np.ones(3, np.float32) for name in names})
    lines = run("dump", path).out.splitlines()
    assert [line.split()[0] for line in lines[-6:-2]] == names


def test_dump_of_a_safetensors_file_of_others(run: Run, tmp_path: Path) -> None:
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "w.safetensors")
    cq.KVCache(2, 64, 8).save(tmp_path / "c.safetensors")
    for name, row in (("w", "w F32 3 12"), ("c", "2.lengths I32 1 4")):
        done = run("dump", tmp_path / f"{name}.safetensors")
        assert (done.status, done.err) == (0, "")
        assert any(" ".join(line.split()).startswith(row) for line in done.out.splitlines())
    told = json.loads(run("dump", tmp_path / "w.safetensors", "--json").out)
    assert told["tensors"] == [{"name": "w", "type": "F32", "shape": [3], "nbytes": 12}]
    (tmp_path / "w.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:-4])
    done = run("dump", tmp_path / "w.safetensors")
    assert_one_line_error(done)
    assert "cut short" in done.err


def test_dump_has_the_option_of_other_commands(run: Run, tmp_path: Path) -> None:
    cq.save(tmp_path / "w.safetensors", {"w": np.ones(3, np.float32)})
    for path in (NANO, tmp_path / "w.safetensors"):
        assert run("dump", path, "-o", "json") == run("dump", path, "--json")
        assert run("dump", path, "-o", "text") == run("dump", path) != run("dump", path, "--json")


def test_dump_json_has_arrays_in_full(run: Run) -> None:
    done, reader = run("dump", NANO, "--json"), gguf.GGUFReader(NANO)
    assert (done.status, done.err) == (0, "")
    content = json.loads(done.out)
    fields = {k: field.contents() for k, field in reader.fields.items() if not k.startswith("GGUF.")}
    assert content["metadata"] == fields
    assert (content["files"], content["alignment"]) == ([str(NANO)], 32)
    for shown, stored in zip(content["tensors"], reader.tensors, strict=True):
        assert shown == {
            "name": stored.name,
            "type": stored.tensor_type.name,
            "shape": stored.shape.tolist()[::-1],
            "offset": stored.data_offset,
            "nbytes": stored.n_bytes,
        }


def test_dump_json_has_null_for_what_json_cannot_say(run: Run, tmp_path: Path) -> None:
    nan, infinity = np.float32(np.nan).tobytes(), np.float64(-np.inf).tobytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(
        gguf_file(
            [
                entry("nan", Value.FLOAT32, nan),
                array("many", Value.FLOAT64, 2, infinity + bytes(8)),
                array("none", Value.STRING, 0),
                entry("most", Value.UINT64, b"\xff" * 8),
                array("bools", Value.BOOL, 2, b"\0\1"),
            ]
        )
    )
    content = json.loads(run("dump", path, "--json").out, parse_constant=pytest.fail)
    assert content["metadata"] == {
        "nan": None,
        "many": [None, 0.0],
        "none": [],
        "most": 2**64 - 1,
        "bools": [False, True],
    }


def test_dump_shortens_long_values(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([entry("long", Value.STRING, string("x" * 10_000 + "\nend"))]))
    lines = run("dump", path).out.splitlines()
    assert max(map(len, lines)) < 100
    assert any(line.endswith("xxx...") for line in lines)


def test_dump_sends_no_control_characters_to_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    value = entry("key\x1b[31m\n", Value.STRING, string("value\x1b[32m\n"))
    strings = array("strings", Value.STRING, 1, string("\x1b[33m"))
    path.write_bytes(gguf_file([value, strings], [tensor("w\x1b[2J", [8])], bytes(32)))
    done = run("dump", path)
    assert done.status == 0
    assert "\x1b" not in done.out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_dump_of_a_pipe(run: Run, tmp_path: Path) -> None:
    """Which nobody waits for."""
    os.mkfifo(tmp_path / "pipe")
    done = run("dump", tmp_path / "pipe")
    assert_one_line_error(done)
    assert "pipe is no ordinary file" in done.err


def test_dump_fails_in_one_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_file([entry("name", Value.STRING, string(b"\xff"))]))
    done = run("dump", path)
    assert_one_line_error(done)
    assert "key 'name' is not valid UTF-8" in done.err
