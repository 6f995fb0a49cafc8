"""Structs that the host packs lie in a kernel's argument as the kernel has them."""

from __future__ import annotations

import nvrtc
import pytest

import cuquant as cq
from cuquant import jit, plan, problem, sources
from cuquant.kv import appender, buckets, codes, cuda, mover, plan as kv_plan

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (test extra)")

TIERS = buckets._TIER.size * len(codes.BITS)
MAPS = 128 * problem._MAPS
OPERANDS = MAPS + problem._ADDRESSES.size
GROUPED, GROUPED_AT = jit.layout(problem._GROUP)

PLACES: dict[str, dict[str, dict[str, int]]] = {
    "append": {
        "Append": {
            "k": TIERS,
            "k_strides": TIERS + appender._PLACES.size,
            "": TIERS + appender._PLACES.size + appender._NUMBERS.size,
        },
    },
    "attention": {
        "Tier": {"room": buckets._TIER.size - 8, "": buckets._TIER.size},
        "Attention": {
            "q": TIERS,
            "q_strides": TIERS + cuda._PLACES.size,
            "": TIERS + cuda._PLACES.size + cuda._NUMBERS.size,
        },
    },
    "move": {
        "Move": {"from": 0, "to": 8, "tier": 16, "to_tier": 20, "": mover._MOVE.itemsize},
        "Moving": {"to": TIERS, "moves": 2 * TIERS, "": 2 * TIERS + mover._NUMBERS.size},
    },
    "gemm": {
        "Problem": {
            "out_map": 128 * problem._OUT_MAP,
            "low": MAPS,
            "x": problem._OPERANDS_AT,
            "values": problem._OPERANDS_AT + problem._OPERANDS.size,
            "x_row": OPERANDS,
            "straight": problem._STRAIGHT_AT,
            "": OPERANDS + problem._NUMBERS.size + problem._OTHERS.size,
        },
        "Grouped<true, 1>": {
            "signs": GROUPED_AT[17],
            "works": GROUPED_AT[20],
            "batch": GROUPED_AT[27],
            "lift_of_v": GROUPED_AT[-2],
            "": GROUPED.size,
        },
    },
}
"""By source, of structs: where members start, and (no name) the end."""


def kernel_of(op: str) -> plan.Kernel:
    if op == "gemm":
        return plan.gemm(cq.formats.get("q4_0"), 1, 64, 64, 1, True, plan.Gpu(90)).plan.kernel
    return next(kernel for kernel in kv_plan.all_kernels(90, (64,)) if kernel.op == op)


def where(struct: str, member: str) -> str:
    """As a constant of NVRTC's front end, which has no `offsetof`."""
    return f"__INTADDR__(&(static_cast<{struct}*>(nullptr)->{member}))" if member else f"sizeof({struct})"


@pytest.mark.parametrize("op", PLACES)
def test_what_the_host_packs_is_where_kernels_look(op: str) -> None:
    """With the last place moved by a byte the same assertions must fail."""
    kernel = kernel_of(op)
    members = [(where(struct, name), at) for struct, all in PLACES[op].items() for name, at in all.items()]

    def compile(moved: int) -> None:
        places = [at for _, at in members[:-1]] + [members[-1][1] + moved]
        lines = [f'static_assert({m} == {at}, "{m}");' for (m, _), at in zip(members, places, strict=True)]
        text = "\n".join([sources.flatten(op, kernel.format), *lines])
        nvrtc.compile_text(text, "sm_90a", ("-ftz=true", *kernel.defines), op)

    compile(0)
    with pytest.raises(AssertionError, match="static assertion"):
        compile(1)
