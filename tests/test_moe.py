"""Mixtures of experts against a loop over tokens and experts in float64."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cuquant as cq
from cuquant import testing
from cuquant.ops import moe as module

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
WEIGHTS = [name for name in cq.formats.names() if not cq.formats.get(name).for_activations]
OTHERS = [cq.KBit(3, scale="decoded", absmax="float16"), cq.Int4(-1), cq.Int4(-1, symmetric=False)]
ACTIVATIONS = [None, "relu", "gelu", "gelu_erf", "silu"]


def gauss(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, F)


def stacks(
    format: Any, count: int = 5, k: int = 128, hidden: int = 128, n: int = 48, seed: int = 0
) -> cq.Experts:
    """Experts whose numbers have about the size of what they multiply; floats for the format None."""
    shapes = [(count, hidden, k), (count, hidden, k), (count, n, hidden)]
    floats = [gauss(*shape, seed=seed + i) / F(np.sqrt(shape[-1])) for i, shape in enumerate(shapes)]
    return cq.Experts(*(w if format is None else cq.quantize(w, format) for w in floats))


def routed(tokens: int, count: int, top_k: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    ids, probs = cq.route(gauss(tokens, count, seed=seed + 7), top_k)
    return ids, probs


def reference(x: Any, experts: cq.Experts, ids: Any, probs: Any, activation: str | None = "silu") -> Any:
    """A token and an expert at a time, in float64; x [tokens, K]."""
    x, ids, probs = (testing.as_numpy(a) for a in (x, ids, probs))
    gate, up, down = (testing.as_numpy(w).astype(np.float64) for w in experts)
    y = np.zeros((len(x), down.shape[1]))
    for t in range(len(x)):
        for j in range(ids.shape[1]):
            e = ids[t, j]
            if not 0 <= e < len(gate):
                y[t] = np.nan
                continue
            act = testing.linear(x[t].astype(np.float64), gate[e], activation=activation)
            y[t] += float(probs[t, j]) * (down[e] @ (act * (up[e] @ x[t].astype(np.float64))))
    return y


def close(y: Any, expected: Any, dtype: Any = F) -> None:
    assert y.dtype == dtype
    assert testing.nmse(y, expected) <= (5e-5 if dtype == BF16 else 1e-5)
    assert y.size == 0 or testing.worst_element(y, expected) <= (0.05 if dtype == BF16 else 0.01)


@pytest.mark.parametrize("format", [None, *WEIGHTS, *OTHERS], ids=str)
@pytest.mark.parametrize("dtype", [F, np.float16, BF16], ids=["float32", "float16", "bfloat16"])
def test_formats_and_types(format: Any, dtype: Any) -> None:
    k = 128 if format is None else max(128, cq.formats.get(format).block_size)
    x, experts, (ids, probs) = gauss(9, k).astype(dtype), stacks(format, k=k, hidden=k), routed(9, 5, 2)
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs), dtype)


@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 257])
@pytest.mark.parametrize(("count", "top_k"), [(1, 1), (2, 2), (8, 2), (8, 8), (64, 1), (64, 8)])
def test_sizes(tokens: int, count: int, top_k: int) -> None:
    experts = stacks("q4_0", count, k=32, hidden=64, n=24)
    x, (ids, probs) = gauss(tokens, 32), routed(tokens, count, top_k)
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str | None) -> None:
    x, experts, (ids, probs) = gauss(6, 128), stacks("q5_1"), routed(6, 5, 3)
    expected = reference(x, experts, ids, probs, activation)
    close(cq.moe(x, experts, ids, probs, activation), expected)
    others = [reference(x, experts, ids, probs, other) for other in ACTIVATIONS if other != activation]
    assert min(testing.nmse(other, expected) for other in others) > 1e-9


@pytest.mark.parametrize("magnitude", [1e-12, 1e-8, 1.0, 1e8])
def test_magnitudes(magnitude: float) -> None:
    x, experts, (ids, probs) = gauss(6, 128) * F(magnitude), stacks("q8_0"), routed(6, 5, 3)
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))


@pytest.mark.parametrize("only", [0, 3, 7])
def test_all_tokens_to_one_expert(only: int) -> None:
    experts, x = stacks("q4_1", 8), gauss(70, 128)
    ids, probs = np.full((70, 1), only, np.int32), gauss(70, 1, seed=3)
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))


def test_an_expert_several_times_in_a_token() -> None:
    experts, x = stacks("q4_0", 3), gauss(5, 128)
    ids = np.array([[1, 1, 1], [0, 1, 0], [2, 0, 1], [1, 1, 0], [2, 2, 2]])
    probs = gauss(5, 3, seed=3)
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))


def test_no_expert_at_all() -> None:
    x, ids, probs = gauss(4, 128), np.empty((4, 0), np.int32), np.empty((4, 0), F)
    np.testing.assert_array_equal(cq.moe(x, stacks("q4_0"), ids, probs), np.zeros((4, 48), F))


def test_experts_without_tokens_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one with NaN weights touch other tokens than its own."""
    w = stacks(None, 6)
    w.gate[2] = w.up[4] = w.down[5] = np.nan
    x, ids, probs = gauss(7, 128), np.array([[0, 1], [3, 1]] * 3 + [[0, 5]]), np.ones((7, 2), F)
    calls = []

    def counted(rows: Any, *others: Any, **options: Any) -> Any:
        calls.append(len(rows))
        return cq.linear(rows, *others, **options)

    monkeypatch.setattr(module, "linear", counted)
    y = cq.moe(x, w, ids, probs)
    assert calls == [4, 6, 3, 1] * 3
    assert np.isnan(y[6]).all()
    close(y[:6], reference(x[:6], w, ids[:6], probs[:6]))


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_makes_its_token_nan(bad: int) -> None:
    x, experts, (ids, probs) = gauss(6, 128), stacks("q4_0"), routed(6, 5, 2)
    ids[1, 0] = ids[4, 1] = bad
    y = cq.moe(x, experts, ids, probs)
    assert np.isnan(y[[1, 4]]).all()
    rest = [0, 2, 3, 5]
    close(y[rest], reference(x, experts, ids, probs)[rest])


