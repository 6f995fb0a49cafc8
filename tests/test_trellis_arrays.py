"""Arrays of trellis weights: products, rows, files, an evaluation."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_trellis import BITS, F, gauss, random_parts, rng, stored

import cuquant as cq
from cuquant import testing


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "k"), [(40, 128), (33, 130), (1, 1), (700, 1600)])
@pytest.mark.parametrize("m", [1, 7])
def test_products_against_float64(bits: int, n: int, k: int, m: int) -> None:
    p = random_parts(bits, (n, k))
    w = cq.trellis_from_parts(**p)
    x = gauss(m, k, seed=2)
    plain = cq.trellis_from_parts(**(p | {"su": np.ones(k), "sv": np.ones(n)}))
    formula = ((x * p["su"]).astype(np.float64) @ plain.dequantize().T.astype(np.float64)) * p["sv"]
    for dtype, most in ((F, 1e-6), (np.float16, 1e-6), (ml_dtypes.bfloat16, 1e-5)):
        y = x.astype(dtype) @ w.T
        assert (y.shape, y.dtype) == ((m, n), np.dtype(dtype))
        assert testing.nmse(y, testing.linear(x.astype(dtype), w)) <= most
    assert testing.nmse(x @ w.T, formula) <= 1e-6
    np.testing.assert_array_equal(w @ x.T, (x @ w.T).T)


def test_stacks_broadcast_and_fuse() -> None:
    w, x = cq.quantize(gauss(3, 40, 96), "trellis3"), gauss(2, 3, 7, 96, seed=1)
    assert testing.nmse(x @ w.T, testing.linear(x, w)) <= 1e-6
    bias, residual = gauss(3, 40), gauss(2, 3, 7, 40)
    out = np.empty_like(residual)
    assert cq.linear(x, w, bias=bias, activation="silu", residual=residual, out=out) is out
    assert testing.nmse(out, testing.linear(x, w, bias=bias, activation="silu", residual=residual)) <= 1e-6
    q = cq.quantize(x, "q8_1")
    assert testing.nmse(q @ w.T, testing.linear(q, w)) <= 1e-6
    one = w[0]
    with pytest.raises(ValueError, match="out may share memory with W"):
        cq.linear(gauss(1, 96), one, out=stored(one, one.storage).scales)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 128])
def test_rows_are_selected_exactly(bits: int, group: int) -> None:
    w = cq.quantize(gauss(5, 37, 70), cq.Trellis(bits, group))
    d = w.dequantize()
    for index in (
        1,
        slice(1, 4),
        (2, 3),
        (2, slice(5, 20)),
        (slice(None), 3),
        (Ellipsis, slice(None)),
        (Ellipsis, 0, slice(None)),
        (2, 3, slice(None)),
        (0, Ellipsis, [1, 2], slice(None)),
        (1, [5, 5, 36, 0]),
        ([4, 0], [1, 2]),
        (slice(None, None, -1), slice(None, None, 2)),
        np.array([True, False, True, True, False]),
        (0, slice(0, 0)),
    ):
        chosen = w[index]
        np.testing.assert_array_equal(chosen.dequantize(), d[index])
        assert chosen.format == w.format
    many = rng().integers(0, 37, 500)
    np.testing.assert_array_equal(w[2][many].dequantize(), d[2][many])
    for matrix, expected in zip(w, d, strict=True):
        np.testing.assert_array_equal(matrix.dequantize(), expected)
    w.storage[...] = 0  # they were copies
    np.testing.assert_array_equal(chosen.dequantize(), d[index])


def test_rows_of_many_tiles_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuquant.formats import trellis

    w, x, chosen = cq.quantize(gauss(200, 70), "trellis3"), gauss(90, 70), rng().integers(0, 200, 77)
    whole, rows, made = w.dequantize(), w[chosen].blocks, cq.quantize(x, w.format).blocks
    monkeypatch.setattr(trellis, "_SLAB", 40 * 70)
    monkeypatch.setattr("cuquant.cpu.SLAB", 7 * 70)
    monkeypatch.setattr(
        "cuquant.cpu.slabs", lambda n, k, **_: (slice(i, min(i + 7, n)) for i in range(0, n, 7))
    )
    np.testing.assert_array_equal(w.dequantize(), whole)
    np.testing.assert_array_equal(w[chosen].blocks, rows)
    np.testing.assert_array_equal(cq.quantize(x, w.format).blocks, made)


def test_rows_of_matrices_with_other_signs() -> None:
    w = cq.trellis_from_parts(**random_parts(3, (2, 17, 40)))
    np.testing.assert_array_equal(w[1, 3:].dequantize(), w.dequantize()[1, 3:])
    with pytest.raises(IndexError, match="whose su differ cannot be one matrix"):
        w[:, 3]


def test_sizes_and_words() -> None:
    w = cq.quantize(gauss(256, 1024), cq.Trellis(3))
    parts = cq.trellis_parts(w)
    assert parts[0].nbytes == 256 * 1024 * 3 // 8
    assert w.nbytes == w.blocks.nbytes == parts[0].nbytes + parts[1].nbytes + 1024 + 256
    assert w.bits_per_weight == pytest.approx(3.25 + 8 * 1280 / 2**18)
    assert repr(w).startswith("QuantizedArray(shape=(256, 1024), format=trellis3, bits_per_weight=3.28906")
    assert "W = grid[q] * scale * su * sv" in w._repr_html_()
    assert (w.T.shape, w.size, w.ndim, len(w), w.device) == ((1024, 256), 1 << 18, 2, 256, "cpu")
    assert w.to_device("cpu") is w
    assert w.prepare() is w
    np.testing.assert_array_equal(w.T.dequantize(), w.dequantize().T)
    with pytest.raises(TypeError, match=r"call .dequantize\(\)"):
        np.asarray(w)
    with pytest.raises(IndexError, match="the last axis"):
        w[:, 3]
    loaded = pickle.loads(pickle.dumps(w))
    assert loaded.format == w.format
    np.testing.assert_array_equal(loaded.dequantize(), w.dequantize())


def test_files(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "a": cq.quantize(gauss(17, 40), "trellis3"),
        "b": cq.quantize(gauss(3, 20, 200), cq.Trellis(2, 32)),
        "row": cq.quantize(gauss(17, 40), "trellis4")[3],
        "plain": np.arange(3),
    }
    cq.save(tmp_path / "w.safetensors", tensors)
    loaded = cq.load(tmp_path / "w.safetensors", "cpu")
    for name in ("a", "b", "row"):
        assert loaded[name].format == tensors[name].format
        assert loaded[name].shape == tensors[name].shape
        np.testing.assert_array_equal(loaded[name].blocks, tensors[name].blocks)
        np.testing.assert_array_equal(loaded[name].dequantize(), tensors[name].dequantize())


def test_a_model_file(model: Path, tmp_path: Path) -> None:
    cq.quantize_file(model, tmp_path / "m.safetensors", cq.Trellis(3, 32), device="cpu")
    source, loaded = cq.open(model, "cpu"), cq.load(tmp_path / "m.safetensors", "cpu")
    name = "blk.0.ffn_up.weight"
    expected = cq.quantize(source[name], cq.Trellis(3, 32))
    assert loaded[name].format == expected.format
    np.testing.assert_array_equal(loaded[name].blocks, expected.blocks)
    with pytest.raises(ValueError, match="trellis3 has no GGUF type"):
        cq.quantize_file(model, tmp_path / "m.gguf", "trellis3")


def test_a_model_is_evaluated_in_them(model: Path) -> None:
    tokens = rng().integers(3, 40, 130)
    formats: list[str | cq.Format] = ["trellis4-32", "trellis3", cq.Trellis(2)]
    result = cq.evaluate(model, tokens=tokens, formats=formats, ctx=64, device="cpu")
    assert [row.format for row in result.rows] == ["f16", "trellis4-32", "trellis3", "trellis2"]
    klds = [row.mean_kld or 0.0 for row in result.rows]
    assert klds == sorted(klds)
    assert {error.format for error in result.rows[2].tensors} == {"trellis3"}


def test_no_rows(tmp_path: Path) -> None:
    w = cq.quantize(np.random.default_rng(0).standard_normal((4, 64), np.float32), "trellis3")
    cq.save(tmp_path / "w.safetensors", {"w": w[:0]})
    assert cq.load(tmp_path / "w.safetensors", "cpu")["w"].validate().shape == (0, 64)
    assert cq.quantize(np.ones((3, 0, 64), np.float32), "trellis3").validate().shape == (3, 0, 64)
