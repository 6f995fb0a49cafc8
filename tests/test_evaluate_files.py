"""Several files on one text: one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Run, assert_one_line_error
from synthetic import Spec, some_tokens, write

import cuquant as cq

OPTIONS: dict[str, Any] = {"tokens": some_tokens(64), "ctx": 16, "formats": ["q8_0"]}


def test_rows_are_those_of_each_model(models: list[Path]) -> None:
    several = cq.evaluate_files(models, **OPTIONS)
    assert several.each == [cq.evaluate(model, **OPTIONS) for model in models]
    table = several.to_pandas()
    assert list(table["model"]) == ["a.gguf", "a.gguf", "b.gguf", "b.gguf"]
    assert list(table["format"]) == ["f16", "q8_0"] * 2
    assert "b.gguf" in several.render()
    assert "<table>" in several._repr_html_()
    tensors = several.to_pandas(tensors=True)
    assert {"model", "name", "nmse"} <= set(tensors)


@pytest.mark.parametrize("kind", [str, Path, cq.open])
def test_one_path_is_one_model(models: list[Path], kind: Any) -> None:
    assert cq.evaluate_files(kind(models[0]), **OPTIONS) == cq.evaluate_files(models[:1], **OPTIONS)


@pytest.mark.parametrize("none", [[], (), iter(())], ids=["list", "tuple", "iterator"])
def test_no_models(none: Any, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    with pytest.raises(ValueError, match="there are no models to evaluate: models is empty"):
        cq.evaluate_files(none, **OPTIONS, results=results)
    assert not results.exists()


def test_formats_that_are_given_once_only(models: list[Path]) -> None:
    """An iterator serves every model."""
    several = cq.evaluate_files(models, **OPTIONS | {"formats": iter(["q8_0"])})
    assert several == cq.evaluate_files(models, **OPTIONS)


def test_widths_that_are_given_once_only(models: list[Path]) -> None:
    several = cq.evaluate_files(models, **OPTIONS | {"kv_bits": iter([8, 4])})
    assert several == cq.evaluate_files(models, **OPTIONS | {"kv_bits": ["8", "4"]})


@pytest.mark.parametrize("given", [{}, {"text": "a", "tokens": [1]}], ids=["neither", "both"])
def test_either_text_or_tokens(models: list[Path], given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either text or tokens"):
        cq.evaluate_files(models, **given)


@pytest.mark.parametrize("tokens", [[1.5] * 64, [True] * 64])
def test_tokens_are_a_vector_of_integers(models: list[Path], tokens: Any) -> None:
    with pytest.raises(TypeError, match="1-D integer array"):
        cq.evaluate_files(models, tokens=tokens)


def test_repr(models: list[Path]) -> None:
    several = cq.evaluate_files(models, **OPTIONS)
    assert repr(several) == "Evaluations(2 models: 4 rows; print shows the table)"
    assert str(several) == several.render()


def test_an_interruption(models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.json"
    real = cq.evaluate

    def interrupted(model: Path, **options: Any) -> cq.Evaluation:
        if model == models[1]:
            raise KeyboardInterrupt
        return real(model, **options)

    monkeypatch.setattr("cuquant.eval.files.evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cq.evaluate_files(models, results=results, **OPTIONS)
    assert len(json.loads(results.read_text(encoding="utf-8"))["evaluations"]) == 1
    monkeypatch.setattr("cuquant.eval.files.evaluate", real)
    assert cq.evaluate_files(models, results=results, **OPTIONS).each == [
        cq.evaluate(model, **OPTIONS) for model in models
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_an_open_model_is_known_by_the_file_that_it_reads(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by what its path leads to later."""
    for folder, model in zip("ab", models, strict=True):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.gguf").write_bytes(model.read_bytes())
    options = OPTIONS | {"results": tmp_path / "results.json"}
    monkeypatch.chdir(tmp_path / "a")
    opened = cq.open("m.gguf")
    monkeypatch.chdir(tmp_path / "b")
    (first,) = cq.evaluate_files(opened, **options).each
    (second,) = cq.evaluate_files("m.gguf", **options).each
    assert (first.rows, second.rows) == tuple(cq.evaluate(model, **OPTIONS).rows for model in models)
    stamps = [each["file"][0] for each in json.loads((tmp_path / "results.json").read_text())["evaluations"]]
    assert stamps == [str((tmp_path / folder / "m.gguf").resolve()) for folder in "ab"]


