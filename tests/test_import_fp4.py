"""FP4 weights of others' checkpoints, against ml_dtypes' floats of 4 and 8 bits."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cuquant as cq
from cuquant.io.shards import opened

read_safetensors = partial(cq.read_safetensors, device="cpu")

F = np.float32
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
TYPES = {np.dtype(np.uint8): "U8", np.dtype(F): "F32", np.dtype(E4M3): "F8_E4M3", np.dtype(E8M0): "F8_E8M0"}
TYPES |= {np.dtype(f"i{size}"): f"I{8 * size}" for size in (2, 4, 8)} | {np.dtype(np.float16): "F16"}
SHAPES = [(8, 64), (3, 192), (2, 5, 128)]


def codes_of(shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Random codes, two in a byte as PyTorch has them, and their numbers."""
    q = np.random.default_rng(0).integers(0, 16, shape, np.uint8)
    return q[..., ::2] | q[..., 1::2] << 4, q.view(ml_dtypes.float4_e2m1fn).astype(F)


def nvfp4(shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], Any, NDArray[np.float32]]:
    """Codes, every finite scale that is not negative, and what they are read as."""
    packed, numbers = codes_of(shape)
    scales = np.random.default_rng(1).permutation(np.arange(numbers.size // 16) % 0x7F).astype(np.uint8)
    scales = scales.reshape(*shape[:-1], -1).view(E4M3)
    return packed, scales, numbers * scales.astype(F).repeat(16, axis=-1)


def mxfp4(shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], Any, NDArray[np.float32]]:
    packed, numbers = codes_of(shape)
    scales = np.random.default_rng(1).integers(100, 150, (*shape[:-1], shape[-1] // 32), np.uint8).view(E8M0)
    return packed, scales, numbers * scales.astype(F).repeat(32, axis=-1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1, 0.25, 3.1e-4])
def test_nvfp4(shape: tuple[int, ...], scale: float) -> None:
    packed, scales, numbers = nvfp4(shape)
    for given in (scales, scales.view(np.uint8)):
        w = cq.from_nvfp4(packed, given, scale)
        assert w.format == cq.NvFp4(scale)
        np.testing.assert_array_equal(w.dequantize(), numbers * F(scale))


@pytest.mark.parametrize("shape", [*SHAPES, (3, 32)])  # also of one block in a row
def test_mxfp4(shape: tuple[int, ...]) -> None:
    packed, scales, numbers = mxfp4(shape)
    blocks = packed.reshape(*shape[:-1], -1, 16)
    for codes, given in ((packed, scales), (blocks, scales.view(np.uint8))):
        w = cq.from_mxfp4(codes, given)
        assert w.format == "mxfp4"
        np.testing.assert_array_equal(w.dequantize(), numbers)


@pytest.mark.parametrize("shape", [(0, 4, 2, 16), (2, 0, 2, 16), (0, 2, 16)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    """Of a stack without experts, or of experts without rows."""
    codes, scales = np.zeros(shape, np.uint8), np.zeros(shape[:-1], np.uint8)
    for made in (
        cq.from_mxfp4(codes, scales),
        cq.from_nvfp4(codes.reshape(*shape[:-2], 32), np.zeros((*shape[:-2], 4), np.uint8)),
    ):
        assert made.shape == made.dequantize().shape == (*shape[:-2], 64)


def test_by_hand() -> None:
    """Byte 0 is 0x2A: weight 0 is code 10, -1, and weight 1 is code 2, 1; scales 0x38 and 127 are 1."""
    packed = np.zeros((1, 32), np.uint8)
    packed[0, 0] = 0x2A
    for w in (
        cq.from_nvfp4(packed, np.full((1, 4), 0x38, np.uint8), 0.5),
        cq.from_mxfp4(packed, np.full((1, 2), 126, np.uint8)),
    ):
        np.testing.assert_array_equal(w.dequantize()[0, :3], [-0.5, 0.5, 0])


def test_products() -> None:
    packed, scales, numbers = nvfp4((16, 128))
    x = np.random.default_rng(2).standard_normal((3, 128), F)
    found = x @ cq.from_nvfp4(packed, scales, 0.01).T
    np.testing.assert_allclose(found, x @ (numbers * F(0.01)).T, rtol=1e-5, atol=1e-3)


CODES, SCALES = np.zeros((4, 64), np.uint8), np.zeros((4, 8), np.uint8)


@pytest.mark.parametrize(
    ("codes", "scales", "kind", "message"),
    [
        (CODES.view(np.int8), SCALES, TypeError, "codes has dtype int8; uint8 is needed"),
        (CODES, SCALES.astype(F), TypeError, "scales has dtype float32; uint8 or float8_e4m3fn is needed"),
        (CODES, SCALES[:, :4], ValueError, r"codes \(4, 64\) and scales \(4, 4\) are not of one weight"),
        (CODES[0], SCALES[0], ValueError, "are not of one weight"),
        (CODES[:, :16], SCALES[:, :2], ValueError, "K is 32; a multiple of 64 is needed"),
        (CODES, SCALES + np.uint8(0x7F), ValueError, "scales hold NaN or negative numbers"),
        (CODES, SCALES + np.uint8(0xB8), ValueError, "scales hold NaN or negative numbers"),
    ],
)
def test_refuses_nvfp4(codes: Any, scales: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.from_nvfp4(codes, scales)


def test_refuses_mxfp4() -> None:
    with pytest.raises(ValueError, match="scales hold 255, which is NaN in E8M0"):
        cq.from_mxfp4(CODES, np.full((4, 4), 255, np.uint8))
    with pytest.raises(ValueError, match=r"codes \(4, 64\) and scales \(4, 8\) are not of one weight"):
        cq.from_mxfp4(CODES, SCALES)
    with pytest.raises(ValueError, match="K is 0; a multiple of 32 is needed"):
        cq.from_mxfp4(CODES[:, :0].reshape(4, 0, 16), SCALES[:, :0])
    with pytest.raises(TypeError, match="scales has dtype float8_e4m3fn; uint8 or float8_e8m0fnu"):
        cq.from_mxfp4(CODES, np.ones((4, 4), E4M3))
    with pytest.raises(ValueError, match="scale is 0; allowed are"):
        cq.from_nvfp4(CODES, SCALES, 0)


# Files


def save(path: Path, tensors: dict[str, Any]) -> Path:
    """A safetensors file by hand, as the package has no floats of 8 bits of NumPy's."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": TYPES[array.dtype], "shape": array.shape, "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_checkpoint_of_modelopt(tmp_path: Path) -> None:
    packed, scales, numbers = nvfp4((8, 64))
    tensors = {
        "norm.weight": np.ones(4, F),
        "l.q_proj.weight": packed,
        "l.q_proj.weight_scale": scales,
        "l.q_proj.weight_scale_2": np.array(0.125, F),
        "l.q_proj.input_scale": np.array(3, F),
        "fp8.weight": np.ones((4, 4), E4M3),
        "fp8.weight_scale": np.array(2, F),
    }
    made = read_safetensors(save(tmp_path / "m.safetensors", tensors))
    assert list(made) == ["l.q_proj.weight"]
    assert made["l.q_proj.weight"].format == cq.NvFp4(0.125)
    np.testing.assert_array_equal(made["l.q_proj.weight"].dequantize(), numbers / 8)


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    """Of both kinds; the global scale divides."""
    packed, scales, numbers = nvfp4((8, 64))
    codes, exponents, others = mxfp4((8, 64))
    tensors = {
        "a.weight_packed": packed,
        "a.weight_scale": scales,
        "a.weight_global_scale": np.array([8], F),
        "b.weight_packed": codes,
        "b.weight_scale": exponents.view(np.uint8),
    }
    made = read_safetensors(save(tmp_path / "m.safetensors", tensors))
    np.testing.assert_array_equal(made["a.weight"].dequantize(), numbers / 8)
    np.testing.assert_array_equal(made["b.weight"].dequantize(), others)
    for bad, problem in (
        (np.zeros(1, F), "weight_global_scale is 0.0; a positive"),
        (np.ones(2, F), "it is one number"),
    ):
        save(tmp_path / "m.safetensors", tensors | {"a.weight_global_scale": bad})
        with pytest.raises(ValueError, match=rf"a\.weight_packed: .*{problem}"):
            read_safetensors(tmp_path / "m.safetensors")


@pytest.mark.parametrize("group", [16, 32])
def test_fp4_weights_that_are_permuted(tmp_path: Path, group: int) -> None:
    """Those of compressed-tensors, by its order; one that changes nothing is no matter."""
    packed, scales, numbers = nvfp4((8, 64)) if group == 16 else mxfp4((8, 64))
    tensors = {"a.weight_packed": packed, "a.weight_scale": scales if group == 16 else scales.view(np.uint8)}
    if group == 16:
        tensors["a.weight_global_scale"] = np.ones(1, F)
    for order in (np.arange(64) // group, np.full(64, -1)):
        save(tmp_path / "m.safetensors", tensors | {"a.weight_g_idx": order.astype(np.int32)})
        made = read_safetensors(tmp_path / "m.safetensors")["a.weight"]
        np.testing.assert_array_equal(made.dequantize(), numbers)
    order = np.arange(64)[::-1] // group
    save(tmp_path / "m.safetensors", tensors | {"a.weight_g_idx": order.astype(np.int32)})
    with pytest.raises(
        ValueError, match=r"a\.weight_packed: weight_g_idx puts weight 0 into group .*act-order"
    ):
        read_safetensors(tmp_path / "m.safetensors")


@pytest.mark.parametrize(("name", "end"), [("mlp.experts.gate_up_proj", "_"), ("mlp.mlp1_weight", ".")])
def test_experts_of_gpt_oss(tmp_path: Path, name: str, end: str) -> None:
    """Stacks of experts, of which a slice takes gate and up apart; by Hugging Face's names and OpenAI's."""
    packed, scales, numbers = mxfp4((3, 8, 64))
    tensors = {
        f"{name}{end}blocks": packed.reshape(3, 8, 2, 16),
        f"{name}{end}scales": scales.view(np.uint8),
        "mlp.experts.gate_up_proj_bias": np.ones((3, 8), F),
    }
    made = read_safetensors(save(tmp_path / "m.safetensors", tensors))
    assert list(made) == [name]
    w = made[name]
    np.testing.assert_array_equal(w.dequantize(), numbers)
    for first in (0, 1):
        half = w[:, first::2]
        assert (half.shape, half.format) == ((3, 4, 64), w.format)
        np.testing.assert_array_equal(half.dequantize(), numbers[:, first::2])


@pytest.mark.parametrize("kind", ["modelopt", "compressed", "mxfp4", "gpt-oss"])
def test_one_of_several_files(tmp_path: Path, kind: str) -> None:
    """Alone, if it has all of its weights; others' names that end alike do not matter."""
    packed, scales, numbers = nvfp4((8, 64))
    codes, exponents, others = mxfp4((3, 8, 64))
    tensors, expected = {
        "modelopt": (
            {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": np.array(1, F)},
            numbers,
        ),
        "compressed": (
            {"a.weight_packed": packed, "a.weight_scale": scales, "a.weight_global_scale": np.ones(1, F)},
            numbers,
        ),
        "mxfp4": ({"a.weight_packed": codes[0], "a.weight_scale": exponents[0].view(np.uint8)}, others[0]),
        "gpt-oss": ({"a_blocks": codes.reshape(3, 8, 2, 16), "a_scales": exponents.view(np.uint8)}, others),
    }[kind]
    more = {
        "n_blocks": np.ones(3, F),
        "more_scales": np.ones(3, F),
        "b.scales": np.zeros(4, ml_dtypes.float8_e4m3fn),
    }
    path = save(tmp_path / "m-00001-of-00002.safetensors", tensors | more)
    save(tmp_path / "m-00002-of-00002.safetensors", {"norm.weight": np.ones(3, F)})
    (made,) = read_safetensors(path).values()
    np.testing.assert_array_equal(made.dequantize(), expected)


@pytest.mark.parametrize("end", ["_", "."])
def test_a_part_that_lacks_blocks(tmp_path: Path, end: str) -> None:
    path = save(tmp_path / "m-00002-of-00002.safetensors", {f"a{end}scales": np.ones((3, 8, 2), np.uint8)})
    with pytest.raises(ValueError, match=rf"a{re.escape(end)}scales has no blocks beside it"):
        read_safetensors(path)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """By one whose tensors lie elsewhere: all that is read is of the file that was opened."""
    path, scales = tmp_path / "m.safetensors", np.arange(4).astype(ml_dtypes.float8_e4m3fn)
    save(path, {"scales": scales})
    with opened(path) as tensors:
        save(tmp_path / "other", {"scales": scales * 2, "before": np.ones(99, np.float32)}).replace(path)
        assert tensors["scales"].tolist() == [0, 1, 2, 3]


def test_inputs_that_are_scaled_before(tmp_path: Path) -> None:
    packed, scales, _ = nvfp4((8, 64))
    tensors = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": np.array(1, F)}
    path = save(tmp_path / "m.safetensors", tensors | {"a.pre_quant_scale": np.ones(64, F)})
    assert list(read_safetensors(path)) == ["a.weight"]
    save(path, tensors | {"a.pre_quant_scale": np.where(np.arange(64) == 7, F(0.5), F(1))})
    with pytest.raises(ValueError, match=r"a\.weight_scale_2: there is a pre_quant_scale, by which inputs"):
        read_safetensors(path)


def test_weights_that_lack_a_tensor(tmp_path: Path) -> None:
    packed, scales, _ = nvfp4((8, 64))
    tensors = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": np.array(1, F)}
    without = {name: array for name, array in tensors.items() if name != "a.weight"}
    with pytest.raises(ValueError, match=r"a\.weight_scale_2 has no weight beside it$"):
        read_safetensors(save(tmp_path / "m.safetensors", without))
    del tensors["a.weight_scale_2"]
    part = save(tmp_path / "m-00001-of-00002.safetensors", tensors)
    with pytest.raises(ValueError, match=r"a\.weight_scale has no weight_scale_2 or weight_packed beside"):
        read_safetensors(part)
    both = tensors | {"a.weight_packed": packed, "a.weight_scale_2": np.array(1, F)}
    with pytest.raises(ValueError, match="there is a weight_packed and a weight_scale_2 of this weight"):
        read_safetensors(save(tmp_path / "m.safetensors", both))
