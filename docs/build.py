"""The documentation as web pages: ``python docs/build.py [FOLDER]``, by default build/docs (docs extra).

Guides are the Markdown files of this folder. Every public name has a page, made of its docstring.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from cuquant import cli

try:
    from pdoc import docstrings, render_helpers
    from pdoc.doc import Class, Doc, Function, Module
    from pygments.formatters import HtmlFormatter
except ImportError as error:
    raise SystemExit(
        f"docs/build.py needs pdoc ({error}): pip install pdoc, or -e '.[docs]' in a checkout of cuquant"
    ) from None

HERE = Path(__file__).parent
GUIDES = {
    "README.md": "Contents",
    "how-it-works.md": "How it works",
    "formats/README.md": "Formats",
    "adding-a-format.md": "Adding a format",
    "performance.md": "Performance",
    "tuning/README.md": "Tuning",
    "troubleshooting.md": "Troubleshooting",
}
"""In the order of the menu; the pages of format families, and of what was tuned, are reached from theirs."""
TOPICS = {
    "Arrays": "QuantizedArray quantize from_blocks config gpu_problem",
    "Products": "matmul linear Experts moe route warmup KernelError",
    "Files": "open Model Metadata save load quantize_file dequantize_file read_imatrix "
    "read_safetensors GGUFError FallbackWarning",
    "Evaluation": "evaluate evaluate_files compare measure_importance Evaluation Evaluations "
    "Comparison Tokenizer UnsupportedModel",
    "Attention": "KVCache attention",
    "Formats": "Format KBit normal_float_codebook e4m4_encode e4m4_decode kbit_tiles kbit_from_tiles NvFp4 "
    "from_nvfp4 from_mxfp4 Int4 int4_from_parts int4_parts from_gptq from_awq from_pack_quantized Exl3 "
    "from_exl3 Trellis trellis_quantize trellis_from_parts trellis_parts",
}
"""Public names of cuquant, by what they are about."""
INTERNAL = {"QuantizedArray": ("rows", "storage", "fragments")}
"""Members of classes for the package's own modules, and for a look inside: their pages lack them."""
MODULES = ("cuquant.formats", "cuquant.testing", "cuquant.bench")
"""Whose public names have a page together."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the documentation as web pages.")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        default=HERE.parent / "build/docs",
        help="where to; by default build/docs of this checkout",
    )
    site = parser.parse_args().folder
    pages = dict(guide_pages()) | dict(reference_pages())
    for name, (title, body) in pages.items():
        target = site / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(name, title, linked(name, body)), encoding="utf-8")
    light, dark = (HtmlFormatter(style=style) for style in ("default", "github-dark"))
    colours = (
        f"{light.get_style_defs('pre')}\n@media (prefers-color-scheme: dark) {{{dark.get_style_defs('pre')}}}"
    )
    style = (HERE / "style.css").read_text(encoding="utf-8")
    (site / "style.css").write_text(f"{colours}\n{style}", encoding="utf-8")
    print(f"{len(pages)} pages in {site}")


def guide_pages() -> Iterator[tuple[str, tuple[str, str]]]:
    """Path, title and HTML of each Markdown file."""
    for path in sorted(HERE.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        yield (
            html_name(path.relative_to(HERE).as_posix()),
            (text.split("\n", 1)[0].lstrip("# "), to_html(text)),
        )


def reference_pages() -> Iterator[tuple[str, tuple[str, str]]]:
    """The same of each public name, or module of several."""
    cuquant = Module(importlib.import_module("cuquant"))
    names = [name for topic in TOPICS.values() for name in topic.split()]
    missing = set(cuquant.obj.__all__) - {"__version__"} ^ set(names)
    if missing:
        raise SystemExit(f"TOPICS and cuquant.__all__ differ in {', '.join(sorted(missing))}")
    for name in names:
        yield (
            f"reference/{name}.html",
            (f"cuquant.{name}", described(cuquant.members[name], f"cuquant.{name}")),
        )
    yield "reference/command-line.html", ("Command line", command_page())
    for name in MODULES:
        module = Module(importlib.import_module(name))
        parts = [f"<h1>{name}</h1>{to_html(module.docstring)}"]
        for member in module.members.values():
            if member.docstring and member.name[0] != "_" and not isinstance(member, Module):
                parts.append(described(member, f"{name}.{member.name}", 2))
        yield f"reference/{name}.html", (name, "".join(parts))


def command_page() -> str:
    """What every subcommand says of itself."""
    os.environ["COLUMNS"] = "100"
    (commands,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    parts = [
        f'<h2 id="{name}">cuquant {name}</h2><pre>{escape(command.format_help())}</pre>'
        for name, command in commands.choices.items()
    ]
    return f"<h1>Command line</h1>{''.join(parts)}"


def described(doc: Doc[Any], name: str, level: int = 1) -> str:
    """Heading, signature and docstring, and those of a class's public members."""
    parts = [f'<h{level} id="{doc.name}">{name}</h{level}>']
    signature = signature_of(doc)
    if signature is not None:
        parts.append(f'<pre class="signature">{escape(signature)}</pre>')
    parts.append(to_html(docstrings.convert(doc.docstring, "numpy", None)))
    if isinstance(doc, Class):
        hidden = ("__init__", *INTERNAL.get(doc.name, ()))
        own = [m for m in doc.own_members if m.name not in hidden and m.docstring and m.name[0] != "_"]
        parts += [described(member, member.name, level + 2) for member in own]
    return "".join(parts)


