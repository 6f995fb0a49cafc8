"""Saving and loading: every format with its parameters, and no half-written file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from formats_table import ACTIVATIONS, CODEBOOKS, NAMES, random_blocks
from gguf_files import NANO, untouched
from numpy.typing import NDArray
from test_convert import small

import cuquant as cq
from cuquant.formats import describe, described

F = np.float32
OWN = [
    cq.KBit(2, [-1, -1e-30, 1 / 3, 1]),
    cq.KBit(3, scale="decoded"),
    cq.KBit(4, np.linspace(0, 1, 16), absmax="float16"),
    cq.KBit(5, scale="decoded", absmax="float16"),
]
FORMATS = [*NAMES, *CODEBOOKS, *(row.name for row in ACTIVATIONS), *OWN]


def gauss(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, F)


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, cq.QuantizedArray):
        assert (a.format, a.shape, a.device) == (b.format, b.shape, b.device)
        a, b = a.blocks, b.blocks
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def note_of(path: Path) -> Any:
    with safetensors.safe_open(path, "np") as file:
        return json.loads(file.metadata()["cuquant"])


# What is kept.


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_format(tmp_path: Path, fmt: Any) -> None:
    tensors: dict[str, Any] = {
        "matrix": cq.from_blocks(random_blocks(fmt, (5, 64)), fmt, (5, 64)),
        "experts": cq.from_blocks(random_blocks(fmt, (2, 3, 32)), fmt, (2, 3, 32)),
        "none": cq.from_blocks(b"", fmt, (0, 32)),
        "bias": gauss(5),
    }
    cq.save(tmp_path / "w.safetensors", tensors)
    loaded = cq.load(str(tmp_path / "w.safetensors"), "cpu")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        same(loaded[name], tensor)
    if isinstance(fmt, cq.KBit):
        np.testing.assert_array_equal(loaded["matrix"].format.codebook, fmt.codebook)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_formats_go_through_json(fmt: Any) -> None:
    fmt = cq.formats.get(fmt)
    again = described(json.loads(json.dumps(describe(fmt))))
    assert (type(again), again) == (type(fmt), fmt)
    assert again.storage == fmt.storage


def test_a_description_is_all_that_reading_takes() -> None:
    assert describe(cq.formats.get("q4_0")) == {"name": "q4_0"}
    assert describe(cq.KBit(2)) == {
        "name": "kbit",
        "bits": 2,
        "codebook": cq.normal_float_codebook(2).tolist(),
        "scale": "absmax",
        "absmax": "e4m4",
    }


def test_a_format_that_could_not_be_read_back(tmp_path: Path) -> None:
    class Nameless(type(cq.formats.get("q4_0"))):  # type: ignore[misc]
        def __init__(self) -> None:
            self.name = "of one's own"

    w = cq.QuantizedArray(Nameless(), np.zeros((1, 18), np.uint8))
    with untouched(tmp_path), pytest.raises(ValueError, match='unknown format "of one\'s own"'):
        cq.save(tmp_path / "w.safetensors", {"w": w})


@pytest.mark.parametrize("n", [1, 31, 32, 33, 1000])
def test_vectors_keep_their_length(tmp_path: Path, n: int) -> None:
    w = cq.quantize(gauss(n), "kbit3")
    cq.save(tmp_path / "w.safetensors", {"w": w})
    loaded = cq.load(tmp_path / "w.safetensors", "cpu")["w"]
    same(loaded, w)
    np.testing.assert_array_equal(loaded.dequantize(), w.dequantize())


def test_plain_arrays(tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    types = [np.float64, F, np.float16, ml_dtypes.bfloat16, bool, np.longlong]
    types += [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
    tensors = {str(np.dtype(t)): g.integers(0, 2, (3, 5)).astype(t) for t in types}
    tensors |= {"scalar": np.array(2.5), "empty": np.zeros((0, 3), F), "odd": np.arange(7, dtype=np.uint8)}
    strided = {"fortran": np.asfortranarray(gauss(3, 4)), "every other": gauss(3, 8)[:, ::2]}
    cq.save(tmp_path / "w.safetensors", tensors | strided)
    loaded = cq.load(tmp_path / "w.safetensors", "cpu")
    assert list(loaded) == [*tensors, *strided]
    for name, tensor in (tensors | strided).items():
        same(loaded[name], np.ascontiguousarray(tensor).reshape(tensor.shape))
        assert loaded[name].flags.aligned
        assert not loaded[name].flags.writeable


def test_names_of_any_text(tmp_path: Path) -> None:
    tensors = {name: gauss(1) for name in ("", "a/b", "naïve ☃ 🦙", '"\\\n\0', "cuquant")}
    cq.save(tmp_path / "w.safetensors", tensors)
    assert list(cq.load(tmp_path / "w.safetensors", "cpu")) == list(tensors)
    assert safetensors.numpy.load_file(tmp_path / "w.safetensors").keys() == tensors.keys()


def test_nothing_at_all(tmp_path: Path) -> None:
    cq.save(tmp_path / "w.safetensors", {})
    assert cq.load(tmp_path / "w.safetensors", "cpu") == {}


def test_a_model_is_a_mapping_of_tensors(tmp_path: Path) -> None:
    with cq.open(small(tmp_path / "s.gguf"), "cpu") as model:
        cq.save(tmp_path / "w.safetensors", model)
        for name, tensor in cq.load(tmp_path / "w.safetensors", "cpu").items():
            same(tensor, model[name])


def test_other_programs_read_the_bytes(tmp_path: Path) -> None:
    """By what the file says of them: planes, absmax and the codebook's entries."""
    fmt = cq.KBit(3, scale="decoded")
    w = cq.quantize(gauss(4, 64), fmt)
    cq.save(tmp_path / "w.safetensors", {"w": w, "b": gauss(4)})
    raw = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    same(raw["b"], gauss(4))
    assert raw["w"].shape == (4, 2 * 13)
    note = note_of(tmp_path / "w.safetensors")
    assert note == {"version": 1, "weights": {"w": {"shape": [4, 64], "format": describe(fmt)}}}
    blocks = raw["w"].reshape(-1, 13)
    bits = np.unpackbits(blocks[:, :12], axis=1, bitorder="little").reshape(-1, 3, 32)
    indices = bits[:, 0] + 2 * bits[:, 1] + 4 * bits[:, 2]
    codebook = np.array(note["weights"]["w"]["format"]["codebook"], F)
    numbers = codebook[indices] * cq.e4m4_decode(blocks[:, 12:])
    np.testing.assert_array_equal(numbers.reshape(4, 64), w.dequantize())


