"""Evaluation with quantized keys and values."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run
from gguf_files import HELD_OUT, NANO
from hypothesis import given, settings, strategies as st
from llama_oracle import error
from scoring import same
from synthetic import QWEN3, Spec, some_tokens, write

import cuquant as cq
from cuquant.eval import config, evaluate, llama
from cuquant.eval.kv import KVBits
from cuquant.eval.llama import Llama
from cuquant.kv import codes


def load(path: Path, kv: str | None = None) -> Llama:
    model = cq.open(path)
    return Llama(config.read(model.metadata), dict(model), kv=None if kv is None else KVBits(kv))


@pytest.mark.parametrize("spec", [Spec(), QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
@pytest.mark.parametrize(("length", "first"), [(45, 10), (150, 71)])
def test_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Spec, bits: int, length: int, first: int
) -> None:
    """As a pass over all positions at once whose keys and values are replaced by what codes stand for, also
    of more queries than attention takes."""
    path, tokens = write(tmp_path / "model.gguf", spec), some_tokens(2, length)
    exact, cached = load(path).hidden(tokens, first), load(path, str(bits)).hidden(tokens, first)
    heads = llama._Block._heads

    def coded(self: Any, x: Any, pair: Any, norm: Any, count: int, *rest: Any) -> Any:
        y = heads(self, x, pair, norm, count, *rest)
        return y if count == spec.n_heads else codes.decode(*codes.encode(y, bits), bits)

    monkeypatch.setattr(llama._Block, "_heads", coded)
    expected = load(path).hidden(tokens, first)
    assert cached.dtype == np.float32
    assert error(cached, expected) < {16: 1e-3, 8: 0.02}.get(bits, 0.2)  # a rounding may turn a code
    assert error(cached[:, :3], exact[:, :3]) < {16: 2e-3, 8: 0.1}.get(bits, 2)
    assert np.median(np.abs(cached - expected)) < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("options", ["+scales", "+rotate", "+scales+rotate"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_options_of_float16_change_little(tmp_path: Path, options: str, interleaved: bool) -> None:
    spec = Spec(head_dim=32) if interleaved else Spec(**(vars(QWEN3) | {"head_dim": 32}))
    path, tokens = write(tmp_path / "model.gguf", spec), some_tokens(2, 45)
    exact = load(path).hidden(tokens, 0)
    assert error(load(path, f"16{options}").hidden(tokens, 0), exact) < 5e-3
    plain, other = (load(path, kv).hidden(tokens, 0) for kv in ("4", f"4{options}"))
    scales_are_1 = not interleaved and options == "+scales"  # qwen3 normalises its keys
    assert (error(other, plain) > 0.01) is not scales_are_1


@settings(deadline=None, max_examples=30)
@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=8), ages=st.lists(st.integers(1, 12), max_size=3)
)
def test_widths_go_by_age(steps: list[int], ages: list[int]) -> None:
    widths = [8, 4, 3][: len(ages)]
    kv = KVBits(",".join([f"{w}:{n}" for w, n in zip(widths, ages, strict=True)] + ["2"]))
    cache = cq.KVCache(1, 8, sum(steps), 2, (8, 4, 3, 2))
    for n in steps:
        kv.append(cache, *np.zeros((2, 2, n, 1, 8), np.float32))
        newest_first = [w for w, count in zip(widths, ages, strict=True) for _ in range(count)]
        newest_first += [2] * sum(steps)
        held = {int(s): b for b, tier in cache.tiers.items() for s in tier.bucket(1).global_slots}
        assert [held[s] for s in sorted(held, reverse=True)] == newest_first[: len(held)]


def test_the_greatest_number_of_tokens() -> None:
    kv, tokens = KVBits("8:2147483647,4:2147483647,2"), np.zeros((1, 3, 1, 8), np.float32)
    cache = cq.KVCache(1, 8, 3, bits=(8, 4, 2))
    kv.append(cache, tokens, tokens)
    assert len(cache.tiers[8].bucket(0).global_slots) == 3


def test_an_option_is_named_once() -> None:
    assert KVBits("8:4, 2+rotate+scales+rotate").text == "8:4,2+scales+rotate"


def test_keys_that_cannot_be_rotated_are_told_before_anything_is_scored(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", Spec())  # 16 channels of a head
    with pytest.raises(ValueError, match="rotat"):
        load(path, "4+rotate")


def test_a_mixture_is_between_its_widths(tmp_path: Path) -> None:
    path, tokens = write(tmp_path / "model.gguf", Spec()), some_tokens(2, 45)
    exact = load(path).hidden(tokens, 30)
    errors = [error(load(path, kv).hidden(tokens, 30), exact) for kv in ("8", "8:24,2", "2")]
    assert errors[0] < errors[1] < errors[2]
    young = load(path, "8:45,4:3,2").hidden(tokens, 30)
    assert np.array_equal(young, load(path, "8").hidden(tokens, 30))


def test_rows(model: Path) -> None:
    ids = some_tokens(70)
    again = ["q8_0", "q4_0", "Q8_0"]  # what comes a second time is left out
    result = evaluate(model, tokens=ids, ctx=32, formats=again, kv_bits=["8", 2, 8])
    assert [(row.format, row.kv_bits) for row in result.rows] == [
        (name, kv) for name in ("f16", "q8_0", "q4_0") for kv in (None, "8", "2")
    ]
    plain = evaluate(model, tokens=ids, ctx=32, formats=["q8_0", "q4_0"])
    for row, expected in zip(result.rows[::3], plain.rows, strict=True):
        assert row == expected
    for exact, eight, two in zip(*(result.rows[i::3] for i in range(3)), strict=True):
        assert exact.mean_kld is not None
        assert eight.mean_kld is not None
        assert two.mean_kld is not None
        assert two.mean_kld > max(eight.mean_kld, exact.mean_kld)
        assert (eight.tensors, two.tensors) == ([], [])
        assert eight.bits_per_weight == exact.bits_per_weight
    assert "KV bits" in result.render()
    assert "KV bits" not in plain.render()
    assert "kv_bits" not in result.render("csv", tensors=True)


def test_a_base_keeps_its_keys_and_values(model: Path, q4_0: Path) -> None:
    result = evaluate(q4_0, base=model, tokens=some_tokens(70), ctx=32, kv_bits=4)
    assert [(row.format, row.kv_bits) for row in result.rows] == [
        ("f16", None),
        ("q4_0", None),
        ("q4_0", "4"),
    ]


@pytest.mark.parametrize(("name", "value"), [("BATCH_TOKENS", 1), ("LOGIT_BLOCK", 7 * 299)])
def test_batches_change_nothing(model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    def result() -> cq.Evaluation:
        return evaluate(model, tokens=some_tokens(170), ctx=32, kv_bits=["8:9,3+scales", "4"])

    expected = result()
    monkeypatch.setattr(importlib.import_module("cuquant.eval.evaluate"), name, value)
    same(result(), expected)


def test_command(run: Run) -> None:
    some = ("--text", HELD_OUT, "--chunks", "1", "--ctx", "64", "--device", "cpu", "-o", "csv")
    done = run("eval", NANO, *some, "--kv-bits", "8:16,4", "--kv-bits", "2+rotate")
    header, *rows = done.out.splitlines()
    assert header.startswith("format,kv_bits,bits_per_weight,ppl")
    assert [row.split(",")[0] for row in rows] == ["f16"] * 3
    assert '"8:16,4"' in rows[1]
    assert ",2+rotate," in rows[2]


BAD = [
    "",
    "5",
    "4,",
    "2:64,8",
    "8:64,8:2,4",
    "8:64",
    "8:0,4",
    "8,4",
    "8:64,8",
    "8:64,4:",
    "4+fast",
    "+rotate",
    "-4",
    "8:64,4:256",
    "08",
    "8:064,4",
    "\uff18",  # another 8, as int() takes it
    "8:6\u0664,4",
    "8:2147483648,4",
    "8:99999999999,4",
    f"8:{'9' * 5000},4",
]


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:20])
def test_what_is_no_width(model: Path, run: Run, text: str) -> None:
    with pytest.raises(
        ValueError, match=r"kv_bits is .*; it is a width of 16, 8, 4, 3, 2, or widths with how"
    ):
        evaluate(model, tokens=some_tokens(64), ctx=32, kv_bits=text)
    done = run("eval", model, "--text", HELD_OUT, f"--kv-bits={text}")
    assert done.status == 2
    assert f"--kv-bits: {text!r} is not a width of 16, 8, 4, 3, 2, or widths with how" in done.err
    assert "kv_bits" not in done.err.partition("error:")[2]


def test_several_evaluations(model: Path) -> None:
    with pytest.raises(ValueError, match=r"may follow; several evaluations are kv_bits=\['16', '4'\]$"):
        evaluate(model, tokens=some_tokens(64), ctx=32, kv_bits="16,4")


@pytest.mark.parametrize("given", [4.0, True, None])
def test_kv_bits_are_texts_or_integers(model: Path, given: Any) -> None:
    for kv_bits in (given, [given]):
        with pytest.raises(TypeError, match=r"kv_bits is (a|None)"):
            evaluate(model, tokens=some_tokens(64), ctx=32, kv_bits=kv_bits)


def test_kv_bits_are_no_mapping(model: Path) -> None:
    given: Any = {16: 32, 4: 512}
    for kv_bits in (given, [given]):
        with pytest.raises(TypeError, match=r'kv_bits is a dict; .*: widths by age are "16:32,4", 16 bits'):
            evaluate(model, tokens=some_tokens(64), ctx=32, kv_bits=kv_bits)


def test_kv_bits_of_numpy(model: Path) -> None:
    for kv_bits in (np.int64(4), np.array([4, 4])):
        rows = evaluate(model, tokens=some_tokens(64), ctx=32, kv_bits=kv_bits).rows
        assert [row.kv_bits for row in rows] == [None, "4"]
