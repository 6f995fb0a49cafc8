"""What models are evaluated with, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from .common import a_or_an, count


def several_formats(value: Any) -> list[Any]:
    """An iterable of what may be formats."""
    if not isinstance(value, Iterable):
        raise TypeError(f"formats is {a_or_an(value)}; a format, its name, a mapping, or several are needed")
    return list(value)


def token_vector(value: Any) -> NDArray[np.integer[Any]]:
    """Token ids [n]."""
    ids = np.asarray(value)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        empty = isinstance(value, (list, tuple)) and not value
        given = f"an empty {type(value).__name__}" if empty else f"{ids.ndim}-D {ids.dtype}"
        raise TypeError(f"tokens are a 1-D integer array, not {given}")
    return ids


def chunking(ctx: Any, chunks: Any) -> tuple[int, int | None]:
    """Tokens of a chunk, and how many chunks there are to be at most, or None."""
    return count(ctx, "ctx", 4), None if chunks is None else count(chunks, "chunks")


def require_finite_scores(
    finite: bool, of: str, first_flaw: Callable[[], str | None], advice: str = ""
) -> None:
    """What a model makes, as its scores, are numbers; `first_flaw` finds a tensor that holds others, and
    `advice` is what to do where none does."""
    if finite:
        return
    flaw = first_flaw()
    why = (
        f"its weights are not, but what they make of the text{advice and f': {advice}'}"
        if flaw is None
        else f"tensor {flaw!r} has weights that are NaN or infinite: convert or download the file anew"
    )
    raise ValueError(f"{of} that are NaN or infinite: {why}")


def stored_fields(kind: type[Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a file has of a dataclass, each of its type; where that is a float an integer becomes one."""
    made = dict(stored)
    for name, hint in get_type_hints(kind).items():
        if name not in made:
            continue  # which the class says, if it has no default
        allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if float in allowed and type(made[name]) is int:
            made[name] = float(made[name])
        if type(made[name]) not in [get_origin(each) or each for each in allowed]:
            raise TypeError(f"{name} is {a_or_an(made[name])}, which is not its type")
    return made
