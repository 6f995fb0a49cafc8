"""The examples: scripts and notebooks run as they stand, and notebooks show what they were stored with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvrtc
import pytest

from cuquant import device
from cuquant.cuda import sources

nbformat = pytest.importorskip("nbformat", reason="the test extra is not installed")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LONGEST = {"10_generate.py": 75}
"""Lines of scripts that are no single idea: others have 40 at most."""
LARGEST = 150_000
"""Bytes of a notebook with its outputs."""
NOISE = 1e-9
"""Numbers below it in magnitude are rounding errors, and as good as any others."""
_NUMBER = re.compile(r"-?\d+\.?(\d*)(?:e([-+]?\d+))?")
_NO_GPU = re.compile(r"(no GPU|without a GPU): .*")


def run(*command: object, folder: Path) -> str:
    """Standard output of a Python program that must not fail; in one thread, so that sums are the same."""
    found = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": found, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown(cell: Any) -> list[tuple[str, str]]:
    """Kinds of a cell's outputs, with the text of those that have one."""
    result = []
    for output in cell.outputs:
        kinds = "+".join(sorted(output.get("data", [output.get("name", output.output_type)])))
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        result.append((kinds, _NO_GPU.sub(r"\1", text)))
    return result


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script(path: Path, tmp_path: Path) -> None:
    """From any folder, without a warning."""
    assert run("-W", "error", path, folder=tmp_path).strip()
    assert not any(tmp_path.iterdir())
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST.get(path.name, 40)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_notebook_is_clean(path: Path) -> None:
    """Small, run once from the top, and about this repository alone."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < LARGEST
    assert not re.search(r"(?<![\w.])/(home|work|tmp|root|usr|opt)/|site-packages|0x7f[0-9a-f]{6}", text)
    cells = code_cells(nbformat.reads(text, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert "error" not in kinds
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell.outputs)


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path: Path, tmp_path: Path) -> None:
    """It runs, and on NumPy, where the stored outputs are from, shows the same: words exactly, numbers within
    2 percent or a unit of their last decimal, as BLAS libraries sum in orders of their own. After a change on
    purpose, ``python tests/notebooks.py`` stores new outputs."""
    run("tests/notebooks.py", "--to", tmp_path, path, folder=ROOT)
    again = code_cells(nbformat.read(tmp_path / path.name, as_version=4))
    if device.gpu_problem() is None:
        return
    for cell, new in zip(code_cells(nbformat.read(path, as_version=4)), again, strict=True):
        for (kinds, old), (new_kinds, text) in zip(shown(cell), shown(new), strict=True):
            assert kinds == new_kinds, cell.source
            assert words(old) == words(text), cell.source
            for (a, digit), (b, _) in zip(numbers(old), numbers(text), strict=True):
                assert b == pytest.approx(a, rel=0.02, abs=max(NOISE, 1.01 * digit)), cell.source


def words(text: str) -> list[str]:
    """What stands between the numbers; a table's columns may move with their widths."""
    text = re.sub(r"(?<=\[)\s+|\s+(?=\])", "", _NUMBER.sub("#", text))
    return re.sub(r"\s+", " ", text).split()


def numbers(text: str) -> list[tuple[float, float]]:
    """The numbers, and what the last decimal of each is worth; 0 of whole ones."""
    found = ((match[0], match[1], int(match[2] or 0)) for match in _NUMBER.finditer(text))
    return [(float(n), 10.0 ** (power - len(d)) if d or power else 0.0) for n, d, power in found]


def test_examples_are_listed() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in readme for path in SCRIPTS + NOTEBOOKS)


@pytest.mark.skipif(nvrtc.library() is None, reason="needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_the_kernel_of_the_last_notebook_compiles(arch: str) -> None:
    (source,) = (
        cell.source
        for cell in code_cells(nbformat.read(NOTEBOOKS[-1], 4))
        if cell.source.startswith("SOURCE")
    )
    text = source.split('"""')[1]
    report = nvrtc.compile_text(text, arch, (f"-I{sources.folder() / 'core'}",))
    assert report.spills == report.stack == 0
