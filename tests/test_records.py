"""The README and docs/performance.md against the committed records."""

from __future__ import annotations

import re
from pathlib import Path

import figures
import pytest
from recorded import PERFORMANCE, README, ROOT, Figure, read_record

TEXTS = {file: (ROOT / file).read_text(encoding="utf-8") for file in (README, PERFORMANCE)}
FIGURES = figures.every_figure()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.words[:60])
def test_a_figure(figure: Figure) -> None:
    """If this fails after a new record: python docs/figures.py."""
    assert figure.find(TEXTS[figure.file]).groups() == figure.numbers


def test_a_wrong_figure_is_found() -> None:
    figure = Figure(README, "{} of {} cells", ("7", "12"))
    assert figure.find("Here 8 of\n12 cells are.").groups() == ("8", "12")
    for text in ("7 of some cells", "7 of 12 cells, and 7 of 12 cells"):
        with pytest.raises(LookupError, match="times: "):
            figure.find(text)


def test_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every number again, if all are 0; words that are not there are told, and the others written."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for file, text in TEXTS.items():
        for figure in (each for each in FIGURES if each.file == file):
            found = figure.find(text)
            for group in range(len(figure.numbers), 0, -1):
                start, end = found.span(group)
                text = f"{text[:start]}0{text[end:]}"
        assert text != TEXTS[file]
        (tmp_path / file).write_text(text, encoding="utf-8")
    assert figures.write() == 0
    assert {file: (tmp_path / file).read_text(encoding="utf-8") for file in TEXTS} == TEXTS
    text = TEXTS[README].replace("combinations measured", "combinations")
    (tmp_path / README).write_text(re.sub(r"weights are \S+ to", "weights are 9 to", text), encoding="utf-8")
    assert figures.write() == 1
    assert capsys.readouterr().out.startswith("README.md has 0 times: With q4_0 weights, {} of the {} comb")
    assert (tmp_path / README).read_text(encoding="utf-8") == text


def test_tables_have_no_rows_beside_them() -> None:
    """Each row of a table of which some are figures is one."""
    tables = {(figure.file, figure.below) for figure in FIGURES if figure.below}
    assert len(tables) == 21
    for file, header in tables:
        text = TEXTS[file]
        rows = text[text.index(f"{header}\n") :].split("\n\n")[0].split("\n")[2:]
        assert len(rows) == sum((each.file, each.below) == (file, header) for each in FIGURES)


def test_records_are_listed_with_their_commits() -> None:
    names = sorted(path.stem for path in (ROOT / "examples/benchmarks").glob("*.json"))
    assert sum(name.startswith("h200-") for name in names) == 15
    listed = [
        line for line in TEXTS[PERFORMANCE].split("\n") if line.startswith("| [JSON](../examples/benchmarks/")
    ]
    assert len(listed) == len(names)
    for name in names:
        record = read_record(name)
        assert record["device"].startswith(f"NVIDIA {name[:4].upper()}")
        (line,) = (line for line in listed if f"/{name}.json)" in line)
        assert re.fullmatch("[0-9a-f]{40}", record["commit"])  # of sources that others can read
        assert line.endswith(f"`{record['commit'][:12]}` |")
        assert all(cell["nmse"] <= 5e-6 for cell in record["cells"] if "nmse" in cell)
    assert f"`{read_record('h200-matmul')['commit'][:12]}`" in TEXTS[README]
