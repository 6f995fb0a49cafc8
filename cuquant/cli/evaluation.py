"""`cuquant eval` and `imatrix`."""

from __future__ import annotations

import argparse
import io
import sys
import time
from pathlib import Path
from tokenize import TokenError
from typing import Any

from .. import check
from ..render import counted, cut, escaped
from .arguments import (
    add_device,
    add_table_style,
    file_format_list,
    left_at,
    positive_int,
    replacing_by_option,
    subcommand,
)


def add(commands: Any) -> None:
    """Add the commands to the parser's."""
    _add_eval(commands)
    _add_imatrix(commands)


def _add_eval(commands: Any) -> None:
    command = subcommand(
        commands,
        "eval",
        _eval,
        "Perplexity, KL divergence and tensor errors of models, or of their quantizations.",
        _left,
    )
    command.add_argument(
        "models",
        metavar="MODEL.gguf",
        nargs="+",
        help="or MODEL.safetensors that quantize or dequantize wrote",
    )
    command.add_argument(
        "--results",
        metavar="FILE.json",
        type=Path,
        help="write each model's result there at once; models that it holds are not evaluated again: all "
        "options but MODEL.gguf must be the same then, formats too, and the version of cuquant",
    )
    command.add_argument(
        "--base", metavar="BASE.gguf", help="likewise: what to compare with, usually the float original"
    )
    command.add_argument(
        "--formats",
        metavar="F,F,...",
        type=file_format_list,
        default=[],
        help="requantize a float model's weight matrices to each of these, and compare with the original",
    )
    _add_text(command)
    command.add_argument(
        "--activations",
        choices=("f16", "q8_1"),
        default="f16",
        help="of products with quantized weights, which alone they concern: quantized, or not (f16)",
    )
    command.add_argument(
        "--kv-bits",
        metavar="BITS",
        action="append",
        default=[],
        type=_kv_bits,
        help='evaluate also with quantized keys and values: 16, 8, 4, 3, 2, or by age as "8:64,4:256,2" (the '
        "newest 64 tokens at 8 bits, ...), +scales, +rotate; may be repeated",
    )
    add_device(command, "compute")
    command.add_argument(
        "--tensors",
        action="store_true",
        help="also print the errors of every tensor, as a second table (csv is one table: those instead)",
    )
    add_table_style(command)


def _add_text(command: argparse.ArgumentParser) -> None:
    """What a model is run over, and how it is cut."""
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text",
        metavar="FILE",
        type=Path,
        help="UTF-8 text (- for standard input), tokenized with the model's vocabulary",
    )
    source.add_argument("--tokens", metavar="IDS.npy", type=Path, help="token ids, a 1-D integer array")
    command.add_argument("--ctx", type=positive_int, default=512, metavar="N", help="tokens of a chunk (512)")
    command.add_argument("--chunks", type=positive_int, metavar="N", help="how many chunks to use (all)")


def _eval(arguments: argparse.Namespace) -> None:
    from ..eval import evaluate_files

    started = time.perf_counter()
    several = evaluate_files(
        arguments.models,
        results=arguments.results,
        **_run_over(arguments),
        base=arguments.base,
        formats=arguments.formats,
        activations=arguments.activations,
        kv_bits=arguments.kv_bits,
        progress=True,
    )
    result = several.each[0]
    print(
        f"{', '.join(arguments.models)}: {counted(result.chunks, 'chunk')} of {result.ctx} tokens, "
        f"{result.scored_tokens} scored, {result.backend}, {time.perf_counter() - started:.1f} s",
        file=sys.stderr,
    )
    if len(arguments.models) > 1 and not (arguments.base or arguments.formats):
        note = "no KLD without a model to compare with: --base BASE.gguf gives it"
        if arguments.kv_bits:
            note = (
                "KLD compares each model with itself without --kv-bits; --base BASE.gguf, all with that one"
            )
        print(note, file=sys.stderr)
    shown: Any = several if len(arguments.models) > 1 else result
    if arguments.tensors and arguments.style == "csv":
        print(shown.render("csv", tensors=True))
        return
    print(shown.render(arguments.style))
    if arguments.tensors and arguments.style != "json":
        print(f"\n{shown.render(arguments.style, tensors=True)}")


