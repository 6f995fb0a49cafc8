"""What the configuration beside a checkpoint says of its GPTQ weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import check

_FILES = {"quantize_config.json": None, "config.json": "quantization_config"}
"""Where a configuration is, and under which key of the file."""
_KEYS = ("checkpoint_format", "format")
"""What it calls the format; GPTQModel writes both, and means to leave the first one out."""
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


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


def _format_in(file: Path, key: str | None) -> str | None:
    """The GPTQ format that a file names; None where it names none, or another's."""
    held: Any = json.loads(file.read_bytes())
    if key is not None and isinstance(held, dict):
        held = held.get(key)
    if not isinstance(held, dict):
        return None
    names = (held[key].lower() for key in _KEYS if isinstance(held.get(key), str))
    return next((name for name in names if name in _VERSIONS), None)
