"""int4: by hand, against scalar loops in exact fractions, and against its separate arrays."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats_table import FLOATS, INT4
from numpy.typing import NDArray
from products import assert_stack_products

import cuquant as cq
from cuquant import testing

pytestmark = pytest.mark.filterwarnings("ignore:.* of the weights are too small")

F = np.float32
FORMATS = [cq.Int4(group, symmetric) for symmetric in (True, False) for group in (32, 64, 128, 96, -1)]
CODES = np.arange(256, dtype=np.uint8)
"""All pairs of codes: one group of 512 weights."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def parts(
    shape: tuple[int, ...], group: int, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.uint8]]:
    """Random codes, scales of both signs, and zero points of a weight."""
    g = rng(seed)
    *lead, k = shape
    scales = g.standard_normal((*lead, k // group)).astype(np.float16)
    zeros = g.integers(0, 16, scales.shape, np.uint8)
    return g.integers(0, 256, (*lead, k // 2), np.uint8), scales, zeros


# The format as a thing


@pytest.mark.parametrize("name", INT4)
def test_facts(name: str) -> None:
    group, symmetric = int(name.split("-")[1]), not name.endswith("zeros")
    fmt = cq.formats.get(name)
    assert fmt == cq.Int4(group, symmetric) == name
    assert hash(fmt) == hash(name)
    assert (fmt.block_size, fmt.bits, fmt.block_bytes) == (group, 4, 2 + (not symmetric) + group // 2)
    assert fmt.bits_per_weight == 4 + (16 if symmetric else 24) / group
    assert fmt.ggml_type is None
    assert cq.Int4() == "int4-128"


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_repr_pickle_and_copies(fmt: cq.Int4) -> None:
    for other in (eval(repr(fmt), {"Int4": cq.Int4}), pickle.loads(pickle.dumps(fmt)), copy.deepcopy(fmt)):
        assert other == fmt
        assert (other.storage, other.group_size, other.symmetric) == (
            fmt.storage,
            fmt.group_size,
            fmt.symmetric,
        )
    assert len({str(f) for f in FORMATS}) == len(FORMATS)
    assert repr(cq.Int4(64, symmetric=False)) == "Int4(64, symmetric=False)"


@pytest.mark.parametrize("group", [0, -2, 1, 16, 48, True])
def test_refuses_other_groups(group: int) -> None:
    with pytest.raises(ValueError, match=f"group_size is {int(group)}; allowed are 32, 64, 128, other"):
        cq.Int4(group)


def test_refuses_groups_that_no_row_has() -> None:
    with pytest.raises(ValueError, match="group_size is 1099511627776; at most 2147483647 is allowed"):
        cq.Int4(2**40)


def test_refuses_parameters_of_other_types() -> None:
    with pytest.raises(TypeError, match="group_size is a float, not an integer"):
        cq.Int4(32.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="symmetric is a str; allowed are True and False"):
        cq.Int4(32, "no")  # type: ignore[arg-type]


# Storage


def test_storage_by_hand() -> None:
    """Peaks 3.5 and -4, so the scale is 0.5 = 0x3800; q = 2 x + 8. The nibbles of a byte are neighbours."""
    x = np.zeros(32, F)
    x[:6] = 3.5, -4, 0.5, -0.5, 0.74, 0.76
    w = cq.quantize(x, "int4-32")
    assert w.blocks.tobytes() == bytes([0x00, 0x38, 0x0F, 0x79, 0xA9, *[0x88] * 13])
    x[4:6] = 0.5, 1
    np.testing.assert_array_equal(w.dequantize(), x)


def test_storage_with_zeros_by_hand() -> None:
    """From -1 to 6.5: scale 0.5, zero point 2, q = 2 x + 2. Ties go to even numbers: 0.25 to 0, 0.75 to 1."""
    x = np.zeros(32, F)
    x[:6] = -1, 6.5, 0.25, 0.75, 3, -0.5
    w = cq.quantize(x, "int4-32-zeros")
    assert w.blocks.tobytes() == bytes([0x00, 0x38, 0x02, 0xF0, 0x42, 0x18, *[0x22] * 13])
    x[2:4] = 0, 1
    np.testing.assert_array_equal(w.dequantize(), x)


@pytest.mark.parametrize("group", [32, 128, 512])
def test_every_pair_of_codes(group: int) -> None:
    """Byte j of a row is codes 2 j and 2 j + 1, whatever the group: all bytes, with each zero point."""
    scales = np.array([1.5, -0.25, 2**-24, 65504], np.float16)
    q = np.stack([CODES & 15, CODES >> 4], axis=1).reshape(512).astype(F)
    codes = np.tile(CODES, (4, 1))
    count = 512 // group
    w = cq.int4_from_parts(codes, np.tile(scales[:, None], count))
    assert w.format == cq.Int4(group)
    np.testing.assert_array_equal(w.dequantize(), (q - 8) * scales.astype(F)[:, None])
    for zero in (0, 1, 7, 8, 15, 16, 255):
        zeros = np.full((4, count), min(zero, 15), np.uint8)
        w = cq.int4_from_parts(codes, np.tile(scales[:, None], count), zeros)
        assert w.format == cq.Int4(group, symmetric=False)
        records = w.blocks.copy().view(w.format.storage)
        records["zero"] = zero  # bytes of which no code is 0 have a meaning, too
        w = cq.from_blocks(records.view(np.uint8), w.format, w.shape)
        np.testing.assert_array_equal(w.dequantize(), (q - zero) * scales.astype(F)[:, None])


# Quantizing, as defined


def reference_group(x: NDArray[np.float32], symmetric: bool) -> tuple[np.float16, int, list[int]]:
    """Scale, zero point and codes by the docstring; quotients in exact fractions of float32's."""
    low, high = min(x), max(x)
    if symmetric:
        scale = np.float16(abs(max(high / F(7), low / F(-8))))
    else:
        low, high = min(low, F(0)), max(high, F(0))
        scale = np.float16((high - low) / F(15))
    step = F(scale)

    def code(value: np.float32, zero: int) -> int:
        quotient = Fraction(float(value / step)) if step else Fraction(0)
        return min(max(round(quotient) + zero, 0), 15)

    zero = 8 if symmetric else code(-low, 0)
    return scale, zero, [code(v, zero) for v in x]


CASES: dict[str, NDArray[np.float32]] = {
    "gauss": rng(1).standard_normal((4, 384), F),
    "uniform": rng(2).uniform(-0.3, 0.5, (4, 384)).astype(F),
    "positive": np.abs(rng(3).standard_normal((2, 384), F)) + F(1),
    "negative": -np.abs(rng(3).standard_normal((2, 384), F)) - F(1),
    "halves": (rng(4).integers(-16, 15, (8, 384)) / 2).astype(F),
    "constant": np.full((1, 384), F(-0.3)),
    "zeros": np.zeros((1, 384), F),
    "minus zeros": np.full((1, 384), F(-0.0)),
    "any exponent": (rng(5).integers(0, 2**32, (8, 384), np.uint32) & 0xBFFFFFFF).view(F),
    "subnormal scale": rng(6).standard_normal((4, 384), F) * F(2**-20),
    "around the smallest scale": rng(7).standard_normal((4, 384), F) * F(2**-22),
    "subnormal": rng(9).standard_normal((2, 384), F) * F(1e-40),
    "large": rng(10).uniform(-450000, 450000, (4, 384)).astype(F),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_quantize_as_the_definition(fmt: cq.Int4, case: str) -> None:
    x = CASES[case]
    w = cq.quantize(x, fmt)
    codes, scales, zeros = cq.int4_parts(w)
    group = 384 if fmt.group_size == -1 else fmt.group_size
    groups = [reference_group(g, fmt.symmetric) for g in x.reshape(-1, group)]
    np.testing.assert_array_equal(scales.ravel().view(np.uint16), [s.view(np.uint16) for s, _, _ in groups])
    q = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1, group)
    np.testing.assert_array_equal(q, [c for _, _, c in groups])
    assert (zeros is None) == fmt.symmetric
    if zeros is not None:
        np.testing.assert_array_equal(zeros.ravel(), [z for _, z, _ in groups])


@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1, 1e4])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_error_bound_of_every_group(fmt: cq.Int4, spread: float) -> None:
    """Half a step, plus what 15 rounded steps may lack or a rounded zero point shift; symmetric: 8 steps."""
    x = (rng().standard_normal((64, 384)) * spread).astype(F)
    w = cq.quantize(x, fmt)
    _, scales, zeros = cq.int4_parts(w)
    error = np.abs(w.dequantize().astype(np.float64) - x).reshape(*scales.shape, -1).max(axis=-1)
    step = scales.astype(np.float64)
    rounding = np.maximum(step * 2**-11, 2.0**-25)
    bound = step / 2 + 8 * rounding if zeros is None else step + 15 * rounding
    assert (error <= bound * (1 + 1e-6)).all()


def test_zero_stays_zero() -> None:
    x = np.abs(rng().standard_normal((64, 128), F)) + F(0.1)
    x[:, ::5] = 0
    for fmt in FORMATS:
        if 128 % fmt.block_size == 0:
            w = cq.quantize(np.concatenate([x, -x]), fmt).dequantize()
            assert (w[:, ::5] == 0).all()


def test_sqnr_of_normal_weights() -> None:
    """Smaller groups and zero points lose less."""
    x = rng().standard_normal((256, 1024), F)
    db = {
        f.name: -10 * np.log10(testing.nmse(cq.quantize(x, f), x))
        for f in FORMATS
        if 1024 % f.block_size == 0
    }
    assert 15 < db["int4-row"] < db["int4-128"] < db["int4-64"] < db["int4-32"] < 21
    assert all(db[name] < db[f"{name}-zeros"] for name in ("int4-row", "int4-128", "int4-64", "int4-32"))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scales_up_to_the_largest_float16(fmt: cq.Int4) -> None:
    levels = 7 if fmt.symmetric else 15
    x = np.zeros((3, 384), F)
    x[2, 40] = F(65520) * F(levels)
    with pytest.raises(ValueError, match="the scale 'scale' of a block in row 2 overflows float16"):
        cq.quantize(x, fmt)
    x[2, 40] = np.nextafter(x[2, 40], F(0))
    assert cq.quantize(x, fmt).dequantize()[2, 40] == levels * 65504


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_refuses_what_is_not_finite(fmt: cq.Int4, bad: float) -> None:
    x = np.zeros((3, 4, 384), F)
    x[2, 1, 7] = bad
    with pytest.raises(ValueError, match=rf"{bad} in row \(2, 1\): weights must be finite"):
        cq.quantize(x, fmt)


# One group per row


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_a_row_takes_the_row_s_length(symmetric: bool) -> None:
    x = rng().standard_normal((5, 160), F)
    w = cq.quantize(x, cq.Int4(-1, symmetric))
    assert w.format == cq.Int4(160, symmetric)
    assert (w.shape, w.nbytes) == ((5, 160), 5 * (82 + (not symmetric)))
    again = cq.from_blocks(w.blocks.tobytes(), cq.Int4(-1, symmetric), (5, 160))
    assert again.format == w.format
    np.testing.assert_array_equal(again.blocks, w.blocks)
    np.testing.assert_array_equal(cq.from_blocks(w.blocks, w.format, x.shape).dequantize(), w.dequantize())
    np.testing.assert_array_equal(cq.quantize(x, w.format).blocks, w.blocks)


@pytest.mark.parametrize("k", [0, 48, 100])
def test_refuses_ragged_rows(k: int) -> None:
    for fmt in (cq.Int4(-1), cq.Int4(32)):
        with pytest.raises(ValueError, match=f"stores blocks of 32 .* has {k} elements"):
            cq.quantize(np.zeros((2, k), F), fmt)
    with pytest.raises(ValueError, match="int4-128 stores blocks of 128"):
        cq.quantize(np.zeros((2, 192), F), "int4-128")


# Parts


@pytest.mark.parametrize("group", [32, 64, 128, 384])
@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (0,), (0, 3)])
def test_parts_there_and_back(group: int, lead: tuple[int, ...]) -> None:
    codes, scales, zeros = parts((*lead, 384), group)
    for given in (None, zeros):
        for size in (None, group, *([-1] if group == 384 else [])):
            w = cq.int4_from_parts(codes, scales, given, group_size=size)
            assert (w.shape, w.format) == ((*lead, 384), cq.Int4(group, given is None))
        q = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, group).astype(F)
        offset = F(8) if given is None else zeros[..., None].astype(F)
        expected = ((q - offset) * scales[..., None].astype(F)).reshape(w.shape)
        np.testing.assert_array_equal(w.dequantize(), expected)
        back = cq.int4_parts(w)
        for part, original in zip(back, (codes, scales, given), strict=True):
            if original is None:
                assert part is None
            else:
                assert part is not None
                assert part.dtype == original.dtype
                np.testing.assert_array_equal(part, original)
        np.testing.assert_array_equal(cq.int4_from_parts(*back).blocks, w.blocks)