def test_a_loaded_array_works(tmp_path: Path) -> None:
    w, x = cq.quantize(gauss(40, 96), "kbit4"), gauss(3, 96, seed=1)
    cq.save(tmp_path / "w.safetensors", {"w": w})
    loaded = cq.load(tmp_path / "w.safetensors", "cpu")["w"]
    np.testing.assert_array_equal(x @ loaded.T, x @ w.T)
    np.testing.assert_array_equal(loaded[3:5].dequantize(), w.dequantize()[3:5])


@pytest.mark.gpu
def test_a_gpu_s_arrays(tmp_path: Path) -> None:
    path, b = tmp_path / "w.safetensors", gauss(5)
    w = cq.quantize(gauss(32, 64), "q4_0")
    cq.save(path, {"w": w.to_device("cuda").prepare(), "b": cq.device.cupy().asarray(b)})
    same(cq.load(path, "cpu")["w"], w)
    loaded = cq.load(path)
    assert loaded["w"].device == "cuda"
    same(loaded["w"].to_device("cpu"), w)
    same(loaded["b"].get(), b)


# Files that are there as a whole or not at all.


def test_a_file_replaces_the_one_that_it_was_loaded_from(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    w = cq.quantize(gauss(40, 96), "kbit4")
    cq.save(path, {"w": w})
    loaded = cq.load(path, "cpu")
    cq.save(path, loaded | {"b": gauss(3)})
    same(cq.load(path, "cpu")["w"], w)
    same(loaded["w"], w)  # still the old file's
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interruption_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], existing: bool
) -> None:
    path = tmp_path / "w.safetensors"
    if existing:
        path.write_text("precious")

    def interrupted(array: Any) -> None:
        assert len(list(tmp_path.iterdir())) == 1 + existing
        raise error

    monkeypatch.setattr(cq.device, "as_numpy", interrupted)
    with untouched(tmp_path), pytest.raises(error):
        cq.save(path, {"w": gauss(3)})


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ([gauss(2)], TypeError, "tensors is a list; a mapping of names to arrays is needed"),
        (cq.Experts._make((1, 2, 3)), TypeError, "tensors is an Experts; a mapping"),
        ({"w": [1.0]}, TypeError, "'w' is a list; a NumPy or CuPy array of floats, integers or bools is"),
        (
            {"w": cq.quantize(np.zeros((2, 32), F), "q4_0").T},
            TypeError,
            "'w' is a Transposed: save .*, its .T",
        ),
        ({"w": np.zeros(2, complex)}, TypeError, "'w' has dtype complex128; allowed are F64, F32, .*BOOL$"),
        ({"w": np.zeros(2, ">f4")}, TypeError, r"'w' has dtype >f4; .*: pass it \.astype\(numpy\.float32\)$"),
        ({"w": np.zeros(2, ">u2")}, TypeError, r"'w' has dtype >u2; .*: pass it \.astype\(numpy\.uint16\)$"),
        ({"w": np.array(["a"])}, TypeError, "tensor 'w' has dtype <U1"),
        ({1: np.zeros(2)}, TypeError, "a tensor is named 1; names are str"),
        ({"__metadata__": np.zeros(2)}, ValueError, "can have no tensor named '__metadata__'"),
        ({"a\ud800": np.zeros(2)}, ValueError, r"can have no tensor named 'a\\ud800'"),
        ({"\udfff": np.zeros(2)}, ValueError, r"can have no tensor named '\\udfff'"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, tensors: Any, kind: type[Exception], message: str) -> None:
    with untouched(tmp_path), pytest.raises(kind, match=message):
        cq.save(tmp_path / "w.safetensors", tensors)


