"""`cuquant info`."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import subcommand


def add(commands: Any) -> None:
    subcommand(commands, "info", _info, "Show versions, GPU and kernel cache, and what would run.")


def _info(arguments: argparse.Namespace) -> None:
    from .. import info

    print(info.as_text())
