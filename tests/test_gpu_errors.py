"""Errors of tensors, and numbers beyond a dtype, as a GPU finds them: as the CPU does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from allocations import allocated
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import Stored, write
from numpy.typing import NDArray
from products import gauss
from synthetic import EXPERTS, Spec, some_tokens, write as write_model
from walks import random_exl3

import cuquant as cq
from cuquant import check, device
from cuquant.eval.errors import error_of
from cuquant.eval.scores import tensor_error
from cuquant.slabs import Slabs

pytestmark = pytest.mark.gpu
FORMATS = ["q8_0", "q4_k", "q6_k", "iq4_nl", "nvfp4", "kbit3", "int4-32-zeros", "trellis3", "trellis2-32"]
H, B, F = np.float16, ml_dtypes.bfloat16, np.float32
NAN, INF = np.nan, np.inf


@pytest.fixture(autouse=True)
def gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU can compare is never compared by the host, which errors of the host are not from."""

    def watched(*tensors: Any, on_gpu: bool) -> Any:
        there = any(device.is_cuda(check.storage(tensor)) for tensor in tensors)
        assert on_gpu or not there or any(tensor.dtype not in check.FLOATS for tensor in arrays(tensors))
        return Slabs(*tensors, on_gpu=on_gpu)

    monkeypatch.setattr("cuquant.eval.errors.Slabs", watched)


def arrays(tensors: tuple[Any, ...]) -> list[Any]:
    return [tensor for tensor in tensors if not check.is_quantized(tensor)]


def put(tensor: Any) -> Any:
    return (
        tensor.to_device("cuda") if isinstance(tensor, cq.QuantizedArray) else device.cupy().asarray(tensor)
    )


def assert_as_on_the_cpu(original: Any, other: Any) -> None:
    """Wherever they are."""
    expected = error_of(original, other)
    there = put(original), put(other)
    for pair in (there, (original, there[1]), (there[0], other)):
        assert error_of(*pair) == pytest.approx(expected, rel=1e-12, nan_ok=True)
    assert error_of(original, other, True)[2] == pytest.approx(expected[2], rel=0, nan_ok=True)


def small_slabs(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("cuquant.slabs.GPU_SLAB", size)


@pytest.mark.parametrize("size", [1 << 22, 8192])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch, size)
    w = gauss((2, 72, 256)).astype(H)
    quantized = cq.quantize(w, name)
    assert_as_on_the_cpu(w, quantized)
    assert_as_on_the_cpu(quantized, cq.quantize(w, "q5_1"))
    prepared = quantized.to_device("cuda").prepare()
    assert error_of(put(w), prepared) == pytest.approx(error_of(w, quantized), rel=1e-12)
    assert error_of(prepared, put(quantized)) == (0, None, 0)


@pytest.mark.parametrize("dtype", [H, B, F], ids=["float16", "bfloat16", "float32"])
def test_float_originals(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch, 1000)
    w = gauss((3, 30, 64)).astype(dtype)
    assert_as_on_the_cpu(w, cq.quantize(w, "q4_0"))
    assert_as_on_the_cpu(w, (w.astype(F) * F(1.01)).astype(H))


