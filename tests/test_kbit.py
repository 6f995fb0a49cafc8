"""The k-bit formats: by hand, and against scalar loops in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing

pytestmark = pytest.mark.filterwarnings("ignore:.* of the weights are too small")
F = np.float32
BITS = (2, 3, 4, 5)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"scale": "decoded"},
    {"absmax": "float16"},
    {"scale": "decoded", "absmax": "float16"},
]
UNIT = np.array([0xB0], np.uint8)
"""E4M4 of 1."""
NF4 = np.array(
    [
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453],
        [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0],
        [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224],
        [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    ],
    F,
).reshape(16)
"""The table that QLoRA published: the same idea, but with an entry at 0 and so not symmetric."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sqnr_db(y: Any, x: NDArray[Any]) -> float:
    return -10 * float(np.log10(testing.nmse(y, x)))


# Storage


def test_storage_by_hand() -> None:
    """Peak 2, so the scale is 0xC0; v is x / 2 against the codebook -1, -0.5, 0.25, 1.

    Weights 0 to 5 are -2, -1, 0.5, 2, -0.25 (in the middle of -0.5 and 0.25: the lower), -0.2498 (above it),
    with indices 0, 1, 2, 3, 1, 2; the others are 1.3, v = 0.65 above the middle 0.625, index 3. Plane 0 has
    bits 0 1 0 1 1 0 from bit 0 on, then ones: 0xFFFFFFDA; plane 1 has 0 0 1 1 0 1: 0xFFFFFFEC.
    """
    fmt = cq.KBit(2, [-1, -0.5, 0.25, 1])
    x = np.full(32, 1.3, F)
    x[:6] = -2, -1, 0.5, 2, -0.25, -0.2498
    w = cq.quantize(x, fmt)
    assert w.blocks.tobytes() == bytes.fromhex("DAFFFFFF ECFFFFFF C0")
    expected = np.full(32, 2, F)
    expected[:6] = -2, -1, 0.5, 2, -1, 0.5
    np.testing.assert_array_equal(w.dequantize(), expected)
    halves = cq.quantize(x, cq.KBit(2, [-1, -0.5, 0.25, 1], absmax="float16"))
    assert halves.blocks.tobytes() == bytes.fromhex("DAFFFFFF ECFFFFFF 0040")
    np.testing.assert_array_equal(halves.dequantize(), expected)


def test_bit_planes_by_hand() -> None:
    """One weight of index 31 at place 9, of index 16 at place 31, all others of index 0."""
    words = [1 << 9] * 4 + [1 << 9 | 1 << 31]
    raw = np.concatenate([np.array(words, "<u4").view(np.uint8), UNIT])
    expected = np.full(32, -1, F)
    expected[9], expected[31] = 1, cq.normal_float_codebook(5)[16]
    w = cq.from_blocks(raw, "kbit5", (32,))
    np.testing.assert_array_equal(w.dequantize(), expected)
    np.testing.assert_array_equal(cq.quantize(expected, "kbit5").blocks, raw)


@pytest.mark.parametrize("k", BITS)
def test_every_index_at_every_place(k: int) -> None:
    """Reading takes the entry of each index, and quantizing that goes back to the same bytes."""
    c = cq.normal_float_codebook(k)
    q = (np.arange(32)[:, None] + np.arange(32)) % 2**k  # every index stands at every place
    q = np.concatenate([q, rng().permuted(q, axis=1)])
    planes = [np.packbits(q >> p & 1, axis=1, bitorder="little") for p in range(k)]
    raw = np.concatenate([*planes, np.tile(UNIT, (len(q), 1))], axis=1)
    w = cq.from_blocks(raw, f"kbit{k}", (len(q), 32))
    np.testing.assert_array_equal(w.dequantize(), c[q])
    np.testing.assert_array_equal(cq.quantize(c[q], f"kbit{k}").blocks, raw)


@pytest.mark.parametrize("k", BITS)
def test_every_scale(k: int) -> None:
    """All 256 E4M4 scales, times every entry, in float32."""
    raw = rng().integers(0, 256, (256, 4 * k + 1), np.uint8)
    raw[:, -1] = np.arange(256)
    bits = np.unpackbits(raw[:, :-1], axis=1, bitorder="little").reshape(256, k, 32)
    q = (bits.astype(int) << np.arange(k)[:, None]).sum(axis=1)
    expected = cq.normal_float_codebook(k)[q] * cq.e4m4_decode(raw[:, -1:])
    np.testing.assert_array_equal(cq.from_blocks(raw, f"kbit{k}", (256, 32)).dequantize(), expected)


# Quantizing, as defined


def reference_block(fmt: cq.KBit, x: NDArray[np.float32]) -> bytes:
    """The docstring's steps, a scalar at a time; the nearest entry in exact fractions."""
    a = max(abs(v) for v in x)
    if fmt.absmax == "float16":
        stored = np.float16(a).tobytes()
        number = F(np.float16(a))
    else:
        table = [Fraction(float(v)) for v in cq.e4m4_decode(np.arange(256, dtype=np.uint8))]
        code = min(range(256), key=lambda c: (abs(table[c] - Fraction(float(a))), c % 2))
        stored, number = bytes([code]), F(float(table[code]))
    d = max(a if fmt.scale == "absmax" else number, F(1e-8))
    entries = [Fraction(float(c)) for c in fmt.codebook]
    words = [0] * fmt.bits
    for j, value in enumerate(x):
        v = F(value) / d
        exact = Fraction(0 if abs(v) < 2**-99 else float(v))
        nearest = min(entries, key=lambda c: abs(c - exact))  # ascending: the lower one of two
        q = entries.index(nearest) + (entries.count(nearest) - 1 if exact > nearest else 0)
        for p in range(fmt.bits):
            words[p] |= (q >> p & 1) << j
    return b"".join(w.to_bytes(4, "little") for w in words) + stored


