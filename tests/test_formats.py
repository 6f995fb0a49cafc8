"""Formats against the gguf package, against scalar loops written from the definition, and by hand."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from formats_table import (
    ACTIVATIONS,
    CODEBOOKS,
    FLOATS,
    FP4,
    INT4,
    K_QUANTS,
    NAMES,
    OWN,
    TRELLIS,
    WEIGHTS,
    Row,
    random_blocks,
)
from gguf_files import assert_reads_as_gguf
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from synthetic import Spec, write

import cuquant as cq
from cuquant.testing import nmse

pytestmark = pytest.mark.filterwarnings("ignore:.* of the weights are too small")

ROOT = Path(__file__).parent.parent
F = np.float32


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("row", WEIGHTS + ACTIVATIONS, ids=lambda row: row.name)
def test_table(row: Row) -> None:
    fmt = cq.formats.get(row.name)
    assert (fmt.name, fmt.block_bytes, fmt.ggml_type) == row[:3]
    assert fmt.block_size == 32
    assert fmt.bits_per_weight == row.block_bytes * 8 / 32
    assert cq.formats.by_ggml_type(row.ggml_type) is fmt
    assert fmt == row.name
    assert hash(fmt) == hash(row.name)
    assert cq.formats.get(row.name.upper()) is fmt
    x = rng().standard_normal((64, 1024), F)
    assert -10 * np.log10(nmse(cq.quantize(x, row.name), x)) > row.sqnr_db


def test_names_are_those_of_the_table() -> None:
    rows = {row.name for row in WEIGHTS + FP4 + K_QUANTS + ACTIVATIONS}
    assert set(cq.formats.names()) == rows | set(CODEBOOKS) | set(INT4) | set(TRELLIS) | set(OWN)


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_random_bytes_as_gguf(name: str) -> None:
    assert np.isnan(assert_reads_as_gguf(name)).any()


@cache
def weights_to_quantize() -> dict[str, NDArray[Any]]:
    g = rng(1)
    gauss = g.standard_normal((16, 256), F)
    bits = g.integers(0, 2**32, (16, 256), np.uint32)
    outlier = gauss * F(1e-3)
    outlier[:, 7] = F(100)
    grid = (g.integers(-8, 8, (16, 256)) / 4).astype(F)  # codes that fall on boundaries
    return {
        "gauss": gauss,
        "uniform": g.uniform(-3, 5, (16, 256)).astype(F),
        "positive": np.abs(gauss) + F(1),
        "negative": -np.abs(gauss) - F(1),
        "outlier": outlier,
        "grid": grid,
        "half grid": grid + F(0.125),
        "any exponent": (bits & 0xBFFFFFFF).view(F),  # magnitudes from 1e-45 to 2
        "constant": np.full((4, 256), F(0.3)),
        "negative constant": np.full((4, 256), F(-0.3)),
        "zeros": np.zeros((4, 256), F),
        "minus zeros": np.full((4, 256), F(-0.0)),
        "signed zeros": np.where(g.random((4, 256)) < 0.5, F(0), F(-0.0)),
        "tiny": gauss * F(1e-30),
        "subnormal scale": gauss * F(2e-38),
        "subnormal": gauss * F(1e-40),
        "large": gauss / np.abs(gauss).max() * F(60000),
    }


def assert_as_the_definition(x: NDArray[np.float32], name: str) -> None:
    expected = b"".join(reference_block(name, block) for block in x.reshape(-1, 32))
    assert cq.quantize(x, name).blocks.tobytes() == expected


@pytest.mark.parametrize("name", [*NAMES, "q8_1"])
@pytest.mark.parametrize("case", weights_to_quantize())
def test_quantize_as_the_definition(name: str, case: str) -> None:
    assert_as_the_definition(weights_to_quantize()[case], name)


LEVELS = {"q4_0": (-8, 7), "q4_1": (0, 15), "q5_0": (-16, 15), "q5_1": (0, 31), "q8_0": (-127, 127)}
"""Smallest and largest code, as a multiple of the scale."""


@pytest.mark.parametrize("step", [F(1), F(2**-10), F(-1)])
@pytest.mark.parametrize("name", LEVELS)
def test_quantize_halfway_between_codes(name: str, step: np.float32) -> None:
    """Weights (q + 1/2) * step, where step is the scale, and their float32 neighbours on both sides."""
    low, high = LEVELS[name]
    x = (rng(4).integers(2 * low, 2 * high + 1, (50, 32)) / 2).astype(F)
    x[:, 3], x[:, 20] = low, high
    for neighbour in (x, np.nextafter(x, F(-np.inf)), np.nextafter(x, F(np.inf))):
        neighbour[:, [3, 20]] = low, high
        assert_as_the_definition(neighbour * step, name)


GGUF_DEPARTS = {"minus zeros", "signed zeros", "any exponent", "subnormal scale", "subnormal"}
"""Where gguf is not llama.cpp's reference: the sign of a zero scale, and codes of an infinite 1 / d."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", sorted(weights_to_quantize().keys() - GGUF_DEPARTS))
def test_quantize_as_gguf(name: str, case: str) -> None:
    x = weights_to_quantize()[case]
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(cq.quantize(x, name).blocks, expected)


