"""FP4 arrays and files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import Run
from formats_table import FLOATS, FP4, Row, random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import write, write_blocks
from products import assert_stack_products
from test_fp4 import NAMES, F, rng

import cuquant as cq

# As other formats


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_strides_and_leading_axes(name: str, dtype: np.dtype[Any]) -> None:
    x = rng(2).standard_normal((3, 5, 128), F).astype(dtype)
    expected = cq.quantize(x.astype(F), name).blocks
    assert expected.shape == (3, 5, cq.formats.get(name).row_bytes(128))
    wide = np.zeros((3, 5, 256), dtype)
    wide[..., ::2] = x
    for value in (x, wide[..., ::2], np.asfortranarray(x)):
        np.testing.assert_array_equal(cq.quantize(value, name).blocks, expected)
    assert cq.quantize(x[:0], name).shape == (0, 5, 128)
    w = cq.quantize(x, name)
    np.testing.assert_array_equal(w[1:, 2].dequantize(), w.dequantize()[1:, 2])


@pytest.mark.parametrize("name", NAMES)
def test_products_against_float64(name: str) -> None:
    w = cq.quantize(rng(1).standard_normal((3, 40, 192), F), name)
    assert_stack_products(w)


@pytest.mark.parametrize("k", [0, 32, 48, 96])
def test_nvfp4_refuses_half_blocks(k: int) -> None:
    with pytest.raises(ValueError, match=f"nvfp4 stores blocks of 64 .* has {k} .* multiple of 64 is needed"):
        cq.quantize(np.zeros((2, k), F), "nvfp4")
    with pytest.raises(ValueError, match="multiple of 64"):
        cq.from_blocks(np.zeros(36, np.uint8), "nvfp4", (1, k))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(name: str, bad: float) -> None:
    x = np.zeros((3, 4, 64), F)
    x[2, 1, 7] = bad
    with pytest.raises(ValueError, match=rf"{bad} in row \(2, 1\): weights must be finite"):
        cq.quantize(x, name)


# Files


@pytest.mark.parametrize("shape", [(64,), (3, 128), (2, 1, 3, 64)], ids=str)
@pytest.mark.parametrize("row", FP4, ids=lambda row: row.name)
def test_opens_from_a_gguf_file(tmp_path: Path, row: Row, shape: tuple[int, ...]) -> None:
    raw = random_blocks(row.name, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is not foreign
        w = cq.open(write_blocks(tmp_path / "m.gguf", shape, row.ggml_type, raw), "cpu")["w.weight"]
    assert (w.format, w.shape) == (row.name, shape)
    assert np.array_equal(w.blocks, raw)
    assert not w.blocks.flags.writeable


def test_a_gguf_file_has_scales_of_tensors(tmp_path: Path) -> None:
    """Beside the blocks, under llama.cpp's names; one for each expert has no format of its own."""
    raw = random_blocks("nvfp4", (2, 3, 128))
    tensors: dict[str, Any] = {"a.weight": (raw[0], Type.NVFP4), "b.weight": (raw, Type.NVFP4)}
    tensors |= {"a.scale": np.array([0.25 / 3], F), "b.scale": np.array([2, -3], F), "c.scale": np.ones(3, F)}
    with pytest.warns(cq.FallbackWarning, match=r"NVFP4: b\.weight\)"):
        model = cq.open(write(tmp_path / "m.gguf", tensors), "cpu")
    assert model["a.weight"].format == cq.NvFp4(0.25 / 3)
    np.testing.assert_array_equal(model["a.weight"].blocks, raw[0])
    own = cq.from_blocks(raw, "nvfp4", (2, 3, 128)).dequantize()
    expected = (own * np.array([2, -3], F)[:, None, None]).astype(np.float16)
    np.testing.assert_array_equal(model["b.weight"], expected)
    cq.save(tmp_path / "w.safetensors", {"a": model["a.weight"]})
    a = cq.load(tmp_path / "w.safetensors", "cpu")["a"]
    np.testing.assert_array_equal(a.dequantize(), own[0] * F(0.25 / 3))
    for scale, problem in (
        (np.ones(2, F), "'a.scale' is no scale of 'a.weight'"),
        (np.zeros(1, F), "0.0; allowed"),
    ):
        path = write(tmp_path / "bad.gguf", {"a.weight": tensors["a.weight"], "a.scale": scale})
        with pytest.raises(cq.GGUFError, match=problem):
            cq.open(path, "cpu")["a.weight"]


def test_a_gguf_file_of_ragged_rows_is_refused(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", (2, 96), Type.NVFP4, np.zeros(108, np.uint8))
    with pytest.raises(cq.GGUFError, match="rows of 96 weights; NVFP4 needs blocks of 64"):
        cq.open(path)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_writes_a_file(run: Run, tmp_path: Path, name: str) -> None:
    """Types, sizes and keys as the gguf package and llama.cpp's loader know them."""
    tensors = {"a.weight": rng().standard_normal((4, 128), F), "ragged.weight": np.ones((2, 40), F)}
    tensors |= {"exps.weight": rng().standard_normal((3, 4, 64), F), "a.bias": np.ones(4, F)}
    source, target = write(tmp_path / "s.gguf", tensors), tmp_path / "t.gguf"
    assert run("quantize", source, target, "--format", name, "--device", "cpu").status == 0
    made = gguf.GGUFReader(target)
    kind = Type[name.upper()]
    kinds = {"a.weight": kind, "exps.weight": kind, "ragged.weight": Type.F32, "a.bias": Type.F32}
    assert {t.name: t.tensor_type for t in made.tensors} == kinds
    file_type = {"mxfp4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE, "nvfp4": gguf.LlamaFileType.MOSTLY_NVFP4}[name]
    assert made.fields["general.file_type"].contents() == file_type
    assert made.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    for t in made.tensors:
        if t.tensor_type == kind:
            np.testing.assert_array_equal(t.data, cq.quantize(tensors[t.name], name).blocks)
            assert t.data_offset % made.alignment == 0


def test_a_model_is_evaluated_in_them(model: Path) -> None:
    tokens = rng().integers(3, 40, 130)
    with pytest.warns(UserWarning, match="nvfp4: kept in float, as K is ragged: blk.0.ffn_down.weight"):
        result = cq.evaluate(model, tokens=tokens, formats=NAMES, ctx=64, device="cpu")
    rows = {row.format: row for row in result.rows}
    assert 0 < (rows["nvfp4"].mean_kld or 0) < (rows["mxfp4"].mean_kld or 0) < 2
