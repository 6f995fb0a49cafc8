"""Notebooks, run from the top: ``python tests/notebooks.py`` stores what those of examples/ show."""

from __future__ import annotations

import argparse
import base64
import io
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent.parent / "examples"


def execute(path: Path) -> Any:
    """The notebook with the outputs of a new kernel, in its own folder; an error where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def store(notebook: Any, path: Path) -> None:
    """Write a notebook, its pictures in 128 colours: a third of their size."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture, small = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))), io.BytesIO()
                picture.convert("RGB").quantize(128).save(small, "png", optimize=True)
                data["image/png"] = base64.b64encode(small.getvalue()).decode()
    nbformat.write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    parser.add_argument("--to", type=Path, help="folder to write to; by default notebooks are replaced")
    arguments = parser.parse_args()
    for path in arguments.files:
        store(execute(path), path if arguments.to is None else arguments.to / path.name)


if __name__ == "__main__":
    main()