def test_ids_of_a_type_that_does_not_hold_the_number_of_experts() -> None:
    x, experts, (ids, probs) = gauss(6, 32), stacks(None, 128, 32, 32), routed(6, 128, 2)
    ids[1, 0] = -1
    np.testing.assert_array_equal(*(cq.moe(x, experts, ids.astype(t), probs) for t in (np.int8, np.int64)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_rows(bad: float) -> None:
    x, experts, (ids, probs) = gauss(6, 128), stacks("q4_0"), routed(6, 5, 2)
    clean = cq.moe(x, experts, ids, probs)
    x[2, 5], probs[4, 1] = bad, np.nan
    y = cq.moe(x, experts, ids, probs)
    assert not np.isfinite(y[2]).any()
    assert np.isnan(y[4]).all()
    np.testing.assert_allclose(y[[0, 1, 3, 5]], clean[[0, 1, 3, 5]], rtol=1e-5, atol=1e-6)


def test_float16_overflows_as_numpy_does() -> None:
    x, experts, (ids, probs) = gauss(3, 128), stacks("q8_0"), routed(3, 5, 2)
    y = cq.moe(x.astype(np.float16), experts, ids, probs * F(1e8))
    assert np.isinf(y).any()
    assert not np.isnan(y).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numpy_s_strictest_errors_change_nothing(activation: str | None) -> None:
    """Of mixtures, and of routing, whose least probabilities are 0."""
    experts, (ids, probs) = stacks("q4_0"), routed(6, 5, 2)
    for size in (1e-38, 1, 1e20):
        for dtype in (np.float16, BF16, F):
            with np.errstate(all="ignore"):
                x, logits = (gauss(6, 128) * F(size)).astype(dtype), (gauss(6, 40) * F(200)).astype(dtype)
                expected = cq.moe(x, experts, ids, probs, activation=activation), *cq.route(logits, 40)
            with np.errstate(all="raise"):
                got = cq.moe(x, experts, ids, probs, activation=activation), *cq.route(logits, 40)
            assert [each.tobytes() for each in got] == [each.tobytes() for each in expected]
            assert not got[2].all()


def test_the_same_bits_again() -> None:
    x, experts, (ids, probs) = gauss(257, 128), stacks("kbit4", 16), routed(257, 16, 4)
    first = cq.moe(x, experts, ids, probs)
    for _ in range(3):
        np.testing.assert_array_equal(cq.moe(x, experts, ids, probs), first)


def test_tokens_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x, experts, (ids, probs) = gauss(50, 128), stacks("q4_0", 2), routed(50, 2, 2)
    monkeypatch.setattr(module, "_HIDDEN", 128 * 7)
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))


