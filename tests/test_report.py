"""An evaluation's result as JSON, CSV, tables for people and data frames."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import some_tokens

from cuquant.eval import Evaluation, Evaluations, evaluate

KEYS = ["model", "text", "ctx", "chunks", "scored_tokens", "backend", "rows", "base", "activations"]
COLUMNS = ["format", "bits_per_weight", "ppl", "ppl_stderr", "mean_kld", "max_kld", "same_top_percent"]
COLUMNS += ["rms_dp_percent"]
TENSOR_COLUMNS = ["name", "format", "bits_per_weight", "nmse", "sqnr_db", "max_abs_error"]


@pytest.fixture(scope="module")
def result(model: Path) -> Evaluation:
    return evaluate(model, tokens=some_tokens(100), ctx=32, formats=["q8_0", "q4_0"])


@pytest.fixture(scope="module")
def alone(model: Path) -> Evaluation:
    """One scored token of one model: nearly nothing to show."""
    return evaluate(model, tokens=some_tokens(4), ctx=4)


def test_json_has_the_documented_keys(result: Evaluation) -> None:
    read = json.loads(result.render("json"))
    assert read == result.to_dict()
    assert list(read) == KEYS
    for row, original in zip(read["rows"], result.rows, strict=True):
        assert sorted(row) == sorted([*COLUMNS, "activations", "kv_bits", "tensors"])
        assert row["ppl"] == original.ppl
        for error in row["tensors"]:
            assert sorted(error) == sorted(TENSOR_COLUMNS)
    assert len(read["rows"][1]["tensors"]) == 16


def test_json_has_null_where_there_is_no_number(result: Evaluation, alone: Evaluation) -> None:
    (row,) = json.loads(alone.render("json"))["rows"]
    assert {row[name] for name in COLUMNS[3:]} == {None}
    lost = replace(result.rows[0], ppl=math.inf, ppl_stderr=math.nan)
    (row,) = json.loads(replace(result, rows=[lost]).render("json"))["rows"]
    assert row["ppl"] is row["ppl_stderr"] is None


def test_what_json_says_is_read_back(result: Evaluation, alone: Evaluation) -> None:
    """NaN too, and None stays None."""
    exact = replace(result.rows[1].tensors[0], nmse=0.0, sqnr_db=None, max_abs_error=0.0)
    lost = replace(exact, nmse=math.nan, sqnr_db=math.nan, max_abs_error=math.nan)
    scores: dict[str, Any] = dict.fromkeys(set(COLUMNS) - {"format", "bits_per_weight"}, math.nan)
    rows = [result.rows[0], replace(result.rows[1], tensors=[exact, lost], **scores)]
    for made in (result, alone, replace(result, rows=rows)):
        read = Evaluation.from_dict(json.loads(made.render("json")))
        assert str(read.to_dict()) == str(made.to_dict())  # NaN is not equal to NaN


@pytest.mark.parametrize("tensors", [False, True])
def test_csv_has_full_precision(result: Evaluation, tensors: bool) -> None:
    read = list(csv.DictReader(io.StringIO(result.render("csv", tensors=tensors))))
    items: list[Any] = [e for row in result.rows for e in row.tensors] if tensors else result.rows
    columns = TENSOR_COLUMNS if tensors else COLUMNS
    assert len(read) == len(items) > 2
    for record, item in zip(read, items, strict=True):
        assert list(record) == columns
        for name in columns:
            value = getattr(item, name)
            assert (record[name] if isinstance(value, str) else float(record[name])) == value


def test_csv_has_empty_cells_where_there_is_no_number(alone: Evaluation) -> None:
    header, row = alone.render("csv").splitlines()
    assert header == ",".join(COLUMNS)
    assert row.endswith(",,,,,")


def cells(result: Evaluation, style: str, tensors: bool = False) -> list[list[str]]:
    """The cells of a rendered table, its header first."""
    text = result.render(style, tensors=tensors)
    if style == "html":
        return [["".join(cell.itertext()).strip() for cell in row] for row in ET.fromstring(text).iter("tr")]
    header, rule, *rows = text.splitlines()
    assert set(rule) <= set("|-: ")
    if style == "md":
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)]
    ends = [i for i, mark in enumerate(rule + " ") if mark == " " and rule[i - 1] == "-"]
    starts = [0, *(end + 2 for end in ends[:-1])]
    places = [slice(*place) for place in zip(starts, [*ends[:-1], None], strict=True)]
    return [[line[place].strip() for place in places] for line in (header, *rows)]


@pytest.mark.parametrize("style", ["table", "md", "html"])
def test_tables_for_people(result: Evaluation, style: str) -> None:
    header, *rows = cells(result, style)
    titles = ["format", "bits/weight", "PPL", "±", "mean KLD", "max KLD", "same top %", "RMS Δp %"]
    assert header == titles
    assert [row[0] for row in rows] == ["f16", "q8_0", "q4_0"]
    for shown, row in zip(rows, result.rows, strict=True):
        for cell, name in zip(shown[1:], COLUMNS[1:], strict=True):
            digits = len(cell.partition(".")[2])
            assert float(cell) == pytest.approx(getattr(row, name), abs=0.51 * 10.0**-digits)
    header, *rows = cells(result, style, tensors=True)
    assert header == ["tensor", "format", "bits/weight", "NMSE", "SQNR dB", "max error"]
    assert [row[:2] for row in rows] == [[e.name, e.format] for row in result.rows for e in row.tensors]


@pytest.mark.parametrize("style", ["table", "md", "html"])
def test_tables_with_nothing_to_compare(alone: Evaluation, style: str) -> None:
    header, row = cells(alone, style)
    assert len(row) == 3
    assert row[0] == "f16"
    assert header == ["format", "bits/weight", "PPL"]
    assert cells(alone, style, tensors=True) == [
        ["tensor", "format", "bits/weight", "NMSE", "SQNR dB", "max error"]
    ]
    text = Evaluations([alone]).render(style)
    assert "PPL" in text
    assert "KLD" not in text
    assert Evaluations([alone]).render("csv").splitlines()[0] == ",".join(["model", *COLUMNS])


def test_columns_with_a_value_in_some_rows_are_shown(result: Evaluation) -> None:
    rows = [replace(result.rows[0], mean_kld=None, max_kld=None), replace(result.rows[1], max_kld=None)]
    header, *_ = cells(replace(result, rows=rows), "table")
    assert "mean KLD" in header
    assert "max KLD" not in header


def test_quantized_activations_are_a_column(result: Evaluation) -> None:
    """As quantized caches are: where there are some; JSON says it always."""
    assert json.loads(result.render("json"))["activations"] == "f16"
    first, *others = result.rows
    rows = [first, *(replace(row, activations="q8_1") for row in others)]
    rounded = replace(result, rows=rows, activations="q8_1")
    assert Evaluation.from_dict(json.loads(rounded.render("json"))) == rounded
    header, *shown = cells(rounded, "md")
    assert header[:3] == ["format", "activations", "bits/weight"]
    assert [row[1] for row in shown] == ["f16", "q8_1", "q8_1"]
    several = Evaluations([result, rounded]).render("csv")
    read = list(csv.DictReader(io.StringIO(several)))
    assert [row["activations"] for row in read] == [""] * 3 + ["f16", "q8_1", "q8_1"]
    assert cells(rounded, "md", tensors=True) == cells(result, "md", tensors=True)


def test_repr_is_short(result: Evaluation, alone: Evaluation) -> None:
    rows = "3 rows (f16, q8_0, q4_0)"
    assert repr(result) == f"Evaluation({Path(result.model).name}: {rows}; print shows the table)"
    assert ": 1 row (f16); " in repr(alone)
    assert "tensors" not in repr(result.rows[1])


def test_other_ways_to_show(result: Evaluation) -> None:
    assert str(result) == result.render() == result.render("table")
    assert result._repr_html_() == result.render("html")
    with pytest.raises(ValueError, match="unknown style 'latex'; allowed are table, md, html, csv, json"):
        result.render("latex")


def test_without_pandas(result: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"a DataFrame needs pandas \(.*\): pip install pandas, or"):
        result.to_pandas()


@pytest.mark.parametrize("tensors", [False, True])
def test_pandas(result: Evaluation, tensors: bool) -> None:
    pytest.importorskip("pandas")
    frame = result.to_pandas(tensors=tensors)
    items: list[Any] = [e for row in result.rows for e in row.tensors] if tensors else result.rows
    assert list(frame.columns) == (TENSOR_COLUMNS if tensors else COLUMNS)
    for name in frame.columns:
        assert frame[name].tolist() == [getattr(item, name) for item in items]


@pytest.mark.parametrize(
    ("models", "base", "names"),
    [
        (["a/m.gguf", "b/m.gguf"], None, ["a/m.gguf", "b/m.gguf"]),
        (["x/a/m.gguf", "x/b/m.gguf", "x/b/n.gguf"], None, ["a/m.gguf", "b/m.gguf", "n.gguf"]),
        (["m.gguf", "a/m.gguf", "/b/a/m.gguf"], None, ["m.gguf", "a/m.gguf", "b/a/m.gguf"]),
        (["a/m.gguf", "./a/m.gguf"], None, ["m.gguf", "m.gguf"]),
        (["q/m.gguf", "q/n.gguf"], "f/m.gguf", ["f/m.gguf", "q/m.gguf", "n.gguf"]),
    ],
)
def test_files_of_one_name_are_told_apart(
    result: Evaluation, models: list[str], base: str | None, names: list[str]
) -> None:
    """By as many folders as it takes."""
    rows = result.rows[:1] if base is None else result.rows[:2]
    several = Evaluations([replace(result, model=model, base=base, rows=rows) for model in models])
    found = [row["model"] for row in csv.DictReader(io.StringIO(several.render("csv")))]
    assert found == [str(Path(name)) for name in names]


def test_a_base_that_scored_otherwise_has_a_row_of_its_own(result: Evaluation) -> None:
    """As a base that says nothing of its tokens does with models that read other ids in a text."""
    first, second = result.rows[0], replace(result.rows[0], ppl=result.rows[0].ppl * 1.5)
    each = [
        replace(result, model=f"{name}.gguf", base="f.gguf", rows=[base, result.rows[1]])
        for name, base in (("a", first), ("b", second), ("c", first), ("d", second))
    ]
    found = [
        (row["model"], row["ppl"]) for row in csv.DictReader(io.StringIO(Evaluations(each).render("csv")))
    ]
    own = repr(result.rows[1].ppl)
    expected = [("f.gguf", repr(first.ppl)), ("a.gguf", own), ("f.gguf", repr(second.ppl)), ("b.gguf", own)]
    assert found == [*expected, ("c.gguf", own), ("d.gguf", own)]


@pytest.mark.parametrize("base", ["q/m.gguf", "./q/m.gguf", "q/f.gguf", "f/m.gguf"])
def test_a_base_in_another_file_is_named(result: Evaluation, base: str) -> None:
    """As rows may have one format; where they are of one file nothing is said."""
    compared = replace(result, model="q/m.gguf", base=base, rows=result.rows[:2])
    names = {"q/f.gguf": ["f.gguf", "m.gguf"], "f/m.gguf": ["f/m.gguf", "q/m.gguf"]}.get(base)
    found = [row.get("model") for row in csv.DictReader(io.StringIO(compared.render("csv")))]
    assert found == ([None, None] if names is None else [str(Path(name)) for name in names])
    assert ("model" in compared.render().splitlines()[0].split()) == (names is not None)
    assert compared.render("csv", tensors=True) == replace(compared, base=None).render("csv", tensors=True)
    assert json.loads(compared.render("json"))["base"] == base


def test_plots_tell_files_of_one_name_apart(result: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    plotter = type("Plotter", (), {"losses": lambda rows: drawn.append(list(rows))})
    monkeypatch.setattr("cuquant.eval.report.plotter", lambda: plotter)
    for models in (["a/m.gguf", "b/m.gguf"], ["m.gguf", "m.safetensors"], ["a/m.gguf", "a/n.gguf"]):
        Evaluations([replace(result, model=model) for model in models]).plot()
    assert drawn == [[str(Path("a/m")), str(Path("b/m"))], ["m.gguf", "m.safetensors"], ["m", "n"]]
