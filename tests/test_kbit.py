"""The k-bit formats: by hand, against scalar loops in exact fractions, and within their analytical bounds."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats_table import CODEBOOKS
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing

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


def float32_absmax(x: NDArray[np.float32], codebook: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the codebook gives where block scales are not rounded at all."""
    blocks = x.reshape(-1, 32).astype(np.float64)
    d = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs((blocks / d)[..., None] - codebook).argmin(axis=-1)
    return (codebook[nearest] * d).reshape(x.shape)


# The codebook


@pytest.mark.parametrize("k", BITS)
def test_codebook_is_normal_quantiles(k: int) -> None:
    c = cq.normal_float_codebook(k)
    assert (c.dtype, c.shape) == (np.dtype(F), (2**k,))
    assert (np.diff(c) > 0).all()
    np.testing.assert_array_equal(c, -c[::-1])
    assert c[-1] == 1
    from statistics import NormalDist

    exact = np.array([NormalDist().inv_cdf((i + 0.5) / 2**k) for i in range(2**k)])
    np.testing.assert_allclose(c, exact / exact[-1], rtol=1e-7)
    with pytest.raises(ValueError, match="read-only"):
        c[0] = 0


def test_codebook_bits_never_change() -> None:
    """Stored weights mean what this table says, whatever SciPy is installed."""
    halves = {  # bits of the entries between 0 and 1
        2: "3E8DD219",
        3: "3DD2012A 3EA32005 3F1409F5",
        4: "3D2C6C36 3E0265AD 3E5D2107 3E9F2EE8 3ED56948 3F0ACE37 3F35233A",
        5: """
        3C950060 3D5FF631 3DBB691C 3E04052D 3E2B36BA 3E539BDA 3E7D9848 3E94D4A9 3EAC39A3 3EC56BF3
        3EE10F81 3F001198 3F122CF2 3F288359 3F4731DC
        """,
    }
    for k, expected in halves.items():
        upper = cq.normal_float_codebook(k)[2 ** (k - 1) : -1]
        assert [f"{v:08X}" for v in upper.view(np.uint32)] == expected.split()


@pytest.mark.parametrize("k", [1, 6, 0, -2, True])
def test_refuses_other_widths(k: int) -> None:
    for make in (cq.normal_float_codebook, cq.KBit):
        with pytest.raises(ValueError, match=f"bits is {int(k)}; allowed are 2, 3, 4, 5"):
            make(k)


def test_refuses_widths_that_are_no_integers() -> None:
    for make in (cq.normal_float_codebook, cq.KBit):
        with pytest.raises(TypeError, match="bits is a float; allowed are 2, 3, 4, 5"):
            make(4.0)  # type: ignore[arg-type]


def test_codebook_of_4_bits_is_near_nf4() -> None:
    """NF4's table differs by its entry at 0: no entry by more than 0.06, and it quantizes about as well."""
    c = cq.normal_float_codebook(4)
    assert np.abs(c - NF4).max() < 0.06
    x = rng().standard_normal((256, 1024), F)
    ours, theirs = (sqnr_db(cq.quantize(x, f), x) for f in (cq.KBit(4), cq.KBit(4, NF4)))
    assert abs(ours - theirs) < 0.5


# The format as a thing


@pytest.mark.parametrize("k", BITS)
def test_facts(k: int) -> None:
    fmt = cq.formats.get(f"kbit{k}")
    assert fmt == cq.KBit(k) == f"kbit{k}"
    assert CODEBOOKS[k - 2] == fmt.name == str(fmt)
    assert hash(fmt) == hash(cq.KBit(k)) == hash(f"kbit{k}")
    assert (fmt.block_bytes, fmt.bits_per_weight, fmt.bits) == (4 * k + 1, k + 0.25, k)
    assert cq.KBit(k, absmax="float16").block_bytes == 4 * k + 2
    assert fmt.ggml_type is None
    assert cq.formats.get(f"KBIT{k}") is fmt


