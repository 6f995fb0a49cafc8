"""Names of formats: what is said of those that there are not, and of what is no name."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest

import cuquant as cq
from cuquant.formats import base
from cuquant.formats.base import UnknownFormatError
from cuquant.formats.kernels import Coding, Kernels, Scaling, kernels_of

F = np.float32


def test_what_is_no_format() -> None:
    with pytest.raises(ValueError, match="unknown format 'zz'; known are " + ", ".join(cq.formats.names())):
        cq.quantize(np.zeros(32, F), "zz")
    given: list[tuple[Any, str]] = [(4, "an int"), (None, "None"), (b"q4_0", "a bytes")]
    for value, said in given:
        with pytest.raises(
            TypeError, match=f"^format is {said}; a format is a name or a Format; names: int4"
        ):
            cq.quantize(np.zeros(32, F), value)


@pytest.mark.parametrize("name", ["q4_0", cq.KBit(4)])
def test_format_and_array_are_swapped(name: Any) -> None:
    message = rf"x is {re.escape(repr(name))}, format an ndarray: they are swapped; quantize\(x, format\)"
    with pytest.raises(TypeError, match=message):
        cq.quantize(name, np.zeros(32, F))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x is a str; a NumPy or CuPy array"):
        cq.quantize("q4_0", "q4_0")


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
        ("int4", r": did you mean int4-128\? Known are int4"),
        ("F16", r"; numbers\.astype\('float16'\) makes floats, which are not quantized; known are int4"),
        ("f32", r"; numbers\.astype\('float32'\) makes"),
        ("bf16", r"; numbers\.astype\('bfloat16'\) makes"),
    ],
)
def test_what_unknown_names_stand_for(name: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"unknown format {re.escape(repr(name))}{advice}"):
        cq.quantize(np.zeros(32, F), name)


@pytest.mark.parametrize("name", ["q4_7", "int4-256", "q4_k_m"])
def test_the_error_comes_through_a_pickle(name: str) -> None:
    """As processes of a pool hand it on."""
    with pytest.raises(UnknownFormatError) as caught:
        cq.formats.get(name)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert vars(again) == vars(caught.value)
    assert (again.name, again.known) == (name, cq.formats.names())


def test_names_of_mixtures_are_told_from_others() -> None:
    with pytest.raises(
        ValueError,
        match=r"; q4_k_m is llama\.cpp's name of a mixture, for whole files "
        r"\(quantize_file, cuquant quantize\), and an array takes one format, as q4_k; known are",
    ):
        cq.formats.get("q4_k_m")
    with pytest.raises(ValueError, match=r": did you mean q4_1"):
        cq.formats.get("q4_1_m")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are forgotten after the test."""
    for names in ("_BY_NAME", "_READ_ONLY"):
        monkeypatch.setattr(base, names, dict(getattr(base, names)))


def defined(name: Any, **attributes: Any) -> type[cq.Format]:
    """A class like q4_0's, but of that name."""
    return type("Own", (type(cq.formats.get("q4_0")),), {"name": name, **attributes})


@pytest.mark.parametrize("name", ["Own4", "own 4", "own,4", "*=own", "", None, 4])
def test_names_that_nobody_could_give(registry: None, name: Any) -> None:
    known = cq.formats.names()
    message = rf"class tests?[\w.]*\.Own has the name {re.escape(repr(name))}; names are lower-case letters"
    with pytest.raises(ValueError, match=message):
        defined(name, __module__="tests")
    assert cq.formats.names() == known


def test_a_name_that_is_taken(registry: None) -> None:
    builtin = cq.formats.get("q8_0")
    with pytest.raises(ValueError, match=r"'q8_0', which is that of cuquant\.formats\.q8_0\.Q8_0: give it"):
        defined("q8_0")
    with pytest.raises(ValueError, match=r"'exl3-3', which is that of cuquant\.formats\.exl3\.Exl3: give it"):
        defined("exl3-3")
    assert cq.formats.get("q8_0") is builtin


def test_a_class_may_be_defined_again(registry: None) -> None:
    """As a notebook's cell does that is run twice."""
    weights = []
    for formula in ("W = 1", "W = 2"):
        made = defined("own4", formula=formula)
        assert type(cq.formats.get("own4")) is made
        weights.append(cq.quantize(np.ones((1, 32), F), "own4"))
    before, after = weights
    assert after.format.formula == "W = 2"
    # They have plans and tables of their own, and no array has parts of both.
    assert before.format != after.format == cq.formats.get("own4") == "own4"
    with pytest.raises(ValueError, match="own4"):
        np.concatenate([before, after])


