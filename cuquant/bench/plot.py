"""A record as a picture: for each shape a roofline, and below it times as multiples of the floor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..picture import COLOURS, Picture
from .ceilings import LAUNCH_US, Ceilings
from .peers import BITS_PER_WEIGHT, PEERS
from .record import Record, short_commit

NAMED_BATCHES = (1, 4, 16, 64, 256, 1024, 4096)
"""Rows of x that are written beside their points."""
MULTIPLES = (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 4, 5)
"""Ticks of the lower panels; what is above the last is cut off."""
_BY_ACTIVATION: dict[str, dict[str, Any]] = {
    "f16": {"linestyle": "-", "marker": "o"},
    "q8_1": {"linestyle": "--", "marker": "o", "markerfacecolor": "white"},
    "bf16": {"linestyle": "-.", "marker": "s"},
    "f32": {"linestyle": ":", "marker": "^"},
}
_BY_OTHER: dict[str, dict[str, Any]] = {
    "cublas_us": {"color": "#000000", "marker": "x", "linestyle": "-"},
    "tinygemm_us": {"color": "#777777", "marker": "+", "linestyle": "-"},
    "gemlite_us": {"color": "#777777", "marker": "1", "linestyle": "--"},
}
_LINE: dict[str, Any] = {"linewidth": 1.1, "markersize": 4, "markeredgewidth": 1}
_CEILING: dict[str, Any] = {"color": "#999999", "linewidth": 1.5, "zorder": 1}


@dataclass(frozen=True)
class Point:
    """A product of M rows: FLOP per byte, TFLOP/s, and its time over the floor's (or else cuBLAS's)."""

    m: int
    intensity: float
    tflops: float
    multiple: float


Lines = dict[str, tuple[dict[str, Any], list[Point]]]
"""Style and points by label."""


def figure(record: Record) -> Picture:
    """See Record.plot."""
    if not record.cells:
        raise ValueError("the record has no cells to plot")
    # Cells of mixtures have the same keys: drawn as products they would seem to be other ones of that W.
    products = [cell for cell in record.cells if cell["op"] == "matmul"]
    if not products:
        raise ValueError(f"a plot shows products, not a record of {record.op}")
    products = [cell for cell in products if cell["gbps"] and (cell["floor_us"] or cell["cublas_us"])]
    if not products:
        raise ValueError("no product has a floor or a time of cuBLAS's, which a plot shows multiples of")
    shapes = sorted({(cell["N"], cell["K"]) for cell in products}, key=lambda s: (s[0] * s[1], s))
    formats = list(dict.fromkeys(cell["format"] for cell in products))
    width = max(8.0, 4.2 * len(shapes))
    made = Picture(figsize=(width, 9), dpi=120, layout="constrained")
    commit = short_commit(record.header["commit"] or "unknown")
    made.suptitle(f"x @ W.T on {record.header['device']}, commit {commit}")
    grid = made.subplots(2, len(shapes), squeeze=False, sharey="row")
    ceilings = record.ceilings
    for (n, k), above, below in zip(shapes, *grid, strict=True):
        cells = [cell for cell in products if (cell["N"], cell["K"]) == (n, k)]
        lines = _own(cells, formats) | _others(cells)
        above.set_title(f"W: {n} x {k}")
        _roofline(above, lines, ceilings)
        _multiples(below, lines)
    lowest, highest = grid[1][0].get_ylim()  # of all panels
    grid[1][0].set_ylim(max(lowest, MULTIPLES[0] * 0.9), min(highest, MULTIPLES[-1]))
    grid[0][0].set_ylabel("TFLOP/s")
    unit = f"floor (cuBLAS and others: of {formats[0]})" if ceilings else "cuBLAS float16's"
    grid[1][0].set_ylabel(f"time / {unit}")
    labels: dict[str, Artist] = {}
    for axes in grid[0]:
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    columns = int(width / 1.7)
    made.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=columns, frameon=False)
    return made


def _own(cells: list[dict[str, Any]], formats: list[str]) -> Lines:
    """A line for each format and type of x."""
    lines: Lines = {}
    for cell in sorted(cells, key=lambda cell: int(cell["M"])):
        style = _BY_ACTIVATION.get(cell["activation"], {}) | {
            "color": COLOURS[formats.index(cell["format"]) % len(COLOURS)]
        }
        _, points = lines.setdefault(f"{cell['format']}, {cell['activation']}", (style, []))
        # Both rates are of one time, so their ratio is operations over bytes.
        intensity = cell["tflops"] * 1e3 / cell["gbps"]
        points.append(Point(cell["M"], intensity, cell["tflops"], cell["us"] / _unit(cell)))
    return lines


def _others(cells: list[dict[str, Any]]) -> Lines:
    """A line for cuBLAS and each peer, next to the format that has its times first."""
    names = {"cublas_us": ("cuBLAS, dense f16", 16.0)}
    names |= {peer.key: (f"{name}, {peer.dtype}", BITS_PER_WEIGHT) for name, peer in PEERS.items()}
    lines: Lines = {}
    for key, (label, bits) in names.items():
        by_batch: dict[int, dict[str, Any]] = {}
        for cell in cells:
            if cell.get(key) is not None:
                by_batch.setdefault(cell["M"], cell)
        points = [_other_point(cell, cell[key], bits) for _, cell in sorted(by_batch.items())]
        if points:
            lines[label] = (_BY_OTHER[key], points)
    return lines


def _other_point(cell: dict[str, Any], us: float, bits: float) -> Point:
    m, n, k = cell["M"], cell["N"], cell["K"]
    operations, moved = 2 * m * n * k, n * k * bits / 8 + 2 * m * (n + k)
    return Point(m, operations / moved, operations / us * 1e-6, us / _unit(cell))


def _unit(cell: dict[str, Any]) -> float:
    """The time that times are multiples of."""
    return float(cell["floor_us"] or cell["cublas_us"])


def _roofline(axes: Axes, lines: Lines, ceilings: Ceilings | None) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of memory")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
    axes.grid(which="major", color="#e8e8e8")
    for label, (style, points) in lines.items():
        axes.plot([p.intensity for p in points], [p.tflops for p in points], label=label, **_LINE | style)
    if ceilings is not None:
        _ceilings(axes, lines, ceilings.read_gbps * 1e9, ceilings.tflops * 1e12)
    _name_batches(axes, lines)


def _ceilings(axes: Axes, lines: Lines, bandwidth: float, compute: float) -> None:
    """The roof min(bandwidth * intensity, compute), and below it the first format's floor."""
    intensities = [p.intensity for _, points in lines.values() for p in points]
    low, high, ridge = min(intensities) / 1.6, max(intensities) * 1.6, compute / bandwidth
    left, right = min(low, ridge), max(high, ridge)
    axes.plot([left, ridge, right], [left * bandwidth * 1e-12, compute * 1e-12, compute * 1e-12], **_CEILING)
    axes.set_xlim(left, right)
    grey: dict[str, Any] = {"color": "#666666", "fontsize": 8}
    axes.text(
        left * 2.2,
        left * 2.2 * bandwidth * 1e-12 * 1.12,
        f"{bandwidth * 1e-12:.3g} TB/s",
        rotation=math.degrees(math.atan(bandwidth * 1e-12)),
        rotation_mode="anchor",
        transform_rotates_text=True,
        **grey,
    )
    axes.text(right / 1.1, compute * 1e-12 * 1.08, f"{compute * 1e-12:.0f} TFLOP/s", ha="right", **grey)
    name, (_, points) = next(iter(lines.items()))
    label = f"roof and {LAUNCH_US:g} µs, {name.partition(',')[0]}"
    reached = [p.tflops * p.multiple for p in points]
    axes.plot([p.intensity for p in points], reached, label=label, **_CEILING | {"linestyle": ":"})


def _plain(number: float, _: int) -> str:
    return f"{number:g}"


def _name_batches(axes: Axes, lines: Lines) -> None:
    """M beside the lowest point of its product, where nothing else is drawn; left out where points crowd."""
    points = [p for _, points in lines.values() for p in points if p.m in NAMED_BATCHES]
    last = 0.0
    for m in sorted({p.m for p in points}):
        lowest = min((p for p in points if p.m == m), key=lambda p: p.tflops / p.intensity)
        place = (lowest.intensity, lowest.tflops)
        if lowest.intensity > 1.8 * last:
            text = str(m) if last else f"M = {m}"
            axes.annotate(text, place, (3, -11), textcoords="offset points", fontsize=8)
            last = lowest.intensity


def _multiples(axes: Axes, lines: Lines) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("M, rows of x")
    axes.grid(which="major", color="#e8e8e8")
    axes.axhline(1, **_CEILING)
    for style, points in lines.values():
        axes.plot([p.m for p in points], [p.multiple for p in points], **_LINE | style)
    axes.xaxis.set_major_locator(FixedLocator(NAMED_BATCHES))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_major_locator(FixedLocator(MULTIPLES))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
