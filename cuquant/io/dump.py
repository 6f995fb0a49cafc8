"""A GGUF model's header, for people and for programs."""

from __future__ import annotations

from ..render import to_json
from .model import Model
from .words import counted, escaped


def as_text(model: Model) -> str:
    """Metadata and tensors as two tables; long values and arrays are cut."""
    from tabulate import tabulate

    tensors = [
        (escaped(i.name), i.type_name, " x ".join(map(str, i.shape)), i.nbytes)
        for i in model.tensors.values()
    ]
    align = ("left", "left", "right", "right")
    return "\n\n".join(
        (
            model.metadata.render(),
            tabulate(tensors, ("tensor", "type", "shape", "bytes"), colalign=align if tensors else None),
            f"{counted(len(model), 'tensor')}, {model.nbytes:,} bytes",
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
