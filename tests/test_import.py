"""int4 weights of others' checkpoints: packed here a code at a time, as the layouts are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import cuquant as cq

F = np.float32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))


class Weight(NamedTuple):
    """Codes [N, K], zero points [N, G] and scales [N, G]."""

    q: NDArray[np.uint8]
    zeros: NDArray[np.uint8]
    scales: NDArray[np.float16]

    @property
    def numbers(self) -> NDArray[np.float32]:
        group = self.q.shape[1] // self.zeros.shape[1]
        zeros, scales = (a.repeat(group, axis=1).astype(F) for a in (self.zeros, self.scales))
        return (self.q.astype(F) - zeros) * scales


def weight(n: int, k: int, group: int, zeros: tuple[int, int] = (0, 16), seed: int = 0) -> Weight:
    """A random one, of zero points in a range."""
    g = np.random.default_rng(seed)
    shape = n, k // group
    return Weight(
        g.integers(0, 16, (n, k), np.uint8),
        g.integers(*zeros, shape, np.uint8),
        g.standard_normal(shape).astype(np.float16),
    )


def words(codes: NDArray[np.uint8], axis: int, order: tuple[int, ...]) -> NDArray[np.int32]:
    """Eight codes along an axis to an int32: its i-th lowest nibble is code order[i] of the eight."""
    codes = codes.swapaxes(axis, -1).astype(np.int64)
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    packed = sum(eights[..., code] << 4 * i for i, code in enumerate(order))
    signed = np.asarray(packed, np.int64).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(signed.swapaxes(axis, -1))


def gptq(w: Weight, version: int = 1) -> dict[str, Any]:
    """As GPTQModel writes them: version 1 takes 1 off every zero point of a word at once."""
    return {
        "qweight": words(w.q.T, 0, IN_ORDER),
        "qzeros": words(w.zeros.T, 1, IN_ORDER) - np.int32(0x11111111 * (version == 1)),
        "scales": np.ascontiguousarray(w.scales.T),
    }


def awq(w: Weight) -> dict[str, Any]:
    return {
        "qweight": words(w.q.T, 1, AWQ_ORDER),
        "qzeros": words(w.zeros.T, 1, AWQ_ORDER),
        "scales": np.ascontiguousarray(w.scales.T),
    }


def assert_is(made: cq.QuantizedArray, w: Weight, *, symmetric: bool = False) -> None:
    """The same codes, scales and zero points, in a format of their group."""
    assert made.format == cq.Int4(w.q.shape[1] // w.zeros.shape[1], symmetric)
    codes, scales, zeros = cq.int4_parts(made)
    np.testing.assert_array_equal(np.stack([codes & 15, codes >> 4], axis=-1).reshape(w.q.shape), w.q)
    np.testing.assert_array_equal(scales.view(np.uint16), w.scales.view(np.uint16))
    if not symmetric:
        assert zeros is not None
        np.testing.assert_array_equal(zeros, w.zeros)
    np.testing.assert_array_equal(made.dequantize(), w.numbers)


def pack_quantized(w: Weight) -> dict[str, Any]:
    """As compressed-tensors writes them, with a zero point for each group."""
    return {
        "weight_packed": words(w.q, 1, IN_ORDER),
        "weight_scale": w.scales,
        "weight_zero_point": words(w.zeros, 0, IN_ORDER),
        "weight_shape": np.array(w.q.shape),
    }


SHAPES = [(8, 32, 32), (16, 128, 32), (24, 256, 128), (8, 192, 64), (8, 160, 160)]


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_gptq(n: int, k: int, group: int) -> None:
    one, two = weight(n, k, group), weight(n, k, group, seed=1)
    assert_is(cq.from_gptq(**gptq(one)), one)
    assert_is(cq.from_gptq(**gptq(two, 2), version=2), two)
    assert_is(cq.from_gptq(**gptq(one), g_idx=np.arange(k, dtype=np.int32) // group), one)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_awq(n: int, k: int, group: int) -> None:
    w = weight(n, k, group)
    assert_is(cq.from_awq(**awq(w)), w)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_pack_quantized(n: int, k: int, group: int) -> None:
    w, symmetric = weight(n, k, group), weight(n + 3, k, group, (8, 9), seed=1)
    assert_is(cq.from_pack_quantized(**pack_quantized(w)), w)
    for order in (np.arange(k) // group, np.full(k, -1)):
        assert_is(cq.from_pack_quantized(**pack_quantized(w), weight_g_idx=order.astype(np.int32)), w)
    packed = words(symmetric.q, 1, IN_ORDER)
    assert_is(cq.from_pack_quantized(packed, symmetric.scales), symmetric, symmetric=True)


def test_pack_quantized_by_hand() -> None:
    """Signed codes -8 to -1 of row 1 are stored 8 more: word [1, 0] is 0x76543210."""
    packed = np.full((2, 4), 0x88888888, np.uint32).view(np.int32)
    packed[1, 0] = 0x76543210
    w = cq.from_pack_quantized(packed, np.full((2, 1), 0.5, ml_dtypes.bfloat16)).dequantize()
    np.testing.assert_array_equal(w[1, :9], np.array([-8, -7, -6, -5, -4, -3, -2, -1, 0]) / 2)
    np.testing.assert_array_equal(w[0], np.zeros(32))


def test_scales_of_pack_quantized_become_float16() -> None:
    """Those of bfloat16 are the same numbers, but for small ones, which are rounded."""
    packed = np.zeros((3, 4), np.int32)
    scales = np.array([[2.0**-14], [1.0078125], [2.0**-20 * 1.0078125]], ml_dtypes.bfloat16)
    found = cq.int4_parts(cq.from_pack_quantized(packed, scales))[1].astype(F)
    np.testing.assert_array_equal(found[:2], scales[:2].astype(F))
    assert found[2, 0] == 2.0**-20
    with pytest.raises(ValueError, match=r"weight_scale holds 65536\.0, which is beyond float16"):
        cq.from_pack_quantized(packed, np.full((3, 1), 65536, ml_dtypes.bfloat16))


def test_gptq_by_hand() -> None:
    """Weights 0 to 7 of column 1 are codes 0 to 7: word [0, 1] is 0x76543210.

    Zero points 1 to 8 of the columns are stored minus 1: qzeros is 0x76543210 too, in version 2 0x87654321.
    """
    qweight = np.zeros((4, 8), np.int32)
    qweight[0, 1] = 0x76543210
    scales = np.full((1, 8), 0.5, np.float16)
    w = cq.from_gptq(qweight, np.array([[0x76543210]], np.int32), scales).dequantize()
    assert w.shape == (8, 32)
    np.testing.assert_array_equal(w[1, :9], (np.array([0, 1, 2, 3, 4, 5, 6, 7, 0]) - 2) / 2)
    np.testing.assert_array_equal(w[:, 31], -np.arange(1, 9) / 2)
    qzeros = np.array([[0x87654321]], np.uint32).view(np.int32)
    np.testing.assert_array_equal(cq.from_gptq(qweight, qzeros, scales, version=2).dequantize(), w)


def test_awq_by_hand() -> None:
    """Columns 0 to 7 of a row are codes 0 to 7: nibbles from the lowest are 0, 2, 4, 6, 1, 3, 5, 7."""
    qweight = np.zeros((32, 1), np.int32)
    qweight[3] = 0x75316420
    w = cq.from_awq(qweight, np.array([[0x75316420]], np.int32), np.ones((1, 8), np.float16)).dequantize()
    assert w.shape == (8, 32)
    np.testing.assert_array_equal(w[:, 3], np.zeros(8))
    np.testing.assert_array_equal(w[:, 4], -np.arange(8))


@pytest.mark.parametrize("code", range(16))
def test_every_code_at_every_place(code: int) -> None:
    """A word of eight equal zero points, and of codes that are all different from their neighbours."""
    q = ((np.arange(64)[:, None] + np.arange(16) + code) % 16).astype(np.uint8).T
    w = Weight(q, np.full((16, 2), code, np.uint8), np.ones((16, 2), np.float16))
    assert_is(cq.from_awq(**awq(w)), w, symmetric=code == 8)
    assert_is(cq.from_gptq(**gptq(w, 2), version=2), w, symmetric=code == 8)


def test_zero_points_of_8_make_a_symmetric_weight() -> None:
    w = weight(16, 128, 64, (8, 9))
    for made in (cq.from_gptq(**gptq(w)), cq.from_gptq(**gptq(w, 2), version=2), cq.from_awq(**awq(w))):
        assert_is(made, w, symmetric=True)
    w.zeros[15, 1] = 9
    assert_is(cq.from_awq(**awq(w)), w)


def test_version_1_stores_a_zero_point_of_0_as_15_and_borrows_from_the_next() -> None:
    scales, qweight = np.ones((1, 8), np.float16), np.zeros((4, 8), np.int32)
    qzeros = np.array([[0x7777776F]], np.int32)
    w = cq.from_gptq(qweight, qzeros, scales)
    np.testing.assert_array_equal(cq.int4_parts(w)[2], np.array([[0, 8, 8, 8, 8, 8, 8, 8]]).T)


def test_products() -> None:
    w = weight(16, 128, 64)
    x = np.random.default_rng(1).standard_normal((3, 128), F)
    np.testing.assert_allclose(x @ cq.from_awq(**awq(w)).T, x @ w.numbers.T, rtol=1e-5, atol=1e-4)


# Refused


@pytest.mark.parametrize("order", [np.arange(128)[::-1] // 32, np.arange(128) % 4, np.zeros(128, int)])
def test_refuses_permuted_weights(order: NDArray[np.integer[Any]]) -> None:
    at = int((order != np.arange(128) // 32).argmax())
    with pytest.raises(
        ValueError, match=rf"g_idx puts weight {at} into .*\(act-order, desc_act\) cannot be read"
    ):
        cq.from_gptq(**gptq(weight(8, 128, 32)), g_idx=order)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"qweight": np.zeros((16, 8), np.int64)}, TypeError, "qweight has dtype int64; int32 is needed"),
        ({"qzeros": np.zeros((4, 1), F)}, TypeError, "qzeros has dtype float32; int32 is needed"),
        ({"scales": np.zeros((4, 8), F)}, TypeError, "scales has dtype float32; float16 is needed"),
        ({"scales": [[1.0]]}, TypeError, "scales is a list; .* array of float16 is needed"),
        (
            {"qweight": np.zeros((32, 8), np.int32).T},
            ValueError,
            r"qweight \(8, 32\), qzeros \(4, 1\) and scales",
        ),
        (
            {"qweight": np.zeros(16, np.int32)},
            ValueError,
            r"are not codes of 4 bits in words: \(K / 8, N\), ",
        ),
        ({"qweight": np.zeros((0, 8), np.int32)}, ValueError, "0 weights along K are not 4 groups"),
        ({"qzeros": np.zeros((4, 2), np.int32)}, ValueError, "are not codes of 4 bits"),  # 8 bits
        ({"qzeros": np.zeros((5, 1), np.int32)}, ValueError, "are not codes of 4 bits"),
        ({"qweight": np.zeros((15, 8), np.int32)}, ValueError, "group_size is 30; allowed are 32"),
        ({"qweight": np.zeros((17, 8), np.int32)}, ValueError, "group_size is 34; allowed are 32"),
        (
            {"scales": np.zeros((3, 8), np.float16), "qzeros": np.zeros((3, 1), np.int32)},
            ValueError,
            "128 weights along K are not 3 groups of one size",
        ),
        ({"version": 3}, ValueError, "version is 3; allowed are 1 and 2"),
        ({"version": np.array([1, 2])}, TypeError, "version is an ndarray; allowed are 1 and 2"),
        ({"g_idx": np.zeros(64, np.int32)}, ValueError, r"g_idx has shape \(64,\); there are 128 weights"),
        ({"g_idx": np.zeros(128, F)}, TypeError, "g_idx has dtype float32; groups are numbered by integers"),
    ],
)
def test_refuses_gptq(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.from_gptq(**{**gptq(weight(8, 128, 32)), **change})


def test_refuses_awq() -> None:
    given = awq(weight(16, 128, 32))
    with pytest.raises(ValueError, match=r"are not codes of 4 bits in words: \(K, N / 8\), \(G, N / 8\) and"):
        cq.from_awq(given["qweight"].T, given["qzeros"], given["scales"])
    with pytest.raises(TypeError, match="qweight has dtype int16"):
        cq.from_awq(given["qweight"].astype(np.int16), given["qzeros"], given["scales"])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"weight_packed": np.zeros((16, 16), np.uint8)},
            TypeError,
            "weight_packed has dtype uint8; int32 is",
        ),
        (
            {"weight_scale": np.ones((16, 4))},
            TypeError,
            "weight_scale has dtype float64; float16, bfloat16 or",
        ),
        (
            {"weight_scale": np.ones((8, 4), F)},
            ValueError,
            r"weight_packed \(16, 16\) and weight_scale \(8, 4\)",
        ),
        (
            {"weight_scale": np.ones((16, 3), F), "weight_zero_point": None},
            ValueError,
            "128 weights along K are not 3 groups",
        ),
        ({"weight_scale": np.ones((16, 8), F)}, ValueError, "weight_zero_point has shape .* it is "),
        (
            {"weight_zero_point": np.zeros((16, 4), np.int32)},
            ValueError,
            r"it is \(2, 4\), eight of N in a word",
        ),
        (
            {"weight_shape": np.array([16, 120])},
            ValueError,
            r"weight_shape is \(16, 120\); .* of 4 bits$",
        ),
        ({"weight_shape": np.array([16, 64])}, ValueError, "codes of 8 bits cannot be read"),
        ({"weight_g_idx": np.arange(128)[::-1] // 32}, ValueError, "weight_g_idx puts weight 0 into group 3"),
        ({"weight_g_idx": np.zeros(64, int)}, ValueError, r"weight_g_idx has shape \(64,\); there are 128"),
    ],
)
def test_refuses_pack_quantized(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        cq.from_pack_quantized(**{**pack_quantized(weight(16, 128, 32)), **change})


# Files


def save(path: Path, tensors: dict[str, NDArray[Any]]) -> Path:
    save_file(tensors, path)
    return path


def named(name: str, tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {f"{name}.{key}": value for key, value in tensors.items()}


def test_a_checkpoint_of_both_layouts(tmp_path: Path) -> None:
    a, b, c = weight(16, 128, 32, (1, 16)), weight(8, 64, 64, seed=1), weight(8, 256, 128, (8, 9), seed=2)
    tensors = named("model.layers.1.q_proj", gptq(a)) | named("model.layers.0.k_proj", awq(b))
    tensors |= named("lm_head", gptq(c)) | {"lm_head.g_idx": np.arange(256, dtype=np.int32) // 128}
    tensors |= {"model.norm.weight": np.ones(4, F), "model.layers.1.q_proj.bias": np.ones(16, np.float16)}
    made = cq.read_safetensors(save(tmp_path / "m.safetensors", tensors))
    assert list(made) == ["lm_head.weight", "model.layers.0.k_proj.weight", "model.layers.1.q_proj.weight"]
    assert_is(made["model.layers.1.q_proj.weight"], a)
    assert_is(made["model.layers.0.k_proj.weight"], b)
    assert_is(made["lm_head.weight"], c, symmetric=True)


def test_a_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    """The zero points, shape and order of a weight are not always there."""
    a, b = weight(16, 128, 32), weight(8, 64, 64, (8, 9), seed=1)
    tensors = named("a", pack_quantized(a)) | named("b.q_proj", pack_quantized(b))
    del tensors["b.q_proj.weight_zero_point"], tensors["b.q_proj.weight_shape"]
    tensors |= {"a.weight_g_idx": np.full(128, -1, np.int32), "a.input_scale": np.ones(1, F)}
    made = cq.read_safetensors(save(tmp_path / "m.safetensors", tensors))
    assert list(made) == ["a.weight", "b.q_proj.weight"]
    assert_is(made["a.weight"], a)
    assert_is(made["b.q_proj.weight"], b, symmetric=True)
    part = save(tmp_path / "m-00001-of-00002.safetensors", {"a.weight_shape": np.array([16, 128])})
    with pytest.raises(ValueError, match=r"a\.weight_shape has no weight_packed beside it; another file"):
        cq.read_safetensors(part)


def test_some_weights_of_a_checkpoint(tmp_path: Path) -> None:
    a, b = weight(8, 64, 32), weight(8, 64, 32, seed=1)
    tensors = named("layers.0.k", gptq(a)) | named("layers.0.v", awq(b)) | named("layers.1.k", gptq(b))
    path = save(tmp_path / "m.safetensors", tensors | {"broken.qweight": np.ones((8, 8), np.int32)})
    made = cq.read_safetensors(path, names="layers.0.*")
    assert list(made) == ["layers.0.k.weight", "layers.0.v.weight"]
    assert_is(made["layers.0.v.weight"], b)
    assert list(cq.read_safetensors(path, names=["*.1.k.weight", "*.0.v.*"])) == [
        "layers.0.v.weight",
        "layers.1.k.weight",
    ]
    said = r"no weight of m\.safetensors is named like 'layers\.2\.\*' \(names\): one that is there is '.+'"
    with pytest.raises(ValueError, match=said):
        cq.read_safetensors(path, names=["layers.0.*", "layers.2.*"])


def test_a_checkpoint_of_version_2(tmp_path: Path) -> None:
    w = weight(8, 64, 32)
    path = save(tmp_path / "m.safetensors", named("a", gptq(w, 2)))
    assert_is(cq.read_safetensors(str(path), version=2)["a.weight"], w)


def test_a_file_without_such_weights(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", {"a.weight": np.ones(3, F)})
    with pytest.raises(
        ValueError, match=r"m\.safetensors has no weight of GPTQ, AWQ, EXL3, .* \*\.trellis, .* \*_blocks$"
    ):
        cq.read_safetensors(path)


def test_a_part_of_a_checkpoint_without_such_weights(tmp_path: Path) -> None:
    """The last file of many has the output matrix alone."""
    path = save(tmp_path / "m-00002-of-00002.safetensors", {"lm_head.weight": np.ones(3, F)})
    assert cq.read_safetensors(path) == {}


def sharded(folder: Path) -> tuple[Weight, Weight]:
    """Two files between which layers "a" and "b" are split, and an index of them."""
    a, b = weight(16, 64, 32, (1, 16)), weight(8, 64, 32, seed=1)
    tensors = named("a", gptq(a)) | named("b", awq(b)) | {"norm.weight": np.ones(3, F)}
    homes = {name: name in ("a.qzeros", "b.qweight", "norm.weight") for name in tensors}
    files = ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]
    for second, file in enumerate(files):
        save(folder / file, {name: value for name, value in tensors.items() if homes[name] == second})
    index = {"metadata": {}, "weight_map": {name: files[second] for name, second in homes.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return a, b


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    """Wherever a layer's tensors are; by an index other files of the folder are not its."""
    a, b = sharded(tmp_path)
    save(tmp_path / "consolidated.safetensors", named("a", gptq(b)))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json", str(tmp_path)):
        made = cq.read_safetensors(path)
        assert list(made) == ["a.weight", "b.weight"]
        assert_is(made["a.weight"], a)
        assert_is(made["b.weight"], b)
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_is(cq.read_safetensors(tmp_path)["b.weight"], b)


