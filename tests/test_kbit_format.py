"""The k-bit formats as things: codebooks, parameters, equality."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from formats_table import CODEBOOKS
from test_kbit import BITS, NF4, VARIANTS, F, rng, sqnr_db

import cuquant as cq
from cuquant.cuda.fragments import _masked_lift
from cuquant.formats.kernels import kernels_of


@pytest.mark.parametrize("k", BITS)
def test_codebook_is_normal_quantiles(k: int) -> None:
    c = cq.normal_float_codebook(k)
    assert (c.dtype, c.shape) == (np.dtype(F), (2**k,))
    assert (np.diff(c) > 0).all()
    np.testing.assert_array_equal(c, -c[::-1])
    assert c[-1] == 1
    from statistics import NormalDist

    exact = np.array([NormalDist().inv_cdf((i + 0.5) / 2**k) for i in range(2**k)])
    np.testing.assert_allclose(c, exact / exact[-1], rtol=1e-7)
    with pytest.raises(ValueError, match="read-only"):
        c[0] = 0


def test_codebook_bits_never_change() -> None:
    """Stored weights mean what this table says, whatever SciPy is installed."""
    halves = {  # bits of the entries between 0 and 1
        2: "3E8DD219",
        3: "3DD2012A 3EA32005 3F1409F5",
        4: "3D2C6C36 3E0265AD 3E5D2107 3E9F2EE8 3ED56948 3F0ACE37 3F35233A",
        5: """
        3C950060 3D5FF631 3DBB691C 3E04052D 3E2B36BA 3E539BDA 3E7D9848 3E94D4A9 3EAC39A3 3EC56BF3
        3EE10F81 3F001198 3F122CF2 3F288359 3F4731DC
        """,
    }
    for k, expected in halves.items():
        upper = cq.normal_float_codebook(k)[2 ** (k - 1) : -1]
        assert [f"{v:08X}" for v in upper.view(np.uint32)] == expected.split()


@pytest.mark.parametrize("a", [0.05, 0.2, 0.27699354, 0.3, 0.45, 0.4998, 0.4999, 0.49999])
@pytest.mark.parametrize("b", [0.1, 1])
def test_two_magnitudes_as_masks_make_them(a: float, b: float) -> None:
    """c and 1024 + c, in units of 2^-24, over one unit: near both magnitudes, or not taken."""
    a = float(F(a * b))
    fmt = cq.KBit(2, [-b, -a, a, b])
    c = round(1024 * a / (b - a))
    masked = kernels_of(fmt).masked
    if masked is None:  # of small ones half a unit is too much, and 1024 is the bit of the exponent
        assert c < 512 or c > 1023
        return
    assert masked.halves.view(np.uint16).tolist() == [0x8400 + c, 0x8000 + c, c, 0x400 + c]
    made = masked.halves.astype(np.float64) * 2**24 / masked.unit
    np.testing.assert_allclose(made[2:], [a, b], rtol=2**-10)
    assert abs(made[3] / b - 1) <= 2**-11


def test_which_codebooks_masks_make() -> None:
    assert kernels_of(cq.KBit(2)).masked is not None
    assert kernels_of(cq.KBit(2, scale="decoded")).masked is not None
    assert kernels_of(cq.KBit(2, absmax="float16")).masked is None
    assert all(kernels_of(cq.KBit(k)).masked is None for k in (3, 4, 5))
    for codebook in ([-1, -0.3, 0.3, 0.9], [-1, -0.6, 0.6, 1], [-1, 0, 0, 1], [0.1, 0.2, 0.3, 1]):
        assert kernels_of(cq.KBit(2, codebook)).masked is None


@pytest.mark.parametrize(
    ("greatest", "least", "expected"),
    [
        (0, np.inf, (True, 15)),
        (0.3, 1e-3, (True, 5)),
        (0.98, 1e-4, (True, 5)),
        (1.2, 2**-6, (True, 0)),
        (1.2, 2**-14, (True, 4)),
        (7.8, 2**-14, (True, 2)),
        (31, 2**-12, (True, 0)),
        (31, 2**-13, (False, 0)),
    ],
)
def test_how_far_masks_lift(greatest: float, least: float, expected: tuple[bool, int]) -> None:
    """By steps; as far as there is room where small blocks need it; scales stay in float16 in any case."""
    assert _masked_lift(greatest, least) == expected
    assert greatest * 2.0 ** (11 + expected[1]) <= np.finfo(np.float16).max


TAKES_BITS: list[tuple[Callable[..., Any], str]] = [(cq.normal_float_codebook, "k"), (cq.KBit, "bits")]


@pytest.mark.parametrize("k", [1, 6, 0, -2, True])
def test_refuses_other_widths(k: int) -> None:
    for make, name in TAKES_BITS:
        with pytest.raises(ValueError, match=f"^{name} is {int(k)}; allowed are 2, 3, 4, 5"):
            make(k)


def test_refuses_widths_that_are_no_integers() -> None:
    for make, name in TAKES_BITS:
        with pytest.raises(TypeError, match=f"^{name} is a float; allowed are 2, 3, 4, 5"):
            make(4.0)


def test_codebook_of_4_bits_is_near_nf4() -> None:
    """NF4's table differs by its entry at 0: no entry by more than 0.06, and it quantizes about as well."""
    c = cq.normal_float_codebook(4)
    assert np.abs(c - NF4).max() < 0.06
    x = rng().standard_normal((256, 1024), F)
    ours, theirs = (sqnr_db(cq.quantize(x, f), x) for f in (cq.KBit(4), cq.KBit(4, NF4)))
    assert abs(ours - theirs) < 0.5