def signature_of(doc: Doc[Any]) -> str | None:
    """As people call it, with the annotations as they are written."""
    if isinstance(doc, Function):
        signature = inspect.signature(getattr(doc.wrapped, "__func__", doc.wrapped))  # of a class method
    elif isinstance(doc, Class) and not issubclass(doc.obj, BaseException):
        signature = inspect.signature(doc.obj)
    else:
        return None
    own = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    text = str(signature.replace(parameters=own))
    text = re.sub(r"ForwardRef\('(\w+)'[^)]*\)", r"\1", text)
    text = re.sub(r"""(: |-> )(['"])(.*?)\2(?=,| =|\)|$)""", r"\1\3", text)  # not evaluated, so quoted
    return doc.name + broken(text.removesuffix(" -> None"))


def broken(signature: str) -> str:
    """A parameter a line, where it is long."""
    end = matching = depth = 0
    lines: list[str] = []
    for at, c in enumerate(signature):
        depth += (c in "([{") - (c in ")]}")
        if (c == "," and depth == 1) or depth == 0:
            lines.append(signature[end + 1 : at].strip())
            end = at
        if depth == 0:
            matching = at
            break
    if len(signature) < 80:
        return signature
    return "(\n" + "".join(f"    {line},\n" for line in lines if line) + signature[matching:]


def to_html(markdown: str) -> str:
    html = str(render_helpers.to_html(markdown))
    return re.sub(r":((</p>)?\s*(</li>|<li>))", r"\1", html)  # of parameters without a description


def html_name(path: str) -> str:
    """Where a Markdown file's page is."""
    return re.sub(r"README\.md$", "index.md", path).removesuffix(".md") + ".html"


def linked(here: str, body: str) -> str:
    """The body with links between pages; those to files that are no pages become text, public names links."""

    def link(match: re.Match[str]) -> str:
        target, anchor, text = match["target"], match["anchor"] or "", match["text"]
        if target.startswith("http") or not target:
            return match[0]
        inside = os.path.normpath(Path(here).parent / target)
        if inside.startswith("..") or not target.endswith(".md"):
            return text
        return f'<a href="{html_name(target)}{anchor}">{text}</a>'

    def name(match: re.Match[str]) -> str:
        known = any(match["name"] in topic.split() for topic in TOPICS.values())
        if not known or here == f"reference/{match['name']}.html":
            return match[0]
        target = relative(f"reference/{match['name']}.html", here)
        return f'<a href="{target}">{match[0]}</a>'

    body = re.sub(
        r'<a href="(?P<target>[^"#]*)(?P<anchor>#[^"]*)?">(?P<text>.*?)</a>', link, body, flags=re.DOTALL
    )
    return re.sub(r"<code>(?:cuquant\.|cq\.)?(?P<name>\w+)(?:\(\))?</code>", name, body)


def relative(target: str, here: str) -> str:
    return os.path.relpath(target, Path(here).parent).replace(os.sep, "/")


def page(here: str, title: str, body: str) -> str:
    def item(target: str, text: str) -> str:
        return f'<a href="{relative(target, here)}">{text}</a>'

    menu = [item(html_name(path), text) for path, text in GUIDES.items()]
    for topic, names in TOPICS.items():
        menu += [f"<b>{topic}</b>", *(item(f"reference/{name}.html", name) for name in names.split())]
    menu += [
        "<b>Elsewhere</b>",
        item("reference/command-line.html", "Command line"),
        *(item(f"reference/{name}.html", name) for name in MODULES),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><link rel="stylesheet" '
        f'href="{relative("style.css", here)}"><nav>{"".join(menu)}</nav><main>{body}</main></html>'
    )


if __name__ == "__main__":
    main()
