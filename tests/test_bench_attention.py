"""Benchmarks of attention: which caches are measured, and on a GPU the measuring."""

from __future__ import annotations

import contextlib
import importlib
import types
from itertools import product
from typing import Any

import numpy as np
import pytest
from cells import attention_cell

from cuquant import KVCache, attention, device
from cuquant.bench import (
    Record,
    attend,
    record as records,
)
from cuquant.bench.attention import cell_keys

attention_bench = importlib.import_module("cuquant.bench.attention")


@pytest.mark.parametrize(
    ("kind", "batch", "context", "expected"),
    [
        ("equal", 3, 64, [64, 64, 64]),
        ("spread", 8, 8192, [1024, 3072, 5120, 7168, 9216, 11264, 13312, 15360]),
        ("spread", 2, 1, [1, 1]),
        ("one-long", 8, 8192, [30249, *[5041] * 7]),
        ("one-long", 2, 1, [1, 1]),
    ],
)
def test_lengths(kind: str, batch: int, context: int, expected: list[int]) -> None:
    assert attention_bench.lengths_of(kind, batch, context) == expected


def test_lengths_have_their_mean() -> None:
    for kind, sizes in attention_bench.SIZES.items():
        for batch, context in sizes:
            lengths = attention_bench.lengths_of(kind, batch, context)
            assert len(lengths) == batch
            assert context - 1 < sum(lengths) / batch <= context
            assert (min(lengths) < max(lengths)) == (kind != "equal")


def test_cells_of_attention_by_default() -> None:
    """Those of equal lengths as ever, and a few of others; all can be told from each other."""
    every = [key for alike in cell_keys() for key in alike]
    assert len({tuple(sorted(key.items())) for key in every}) == len(every)
    lengths = [key["lengths"] for key in every]
    assert lengths.count("equal") == 6 * 3 * 6 * 2
    assert {name: lengths.count(name) for name in ("spread", "one-long")} == {"spread": 9, "one-long": 3}
    assert {(key["heads"], key["kv_heads"]) for key in every if key["lengths"] != "equal"} == {(32, 8)}
    assert {key["bits"] for key in every if key["lengths"] != "equal"} == {"8", "4", "mixed"}


