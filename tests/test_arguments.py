"""What the host packs is what kernels take: structs member by member, and types of arguments."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import nvrtc
import pytest

import cuquant as cq
from cuquant import plan
from cuquant.cuda import jit, problem, trellis as cuda_trellis
from cuquant.formats.trellis_search import CANDIDATES, search_of
from cuquant.kv import appender, buckets, codes, cuda, mover
from cuquant.plan import attention as kv_plan, caches
from cuquant.plan.blocks import ACTIVATION_KERNELS

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (test extra)")


def offsets(*packed: str) -> list[int]:
    """Where members of these types start that are packed one after the other, and where the last one ends.
    Bytes are one member, padding is none."""

    def places() -> Iterator[int]:
        at = 0
        for count, code in re.findall(r"(\d*)([a-zA-Z])", "".join(packed)):
            number = int(count or 1)
            for size in [number] if code in "sx" else [struct.calcsize(f"<{code}")] * number:
                if code != "x":
                    yield at
                at += size
        yield at

    return list(places())


class Struct(NamedTuple):
    """A struct of a kernel file as the host packs it."""

    op: str
    name: str
    members: str
    """In order; `*3` stands for an array of three, `-` for what nobody reads."""
    places: Sequence[int]
    """Where they start, and where the last one ends."""

    def constants(self) -> dict[str, int]:
        """The same for the compiler."""
        members: list[str] = []
        for member in self.members.split():
            array, _, count = member.partition("*")
            members += [f"{array}[{i}]" for i in range(int(count))] if count else [array]
        known = zip([*map(self._where, members), f"sizeof({self.name})"], self.places, strict=True)
        return {where: at for where, at in known if where}

    def _where(self, member: str) -> str:
        """NVRTC's front end has no `offsetof`."""
        return "" if member == "-" else f"__INTADDR__(&(static_cast<{self.name}*>(nullptr)->{member}))"


MAP = len(problem.NO_MAP)
TIERS = f"{buckets._TIER.size * len(codes.BITS)}s"
OPERANDS = (f"{MAP}s" * problem._MAPS, problem._ADDRESSES.format, problem._NUMBERS.format)
OTHERS = problem._OTHERS.format
MAPS = "map rest_map out_map"
PLANES = "low high scale x unscale out bias residual partials flags values group"
MOVE: Mapping[str, Any] = mover._MOVE.fields or {}
LEVELS = cuda_trellis._levels(search_of(np.array([-1, -0.25, 0.5, 1], np.float32)), 2)
STRUCTS = [
    Struct(
        "attention",
        "Tier",
        "k v k_scale v_scale ids slots importance lengths room",
        offsets(buckets._TIER.format),
    ),
    Struct(
        "append",
        "Append",
        """tiers k v next_slots key_scales tier_of rank adds ids lengths ticket refused k_strides*3
        v_strides*3 batch n kv_heads dim k_dtype v_dtype tier capacity rotate lanes clustered""",
        offsets(TIERS, appender._PLACES.format, appender._NUMBERS.format),
    ),
    Struct(
        "attention",
        "Attention",
        """tiers q out mask positions next_slots key_scales left counters shares queries totals q_strides*3
        out_strides*4 mask_strides*4 batch q_len heads kv_heads q_dtype out_dtype mask_dtype mask_columns
        causal rotate scale finest streams group parts of_call to_come""",
        offsets(TIERS, cuda._PLACES.format, cuda._NUMBERS.format),
    ),
    Struct("attention", "Maps", "maps[0][1] maps[1]", (MAP, 4 * MAP, 4 * MAP * len(codes.BITS))),
    Struct(
        "move",
        "Move",
        "from to tier to_tier",
        [*(MOVE[name][1] for name in ("from", "to", "tier", "to_tier")), mover._MOVE.itemsize],
    ),
    Struct(
        "move",
        "Moving",
        "from to moves lengths count batch kv_heads dim",
        offsets(TIERS, TIERS, mover._NUMBERS.format),
    ),
    Struct(
        "gemm",
        "Problem",
        f"""{MAPS} {PLANES} x_row out_row out_column residual_row residual_column extent*3 w_axis*3 x_axis*3
        out_axis*3 residual_axis*3 x_row_axis*3 M N K chunk out_dtype bias_dtype residual_dtype activation
        bias_stacked streamed passing factor straight signs rows""",
        offsets(*OPERANDS, OTHERS),
    ),
    Struct(
        "gemm",
        "Problem",
        "out_map x straight",
        (problem._OUT_MAP * MAP, problem._OPERANDS_AT, problem._STRAIGHT_AT, offsets(*OPERANDS, OTHERS)[-1]),
    ),
    Struct(
        "gemm",
        "Grouped<true, 1>",
        f"""{MAPS} {PLANES} x_row straight signs rows - works apart routing.ids routing.wide routing.tokens
        routing.top_k routing.experts batch share early box_steps levels out_signs values_of_v
        factor_of_v -""",
        (*jit.layout(problem._GROUP)[1], jit.layout(problem._GROUP)[0].size),
    ),
    Struct("quantize", "Found", "first_bad lost", offsets("2Q")),
    Struct(
        "quantize_trellis",
        "Levels",
        "level middle candidate largest tried order",
        (*offsets(f"64s64s{CANDIDATES.nbytes}sfi"), len(LEVELS)),
    ),
    Struct("dequantize_trellis", "Grid", "level", offsets("64s")),
]


