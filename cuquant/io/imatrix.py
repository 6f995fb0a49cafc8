"""llama.cpp's importance matrices: how much errors of each column of a weight matter.

llama-imatrix runs a model over a text and sums the squares of what each column is multiplied by. Its files
are of two formats, both little-endian, of which the first is written here, too:

    GGUF     general.type "imatrix"; for each weight the F32 tensors "<weight>.in_sum2" (matrices, K) and
             "<weight>.counts" (matrices, 1), how many inputs were summed; imatrix.datasets, a list of names;
             imatrix.chunk_count; imatrix.chunk_size, tokens of a chunk
    older    entry count i32 | entries | last chunk i32 | dataset string   (the last two may be missing)
    entry    name string | calls i32 | value count i32 | values f32        (a string: length i32, bytes)

Layouts and means are those of save_imatrix and save_imatrix_legacy in llama.cpp's tools/imatrix/imatrix.cpp,
and of load_imatrix in its tools/quantize/quantize.cpp.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..render import told
from .gguf import File
from .header import MAX_NAME_BYTES, Cursor, Header, Mapped, quote, same_value
from .metadata import IMATRIX
from .safetensors import is_begun
from .words import LFS_POINTER, of_pointer

_MAGIC, _KIND = b"GGUF", "imatrix"
_SUMS, _COUNTS = ".in_sum2", ".counts"
_I32 = struct.Struct("<i")
_MIN_ENTRY_BYTES = 4 + 1 + 4 + 4 + 4  # a name of one letter and one value
_MAX_TEXT_BYTES = 127
"""What llama-quantize writes of a name at most."""


@dataclass(frozen=True)
class Imatrix:
    """Importance of tensors, and what is known of where it comes from: "" and 0 where that is nothing."""

    entries: Mapping[str, Any]
    file: str = ""
    dataset: str = ""
    """The first of the texts that the model was run over."""
    chunks: int = 0

    @property
    def metadata(self) -> dict[str, str | int]:
        """What llama-quantize adds to the metadata of a file that it made with an importance matrix."""
        known = {"file": self.file, "dataset": self.dataset}
        texts = {key: text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore") for key, text in known.items()}
        counts = {"entries_count": len(self.entries), "chunks_count": self.chunks}
        return {IMATRIX + key: value for key, value in (texts | counts).items() if value}


class Sums(NamedTuple):
    """What is known of a weight's inputs."""

    squares: NDArray[np.float32]
    """Sums of the squares of each column's inputs, [matrices, K]."""
    counts: NDArray[np.float32]
    """How many inputs each matrix had, [matrices]."""

    @property
    def mean(self) -> NDArray[np.float32]:
        """Mean squares [matrices, K]; 1 everywhere for a matrix that had no inputs."""
        whole = np.floor(self.counts.astype(np.float64) + 0.5).astype(np.float32)[:, None]
        mean = np.ones(self.squares.shape, np.float32)
        np.divide(self.squares, whole, out=mean, where=whole > 0)
        return mean


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, NDArray[np.float32]]:
    """Read an importance matrix that `measure_importance` or llama.cpp's llama-imatrix wrote, of the GGUF
    format or llama.cpp's older one.

    Parameters
    ----------
    path : path

    Returns
    -------
    dict of str to float32 array
        By names of weights, the mean square of each column's inputs: (K,), or (E, K) of a stack of experts
        (E, N, K). Experts that no input reached have 1 everywhere. The older format, and the other one of
        stacks that are no experts', do not tell E and K: the array is (E * K,) there. ``quantize(w, format,
        importance)`` takes a row; `quantize_file` takes the dict, or the path.

    Raises
    ------
    ValueError
        The file is no importance matrix, damaged or cut short; or it holds numbers that are negative or not
        finite. GGUFError, which is one, where the header of a GGUF file breaks a rule.
    OSError
        As `open` has it.
    """
    return dict(read(path).entries)


def given(importance: Any) -> Imatrix:
    """The importance matrix of a path, or of a mapping; TypeError and ValueError for anything else."""
    if isinstance(importance, (str, os.PathLike)):
        return read(importance)
    return Imatrix(check.importances(importance))


