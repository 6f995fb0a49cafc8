"""Pictures of evaluations: what formats lose over their size, and the errors of every tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from ..picture import COLOURS, Picture
from .report import Row

_MARKERS = "osD^vP"
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def losses(models: Mapping[str, Sequence[Row]]) -> Picture:
    """Mean KL divergence (perplexity, where nothing was compared) over bits per weight, row by row.

    `models` are rows by name; a line goes along those that no other row beats in both.
    """
    rows = [(name, row) for name, own in models.items() for row in own]
    measure, title = ("mean_kld", "mean KL divergence from the original, nats per token")
    shown = [(name, row) for name, row in rows if row.mean_kld]
    if not shown:
        measure, title, shown = "ppl", "perplexity", rows
    points = [(row.bits_per_weight, float(getattr(row, measure))) for _, row in shown]
    if not points:
        raise ValueError("there are no rows to plot")
    made = Picture(figsize=(7, 4.5), dpi=120, layout="constrained")
    axes = made.subplots()
    names = list(models)
    by_size = sorted(zip(points, shown, strict=True), key=lambda each: each[0])
    for i, ((x, y), (name, row)) in enumerate(by_size):
        style = {"marker": _MARKERS[names.index(name) % len(_MARKERS)], "color": COLOURS[0]}
        axes.plot([x], [y], linestyle="", markersize=5, **style)  # type: ignore[arg-type]
        # Neighbours' labels go to different sides.
        side: Any = {"xytext": (5, 5)} if i % 2 else {"xytext": (-5, -5), "ha": "right", "va": "top"}
        axes.annotate(_label(name, row), (x, y), textcoords="offset points", fontsize=8, **side)
    axes.margins(0.12)
    front = pareto(points)
    axes.plot(*zip(*front, strict=True), color="#bbbbbb", linewidth=1, zorder=1)
    axes.set_xlabel("bits per weight, all tensors")
    axes.set_ylabel(title)
    if measure == "mean_kld":
        axes.set_yscale("log")
    axes.grid(which="major", color="#e8e8e8")
    return made


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other is at least as small as in both numbers and smaller in one, by the first."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _label(model: str, row: Row) -> str:
    label = row.format if row.kv_bits is None else f"{row.format}, KV {row.kv_bits}"
    return f"{model} {label}" if model else label


def tensors(rows: Sequence[Row]) -> Picture:
    """For every row with errors a panel: signal to quantization noise of each tensor, kind by layer."""
    rows = [row for row in rows if row.tensors]
    if not rows:
        raise ValueError("there are no tensors' errors to plot")
    grids = [_grid(row) for row in rows]
    values = [value for grid in grids for value in grid.values()]
    kinds = list(dict.fromkeys(kind for grid in grids for kind, _ in grid))
    layers = sorted({layer for grid in grids for _, layer in grid})
    made = Picture(
        figsize=(1.6 + 1.2 * len(rows) + 0.22 * len(layers) * len(rows), 1.4 + 0.3 * len(kinds)),
        dpi=120,
        layout="constrained",
    )
    panels = made.subplots(1, len(rows), squeeze=False, sharey=True)[0]
    image: Any = None
    for axes, row, grid in zip(panels, rows, grids, strict=True):
        image = _panel(axes, grid, kinds, layers, (min(values), max(values)))
        axes.set_title(row.format, fontsize=9)
    panels[0].set_yticks(range(len(kinds)), kinds, fontsize=8)
    made.colorbar(image, ax=list(panels), label="SQNR, dB")
    return made


def _grid(row: Row) -> dict[tuple[str, int], float]:
    """The ratio in dB by kind of tensor and layer (-1: none); exact tensors have none."""
    grid = {}
    for error in row.tensors:
        if error.sqnr_db is not None:
            match = _LAYER.fullmatch(error.name)
            kind, layer = (match[2], int(match[1])) if match else (error.name, -1)
            grid[kind.removesuffix(".weight"), layer] = error.sqnr_db
    return grid


def _panel(
    axes: Axes, grid: dict[tuple[str, int], float], kinds: list[str], layers: list[int], span: Any
) -> Any:
    table = [[grid.get((kind, layer), float("nan")) for layer in layers] for kind in kinds]
    image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=span[0], vmax=span[1])
    places = [i for i, layer in enumerate(layers) if layer >= 0]
    places = places[:: max(1, len(places) // 6)]
    axes.set_xticks(places, [str(layers[i]) for i in places])
    axes.set_xlabel("layer", fontsize=8)
    axes.tick_params(labelsize=8)
    return image
