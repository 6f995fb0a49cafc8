"""Mixtures of trellis experts on a GPU: signs of columns, of each expert and projection."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from formats_table import TRELLIS
from mixtures import F, close, gauss, kernels_of, on_gpu, reference, routed, stacks
from test_trellis import random_parts

import cuquant as cq
from cuquant import device, testing
from cuquant.cuda import moe as cuda_moe, moe_memory
from cuquant.plan.moe import Load

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("grouped")]
TOKENS = (3, 70)
"""The decode core, and others, whose rows have signs when they come."""
KINDS = ("alike", "signs", "grid", "bare_gate", "bare_up", "apart")


def trellis_stacks(name: str, kind: str, k: int = 160, hidden: int = 192, n: int = 24) -> cq.Experts:
    """Five experts, each with signs of its own. Gate and up are alike or differ in signs, or in the grid and
    magnitude, or one has no signs; or scales are too far apart for float16."""
    fmt = cq.formats.get(name)
    made: list[dict[str, Any]] = []
    assert isinstance(fmt, cq.Trellis)
    for seed, shape in enumerate(((5, hidden, k), (5, hidden, k), (5, n, hidden))):
        parts = random_parts(fmt.bits, shape, fmt.group_size, seed=seed)
        parts["grid"] = np.linspace(-1, 2 if (seed, kind) == (1, "grid") else 1, 1 << fmt.bits)
        sizes = np.random.default_rng(seed).uniform(0.5, 1, parts["scales"].shape) / np.sqrt(shape[-1])
        if (seed, kind) == (1, "grid"):
            sizes *= 300
        if kind == "apart":
            sizes *= 10.0 ** -(2.5 * np.arange(5)[:, None, None])
        parts["scales"] = np.copysign(sizes, parts["scales"]).astype(F)
        if seed == 1 and kind != "signs":
            parts["su"] = made[0]["su"]
        made.append(parts)
    for i, bare in enumerate(("bare_gate", "bare_up")):
        if kind == bare:
            made[i]["su"] = np.ones((5, k), F)
    return cq.Experts(*(cq.trellis_from_parts(**parts).to_device("cuda") for parts in made))


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    kernels = set()
    for name, tokens, half in product(TRELLIS, TOKENS, (True, False)):
        kernels |= kernels_of(name, Load(tokens, 2, 5), half, (192, 160), (24, 192))
    compile_ahead(kernels)


def agree(tokens: int, experts: cq.Experts) -> None:
    """Of floats and of q8_1, the same bits again; every fourth token is lost."""
    cupy, (ids, probs) = device.cupy(), routed(tokens, 5, 2)
    ids[2::4, 1] = 5
    x, there_ids, there_probs = on_gpu(gauss(tokens, experts.gate.shape[2]), ids, probs)
    for operand, most in ((x, 1e-5), (cq.quantize(x, "q8_1"), 1e-3)):
        y = cq.moe(operand, experts, there_ids, there_probs)
        again = cq.moe(operand, experts, there_ids, there_probs)
        assert (y.view(np.uint32) == again.view(np.uint32)).all()
        expected = reference(operand, experts, ids, probs)
        lost = np.isnan(expected).all(axis=1)
        assert (cupy.asnumpy(cupy.isnan(y)).all(axis=1) == lost).all()
        assert testing.nmse(testing.as_numpy(y)[~lost], expected[~lost]) <= most


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRELLIS)
def test_signs_of_columns(name: str, kind: str, tokens: int) -> None:
    experts = trellis_stacks(name, kind)
    agree(tokens, experts)
    gate, up = (w.fragments() for w in (experts.gate, experts.up))
    prepared = moe_memory.Mixture(gate, up, experts.down.fragments(), "silu", False)
    assert prepared.alike() == (kind in ("alike", "grid", "apart"))
    assert (gate.lift == up.lift) == (kind != "grid")
    assert gate.half == (kind != "apart")
    assert (gate.signs is None, up.signs is None) == (kind == "bare_gate", kind == "bare_up")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("whole", ["gate", "up", "down"])
def test_signs_of_some_projections(whole: str, tokens: int) -> None:
    experts = stacks("q4_0", k=160, hidden=192, n=24)
    own = getattr(trellis_stacks("trellis3-32", "alike"), whole)
    agree(tokens, experts._replace(**{whole: own}))


def test_trellis_beyond_the_kernels_fallback() -> None:
    """Sides that are no whole pieces, and a grid that float16 does not hold."""
    odd = trellis_stacks("trellis3-32", "alike", k=40, hidden=72)
    parts = random_parts(2, (5, 24, 192)) | {"grid": [1e-30, 1, 3]}
    wide = stacks("q4_0", k=160, hidden=192)._replace(down=cq.trellis_from_parts(**parts).to_device("cuda"))
    for experts in (odd, wide):
        x, ids, probs = gauss(6, experts.gate.shape[2]), *routed(6, 5, 2)
        assert not cuda_moe.takes(x, *experts, 2)
        there = on_gpu(x, ids, probs)
        close(cq.moe(there[0], experts, *there[1:]), reference(x, experts, ids, probs))