def reference_block(name: str, x: NDArray[np.float32]) -> bytes:
    """llama.cpp's reference quantizer of one block, a scalar at a time, every operation in float32."""
    bits, kind = int(name[1]), name[-1]
    with np.errstate(all="ignore"):
        if bits == 8:
            d = F(max(abs(v) for v in x)) / F(127)
            inverse = safe_inverse(d)
            codes = [half_away(float(v * inverse)) for v in x]
            s = np.float16(F(sum(codes)) * d).tobytes() if name == "q8_1" else b""
            return np.float16(d).tobytes() + s + np.array(codes, np.int8).tobytes()
        top = 2**bits - 1
        if kind == "0":
            amax, peak = F(0), F(0)
            for v in x:
                if amax < abs(v):
                    amax, peak = abs(v), v
            d = peak / F(-(2 ** (bits - 1)))
            inverse = safe_inverse(d)
            codes = [min(top, int(v * inverse + F(2 ** (bits - 1) + 0.5))) for v in x]
            head = np.float16(d).tobytes()
        else:
            low = high = x[0]
            for v in x:
                low = v if v < low else low
                high = v if v > high else high
            d = (high - low) / F(top)
            inverse = safe_inverse(d)
            codes = [min(top, int((v - low) * inverse + F(0.5))) for v in x]
            head = np.float16(d).tobytes() + np.float16(low).tobytes()
    fifth = sum((c >> 4) << j for j, c in enumerate(codes)).to_bytes(4, "little") if bits == 5 else b""
    return head + fifth + bytes((codes[j] & 15) | (codes[j + 16] & 15) << 4 for j in range(16))


def safe_inverse(d: np.float32) -> np.float32:
    """1 / d; 0 where C's conversion of what follows would be undefined (the stored scale is 0 there)."""
    inverse = F(1) / d
    return inverse if np.isfinite(inverse) else F(0)


def half_away(value: float) -> int:
    """roundf, in the wider type where adding a half is exact."""
    return int(abs(value) + 0.5) * (-1 if value < 0 else 1)


