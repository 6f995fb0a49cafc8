"""Opening models: lazily, without copies, as a mapping."""

from __future__ import annotations

import copy
import pickle
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from formats_table import ACTIVATIONS, WEIGHTS, Row, random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import NANO, Stored, array, entry, gguf_file, string, tensor, u32, write, write_blocks

import cuquant as cq
from cuquant import QuantizedArray
from cuquant.io import dump
from cuquant.io.gguf import File, Metadata, scan

# Types of this library.


@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 5, 96), (2, 1, 3, 32)], ids=str)
@pytest.mark.parametrize("row", WEIGHTS + ACTIVATIONS, ids=lambda row: row.name)
def test_a_native_format_is_a_quantized_array(tmp_path: Path, row: Row, shape: tuple[int, ...]) -> None:
    raw = random_blocks(row.name, shape)
    w = cq.open(write_blocks(tmp_path / "m.gguf", shape, row.ggml_type, raw))["w.weight"]
    assert isinstance(w, QuantizedArray)
    assert (str(w.format), w.shape, w.device) == (row.name, shape, "cpu")
    assert w.nbytes == np.prod(shape) // 32 * row.block_bytes
    assert np.array_equal(w.blocks, raw)
    assert not w.blocks.flags.writeable


@pytest.mark.parametrize("row", WEIGHTS, ids=lambda row: row.name)
def test_a_native_format_has_the_gguf_package_s_numbers(tmp_path: Path, row: Row) -> None:
    raw = random_blocks(row.name, (4, 64), finite=True)
    path = write(tmp_path / "m.gguf", {"w.weight": (raw, Type(row.ggml_type))})
    expected = gguf.quants.dequantize(raw, Type(row.ggml_type))
    assert np.array_equal(cq.open(path)["w.weight"].dequantize(), expected)


@pytest.mark.parametrize("dtype", ["f4", "f2", "i1", "i2", "i4", "i8", "f8"])
def test_a_plain_type_is_an_array(tmp_path: Path, dtype: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (2, 3, 5 * np.dtype(dtype).itemsize), np.uint8)
    written = raw.view(dtype)
    read = cq.open(write(tmp_path / "m.gguf", {"w": written}))["w"]
    assert type(read) is np.ndarray
    assert (read.dtype, read.shape) == (written.dtype, (2, 3, 5))
    assert np.array_equal(read.view(np.uint8), raw)  # every bit, NaNs included
    assert not read.flags.writeable


def test_bfloat16(tmp_path: Path) -> None:
    written = np.array([[1.0, -2.5, 3e38], [1e-40, np.inf, 0.0]], ml_dtypes.bfloat16)
    read = cq.open(write(tmp_path / "m.gguf", {"w": (written.view(np.uint8), Type.BF16)}))["w"]
    assert read.dtype == ml_dtypes.bfloat16
    assert np.array_equal(read, written)


def test_real_model_as_the_gguf_package_reads_it() -> None:
    model, reader = cq.open(NANO), gguf.GGUFReader(NANO)
    assert list(model) == [t.name for t in reader.tensors]
    for other in reader.tensors:
        assert model[other.name].dtype == other.data.dtype
        assert np.array_equal(model[other.name], other.data)
        assert model.raw(other.name).tobytes() == other.data.tobytes()
    assert model.metadata["general.name"] == "nano-llama"
    assert model.metadata["llama.embedding_length"] == 256
    assert model.nbytes == sum(t.n_bytes for t in reader.tensors)


# Laziness.


def test_arrays_are_the_file_s_own_memory(tmp_path: Path) -> None:
    """What is written into the file later shows in arrays that were read before."""
    zeros: dict[str, Stored] = {
        "plain": np.zeros((2, 4), np.float32),
        "blocks": (np.zeros((2, 34), np.uint8), Type.Q8_0),
    }
    path = write(tmp_path / "m.gguf", zeros)
    model = cq.open(path)
    plain, blocks = model["plain"], model["blocks"].blocks
    with path.open("r+b") as file:
        file.seek(model.tensors["plain"].offset)
        file.write(np.arange(8, dtype=np.float32).tobytes())
        file.seek(model.tensors["blocks"].offset)
        file.write(bytes(range(68)))
    assert plain.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert blocks.tobytes() == bytes(range(68))
    assert np.shares_memory(plain, model.raw("plain"))
    assert np.shares_memory(blocks, model.raw("blocks"))


