"""The file of results of several evaluations: it survives interruptions, and others are refused."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run
from gguf_files import forbid, untouched
from synthetic import Spec, some_tokens, write
from test_evaluate_files import OPTIONS

import cuquant as cq


def test_what_is_there_is_not_evaluated_again(
    models: list[Path], tmp_path: Path, evaluated: list[Path]
) -> None:
    results = tmp_path / "results.json"
    first = cq.evaluate_files(models[:1], results=results, **OPTIONS)
    both = cq.evaluate_files(models, results=results, **OPTIONS)
    assert evaluated == models
    assert both.each[0] == first.each[0]
    write(models[0], Spec(seed=7))  # a changed file is another one
    again = cq.evaluate_files(models, results=results, **OPTIONS)
    assert evaluated == [*models, models[0]]
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


def test_a_changed_part_is_another_model(models: list[Path], tmp_path: Path, evaluated: list[Path]) -> None:
    parts, others = (split(tmp_path / f"{seed}", Spec(seed=seed)) for seed in range(2))
    options = OPTIONS | {"formats": (), "results": tmp_path / "results.json"}
    of_base = options | {"base": parts[0], "results": tmp_path / "of_base.json"}
    first = cq.evaluate_files(parts[0], **options)
    assert cq.evaluate_files(parts[1], **options) == first  # the same by another of its files
    cq.evaluate_files(models[0], **of_base)
    assert evaluated == [parts[0], models[0]]
    others[-1].replace(parts[-1])
    assert cq.evaluate_files(parts[0], **options).each[0].rows[0].ppl != first.each[0].rows[0].ppl
    with pytest.raises(ValueError, match=r"other settings \(base\)"):
        cq.evaluate_files(models[0], **of_base)


def test_the_same_settings_in_other_words(models: list[Path], tmp_path: Path, evaluated: list[Path]) -> None:
    options = OPTIONS | {"results": tmp_path / "results.json"}
    for kv_bits in (4, "4", ["4"], [4, "4"], np.int64(4), " 4"):
        cq.evaluate_files(models[:1], **options | {"kv_bits": kv_bits, "ctx": np.int64(16)})
        cq.evaluate_files(models[:1], **options | {"kv_bits": kv_bits})
    assert len(evaluated) == 1


def test_defaults_and_names_in_other_words(models: list[Path], tmp_path: Path, evaluated: list[Path]) -> None:
    options: dict[str, Any] = {"tokens": some_tokens(1024), "results": tmp_path / "results.json"}
    defaults: dict[str, Any] = {"ctx": 512, "chunks": None, "activations": "f16", "device": None}
    for formats in ("Q8_0", ["q8_0"], cq.formats.get("q8_0")):
        cq.evaluate_files(models[:1], **options, formats=formats)
        cq.evaluate_files(models[:1], **options | defaults, formats=formats)
    assert len(evaluated) == 1
    options["results"] = tmp_path / "recipes.json"
    for recipe in ({"*": "Q8_0"}, {"*": cq.formats.get("q8_0")}):
        cq.evaluate_files(models[:1], **options, formats=recipe)
    assert len(evaluated) == 2


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
def test_where_no_results_can_be(
    models: list[Path], tmp_path: Path, evaluated: list[Path], where: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with untouched(tmp_path), pytest.raises(OSError, match=r"is (no|a) (folder|ordinary file)"):
        cq.evaluate_files(models, results=tmp_path / where, **OPTIONS)
    assert evaluated == []


@pytest.mark.parametrize("what", ["made", "listed"])
def test_where_no_results_may_be(
    models: list[Path], tmp_path: Path, evaluated: list[Path], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    forbid(monkeypatch, tmp_path, what)
    with pytest.raises(PermissionError, match=tmp_path.name):
        cq.evaluate_files(models, results=tmp_path / "results.json", **OPTIONS)
    assert evaluated == []
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_missing_is_told_before_any_work(models: list[Path], evaluated: list[Path]) -> None:
    with pytest.raises(FileNotFoundError, match="none"):
        cq.evaluate_files([*models, models[0].with_name("none.gguf")], **OPTIONS)
    assert evaluated == []


def test_a_name_that_is_no_utf_8(models: list[Path], tmp_path: Path, evaluated: list[Path]) -> None:
    path, options = tmp_path / os.fsdecode(b"\xff.gguf"), OPTIONS | {"results": tmp_path / "results.json"}
    try:
        path.write_bytes(models[0].read_bytes())
    except OSError:
        pytest.skip("file names are Unicode here")
    first = cq.evaluate_files(path, **options)
    assert cq.evaluate_files(path, **options) == first
    assert evaluated == [path]


def test_results_of_something_else_are_refused(
    models: list[Path], tmp_path: Path, evaluated: list[Path]
) -> None:
    results = tmp_path / "results.json"
    cq.evaluate_files(models[:1], results=results, **OPTIONS)
    with pytest.raises(ValueError, match=r"other settings \(chunks, formats\): remove it"):
        cq.evaluate_files(models[:1], results=results, **OPTIONS | {"chunks": 2, "formats": "q4_0"})
    with pytest.raises(ValueError, match=r"other settings \(text\)"):
        cq.evaluate_files(models[:1], results=results, **OPTIONS | {"tokens": some_tokens(32)})
    assert len(evaluated) == 1
    for wrong in ("", "[]", '{"kind": "other"}', '{"kind": "cuquant evaluations"}'):
        results.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match="not a file of cuquant's evaluations"):
            cq.evaluate_files(models[:1], results=results, **OPTIONS)
        assert results.read_text(encoding="utf-8") == wrong


def test_results_with_something_else_in_them(
    models: list[Path], tmp_path: Path, evaluated: list[Path]
) -> None:
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
    assert len(evaluated) == 1


def test_results_of_another_version_are_refused(
    models: list[Path], tmp_path: Path, evaluated: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose numbers may be others."""
    options = OPTIONS | {"results": tmp_path / "results.json"}
    cq.evaluate_files(models[:1], **options)
    monkeypatch.setattr(cq, "__version__", "0.0.1")
    with pytest.raises(ValueError, match=r"other settings \(cuquant version\): remove it, or name another"):
        cq.evaluate_files(models[:1], **options)
    assert len(evaluated) == 1