def test_arguments_of_save_that_are_swapped(tmp_path: Path) -> None:
    given: Any = tmp_path / "a.st"
    with untouched(tmp_path), pytest.raises(TypeError, match=r"tensors is a \w+; .*: save\(path, tensors\)$"):
        cq.save({"w": gauss(3)}, given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["w.gguf", "W.GGUF"])
def test_a_name_of_a_gguf_file(tmp_path: Path, name: str) -> None:
    with untouched(tmp_path), pytest.raises(ValueError, match=r"(?i)w\.gguf .*cuquant\.quantize_file makes"):
        cq.save(tmp_path / name, {"w": gauss(3)})


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^there is no folder .*missing: w cannot be written there$"):
        cq.save(tmp_path / "missing" / "w", {})
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"file is not a folder: w cannot be written there$"):
        cq.save(tmp_path / "file" / "w", {})
    with pytest.raises(IsADirectoryError, match="is a folder"):
        cq.save(tmp_path, {})


@pytest.mark.parametrize("device", ["gpu", None])
def test_devices(tmp_path: Path, device: str | None) -> None:
    cq.save(tmp_path / "w", {"w": gauss(3)})
    if device is None:
        assert cq.device.of(cq.load(tmp_path / "w")["w"]) == cq.device.default()
    else:
        with pytest.raises(ValueError, match="unknown device 'gpu'; allowed are 'cpu' and 'cuda'"):
            cq.load(tmp_path / "w", device)


@pytest.mark.parametrize("fmt", [cq.Int4(-1), cq.Int4(96, False), cq.Int4(64)], ids=str)
def test_int4_of_any_group(fmt: cq.Int4, tmp_path: Path) -> None:
    w = cq.quantize(np.random.default_rng(0).standard_normal((3, 192), np.float32), fmt)
    cq.save(tmp_path / "w.safetensors", {"w": w})
    again = cq.load(tmp_path / "w.safetensors", "cpu")["w"]
    assert (again.format, again.shape) == (w.format, (3, 192))
    np.testing.assert_array_equal(again.blocks, w.blocks)


def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path) -> None:
    """A pipe stays one; of a link the file takes the place that it points to."""
    pipe, link, place = tmp_path / "pipe.safetensors", tmp_path / "link.safetensors", tmp_path / "there"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"pipe\.safetensors is no ordinary file: nothing can take its place"):
        cq.save(pipe, {"a": np.zeros(3, np.float32)})
    assert pipe.is_fifo()
    link.symlink_to(place)
    for value in (1, 2):
        cq.save(link, {"a": np.full(3, value, np.float32)})
        assert link.is_symlink()
        assert not place.is_symlink()
        np.testing.assert_array_equal(cq.load(place, "cpu")["a"], value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "link.safetensors",
        "pipe.safetensors",
        "there",
    ]


FULL = """
import resource, signal, sys
import numpy as np
import cuquant as cq
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
if sys.argv[2] == "save":
    cq.save(sys.argv[1], {"a": np.zeros(100_000, np.float32)})
else:
    cq.quantize_file(sys.argv[3], sys.argv[1], "q8_0", device="cpu")
"""


@pytest.mark.parametrize("name", ["save", "a.gguf", "a.safetensors"])
def test_a_full_disk_is_told_with_the_file_s_name(tmp_path: Path, name: str) -> None:
    target = tmp_path / ("a.safetensors" if name == "save" else name)
    command = [sys.executable, "-c", FULL, str(target), name, str(NANO)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("OSError: ")
    assert str(target) in last
    assert not any(tmp_path.iterdir())
