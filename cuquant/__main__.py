"""`python -m cuquant`, and the `cuquant` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line, as `cuquant.cli.main` does, and heed Ctrl-C also while that is imported and reads
    its words; what comes before is Python's import of the package."""
    try:
        from .cli import main as command

        return command()
    except KeyboardInterrupt:
        print("cuquant: interrupted: nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
