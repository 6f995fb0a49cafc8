"""What is printed of operations, and what is found wrong with arrays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from formats_table import CODEBOOKS, FP4, INT4, NAMES, TRELLIS

import cuquant as cq

F = np.float32
EVERY = [*NAMES, *(row.name for row in FP4), *CODEBOOKS, *INT4, *TRELLIS]


def gauss(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(shape, F)


def writable(w: cq.QuantizedArray) -> tuple[cq.QuantizedArray, Any]:
    """The same of bytes that can be changed, and these."""
    blocks = w.blocks.copy()
    return cq.QuantizedArray(w.format, blocks, shape=w.shape), blocks


@pytest.mark.parametrize("name", EVERY)
def test_what_is_quantized_is_valid(name: str) -> None:
    for shape in ((3, 5, 128), (5, 128), (128,)):
        w = cq.quantize(gauss(*shape), name)
        assert w.validate() is w


@pytest.mark.parametrize(("name", "field"), [("q4_0", "d"), ("q5_1", "m"), ("int4-64", "scale")])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_found(name: str, field: str, bad: float) -> None:
    w, blocks = writable(cq.quantize(gauss(2, 5, 128), name))
    blocks.view(w.format.storage)[field][[0, 1], [4, 2], [1, 0]] = bad
    message = r"array \(2, 5, 128\): 2 rows hold weights that are NaN or infinite, the first is row \(0, 4\)"
    with pytest.raises(ValueError, match=message):
        w.validate()


def test_codes_that_mean_nan_are_found() -> None:
    w, blocks = writable(cq.quantize(gauss(4, 64), "mxfp4"))
    blocks.view(w.format.storage)["e"][3] = 255
    with pytest.raises(ValueError, match=r"1 row holds .* row 3"):
        w.validate()


def test_all_that_is_wrong_with_a_trellis_weight() -> None:
    w, blocks = writable(cq.quantize(gauss(20, 40), cq.Trellis(3, grid=[-1, -0.4, 0, 0.4, 1])))
    assert w.validate() is w
    assert isinstance(w.format, cq.Trellis)
    parts = w.format.parts(blocks, w.shape)
    parts.packed[:] = 0xFF
    with pytest.raises(ValueError, match=r"800 indices are beyond the grid of 5 levels and read as index 0$"):
        w.validate()
    parts.su[7], parts.sv[2], parts.scales[0, 9] = 3, 0, np.nan
    with pytest.raises(
        ValueError, match=r"su holds 3; sv holds 0; scales holds nan; 800 .*; 1 row .* row 9$"
    ):
        w.validate()


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert not out
    return err


def test_nothing_is_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert not cq.config().debug
    gauss(2, 32) @ cq.quantize(gauss(4, 32), "q4_0").T
    assert not printed(capsys)


def test_operands_and_results_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    x, w = gauss(2, 64), cq.quantize(gauss(17, 64), cq.Trellis(3, 32, [-1, -0.25, 0.5, 1]))
    x[1, :3] = np.nan, np.inf, -np.inf
    expected = cq.linear(x, w)
    with cq.config(debug=True) as settings:
        assert settings.debug
        assert repr(settings) == "config(debug=True)"
        np.testing.assert_array_equal(cq.linear(x, w, activation=None), expected)
    text = printed(capsys)
    finite = x[np.isfinite(x)]
    for line in (
        r"=== cuquant.linear before ===",
        rf"x: float32 \(2, 64\), cpu, min={finite.min():.6g} max={finite.max():.6g} nan=1 inf=2",
        r"w: QuantizedArray\(shape=\(17, 64\), format=trellis3-32, .*",
        r"  w.grid: float32 \(4,\), cpu, min=-1 max=1 nan=0 inf=0, values -1 -0.25 0.5 1",
        r"  w.packed: uint8 \(4, 2, 96\), cpu, first \[[\d, ]+\]",
        r"  w.scales: float32 \(2, 17\), cpu, min=.* max=.* nan=0 inf=0",
        r"  w.su: int8 \(64,\), cpu, unique \[-1, 1\]",
        r"  w.sv: int8 \(17,\), cpu, unique \[-1, 1\]",
        r"activation: None",
        r"=== cuquant.linear after \d+\.\d+ ms ===",
        r"result: float32 \(2, 17\), cpu, min=.* nan=17 inf=0",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    cq.linear(x, w)
    assert not printed(capsys)


def test_a_matrix_is_printed_as_an_array(capsys: pytest.CaptureFixture[str]) -> None:
    x, w = gauss(2, 32), cq.quantize(gauss(4, 32), "q4_0")
    x[:, 4:] = 0
    with cq.config(debug=True):
        np.testing.assert_array_equal(x.view(np.matrix)[:, :] @ w.T, x @ w.T)
        small: Any = np.ones((1, 4), np.float16).view(np.matrix)
        with pytest.raises(ValueError, match="differ in K"):
            cq.linear(small, w)
    assert "x: float16 (1, 4), cpu, min=1 max=1 nan=0 inf=0, values 1 1 1 1\n" in printed(capsys)


def test_operands_that_are_refused_are_refused_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    w = cq.quantize(gauss(4, 64), "q4_0")
    with cq.config(debug=True), pytest.raises(TypeError, match="x has dtype <U1"):
        cq.linear(np.full((2, 64), "a"), w)
    assert "x: <U1 (2, 64), cpu\n" in printed(capsys)


def test_every_operation_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every format, also of empty operands, and where an operation refuses."""
    with cq.config(debug=True):
        for name in EVERY:
            w = cq.quantize(gauss(5, 128), name)
            cq.from_blocks(w.blocks, w.format, w.shape).dequantize()
            gauss(0, 128) @ w.T
        ids, probs = cq.route(gauss(3, 2), 1)
        stack = cq.quantize(gauss(2, 128, 128), "q4_0")
        cq.moe(gauss(3, 128), cq.Experts(stack, stack, stack), ids, probs)
        cache = cq.KVCache(1, 32, 4)
        cq.attention(gauss(1, 1, 1, 32), cache)
        with pytest.raises(TypeError, match="missing a required argument: 'format'"):
            cq.quantize(gauss(3, 32))  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="unknown format"):
            cq.quantize(gauss(3, 32), "q3")
    text = printed(capsys)
    for operation in ("quantize", "from_blocks", "dequantize", "linear", "route", "moe", "attention"):
        assert f"=== cuquant.{operation} before ===" in text
        assert f"=== cuquant.{operation} after" in text
    assert "experts.gate: QuantizedArray(shape=(2, 128, 128), format=q4_0" in text
    assert "expert_ids: int32 (3, 1), cpu, min=0 max=0 nan=0 inf=0" in text


