"""Good GGUF files: the scanner against the gguf package's reader, field by field."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type, GGUFValueType as Value
from gguf_files import array, entry, gguf_file, string, tensor, u32, write as write_tensors

import cuquant as cq
from cuquant.io.gguf import File, GGUFError, scan

NANO = Path(__file__).parents[1] / "examples" / "data" / "nano-llama-f16.gguf"

# Extremes of every scalar type; float32 values are exact in float32.
SCALARS: list[tuple[Value, list[Any]]] = [
    (Value.UINT8, [0, 255]),
    (Value.INT8, [-128, 127]),
    (Value.UINT16, [0, 65535]),
    (Value.INT16, [-32768, 32767]),
    (Value.UINT32, [0, 2**32 - 1]),
    (Value.INT32, [-(2**31), 2**31 - 1]),
    (Value.FLOAT32, [-0.5, 2.0**-149, float("inf")]),
    (Value.BOOL, [False, True]),
    (Value.STRING, ["", "plain", "naïve ☃ \x00 🦙"]),
    (Value.UINT64, [0, 2**64 - 1]),
    (Value.INT64, [-(2**63), 2**63 - 1]),
    (Value.FLOAT64, [-1e308, 5e-324]),
]

# Shapes in stored elements, slowest axis first; quantized types are given in bytes.
TENSORS = {
    "f32": (np.float32, (3, 5), None),
    "f16": (np.float16, (7,), None),
    "f64": (np.float64, (2, 1, 3), None),
    "i8": (np.int8, (2, 3, 1, 5), None),
    "i16": (np.int16, (9,), None),
    "i32": (np.int32, (1, 1), None),
    "i64": (np.int64, (4,), None),
    "bf16": (np.uint8, (3, 10), Type.BF16),
    "q4_0": (np.uint8, (2, 3, 2 * 18), Type.Q4_0),
    "q4_1": (np.uint8, (5, 20), Type.Q4_1),
    "q5_0": (np.uint8, (1, 22), Type.Q5_0),
    "q5_1": (np.uint8, (24,), Type.Q5_1),
    "q8_0": (np.uint8, (3, 3 * 34), Type.Q8_0),
    "q4_k": (np.uint8, (2, 144), Type.Q4_K),
    "q6_k": (np.uint8, (1, 2 * 210), Type.Q6_K),
    "iq4_nl": (np.uint8, (2, 18), Type.IQ4_NL),
}


def write(path: Path, alignment: int | None = None) -> Path:
    """A file with every value type, alone and in arrays, and every kind of tensor."""
    writer = gguf.GGUFWriter(path, "test")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for kind, values in SCALARS:
        for number, value in enumerate(values):
            writer.add_key_value(f"scalar.{kind.name}.{number}", value, kind)
        writer.add_key_value(f"array.{kind.name}", values, Value.ARRAY, sub_type=kind)
    rng = np.random.default_rng(0)
    for name, (dtype, shape, ggml_type) in TENSORS.items():
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = rng.integers(0, 256, count, np.uint8).view(dtype).reshape(shape)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def contents(value: Any) -> Any:
    """A metadata value in plain Python."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_as_gguf_package(path: Path) -> None:
    reader, file = gguf.GGUFReader(path), File(path)
    header = file.header
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for key, field in fields.items():
        value = header.metadata[key]
        assert contents(value) == field.contents()
        assert type(contents(value)) is type(field.contents())
        types = [int(kind) for kind in header.metadata.value_type(key) if kind is not None]
        assert types == [int(kind) for kind in field.types[:2]]
    assert header.version == reader.fields["GGUF.version"].contents()
    assert (header.alignment, header.data_offset) == (reader.alignment, reader.data_offset)
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for info, other in zip(header.tensors.values(), reader.tensors, strict=True):
        assert info.shape == tuple(reversed(other.shape.tolist()))
        assert (info.ggml_type, info.type_name) == (other.tensor_type, other.tensor_type.name)
        assert (info.offset, info.nbytes) == (other.data_offset, other.n_bytes)
        assert file.buffer[info.offset : info.offset + info.nbytes] == other.data.tobytes()


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_every_value_and_tensor_type(tmp_path: Path, alignment: int | None) -> None:
    assert_as_gguf_package(write(tmp_path / "all.gguf", alignment))


