"""Every conversion of kernels/core/convert.cuh, for all codes at all places of its words, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from cuquant import device, plan
from cuquant.bench import Record, dequant
from cuquant.bench.conversions import CONVERSIONS, Conversion
from cuquant.bench.dequant import conversion_kernel, table_bytes
from cuquant.cuda import jit
from cuquant.testing import as_numpy

Q = np.arange(16)
E2M1 = Q.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
INT8 = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.int32)
ANY = np.array([-0.0, 2**-24, 65504, *np.random.default_rng(0).standard_normal(13)], np.float16)
"""Float16 numbers of every kind for the tables."""


def times(x: NDArray[Any], power: int, dtype: Any) -> NDArray[np.uint16]:
    """Bits of x times a power of two, which `dtype` holds exactly."""
    wanted = np.ldexp(x.astype(np.float64), power)
    made = wanted.astype(dtype)
    assert (made.astype(np.float64) == wanted).all()
    return made.view(np.uint16)


HALF, BFLOAT = np.float16, ml_dtypes.bfloat16
EXPECTED = {
    "E2m1": (times(E2M1, 0, HALF),),
    "E2m1Uncorrected": (times(E2M1, -14, HALF),),
    "FragmentE2m1": (times(E2M1, -14, HALF),),
    "E2m1Permutes": (times(E2M1, 0, HALF),),
    "E2m1Bfloat": (times(E2M1, 0, BFLOAT),),
    "E2m1BfloatUncorrected": (times(E2M1, -126, BFLOAT),),
    "U4": (times(Q, 0, HALF),),
    "U4b8": (times(Q - 8, 0, HALF),),
    "U4Uncorrected": (times(1024 + Q, 0, HALF), times(1024 + 16 * Q, 0, HALF)),
    "FragmentIntegers": (times(Q, -24, HALF), times(Q, -20, HALF)),
    "Permutes": (ANY.view(np.uint16),),
    "Values": (ANY.view(np.uint16),),
    "Pairs": (ANY.view(np.uint16),),
    "Int8": (times(INT8, 0, HALF),),
    "Int8Uncorrected": (times(INT8 + 128 + 1024, 0, HALF),),
}
"""What registers hold, of even numbers and, if it is something else, of odd ones."""


def all_words(words: int) -> NDArray[np.uint32]:
    """[65536, words]: each half of each word takes every value."""
    low = np.arange(1 << 16, dtype=np.uint32)
    return np.stack([low * (2 * w + 1) % 65536 | low * (4 * w + 7) % 65536 << 16 for w in range(words)], 1)


def test_every_conversion_is_listed_with_its_numbers() -> None:
    """Also on the CPU: the benchmark's idea of registers is what ml_dtypes says of the codes."""
    assert EXPECTED.keys() == CONVERSIONS.keys()
    for codec, conversion in CONVERSIONS.items():
        if not conversion.table and codec != "Permutes":
            np.testing.assert_array_equal(conversion.registers[0], EXPECTED[codec][0])
            np.testing.assert_array_equal(conversion.registers[1], EXPECTED[codec][-1])
    signs, halves = EXPECTED["E2m1"][0][[0, 8]], EXPECTED["E2m1Uncorrected"][0][[1, 9]]
    assert [hex(bits) for bits in (*signs, *halves)] == ["0x0", "0x8000", "0x200", "0x8200"]


@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_every_place_has_every_code(conversion: Conversion) -> None:
    """What the test below holds the kernels against: an order is a permutation of a word's codes."""
    codes = conversion.order(all_words(conversion.words)).reshape(1 << 16, 16)
    count = 16 if conversion.words == 2 else 256
    assert codes.max() == count - 1
    for place in codes.T:
        assert (np.bincount(place, minlength=count) == (1 << 16) // count).all()
    for word, bit in np.ndindex(conversion.words, 32):
        one = np.zeros(conversion.words, np.uint32)
        one[word] = np.uint32(1) << np.uint32(bit)
        assert np.count_nonzero(conversion.order(one)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS.keys())
def test_all_codes_at_all_places(conversion: Conversion) -> None:
    cupy = device.cupy()
    given = all_words(conversion.words)
    out = cupy.zeros((len(given), 8), np.uint32)
    capability = jit.capability()
    kernel = conversion_kernel("words", conversion, capability)
    launch = plan.Plan(kernel, (len(given) // 256, 1, 1), 256, table_bytes(conversion, capability))
    jit.launch(launch, cupy.asarray(given), out, cupy.asarray(ANY))
    got = as_numpy(out).view(np.uint16).reshape(-1, 8, 2)
    codes, expected = conversion.order(given), EXPECTED[conversion.codec]
    for register in range(8):
        bits = expected[register % 2 if len(expected) == 2 else 0]
        np.testing.assert_array_equal(got[:, register], bits[codes[:, register]])


@pytest.mark.gpu
def test_the_benchmark_checks_and_measures() -> None:
    record = Record(None, {})
    chosen = [CONVERSIONS[codec] for codec in ("E2m1Uncorrected", "Pairs", "FragmentIntegers", "Int8")]
    cells = list(dequant(record, [(2048, 512)], [1, 8], chosen))
    assert [c.where for c in cells] == ["registers"] * 5 + ["decode"] * 6
    for c in cells:
        assert c.us > 0.5
        assert c.instructions is None or 0 < c.instructions < 20
    assert record.verdict is not None
    assert record.verdict.count("\n") == 2
