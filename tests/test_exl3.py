"""EXL3 weights: against scalar arithmetic and loops over bits, and by hand."""

from __future__ import annotations

import pickle
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from walks import GENERATORS, random_exl3

import cuquant as cq
from cuquant.cuda.fragments import of_matrices
from cuquant.formats.exl3 import states
from cuquant.testing import nmse

read_safetensors = partial(cq.read_safetensors, device="cpu")

F, H = np.float32, np.float16
CODEBOOKS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def half(bits: int) -> Fraction:
    return Fraction(float(np.array(bits, np.uint16).view(H)))


def number(state: int, codebook: str) -> Fraction:
    """What a state stands for, before its rounding to float16."""
    product = state * CODEBOOKS[codebook] + (64248484 if codebook == "3inst" else 0) & 0xFFFFFFFF
    if codebook == "mul1":
        return (1024 + sum(product.to_bytes(4, "little"))) * half(0x1EEE) + half(0xC931)
    product = product & 0x8FFF8FFF ^ 0x3B603B60
    return half(product & 0xFFFF) + half(product >> 16)


class Weight:
    """Random steps of every tile, and what they stand for."""

    def __init__(self, n: int, k: int, bits: int, codebook: str, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.steps = rng.integers(0, 1 << bits, (k // 16, n // 16, 256))
        self.suh, self.svh = (rng.standard_normal(size).astype(H) for size in (k, n))
        self.bits, self.codebook = bits, codebook

    @property
    def rings(self) -> list[str]:
        """The bits of every tile, in order."""
        return [
            "".join(f"{s:0{self.bits}b}" for s in steps) for steps in self.steps.reshape(-1, 256).tolist()
        ]

    @property
    def trellis(self) -> NDArray[np.int16]:
        """Words of 16 bits, the highest first; of two the second is stored before the first."""
        words = [[int(ring[i : i + 16], 2) for i in range(0, len(ring), 16)] for ring in self.rings]
        stored = np.array(words, np.uint16).reshape(-1, 2)[:, ::-1]
        return np.ascontiguousarray(stored).view(np.int16).reshape(*self.steps.shape[:2], -1)

    @property
    def inner(self) -> NDArray[np.float64]:
        """V [K, N]."""
        tiles_k, tiles_n, _ = self.steps.shape
        made = np.empty((tiles_k * 16, tiles_n * 16))
        for tile, ring in enumerate(self.rings):
            twice = ring + ring
            for t in range(256):
                end = (t + 1) * self.bits + len(ring)
                value = float(H(float(number(int(twice[end - 16 : end], 2), self.codebook))))
                lane, j = divmod(t, 8)
                row = lane % 4 * 2 + (0, 1, 8, 9)[j % 4]
                column = lane // 4 + (8 if j >= 4 else 0)
                made[tile // tiles_n * 16 + row, tile % tiles_n * 16 + column] = value
        return made

    @property
    def numbers(self) -> NDArray[np.float64]:
        """W [N, K]."""
        one = np.ones((1, 1))
        while len(one) < 128:
            one = np.block([[one, one], [one, -one]])
        v = self.inner
        sides = [np.kron(np.eye(size // 128), one / np.sqrt(128)) for size in v.shape]
        turned: NDArray[np.float64] = sides[0] @ v @ sides[1]
        return (turned * self.suh.astype(float)[:, None] * self.svh.astype(float)).T


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_every_state(codebook: str) -> None:
    values = states(codebook)
    for state in [*range(0, 1 << 16, 7), 0xFFFF]:
        exact = number(state, codebook)
        assert Fraction(float(exact)) == exact  # a float64 holds the sum, and the product and sum
        assert values[state] == float(H(float(exact)))
    assert abs(values.mean()) < 0.02
    assert 1.2 < values.std() < 1.3 or codebook == "mul1"


def test_states_by_hand() -> None:
    """mcg's product of 0 is 0: both halves are 0x3b60, 1888 / 2048. mul1's bytes of 0 add up to 0."""
    assert states("mcg")[0] == 2 * 1888 / 2048
    assert states("mul1")[0] == F(H(1024 * (1774 / 2**18) - 1329 / 128))


def test_the_state_1_by_hand() -> None:
    """89226354 + 64248484 = 0x0925d716, masked 0x0925d716, changed 0x3245bc76: 1605 / 2^13 - 1142 / 2^10.

    0xcbac1fed, masked 0x8bac0fed, changed 0xb0cc348d: -1228 / 2^13 + 1165 / 2^12. The bytes of 0x83dcd12d add
    up to 605.
    """
    assert states("3inst")[1] == F(H(1605 / 2**13 - 1142 / 2**10))
    assert states("mcg")[1] == F(H(1165 / 2**12 - 1228 / 2**13))
    assert states("mul1")[1] == F(H((1024 + 605) * (1774 / 2**18) - 1329 / 128))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_numbers(bits: int, codebook: str) -> None:
    n = 256 if codebook == "mcg" else 128  # in Python a number takes long
    w = Weight(n, 128, bits, codebook, bits)
    packed = cq.from_exl3(w.trellis, w.suh, w.svh, codebook)
    assert packed.shape == (n, 128)
    assert packed.nbytes == n * 128 * bits // 8 + 2 * (n + 128)
    made = packed.dequantize()
    assert made.dtype == F
    assert nmse(made, w.numbers) < 1e-12


def test_packed_signs() -> None:
    w = Weight(128, 256, 3, "3inst")
    w.suh, w.svh = np.sign(w.suh), np.sign(w.svh)
    bits = [np.packbits(side < 0, bitorder="little").view(np.int16) for side in (w.suh, w.svh)]
    assert bits[0].shape == (16,)
    packed, given = cq.from_exl3(w.trellis, bits[0], bits[1]), cq.from_exl3(w.trellis, w.suh, w.svh)
    np.testing.assert_array_equal(packed.blocks, given.blocks)


def test_parts_of_a_weight_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Weight(384, 256, 2, "mcg")
    packed = cq.from_exl3(w.trellis, w.suh, w.svh, "mcg")
    expected = packed.dequantize()
    monkeypatch.setattr("cuquant.formats.exl3._AT_ONCE", 1)
    np.testing.assert_array_equal(packed.dequantize(), expected)


def stored(w: Weight, prefix: str, **more: Any) -> dict[str, Any]:
    return {
        f"{prefix}{name}": a
        for name, a in ({"trellis": w.trellis, "suh": w.suh, "svh": w.svh} | more).items()
    }


def test_checkpoint(tmp_path: Path) -> None:
    a, b, c = (Weight(128, 128, 2 + i, name, i) for i, name in enumerate(CODEBOOKS))
    factor = {name: np.array(value, np.uint32).view(np.int32) for name, value in CODEBOOKS.items()}
    tensors = stored(a, "a.") | stored(b, "b.", mcg=factor["mcg"], bias=np.ones(128, H))
    tensors |= stored(c, "c.", mul1=factor["mul1"].reshape(1)) | {"norm.weight": np.ones(3, H)}
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
    found = read_safetensors(tmp_path / "m.safetensors")
    assert list(found) == ["a.weight", "b.weight", "c.weight"]
    for name, w in zip("abc", (a, b, c), strict=True):
        np.testing.assert_array_equal(
            found[f"{name}.weight"].blocks, cq.from_exl3(w.trellis, w.suh, w.svh, w.codebook).blocks
        )
    assert cq.quantize(found["b.weight"].dequantize(), "q8_0").shape == (128, 128)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x.suh": None}, r"x\.trellis has no suh beside it"),
        ({"x.mcg": np.array([5], np.int32)}, r"x\.mcg is 0x5; 0xcbac1fed alone is known"),
        ({"x.mcg": np.array([], np.int32)}, r"x\.mcg is empty; 0xcbac1fed alone is known"),
        ({"x.mcg": np.array([1.0], F)}, r"x\.mcg has dtype float32; an integer is needed"),
        (
            dict.fromkeys(("x.mul1", "x.mcg"), np.array([5], np.int32)),
            r"x\.trellis: there is an mcg and a mul1 of this weight",
        ),
        ({"x.su": np.ones(8, np.int16)}, r"x\.trellis: there is a suh and a su of this weight"),
        ({"x.svh": np.ones(64, H)}, r"x\.trellis: svh stands for \(64,\) numbers; trellis .* has 128 there"),
    ],
)
def test_a_checkpoint_with_faults(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    tensors = {k: v for k, v in (stored(Weight(128, 128, 2, "mcg"), "x.") | change).items() if v is not None}
    safetensors.numpy.save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises((TypeError, ValueError), match=problem):
        read_safetensors(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (
            {"trellis": np.zeros((8, 8, 32), np.uint16)},
            TypeError,
            "trellis has dtype uint16; int16 is needed",
        ),
        ({"trellis": np.zeros((8, 7, 32), np.int16)}, ValueError, "N is 112, no multiple of 128"),
        ({"trellis": np.zeros((8, 8, 40), np.int16)}, ValueError, "its last axis is 16 times bits, 1 to 8"),
        ({"trellis": np.zeros((0, 8, 32), np.int16)}, ValueError, "K is 0, no multiple of 128"),
        ({"trellis": np.zeros((8, 8), np.int16)}, ValueError, "three axes"),
        ({"suh": np.ones(128, F)}, TypeError, "suh has dtype float32; float16, or int16 with a bit for each"),
        ({"svh": np.ones(8, np.int16)[:4]}, ValueError, r"svh stands for \(64,\) numbers"),
        ({"codebook": "2mad"}, ValueError, "codebook"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], problem: str) -> None:
    ones = np.ones(128, H)
    given: dict[str, Any] = {"trellis": np.zeros((8, 8, 32), np.int16), "suh": ones, "svh": ones} | change
    with pytest.raises(error, match=problem):
        cq.from_exl3(**given)


def test_products_on_the_cpu() -> None:
    w = random_exl3(3, (256, 384))
    x = np.random.default_rng(1).standard_normal((2, 5, 384), F)
    exact = x.astype(float) @ w.dequantize().astype(float).T
    assert nmse(x @ w.T, exact) < 1e-10
    assert nmse(cq.quantize(x, "q8_1") @ w.T, exact) < 1e-4


def test_rows_are_selected_in_runs() -> None:
    w = random_exl3(2, (2, 384, 256))
    dense = w.dequantize()
    for index in ((0,), (1, slice(128, 384)), (0, slice(0, 0)), (slice(None), slice(256, 384)), (Ellipsis,)):
        np.testing.assert_array_equal(w[index].dequantize(), dense[index])
    nothing: list[Any] = [slice(0, 0), [], (slice(None), slice(0, 0))]
    for none in nothing:
        assert w[none].dequantize().shape == dense[none].shape
    assert not w[0, :0].blocks.any()  # a side that no row has is not what memory held before
    runs = np.r_[256:384, 0:128]
    np.testing.assert_array_equal(w[1, runs].dequantize(), dense[1, runs])
    np.testing.assert_array_equal(next(reversed(w)).blocks, w[1].blocks)
    with pytest.raises(IndexError, match="made 128 at a time"):
        list(reversed(w[0]))
    for rows in (5, slice(0, 100), slice(64, 192), np.arange(128)[::-1]):
        with pytest.raises(IndexError, match="rows of exl3-2-mcg are made 128 at a time"):
            w[0, rows]
    both = np.repeat([0, 1], 128)
    with pytest.raises(IndexError, match="whose suh differ"):
        w[both, np.r_[0:128, 0:128]]


@pytest.mark.parametrize("generator", GENERATORS)
def test_saved_and_read_back(tmp_path: Path, generator: str) -> None:
    w = random_exl3(5, (128, 256), generator)
    cq.save(tmp_path / "w.safetensors", {"w": w})
    again = cq.load(tmp_path / "w.safetensors")["w"]
    assert again.format == w.format == cq.formats.get(f"exl3-5-{generator}".removesuffix("-3inst"))
    np.testing.assert_array_equal(again.blocks, w.blocks)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(w)).blocks, w.blocks)
    assert again.validate() is again


def test_numbers_that_are_not_finite() -> None:
    w = random_exl3(2, (256, 128))
    blocks = w.blocks.copy()
    cq.Exl3(2, "mcg").parts(blocks, w.shape).svh[3] = np.inf
    with pytest.raises(ValueError, match="1 row holds weights that are NaN or infinite, the first is row 3"):
        cq.from_blocks(blocks, w.format, w.shape).validate()


def test_a_side_of_nan_is_like_itself() -> None:
    w = random_exl3(2, (256, 128))
    blocks = w.blocks.copy()
    cq.Exl3(2, "mcg").parts(blocks, w.shape).suh[5] = np.nan
    half = cq.from_blocks(blocks, w.format, w.shape)[128:]
    assert np.isnan(half.dequantize()).any(axis=1).all()


def test_nothing_here_quantizes_to_it(tmp_path: Path) -> None:
    assert "exl3-4" not in cq.formats.names()
    for fmt in ("exl3-4", cq.Exl3(4, "mcg")):
        with pytest.raises(ValueError, match=r"nothing here quantizes to exl3-4(-mcg)?: exllamav3 does"):
            cq.quantize(np.ones((128, 128), F), fmt)
    model = Path(__file__).parent.parent / "examples/data/nano-llama-f16.gguf"
    with pytest.raises(ValueError, match="nothing here quantizes to exl3-4: exllamav3 does"):
        cq.quantize_file(model, tmp_path / "w.safetensors", {"*attn*": "exl3-4"})
    with pytest.raises(ValueError, match=r"multiples of 128, not \(128, 64\)"):
        cq.from_blocks(np.zeros(128 * 64 // 2 + 384, np.uint8), "exl3-4", (128, 64))
    with pytest.raises(ValueError, match="unknown format 'exl3': did you mean exl3-"):
        cq.quantize(np.ones((128, 128), F), "exl3")
    with pytest.raises(ValueError, match="bits is 9; allowed are 1, 2, 3"):
        cq.Exl3(9)
    with pytest.raises(ValueError, match="generator is 'lcg'; allowed are '3inst', 'mcg', 'mul1'"):
        cq.Exl3(4, "lcg")


def test_operands_that_are_not_there_yet() -> None:
    w = random_exl3(2, (128, 128))
    with pytest.raises(TypeError, match=r"array of .* is needed: its \.dequantize\(\) is one"):
        cq.quantize(w, "q4_0")
    a_list = r"experts\.gate is a list; an array is needed, of several weights"
    with pytest.raises(TypeError, match=a_list):
        cq.Experts([w], [w], [w])
    experts, ids = cq.Experts._make([[w], [w], [w]]), np.zeros((1, 1), int)
    with pytest.raises(TypeError, match=a_list):
        cq.moe(np.ones((1, 128), F), experts, ids, np.ones((1, 1), F))


def test_experts_are_stacked() -> None:
    ws: Any = [random_exl3(3, (128, 256), seed=seed) for seed in range(3)]
    stacked: Any = np.stack(ws)
    assert (stacked.shape, stacked.format) == ((3, 128, 256), ws[0].format)
    np.testing.assert_array_equal(stacked.dequantize(), np.stack([w.dequantize() for w in ws]))


def test_whole_matrices_that_gpus_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format of one's own may be for NumPy alone."""
    monkeypatch.setattr(cq.Exl3, "kernels", None)
    with pytest.raises(NotImplementedError, match="has no kernels yet: it works on NumPy arrays only"):
        of_matrices(cq.Exl3(4))