def test_a_checkpoint_that_lacks_files(tmp_path: Path) -> None:
    """Names tell where there is no index, however files are counted."""
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    for first, second in (("1", "2"), ("0", "1")):
        for old, new in zip(sorted(tmp_path.glob("m-*")), (first, second), strict=True):
            old.rename(tmp_path / f"m-0000{new}-of-00002.safetensors")
        assert len(cq.read_safetensors(tmp_path)) == 2
    for old in sorted(tmp_path.glob("m-*")):
        old.rename(tmp_path / old.name.replace("-of-00002", "-of-00003"))
    lacks = r"has 2 of the 3 files m-\*-of-00003\.safetensors: files of this checkpoint are missing"
    with pytest.raises(ValueError, match=lacks):
        cq.read_safetensors(tmp_path)


def test_a_file_that_lacks_what_the_index_says(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["c.qweight"] = "m-00002-of-00002.safetensors"
    index.write_text(json.dumps(said))
    for path in (tmp_path, index):
        with pytest.raises(
            ValueError, match=r"m-00002-of-00002\.safetensors has no tensor 'c\.qweight', which"
        ):
            cq.read_safetensors(path)


def test_one_of_several_files_lacks_what_another_has(tmp_path: Path) -> None:
    sharded(tmp_path)
    elsewhere = r"another file of the checkpoint may: pass its folder, or its \*\.safetensors\.index\.json"
    first, second = sorted(tmp_path.glob("m-*"))
    with pytest.raises(ValueError, match=rf"{first.name}: b\.qzeros has no qweight beside it; {elsewhere}"):
        cq.read_safetensors(first)
    with pytest.raises(ValueError, match=rf"{second.name}: a\.qzeros has no qweight beside it; {elsewhere}"):
        cq.read_safetensors(second)
    part = save(tmp_path / "n-00001-of-00002.safetensors", {"a.qweight": np.zeros((8, 8), np.int32)})
    problem = rf"{part.name}: a\.qweight has no qzeros and no scales beside it; {elsewhere}"
    with pytest.raises(ValueError, match=problem):
        cq.read_safetensors(part)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "index.json is no index of a checkpoint: it has no weight_map of files"),
        ("[]", "is no index"),
        ('{"weight_map": ["m"]}', "is no index"),
        (
            '{"weight_map": {"a": "../m.safetensors"}}',
            r"index.json: '\.\./m\.safetensors' is no file beside it",
        ),
        (
            '{"weight_map": {"a": "x.safetensors", "b": "\\u001b[2J"}}',
            r"files of this checkpoint are missing beside it: \\x1b\[2J, x\.safetensors$",
        ),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, index: str, problem: str) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(index)
    for path in (tmp_path, tmp_path / "m.safetensors.index.json"):
        with pytest.raises(ValueError, match=problem):
            cq.read_safetensors(path)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder without safetensors files"):
        cq.read_safetensors(tmp_path)
    for name in "mn":
        save(tmp_path / f"{name}.safetensors", {"x": np.ones(3, F)})
    with pytest.raises(ValueError, match=r"n\.safetensors: tensor 'x' is in m\.safetensors, too"):
        cq.read_safetensors(tmp_path)
    for name in "mn":
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has 2 files \*\.safetensors\.index\.json: pass the one of"):
        cq.read_safetensors(tmp_path)


