"""Operands of mixtures of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from .common import a_or_an, array, count, floats, readable
from .products import weights


def experts(value: Any) -> tuple[Any, Any, Any]:
    """Stacks gate (E, F, K), up (E, F, K) and down (E, N, F) of weights, as an `Experts` has them."""
    if not all(hasattr(value, name) for name in ("gate", "up", "down")):
        raise TypeError(f"experts is {a_or_an(value)}; a cuquant.Experts(gate, up, down) is needed")
    gate, up, down = (weights(getattr(value, name), f"experts.{name}") for name in ("gate", "up", "down"))
    shapes = gate.shape, up.shape, down.shape
    if any(len(s) != 3 for s in shapes) or up.shape != gate.shape or down.shape[::2] != gate.shape[:2]:
        raise ValueError(
            f"experts have gate {shapes[0]}, up {shapes[1]} and down {shapes[2]}; "
            "(E, F, K), (E, F, K) and (E, N, F) are needed"
        )
    return gate, up, down


def routing(ids: Any, probs: Any, x: tuple[int, ...], gate: tuple[int, ...]) -> tuple[Any, Any]:
    """Ids and probabilities (..., top_k) of the tokens x (..., K), which gates (E, F, K) take."""
    ids = readable(array(ids, "expert_ids", "integers", in_place=True), "expert_ids")
    given = array(probs, "expert_probs", in_place=True)
    if ids.dtype.kind not in "iub" and given.dtype.kind in "iu":
        raise TypeError(
            f"expert_ids has dtype {ids.dtype}, expert_probs {given.dtype}: they are swapped; "
            "moe(x, experts, expert_ids, expert_probs) has the ids first"
        )
    probs = floats(given, "expert_probs")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"expert_ids has dtype {ids.dtype}; experts are numbered by integers")
    if not x or x[-1] != gate[-1]:
        raise ValueError(f"x {x} and experts.gate {gate} differ in K, their last axis")
    if ids.shape[:-1] != x[:-1] or ids.ndim != len(x) or probs.shape != ids.shape:
        raise ValueError(
            f"expert_ids {ids.shape} and expert_probs {probs.shape} do not fit x {x}: both are (..., top_k), "
            "with the leading axes of x"
        )
    return ids, probs


def require_top_k(value: Any, logits: tuple[int, ...]) -> None:
    """An integer from 1 to the number of experts."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"top_k is {value}; an integer is needed")
    if not logits:
        raise ValueError("logits is a scalar; (..., E) is needed")
    if logits[-1] == 0:
        raise ValueError(f"logits has shape {logits}, of no experts: one or more are needed, as (..., E)")
    count(value, "top_k", most=logits[-1])
