"""Benchmarks: what is measured next to what, and how times are taken; on a GPU, the measuring."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from cells import cell

from cuquant import device
from cuquant.bench import (
    Record,
    append,
    ceilings,
    host,
    matmul,
    moe,
    peers,
    record as records,
    timing,
    weights,
)
from cuquant.cuda.fragments import from_fragments

attention_bench = importlib.import_module("cuquant.bench.attention")

# What is measured next to what.


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is asked of peers, on a machine where nothing is measured in truth."""
    asked: list[tuple[Any, ...]] = []

    def measure(peer: peers.Peer, n: int, k: int, batches: list[int]) -> dict[int, float]:
        asked.append((peer.name, n, k, batches))
        return {m: 10.0 + m for m in batches if m < 16}

    module = importlib.import_module("cuquant.bench.matmul")  # the package has a function of that name
    for name, value in {
        "warm_up": lambda: None,
        "_compile": lambda keys: None,
        "_cublas_us": lambda m, n, k: 100.0 + m,
        "random_weights": lambda name, n, k: [],
        "_cell": lambda key, weights, cublas_us, floor_us: cell(**key, cublas_us=cublas_us),
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(peers, "measure", measure)
    return asked


def test_peers_stand_next_to_4_bit_formats_with_16_bit_x(measured: list[tuple[Any, ...]]) -> None:
    record = Record(None, {}, [])
    names, activations, batches = ["q4_0", "q5_0", "q4_1"], ["f16", "f32", "bf16", "q8_1"], [1, 16]
    cells = list(matmul(record, names, activations, [(64, 128)], batches, [peers.PEERS["tinygemm"]]))
    assert measured == [("tinygemm", 64, 128, [1, 16])]
    assert len(cells) == 3 * 4 * 2
    for c in cells:
        compared = c.format != "q5_0" and c.activation != "f32" and c.M == 1
        assert c.tinygemm_us == (11.0 if compared else None)
        assert c.gemlite_us is None
        assert c.cublas_us == 100 + c.M


def test_peers_are_asked_for_what_is_missing(measured: list[tuple[Any, ...]]) -> None:
    record = Record(None, {}, [])
    for c in (cell(), cell(format="q8_0", M=8)):
        record.add(c)
    every = list(peers.PEERS.values())
    assert len(list(matmul(record, ["q4_0", "q8_0"], ["f16"], [(64, 128)], [1, 8], every))) == 2
    assert measured == [("tinygemm", 64, 128, [8]), ("gemlite", 64, 128, [8])]
    assert list(matmul(record, ["q4_0", "q8_0"], ["f16"], [(64, 128)], [1, 8], every)) == []
    list(matmul(record, ["q5_0"], ["f16"], [(64, 128)], [1], every))
    assert len(measured) == 2


def test_peers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda package: package == "torch" or None)
    assert [peer.name for peer in peers.installed()] == ["tinygemm"]
    assert peers.installed([]) == []
    with pytest.raises(ValueError, match="gemlite is not installed"):
        peers.installed(["tinygemm", "gemlite"])


class Broken(peers.Tinygemm):
    """Fails as it is packed."""

    def product(self, w: peers.Int4) -> peers.Product:
        raise RuntimeError("no kernel\nfor this GPU")


class Wrong(peers.Tinygemm):
    """Another weight's product."""

    def product(self, w: peers.Int4) -> peers.Product:
        right = super().product(w)
        return lambda x: right(x.flip(1))


def test_a_shape_that_a_peer_does_not_take() -> None:
    assert peers.measure(peers.PEERS["tinygemm"], 64, 96, [1]) == {}


def test_a_peer_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.warns(UserWarning, match="tinygemm, 64x128: 0 of 2 times: import of torch halted"):
        assert peers.measure(Broken(), 64, 128, [1, 2]) == {}


# Measuring.


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:cuBLAS is not timed")  # other tests may keep the host busy
def test_cells_of_mixtures() -> None:
    record = Record(None, records.environment())
    arguments: Any = (record, ["q4_0", "trellis3"], ["f16", "q8_1"], [(256, 128)], [1, 40], 4, 2)
    cells = list(moe(*arguments))
    assert [(c.format, c.activation, c.M) for c in cells] == [
        (f, a, m) for f in ("q4_0", "trellis3") for a in ("f16", "q8_1") for m in (1, 40)
    ]
    assert all((c.op, c.experts, c.top_k, c.N, c.K) == ("moe", 4, 2, 256, 128) for c in cells)
    assert all(c.us > 0 and (c.cublas_us or 1) > 0 and 0 <= c.nmse <= 1e-3 for c in cells)
    assert [c.hit for c in cells[:2]] == [2, 4]
    assert list(moe(*arguments)) == []
    cells = list(moe(record, ["exl3-4-mcg"], ["f16"], [(256, 128)], [1, 40], 4, 2))
    assert [c.M for c in cells if 0 < c.nmse <= 1e-5] == [1, 40]


