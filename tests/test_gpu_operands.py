"""Operands as they may come, on a GPU: strides, memory of other libraries, indices, captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from products import cuda_weight, gauss

import cuquant as cq
from cuquant import device, testing
from cuquant.testing import as_numpy, nmse

pytestmark = pytest.mark.gpu
F, H = np.float32, np.float16


class Foreign:
    """An array as another library gives it: memory that CuPy knows nothing of."""

    def __init__(self, array: Any) -> None:
        place = {"data": (array.data.ptr, False), "shape": array.shape, "strides": array.strides}
        self.__cuda_array_interface__ = {"version": 3, "typestr": array.dtype.str, **place}


def stack_of_signs(lead: int) -> cq.QuantizedArray:
    """Trellis matrices whose columns have signs of their own."""
    shape = (lead, 64, 64)
    packed, scales, grid, su, sv = cq.trellis_parts(cq.quantize(gauss(shape, 1), "trellis3"))
    su = np.where(np.arange(64) % (2 + np.arange(lead)[:, None]), su, -su)
    return cq.trellis_from_parts(packed, scales, grid, su, sv, shape).to_device("cuda").prepare()


@pytest.mark.parametrize("name", ["q8_0", "iq4_nl"])
@pytest.mark.parametrize("largest", [1e-36, 1e-37, 1e-38, 1e-40])
def test_rows_near_the_smallest_float32_number(name: str, largest: float) -> None:
    """Even those of subnormal numbers alone."""
    w = cq.quantize(F(1e5) * gauss((48, 256)), name)
    x = np.clip(gauss((40, 256), 1), -1, 1) * F(largest)
    x[::3] *= F(2**20)
    for rows in (1, 40):
        y = as_numpy(cq.matmul(device.cupy().asarray(x[:rows]), w.to_device("cuda").T))
        for given, row in zip(x[:rows], y, strict=True):
            assert nmse(row, testing.linear(given, w)) <= 1e-6


def test_a_format_that_is_defined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plans, and the tables that are made for it, are its own."""
    monkeypatch.setattr(cq.formats.base, "_BY_NAME", dict(cq.formats.base._BY_NAME))

    def defined(base: str, **parts: Any) -> cq.Format:
        parts |= {"name": "mine", "header": base, "ggml_type": None, "file_type": None}
        type("Mine", (type(cq.formats.get(base)),), parts)
        return cq.formats.get("mine")

    given, cupy = gauss((24, 256)), device.cupy()
    for base, parts in (
        ("q4_0", {}),
        ("q8_0", {}),
        ("iq4_nl", {}),
        ("iq4_nl", {"codebook": np.linspace(-30000, 30000, 16, dtype=F)}),
        ("iq4_nl", {"codebook": np.linspace(-1e-3, 1e-3, 16, dtype=F)}),
    ):
        w = cq.quantize(given, base)
        w = cq.from_blocks(w.blocks, defined(base, **parts), w.shape).to_device("cuda")
        x, numbers = gauss((40, 256), 1).astype(H), as_numpy(w.dequantize())
        for rows in (1, 40):
            y = cq.matmul(cupy.asarray(x[:rows]), w.T, dtype=F)
            assert nmse(as_numpy(y), x[:rows].astype(float) @ numbers.T) <= 1e-6


def test_out_in_the_memory_of_others_is_apart_from_what_is_read() -> None:
    """Neither array is contiguous, and each one's memory, as CuPy sees it, starts where it starts."""
    cupy = device.cupy()
    w = cuda_weight("q4_0", (192, 64))
    buffer = cupy.asarray(gauss((40, 256)).astype(H))
    x, out = Foreign(buffer[:39, :64]), Foreign(buffer[1:, :192])
    for _ in range(2):
        with pytest.raises(ValueError, match="out may share memory with x"):
            cq.linear(x, w, out=out)
    apart = cupy.empty((39, 192), H)
    cq.linear(x, w, out=Foreign(apart))
    assert nmse(apart, testing.linear(buffer[:39, :64], w)) < 1e-6


def test_a_residual_in_place_whose_single_row_has_another_stride() -> None:
    cupy = device.cupy()
    w = cuda_weight("q4_0", (32, 64))
    x, base = cupy.asarray(gauss((1, 64)).astype(H)), cupy.asarray(gauss((2, 64)))
    out, again = base[:1, :32], base.reshape(-1)[:32].reshape(1, 32)
    assert again.strides != out.strides
    expected = testing.linear(x, w) + as_numpy(out)
    assert nmse(cq.linear(x, w, residual=again, out=out), expected) < 1e-6


