"""Weights that are too small for the scales of a format: nothing is lost without a word."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from gguf_files import write
from numpy.typing import NDArray

import cuquant as cq
from cuquant import formats, testing

F = np.float32
TAKE_ANY = {"mxfp4", *(name for name in formats.names() if name.startswith("trellis"))}
LIMITED: list[str | cq.Format] = [
    name for name in formats.names() if name not in TAKE_ANY and not formats.get(name).for_activations
]


def gauss(size: float, shape: tuple[int, ...] = (16, 256)) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(F) * F(size)


LIMITED += [cq.KBit(bits, absmax="float16") for bits in (2, 3, 4, 5)]
LIMITED += [cq.KBit(bits, scale="decoded") for bits in (2, 3, 4, 5)]
LIMITED += [cq.Int4(256), cq.Int4(256, symmetric=False)]


@pytest.mark.parametrize("name", LIMITED, ids=str)
def test_what_is_far_from_the_weights_is_said(name: str | cq.Format) -> None:
    """Wherever the error is four times that of ordinary weights, and a hundredth; but not before it is about
    one and a half times that. (At some smaller sizes scales happen to be near what they are rounded to.)"""
    usual = testing.nmse(cq.quantize(gauss(1), name).dequantize(), gauss(1))
    said = f"of the weights are too small for the scales of {re.escape(str(name))}, and read as 0 or with"
    first = None
    for size in np.geomspace(1, 1e-10, 101):
        x = gauss(size)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            error = testing.nmse(cq.quantize(x, name).dequantize(), x)
        assert all(re.search(said, str(each.message)) for each in found)
        assert found or error < max(4 * usual, 1 / 100), (size, error / usual)
        assert all(Path(each.filename) == Path(__file__) for each in found)
        if found:
            first = first or error / usual
            assert error > 1.05 * usual, (size, error / usual)

    assert first is not None
    assert first > (
        1.05 if str(name).startswith("kbit2") else 1.3
    )  # whose scale may do though it is off by half


@pytest.mark.parametrize("name", sorted(TAKE_ANY))
def test_formats_that_take_weights_of_any_size(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (1e-9, 1e-5, 1):
            assert testing.nmse(cq.quantize(gauss(size), name).dequantize(), gauss(size)) < 0.2


@pytest.mark.parametrize("name", LIMITED, ids=str)
def test_zeros_and_constant_blocks_are_not_too_small(name: str | cq.Format) -> None:
    """Nor is a hundredth of the weights, or less, a reason to warn."""
    x = gauss(0.02, (200, 256))
    x[::2] = 0
    x[2::4] = np.copysign(x[2::4], gauss(1, x[2::4].shape))
    x[1] *= F(1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cq.quantize(x, name)
        if len(formats.get(name).scales) > 1:
            x[::2] = 0.5
            w = cq.quantize(x, name)
            assert testing.nmse(w[::2].dequantize(), x[::2]) < 1e-2


def test_importance_and_files(tmp_path: Path) -> None:
    x = gauss(1e-6)
    with pytest.warns(UserWarning, match="about 100% of the weights are too small for the scales of q4_k"):
        cq.quantize(x, "q4_k", importance=np.ones(256, F))
    source = write(tmp_path / "s.gguf", {"tiny.weight": x})
    with pytest.warns(
        UserWarning, match=r"^tensor 'tiny\.weight': about 100% of the weights are too small for the"
    ):
        cq.quantize_file(source, tmp_path / "t.gguf", formats.get("q6_k"))


@pytest.mark.parametrize(
    ("name", "size", "least"),
    [
        ("q4_1", 3e-8, 1.0),
        ("q5_1", 3e-8, 1.0),
        ("q2_k", 2e-6, 1.0),
        ("q4_k", 3e-5, 1.0),
        ("q5_k", 6e-5, 1.0),
        ("mxfp4", 2.0**-125, 0.0),
        (cq.NvFp4(), 5e-33, 0.0),
    ],
    ids=str,
)
def test_documented_limits_of_what_is_not_counted(name: str | cq.NvFp4, size: float, least: float) -> None:
    """From the size on some weights are left, and below a half of it none: constant ones (`least` 1), or
    gauss' largest. No warning says so, as quantize's docstring and the README say."""
    x = np.maximum(np.abs(gauss(1)) / np.abs(gauss(1)).max(), F(least))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cq.quantize(x * F(size), name).dequantize().any()
        assert not cq.quantize(x * F(size / 2.1), name).dequantize().any()