@pytest.mark.gpu
def test_cells_of_appended_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(None, records.environment())
    arguments: Any = (record, ["16", "3"], [1, 17], [1, 2], [(4, 2)])
    cells = list(append(*arguments))
    assert [(c.batch, c.tokens, c.bits) for c in cells] == list(product((1, 2), (1, 17), ("16", "3")))
    assert all((c.op, c.heads, c.kv_heads) == ("append", 4, 2) and min(c.us, c.gbps) > 0 for c in cells)
    assert list(append(*arguments)) == []
    module = importlib.import_module("cuquant.bench.append")
    monkeypatch.setattr(module.codes, "encode", lambda x, bits: (x.astype(np.float16) + 1, None))
    with pytest.raises(RuntimeError, match=r"wrong result: .*'tokens': 2"):
        list(append(record, ["16"], [2], [1], [(4, 2)]))


@pytest.mark.gpu
def test_cells_of_weights() -> None:
    record = Record(None, {})
    arguments: Any = (record, ["q4_0", "q5_k", "kbit3", "mxfp4", "trellis2-32"], [(320, 512)])
    cells = list(weights(*arguments))
    works = ["quantize", "encode", "dequantize", "prepare", "repack", "restore"]
    assert [(c.format, c.work) for c in cells] == [
        (f, w) for f in arguments[1] for w in works if f != "trellis2-32" or w not in ("quantize", "encode")
    ]
    assert all((c.op, c.N, c.K) == ("weights", 320, 512) and min(c.us, c.gbps) > 0 for c in cells)
    assert list(weights(*arguments)) == []


@pytest.mark.gpu
def test_cells_of_what_calls_take_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def once(call: Callable[[], Any], count: int) -> float:
        calls.append(count)
        call()
        return 1.0

    module = importlib.import_module("cuquant.bench.host")
    for name, value in {"host_us": once, "warm_up": lambda: None, "EXPERT": (64, 128), "CONTEXT": 64}.items():
        monkeypatch.setattr(module, name, value)
    names, shapes = ["q4_0", "trellis3"], [(128, 256)]
    record = Record(None, {})
    cells = list(host(record, names, shapes))
    assert len(cells) == len(calls) == module.count(names, shapes) == 2 + 2 * 6 + 5
    assert [c.work for c in cells[:6]] == ["CuPy kernel", "CuPy empty", *["matmul"] * 4]
    assert {(c.work, c.bits) for c in cells if c.bits} == set(
        product(("append", "attention"), ("4", "mixed"))
    )
    assert list(host(record, names, shapes)) == []


@pytest.mark.gpu
def test_a_wrong_call_is_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("cuquant.bench.host")
    monkeypatch.setattr(module, "warm_up", lambda: None)
    monkeypatch.setattr(module, "product_of", lambda x, w, out, **words: out)
    with pytest.raises(RuntimeError, match="wrong result"):
        list(host(Record(None, {}), ["q8_0"], [(64, 64)]))


@pytest.mark.gpu
def test_a_wrong_pass_over_weights_is_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(None, {})
    wrong = importlib.import_module("cuquant.bench.weights")
    monkeypatch.setattr(wrong, "from_fragments", lambda f: from_fragments(f) ^ np.uint8(1))
    with pytest.raises(RuntimeError, match="wrong result: restore of q8_0, 64x64"):
        list(weights(record, ["q8_0"], [(64, 64)]))
    assert [c["work"] for c in record.cells] == ["quantize", "encode", "dequantize", "prepare", "repack"]


@pytest.mark.gpu
def test_floors_go_by_what_this_gpu_reaches() -> None:
    """Others may be using it meanwhile: how fast it is does not count here."""
    record = Record(None, records.environment() | {"device": "another"})
    (made,) = matmul(record, ["q8_0"], ["f16"], [(4096, 4096)], [1])
    rates = record.ceilings
    assert rates is not None
    assert min(rates) > 1
    moved = made.gbps * made.us * 1e3
    assert made.floor_us == pytest.approx(moved / rates.read_gbps * 1e-3 + ceilings.LAUNCH_US, rel=1e-3)
    assert Record(None, record.header).origin.endswith(f"{rates.tflops:.0f} TFLOP/s")


@pytest.mark.gpu
def test_cells_of_every_activation() -> None:
    activations = ["f16", "bf16", "f32", "q8_1"]
    record = Record(None, records.environment())
    cells = list(matmul(record, ["q4_0"], activations, [(2048, 2048)], [1, 20]))
    assert [(c.activation, c.M) for c in cells] == [(a, m) for a in activations for m in (1, 20)]
    for c in cells:
        assert c.us > 0.5
        assert c.cublas_us is None or c.cublas_us > 0.5
        assert c.tinygemm_us is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_is_measured(name: str) -> None:
    peer = peers.PEERS[name]
    pytest.importorskip(peer.package)
    times = peers.measure(peer, 2048, 2048, [1, 20])
    assert list(times) == [1, 20]
    assert min(times.values()) > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("peer", "reason"), [(Broken(), "no kernel$"), (Wrong(), "wrong result for 1 rows of x")]
)
def test_a_peer_that_is_wrong_has_no_time(peer: peers.Peer, reason: str) -> None:
    pytest.importorskip("torch")
    with pytest.warns(UserWarning, match=f"tinygemm, 2048x2048: 0 of 1 times: {reason}"):
        assert peers.measure(peer, 2048, 2048, [1]) == {}