CASES: dict[str, NDArray[np.float32]] = {
    "gauss": rng(1).standard_normal((8, 64), F),
    "uniform": rng(2).uniform(-0.3, 0.5, (8, 64)).astype(F),
    "positive": np.abs(rng(3).standard_normal((4, 64), F)) + F(1),
    "tenths": (rng(4).integers(-10, 11, (8, 64)) / 10).astype(F),
    "constant": np.full((2, 32), F(-0.3)),
    "zeros": np.zeros((1, 32), F),
    "minus zeros": np.full((1, 32), F(-0.0)),
    "any exponent": (rng(5).integers(0, 2**32, (16, 64), np.uint32) & 0xBFFFFFFF).view(F),
    "subnormal scale": rng(6).standard_normal((8, 64), F) * F(2**-13),
    "around the smallest scale": rng(7).standard_normal((8, 64), F) * F(2**-16),
    "tiny": rng(8).standard_normal((4, 64), F) * F(1e-8),
    "subnormal": rng(9).standard_normal((2, 64), F) * F(1e-40),
    "large": rng(10).uniform(-31.5, 31.5, (4, 64)).astype(F),
}
OWN = [
    NF4,
    np.linspace(0, 1, 8, dtype=F),
    np.linspace(-1, -0.25, 8, dtype=F),
    np.array([-1, -0.1, -0.1, 1 / 3], F),
    np.array([0, 0, 0, 0], F),
    np.array([-1e-40, 1e-35, 1e-3, 1], F),
    np.sort(rng(11).uniform(-1, 1, 32)).astype(F),
]
FORMATS = [cq.KBit(k, **v) for k in BITS for v in VARIANTS] + [cq.KBit(int(np.log2(len(c))), c) for c in OWN]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_quantize_as_the_definition(fmt: cq.KBit, case: str) -> None:
    expected = b"".join(reference_block(fmt, block) for block in CASES[case].reshape(-1, 32))
    assert cq.quantize(CASES[case], fmt).blocks.tobytes() == expected


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ties_and_their_neighbours(fmt: cq.KBit) -> None:
    """Weights in the middle of two entries, as near as float32 comes, in blocks of peak 1."""
    middle = fmt.thresholds[np.arange(31) % len(fmt.thresholds)]
    for x in (middle, np.nextafter(middle, F(-1)), np.nextafter(middle, F(1))):
        block = np.append(x, F(1))
        assert cq.quantize(block, fmt).blocks.tobytes() == reference_block(fmt, block)


def test_a_tie_goes_to_the_lower_entry() -> None:
    """0 is the middle of a symmetric codebook: zeros beside a peak become its largest negative entry."""
    block = np.zeros(32, F)
    block[3] = 1
    w = cq.quantize(block, "kbit2").dequantize()
    expected = np.full(32, cq.normal_float_codebook(2)[1], F)
    expected[3] = 1
    np.testing.assert_array_equal(w, expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_zeros_and_tiny_blocks_read_as_zero(fmt: cq.KBit) -> None:
    for peak in (0, 1e-45, 1e-30, 1e-8, 2**-26):
        x = np.full((1, 32), peak, F)
        x[0, ::2] *= -1
        np.testing.assert_array_equal(cq.quantize(x, fmt).dequantize(), np.zeros((1, 32)))


def test_the_largest_weights() -> None:
    x = np.zeros((40_001, 64), F)  # more than one slab
    x[40_000, 40] = -31.5
    np.testing.assert_array_equal(cq.quantize(x[40_000:], "kbit4").dequantize()[0, 40], -31)
    x[40_000, 40] = np.nextafter(F(-31.5), F(-32))
    message = r'kbit4: a weight of magnitude 31.50.* in row 40000 is beyond 31.5, .*absmax="float16"'
    with pytest.raises(ValueError, match=message):
        cq.quantize(x, "kbit4")
    wide = cq.KBit(4, absmax="float16")
    for peak in (31.6, 65504, np.nextafter(F(65520), F(0))):
        x[40_000, 40] = -peak
        assert cq.quantize(x[40_000:], wide).dequantize()[0, 40] == -F(np.float16(peak))
    x[40_000, 40] = 65520
    with pytest.raises(
        ValueError, match="kbit4-float16: the scale 'absmax' of a block in row 40000 overflows"
    ):
        cq.quantize(x, wide)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", [cq.KBit(2), cq.KBit(5, absmax="float16")], ids=str)
def test_refuses_what_is_not_finite(fmt: cq.KBit, bad: float) -> None:
    x = np.zeros((3, 4, 32), F)
    x[2, 1, 7] = bad
    with pytest.raises(ValueError, match=rf"{bad} in row \(2, 1\): weights must be finite"):
        cq.quantize(x, fmt)


def test_refuses_partial_blocks() -> None:
    with pytest.raises(ValueError, match=r"kbit3 stores blocks of 32 .* which has 48 elements"):
        cq.quantize(np.zeros((2, 48), F), "kbit3")
