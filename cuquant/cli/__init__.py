"""The `cuquant` command: results on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from typing import Any, NoReturn

from .. import __version__
from . import bench, evaluation, files, system
from .arguments import of_spaced_formats, replaced, stamp


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for a failure, 130, 143 and 129 for an interruption
    by Ctrl-C, SIGTERM or SIGHUP.

    Wrong usage exits with 2.
    """
    given = sys.argv[1:] if argv is None else argv
    arguments = _parsed(given)
    arguments.before = stamp(replaced(arguments))
    with _own_output():
        return _run(arguments, given)


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """Run what the words say; the exit status."""
    try:
        with _signals_interrupt():
            arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; keep Python from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interruption:
        with suppress(OSError):  # SIGHUP says that the terminal is gone
            print(f"cuquant: interrupted: {arguments.left(arguments)}", file=sys.stderr)
        return interruption.status if isinstance(interruption, _Ended) else 130
    except MemoryError as error:
        print(f"cuquant: error: out of memory{f': {error}' if str(error) else ''}", file=sys.stderr)
        return 1
    except (OSError, ValueError, TypeError, RuntimeError, ImportError) as error:
        absent = [str(error.filename)] if isinstance(error, FileNotFoundError) else []
        told = str(error).removeprefix(f"[Errno {getattr(error, 'errno', None)}] ")
        print(f"cuquant: error: {told}{of_spaced_formats(given, absent)}", file=sys.stderr)
        return 1
    return 0


def _parsed(given: Sequence[str]) -> argparse.Namespace:
    """Arguments parsed from the words, each of which some argument takes."""
    made = parser()
    arguments, rest = made.parse_known_args(given)
    if rest:
        made.error(f"unrecognized arguments: {' '.join(rest)}{of_spaced_formats(given, rest)}")
    return arguments


@contextmanager
def _own_output() -> Iterator[None]:
    """What is printed inside is a command's: a warning is a line, and characters that the encoding of a pipe
    lacks are escapes. Whoever calls `main` finds the process as it was."""
    with ExitStack() as stack:
        if sys.stderr is None:  # closed: print would take stdout for it, where results are
            stack.enter_context(redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        stack.enter_context(_in_lines())
        yield


@contextmanager
def _in_lines() -> Iterator[None]:
    """Warnings inside are lines, and what is printed has escapes."""
    show = warnings.showwarning
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    errors = [stream.errors for stream in streams]
    warnings.showwarning = _show_warning
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        warnings.showwarning = show
        for stream, before in zip(streams, errors, strict=True):
            with suppress(OSError, ValueError):  # a full disk, or a stream that is closed
                stream.reconfigure(errors=before)


_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a process; Windows lacks the one of a terminal that closes."""


class _Ended(KeyboardInterrupt):
    """A signal of `_ENDING` came."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let signals of `_ENDING` end what runs inside as Ctrl-C does, so that no part of a file is left; not
    where another handles or ignores them."""
    here = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDING if here and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _ended)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _ended(number: int, frame: Any) -> NoReturn:
    for each in _ENDING:
        if signal.getsignal(each) is _ended:
            signal.signal(each, signal.SIG_IGN)  # `timeout` sends two: the second may not end the clean-up
    raise _Ended(number)


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"cuquant: warning: {message}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command and all its subcommands."""
    made = argparse.ArgumentParser(prog="cuquant", description="Evaluate, convert and time quantized models.")
    made.add_argument("--version", action="version", version=f"cuquant {__version__}")
    commands = made.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (evaluation, files, bench, system):
        module.add(commands)
    return made