def test_q8_1_by_hand() -> None:
    """Block of 0, 1, ..., 31: d = 31/127, code of v is round(v * 127 / 31), s = half(sum(codes) * d).

    31/127 = 0.24409449 in float32, as float16 0.2441406 = 0x33D0. The codes are 4.0968 v rounded; they sum to
    2032 (496 * 127 / 31 exactly; the roundings cancel), so s = 2032 * 0.24409449 = 496 = 0x5FC0, while the
    rounded d would give 496.09 = 0x5FC0 too. Halving the scale of the second block's numbers halves d and s.
    """
    codes = [0, 4, 8, 12, 16, 20, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61]
    codes += [66, 70, 74, 78, 82, 86, 90, 94, 98, 102, 107, 111, 115, 119, 123, 127]
    assert sum(codes) == 2032
    first = bytes([0xD0, 0x33, 0xC0, 0x5F, *codes])
    second = bytes([0xD0, 0x2F, 0xC0, 0x5B, *codes])
    x = np.concatenate([np.arange(32, dtype=F), np.arange(32, dtype=F) / 2])
    assert cq.quantize(x, "q8_1").blocks.tobytes() == first + second


def test_q8_1_by_hand_with_signs_and_ties() -> None:
    """Peak -127, so d = 1 = 0x3C00, and halves round away from zero: 0.5, -0.5, 2.5, -2.5 to 1, -1, 3, -3.

    The codes sum to -127, so s = -127 = 0xD7F0.
    """
    x = np.zeros(32, F)
    x[:6] = -127, 0.5, -0.5, 2.5, -2.5, 0.49999997
    expected = bytes([0x00, 0x3C, 0xF0, 0xD7, 0x81, 0x01, 0xFF, 0x03, 0xFD]) + bytes(27)
    assert cq.quantize(x, "q8_1").blocks.tobytes() == expected


def test_q8_1_sum_uses_the_scale_before_its_rounding() -> None:
    """32 times 1000.3: s = 32 * 127 * (1000.3 / 127) = 32009.6, rounded to a multiple of 16: 32016.

    With the scale as stored, 7.875, it would be 32004, rounded 32000.
    """
    record = cq.quantize(np.full(32, 1000.3, F), "q8_1").blocks.view(cq.formats.get("q8_1").storage)[0]
    assert record["d"] == np.float16(7.875)
    assert record["s"] == np.float16(32016)


def test_q8_1_propagates_what_is_not_finite() -> None:
    x = rng().standard_normal((4, 64), F)
    expected = cq.quantize(x, "q8_1").dequantize()
    x[1, 3], x[2, 40], x[3, 0] = np.nan, -np.inf, 127 * 65520  # the last one's scale overflows float16
    got = cq.quantize(x, "q8_1").dequantize()
    assert np.isnan(got[1, :32]).all()
    assert np.isnan(got[2, 32:]).all()
    assert not np.isfinite(got[3, :32]).any()
    touched = np.zeros((4, 64), bool)
    touched[1, :32] = touched[2, 32:] = touched[3, :32] = True
    np.testing.assert_array_equal(got[~touched], expected[~touched])


def test_q8_1_sum_may_overflow() -> None:
    record = cq.quantize(np.full(32, 60000, F), "q8_1").blocks.view(cq.formats.get("q8_1").storage)[0]
    assert np.isinf(record["s"])
    assert np.isfinite(record["d"])


