"""What makes no quantized array, and what NumPy does with arrays of numbers alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import cuquant as cq

F, U1 = np.float32, np.uint8


def make(shape: tuple[int, ...] = (6, 64), name: str | cq.Format = "q4_0") -> cq.QuantizedArray:
    return cq.quantize(np.random.default_rng(0).standard_normal(shape, F), name)


@pytest.mark.parametrize("name", ["q4_0", "q8_1", "int4-64-zeros", "kbit3", "trellis3", "q4_k"])
def test_an_array_of_its_own_blocks(name: str) -> None:
    """By the constructor, with a shape; of what is no matrix as a whole, without one too."""
    w = make((3, 256), name)
    again = cq.QuantizedArray(w.format, w.blocks, shape=w.shape)
    assert (again.shape, str(again.format), again.nbytes) == (w.shape, name, w.nbytes)
    assert np.shares_memory(again.blocks, w.blocks)
    np.testing.assert_array_equal(again.dequantize(), w.dequantize())
    if not w.format.whole_matrices:
        assert cq.QuantizedArray(name, w.blocks).shape == w.shape


def test_blocks_with_gaps_are_copied() -> None:
    w = make()
    spread = np.repeat(w.blocks, 2, axis=0)[::2]
    made = cq.QuantizedArray("q4_0", spread)
    assert made.storage.flags.c_contiguous
    np.testing.assert_array_equal(made.blocks, w.blocks)


def test_a_row_s_own_format() -> None:
    """Int4(-1) holds no array; a row's groups are of its length."""
    w = make((4, 96), cq.Int4(-1))
    assert cq.QuantizedArray(cq.Int4(-1), w.blocks, shape=(4, 96)).format == "int4-96"


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (("zz", np.zeros((2, 18), U1)), ValueError, "unknown format 'zz'"),
        ((4, np.zeros((2, 18), U1)), TypeError, "format is an int; a format is a name or a Format"),
        (("q4_0", [0] * 18), TypeError, "blocks is a list; a NumPy or CuPy array of uint8 is needed"),
        (("q4_0", np.zeros((2, 18), F)), TypeError, r"blocks has dtype float32; .* \(blocks\.view\("),
        (("q4_0", np.zeros((2, 19), U1)), ValueError, "blocks has 19 bytes along its last axis; .* of 18"),
        (("q4_0", np.zeros((2, 0), U1)), ValueError, "blocks has 0 bytes along its last axis"),
        (("q4_0", np.zeros((), U1)), ValueError, "blocks has 0 bytes along its last axis"),
        (
            ("q4_0", np.zeros((2, 18), U1), (2, 64)),
            ValueError,
            r"blocks has 36 bytes; q4_0 of shape \(2, 64\) has 72",
        ),
        (("q4_0", np.zeros((2, 18), U1), (2, 33)), ValueError, r"has shape \(2, 33\): .* 33 elements"),
        (("q4_0", np.zeros((2, 18), U1), "x"), TypeError, "shape 'x' is not a tuple of integers"),
        (("trellis3", np.zeros(64, U1)), ValueError, "shape is missing: trellis3 stores whole matrices"),
        ((cq.Trellis(3), np.zeros(64, U1), (2, 32)), ValueError, "trellis3: the format has no grid"),
    ],
)
def test_blocks_that_do_not_fit(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.QuantizedArray(*given)


@pytest.mark.parametrize("name", ["q4_0", "kbit3"])
def test_copies_and_pickles(name: str) -> None:
    w = make((65,) if name == "kbit3" else (6, 64), name)
    for made in (copy.copy(w), copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert (made.shape, made.format, made.rows) == (w.shape, w.format, None)
        np.testing.assert_array_equal(made.blocks, w.blocks)


REDUCED: list[tuple[Callable[[Any], Any], str]] = [
    (np.sum, "sum"),
    (np.prod, "prod"),
    (np.max, "max"),
    (np.amin, "min"),
    (np.any, "any"),
    (np.all, "all"),
    (lambda w: np.sum(w, axis=0), "sum"),
    (np.logaddexp.reduce, r"logaddexp\.reduce"),
    (np.add.accumulate, r"add\.accumulate"),
    (lambda w: np.multiply.outer(np.ones(3, F), w), r"multiply\.outer"),
    (lambda w: np.add.at(w, 0, 1), r"add\.at"),
]


@pytest.mark.parametrize(("call", "name"), REDUCED)
def test_functions_are_named_as_they_are_written(call: Callable[[Any], Any], name: str) -> None:
    for packed in (make(), make().T):
        with pytest.raises(TypeError, match=rf"packed blocks, which have no numpy\.{name}: call"):
            call(packed)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (
            lambda w: np.vstack([w, w]),
            r"numpy\.vstack takes no QuantizedArray \(q4_0\): numpy\.concatenate joins",
        ),
        (
            lambda w: np.append(w, w),
            r"numpy\.append takes no QuantizedArray \(q4_0\): numpy\.concatenate joins",
        ),
        *(
            (
                partial(each, indices_or_sections=2),
                rf"{each.__name__} takes .*: take rows of W: W\[:n\], W\[n:\]$",
            )
            for each in (np.split, np.array_split, np.vsplit)
        ),
        (np.transpose, r"numpy\.transpose takes no QuantizedArray \(q4_0\): \.T swaps the last two axes"),
        (lambda w: np.swapaxes(w, 0, 1), r"numpy\.swapaxes takes no QuantizedArray \(q4_0\): \.T swaps"),
    ],
)
def test_functions_that_others_stand_for(call: Callable[[Any], Any], instead: str) -> None:
    with pytest.raises(TypeError, match=instead):
        call(make())


def test_types_of_what_numpy_joins() -> None:
    """No `Any` hides the arrays from mypy, which takes what `__array__` returns for what they hold."""
    w: cq.QuantizedArray = make()
    stacked, joined = np.stack([w, w]), np.concatenate([w, w])
    assert (stacked.shape, joined.shape) == ((2, 6, 64), (12, 64))
    with pytest.raises(TypeError, match="holds packed blocks, not numbers"):
        np.asarray(w)


def test_no_truth() -> None:
    """As NumPy's arrays have none: `if W` is not the same as `if W is not None`."""
    empty = cq.quantize(np.ones((0, 64), F), "q4_0")
    for packed in (make(), make().T, empty):
        with pytest.raises(
            ValueError, match=r"truth value of a \w+ \(q4_0\) is ambiguous: compare with None"
        ):
            bool(packed)
        assert packed is not None
    with pytest.raises(ValueError, match="ambiguous"):
        _ = make() or make()
