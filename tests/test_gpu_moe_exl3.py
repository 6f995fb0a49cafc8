"""Mixtures of EXL3 experts: rows and sums are turned between launches of all experts, by each one's sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mixtures import BF16, F, check_in_a_graph, close, gauss, on_gpu, reference, routed
from walks import GENERATORS, PRODUCT_BITS, random_exl3

import cuquant as cq
from cuquant import device, plan
from cuquant.cuda import jit, moe_memory
from cuquant.plan.moe import Load
from cuquant.testing import as_numpy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("grouped")]
H = np.float16
K, HIDDEN, N, COUNT = 256, 384, 128, 4


@pytest.fixture(scope="module", autouse=True)
def compiled(compile_ahead: Callable[[Any], None]) -> None:
    todo = [
        plan.moe.product(cq.Exl3(bits, "mcg"), Load(tokens, 2, COUNT), n, k, jit.gpu())
        for bits in PRODUCT_BITS
        for tokens in (1, 3, 60, 300)
        for n, k in ((HIDDEN, K), (N, HIDDEN))
    ]
    compile_ahead({made.gemm.plan.kernel for made in todo if made is not None})


def stacks(
    bits: Any = 4, generators: Any = "mcg", count: int = COUNT, k: int = K, hidden: int = HIDDEN, n: int = N
) -> cq.Experts:
    """Experts on the GPU; of one format, or of three."""
    shapes = ((count, hidden, k), (count, hidden, k), (count, n, hidden))
    three = [given if isinstance(given, tuple) else (given,) * 3 for given in (bits, generators)]
    made = (
        random_exl3(b, shape, generator, seed=seed)
        for seed, (shape, b, generator) in enumerate(zip(shapes, *three, strict=True))
    )
    return cq.Experts(*(w.to_device("cuda") for w in made))


def check(experts: cq.Experts, x: Any, ids: Any, probs: Any, activation: str | None = "silu") -> None:
    y = cq.moe(*on_gpu(x, ids, probs)[:1], experts, *on_gpu(x, ids, probs)[1:], activation=activation)
    close(y, reference(x, experts, ids, probs, activation), x.dtype)


@pytest.mark.parametrize("bits", PRODUCT_BITS)
@pytest.mark.parametrize("tokens", [1, 3, 60, 300])
def test_numbers_of_tokens(bits: int, tokens: int) -> None:
    check(stacks(bits), gauss(tokens, K), *routed(tokens, COUNT, 2))


@pytest.mark.parametrize("dtype", [H, BF16, F])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_erf", "silu"])
def test_types_and_activations(dtype: Any, activation: str | None) -> None:
    check(stacks(), gauss(5, K).astype(dtype), *routed(5, COUNT, 2), activation)


def test_weights_of_three_formats() -> None:
    check(stacks((3, 2, 6), GENERATORS), gauss(40, K), *routed(40, COUNT, 2))


@pytest.mark.parametrize(("k", "hidden"), [(16512, 128), (128, 16512)])
def test_rows_that_no_block_keeps(k: int, hidden: int) -> None:
    """They are gone through twice."""
    check(stacks(count=2, k=k, hidden=hidden), gauss(3, k), *routed(3, 2, 1))


@pytest.mark.parametrize("bad", [-1, COUNT, 2**31 - 1])
@pytest.mark.parametrize("tokens", [6, 60])
def test_an_id_out_of_range_makes_its_token_nan(tokens: int, bad: int) -> None:
    x, experts, (ids, probs) = gauss(tokens, K), stacks(), routed(tokens, COUNT, 2)
    ids[1, 0] = ids[4, 1] = bad
    check(experts, x, ids, probs)
    ids[...] = bad
    check(experts, x, ids, probs)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_stay_with_their_token(bad: float) -> None:
    x, experts, (ids, probs) = gauss(7, K), stacks(), routed(7, COUNT, 2)
    x[3, 5] = bad
    y = as_numpy(cq.moe(on_gpu(x, ids, probs)[0], experts, ids, probs))
    assert np.isnan(y[3]).all()
    rest = [0, 1, 2, 4, 5, 6]
    close(y[rest], reference(x[rest], experts, ids[rest], probs[rest]))


@pytest.mark.parametrize("magnitude", [1e-15, 1e-6, 1e4, 1e17])
def test_magnitudes(magnitude: float) -> None:
    check(stacks(), gauss(5, K) * F(magnitude), *routed(5, COUNT, 2), "relu")


def test_any_strides() -> None:
    cupy = device.cupy()
    x, experts, (ids, probs) = gauss(6, 2 * K)[:, ::2], stacks(), routed(6, COUNT, 2)
    out = cupy.zeros((N, 6), H).T
    wide = cupy.asarray(gauss(6, 2 * K))[:, ::2]
    assert cq.moe(wide, experts, cupy.asarray(ids.astype(np.int64)), probs, out=out) is out
    close(out, reference(x, experts, ids, probs), H)


def test_more_tokens_than_the_workspace_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_memory, "WORKSPACE", 1 << 18)
    check(stacks(), gauss(200, K), *routed(200, COUNT, 2))


@pytest.mark.parametrize("tokens", [1, 60])
def test_a_step_in_a_graph(tokens: int) -> None:
    check_in_a_graph(stacks(), tokens, 3)


def test_fallback_beside_other_formats_and_for_blocks_of_x(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are products of their own then, of matrices that lie where they are."""
    experts = stacks()
    down = cq.quantize(gauss(COUNT, N, HIDDEN), "q8_0").to_device("cuda")
    x, ids, probs = on_gpu(gauss(6, K), *routed(6, COUNT, 2))
    for w in experts:
        w.prepare()
    monkeypatch.setattr("cuquant.cuda.exl3._repack", None)
    monkeypatch.setattr("cuquant.cuda.exl3.dequantize", None)
    others = experts._replace(down=down)
    found = [cq.moe(x, others, ids, probs) for _ in range(2)]
    q = cq.quantize(x, "q8_1")
    blocks = cq.moe(q, experts, ids, probs)
    assert all(w.fragments().matrices[int(ids[0, 0])].repeats for w in experts[:2])
    monkeypatch.undo()
    for y in found:
        close(y, reference(x, others, ids, probs))
    on_cpu = cq.Experts(*(w.to_device("cpu") for w in experts))
    close(blocks, cq.moe(q.to_device("cpu"), on_cpu, as_numpy(ids), as_numpy(probs)))
