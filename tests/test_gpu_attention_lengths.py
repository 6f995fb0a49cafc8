"""Attention begins by lengths that may have been others than they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attending import F, changed_kernel, filled, normal, on_gpu

import cuquant as cq
from cuquant import device, testing

pytestmark = pytest.mark.gpu

OTHER_LENGTHS = {
    "none": "0",
    "many": "1 << 30",
    "negative": "-7",
    "half": "lengths.of[t] / 2",
    "more": "lengths.of[t] + 7",
    "an_empty_bucket": "t == 0 ? 0 : lengths.of[t]",
    "same_grain": "(lengths.of[t] + 15) / 16 * 16",
    "by_block": "(lengths.of[t] + int(blockIdx.x) * 37) % 1000",
}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "plain": ({}, {}, np.float16),
    "40_channels": ({"dim": 40}, {}, np.float16),
    "float32": ({}, {}, F),
    "masked": ({}, {"mask": np.arange(4200) % 3 > 0}, np.float16),
    "tracked": ({"track_attention": True}, {}, np.float16),
}
WHERE = {1: ("Lengths lengths(p, which);", "EARLY"), 5: ("Lengths lengths(p, lane);", "OVERLAPS")}
"""Where one sequence's lengths are read, and several ones'; what says that they are not yet known."""


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        *((read, "plain") for read in OTHER_LENGTHS),
        *(("by_block", kind) for kind in KINDS if kind != "plain"),
    ],
)
@pytest.mark.parametrize("batch", WHERE)
def test_lengths_that_were_others_when_a_launch_began(
    batch: int, read: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks begin by lengths that the kernel before may still change: whatever they read, results are the
    same bits, and so is what is counted of attention."""
    made, given, dtype = KINDS[kind]
    q = device.cupy().asarray(normal(batch, 1, 8, made.get("dim", 64), seed=3, dtype=dtype))
    arguments = on_gpu(**given)

    def found() -> list[Any]:
        caches = [filled(n, batch, **made) for n in (1, 50, 4099 if batch == 1 else 700)]
        results = [cq.attention(q, cache, **arguments) for cache in caches]
        weights = [t.buffers.importance for cache in caches for t in cache.tiers.values()]
        return [testing.as_numpy(a) for a in (*results, *(weights if kind == "tracked" else ()))]

    expected = found()
    line, early = WHERE[batch]
    others = f"if ({early}) for (int t = 0; t < TIERS; t++) lengths.of[t] = {OTHER_LENGTHS[read]};"
    with monkeypatch.context() as patch:
        changed_kernel(patch, "attention", line, others)
        for ours, theirs in zip(found(), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("read", ["same_grain", "by_block"])
@pytest.mark.parametrize(
    ("op", "heads", "dim", "q_len"), [("attention", 8, 128, 1), ("attention_panels", 2, 64, 64)]
)
def test_other_lengths_of_eight_heads_at_once_and_panels(
    op: str, heads: int, dim: int, q_len: int, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Likewise, of several sequences, on GPUs that have these."""
    q = device.cupy().asarray(normal(5, q_len, 2 * heads, dim, seed=3, dtype=np.float16))

    def found() -> list[Any]:
        caches = [filled(n, 5, (2,), heads, dim) for n in (64, 701)]
        return [testing.as_numpy(cq.attention(q, cache)) for cache in caches]

    expected = found()
    others = f"if (OVERLAPS) for (int t = 0; t < TIERS; t++) lengths.of[t] = {OTHER_LENGTHS[read]};"
    with monkeypatch.context() as patch:
        changed_kernel(patch, op, WHERE[5][0], others)
        for ours, theirs in zip(found(), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("shares", ["shares.y + 1", "max(2, shares.y - 1)"])
def test_lengths_that_change_while_attention_runs(shares: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another stream had appended, so that what merges waits for more shares than there are, or for
    fewer: the result is NaN, nothing hangs, and the next one is right."""
    q, cache = device.cupy().asarray(normal(1, 1, 8, 64, seed=3, dtype=np.float16)), filled(4099, 1)
    expected = testing.as_numpy(cq.attention(q, cache))
    with monkeypatch.context() as patch:
        line = "shares = ONE_SEQUENCE ? Share::all_of_single(p) : Portion::shares_of(p, sequence, lane);"
        changed_kernel(patch, "attention", line, f"if (shares.y > 1) shares.y = {shares};")
        assert np.isnan(testing.as_numpy(cq.attention(q, cache))).all()
    np.testing.assert_array_equal(testing.as_numpy(cq.attention(q, cache)), expected)
