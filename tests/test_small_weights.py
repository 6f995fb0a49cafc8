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


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def listed(column: int, head: str) -> list[tuple[str, float]]:
    """Formats and sizes of a column of the README's table with that head."""
    rows = README.split(head, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.split(", ") for cell in row.strip(" |").split(" | ")] for row in rows]
    return [(n, float(size)) for row in cells for n, size in zip(row[0], row[column], strict=True)]


LOSING, WARNING = (listed(column, "| formats | twice the usual error | warning below |") for column in (1, 2))


def test_sizes_are_listed_of_all_formats_that_have_some() -> None:
    names = [name for name in LIMITED if isinstance(name, str)]
    assert sorted(dict(LOSING)) == sorted(dict(WARNING)) == sorted(names)


@pytest.mark.parametrize(("name", "size"), LOSING)
def test_listed_sizes_at_which_errors_are_twice_the_usual(name: str, size: float) -> None:
    """Within a seventh."""

    def error(size: float) -> float:
        x = gauss(size, (64, 1024))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return testing.nmse(cq.quantize(x, name).dequantize(), x)

    assert all(error(size * above) < 2 * error(1) for above in np.geomspace(7 / 6, 100, 20))
    assert any(error(size * near) > 2 * error(1) for near in np.geomspace(6 / 7, 7 / 6, 10))


@pytest.mark.parametrize(("name", "size"), WARNING)
def test_listed_sizes_below_which_quantizing_warns(name: str, size: float) -> None:
    """Within a seventh."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for above in np.geomspace(7 / 6, 100, 20):
            cq.quantize(gauss(size * above, (64, 1024)), name)
    for below in np.geomspace(6 / 7, 1 / 100, 20):
        with pytest.warns(UserWarning, match="too small"):
            cq.quantize(gauss(size * below, (64, 1024)), name)


def alike(sign: str) -> list[tuple[str, float]]:
    """Formats and sizes of the README's row of weights of a sign that become 0."""
    ((names, sizes),) = re.findall(rf"\| ([\w, ]+) \| {sign} ones .* block, below ([\de., -]+) \|", README)
    return [(n, float(size)) for n, size in zip(names.split(", "), sizes.split(", "), strict=True)]


@pytest.mark.parametrize(
    ("name", "size", "least"),
    [
        *((name, size, 1.0) for name, size in alike("positive")),
        *((name, -size, 1.0) for name, size in alike("negative")),
        ("mxfp4", 2.0**-125, 0.0),
        (cq.NvFp4(), 4.6e-33, 0.0),
    ],
    ids=str,
)
def test_documented_limits_of_what_is_not_counted(name: str | cq.NvFp4, size: float, least: float) -> None:
    """A little above the size some weights are left, and a little below none: constant ones (`least` 1), or
    gauss' largest. No warning says so, as the README says."""
    x = np.maximum(np.abs(gauss(1)) / np.abs(gauss(1)).max(), F(least))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cq.quantize(x * F(size * 1.05), name).dequantize().any()
        assert not cq.quantize(x * F(size / 1.05), name).dequantize().any()