@pytest.mark.parametrize(
    ("asked", "lengths", "sizes", "bits", "heads", "queries"),
    [
        ({"bits": ["2"], "queries": [1, 3]}, {"equal", "spread", "one-long"}, None, {"2"}, None, {1, 3}),
        ({"contexts": [64], "batches": [1, 3]}, {"equal"}, {(1, 64), (3, 64)}, None, None, {1}),
        ({"batches": [8], "bits": ["4"]}, {"equal"}, None, {"4"}, {(32, 8), (32, 32)}, {1}),
        (
            {"lengths": ["spread"]},
            {"spread"},
            {(8, 8192), (32, 8192), (100, 1024)},
            {"8", "4", "mixed"},
            {(32, 8)},
            {1},
        ),
        (
            {"lengths": ["spread", "one-long"], "batches": [3, 5], "heads": [(8, 2)]},
            {"spread", "one-long"},
            {(batch, context) for batch in (3, 5) for context in (8192, 1024)},
            {"8", "4", "mixed"},
            {(8, 2)},
            {1},
        ),
        (
            {"lengths": ["one-long"], "contexts": [64, 96]},
            {"one-long"},
            {(8, 64), (8, 96)},
            {"8", "4", "mixed"},
            {(32, 8)},
            {1},
        ),
    ],
)
def test_cells_of_attention_that_are_asked_for(
    asked: dict[str, Any],
    lengths: set[str],
    sizes: set[tuple[int, int]] | None,
    bits: set[str] | None,
    heads: set[tuple[int, int]] | None,
    queries: set[int],
) -> None:
    groups = cell_keys(**asked)
    every = [key for alike in groups for key in alike]
    assert len({tuple(sorted(key.items())) for key in every}) == len(every)
    assert {key["lengths"] for key in every} == lengths
    assert sizes is None or {(key["batch"], key["context"]) for key in every} == sizes
    assert bits is None or {key["bits"] for key in every} == bits
    assert heads is None or {(key["heads"], key["kv_heads"]) for key in every} == heads
    assert {key["queries"] for key in every} == queries
    for alike in groups:
        assert len({tuple((key | {"bits": ""}).items()) for key in alike}) == 1


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"contexts": [64, 32], "queries": [1, 33]}, r"queries are \[1, 33\]; .* there can be 1 to 32$"),
        ({"contexts": [64], "batches": [8], "lengths": ["spread"], "queries": [9]}, r"can be 1 to 8$"),
        ({"batches": [1], "lengths": ["one-long"]}, "lengths of a single sequence are equal, not one-long"),
    ],
)
def test_caches_that_attention_is_not_measured_of(asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        cell_keys(**asked)


def test_attention_goes_on_where_a_record_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how long the sequences are, too; cells of records without that are of equal lengths. Other libraries
    are asked for these alone."""
    asked = []

    def peer(torch: Any, **shape: int) -> None:
        asked.append(shape)

    def made(key: dict[str, Any], others: dict[str, float | None], floor_us: Any) -> Any:
        return attention_cell(**key, **others)

    peer_module = types.SimpleNamespace(torch_on_gpu=lambda: contextlib.nullcontext())
    for name, value in {
        "warm_up": lambda: None,
        "fits": lambda nbytes: True,
        "rotation": lambda nbytes: 1,
        "peers": peer_module,
        "_PEERS": {"sdpa_us": peer},
        "_cell": made,
    }.items():
        monkeypatch.setattr(attention_bench, name, value)
    record = Record(None, {})
    sizes: dict[str, Any] = {"bits": ["4", "8"], "contexts": [64], "batches": [3], "heads": [(8, 2)]}
    shape = {"batch": 3, "heads": 8, "kv_heads": 2, "context": 64, "queries": 1}
    assert [c.lengths for c in attend(record, cell_keys(**sizes))] == ["equal", "equal"]
    assert asked == [shape]
    for cell_before in record.cells:
        del cell_before["lengths"]
    assert list(attend(record, cell_keys(**sizes))) == []
    kinds = ["equal", "spread", "one-long"]
    cells = list(attend(record, cell_keys(**sizes, lengths=kinds)))
    assert [(c.lengths, c.bits) for c in cells] == list(product(kinds[1:], ("4", "8")))
    assert {c.sdpa_us for c in cells} == {None}
    assert asked == [shape]
    del record.cells[-1]
    assert [(c.lengths, c.bits) for c in attend(record, cell_keys(**sizes, lengths=kinds))] == [
        ("one-long", "8")
    ]


@pytest.mark.parametrize("bits", ["4", "mixed", "16"])
@pytest.mark.parametrize("kind", ["equal", "spread", "one-long"])
def test_caches_that_attention_is_measured_of(kind: str, bits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's, made the same way: each sequence has its tokens, with all slots that there are. The check
    finds what is wrong in the first sequence, the last one, and one between where lengths differ."""
    monkeypatch.setattr(device, "cupy", lambda: np)
    monkeypatch.setattr(attention_bench, "KVCache", on_cpu)
    monkeypatch.setattr(attention_bench, "POOL", 1 << 10)
    lengths = attention_bench.lengths_of(kind, 5, 100)
    tokens = [attention_bench.tokens_of(bits, length) for length in lengths]
    prompt = attention_bench.random_cache(2, tokens, seed=1, any_order=False)
    slots = [tier.bucket(n).global_slots for n in range(5) for tier in prompt.tiers.values()]
    assert all((np.diff(each) == 1).all() for each in slots)
    cache = attention_bench.random_cache(2, tokens, seed=1)
    slots = [tier.bucket(n).global_slots for n in range(5) for tier in cache.tiers.values()]
    assert not all((np.diff(each) == 1).all() for each in slots)
    assert cache.lengths.tolist() == cache.next_slots.tolist() == lengths
    for sequence, length in enumerate(lengths):
        held = cache.tokens(sequence)
        assert held.slots.tolist() == held.token_ids.tolist() == [*range(length)]
        assert {b: int((held.bits == b).sum()) for b in cache.bits} == tokens[sequence]
    assert {b: tier.room for b, tier in cache.tiers.items()} == attention_bench.rooms_of(tokens)
    q = np.random.default_rng(0).standard_normal((5, 3, 8, 128)).astype(np.float16)
    out = np.empty_like(q)
    assert 0 < attention_bench.sampled_error(q, cache, out) <= 1e-6
    for wrong in (0, 4) if kind == "equal" else (0, 2, 4):

        def attend_wrongly(q: Any, cache: Any, out: Any, wrong: int = wrong) -> Any:
            attention(q, cache, out=out)
            out[wrong] *= 1.1

        with monkeypatch.context() as patch:
            patch.setattr(attention_bench, "attention", attend_wrongly)
            with pytest.raises(RuntimeError, match="wrong result"):
                attention_bench.sampled_error(q, cache, out)


def on_cpu(*arguments: Any, device: str) -> KVCache:
    assert device == "cuda"
    return KVCache(*arguments)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:sdpa_us, ")  # other tests may keep the host busy
def test_cells_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_bench, "rotation", lambda nbytes: 2)  # thousands take minutes
    record = Record(None, records.environment())
    keys = cell_keys(["4", "mixed"], [64, 512], [1, 3], [(8, 2)], [1, 5])
    cells = list(attend(record, keys))
    assert [(c.batch, c.context, c.queries, c.bits) for c in cells] == list(
        product((1, 3), (64, 512), (1, 5), ("4", "mixed"))
    )
    prompts = cell_keys(["16", "mixed"], [150], [2], [(8, 2)], [150])
    cells += attend(record, prompts)
    assert [(c.queries, c.bits) for c in cells[-2:]] == [(150, "16"), (150, "mixed")]
    assert all(c.us > 0 and 0 < c.nmse <= 1e-6 for c in cells)
    assert list(attend(record, [*keys, *prompts])) == []
    keys = cell_keys(["4", "mixed"], [64], [5], [(8, 2)], [3], ["spread", "one-long"])
    unequal = list(attend(record, keys))
    assert [(c.lengths, c.bits) for c in unequal] == list(product(("spread", "one-long"), ("4", "mixed")))
    assert all(c.us > 0 and 0 < c.nmse <= 1e-6 and c.sdpa_us is None for c in unequal)
    for wrong in (lambda q, cache, out: attention(q, cache, causal=False, out=out), lambda *a, out: out):
        monkeypatch.setattr(attention_bench, "attention", wrong)
        with pytest.raises(RuntimeError, match="wrong result"):
            list(attend(record, cell_keys(["8"], [64], [1], [(8, 2)], [5])))
