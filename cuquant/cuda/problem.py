"""The matrix product as kernels/core/problem.cuh takes it: shapes and strides become a plan and numbers.

Everything but the addresses follows from shapes, strides and types, and is worked out once for each
combination of them. Nothing here needs a GPU.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from .. import check, plan
from ..formats import Format
from ..plan import Planes

DTYPES = {dtype: number for number, dtype in enumerate(check.FLOATS)}
"""Numbers of the float types, as kernels/core/types.cuh has them."""
ACTIVATIONS = {None: 0} | {name: 1 + number for number, name in enumerate(check.ACTIVATIONS)}
_BATCH_AXES = 3
WHOLE = 8
"""Columns of a piece of 16 bytes: kernels read rows of whole ones, longer ones than K ending in zeros."""
_ADDRESSES = struct.Struct("<12q")
_NUMBERS = struct.Struct("<23q11if")
_OTHERS = struct.Struct("<i4xqq32x")
"""`struct Problem`: the copy engine's maps, twelve addresses, what `resolve` packs, a flag and two more."""
_GROUP = ("128s", "128s", "128s", *"Q" * 12, f"{_NUMBERS.size}s", "i", "Q", "q", "32s")
_GROUP += (*"QqQ", *"i" * 8, *"QQQ", "f", "44s")
"""Members of `struct Grouped`: those of `struct Problem`, and what it adds to them."""

Shape = tuple[int, ...]


def whole_pieces(k: int) -> int:
    """Columns with those that rows of so many end in."""
    return k + -k % WHOLE


class Weight(NamedTuple):
    """A weight (..., N, K) in the fragment layout.

    `half` tells whether its numbers fit float16; `scale` is what they are to be multiplied by. Sums are
    divided by 2^`lift`, for one of two reasons. Either what kernels read are the numbers times 2^lift, so
    that float16 keeps their bits: that is taken back. Or, of EXL3, numbers are as they are, but their
    sums become float16 before they are turned, which might not hold them: what turns them multiplies by
    2^lift. `signed` tells whether columns have signs.
    """

    format: Format
    shape: Shape
    half: bool = True
    lift: int = 0
    scale: float = 1.0
    signed: bool = False

    @property
    def factor(self) -> float:
        """Factor that sums are multiplied by."""
        return 2.0**-self.lift * self.scale

    @property
    def unscaled(self) -> Weight:
        """The weight without `lift` and `scale`: equal for all weights that differ in these alone."""
        return self._replace(lift=0, scale=1.0)


class Source(NamedTuple):
    """Activations (..., M, K) as the kernel reads them.

    `entry` is the kernel that converts them to contiguous float16 rows first, or None; `strides` are those of
    the rows (all axes but the last) in elements; `factors` tells whether rows lack a power of two each,
    `to_convert` that products are to take the numbers that q8_1 blocks of them stand for, or
    turned ones.
    """

    shape: Shape
    strides: Shape
    entry: str | None
    factors: bool
    to_convert: bool = False


class Output(NamedTuple):
    """Where results go: shape, strides in elements, number of the dtype."""

    shape: Shape
    strides: Shape
    dtype: int


class Epilogue(NamedTuple):
    """What follows the sums; dtypes as numbers, strides in elements (None without a residual)."""

    bias_dtype: int
    bias_stacked: bool
    activation: str | None
    residual_dtype: int
    residual_strides: Shape | None


