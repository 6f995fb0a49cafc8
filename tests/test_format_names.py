"""Names of formats: what is said of those that there are not, and of what is no name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cuquant as cq

F = np.float32


def test_what_is_no_format() -> None:
    with pytest.raises(ValueError, match="unknown format 'zz'; known are " + ", ".join(cq.formats.names())):
        cq.quantize(np.zeros(32, F), "zz")
    with pytest.raises(TypeError, match="a format is a name or a Format, not int"):
        cq.quantize(np.zeros(32, F), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [cq.KBit, cq.Int4])
def test_a_class_is_no_format(kind: Any) -> None:
    message = rf"format is the class {kind.__name__}: call it, as in KBit\(4\) or Int4\(128\)"
    with pytest.raises(TypeError, match=message):
        cq.quantize(np.zeros(32, F), kind)
    with pytest.raises(TypeError, match=message):
        cq.evaluate("none.gguf", text="some text", formats=kind)


def test_near_names_are_offered() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'q4-0': did you mean q4_0\? Known are int4"):
        cq.formats.get("q4-0")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (str(cq.Int4(256)), r"; cuquant\.Int4\(group_size, symmetric\) makes"),
        (
            str(cq.KBit(3, scale="decoded", absmax="float16")),
            r"; cuquant\.KBit\(bits, codebook, scale, absmax\)",
        ),
        (str(cq.NvFp4(0.01)).upper(), r"; cuquant\.NvFp4\(scale\) makes"),
        ("trellis2-48", r"; cuquant\.Trellis\(bits, group_size, grid\) makes"),
        ("exl3-9", r": did you mean exl3-"),
        ("kbit9", r": did you mean kbit"),
        ("int8", r": did you mean q8_0\? Known are int4"),
        ("F16", r"; numbers\.astype\('float16'\) makes floats, which are not quantized; known are int4"),
        ("f32", r"; numbers\.astype\('float32'\) makes"),
        ("bf16", r"; numbers\.astype\('bfloat16'\) makes"),
    ],
)
def test_what_unknown_names_stand_for(name: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"unknown format {re.escape(repr(name))}{advice}"):
        cq.quantize(np.zeros(32, F), name)


def test_names_of_mixtures_are_told_from_others() -> None:
    with pytest.raises(
        ValueError,
        match=r"; q4_k_m is llama\.cpp's name of a mixture, for whole files "
        r"\(quantize_file, cuquant quantize\); known are",
    ):
        cq.formats.get("q4_k_m")
    with pytest.raises(ValueError, match=r": did you mean q4_1"):
        cq.formats.get("q4_1_m")