def test_parts_of_any_strides_are_copied() -> None:
    codes, scales, zeros = parts((6, 256), 64)
    expected = cq.int4_from_parts(codes, scales, zeros).blocks
    w = cq.int4_from_parts(np.asfortranarray(codes), np.asfortranarray(scales), np.asfortranarray(zeros))
    np.testing.assert_array_equal(w.blocks, expected)
    codes[:], zeros[:] = 0, 0
    np.testing.assert_array_equal(w.blocks, expected)
    back = cq.int4_parts(w)
    back[0][:] = 0
    np.testing.assert_array_equal(w.blocks, expected)
    np.testing.assert_array_equal(cq.int4_parts(w[1:3])[1], scales[1:3])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"codes": np.zeros((4, 64), np.int8)}, TypeError, "codes has dtype int8; uint8 is needed"),
        ({"codes": [[0]]}, TypeError, "codes is a list; .* array of uint8 is needed"),
        ({"scales": np.zeros((4, 4), F)}, TypeError, "scales has dtype float32; float16 is needed"),
        ({"zeros": np.zeros((4, 4), np.int32)}, TypeError, "zeros has dtype int32; uint8 is needed"),
        ({"zeros": np.zeros((4, 2), np.uint8)}, ValueError, r"zeros has shape \(4, 2\); that of scales is"),
        ({"zeros": np.full((4, 4), 16, np.uint8)}, ValueError, "zeros holds 16; zero points are codes, 0 to"),
        (
            {"scales": np.zeros((3, 4), np.float16)},
            ValueError,
            r"codes \(4, 64\) and scales \(3, 4\) are not of",
        ),
        ({"scales": np.zeros((4, 3), np.float16)}, ValueError, "128 weights along K are not 3 groups of one"),
        ({"scales": np.zeros((4, 0), np.float16)}, ValueError, "128 weights along K are not 0 groups"),
        ({"scales": np.zeros((4, 8), np.float16)}, ValueError, "group_size is 16; allowed are 32, 64, 128"),
        ({"codes": np.zeros((4, 0), np.uint8)}, ValueError, "0 weights along K are not 4 groups"),
        ({"codes": np.array(1, np.uint8)}, ValueError, r"codes \(\) and scales"),
        ({"group_size": 64}, ValueError, r"group_size is 64; codes \(4, 64\) and scales \(4, 4\) have 32"),
        ({"group_size": -1}, ValueError, "group_size is -1; codes .* have 32"),
        ({"group_size": 33}, ValueError, "group_size is 33; allowed are"),
    ],
)
def test_refuses_parts(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"codes": np.zeros((4, 64), np.uint8), "scales": np.zeros((4, 4), np.float16)}
    with pytest.raises(kind, match=message):
        cq.int4_from_parts(**given | change)