def test_formats_of_equal_parameters_are_equal() -> None:
    own = cq.normal_float_codebook(4) * F(0.5)
    different = [
        cq.KBit(3),
        *(cq.KBit(4, **v) for v in VARIANTS),
        cq.KBit(4, own),
        cq.KBit(4, own, scale="decoded"),
        cq.KBit(4, own * F(0.5)),
        cq.formats.get("q4_0"),
    ]
    for i, a in enumerate(different):
        for j, b in enumerate(different):
            assert (a == b) == (i == j)
            assert (a.name == b.name) == (i == j)
    assert len(set(different)) == len(different)
    assert cq.KBit(4, own) == cq.KBit(4, own.tolist())
    assert hash(cq.KBit(4, own)) == hash(cq.KBit(4, own.copy()))
    assert cq.KBit(4, cq.normal_float_codebook(4)) == cq.KBit(4) == "kbit4"
    assert cq.KBit(4) != 4


@pytest.mark.parametrize("parameters", [*VARIANTS, {"codebook": NF4}, {"codebook": NF4, "absmax": "float16"}])
def test_repr_pickle_and_copies(parameters: dict[str, Any]) -> None:
    fmt = cq.KBit(4, **parameters)
    for other in (
        eval(repr(fmt), {"KBit": cq.KBit}),
        pickle.loads(pickle.dumps(fmt)),
        copy.deepcopy(fmt),
        copy.copy(fmt),
    ):
        assert other == fmt
        assert hash(other) == hash(fmt)
        np.testing.assert_array_equal(other.codebook, fmt.codebook)
    assert repr(cq.KBit(4)) == "KBit(4)"
    assert repr(cq.KBit(2, [-1, 0, 0.5, 1], "decoded", "float16")) == (
        "KBit(2, codebook=[-1.0, 0.0, 0.5, 1.0], scale='decoded', absmax='float16')"
    )