def test_a_weight_of_two_kinds(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", named("l", awq(weight(8, 64, 32))) | {"l.trellis": np.ones(3, F)})
    with pytest.raises(ValueError, match=r"m\.safetensors: l\.\w+: there is a qweight and a trellis of this"):
        cq.read_safetensors(path)


def test_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", named("l", awq(weight(8, 64, 32))))
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header["l.scales"] |= {"dtype": "F8_E5M2", "shape": [2, 16]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + int.from_bytes(raw[:8], "little") :])
    with pytest.raises(TypeError, match=r"m\.safetensors: l\.scales has the type F8_E5M2, which NumPy lacks"):
        cq.read_safetensors(path)


@pytest.mark.parametrize("name", ["m.safetensors", "m-00002-of-00002.safetensors"])
def test_a_file_of_this_library(tmp_path: Path, name: str) -> None:
    cq.save(tmp_path / name, {"a.weight": weight(8, 64, 32)[0]})
    with pytest.raises(ValueError, match=r"\*_blocks; cuquant wrote it, and cuquant\.load reads it"):
        cq.read_safetensors(tmp_path / name)


def test_a_file_s_errors_name_the_weight(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = named("good", awq(weight(8, 64, 32))) | named("x.bad", gptq(weight(8, 64, 32)))
    for change, kind, message in (
        (
            {"x.bad.g_idx": np.arange(64)[::-1] // 32},
            ValueError,
            r"x\.bad\.qweight: g_idx puts weight 0 into",
        ),
        (
            {"x.bad.scales": np.ones((2, 8), ml_dtypes.bfloat16)},
            TypeError,
            r"x\.bad\.qweight: scales has dtype bf",
        ),
        ({"x.bad.qzeros": np.ones((2, 2), np.int32)}, ValueError, r"x\.bad\.qweight: qweight .* 4 bits"),
    ):
        save(path, tensors | {k: np.ascontiguousarray(v) for k, v in change.items()})
        with pytest.raises(kind, match=message):
            cq.read_safetensors(path)
    for missing, words in ((("scales",), "no scales"), (("qzeros", "scales"), "no qzeros and no scales")):
        save(path, {k: v for k, v in tensors.items() if k not in [f"x.bad.{m}" for m in missing]})
        with pytest.raises(ValueError, match=rf"x\.bad\.qweight has {words} beside it"):
            cq.read_safetensors(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"m\.safetensors is no safetensors file that can be read"):
        cq.read_safetensors(path)
    with pytest.raises(FileNotFoundError):
        cq.read_safetensors(tmp_path / "none.safetensors")