def apart(like: Any, gap: int = 0) -> Any:
    """An array of zeros whose numbers start two bytes behind a multiple of their size."""
    size = like.dtype.itemsize
    raw = device.cupy().zeros(like.size * size + size + gap, np.uint8)
    return raw[2 : 2 + like.size * size].view(like.dtype).reshape(like.shape)


@pytest.mark.parametrize("what", ["x", "bias", "residual", "out"])
def test_numbers_between_multiples_of_their_size_are_refused(what: str) -> None:
    """Also where a call like it was right, and those after it are not checked in full."""
    cupy = device.cupy()
    w = cuda_weight("q4_0", (64, 64))
    shapes = {"x": (5, 64), "bias": (64,), "residual": (5, 64), "out": (5, 64)}
    given = {name: cupy.zeros(shape, F) for name, shape in shapes.items()}
    stepping = cupy.zeros((5, 64 * 4 + 2), np.uint8)[:, :256].view(F)
    # x that starts on 16 bytes is no call like the odd one: one that starts on 4 is.
    whole = cupy.zeros(5 * 64 + 1, F)[1:].reshape(5, 64) if what == "x" else given[what]
    for odd in (apart(given[what]), *([] if what == "bias" else [stepping])):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"{what} has numbers of 4 bytes that start between"):
                cq.linear(**{"w": w, **given, what: odd})
            cq.linear(w=w, **given | {what: whole})


@pytest.mark.parametrize("what", ["x", "expert_ids", "expert_probs", "out"])
def test_the_same_of_mixtures(what: str) -> None:
    cupy = device.cupy()
    experts = cq.Experts(*(cuda_weight("q4_0", (2, 64, 64)) for _ in range(3)))
    given = {"x": cupy.zeros((4, 64), F), "expert_ids": cupy.zeros((4, 2), np.int32)}
    given |= {"expert_probs": cupy.ones((4, 2), F), "out": cupy.empty((4, 64), F)}
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{what} has numbers of 4 bytes that start between"):
            cq.moe(**{"experts": experts, **given, what: apart(given[what])})
        cq.moe(experts=experts, **given)


def test_memory_that_cupy_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it copies another GPU's: results would be in the copy."""
    cupy = device.cupy()
    w, x, out = cuda_weight("q4_0", (32, 64)), cupy.zeros((3, 64), H), cupy.zeros((3, 32), H)
    monkeypatch.setattr(cupy, "asarray", lambda array: cupy.zeros((3, 32), H))
    match = "out is not in the memory of GPU 0, the current device"
    with pytest.raises(ValueError, match=match):
        cq.linear(x, w, out=Foreign(out))
    with pytest.raises(ValueError, match=match):
        cq.matmul(w, x.T, out=Foreign(out.T))


def test_indices_beyond_an_axis_are_refused() -> None:
    """CuPy takes integers of arrays modulo the axis' extent."""
    cupy = device.cupy()
    for name, lead in (("q8_0", ()), ("kbit4", (3,)), ("trellis3", (3,))):
        w = cuda_weight(name, (*lead, 8, 64))
        for prepared in (False, True):
            if prepared:
                w.prepare()
            first = (0,) * len(lead)
            for beyond in ([0, 9], np.array([-9]), cupy.asarray([[8]])):
                where = (*first, beyond)
                with pytest.raises(IndexError, match="out of bounds"):
                    w[where]
            for inside in ([0, 7, -8], cupy.asarray([3, 3])):
                where = (*first, inside)
                matrix = as_numpy(w.dequantize(F))[first]
                np.testing.assert_array_equal(as_numpy(w[where].dequantize(F)), matrix[as_numpy(inside)])
            if prepared:
                assert w._blocks is None
    rows = cuda_weight("q8_0", (8, 64))[Foreign(cupy.asarray([6, 1]))]
    np.testing.assert_array_equal(
        as_numpy(rows.blocks), as_numpy(cuda_weight("q8_0", (8, 64)).blocks)[[6, 1]]
    )