def test_version_2(tmp_path: Path) -> None:
    path = write(tmp_path / "v2.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + u32(2) + raw[8:])
    assert File(path).header.version == 2
    assert_as_gguf_package(path)


def test_real_model() -> None:
    assert_as_gguf_package(NANO)


def test_arrays_of_numbers_are_read_only_views_of_the_file(tmp_path: Path) -> None:
    file = File(write(tmp_path / "all.gguf"))
    whole = np.frombuffer(file.buffer, np.uint8)
    for kind, values in SCALARS:
        if kind is not Value.STRING:
            stored = file.header.metadata[f"array.{kind.name}"]
            assert stored.dtype == np.asarray(values, kind.name.lower()).dtype
            assert np.shares_memory(stored, whole)
            assert not stored.flags.writeable


def test_arrays_of_a_writable_buffer_are_read_only() -> None:
    raw = memoryview(bytearray(gguf_file([array("a", 4, 2, u32(1) + u32(2))])))
    stored = scan(raw, "memory").metadata["a"]
    assert stored.tolist() == [1, 2]
    assert not stored.flags.writeable


def test_a_list_of_strings_is_decoded_once(tmp_path: Path) -> None:
    metadata = File(write(tmp_path / "all.gguf")).header.metadata
    assert metadata["array.STRING"] is metadata["array.STRING"]


@pytest.mark.parametrize("element_type", [t for t in Value if t is not Value.ARRAY])
def test_empty_array(element_type: int) -> None:
    metadata = scan(gguf_file([array("none", element_type, 0)]), "memory").metadata
    assert len(metadata["none"]) == 0
    assert [int(kind) for kind in metadata.value_type("none") if kind is not None] == [9, element_type]


def test_names_at_their_longest() -> None:
    raw = gguf_file([entry("k" * 65535, 0, b"\7")], [tensor("é" * 31 + "n", [1])], bytes(4))
    header = scan(raw, "memory")
    assert header.metadata == {"k" * 65535: 7}
    assert header.tensors["é" * 31 + "n"].nbytes == 4


def test_a_tensor_without_axes_is_a_scalar(tmp_path: Path) -> None:
    """As the gguf package writes one, and ggml reads it."""
    source = write_tensors(
        tmp_path / "m.gguf", {"s": np.array(3, np.float32), "w.weight": np.ones((2, 32), np.float32)}
    )
    cq.quantize_file(source, tmp_path / "t.gguf", "q8_0", device="cpu")
    for path in (source, tmp_path / "t.gguf"):
        model = cq.open(path, "cpu")
        assert (model.tensors["s"].shape, model.tensors["s"].nbytes) == ((), 4)
        assert model["s"].shape == model.floats("s").shape == ()
        assert model["s"] == 3
    cq.quantize_file(source, tmp_path / "t.safetensors", "q8_0", device="cpu")
    assert cq.load(tmp_path / "t.safetensors", "cpu")["s"] == 3


def test_no_tensors_and_no_padding() -> None:
    header = scan(gguf_file([entry("general.name", 8, string("vocabulary"))]), "memory")
    assert header.tensors == {}
    assert header.metadata["general.name"] == "vocabulary"


def test_q8_1_has_36_bytes_a_block() -> None:
    """float16 d, float16 s, 32 signed bytes: 36, where the gguf package says 40."""
    info = scan(gguf_file([], [tensor("x", [64, 3], Type.Q8_1)], bytes(216)), "memory").tensors["x"]
    assert (info.shape, info.nbytes, info.type_name) == ((3, 64), 3 * 2 * 36, "Q8_1")


def test_tensors_in_any_order_and_with_gaps() -> None:
    tensors = [tensor("late", [8], offset=96), tensor("early", [8])]
    header = scan(gguf_file([], tensors, bytes(128)), "memory")
    assert list(header.tensors) == ["late", "early"]
    assert [t.offset - header.data_offset for t in header.tensors.values()] == [96, 0]


def test_closing_unmaps_unless_views_are_alive(tmp_path: Path) -> None:
    path = write(tmp_path / "all.gguf")
    unused, used = File(path), File(path)
    assert unused.header.metadata["array.STRING"][1] == "plain"
    view = used.header.metadata["array.UINT32"]
    unused.close()
    used.close()
    assert unused.buffer.closed
    assert not used.buffer.closed
    assert view.tolist() == [0, 2**32 - 1]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        File(tmp_path / "none.gguf")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=tmp_path.name):
        File(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "empty"), (b"GG", "not a GGUF file"), (b"GGUF\3\0", "version needs 4 bytes, but 2 are left")],
)
def test_short_file(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=rf"short\.gguf: .*{problem}"):
        File(path)


def test_a_large_vocabulary_is_scanned_quickly() -> None:
    """128,000 tokens and 280,000 merges; about 0.03 s on one 2020s core."""
    tokens = b"".join(string("x" * (1 + i % 11)) for i in range(128_000))
    merges = b"".join(string("y" * (3 + i % 9)) for i in range(280_000))
    raw = gguf_file([array("tokens", 8, 128_000, tokens), array("merges", 8, 280_000, merges)])
    start = time.process_time()
    metadata = scan(raw, "memory").metadata
    assert time.process_time() - start < 0.5
    assert metadata["merges"][-1] == "y" * (3 + 279_999 % 9)