def _run_over(arguments: argparse.Namespace) -> dict[str, Any]:
    """What models are run over, and where."""
    return {
        "text": None if arguments.text is None else _text(arguments.text),
        "tokens": None if arguments.tokens is None else _load_ids(arguments.tokens),
        "ctx": arguments.ctx,
        "chunks": arguments.chunks,
        "device": arguments.device,
    }


def _left(arguments: argparse.Namespace) -> str:
    results = arguments.results
    if results is None:
        return "nothing was written; --results FILE.json keeps the result of every model that is done"
    if results.exists():
        return f"{results} has every result so far, and the same command goes on from there"
    return f"no model is done, and {results} was not written"


def _add_imatrix(commands: Any) -> None:
    command = subcommand(
        commands,
        "imatrix",
        _imatrix,
        "Measure over a text which columns of a model's weights matter, for quantize --imatrix and "
        "llama-quantize.",
        left_at,
        replaces="target",
    )
    command.add_argument(
        "model", metavar="MODEL.gguf", help="or MODEL.safetensors that quantize or dequantize wrote"
    )
    _add_text(command)
    command.add_argument("--process-output", action="store_true", help="measure the output matrix, too")
    add_device(command, "compute")
    command.add_argument(
        "-o", dest="target", required=True, metavar="FILE.gguf", help="where to write the importance matrix"
    )
    command.add_argument("--force", action="store_true", help="replace FILE.gguf")


def _imatrix(arguments: argparse.Namespace) -> None:
    from ..eval import measure_importance
    from ..io import imatrix

    started = time.perf_counter()
    with replacing_by_option(arguments.target):
        if arguments.tokens is not None:
            check.require_another_file(Path(arguments.target), arguments.tokens, "token ids")
        made = measure_importance(
            arguments.model,
            arguments.target,
            **_run_over(arguments),
            process_output=arguments.process_output,
            force=arguments.force,
            progress=True,
        )
    chunks = imatrix.read(arguments.target).chunks
    print(
        f"{arguments.target}: importance of {counted(len(made), 'tensor')}, by {counted(chunks, 'chunk')} of "
        f"{arguments.ctx} tokens, {time.perf_counter() - started:.1f} s",
        file=sys.stderr,
    )


def _text(path: Path) -> Any:
    """The text of a file, or with "-" of standard input."""
    from ..eval.evaluate import STDIN, Text, decoded

    if str(path) != "-":
        return path
    if sys.stdin is None:
        raise ValueError(f"{STDIN} is closed: name a file of the text")
    return Text(decoded(sys.stdin.buffer.read(), STDIN), STDIN)


def _load_ids(path: Path) -> Any:
    import numpy as np

    is_file = path.is_file()
    raw = b"" if is_file else path.read_bytes()  # of a pipe
    begin = _first_bytes(path) if is_file else raw[: len(_NPY)]
    none = f"{path} is not a .npy file of token ids"
    if begin.startswith(_ZIP):
        raise ValueError(f"{none} but an .npz archive: save one array with numpy.save")
    if begin != _NPY:
        raise ValueError(f"{none}: it starts with {begin!r} instead of {_NPY!r}")
    try:
        with np.errstate(over="ignore"):  # of a size, which is found to be none then
            ids = (
                np.lib.format.open_memmap(path, mode="r")
                if is_file
                else np.lib.format.read_array(io.BytesIO(raw))
            )
    except ValueError as error:
        raise ValueError(f"{none}: {cut(escaped(str(error)), 200)}") from None
    except _OF_A_HEADER:
        raise ValueError(f"{none}: its header is damaged") from None
    try:
        return check.token_vector(ids)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from None


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_NPY))


_NPY, _ZIP = b"\x93NUMPY", (b"PK\3\4", b"PK\5\6")
"""What files of one array, and archives of several, start with."""
_OF_A_HEADER = (TypeError, LookupError, SyntaxError, TokenError, OverflowError, RecursionError, MemoryError)
"""What NumPy raises beside ValueError of a header that is none, or claims what no memory holds."""


def _kv_bits(text: str) -> str:
    from ..eval.kv import KVBits, UnknownWidthsError

    try:
        return KVBits(text).text
    except UnknownWidthsError as error:
        raise argparse.ArgumentTypeError(error.of_command) from None
