"""QuantizedArray as an array: its facts, its bytes, and what it refuses to be."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from formats_table import NAMES, random_blocks

import cuquant as cq


def make(shape: tuple[int, ...] = (6, 64), name: str = "q4_0") -> cq.QuantizedArray:
    return cq.from_blocks(random_blocks(name, shape, finite=True), name, shape)


def test_facts() -> None:
    w = make((3, 6, 64), "q5_1")
    assert (w.shape, w.ndim, w.size, len(w), w.device) == ((3, 6, 64), 3, 1152, 3, "cpu")
    assert w.format == "q5_1"
    assert w.bits_per_weight == 6
    assert w.nbytes == w.blocks.nbytes == 3 * 6 * 2 * 24
    assert (
        repr(w)
        == "QuantizedArray(shape=(3, 6, 64), format=q5_1, bits_per_weight=6, nbytes=864, device='cpu')"
    )
    page = w._repr_html_()
    for fact in ("3 × 6 × 64", "q5_1", "864", "cpu", "bits per weight</th><td>6<"):  # noqa: RUF001
        assert fact in page
    page = w.T._repr_html_()
    for fact in ("3 × 64 × 6", "q5_1", "864", "cpu", "bits per weight</th><td>6<"):  # noqa: RUF001
        assert fact in page


def test_html_is_escaped() -> None:
    class Odd(type(cq.formats.get("q4_0"))):  # type: ignore[misc]
        formula = "W < d & <b>q</b>"

    page = cq.QuantizedArray(Odd(), np.zeros((1, 18), np.uint8))._repr_html_()
    assert "W &lt; d &amp; &lt;b&gt;q&lt;/b&gt;" in page
    assert "<b>" not in page


@pytest.mark.parametrize("name", NAMES)
def test_blocks_round_trip(name: str) -> None:
    raw = random_blocks(name, (2, 5, 96))
    w = cq.from_blocks(raw, name, (2, 5, 96))
    assert w.blocks.base is not None or w.blocks is raw
    assert np.shares_memory(w.blocks, raw)
    as_bytes, spread = raw.tobytes(), np.repeat(raw, 2, axis=-1)[..., ::2]
    for other in (
        as_bytes,
        bytearray(as_bytes),
        memoryview(as_bytes),
        raw.reshape(-1),
        np.asfortranarray(raw),
        spread,
        raw[::-1].copy()[::-1],
    ):
        np.testing.assert_array_equal(cq.from_blocks(other, name, (2, 5, 96)).blocks, raw)


@pytest.mark.filterwarnings("ignore:.* of the weights are too small")
@pytest.mark.parametrize("fmt", [*cq.formats.names(), cq.NvFp4()], ids=str)
def test_no_errors_and_warnings_of_numpy_get_out(fmt: str | cq.Format) -> None:
    """Numbers beyond float16 become infinite without a word, and small ones 0, when made and read."""
    x = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    sizes = [2.0**-130, 1.0]
    if not str(fmt).startswith("kbit") and fmt not in ("nvfp4", "q4_1", "q5_1"):  # which refuse such weights
        sizes.append(6e4)
    for size in sizes:
        with np.errstate(under="ignore"):
            given = x * np.float32(size)
        w = cq.quantize(given, fmt)
        for dtype in ("float16", "bfloat16", "float32"):
            numbers = w.dequantize(dtype)
            with np.errstate(all="raise"):
                np.testing.assert_array_equal(cq.quantize(given, fmt).dequantize(dtype), numbers)
        assert np.isfinite(w.dequantize()).all()
        assert np.isinf(w.dequantize("float16")).any() == (size > 1)


def test_blocks_of_a_read_only_map(tmp_path: Any) -> None:
    raw = random_blocks("q8_0", (4, 32))
    (tmp_path / "w").write_bytes(raw.tobytes())
    mapped = np.memmap(tmp_path / "w", np.uint8, "r")
    w = cq.from_blocks(mapped, "q8_0", (4, 32))
    assert np.shares_memory(w.blocks, mapped)
    assert (np.ones((1, 32), np.float32) @ w.T).shape == (1, 4)


@pytest.mark.parametrize(
    ("raw", "shape", "kind", "message"),
    [
        (np.zeros(17, np.uint8), (1, 32), ValueError, r"raw has 17 bytes; q4_0 of shape \(1, 32\) has 18"),
        (np.zeros(19, np.uint8), (1, 32), ValueError, r"raw has 19 bytes; q4_0 of shape \(1, 32\) has 18"),
        (np.zeros(18, np.int8), (1, 32), TypeError, "raw has dtype int8; storage bytes are uint8"),
        (np.zeros(18, np.uint8), (1, 33), ValueError, "33 elements"),
        (np.zeros(0, np.uint8), (), ValueError, "at least one axis"),
        (np.zeros(18, np.uint8), (-1, 32), ValueError, "negative dimension"),
        (np.zeros(18, np.uint8), "x", TypeError, "shape 'x' is not a tuple of integers"),
        (np.zeros(0, np.uint8), (2**40, 2**40), ValueError, rf"raw has 0 bytes; .* has {18 * 2**75}"),
        ([0] * 18, (1, 32), TypeError, "raw is a list"),
        (memoryview(bytes(36))[::2], (1, 32), ValueError, "raw is a memoryview with gaps"),
    ],
)
def test_from_blocks_refuses(raw: Any, shape: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.from_blocks(raw, "q4_0", shape)


def test_preparing_a_vector_does_nothing(xp: ModuleType) -> None:
    w = cq.quantize(xp.ones(64, xp.float32), "q4_0")
    assert w.prepare() is w
    assert np.shares_memory(w.blocks, w.storage) if xp is np else w.blocks is w.storage


def test_a_vector_may_end_within_a_block(xp: ModuleType) -> None:
    x = np.random.default_rng(0).standard_normal(1001, np.float32)
    expected = cq.quantize(x, "kbit3")
    w = cq.quantize(xp.asarray(x), "kbit3")
    assert w.shape == w[...].shape == w.to_device("cpu").shape == (1001,)
    assert w.nbytes == w.blocks.nbytes == expected.nbytes
    for made, wanted in ((w.blocks, expected.blocks), (w.dequantize(), expected.dequantize())):
        np.testing.assert_array_equal(cq.device.as_numpy(made), wanted)


def test_bytes_are_not_to_be_changed() -> None:
    w = make()
    with pytest.raises(ValueError, match="read-only"):
        w.blocks[0] = 0
    with pytest.raises(TypeError, match=r"\(q4_0\) cannot be changed: change numbers, and quantize them"):
        w[0] = np.zeros(64, np.float32)


def test_is_no_buffer_of_numbers() -> None:
    w = make()
    assert w.__array_ufunc__ is w.T.__array_ufunc__ is None
    for value in (w, w.T):
        with pytest.raises(
            TypeError, match=r"packed blocks, not numbers: products are x @ W\.T; call \.dequantize\(\)"
        ):
            np.asarray(value)
    assert not hasattr(w, "__dlpack__")
    assert not hasattr(w, "__cuda_array_interface__")


@pytest.mark.parametrize(
    "operate",
    [
        lambda x, w: x + w,
        lambda x, w: w + x,
        lambda x, w: x - w,
        lambda x, w: np.multiply(x, w),
        lambda x, w: np.sqrt(w),
        lambda x, w: np.sum(w),
        lambda x, w: x.__imul__(w),
        lambda x, w: np.float32(2) * w,
        lambda x, w: 2 * w,
        lambda x, w: w / 2,
        lambda x, w: -w,
        lambda x, w: w**2,
        lambda x, w: abs(w),
        lambda x, w: w < x,
        lambda x, w: x >= w,
    ],
)
def test_blocks_have_no_arithmetic(operate: Any) -> None:
    w = cq.quantize(np.ones((4, 64), np.float32), "q4_0")
    for packed in (w, w.T):
        message = r"\(q4_0\) holds packed blocks, which have no ([-+*/<]|\*\*|>=|[\w.]+): call \.dequantize"
        with pytest.raises(TypeError, match=message):
            operate(np.ones(packed.shape, np.float32), packed)


def test_comparisons() -> None:
    """Python turns them round: which was written only NumPy's functions know."""
    w: Any = make()
    compared: list[Callable[[], Any]] = [lambda: w > 0, lambda: 0 >= w, lambda: w.T < 0]  # noqa: SIM300
    for compare in compared:
        with pytest.raises(TypeError, match="packed blocks, which have no comparison: call"):
            compare()
    with pytest.raises(TypeError, match="packed blocks, which have no >=: call"):
        _ = np.zeros(w.shape, np.float32) >= w


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dtype", r"\.dequantize\(dtype\) makes float32"),
        ("astype", r"call \.dequantize\(dtype\)"),
        ("reshape", "reshape numbers before they are quantized"),
        ("transpose", r"\.T swaps the last two axes"),
        ("swapaxes", r"\.T swaps the last two axes"),
        ("copy", "it never changes"),
        ("to", r"W\.to_device\(device\) moves W"),
        ("cpu", r"W\.to_device\('cpu'\) moves W"),
        ("cuda", r"W\.to_device\('cuda'\) moves W"),
        ("numpy", r"W\.to_device\('cpu'\)\.dequantize\(\) makes"),
        ("get", r"W\.to_device\('cpu'\) moves W"),
        ("sum", r"call \.dequantize\(\) for the numbers"),
        *((n, r"call \.dequantize\(\)") for n in ("mean", "max", "min", "flatten", "tolist", "strides")),
    ],
)
def test_attributes_that_arrays_have(name: str, instead: str) -> None:
    for packed in (make(), make().T):
        assert not hasattr(packed, name)
        with pytest.raises(AttributeError, match=rf"a \w+ has no {name}: .*{instead}"):
            getattr(packed, name)


