"""Arrays among other libraries: torch's tensors, pickles and copies, several GPUs."""

from __future__ import annotations

import copy
import pickle
import sys
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuquant as cq
from cuquant import device, formats

RNG = np.random.default_rng(0)
W = RNG.standard_normal((32, 256)).astype(np.float32)
FORMATS = ["q4_0", "kbit3", cq.KBit(4, codebook=np.linspace(-1, 1, 16)), "int4-128", "trellis3", "q6_k"]
COPIES = {"pickle": lambda a: pickle.loads(pickle.dumps(a)), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_copies_of_arrays(xp: ModuleType, fmt: Any, how: str) -> None:
    if xp is not np and not formats.get(fmt).on_gpu:
        pytest.skip("no kernels")
    w = cq.quantize(xp.asarray(W), fmt)
    x = xp.asarray(RNG.standard_normal((2, 256)).astype(np.float16))
    expected = x @ w.T  # on a GPU the weight is prepared now, and knows where it lies
    made = COPIES[how](w)
    assert (x @ made.T == expected).all()
    if xp is not np:
        own = made.fragments()
        assert own.addresses.low == own.buffer.data.ptr + own.planes.low
    assert (made.format, made.shape, made.device) == (w.format, w.shape, w.device)
    assert (made.blocks == w.blocks).all()
    assert (made.dequantize() == w.dequantize()).all()
    q = cq.quantize(x, "q8_1")
    assert (COPIES[how](q) @ w.T == q @ w.T).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_arrays_are_joined_by_numpy(xp: ModuleType, fmt: Any) -> None:
    """Prepared ones, too; what is stored whole along the axes of a stack alone."""
    if xp is not np and not formats.get(fmt).on_gpu:
        pytest.skip("no kernels")
    fmt = formats.get(fmt).fitted(W)
    parts: Any = [cq.quantize(xp.asarray(W * np.float32(i)), fmt) for i in (1, 2, 3)]
    numbers = [w.dequantize() for w in parts]
    assert (xp.ones((1, 256), np.float16) @ parts[0].T).shape == (1, 32)
    stacked: Any = np.stack(parts)
    assert (stacked.format, stacked.shape, stacked.device) == (fmt, (3, 32, 256), parts[0].device)
    assert (stacked.dequantize() == xp.stack(numbers)).all()
    both: Any = np.concatenate([stacked, stacked[:1]])
    assert (both.dequantize() == xp.stack([*numbers, numbers[0]])).all()
    if fmt.whole_matrices:
        with pytest.raises(ValueError, match="cannot be joined along axis 0, as matrices are stored whole"):
            np.concatenate(parts)
        return
    rows: Any = np.concatenate((parts[0], parts[1][:5]))
    assert (rows.dequantize() == xp.concatenate([numbers[0], numbers[1][:5]])).all()
    assert np.stack([stacked, stacked], axis=-3).shape == (3, 2, 32, 256)
    with pytest.raises(ValueError, match="axis 1, as the last axis is packed in blocks"):
        np.concatenate(parts, axis=-1)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array])
def test_integers_of_numpy(kind: Any) -> None:
    """An axis, and a shape of one."""
    w: Any = cq.quantize(np.ones((2, 64), np.float32), "q4_0")
    both: Any = np.concatenate([w, w], axis=kind(0))
    stacked: Any = np.stack([w, w], axis=kind(1))
    assert (both.shape, stacked.shape) == ((4, 64), (2, 2, 64))
    for vector in (
        cq.from_blocks(w.blocks[0], "q4_0", kind(64)),
        cq.QuantizedArray("q4_0", w.blocks[0], kind(64)),
    ):
        assert vector.shape == (64,)
        assert type(vector.shape[0]) is int


def test_what_cannot_be_joined() -> None:
    w: Any = cq.quantize(W, "q4_0")
    other = np.linspace(-1, 1, 16)
    refused: list[tuple[Any, type[Exception], str]] = [
        ([w, cq.quantize(W, "q8_0")], ValueError, r"of one format; number 1 is q8_0, the first q4_0"),
        ([w, W], TypeError, r"number 1 is an ndarray, and quantized arrays hold packed"),
        ([w.T, w], TypeError, r"number 0 is a transpose, of which .T is the array"),
        ([w, w[0]], ValueError, r"one shape.*; number 1 is \(256,\), the first \(32, 256\)"),
        ([w, cq.quantize(W[:, :128], "q4_0")], ValueError, r"one shape.*; number 1 is \(32, 128\)"),
    ]
    for arrays, error, message in refused:
        for join in (np.stack, np.concatenate):
            with pytest.raises(error, match=message):
                join(arrays)
    grids: Any = [cq.trellis_quantize(W, cq.Trellis(3, grid=grid)) for grid in (other[::2], other[1::2])]
    coarser: Any = cq.quantize(W, "trellis3-32")
    codebooks: Any = [cq.quantize(W, fmt) for fmt in ("kbit4", cq.KBit(4, codebook=other))]
    with pytest.raises(ValueError, match=r"number 1 is trellis3.*, the first trellis3.*"):
        np.stack(grids)
    with pytest.raises(ValueError, match=r"number 1 is trellis3-32, the first trellis3$"):
        np.stack([grids[0], coarser])
    with pytest.raises(ValueError, match=r"number 1 is kbit4-\w+, the first kbit4$"):
        np.stack(codebooks)
    ragged: Any = cq.quantize(W[0, :40], "kbit3")
    with pytest.raises(ValueError, match=r"shape \(2, 40\): kbit3 stores blocks of 32"):
        np.stack([ragged, ragged])
    with pytest.raises(ValueError, match="axis 3 is out of range for arrays of 2 axes"):
        np.stack([w, w], axis=3)
    assert np.concatenate([w, w], axis=-2).shape == (64, 256)
    with pytest.raises(ValueError, match="axis -3 is out of range for arrays of 2 axes"):
        np.concatenate([w, w], axis=-3)
    for axis in (None, "0", 0.0):
        with pytest.raises(
            TypeError, match=r"concatenate: axis is (None|a str|a float); an integer is needed"
        ):
            np.concatenate([w, w], axis=axis)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="holds packed blocks, not numbers"):
        np.stack([w, w], out=np.empty(1))


