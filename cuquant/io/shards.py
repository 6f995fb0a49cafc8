"""The tensors of a checkpoint in safetensors files, one or several."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..render import escaped
from .safetensors import SMALL_FLOATS, Header, header_of, small_floats, sound

_INDEX = ".safetensors.index.json"
"""How the name of a file ends that says which file has which tensor."""
_PART = re.compile(r"(?P<stem>.*)-\d+-of-(?P<count>\d+)\.safetensors")
"""A numbered file of a checkpoint, by its name."""


class Tensors(Mapping[str, Any]):
    """NumPy arrays by name, read from the open files when asked for."""

    def __init__(self, files: Mapping[Path, Any], streams: Mapping[Path, BinaryIO]) -> None:
        self.files, self._streams = files, streams
        self._home: dict[str, Path] = {}
        self._headers: dict[Path, Header] = {}
        for path, file in files.items():
            for name in file.keys():  # noqa: SIM118
                if name in self._home:
                    raise ValueError(f"{path}: tensor {name!r} is in {self._home[name].name}, too")
                self._home[name] = path

    def __getitem__(self, name: str) -> Any:
        path = self._home[name]
        if self.type(name) in SMALL_FLOATS:
            if path not in self._headers:
                self._headers[path] = header_of(self._streams[path])
            return small_floats(self._streams[path], name, self._headers[path])
        from safetensors import SafetensorError

        try:
            return self.files[path].get_tensor(name)
        except (AttributeError, TypeError, SafetensorError):
            kind = self.type(name)
            raise TypeError(f"{self.named(name)} has the type {kind}, which NumPy lacks") from None

    def type(self, name: str) -> str:
        """As the file calls it, "F8_E4M3"; the tensor is not read."""
        kind: str = self.files[self._home[name]].get_slice(name).get_dtype()
        return kind

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor is not read."""
        return tuple(self.files[self._home[name]].get_slice(name).get_shape())

    def __contains__(self, name: object) -> bool:
        return name in self._home  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def named(self, name: str) -> str:
        """A tensor of errors: its file, and its name."""
        return f"{self._home[name]}: {escaped(name)}"


def is_part(path: Path) -> bool:
    """Whether a file is one of several of a checkpoint, by its name; one of one is the whole checkpoint."""
    match = _PART.fullmatch(path.name)
    return match is not None and int(match["count"]) > 1


@contextmanager
def opened(path: Path) -> Iterator[Tensors]:
    """Those of a file, or of all files of a checkpoint by its folder or its index.

    ValueError where there is none, where one is missing, cannot be read or lacks what the index says it has,
    or where two have tensors of one name.
    """
    with ExitStack() as stack:
        files, streams = {}, {}
        for each, listed in _files(path).items():
            streams[each], files[each] = stack.enter_context(sound(each))
            lacking = listed - {*files[each].keys()}
            if lacking:
                raise ValueError(f"{each} has no tensor {min(lacking)!r}, which the index says it has")
        yield Tensors(files, streams)


def _files(path: Path) -> dict[Path, set[str]]:
    """The files, and the tensors that each must have."""
    if path.name.endswith(_INDEX):
        return _listed(path)
    if not path.is_dir():
        return {path: set()}
    indices = sorted(path.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        raise ValueError(f"{path} has {len(indices)} files *{_INDEX}: pass the one of the checkpoint")
    files = sorted(path.glob("*.safetensors"))
    if not indices:
        _check_whole(path, files)
    listed = _listed(indices[0]) if indices else {file: set() for file in files}
    if not listed:
        raise ValueError(f"{path} is a folder without safetensors files")
    return listed


def _check_whole(folder: Path, files: list[Path]) -> None:
    """ValueError where names say that there are more files: nothing else does where there is no index."""
    parts = [match for file in files if (match := _PART.fullmatch(file.name))]
    for (stem, count), found in Counter(match.group("stem", "count") for match in parts).items():
        if found < int(count):
            which = f"{found} of the {int(count)} files {stem}-*-of-{count}.safetensors"
            raise ValueError(f"{folder} has {escaped(which)}: files of this checkpoint are missing")


def _listed(index: Path) -> dict[Path, set[str]]:
    """The files beside an index that it names, and their tensors."""
    names: dict[str, set[str]] = {}
    try:
        for tensor, name in json.loads(index.read_bytes())["weight_map"].items():
            names.setdefault(str(name), set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index} is no index of a checkpoint: it has no weight_map of files") from None
    outside = [name for name in names if not name or Path(name).name != name]
    if outside:
        raise ValueError(f"{index}: {min(outside)!r} is no file beside it")
    missing = [name for name in sorted(names) if not index.with_name(name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        listed = ", ".join(map(escaped, missing[:3]))
        raise ValueError(f"{index}: files of this checkpoint are missing beside it: {listed}{more}")
    return {index.with_name(name): names[name] for name in sorted(names)}
