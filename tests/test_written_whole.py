"""Files are written whole or not at all: what a failure in the middle leaves, and who may read them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import untouched, write
from test_convert import small

import cuquant as cq
from cuquant.io import atomic
from cuquant.io.convert import quantize_file


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["write_kv_data_to_file", "write_tensor_data"])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interruption_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException], existing: bool
) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    if existing:
        target.write_text("precious")
    original, calls = getattr(gguf.GGUFWriter, method), []

    def interrupted(self: gguf.GGUFWriter, *args: Any) -> None:
        original(self, *args)
        calls.append(sorted(tmp_path.iterdir()))
        if len(calls) == 2 or method != "write_tensor_data":
            raise error

    monkeypatch.setattr(gguf.GGUFWriter, method, interrupted)
    with untouched(tmp_path), pytest.raises(error):
        quantize_file(source, target, "q4_0", force=existing)
    assert len(calls[-1]) == 2 + existing  # the unfinished file was there


def test_an_interruption_as_the_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, close = small(tmp_path / "s.gguf"), os.close

    def interrupted(number: int) -> None:
        close(number)
        raise KeyboardInterrupt

    with untouched(tmp_path), monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize_file(source, tmp_path / "t.gguf", "q4_0")


def test_a_folder_in_which_nothing_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the name that was given."""
    source = small(tmp_path / "s.gguf")

    def refuses(operation: Any) -> Any:
        def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
            if Path(path).parent == tmp_path and Path(path) != source:
                raise OSError(errno.EROFS, "Read-only file system", path)
            return operation(path, *args, **kwargs)

        return refused

    with untouched(tmp_path), monkeypatch.context() as patch:
        for name in ("open", "unlink"):  # Linux asks whether a file may be removed before whether it is there
            patch.setattr(os, name, refuses(getattr(os, name)))
        with pytest.raises(OSError, match=r"Read-only file system: '.*/t\.gguf'$"):
            quantize_file(source, tmp_path / "t.gguf", "q4_0")


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_mode_follows_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    before = os.umask(mask)
    try:
        quantize_file(source, target, "q4_0")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert target.stat().st_mode & 0o777 == mode
    assert sorted(tmp_path.iterdir()) == [source, target]


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_that_is_replaced_gives_its_mode(tmp_path: Path, mode: int) -> None:
    source, target = small(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    target.write_text("old")
    target.chmod(mode)
    quantize_file(source, target, "q4_0", force=True)
    assert target.stat().st_mode & 0o777 == mode
    assert cq.open(target)["output.weight"].format == "q4_0"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left"), r"^\[Errno \d+\] No space left: '.*t\.gguf'$"),
        (OSError("2 of 5 written"), r"t\.gguf could not be written \(is the disk full\?\): 2 of 5 written$"),
        (
            OSError(errno.EIO, "Input/output error", "s.gguf"),
            r"^\[Errno \d+\] Input/output error: 's\.gguf'$",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "s.gguf"),
            r"^\[Errno \d+\] No such file: 's\.gguf'$",
        ),
    ],
)
def test_errors_of_writing_name_the_file(tmp_path: Path, error: OSError, told: str) -> None:
    """Where they name none themselves."""
    with pytest.raises(OSError, match=told), atomic.replacing(tmp_path / "t.gguf"):
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="no such locks")
def test_texts_are_rewritten_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("0")

    def one_more() -> str:
        number = int(path.read_text())
        time.sleep(0.005)
        return str(number + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: atomic.rewrite(path, one_more), range(8)))
    assert path.read_text() == "8"


def test_a_text_that_is_to_stay(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    atomic.rewrite(path, lambda: None)
    assert not list(tmp_path.iterdir())
    atomic.rewrite(path, lambda: "ü")
    before = path.stat()
    atomic.rewrite(path, lambda: None)
    assert path.read_bytes() == "ü".encode()
    assert path.stat().st_ino == before.st_ino


@pytest.mark.skipif(os.name == "nt", reason="POSIX file modes")
def test_nobody_else_reads_what_is_not_whole(tmp_path: Path) -> None:
    with atomic.replacing(tmp_path / "t.gguf") as part:
        assert part.stat().st_mode & 0o777 == 0o600


_WRITER = """
import sys, time
from pathlib import Path
from cuquant.io.atomic import replacing
with replacing(Path(sys.argv[1])) as part:
    part.write_text("half")
    print(part.name, flush=True)
    time.sleep(600)
"""


@contextmanager
def a_writer(target: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that is writing, and its temporary file."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _WRITER, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            yield process, target.with_name(process.stdout.readline().strip())
        finally:
            process.kill()


@pytest.mark.skipif(atomic._mark(Path("t")) is None, reason="the system tells no containers apart")
def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next one that writes the same target; parts of processes that live, and others, stay."""
    target, other = tmp_path / "t[0].gguf", tmp_path / "t.gguf"
    strange = tmp_path / ".t[0].gguf.0123456789abcdef.part"
    strange.write_text("another's")
    with a_writer(target) as (killed, left), a_writer(target) as (_, living), a_writer(other) as (last, its):
        for process in (killed, last):
            process.kill()
            process.wait()
        assert {left, living, its} <= {*tmp_path.iterdir()}
        atomic.rewrite(other.with_name("u.gguf"), lambda: "new")
        with monkeypatch.context() as patch:
            patch.setattr(os, "readlink", lambda _: "pid:[1]")  # as in another container
            atomic.rewrite(target, lambda: "new")
        assert {left, living, its} <= {*tmp_path.iterdir()}
        atomic.rewrite(target, lambda: "new")
        assert {*tmp_path.iterdir()} == {target, other.with_name("u.gguf"), strange, living, its}
    assert target.read_text() == "new"


@pytest.mark.skipif(atomic._mark(Path("t")) is None, reason="the system tells no containers apart")
def test_ids_that_say_nothing_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process may be alive its file stays."""
    target = tmp_path / "t.gguf"
    begin = f".t.gguf.{atomic._mark(target)}"
    parts = [tmp_path / f"{begin}{process}00000000.part" for process in ("ffffffff", "00000000", "00000001")]
    for part in parts:
        part.touch()
    atomic.rewrite(target, lambda: "new")
    assert {*tmp_path.iterdir()} == {target, *parts}
    monkeypatch.setattr(atomic, "_mark", lambda _: None)
    with atomic.replacing(target) as part:
        part.write_text("newer")
    assert {*tmp_path.iterdir()} == {target, *parts}
    assert target.read_text() == "newer"


@pytest.mark.parametrize("letter", ["n", "ü", "𝄞"])
def test_the_longest_names(tmp_path: Path, letter: str) -> None:
    count, rest = divmod(255 - len(".gguf"), len(letter.encode()))
    name = f"{letter * count}{'_' * rest}.gguf"
    quantize_file(small(tmp_path / "s.gguf"), tmp_path / name, "q4_0")
    assert cq.open(tmp_path / name)["output.weight"].format == "q4_0"


def test_names_of_a_file_are_escaped(tmp_path: Path) -> None:
    """A terminal would obey them."""
    name = "\x1b[2J.weight"
    source = write(tmp_path / "s.gguf", {name: (random_blocks("q8_0", (4, 32)), Type.Q8_0)})
    with pytest.raises(ValueError, match=r"is quantized already: \\x1b\[2J\.weight \(Q8_0\)"):
        quantize_file(source, tmp_path / "t.gguf", "q4_0")
