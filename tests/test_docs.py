"""The documentation: its pages are built without a warning, its links lead somewhere, its tables are true."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import cuquant as cq

nbformat = pytest.importorskip("nbformat", reason="the test extra is not installed")
pytest.importorskip("pdoc", reason="the test extra is not installed")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples/README.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(DOCS / "build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return folder


def test_building_says_how_it_is_called(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for option, code, said in (
        ("--help", 0, "[FOLDER]"),
        ("--nothing", 2, "unrecognized arguments: --nothing"),
    ):
        command = [sys.executable, str(DOCS / "build.py"), option]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
        assert (done.returncode, said in done.stdout + done.stderr) == (code, True)
        assert not list(tmp_path.iterdir())


def test_building_without_pdoc_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pdoc.py").write_text("raise ModuleNotFoundError(\"No module named 'pdoc'\")")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, str(DOCS / "build.py"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("docs/build.py needs pdoc (No module named 'pdoc'): pip install")


def text_of(path: Path) -> str:
    """The Markdown of a page, or of a notebook's cells, without code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return _CODE.sub("", text)


def anchors(path: Path) -> set[str]:
    """Of a Markdown page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES + NOTEBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_files(path: Path) -> None:
    for link in _LINK.findall(text_of(path)):
        if link.startswith("https://"):
            continue
        target, _, anchor = unquote(link).partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


def test_links_of_built_pages(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    ids = {page: set(re.findall(r'id="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if link.startswith("https://"):
                continue
            target, _, anchor = link.partition("#")
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in ids[file], f"{page.name}: {link}"


@pytest.mark.parametrize("name", [name for name in cq.__all__ if name[0] != "_"])
def test_every_public_name_has_a_page(site: Path, name: str) -> None:
    text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
    assert f"cuquant.{name}</h1>" in text
    body = re.sub(r"<pre.*?</pre>|<[^>]+>", "", text.split("</h1>")[1], flags=re.DOTALL)
    assert len(body.split()) > 5
    for section in ("Parameters", "Returns", "Raises"):
        if f"\n{section}\n" in (getattr(cq, name).__doc__ or "").replace("    ", ""):
            assert f">{section}</h6>" in text


def test_pages_lack_members_of_the_package_alone(site: Path) -> None:
    text = (site / "reference/QuantizedArray.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'<h3 id="(\w+)"', text))
    assert {"blocks", "prepare"} <= ids <= set(dir(cq.QuantizedArray))
    for name in ("rows", "storage", "fragments"):
        assert name not in ids
        assert hasattr(cq.QuantizedArray, name)


@pytest.mark.parametrize(
    "function",
    [cq.open, cq.load, cq.evaluate, cq.evaluate_files, cq.warmup, cq.read_safetensors]
    + [getattr(cq.QuantizedArray, name) for name in ("dequantize", "to_device", "__getitem__", "prepare")]
    + [getattr(cq.KVCache, name) for name in ("assign", "evict", "trim", "clear", "load")],
    ids=lambda function: function.__name__,
)
def test_errors_are_told(function: Any) -> None:
    """By kind, each with when it is raised."""
    text = inspect.getdoc(function) or ""
    errors = text.split("\nRaises\n------\n")[1].split("\n\n")[0]
    assert len(re.findall(r"^(\w+(Error|Model), )*\w+(Error|Model)\n    ", errors, re.MULTILINE)) >= 2


def test_the_table_of_formats() -> None:
    """Every format, with its bytes and bits, and where it is quantized."""
    table = (DOCS / "formats/README.md").read_text(encoding="utf-8")
    for name in cq.formats.names():
        fmt = cq.formats.get(name)
        size = 32 * fmt.bits if fmt.whole_matrices else fmt.block_bytes  # of a tile
        where = "GPU, CPU" if fmt.encodes_on_gpu else "CPU"
        row = rf"^\| {name} \|.*\| {where} \| {size} \| {fmt.bits_per_weight:g} \|$"
        assert re.search(row, table, re.MULTILINE), row
    without = [name for name in cq.formats.names() if not cq.formats.get(name).on_gpu]
    assert not without, f"{without} have no kernels yet: section 3 of docs/adding-a-format.md makes them"
    whole = 8 * math.prod(cq.formats.get("trellis3").stored((768, 256))) / (768 * 256)
    assert f"{whole:g} for trellis3 of 768 × 256 weights" in table  # noqa: RUF001


def test_the_bytes_of_every_block_are_pictured() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "formats").glob("*.md"))
    for name in cq.formats.names():
        fmt = cq.formats.get(name)
        if not fmt.whole_matrices:
            fields = " | ".join(f"{field} {fmt.storage[field].itemsize}" for field in fmt.storage.names or ())
            assert f"{name}   {fmt.block_bytes} bytes = {fields}" in pages


@pytest.mark.parametrize("page", ["grids", "two-bits"])
def test_the_bytes_of_what_is_only_read_are_pictured(page: str) -> None:
    """Of each format that the title names; all of them have a page."""
    pages = {
        name: (DOCS / f"formats/{name}.md").read_text(encoding="utf-8") for name in ("grids", "two-bits")
    }
    titles = {name: set(re.findall(r"[\w-]+", text.splitlines()[0])) for name, text in pages.items()}
    ours = {name for name in cq.formats.names_of_read_only() if not name.startswith("exl3")}
    assert ours <= set.union(*titles.values())
    for fmt in map(cq.formats.get, sorted(ours & titles[page])):
        fields = " | ".join(f"{field} {fmt.storage[field].itemsize}" for field in fmt.storage.names or ())
        bits = fmt.bits_per_weight
        row = rf"^{fmt} +{fmt.block_bytes} = {re.escape(fields)} .* ({bits:.2f}|{bits:g}) "
        assert re.search(row, pages[page], re.MULTILINE), row


def test_words_of_this_code_are_where_the_glossary_says() -> None:
    text = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    table = text.split("## Words of this code\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.split("\n") if line.startswith("| ")][1:]
    assert len(rows) >= 25
    for words, usual, where in rows:
        files = [ROOT / name for name in re.findall(r"`([^`]+)`", where)]
        assert usual
        assert files
        found = "\n".join(path.read_text(encoding="utf-8") for path in files).lower()
        for word in re.sub(r" \(.*\)", "", words).split(", "):
            assert re.search(re.escape(word).replace(r"\ ", "[ _]"), found), word


@pytest.mark.parametrize("page", ["docs/formats/kv.md", "docs/formats/kbit.md"])
def test_code_of_pages_runs(page: str, tmp_path: Path) -> None:
    """All of a page's, one after another."""
    parts = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(parts)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
