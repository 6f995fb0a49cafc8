"""The `cuquant` command: results on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from .. import __version__
from . import bench, evaluation, files, system
from .arguments import replaced, stamp


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for a failure, 130 for an interruption.

    Wrong usage exits with 2.
    """
    arguments = parser().parse_args(argv)
    arguments.before = stamp(replaced(arguments))
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
        print(f"cuquant: interrupted: {arguments.left(arguments)}", file=sys.stderr)
        return 130
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        print(f"cuquant: error: {error}", file=sys.stderr)
        return 1
    return 0


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"cuquant: warning: {message}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Of the command and all its subcommands."""
    made = argparse.ArgumentParser(prog="cuquant", description="Evaluate, convert and time quantized models.")
    made.add_argument("--version", action="version", version=f"cuquant {__version__}")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (evaluation, files, bench, system):
        module.add(commands)
    return made