def test_an_empty_path(tmp_path: Path) -> None:
    """Is no name of the working folder's."""
    save: Any = lambda path: cq.save(path, {})  # noqa: E731
    for use in (cq.open, cq.load, cq.read_safetensors, save):
        with pytest.raises(FileNotFoundError, match="the path is empty"):
            use("")


def test_opening_touches_no_tensor(tmp_path: Path) -> None:
    """A sparse file: 2^20 rows of 8192 weights in q4_0, 4.5 GiB that the disk does not hold."""
    path = tmp_path / "sparse.gguf"
    header = gguf_file([], [tensor("w.weight", [8192, 1 << 20], Type.Q4_0)], b"\0" * 32)
    path.write_bytes(header)
    nbytes = (1 << 20) * 8192 // 32 * 18
    with path.open("r+b") as file:
        file.truncate(len(header) - 32 + nbytes)
    tracemalloc.start()
    start = time.perf_counter()
    w = cq.open(path)["w.weight"]
    last = w[-1].dequantize()
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (w.shape, w.nbytes) == ((1 << 20, 8192), nbytes)
    assert last.shape == (8192,)
    assert not last.any()
    assert seconds < 0.5
    assert peak < 1 << 20


def test_a_large_vocabulary_opens_quickly(tmp_path: Path) -> None:
    """128,000 tokens with scores and types, and 280,000 merges; about 0.03 s on one 2020s core."""
    names = [f"token {i}" for i in range(128_000)]
    entries = [
        array("tokenizer.ggml.tokens", 8, 128_000, b"".join(map(string, names))),
        array("tokenizer.ggml.scores", 6, 128_000, bytes(4 * 128_000)),
        array("tokenizer.ggml.token_type", 5, 128_000, u32(1) * 128_000),
        array("tokenizer.ggml.merges", 8, 280_000, string("ab cd") * 280_000),
    ]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(gguf_file(entries))
    start = time.process_time()
    model = cq.open(path)
    assert time.process_time() - start < 0.5
    assert model.metadata["tokenizer.ggml.tokens"] == names


# Metadata.


def test_metadata_is_equal_to_the_same_keys_and_values(tmp_path: Path) -> None:
    metadata = cq.open(NANO).metadata
    assert metadata == cq.open(NANO).metadata == dict(metadata)
    assert not metadata != cq.open(NANO).metadata  # noqa: SIM202
    assert metadata != cq.open(write(tmp_path / "m.gguf", {"w": np.zeros(1)})).metadata
    key = "tokenizer.ggml.token_type"
    changed = metadata[key].copy()
    changed[7] += 1
    others: tuple[Any, ...] = (changed, changed[:5], [], "text", None)
    for other in others:
        assert metadata != dict(metadata) | {key: other}
    assert metadata == dict(metadata) | {key: metadata[key].tolist()}
    assert metadata != {k: v for k, v in metadata.items() if k != key}
    assert metadata != 5


def test_nan_in_metadata_is_equal_to_nan() -> None:
    nan = struct.pack("<f", float("nan"))
    raw = gguf_file([entry("a", 6, nan), array("b", 6, 2, nan + u32(0))])
    first, second = (scan(raw, "memory").metadata for _ in range(2))
    assert first == second
    assert first != dict(first) | {"a": 1.0}
    assert first != dict(first) | {"b": np.zeros(2, np.float32)}


@pytest.mark.parametrize("style", ["json", "latex"])
def test_metadata_has_no_other_styles(style: str) -> None:
    message = f"^unknown style '{style}'; allowed are table, md, html, csv$"
    with pytest.raises(ValueError, match=message):
        cq.open(NANO, "cpu").metadata.render(style)


def test_metadata_shows_its_table_with_long_arrays_cut() -> None:
    metadata = cq.open(NANO).metadata
    text = repr(metadata)
    assert text in dump.as_text(cq.open(NANO))
    assert len(text.splitlines()) == 2 + len(metadata)
    assert "tokenizer.ggml.token_type               int32[4096]   3, 1, 1, 1, 1, 1, 1, 1, ...\n" in text
    assert metadata._repr_html_().count("<tr>") == 1 + len(metadata)


