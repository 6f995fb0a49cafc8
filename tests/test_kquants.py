"""k-quants and IQ4: against gguf, scalar loops of ggml's definition, llama-quantize's scores and types."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from formats_table import FLOATS, K_QUANTS, Row
from gguf import GGMLQuantizationType as Type
from gguf_files import assert_reads_as_gguf
from kquants_oracle import BLOCK
from numpy.typing import NDArray
from products import assert_stack_products

import cuquant as cq
from cuquant import testing
from cuquant.formats import kquant

pytestmark = pytest.mark.filterwarnings("ignore:.* of the weights are too small")

F = np.float32
NAMES = [row.name for row in K_QUANTS]
DATA = Path(__file__).parent / "data"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The formats as things


@pytest.mark.parametrize("row", K_QUANTS, ids=lambda row: row.name)
def test_table(row: Row) -> None:
    fmt = cq.formats.get(row.name)
    assert (fmt.name, fmt.block_bytes, fmt.ggml_type) == row[:3]
    assert (fmt.block_size, row.block_bytes) == gguf.GGML_QUANT_SIZES[Type(row.ggml_type)]
    assert cq.formats.by_ggml_type(row.ggml_type) is fmt
    x = rng().standard_normal((64, 1024), F)
    assert row.sqnr_db < -10 * np.log10(testing.nmse(cq.quantize(x, row.name), x)) < row.sqnr_db + 0.5


def test_searched_scales_lose_less_than_those_of_the_largest_weight() -> None:
    x = rng().standard_normal((64, 1024), F)
    for searched, plain in (("q4_k", "q4_0"), ("iq4_nl", "q4_0"), ("q5_k", "q5_0"), ("iq4_xs", "kbit4")):
        assert testing.nmse(cq.quantize(x, searched), x) < 0.85 * testing.nmse(cq.quantize(x, plain), x)


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_random_bytes_as_gguf(name: str) -> None:
    assert np.isnan(assert_reads_as_gguf(name)).any()


# Quantizing


@cache
def cases() -> dict[str, NDArray[Any]]:
    """Two blocks of 256 weights each."""
    g = rng(1)
    gauss = g.standard_normal((2, 256), F)
    outlier = gauss * F(1e-3)
    outlier[:, 7] = F(100)
    sizes = np.repeat(np.ldexp(F(1), -g.integers(0, 24, (2, 16))), 16, axis=1)
    return {
        "gauss": gauss,
        "uniform": g.uniform(-3, 5, (2, 256)).astype(F),
        "positive": np.abs(gauss) + F(1),
        "negative": -np.abs(gauss) - F(1),
        "outlier": outlier,
        "heavy tails": (gauss / g.uniform(0.01, 1, (2, 256))).astype(F),
        "groups of many sizes": gauss * sizes.astype(F),
        "grid": (g.integers(-8, 8, (2, 256)) / 4).astype(F),
        "constant": np.full((2, 256), F(0.3)),
        "negative constant": np.full((2, 256), F(-0.3)),
        "one value": np.where(np.arange(256) == 100, F(-0.7), F(0)) * np.ones((2, 1), F),
        "constants of groups": np.repeat(g.standard_normal((2, 16), F), 16, axis=1),
        "zeros": np.zeros((2, 256), F),
        "signed zeros": np.where(g.random((2, 256)) < 0.5, F(0), F(-0.0)),
        "half zeros": np.where(np.arange(256) < 128, gauss, F(0)),
        "typical": gauss * F(0.02),
        "small": gauss * F(1e-6),
        "below float16": gauss * F(1e-13),
        "negligible": gauss * F(1e-17),
        "subnormal": gauss * F(1e-40),
        "large": gauss * F(1e5),
    }


def as_defined(name: str, x: NDArray[np.float32], importance: NDArray[np.float32] | None = None) -> bytes:
    size = cq.formats.get(name).block_size
    weights = None if importance is None else np.broadcast_to(importance, x.shape).reshape(-1, size)
    with np.errstate(all="ignore"):
        return b"".join(
            BLOCK[name](block, None if weights is None else weights[i])
            for i, block in enumerate(x.reshape(-1, size))
        )


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("name", NAMES)
def test_quantize_as_the_definition(name: str, case: str) -> None:
    x = cases()[case]
    assert cq.quantize(x, name).blocks.tobytes() == as_defined(name, x)


@pytest.mark.parametrize(
    "case", ["gauss", "uniform", "outlier", "groups of many sizes", "half zeros", "large"]
)
@pytest.mark.parametrize("name", NAMES)
def test_quantize_by_importance_as_the_definition(name: str, case: str) -> None:
    x = cases()[case]
    importance = np.exp(rng(2).normal(0, 2, 256)).astype(F)
    importance *= F(1.5) / importance.max()  # as it is passed to formats
    assert cq.quantize(x, name, importance).blocks.tobytes() == as_defined(name, x, importance)


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_are_quantized_as_one_by_one(name: str) -> None:
    """More than are searched at a time, and a single block, whose sums NumPy would order otherwise."""
    fmt = cq.formats.get(name)
    x = rng(3).standard_normal((kquant.PIECE // fmt.block_size + 3, fmt.block_size), F)
    blocks = cq.quantize(x, name).blocks
    for i in (0, 1, len(x) - 4, len(x) - 3, len(x) - 1):
        np.testing.assert_array_equal(cq.quantize(x[i], name).blocks, blocks[i])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides_and_leading_axes(name: str, dtype: np.dtype[Any]) -> None:
    x = rng(2).standard_normal((3, 2, 512), F).astype(dtype)
    expected = cq.quantize(x.astype(F), name).blocks
    wide = np.zeros((3, 2, 1024), dtype)
    wide[..., ::2] = x
    for value in (x, wide[..., ::2], np.asfortranarray(x)):
        np.testing.assert_array_equal(cq.quantize(value, name).blocks, expected)
    assert cq.quantize(x[:0], name).shape == (0, 2, 512)
    w = cq.quantize(x, name)
    np.testing.assert_array_equal(w[1:, 1].dequantize(), w.dequantize()[1:, 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e10, 3e15, 1e25, 3e38])
def test_weights_too_large_are_refused(name: str, size: float) -> None:
    """Also where squares overflow."""
    x = np.zeros((3, 256), F)
    x[1] = np.clip(rng().standard_normal(256), -1, 1) * size
    for importance in (None, np.arange(1, 257)):
        with pytest.raises(
            ValueError, match=f"{name}: the scale '(d|dmin)' of a block in row 1 overflows float16"
        ):
            cq.quantize(x, name, importance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(name: str, bad: float) -> None:
    x = np.zeros((3, 4, 256), F)
    x[2, 1, 7] = bad
    with pytest.raises(ValueError, match=rf"{bad} in row \(2, 1\): weights must be finite"):
        cq.quantize(x, name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "iq4_nl"])
def test_refuses_half_blocks(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} stores blocks of 256 .* multiple of 256 is needed"):
        cq.quantize(np.zeros((2, 128), F), name)


@pytest.mark.parametrize("name", NAMES)
def test_products_against_float64(name: str) -> None:
    w = cq.quantize(rng(1).standard_normal((3, 40, 512), F), name)
    assert_stack_products(w)


# Importance


@pytest.mark.parametrize("name", NAMES)
def test_importance_lowers_the_error_of_products(name: str) -> None:
    w = rng(1).standard_normal((64, 1024), F)
    sizes = np.exp(rng(2).normal(0, 1, 1024)).astype(F)
    x = rng(3).standard_normal((256, 1024), F) * sizes
    y = x @ w.T
    plain, weighted = cq.quantize(w, name), cq.quantize(w, name, sizes**2)
    assert testing.nmse(x @ weighted.T, y) < 0.9 * testing.nmse(x @ plain.T, y)


@pytest.mark.parametrize("name", NAMES)
def test_proportions_of_importance_count(name: str) -> None:
    w = rng(1).standard_normal((3, 5, 512), F)
    importance = np.exp(rng(2).normal(0, 1, 512))
    expected = cq.quantize(w, name, importance.astype(F)).blocks
    for same in (importance.astype(F) * F(2**-100), np.ldexp(importance.astype(F), 90)):
        np.testing.assert_array_equal(cq.quantize(w, name, same).blocks, expected)
    np.testing.assert_array_equal(cq.quantize(w[1, 2], name, importance).blocks, expected[1, 2])
    assert (cq.quantize(w, name, importance * 0 + 1).blocks != expected).any()


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_no_importance_are_still_weights(name: str) -> None:
    w = rng(1).standard_normal((8, 1024), F)
    importance = np.where(np.arange(1024) < 512, 1, 0)
    assert testing.nmse(cq.quantize(w, name, importance).dequantize()[:, 512:], w[:, 512:]) < 0.15


@pytest.mark.parametrize("name", ["q8_0", "kbit4", "mxfp4", "int4-32", "q8_1"])
def test_formats_that_take_no_importance(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} takes no importance; k-quants .* and trellis formats do"):
        cq.quantize(np.ones((2, 256), F), name, np.ones(256))


@pytest.mark.parametrize(
    ("importance", "error", "message"),
    [
        (
            [1.0] * 256,
            TypeError,
            r"importance is a list; .*: pass numpy\.asarray\(importance, numpy\.float32\)",
        ),
        (np.ones(255), ValueError, r"importance has shape \(255,\); \(256,\) is needed"),
        (np.ones((2, 256)), ValueError, r"shape \(2, 256\)"),
        (np.full(256, -1), ValueError, "finite, not negative, and above 0"),
        (np.full(256, np.nan), ValueError, "finite"),
        (np.full(256, np.inf), ValueError, "finite"),
        (np.full(256, np.longdouble("1e4000")), ValueError, "finite"),
        (np.zeros(256), ValueError, "above 0 somewhere"),
        (np.ones(256, complex), TypeError, "dtype complex128; numbers are needed"),
        ([1.0] * 256, TypeError, "importance is a list; a NumPy or CuPy array of numbers is needed"),
    ],
    ids=str,
)
def test_importance_that_does_not_fit(importance: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cq.quantize(np.ones((2, 256), F), "q4_k", importance)
