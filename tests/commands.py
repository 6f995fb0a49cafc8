"""Commands as tests run them: in this process, or in one of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from gguf_files import HELD_OUT

from cuquant import cli

FEW = ("--text", HELD_OUT, "--chunks", "2", "--ctx", "64")
"""Arguments that evaluate little of a text."""


class Done(NamedTuple):
    status: int | str | None
    out: str
    err: str


Run = Callable[..., Done]


def run(*arguments: object) -> int | str | None:
    """The exit status of a command in this process."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as leaving:  # argparse
        return leaving.code


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A command in a process of its own, its output in pipes."""
    return python("-m", "cuquant", *arguments, **options)


def python(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The same of Python with any arguments."""
    command = [sys.executable, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, errors="replace", encoding="utf-8", **(pipes | options))


def finish(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=60)
    return Done(process.returncode, out, err)


def assert_one_line_error(done: Done) -> None:
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("cuquant: error: ")
    assert done.err.count("\n") == 1


def assert_interrupted(done: Done, left: str) -> None:
    assert done == (130, "", f"cuquant: interrupted: {left}\n")


def interrupted(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt
