"""The `cuquant` command: results on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__, formats


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 1 for a failure. Wrong usage exits with 2."""
    arguments = _parser().parse_args(argv)
    warnings.showwarning = _show_warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe may have an encoding that lacks a character
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; keep Python from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        print(f"cuquant: error: {error}", file=sys.stderr)
        return 1
    return 0


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"cuquant: warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cuquant", description="Evaluate and convert quantized GGUF models."
    )
    parser.add_argument("--version", action="version", version=f"cuquant {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_eval, _add_quantize, _add_dump, _add_bench, _add_info):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[Any], None], text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    return command


def _format_list(text: str) -> list[str]:
    try:
        return [str(formats.get(name.strip())) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file_format_list(text: str) -> list[str]:
    from .io import mixture

    try:
        return [str(mixture.get(name.strip())) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _kv_bits(text: str) -> str:
    from .eval.kv import KVBits

    try:
        return KVBits(text).text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_eval(commands: Any) -> None:
    command = _command(
        commands,
        "eval",
        _eval,
        "Perplexity, KL divergence and tensor errors of a model, or of its quantizations.",
    )
    command.add_argument("model", metavar="MODEL.gguf")
    command.add_argument(
        "--base", metavar="BASE.gguf", help="model to compare with, usually the float original"
    )
    command.add_argument(
        "--formats",
        metavar="F,F,...",
        type=_file_format_list,
        default=[],
        help="requantize a float model's weight matrices to each of these, and compare with the original",
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", metavar="FILE", type=Path, help="UTF-8 text, tokenized with the model's vocabulary"
    )
    source.add_argument("--tokens", metavar="IDS.npy", type=Path, help="token ids, a 1-D integer array")
    command.add_argument("--ctx", type=int, default=512, metavar="N", help="tokens of a chunk (512)")
    command.add_argument("--chunks", type=int, metavar="N", help="how many chunks to use (all)")
    command.add_argument(
        "--activations", choices=("f16", "q8_1"), default="f16", help="quantize activations, or not (f16)"
    )
    command.add_argument(
        "--kv-bits",
        metavar="BITS",
        action="append",
        default=[],
        type=_kv_bits,
        help='evaluate also with quantized keys and values: 16, 8, 4, 3, 2, or by age as "8:64,4:256,2" (the '
        "newest 64 tokens at 8 bits, ...), +scales, +rotate; may be repeated; on the CPU only",
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to compute (the GPU where one can be used)"
    )
    command.add_argument(
        "--tensors",
        action="store_true",
        help="also print the errors of every tensor, as a second table (csv is one table: those instead)",
    )
    command.add_argument(
        "-o", dest="style", choices=("table", "md", "csv", "json"), default="table", help="output"
    )


def _eval(arguments: argparse.Namespace) -> None:
    from .eval import evaluate

    started = time.perf_counter()
    result = evaluate(
        arguments.model,
        text=arguments.text,
        tokens=None if arguments.tokens is None else _load_ids(arguments.tokens),
        base=arguments.base,
        formats=arguments.formats,
        ctx=arguments.ctx,
        chunks=arguments.chunks,
        activations=arguments.activations,
        kv_bits=arguments.kv_bits,
        device=arguments.device,
        progress=True,
    )
    print(
        f"{result.model}: {result.chunks} chunks of {result.ctx} tokens, {result.scored_tokens} scored, "
        f"{result.backend}, {time.perf_counter() - started:.1f} s",
        file=sys.stderr,
    )
    if arguments.tensors and arguments.style == "csv":
        print(result.render("csv", tensors=True))
        return
    print(result.render(arguments.style))
    if arguments.tensors and arguments.style != "json":
        print(f"\n{result.render(arguments.style, tensors=True)}")


def _load_ids(path: Path) -> Any:
    import numpy as np

    try:
        return np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"{path} is not a .npy file of token ids: {error}") from None


def _add_quantize(commands: Any) -> None:
    from .io import mixture

    command = _command(
        commands,
        "quantize",
        _quantize,
        "Quantize a float model to a GGUF file that llama.cpp loads, or its tensors to a safetensors file.",
    )
    command.add_argument("source", metavar="IN.gguf")
    command.add_argument("target", metavar="OUT", help="OUT.gguf, or OUT.safetensors for cuquant.load")
    command.add_argument(
        "--format",
        required=True,
        type=str.lower,
        choices=mixture.names(),
        help="of the weight matrices, or llama.cpp's mixtures (q4_k_m); GGUF has no kbit and int4 formats",
    )
    command.add_argument(
        "--pure", action="store_true", help="one format for all, where a mixture has its name (q6_k)"
    )
    command.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="copy tensors of these names unchanged (shell pattern; may be repeated)",
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to quantize (the GPU where one can be used)"
    )
    command.add_argument("--force", action="store_true", help="replace OUT")


def _quantize(arguments: argparse.Namespace) -> None:
    from .io.convert import quantize_file
    from .io.mixture import pure

    try:
        done = quantize_file(
            arguments.source,
            arguments.target,
            pure(arguments.format) if arguments.pure else arguments.format,
            keep=arguments.keep,
            force=arguments.force,
            device=arguments.device,
            progress=True,
        )
    except FileExistsError as error:
        raise FileExistsError(f"{error}; --force replaces it") from None
    print(
        f"{arguments.target}: {len(done.quantized)} tensors to {done.format}, {len(done.kept)} copied, "
        f"{done.source_bytes:,} -> {os.path.getsize(arguments.target):,} bytes",
        file=sys.stderr,
    )
    if done.ragged:
        print(f"kept in float, rows are not whole blocks: {', '.join(sorted(done.ragged))}", file=sys.stderr)
    if done.replaced:
        others = (f"{name} ({done.formats[name]})" for name in sorted(done.replaced))
        print(f"in another format, rows are not whole blocks: {', '.join(others)}", file=sys.stderr)


def _add_dump(commands: Any) -> None:
    command = _command(commands, "dump", _dump, "Show the metadata and tensors of a GGUF file.")
    command.add_argument("model", metavar="MODEL.gguf")
    command.add_argument("--json", action="store_true", help="one JSON object, arrays in full")


def _dump(arguments: argparse.Namespace) -> None:
    from .io import dump
    from .io.model import FallbackWarning, open

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # no tensor is read
        model = open(arguments.model)
    print(dump.as_json(model) if arguments.json else dump.as_text(model))


def _add_bench(commands: Any) -> None:
    command = _command(
        commands,
        "bench",
        _bench,
        "Time x @ W.T, or decode attention, on this GPU, next to other libraries and the bytes' floor; "
        "show a record.",
    )
    command.add_argument(
        "what", nargs="?", choices=("matmul", "attention"), default="matmul", help="what to time (matmul)"
    )
    command.add_argument(
        "--bits", metavar="B,B,...", type=_width_list, help="of cached tokens, or mixed (all)"
    )
    command.add_argument("--contexts", metavar="T,T,...", type=_int_list, help="cached tokens (1k to 128k)")
    command.add_argument(
        "--heads", metavar="H/K,...", type=_head_list, help="of queries, of keys (32/8,32/32)"
    )
    command.add_argument("--formats", metavar="F,F,...", type=_format_list, help="of W (all)")
    command.add_argument(
        "--activations",
        metavar="A,A,...",
        type=_activation_list,
        help="types of x: f16, bf16, f32, or q8_1, which counts quantizing f16 (f16,q8_1)",
    )
    command.add_argument("--shapes", metavar="NxK,...", type=_shape_list, help="rows by columns of W (five)")
    command.add_argument(
        "--batches",
        metavar="M,M,...",
        type=_int_list,
        help="rows of x (1,2,4,...,4096), or sequences (1,8,32)",
    )
    command.add_argument(
        "--peers",
        metavar="P,P",
        type=_peer_list,
        help="other libraries to time next to 4-bit formats: tinygemm (in torch), gemlite, or none "
        "(those that are installed)",
    )
    record = command.add_mutually_exclusive_group()
    record.add_argument(
        "--record", metavar="FILE.json", type=Path, help="write every cell there; continue it"
    )
    record.add_argument(
        "--from", dest="source", metavar="FILE.json", help="measure nothing, show this record (or some of it)"
    )
    command.add_argument(
        "--plot",
        metavar="FILE",
        type=_plot_path,
        help="also draw rooflines, and times over the floor: .png, .svg or .pdf (notebook extra)",
    )
    command.add_argument(
        "-o", dest="style", choices=("table", "md", "csv", "json"), default="table", help="output"
    )


def _activation_list(text: str) -> list[str]:
    names, known = text.split(","), ("f16", "bf16", "f32", "q8_1")
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"activations are {', '.join(known)}")
    return names


