"""Opening models: lazily, without copies, in parts, and through the gguf package where there is no format."""

from __future__ import annotations

import time
import tracemalloc
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from formats_table import ACTIVATIONS, WEIGHTS, Row, random_blocks
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from gguf_files import array, entry, gguf_file, string, tensor, u32
from numpy.typing import NDArray

import cuquant as cq
from cuquant import FallbackWarning, GGUFError, QuantizedArray

NANO = Path(__file__).parents[1] / "examples" / "data" / "nano-llama-f16.gguf"

Stored = NDArray[Any] | tuple[NDArray[np.uint8], Type]
"""A tensor to write: plain numbers, or rows of bytes and their type."""


def write(
    path: Path, tensors: Mapping[str, Stored], *, split: int = 0, alignment: int | None = None, **keys: str
) -> Path:
    """A file by the gguf package, `split` tensors to a part; `keys` are strings under "general."."""
    writer = gguf.GGUFWriter(path, "test", split_max_tensors=split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in keys.items():
        writer.add_string(f"general.{key}", value)
    for name, stored in tensors.items():
        values, kind = stored if isinstance(stored, tuple) else (stored, None)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_blocks(path: Path, shape: tuple[int, ...], ggml_type: int, raw: NDArray[np.uint8]) -> Path:
    """A file of one tensor, byte by byte: the gguf package is wrong about q8_1."""
    path.write_bytes(gguf_file([], [tensor("w.weight", shape[::-1], ggml_type)], raw.tobytes()))
    return path


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


@pytest.mark.parametrize("access", [cq.Model.__getitem__, cq.Model.raw])
def test_a_wrong_name_is_a_key_error_with_near_ones(access: Any) -> None:
    with pytest.raises(KeyError, match=r"nano-llama-f16\.gguf has no tensor 'outputs\.weight'") as error:
        access(cq.open(NANO), "outputs.weight")
    assert "did you mean output.weight" in str(error.value)
    with pytest.raises(KeyError) as error:
        access(cq.open(NANO), "zzz")
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
    with pytest.raises(ValueError, match="closed"):
        model["output.weight"]
    assert next(iter(model)) == "token_embd.weight"


def test_repr() -> None:
    text = repr(cq.open(NANO))
    assert text == f"Model({str(NANO)!r}, 39 tensors: 30 F16, 9 F32; 10494976 bytes)"


def test_html_escapes_what_comes_from_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a&b.gguf", {"w": np.zeros(1)}, name="<script>alert(1)</script>")
    text = cq.open(path)._repr_html_()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "a&amp;b.gguf" in text
    assert "1 F64" in text


# Arguments of open.


@pytest.mark.parametrize("kind", [str, Path])
def test_paths(kind: Any) -> None:
    assert cq.open(kind(NANO)).path == NANO


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        cq.open(tmp_path / "none.gguf")


@pytest.mark.parametrize("device", ["cuda:0", "CPU", "GPU"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(ValueError, match=f"unknown device {device!r}; allowed are 'cpu' and 'cuda'"):
        cq.open(NANO, device)


# Types of the gguf package only. The bytes of a block are random below 60, which keeps scales small.

FOREIGN = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.TQ1_0, Type.TQ2_0, Type.IQ4_NL]
FOREIGN += [Type.IQ4_XS, Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS]
FOREIGN += [Type.IQ3_S, Type.MXFP4]


def foreign_rows(kind: Type, rows: int, blocks: int = 1) -> NDArray[np.uint8]:
    """Bytes [rows, blocks * block bytes] whose numbers fit float16."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 60, (rows, blocks, block_bytes), np.uint8)
    if kind is Type.MXFP4:
        raw[..., 0] = 120  # the exponent of the scale, with a bias of 127
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", FOREIGN, ids=lambda kind: kind.name)
def test_a_foreign_type_is_float16_of_the_gguf_package_s_numbers(tmp_path: Path, kind: Type) -> None:
    raw = foreign_rows(kind, 6, 2)
    path = write(tmp_path / "m.gguf", {"w": (raw.reshape(2, 3, -1), kind)})
    with pytest.warns(FallbackWarning, match=kind.name):
        model = cq.open(path)
    expected = gguf.quants.dequantize(raw, kind).astype(np.float16)
    assert expected.any()
    assert model["w"].dtype == np.float16
    assert np.array_equal(model["w"], expected.reshape(2, 3, -1))
    assert model.raw("w").tobytes() == raw.tobytes()


def test_a_foreign_tensor_of_many_slabs(tmp_path: Path) -> None:
    """5000 rows of 256 weights are more than are converted at a time."""
    raw = foreign_rows(Type.Q4_K, 5000)
    with pytest.warns(FallbackWarning):
        model = cq.open(write(tmp_path / "m.gguf", {"w": (raw, Type.Q4_K)}))
    assert np.array_equal(model["w"], gguf.quants.dequantize(raw, Type.Q4_K).astype(np.float16))


def test_one_warning_names_types_and_tensors(tmp_path: Path) -> None:
    tensors: dict[str, Stored] = {f"k.{i}": (foreign_rows(Type.Q4_K, 1), Type.Q4_K) for i in range(5)}
    tensors |= {"six": (foreign_rows(Type.Q6_K, 1), Type.Q6_K), "native": np.zeros(3)}
    path = write(tmp_path / "m.gguf", tensors)
    with pytest.warns(FallbackWarning) as record:
        model = cq.open(path)
    (warning,) = record
    assert warning.filename == __file__
    text = str(warning.message)
    assert "Q4_K: k.0, k.1, k.2 and 2 more; Q6_K: six" in text
    assert "m.gguf" in text
    assert text.count("native") == 1  # the tensor of that name is not listed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model["six"].shape == (1, 256)  # reading does not warn again


def test_no_warning_where_all_types_are_native(tmp_path: Path) -> None:
    tensors: dict[str, Stored] = {
        row.name: (random_blocks(row.name, (32,)), Type(row.ggml_type)) for row in WEIGHTS
    }
    path = write(tmp_path / "m.gguf", tensors | {"x": np.zeros(3, np.int8)})
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        dict(cq.open(path))
    assert record == []


def q8_k_model(folder: Path) -> cq.Model:
    """A model of a type that the gguf package knows but cannot dequantize."""
    path = write_blocks(folder / "m.gguf", (2, 256), Type.Q8_K, np.zeros(2 * 292, np.uint8))
    with pytest.warns(FallbackWarning, match="Q8_K: w.weight"):
        return cq.open(path)


def test_a_type_that_nothing_dequantizes_is_an_error_when_read(tmp_path: Path) -> None:
    model = q8_k_model(tmp_path)
    assert model.raw("w.weight").nbytes == 2 * 292
    with pytest.raises(GGUFError, match=r"tensor 'w\.weight': .* cannot dequantize Q8_K"):
        model["w.weight"]


def test_asking_for_a_name_does_not_read_the_tensor(tmp_path: Path) -> None:
    assert "w.weight" in q8_k_model(tmp_path)


def q6_k_rows(d: float) -> NDArray[np.uint8]:
    """Three rows of one Q6_K block, d * scale * (q - 32) with all scales 1: zeros, -d, zeros."""
    rows = np.zeros((3, 210), np.uint8)
    rows[:, 128:192] = 0b10101010  # upper two bits of every q: q = 32
    rows[1, :128], rows[1, 128:192] = 0xFF, 0b01010101  # q = 31
    rows[:, 192:208] = 1
    rows[:, 208:] = np.array([d], np.float16).view(np.uint8)
    return rows


def test_the_largest_float16_survives_the_fallback(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": (q6_k_rows(65504), Type.Q6_K)})
    with pytest.warns(FallbackWarning):
        w = cq.open(path)["w"]
    assert w.min(axis=1).tolist() == w.max(axis=1).tolist() == [0, -65504, 0]


def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    rows = q6_k_rows(65504)
    rows[1, 192:208] = 2
    with pytest.warns(FallbackWarning):
        model = cq.open(write(tmp_path / "m.gguf", {"huge": (rows, Type.Q6_K)}))
    with pytest.raises(GGUFError, match=r"tensor 'huge' \(Q6_K\) has values beyond float16's 65504"):
        model["huge"]


# Split models.

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


def write_part(folder: Path, number: int, keys: Mapping[str, int], name: str) -> Path:
    """Part `number` (from 0) of two with one tensor; `keys` are uint32 under "split."."""
    entries = [entry(f"split.{key}", Value.UINT32, u32(value)) for key, value in keys.items()]
    path = folder / f"m-0000{number + 1}-of-00002.gguf"
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


def test_many_missing_parts_are_told_in_few_words(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-02000.gguf"
    path.write_bytes(gguf_file([entry("split.count", Value.UINT32, u32(2000))]))
    with pytest.raises(GGUFError, match=r"missing beside it: m-00002-of-02000\.gguf") as error:
        cq.open(path)
    assert len(str(error.value)) < 1000
