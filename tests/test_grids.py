"""Grids, and digits: numbers are the gguf package's, and bytes come back from what kernels read."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import write
from numpy.typing import NDArray

import cuquant as cq
from cuquant import formats, testing
from cuquant.formats.kernels import kernels_of
from cuquant.io import mixture

NAMES = ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "tq1_0", "tq2_0"]
SHAPE = (37, 768)


def blocks_of(name: str) -> NDArray[np.uint8]:
    return random_blocks(name, SHAPE, finite=True)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_gguf(name: str) -> None:
    raw, fmt = blocks_of(name), formats.get(name)
    expected = gguf.quants.dequantize(raw, Type[name.upper()])
    w = cq.from_blocks(raw, name, SHAPE)
    assert np.unique(np.abs(expected)).size > 100
    np.testing.assert_array_equal(w.dequantize(), expected)
    assert w.nbytes * 8 == w.size * fmt.bits_per_weight
    x = np.random.default_rng(1).standard_normal((5, SHAPE[1])).astype(np.float32)
    assert testing.nmse(x @ w.T, x.astype(np.float64) @ expected.astype(np.float64).T) < 1e-10
    np.testing.assert_array_equal(w[3:9:2].dequantize(), expected[3:9:2])


@pytest.mark.parametrize("name", NAMES)
def test_kernels_have_the_same_numbers_and_give_the_bytes_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of any bytes, and of more blocks than are taken at a time."""
    fmt, shape = formats.get(name), (3, 5, 512)
    own = fmt.for_kernels
    monkeypatch.setattr("cuquant.formats.chunks._AT_ONCE", 7)
    for raw in (random_blocks(name, shape), random_blocks(name, shape, finite=True)):
        given = kernels_of(fmt).to_kept(raw, np)
        np.testing.assert_array_equal(kernels_of(fmt).from_kept(given, np), raw)
    assert given.shape == (3, 5, own.row_bytes(512))
    expected = cq.from_blocks(raw, fmt, shape).dequantize()
    np.testing.assert_array_equal(cq.from_blocks(given, own, shape).dequantize(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_others(tmp_path: Path, name: str) -> None:
    """Weights stay as they are, and become floats where asked for."""
    raw = blocks_of(name)
    source = write(tmp_path / "s.gguf", {"x.weight": (raw, Type[name.upper()])})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = cq.open(source, "cpu")["x.weight"]
        cq.dequantize_file(source, tmp_path / "t.gguf", np.float32)
    assert w.format == name
    np.testing.assert_array_equal(w.blocks, raw)
    np.testing.assert_array_equal(cq.open(tmp_path / "t.gguf", "cpu")["x.weight"], w.dequantize())
    cq.save(tmp_path / "t.safetensors", {"x": w})
    back = cq.load(tmp_path / "t.safetensors")["x"]
    assert back.format == name
    np.testing.assert_array_equal(back.blocks, raw)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_quantizes_to_them(tmp_path: Path, name: str) -> None:
    assert name not in formats.names()
    assert name in formats.names_of_read_only()
    source = write(tmp_path / "s.gguf", {"x.weight": np.ones((2, 256), np.float32)})
    for given in (name, {"*": name}):
        with pytest.raises(ValueError, match=f"^nothing here quantizes to {name}: llama.cpp does"):
            cq.quantize_file(source, tmp_path / "t.gguf", given)
    with pytest.raises(ValueError, match=f"nothing here quantizes to {name}: llama.cpp does"):
        cq.quantize(np.ones((2, 256), np.float32), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_type_that_llama_cpp_has_for_them(name: str) -> None:
    fmt, kind = formats.get(name), f"MOSTLY_{name.upper()}"
    assert gguf.LlamaFileType[kind] == fmt.file_type
    assert mixture.of_file(name, fmt.file_type) == name