def test_formats_may_differ() -> None:
    one, two, three = stacks("q4_0"), stacks("kbit3", seed=5), stacks(None, seed=9)
    experts = cq.Experts(one.gate, two.up, three.down.astype(np.float16))
    x, (ids, probs) = gauss(6, 128), routed(6, 5, 2)
    close(cq.moe(x, experts, ids, probs), reference(x, experts, ids, probs))


def test_quantized_activations() -> None:
    """What `down` multiplies is quantized, too; a value at the border of two codes may fall elsewhere."""
    experts, (ids, probs) = stacks("q4_0"), routed(6, 5, 2)
    x = cq.quantize(gauss(6, 128), "q8_1")
    y = cq.moe(x, experts, ids, probs)
    assert y.dtype == F
    exact = reference(x, experts, ids, probs)
    assert 1e-6 < testing.nmse(y, exact) < 1e-3
    floats = cq.Experts(experts.gate, experts.up, experts.down.dequantize())
    close(cq.moe(x, floats, ids, probs), exact)


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (1, 3, 2)])
@pytest.mark.parametrize("quantized", [False, True])
def test_leading_axes(lead: tuple[int, ...], quantized: bool) -> None:
    experts, count = stacks("q4_0"), int(np.prod(lead))
    x, (ids, probs) = gauss(count, 128), routed(count, 5, 2)
    flat = cq.moe(cq.quantize(x, "q8_1") if quantized else x, experts, ids, probs)
    shaped = x.reshape(*lead, 128)
    y = cq.moe(
        cq.quantize(shaped, "q8_1") if quantized else shaped,
        experts,
        ids.reshape(*lead, 2),
        probs.reshape(*lead, 2),
    )
    np.testing.assert_array_equal(y, flat.reshape(*lead, 48))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_integers_and_probabilities_of_other_types(kind: Any) -> None:
    x, experts, (ids, probs) = gauss(6, 128), stacks("q4_0"), routed(6, 5, 2)
    half = probs.astype(np.float16)
    close(cq.moe(x, experts, ids.astype(kind), half), reference(x, experts, ids, half))


def test_out_is_written_whatever_its_strides() -> None:
    x, experts, (ids, probs) = gauss(6, 128)[:, ::-1], stacks("q4_0"), routed(6, 5, 2)
    expected = reference(x, experts, ids, probs)
    guarded = testing.Guarded((6, 48), np.float16, strided=True)
    assert cq.moe(x, experts, ids, probs, out=guarded.array) is guarded.array
    close(guarded.array, expected, np.float16)
    assert guarded.intact()


def test_out_is_checked() -> None:
    x, experts, (ids, probs) = gauss(6, 64), stacks("q8_0", k=64, hidden=64, n=64), routed(6, 5, 2)
    with pytest.raises(ValueError, match=r"out has shape \(6, 5\); the result has \(6, 64\)"):
        cq.moe(x, experts, ids, probs, out=np.empty((6, 5), F))
    with pytest.raises(TypeError, match="out has dtype float64"):
        cq.moe(x, experts, ids, probs, out=np.empty((6, 64)))
    with pytest.raises(ValueError, match="out may share memory with x"):
        cq.moe(x, experts, ids, probs, out=x)
    buffer = np.zeros((6, 64), F)
    inside = buffer[:, :2]
    with pytest.raises(ValueError, match="out may share memory with expert_probs"):
        cq.moe(x, experts, ids, inside, out=buffer)


def refused(message: str, kind: type[Exception] = ValueError, **changes: Any) -> None:
    ids, probs = routed(6, 5, 2)
    arguments: dict[str, Any] = {"x": gauss(6, 128), "experts": stacks("q4_0")}
    arguments |= {"expert_ids": ids, "expert_probs": probs}
    with pytest.raises(kind, match=message):
        cq.moe(**(arguments | changes))