def read(path: str | os.PathLike[str]) -> Imatrix:
    """See `read_imatrix`."""
    place = check.path(path)
    if place.is_dir():
        raise IsADirectoryError(f"{place} is a folder, not the file of an importance matrix")
    check.require_mappable(place)
    with place.open("rb") as file:
        in_gguf = file.read(len(_MAGIC)) == _MAGIC
    name = os.fsencode(place).decode(errors="replace")
    return _of_gguf(place, name) if in_gguf else _of_older(place, name)


def is_imatrix(header: Header) -> bool:
    """Whether a GGUF file says that it is an importance matrix."""
    return same_value(header.metadata.get("general.type"), _KIND)


def _of_gguf(path: Path, name: str) -> Imatrix:
    file = File(path)
    try:
        header = file.header
        if not is_imatrix(header):
            raise ValueError(f"{path}: {_of_another_kind(header)}")
        weights = {n.removesuffix(s): None for n in header.tensors for s in (_SUMS, _COUNTS) if n.endswith(s)}
        if not weights:
            raise ValueError(f"{path}: no importance matrix: it has no tensors *{_SUMS} and *{_COUNTS}")
        entries = {weight: _mean(file, weight) for weight in weights}
        datasets = header.metadata.get("imatrix.datasets")
        chunks = header.metadata.get("imatrix.chunk_count")
        return Imatrix(
            entries,
            name,
            datasets[0] if isinstance(datasets, list) and datasets else "",
            chunks if isinstance(chunks, int) and 0 < chunks < 1 << 32 else 0,
        )
    finally:
        file.close()


def _of_another_kind(header: Header) -> str:
    """What a GGUF file is that is taken for an importance matrix."""
    kind = header.metadata.get("general.type")
    if same_value(kind, "model") or (kind is None and "general.architecture" in header.metadata):
        return f"a model, {NOT_ONE}"
    return f"no importance matrix: its general.type is {told(kind)}, not {_KIND!r}"


NOT_ONE = "not an importance matrix, which cuquant imatrix or llama-imatrix makes of a model and a text"


def _mean(file: File, weight: str) -> NDArray[np.float32]:
    """Mean squares of the inputs of a weight's columns, [K] or [matrices, K]."""
    for suffix in (_SUMS, _COUNTS):
        info = file.header.tensors.get(weight + suffix)
        if info is None:
            raise ValueError(f"{file.path}: {quote(weight)} has no tensor {quote(weight + suffix)}")
        if info.type_name != "F32":
            raise ValueError(f"{file.path}: tensor {quote(info.name)} is of type {info.type_name}, not F32")
    sums, counts = (file.header.tensors[weight + suffix] for suffix in (_SUMS, _COUNTS))
    squares, inputs = (file.bytes_of(info).view("<f4") for info in (sums, counts))
    check.require_importance(squares, f"{file.path}: tensor {quote(sums.name)}")
    check.require_importance(inputs, f"{file.path}: tensor {quote(counts.name)}")
    if squares.size % inputs.size:
        raise ValueError(
            f"{file.path}: tensor {quote(sums.name)} has the shape {sums.shape}, {quote(counts.name)} "
            f"{counts.shape}: a count for each matrix is needed"
        )
    mean = Sums(squares.reshape(inputs.size, -1), inputs.reshape(-1)).mean
    return _of_rows(mean.reshape(-1, *sums.shape[-1:]))


def _of_rows(mean: NDArray[np.float32]) -> NDArray[np.float32]:
    """Mean squares as they are given: (K,) of one matrix, or (E, K)."""
    return mean[0] if len(mean) == 1 else mean


def means(sums: Mapping[str, Sums]) -> dict[str, NDArray[np.float32]]:
    """What `read_imatrix` returns of a file of these sums."""
    return {weight: _of_rows(each.mean) for weight, each in sums.items()}