@pytest.mark.parametrize("size", [1 << 22, 40000])
def test_rows_that_are_made_together(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_slabs(monkeypatch, size)
    w = random_exl3(3, (2, 384, 128))
    assert_as_on_the_cpu(w.dequantize(H), w)
    assert_as_on_the_cpu(w.dequantize(B), w)


@pytest.mark.parametrize(("name", "k"), [("kbit4", 70), ("q8_0", 64), ("trellis3", 48)])
def test_vectors(name: str, k: int) -> None:
    x = gauss((k,))
    w = cq.quantize(x, name)
    expected, found = tensor_error("x", x, w), tensor_error("x", put(x), put(w))
    assert found.nmse == pytest.approx(expected.nmse, rel=1e-12)
    assert found.max_abs_error == expected.max_abs_error
    assert_as_on_the_cpu(x, w)


def test_long_and_short_rows() -> None:
    for shape in ((2, 70000), (5000, 32), (1, 1)):
        w = gauss(shape)
        assert_as_on_the_cpu(w, w.astype(H))


@pytest.mark.parametrize("dtype", [H, B, F], ids=["float16", "bfloat16", "float32"])
def test_what_is_not_finite(dtype: Any) -> None:
    a = gauss((40, 64)).astype(dtype)
    b = a + np.ones((), dtype)
    for value in (NAN, INF, -INF):
        a[:, 3] = b[:, 3] = value
        assert_as_on_the_cpu(a, b)
    for one, other in [(NAN, 1), (1, NAN), (NAN, INF), (INF, -INF), (1, INF), (-INF, NAN)]:
        a[:, 3] = b[:, 3] = 0
        a[7, 3], b[7, 3] = one, other
        assert_as_on_the_cpu(a, b)
    b[5, 5] = INF
    b[30, 5] = NAN
    assert_as_on_the_cpu(a, b)


def test_blocks_that_are_not_finite() -> None:
    shape = (64, 256)
    a, b = (cq.from_blocks(random_blocks("q4_k", shape, seed), "q4_k", shape) for seed in (0, 1))
    assert not np.isfinite(a.dequantize()).all()
    assert_as_on_the_cpu(a, b)
    assert error_of(put(a), put(a)) == (0, None, 0)


def test_zeros_and_magnitudes() -> None:
    zeros = np.zeros((3, 64), F)
    assert error_of(put(zeros), put(-zeros)) == (0, None, 0)
    assert error_of(put(zeros), put(zeros + 1)) == (INF, -INF, 1)
    assert error_of(put(zeros[:, :0]), put(zeros[:, :0])) == (0, None, 0)
    for a, b in ((3e38, -3e38), (1e-30, 3e-30), (3e38, 1e-37), (1e-45, -3e-45), (1e-39, 1.2e-38)):
        assert_as_on_the_cpu(zeros + F(a), zeros + F(b))
        assert_as_on_the_cpu((zeros + F(a)).astype(B), zeros + F(b))


def test_what_the_host_compares() -> None:
    """Numbers that float32 does not hold."""
    a, b = np.array([[1e300, 1]]), np.array([[1e300, 2]])
    assert error_of(put(a), put(b)) == error_of(a, b)
    assert error_of(a, b, True) == error_of(a, b)
    i = np.array([[1 << 53, 1]], np.int64)
    assert error_of(put(i), put(i + 1)) == error_of(i, i + 1)
    narrow = np.array([[INF, 1]], F)
    assert error_of(put(narrow), put(b)) == error_of(narrow, b)


@pytest.mark.parametrize("spec", [Spec(tied=True), EXPERTS], ids=["dense", "experts"])
def test_evaluations(tmp_path: Path, spec: Spec) -> None:
    path = write_model(tmp_path / "model.gguf", spec)
    given: dict[str, Any] = {"tokens": some_tokens(8), "ctx": 8, "formats": ["q4_0", "kbit4"]}
    cpu, gpu = (cq.evaluate(path, device=where, **given) for where in ("cpu", "cuda"))
    for a, b in zip(cpu.rows, gpu.rows, strict=True):
        assert len(a.tensors) == len(b.tensors)
        for expected, found in zip(a.tensors, b.tensors, strict=True):
            assert (found.name, found.format) == (expected.name, expected.format)
            assert found.nmse == pytest.approx(expected.nmse, rel=1e-12)
            assert found.max_abs_error == expected.max_abs_error


def files(folder: Path) -> list[Path]:
    """A float model, and another, quantized; with what is no matrix, and what no GPU compares."""
    w, norm = gauss((6, 64)), gauss((64,), 1)
    blocks = cq.quantize(w, "q4_0").blocks, Type.Q4_0
    given: list[dict[str, Stored]] = [{"w": w.astype(H), "norm": norm}, {"w": blocks, "norm": norm + 1}]
    return [
        write(folder / f"{i}.gguf", tensors | {"ids": np.arange(i, i + 4, dtype=np.int32)})
        for i, tensors in enumerate(given)
    ]


def test_comparisons(tmp_path: Path) -> None:
    """Of files, and of models that are open anywhere."""
    a, b = files(tmp_path)
    expected = cq.compare(a, b, device="cpu")
    for first, second in ((a, b), (cq.open(a, "cuda"), b), (cq.open(a, "cpu"), cq.open(b, "cuda"))):
        for where in ("cuda", "cpu", None):
            found = cq.compare(first, second, device=where)
            for x, y in zip(expected.tensors, found.tensors, strict=True):
                assert (x.name, x.a, x.b, x.identical) == (y.name, y.a, y.b, y.identical)
                assert y.nmse == pytest.approx(x.nmse, rel=1e-12)
                assert y.max_abs_error == x.max_abs_error


def test_no_tensor_is_dense() -> None:
    w = device.cupy().asarray(gauss((4096, 8192)).astype(H))
    quantized = cq.quantize(w, "q8_0")
    with allocated() as sizes:
        error_of(w, quantized)
    assert max(sizes) <= 16 << 20
    assert len(sizes) > 8


def said(source: Path, target: Path, dtype: Any, where: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cq.dequantize_file(source, target, dtype, device=where)
    return sorted(str(each.message) for each in caught)


@pytest.mark.parametrize("dtype", [H, B, F], ids=["float16", "bfloat16", "float32"])
def test_what_is_said_of_dequantized_numbers(
    tmp_path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros are no loss, small numbers are, NaN stays."""
    small_slabs(monkeypatch, 256)
    w: NDArray[np.float32] = gauss((16, 256))
    spoiled = np.array(cq.quantize(w, "q4_0").blocks)
    spoiled[3, :2] = np.array([NAN], H).view(np.uint8)
    stored: dict[str, Stored] = {
        "small.weight": (cq.quantize(w * F(1e-8), "mxfp4").blocks, Type.MXFP4),
        "least.weight": w * F(2.0**-134),
        "zeros.weight": (cq.quantize(w * (np.arange(256) % 3 > 0), "q6_k").blocks, Type.Q6_K),
        "nan.weight": (spoiled, Type.Q4_0),
    }
    source = write(tmp_path / "s.gguf", stored)
    targets = [tmp_path / f"{where}.gguf" for where in ("cpu", "cuda")]
    expected, found = (said(source, target, dtype, target.stem) for target in targets)
    assert found == expected
    assert len(found) == {H: 3, B: 2, F: 1}[dtype]
    cpu, gpu = (cq.open(target, "cpu") for target in targets)
    for name in stored:
        np.testing.assert_array_equal(gpu[name].astype(F), cpu[name].astype(F))