@pytest.mark.parametrize("name", ["blocks", "size", "validate", "to_device", "prepare"])
def test_what_the_array_has_and_its_transpose_has_not(name: str) -> None:
    w: Any = make()
    assert hasattr(w, name)
    with pytest.raises(AttributeError, match=rf"a Transposed has no {name}: W has, .* \.T\.{name}$"):
        getattr(w.T, name)
    with pytest.raises(AttributeError, match="'Transposed' object has no attribute '_format'"):
        _ = w.T._format


@pytest.mark.parametrize("use", [lambda w: w[0], lambda w: list(w), lambda w: w[:, 1]])
def test_a_transpose_cannot_be_indexed(use: Any) -> None:
    with pytest.raises(TypeError, match=r"a Transposed \(q4_0\) has no rows of blocks: index W, .* \.T, or"):
        use(make().T)


def test_numpy_s_own_product() -> None:
    """Is the library's; where NumPy was to write it somewhere, the error says what does."""
    rows = np.ones((4, 64), np.float32)
    x: Any = rows
    w: Any = cq.quantize(np.ones((64, 64), np.float32), "q4_0")
    np.testing.assert_array_equal(np.matmul(x, w.T), cq.matmul(x, w.T))
    np.testing.assert_array_equal(np.matmul(w, x.T), cq.matmul(w, x.T))
    advice = r"write x @ W\.T, or cuquant\.matmul\(x, W\.T, out=out\)"
    with pytest.raises(TypeError, match=advice):
        x @= w.T
    with pytest.raises(TypeError, match=advice):
        np.matmul(x, w.T, out=np.empty_like(x))
    with pytest.raises(TypeError, match=r"write x @ W\.T, or cuquant\.matmul\(x, W\.T, dtype=dtype\)"):
        np.matmul(x, w.T, dtype=np.float32)
    with pytest.raises(TypeError, match=r"cuquant\.matmul\(x, W\.T, out=out, dtype=dtype\)"):
        np.matmul(x, w.T, dtype=np.float32, out=np.empty_like(x))
    assert x is rows


