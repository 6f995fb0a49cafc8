"""What arguments of several commands are made of."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from .. import formats
from ..formats.base import UnknownFormatError


def subcommand(
    commands: Any,
    name: str,
    run: Callable[[Any], None],
    text: str,
    left: Callable[[Any], str] = lambda arguments: "nothing was written",
    replaces: str | None = None,
) -> argparse.ArgumentParser:
    """A command's parser; `left` says what an interruption leaves behind.

    `replaces` is the argument that names a file which the command puts in place as a whole: see `left_at`.
    """
    made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    made.set_defaults(run=run, left=left, replaces=replaces)
    return made


def add_device(command: argparse.ArgumentParser, verb: str) -> None:
    """Where a command does what it does."""
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help=f"where to {verb} (the GPU where one can be used)"
    )


def add_table_style(command: argparse.ArgumentParser) -> None:
    """As what a command prints its table."""
    command.add_argument(
        "-o", dest="style", choices=("table", "md", "csv", "json"), default="table", help="output"
    )


def stamp(path: str | os.PathLike[str] | None) -> tuple[int, int] | None:
    """What changes when a file is replaced: its inode and time of change; None where there is no file."""
    try:
        status = None if path is None else os.stat(path)
    except (OSError, ValueError):  # a path that no file can have
        return None
    return status and (status.st_ino, status.st_mtime_ns)


def replaced(arguments: argparse.Namespace) -> Any:
    """The path of the file that the command puts in place; None for commands without one."""
    return None if arguments.replaces is None else getattr(arguments, arguments.replaces)


def left_at(arguments: argparse.Namespace) -> str:
    """What an interruption leaves of that file: the old one, the new one, or none."""
    path = replaced(arguments)
    now = stamp(path)
    if now is None:
        return f"{path} was not written, and no part of it is left"
    return f"{path} is as it was" if now == arguments.before else f"{path} is the new file, and whole"


@contextmanager
def replacing_by_option(path: Any) -> Iterator[None]:
    """Surround what writes that file: where it exists, the error of a command, whose option replaces it."""
    try:
        yield
    except FileExistsError:
        raise FileExistsError(f"{path} exists; --force replaces it") from None


def format_list(text: str) -> list[str]:
    made = []
    for name in _names(text):
        with _named():
            made.append(str(formats.get(name)))
    return made


@contextmanager
def _named() -> Iterator[None]:
    """Surround what looks a name up: where there is none, the error of a command, which is not in Python."""
    try:
        yield
    except UnknownFormatError as error:
        raise argparse.ArgumentTypeError(error.of_command) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def file_format_list(text: str) -> list[str]:
    """Formats or mixtures, each once; a recipe has commas of its own."""
    from ..io import mixture

    if "=" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a recipe: make a file by cuquant quantize --format, and evaluate that, or call "
            'cuquant.evaluate(formats={"*": "q4_k"})'
        )
    names = _names(text)
    with _named():
        mixture.refuse_floats(names, "the first row is of the original as it is")
    return list(dict.fromkeys(file_format(name) for name in names))


def of_spaced_formats(given: Sequence[str], rest: Sequence[str]) -> str:
    """A hint where a word that no argument takes, or no file is called, is a format behind --formats'."""
    for at, word in enumerate(given):
        option, _, value = word.partition("=")
        behind = given[at + (1 if value else 2) :]
        asks = option.startswith("--f") and "--formats".startswith(option)
        if asks and behind and behind[0] in rest and _are_formats(behind[0]):
            return "; formats are separated by commas: --formats q4_0,q8_0"
    return ""


def _are_formats(text: str) -> bool:
    with suppress(argparse.ArgumentTypeError):
        return bool(file_format_list(text))
    return False


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name; names are separated by commas")
    return names


def file_format(name: str) -> str:
    from ..io import mixture

    with _named():
        return str(mixture.get(name))


def recipe_or_format(text: str) -> str | dict[str, str]:
    """PATTERN=FORMAT, several separated by commas, or the name of a format or mixture."""
    from ..io import mixture

    kept = "tensors that --keep names, or no PATTERN matches, are copied as they are; "
    kept += "cuquant dequantize makes a file of floats"
    if "=" not in text:
        with _named():
            mixture.refuse_floats([text], kept)
        return file_format(text)
    rules: dict[str, str] = {}
    for rule in text.split(","):
        pattern, _, name = (part.strip() for part in rule.rpartition("="))
        if not pattern or pattern in rules:
            again, none = "names a pattern again", "is no PATTERN=FORMAT (patterns have no commas here)"
            raise argparse.ArgumentTypeError(f"{rule!r} in {text!r} {again if pattern else none}")
        rules[pattern] = name
    with _named():
        mixture.refuse_floats(rules.values(), kept)
    for pattern, name in rules.items():
        with _named():
            mixture.get({pattern: name})
    return rules


def int_list(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive whole numbers, as 1,16,4096")
    return numbers


def positive_int(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number
