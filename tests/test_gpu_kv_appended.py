"""Tokens that a GPU appends: the CPU's bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches_there import OPTIONS, WIDTHS, F, assert_same, both, put, tokens

import cuquant as cq
from cuquant import device, testing

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 256])
def test_append_gives_the_cpu_s_bits(bits: int, dim: int) -> None:
    a, b = both(3, dim, 40, 2, WIDTHS)
    k, v = tokens(2, 30, 3, dim)
    k[1, 7], k[1, 8, :, 0] = -0.0, -0.0
    k[0, :10] *= np.logspace(-44, 4.5, 10)[:, None, None].astype(F)
    v[1, 3] = np.rint(v[1, 3])  # extremes that are there twice, of either sign
    v[1, 4], v[0, 5], k[1, 6, 1] = 0, -v[0, 5], 1
    a.append(k, v, bits)
    b.append(put(k), put(v), bits)
    assert_same(a, b)


@pytest.mark.parametrize("heads", [1, 2, 5, 13, 32])
@pytest.mark.parametrize("dim", [8, 32, 128])
def test_vectors_that_share_a_warp(heads: int, dim: int) -> None:
    """Tokens of all widths, one and many at a time."""
    a, b = both(heads, dim, 80, 2, WIDTHS, rotate=dim % 32 == 0)
    for n in (1, 37, 1, 2):
        k, v = tokens(2, n, heads, dim, seed=n)
        bits = np.random.default_rng(n).choice(WIDTHS, (2, n))
        a.append(k, v, bits)
        b.append(put(k), put(v), bits)
    assert_same(a, b)


@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (32, 128), (40, 96), (32, 64), (200, 256)])
def test_one_token_of_many_heads(heads: int, dim: int) -> None:
    """Where a GPU has clusters, blocks of one share it; nothing is written where it does not fit."""
    a, b = both(heads, dim, 6, 1, WIDTHS)
    for step, bits in enumerate((*WIDTHS, 8)):
        k, v = tokens(1, 1, heads, dim, seed=step)
        a.append(k, v, bits)
        b.append(put(k), put(v), bits)
    assert_same(a, b)
    taken = cq.KVCache(heads, dim, 6, 1, (4,), device="cuda")
    appender: Any = taken._appender
    lengths = put(np.ones(1, np.int32))  # there, so that the host does not know
    for _ in range(7):
        taken.append(put(k), put(v), lengths=lengths)
        device.cupy().cuda.get_current_stream().synchronize()
        if appender._refused[0]:
            break
    assert taken.lengths.tolist() == [6]
    with pytest.raises(ValueError, match="was refused and changed nothing: sequence 0"):
        taken.append(put(k), put(v))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 65519.0, 65520.0, 1e-45])
@pytest.mark.parametrize("bits", WIDTHS)
def test_extremes_too(bits: int, bad: float) -> None:
    a, b = both(2, 64, 8, 1, WIDTHS)
    k, v = tokens(1, 4, 2, 64)
    k[0, 1, 0, 5], v[0, 2, 1, 63] = bad, -bad
    v[0, 3] = 0
    v[0, 3, 0, 7] = bad
    a.append(k, v, bits)
    b.append(put(k), put(v), bits)
    assert_same(a, b, nan=True)


@pytest.mark.parametrize("bits", WIDTHS[1:])
def test_numbers_halfway_between_codes(bits: int) -> None:
    """And up to three float32 numbers beside that, where a quotient is rounded to a tie, or is near one."""
    a, b = both(1, 256, 512, 1, (bits,))
    rng = np.random.default_rng(bits)
    steps = rng.integers(1, 0x7BFF, 512).astype(np.uint16).view(np.float16).astype(F)
    steps[:16] = 2.0 ** -np.arange(9, 25)
    steps *= rng.choice([-1, 1], 512).astype(F)
    least = -(1 << (bits - 1))
    halfway = (rng.integers(least, -1 - least, (512, 256)) + 0.5).astype(F)
    x = ((halfway * steps[:, None]).view(np.int32) + rng.integers(-3, 4, halfway.shape, np.int32)).view(F)
    x[:, 7] = least * steps
    a.append(x[None, :, None], -x[None, :, None])
    b.append(put(x[None, :, None]), put(-x[None, :, None]))
    assert_same(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=["pairs", "halves rotated", "given", "rotated"])
def test_scaled_and_rotated_keys(options: dict[str, Any]) -> None:
    a, b = both(3, 96, 60, 2, WIDTHS, **options)
    for step, n in enumerate((20, 1, 5)):
        k, v = tokens(2, n, 3, 96, seed=step)
        k[..., 4:6] *= 60
        lengths = [n, 0] if step == 0 else None
        a.append(k, v, np.resize(WIDTHS, n), lengths=lengths)
        b.append(put(k), put(v), np.resize(WIDTHS, n), lengths=lengths)
    np.testing.assert_array_equal(a.key_scales, testing.as_numpy(b.key_scales))
    assert_same(a, b)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, F])
def test_any_floats_and_strides(dtype: Any) -> None:
    cupy = device.cupy()
    k, v = (x.astype(dtype) for x in tokens(2, 5, 2, 64))
    a, b = both(2, 64, 8, 2, (4,))
    a.append(k, v)
    wide = cupy.zeros((2, 5, 2, 128), dtype)
    wide[..., ::2] = put(k)
    b.append(wide[..., ::2], cupy.asfortranarray(put(v)))
    assert_same(a, b)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_widths_ids_and_lengths_of_every_token(on_gpu: bool) -> None:
    a, b = both(2, 64, {16: 9, 8: 30, 4: 30, 2: 30}, 3)
    rng = np.random.default_rng(0)
    for step in range(4):
        k, v = tokens(3, 7, 2, 64, seed=step)
        bits, ids = rng.choice([8, 4, 2], (3, 7)), rng.integers(0, 1000, (3, 7))
        lengths = rng.integers(0, 8, 3)
        unused = np.arange(7) >= lengths[:, None]
        bits[unused] = ids[unused] = -1
        a.append(k, v, bits, token_ids=ids, lengths=lengths)
        given = [put(x) if on_gpu else x for x in (bits, ids, lengths)]
        b.append(put(k), put(v), given[0], token_ids=given[1], lengths=given[2])
    assert_same(a, b)


def test_a_long_prompt_in_one_call() -> None:
    a, b = both(4, 128, 3000, 2, WIDTHS)
    k, v = tokens(2, 2500, 4, 128)
    bits = np.random.default_rng(0).choice(WIDTHS, (2, 2500))
    a.append(k, v, bits)
    b.append(put(k), put(v), bits)
    assert_same(a, b)
