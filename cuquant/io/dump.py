"""What is in a file, for people and for programs: metadata and tensors of a model, or tensors of another
safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .. import check
from ..render import counted, escaped, to_json
from . import safetensors
from .model import Model


def as_text(model: Model) -> str:
    """Metadata and tensors as two tables; long values and arrays are cut."""
    return f"{model.metadata.render()}\n\n{_table(_tensors(model))}"


def as_json(model: Model) -> str:
    """One object: "files", "alignment", "metadata" (arrays in full, NaN and infinity as null), "tensors"."""
    content = {
        "files": [str(path) for path in model.paths],
        "alignment": model.alignment,
        "metadata": dict(model.metadata),
        "tensors": _tensors(model),
    }
    return to_json(content)


def of_safetensors(path: Path, json: bool) -> str | None:
    """What is in a safetensors file that is no model: its tensors as a table, or in a JSON object; None of
    any other file.

    ValueError where it is damaged.
    """
    with path.open("rb") as file:
        if not safetensors.is_begun(file.read(9)):
            return None
    with safetensors.sound(path) as (stream, reader):
        told, header = reader.metadata() or {}, safetensors.header_of(stream)
    content: dict[str, Any] = {"files": [str(path)]}
    if safetensors.KEY in told:
        tensors = [
            {"name": name, "type": _kind(tensor), "shape": tensor.shape, "nbytes": tensor.nbytes}
            for name, tensor in safetensors.load(path, "cpu").items()
        ]
    else:
        tensors = _of_others(header)
        content |= {"metadata": told}
    return to_json(content | {"tensors": tensors}) if json else _table(tensors)


def _kind(tensor: Any) -> str:
    return str(tensor.format) if check.is_quantized(tensor) else str(tensor.dtype.name)


def _of_others(header: safetensors.Header) -> list[dict[str, Any]]:
    """Tensors as the header of a file says."""
    return [
        {
            "name": name,
            "type": info["dtype"],
            "shape": tuple(info["shape"]),
            "nbytes": info["data_offsets"][1] - info["data_offsets"][0],
        }
        for name, info in header.tensors.items()
    ]


def _tensors(model: Model) -> list[dict[str, Any]]:
    return [
        {"name": i.name, "type": i.type_name, "shape": i.shape, "offset": i.offset, "nbytes": i.nbytes}
        for i in model.tensors.values()
    ]


def _table(tensors: list[dict[str, Any]]) -> str:
    """A row for each tensor, and their sum."""
    from tabulate import tabulate

    rows = [(escaped(t["name"]), t["type"], " x ".join(map(str, t["shape"])), t["nbytes"]) for t in tensors]
    align = ("left", "left", "right", "right")
    head = ("tensor", "type", "shape", "bytes")
    table = tabulate(rows, head, colalign=align if rows else None, disable_numparse=True)
    return f"{table}\n\n{counted(len(rows), 'tensor')}, {sum(row[-1] for row in rows):,} bytes"
