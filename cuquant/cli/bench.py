"""`cuquant bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import device, formats
from ..render import counted, progress_bar
from .arguments import add_table_style, format_list, int_list, left_at, positive_int, subcommand


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    command = subcommand(
        commands,
        "bench",
        _bench,
        "Time products, mixtures of experts, attention, appends, conversions, passes over weights or the "
        "host's part, next to other libraries and the bytes' floor; show a record.",
        _left,
        replaces="plot",
    )
    command.add_argument(
        "what",
        nargs="?",
        choices=tuple(kind for kind in _KINDS if kind != "tune"),
        help="x @ W.T (the default, but --from shows all of a record); mixtures of experts with gates of the "
        "shapes; attention over quantized keys and values; appending to these; ways to convert small "
        "codes to 16-bit floats; quantizing, dequantizing and preparing weights; or the host's part of calls",
    )
    command.add_argument("--formats", metavar="F,F,...", type=format_list, help="of W (all; moe: q4_0)")
    command.add_argument(
        "--activations",
        metavar="A,A,...",
        type=_activation_list,
        help="types of x: f16, bf16, f32, or q8_1, which counts quantizing f16 (f16,q8_1; moe: f16)",
    )
    command.add_argument(
        "--shapes",
        metavar="NxK,...",
        type=_shape_list,
        help="rows by columns of W (five; moe and dequant: 14336x4096, weights: 32768x8192, host: 4096x4096)",
    )
    command.add_argument(
        "--batches",
        metavar="M,M,...",
        type=int_list,
        help="rows of x (1,2,4,...,4096; dequant: 1,8), or sequences (attention: 1,8,32, append: 1,8)",
    )
    command.add_argument("--experts", metavar="E", type=positive_int, help="moe: experts (8)")
    command.add_argument("--top-k", metavar="K", type=positive_int, help="moe: experts of a token (2)")
    command.add_argument(
        "--bits",
        metavar="B,B,...",
        type=_width_list,
        help="attention, append: of cached tokens; attention: or mixed (all)",
    )
    command.add_argument(
        "--contexts",
        metavar="T,T,...",
        type=int_list,
        help="attention: cached tokens (1024 to 131072) of each sequence, in the mean",
    )
    command.add_argument(
        "--lengths",
        metavar="L,L,...",
        type=_lengths_list,
        help="attention: how long sequences are next to --contexts: equal; spread, in even steps from 1/8 to "
        "15/8 of it; one-long, the first six times as long as each other (all, but of the latter two few "
        "sizes; equal where --contexts or --batches are given)",
    )
    command.add_argument(
        "--heads",
        metavar="H/K,...",
        type=_head_list,
        help="attention, append: of queries, of keys (32/8,32/32)",
    )
    command.add_argument(
        "--queries",
        metavar="Q,Q,...",
        type=int_list,
        help="attention: of each sequence, its last tokens; as many as contexts have are whole prompts (1)",
    )
    command.add_argument(
        "--tokens", metavar="T,T,...", type=int_list, help="append: of each sequence in a call (1,16,512)"
    )
    command.add_argument(
        "--peers",
        metavar="P,P",
        type=_peer_list,
        help="other libraries to time next to 4-bit formats: tinygemm (in torch), gemlite, or none "
        "(those that are installed)",
    )
    command.add_argument(
        "--tune",
        action="store_true",
        help="products: find the fastest launch of each on this GPU, check its result, and keep it for what "
        "is computed here later (batches: 1,2,4,8,16)",
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
        help="also draw rooflines of products, and times over the floor: .png, .svg or .pdf (notebook extra)",
    )
    add_table_style(command)
    command.set_defaults(wrong_usage=command.error)
    command.epilog = (
        "In tables us are microseconds, as is all that ends so: floor_us, the time to move the bytes or to "
        "compute, whichever is longer, at rates that the GPU was measured to have, and to launch; "
        "cublas_us, dense float16 by cuBLAS, and other libraries' times. gbps and tflops are 10^9 bytes and "
        "10^12 operations a second, nmse is the error against float64, core the kernel that was chosen, mhz "
        "the mean clock meanwhile. time / floor is better the less it is, speed / cuBLAS the more. Of "
        "attention, context is the mean of the sequences' lengths, and other libraries are timed where these "
        "are equal. Of tuning, us is the launch that is used now, of so many tried, usual_us the one before, "
        "and tile the constants in which they differ. Of weights, prepare is bytes to the kernels' layout "
        "and restore the way back; encode and repack are the kernels of quantize and prepare alone."
    )


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
    try:
        shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in text.split(","))]
    except ValueError:
        shapes = []
    if not shapes or any(min(shape) < 1 for shape in shapes):
        raise argparse.ArgumentTypeError(f"invalid shapes {text!r}: a shape is NxK, as 14336x4096")
    return shapes


def _width_list(text: str) -> list[str]:
    from ..bench.attention import WIDTHS

    names = text.split(",")
    if not {*names} <= {*WIDTHS}:
        raise argparse.ArgumentTypeError(f"bits are {', '.join(WIDTHS)}")
    return names


def _lengths_list(text: str) -> list[str]:
    from ..bench.attention import SIZES

    names = text.split(",")
    if not {*names} <= {*SIZES}:
        raise argparse.ArgumentTypeError(f"lengths are {', '.join(SIZES)}")
    return names


def _head_list(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [(int(q), int(k)) for q, k in (pair.split("/") for pair in text.split(","))]
    except ValueError:
        pairs = []
    if not pairs or any(min(q, k) < 1 or q % k for q, k in pairs):
        raise argparse.ArgumentTypeError("heads are H/K, as 32/8: of queries, and of keys")
    return pairs


def _bench(arguments: argparse.Namespace) -> None:
    from ..bench.record import plotter
    from ..io.atomic import replacing

    if arguments.tune:
        if arguments.source is not None or arguments.what not in (None, _DEFAULT):
            arguments.wrong_usage(
                "--tune measures products: it goes with neither --from nor another benchmark"
            )
        arguments.what = "tune"
    if arguments.peers is not None and arguments.source is not None:
        arguments.wrong_usage("--peers are timed, and --from times nothing")
    what = arguments.what or (_DEFAULT if arguments.source is None else None)
    if what is not None:
        takes, _ = _KINDS[what]
        for name in (*_OPTIONS, "plot"):
            if name not in takes and getattr(arguments, name) is not None:
                arguments.wrong_usage(f"{what} takes no {_written(name)}")
    if arguments.source is None:
        _needs_a_gpu()
    draw = plotter() if arguments.plot else None  # before hours of measuring
    if arguments.source is None:
        record = _measured(arguments)
        count = f"{len(record.cells)} cells"
        if arguments.tune:
            count += f"; used are {_kept()}"
    else:
        record, count = _selected(arguments)

    def show() -> None:
        print(f"{count}, {record.origin}", file=sys.stderr)
        print(record.render(arguments.style))

    if draw is not None:
        try:
            figure = draw(record)
            with replacing(arguments.plot) as part:
                figure.savefig(part, format=arguments.plot.suffix[1:].lower())
        except Exception:
            if arguments.source is None:
                show()  # what was measured is not lost with its picture
            raise
    show()


def _needs_a_gpu() -> None:
    """RuntimeError where there is none, with what can be shown all the same."""
    try:
        device.cupy()
    except RuntimeError as error:
        raise RuntimeError(f"{error}; --from RECORD.json shows a record of another machine's GPU") from None


def _written(name: str) -> str:
    """An option as people write it."""
    return f"--{name.replace('_', '-')}"


def _selected(arguments: argparse.Namespace) -> tuple[Any, str]:
    """The part of a record that the arguments ask for, and how much of it that is."""
    from ..bench.record import Record

    whole = Record.read(arguments.source)
    held = list(dict.fromkeys(cell["op"] for cell in whole.cells))
    kinds = [arguments.what] if arguments.what else held
    taken = {name for kind in kinds for name in _KINDS[kind][0]}
    for name in _OPTIONS:
        if held and name not in taken and getattr(arguments, name) is not None:
            raise ValueError(
                f"{arguments.source} has cells of {', '.join(held)}, which take no {_written(name)}"
            )
    wanted = {cell: getattr(arguments, name) for name, cell in _OPTIONS.items() if cell}
    wanted = {name: [v] if isinstance(v, int) else v for name, v in wanted.items()}
    if {*kinds} <= {"attention", "append"}:
        wanted["batch"] = wanted.pop("M")  # an error names what there is as its table does
    record = whole.only(op=arguments.what and [arguments.what], **wanted)
    if lacking := record.lacking(**wanted):
        print(f"{arguments.source}: among these cells is {lacking}", file=sys.stderr)
    return record, f"{arguments.source}: {len(record.cells)} of {len(whole.cells)} cells"


def _measured(arguments: argparse.Namespace) -> Any:
    """The record of what the arguments ask for, with what it held before."""
    _, cells_of = _KINDS[arguments.what or _DEFAULT]
    record, cells, count = cells_of(arguments)
    with progress_bar(True, "cell", cells, count) as bar:
        for cell in bar:
            bar.write(f"{cell}: {cell.us} us", file=sys.stderr)
    return record


def _kept() -> str:
    """Which launches are used, in words: tuned products and their file, or the usual ones."""
    from ..cuda import jit

    count = len(jit.gpu().tuned or ())
    return (
        f"{counted(count, 'tuned product')} of this GPU in {device.tuned_file()}"
        if count
        else "the usual launches"
    )


def _left(arguments: argparse.Namespace) -> str:
    record = arguments.record
    plot = None if arguments.plot is None else left_at(arguments)
    if arguments.source is not None:
        return plot or "nothing was written"
    if arguments.tune and record is None:
        return f"what was found so far is kept: used are {_kept()}"
    if record is None:
        return f"{plot or 'nothing was written'}; --record FILE.json keeps every cell that is measured"
    cells = (
        f"{record} has every cell so far, and the same command goes on from there"
        if record.exists()
        else f"no cell is measured, and {record} was not written"
    )
    return f"{cells}; {plot}" if plot else cells


def _matmul(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of products as they are measured, and how many there will be."""
    from ..bench import Record, matmul, peers
    from ..bench.matmul import BATCHES, SHAPES

    others = peers.installed(arguments.peers)
    record = Record.start(arguments.record, [peer.package for peer in others])
    names = arguments.formats or _weight_formats()
    activations = arguments.activations or ["f16", "q8_1"]
    shapes, batches = arguments.shapes or SHAPES, arguments.batches or BATCHES
    cells = matmul(record, names, activations, shapes, batches, others)
    return record, cells, len(shapes) * len(batches) * len(names) * len(activations)