def _width_list(text: str) -> list[str]:
    from .bench.attention import WIDTHS

    names = text.split(",")
    if not {*names} <= {*WIDTHS}:
        raise argparse.ArgumentTypeError(f"bits are {', '.join(WIDTHS)}")
    return names


def _head_list(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [(int(q), int(k)) for q, k in (pair.split("/") for pair in text.split(","))]
    except ValueError:
        pairs = []
    if not pairs or any(k < 1 or q % k for q, k in pairs):
        raise argparse.ArgumentTypeError("heads are H/K, as 32/8: of queries, and of keys")
    return pairs


def _peer_list(text: str) -> list[str]:
    names, known = text.split(","), ("tinygemm", "gemlite")
    if text != "none" and not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"peers are {', '.join(known)}, or none")
    return [] if text == "none" else names


def _plot_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text}: a plot is a .png, .svg or .pdf file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    return path


def _int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shape_list(text: str) -> list[tuple[int, int]]:
    shapes = [tuple(int(part) for part in shape.split("x")) for shape in text.split(",")]
    if any(len(shape) != 2 for shape in shapes):
        raise argparse.ArgumentTypeError("a shape is NxK, as 14336x4096")
    return [(n, k) for n, k in shapes]


def _bench(arguments: argparse.Namespace) -> None:
    from .bench.record import Record, plotter

    draw = plotter() if arguments.plot else None  # before hours of measuring
    if arguments.source is None:
        record = _measured(arguments)
    else:
        record = Record.read(arguments.source).only(
            bits=arguments.bits,
            context=arguments.contexts,
            format=arguments.formats,
            activation=arguments.activations,
            shape=arguments.shapes,
            M=arguments.batches,
        )
    if draw is not None:
        draw(record).savefig(arguments.plot)
    print(record.render(arguments.style))


