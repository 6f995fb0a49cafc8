"""k-quants and IQ4: against gguf, scalar loops of ggml's definition, llama-quantize's scores and types."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from commands import Run
from formats_table import FLOATS, K_QUANTS, Row, random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import HELD_OUT, NANO, write, write_blocks
from kquants_oracle import BLOCK
from numpy.typing import NDArray
from synthetic import EXPERTS, some_tokens
from synthetic import write as write_model

import cuquant as cq
from cuquant import testing
from cuquant.formats import kquant
from cuquant.io import mixture
from cuquant.io.header import TensorInfo

F = np.float32
NAMES = [row.name for row in K_QUANTS]
DATA = Path(__file__).parent / "data"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The formats as things


@pytest.mark.parametrize("row", K_QUANTS, ids=lambda row: row.name)
def test_table(row: Row) -> None:
    fmt = cq.formats.get(row.name)
    assert (fmt.name, fmt.block_bytes, fmt.ggml_type) == row[:3]
    assert (fmt.block_size, row.block_bytes) == gguf.GGML_QUANT_SIZES[Type(row.ggml_type)]
    assert cq.formats.by_ggml_type(row.ggml_type) is fmt
    x = rng().standard_normal((64, 1024), F)
    assert row.sqnr_db < -10 * np.log10(testing.nmse(cq.quantize(x, row.name), x)) < row.sqnr_db + 0.5


def test_searched_scales_lose_less_than_those_of_the_largest_weight() -> None:
    x = rng().standard_normal((64, 1024), F)
    for searched, plain in (("q4_k", "q4_0"), ("iq4_nl", "q4_0"), ("q5_k", "q5_0"), ("iq4_xs", "kbit4")):
        assert testing.nmse(cq.quantize(x, searched), x) < 0.85 * testing.nmse(cq.quantize(x, plain), x)


@pytest.mark.parametrize("name", NAMES)
def test_dequantize_random_bytes_as_gguf(name: str) -> None:
    raw = random_blocks(name, (64, 4096))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the bytes hold infinite and NaN scales
        expected = gguf.quants.dequantize(raw, Type[name.upper()])
    assert np.isnan(expected).any()
    got = cq.from_blocks(raw, name, (64, 4096)).dequantize()
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


# Quantizing


@cache
def cases() -> dict[str, NDArray[Any]]:
    """Two blocks of 256 weights each."""
    g = rng(1)
    gauss = g.standard_normal((2, 256), F)
    outlier = gauss * F(1e-3)
    outlier[:, 7] = F(100)
    sizes = np.repeat(np.ldexp(F(1), -g.integers(0, 24, (2, 16))), 16, axis=1)
    return {
        "gauss": gauss,
        "uniform": g.uniform(-3, 5, (2, 256)).astype(F),
        "positive": np.abs(gauss) + F(1),
        "negative": -np.abs(gauss) - F(1),
        "outlier": outlier,
        "heavy tails": (gauss / g.uniform(0.01, 1, (2, 256))).astype(F),
        "groups of many sizes": gauss * sizes.astype(F),
        "grid": (g.integers(-8, 8, (2, 256)) / 4).astype(F),
        "constant": np.full((2, 256), F(0.3)),
        "negative constant": np.full((2, 256), F(-0.3)),
        "one value": np.where(np.arange(256) == 100, F(-0.7), F(0)) * np.ones((2, 1), F),
        "constants of groups": np.repeat(g.standard_normal((2, 16), F), 16, axis=1),
        "zeros": np.zeros((2, 256), F),
        "signed zeros": np.where(g.random((2, 256)) < 0.5, F(0), F(-0.0)),
        "half zeros": np.where(np.arange(256) < 128, gauss, F(0)),
        "typical": gauss * F(0.02),
        "small": gauss * F(1e-6),
        "below float16": gauss * F(1e-13),
        "negligible": gauss * F(1e-17),
        "subnormal": gauss * F(1e-40),
        "large": gauss * F(1e5),
    }


def as_defined(name: str, x: NDArray[np.float32], importance: NDArray[np.float32] | None = None) -> bytes:
    size = cq.formats.get(name).block_size
    weights = None if importance is None else np.broadcast_to(importance, x.shape).reshape(-1, size)
    with np.errstate(all="ignore"):
        return b"".join(
            BLOCK[name](block, None if weights is None else weights[i])
            for i, block in enumerate(x.reshape(-1, size))
        )


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("name", NAMES)
def test_quantize_as_the_definition(name: str, case: str) -> None:
    x = cases()[case]
    assert cq.quantize(x, name).blocks.tobytes() == as_defined(name, x)


@pytest.mark.parametrize(
    "case", ["gauss", "uniform", "outlier", "groups of many sizes", "half zeros", "large"]
)
@pytest.mark.parametrize("name", NAMES)
def test_quantize_by_importance_as_the_definition(name: str, case: str) -> None:
    x = cases()[case]
    importance = np.exp(rng(2).normal(0, 2, 256)).astype(F)
    importance *= F(1.5) / importance.max()  # as it is passed to formats
    assert cq.quantize(x, name, importance).blocks.tobytes() == as_defined(name, x, importance)


@pytest.mark.parametrize("name", NAMES)
def test_many_blocks_are_quantized_as_one_by_one(name: str) -> None:
    """More than are searched at a time, and a single block, whose sums NumPy would order otherwise."""
    fmt = cq.formats.get(name)
    x = rng(3).standard_normal((kquant.PIECE // fmt.block_size + 3, fmt.block_size), F)
    blocks = cq.quantize(x, name).blocks
    for i in (0, 1, len(x) - 4, len(x) - 3, len(x) - 1):
        np.testing.assert_array_equal(cq.quantize(x[i], name).blocks, blocks[i])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides_and_leading_axes(name: str, dtype: np.dtype[Any]) -> None:
    x = rng(2).standard_normal((3, 2, 512), F).astype(dtype)
    expected = cq.quantize(x.astype(F), name).blocks
    wide = np.zeros((3, 2, 1024), dtype)
    wide[..., ::2] = x
    for value in (x, wide[..., ::2], np.asfortranarray(x)):
        np.testing.assert_array_equal(cq.quantize(value, name).blocks, expected)
    assert cq.quantize(x[:0], name).shape == (0, 2, 512)
    w = cq.quantize(x, name)
    np.testing.assert_array_equal(w[1:, 1].dequantize(), w.dequantize()[1:, 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e10, 3e15, 1e25, 3e38])
def test_weights_too_large_are_refused(name: str, size: float) -> None:
    """Also where squares overflow."""
    x = np.zeros((3, 256), F)
    x[1] = np.clip(rng().standard_normal(256), -1, 1) * size
    with pytest.raises(
        ValueError, match=f"{name}: the scale '(d|dmin)' of a block in row 1 overflows float16"
    ):
        cq.quantize(x, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(name: str, bad: float) -> None:
    x = np.zeros((3, 4, 256), F)
    x[2, 1, 7] = bad
    with pytest.raises(ValueError, match=rf"{bad} in row \(2, 1\): weights must be finite"):
        cq.quantize(x, name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "iq4_nl"])
def test_refuses_half_blocks(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} stores blocks of 256 .* multiple of 256 is needed"):
        cq.quantize(np.zeros((2, 128), F), name)


@pytest.mark.parametrize("name", NAMES)
def test_products_against_float64(name: str) -> None:
    w = cq.quantize(rng(1).standard_normal((3, 40, 512), F), name)
    dense = w.dequantize().astype(np.float64)
    for dtype, most in ((F, 1e-6), (np.float16, 1e-6), (ml_dtypes.bfloat16, 1e-5)):
        x = rng(2).standard_normal((3, 7, 512), F).astype(dtype)
        y = x @ w.T
        assert (y.shape, y.dtype) == ((3, 7, 40), np.dtype(dtype))
        assert testing.nmse(y, x.astype(np.float64) @ dense.swapaxes(1, 2)) <= most
    x8 = cq.quantize(rng(3).standard_normal((5, 512), F), "q8_1")
    assert testing.nmse(x8 @ w[1].T, testing.linear(x8, w[1])) <= 1e-6


# Importance


@pytest.mark.parametrize("name", NAMES)
def test_importance_lowers_the_error_of_products(name: str) -> None:
    w = rng(1).standard_normal((64, 1024), F)
    sizes = np.exp(rng(2).normal(0, 1, 1024)).astype(F)
    x = rng(3).standard_normal((256, 1024), F) * sizes
    y = x @ w.T
    plain, weighted = cq.quantize(w, name), cq.quantize(w, name, sizes**2)
    assert testing.nmse(x @ weighted.T, y) < 0.9 * testing.nmse(x @ plain.T, y)


@pytest.mark.parametrize("name", NAMES)
def test_proportions_of_importance_count(name: str) -> None:
    w = rng(1).standard_normal((3, 5, 512), F)
    importance = np.exp(rng(2).normal(0, 1, 512))
    expected = cq.quantize(w, name, importance.astype(F)).blocks
    for same in (importance.astype(F) * F(2**-100), np.ldexp(importance.astype(F), 90)):
        np.testing.assert_array_equal(cq.quantize(w, name, same).blocks, expected)
    np.testing.assert_array_equal(cq.quantize(w[1, 2], name, importance).blocks, expected[1, 2])
    assert (cq.quantize(w, name, importance * 0 + 1).blocks != expected).any()


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_no_importance_are_still_weights(name: str) -> None:
    w = rng(1).standard_normal((8, 1024), F)
    importance = np.where(np.arange(1024) < 512, 1, 0)
    assert testing.nmse(cq.quantize(w, name, importance).dequantize()[:, 512:], w[:, 512:]) < 0.15


@pytest.mark.parametrize("name", ["q4_0", "q8_0", "kbit4", "mxfp4", "int4-32", "q8_1"])
def test_formats_that_take_no_importance(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} takes no importance; k-quants .* do"):
        cq.quantize(np.ones((2, 256), F), name, np.ones(256))


@pytest.mark.parametrize(
    ("importance", "error", "message"),
    [
        (np.ones(255), ValueError, r"importance has shape \(255,\); \(256,\) is needed"),
        (np.ones((2, 256)), ValueError, r"shape \(2, 256\)"),
        (np.full(256, -1), ValueError, "finite, not negative, and above 0"),
        (np.full(256, np.nan), ValueError, "finite"),
        (np.full(256, np.inf), ValueError, "finite"),
        (np.zeros(256), ValueError, "above 0 somewhere"),
        (np.ones(256, complex), TypeError, "dtype complex128; numbers are needed"),
        ([1.0] * 256, TypeError, "importance is a list; a NumPy or CuPy array of numbers is needed"),
    ],
    ids=str,
)
def test_importance_that_does_not_fit(importance: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cq.quantize(np.ones((2, 256), F), "q4_k", importance)


# Mixtures


def formats_of(
    name: str,
    layers: int = 32,
    *,
    experts: int = 0,
    heads: int = 32,
    key_heads: Any = 32,
    architecture: str = "llama",
    tied: bool = False,
    k: int = 512,
) -> dict[str, str]:
    """Names of formats of a model's matrices; blk.7.ffn_down.weight is ("ffn_down", 7) there."""
    suffix = "_exps" if experts else ""
    names = ["token_embd.weight"] if tied else ["token_embd.weight", "output.weight"]
    for i in range(layers):
        names += [f"blk.{i}.attn_{part}.weight" for part in ("q", "k", "v", "output")]
        names += [f"blk.{i}.ffn_{part}{suffix}.weight" for part in ("gate", "up", "down")]
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": key_heads,
        f"{architecture}.expert_count": experts,
    }
    infos = [TensorInfo(name, (64, k), 1, "F16", 0, 0) for name in names]
    chosen = mixture.get(name)
    assert isinstance(chosen, mixture.Mixture)
    return {n: f.name for n, f in chosen.formats_of(infos[::-1], names, metadata).items()}


