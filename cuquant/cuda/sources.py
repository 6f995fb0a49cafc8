"""The CUDA sources: where they are, and one self-contained text per kernel file.

CuPy's disk cache keys a module by its source text, which does not see inside included files. So the
includes of our own headers are replaced by their contents, and an edited header is a new kernel.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^#include (?:"(?P<path>[^"]+)"|(?P<format>CUQUANT_FORMAT))$', re.MULTILINE)


def folder() -> Path:
    """The folder of the CUDA C++ sources.

    A wheel installs the repository's `kernels/` as `cuquant/kernels/`; a checkout or an editable install
    has it next to the package. FileNotFoundError where it is in neither place.
    """
    package = Path(__file__).parent.parent
    for candidate in (package / "kernels", package.parent / "kernels"):
        if (candidate / "README.md").is_file():
            return candidate
    raise FileNotFoundError(
        f"the CUDA sources are neither in {package} nor beside it: the installation is damaged"
    )


@cache
def flatten(op: str, format: str | None) -> str:
    """The text of kernels/ops/`op`.cu with every header of ours in place, once.

    ``#include CUQUANT_FORMAT`` stands for the header of `format`. `#line` directives keep the places in a
    compiler's messages those of the files.
    """
    seen: set[Path] = set()

    def expand(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = path.read_text(encoding="utf-8").replace("#pragma once\n", "\n")

        def include(match: re.Match[str]) -> str:
            name = f"../formats/{format}.cuh" if match["format"] else match["path"]
            after = text.count("\n", 0, match.end()) + 2
            body = expand((path.parent / name).resolve())
            return f'{body}\n#line {after} "{path.name}"' if body else ""

        return f'#line 1 "{path.name}"\n{_INCLUDE.sub(include, text)}'

    return expand((folder() / "ops" / f"{op}.cu").resolve())
