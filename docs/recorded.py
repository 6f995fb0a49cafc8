"""What figures in texts are made of: cells of committed records, and the words that numbers stand in."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
README, PERFORMANCE = "README.md", "docs/performance.md"
NUMBER = r"(-?\d+(?:\.\d+)?)"

Cell = dict[str, Any]


class Figure(NamedTuple):
    """Words that stand in a file once, with {} for each number."""

    file: str
    words: str
    numbers: tuple[str, ...]
    below: str = ""
    """The header of the table that they are a row of."""

    def find(self, text: str) -> re.Match[str]:
        """Where they stand, with any numbers, and lines that end anywhere; LookupError where that is nowhere,
        or in several places."""
        parts = (re.escape(part).replace(r"\ ", r"\s+") for part in self.words.split("{}"))
        pattern = re.compile(NUMBER.join(parts))
        start, end = table_lines(text, self.below) if self.below else (0, len(text))
        found = list(pattern.finditer(text, start, end))
        if len(found) != 1:
            raise LookupError(f"{self.file} has {len(found)} times: {self.words}")
        assert pattern.groups == len(self.numbers), self.words
        return found[0]


def table_lines(text: str, header: str) -> tuple[int, int]:
    """Where the rows below a header begin and end; LookupError without such a table."""
    if f"{header}\n" not in text:
        raise LookupError(f"no table begins with: {header}")
    start = text.index(f"{header}\n") + len(header) + 1
    rows = itertools.takewhile(lambda line: line.startswith("|"), text[start:].splitlines(keepends=True))
    return start, start + sum(map(len, rows))


@cache
def read_record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((ROOT / f"examples/benchmarks/{name}.json").read_text())
    return record


def read_cells(name: str, op: str | None = None, activation: str | None = None) -> list[Cell]:
    return [
        cell
        for cell in read_record(name)["cells"]
        if (op is None or cell["op"] == op) and (activation is None or cell["activation"] == activation)
    ]


def span(values: Iterable[float], digits: int) -> tuple[str, str]:
    """The least and the most."""
    every = list(values)
    return f"{min(every):.{digits}f}", f"{max(every):.{digits}f}"


def over(cells: Iterable[Cell], other: str) -> list[float]:
    """Times as multiples of another one of the same cell."""
    return [cell["us"] / cell[other] for cell in cells]


def between(cells: Iterable[Cell], first: int, last: int) -> list[Cell]:
    """Those with so many rows of x, or tokens."""
    return [cell for cell in cells if first <= cell["M"] <= last]


def table(
    file: str,
    header: str,
    rows: int,
    number: Callable[..., float | str],
    columns: Iterable[Any],
    labels: int = 1,
) -> Iterator[Figure]:
    """A table's figures: number(label, ..., column) for each of its rows, as they are labelled there;
    LookupError where there are others than these, or no record has a number."""
    text = (ROOT / file).read_text(encoding="utf-8")
    start, end = table_lines(text, header)
    lines = text[start:end].splitlines()[1:]
    if len(lines) != rows:
        raise LookupError(f"{len(lines)} rows in place of {rows} below: {header}")
    for line in lines:
        label = [cell.strip() for cell in line.strip("|").split("|")[:labels]]
        try:
            found = [number(*label, column) for column in columns]
        except KeyError as missing:
            raise LookupError(f"no record has {missing}, of the row: {line}") from None
        numbers = tuple(each if isinstance(each, str) else f"{each:.1f}" for each in found)
        yield Figure(file, f"| {' | '.join([*label, *['{}'] * len(numbers)])} |", numbers, header)


AIMS = {"1 to 16": 1.1, "32": 1.2, "64": 1.3, "128": 1.15, "256, 512": 1.08, "1024 and more": 1.05}
"""Times over the floor, by rows of x."""
LAST = (16, 32, 64, 128, 512, 4096)


def aim(rows: int) -> float:
    """Times over the floor that so many rows may take."""
    return next(times for times, last in zip(AIMS.values(), LAST, strict=True) if rows <= last)


def reached(cells: Iterable[Cell]) -> int:
    return sum(c["us"] <= aim(c["M"]) * c["floor_us"] for c in cells)


def no_slower(cells: Iterable[Cell]) -> int:
    """Cells that take no longer than dense cuBLAS."""
    return sum(c["us"] <= c["cublas_us"] for c in cells)
