"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary file beside `target` to be written; it takes the target's place when the block ends.

    An exception inside leaves the target as it was, and nothing else behind. Of a symbolic link the file
    takes the place that it points to.

    Raises
    ------
    OSError
        Before the block: the target's folder is missing, or the target is a folder, or a device or pipe.
    """
    ordinary(target)
    target = Path(os.path.realpath(target)) if target.is_symlink() else target
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder: {target.name} cannot be written there")
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    try:
        yield Path(name)
        with open(name, "r+b") as file:  # else a crash could leave the new name with bytes missing
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)  # an interruption may come after the replacing
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(target)) from error  # a full disk has no name
        if type(error) is OSError and error.errno is None:  # NumPy's, of a full disk
            raise OSError(f"{target} could not be written (is the disk full?): {error}") from error
        raise


def ordinary(target: Path) -> None:
    """OSError if there is something that no file can take the place of: a folder, a device, a pipe."""
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder")
    if target.exists() and not target.is_file():
        raise OSError(f"{target} is no ordinary file: nothing can take its place")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