def test_operands_that_do_not_fit() -> None:
    good = stacks("q4_0")
    ids, probs = routed(6, 5, 2)
    refused(r"x \(6, 96\) and experts.gate \(5, 128, 128\) differ in K", x=gauss(6, 96))
    refused("x has dtype float64", TypeError, x=np.zeros((6, 128)))
    refused("x is quantized to q4_0, a format of weights", TypeError, x=cq.quantize(gauss(6, 128), "q4_0"))
    refused("experts is a list; a cuquant.Experts", TypeError, experts=[*good])
    refused(r"experts.up is a transposed q4_0", TypeError, experts=good._replace(up=good.up.T))
    refused("experts.down is an int", TypeError, experts=good._replace(down=3))
    refused(r"experts have gate \(128, 128\), up", experts=good._replace(gate=good.gate[0]))
    refused(
        r"experts have gate \(128, 128\), up \(128, 128\)",
        experts=cq.Experts._make((good.gate[0], good.up[0], cq.quantize(np.zeros((128, 1, 128), F), "q4_0"))),
    )
    refused(r"up \(4, 128, 128\) and down", experts=good._replace(up=good.up[:4]))
    refused(r"down \(5, 48, 64\); \(E, F, K\)", experts=good._replace(down=stacks("q4_0", hidden=64).down))
    refused(
        "experts.gate is quantized to q8_1",
        TypeError,
        experts=good._replace(gate=cq.quantize(gauss(5, 128, 128), "q8_1")),
    )
    refused(r"expert_ids \(5, 2\) and expert_probs \(6, 2\) do not fit x \(6, 128\)", expert_ids=ids[:5])
    refused(r"expert_probs \(6, 1\) do not fit", expert_probs=probs[:, :1])
    one: dict[str, Any] = {"expert_ids": np.array(ids[0, 0]), "expert_probs": np.array(probs[0, 0])}
    refused(r"expert_ids \(\) and expert_probs \(\) do not fit x \(128,\)", x=gauss(128), **one)
    refused("do not fit x", expert_ids=ids[None], expert_probs=probs[None])
    refused("expert_ids has dtype float32; experts are numbered", TypeError, expert_ids=probs)
    refused("expert_ids has dtype bool", TypeError, expert_ids=ids > 0)
    refused("expert_probs has dtype int32", TypeError, expert_probs=ids)
    swapped = r"expert_ids has dtype float32, expert_probs int32: they are swapped; moe\(x, experts, expert_i"
    refused(swapped, TypeError, expert_ids=probs, expert_probs=ids)
    lists = {"expert_ids": ids.tolist(), "expert_probs": probs.tolist()}
    refused(r"expert_ids is a list; .* pass numpy\.asarray\(expert_ids\)$", TypeError, **lists)
    del lists["expert_ids"]
    refused(r"pass numpy\.asarray\(expert_probs, numpy\.float32\)$", TypeError, **lists)
    refused("unknown activation 'tanh'", activation="tanh")
    refused(r"x \(\) and experts.gate", x=np.zeros((), F))