class Launch(NamedTuple):
    """A planned product."""

    plan: plan.Plan
    maps: tuple[Map | None, ...]
    """What x is to the copy engine, where the core uses it: in whole boxes, and in the one that the last
    batch rows make, or None where there is no such box. Elsewhere there are none."""
    out_map: Map | None
    """What out is to the copy engine, where it can store results; out must be aligned to 16 bytes then."""
    straight: bool
    """Whether the kernel can store results straight from its registers, through the copy engine if there is
    an `out_map`."""
    numbers: bytes
    partials: int
    """Bytes of global memory in which blocks leave sums to each other."""
    signs_go_to: str
    """Operand to which the kernel itself gives the signs of W's columns, "x" or "W"; or "" where rows of x
    must have them."""
    converts_x: bool
    """Whether the kernel itself quantizes x, or turns it."""
    turns_sums: bool
    """Whether the kernel itself turns sums."""

    def argument(self, w: Planes, values: int, signs: int) -> bytes:
        """The kernel's argument for a weight, but for what `fill` adds; addresses of W's planes, its
        codebook and the signs of its columns."""
        ends = _ADDRESSES.pack(w.low, w.high, w.scale, *(0,) * 7, values, w.group)
        straight = self.straight and self.out_map is None
        return NO_MAP * _MAPS + ends + self.numbers + _OTHERS.pack(straight, signs, w.row)


_MAPS, _OUT_MAP = 3, 2
_OPERANDS, _OPERANDS_AT = struct.Struct("<7q"), _MAPS * 128 + 3 * 8
_STRAIGHT_AT = _MAPS * 128 + _ADDRESSES.size + _NUMBERS.size


def fill(argument: memoryview, known: bytes, *addresses: int) -> None:
    """Write a kernel's argument, with addresses of x, of `unscale` of its rows, out, bias, residual, partial
    sums and their flags."""
    argument[:] = known
    _OPERANDS.pack_into(argument, _OPERANDS_AT, *addresses)


def set_map(argument: memoryview, which: int, map: bytes) -> None:
    """Let the copy engine read x by this one of its maps."""
    argument[128 * which : 128 * (which + 1)] = map


def set_out_map(argument: memoryview, map: bytes) -> None:
    """Let the copy engine store results by this map."""
    set_map(argument, _OUT_MAP, map)
    argument[_STRAIGHT_AT] = 1


class Group(NamedTuple):
    """A planned product with rows that are sorted by their matrix of W, as `struct Grouped` adds to it."""

    plan: plan.Plan
    map: Map | None
    box_steps: int
    """Steps of 64 columns that a box of x has."""
    numbers: bytes

    def members(self, map: Any, w: Planes, values: int, signs: int, addresses: Any, *group: Any) -> Any:
        """The kernel's argument, as types and values; addresses of W's planes, its codebook, its columns'
        signs (or 0), of x, of `unscale` of its rows, out, a factor, partial sums and their flags (or 0), then
        what `struct Grouped` adds."""
        x, unscale, out, factor, partials, flags = addresses
        ends = (w.low, w.high, w.scale, x, unscale, out, 0, factor, partials, flags, values, w.group)
        return _GROUP, (map, NO_MAP, NO_MAP, *ends, self.numbers, 0, signs, w.row, b"", *group, b"")


