"""q4_0, q4_1, q5_0 and q5_1 by importance: against scalar loops of ggml's definition; what they take."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
from formats_table import FLOATS
from kquants_oracle import OF_ROWS, row_by_importance
from numpy.typing import NDArray

import cuquant as cq
from cuquant import cpu, formats, testing

pytestmark = pytest.mark.filterwarnings("ignore:.* of the weights are too small")

F = np.float32
NAMES = [*OF_ROWS]
K = 160


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def importance_of(k: int) -> NDArray[np.float32]:
    """As formats are told it: powers of two apart they are any numbers."""
    result = np.exp(rng(2).normal(0, 2, k)).astype(F)
    return result * F(1.5) / result.max()


@cache
def cases() -> dict[str, NDArray[np.float32]]:
    """Two rows each."""
    g = rng(1)
    gauss = g.standard_normal((2, K), F)
    outlier, one_large = gauss * F(1e-3), gauss.copy()
    outlier[:, 7] = F(100)
    one_large[:, 64:96] *= F(1e4)
    alone = np.zeros((2, K), F)
    alone[:, 100] = F(-0.7)
    sizes = np.repeat(np.ldexp(F(1), -g.integers(0, 24, (2, K // 32))), 32, axis=1)
    return {
        "gauss": gauss,
        "uniform": g.uniform(-3, 5, (2, K)).astype(F),
        "positive": np.abs(gauss) + F(1),
        "negative": -np.abs(gauss) - F(1),
        "outlier": outlier,
        "one large block": one_large,
        "heavy tails": (gauss / g.uniform(0.01, 1, (2, K))).astype(F),
        "blocks of many sizes": gauss * sizes.astype(F),
        "grid": (g.integers(-8, 8, (2, K)) / 4).astype(F),
        "constant": np.full((2, K), F(0.3)),
        "negative constant": np.full((2, K), F(-0.3)),
        "one value": alone,
        "constants of blocks": np.repeat(g.standard_normal((2, K // 32), F), 32, axis=1),
        "zeros": np.zeros((2, K), F),
        "signed zeros": np.where(g.random((2, K)) < 0.5, F(0), F(-0.0)),
        "half zeros": np.where(np.arange(K) < 80, gauss, F(0)),
        "typical": gauss * F(0.02),
        "small": gauss * F(1e-6),
        "below float16": gauss * F(1e-13),
        "negligible": gauss * F(1e-17),
        "subnormal": gauss * F(1e-40),
        "large": gauss * F(1e4),
    }


def as_defined(name: str, x: NDArray[np.float32], importance: NDArray[np.float32]) -> bytes:
    with np.errstate(all="ignore"):
        return b"".join(row_by_importance(name, row, importance) for row in x)


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("name", NAMES)
def test_quantize_as_the_definition(name: str, case: str) -> None:
    x, importance = cases()[case], importance_of(K)
    assert cq.quantize(x, name, importance).blocks.tobytes() == as_defined(name, x, importance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(32,), (1, 96), (3, 32), (2, 1, 3, 64)], ids=str)
def test_rows_of_any_number_and_length(name: str, shape: tuple[int, ...]) -> None:
    """A single row, whose sums NumPy would order otherwise; of a vector all counts, as of a row."""
    x, importance = rng(3).standard_normal(shape, F), importance_of(shape[-1])
    made = cq.quantize(x, name, importance)
    assert made.shape == shape
    assert made.blocks.tobytes() == as_defined(name, x.reshape(-1, shape[-1]), importance)
    vector = x.reshape(-1)
    importance = importance_of(len(vector))
    assert cq.quantize(vector, name, importance).blocks.tobytes() == as_defined(
        name, vector[None], importance
    )


@pytest.mark.parametrize("name", NAMES)
def test_many_rows_are_quantized_as_one_by_one(name: str) -> None:
    """More than are converted at a time, and more blocks than are searched at a time."""
    x, importance = rng(3).standard_normal((cpu.SLAB // 2048 + 3, 2048), F), importance_of(2048)
    blocks = cq.quantize(x, name, importance).blocks
    for i in (0, 1, 15, 16, len(x) - 4, len(x) - 3, len(x) - 1):
        np.testing.assert_array_equal(cq.quantize(x[i], name, importance).blocks, blocks[i])
    assert cq.quantize(x[:0], name, importance).shape == (0, 2048)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides_and_types(name: str, dtype: np.dtype[Any]) -> None:
    x, importance = rng(2).standard_normal((3, 2, 96), F).astype(dtype), importance_of(96)
    expected = cq.quantize(x.astype(F), name, importance).blocks
    wide = np.zeros((3, 2, 192), dtype)
    wide[..., ::2] = x
    for value in (x, wide[..., ::2], np.asfortranarray(x)):
        np.testing.assert_array_equal(cq.quantize(value, name, importance).blocks, expected)


@pytest.mark.parametrize("name", NAMES)
def test_errors_count_by_the_whole_row(name: str) -> None:
    """What is beside a block changes it, though its own weights and their importance are the same."""
    x, importance = rng(1).standard_normal((64, 64), F), importance_of(64)
    beside = x.copy()
    beside[:, 32:] *= F(100)
    size = formats.get(name).block_bytes
    first, other = (cq.quantize(w, name, importance).blocks[:, :size] for w in (x, beside))
    assert (first != other).any(axis=1).mean() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_importance_lowers_the_errors_that_count(name: str) -> None:
    w = rng(1).standard_normal((64, 1024), F)
    sizes = np.exp(rng(2).normal(0, 1, 1024)).astype(F)
    plain, weighted = cq.quantize(w, name), cq.quantize(w, name, sizes**2)
    errors = [(((made.dequantize() - w) * sizes) ** 2).sum() for made in (weighted, plain)]
    assert errors[0] < 0.9 * errors[1]
    x = rng(3).standard_normal((256, 1024), F) * sizes
    assert testing.nmse(x @ weighted.T, x @ w.T) < 0.9 * testing.nmse(x @ plain.T, x @ w.T)


@pytest.mark.parametrize("name", NAMES)
def test_proportions_of_importance_count(name: str) -> None:
    w, importance = rng(1).standard_normal((3, 5, 128), F), importance_of(128)
    expected = cq.quantize(w, name, importance).blocks
    for same in (importance * F(2**-100), np.ldexp(importance, 90), importance.astype(np.float64)):
        np.testing.assert_array_equal(cq.quantize(w, name, same).blocks, expected)
    assert (cq.quantize(w, name, importance * 0 + 1).blocks != expected).any()


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_no_importance_are_still_weights(name: str) -> None:
    """In blocks of their own, and beside others."""
    w, importance = rng(1).standard_normal((8, 1024), F), np.ones(1024)
    importance[512:] = importance[100:110] = 0
    read = cq.quantize(w, name, importance).dequantize()
    assert testing.nmse(read[:, 512:], w[:, 512:]) < 0.02
    assert testing.nmse(read[:, 100:110], w[:, 100:110]) < 0.15
    least = np.where(importance > 0, importance, 2.0**-40)
    np.testing.assert_array_equal(cq.quantize(w, name, least).dequantize(), read)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e7, 1e10, 3e15, 1e25, 3e38])
def test_weights_too_large_are_refused(name: str, size: float) -> None:
    """Also where squares overflow."""
    x = np.zeros((3, 256), F)
    x[1, 64:96] = np.clip(rng().standard_normal(32), -1, 1) * size
    with pytest.raises(ValueError, match=f"{name}: the scale '[dm]' of a block in row 1 overflows float16"):
        cq.quantize(x, name, np.arange(1, 257))
    with pytest.raises(ValueError, match="row 0 overflows float16"):
        cq.quantize(x[1], name, np.arange(1, 257))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(name: str, bad: float) -> None:
    x = np.zeros((3, 4, 64), F)
    x[2, 1, 7] = bad
    with pytest.raises(ValueError, match=rf"{bad} in row \(2, 1\): weights must be finite"):
        cq.quantize(x, name, np.ones(64))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (np.ones(63), r"importance has shape \(63,\); \(64,\) is needed"),
        (np.full(64, -1), "finite, not negative, and above 0"),
        (np.full(64, np.nan), "finite"),
        (np.zeros(64), "above 0 somewhere"),
    ],
    ids=str,
)
def test_importance_that_does_not_fit(name: str, importance: NDArray[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cq.quantize(np.ones((2, 64), F), name, importance)


@pytest.mark.parametrize("name", NAMES)
def test_weights_too_small_are_said(name: str) -> None:
    with pytest.warns(UserWarning, match=f"about 100% of the weights are too small for the scales of {name}"):
        cq.quantize(rng().standard_normal((16, 256), F) * F(1e-9), name, np.ones(256))


@pytest.mark.parametrize(("name", "size"), [("q4_1", 4.5e-7), ("q5_1", 9.3e-7)])
def test_equal_weights_that_become_0_without_a_warning(name: str, size: float) -> None:
    """As the README's section on limits has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor, kept in ((1.05, True), (1 / 1.05, False)):
            w = cq.quantize(np.full((2, 64), size * factor, F), name, np.ones(64))
            assert w.dequantize().all() == w.dequantize().any() == kept


@pytest.mark.parametrize("base", NAMES)
def test_an_encode_of_ones_own_takes_none(base: str) -> None:
    """But where it has the argument; what it derives from does not count."""
    kind = type(formats.get(base))

    class Alone(kind):  # type: ignore[misc, valid-type]
        def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
            result: NDArray[Any] = super().encode(x)
            return result

    class Both(kind):  # type: ignore[misc, valid-type]
        def encode(
            self, x: NDArray[np.float32], importance: NDArray[np.float32] | None = None
        ) -> NDArray[Any]:
            result: NDArray[Any] = super().encode(x)
            return result

    w, expected = (
        rng().standard_normal((2, 64), F),
        cq.quantize(rng().standard_normal((2, 64), F), base).blocks,
    )
    assert not Alone.takes_importance
    with pytest.raises(ValueError, match=f"{base} takes no importance; k-quants"):
        cq.quantize(w, Alone(), np.ones(64, F))
    np.testing.assert_array_equal(cq.quantize(w, Alone()).blocks, expected)
    np.testing.assert_array_equal(cq.quantize(w, Both(), np.ones(64, F)).blocks, expected)
