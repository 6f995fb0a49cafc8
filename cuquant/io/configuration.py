"""What the configuration beside a checkpoint says of its weights: GPTQ's version, and sizes of groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import check

_FILES = {"quantize_config.json": None, "quant_config.json": None, "config.json": "quantization_config"}
"""Where a configuration is (GPTQ's, AWQ's, the model's), and under which key of the file."""
_KEYS = ("checkpoint_format", "format")
"""Keys under which it names the format; GPTQModel writes both, and means to leave the first one out."""
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_GROUP_KEYS = ("group_size", "q_group_size")
"""Keys under which it states the size of groups; the latter is AutoAWQ's."""
_OF_SOME = ("dynamic", "extra_config")
"""Under which keys GPTQModel and AutoRound have what is other of some weights."""


def gptq_version(path: Path, version: int | None) -> int | None:
    """The version that is asked for, or else what the configuration beside a checkpoint says, if it does.

    ValueError where the configuration says another, files of it disagree, or one is no JSON; OSError where
    one cannot be read. What is asked for goes without files that cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    stated: dict[Path, str] = {}
    for name, key in _FILES.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            said = _format_in(file, key)
        except OSError:
            if version is None:
                raise
        except (ValueError, RecursionError):
            if version is None:
                raise ValueError(
                    f"{file} is no JSON, and may say of which version GPTQ weights are: pass version=1 or "
                    "version=2"
                ) from None
        else:
            if said is not None:
                stated[file] = said
    return check.stated_version(version, {file: (said, _VERSIONS[said]) for file, said in stated.items()})


def group_sizes(path: Path) -> dict[str, set[int]]:
    """Sizes of groups of int4 weights, -1 for a row, by the files beside a checkpoint that state any, in
    words of errors.

    A weight has one of each file's. A file that cannot be read, or is no JSON, states none.
    """
    folder = path if path.is_dir() else path.parent
    stated: dict[str, set[int]] = {}
    for name, key in _FILES.items():
        file = folder / name
        sizes: set[int] = set()
        with suppress(OSError, ValueError, RecursionError):
            if file.is_file():
                sizes = {size for scheme in _schemes(_held(file, key)) if (size := _group_in(scheme))}
        if sizes:
            listed = " or ".join("a row" if size == -1 else str(size) for size in sorted(sizes))
            stated[f"{file} says groups of {listed}"] = sizes
    return stated


def _held(file: Path, key: str | None) -> dict[str, Any]:
    """The configuration in a file, of nothing where there is none."""
    held: Any = json.loads(file.read_bytes())
    if key is not None and isinstance(held, dict):
        held = held.get(key)
    return held if isinstance(held, dict) else {}


def _schemes(held: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A configuration, and the parts of it that are of some weights."""
    parts: list[Any] = [held]
    for key in _OF_SOME:
        parts += _values(held.get(key))
    parts += [part.get("weights") for part in _values(held.get("config_groups")) if isinstance(part, dict)]
    return (part for part in parts if isinstance(part, dict))


def _values(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else []


def _group_in(scheme: dict[str, Any]) -> int | None:
    """The size of groups that one states; of compressed-tensors a strategy says that a row is one."""
    if scheme.get("strategy") == "channel":
        return -1
    sizes = (scheme.get(key) for key in _GROUP_KEYS)
    return next((size for size in sizes if type(size) is int and (size == -1 or size > 0)), None)


def _format_in(file: Path, key: str | None) -> str | None:
    """The GPTQ format that a file names; None where it names none, or another's."""
    held = _held(file, key)
    names = (held[key].lower() for key in _KEYS if isinstance(held.get(key), str))
    return next((name for name in names if name in _VERSIONS), None)
