"""Tiles by measurement: every launch that may be a product's fastest, and which of them was.

`cuquant bench --tune` times the candidates on a GPU and keeps, for each product, what tells the fastest from
the others: the constants that its kernel is compiled with. Plans take the launch of that problem which has
them. So a file, whatever is in it, can make a product slower, but never wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..formats.kernels import kernels_of
from . import decode_plain, mma_core, wgmma_timed
from .cores import DECODE_BATCH, Core, Gemm, Problem

MOST = 8
"""Candidates of a core."""
_LEAST_BATCH = 5
"""Batch rows from which on other cores than decode are candidates: for fewer they are the faster one for very
large weights alone, which plans know."""
_VERSION = 4

Mark = tuple[tuple[tuple[str, int], ...], bool]
"""The constants of a kernel, and whether blocks share out the last tiles."""


class ProblemKind(NamedTuple):
    """Problems that one launch is kept for: of more than 16 batch rows all that have the same next power of
    two."""

    format: str
    block_bytes: int
    m: int
    n: int
    k: int
    matrices: int

    @classmethod
    def of(cls, problem: Problem) -> ProblemKind:
        fmt, m, n, k, _, matrices = problem[:6]
        return cls(kernels_of(fmt).header, fmt.block_bytes, rows_of(m), n, k, matrices)


def rows_of(m: int) -> int:
    """Batch rows that stand for so many."""
    return m if m <= DECODE_BATCH else 1 << (m - 1).bit_length()


class NewerVersion(ValueError):
    """A file of tuned products that a later version of this library has written."""


class Tuned:
    """The fastest launches that were measured on one GPU, by kinds of problems."""

    def __init__(self, marks: dict[ProblemKind, Mark] | None = None) -> None:
        self._marks = dict(marks or {})

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def name(self) -> str:
        """How many products are tuned, and what tells these from others."""
        return f"{len(self)} ({hashlib.sha256(self.to_json().encode()).hexdigest()[:8]})"

    def __contains__(self, kind: ProblemKind) -> bool:
        return kind in self._marks

    def with_one(self, kind: ProblemKind, gemm: Gemm | None) -> Tuned:
        """The tuned launches with this one in the place of the kind's former one; None: without it."""
        others = {known: held for known, held in self._marks.items() if known != kind}
        return Tuned(others if gemm is None else others | {kind: mark(gemm)})

    def choice(self, problem: Problem) -> Gemm | None:
        """The launch that was fastest for such a product; None where nobody knows."""
        wanted = self._marks.get(ProblemKind.of(problem))
        if wanted is None:
            return None
        core = dict(wanted[0]).get("CORE")
        found = _variants(problem, core)
        return next((gemm for gemm in found if mark(gemm) == wanted), None)

    def to_json(self) -> str:
        """A kind of problems a line."""
        lines = [
            json.dumps({**kind._asdict(), "constants": dict(constants), "streamed": streamed})
            for kind, (constants, streamed) in self._marks.items()
        ]
        return f'{{"version": {_VERSION}, "products": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str) -> Tuned:
        """Read the text of `to_json`; ValueError where it is none, NewerVersion where another version knows
        more of it."""
        try:
            held = json.loads(text)
            if held["version"] > _VERSION:
                raise NewerVersion("a later version of cuquant wrote it")
            if held["version"] != _VERSION:
                raise ValueError
            marks = {}
            for line in held["products"]:
                constants = tuple((str(name), int(value)) for name, value in line.pop("constants").items())
                streamed = bool(line.pop("streamed"))
                marks[ProblemKind(**line)] = (constants, streamed)
        except NewerVersion:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ValueError("it is not a file of tuned products, or another version's") from None
        return cls(marks)

    @classmethod
    def read(cls, path: Path) -> Tuned:
        """Tuned launches that a file holds, none where there is no file. OSError, or ValueError where it is
        another."""
        return cls.from_json(path.read_text(encoding="utf-8")) if path.exists() else cls()


def mark(gemm: Gemm) -> Mark:
    """What tells a launch from the other candidates of its problem. Of the mma core that is the tile alone:
    whether blocks share columns depends on the very number of tiles, which other problems' differ in."""
    constants = gemm.plan.kernel.constants
    if dict(constants)["CORE"] == Core.MMA:
        return tuple(each for each in constants if each[0] != "SPLITS"), False
    return constants, gemm.streamed > 0


def candidates(usual: Gemm, problem: Problem) -> list[Gemm]:
    """Launches of an ordinary product that may be its fastest: the usual one, then up to MOST others of each
    core that has a chance, the likeliest first."""
    found = {mark(usual): usual}
    cores: dict[int, int] = {}
    for gemm in _variants(problem):
        core = dict(gemm.plan.kernel.constants)["CORE"]
        if mark(gemm) not in found and cores.get(core, 0) < MOST:
            cores[core] = cores.get(core, 0) + 1
            found[mark(gemm)] = gemm
    return list(found.values())


def _variants(problem: Problem, core: int | None = None) -> Iterator[Gemm]:
    """Every launch of the cores that have a chance, or of one of them."""
    m, capability = problem.m, problem.gpu.capability
    if core in (None, Core.WGMMA) and capability == 90 and m >= _LEAST_BATCH:
        yield from wgmma_timed.variants(problem)
    if core in (None, Core.DECODE) and m <= DECODE_BATCH:
        yield from decode_plain.variants(problem)
    if core in (None, Core.MMA) and capability != 90 and m >= _LEAST_BATCH:
        yield from mma_core.variants(problem)