@pytest.mark.parametrize("late", [0, 3, 100])
def test_launches_that_the_host_makes_too_slowly_are_not_timed(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is held for longer until they are all there before it goes on."""
    products, made = [], []

    class Ones:
        def __matmul__(self, other: Any) -> None:
            products.append(other)

    class Event:
        def record(self, stream: Any) -> None: ...
        def synchronize(self) -> None: ...

        @property
        def done(self) -> bool:
            made.append(len(products))
            return len(made) <= late

    cuda = types.SimpleNamespace(
        Stream=lambda non_blocking: contextlib.nullcontext(), Event=Event, get_elapsed_time=lambda a, b: 2.0
    )
    monkeypatch.setattr(device, "cupy", lambda: types.SimpleNamespace(cuda=cuda, ones=lambda *a: Ones()))
    monkeypatch.setattr(timing, "settle", lambda: None)
    calls: list[int] = []
    if late == 100:
        with pytest.warns(UserWarning, match="cuBLAS is not timed: the host is busy"):
            assert timing.stream_us([lambda: calls.append(1)]) is None
        return
    # Three runs of both calls seem to take 2 ms; six fill 4.
    assert timing.stream_us([lambda: calls.append(1)] * 2) == pytest.approx(2000 / 6 / 2)
    assert len(calls) == 2 * (1 + 3 + 6 * (late + timing.REPEATS))
    assert len(made) == late + timing.REPEATS
    assert made[:5] == ([1, 3, 7, 15, 23] if late else [1, 2, 3, 4, 5])


@pytest.mark.parametrize("late", [0, 6])
def test_how_often_calls_are_made_at_most(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that change what they work on want to know: also where the host is late as often as it may be."""
    asked, replayed = [], []

    class Event:
        def record(self, stream: Any) -> None: ...
        def synchronize(self) -> None: ...

        @property
        def done(self) -> bool:
            asked.append(1)
            return len(asked) <= late

    cuda = types.SimpleNamespace(Event=Event, get_elapsed_time=lambda a, b: 2.0)
    monkeypatch.setattr(device, "cupy", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(timing, "_factor", lambda: np.ones((1, 1)))
    monkeypatch.setattr(timing, "settle", lambda: None)
    calls = [lambda: None] * timing.LEAST_CALLS
    timing.captured_us(contextlib.nullcontext(), lambda given: lambda: replayed.append(given), calls, most=2)
    assert all(given is calls for given in replayed)
    unused = 2 * (6 - late)
    assert 1 + len(replayed) == timing.most_calls(2) - unused


@pytest.mark.parametrize(
    ("calls", "each", "captured"), [(2, 20.0, 32), (3, 400.0, 9), (2, 3000.0, 2), (40, 1.0, 40)]
)
def test_graphs_of_short_calls_hold_many(
    calls: int, each: float, captured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as fill a measurement, 32 at most; those of long calls, or of many, hold each once."""
    sizes = []

    def capture(calls: Any) -> Any:
        sizes.append(len(calls))
        return lambda: None

    monkeypatch.setattr(timing, "_elapsed_us", lambda stream, replay, runs: calls * each)
    monkeypatch.setattr(timing, "replay_us", lambda stream, replay, most, clock: sizes[-1] * each)
    assert timing.captured_us(None, capture, [lambda: None] * calls) == pytest.approx(each)
    assert sizes[0] == calls
    assert sizes[-1] == captured


def test_the_mean_clock_is_of_multiprocessors_that_were_seen_twice() -> None:
    begin = np.array([[10**12, 5, 0, 7], [2 * 10**18, 2 * 10**18, 0, 2 * 10**18]], np.uint64)
    end = begin + np.array([[6000, 3000, 9, 0], [4000, 3000, 9, 0]], np.uint64)
    end[:, 3] = 0
    assert timing.mean_mhz(begin, end) == pytest.approx(1250.0)


@pytest.mark.gpu
def test_the_clock_is_that_of_the_work_in_between() -> None:
    """Marks on either side of a stretch that is long enough for the GPU's timer."""
    cupy = device.cupy()
    a = cupy.ones((2048, 2048), "float16")
    result = timing.graph_us([lambda: cupy.multiply(a, a, out=a)])
    assert 0 < result.us < 1000
    assert 200 < result.mhz < 4000
