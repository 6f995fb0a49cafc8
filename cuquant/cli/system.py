"""`cuquant info` and `cuquant warmup`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..render import counted
from .arguments import int_list, subcommand


def add(commands: Any) -> None:
    """Add the commands to the parser's."""
    command = subcommand(
        commands,
        "warmup",
        _warmup,
        "Compile ahead the kernels that products with a model's weights need.",
        lambda arguments: "kernels compiled so far are kept, and the same command goes on from there",
    )
    command.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="MODEL.gguf, or MODEL.safetensors that quantize or dequantize wrote",
    )
    command.add_argument(
        "--batches", metavar="M,M,...", type=int_list, help="rows of x (1,2,4,...,512)", default=None
    )
    subcommand(commands, "info", _info, "Show versions, GPU and kernel cache, and what would run.")


def _warmup(arguments: argparse.Namespace) -> None:
    from ..warmup import BATCHES, warmup

    for model in arguments.models:
        count = warmup(model, arguments.batches or BATCHES, progress=True)
        print(f"{model}: {counted(count, 'kernel')} ready", file=sys.stderr)


def _info(arguments: argparse.Namespace) -> None:
    from .. import info

    print(info.as_text())
