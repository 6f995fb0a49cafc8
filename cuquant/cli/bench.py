"""`cuquant bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import formats
from .arguments import format_list, int_list, subcommand


def add(commands: Any) -> None:
    command = subcommand(
        commands,
        "bench",
        _bench,
        "Time x @ W.T on this GPU, next to cuBLAS, other libraries and the bytes' floor; show a record.",
    )
    command.add_argument(
        "what",
        nargs="?",
        choices=("matmul", "dequant"),
        default="matmul",
        help="products (the default), or ways to convert small codes to 16-bit floats: by bits, tables and "
        "byte permutes, in registers and inside the decode kernel",
    )
    command.add_argument("--formats", metavar="F,F,...", type=format_list, help="of W (all)")
    command.add_argument(
        "--activations",
        metavar="A,A,...",
        type=_activation_list,
        help="types of x: f16, bf16, f32, or q8_1, which counts quantizing f16 (f16,q8_1)",
    )
    command.add_argument(
        "--shapes",
        metavar="NxK,...",
        type=_shape_list,
        help="rows by columns of W (five; dequant: 14336x4096)",
    )
    command.add_argument(
        "--batches", metavar="M,M,...", type=int_list, help="rows of x (1,2,4,...,4096; dequant: 1,8)"
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
    command.set_defaults(wrong_usage=command.error)


def _activation_list(text: str) -> list[str]:
    names, known = text.split(","), ("f16", "bf16", "f32", "q8_1")
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"activations are {', '.join(known)}")
    return names


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


def _shape_list(text: str) -> list[tuple[int, int]]:
    shapes = [tuple(int(part) for part in shape.split("x")) for shape in text.split(",")]
    if any(len(shape) != 2 for shape in shapes):
        raise argparse.ArgumentTypeError("a shape is NxK, as 14336x4096")
    return [(n, k) for n, k in shapes]


def _bench(arguments: argparse.Namespace) -> None:
    from ..bench.record import Record, plotter

    if arguments.what == "dequant":
        given = (arguments.formats, arguments.activations, arguments.peers, arguments.plot)
        names = ("--formats", "--activations", "--peers", "--plot")
        for name in (name for name, value in zip(names, given, strict=True) if value is not None):
            arguments.wrong_usage(f"dequant takes no {name}")
    draw = plotter() if arguments.plot else None  # before hours of measuring
    if arguments.source is None:
        record = _measured(arguments)
    else:
        record = Record.read(arguments.source).only(
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

    record, cells, count = (_dequant if arguments.what == "dequant" else _matmul)(arguments)
    for cell in tqdm(cells, total=count, unit="cell", disable=None):
        tqdm.write(f"{cell}: {cell.us} us", file=sys.stderr)
    return record


def _matmul(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of products as they are measured, and how many there will be."""
    from ..bench import Record, matmul, peers
    from ..bench.matmul import BATCHES, SHAPES

    others = peers.installed(arguments.peers)
    record = Record.start(arguments.record, [peer.package for peer in others])
    known = map(formats.get, formats.names())
    names = arguments.formats or [str(f) for f in known if f.on_gpu and not f.for_activations]
    activations = arguments.activations or ["f16", "q8_1"]
    shapes, batches = arguments.shapes or SHAPES, arguments.batches or BATCHES
    cells = matmul(record, names, activations, shapes, batches, others)
    return record, cells, len(shapes) * len(batches) * len(names) * len(activations)


def _dequant(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The same of conversions."""
    from ..bench import Record, dequant
    from ..bench.conversions import CONVERSIONS
    from ..bench.dequant import BATCHES, SHAPES

    record = Record.start(arguments.record)
    shapes, batches = arguments.shapes or SHAPES, arguments.batches or BATCHES
    in_decode = sum(conversion.weights is not None for conversion in CONVERSIONS.values())
    count = 1 + len(CONVERSIONS) + len(shapes) * len(batches) * in_decode
    return record, dequant(record, shapes, batches), count
