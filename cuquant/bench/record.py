"""A benchmark's record: JSON on disk, complete after every cell, taken up again where it stopped."""

from __future__ import annotations

import hashlib
import html
import json
import os
import platform
import subprocess
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, device, info
from ..cuda import jit, sources
from ..io.atomic import check_rewrite, rewrite
from ..render import escaped, missing, rows_to_csv, table_format_of, to_pandas
from .ceilings import Ceilings, measured, told_by
from .peers import PEERS

Floor = Callable[..., float | None]
"""Microseconds of so many bytes, and so many operations: `Record.floor_us`."""


def environment(packages: Iterable[str] = (), by_tuned: bool = True) -> dict[str, Any]:
    """The GPU, the versions that matter (of other packages too; of tuned products, if plans go by them), and
    the commit of the sources that run."""
    cupy, tuned = device.cupy(), jit.gpu().tuned if by_tuned else None
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
            **{package: version(package) for package in packages},
            **({"tuned products": tuned.name} if tuned else {}),
        },
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of a checkout (CUQUANT_COMMIT where git is not at hand); None for an installed package, also
    one within another repository.

    Where the checkout's sources have been changed since, a digest of them and "-dirty" are behind it: what
    others were measured with is then another commit.
    """
    given = os.environ.get("CUQUANT_COMMIT")
    if given:
        return given
    root = sources.folder().parent
    try:
        if not os.path.samefile(_git(root, "rev-parse", "--show-toplevel"), root):
            return None
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "kernels", "cuquant")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-{_digest(root)}-dirty" if changed else head


def _git(root: Path, *arguments: str) -> str:
    """Output of a git command in a checkout."""
    command = ("git", "-C", str(root), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _digest(root: Path) -> str:
    """Short hash of the sources in a checkout."""
    digest = hashlib.sha256()
    for path in sorted([*root.glob("kernels/**/*.cu*"), *root.glob("cuquant/**/*.py")]):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def short_commit(commit: str) -> str:
    """First 12 digits of a commit, and all that tells that it is not the commit alone."""
    head, *more = commit.split("-")
    return "-".join([head[:12], *more])


def plotter() -> Callable[[Record], Any]:
    """What makes the figure of a record; ImportError with advice where matplotlib is missing."""
    try:
        from .plot import figure
    except ImportError as error:
        raise missing("a plot", "matplotlib", error) from None
    return figure


@dataclass
class Record:
    """Cells with the environment that they were measured in.

    With a `path`, every added cell is on disk before the next is measured (temporary sibling, then rename),
    and a record of the same device, versions and commit that is there already is continued.
    """

    path: Path | None
    header: dict[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list, repr=False)
    verdict: str | None = None
    """What the cells say, where a benchmark sums them up: a sentence a line."""
    _text: str | None = field(default=None, repr=False, compare=False)
    """What the file held when it was last read or written."""

    @classmethod
    def start(cls, path: Path | None, packages: Iterable[str] = (), by_tuned: bool = True) -> Record:
        """Open a record for this environment; ValueError where the file holds another's, OSError where it
        could not be written."""
        header = environment(packages, by_tuned)
        if path is not None:
            check_rewrite(path)  # before hours of measuring
        if path is None or not path.exists():
            return cls(path, header)
        record = cls.read(path)
        if {name: told for name, told in record.header.items() if name != "ceilings"} != header:
            raise ValueError(
                f"{path} is a record of another device, version, tuning or commit: remove it, or name another"
            )
        return record

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Record:
        """A record as it is on disk, wherever it was measured; ValueError where the file is none."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            header = json.loads(text)
            cells, said = header.pop("cells"), header.pop("verdict", None)
            typed = isinstance(cells, list) and isinstance(said, (str, type(None)))
            typed = typed and all(isinstance(header[name], types) for name, types in _HEADER.items())
            rates = told_by(header)
            typed = typed and (rates is None or all(0 < rate < _MOST for rate in rates))
            if not (typed and all(map(_is_whole, cells))):
                raise KeyError
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ValueError(f"{path} is not a record of cuquant bench") from None
        return cls(path, header, cells, said, text)

    @property
    def op(self) -> str:
        """What the first cell is of: "matmul", "moe", "attention", "append", "dequant", "tune", "weights" or
        "host"."""
        return str(self.cells[0]["op"]) if self.cells else "matmul"

    @property
    def origin(self) -> str:
        """The GPU, the commit and the versions that the cells were measured with, in a line."""
        commit = self.header["commit"]
        source = "an installed package" if commit is None else f"commit {short_commit(commit)}"
        versions = [
            f"{_TITLES.get(name, name)} {info.cuda_version(found) if isinstance(found, int) else found}"
            for name, found in self.header["versions"].items()
        ]
        told = self.ceilings
        rates = "" if told is None else f"; floors by {told.read_gbps:.0f} GB/s, {told.tflops:.0f} TFLOP/s"
        return escaped(f"{self.header['device']}, {source} ({', '.join(versions)})") + rates

    @property
    def ceilings(self) -> Ceilings | None:
        """Rates of the GPU that the floors go by; None where they are not known."""
        return told_by(self.header)

    def floor_us(self, moved: float, operations: float = 0) -> float | None:
        """The least time of a launch that moves so many bytes and computes so much, on this GPU: where its
        ceilings are not known yet, they are measured, and the record has them from then on. None where they
        cannot be."""
        if "ceilings" not in self.header:
            found = self.ceilings or measured()
            if found is None:
                return None
            self.header["ceilings"] = {name: rounded(rate) for name, rate in found._asdict().items()}
        return Ceilings(**self.header["ceilings"]).floor_us(moved, operations)

    def only(self, **wanted: Collection[Any] | None) -> Record:
        """The cells whose values are among those wanted (None: all), ``only(format=["q4_0"], M=[1, 16])``.

        `shape` stands for (N, K), `head_layout` for (heads, kv_heads), `M` for the `batch` of sequences too.
        Cells without such a value are left out. ValueError where none is left, with the values that there
        are.
        """
        kept = [
            cell
            for cell in self.cells
            for values in [cell | _aliases(cell)]
            if all(allowed is None or values.get(name) in allowed for name, allowed in wanted.items())
        ]
        if not self.cells:
            raise ValueError("the record has no cells")
        if not kept:
            held = [self._values(name) for name, allowed in wanted.items() if allowed is not None]
            raise ValueError(f"the record has no such cells; it has {'; '.join(held)}")
        return Record(None, self.header, kept, self.verdict if len(kept) == len(self.cells) else None)

    def lacking(self, **wanted: Collection[Any] | None) -> str:
        """The wanted values, as in `only`, that no cell has: "no format q6_k; no M 3, 5"."""
        lost = {
            name: [value for value in allowed if value not in held]
            for name, allowed in wanted.items()
            if allowed is not None
            for held in [self._held(name)]
        }
        return "; ".join(f"no {name} {_listed(name, values)}" for name, values in lost.items() if values)

    def _held(self, name: str) -> list[Any]:
        """Values that cells have under a name."""
        values = dict.fromkeys((cell | _aliases(cell)).get(name) for cell in self.cells)
        return [value for value in values if value not in (None, (None, None))]

    def _values(self, name: str) -> str:
        """Values that cells have under a name, in words."""
        values = self._held(name)
        return f"{name} {_listed(name, values)}" if values else f"no {name}"

    def __contains__(self, key: dict[str, Any]) -> bool:
        return any(_has(cell, key) for cell in self.cells)

    def add(self, cell: Any) -> None:
        """Append a cell (a dataclass) and save."""
        self.cells.append(asdict(cell))
        self._save()

    def forget(self, key: dict[str, Any]) -> None:
        """Leave out the cells of a key, from when the next one is saved on."""
        self.cells = [cell for cell in self.cells if not _has(cell, key)]

    def conclude(self, verdict: str) -> None:
        """Say what the cells show, and save."""
        self.verdict = verdict
        self._save()

    def _save(self) -> None:
        if self.path is None:
            return
        text = self.to_json() + "\n"
        rewrite(self.path, partial(self._checked, self.path, text))
        self._text = text

    def _checked(self, path: Path, text: str) -> str:
        """The text, where the file is still as it was last read or written."""
        there = path.read_text(encoding="utf-8") if path.exists() else None
        if there is not None and there != self._text:
            raise OSError(
                f"{path} has been changed by another process since: what is there is kept, and the "
                "cell measured last is lost"
            )
        return text

    def to_json(self) -> str:
        """The whole record, a cell a line."""
        said = {} if self.verdict is None else {"verdict": self.verdict}
        head = json.dumps(self.header | said, indent=1)[:-2]
        lines = ",\n".join("  " + json.dumps(cell) for cell in self.cells)
        return f'{head},\n "cells": [\n{lines}\n ]\n}}'

    def plot(self) -> Any:
        """A matplotlib Figure of products: for each shape a roofline, and below it times over the floor.

        ``record.plot().savefig("bench.svg")``; a notebook shows it. matplotlib comes with the notebook extra:
        ImportError without. Cells of anything else are left out: ValueError for a record without products.
        """
        return plotter()(self)

    def to_pandas(self) -> Any:
        """A pandas DataFrame of the cells and their ratios; pandas comes with the notebook extra."""
        return to_pandas(*self._with_ratios())

    def _with_ratios(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The cells, each with its ratios, and all that any of them has."""
        columns = list(dict.fromkeys(name for cell in self.cells for name in cell))
        titles = [title for name, title in _RATIOS.items() if name in columns]
        return [cell | _ratios(cell) for cell in self.cells], columns + titles

    def _repr_html_(self) -> str:
        return self.render("html")

    def render(self, style: str) -> str:
        """The cells with their ratios as a "table", as "md", "html" or "csv"; as "json" the record itself."""
        if style == "json":
            return self.to_json()
        cells, columns = self._with_ratios()
        if style == "csv":
            return rows_to_csv(cells, columns)
        table_format = table_format_of(style, "csv", "json")
        from tabulate import tabulate

        shown = [name for name in columns if any(cell.get(name) is not None for cell in cells)]
        ratios = set(_RATIOS.values())
        rows = [
            [
                f"{cell[name]:.2f}" if name in ratios and name in cell else _printable(cell.get(name))
                for name in shown
            ]
            for cell in cells
        ]
        table = tabulate(rows, map(escaped, shown), tablefmt=table_format, disable_numparse=True)
        return table if self.verdict is None else f"{table}\n\n{_paragraphs(self.verdict, style)}"


def rounded(value: float | None) -> Any:
    """A number rounded to the five digits that a record has."""
    return None if value is None else float(f"{value:.5g}")


def _paragraphs(text: str, style: str) -> str:
    pattern = {"md": "- {}", "html": "<p>{}</p>"}.get(style, "{}")
    lines = (escaped(line) for line in text.splitlines())
    return "\n".join(pattern.format(html.escape(line) if style == "html" else line) for line in lines)


def _printable(value: Any) -> Any:
    """A value of a cell, as a terminal may have it."""
    return escaped(value) if isinstance(value, str) else value


def _listed(name: str, values: Iterable[Any]) -> str:
    """Values that cells have under a name, as people write them."""
    between = "/" if name == "head_layout" else "x"
    return ", ".join(between.join(map(str, v)) if isinstance(v, tuple) else str(v) for v in values)


def _aliases(cell: dict[str, Any]) -> dict[str, Any]:
    return {
        "M": cell.get("M", cell.get("batch")),
        "shape": (cell.get("N"), cell.get("K")),
        "head_layout": (cell.get("heads"), cell.get("kv_heads")),
        "queries": cell.get("queries", 1 if cell.get("op") == "attention" else None),
        "lengths": cell.get("lengths", "equal" if cell.get("op") == "attention" else None),
    }


_TITLES = {
    "cupy": "CuPy",
    "cuda_runtime": "CUDA runtime",
    "cuda_driver": "CUDA driver",
    "nvrtc": "NVRTC",
    "numpy": "NumPy",
    "python": "Python",
}
_HEADER: dict[str, tuple[type, ...]] = {
    "device": (str,),
    "versions": (dict,),
    "commit": (str, type(None)),
}
"""What every record has beside its cells."""
_PRODUCT = {"format", "activation", "M", "N", "K", "us", "floor_us", "cublas_us", "gbps", "tflops"}
_KEYS = {
    "matmul": _PRODUCT,
    "moe": _PRODUCT | {"experts", "top_k"},
    "attention": {"bits", "batch", "heads", "kv_heads", "context", "us", "floor_us", "sdpa_us", "gbps"},
    "append": {"bits", "batch", "heads", "kv_heads", "tokens", "us", "floor_us", "gbps"},
    "dequant": {"where", "codes", "method", "M", "N", "K", "us", "values_per_ns", "instructions"},
    "tune": {"format", "M", "N", "K", "us", "usual_us", "tried", "core", "tile"},
    "weights": {"work", "format", "N", "K", "us", "floor_us", "gbps"},
    "host": {"work", "format", "activation", "bits", "N", "K", "us"},
}
"""What cells have, by what was measured."""
_PRODUCTS = ("matmul", "moe")
"""Operations whose cells are of products."""
_SIZES = ("M", "N", "K", "batch", "heads", "kv_heads", "context", "queries", "tokens", "experts", "top_k")
_RATES = ("gbps", "tflops")
_MOST = 1e300
"""Numbers of a record are smaller: JSON has integers that no float holds."""
_RATIOS = {
    "floor_us": "time / floor",
    "cublas_us": "speed / cuBLAS",
    "sdpa_us": "speed / SDPA",
    "flashinfer_us": "speed / FlashInfer",
    "usual_us": "speed / usual",
} | {peer.key: f"speed / {name}" for name, peer in PEERS.items()}
"""Times that a cell's own is compared with, and the ratio's title."""


def _has(cell: dict[str, Any], key: dict[str, Any]) -> bool:
    values = _aliases(cell) | cell
    return all(values.get(name) == value for name, value in key.items())


def _is_whole(cell: dict[str, Any]) -> bool:
    """Whether a cell has what it must, and numbers that ratios and plots can be made of; TypeError of what is
    none."""
    others = (cell.get(name) for name in (*_RATIOS, *_RATES))
    sizes = [cell.get(name) for name in _SIZES]
    return (
        cell.keys() >= _KEYS[cell["op"]]
        and not any(isinstance(value, (list, dict)) for value in cell.values())
        and all(abs(value) < _MOST for value in cell.values() if isinstance(value, (int, float)))
        and cell["us"] > 0
        and all(other is None or other > 0 for other in others)
        and all(size is None or (type(size) is int and size > 0) for size in sizes)
        and (cell["op"] not in _PRODUCTS or all(cell[name] for name in ("M", "N", "K")))
        and (cell["op"] not in _PRODUCTS or cell["gbps"] is None or cell["tflops"] is not None)
    )


def _ratios(cell: dict[str, Any]) -> dict[str, float]:
    """A cell's time over the floor; the others' times over its own: how many times as fast it is."""
    times = ((name, title, cell.get(name)) for name, title in _RATIOS.items())
    return {
        title: cell["us"] / other if name == "floor_us" else other / cell["us"]
        for name, title, other in times
        if other
    }