def test_other_weights_have_no_parts() -> None:
    with pytest.raises(
        TypeError, match=r"w is q4_0 array \(2, 32\); a QuantizedArray of a format cuquant.Int4"
    ):
        cq.int4_parts(cq.quantize(np.zeros((2, 32), F), "q4_0"))
    with pytest.raises(TypeError, match=r"w is ndarray \(2,\)"):
        cq.int4_parts(np.zeros(2))  # type: ignore[arg-type]


# As a QuantizedArray


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products_against_float64(fmt: cq.Int4) -> None:
    w = cq.quantize(rng(1).standard_normal((3, 40, 384), F), fmt)
    assert_stack_products(w)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_slices_bytes_and_strides(fmt: cq.Int4, dtype: Any) -> None:
    x = rng().standard_normal((6, 5, 384), F).astype(dtype)
    w = cq.quantize(x, fmt)
    np.testing.assert_array_equal(w.blocks, cq.quantize(x.astype(F), fmt).blocks)
    assert w.nbytes == w.blocks.nbytes == 30 * 384 // w.format.block_size * w.format.block_bytes
    np.testing.assert_array_equal(w[1:4, 2].blocks, cq.quantize(x[1:4, 2], fmt).blocks)
    np.testing.assert_array_equal(cq.quantize(np.asfortranarray(x), fmt).blocks, w.blocks)
    loaded = pickle.loads(pickle.dumps(w))
    assert loaded.format == w.format
    np.testing.assert_array_equal(loaded.dequantize(dtype), w.dequantize().astype(dtype))


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_scales_that_are_not_finite_stay_in_their_row(bits: int) -> None:
    codes, scales, _ = parts((3, 64), 32)
    scales[1, 0] = np.uint16(bits).view(np.float16)
    y = np.ones((2, 64), F) @ cq.int4_from_parts(codes, scales).T
    assert np.isfinite(y[:, [0, 2]]).all()
    assert not np.isfinite(y[:, 1]).any()


def test_no_gguf_file_holds_them(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="int4-row has no GGUF type"):
        cq.quantize_file(model, tmp_path / "out.gguf", cq.Int4(-1), device="cpu")


def test_a_model_is_evaluated_in_them(model: Path) -> None:
    tokens = rng().integers(3, 40, 130)
    formats: list[Any] = ["int4-32", cq.Int4(-1, symmetric=False)]
    result = cq.evaluate(model, tokens=tokens, formats=formats, ctx=64, device="cpu")
    rows = {row.format: row for row in result.rows}
    assert 0 < (rows["int4-32"].mean_kld or 0) < 1
    assert 0 < (rows["int4-row-zeros"].mean_kld or 0) < 1
