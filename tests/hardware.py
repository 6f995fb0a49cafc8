"""What GPUs have, and that plans keep to it."""

from __future__ import annotations

import cuquant as cq
from cuquant import plan
from cuquant.plan.cores import table_of

SHARED = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_120": 99 << 10}
"""Bytes of shared memory that a block may have, where less than 227 KB."""


def assert_staged(fmt: cq.formats.Format, gemm: plan.Gemm, batch: int, capability: int) -> None:
    """A block of the decode core has room for table, ring and rows of x, many columns of them at a time; a
    multiprocessor for two blocks, where two are to share it."""
    c = dict(gemm.plan.kernel.constants)
    given = fmt.for_kernels, capability
    roomy = c["COPIES"] > table_of(*given)[0]
    table = table_of(*given, roomy, 1 + c.get("GATED", 0))[1]
    ring = c["WARPS"] * c["DEPTH"] * plan.layout(fmt.for_kernels).slot(c["ROW_TILES"])
    rows = c["ROW_TILES"] * c["ROW_WARPS"] * plan.layout(fmt.for_kernels).row * c["ROW_FACTORS"]
    sent = c["ROW_TILES"] * c["ROW_WARPS"] * 16 * c["GROUPS"] * 8 * 4 * (c["CLUSTER"] > 1)
    assert table + rows + sent + ring + batch * (gemm.chunk * 128 + 16) <= gemm.plan.shared
    if c["RESIDENT"] == 2 and capability >= 80:
        multiprocessor = {80: 164, 86: 100, 87: 164, 89: 100, 120: 100}.get(capability, 228) << 10
        static = (1 << 10) if "GATED" in c else 512  # of grouped products, of others at most
        assert 2 * (gemm.plan.shared + (1 << 10) + static) <= multiprocessor
        assert c["DEPTH"] >= 2
