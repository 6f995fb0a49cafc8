"""What the k-bit formats lose, within their analytical bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_kbit import BITS, FORMATS, VARIANTS, F, rng, sqnr_db

import cuquant as cq


def float32_absmax(x: NDArray[np.float32], codebook: NDArray[np.float32]) -> NDArray[np.float64]:
    """What the codebook gives where block scales are not rounded at all."""
    blocks = x.reshape(-1, 32).astype(np.float64)
    d = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs((blocks / d)[..., None] - codebook).argmin(axis=-1)
    return (codebook[nearest] * d).reshape(x.shape)


@pytest.mark.filterwarnings("ignore:.* of the weights are too small")
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
