"""The tensors of a checkpoint in safetensors files, one or several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .safetensors import why_unreadable
from .words import escaped

_INDEX = ".safetensors.index.json"
"""How the name of a file ends that says which file has which tensor."""


class Tensors(Mapping[str, Any]):
    """NumPy arrays by name, read from the open files when asked for."""

    def __init__(self, files: Mapping[Path, Any]) -> None:
        self.files = files
        self._home: dict[str, Path] = {}
        for path, file in files.items():
            for name in file.keys():  # noqa: SIM118
                if name in self._home:
                    raise ValueError(f"{path}: tensor {name!r} is in {self._home[name].name}, too")
                self._home[name] = path

    def __getitem__(self, name: str) -> Any:
        path = self._home[name]
        with _readable(path):
            try:
                return self.files[path].get_tensor(name)
            except (AttributeError, TypeError):
                kind = self.files[path].get_slice(name).get_dtype()
                raise TypeError(f"{self.named(name)} has the type {kind}, which NumPy lacks") from None

    def __contains__(self, name: object) -> bool:
        return name in self._home  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def named(self, name: str) -> str:
        """A tensor of errors: its file, and its name."""
        return f"{self._home[name]}: {escaped(name)}"


@contextmanager
def opened(path: Path) -> Iterator[Tensors]:
    """Those of a file, or of all files of a checkpoint by its folder or its index.

    ValueError where there is none, where one cannot be read, or where two have tensors of one name.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        files = {}
        for each in _files(path):
            with _readable(each):
                files[each] = stack.enter_context(safe_open(each, framework="numpy"))
        yield Tensors(files)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Around what the safetensors package reads."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        problem = why_unreadable(path, error)
        raise ValueError(f"{path} is no safetensors file that can be read: {problem}") from None


def _files(path: Path) -> list[Path]:
    if path.name.endswith(_INDEX):
        return _listed(path)
    if not path.is_dir():
        return [path]
    indices = sorted(path.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        raise ValueError(f"{path} has {len(indices)} files *{_INDEX}: pass the one of the checkpoint")
    files = _listed(indices[0]) if indices else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} is a folder without safetensors files")
    return files


def _listed(index: Path) -> list[Path]:
    """The files beside an index that it names."""
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index} is no index of a checkpoint: it has no weight_map of files") from None
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index}: {min(outside)!r} is no file beside it")
    missing = [name for name in sorted(names) if not index.with_name(name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        listed = ", ".join(map(escaped, missing[:3]))
        raise ValueError(f"{index}: files of this checkpoint are missing beside it: {listed}{more}")
    return [index.with_name(name) for name in sorted(names)]
