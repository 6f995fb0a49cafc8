"""`cuquant quantize`, `dequantize`, `dump` and `compare`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .. import check
from ..render import counted, escaped
from .arguments import add_device, add_table_style, left_at, recipe_or_format, replacing_by_option, subcommand


def add(commands: Any) -> None:
    """Add the commands to the parser's."""
    for each in (_add_quantize, _add_dequantize, _add_dump, _add_compare):
        each(commands)


def _add_quantize(commands: Any) -> None:
    from ..io import mixture

    command = subcommand(
        commands,
        "quantize",
        _quantize,
        "Quantize a float model to a GGUF file that llama.cpp loads, or to a safetensors file, which can "
        "have formats that GGUF lacks.",
        left_at,
        replaces="target",
    )
    command.add_argument(
        "source", metavar="IN", help="a float model: IN.gguf, or IN.safetensors that dequantize wrote"
    )
    command.add_argument(
        "target", metavar="OUT", help="OUT.gguf, or OUT.safetensors, which eval and the others take"
    )
    command.add_argument(
        "--format",
        required=True,
        metavar="FORMAT",
        type=recipe_or_format,
        help=f"one of {', '.join(mixture.names())}: of all weight matrices (q4_k), or a mixture of "
        "llama.cpp's (q4_k_m); or formats by shell patterns of tensor names, of which the first that matches "
        "counts: '*ffn_down*=q6_k,*=q4_k'; GGUF has no int4, kbit and trellis",
    )
    command.add_argument(
        "--pure", action="store_true", help="one format for all, where a mixture has its name (q6_k)"
    )
    command.add_argument(
        "--imatrix",
        metavar="FILE",
        help="quantize by an importance matrix that cuquant imatrix or llama.cpp's llama-imatrix wrote: to "
        + check.TAKE_IMPORTANCE,
    )
    _add_how(command, "quantize")


def _add_how(command: argparse.ArgumentParser, verb: str) -> None:
    """What commands that write a model have in common."""
    command.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="copy tensors of these names unchanged (shell pattern; may be repeated)",
    )
    add_device(command, verb)
    command.add_argument("--force", action="store_true", help="replace OUT")


def _quantize(arguments: argparse.Namespace) -> None:
    from ..io.convert import quantize_file
    from ..io.mixture import pure

    kind = arguments.format
    if arguments.pure:
        if not isinstance(kind, str):
            raise ValueError(
                "--pure makes one format of a mixture's name; PATTERN=FORMAT has formats already"
            )
        kind = pure(kind)
    done = _written(quantize_file, arguments, kind, importance=arguments.imatrix)
    print(
        f"{arguments.target}: {counted(len(done.quantized), 'tensor')} to {done.label}, "
        f"{len(done.kept)} copied, "
        f"file of {done.source_bytes:,} -> {os.path.getsize(arguments.target):,} bytes",
        file=sys.stderr,
    )
    if arguments.imatrix is not None:
        made = counted(len(done.quantized), "tensor")
        why = "" if done.by_importance else f" ({check.TAKE_IMPORTANCE} take one)"
        print(f"by importance: {len(done.by_importance):,} of {made}{why}", file=sys.stderr)
    if done.unmatched:
        count = len(done.unmatched)
        matrices = f"{count:,} matri{'x' if count == 1 else 'ces'}"
        print(f"copied, no PATTERN matches: {matrices} ('*=FORMAT' at the end takes them)", file=sys.stderr)
    if done.ragged:
        print(f"kept in float, rows are not whole blocks: {_listed(done.ragged)}", file=sys.stderr)
    if done.replaced:
        others = _listed(f"{name} ({done.formats[name]})" for name in done.replaced)
        print(f"in another format, rows are not whole blocks: {others}", file=sys.stderr)
    _tell_left_out(done.left_out)


def _tell_left_out(scales: Iterable[str]) -> None:
    if scales:
        print(f"left out, in the tensors that they scale: {_listed(scales)}", file=sys.stderr)