def test_what_every_format_has(registry: None) -> None:
    def coded(self: Any, x: Any) -> Any:
        return x

    parts = {"name": "own", "encode": coded, "decode": coded}
    with pytest.raises(TypeError, match=r"\.Own has no formula and no storage: see cuquant\.Format"):
        type("Own", (cq.Format,), parts | {"bits": 4})
    type("Own", (cq.Format,), parts | {"bits": 4, "formula": "W = q", "whole_matrices": True})


def test_which_formats_have_kernels() -> None:
    """All of this library's, some to be quantized to as well; a new one has none unless its class says so."""
    ours = [cq.formats.get(name) for name in (*cq.formats.names(), *cq.formats.names_of_read_only())]
    assert all(fmt.on_gpu for fmt in ours)
    not_encoded = {fmt.name for fmt in ours if not fmt.encodes_on_gpu}
    assert not_encoded == set(cq.formats.names_of_read_only())
    for new in (cq.Format, base.ReadOnly, base.WholeMatrices):
        assert new.kernels is None


def test_what_a_derived_class_changes_no_kernel_does() -> None:
    """Else a GPU would quantize, or read, as the class does from which it derives."""

    def unchanged(self: Any, x: Any) -> Any:
        return x

    for parent, given in (
        (type(cq.formats.get("q4_0")), ()),
        (cq.KBit, (3,)),
        (cq.Int4, (64,)),
        (cq.Trellis, (3,)),
    ):
        for method, state in (
            ("numbers", (True, True)),
            ("encode", (True, False)),
            ("weights_of_errors", (True, False)),
            ("decode", (False, False)),
        ):
            derived = type("Own", (parent,), {method: unchanged})(*given)
            assert (derived.on_gpu, derived.encodes_on_gpu) == state
            told = {"kernels": kernels_of(parent(*given)), method: unchanged}
            again = type("Own", (parent,), told)(*given)
            assert (again.on_gpu, again.encodes_on_gpu) == (True, True)
        with pytest.raises(NotImplementedError, match="works on NumPy arrays only"):
            kernels_of(derived)


def test_a_derived_class_whose_constructor_says_what_kernels_are_told_has_them() -> None:
    parent = type(cq.formats.get("q8_0"))

    class Own(parent):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.kernels = kernels_of(cq.formats.get("q8_0"))

        def encode(self, x: Any) -> Any:
            return super().encode(x)

        def decode(self, records: Any) -> Any:
            return super().decode(records)

    for own in (Own(), copy.copy(Own())):
        assert (own.on_gpu, own.encodes_on_gpu) == (True, True)
        assert kernels_of(own) is own.kernels


class OfSize(cq.Format):
    """q8_0's blocks in a class with a parameter, which kernels are told with it."""

    bits = 8
    storage = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])
    formula = "W = d * q"

    def __init__(self, size: int) -> None:
        self.name = f"own-{size}"
        self.kernels = Kernels("q8_0", Coding.INTEGERS, Scaling.HALF, size)

    def encode(self, x: Any) -> Any:
        raise NotImplementedError

    def decode(self, records: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    "fmt", [OfSize(64), *map(cq.formats.get, ("q4_0", "q1_0", "iq2_xs", "nvfp4", "exl3-7"))]
)
def test_copies_have_the_same_kernels(fmt: cq.Format) -> None:
    """Those that a constructor set, those of a class, and those that are made when they are asked for."""
    told = kernels_of(fmt)
    for made in (copy.copy(fmt), copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt))):
        assert made == fmt
        same = [(k.header, k.coding, k.scaling, k.group_size) for k in (told, kernels_of(made))]
        assert same[0] == same[1]
        assert made.for_kernels == (made if told.kept is None else told.kept.format)


def test_a_format_that_others_alone_quantize_to(registry: None) -> None:
    """It is listed apart; defined again as one that is not, it is like others, and the other way around."""
    for made_by in ("nobody does", "", "others do"):
        fmt = defined("own4", __module__="tests", made_by=made_by)()
        assert ("own4" in cq.formats.names(), "own4" in cq.formats.names_of_read_only()) == (
            not made_by,
            bool(made_by),
        )
        assert cq.formats.get("own4").made_by == fmt.made_by
        w = np.ones((2, 32), np.float32)
        if made_by:
            with pytest.raises(ValueError, match=f"^nothing here quantizes to own4: {made_by}$"):
                cq.quantize(w, "own4")
        else:
            assert cq.quantize(w, "own4").format == "own4"