def test_equal_to_itself_alone() -> None:
    w = make()
    x = w.dequantize()
    assert (x == w, x != w, w == x, w == make(), w == w) == (False, True, False, False, True)
    given: Any = w
    assert (np.equal(given, given), np.not_equal(given, given), np.equal(x, given)) == (True, False, False)
    with pytest.raises(TypeError, match=r"packed blocks, which have no numpy\.equal"):
        np.equal(x, given, out=np.zeros(x.shape, bool))
    with pytest.raises(TypeError, match=r"packed blocks, which have no numpy\.equal\.outer: call"):
        np.equal.outer(x, given)


class OnAnotherDevice:
    """An array whose library, as CuPy, refuses others in NumPy's functions."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return NotImplemented


def test_comparisons_that_would_answer_false() -> None:
    w: Any = make()
    x: Any = w.dequantize()
    other: Any = OnAnotherDevice()
    for packed, bytes_ in ((w, r"\.blocks"), (w.T, r"\.T\.blocks")):
        advice = rf"does not compare: compare what \.dequantize\(\) or {bytes_} gives$"
        for a, b in ((packed, packed), (x, packed), (packed, x), (packed, other), (other, packed)):
            with pytest.raises(TypeError, match=rf"\(q4_0\) .* which numpy\.array_equal {advice}"):
                np.array_equal(a, b)
            with pytest.raises(TypeError, match=rf"\(q4_0\) .* which numpy\.array_equiv {advice}"):
                np.array_equiv(a, b)
        with pytest.raises(TypeError, match=f"which the operator in {advice}"):
            _ = 1.0 in packed


def test_other_functions_of_numpy_are_as_they_were() -> None:
    w: Any = make()
    x, other = w.dequantize(), OnAnotherDevice()
    assert (np.shape(w), np.ndim(w.T), np.size(w), np.size(w, 0)) == ((6, 64), 2, 384, 6)
    uses: list[Callable[[], Any]] = [
        lambda: np.concatenate([x, w]),
        lambda: np.dot(x, w.T),
        lambda: np.allclose(w, x),
        lambda: np.zeros_like(w),
    ]
    for use in uses:
        with pytest.raises(
            TypeError, match=r"packed blocks, not numbers: (products are x @ W\.T; )?call \.dequantize\(\)"
        ):
            use()
    with pytest.raises(TypeError, match=r"no implementation found for 'numpy\.dot'"):
        np.dot(other, w)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="__array_function__"):
        np.zeros(3, like=w)


def test_errors_of_properties_are_their_own() -> None:
    broken: Any = cq.QuantizedArray._made("q4_0", np.zeros((2, 18), np.uint8), shape=(2, 32))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="'str' object has no attribute"):
        _ = broken.nbytes
    with pytest.raises(AttributeError, match="'QuantizedArray' object has no attribute 'nonsense'"):
        _ = broken.nonsense


def test_transpose() -> None:
    w = make((3, 6, 64))
    assert w.T.shape == w.mT.shape == (3, 64, 6)
    assert w.T.ndim == 3
    assert w.T.format is w.format
    assert w.T.T is w
    assert w.T.mT is w
    np.testing.assert_array_equal(w.T.dequantize(), w.dequantize().swapaxes(-1, -2))
    expected = "Transposed(shape=(3, 64, 6), format=q4_0, bits_per_weight=4.5, nbytes=648, device='cpu')"
    assert repr(w.T) == expected
    assert (len(w.T), w.T.nbytes, w.T.device) == (3, 648, "cpu")
    with pytest.raises(ValueError, match="no rows and columns to swap"):
        _ = make((64,)).T


def test_devices() -> None:
    w = make()
    assert w.to_device("cpu") is w
    assert w.prepare() is w
    with pytest.raises(ValueError, match="unknown device 'gpu'; allowed are 'cpu' and 'cuda'"):
        w.to_device("gpu")


def test_cuda_without_a_gpu_says_why() -> None:
    if cq.device.gpu_problem() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="no CUDA device can be used: CuPy"):
        make().to_device("cuda")


def test_copies() -> None:
    w = make()
    deep = copy.deepcopy(w)
    for other in (pickle.loads(pickle.dumps(w)), deep, copy.copy(w)):
        assert (other.format, other.shape) == (w.format, w.shape)
        np.testing.assert_array_equal(other.blocks, w.blocks)
    assert not np.shares_memory(deep.blocks, w.blocks)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(w.T, protocol)).T.blocks, w.blocks)


def test_arrays_while_another_thread_imports_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is there before what is in it."""
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setattr(cq.device, "_is_cuda", {})
    assert make().dequantize().shape == make().shape
