"""A benchmark's record: JSON on disk, complete after every cell, taken up again where it stopped."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, device, sources
from ..render import TABLE_STYLES, rows_to_csv


def environment() -> dict[str, Any]:
    """The GPU, the versions that matter, and the commit of the sources that run."""
    cupy = device.cupy()
    runtime = cupy.cuda.runtime
    return {
        "device": device.name("cuda"),
        "versions": {
            "cuquant": __version__,
            "cupy": cupy.__version__,
            "cuda_runtime": runtime.runtimeGetVersion(),
            "cuda_driver": runtime.driverGetVersion(),
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of a checkout (CUQUANT_COMMIT where git is not at hand); None for an installed package."""
    given = os.environ.get("CUQUANT_COMMIT")
    if given:
        return given
    command = ("git", "-C", str(sources.folder()), "rev-parse", "HEAD")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass
class Record:
    """Cells with the environment that they were measured in.

    With a `path`, every added cell is on disk before the next is measured (temporary sibling, then rename),
    and a record of the same device, versions and commit that is there already is continued.
    """

    path: Path | None
    header: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, path: Path | None) -> Record:
        """Open a record for this environment; ValueError where the file holds another's."""
        header = environment()
        record = cls(path, header)
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            record.cells = found.pop("cells")
            if found != header:
                raise ValueError(
                    f"{path} is a record of another device, version or commit: remove it, or name another"
                )
        return record

    def __contains__(self, key: dict[str, Any]) -> bool:
        return any(all(cell[name] == value for name, value in key.items()) for cell in self.cells)

    def add(self, cell: Any) -> None:
        """Append a cell (a dataclass) and save."""
        self.cells.append(asdict(cell))
        if self.path is not None:
            temporary = self.path.with_name(f".{self.path.name}.part")
            temporary.write_text(self.to_json() + "\n", encoding="utf-8")
            os.replace(temporary, self.path)

    def to_json(self) -> str:
        """The whole record, a cell a line."""
        head = json.dumps(self.header, indent=1)[:-2]
        lines = ",\n".join("  " + json.dumps(cell) for cell in self.cells)
        return f'{head},\n "cells": [\n{lines}\n ]\n}}'

    def render(self, style: str) -> str:
        """The cells as a "table", as "md", "csv" or "json"; tables add the ratios."""
        if style == "json":
            return self.to_json()
        columns = list(self.cells[0]) if self.cells else []
        if style == "csv":
            return rows_to_csv(self.cells, columns)
        from tabulate import tabulate

        rows = [
            cell
            | {
                "x floor": _ratio(cell["us"], cell["floor_us"]),
                "x cuBLAS": _ratio(cell["cublas_us"], cell["us"]),
            }
            for cell in self.cells
        ]
        return tabulate(rows, "keys", tablefmt=TABLE_STYLES[style], disable_numparse=True)


def _ratio(a: float, b: float | None) -> str:
    return "" if b is None else f"{a / b:.2f}"
