"""Formats as JSON describes them: by name, or by the parameters of those that have some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .base import Format, get, names
from .exl3 import Exl3
from .int4 import Int4
from .kbit import KBit
from .nvfp4 import NvFp4
from .trellis import Trellis

FAMILIES: dict[str, tuple[type[Format], tuple[str, ...]]] = {
    "exl3": (Exl3, ("bits", "generator")),
    "int4": (Int4, ("group_size", "symmetric")),
    "kbit": (KBit, ("bits", "codebook", "scale", "absmax")),
    "nvfp4": (NvFp4, ("scale",)),
    "trellis": (Trellis, ("bits", "group_size", "grid")),
}
"""Classes of formats with parameters, which are arguments of the class and attributes of the format; a file
says the first, if any."""


def describe(fmt: Format) -> dict[str, Any]:
    """What a file says of a format, for `described`: ``{"name": "q4_0"}``, or all parameters too.

    A codebook is described by its entries, so that a file can be read without knowing where they come from.

    Raises
    ------
    ValueError
        The format has no known name and is of no class that has parameters: it could not be read back.
    """
    for family, (kind, given) in FAMILIES.items():
        if type(fmt) is kind:
            return {"name": family} | {name: _as_json(getattr(fmt, name)) for name in given}
    return {"name": get(fmt.name).name}


def described(description: Mapping[str, Any]) -> Format:
    """The format that `describe` described.

    Raises
    ------
    TypeError, ValueError
        There is no such format.
    """
    if not isinstance(description, Mapping):
        raise TypeError(f"a format is described by a mapping, not by {description!r:.80}")
    parameters = {key: value for key, value in description.items() if key != "name"}
    name = description.get("name")
    if isinstance(name, str) and name in FAMILIES and (parameters or name not in names()):
        kind, given = FAMILIES[name]
        unknown = parameters.keys() - {*given}
        if unknown or given[0] not in parameters:
            lack = (
                f"has no parameter {min(unknown)!r:.80}" if unknown else f"needs the parameter {given[0]!r}"
            )
            raise ValueError(f"{name!r} {lack}; its own are {', '.join(given)}")
        return kind(**parameters)
    if parameters:
        raise ValueError(f"{name!r} is no format with parameters; known are {', '.join(FAMILIES)}")
    return get(name)  # type: ignore[arg-type]


def _as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
