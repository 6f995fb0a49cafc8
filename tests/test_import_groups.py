"""Sizes of groups of int4 checkpoints, which only a configuration says where they do not divide K."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from test_import import Weight, assert_is, awq, gptq, pack_quantized, weight

import cuquant as cq

read_safetensors = partial(cq.read_safetensors, device="cpu")

LAYOUTS: list[tuple[Callable[[Weight], dict[str, Any]], Callable[..., cq.QuantizedArray]]] = [
    (gptq, cq.from_gptq),
    (awq, cq.from_awq),
    (pack_quantized, cq.from_pack_quantized),
]
by_layout = pytest.mark.parametrize(("pack", "make"), LAYOUTS, ids=["gptq", "awq", "pack_quantized"])
CUT_SHORT = [(192, 128), (288, 128), (320, 256), (896, 512)]
"""K, and groups of which the last is cut short: as many as there would be of K over their number."""


@by_layout
@pytest.mark.parametrize(("k", "real"), CUT_SHORT)
def test_groups_that_do_not_divide_k(
    k: int, real: int, pack: Callable[[Weight], dict[str, Any]], make: Callable[..., cq.QuantizedArray]
) -> None:
    """ceil(K / group) scales look like those of K / G, which has to be said."""
    count = -(-k // real)
    w = weight(8, k, k // count)
    told = (
        rf"K is {k} with {count} scales in each row: groups of {k // count}, or longer ones of which the "
        rf"last is cut short, .* pass group_size={k // count} to"
    )
    with pytest.raises(ValueError, match=told):
        make(**pack(w))
    short = rf"group_size is {real}, and K is {k} with {count} scales .*: the last group is cut short"
    with pytest.raises(ValueError, match=short):
        make(**pack(w), group_size=real)
    assert_is(make(**pack(w), group_size=k // count), w)


@by_layout
def test_a_size_that_is_given(
    pack: Callable[[Weight], dict[str, Any]], make: Callable[..., cq.QuantizedArray]
) -> None:
    """Also of a row that is shorter than a group."""
    four, one = weight(8, 128, 32), weight(8, 96, 96)
    assert_is(make(**pack(four), group_size=32), four)
    for size in (-1, 96, 128, 1024, None):
        assert_is(make(**pack(one), group_size=size), one)
    for size in (-1, 64, 128, 256):
        with pytest.raises(
            ValueError,
            match=rf"group_size is {size}, but K is 128 with 4 scales in each row, which are groups of 32$",
        ):
            make(**pack(four), group_size=size)
    with pytest.raises(ValueError, match="group_size is 32, but K is 96 with 1 scale in each row, which"):
        make(**pack(one), group_size=32)
    with pytest.raises(ValueError, match=r"group_size is 48; allowed are 32"):
        make(**pack(one), group_size=48)
    with pytest.raises(TypeError, match=r"group_size is a str, not an integer"):
        make(**pack(one), group_size="32")


def test_an_order_says_the_size() -> None:
    """A g_idx says which group each weight is in; one of -1 says nothing."""
    w, order = weight(8, 192, 96), np.arange(192)
    assert_is(cq.from_gptq(**gptq(w), g_idx=order // 96), w)
    assert_is(cq.from_pack_quantized(**pack_quantized(w), weight_g_idx=order // 96), w)
    with pytest.raises(
        ValueError, match=r"^g_idx says groups of 128, and K is 192: the last one is cut short"
    ):
        cq.from_gptq(**gptq(w), g_idx=order // 128)
    with pytest.raises(ValueError, match="K is 192 with 2 scales in each row: groups of 96, or longer"):
        cq.from_pack_quantized(**pack_quantized(w), weight_g_idx=np.full(192, -1))


# Files


def save(folder: Path, layers: dict[str, dict[str, NDArray[Any]]], said: Any, file: str) -> Path:
    """A checkpoint with a configuration."""
    path = folder / "m.safetensors"
    tensors = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.items()}
    save_file(tensors, path)
    (folder / file).write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def scheme(**weights: Any) -> dict[str, Any]:
    """As compressed-tensors writes it."""
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


SAYS_96: list[tuple[str, Any]] = [
    ("quantize_config.json", {"bits": 4, "group_size": 96}),
    ("quant_config.json", {"w_bit": 4, "q_group_size": 96}),
    ("config.json", {"quantization_config": {"bits": 4, "group_size": 96}}),
    ("config.json", {"quantization_config": {"group_size": 128, "dynamic": {"+:a": {"group_size": 96}}}}),
    ("config.json", {"quantization_config": {"extra_config": {"a": {"group_size": 96}}}}),
    ("config.json", {"quantization_config": scheme(num_bits=4, strategy="group", group_size=96)}),
]


@pytest.mark.parametrize("pack", [gptq, awq, pack_quantized])
@pytest.mark.parametrize(("file", "said"), SAYS_96)
def test_a_configuration_says_the_size(
    tmp_path: Path, file: str, said: Any, pack: Callable[[Weight], dict[str, Any]]
) -> None:
    """One of those that it states, and no other; the configuration of a folder is that of its files."""
    w, other = weight(8, 288, 96), weight(8, 128, 32)
    path = save(tmp_path, {"a": pack(w)}, said, file)
    if "128" in json.dumps(said):  # by which there are as many
        with pytest.raises(
            ValueError, match=r"m\.safetensors: a\.\w+: .*96 or 128, and K is 288 .*cut short"
        ):
            read_safetensors(path)
    else:
        for each in (path, tmp_path):
            assert_is(read_safetensors(each)["a.weight"], w)
    save(tmp_path, {"a": pack(other)}, said, file)
    told = (
        rf"a\.\w+: .*{file} says groups of 96.*, but K is 128 with 4 scales in each row, which are groups of"
    )
    with pytest.raises(ValueError, match=told):
        read_safetensors(path)
    (tmp_path / file).write_text("{}")
    assert_is(read_safetensors(path)["a.weight"], other)
    save(tmp_path, {"a": pack(w)}, {}, file)
    with pytest.raises(ValueError, match=r"groups of 96, or longer ones .*, have the configuration beside"):
        read_safetensors(path)


@pytest.mark.parametrize(("k", "real"), CUT_SHORT)
def test_a_configuration_says_that_the_last_group_is_cut_short(tmp_path: Path, k: int, real: int) -> None:
    w = weight(8, k, k // -(-k // real))
    path = save(tmp_path, {"a": awq(w)}, {"group_size": real}, "quantize_config.json")
    told = rf"quantize_config\.json says groups of {real}, and K is {k} .*: the last group is cut short"
    with pytest.raises(ValueError, match=told):
        read_safetensors(path)


@pytest.mark.parametrize(
    "said",
    [
        {"group_size": 64},
        {"group_size": -1, "dynamic": {"+:a": {"group_size": 64}, "-:b": {}}},
        {"group_size": None},
        {"group_size": "128"},
        {"group_size": 0},
        {"group_size": True},
        {"dynamic": [], "extra_config": {"a": 5}, "config_groups": {"group_0": None}},
        scheme(strategy="tensor", group_size=None),
        {"config_groups": {"group_0": {"weights": None, "input_activations": {"group_size": 128}}}},
    ],
)
def test_configurations_that_do_not_contradict(tmp_path: Path, said: Any) -> None:
    """By what they say, or as they say nothing; rows that are shorter than a group are one."""
    w, short = weight(8, 128, 64), weight(8, 32, 32)
    layers = {"a": awq(w), "b": awq(short)}
    path = save(tmp_path, layers, {"quantization_config": said}, "config.json")
    made = read_safetensors(path)
    assert_is(made["a.weight"], w)
    assert_is(made["b.weight"], short)


def test_one_group_a_row(tmp_path: Path) -> None:
    rows, groups = weight(8, 160, 160), weight(8, 128, 64)
    for said in (scheme(strategy="channel", group_size=None), {"group_size": -1}):
        config = {"quantization_config": said}
        path = save(tmp_path, {"a": pack_quantized(rows)}, config, "config.json")
        assert_is(read_safetensors(path)["a.weight"], rows)
        save(tmp_path, {"a": pack_quantized(groups)}, config, "config.json")
        with pytest.raises(ValueError, match="says groups of a row, but K is 128 with 2 scales in each row"):
            read_safetensors(path)


def test_two_configurations_of_groups(tmp_path: Path) -> None:
    """A weight has a size of each; one that is no JSON says none."""
    w = weight(8, 128, 64)
    path = save(tmp_path, {"a": awq(w)}, {"group_size": 64}, "quantize_config.json")
    for said in ("{", '{"quantization_config": {"group_size": 64}}'):
        (tmp_path / "config.json").write_text(said)
        assert_is(read_safetensors(path)["a.weight"], w)
    (tmp_path / "config.json").write_text('{"quantization_config": {"group_size": 32}}')
    with pytest.raises(ValueError, match=r"config\.json says groups of 32, but K is 128 with 2 scales"):
        read_safetensors(path)
