"""Figures of the README and of performance.md that come from committed records: ``python docs/figures.py``
writes them into these texts after a new record, and says which it does not find there.

Each is a line of text with numbers in it. `tests/test_records.py` compares them with the records.
"""

from __future__ import annotations

import sys

import figures_of_others
import figures_of_products
from recorded import PERFORMANCE, README, ROOT, Figure


def every_figure() -> list[Figure]:
    return [figure for part in (*figures_of_products.PARTS, *figures_of_others.PARTS) for figure in part()]


def write() -> int:
    """Put the records' numbers into the texts; how many were not found."""
    missing = 0
    figures = every_figure()
    for file in (README, PERFORMANCE):
        path = ROOT / file
        text = path.read_text(encoding="utf-8")
        for figure in (each for each in figures if each.file == file):
            try:
                found = figure.find(text)
            except LookupError as error:
                print(error)
                missing += 1
                continue
            for group in range(len(figure.numbers), 0, -1):
                start, end = found.span(group)
                text = text[:start] + figure.numbers[group - 1] + text[end:]
        path.write_text(text, encoding="utf-8")
    return missing


if __name__ == "__main__":
    sys.exit(write() > 0)