def test_a_codebook_is_copied_and_cannot_be_written() -> None:
    own = np.array([-1, -0.5, 0.5, 1], F)
    fmt = cq.KBit(2, own)
    own[:] = 0
    np.testing.assert_array_equal(fmt.codebook, np.array([-1, -0.5, 0.5, 1], F))
    for array in (fmt.codebook, fmt.thresholds):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("parameters", "kind", "message"),
    [
        (
            {"codebook": [0, 1, 0.5, 0.25]},
            ValueError,
            r"not sorted: entry 2 \(0.5\) is below entry 1 \(1.0\)",
        ),
        ({"codebook": [1, 0.5, 0, -1]}, ValueError, "not sorted: entry 1 .* pass numpy.sort"),
        ({"codebook": [0, 0.5, 1]}, ValueError, r"codebook has shape \(3,\); 4 numbers are needed"),
        ({"codebook": np.zeros((2, 2))}, ValueError, r"codebook has shape \(2, 2\)"),
        ({"codebook": [-1, 0, 1, 2]}, ValueError, r"codebook holds 2.0; entries are in \[-1, 1\]"),
        ({"codebook": [-1, 0, 1, np.nan]}, ValueError, "codebook holds nan"),
        ({"codebook": [-1, 0, 1, 1e99]}, ValueError, "codebook holds inf"),
        ({"codebook": [-1, 0, 1, 10**400]}, TypeError, "codebook is no array of 4 numbers: int too large"),
        ({"codebook": [-np.inf, 0, 0, 1]}, ValueError, "codebook holds -inf"),
        ({"codebook": "nf4"}, ValueError, "codebook is 'nf4'; allowed are \"normal\" and 4 numbers"),
        ({"codebook": [object()] * 4}, TypeError, "codebook is no array of 4 numbers"),
        ({"scale": "other"}, ValueError, "scale is 'other'; allowed are 'absmax', 'decoded'"),
        ({"absmax": np.float16}, ValueError, "absmax is .*; allowed are 'e4m4', 'float16'"),
    ],
)
def test_refuses_parameters(parameters: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.KBit(2, **parameters)


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


# How much is lost


@pytest.mark.parametrize("spread", [1e-6, 1e-4, 3e-4, 1e-2, 1, 6])
@pytest.mark.parametrize("fmt", FORMATS[: len(BITS) * len(VARIANTS)], ids=str)
def test_error_bound_of_every_block(fmt: cq.KBit, spread: float) -> None:
    """abs(error) <= (max_gap / 2 + e) * absmax, where e is the scale's own relative error, at most 1/33.

    E4M4's subnormals have e up to 1/3 from 2^-14 on, and up to 1 below. Normalised by the decoded scale d,
    the error is d * max_gap / 2 within the codebook's range, and abs(absmax - d) beyond it.
    """
    x = (rng().standard_normal((512, 32)) * spread).clip(-31.5, 31.5).astype(F)
    w = cq.quantize(x, fmt)
    error = np.abs(w.dequantize().astype(np.float64) - x).max(axis=1)
    peak = np.abs(x).max(axis=1).astype(np.float64)
    gap = np.diff(fmt.codebook.astype(np.float64)).max()
    if fmt.absmax == "e4m4":
        e = np.where(peak >= 2**-10, 1 / 33, np.where(peak >= 2**-14, 1 / 3, 1))
    else:
        e = np.where(peak >= 2**-14, 2**-11, np.minimum(1, 2**-25 / peak))
    bound = (gap / 2 + e) * peak
    if fmt.scale == "decoded":
        bound = np.maximum(gap / 2 * (1 + e), e) * peak
    assert (error <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize(("k", "least"), [(2, 5), (3, 10), (4, 15), (5, 20)])
def test_sqnr_of_normal_weights(k: int, least: float) -> None:
    """E4M4 scales cost less than 1.5 dB; dividing by the decoded scale costs less than by the peak.

    The table in docs/formats/kbit.md has these numbers.
    """
    x = rng().standard_normal((1024, 1024), F)
    exact = sqnr_db(float32_absmax(x, cq.normal_float_codebook(k)), x)
    peak, decoded, half = (sqnr_db(cq.quantize(x, cq.KBit(k, **v)), x) for v in VARIANTS[:3])
    assert least < peak < decoded < exact + 0.01
    assert exact - peak < 1.5
    assert half == pytest.approx(exact, abs=0.01)
    page = (Path(__file__).parent.parent / "docs/formats/kbit.md").read_text(encoding="utf-8")
    assert f"\n| kbit{k} | {peak:.2f} | {decoded:.2f} | {half:.2f} |\n" in page


@pytest.mark.parametrize("k", BITS)
def test_mean_square_error_of_even_codebooks(k: int) -> None:
    """gap^2 / 12 times the mean square of a block's peak, n / (n + 2) of n uniform weights.

    All weights of a block but its peak have an error. So a bit more leaves about a quarter of it.
    """
    x = rng().uniform(-1, 1, (512, 1024)).astype(F)
    w = cq.quantize(x, cq.KBit(k, np.linspace(-1, 1, 2**k), absmax="float16")).dequantize()
    expected = (2 / (2**k - 1)) ** 2 / 12 * 32 / 34 * 31 / 32
    assert np.mean((w - x) ** 2) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("parameters", VARIANTS)
def test_a_bit_more_is_worth_at_least_4_db(parameters: dict[str, Any]) -> None:
    x = rng().standard_normal((256, 1024), F)
    db = [sqnr_db(cq.quantize(x, cq.KBit(k, **parameters)), x) for k in BITS]
    assert (np.diff(db) > 4).all()


@pytest.mark.parametrize("own", [np.linspace(0, 1, 16, dtype=F), np.linspace(1 / 16, 1, 16, dtype=F) ** 2])
def test_all_positive_codebooks(own: NDArray[np.float32]) -> None:
    """Positive weights are near their entries, negative ones become the lowest."""
    x = np.abs(rng().standard_normal((64, 256), F))
    w = cq.quantize(x, cq.KBit(4, own)).dequantize()
    peak = np.abs(x).reshape(64, 8, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(w - x) <= (np.diff(own, prepend=-own[0]).max() / 2 + 1 / 33) * peak * (1 + 1e-6)).all()
    scale = cq.e4m4_decode(cq.e4m4_encode(peak))
    np.testing.assert_array_equal(cq.quantize(-x, cq.KBit(4, own)).dequantize(), own[0] * scale)


def test_an_asymmetric_codebook_serves_asymmetric_weights() -> None:
    own = np.linspace(-0.25, 1, 32, dtype=F)
    x = rng().uniform(-0.25, 1, (64, 256)).astype(F)
    assert sqnr_db(cq.quantize(x, cq.KBit(5, own)), x) > sqnr_db(cq.quantize(x, cq.KBit(5)), x) + 1