def layers_of(made: dict[str, str], part: str, name: str) -> list[int]:
    return sorted(int(n.split(".")[1]) for n, fmt in made.items() if part in n and fmt == name)


MORE = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
"""Of 32 layers the first and the last four, and each third between."""
ALL = list(range(32))


@pytest.mark.parametrize(
    ("name", "base", "embedding", "exceptions"),
    [
        (
            "q2_k",
            "q2_k",
            "q2_k",
            {"attn_v": {"q3_k": ALL}, "ffn_down": {"q3_k": ALL}, "attn_output": {"q3_k": ALL}},
        ),
        ("q3_k_s", "q3_k", "q3_k", {}),
        (
            "q3_k_m",
            "q3_k",
            "q3_k",
            {
                "attn_v": {"q5_k": [0, 1], "q4_k": ALL[2:]},
                "ffn_down": {"q5_k": [0, 1], "q4_k": ALL[2:]},
                "attn_output": {"q4_k": ALL},
            },
        ),
        ("q3_k_l", "q3_k", "q3_k", {part: {"q5_k": ALL} for part in ("attn_v", "ffn_down", "attn_output")}),
        ("q4_k_s", "q4_k", "q4_k", {"attn_v": {"q5_k": ALL[:4]}, "ffn_down": {"q5_k": ALL[:4]}}),
        ("q4_k_m", "q4_k", "q4_k", {"attn_v": {"q6_k": MORE}, "ffn_down": {"q6_k": MORE}}),
        ("q5_k_s", "q5_k", "q5_k", {}),
        ("q5_k_m", "q5_k", "q5_k", {"attn_v": {"q6_k": MORE}, "ffn_down": {"q6_k": MORE}}),
        ("q6_k", "q6_k", "q6_k", {}),
        ("iq4_nl", "iq4_nl", "iq4_nl", {"ffn_down": {"q5_k": ALL[:4]}}),
        ("iq4_xs", "iq4_xs", "iq4_xs", {"ffn_down": {"q5_k": ALL[:4]}}),
    ],
)
def test_mixtures_of_a_model_of_32_layers(
    name: str, base: str, embedding: str, exceptions: dict[str, dict[str, list[int]]]
) -> None:
    made = formats_of(name)
    assert made.pop("output.weight") == "q6_k"
    assert made.pop("token_embd.weight") == embedding
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        others = exceptions.get(part, {})
        for fmt, layers in others.items():
            assert layers_of(made, part, fmt) == layers
        rest = [i for i in ALL if not any(i in layers for layers in others.values())]
        if base not in others:
            assert layers_of(made, part, base) == rest


