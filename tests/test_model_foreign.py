"""Types without a format, or on a GPU without kernels: read as float16 numbers, and one warning about it."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
from formats_table import FP4, K_QUANTS, WEIGHTS, random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import Stored, write, write_blocks
from numpy.typing import NDArray

import cuquant as cq
import cuquant.io.model
from cuquant import FallbackWarning, GGUFError
from cuquant.formats import kquant

pytestmark = pytest.mark.usefixtures("foreign_types")
FOREIGN = [Type.TQ1_0, Type.IQ1_M, Type.IQ2_XS, Type.IQ2_S]
"""Bytes of a block are random below 60, which keeps scales small."""


def foreign_rows(kind: Type, rows: int, blocks: int = 1) -> NDArray[np.uint8]:
    """Bytes [rows, blocks * block bytes] whose numbers fit float16."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    return np.random.default_rng(0).integers(0, 60, (rows, blocks * block_bytes), np.uint8)


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
    raw = foreign_rows(Type.IQ2_S, 5000)
    with pytest.warns(FallbackWarning):
        model = cq.open(write(tmp_path / "m.gguf", {"w": (raw, Type.IQ2_S)}))
    assert np.array_equal(model["w"], gguf.quants.dequantize(raw, Type.IQ2_S).astype(np.float16))


def test_numpy_s_strictest_errors_change_nothing(tmp_path: Path) -> None:
    """Small numbers are 0 in float16, of a foreign type as of floats."""
    raw = foreign_rows(Type.IQ2_S, 2)
    tensors: dict[str, Stored] = {"small": (raw // 4, Type.IQ2_S), "floats": np.full(4, 1e-9, np.float32)}
    with pytest.warns(FallbackWarning):
        model = cq.open(write(tmp_path / "m.gguf", tensors))
    for name in tensors:
        expected = model.floats(name, np.float16)
        with np.errstate(all="raise"):
            np.testing.assert_array_equal(model.floats(name, np.float16), expected)


def test_one_warning_names_types_and_tensors(tmp_path: Path) -> None:
    tensors: dict[str, Stored] = {f"k.{i}": (foreign_rows(Type.IQ2_S, 1), Type.IQ2_S) for i in range(5)}
    tensors |= {"six": (foreign_rows(Type.TQ1_0, 1), Type.TQ1_0), "native": np.zeros(3)}
    path = write(tmp_path / "m.gguf", tensors)
    with pytest.warns(FallbackWarning) as record:
        model = cq.open(path)
    (warning,) = record
    assert warning.filename == __file__
    text = str(warning.message)
    assert "IQ2_S: k.0, k.1, k.2 and 2 more; TQ1_0: six" in text
    assert "m.gguf" in text
    assert text.count("native") == 1  # the tensor of that name is not listed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model["six"].shape == (1, 256)  # reading does not warn again


def test_no_warning_where_all_types_are_native(tmp_path: Path) -> None:
    tensors: dict[str, Stored] = {
        row.name: (random_blocks(row.name, (256,)), Type(row.ggml_type)) for row in WEIGHTS + FP4 + K_QUANTS
    }
    path = write(tmp_path / "m.gguf", tensors | {"x": np.zeros(3, np.int8)})
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        dict(cq.open(path, "cpu"))
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets NumPy stand for CuPy, where plain arrays go to, and k-quants for formats without kernels."""
    for module in (cuquant.device, cuquant.io.model):
        monkeypatch.setattr(module, "cupy", lambda: np)
    monkeypatch.setattr(kquant.KQuant, "on_gpu", False)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", [row.name for row in K_QUANTS])
def test_a_format_without_kernels_is_float16_on_a_gpu(tmp_path: Path, name: str) -> None:
    """On the CPU the same file opens natively, as the test of no warning says."""
    raw, kind = foreign_rows(Type[name.upper()], 6, 2), Type[name.upper()]
    path = write(tmp_path / "m.gguf", {"w": (raw, kind), "q": (random_blocks("q8_0", (64,)), Type.Q8_0)})
    with pytest.warns(FallbackWarning, match=f"on a GPU, dequantized .* \\({kind.name}: w\\)"):
        w = cq.open(path, "cuda")["w"]
    assert w.dtype == np.float16
    assert np.array_equal(w, gguf.quants.dequantize(raw, kind).astype(np.float16))


@pytest.mark.usefixtures("gpu")
def test_the_largest_float16_survives_the_fallback(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": (q6_k_rows(65504), Type.Q6_K)})
    with pytest.warns(FallbackWarning):
        w = cq.open(path, "cuda")["w"]
    assert w.min(axis=1).tolist() == w.max(axis=1).tolist() == [0, -65504, 0]


@pytest.mark.usefixtures("gpu")
def test_values_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    rows = q6_k_rows(65504)
    rows[1, 192:208] = 2
    with pytest.warns(FallbackWarning):
        model = cq.open(write(tmp_path / "m.gguf", {"huge": (rows, Type.Q6_K)}), "cuda")
    with pytest.raises(GGUFError, match=r"tensor 'huge' \(Q6_K\) has values beyond float16's 65504"):
        model["huge"]


def test_a_warning_only_where_numbers_are_written(tmp_path: Path) -> None:
    """A GGUF file has the bytes; the warning is of the line that called."""
    raw = foreign_rows(Type.IQ2_XS, 6, 2)
    tensors: dict[str, Stored] = {
        "x\x1b[2J.weight": (raw, Type.IQ2_XS),
        "a.weight": np.ones((2, 32), np.float32),
    }
    source = write(tmp_path / "m.gguf", tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cq.quantize_file(source, tmp_path / "t.gguf", "q8_0", keep="x*")
    assert raw.tobytes() in (tmp_path / "t.gguf").read_bytes()
    with pytest.warns(FallbackWarning, match=r"\(IQ2_XS: x\\x1b\[2J\.weight\)") as record:
        cq.quantize_file(source, tmp_path / "t.safetensors", "q8_0", keep="x*")
    assert [warning.filename for warning in record] == [__file__]
