"""What arguments of several commands are made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .. import formats


def subcommand(
    commands: Any,
    name: str,
    run: Callable[[Any], None],
    text: str,
    left: Callable[[Any], str] = lambda arguments: "nothing was written",
) -> argparse.ArgumentParser:
    """A command's parser; `left` says what an interruption leaves behind."""
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    made.set_defaults(run=run, left=left)
    return made


def format_list(text: str) -> list[str]:
    try:
        return [str(formats.get(name.strip())) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def file_format_list(text: str) -> list[str]:
    from ..io import mixture

    try:
        return [str(mixture.get(name.strip())) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