def test_an_index_is_checked_before_blocks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    w = cuda_weight("q8_0", (8, 64)).prepare()
    monkeypatch.setattr("cuquant.cuda.fragments.from_fragments", None)
    for index in (8, [9], (0, 3)):
        with pytest.raises(IndexError):
            w[index]


def unmerged(dtype: Any) -> Any:
    """Rows that no single stride leads to."""
    return device.cupy().asarray(gauss((3, 2, 64))).astype(dtype).swapaxes(0, 1)


def converted(cupy: Any) -> Callable[[], Any]:
    w, x, out = cuda_weight("q4_0", (32, 64)).prepare(), unmerged(F), cupy.empty((2, 3, 32), F)
    return lambda: cq.linear(x, w, out=out)


def quantized(cupy: Any) -> Callable[[], Any]:
    x = unmerged(H)
    return lambda: cq.quantize(x, "q8_1")


def routed(cupy: Any) -> Callable[[], Any]:
    x = unmerged(F)
    return lambda: cq.route(x, 2)


def signs_of_each(cupy: Any) -> Callable[[], Any]:
    w, x, out = stack_of_signs(2), cupy.zeros((40, 64), H), cupy.empty((2, 40, 64), H)
    return lambda: cq.linear(x, w, out=out)


def blocks_of_x(cupy: Any) -> Callable[[], Any]:
    w, x, out = stack_of_signs(2), cupy.zeros((2, 3, 64), H), cupy.empty((2, 3, 64), H)
    return lambda: cq.linear(x, w, out=out, x_format="q8_1")


def plain(cupy: Any) -> Callable[[], Any]:
    w, x, out = cupy.zeros((32, 64), H), cupy.zeros((3, 64), H), cupy.empty((3, 32), H)
    return lambda: cq.linear(x, w, out=out)


def mixture(cupy: Any, ids: Any, probs: Any) -> Callable[[], Any]:
    """Of two experts, for four tokens."""
    experts = cq.Experts(*(cuda_weight("q4_0", (2, 64, 64)).prepare() for _ in range(3)))
    x, out = cupy.zeros((4, 64), H), cupy.empty((4, 64), H)
    return lambda: cq.moe(x, experts, ids, probs, out=out)


def numbers_of_prepared(cupy: Any) -> Callable[[], Any]:
    w = cuda_weight("q4_0", (32, 64)).prepare()
    return w.dequantize


def rows_of_prepared(cupy: Any) -> Callable[[], Any]:
    w = cuda_weight("kbit3", (32, 64)).prepare()
    return lambda: w[3:9]


def chosen_by_the_host(cupy: Any) -> Callable[[], Any]:
    experts = cq.Experts(*(cupy.zeros((2, 64, 64), H) for _ in range(3)))
    x, ids, probs = cupy.zeros((4, 64), H), cupy.zeros((4, 2), np.int32), cupy.ones((4, 2), F)
    return lambda: cq.moe(x, experts, ids, probs)


def ids_of_bytes(cupy: Any) -> Callable[[], Any]:
    return mixture(cupy, cupy.zeros((4, 2), np.uint8), cupy.ones((4, 2), F))


def probabilities_with_gaps(cupy: Any) -> Callable[[], Any]:
    return mixture(cupy, cupy.zeros((4, 2), np.int32), cupy.ones((4, 4), F)[:, ::2])


CAPTURED: dict[Callable[[Any], Callable[[], Any]], str] = {
    converted: "x has leading axes that do not merge",
    quantized: "x has leading axes that do not merge",
    routed: "logits has leading axes that do not merge",
    signs_of_each: "x is one for several matrices",
    blocks_of_x: "x is quantized before the product",
    plain: "a product with a plain weight",
    numbers_of_prepared: "the storage bytes of a prepared weight are made",
    rows_of_prepared: "the storage bytes of a prepared weight are made",
    chosen_by_the_host: "experts that are products of their own",
    ids_of_bytes: "expert_ids is no contiguous CuPy array of int64",
    probabilities_with_gaps: "expert_probs is no contiguous CuPy array of float32",
}


@pytest.mark.parametrize("made", CAPTURED)
def test_what_needs_memory_of_its_own_is_not_captured(made: Callable[[Any], Callable[[], Any]]) -> None:
    """A graph would write to it each time, and others have it by then."""
    cupy = device.cupy()
    call = made(cupy)
    call()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=CAPTURED[made]):
                call()
        finally:
            stream.end_capture()
