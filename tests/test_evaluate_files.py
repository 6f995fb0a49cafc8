"""Several files on one text: one table, and results that survive an interruption."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, assert_one_line_error
from gguf_files import forbid, untouched
from synthetic import Spec, some_tokens, write

import cuquant as cq

OPTIONS: dict[str, Any] = {"tokens": some_tokens(64), "ctx": 16, "formats": ["q8_0"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write(folder / f"{name}.gguf", Spec(seed=seed)) for seed, name in enumerate("ab")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Models that are evaluated, as it happens."""
    seen: list[Path] = []
    real = cq.evaluate

    def counted(model: Path, **options: Any) -> cq.Evaluation:
        seen.append(model)
        return real(model, **options)

    monkeypatch.setattr("cuquant.eval.files.evaluate", counted)
    return seen


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


def test_what_is_there_is_not_evaluated_again(models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
    results = tmp_path / "results.json"
    first = cq.evaluate_files(models[:1], results=results, **OPTIONS)
    both = cq.evaluate_files(models, results=results, **OPTIONS)
    assert calls == models
    assert both.each[0] == first.each[0]
    write(models[0], Spec(seed=7))  # a changed file is another one
    again = cq.evaluate_files(models, results=results, **OPTIONS)
    assert calls == [*models, models[0]]
    assert again.each[0].rows[0].ppl != first.each[0].rows[0].ppl


def test_results_that_another_process_adds_meanwhile(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is lost, and none that is there is found once more."""
    options = OPTIONS | {"results": tmp_path / "results.json"}
    real, seen = cq.evaluate, []

    def slow(model: Path, **others: Any) -> cq.Evaluation:
        seen.append(model)
        if len(seen) == 1:
            cq.evaluate_files(models[1], **options)
        return real(model, **others)

    monkeypatch.setattr("cuquant.eval.files.evaluate", slow)
    both = cq.evaluate_files(models, **options)
    assert seen == models
    assert cq.evaluate_files(models, **options) == both
    assert len(seen) == 2
    assert [Path(each.model) for each in both.each] == models


def test_results_that_become_others_meanwhile(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept."""
    results, real = tmp_path / "results.json", cq.evaluate

    def slow(model: Path, **others: Any) -> cq.Evaluation:
        results.write_text("mine", encoding="utf-8")
        return real(model, **others)

    monkeypatch.setattr("cuquant.eval.files.evaluate", slow)
    with pytest.raises(ValueError, match="not a file of cuquant's evaluations"):
        cq.evaluate_files(models[0], results=results, **OPTIONS)
    assert results.read_text(encoding="utf-8") == "mine"


def split(folder: Path, spec: Spec) -> list[Path]:
    """A model's files."""
    folder.mkdir()
    write(folder / "m.gguf", spec, split=8)
    return sorted(folder.iterdir())


def test_a_changed_part_is_another_model(models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
    parts, others = (split(tmp_path / f"{seed}", Spec(seed=seed)) for seed in range(2))
    options = OPTIONS | {"formats": (), "results": tmp_path / "results.json"}
    of_base = options | {"base": parts[0], "results": tmp_path / "of_base.json"}
    first = cq.evaluate_files(parts[0], **options)
    assert cq.evaluate_files(parts[1], **options) == first  # the same by another of its files
    cq.evaluate_files(models[0], **of_base)
    assert calls == [parts[0], models[0]]
    others[-1].replace(parts[-1])
    assert cq.evaluate_files(parts[0], **options).each[0].rows[0].ppl != first.each[0].rows[0].ppl
    with pytest.raises(ValueError, match=r"other settings \(base\)"):
        cq.evaluate_files(models[0], **of_base)


def test_the_same_settings_in_other_words(models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
    options = OPTIONS | {"results": tmp_path / "results.json"}
    for kv_bits in (4, "4", ["4"], [4, "4"], np.int64(4), " 4"):
        cq.evaluate_files(models[:1], **options | {"kv_bits": kv_bits, "ctx": np.int64(16)})
        cq.evaluate_files(models[:1], **options | {"kv_bits": kv_bits})
    assert len(calls) == 1


def test_defaults_and_names_in_other_words(models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
    options: dict[str, Any] = {"tokens": some_tokens(1024), "results": tmp_path / "results.json"}
    defaults: dict[str, Any] = {"ctx": 512, "chunks": None, "activations": "f16", "device": None}
    for formats in ("Q8_0", ["q8_0"], cq.formats.get("q8_0")):
        cq.evaluate_files(models[:1], **options, formats=formats)
        cq.evaluate_files(models[:1], **options | defaults, formats=formats)
    assert len(calls) == 1
    options["results"] = tmp_path / "recipes.json"
    for recipe in ({"*": "Q8_0"}, {"*": cq.formats.get("q8_0")}):
        cq.evaluate_files(models[:1], **options, formats=recipe)
    assert len(calls) == 2


def test_a_mixture_is_no_format_of_its_name(models: list[Path], tmp_path: Path) -> None:
    options = OPTIONS | {"results": tmp_path / "results.json"}
    cq.evaluate_files(models[:1], **options | {"formats": "q6_k"})
    with pytest.raises(ValueError, match="formats"):
        cq.evaluate_files(models[:1], **options | {"formats": cq.formats.get("q6_k")})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_text_in_a_pipe(run: Run, models: list[Path], tmp_path: Path) -> None:
    """It can be read once, for all models and their results' file."""
    text, pipe = "The quick brown fox jumps over the lazy dog. " * 20, tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    threading.Thread(target=pipe.write_text, args=(text,), daemon=True).start()
    options = ("--ctx", "32", "-o", "csv", "--text")
    done = run("eval", *models, *options, pipe, "--results", tmp_path / "results.json")
    assert done.out == run("eval", *models, *options, tmp_path / "text.txt").out
    assert done.status == 0
    assert json.loads((tmp_path / "results.json").read_text())["evaluations"][0]["evaluation"]["text"] == str(
        pipe
    )


@pytest.mark.parametrize("where", ["none/results.json", ".", "pipe"])
def test_where_no_results_can_be(models: list[Path], tmp_path: Path, calls: list[Path], where: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with untouched(tmp_path), pytest.raises(OSError, match=r"is (no|a) (folder|ordinary file)"):
        cq.evaluate_files(models, results=tmp_path / where, **OPTIONS)
    assert calls == []


@pytest.mark.parametrize("what", ["made", "listed"])
def test_where_no_results_may_be(
    models: list[Path], tmp_path: Path, calls: list[Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    forbid(monkeypatch, tmp_path, what)
    with pytest.raises(PermissionError, match=tmp_path.name):
        cq.evaluate_files(models, results=tmp_path / "results.json", **OPTIONS)
    assert calls == []
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_missing_is_told_before_any_work(models: list[Path], calls: list[Path]) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        cq.evaluate_files([*models, models[0].with_name("none.gguf")], **OPTIONS)
    assert calls == []


def test_a_name_that_is_no_utf_8(models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
    path, options = tmp_path / os.fsdecode(b"\xff.gguf"), OPTIONS | {"results": tmp_path / "results.json"}
    try:
        path.write_bytes(models[0].read_bytes())
    except OSError:
        pytest.skip("file names are Unicode here")
    first = cq.evaluate_files(path, **options)
    assert cq.evaluate_files(path, **options) == first
    assert calls == [path]


def test_results_of_something_else_are_refused(models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
    results = tmp_path / "results.json"
    cq.evaluate_files(models[:1], results=results, **OPTIONS)
    with pytest.raises(ValueError, match=r"other settings \(chunks, formats\): remove it"):
        cq.evaluate_files(models[:1], results=results, **OPTIONS | {"chunks": 2, "formats": "q4_0"})
    with pytest.raises(ValueError, match=r"other settings \(text\)"):
        cq.evaluate_files(models[:1], results=results, **OPTIONS | {"tokens": some_tokens(32)})
    assert len(calls) == 1
    for wrong in ("", "[]", '{"kind": "other"}', '{"kind": "cuquant evaluations"}'):
        results.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match="not a file of cuquant's evaluations"):
            cq.evaluate_files(models[:1], results=results, **OPTIONS)
        assert results.read_text(encoding="utf-8") == wrong


def test_results_with_something_else_in_them(models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
    """A type that no table can show, as of a file that was changed by hand."""
    options = OPTIONS | {"results": tmp_path / "results.json", "base": models[1], "formats": ()}
    cq.evaluate_files(models[:1], **options)
    read = json.loads(options["results"].read_text(encoding="utf-8"))
    evaluation = read["evaluations"][0]["evaluation"]
    row = evaluation["rows"][0]
    changes: list[tuple[dict[str, Any], str, list[Any]]] = [
        (read, "settings", [0, None, "x", [], [1]]),
        (row, "ppl", ["x", True, [], 10**400]),
        (row, "format", [None, 5]),
        (row, "activations", [None, 5]),
        (row, "tensors", [5, {}, ""]),
        (row, "kv_bits", [4, []]),
        (evaluation, "rows", [[], [row], {}]),
        (evaluation, "model", [1.5, []]),
        (evaluation, "ctx", [1.5, []]),
        (evaluation, "base", [1.5, []]),
    ]
    for place, key, values in changes:
        before = place[key]
        for place[key] in values:
            options["results"].write_text(json.dumps(read), encoding="utf-8")
            with pytest.raises(ValueError, match="not a file of cuquant's evaluations"):
                cq.evaluate_files(models[:1], **options)
        place[key] = before
    row["ppl"] = 5  # which Python's JSON makes of 5.0 nowhere, but others do
    options["results"].write_text(json.dumps(read), encoding="utf-8")
    assert "5.0000" in cq.evaluate_files(models[:1], **options).render()
    assert len(calls) == 1


def test_results_of_another_version_are_refused(
    models: list[Path], tmp_path: Path, calls: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose numbers may be others."""
    options = OPTIONS | {"results": tmp_path / "results.json"}
    cq.evaluate_files(models[:1], **options)
    monkeypatch.setattr(cq, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=r"other settings \(cuquant version\): remove it, or name another"):
        cq.evaluate_files(models[:1], **options)
    assert len(calls) == 1


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
    monkeypatch.setattr("cuquant.io.model.default_device", lambda: "cuda")
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
    models: list[Path], tmp_path: Path, calls: list[Path]
) -> None:
    options = OPTIONS | {"results": tmp_path / "results.json"}
    grids = ([-1, -0.3, 0.3, 1], [-1, 0, 0.5, 1])
    cq.evaluate_files(models[:1], **options | {"formats": cq.Trellis(2, grid=grids[0])})
    with pytest.raises(ValueError, match="formats"):
        cq.evaluate_files(models[:1], **options | {"formats": cq.Trellis(2, grid=grids[1])})
    options["results"] = tmp_path / "others.json"
    for fmt in ("kbit2", cq.KBit(2)):
        cq.evaluate_files(models[:1], **options | {"formats": fmt})
    assert len(calls) == 2


def test_command(run: Run, models: list[Path], tmp_path: Path, calls: list[Path]) -> None:
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
    assert len(calls) == 2
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
