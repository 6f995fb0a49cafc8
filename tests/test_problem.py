"""The numbers that a kernel gets, read back as the kernel reads them, against NumPy's own strides."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from test_matmul import LEADING

import cuquant as cq
from cuquant import plan
from cuquant.cuda import fragments, problem

FIELDS = ("x_row", "out_row", "out_column", "residual_row", "residual_column")
AXES = ("extent", "w", "x", "out", "residual", "x_rows")
INTEGERS = ["M", "N", "K", "chunk", "out_dtype", "bias_dtype", "residual_dtype", "activation"]
INTEGERS += ["stacked", "streamed", "passing", "factor"]
NOTHING = problem.Epilogue(0, False, None, 0, None)


def unpack(launch: problem.Launch) -> dict[str, Any]:
    """The fields of struct Problem that follow the addresses."""
    values = struct.unpack("<23q11if", launch.numbers)
    read: dict[str, Any] = dict(zip(FIELDS, values[:5], strict=True))
    read |= {name: values[5 + 3 * i : 8 + 3 * i] for i, name in enumerate(AXES)}
    return read | dict(zip(INTEGERS, values[23:], strict=True))


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


def test_rows_of_any_length_are_filled_up() -> None:
    """Kernels read pieces of 8 columns; rows that do not end with one are made anew."""
    for k, entry in ((64, None), (72, None), (70, "prepare_halves"), (1, "prepare_halves")):
        source = problem.source((3, k), (2 * k, 2), True)
        assert source.entry == entry
        assert source.strides == (k + -k % 8,)
        w = problem.Weight(cq.formats.get("trellis3"), (40, k))
        launch = problem.resolve(w, source, problem.Output((3, 40), (40, 1), 0), NOTHING, plan.Gpu(90))
        assert unpack(launch)["K"] == k + -k % 8
        assert launch.signs_go_to == "x"
    assert problem.source((3, 70), (280, 4), False).entry == "prepare_rows"
    assert problem.source((3, 96), (192, 2), True, aligned=False).entry == "prepare_halves"


def test_columns_signs_are_for_x_or_w() -> None:
    """Of many rows as they are the wgmma core gives them to W; else rows that are made anew have them."""

    def signs(source: problem.Source, signed: bool = True, capability: int = 90) -> str:
        w = problem.Weight(cq.formats.get("trellis3"), (2000, source.shape[1]), signed=signed)
        out = problem.Output((source.shape[0], 2000), (2000, 1), 0)
        launch = problem.resolve(w, source, out, NOTHING, plan.Gpu(capability))
        assert dict(launch.plan.kernel.constants).get("SIGNS", 0) == (launch.signs_go_to == "W")
        return launch.signs_go_to

    assert signs(problem.source((9, 72), (144, 2), True)) == ""
    as_it_is = problem.source((4096, 1096), (2192, 2), True)
    assert signs(as_it_is) == "W"
    assert signs(as_it_is, signed=False) == signs(as_it_is, capability=80) == ""
    assert signs(problem.prepared((4096, 1095), True)) == ""


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
    rows = problem.Source(left, strides(x)[:-1], "prepare_rows" if converted else None, converted)
    target = problem.Output(shape, strides(out), 0)
    launch = problem.resolve(
        problem.Weight(cq.formats.get("q4_0"), right), rows, target, NOTHING, plan.Gpu(90)
    )
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
            else:
                assert at["x_rows"] == 0
    assert sorted(seen) == sorted(out[..., 0].reshape(-1).tolist())
    assert (read["N"], read["K"], read["out_column"]) == (right[-2], right[-1], strides(out)[-1])


def test_a_residual_has_strides_of_its_own() -> None:
    x = problem.source((2, 4, 64), (512, 128, 2), True)
    out, w = problem.Output((2, 4, 32), (128, 32, 1), 0), problem.Weight(cq.formats.get("q8_0"), (32, 64))
    read = unpack(problem.resolve(w, x, out, NOTHING._replace(residual_strides=(1, 64, 2)), plan.Gpu(90)))
    assert (read["M"], read["extent"]) == (4, (1, 1, 2))
    assert (read["residual"][2], read["residual_row"], read["residual_column"]) == (1, 64, 2)
    assert (read["out"][2], read["out_row"], read["out_column"]) == (128, 32, 1)


def test_rows_merge_where_w_is_one_matrix() -> None:
    rows = problem.source((2, 3, 4, 64), (1536, 512, 128, 2), True)
    assert rows.entry is None
    out = problem.Output((2, 3, 4, 32), (384, 128, 32, 1), 0)
    read = unpack(
        problem.resolve(problem.Weight(cq.formats.get("q8_0"), (32, 64)), rows, out, NOTHING, plan.Gpu(90))
    )
    assert (read["M"], read["extent"]) == (24, (1, 1, 1))


def test_too_many_axes_are_refused() -> None:
    w = problem.Weight(cq.formats.get("q8_0"), (32, 64))
    rows = problem.source((2, 2, 2, 4, 64), (0, 0, 0, 128, 2), True)
    out = problem.Output((2, 2, 2, 4, 32), (1111, 555, 222, 32, 1), 0)
    assert unpack(problem.resolve(w, rows, out, NOTHING, plan.Gpu(90)))["extent"] == (2, 2, 2)
    rows = problem.source((2, 1, 2, 1, 2, 1, 4, 64), (0, 0, 0, 0, 0, 0, 128, 2), True)
    out = problem.Output((2, 1, 2, 1, 2, 1, 4, 32), (1111, 9, 555, 9, 222, 9, 32, 1), 0)
    assert unpack(problem.resolve(w, rows, out, NOTHING, plan.Gpu(90)))["extent"] == (2, 2, 2)
    rows = problem.source((2, 2, 2, 2, 4, 64), (0, 0, 0, 0, 128, 2), True)
    out = problem.Output((2, 2, 2, 2, 4, 32), (4096, 1111, 555, 222, 32, 1), 0)
    with pytest.raises(ValueError, match="4 leading axes that do not merge; at most 3"):
        problem.resolve(problem.Weight(cq.formats.get("q8_0"), (32, 64)), rows, out, NOTHING, plan.Gpu(90))


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "kbit3", "trellis2"])
def test_too_many_columns_are_refused(name: str) -> None:
    """Offsets between a block's row tiles have 32 bits."""
    most = plan.MOST_COLUMNS
    fmt = cq.formats.get(name)
    assert 15 * (most // plan.TILE_COLUMNS) * plan.layout(fmt.for_kernels).low < 1 << 32
    with pytest.raises(ValueError, match=rf"{most + 256} columns \(K\) .* at most {most}"):
        fragments.to_fragments(None, fmt, (16, most + 256))


def test_too_many_matrices_are_refused() -> None:
    def resolved(count: int) -> problem.Launch:
        rows = problem.source((count, 2, 64), (256, 128, 2), True)
        out = problem.Output((count, 2, 32), (64, 32, 1), 0)
        w = problem.Weight(cq.formats.get("q4_0"), (count, 32, 64))
        return problem.resolve(w, rows, out, NOTHING, plan.Gpu(90))

    assert resolved(65_535).plan.grid[2] == 65_535
    for count in (65_536, 70_000):
        with pytest.raises(ValueError, match=f"{count} blocks along an axis of one launch; at most 65535"):
            resolved(count)


@pytest.mark.parametrize(
    ("strides", "half", "entry"),
    [
        ((128, 2), True, None),
        ((0, 2), True, "prepare_halves"),
        ((-128, 2), True, "prepare_halves"),
        ((160, 2), True, None),
        ((130, 2), True, "prepare_halves"),
        ((128, 4), True, "prepare_halves"),
        ((256, 4), False, "prepare_rows"),
        ((128, 2), False, "prepare_rows"),  # bfloat16
        ((512, 128, 2), True, None),
        ((0, 128, 2), True, None),
        ((-512, 128, 2), True, "prepare_halves"),
        ((520, 128, 2), True, "prepare_halves"),
    ],
)
def test_what_is_read_as_it_is(strides: tuple[int, ...], half: bool, entry: str | None) -> None:
    source = problem.source((2, 4, 64)[-len(strides) :], strides, half)
    assert (source.entry, source.factors) == (entry, not half)


def test_what_lies_behind_a_row_is_not_read() -> None:
    assert problem.source((4, 70), (160, 2), True).entry == "prepare_halves"


def test_q8_1_activations_are_read_as_half_rows() -> None:
    assert problem.quantized_source((3, 96), False) == ((3, 96), (96,), "blocks_to_half", True, False)
    assert problem.quantized_source((3, 96), True) == ((3, 96), (96,), None, True, False)


def test_activations_are_quantized_by_the_product_or_before_it() -> None:
    first = problem.quantized_first((2, 96), True)
    assert first == ((2, 96), (96,), "round_halves", False, False)
    assert problem.quantized_first((2, 96), False) == ((2, 96), (96,), "quantize_rows", True, False)
    for m, k, converts in ((1, 512, True), (2, 512, False), (40, 512, False), (1, 32768, False)):
        x = problem.source((m, k), (2 * k, 2), True)._replace(to_convert=True)
        assert resolved(m, x).converts_x == converts, (m, k)


def resolved(m: int, x: problem.Source, *, half: bool = True, capability: int = 90) -> problem.Launch:
    rows = (m * 256, 256, 1) if len(x.shape) > 2 else (256, 1)
    out = problem.Output((*x.shape[:-2], m, 256), rows, 0)
    return problem.resolve(
        problem.Weight(cq.formats.get("q4_0"), (256, x.shape[-1]), half),
        x,
        out,
        NOTHING,
        plan.Gpu(capability),
    )


def test_the_map_describes_x_to_the_copy_engine() -> None:
    x = problem.source((2, 100, 96), (1 << 20, 256, 2), True)
    for tensor in resolved(100, x).maps:
        assert tensor is not None
        assert tensor.dims == (96, 100, 2, 1, 1)
        assert tensor.strides[:2] == (256, 1 << 20)
        assert not any(stride % 16 for stride in tensor.strides)
        assert tensor.box[0] * 2 == 128
        assert tensor.box[2:] == (1, 1, 1)


def test_the_map_has_no_axis_that_x_lacks() -> None:
    """Of one x for a stack of weights; the copy engine has no stride of 0."""
    x = problem.source((100, 96), (192, 2), True)
    w = problem.Weight(cq.formats.get("q4_0"), (3, 256, 96))
    out = problem.Output((3, 100, 256), (25_600, 256, 1), 0)
    launch = problem.resolve(w, x, out, NOTHING, plan.Gpu(90))
    assert unpack(launch)["extent"] == (1, 1, 3)
    for tensor in launch.maps:
        assert tensor is not None
        assert tensor.dims == (96, 100, 1, 1, 1)
        assert min(tensor.strides) > 0


@pytest.mark.parametrize("m", [1, 9, 16, 128, 129, 300, 4096, 5000])
def test_boxes_end_with_the_last_batch_row(m: int) -> None:
    """One map for whole ones, and one for what is left, if there are any."""
    launch = resolved(m, problem.source((m, 4096), (8192, 2), True))
    if plan.core_of(launch.plan.kernel) != "wgmma":
        assert launch.maps == ()
        return
    constants = dict(launch.plan.kernel.constants)
    most = constants["BATCH"] // constants["PAIR"]
    boxes = [tensor.box[1] if tensor else 0 for tensor in launch.maps]
    assert boxes == [most if m >= most else 0, m % most]
    assert [tensor is None for tensor in launch.maps] == [box == 0 for box in boxes]


def test_other_cores_take_what_wgmma_cannot() -> None:
    """Weights beyond float16 and repeated rows (stride 0, which a map cannot have) go to the decode core."""
    x = problem.source((100, 96), (192, 2), True)
    repeated = problem.source((100, 1, 96), (0, 0, 2), True)
    assert unpack(resolved(1, repeated))["M"] == 100
    cores = [
        plan.core_of(launch.plan.kernel)
        for launch in (
            resolved(100, x),
            resolved(100, x, half=False),
            resolved(1, repeated),
            resolved(100, x, capability=80),
            resolved(8, problem.source((8, 96), (192, 2), True)),
        )
    ]
    assert cores == ["wgmma", "decode", "decode", "mma", "decode"]


def filled(known: bytes) -> memoryview:
    whole = memoryview(bytearray(len(known)))
    problem.fill(whole, known, *range(4, 11))
    return whole


def test_the_argument_is_the_struct() -> None:
    launch = resolved(3, problem.source((3, 64), (128, 2), True))
    known = launch.argument(plan.Planes(1, 2, 3, 12, 100), 11, 99)
    maps = [bytes([number] * 128) for number in (1, 2, 3)]
    for given, straight in ((0, False), (1, False), (2, False), (3, True)):
        whole = filled(known)
        for which, each in enumerate(maps[: min(given, 2)]):
            problem.set_map(whole, which, each)
        if given > 2:
            problem.set_out_map(whole, maps[2])
        assert len(whole) == len(known)
        assert len(whole) % 64 == 0  # as its alignment
        assert whole[:384] == b"".join(maps[:given]) + bytes(128 * (3 - given))
        assert struct.unpack("<12q", whole[384:480]) == tuple(range(1, 13))
        numbers = whole[480 : 480 + len(launch.numbers)]
        assert numbers == launch.numbers
        assert struct.unpack("<i4xqq", whole[480 + len(numbers) :][:24]) == (straight, 99, 100)
    assert struct.unpack("<12q", known[384:480]) == (1, 2, 3, *[0] * 7, 11, 12)


def test_when_results_are_stored_straight() -> None:
    launch = resolved(3000, problem.source((3000, 64), (128, 2), True))._replace(straight=True, out_map=None)
    known = launch.argument(plan.Planes(1, 2, 3, 12, 100), 11, 99)
    at = 480 + len(launch.numbers)
    assert filled(known)[at] == known[at] == 1
    # Of float16 they are only where there is a map: out may start where the copy engine cannot store.
    mapped = launch._replace(out_map=problem.Map((1,), (16,), (1,)))
    assert mapped.argument(plan.Planes(1, 2, 3, 12, 100), 11, 99)[at] == 0


@pytest.mark.parametrize(
    ("out", "end", "straight", "mapped"),
    [
        (problem.Output((3000, 2560), (2560, 1), 0), NOTHING, True, True),
        (problem.Output((3000, 2560), (2560, 1), 1), NOTHING._replace(bias_dtype=2), True, True),
        (problem.Output((3000, 2560), (5120, 1), 2), NOTHING, True, False),
        (problem.Output((3000, 2560), (2561, 1), 2), NOTHING, True, False),
        (problem.Output((3000, 2560), (2564, 1), 0), NOTHING, False, False),
        (problem.Output((3000, 2560), (-2560, 1), 0), NOTHING, False, False),
        (problem.Output((3000, 2560), (1, 3000), 0), NOTHING, False, False),
        (problem.Output((3000, 2560), (1, 3000), 2), NOTHING, False, False),
        (problem.Output((3000, 2560), (2560, 1), 0), NOTHING._replace(activation="relu"), False, False),
        (
            problem.Output((3000, 2560), (2560, 1), 0),
            NOTHING._replace(residual_strides=(2560, 1)),
            False,
            False,
        ),
    ],
)
def test_what_the_copy_engine_may_store(
    out: problem.Output, end: problem.Epilogue, straight: bool, mapped: bool
) -> None:
    x = problem.source((3000, 1024), (2048, 2), True)
    launch = problem.resolve(problem.Weight(cq.formats.get("q4_0"), (2560, 1024)), x, out, end, plan.Gpu(90))
    assert (launch.straight, launch.out_map is not None) == (straight, mapped)
    if launch.out_map is not None:
        assert launch.out_map.dims == (2560, 3000, 1, 1, 1)
        assert launch.out_map.strides[0] == 5120
        assert not any(stride % 16 or stride <= 0 for stride in launch.out_map.strides)


@pytest.mark.parametrize(("apart", "straight"), [(4, False), (8, True), (-(1 << 23), False)])
def test_all_matrices_lie_where_the_copy_engine_may_store(apart: int, straight: bool) -> None:
    x = problem.source((3000, 1024), (2048, 2), True)
    w, steps = problem.Weight(cq.formats.get("q4_0"), (2, 2560, 1024)), (3000 * 2560 + apart, 2560, 1)
    launch = problem.resolve(w, x, problem.Output((2, 3000, 2560), steps, 0), NOTHING, plan.Gpu(90))
    assert (launch.straight, launch.out_map is not None) == (straight, straight)


def test_few_rows_are_not_stored_by_the_copy_engine() -> None:
    launch = resolved(3, problem.source((3, 64), (128, 2), True))
    assert (launch.maps, launch.straight, launch.out_map) == ((), False, None)


def test_a_single_row_has_no_stride() -> None:
    """x[:, None], and the last of each sequence, are rows of one matrix, but for stacks of weights."""
    states = np.zeros((5, 9, 64), np.float16)
    for x in (states[:, -1:], states[:, 0][:, None], np.zeros((5, 1, 64), np.float16)):
        source = problem.Source(x.shape, strides(x)[:-1], None, False)
        for stack, m in (((), 5), ((5,), 1)):
            w = problem.Weight(cq.formats.get("q4_0"), (*stack, 40, 64))
            out = problem.Output((5, 1, 40), (40, 40, 1), 0)
            read = unpack(problem.resolve(w, source, out, NOTHING, plan.Gpu(90)))
            assert (read["M"], read["extent"][-1]) == (m, 5 // m)
            if m == 5:
                assert (read["x_row"], read["out_row"]) == (strides(x)[0], 40)


def test_vectors_are_planned_as_matrices_of_one_row() -> None:
    out = problem.Output((1, 8192), (8192, 1), 0)
    w = problem.Weight(cq.formats.get("q8_0"), (8192, 28672))
    plans = {
        problem.resolve(w, problem.Source((1, 28672), (row,), None, False), out, NOTHING, plan.Gpu(90)).plan
        for row in (0, 28672)
    }
    assert len(plans) == 1
    assert plan.core_of(plans.pop().kernel) == "wgmma"
