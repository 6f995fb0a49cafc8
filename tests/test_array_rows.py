"""Rows of a QuantizedArray: indices, and iteration along the first axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_array import make

ROWS: list[Any] = [
    0,
    -1,
    np.int64(2),
    slice(1, 4),
    slice(None, None, -2),
    slice(0, 0),
    ...,
    (),
    [3, 1, 1],
    [],
    range(1, 4),
    np.array([[0, 5], [2, 2]]),
    np.array([], int),
    np.array([True, False, True, False, False, True]),
    [True, False, True, False, False, True],
    np.zeros(6, bool),
    (slice(1, 3), slice(None)),
    (..., slice(None)),
    (2, ...),
]


@pytest.mark.parametrize("index", ROWS, ids=repr)
@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_rows_of_a_matrix(index: Any, name: str) -> None:
    w = make((6, 64), name)
    got = w[index]
    np.testing.assert_array_equal(got.dequantize(), w.dequantize()[index])
    assert not np.shares_memory(got.blocks, w.blocks)


@pytest.mark.parametrize(
    "index",
    [
        1,
        (1, 2),
        (slice(None), 2),
        (..., 2, slice(None)),
        ([0, 2], [1, 1]),
        ([[0], [2]], [1, 3, 0]),
        (0, [3, 1]),
        (slice(None, None, -1), slice(3, 0, -2)),
        (slice(None), [True, False, True, False]),
        np.arange(12).reshape(3, 4) % 5 == 0,
        [2],
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["q5_1", "q8_1"])
def test_rows_of_a_stack(index: Any, name: str) -> None:
    w = make((3, 4, 64), name)
    got = w[index]
    np.testing.assert_array_equal(got.dequantize(), w.dequantize()[index])
    assert not np.shares_memory(got.blocks, w.blocks)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0), "last axis of shape"),
        ((slice(None), slice(0, 32)), "last axis of shape"),
        ((..., 0), "last axis of shape"),
        ((..., [0]), "last axis of shape"),
        (np.ones((6, 64), bool), "last axis of shape"),
        (None, "no new axes"),
        ((0, None), r"no new axes: \.dequantize\(\) first$"),
        (1.0, "is a float; integers, slices, ... and arrays of integers or booleans are allowed$"),
        ((0, np.float32(1)), "is a float32; integers"),
        ("0", "is a str; integers"),
        ({1}, "is a set; integers"),
        (6, "out of bounds"),
        ((0, 0, slice(None)), "too many"),
    ],
    ids=repr,
)
def test_refused_indices(index: Any, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        make()[index]


def test_a_vector_has_no_rows_to_index() -> None:
    with pytest.raises(IndexError, match="last axis"):
        make((64,))[0]


@pytest.mark.parametrize("shape", [(6, 64), (3, 4, 64), (0, 64)], ids=str)
def test_iteration_is_along_the_first_axis(shape: tuple[int, ...]) -> None:
    w = make(shape)
    parts = list(w)
    assert len(parts) == len(w)
    for part, numbers in zip(parts, w.dequantize(), strict=True):
        assert part.shape == shape[1:]
        np.testing.assert_array_equal(part.dequantize(), numbers)
        assert not np.shares_memory(part.blocks, w.blocks)


def test_the_numbers_of_a_vector_cannot_be_iterated_over() -> None:
    message = r"a QuantizedArray of shape \(64,\) has no rows to iterate over.* iterate over \.dequantize\(\)"
    with pytest.raises(TypeError, match=message):
        iter(make((64,)))