def _tune(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of products' fastest launches as they are tuned, and how many there will be."""
    from ..bench import Record, tune
    from ..bench.tune import BATCHES, SHAPES, problems

    record = Record.start(arguments.record, by_tuned=False)
    names, shapes = arguments.formats or _weight_formats(), arguments.shapes or SHAPES
    keys = problems(names, shapes, arguments.batches or BATCHES)
    return record, tune(record, keys), len(keys)


def _weight_formats() -> list[str]:
    """Names of the formats that weights on a GPU can have."""
    known = map(formats.get, formats.names())
    return [str(f) for f in known if f.on_gpu and not f.for_activations]


def _moe(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of mixtures as they are measured, and how many there will be."""
    from ..bench import Record, moe
    from ..bench.moe import BATCHES, SHAPES

    record = Record.start(arguments.record)
    names, activations = arguments.formats or ["q4_0"], arguments.activations or ["f16"]
    shapes, batches = arguments.shapes or SHAPES, arguments.batches or BATCHES
    experts, top_k = arguments.experts or 8, arguments.top_k or 2
    cells = moe(record, names, activations, shapes, batches, experts, top_k)
    return record, cells, len(shapes) * len(batches) * len(names) * len(activations)


def _attention(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of attention as they are measured, and how many there will be."""
    from importlib.util import find_spec

    from ..bench import Record, attend
    from ..bench.attention import cell_keys

    asked = {name: getattr(arguments, name) for name in _KINDS["attention"][0]}
    cells = cell_keys(**asked)
    here = [package for package in ("torch", "flashinfer-python") if find_spec(package.split("-")[0])]
    record = Record.start(arguments.record, here)
    return record, attend(record, cells), sum(map(len, cells))


def _append(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of appended tokens as they are measured, and how many there will be."""
    from ..bench import Record, append
    from ..bench.append import BATCHES, BITS, TOKENS
    from ..bench.attention import HEADS

    bits, tokens = arguments.bits or list(BITS), arguments.tokens or TOKENS
    if not {*bits} <= {*BITS}:
        arguments.wrong_usage(f"append takes tokens of one width: {', '.join(BITS)} bits")
    batches, heads = arguments.batches or BATCHES, arguments.heads or HEADS
    record = Record.start(arguments.record)
    cells = append(record, bits, tokens, batches, heads)
    return record, cells, len(bits) * len(tokens) * len(batches) * len(heads)


def _dequant(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of conversions as they are measured, and how many there will be."""
    from ..bench import Record, dequant
    from ..bench.conversions import CONVERSIONS
    from ..bench.dequant import BATCHES, SHAPES

    record = Record.start(arguments.record)
    shapes, batches = arguments.shapes or SHAPES, arguments.batches or BATCHES
    in_decode = sum(conversion.weights is not None for conversion in CONVERSIONS.values())
    count = 1 + len(CONVERSIONS) + len(shapes) * len(batches) * in_decode
    return record, dequant(record, shapes, batches), count


def _weights(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of passes over weights as they are measured, and how many there will be."""
    from ..bench import Record, weights
    from ..bench.weights import SHAPES, works

    record = Record.start(arguments.record)
    shapes = arguments.shapes or SHAPES
    names = arguments.formats or _weight_formats()
    cells = sum(len(works(formats.get(name))) for name in names)
    return record, weights(record, names, shapes), cells * len(shapes)


def _host(arguments: argparse.Namespace) -> tuple[Any, Any, int]:
    """The record, cells of what calls take the host as they are measured, and how many there will be."""
    from ..bench import Record, host
    from ..bench.host import SHAPES, count

    record = Record.start(arguments.record)
    names, shapes = arguments.formats or _weight_formats(), arguments.shapes or list(SHAPES)
    return record, host(record, names, shapes), count(names, shapes)


_OPTIONS = {
    "formats": "format",
    "activations": "activation",
    "shapes": "shape",
    "batches": "M",
    "experts": "experts",
    "top_k": "top_k",
    "bits": "bits",
    "contexts": "context",
    "heads": "head_layout",
    "queries": "queries",
    "lengths": "lengths",
    "tokens": "tokens",
    "peers": None,
}
"""Options that say what is measured, and what a record's cells call it, if it selects among them."""
_KINDS: dict[str, tuple[set[str], Callable[[argparse.Namespace], tuple[Any, Any, int]]]] = {
    "matmul": ({"formats", "activations", "shapes", "batches", "peers", "plot"}, _matmul),
    "moe": ({"formats", "activations", "shapes", "batches", "experts", "top_k"}, _moe),
    "attention": ({"bits", "contexts", "heads", "batches", "queries", "lengths"}, _attention),
    "append": ({"bits", "heads", "batches", "tokens"}, _append),
    "dequant": ({"shapes", "batches"}, _dequant),
    "weights": ({"formats", "shapes"}, _weights),
    "host": ({"formats", "shapes"}, _host),
    "tune": ({"formats", "shapes", "batches"}, _tune),
}
"""What can be measured: the options that it takes, and its cells."""
_DEFAULT = "matmul"