@pytest.mark.parametrize("k", BITS)
def test_facts(k: int) -> None:
    fmt = cq.formats.get(f"kbit{k}")
    assert fmt == cq.KBit(k) == f"kbit{k}"
    assert CODEBOOKS[k - 2] == fmt.name == str(fmt)
    assert hash(fmt) == hash(cq.KBit(k)) == hash(f"kbit{k}")
    assert (fmt.block_bytes, fmt.bits_per_weight, fmt.bits) == (4 * k + 1, k + 0.25, k)
    assert cq.KBit(k, absmax="float16").block_bytes == 4 * k + 2
    assert fmt.ggml_type is None
    assert cq.formats.get(f"KBIT{k}") is fmt


def test_formats_of_equal_parameters_are_equal() -> None:
    own = cq.normal_float_codebook(4) * F(0.5)
    different = [
        cq.KBit(3),
        *(cq.KBit(4, **v) for v in VARIANTS),
        cq.KBit(4, own),
        cq.KBit(4, own, scale="decoded"),
        cq.KBit(4, own * F(0.5)),
        cq.formats.get("q4_0"),
    ]
    for i, a in enumerate(different):
        for j, b in enumerate(different):
            assert (a == b) == (i == j)
            assert (a.name == b.name) == (i == j)
    assert len(set(different)) == len(different)
    assert cq.KBit(4, own) == cq.KBit(4, own.tolist())
    assert hash(cq.KBit(4, own)) == hash(cq.KBit(4, own.copy()))
    assert cq.KBit(4, cq.normal_float_codebook(4)) == cq.KBit(4) == "kbit4"
    assert cq.KBit(4) != 4


@pytest.mark.parametrize("parameters", [*VARIANTS, {"codebook": NF4}, {"codebook": NF4, "absmax": "float16"}])
def test_repr_pickle_and_copies(parameters: dict[str, Any]) -> None:
    fmt = cq.KBit(4, **parameters)
    for other in (
        eval(repr(fmt), {"KBit": cq.KBit}),
        pickle.loads(pickle.dumps(fmt)),
        copy.deepcopy(fmt),
        copy.copy(fmt),
    ):
        assert other == fmt
        assert hash(other) == hash(fmt)
        np.testing.assert_array_equal(other.codebook, fmt.codebook)
    assert repr(cq.KBit(4)) == "KBit(4)"
    assert repr(cq.KBit(2, [-1, 0, 0.5, 1], "decoded", "float16")) == (
        "KBit(2, codebook=[-1.0, 0.0, 0.5, 1.0], scale='decoded', absmax='float16')"
    )


def test_a_codebook_is_copied_and_cannot_be_written() -> None:
    own = np.array([-1, -0.5, 0.5, 1], F)
    fmt = cq.KBit(2, own)
    own[:] = 0
    np.testing.assert_array_equal(fmt.codebook, np.array([-1, -0.5, 0.5, 1], F))
    for array in (fmt.codebook, fmt.thresholds):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("parameters", "kind", "message"),
    [
        (
            {"codebook": [0, 1, 0.5, 0.25]},
            ValueError,
            r"not sorted: entry 2 \(0.5\) is below entry 1 \(1.0\)",
        ),
        ({"codebook": [0, 0, 1, 0.5]}, ValueError, r"not sorted: entry 3 \(0.5\) is below entry 2 \(1.0\)"),
        ({"codebook": [1, 0.5, 0, -1]}, ValueError, "not sorted: entry 1 .* pass numpy.sort"),
        ({"codebook": [0, 0.5, 1]}, ValueError, r"codebook has shape \(3,\); 4 numbers are needed"),
        ({"codebook": np.zeros((2, 2))}, ValueError, r"codebook has shape \(2, 2\)"),
        ({"codebook": [-1, 0, 1, 2]}, ValueError, r"codebook holds 2.0; entries are in \[-1, 1\]"),
        ({"codebook": [-1, 0, 1, np.nan]}, ValueError, "codebook holds nan"),
        ({"codebook": [-1, 0, 1, 1e99]}, ValueError, "codebook holds inf"),
        ({"codebook": [-1, 0, 1, 10**400]}, TypeError, "codebook is no array of 4 numbers: int too large"),
        ({"codebook": [-np.inf, 0, 0, 1]}, ValueError, "codebook holds -inf"),
        ({"codebook": "nf4"}, ValueError, "codebook is 'nf4'; allowed are \"normal\" and 4 numbers"),
        ({"codebook": [object()] * 4}, TypeError, "codebook is no array of 4 numbers"),
        ({"scale": "other"}, ValueError, "scale is 'other'; allowed are 'absmax', 'decoded'"),
        ({"absmax": np.float16}, ValueError, "absmax is .*; allowed are 'e4m4', 'float16'"),
    ],
)
def test_refuses_parameters(parameters: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.KBit(2, **parameters)
