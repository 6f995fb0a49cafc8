"""The picture of a record: what is drawn, and where it can be written."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from cells import RECORD, cell
from commands import Run, assert_interrupted, assert_one_line_error, interrupted

from cuquant.bench import Record, record as records

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"


def lines(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Points of the named lines of a panel."""
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def test_a_roofline_and_multiples_for_each_shape() -> None:
    commit = json.loads(RECORD.read_text(encoding="utf-8"))["commit"]
    figure = Record.read(RECORD).plot()
    assert f"NVIDIA H200, commit {commit[:12]}" in figure.get_suptitle()
    above, below = figure.axes[:5], figure.axes[5:]
    shapes = ["4096 x 4096", "4096 x 14336", "14336 x 4096", "8192 x 8192", "28672 x 8192"]
    assert [axes.get_title() for axes in above] == [f"W: {shape}" for shape in shapes]
    for axes in above:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert {len(points) for points in lines(axes).values()} == {13}
        assert list(lines(axes))[:2] == ["q4_0, f16", "q4_0, q8_1"]
        assert {"q8_0, q8_1", "cuBLAS, dense f16", "roof and 2.4 µs, q4_0"} < set(lines(axes))
        assert {"M = 1", "4", "16", "64", "4.46 TB/s", "770 TFLOP/s"} <= {t.get_text() for t in axes.texts}
    assert len(below) == 5


def test_points_are_the_record_s_numbers() -> None:
    """q4_0 at M = 1: 18 bytes of 32 weights, and x and y in float16."""
    record = Record.read(RECORD).only(format=["q4_0"], activation=["f16"], shape=[(14336, 4096)])
    above, below = record.plot().axes
    first = record.cells[0]
    moved = 14336 * 4096 * 18 / 32 + 2 * (14336 + 4096)
    ((x, y), *_) = lines(above)["q4_0, f16"]
    assert x == pytest.approx(2 * 14336 * 4096 / moved, rel=1e-3)
    assert y == first["tflops"]
    ((x, y), *_) = lines(above)["cuBLAS, dense f16"]
    assert x == pytest.approx(1, rel=1e-3)
    assert y == pytest.approx(2 * 14336 * 4096 / first["cublas_us"] * 1e-6)
    ((_, y), *_) = lines(above)["roof and 2.4 µs, q4_0"]
    assert y == pytest.approx(2 * 14336 * 4096 / first["floor_us"] * 1e-6, rel=1e-3)
    own, cublas = below.get_lines()[1:]
    assert own.get_ydata()[0] == pytest.approx(first["us"] / first["floor_us"])
    assert cublas.get_ydata()[0] == pytest.approx(first["cublas_us"] / first["floor_us"])


def test_peers_are_drawn_where_they_were_measured() -> None:
    record = Record(None, {"device": "NVIDIA H200", "versions": {}, "commit": None})
    for m in (1, 2):
        record.add(cell(M=m, tinygemm_us=10.0 if m == 1 else None))
    shown = lines(record.plot().axes[0])
    assert len(shown["tinygemm, bfloat16"]) == 1
    assert not any("gemlite" in label for label in shown)


def test_a_gpu_of_unknown_ceilings() -> None:
    record = Record(None, {"device": "another", "versions": {}, "commit": "0"})
    record.add(cell(floor_us=None))
    above, below = record.plot().axes
    assert set(lines(above)) == {"q4_0, f16", "cuBLAS, dense f16"}
    assert below.get_ylabel() == "time / cuBLAS float16's"
    assert below.get_lines()[1].get_ydata()[0] == pytest.approx(4 / 6)


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no cells to plot"):
        Record(None, {"device": "", "commit": None}).plot()


def test_only_products_are_drawn() -> None:
    """Cells of mixtures have the same keys."""
    whole = Record.read(RECORD.with_name("h200-trellis-moe.json"))
    figure, products = whole.plot(), whole.only(op=["matmul"]).plot()
    assert [lines(axes) for axes in figure.axes] == [lines(axes) for axes in products.axes]
    with pytest.raises(ValueError, match="a plot shows products, not a record of moe"):
        whole.only(op=["moe"]).plot()


def test_a_notebook_shows_it() -> None:
    assert Record.read(RECORD).only(shape=[(4096, 4096)]).plot()._repr_png_().startswith(PNG)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_bench_plots_a_record(run: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bench.{suffix}"
    done = run("bench", "--from", RECORD, "--formats", "q4_0", "--shapes", "4096x4096", "--plot", path)
    assert done.status == 0
    assert done.out.count("q4_0") == 26
    if suffix == "png":
        assert path.read_bytes().startswith(PNG)
    else:
        assert ET.parse(path).getroot().tag.endswith("svg")
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("before", [None, "precious"])
def test_bench_interrupted_before_the_plot_is_in_place(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    path = tmp_path / "p.png"
    if before is not None:
        path.write_text(before)

    def half(figure: Any, target: Any, **options: Any) -> None:
        Path(target).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("cuquant.picture.Picture.savefig", half)
    left = f"{path} was not written, and no part of it is left"
    done = run("bench", "--from", RECORD, "--plot", path)
    assert_interrupted(done, left if before is None else f"{path} is as it was")
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if before is None else [before])


def test_bench_interrupted_after_the_plot_is_in_place(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.png"
    path.write_text("old")
    monkeypatch.setattr(Record, "render", interrupted)
    some = ("--formats", "q4_0", "--shapes", "4096x4096")
    done = run("bench", "--from", RECORD, *some, "--plot", path)
    assert (done.status, done.out) == (130, "")
    assert done.err.splitlines()[1:] == [f"cuquant: interrupted: {path} is the new file, and whole"]
    assert path.read_bytes().startswith(PNG)
    assert list(tmp_path.iterdir()) == [path]


def test_bench_interrupted_as_it_measures_names_the_plot(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = tmp_path / "p.svg", tmp_path / "r.json"
    facts = {"device": "a GPU", "versions": {}, "commit": "0123"}
    monkeypatch.setattr(records, "environment", lambda packages=(), by_tuned=True: facts)
    monkeypatch.setattr("cuquant.cli.bench._needs_a_gpu", lambda: None)
    monkeypatch.setattr("cuquant.bench.matmul", interrupted)
    command = ("bench", "--peers", "none", "--plot", path)
    no_plot = f"{path} was not written, and no part of it is left"
    hint = f"{no_plot}; --record FILE.json keeps every cell that is measured"
    assert_interrupted(run(*command), hint)
    left = f"no cell is measured, and {record} was not written; {no_plot}"
    assert_interrupted(run(*command, "--record", record), left)


def test_without_matplotlib_the_extra_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cuquant.bench.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.artist", None)
    with pytest.raises(ImportError, match=r"a plot needs matplotlib .*: pip install matplotlib, or"):
        Record.read(RECORD).plot()
    done = run("bench", "--from", RECORD, "--plot", tmp_path / "p.png")
    assert_one_line_error(done)
    assert "'.[notebook]' in a checkout" in done.err
