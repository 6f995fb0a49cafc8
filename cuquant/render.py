"""Text for people and programs: JSON that every parser takes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np


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