def test_mixtures_by_what_a_model_is() -> None:
    assert formats_of("q4_k_m", tied=True)["token_embd.weight"] == "q6_k"
    assert formats_of("q2_k", key_heads=8)["blk.9.attn_v.weight"] == "q4_k"
    assert formats_of("iq4_nl", key_heads=8)["blk.9.attn_v.weight"] == "q5_k"
    assert formats_of("iq4_nl", key_heads=np.array([8, 32]))["blk.9.attn_v.weight"] == "q5_k"
    assert formats_of("iq4_nl", key_heads=np.array([], int))["blk.9.attn_v.weight"] == "iq4_nl"
    assert formats_of("q4_k_m", k=96)["output.weight"] == "q8_0"
    large = formats_of("q4_k_s", 80, key_heads=8)
    assert layers_of(large, "attn_v", "q5_k") == list(range(80))
    assert layers_of(formats_of("q4_k_s", 80), "attn_v", "q5_k") == list(range(4))
    assert layers_of(formats_of("q3_k_s", 80, architecture="qwen2"), "attn_v", "q5_k") == list(range(80))
    falcon = formats_of("q4_k_m", architecture="falcon")
    assert falcon["output.weight"] == "q8_0"
    assert layers_of(falcon, "ffn_down", "q6_k") == [0, 1]
    assert layers_of(falcon, "ffn_down", "q5_k") == MORE[2:]
    assert layers_of(formats_of("q3_k_m", architecture="falcon"), "ffn_down", "q3_k") == [
        i for i in ALL[2:] if i not in MORE
    ]
    assert formats_of("q3_k_l", architecture="falcon")["blk.9.attn_output.weight"] == "q4_k"


