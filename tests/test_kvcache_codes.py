"""Codes of keys and values, against their definition; the rotation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from scipy.linalg import hadamard
from test_kvcache import PACKED, F, Tokens, tokens

from cuquant import testing
from cuquant.kv import codes


def plain_codes(raw: bytes, bits: int, count: int) -> list[int]:
    """Codes of packed bytes, as one long little-endian number."""
    number = int.from_bytes(raw, "little")
    return [(number >> (bits * i) & (1 << bits) - 1) - (1 << bits - 1) for i in range(count)]


def test_packing_by_hand() -> None:
    """-4 .. 3 at 3 bits are stored as 0 .. 7, eight to three bytes, the first code in the lowest bits."""
    qx, scale = codes.encode(np.array([[-4, -3, -2, -1, 0, 1, 2, 3]], F), 3)
    assert scale.tolist() == [1]
    assert qx.tolist() == [[0b10_001_000, 0b1_100_011_0, 0b111_110_10]]
    assert codes.encode(np.array([[-8, 7, 1, -1] * 2], F), 4)[0].tolist() == [[0xF0, 0x79] * 2]
    assert codes.encode(np.array([[-2, -1, 0, 1] * 2], F), 2)[0].tolist() == [[0b11_10_01_00] * 2]
    assert codes.encode(np.array([[-128, 127, 0, 1] * 2], F), 8)[0].tolist() == [[-128, 127, 0, 1] * 2]


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e5, max_value=1e5)


@settings(deadline=None, max_examples=50)
@given(x=arrays(F, (3, 2, 16), elements=numbers), bits=st.sampled_from((8, *PACKED)))
def test_codes_as_defined(x: Tokens, bits: int) -> None:
    least = -(1 << (bits - 1))
    qx, scale = codes.encode(x, bits)
    assert qx.shape == (3, 2, codes.packed_dim(16, bits))
    assert scale.shape == (3, 2)
    assert [a.dtype for a in (qx, scale)] == [np.int8 if bits == 8 else np.uint8, np.float16]
    for index in np.ndindex(3, 2):
        row, raw = x[index], qx[index]
        q = raw.astype(int) if bits == 8 else np.array(plain_codes(raw.tobytes(), bits, 16))
        extreme = row[np.abs(row).argmax()]
        wanted = extreme / least
        step = float(scale[index])
        assert abs(wanted) <= abs(step) <= abs(wanted) * (1 + 2**-10) + 2**-24
        assert step * wanted >= 0
        decoded = q * step
        assert np.array_equal(codes.decode(qx, scale, bits)[index], decoded.astype(F))
        clipped = q == -1 - least
        rounding = 2.0**-141  # of the step of float32's smallest numbers
        assert (np.abs(decoded - row) <= abs(step) * np.where(clipped, 1.001, 0.501) + rounding).all()


def test_codes_of_16_bits_are_float16() -> None:
    x = tokens(3, 2, 16)[0]
    qx, scale = codes.encode(x, 16)
    assert scale.shape == (3, 0)
    assert np.array_equal(codes.decode(qx, scale, 16), x.astype(np.float16).astype(F))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("bits", [8, *PACKED])
def test_what_no_code_stands_for_is_nan_in_its_row(bad: float, bits: int) -> None:
    x = tokens(3, 2, 16)[0]
    x[1, 0, 5] = bad
    decoded = codes.decode(*codes.encode(x, bits), bits)
    assert np.isnan(decoded[1, 0]).all()
    decoded[1, 0] = 0
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1e-6, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("bits", [8, *PACKED])
def test_magnitudes(magnitude: float, bits: int) -> None:
    x = tokens(50, 2, 64)[0] * F(magnitude)
    error = testing.nmse(codes.decode(*codes.encode(x, bits), bits), x)
    assert error < {8: 2e-3, 4: 0.02, 3: 0.05, 2: 0.2}[bits] or magnitude < 1e-5


def test_rotation_is_hadamard_s() -> None:
    x = tokens(5, 2, 96)[0]
    matrix = hadamard(32) / np.sqrt(32)
    expected = (x.astype(float).reshape(5, 2, 3, 32) @ matrix).reshape(x.shape)
    assert np.allclose(codes.rotate(x), expected, atol=1e-6)
    assert np.allclose(codes.rotate(codes.rotate(x)), x, atol=1e-6)


@pytest.mark.parametrize("bits", codes.BITS)
def test_documented_limits_of_small_numbers(bits: int) -> None:
    """Scales are float16 numbers, at 16 bits the numbers: docs/formats/kv.md says which are lost."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(F)
    x /= np.abs(x).max(axis=-1, keepdims=True)

    def error(size: float) -> float:
        coded = codes.encode(x * F(size), bits)
        return testing.nmse(codes.decode(*coded, bits) / F(size), x)

    assert error(2.9e-8) == 1
    assert error(3.1e-8) < 1
    assert error(1e-5) < error(1) + 1e-3
    assert error(2e-7) > error(1) + 1e-3