def test_metadata_that_cannot_be_read_says_so() -> None:
    with cq.open(NANO) as model:
        pass
    assert repr(model.metadata).startswith("GGUF metadata of 26 keys: ")
    assert repr(model.metadata).endswith("general.architecture': the file is closed")
    assert model.metadata._repr_html_().endswith("general.architecture&#x27;: the file is closed")


@pytest.mark.parametrize("access", [Metadata.__getitem__, Metadata.value_type])
def test_a_wrong_key_is_a_key_error_with_near_ones(access: Any) -> None:
    with pytest.raises(KeyError, match=r"nano-llama-f16\.gguf has no key 'general\.nam'") as error:
        access(cq.open(NANO).metadata, "general.nam")
    assert "did you mean general.name or" in str(error.value)
    assert cq.open(NANO).metadata.get("general.nam") is None
    assert cq.open(NANO).metadata.get("general.nam", 3) == 3


# A model is a mapping.


def test_mapping() -> None:
    model = cq.open(NANO)
    names = [t.name for t in gguf.GGUFReader(NANO).tensors]
    assert len(model) == 39
    assert list(model.keys()) == list(model.tensors) == names
    assert [name for name, _ in model.items()] == names
    assert "output.weight" in model
    assert "output.bias" not in model
    assert model.get("output.bias") is None
    assert dict(model)["output_norm.weight"].shape == (256,)