@pytest.mark.parametrize("name", [*NAMES, "q8_1"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides_and_leading_axes(name: str, dtype: np.dtype[Any]) -> None:
    x = rng(2).standard_normal((3, 5, 128), F).astype(dtype)
    expected = cq.quantize(x.astype(F), name).blocks
    assert expected.shape == (3, 5, cq.formats.get(name).row_bytes(128))
    wide = np.zeros((3, 5, 256), dtype)
    wide[..., ::2] = x
    variants = {
        "as is": x,
        "every other column": wide[..., ::2],
        "Fortran order": np.asfortranarray(x),
        "reversed twice": x[::-1, :, ::-1].copy()[::-1, :, ::-1],
        "transposed": np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    }
    for how, value in variants.items():
        np.testing.assert_array_equal(cq.quantize(value, name).blocks, expected, err_msg=how)
    broadcast = np.broadcast_to(x[:1], (4, 5, 128))
    np.testing.assert_array_equal(
        cq.quantize(broadcast, name).blocks, np.broadcast_to(expected[:1], (4, *expected.shape[1:]))
    )
    np.testing.assert_array_equal(cq.quantize(x[0, 0], name).blocks, expected[0, 0])
    assert cq.quantize(x[:0], name).shape == (0, 5, 128)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("index", "row"), [((5, 3), "5"), ((40_000, 63), "40000")])
def test_refuses_what_is_not_finite(name: str, bad: float, index: tuple[int, int], row: str) -> None:
    x = np.zeros((40_001, 64), F)  # more than one slab
    x[index] = bad
    with pytest.raises(ValueError, match=rf"{bad} in row {row}: weights must be finite"):
        cq.quantize(x, name)
    with pytest.raises(ValueError, match=f"{bad} in row 0: weights must be finite"):
        cq.quantize(x[index[0]], name)  # a vector's only one


def test_names_the_row_of_a_stack() -> None:
    x = np.zeros((3, 4, 32), F)
    x[2, 1, 0] = np.nan
    with pytest.raises(ValueError, match=r"row \(2, 1\)"):
        cq.quantize(x, "q4_0")


OVERFLOW = F(65520)
"""Halfway from float16's largest to the next power of two: the least that rounds to infinity."""


@pytest.mark.parametrize(
    ("name", "levels"), [("q4_0", 8), ("q4_0", -8), ("q5_0", -16), ("q8_0", 127), ("q4_1", 15), ("q5_1", 31)]
)
def test_scales_up_to_the_largest_float16(name: str, levels: int) -> None:
    x = np.zeros((40_001, 64), F)  # more than one slab
    x[40_000, 40] = OVERFLOW * F(levels)
    message = (
        f"{name}: the scale 'd' of a block in row 40000 overflows float16 .*; scales of mxfp4 and trellis4"
    )
    with pytest.raises(ValueError, match=message):
        cq.quantize(x, name)
    x[40_000, 40] = np.nextafter(x[40_000, 40], F(0))
    assert_as_the_definition(x[40_000:], name)


@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
def test_minimums_up_to_the_largest_float16(name: str) -> None:
    x = np.full((3, 64), -OVERFLOW, F)
    x[:2] = np.nextafter(-OVERFLOW, F(0))
    with pytest.raises(ValueError, match="the scale 'm' of a block in row 2 overflows float16"):
        cq.quantize(x, name)
    assert_as_the_definition(x[:2], name)


@pytest.mark.parametrize("k", [0, 1, 31, 33, 48])
def test_refuses_partial_blocks(k: int) -> None:
    with pytest.raises(ValueError, match=f"which has {k} elements .*positive multiple of 32"):
        cq.quantize(np.zeros((2, k), F), "q8_0")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.zeros((2, 32)), "x has dtype float64"),
        (np.zeros((2, 32), np.int8), "x has dtype int8"),
        ([[0.0] * 32], "x is a list"),
        (np.ma.masked_array(np.zeros(32, F)), "masked array"),
        (np.uint8(1), "x is a scalar of uint8; a NumPy"),
        (None, "x is None; a NumPy"),
        (cq.quantize(np.zeros((2, 32), F), "q4_0").T, r"x is a Transposed; .*: its \.dequantize\(\) is one$"),
    ],
)
def test_refuses_other_things(value: Any, error: str) -> None:
    with pytest.raises(TypeError, match=error):
        cq.quantize(value, "q4_0")


def test_refuses_scalars() -> None:
    with pytest.raises(ValueError, match="x is a scalar; q4_0 needs an array of at least one axis"):
        cq.quantize(np.array(1, F), "q4_0")


def test_rows_of_no_whole_blocks_are_named() -> None:
    problem = (
        r"^x has shape \(2, 40\): q4_0 stores blocks of 32 .* has 40 elements .a positive multiple of 32"
    )
    with pytest.raises(ValueError, match=problem):
        cq.quantize(np.zeros((2, 40), F), "q4_0")


