"""int4 weights of others' checkpoints: packed here a code at a time, as the layouts are published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cuquant as cq

F = np.float32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))


class Weight(NamedTuple):
    """Codes [N, K], zero points [N, G] and scales [N, G]."""

    q: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float16]

    @property
    def numbers(self) -> NDArray[np.float32]:
        group = self.q.shape[1] // self.zeros.shape[1]
        zeros, scales = (a.repeat(group, axis=1).astype(F) for a in (self.zeros, self.scales))
        return (self.q.astype(F) - zeros) * scales


def weight(n: int, k: int, group: int, zeros: tuple[int, int] = (0, 16), seed: int = 0) -> Weight:
    """A random one, of zero points in a range."""
    g = np.random.default_rng(seed)
    shape = n, k // group
    return Weight(
        g.integers(0, 16, (n, k), np.uint8),
        g.integers(*zeros, shape, np.uint8),
        g.standard_normal(shape).astype(np.float16),
    )


def words(codes: NDArray[np.uint8], axis: int, order: tuple[int, ...]) -> NDArray[np.int32]:
    """Eight codes along an axis to an int32: its i-th lowest nibble is code order[i] of the eight."""
    codes = codes.swapaxes(axis, -1).astype(np.int64)
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    packed = sum(eights[..., code] << 4 * i for i, code in enumerate(order))
    signed = np.asarray(packed, np.int64).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(signed.swapaxes(axis, -1))


def gptq(w: Weight, version: int = 1) -> dict[str, Any]:
    """As GPTQModel writes them: version 1 takes 1 off every zero point of a word at once."""
    return {
        "qweight": words(w.q.T, 0, IN_ORDER),
        "qzeros": words(w.zeros.T, 1, IN_ORDER) - np.int32(0x11111111 * (version == 1)),
        "scales": np.ascontiguousarray(w.scales.T),
    }


def awq(w: Weight) -> dict[str, Any]:
    return {
        "qweight": words(w.q.T, 1, AWQ_ORDER),
        "qzeros": words(w.zeros.T, 1, AWQ_ORDER),
        "scales": np.ascontiguousarray(w.scales.T),
    }


def assert_is(made: cq.QuantizedArray, w: Weight, *, symmetric: bool = False) -> None:
    """The same codes, scales and zero points, in a format of their group."""
    assert made.format == cq.Int4(w.q.shape[1] // w.zeros.shape[1], symmetric)
    codes, scales, zeros = cq.int4_parts(made)
    np.testing.assert_array_equal(np.stack([codes & 15, codes >> 4], axis=-1).reshape(w.q.shape), w.q)
    np.testing.assert_array_equal(scales.view(np.uint16), w.scales.view(np.uint16))
    if not symmetric:
        assert zeros is not None
        np.testing.assert_array_equal(zeros, w.zeros)
    np.testing.assert_array_equal(made.dequantize(), w.numbers)


def pack_quantized(w: Weight) -> dict[str, Any]:
    """As compressed-tensors writes them, with a zero point for each group."""
    return {
        "weight_packed": words(w.q, 1, IN_ORDER),
        "weight_scale": w.scales,
        "weight_zero_point": words(w.zeros, 0, IN_ORDER),
        "weight_shape": np.array(w.q.shape),
    }


SHAPES = [(8, 32, 32), (16, 128, 32), (24, 256, 128), (8, 192, 64), (8, 160, 160)]


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_gptq(n: int, k: int, group: int) -> None:
    one, two = weight(n, k, group), weight(n, k, group, seed=1)
    assert_is(cq.from_gptq(**gptq(one)), one)
    assert_is(cq.from_gptq(**gptq(two, 2), version=2), two)
    assert_is(cq.from_gptq(**gptq(one), g_idx=np.arange(k, dtype=np.int32) // group), one)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_awq(n: int, k: int, group: int) -> None:
    w = weight(n, k, group)
    assert_is(cq.from_awq(**awq(w)), w)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_pack_quantized(n: int, k: int, group: int) -> None:
    w, symmetric = weight(n, k, group), weight(n + 3, k, group, (8, 9), seed=1)
    assert_is(cq.from_pack_quantized(**pack_quantized(w)), w)
    for order in (np.arange(k) // group, np.full(k, -1)):
        assert_is(cq.from_pack_quantized(**pack_quantized(w), weight_g_idx=order.astype(np.int32)), w)
    packed = words(symmetric.q, 1, IN_ORDER)
    assert_is(cq.from_pack_quantized(packed, symmetric.scales), symmetric, symmetric=True)


def test_pack_quantized_by_hand() -> None:
    """Signed codes -8 to -1 of row 1 are stored 8 more: word [1, 0] is 0x76543210."""
    packed = np.full((2, 4), 0x88888888, np.uint32).view(np.int32)
    packed[1, 0] = 0x76543210
    w = cq.from_pack_quantized(packed, np.full((2, 1), 0.5, ml_dtypes.bfloat16)).dequantize()
    np.testing.assert_array_equal(w[1, :9], np.array([-8, -7, -6, -5, -4, -3, -2, -1, 0]) / 2)
    np.testing.assert_array_equal(w[0], np.zeros(32))


def test_scales_of_pack_quantized_become_float16() -> None:
    """Those of bfloat16 are the same numbers, but for small ones, which are rounded."""
    packed = np.zeros((3, 4), np.int32)
    scales = np.array([[2.0**-14], [1.0078125], [2.0**-20 * 1.0078125]], ml_dtypes.bfloat16)
    found = cq.int4_parts(cq.from_pack_quantized(packed, scales))[1].astype(F)
    np.testing.assert_array_equal(found[:2], scales[:2].astype(F))
    assert found[2, 0] == 2.0**-20
    with pytest.raises(ValueError, match=r"weight_scale holds 65536\.0, which is beyond float16"):
        cq.from_pack_quantized(packed, np.full((3, 1), 65536, ml_dtypes.bfloat16))
    with pytest.raises(
        ValueError, match=r"^67% of weight_scale, as 1.0\d*e-08, are below 3e-8 and would be 0"
    ):
        cq.from_pack_quantized(packed, np.array([[1], [1e-8], [1e-8]], ml_dtypes.bfloat16))
    with np.errstate(all="raise"):
        assert not cq.from_pack_quantized(packed[:1], np.zeros((1, 1), F)).dequantize().any()
        cq.from_pack_quantized(packed[:2], scales[:2] * F(1e-3))
    with pytest.raises(ValueError, match=r"weight_scale holds 65520\.0, which is beyond float16"):
        cq.from_pack_quantized(packed, np.full((3, 1), 65520, F))
    kept = np.array([[65504], [np.inf], [np.nan]], F)
    np.testing.assert_array_equal(cq.int4_parts(cq.from_pack_quantized(packed, kept))[1], kept)


@pytest.mark.parametrize("make", [cq.from_gptq, cq.from_awq])
def test_scales_of_gptq_and_awq_become_float16(make: Callable[..., cq.QuantizedArray]) -> None:
    """As those of compressed-tensors do."""
    w = weight(8, 64, 32)
    given = gptq(w) if make is cq.from_gptq else awq(w)
    scales = np.full((2, 8), 1.0078125, ml_dtypes.bfloat16)
    scales[1] = 2.0**-20 * 1.0078125
    found = cq.int4_parts(make(**{**given, "scales": scales}))[1].astype(F)
    np.testing.assert_array_equal(found[:, 0], scales[0].astype(F))
    np.testing.assert_array_equal(found[:, 1], np.full(8, 2.0**-20))
    wide = given["scales"].astype(F)
    assert_is(make(**{**given, "scales": wide}), w)
    for dtype in (F, ml_dtypes.bfloat16):
        with pytest.raises(ValueError, match=r"scales holds 65536\.0, which is beyond float16 \(65504\)"):
            make(**{**given, "scales": np.full((2, 8), 65536, dtype)})


def test_gptq_by_hand() -> None:
    """Weights 0 to 7 of column 1 are codes 0 to 7: word [0, 1] is 0x76543210.

    Zero points 1 to 8 of the columns are stored minus 1: qzeros is 0x76543210 too, in version 2 0x87654321.
    """
    qweight = np.zeros((4, 8), np.int32)
    qweight[0, 1] = 0x76543210
    scales = np.full((1, 8), 0.5, np.float16)
    w = cq.from_gptq(qweight, np.array([[0x76543210]], np.int32), scales).dequantize()
    assert w.shape == (8, 32)
    np.testing.assert_array_equal(w[1, :9], (np.array([0, 1, 2, 3, 4, 5, 6, 7, 0]) - 2) / 2)
    np.testing.assert_array_equal(w[:, 31], -np.arange(1, 9) / 2)
    qzeros = np.array([[0x87654321]], np.uint32).view(np.int32)
    np.testing.assert_array_equal(cq.from_gptq(qweight, qzeros, scales, version=2).dequantize(), w)


def test_awq_by_hand() -> None:
    """Columns 0 to 7 of a row are codes 0 to 7: nibbles from the lowest are 0, 2, 4, 6, 1, 3, 5, 7."""
    qweight = np.zeros((32, 1), np.int32)
    qweight[3] = 0x75316420
    w = cq.from_awq(qweight, np.array([[0x75316420]], np.int32), np.ones((1, 8), np.float16)).dequantize()
    assert w.shape == (8, 32)
    np.testing.assert_array_equal(w[:, 3], np.zeros(8))
    np.testing.assert_array_equal(w[:, 4], -np.arange(8))


@pytest.mark.parametrize("code", range(16))
def test_every_code_at_every_place(code: int) -> None:
    """A word of eight equal zero points, and of codes that are all different from their neighbours."""
    q = ((np.arange(64)[:, None] + np.arange(16) + code) % 16).astype(np.uint8).T
    w = Weight(q, np.full((16, 2), code, np.uint8), np.ones((16, 2), np.float16))
    assert_is(cq.from_awq(**awq(w)), w, symmetric=code == 8)
    assert_is(cq.from_gptq(**gptq(w, 2), version=2), w, symmetric=code == 8)


def test_zero_points_of_8_make_a_symmetric_weight() -> None:
    w = weight(16, 128, 64, (8, 9))
    for made in (cq.from_gptq(**gptq(w)), cq.from_gptq(**gptq(w, 2), version=2), cq.from_awq(**awq(w))):
        assert_is(made, w, symmetric=True)
    w.zeros[15, 1] = 9
    assert_is(cq.from_awq(**awq(w)), w)


def test_version_1_stores_a_zero_point_of_0_as_15_and_borrows_from_the_next() -> None:
    scales, qweight = np.ones((1, 8), np.float16), np.zeros((4, 8), np.int32)
    qzeros = np.array([[0x7777776F]], np.int32)
    w = cq.from_gptq(qweight, qzeros, scales)
    np.testing.assert_array_equal(cq.int4_parts(w)[2], np.array([[0, 8, 8, 8, 8, 8, 8, 8]]).T)


def test_products() -> None:
    w = weight(16, 128, 64)
    x = np.random.default_rng(1).standard_normal((3, 128), F)
    np.testing.assert_allclose(x @ cq.from_awq(**awq(w)).T, x @ w.numbers.T, rtol=1e-5, atol=1e-4)


# Refused


@pytest.mark.parametrize("order", [np.arange(128)[::-1] // 32, np.arange(128) % 4, np.zeros(128, int)])
def test_refuses_permuted_weights(order: NDArray[np.integer[Any]]) -> None:
    at = int((order != np.arange(128) // 32).argmax())
    with pytest.raises(
        ValueError, match=rf"g_idx puts weight {at} into .*\(act-order, desc_act\) cannot be read"
    ):
        cq.from_gptq(**gptq(weight(8, 128, 32)), g_idx=order)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"qweight": np.zeros((16, 8), np.int64)}, TypeError, "qweight has dtype int64; int32 is needed"),
        ({"qzeros": np.zeros((4, 1), F)}, TypeError, "qzeros has dtype float32; int32 is needed"),
        (
            {"scales": np.zeros((4, 8))},
            TypeError,
            "scales has dtype float64; float16, bfloat16 or float32 is needed",
        ),
        ({"scales": [[1.0]]}, TypeError, "scales is a list; .* array of floats is needed"),
        (
            {"qweight": np.zeros((32, 8), np.int32).T},
            ValueError,
            r"qweight \(8, 32\), qzeros \(4, 1\) and scales",
        ),
        (
            {"qweight": np.zeros(16, np.int32)},
            ValueError,
            r"are not codes of 4 bits in words: \(K / 8, N\), ",
        ),
        ({"qweight": np.zeros((0, 8), np.int32)}, ValueError, "0 weights along K are not 4 groups"),
        ({"qzeros": np.zeros((4, 2), np.int32)}, ValueError, "are not codes of 4 bits"),  # 8 bits
        ({"qzeros": np.zeros((5, 1), np.int32)}, ValueError, "are not codes of 4 bits"),
        ({"qweight": np.zeros((15, 8), np.int32)}, ValueError, "group_size is 30; allowed are 32"),
        ({"qweight": np.zeros((17, 8), np.int32)}, ValueError, "group_size is 34; allowed are 32"),
        (
            {"scales": np.zeros((3, 8), np.float16), "qzeros": np.zeros((3, 1), np.int32)},
            ValueError,
            "128 weights along K are not 3 groups of one size",
        ),
        ({"version": 3}, ValueError, "version is 3; allowed are 1 and 2"),
        ({"version": np.array([1, 2])}, TypeError, "version is an ndarray; allowed are 1 and 2"),
        ({"g_idx": np.zeros(64, np.int32)}, ValueError, r"g_idx has shape \(64,\); there are 128 weights"),
        ({"g_idx": np.zeros(128, F)}, TypeError, "g_idx has dtype float32; groups are numbered by integers"),
    ],
)
def test_refuses_gptq(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.from_gptq(**{**gptq(weight(8, 128, 32)), **change})


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_refuses_codes_of_other_bits(bits: int, version: int) -> None:
    """Their shapes say so: zero points have `bits` / 32 words for each of N, whatever is said of them."""
    n, k, group_count = 64, 256, 4
    qzeros = np.zeros((group_count, n * bits // 32), np.int32)
    scales = np.ones((group_count, n), np.float16)
    along_k, along_n = np.zeros((k * bits // 32, n), np.int32), np.zeros((k, n * bits // 32), np.int32)
    with pytest.raises(ValueError, match=r"are not codes of 4 bits in words: \(K / 8, N\)"):
        cq.from_gptq(along_k, qzeros, scales, version=version)
    with pytest.raises(ValueError, match=r"are not codes of 4 bits in words: \(K, N / 8\)"):
        cq.from_awq(along_n, qzeros, scales)


def test_refuses_awq() -> None:
    given = awq(weight(16, 128, 32))
    with pytest.raises(ValueError, match=r"are not codes of 4 bits in words: \(K, N / 8\), \(G, N / 8\) and"):
        cq.from_awq(given["qweight"].T, given["qzeros"], given["scales"])
    with pytest.raises(TypeError, match="qweight has dtype int16"):
        cq.from_awq(given["qweight"].astype(np.int16), given["qzeros"], given["scales"])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"weight_packed": np.zeros((16, 16), np.uint8)},
            TypeError,
            "weight_packed has dtype uint8; int32 is",
        ),
        (
            {"weight_scale": np.ones((16, 4))},
            TypeError,
            "weight_scale has dtype float64; float16, bfloat16 or",
        ),
        (
            {"weight_scale": np.ones((8, 4), F)},
            ValueError,
            r"weight_packed \(16, 16\) and weight_scale \(8, 4\)",
        ),
        (
            {"weight_scale": np.ones((16, 3), F), "weight_zero_point": None},
            ValueError,
            "128 weights along K are not 3 groups",
        ),
        ({"weight_scale": np.ones((16, 8), F)}, ValueError, "weight_zero_point has shape .* it is "),
        (
            {"weight_zero_point": np.zeros((16, 4), np.int32)},
            ValueError,
            r"it is \(2, 4\), eight of N in a word",
        ),
        (
            {"weight_shape": np.array([16, 120])},
            ValueError,
            r"weight_shape is \(16, 120\); .* of 4 bits$",
        ),
        ({"weight_shape": np.array([16, 0])}, ValueError, r"weight_shape is \(16, 0\); .* of 4 bits$"),
        ({"weight_shape": np.array([16, 64])}, ValueError, "codes of 8 bits cannot be read"),
        (
            {"weight_shape": np.array([16, np.inf])},
            TypeError,
            "weight_shape has dtype float64; integers are needed",
        ),
        ({"weight_g_idx": np.arange(128)[::-1] // 32}, ValueError, "weight_g_idx puts weight 0 into group 3"),
        ({"weight_g_idx": np.zeros(64, int)}, ValueError, r"weight_g_idx has shape \(64,\); there are 128"),
    ],
)
def test_refuses_pack_quantized(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.from_pack_quantized(**{**pack_quantized(weight(16, 128, 32)), **change})
