"""Results as text, for people and for programs."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

TABLE_STYLES = {"table": "simple", "md": "github", "html": "html"}
"""Our names of tabulate's styles: for terminals, Markdown, notebooks."""
_SHOWN = 8
"""Items of an array that are shown."""


def counted(number: int, thing: str) -> str:
    """A number of things: "1 tensor", "2,048 tensors"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def escaped(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return repr(text)[1:-1]


def short(value: Any, width: int = 72) -> str:
    """A value of metadata in a line; what is long is cut to so many characters."""
    if isinstance(value, (list, np.ndarray)):
        items = ", ".join(
            str(item) if isinstance(value, np.ndarray) else repr(item) for item in value[:_SHOWN]
        )
        text = f"{items}, ..." if len(value) > _SHOWN else items
    else:
        text = escaped(value) if isinstance(value, str) else str(value)
    return cut(text, width)


def told(value: Any) -> str:
    """A value of metadata as errors show it, in a line: texts in quotes, arrays in brackets; cut if long."""
    if isinstance(value, (list, np.ndarray)):
        return f"[{short(value)}]"
    return cut(repr(value)) if isinstance(value, str) else short(value)


def cut(text: str, width: int = 72) -> str:
    """A text cut to so many characters; what is missing is three dots."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def progress_bar(shown: bool, unit: str, over: Iterable[Any] | None = None, total: int | None = None) -> Any:
    """tqdm's bar on stderr, if it is to be shown and that is a terminal: of things, or of so many steps."""
    from tqdm import tqdm

    return tqdm(over, total=total, unit=unit, disable=None if shown else True)


def rows_to_csv(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Comma-separated values with a header, in full precision; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().rstrip("\n")


Columns = dict[str, tuple[str, str]]
"""Titles and number formats by key; numbers are right-aligned, what has no format is text."""


def table_format_of(style: str, *others: str) -> str:
    """What tabulate calls one of TABLE_STYLES; ValueError for another, which is none of the caller's `others`
    either."""
    if style not in TABLE_STYLES:
        allowed = ", ".join([*TABLE_STYLES, *others])
        raise ValueError(f"unknown style {style!r}; allowed are {allowed}")
    return TABLE_STYLES[style]


def render_records(records: list[dict[str, Any]], columns: Columns, style: str, *others: str) -> str:
    """Records as a table in one of TABLE_STYLES, or as "csv" in full precision; None is an empty cell.

    ValueError for a style that is neither of these; `others` are those that the caller has beside them.
    """
    if style == "csv":
        return rows_to_csv(records, list(columns))
    table_format = table_format_of(style, "csv", *others)
    from tabulate import tabulate

    cells = [
        ["" if record[key] is None else format(record[key], spec) for key, (_, spec) in columns.items()]
        for record in records
    ]
    if style == "md":  # a name of somebody's file may have a bar
        cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    align = ["right" if spec else "left" for _, spec in columns.values()]
    headers = [title for title, _ in columns.values()]
    return tabulate(
        cells,
        headers,
        tablefmt=table_format,
        colalign=align if cells else None,
        disable_numparse=True,
    )


def to_pandas(records: list[dict[str, Any]], columns: list[str]) -> Any:
    """Records as a pandas DataFrame; ImportError with advice where pandas is missing."""
    try:
        import pandas
    except ImportError as error:
        raise missing("a DataFrame", "pandas", error) from None
    return pandas.DataFrame(records, columns=columns)


def missing(what: str, package: str, error: ImportError) -> ImportError:
    """The error for a package of the notebook extra that is not there."""
    return ImportError(
        f"{what} needs {package} ({error}): pip install {package}, or '.[notebook]' in a checkout of cuquant"
    )


def html_facts(facts: dict[str, str]) -> str:
    """Names and values as a small HTML table."""
    cells = "".join(f"<tr><th>{key}</th><td>{html.escape(value)}</td></tr>" for key, value in facts.items())
    return f"<table>{cells}</table>"


def html_shape(shape: tuple[int, ...]) -> str:
    """Extents as in 3 × 64."""  # noqa: RUF002
    return " × ".join(map(str, shape)) or "scalar"  # noqa: RUF001


def to_json(value: Any) -> str:
    """Dictionaries, lists, arrays and numbers as JSON; NaN and infinity, which JSON has not, become null.

    In ASCII, since a pipe of another encoding has escapes that JSON has not for what it lacks."""
    return json.dumps(_plain(value), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