@pytest.mark.parametrize("given", [{"device": None}, {"device": "cpu"}])
def test_the_device_that_was_used_is_kept(
    models: list[Path], tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuquant.eval.files.default_device", lambda: "cpu")
    results = tmp_path / "results.json"
    cq.evaluate_files(models[:1], results=results, **OPTIONS | given)
    assert json.loads(results.read_text(encoding="utf-8"))["settings"]["device"] == "cpu"
    monkeypatch.setattr("cuquant.eval.files.default_device", lambda: "cuda")
    cq.evaluate_files(cq.open(models[0], "cpu"), results=results, **OPTIONS)  # on its own device
    with pytest.raises(ValueError, match=r"other settings \(device\)"):
        cq.evaluate_files(models[:1], results=results, **OPTIONS)


def test_a_base_is_read_on_the_device_of_the_model(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever else it would be."""
    monkeypatch.setattr("cuquant.device.default", lambda: "cuda")
    monkeypatch.setattr("cuquant.eval.files.default_device", lambda: "cuda")
    options = OPTIONS | {"formats": (), "results": tmp_path / "results.json"}
    evaluated = cq.evaluate_files(cq.open(models[1], "cpu"), **options, base=models[0])
    assert [each.backend for each in evaluated.each] == ["numpy"]
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["settings"]["device"] == "cpu"
    assert cq.evaluate_files(models[1], **options, base=models[0], device="cpu") == evaluated


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_an_open_model_goes_to_the_device_that_is_asked_for(models: list[Path], place: str) -> None:
    others = [cq.open(model, {"cpu": "cuda", "cuda": "cpu"}[place]) for model in models]
    options: dict[str, Any] = OPTIONS | {"formats": (), "device": place}
    (found,) = cq.evaluate_files(others[1], **options, base=others[0]).each
    assert found == cq.evaluate(models[1], **options, base=models[0])
    assert (found.backend == "numpy") == (place == "cpu")


def test_models_that_are_given_once_only(models: list[Path]) -> None:
    assert cq.evaluate_files(iter(models), **OPTIONS) == cq.evaluate_files(models, **OPTIONS)


def test_a_recipe_is_known_by_its_formats_too(models: list[Path], tmp_path: Path) -> None:
    options = OPTIONS | {"results": tmp_path / "results.json"}
    cq.evaluate_files(models[:1], **options | {"formats": {"*": "q8_0"}})
    with pytest.raises(ValueError, match="formats"):
        cq.evaluate_files(models[:1], **options | {"formats": {"*": "q4_0"}})


def test_a_format_is_known_by_its_parameters_too(
    models: list[Path], tmp_path: Path, evaluated: list[Path]
) -> None:
    options = OPTIONS | {"results": tmp_path / "results.json"}
    grids = ([-1, -0.3, 0.3, 1], [-1, 0, 0.5, 1])
    cq.evaluate_files(models[:1], **options | {"formats": cq.Trellis(2, grid=grids[0])})
    with pytest.raises(ValueError, match="formats"):
        cq.evaluate_files(models[:1], **options | {"formats": cq.Trellis(2, grid=grids[1])})
    options["results"] = tmp_path / "others.json"
    for fmt in ("kbit2", cq.KBit(2)):
        cq.evaluate_files(models[:1], **options | {"formats": fmt})
    assert len(evaluated) == 2


def test_command(run: Run, models: list[Path], tmp_path: Path, evaluated: list[Path]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    options = ("--text", text, "--ctx", "32", "--chunks", "2", "--results", tmp_path / "results.json")
    done = run("eval", *models, *options, "-o", "csv")
    assert done.status == 0
    assert done.out.splitlines()[0].startswith("model,format,")
    assert len(done.out.splitlines()) == 3
    hint = "\nno KLD without a model to compare with: --base BASE.gguf gives it\n"
    assert done.err.endswith(hint)
    assert run("eval", *models, *options, "-o", "csv").out == done.out
    assert len(evaluated) == 2
    for other in ((models[0], *options[:-2]), (*models, *options[:-2], "--base", models[0])):
        assert hint not in run("eval", *other).err
    failed = run("eval", models[0], tmp_path / "none.gguf", *options)
    assert_one_line_error(failed)
    assert "none.gguf" in failed.err


def test_a_base_may_be_open_already(models: list[Path]) -> None:
    options = OPTIONS | {"formats": ()}
    opened, named = (
        cq.evaluate_files(models[1], **options, base=base) for base in (cq.open(models[0]), models[0])
    )
    assert opened == named


def test_the_base_stands_once(models: list[Path]) -> None:
    options = {**OPTIONS, "formats": (), "base": models[0]}
    table = cq.evaluate_files([models[1], models[1]], **options).to_pandas()
    assert list(table["model"]) == ["a.gguf", "b.gguf", "b.gguf"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_base_among_the_models_stands_once(models: list[Path], order: tuple[int, int]) -> None:
    given = [models[i] for i in order]
    several = cq.evaluate_files(given, **OPTIONS | {"formats": (), "base": models[0], "kv_bits": 8})
    rows = [line.split(",") for line in several.render("csv").splitlines()]
    assert rows[0][2] == "kv_bits"
    own = {"a.gguf": [["a.gguf", "8"]], "b.gguf": [["b.gguf", ""], ["b.gguf", "8"]]}
    expected = [["a.gguf", ""], *(row for path in given for row in own[path.name])]
    assert [[row[0], row[2]] for row in rows[1:]] == expected
    assert "Evaluations(2 models: 4 rows" in repr(several)


def test_a_mixture_has_its_name(tmp_path: Path) -> None:
    source = write(tmp_path / "f16.gguf", Spec(d_model=256, head_dim=64, n_ff=256))
    for kind in ("q4_k_m", "q4_0"):
        cq.quantize_file(source, tmp_path / f"{kind}.gguf", kind)
        rows = cq.evaluate(tmp_path / f"{kind}.gguf", tokens=some_tokens(32), ctx=16).rows
        assert [row.format for row in rows] == [kind]
