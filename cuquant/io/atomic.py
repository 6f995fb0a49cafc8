"""Files that are there as a whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SHOWN = 50
"""Characters of a target's name that a temporary file has in its own: with four bytes each it stays below the
255 that file systems allow."""
_OF_PROCESS = re.compile(r"([0-9a-f]{8})[0-9a-f]{8}\.part")
"""How a temporary file's name ends: with the id of the process that writes it, and what no other file has."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let one of several processes of one machine at a time into the block for a folder; where the system has
    no such locks (Windows), let all."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def rewrite(target: Path, made: Callable[[], str | None]) -> None:
    """Give a file the text that `made` returns, in UTF-8; None leaves it as it is.

    What `made` reads of the file is what is replaced: other processes of this machine that do so wait
    meanwhile, and none's change is lost. OSError as of `replacing`, and what `made` raises.
    """
    with alone(place_of(target).parent):
        text = made()
        if text is not None:
            with replacing(target) as part:
                part.write_text(text, encoding="utf-8")


class _NotNow(Exception):
    """Raised to leave the file as it is."""


def check_rewrite(target: Path) -> None:
    """OSError where `rewrite` could not give the file a text: to be known before hours of work for it."""
    with suppress(_NotNow), alone(place_of(target).parent), replacing(target):
        raise _NotNow


@contextmanager
def replacing(target: Path, force: bool = True) -> Iterator[Path]:
    """A temporary file beside `target` to be written; it takes the target's place when the block ends.

    An exception inside leaves the target as it was, and nothing else behind. Of a symbolic link the file
    takes the place that it points to. It has the mode of the file that it replaces. Temporary files that
    processes left which were killed are removed before, where that can be told (see `_mark`).

    Raises
    ------
    FileExistsError
        The target exists and `force` is false: before the block, or after it if it has appeared meanwhile.
    OSError
        Before the block: the target's folder is missing, or the target is a folder, a device, a pipe, or a
        symbolic link that leads back to itself.
    """
    place = place_of(target, force)
    mark = _mark(place)
    if mark is None:
        mark = secrets.token_hex(6)
    else:
        _remove_left(place, mark)
    temporary = place.with_name(f".{place.name[:_SHOWN]}.{mark}{os.getpid():08x}{secrets.token_hex(4)}.part")
    try:
        # Made as any new file, it has the mode that the umask leaves; written as one of the user alone.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = (place if place.exists() else temporary).stat().st_mode & 0o777
        temporary.chmod(0o600)
        yield temporary
        with temporary.open("r+b") as file:  # else a crash could leave the new name with bytes missing
            os.fsync(file.fileno())
        temporary.chmod(mode)
        if force:
            temporary.replace(place)
        else:
            _put(temporary, place, target)
    except BaseException as error:
        # An interruption may come after the replacing, and where nothing may be made nothing was.
        with suppress(OSError):
            temporary.unlink()
        own = isinstance(error, OSError) and error.filename in (None, temporary, str(temporary))
        if isinstance(error, OSError) and own and error.errno is not None:
            # A full disk has no name, and the temporary one nobody has given.
            raise OSError(error.errno, error.strerror, str(target)) from error
        if type(error) is OSError and error.errno is None:  # NumPy's, of a full disk
            raise OSError(f"{target} could not be written (is the disk full?): {error}") from error
        raise


def _mark(place: Path) -> str | None:
    """What names of temporary files for a target have in common whose processes this one can look for by
    their ids: none of another machine that shares the folder, of another container or from before a restart,
    where an id says nothing. None where the system does not tell these apart (all but Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        ids = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    host = os.uname().nodename  # copies of a virtual machine that runs have one boot_id
    told = [boot, *map(os.fsencode, (ids, host, place.name))]
    return hashlib.sha256(b"\0".join(told)).hexdigest()[:12]


def _remove_left(place: Path, mark: str) -> None:
    """Remove temporary files for a target, those of a mark, whose processes have ended."""
    begin = f".{place.name[:_SHOWN]}.{mark}"
    with suppress(OSError):  # a folder may be one that is written, and not read
        for name in os.listdir(place.parent):
            found = name.startswith(begin) and _OF_PROCESS.fullmatch(name, len(begin))
            if found and _has_ended(int(found[1], 16)):
                with suppress(OSError):
                    place.with_name(name).unlink()


def _has_ended(process: int) -> bool:
    """Whether there is no process of that id."""
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no id
        return False
    return False


def _put(temporary: Path, place: Path, target: Path) -> None:
    """Give a file its name, unless that is taken: a rename would replace what is there."""
    try:
        os.link(temporary, place)
    except OSError:
        if os.path.lexists(place):
            raise _taken(target) from None
        temporary.replace(place)  # the file system has no links
    else:
        temporary.unlink()


def place_of(target: Path, force: bool = True) -> Path:
    """Where the file lies that `replacing` writes; its errors from before the block."""
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder")
    if target.exists() and not target.is_file():
        raise OSError(f"{target} is no ordinary file: nothing can take its place")
    if os.path.islink(os.path.realpath(target)):
        raise OSError(f"{target} is a symbolic link that leads back to itself")
    if target.exists() and not force:
        raise _taken(target)
    place = Path(os.path.realpath(target)) if target.is_symlink() else target
    folder = place.parent
    if not folder.is_dir():
        problem = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        raise FileNotFoundError(f"{problem}: {place.name} cannot be written there")
    return place


def _taken(target: Path) -> FileExistsError:
    return FileExistsError(f"{target} exists; force=True replaces it")
