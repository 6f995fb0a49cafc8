"""The files of a model: one, or the parts of a split GGUF model."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from ..render import short, told
from .gguf import File, GGUFError, SavedArraysError
from .header import same_value
from .saved import SavedFile

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


def open_parts(path: Path, mapped: ExitStack) -> list[File | SavedFile]:
    """The file, or all files of the split model that it belongs to, in order; `mapped` can close them."""

    def file(path: Path) -> File | SavedFile:
        made: File | SavedFile
        try:
            made = File(path)
        except SavedArraysError:
            made = SavedFile(path)
        mapped.callback(made.close)
        return made

    first = file(path)
    count = first.header.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= 99999:
        raise GGUFError(f"{path}: split.count is {told(count)}, not a number of parts")
    if count in (0, 1):
        return [first]
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise GGUFError(
            f"{path}: one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf"
        )
    names = [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [name.name for name in names if not name.exists()]
    if missing:
        raise GGUFError(
            f"{path}: parts of this split model are missing beside it: {short(', '.join(missing), 200)}"
        )
    first.close()
    parts = [file(name) for name in names]
    _check_parts(parts)
    return parts


def _check_parts(parts: list[File | SavedFile]) -> None:
    """The parts number themselves as they are named, share no tensor name and are complete."""
    seen: set[str] = set()
    for number, part in enumerate(parts):
        meta = part.header.metadata
        own_number, count = meta.get("split.no"), meta.get("split.count")
        if not (same_value(own_number, number) and same_value(count, len(parts))):
            raise GGUFError(
                f"{part.path}: says it is part {told(own_number)} of {told(count)}, but is named as part "
                f"{number} of {len(parts)} (counted from 0)"
            )
        twice = seen & part.header.tensors.keys()
        if twice:
            raise GGUFError(f"{part.path}: tensor {min(twice)!r} is in an earlier part too")
        seen |= part.header.tensors.keys()
    total = parts[0].header.metadata.get("split.tensors.count", len(seen))
    if not same_value(total, len(seen)):
        raise GGUFError(f"{parts[0].path}: {told(total)} tensors are announced, the parts hold {len(seen)}")
