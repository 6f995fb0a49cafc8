"""The tensors of a checkpoint in safetensors files, one or several."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
        """Type of a tensor as the file calls it, "F8_E4M3"; the tensor is not read."""
        kind: str = self.files[self._home[name]].get_slice(name).get_dtype()
        return kind

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read."""
        return tuple(self.files[self._home[name]].get_slice(name).get_shape())

    def __contains__(self, name: object) -> bool:
        return name in self._home  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def named(self, name: str) -> str:
        """A tensor as errors name it: its file, and its name."""
        return f"{self._home[name]}: {escaped(name)}"


class Others(NamedTuple):
    """What is known of the other files of a checkpoint."""

    tensors: set[str]
    """Names of the tensors that the other files have, those of the file itself maybe among them."""
    are_all: bool
    """Whether the other files have no more tensors than these."""


def others(path: Path) -> Others | None:
    """What is known of the other files of a checkpoint of which a file is one of several; None of what is a
    whole one.

    By an index beside the file that lists it; without one by the headers of the files beside it that are
    numbered as it is. An index that is none says nothing, nor does a file that cannot be read.
    """
    if path.is_dir() or path.name.endswith(_INDEX):
        return None
    beside: list[str] = []
    with suppress(OSError):  # a folder may be one whose files can be read, but not listed
        beside = sorted(each.name for each in path.parent.iterdir())
    own = _PART.fullmatch(path.name)
    count = 1 if own is None else int(own["count"])  # one of one is whole
    homes: dict[str, str] = {}
    for name in beside:
        if name.endswith(_INDEX):
            with suppress(OSError, ValueError):
                listed = _weight_map(path.with_name(name))
                homes |= listed if path.name in listed.values() else {}
    if own is not None and count > 1 and not homes:
        return _numbered_like(path, own, beside)
    return Others({*homes}, True) if count > 1 or {*homes.values()} - {path.name} else None


def _numbered_like(path: Path, own: re.Match[str], beside: list[str]) -> Others:
    """What the other files of a numbered one have, as far as they are there."""
    tensors: set[str] = set()
    found = 1
    for name in beside:
        other = _PART.fullmatch(name)
        if other is None or name == path.name or other.group("stem", "count") != own.group("stem", "count"):
            continue
        with suppress(OSError, ValueError), sound(path.with_name(name)) as (_, reader):
            tensors.update(reader.keys())
            found += 1
    return Others(tensors, found >= int(own["count"]))


@contextmanager
def opened(path: Path) -> Iterator[Tensors]:
    """Open the tensors of a file, or of all files of a checkpoint by its folder or its index.

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
    for tensor, name in _weight_map(index).items():
        names.setdefault(name, set()).add(tensor)
    outside = [name for name in names if not name or Path(name).name != name]
    if outside:
        raise ValueError(f"{index}: {min(outside)!r} is no file beside it")
    missing = [name for name in sorted(names) if not index.with_name(name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        listed = ", ".join(map(escaped, missing[:3]))
        raise ValueError(f"{index}: files of this checkpoint are missing beside it: {listed}{more}")
    return {index.with_name(name): names[name] for name in sorted(names)}


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says it; ValueError where it is none."""
    try:
        homes = json.loads(index.read_bytes())["weight_map"]
        return {tensor: str(name) for tensor, name in homes.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index} is no index of a checkpoint: it has no weight_map of files") from None
