"""What is shipped: the wheel, found kernels, types, style, and a README that says what is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cuquant

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples/data/nano-llama-f16.gguf"


def run(*command: str | Path, cwd: Path = ROOT, path: Path | None = None) -> str:
    """Standard output of a command that must succeed; `path` goes before everything Python can import."""
    env = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_the_kernels_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {p.relative_to(ROOT).as_posix() for p in (ROOT / "cuquant").rglob("*.py")}
    kernels = {f"cuquant/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "kernels").rglob("*.*")}
    assert {n for n in names if ".dist-info/" not in n} == package | kernels | {"cuquant/py.typed"}


def test_installed_wheel_evaluates_a_model_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    where = "import cuquant, cuquant.sources as s; print(cuquant.__file__); print(s.folder())"
    package, kernels = run(sys.executable, "-c", where, cwd=tmp_path, path=site).splitlines()
    assert Path(package) == site / "cuquant/__init__.py"
    assert Path(kernels) == site / "cuquant/kernels"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    command = (
        sys.executable,
        "-m",
        "cuquant",
        "eval",
        MODEL,
        "--formats",
        "q8_0",
        "--text",
        text,
        "--ctx",
        "64",
    )
    result = json.loads(run(*command, "-o", "json", cwd=tmp_path, path=site))
    assert [row["format"] for row in result["rows"]] == ["f16", "q8_0"]
    assert 0 < result["rows"][1]["mean_kld"] < 0.01


def test_import_is_light() -> None:
    """Importing cuquant must not import what only some calls need, CuPy first of all."""
    heavy = ("cupy", "gguf", "scipy", "tokenizers", "pandas", "tqdm", "tabulate", "matplotlib", "torch")
    loaded = run(sys.executable, "-c", "import sys, cuquant; print(*sys.modules)").split()
    assert not set(heavy) & set(loaded)


def test_version_is_one(wheel: Path) -> None:
    assert f"-{cuquant.__version__}-" in wheel.name


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy"])
def test_style_and_types(command: str) -> None:
    run(sys.executable, "-m", *command.split())


def test_readme_example_runs() -> None:
    """The first Python block, as it stands."""
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    run(sys.executable, "-W", "error", "-c", code)


def test_readme_scores_are_the_reference() -> None:
    """The table of scores against the independent program's, to the digits shown."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    reference = json.loads((ROOT / "tests/data/reference.json").read_text())["float32"]
    for name, scores in reference.items():
        (row,) = re.findall(rf"^\| {name} +\|((?: +[\d.]+ \|){{7}})$", readme, re.MULTILINE)
        _, ppl, _, mean_kld, *_ = (float(cell) for cell in row.split("|")[:-1])
        assert ppl == pytest.approx(scores["ppl"], abs=6e-5)
        assert mean_kld == pytest.approx(scores["mean_kld"], abs=6e-7)


def test_ci_runs_the_readme_s_test_command() -> None:
    readme, script = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    assert ".venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n auto\n" in readme
    assert "pip\" install --quiet -e '.[test]'" in script
    assert script.rstrip().endswith('python" -m pytest -n auto')


def test_readme_times_are_the_record_s() -> None:
    """The table of times against the committed records, whose commit it also names."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cells: dict[tuple[str, str, int, int], dict[str, float]] = {}
    for path in (ROOT / "examples/benchmarks").glob("h200-*.json"):
        record = json.loads(path.read_text())
        assert f"`{record['commit'][:12]}`" in readme
        assert f"({path.relative_to(ROOT)})" in readme
        products = [c for c in record["cells"] if c["op"] == "matmul"]
        cells |= {(c["format"], c["activation"], c["M"], c["N"]): c for c in products}
        assert all(c["nmse"] <= 1e-6 for c in products)
    rows = re.findall(r"^\| ([\w-]+) \| (f16|q8_1) \| ([\d. |]+) \|$", readme, re.MULTILINE)
    assert len(rows) == 2 * 5 + 4 + 3
    for name, activation, times in rows:
        for m, shown in zip((1, 4, 16, 64, 256, 4096), times.split(" | "), strict=True):
            assert float(shown) == pytest.approx(cells[name, activation, m, 14336]["us"], abs=0.51)


def test_readme_conversions_are_the_record_s() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    record = json.loads((ROOT / "examples/benchmarks/h200-dequant.json").read_text())
    cells = {(c["codes"], c["method"], c["M"]): c for c in record["cells"]}
    shown = {
        "E2M1: masks and shifts of plain nibbles": ("e2m1", "bits, uncorrected"),
        "E2M1: masks and shifts, in the fragment layout's order": ("e2m1", "bits of the fragment layout"),
        "E2M1: byte permutes": ("e2m1", "byte permutes"),
        "any 16 numbers: shared table of pairs, one for each lane": ("any 16", "shared table of pairs"),
        "any 16 numbers: shared table of single ones": ("any 16", "shared table of values"),
        "any 16 numbers: byte-permute table": ("any 16", "byte-permute table"),
        "integers − 8: magic number, subtracted": ("u4b8", "bits"),  # noqa: RUF001
        "integers − 8: masks alone, offset by sums of x": ("u4b8", "bits, masked"),  # noqa: RUF001
    }
    for label, (codes, method) in shown.items():
        (row,) = re.findall(rf"^\| {label} \| ([\d. |]+) \|$", readme, re.MULTILINE)
        rate, instructions, *us = (float(cell) for cell in row.split(" | "))
        alone = cells[codes, method, None]
        assert rate == pytest.approx(alone["values_per_ns"], abs=0.51)
        assert instructions == pytest.approx(alone["instructions"], abs=0.051)
        assert us == pytest.approx([cells[codes, method, m]["us"] for m in (1, 8)], abs=0.051)
