"""Results as text, for people and for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import numpy as np

TABLE_STYLES = {"table": "simple", "md": "github", "html": "html"}
"""Our names of tabulate's styles: for terminals, Markdown, notebooks."""


def rows_to_csv(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Comma-separated values with a header, in full precision; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().rstrip("\n")


def to_json(value: Any) -> str:
    """Dictionaries, lists, arrays and numbers as JSON; NaN and infinity, which JSON has not, become null."""
    return json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