def test_no_name_is_sought_that_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand that takes milliseconds, and `get` shows none."""
    for module in ("model", "header"):
        monkeypatch.delattr(f"cuquant.io.{module}.missing")
    model = cq.open(NANO)
    assert model.get("output.weigh") is None
    assert model.get("output.weigh", 3) == 3
    assert model.get("output.weight").shape == model["output.weight"].shape
    assert model.metadata.get("general.nam", 3) == 3


@pytest.mark.parametrize("access", [cq.Model.__getitem__, cq.Model.raw])
def test_a_wrong_name_is_a_key_error_with_near_ones(access: Any) -> None:
    with pytest.raises(KeyError, match=r"nano-llama-f16\.gguf has no tensor 'outputs\.weight'") as error:
        access(cq.open(NANO), "outputs.weight")
    assert "did you mean output.weight" in str(error.value)
    with pytest.raises(KeyError, match=r"did you mean blk\.0\.ffn_up\.weight or blk\.1\.ffn_up\.weight"):
        access(cq.open(NANO), "ffn_up")
    for name in ("zzz", ""):
        with pytest.raises(KeyError) as error:
            access(cq.open(NANO), name)
        assert "did you mean" not in str(error.value)


def test_raw_is_a_read_only_view_of_the_stored_bytes(tmp_path: Path) -> None:
    raw = random_blocks("q5_1", (3, 64))
    model = cq.open(write(tmp_path / "m.gguf", {"w": (raw, Type.Q5_1), "x": np.arange(3.0)}))
    assert model.raw("w").dtype == np.uint8
    assert model.raw("w").shape == (3 * 2 * 24,)
    assert model.raw("w").tobytes() == raw.tobytes()
    assert model.raw("x").tobytes() == np.arange(3.0).tobytes()
    assert not model.raw("w").flags.writeable


def test_closing_leaves_live_arrays_readable(tmp_path: Path) -> None:
    raw = random_blocks("q8_0", (2, 32))
    tensors: dict[str, Stored] = {"w": (raw, Type.Q8_0), "x": np.arange(3.0)}
    with cq.open(write(tmp_path / "m.gguf", tensors)) as model:
        w, x = model["w"], model["x"]
    model.close()  # a second time does no harm
    assert x.tolist() == [0, 1, 2]
    assert np.array_equal(w.blocks, raw)


def test_a_closed_model_without_live_arrays_cannot_be_read() -> None:
    with cq.open(NANO) as model:
        pass
    for read in (model.raw, model.__getitem__):
        with pytest.raises(ValueError, match=r"gguf: tensor 'output\.weight': the file is closed$"):
            read("output.weight")
    assert next(iter(model)) == "token_embd.weight"


def test_a_closed_model_is_closed_whatever_was_read() -> None:
    """Arrays of metadata that it has itself do not keep its file open; those that a caller has stay."""
    key = "tokenizer.ggml.token_type"
    model = cq.open(NANO, "cpu")
    types = model.metadata[key].tolist()
    model.close()
    assert [file.buffer.closed for file in model._files if isinstance(file, File)] == [True]
    assert model.metadata[key].tolist() == types
    assert not model.metadata[key].flags.writeable
    model = cq.open(NANO, "cpu")
    array, norm = model.metadata[key], model["output_norm.weight"]
    model.close()
    assert (array.tolist(), norm.shape) == (types, (256,))
    for read in (model.raw, model.__getitem__, model.floats):
        with pytest.raises(ValueError, match=r"gguf: tensor 'output\.weight': the file is closed$"):
            read("output.weight")


@pytest.mark.parametrize("key", ["general.name", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
def test_metadata_that_was_not_read_before_closing(key: str) -> None:
    with cq.open(NANO) as model:
        pass
    with pytest.raises(ValueError, match=rf"gguf: key '{key}': the file is closed$"):
        model.metadata[key]
    assert model.metadata["llama.embedding_length"] == 256
    assert "39 tensors" in repr(model)
    assert "30 F16, 9 F32" in model._repr_html_()


@pytest.mark.parametrize("key", ["general.name", "tokenizer.ggml.tokens"])
def test_metadata_that_was_read_before_closing(key: str) -> None:
    with cq.open(NANO) as model:
        value = model.metadata[key]
    assert model.metadata[key] == value


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_pickles_and_copies(copied: Any) -> None:
    """What reads the file is in none of them; its contents can be."""
    model = cq.open(NANO, "cpu")
    for given, contents in ((model, "tensors"), (model.metadata, "values")):
        name = type(given).__name__
        message = rf"a {name} reads a file .*: pass the path .*, or dict\({name.lower()}\) for the {contents}"
        with pytest.raises(TypeError, match=message):
            copied(given)
        copied(dict(given))
        assert copy.copy(given) is given


def test_html_of_a_tensor_s_facts(tmp_path: Path) -> None:
    model = cq.open(write(tmp_path / "m.gguf", {"a<b>": np.zeros((3, 4)), "one": np.array(1.0)}))
    page = model.tensors["a<b>"]._repr_html_()
    for fact in ("<td>a&lt;b&gt;<", "<td>3 × 4<", "<td>F64<", "bytes</th><td>96<", "offset</th>"):  # noqa: RUF001
        assert fact in page


def test_repr() -> None:
    text = repr(cq.open(NANO))
    assert text == f"Model({str(NANO)!r}, 39 tensors: 30 F16, 9 F32; 10,494,976 bytes of tensors)"


def test_repr_of_one_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": np.zeros(1)})
    assert repr(cq.open(path)) == f"Model({str(path)!r}, 1 tensor: 1 F64; 8 bytes of tensors)"


def test_html_escapes_what_comes_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a&b.gguf", {"w": np.zeros(1)}, name="<script>alert(1)</script>")
    text = cq.open(path)._repr_html_()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "a&amp;b.gguf" in text
    assert "1 F64" in text
    text = cq.open(path).metadata._repr_html_()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


# Arguments of open.


@pytest.mark.parametrize("kind", [str, Path])
def test_paths(kind: Any) -> None:
    assert cq.open(kind(NANO)).path == NANO


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        cq.open(tmp_path / "none.gguf")


@pytest.mark.parametrize("device", ["cuda:0", "CPU", "GPU"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(ValueError, match=f"unknown device {device!r}; allowed are 'cpu' and 'cuda'") as error:
        cq.open(NANO, device)
    assert ("cupy.cuda.Device" in str(error.value)) == (device == "cuda:0")


def test_the_module_of_its_arrays_makes_others(model: Path) -> None:
    opened = cq.open(model, "cpu")
    assert opened.xp is np
    assert all(not hasattr(array, "get") for array in opened.values())