def _measured(arguments: argparse.Namespace) -> Any:
    """The record of what the arguments ask for, and of what it held before."""
    from tqdm import tqdm

    from .bench import Record, matmul, peers
    from .bench.matmul import BATCHES, SHAPES

    if arguments.what == "attention":
        return _measured_attention(arguments)
    others = peers.installed(arguments.peers)
    record = Record.start(arguments.record, [peer.package for peer in others])
    known = map(formats.get, formats.names())
    names = arguments.formats or [str(f) for f in known if f.on_gpu and not f.for_activations]
    activations = arguments.activations or ["f16", "q8_1"]
    shapes, batches = arguments.shapes or SHAPES, arguments.batches or BATCHES
    count = len(shapes) * len(batches) * len(names) * len(activations)
    cells = matmul(record, names, activations, shapes, batches, others)
    for cell in tqdm(cells, total=count, unit="cell", disable=None):
        tqdm.write(
            f"{cell.format} {cell.activation} {cell.M}x{cell.N}x{cell.K}: {cell.us} us", file=sys.stderr
        )
    return record


def _measured_attention(arguments: argparse.Namespace) -> Any:
    from importlib.util import find_spec

    from tqdm import tqdm

    from .bench import Record, attend
    from .bench.attention import BATCHES, CONTEXTS, HEADS, WIDTHS

    here = [package for package in ("torch", "flashinfer-python") if find_spec(package.split("-")[0])]
    record = Record.start(arguments.record, here)
    widths, contexts = arguments.bits or list(WIDTHS), arguments.contexts or CONTEXTS
    batches, heads = arguments.batches or BATCHES, arguments.heads or HEADS
    count = len(widths) * len(contexts) * len(batches) * len(heads)
    cells = attend(record, widths, contexts, batches, heads)
    for cell in tqdm(cells, total=count, unit="cell", disable=None):
        name = f"{cell.bits} bits, {cell.batch} x {cell.context}, {cell.heads}/{cell.kv_heads}"
        tqdm.write(f"{name}: {cell.us} us", file=sys.stderr)
    return record


def _add_info(commands: Any) -> None:
    _command(commands, "info", _info, "Show versions, GPU and kernel cache, and what would run.")


def _info(arguments: argparse.Namespace) -> None:
    from . import info

    print(info.as_text())


if __name__ == "__main__":
    sys.exit(main())
