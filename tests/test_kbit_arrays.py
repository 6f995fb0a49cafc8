"""k-bit arrays: vectors of any length, products, slices, and the tiles of other kernels."""

from __future__ import annotations

import pickle
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
from formats_table import CODEBOOKS
from products import assert_stack_products
from test_kbit import BITS, NF4, F, rng, sqnr_db

import cuquant as cq
from cuquant import testing

# Vectors


@pytest.mark.parametrize("fmt", [*CODEBOOKS, cq.KBit(3, absmax="float16"), cq.KBit(4, NF4)], ids=str)
def test_vectors_of_any_length(fmt: str | cq.KBit) -> None:
    x = rng().standard_normal(2000, F)
    for n in (*range(1, 100), 1000, 1023, 1024, 1025, 2000):
        w = cq.quantize(x[:n], fmt)
        filled = np.zeros(-(-n // 32) * 32, F)
        filled[:n] = x[:n]
        whole = cq.quantize(filled, fmt)
        assert (w.shape, w.size, len(w), w.nbytes) == ((n,), n, n, w.blocks.nbytes)
        np.testing.assert_array_equal(w.blocks, whole.blocks)
        np.testing.assert_array_equal(w.dequantize(), whole.dequantize()[:n])
        for other in (cq.from_blocks(w.blocks, fmt, n), w[...], pickle.loads(pickle.dumps(w))):
            assert (other.shape, other.format) == ((n,), w.format)
            np.testing.assert_array_equal(other.blocks, w.blocks)


@pytest.mark.parametrize("k", BITS)
def test_a_long_vector(k: int) -> None:
    """Its blocks are those of a matrix, and reading them back has the error of such weights."""
    x = rng().standard_normal(10**7 - 1, F)
    w = cq.quantize(x, cq.KBit(k))
    assert w.blocks.shape == (10**7 // 32 * w.format.block_bytes,)
    matrix = cq.quantize(x[:9_984_000].reshape(-1, 32_000), cq.KBit(k)).blocks
    np.testing.assert_array_equal(w.blocks[: matrix.size], matrix.reshape(-1))
    assert sqnr_db(w.dequantize(), x) == pytest.approx((7.4, 15.0, 21.1, 26.0)[k - 2], abs=0.1)


def test_matrices_and_ggml_vectors_have_whole_blocks() -> None:
    for shape, fmt in (((1, 33), "kbit4"), ((33,), "q4_0"), ((33,), "q8_1")):
        with pytest.raises(
            ValueError, match=f"{fmt} stores blocks of 32 .* has 33 elements .*multiple of 32"
        ):
            cq.quantize(np.zeros(shape, F), fmt)
    with pytest.raises(ValueError, match="which has 0 elements"):
        cq.quantize(np.zeros(0, F), "kbit4")
    with pytest.raises(ValueError, match=r"raw has 34 bytes; kbit4 of shape \(65,\) has 51"):
        cq.from_blocks(bytes(34), "kbit4", (65,))


def test_vectors_have_no_products() -> None:
    x = np.ones(33, F)
    w = cq.quantize(x, "kbit4")
    no_matrix = r"W has shape \(33,\); a weight is \(\.\.\., N, K\)"
    with pytest.raises(ValueError, match=no_matrix):
        w @ x
    with pytest.raises(ValueError, match=no_matrix):
        cq.linear(x, w)
    with pytest.raises(ValueError, match="no rows and columns to swap"):
        w.T  # noqa: B018
    with pytest.raises(TypeError, match=r"kbit4 array \(33,\): a quantized vector has no rows"):
        x @ w


# As a QuantizedArray


@pytest.mark.parametrize("fmt", [*CODEBOOKS, cq.KBit(3, absmax="float16"), cq.KBit(4, NF4)], ids=str)
def test_products_against_float64(fmt: str | cq.KBit) -> None:
    weights = rng(1).standard_normal((3, 40, 192), F)
    w = cq.quantize(weights, fmt)
    assert_stack_products(w)
    x = rng(3).standard_normal((5, 192), F)
    fused = cq.linear(x, w[0], bias=np.ones(40, F), activation="silu")
    assert testing.nmse(fused, testing.linear(x, w[0], bias=np.ones(40, F), activation="silu")) <= 1e-6


@pytest.mark.parametrize("fmt", [*CODEBOOKS, cq.KBit(5, scale="decoded", absmax="float16")], ids=str)
def test_slices_bytes_and_copies(fmt: str | cq.KBit) -> None:
    x = rng().standard_normal((6, 5, 96), F)
    w = cq.quantize(x, fmt)
    assert w.nbytes == w.blocks.nbytes == 30 * 3 * w.format.block_bytes
    assert f"format={w.format}" in repr(w)
    np.testing.assert_array_equal(w[1:4, 2].blocks, cq.quantize(x[1:4, 2], fmt).blocks)
    np.testing.assert_array_equal(w[[5, 0]].dequantize(), w.dequantize()[[5, 0]])
    np.testing.assert_array_equal(cq.from_blocks(w.blocks.tobytes(), fmt, x.shape).blocks, w.blocks)
    loaded = pickle.loads(pickle.dumps(w))
    assert loaded.format == fmt
    np.testing.assert_array_equal(loaded.dequantize(), w.dequantize())
    for dtype in (np.float16, ml_dtypes.bfloat16):
        np.testing.assert_array_equal(w.dequantize(dtype), w.dequantize().astype(dtype))
        np.testing.assert_array_equal(
            cq.quantize(x.astype(dtype), fmt).blocks, cq.quantize(x.astype(dtype).astype(F), fmt).blocks
        )
    np.testing.assert_array_equal(cq.quantize(x[:, ::-1, ::-1][..., ::-1], fmt).blocks, w.blocks[:, ::-1])


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_foreign_scales_that_are_not_finite_stay_in_their_row(bits: int) -> None:
    fmt = cq.KBit(2, absmax="float16")
    w = cq.quantize(np.ones((3, 64), F), fmt).blocks.copy()
    w.view(fmt.storage)["absmax"][1, 0] = np.uint16(bits).view(np.float16)
    y = np.ones((2, 64), F) @ cq.from_blocks(w, fmt, (3, 64)).T
    assert np.isfinite(y[:, [0, 2]]).all()
    assert not np.isfinite(y[:, 1]).any()


def test_a_model_is_evaluated_in_them(model: Any) -> None:
    tokens, fmt = rng().integers(3, 40, 130), cq.KBit(4, scale="decoded", absmax="float16")
    formats: list[str | cq.Format] = ["kbit5", "kbit4", "kbit3", "kbit2", fmt]
    result = cq.evaluate(model, tokens=tokens, formats=formats, ctx=64, device="cpu")
    assert [row.format for row in result.rows] == ["f16", *map(str, formats)]
    klds = [row.mean_kld or 0.0 for row in result.rows[:-1]]
    assert klds == sorted(klds)
    for row, chosen in zip(result.rows[1:], map(cq.formats.get, formats), strict=True):
        assert {error.format for error in row.tensors} == {chosen.name}
        assert {error.bits_per_weight for error in row.tensors} == {chosen.bits_per_weight}
    (alone,) = cq.evaluate(model, tokens=tokens, formats=fmt, ctx=64, device="cpu").rows[1:]
    assert alone == result.rows[-1]


# Tiles


@pytest.mark.parametrize("absmax", ["e4m4", "float16"])
@pytest.mark.parametrize("k", BITS)
def test_tiles_are_as_documented(k: int, absmax: Any) -> None:
    """[k tile][n tile][row][block][plane], padded with zeros, and back exactly."""
    fmt = cq.KBit(k, absmax=absmax)
    w = cq.quantize(rng().standard_normal((150, 224), F), fmt)
    records = w.blocks.view(fmt.storage)
    for tile_n, tile_k in ((128, 64), (64, 32), (16, 96)):
        packed, scales = cq.kbit_tiles(w, tile_n, tile_k)
        assert packed.shape == (-(-224 // tile_k), -(-150 // tile_n), tile_n, tile_k // 32, k)
        for n, block in ((0, 0), (149, 6), (64, 3), (17, 2)):
            at = (block * 32 // tile_k, n // tile_n, n % tile_n, block % (tile_k // 32))
            np.testing.assert_array_equal(packed[at], records["planes"][n, block])
            assert scales[at] == records["absmax"][n, block]
        assert not packed[-1, -1, 150 % tile_n or tile_n :].any()
        again = cq.kbit_from_tiles(packed, scales, fmt, (150, 224))
        np.testing.assert_array_equal(again.blocks, w.blocks)
        assert again.format == fmt


def test_tiles_of_no_rows() -> None:
    w = cq.quantize(np.ones((0, 96), F), "kbit3")
    packed, scales = cq.kbit_tiles(w)
    assert (packed.shape, scales.shape) == ((2, 0, 128, 2, 3), (2, 0, 128, 2))
    assert cq.kbit_from_tiles(packed, scales, cq.KBit(3), (0, 96)).shape == (0, 96)


def test_tiles_that_do_not_fit_are_refused() -> None:
    w = cq.quantize(rng().standard_normal((40, 64), F), "kbit3")
    packed, scales = cq.kbit_tiles(w)
    three, shape, name, extent = cq.KBit(3), (40, 64), cast(Any, "kbit3"), cast(Any, 64)
    for make, error, message in (
        (lambda: cq.kbit_tiles(cq.quantize(np.ones((4, 32), F), "q4_0")), TypeError, "format cuquant.KBit"),
        (lambda: cq.kbit_tiles(w, 128, 48), ValueError, "tile_k is 48; a positive multiple of 32 is needed"),
        (lambda: cq.kbit_tiles(w, 0), ValueError, "tile_n is 0"),
        (lambda: cq.kbit_from_tiles(packed, scales, name, shape), TypeError, "a cuquant.KBit is needed"),
        (lambda: cq.kbit_from_tiles(packed, scales, cq.KBit(4), shape), ValueError, "for packed 4 more"),
        (lambda: cq.kbit_from_tiles(packed, scales, three, extent), ValueError, "do not hold a weight"),
        (lambda: cq.kbit_from_tiles(packed, scales, three, (40, 48)), ValueError, "which has 48 elements"),
        (lambda: cq.kbit_from_tiles(packed, scales, three, (140, 64)), ValueError, "do not hold a weight"),
        (lambda: cq.kbit_from_tiles(packed.view(np.int32), scales, three, shape), TypeError, "int32"),
    ):
        with pytest.raises(error, match=message):
            make()
