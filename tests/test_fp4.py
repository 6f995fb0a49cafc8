"""mxfp4 and nvfp4: against ml_dtypes's code tables, gguf, scalar loops of ggml's definition, and by hand."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from formats_table import FLOATS, FP4, Row
from gguf import GGMLQuantizationType as Type
from gguf_files import assert_reads_as_gguf
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing

pytestmark = pytest.mark.filterwarnings("ignore:.* of the weights are too small")
F = np.float32
NAMES = [row.name for row in FP4]
BYTES = np.arange(256, dtype=np.uint8)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F) + F(0)  # ggml has no -0
E8M0 = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(F)
E4M3 = (BYTES & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(F)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The formats as things


@pytest.mark.parametrize("row", FP4, ids=lambda row: row.name)
def test_table(row: Row) -> None:
    fmt = cq.formats.get(row.name)
    assert (fmt.name, fmt.block_bytes, fmt.ggml_type, fmt.bits) == (*row[:3], 4)
    assert (fmt.block_size, row.block_bytes) == gguf.GGML_QUANT_SIZES[Type(row.ggml_type)]
    assert cq.formats.by_ggml_type(row.ggml_type) is fmt
    x = rng().standard_normal((64, 1024), F)
    assert -10 * np.log10(testing.nmse(cq.quantize(x, row.name), x)) > row.sqnr_db


# Code tables


def test_every_mxfp4_scale_and_code() -> None:
    """All E8M0 scales times all E2M1 codes. ggml reads 255 as 2^128, not as NaN."""
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = BYTES
    raw[:, 1:] = np.arange(16) | (15 - np.arange(16)) << 4
    scales = E8M0.astype(np.float64)
    assert np.isnan(scales[255])
    scales[255] = 2.0**128
    codes = np.concatenate([E2M1, E2M1[::-1]]).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = (codes * scales[:, None]).astype(F)
    got = cq.from_blocks(raw, "mxfp4", (256, 32)).dequantize()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    assert got[0, 1] == 2.0**-128  # a subnormal result


def test_every_nvfp4_scale_and_code() -> None:
    """All scales, the sign left out, times all codes. ggml reads E4M3's NaN as 0, with a sign as 480."""
    raw = np.zeros((64, 36), np.uint8)
    raw[:, :4] = BYTES.reshape(64, 4)
    raw[:, 4:] = np.tile(np.arange(8) | np.arange(8, 16) << 4, 4)
    scales = E4M3.copy()
    assert np.flatnonzero(np.isnan(scales)).tolist() == [0x7F, 0xFF]
    scales[[0x7F, 0xFF]] = 0, 480
    expected = (E2M1 * scales[:, None]).reshape(64, 64)
    got = cq.from_blocks(raw, "nvfp4", (64, 64)).dequantize()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


# Against gguf


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_random_bytes_as_gguf(name: str) -> None:
    assert_reads_as_gguf(name)


@cache
def cases() -> dict[str, NDArray[Any]]:
    g = rng(1)
    gauss = g.standard_normal((16, 256), F)
    outlier = gauss * F(1e-3)
    outlier[:, 7] = F(100)
    powers = np.ldexp(F(1), np.arange(-149, 128)).astype(F)
    powers = np.concatenate([np.nextafter(powers, F(0)), powers, np.nextafter(powers, F(np.inf))])
    grid = (g.integers(-24, 25, (16, 256)) / 4).astype(F)
    return {
        "gauss": gauss,
        "uniform": g.uniform(-3, 5, (16, 256)).astype(F),
        "outlier": outlier,
        "grid": grid,
        "beside the grid": np.nextafter(grid, F(np.inf)),
        "below the grid": np.nextafter(grid, F(-np.inf)),
        "any exponent": (g.integers(0, 2**32, (64, 256), np.uint32) & 0xBFFFFFFF).view(F),
        "constant": np.full((4, 256), F(-0.3)),
        "zeros": np.zeros((4, 256), F),
        "signed zeros": np.where(g.random((4, 256)) < 0.5, F(0), F(-0.0)),
        "peaks around powers of two": np.multiply.outer(powers, g.uniform(-1, 1, 64).astype(F)),
        "powers of two": np.repeat(powers, 64).reshape(-1, 64),
        "typical": gauss * F(0.02),
        "smallest nvfp4 scales": gauss * F(2e-3),
        "smallest mxfp4 scales": gauss * F(2**-125),
        "below the smallest mxfp4 scale": gauss * F(2**-128),
        "subnormal": gauss * F(1e-40),
        "large": gauss / np.abs(gauss).max() * F(2688),
    }