@lru_cache(maxsize=4096)
def group(w: Weight, rows: int, gemm: plan.Gemm, activation: str | None, x_row: int, leveled: bool) -> Group:
    """Pack the numbers of rows of float16, so many elements apart, times a stack (E, N, K), to float32, or to
    float16 in levels."""
    count, n, k = w.shape
    none, float32 = (0, 0, 0), DTYPES[check.FLOAT32]
    out = DTYPES[check.FLOAT16] if leveled else float32
    numbers = _NUMBERS.pack(
        *(x_row, n, 1, n, 1, 1, 1, count, 0, 0, 1),
        *(none * 4),
        *(rows, n, k, gemm.chunk, out, 0, float32, ACTIVATIONS[activation], 0),
        *(gemm.streamed, gemm.parts or gemm.passing),
        w.factor,
    )
    # What a box has of whole steps lies step after step, as a stage has it. Behind the last row are more
    # (moe_memory): it takes longer to make zeros than to copy.
    extent = rows + gemm.rows_behind
    steps, columns = (1 if k % plan.TILE_COLUMNS else gemm.box_steps), plan.TILE_COLUMNS
    tensor = None
    if steps > 1:
        dims = (columns, extent, k // columns, 1, 1)
        tensor = Map(dims, (2 * x_row, 2 * columns, 16, 16), (columns, gemm.box, steps, 1, 1))
    elif gemm.box:
        tensor = Map((k, extent, 1, 1, 1), (2 * x_row, 16, 16, 16), (columns, gemm.box, 1, 1, 1))
    return Group(gemm.plan, tensor, steps, numbers)


class Map(NamedTuple):
    """A tensor of float16 numbers, fastest axis first: extents, strides in bytes (but the first's), box."""

    dims: Shape
    strides: Shape
    box: Shape


NO_MAP = bytes(128)


@lru_cache(maxsize=4096)
def source(shape: Shape, strides: Shape, half: bool, aligned: bool = True) -> Source:
    """Float activations with byte strides: read as they are if they are float16 (`half`) in whole 16-byte
    pieces, of which the first is `aligned`.

    Rows that run backwards or repeat each other are copied: the copy engine has no such strides.
    """
    forward = all(stride >= 0 and stride % 16 == 0 for stride in strides[:-1])
    whole = shape[-1] % WHOLE == 0
    own = half and aligned and strides[-1] == 2 and forward and whole
    if own and (shape[-2] == 1 or strides[-2] > 0):
        return Source(shape, tuple(stride // 2 for stride in strides[:-1]), None, False)
    return prepared(shape, half)


@lru_cache(maxsize=4096)
def prepared(shape: Shape, half: bool) -> Source:
    """Activations, float16 numbers (`half`) or others, that become rows of 16-byte pieces, and may take signs
    as they do."""
    entry = "prepare_halves" if half else "prepare_rows"
    return Source(shape, _contiguous(shape[:-1], whole_pieces(shape[-1])), entry, not half)


@lru_cache(maxsize=4096)
def quantized_source(shape: Shape, has_rows: bool) -> Source:
    """q8_1 activations, as the float16 rows that were made with them, or must be made of them."""
    return Source(shape, _contiguous(shape[:-1], shape[-1]), None if has_rows else "blocks_to_half", True)


@lru_cache(maxsize=4096)
def quantized_first(shape: Shape, half: bool) -> Source:
    """Float activations as the float16 rows that q8_1 blocks of them stand for, which a kernel makes before
    the product, of float16 numbers (`half`) or others."""
    entry = "round_halves" if half else "quantize_rows"
    return Source(shape, _contiguous(shape[:-1], shape[-1]), entry, not half)


@lru_cache(maxsize=4096)
def resolve(w: Weight, x: Source, out: Output, end: Epilogue, gpu: plan.Gpu) -> Launch:
    """Plan the product of x with a weight, and pack its numbers."""
    n, k = w.shape[-2], whole_pieces(w.shape[-1])
    residual = out.strides if end.residual_strides is None else end.residual_strides
    m, rows, axes = _merge(w.shape, x, out, residual)
    extents = [extent for extent, _ in axes]
    steps = list(zip(*(steps for _, steps in axes), strict=True))
    # A map cannot repeat rows (stride 0). A vector has one, of any stride.
    how = {"repeats": m > 1 and rows[1] == 0, "to_convert": x.to_convert}
    how["signs"] = w.signed and x.entry is None  # rows that are made anew have them
    gemm = plan.gemm(plan.Problem(w.format, m, n, k, gpu, prod(extents), w.half), **how)
    check.require_launch_size(max(gemm.plan.grid[1:]), plan.MOST_BLOCKS, out.shape)
    # Row factors of a conversion go with its rows.
    x_rows = [stride // k if x.factors else 0 for stride in steps[1]]
    numbers = _NUMBERS.pack(
        *(rows[1], rows[2], out.strides[-1], rows[3], residual[-1]),
        *(*extents, *steps[0], *steps[1], *steps[2], *steps[3], *x_rows),
        *(m, n, k, gemm.chunk, out.dtype, end.bias_dtype, end.residual_dtype),
        *(ACTIVATIONS[end.activation], int(end.bias_stacked), gemm.streamed, gemm.parts or gemm.passing),
        w.factor,
    )
    maps: tuple[Map | None, ...] = ()
    # What a tile has beyond the last row stays what it is: it makes results that nobody stores.
    if gemm.box:  # axes that x lacks have extent 1, and any stride
        dims = [extent if step else 1 for extent, step in zip(extents, steps[1], strict=True)]
        strides = [2 * step or 16 for step in steps[1]]
        tensor = (k, m, *dims[::-1]), (2 * rows[1] or 16, *strides[::-1])
        whole, rest = (Map(*tensor, (plan.TILE_COLUMNS, box, 1, 1, 1)) for box in (gemm.box, m % gemm.box))
        maps = (whole if m >= gemm.box else None, rest if m % gemm.box else None)
    straight, out_map = False, None
    if gemm.out_box and out.strides[-1] == 1 and end.activation is None and end.residual_strides is None:
        along = zip(extents, steps[2], strict=True)
        steps_out = (rows[2] if m > 1 else 0, *(step if extent > 1 else 0 for extent, step in along))
        if out.dtype == DTYPES[check.FLOAT32]:
            straight = True
        elif not any(step % 8 or step < 0 for step in steps_out):
            row, *outer = (2 * step or 16 for step in steps_out)
            box = (plan.TILE_COLUMNS, gemm.out_box, 1, 1, 1)
            straight, out_map = True, Map((n, m, *extents[::-1]), (row, *outer[::-1]), box)
    return Launch(
        *(gemm.plan, maps, out_map, straight, numbers, gemm.partials),
        *(gemm.signs_go_to, gemm.converts_x, gemm.turns_sums),
    )


def _merge(w: Shape, x: Source, out: Output, residual: Shape) -> tuple[int, Shape, list[tuple[int, Shape]]]:
    """Merge leading axes as far as strides allow, into the batch rows where W does not vary.

    Returns the batch rows m, their strides, and three leading axes (extent, strides), slowest first, padded
    with ones. Strides are of W (in matrices), x, out and the residual (in elements).
    """
    lead = len(out.shape) - 2
    w_axes = _broadcast(w[:-2], _contiguous(w[:-2], 1), lead)
    x_axes = _broadcast(x.shape[:-2], x.strides[:-1], lead)
    merged: list[tuple[int, Shape]] = [(out.shape[-2], (0, x.strides[-1], out.strides[-2], residual[-2]))]
    for axis in reversed(range(lead)):
        extent, steps = out.shape[axis], (w_axes[axis], x_axes[axis], out.strides[axis], residual[axis])
        inner, inner_steps = merged[0]
        if extent == 1:
            continue
        # A single row has no stride: of x[:, None] the axis before is the rows'.
        single = len(merged) == inner == 1 and steps[0] == 0
        if single:
            merged[0] = (extent, steps)
        elif all(step == inner * inner_step for step, inner_step in zip(steps, inner_steps, strict=True)):
            merged[0] = (extent * inner, inner_steps)
        else:
            merged.insert(0, (extent, steps))
    *outer, (m, rows) = merged
    check.require_batch_axes(len(outer), _BATCH_AXES, out.shape)
    return m, rows, [(1, (0, 0, 0, 0))] * (_BATCH_AXES - len(outer)) + outer


def _contiguous(rows: Shape, columns: int) -> Shape:
    """Element strides of rows of `columns` elements back to back."""
    return tuple(prod(rows[axis + 1 :]) * columns for axis in range(len(rows)))


def _broadcast(shape: Shape, strides: Shape, axes: int) -> Shape:
    """Strides over `axes` leading axes: 0 where the operand lacks the axis or has extent 1."""
    own = tuple(0 if extent == 1 else stride for extent, stride in zip(shape, strides, strict=True))
    return (0,) * (axes - len(own)) + own