def _listed(names: Iterable[str]) -> str:
    """Names of tensors, sorted, as a terminal may have them."""
    return ", ".join(map(escaped, sorted(names)))


def _written(write: Callable[..., Any], arguments: argparse.Namespace, kind: Any, **more: Any) -> Any:
    """Write the target, of a format or a dtype."""
    names = ("keep", "force", "device")
    how = {name: getattr(arguments, name) for name in names} | more
    with replacing_by_option(arguments.target):
        return write(arguments.source, arguments.target, kind, **how, progress=True)


def _add_dequantize(commands: Any) -> None:
    command = subcommand(
        commands,
        "dequantize",
        _dequantize,
        "Write the numbers that a quantized model stands for to a file of floats, GGUF or safetensors.",
        left_at,
        replaces="target",
    )
    command.add_argument("source", metavar="IN", help="IN.gguf, or IN.safetensors that quantize wrote")
    command.add_argument("target", metavar="OUT", help="OUT.gguf or OUT.safetensors")
    command.add_argument(
        "--type", choices=tuple(check.NAMED_FLOATS), default="f16", help="of the matrices (f16)"
    )
    _add_how(command, "dequantize")


def _dequantize(arguments: argparse.Namespace) -> None:
    from ..io.floats import dequantize_file

    done = _written(dequantize_file, arguments, arguments.type)
    print(
        f"{arguments.target}: {counted(len(done.made), 'tensor')} to {arguments.type}, "
        f"{len(done.kept)} copied, file of {os.path.getsize(arguments.target):,} bytes",
        file=sys.stderr,
    )
    _tell_left_out(done.left_out)


def _add_dump(commands: Any) -> None:
    command = subcommand(commands, "dump", _dump, "Show what is in a GGUF file, or a safetensors file.")
    command.add_argument("model", metavar="MODEL", help="MODEL.gguf or MODEL.safetensors")
    command.add_argument(
        "-o",
        dest="style",
        choices=("text", "json"),
        default="text",
        help="output: tables, or one JSON object with arrays in full (text)",
    )
    command.add_argument(
        "--json", dest="style", action="store_const", const="json", help="the same as -o json"
    )


def _dump(arguments: argparse.Namespace) -> None:
    from ..io import dump
    from ..io.gguf import SafetensorsError
    from ..io.model import Model
    from ..io.parts import open_parts

    path, as_json = Path(arguments.model), arguments.style == "json"
    with ExitStack() as mapped:
        try:
            model = Model(open_parts(path, mapped), "cpu")  # an importance matrix, too; no tensor is read
        except SafetensorsError:
            listed = dump.of_safetensors(path, as_json) if path.is_file() else None
            if listed is None:
                raise
            print(listed)
        else:
            print(dump.as_json(model) if as_json else dump.as_text(model))


def _add_compare(commands: Any) -> None:
    command = subcommand(
        commands,
        "compare",
        _compare,
        "Compare two files (GGUF, or safetensors that quantize or cuquant.save wrote): types, sizes, numbers "
        "of tensors; metadata.",
    )
    command.add_argument(
        "a", metavar="A", help="A.gguf or A.safetensors: the reference, usually the float original"
    )
    command.add_argument("b", metavar="B", help="B.gguf or B.safetensors")
    add_device(command, "compare numbers")
    add_table_style(command)


def _compare(arguments: argparse.Namespace) -> None:
    from ..eval import compare

    found = compare(arguments.a, arguments.b, device=arguments.device, progress=True)
    print(found.render(arguments.style))
    told = sys.stdout if arguments.style in ("table", "md") else sys.stderr  # csv and json are for programs
    print(f"\n{found.summary()}" if told is sys.stdout else found.summary(), file=told)
    for key, (a, b) in (found.metadata or {}).items():
        print(f"{escaped(key)}: {a or 'missing'} -> {b or 'missing'}", file=told)
