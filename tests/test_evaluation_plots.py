"""Pictures of evaluations: what is drawn."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import cuquant as cq
from cuquant.eval import Row, TensorError

pytest.importorskip("matplotlib")


def row(name: str, bits: float, kld: float | None, **more: Any) -> Row:
    return Row(name, 10 - bits / 16, None, kld, kld, None, None, bits, **more)


def evaluation(*rows: Row) -> cq.Evaluation:
    return cq.Evaluation("folder/m.gguf", "text", 8, 1, 3, "numpy", list(rows))


def error(name: str, db: float | None) -> TensorError:
    return TensorError(name, "q4_0", 4.5, 0.0, db, 0.0)


def test_divergence_over_size_and_what_none_beats() -> None:
    from cuquant.eval.plot import pareto

    result = evaluation(
        row("f16", 16, 0), row("q8_0", 8.5, 1e-4), row("q4_1", 5, 2e-2), row("q4_0", 4.5, 1e-2)
    )
    (axes,) = result.plot().axes
    assert {text.get_text() for text in axes.texts} == {"q8_0", "q4_1", "q4_0"}
    assert axes.get_yscale() == "log"
    assert list(axes.get_lines()[-1].get_xdata()) == [4.5, 8.5]
    assert pareto([(2, 1), (1, 2), (2, 1), (3, 1), (1, 3)]) == [(1, 2), (2, 1)]


def test_perplexity_where_nothing_was_compared() -> None:
    (axes,) = evaluation(row("q4_0", 4.5, None)).plot().axes
    assert axes.get_ylabel() == "perplexity"
    with pytest.raises(ValueError, match="no rows"):
        evaluation().plot()


def test_several_models_are_told_apart() -> None:
    (axes,) = cq.Evaluations([evaluation(row("q4_0", 4.5, 1e-2, kv_bits="4"))]).plot().axes
    assert [text.get_text() for text in axes.texts] == ["m q4_0, KV 4"]


def test_a_panel_of_tensors_for_each_format() -> None:
    errors = [
        error("output.weight", 20),
        error("blk.0.attn_q.weight", 21),
        error("blk.1.attn_q.weight", None),
    ]
    figure = evaluation(row("f16", 16, 0), row("q4_0", 4.5, 1e-2, tensors=errors)).plot(tensors=True)
    panel, bar = figure.axes
    assert panel.get_title() == "q4_0"
    assert [label.get_text() for label in panel.get_yticklabels()] == ["output", "attn_q"]
    (image,) = panel.get_images()
    assert image.get_array().filled(0).tolist() == [[20, 0], [0, 21]]
    assert bar.get_ylabel() == "SQNR, dB"
    with pytest.raises(ValueError, match="no tensors"):
        evaluation(row("f16", 16, 0)).plot(tensors=True)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "cuquant.eval.plot", raising=False)
    with pytest.raises(ImportError, match=r"a plot needs matplotlib .*'\.\[notebook\]'"):
        evaluation(row("q4_0", 4.5, 1e-2)).plot()