def test_the_mixture_of_eight_experts() -> None:
    """As llama-quantize made it of a model of four layers."""
    made = formats_of("q4_k_m", 4, experts=8, heads=8, key_heads=2)
    assert made.pop("output.weight") == "q6_k"
    assert made.pop("token_embd.weight") == "q4_k"
    for i in range(4):
        block = {
            part: made[f"blk.{i}.{part}.weight"] for part in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        assert block == {"attn_q": "q4_k", "attn_k": "q8_0", "attn_v": "q8_0", "attn_output": "q5_k"}
        exps = [made[f"blk.{i}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        assert exps == ["q4_k", "q4_k", "q6_k" if i >= 2 else "q4_k"]
    assert formats_of("q5_k_m", 4, experts=8)["blk.1.attn_output.weight"] == "q5_k"
    assert formats_of("q6_k", 4, experts=8)["blk.1.attn_output.weight"] == "q6_k"


@pytest.mark.parametrize(
    ("name", "k", "expected"),
    [
        ("q4_k", 512, "q4_k"),
        ("q4_k", 288, "q5_0"),
        ("q2_k", 288, "q4_0"),
        ("q3_k", 288, "q4_0"),
        ("q5_k", 288, "q5_1"),
        ("q6_k", 288, "q8_0"),
        ("iq4_xs", 288, "iq4_nl"),
        ("iq4_nl", 288, "iq4_nl"),
        ("q4_k", 40, None),
        ("iq4_nl", 40, None),
        ("nvfp4", 96, None),
    ],
)
def test_formats_of_other_rows(name: str, k: int, expected: str | None) -> None:
    made = mixture.fallback(cq.formats.get(name), k)
    assert (made if made is None else made.name) == expected


# Files


@pytest.mark.parametrize("shape", [(256,), (3, 512), (2, 1, 3, 256)], ids=str)
@pytest.mark.parametrize("row", K_QUANTS, ids=lambda row: row.name)
def test_opens_from_a_gguf_file(tmp_path: Path, row: Row, shape: tuple[int, ...]) -> None:
    raw = random_blocks(row.name, shape)
    w = cq.open(write_blocks(tmp_path / "m.gguf", shape, row.ggml_type, raw), "cpu")["w.weight"]
    assert (w.format, w.shape) == (row.name, shape)
    assert w.blocks.tobytes() == raw.tobytes()
    assert not w.blocks.flags.writeable  # the file's own bytes


DIGESTS: dict[str, str] = json.loads((DATA / "nano-llama-mixtures-sha256.json").read_text())
"""Of all tensors' data; of q2_k, q4_k_m, q6_k and iq4_nl the scores equal those of llama-quantize's files."""


@pytest.mark.parametrize("name", DIGESTS)
def test_a_real_model_as_before(tmp_path: Path, name: str) -> None:
    done = cq.quantize_file(NANO, tmp_path / "q.gguf", name, device="cpu")
    made = gguf.GGUFReader(tmp_path / "q.gguf")
    data = b"".join(t.data.tobytes() for t in made.tensors)
    assert hashlib.sha256(data).hexdigest() == DIGESTS[name]
    kind = made.fields["general.file_type"].contents()
    assert gguf.LlamaFileType(kind).name.removeprefix("MOSTLY_") == name.upper()
    assert str(done.format) == name
    assert not done.ragged | done.replaced
    types = {t.name: t.tensor_type.name.lower() for t in made.tensors if t.name in done.formats}
    assert types == {tensor: fmt.name for tensor, fmt in done.formats.items()}


def test_a_real_model_scores_as_llama_quantize_s() -> None:
    reference = json.loads((DATA / "reference.json").read_text(encoding="utf-8"))["float32"]
    result = cq.evaluate(NANO, text=HELD_OUT, formats="q4_k_m", device="cpu")
    assert [row.format for row in result.rows] == ["f16", "q4_k_m"]
    for row in result.rows:
        assert row.ppl == pytest.approx(reference[row.format]["ppl"], rel=1e-5)
        assert row.mean_kld == pytest.approx(reference[row.format]["mean_kld"], rel=1e-4, abs=1e-9)


def test_a_mixture_of_experts_runs_as_it_is_stored(tmp_path: Path) -> None:
    """No fallback: warnings are errors."""
    source = write_model(tmp_path / "m.gguf", replace(EXPERTS, d_model=256, n_ff=256))
    cq.quantize_file(source, tmp_path / "q.gguf", "q4_k_m", device="cpu")
    model = cq.open(tmp_path / "q.gguf", "cpu")
    assert {info.type_name for info in model.tensors.values()} == {"F32", "Q4_K", "Q5_0", "Q6_K"}
    tokens = some_tokens(64)
    stored = cq.evaluate(model, tokens=tokens, base=source, ctx=32, device="cpu").rows[1]
    made = cq.evaluate(source, tokens=tokens, formats=["q4_k_m"], ctx=32, device="cpu").rows[1]
    assert (stored.ppl, stored.mean_kld) == (made.ppl, made.mean_kld)
    assert stored.bits_per_weight == made.bits_per_weight < 6


def ragged(folder: Path) -> Path:
    """Rows of 512, 288 (of whole blocks of 32) and 40 weights."""
    x = rng().standard_normal((4, 1024), F)
    tensors = {f"blk.{i}.ffn_up.weight": x[:, :k] for i, k in enumerate((512, 288, 40))}
    return write(folder / "m.gguf", tensors | {"output.weight": x[:, :512]})


def test_ragged_rows_have_other_formats(tmp_path: Path, run: Run) -> None:
    source, target = ragged(tmp_path), tmp_path / "q.gguf"
    done = run("quantize", source, target, "--format", "q4_k_m", "--device", "cpu")
    assert done.status == 0
    assert "3 tensors to q4_k_m, 1 copied" in done.err
    assert "kept in float, rows are not whole blocks: blk.2.ffn_up.weight\n" in done.err
    assert done.err.endswith("in another format, rows are not whole blocks: blk.1.ffn_up.weight (q5_0)\n")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(target).tensors}
    assert types == {
        "blk.0.ffn_up.weight": "Q4_K",
        "blk.1.ffn_up.weight": "Q5_0",
        "blk.2.ffn_up.weight": "F32",
        "output.weight": "Q6_K",
    }


@pytest.mark.parametrize(("name", "expected"), [("q2_k", "Q2_K"), ("q4_k_m", "Q4_K"), ("q4_0", "Q4_0")])
def test_pure(tmp_path: Path, run: Run, name: str, expected: str) -> None:
    """One format for all; a Format object asks for the same."""
    source = ragged(tmp_path)
    run("quantize", source, tmp_path / "a.gguf", "--format", name, "--pure", "--device", "cpu")
    cq.quantize_file(source, tmp_path / "b.gguf", cq.formats.get(expected.lower()), device="cpu")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert types["output.weight"] == types["blk.0.ffn_up.weight"] == expected


def test_a_mixture_in_a_safetensors_file(tmp_path: Path) -> None:
    cq.quantize_file(ragged(tmp_path), tmp_path / "q.safetensors", "Q4_K_M", device="cpu")
    made = cq.load(tmp_path / "q.safetensors", "cpu")
    assert made["output.weight"].format == "q6_k"
    assert made["blk.1.ffn_up.weight"].format == "q5_0"
    assert made["blk.2.ffn_up.weight"].dtype == F


def test_kept_tensors_do_not_move_a_mixture(tmp_path: Path) -> None:
    done = cq.quantize_file(NANO, tmp_path / "q.gguf", "q4_k_s", keep=["blk.0.*"], device="cpu")
    assert done.formats["blk.3.attn_v.weight"] == "q5_k"
    assert "blk.0.attn_v.weight" in done.kept


def test_eval_takes_mixtures(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(64))
    command = ("eval", NANO, "--tokens", tmp_path / "ids.npy", "--ctx", "64", "--device", "cpu", "-o", "csv")
    done = run(*command, "--formats", "Q4_K_S,q8_0")
    assert done.status == 0
    assert [line.split(",")[0] for line in done.out.splitlines()] == ["format", "f16", "q4_k_s", "q8_0"]
    assert "unknown format 'q4_k_x'" in run(*command, "--formats", "q4_k_x").err


def test_formats_unknown_to_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown format 'q4_k_x'; known are"):
        cq.quantize_file(NANO, tmp_path / "q.gguf", "q4_k_x", device="cpu")
    assert {"q4_k_m", "q4_k", "q4_0", "kbit4"} < set(mixture.names())
    assert "q8_1" not in mixture.names()