def test_experts_are_checked_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of `moe`; copies and pickles are experts again."""
    gate, up, down = good = stacks("q4_0")
    assert repr(good).startswith("Experts(gate=QuantizedArray(")
    for made in (copy.copy(good), pickle.loads(pickle.dumps(good)), cq.Experts(down=down, gate=gate, up=up)):
        assert type(made) is cq.Experts
        assert made._fields == ("gate", "up", "down")
        np.testing.assert_array_equal(made.up.blocks, up.blocks)
    refused: list[tuple[type[Exception], str, tuple[Any, Any, Any]]] = [
        (
            TypeError,
            r"^experts.up is a transposed q4_0 array of shape \(5, 128, 128\), and products transpose it "
            r"themselves: pass what it is the transpose of, of shape \(5, 128, 128\)$",
            (gate, up.T, down),
        ),
        (TypeError, r"^experts.down is an int", (gate, up, 3)),
        (TypeError, r"^experts.gate is a list; .* a stack \(numpy\.stack\)", ([*gate], up, down)),
        (TypeError, r"^experts.gate has dtype float64", (gate.dequantize().astype(float), up, down)),
        (ValueError, r"^experts have gate \(128, 128\), up", (gate[0], up, down)),
        (ValueError, r"up \(4, 128, 128\) and down .* are needed$", (gate, up[:4], down)),
    ]
    for kind, message, weights in refused:
        with pytest.raises(kind, match=message):
            cq.Experts(*weights)
    there = gate.dequantize()
    monkeypatch.setattr("cuquant.device.is_cuda", lambda a: a is there)
    monkeypatch.setattr("cuquant.check.common.readable", lambda a, what: a)
    where = (
        r"^operands are on different devices: experts\.gate on cuda, experts\.up on cpu, experts\.down on cpu"
    )
    with pytest.raises(TypeError, match=where):
        cq.Experts(there, up, down)


@pytest.mark.parametrize("gpus", [(1, 1, 1), (0, 1, 1)])
def test_experts_are_on_one_gpu(monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, ...]) -> None:
    """The current one or not."""
    runtime = SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setattr("cuquant.device.is_cuda", lambda a: True)
    monkeypatch.setattr("cuquant.device.cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    stacks = [
        SimpleNamespace(
            shape=(2, 8, 8),
            ndim=3,
            dtype=np.dtype(F),
            itemsize=4,
            data=SimpleNamespace(device_id=gpu, ptr=64),
        )
        for gpu in gpus
    ]
    for stack in stacks:
        stack.flags = SimpleNamespace(c_contiguous=True)
    if len({*gpus}) == 1:
        assert cq.Experts(*stacks).gate is stacks[0]
        return
    message = r"experts\.gate on GPU 0, experts\.up on GPU 1, .*: move the arrays to one GPU"
    with pytest.raises(ValueError, match=message):
        cq.Experts(*stacks)


@pytest.mark.parametrize("dtype", [F, np.float16, BF16])
def test_routing(dtype: Any) -> None:
    logits = (gauss(40, 11) * 3).astype(dtype)
    ids, probs = cq.route(logits, 3)
    assert (ids.dtype, probs.dtype, ids.shape, probs.shape) == (np.int32, F, (40, 3), (40, 3))
    _, softmax = cq.route(logits, 3, normalize=False)
    for row, (chosen, p, s) in enumerate(zip(ids, probs, softmax, strict=True)):
        z = logits[row].astype(np.float64)
        expected = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        assert chosen.tolist() == sorted(range(11), key=lambda e: (-z[e], e))[:3]
        np.testing.assert_allclose(s, expected[chosen], rtol=1e-6)
        np.testing.assert_allclose(p, expected[chosen] / expected[chosen].sum(), rtol=1e-6)


def test_ties_go_to_the_lower_index() -> None:
    ids, probs = cq.route(np.array([[1, 2, 2, 1, 2], [0.0, -0.0, 0.0, 0.0, -0.0]], F), 4)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    np.testing.assert_array_equal(probs[1], np.full(4, 0.25, F))


def test_routing_of_extreme_logits() -> None:
    inf, nan = np.inf, np.nan
    logits = np.array([[3e38, -3e38, 0], [-inf, 1, 1], [nan, 1, 2], [inf, 1, 2], [-inf, -inf, -inf]], F)
    ids, probs = cq.route(logits, 2)
    assert ids[:2].tolist() == [[0, 2], [1, 2]]
    np.testing.assert_array_equal(probs[:2], np.array([[1, 0], [0.5, 0.5]], F))
    assert np.isnan(probs[2:]).all()
    assert cq.route(np.zeros((0, 4), F), 4)[0].shape == (0, 4)
    assert cq.route(gauss(4), 2)[0].shape == (2,)


def test_routing_refuses() -> None:
    for top_k in (0, 6):
        with pytest.raises(ValueError, match=f"top_k is {top_k}"):
            cq.route(gauss(3, 5), top_k)
    flags: list[Any] = [True, np.True_]
    for flag in flags:
        with pytest.raises(TypeError, match="top_k is True; an integer is needed"):
            cq.route(gauss(3, 5), flag)
    with pytest.raises(TypeError, match="top_k is a float"):
        cq.route(gauss(3, 5), 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="logits has dtype int64"):
        cq.route(np.zeros((3, 5), int), 2)
    with pytest.raises(TypeError, match="normalize is an int"):
        cq.route(gauss(3, 5), 2, normalize=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits is a scalar"):
        cq.route(np.zeros((), F), 1)
    with pytest.raises(ValueError, match=r"logits has shape \(3, 0\), of no experts: one or more are needed"):
        cq.route(np.zeros((3, 0), F), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "q4_0", "kbit3"])
def test_on_the_gpu(name: str | None) -> None:
    cupy = pytest.importorskip("cupy")
    x, experts, (ids, probs) = gauss(33, 128), stacks(name), routed(33, 5, 2)
    ids[3, 0] = 9
    there = cq.Experts(*(cupy.asarray(w) if name is None else w.to_device("cuda") for w in experts))
    y = cq.moe(cupy.asarray(x), there, ids, probs).get()
    assert np.isnan(y[3]).all()
    keep = np.arange(33) != 3
    close(y[keep], reference(x, experts, ids, probs)[keep])


@pytest.mark.parametrize(("f", "k"), [(4, 0), (0, 4), (0, 0)])
def test_experts_of_no_columns_give_zeros(f: int, k: int) -> None:
    experts = cq.Experts(np.ones((2, f, k), F), np.ones((2, f, k), F), np.ones((2, 3, f), F))
    y = cq.moe(np.ones((5, k), F), experts, np.zeros((5, 1), np.int32), np.ones((5, 1), F))
    np.testing.assert_array_equal(y, np.zeros((5, 3), F))