def kernel_of(op: str) -> plan.Kernel:
    q4_0, trellis = cq.formats.get("q4_0"), cq.formats.get("trellis3").for_kernels
    if op == "gemm":
        return plan.gemm(plan.Problem(q4_0, 1, 64, 64, plan.Gpu(90))).plan.kernel
    if op == "quantize":
        return plan.quantize(q4_0, 1, plan.Gpu(90)).kernel
    if op == "attention":  # with maps of all widths
        shape = kv_plan.Shape(1, 1, 32, 8, 128, codes.BITS, False, 1)
        return kv_plan.attention(shape, 90, plan.LARGE_GPU).attention.kernel
    kernels = [*caches.all_kernels(90, (64,)), *plan.trellis.kernels(trellis)]
    return next(kernel for kernel in kernels if kernel.op == op)


@pytest.mark.parametrize("known", STRUCTS, ids=lambda known: f"{known.name} of {known.op}")
def test_members_are_where_the_host_packs_them(known: Struct) -> None:
    """Of places that are one further none may be right."""
    kernel, places = kernel_of(known.op), known.constants()
    assert nvrtc.unequal(kernel, places) == []
    assert nvrtc.unequal(kernel, {name: at + 1 for name, at in places.items()}) == list(places)


TYPES = """
template <class T>
struct Number;
template <class T>
struct Number<T*> { static constexpr u64 OF = 0; };
template <>
struct Number<int> { static constexpr u64 OF = 1; };
template <>
struct Number<s64> { static constexpr u64 OF = 2; };
template <>
struct Number<float> { static constexpr u64 OF = 3; };

template <class F>
struct Types;
template <class... T>
struct Types<void(T...)> {
    static DEVICE constexpr u64 number() {
        u64 all = 1;
        ((all = all * 4 + Number<T>::OF), ...);
        return all;
    }
};
"""
"""A kernel's parameters as digits of a number."""


def number_of(types: str) -> int:
    return int("1" + "".join(str("Qiqf".index(code)) for code in types), 4)


@pytest.mark.parametrize(
    ("kernel", "entries"),
    [
        (plan.activations("prepare_rows", cq.formats.get("q8_1"), 1, 32).kernel, ACTIVATION_KERNELS),
        (plan.exl3.turn_rows(1, 128).kernel, plan.exl3.ARGUMENTS),
    ],
    ids=["activations", "exl3"],
)
def test_arguments_are_those_that_kernels_take(kernel: plan.Kernel, entries: Mapping[str, str]) -> None:
    numbers = {f"Types<decltype({entry})>::number()": number_of(types) for entry, types in entries.items()}
    assert nvrtc.unequal(kernel, numbers, more=TYPES) == []
    others = {name: number + 1 for name, number in numbers.items()}
    assert nvrtc.unequal(kernel, others, more=TYPES) == list(numbers)