@pytest.mark.parametrize("name", NAMES)
def test_real_model_as_llama_quantize(name: str) -> None:
    expected = json.loads((ROOT / "tests/data/nano-llama-quantized-sha256.json").read_text())[name]
    model = {t.name: t.data for t in nano_llama().tensors}
    assert expected.keys() == model.keys()
    for tensor, (kind, digest) in expected.items():
        array = model[tensor] if kind == "F32" else cq.quantize(model[tensor], name).blocks
        assert hashlib.sha256(array.tobytes()).hexdigest() == digest, tensor


@cache
def nano_llama() -> gguf.GGUFReader:
    return gguf.GGUFReader(ROOT / "examples/data/nano-llama-f16.gguf")


@st.composite
def blocks_with_extreme_codes(draw: st.DrawFn, name: str) -> NDArray[np.uint8]:
    """A block of any codes among which the smallest and the largest occur, and of a scale that is not 0.

    The scale of q4_0 and q5_0 has either sign. A minimum is at most 1024 scales, so that float32 has the
    bits for d * q + m.
    """
    raw = np.frombuffer(draw(st.binary(min_size=32, max_size=32)), np.uint8)
    low, high = LEVELS[name]
    codes = low + raw.astype(np.int64) % (high - low + 1)
    codes[list(draw(st.permutations(range(32)))[:2])] = low, high
    d = draw(st.floats(2.0**-24, 65504, width=16))
    record = np.zeros(1, cq.formats.get(name).storage)
    record["d"] = -d if low < 0 and name != "q8_0" and draw(st.booleans()) else d
    if name.endswith("_1"):
        m = draw(st.floats(-1024, 1024, width=16)) * d
        record["m"] = np.clip(m, -65504, 65504) + 0.0  # no -0: d * 0 + -0 is 0
    if name == "q8_0":
        record["qs"] = codes
    else:
        codes = codes - low
        record["qs"] = (codes[:16] & 15) | (codes[16:] & 15) << 4
    if "qh" in (record.dtype.names or ()):
        record["qh"] = np.packbits(codes >> 4 != 0, bitorder="little")
    return record.view(np.uint8)


@pytest.mark.parametrize("name", LEVELS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_quantizing_what_was_quantized_changes_nothing(name: str, data: st.DataObject) -> None:
    """Weights that came from such a block go back to its bytes: no loss over generations of files."""
    raw = data.draw(blocks_with_extreme_codes(name))
    once = cq.from_blocks(raw, name, (32,)).dequantize()
    np.testing.assert_array_equal(cq.quantize(once, name).blocks, raw)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_dequantize_rounds_once(name: str, dtype: Any) -> None:
    w = cq.from_blocks(random_blocks(name, (8, 256), finite=True), name, (8, 256))
    np.testing.assert_array_equal(w.dequantize(dtype), w.dequantize().astype(dtype))
    assert w.dequantize(dtype).dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("f16", "float16"),
        ("F16", "float16"),
        ("bf16", "bfloat16"),
        ("f32", "float32"),
        ("BFloat16", "bfloat16"),
    ],
)
def test_floats_by_the_names_of_files(name: str, dtype: str, tmp_path: Path) -> None:
    """Everywhere: NumPy's own "f16" has 16 bytes, and is none of them."""
    w = cq.quantize(np.ones((32, 32), F), "q4_0")
    x = np.ones((1, 32), F)
    model = write(tmp_path / "m.gguf", Spec())
    with cq.open(model, "cpu") as opened:
        floats = opened.floats("token_embd.weight", name)
    for made in (w.dequantize(name), w.T.dequantize(name), cq.linear(x, w, dtype=name), floats):
        assert made.dtype == np.dtype(dtype)


def test_dequantize_to_other_types_is_refused() -> None:
    w = cq.quantize(np.zeros((1, 32), F), "q4_0")
    for dtype in ("float64", "int8", "nonsense"):
        with pytest.raises(TypeError, match="is not one of float16, bfloat16 or float32"):
            w.dequantize(dtype)