def write(path: Path, sums: Mapping[str, Sums], dataset: str, chunks: int, ctx: int) -> None:
    """Write an importance matrix of the GGUF format: of so many chunks of `ctx` tokens of a text."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def add_architecture(self) -> None:
            pass  # that of models, which such a file is none of

    with closing(Writer(path, arch="")) as writer:
        writer.add_type(_KIND)
        writer.add_array("imatrix.datasets", [os.fsencode(dataset).decode(errors="replace")])  # a file's name
        writer.add_uint32("imatrix.chunk_count", chunks)
        writer.add_uint32("imatrix.chunk_size", ctx)
        for weight, each in sums.items():
            stack = len(each.counts) > 1  # ggml drops trailing axes of 1, which GGUF's first ones are here
            writer.add_tensor(weight + _SUMS, each.squares if stack else each.squares[0])
            writer.add_tensor(weight + _COUNTS, each.counts[:, None] if stack else each.counts)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _of_older(path: Path, name: str) -> Imatrix:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError(f"{path}: the file is empty")
        buffer = Mapped(file.fileno(), 0, access=mmap.ACCESS_READ)
    with buffer:
        return _Older(buffer, str(path)).read(name)


class _Older(Cursor):
    """A cursor over the bytes of a file of the older format; no view of them is kept."""

    def read(self, name: str) -> Imatrix:
        """The importance matrix; every count is held against the bytes left before anything is made."""
        self.require_older()
        entries: dict[str, NDArray[np.float32]] = {}
        for index in range(self.number("the number of entries")):
            what = f"the name of entry {index}"
            weight = self.name(what)
            if weight in entries:
                self.fail(f"{what} is {quote(weight)}, which an entry before it has")
            entries[weight] = self.values(f"entry {quote(weight)}")
        if self.pos == len(self.buffer):
            return Imatrix(entries, name)
        chunks = self.number("the number of the last chunk")
        dataset = self.take(self.length("the dataset's name", 0, len(self.buffer)), "the dataset's name")
        if self.pos < len(self.buffer):
            self.fail(f"{len(self.buffer) - self.pos} bytes follow the dataset's name, where nothing is")
        return Imatrix(entries, name, dataset.decode(errors="replace"), max(chunks, 0))

    def require_older(self) -> None:
        """A count of entries that the file can hold: the format has no other mark."""
        if pointer := of_pointer(bytes(self.buffer[: len(LFS_POINTER)])):
            raise ValueError(f"{self.source}: no importance matrix, but {pointer}")
        if is_begun(bytes(self.buffer[:9])):
            raise ValueError(f"{self.source}: a safetensors file, {NOT_ONE}")
        count = self.number("the number of entries")
        if not 0 < count <= (len(self.buffer) - self.pos) // _MIN_ENTRY_BYTES:
            raise ValueError(
                f"{self.source}: no importance matrix: no GGUF file, and one of the older format would have "
                f"{count} entries here, in {len(self.buffer) - self.pos} bytes"
            )
        self.pos = 0

    def name(self, what: str) -> str:
        """The next string, a weight's name."""
        raw = self.take(self.length(what, 1, MAX_NAME_BYTES), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8: {quote(raw)}")

    def values(self, what: str) -> NDArray[np.float32]:
        """The mean squares of an entry, float32 [n]; of sums that state no calls, the sums."""
        calls = self.number(f"the calls of {what}")
        count = self.length(f"{what}", 1, len(self.buffer), "values")
        self.need(4 * count, what)
        values = np.frombuffer(self.buffer, "<f4", count, self.pos).astype(np.float32)
        check.require_importance(values, f"{self.source}: {what}")
        self.pos += 4 * count
        return values / np.float32(calls) if calls > 0 else values

    def length(self, what: str, least: int, most: int, unit: str = "bytes") -> int:
        """A number of things to come."""
        count = self.number(f"the length of {what}")
        if not least <= count <= most:
            self.fail(f"{what} has {count} {unit}; {least} to {most} are allowed")
        return count

    def number(self, what: str) -> int:
        """The next integer."""
        return int(_I32.unpack(self.take(_I32.size, what))[0])

    def take(self, nbytes: int, what: str) -> bytes:
        """The next bytes."""
        self.need(nbytes, what)
        self.pos += nbytes
        return bytes(self.buffer[self.pos - nbytes : self.pos])
