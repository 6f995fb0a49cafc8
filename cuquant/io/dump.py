"""A GGUF model's header, for people and for programs."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..render import to_json
from .gguf import Metadata
from .model import Model

_SHOWN = 8
"""Items of an array that the text form shows."""
_WIDTH = 72
"""Characters of a value that the text form shows."""


def as_text(model: Model) -> str:
    """Metadata and tensors as two tables; long values and arrays are cut."""
    from tabulate import tabulate

    keys = [(_escaped(key), _type_name(model.metadata, key), _short(v)) for key, v in model.metadata.items()]
    tensors = [
        (_escaped(i.name), i.type_name, " x ".join(map(str, i.shape)), i.nbytes)
        for i in model.tensors.values()
    ]
    align = ("left", "left", "right", "right")
    return "\n\n".join(
        (
            tabulate(keys, ("key", "type", "value"), disable_numparse=True),
            tabulate(tensors, ("tensor", "type", "shape", "bytes"), colalign=align if tensors else None),
            f"{len(model)} tensors, {model.nbytes} bytes",
        )
    )


def as_json(model: Model) -> str:
    """One object: "files", "alignment", "metadata" (arrays in full, NaN and infinity as null), "tensors"."""
    content = {
        "files": [str(path) for path in model.paths],
        "alignment": model.alignment,
        "metadata": dict(model.metadata),
        "tensors": [
            {"name": i.name, "type": i.type_name, "shape": i.shape, "offset": i.offset, "nbytes": i.nbytes}
            for i in model.tensors.values()
        ],
    }
    return to_json(content)


def _escaped(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return repr(text)[1:-1]


def _type_name(metadata: Metadata, key: str) -> str:
    kind, element = metadata.value_type(key)
    return kind.name.lower() if element is None else f"{element.name.lower()}[{len(metadata[key])}]"


def _short(value: Any) -> str:
    if isinstance(value, (list, np.ndarray)):
        items = ", ".join(
            str(item) if isinstance(value, np.ndarray) else repr(item) for item in value[:_SHOWN]
        )
        text = f"{items}, ..." if len(value) > _SHOWN else items
    else:
        text = _escaped(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