def test_what_fitted_formats_say_joins_them() -> None:
    """Each of two arrays has a grid, or a scale, of its own; what the error says gives them one."""
    floats = [W, W * np.float32(3) + np.float32(0.1)]
    trellis: Any = [cq.quantize(w, "trellis3") for w in floats]
    told = "the first trellis3, but each has a grid of its own, .*: quantize the floats as one stack, or each"
    with pytest.raises(ValueError, match=f"^stack .*{told} with the grid of one"):
        np.stack(trellis)
    trellis_alike: Any = [cq.quantize(w, trellis[0].format) for w in floats]
    stacked: Any = np.stack(trellis_alike)
    assert stacked.shape == (2, 32, 256)
    rows = "stored whole, in tiles, .*: multiply by each, and join products, or quantize the joined floats$"
    with pytest.raises(ValueError, match=f"axis 0, as matrices are {rows}"):
        np.concatenate(trellis)
    for join in (np.concatenate, np.stack):
        with pytest.raises(ValueError, match=r"axis 1, as matrices are stored whole$"):
            join(trellis, axis=1)
    scaled: Any = [cq.quantize(w, cq.NvFp4()) for w in floats]
    own = [w.format.scale for w in scaled]
    assert own[0] != own[1]
    for join in (np.stack, np.concatenate):
        with pytest.raises(
            ValueError, match=r"but each has a scale for the tensor of its own: .* one cuquant.Nv"
        ):
            join(scaled)
    scaled = [cq.quantize(w, cq.NvFp4(max(own))) for w in floats]
    both: Any = np.concatenate(scaled)
    assert both.shape == (64, 256)


def test_a_matrix_and_a_record_array_are_arrays() -> None:
    for kind in (np.matrix, np.recarray):
        given: Any = W.view(kind)
        for fmt in ("q4_0", "trellis3", cq.NvFp4()):
            assert (cq.quantize(given, fmt).blocks == cq.quantize(W, fmt).blocks).all()


class FakeTensor:
    """What torch.Tensor has of what is asked for, of bfloat16 numbers."""

    def __init__(self, array: Any, dtype: str) -> None:
        self.array, self.dtype = array, dtype

    def view(self, dtype: str) -> FakeTensor:
        return FakeTensor(self.array.view(np.int16), dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.dtype == "bfloat16":
            raise BufferError("no such type")
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def test_bfloat16_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = types.ModuleType("torch")
    fake.Tensor, fake.bfloat16, fake.int16 = FakeTensor, "bfloat16", "int16"
    monkeypatch.setitem(sys.modules, "torch", fake)
    x = W.astype(ml_dtypes.bfloat16)
    made = cq.quantize(FakeTensor(x, "bfloat16"), "q8_0")
    assert (made.blocks == cq.quantize(x, "q8_0").blocks).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch(where: str, name: str) -> None:
    """Tensors go in and, as out, receive results."""
    torch = pytest.importorskip("torch")
    w = cq.quantize(W, "q4_0").to_device(where)
    x = torch.randn(3, 256, dtype=getattr(torch, name), device=where)
    y = torch.zeros(3, 32, dtype=x.dtype, device=where)
    if where == "cuda":
        torch.cuda.synchronize()
    assert cq.matmul(x, w.T, out=y) is y
    if where == "cuda":
        device.cupy().cuda.Device().synchronize()
    expected = x.double().cpu().numpy() @ w.to_device("cpu").dequantize().astype(np.float64).T
    error = y.double().cpu().numpy() - expected
    assert np.square(error).sum() / np.square(expected).sum() < 1e-5
    result = x @ w.T
    assert result.dtype == np.dtype(name if name != "bfloat16" else ml_dtypes.bfloat16)
    if name != "bfloat16":
        assert (torch.from_dlpack(result) == y).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: x @ w.T,
        lambda x, w: cq.quantize(x, "q8_0"),
        lambda x, w: cq.quantize(x, "q8_1"),
        lambda x, w: w.dequantize(),
    ],
    ids=["product", "quantize", "activations", "dequantize"],
)
def test_another_gpu_is_refused(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = device.cupy()
    w = cq.quantize(cupy.asarray(W), "q4_0")
    x = cupy.ones((3, 256), cupy.float16)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 1)
    with pytest.raises(ValueError, match=r"on GPU 0.*; the current device is GPU 1"):
        call(x, w)
