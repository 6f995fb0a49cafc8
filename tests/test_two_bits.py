"""q1_0, q2_0, tq1_0 and tq2_0: numbers and bytes, and files of llama.cpp and of its fork."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import gguf_file, tensor
from numpy.typing import NDArray

import cuquant as cq
from cuquant import formats, testing
from cuquant.formats.kernels import kernels_of
from cuquant.io import mixture

NAMES = ["q1_0", "q2_0", "q2_0-128"]


def test_a_block_by_hand() -> None:
    """The first code is in the lowest bits of a byte."""
    raw = np.zeros((1, 18), np.uint8)
    raw[0, :2] = np.array([-1.5], np.float16).view(np.uint8)
    raw[0, 2], raw[0, 17] = 0b11_10_01_00, 0b01_00_00_00
    w = cq.from_blocks(raw, "q2_0", (1, 64)).dequantize()[0]
    assert w[:8].tolist() == [1.5, 0, -1.5, -3, 1.5, 1.5, 1.5, 1.5]
    assert w[60:].tolist() == [1.5, 1.5, 1.5, 0]
    raw[0, 2:] = 0
    raw[0, 2], raw[0, 17] = 0b0000_0101, 0b1000_0000
    w = cq.from_blocks(raw, "q1_0", (1, 128)).dequantize()[0]
    assert w[:4].tolist() == [-1.5, 1.5, -1.5, 1.5]
    assert np.flatnonzero(w < 0).tolist() == [0, 2, 127]


@pytest.mark.parametrize("name", [*NAMES, "tq1_0", "tq2_0"])
def test_kernels_have_the_same_numbers_and_give_the_bytes_back(name: str) -> None:
    fmt, shape = formats.get(name), (3, 5, 512)
    for finite in (False, True):
        raw = random_blocks(name, shape, finite=finite)
        given = kernels_of(fmt).to_kept(raw, np)
        assert given.shape == (3, 5, fmt.for_kernels.row_bytes(512))
        np.testing.assert_array_equal(kernels_of(fmt).from_kept(given, np), raw)
    w = cq.from_blocks(raw, fmt, shape)
    np.testing.assert_array_equal(cq.from_blocks(given, fmt.for_kernels, shape).dequantize(), w.dequantize())
    x = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    assert testing.nmse(x @ w[1].T, x.astype(np.float64) @ w[1].dequantize().astype(np.float64).T) < 1e-10


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0"])
def test_ternary_weights(name: str) -> None:
    """As the gguf package writes them."""
    w = np.random.default_rng(0).integers(-1, 2, (3, 512)).astype(np.float32) / 2
    raw, fmt = gguf.quants.quantize(w, Type[name.upper()]), formats.get(name)
    np.testing.assert_array_equal(cq.from_blocks(raw, name, w.shape).dequantize(), w)
    np.testing.assert_array_equal(kernels_of(fmt).from_kept(kernels_of(fmt).to_kept(raw, np), np), raw)


def test_every_byte_of_digits_keeps_them() -> None:
    """Those that ggml does not write become others of the same digits."""
    fmt, raw = formats.get("tq1_0"), np.zeros((256, 54), np.uint8)
    raw[:, :52] = np.arange(256)[:, None]
    raw[:, 52:] = np.array([1], np.float16).view(np.uint8)
    back = kernels_of(fmt).from_kept(kernels_of(fmt).to_kept(raw, np), np)
    assert (back[:, 0] != raw[:, 0]).sum() == 13
    expected = gguf.quants.dequantize(raw, Type.TQ1_0)
    np.testing.assert_array_equal(gguf.quants.dequantize(back, Type.TQ1_0), expected)
    np.testing.assert_array_equal(cq.from_blocks(raw, fmt, (256, 256)).dequantize(), expected)


def write(path: Path, name: str, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.uint8]]:
    """A file of matrices of a format, whose number another format may have: their bytes."""
    fmt = formats.get(name)
    number = fmt.ggml_type or fmt.ggml_type_elsewhere
    assert number is not None
    all_raw = [random_blocks(name, shape, seed, finite=True) for seed, shape in enumerate(shapes)]
    infos, data = [], b""
    for i, (shape, raw) in enumerate(zip(shapes, all_raw, strict=True)):
        infos.append(tensor(f"blk.{i}.attn_q.weight", shape[::-1], number, len(data)))
        data += raw.tobytes() + bytes(-raw.size % 32)
    path.write_bytes(gguf_file([], infos, data))
    return all_raw


@pytest.mark.parametrize("name", NAMES)
def test_files(tmp_path: Path, name: str) -> None:
    """Blocks are known by how far tensors are apart, a small one, with room for both, by others."""
    shapes = [(40, 512), (3, 128), (16, 2048)]
    all_raw = write(tmp_path / "s.gguf", name, shapes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = cq.open(tmp_path / "s.gguf", "cpu")
        cq.dequantize_file(tmp_path / "s.gguf", tmp_path / "t.gguf", np.float32)
    floats = cq.open(tmp_path / "t.gguf", "cpu")
    for key, raw, shape in zip(model, all_raw, shapes, strict=True):
        w = model[key]
        assert (w.format, w.shape, model.tensors[key].type_name) == (name, shape, name.upper())
        np.testing.assert_array_equal(w.blocks, raw)
        np.testing.assert_array_equal(floats[key], w.dequantize())
    cq.save(tmp_path / "t.safetensors", {"x": w})
    back = cq.load(tmp_path / "t.safetensors")["x"]
    assert back.format == name
    np.testing.assert_array_equal(back.blocks, w.blocks)


def test_a_file_that_is_cut_short_is_no_other(tmp_path: Path) -> None:
    """It has room for shorter blocks, but not as far apart as these would be."""
    path = tmp_path / "s.gguf"
    write(path, "q2_0", [(40, 512), (64, 2048)])
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(cq.GGUFError, match="it is cut short"):
        cq.open(path, "cpu")
    # Even where they would be: rows of 192 weights have none of them.
    write(path, "q2_0", [(40, 192), (64, 2048)])
    path.write_bytes(path.read_bytes()[: -64 * (2048 // 64 * 18 - 2048 // 128 * 34)])
    with pytest.raises(cq.GGUFError, match="it is cut short"):
        cq.open(path, "cpu")


def test_what_either_may_be_is_llama_cpp_s(tmp_path: Path) -> None:
    """A tensor that is so small that padding hides which blocks it has."""
    (raw,) = write(tmp_path / "s.gguf", "q2_0", [(1, 128)])
    (w,) = cq.open(tmp_path / "s.gguf", "cpu").values()
    assert w.format == "q2_0"
    np.testing.assert_array_equal(w.blocks, raw)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_quantizes_to_them(name: str) -> None:
    assert name in formats.names_of_read_only()
    assert name not in formats.names()
    with pytest.raises(ValueError, match=f"nothing here quantizes to {name}: those who train such models do"):
        cq.quantize(np.ones((2, 256), np.float32), name)
    number = formats.get(name).file_type
    if number is not None:
        assert mixture.of_file(name, number) == name
