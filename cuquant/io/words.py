"""What is said of files to people: what one is that is none of those asked for, and names like one sought."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from .. import check
from ..render import escaped

LFS_POINTER = b"version https://git-lfs"
"""How a Git LFS pointer begins."""


def of_pointer(head: bytes) -> str | None:
    """What a file is that begins so, and what to do, where it is a Git LFS pointer; None of others."""
    if not head.startswith(LFS_POINTER):
        return None
    return (
        "a Git LFS pointer, a small text in the file's place: git lfs pull in its repository fetches the file"
    )


IMPORTANCE = (
    "an importance matrix, not a model: cuquant quantize --imatrix takes it, and quantize_file(importance=)"
)
"""What an importance matrix is that is taken for a model, and what to do."""


def of_importance(head: bytes) -> str | None:
    """What a file is that begins so, and what to do, where it is an importance matrix of llama.cpp's older
    format: a count of entries, and the name of a weight behind its length; None of others."""
    count, length = (int.from_bytes(head[at : at + 4], "little", signed=True) for at in (0, 4))
    name = head[8 : 8 + max(length, 0)]
    return IMPORTANCE if count > 0 and len(name) == length and name.endswith(b".weight") else None


def missing(file: str, kind: str, name: Any, names: Collection[str]) -> KeyError:
    """The error for a name that a file has not, with those near to it, or that hold it."""
    return KeyError(f"{file} has no {kind} {name!r}{_near(str(name), names)}")


def _near(name: str, names: Collection[str]) -> str:
    """A question for names like this one, or else that hold it, or nothing."""
    like = difflib.get_close_matches(name, names, n=3)
    if name and not like:
        like = [each for each in names if name in each][:3]
    near = [escaped(each) for each in like]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def named_like(names: Collection[str], patterns: str | Iterable[str], kind: str, argument: str) -> list[str]:
    """Names that match a shell pattern or one of several; ValueError where one matches none."""
    patterns = check.patterns(patterns, argument)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = _near(pattern, names)
            if pattern and any(fnmatchcase(name, f"*{pattern}*") for name in names):
                hint = f"; patterns match whole names: write {'*' + pattern.strip('*') + '*'!r}"
            if names and not hint:
                hint = f": one that is there is {next(iter(names))!r}"
            raise ValueError(f"no {kind} is named like {pattern!r} ({argument}){hint}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
