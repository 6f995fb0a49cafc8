"""What is shipped: the wheel, found kernels, types, style, and a README whose commands are those that run."""

from __future__ import annotations

import ast
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
    where = "import cuquant, cuquant.cuda.sources as s; print(cuquant.__file__); print(s.folder())"
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
    """Importing cuquant, and looking at its names, must not import what only some calls need, CuPy first of
    all."""
    heavy = ("cupy", "gguf", "scipy", "tokenizers", "pandas", "tqdm", "tabulate", "matplotlib", "torch")
    code = "import sys, cuquant; [getattr(cuquant, name) for name in dir(cuquant)]; print(*sys.modules)"
    loaded = run(sys.executable, "-c", code).split()
    assert not set(heavy) & set(loaded)


def test_version_is_one(wheel: Path) -> None:
    assert f"-{cuquant.__version__}-" in wheel.name


@pytest.mark.parametrize(
    "command", ["ruff check", "ruff format --check", pytest.param("mypy", marks=pytest.mark.long)]
)
def test_style_and_types(command: str) -> None:
    run(sys.executable, "-m", *command.split())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "cuquant").rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_doc_strings_make_sense_alone(path: Path) -> None:
    """Also those of constants and fields: none begins as if the line before it had been read."""
    said = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    docs = [
        node.value for node in said if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    elliptic = r"\s*(Of|Those|They|It|Its|Their|And|Likewise|The same|The way back)\b"
    found = [(doc.lineno, doc.value) for doc in docs if re.match(elliptic, str(doc.value))]
    assert not found, "begin with a noun or a verb"


def test_readme_examples_run() -> None:
    """The Python blocks that need no GPU, one after the other, as they stand."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    own = [code for code in blocks if "cupy" not in code]
    assert len(own) == 2
    run(sys.executable, "-W", "error", "-c", "\n".join(own))


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


def test_names_of_checks_tell_what_comes_back() -> None:
    """As the package's doc string has it; `flag` is an argument that is a bool."""
    kinds = {"None": "require_", "bool": "is_"}
    for path in sorted((ROOT / "cuquant/check").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.name == "flag":
                continue
            returned, name = ast.unparse(node.returns or ast.Constant("nothing")), node.name
            assert name.endswith("_error") == returned.endswith("Error"), name
            for kind, prefix in kinds.items():
                assert name.startswith(prefix) == (returned == kind), name