def test_what_a_cache_takes_and_gives_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cache, k = cq.KVCache(2, 32, {16: 8, 4: 8}), gauss(1, 4, 2, 32)
    k[0, 1, 0, :2] = np.nan
    with cq.config(debug=True):
        cache.append(k, k, bits=16)
        cache.assign(np.array([0]), 4)
        cache.allocate(8)
        cache.age({16: 1})
        cache.evict([1])
        cache.trim(2, importance=np.arange(4))
        cache.dequantize()
        cache.tokens()
    text = printed(capsys)
    for name in ("append", "assign", "allocate", "age", "evict", "trim", "dequantize", "tokens"):
        before, _, rest = text.partition(
            f"=== cuquant.KVCache.{name} before ===\nself: KVCache(n_kv_heads=2,"
        )
        assert not before, name
        _, _, text = rest.partition(f"=== cuquant.KVCache.{name} after")
        operands, result = rest[: -len(text)], text.partition("=== cuquant")[0]
        text = text[len(result) :]
        if name == "append":
            assert re.search(r"^k: float32 \(1, 4, 2, 32\), cpu, min=-.* max=.* nan=2 inf=0$", operands, re.M)
            assert "\nbits: 16\n" in operands
        if name == "assign":
            assert "token_ids: int64 (1,), cpu, min=0 max=0" in operands
            assert "result: 1\n" in result
        if name == "dequantize":
            assert re.search(r"^result.2: float32 \(2, 2, 32\), cpu, min=.*nan=0", result, re.M)
    cache.append(k[:, :1], k[:, :1])
    assert not printed(capsys)


def test_nothing_is_asked_of_a_cache_while_a_graph_is_captured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lengths are on the GPU, which cannot be waited for."""
    cache: Any = type("Cache", (), {"is_kv_cache": True, "device": "cuda", "bits": (4,), "batch": 3})()
    monkeypatch.setattr("cuquant.debug.device.is_capturing", lambda: True)
    monkeypatch.setattr(type(cache), "__repr__", lambda cache: pytest.fail("lengths were read"))
    with cq.config(debug=True), pytest.raises(TypeError):
        cq.attention(gauss(1, 1, 1, 32), cache)
    assert "cache: KVCache of (4,) bits, batch=3, cuda\n" in printed(capsys)


def test_settings(capsys: pytest.CaptureFixture[str]) -> None:
    cq.config(debug=True)
    try:
        with cq.config(debug=False):
            cq.quantize(gauss(1, 32), "q4_0")
        assert not printed(capsys)
        assert cq.config().debug
    finally:
        cq.config(debug=False)
    with pytest.raises(TypeError, match="debug is an int"):
        cq.config(debug=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_turns_it_on(value: str, on: bool) -> None:
    code = "import numpy as np, cuquant as cq; cq.quantize(np.ones((1, 32), 'f4'), 'q4_0')"
    environment = os.environ | {"CUQUANT_DEBUG": value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert ("=== cuquant.quantize before ===" in done.stderr) == on


def test_operations_keep_their_names_and_signatures() -> None:
    import inspect

    assert cq.linear.__name__ == "linear"
    assert [*inspect.signature(cq.linear).parameters][:3] == ["x", "w", "bias"]
    assert (cq.linear.__doc__ or "").startswith("y = act")