HUGE = {
    "float32's end": rng(2).uniform(-1, 1, (16, 256)).astype(F) * np.finfo(F).max,
    "the largest float32": np.full((2, 64), np.finfo(F).max, F),
    "its neighbours": np.full((2, 64), -np.nextafter(F(2**127), F(0)), F),
}
"""Beyond nvfp4."""


@pytest.mark.parametrize("case", [*cases(), *HUGE])
def test_quantize_mxfp4_as_gguf(case: str) -> None:
    x = (cases() | HUGE)[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = gguf.quants.quantize(x, Type.MXFP4)
    np.testing.assert_array_equal(cq.quantize(x, "mxfp4").blocks, expected)


# As ggml's C defines it


def ue4m3(x: np.float32) -> int:
    """ggml_fp32_to_ue4m3, a step at a time."""
    if not x > 0:
        return 0
    bits = int(min(x, F(448)).view(np.uint32))
    exponent, mantissa = (bits >> 23) - 127 + 7, bits >> 20 & 7
    if exponent <= 0:
        return min(7, int(x * F(512) + F(0.5)))
    mantissa += bits >> 19 & 1
    exponent, mantissa = exponent + mantissa // 8, mantissa % 8
    return 0x7E if exponent >= 15 else exponent * 8 + mantissa


def half_of(code: int) -> np.float32:
    """ggml_ue4m3_to_fp32, from ml_dtypes's table."""
    return F(0) if code == 0x7F else E4M3[code] * F(0.5)


def best_code(x: np.float32, half: np.float32) -> int:
    """best_index_mxfp4: the first code of the least distance, in float32."""
    distances = [abs(F(2) * value * half - x) for value in E2M1]
    return distances.index(min(distances))


def nvfp4_block(x: NDArray[np.float32]) -> bytes:
    """quantize_row_nvfp4_ref, a scalar at a time."""
    scales, nibbles = b"", b""
    for group in x.reshape(4, 16):
        code = ue4m3(F(max(abs(v) for v in group)) / F(6))
        codes = [best_code(v, half_of(code)) for v in group]
        scales += bytes([code])
        nibbles += bytes(codes[j] | codes[j + 8] << 4 for j in range(8))
    return scales + nibbles


@pytest.mark.parametrize("case", [c for c in cases() if "powers" not in c and c != "any exponent"])
def test_quantize_nvfp4_as_the_definition(case: str) -> None:
    x = cases()[case][:4]
    assert cq.quantize(x, "nvfp4").blocks.tobytes() == b"".join(map(nvfp4_block, x.reshape(-1, 64)))


def test_every_nvfp4_scale_is_rounded_as_the_definition() -> None:
    """Peaks at 6 times each scale, halfway between neighbours, and one float32 beside each."""
    scales = np.unique(E4M3[np.isfinite(E4M3)])
    halfway = (scales[1:] + scales[:-1]) / 2
    peaks = np.concatenate([scales, halfway, np.geomspace(1e-4, 448, 999, dtype=F)]) * F(6)
    peaks = np.concatenate([np.nextafter(peaks, F(0)), peaks, np.nextafter(peaks, F(np.inf))])
    peaks = np.minimum(peaks, F(2688))
    x = np.zeros((len(peaks), 64), F)
    x[:, 5] = -peaks
    got = cq.quantize(x, "nvfp4").blocks[:, 0]
    np.testing.assert_array_equal(got, [ue4m3(peak / F(6)) for peak in peaks])


@pytest.mark.parametrize(
    ("peak", "code"),
    [
        (0, 0x00),
        (0.0058, 0x00),  # 0.495 steps of 2^-9
        (6 * 2**-10, 0x01),  # half a step: up
        (6 * 2**-9, 0x01),
        (6 * 7.49 * 2**-9, 0x07),
        (6 * 7.99 * 2**-9, 0x07),  # nearest is 2^-6, but a subnormal never becomes normal
        (6 * 2**-6, 0x08),
        (6 * 1.0625, 0x39),  # halfway between 1 and 1.125: up, where E4M3's own rounding would give 1
        (6 * 1.0624, 0x38),
        (6 * 1.9375, 0x40),  # halfway between 1.875 and 2: the mantissa carries
        (6 * 240, 0x77),
        (6 * 247.9, 0x77),
        (6 * 248, 0x7E),  # it carries into the last exponent, all of which is 448
        (6 * 256, 0x7E),
        (6 * 448, 0x7E),
    ],
)
def test_nvfp4_scales_by_hand(peak: float, code: int) -> None:
    x = np.zeros(64, F)
    x[63] = peak
    assert cq.quantize(x, "nvfp4").blocks.tobytes()[:4] == bytes([0, 0, 0, code])


def test_nvfp4_by_hand() -> None:
    """Four groups of 16, with scales 1, 2, 0.5 and 0.

    The first holds all codes and ties: halfway between two numbers the smaller one wins, 0 without a sign.
    0.25 is 0, 0.75 is 0.5, 1.25 is 1, 1.75 is 1.5, 2.5 is 2, 3.5 is 3, 5 is 4. Byte j is weight j and j + 8.
    """
    x = np.zeros((4, 16), F)
    x[0] = 6, 4, 3, 2, 1.5, 1, 0.5, 0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0
    x[1, 0], x[1, 8] = -12, 1
    x[2, 7], x[2, 15] = 3, -0.26
    x[3] = 0.005
    expected = bytes([0x38, 0x40, 0x30, 0x00])
    expected += bytes([0x07, 0x96, 0xA5, 0xB4, 0xC3, 0xD2, 0xE1, 0x00])
    expected += bytes([0x1F, 0, 0, 0, 0, 0, 0, 0])
    expected += bytes([0, 0, 0, 0, 0, 0, 0, 0x97])
    expected += bytes(8)
    w = cq.quantize(x.reshape(64), "nvfp4")
    assert w.blocks.tobytes() == expected
    read = x.copy()
    read[0, 8:] = 0, -0.5, -1, -1.5, -2, -3, -4, 0
    read[2, 15], read[3] = -0.25, 0
    np.testing.assert_array_equal(w.dequantize(), read.reshape(64))


def test_mxfp4_by_hand() -> None:
    """Peak 7: floor(log2 7) = 2, so the scale is 2^0, e = 127; 7 becomes 6. Byte j is weight j and j + 16."""
    x = np.zeros(32, F)
    x[:6] = 7, -6, 0.25, 0.26, -5, 5.01
    x[16:20] = 1.5, -0.5, -0.2, 3.5
    w = cq.quantize(x, "mxfp4")
    assert w.blocks.tobytes() == bytes([127, 0x37, 0x9F, 0x00, 0x51, 0x0E, 0x07, *bytes(10)])
    x[[0, 2, 3, 4, 5, 18, 19]] = 6, 0, 0.5, -4, 6, 0, 3
    np.testing.assert_array_equal(w.dequantize(), x)


@pytest.mark.parametrize(
    ("peak", "code"),
    [
        (0, 0),
        (2.0**-125, 0),
        (2.0**-124, 1),
        (2.0**-123, 2),
        (4, 127),
        (8 * (1 - 2.0**-24), 128),  # its logarithm rounds to 3
        (8 * (1 - 2.0**-20), 127),
        (2.0**127, 252),
        (float(np.finfo(F).max), 253),
    ],
)
def test_mxfp4_scales_by_hand(peak: float, code: int) -> None:
    x = np.zeros(32, F)
    x[9] = -peak
    assert cq.quantize(x, "mxfp4").blocks[0] == code


@pytest.mark.parametrize("name", NAMES)
def test_small_weights_read_as_zero(name: str) -> None:
    for size in ({"mxfp4": F(0.999 * 2**-125), "nvfp4": F(0.999 * 6 * 2**-10)}[name], F(1e-45)):
        x = np.where(np.arange(64) % 2, size, -size)
        np.testing.assert_array_equal(cq.quantize(x, name).dequantize().view(np.uint32), np.zeros(64))


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_what_was_quantized_changes_nothing(name: str) -> None:
    """Where a group's peak is 6 or 4 (of mxfp4) times its scale; scales that ggml's rounding reaches."""
    x = cq.quantize(rng(5).standard_normal((64, 256), F) * F(3), name).dequantize()
    np.testing.assert_array_equal(cq.quantize(x, name).dequantize(), x)


def test_nvfp4_refuses_what_its_scales_cannot_hold() -> None:
    x = np.zeros((3, 64), F)
    x[2, 7] = -2688
    assert cq.quantize(x, "nvfp4").dequantize()[2, 7] == -2688
    x[2, 7] = np.nextafter(F(-2688), F(-3000))
    with pytest.raises(
        ValueError, match=r"nvfp4: a weight of magnitude 2688.0002.* in row 2 is beyond 2688.0, .*NvFp4"
    ):
        cq.quantize(x, "nvfp4")


def test_a_scale_of_a_tensor_makes_small_weights_precise() -> None:
    w = rng().standard_normal((64, 1024), F) * F(0.002)
    plain, scaled = cq.quantize(w, "nvfp4"), cq.quantize(w, cq.NvFp4())
    assert testing.nmse(scaled, w) < 0.012 < 0.2 < testing.nmse(plain, w)
    assert scaled.format.scale == np.abs(w).max() / F(1440)  # type: ignore[attr-defined]
    assert repr(scaled).startswith(f"QuantizedArray(shape=(64, 1024), format=nvfp4*{scaled.format.scale:.9g}")  # type: ignore[attr-defined]
    assert "* d *" in scaled._repr_html_()
    scaled.validate()


@pytest.mark.filterwarnings("default")
def test_weights_that_are_too_small_for_scales() -> None:
    """A warning that tells what to do; not for groups that are 0 anyway, or a few of many."""
    w = rng().standard_normal((64, 1024), F) * F(0.001)
    with pytest.warns(
        UserWarning,
        match=r"\d\d% of the weights are too small for the scales of nvfp4, .* use cuquant\.NvFp4\(\)",
    ):
        cq.quantize(w.astype(ml_dtypes.bfloat16)[::-1], "nvfp4")
    with pytest.warns(UserWarning, match=r"100% of the weights .* kbit4, .* cuquant\.KBit\(\.\.\., absmax="):
        cq.quantize(w * F(0.001), "kbit4")
    with pytest.warns(UserWarning, match="about 100% of the weights are too small for the scales of nvfp4"):
        cq.quantize(np.full((3, 2048, 512), F(1e-4)), "nvfp4")
    ordinary = rng().standard_normal((64, 1024), F)
    ordinary[:32] = 0
    ordinary[40, :64] = 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fmt in (cq.NvFp4(), cq.KBit(4, absmax="float16"), "q4_0"):
            cq.quantize(w, fmt)
        for fmt in ("nvfp4", "kbit4"):
            cq.quantize(ordinary, fmt)


def test_a_fitted_scale_leaves_those_of_blocks_to_nearest() -> None:
    """From 248 on they would all be 448."""
    w = rng().standard_normal((512, 256), F)
    plain, fitted = (testing.nmse(cq.quantize(w, fmt), w) for fmt in ("nvfp4", cq.NvFp4()))
    assert fitted == pytest.approx(plain, rel=0.01)
    assert testing.nmse(cq.quantize(w, cq.NvFp4(np.abs(w).max() / 2688)), w) > 1.1 * plain


@pytest.mark.parametrize("scale", [2.0**-100, 1 / 3, 1.0, 2, 2.0**100])
def test_the_scale_is_divided_by_and_multiplied_by(scale: float) -> None:
    """Each once in float32, around blocks that are nvfp4's own; products are those of the numbers."""
    fmt = cq.NvFp4(scale)
    w = rng().standard_normal((16, 128), F) * F(scale)
    got, own = cq.quantize(w, fmt), cq.quantize(w / F(scale), "nvfp4")
    np.testing.assert_array_equal(got.blocks, own.blocks)
    np.testing.assert_array_equal(got.dequantize(), own.dequantize() * F(scale))
    assert got[3:5].format == fmt != cq.NvFp4()
    x = rng(1).standard_normal((8, 128), F)
    assert testing.nmse(x @ got.T, testing.linear(x, got)) < 1e-6
    assert (fmt == "nvfp4") == (scale == 1)
    assert (fmt.ggml_type, fmt.block_bytes) == (40 if scale == 1 else None, 36)
    again = cq.formats.described(cq.formats.describe(fmt))
    assert (again, again.scale) == (fmt, float(F(scale)))  # type: ignore[attr-defined]
    assert cq.formats.described({"name": "nvfp4"}) == "nvfp4"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_scale_is_fitted_to_the_greatest_magnitude(dtype: np.dtype[Any]) -> None:
    for seed, size in enumerate(10 ** rng(3).uniform(-4, 4, 200)):
        x = (rng(seed).standard_normal((1, 64)) * size).astype(dtype)
        w = cq.quantize(x[:, ::1], cq.NvFp4())
        peak = np.abs(x.astype(F)).max()
        assert np.abs(w.dequantize()).max() == pytest.approx(peak, rel=1e-6)
        assert w.format.scale == pytest.approx(peak / 1440, rel=3e-7)  # type: ignore[attr-defined]
    assert cq.quantize(np.zeros((1, 64), dtype), cq.NvFp4()).format == "nvfp4"
    with pytest.raises(ValueError, match="cannot quantize nan in row 0"):
        cq.quantize(np.full((1, 64), np.nan, dtype), cq.NvFp4())


@pytest.mark.parametrize("peak", [2688 * 2.0**100, 3.5e33, 3.4e38])
def test_weights_beyond_the_largest_scale(peak: float) -> None:
    x = np.full((2, 64), 1, F)
    x[1, 3] = peak
    if peak == 2688 * 2.0**100:
        assert cq.quantize(x, cq.NvFp4()).format == cq.NvFp4(2.0**100)
        return
    with pytest.raises(
        ValueError, match=r"a weight of magnitude .* in row 1 is beyond .*: divide the weights"
    ):
        cq.quantize(x, cq.NvFp4())


def test_the_largest_weight_of_a_scale() -> None:
    """The bound holds after the division, as on a GPU."""
    for scale in (F(s) for s in 10 ** rng(4).uniform(-30, 30, 100)):
        largest = F(cq.NvFp4(float(scale)).largest)
        assert largest / scale <= 2688 < np.nextafter(largest, F(np.inf)) / scale


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (0, "scale is 0; allowed"),
        (-1, "-1"),
        (np.nan, "nan"),
        (1e31, "1e\\+31"),
        (1e40, "scale is 1e\\+40; allowed"),
        pytest.param(10**400, "scale is 10", id="giant"),
        (np.float16(np.inf), "inf"),
        ("1", "a str"),
        (True, "a bool"),
    ],
)
def test_scales_that_are_none(scale: Any, problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        cq.NvFp4(scale)


def test_blocks_need_a_scale() -> None:
    with pytest.raises(ValueError, match=r"the format has no scale: pass NvFp4\(scale\)"):
        cq.from_blocks(np.zeros(36, np.uint8), cq.NvFp4(), (1, 64))
    assert repr(cq.NvFp4()) == "NvFp4()"
