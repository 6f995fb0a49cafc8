"""The numbers that a kernel gets, read back as the kernel reads them, against NumPy's own strides."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from test_matmul import LEADING

import cuquant as cq
from cuquant import problem

FIELDS = ("x_row", "scales_matrix", "out_row", "out_column", "residual_row", "residual_column")
AXES = ("extent", "w", "x", "out", "residual", "x_rows")
INTEGERS = ("M", "N", "K", "scales_row", "out_dtype", "bias_dtype", "residual_dtype", "activation", "stacked")
NOTHING = problem.Epilogue(0, False, None, 0, None)


def unpack(launch: problem.Launch) -> dict[str, Any]:
    """The fields of struct Problem that follow the addresses."""
    values = struct.unpack("<24q9i4x", launch.numbers)
    read: dict[str, Any] = dict(zip(FIELDS, values[:6], strict=True))
    read |= {name: values[6 + 3 * i : 9 + 3 * i] for i, name in enumerate(AXES)}
    return read | dict(zip(INTEGERS, values[24:], strict=True))


def offsets(read: dict[str, Any], index: int) -> dict[str, int]:
    """What matrix_of in kernels/core/problem.cuh makes of a matrix's number."""
    total = dict.fromkeys(AXES[1:], 0)
    for axis in (2, 1, 0):
        i, index = index % read["extent"][axis], index // read["extent"][axis]
        for name in total:
            total[name] += i * read[name][axis]
    return total


def strides(array: Any) -> tuple[int, ...]:
    return tuple(stride // array.itemsize for stride in array.strides)


@pytest.mark.parametrize(
    ("left", "right"), [case for case in LEADING if len(case[0]) > 1 and 0 not in sum(case, ())]
)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_every_element_is_where_numpy_has_it(
    left: tuple[int, ...], right: tuple[int, ...], strided: bool, converted: bool
) -> None:
    """x, W, out and the residual hold their own addresses; the kernel's offsets must find them."""
    x = np.arange(np.prod(left) * 2, dtype=np.int64).reshape(*left[:-1], -1)[..., : left[-1]]
    if converted:  # conversions write contiguous rows
        x = np.arange(np.prod(left)).reshape(left)
    shape = (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-2])
    base = np.arange(np.prod(shape) * 2).reshape(*shape[:-1], -1)
    out = base[..., ::2] if strided else np.arange(np.prod(shape)).reshape(shape)
    rows = problem.Source(left, strides(x)[:-1], "rows_to_half" if converted else None, left[-1])
    target = problem.Output(shape, strides(out), 0)
    launch = problem.resolve(cq.formats.get("q4_0"), right, rows, target, NOTHING, 90)
    read = unpack(launch)
    w = np.arange(np.prod(right[:-2], dtype=int)).reshape(right[:-2])
    wide_x = np.broadcast_to(x, (*shape[:-1], left[-1]))
    wide_w = np.broadcast_to(w[..., None], shape[:-1])
    seen = []
    for index in range(int(np.prod(read["extent"]))):
        at = offsets(read, index)
        for m in range(read["M"]):
            place = at["out"] + m * read["out_row"]
            seen.append(place)
            where = tuple(int(i[0]) for i in np.nonzero(out[..., 0] == place))
            assert wide_x[where][0] == at["x"] + m * read["x_row"]
            assert wide_w[where] == at["w"]
            assert at["residual"] == at["out"]
            if converted:
                assert (at["x_rows"] + m) * left[-1] == at["x"] + m * read["x_row"]
    assert sorted(seen) == sorted(out[..., 0].reshape(-1).tolist())
    assert (read["N"], read["K"], read["out_column"]) == (right[-2], right[-1], strides(out)[-1])


def test_rows_merge_where_w_is_one_matrix() -> None:
    rows = problem.source((2, 3, 4, 64), (1536, 512, 128, 2), True)
    assert rows.entry is None
    out = problem.Output((2, 3, 4, 32), (384, 128, 32, 1), 0)
    read = unpack(problem.resolve(cq.formats.get("q8_0"), (32, 64), rows, out, NOTHING, 90))
    assert (read["M"], read["extent"]) == (24, (1, 1, 1))


def test_too_many_axes_are_refused() -> None:
    rows = problem.source((2, 2, 2, 2, 4, 64), (0, 0, 0, 0, 128, 2), True)
    out = problem.Output((2, 2, 2, 2, 4, 32), (4096, 1111, 555, 222, 32, 1), 0)
    with pytest.raises(ValueError, match="4 leading axes that do not merge; at most 3"):
        problem.resolve(cq.formats.get("q8_0"), (32, 64), rows, out, NOTHING, 90)


@pytest.mark.parametrize(
    ("strides", "half", "entry"),
    [
        ((128, 2), True, None),
        ((0, 2), True, None),
        ((160, 2), True, None),
        ((130, 2), True, "rows_to_half"),
        ((128, 4), True, "rows_to_half"),
        ((256, 4), False, "rows_to_half"),
    ],
)
def test_what_is_read_as_it_is(strides: tuple[int, ...], half: bool, entry: str | None) -> None:
    assert problem.source((4, 64), strides, half).entry == entry


def test_8_bit_codes_are_padded_to_tiles() -> None:
    assert problem.quantized_source((3, 96), 90) == ((3, 96), (128,), "blocks_to_int8", 128)
    assert problem.quantized_source((3, 96), 75) == ((3, 96), (96,), "blocks_to_half", 96)
    out = problem.Output((3, 32), (32, 1), 2)
    launch = problem.resolve(
        cq.formats.get("q4_0"), (32, 96), problem.quantized_source((3, 96), 90), out, NOTHING, 90
    )
    read = unpack(launch)
    assert (read["scales_row"], read["scales_matrix"]) == (8 // 2, 4 * 8 // 2)  # 8 padded rows, 4 blocks
    assert (read["x_row"], read["out_dtype"]) == (128, 2)


def test_the_packed_argument_is_the_struct() -> None:
    out = problem.Output((3, 32), (32, 1), 2)
    rows = problem.source((3, 64), (128, 2), True)
    launch = problem.resolve(cq.formats.get("q4_0"), (32, 64), rows, out, NOTHING, 90)
    packed = launch.packed(*range(1, 10))
    assert packed.nbytes == 9 * 8 + 24 * 8 + 9 * 4 + 4
    assert struct.unpack("<9q", packed.tobytes()[:72]) == tuple(range(1, 10))
