"""Weights of any format, and plain arrays, in safetensors files: GGUF has no types for k-bit weights.

A quantized array is a uint8 tensor of its storage bytes (..., N, row bytes). The file's metadata has one
entry of ours, "cuquant", which is JSON:

    {"version": 1, "weights": {tensor name: {"shape": [N, K], "format": {"name": "kbit", "bits": 4, ...}}}}

with all parameters of the formats, entries of codebooks too. Other tensors are arrays of numbers. A file
that is a model has one more, whose name is the entry's "metadata": the bytes of a GGUF file of no tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from .. import check, device as devices, formats
from ..array import QuantizedArray
from ..formats import Format
from ..ops.quantize import from_blocks
from ..render import cut, escaped
from .atomic import replacing
from .header import Metadata, misfit
from .metadata import DEFAULT_ALIGNMENT, as_gguf
from .words import LFS_POINTER, of_pointer

KEY = "cuquant"
VERSION = 1
METADATA = "cuquant.metadata"
"""The tensor that is a model's metadata."""
OTHER_READERS = (
    "cuquant.read_safetensors reads quantized weights of others' checkpoints (GPTQ, AWQ, EXL3, NVFP4 and so "
    "on); of a Hugging Face model in floats llama.cpp's convert_hf_to_gguf.py makes a GGUF file, which "
    "cuquant.open reads"
)
"""What to do with a safetensors file of others."""
_LONGEST_TOLD = 300
"""Characters of what is said of a file and cites it."""
LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors package refuses a longer one."""
TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype(bool),
}
"""Types of tensors that hold plain numbers."""
OF_MODELS = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")
"""Types of plain numbers that GGUF has, too."""
SMALL_FLOATS: dict[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Types of the scales of FP4 weights, which the safetensors package does not give to NumPy."""


class Tensor(NamedTuple):
    """A tensor to be written: what it will be, known before it is made."""

    type: str
    """One of `TYPES`."""
    shape: tuple[int, ...]
    make: Callable[[], Any]
    """Returns the NumPy or CuPy array."""
    weight: dict[str, Any] | None = None
    """What the metadata says of a quantized array."""


def save(path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: Metadata | None = None) -> None:
    """Write quantized arrays and plain ones to a safetensors file.

    A file that exists is replaced without a question, as numpy.save does it. The new one is written under a
    temporary name beside `path` and takes its place only when complete.

    Parameters
    ----------
    path : str or path
        By any name that does not end in .gguf.
    tensors : mapping of str to QuantizedArray or array
        Quantized arrays of any format; plain ones of floats, integers or bools; NumPy's or CuPy's.
    metadata : Metadata, optional
        Those of a GGUF file, as `cuquant.open` gives them: with them the file is a model, which
        `cuquant.open` opens and `cuquant.evaluate` evaluates. Names, shapes and types are then those that a
        GGUF file may have.

    Raises
    ------
    TypeError, ValueError
        A tensor is something else, or cannot have this name in a file (the message names it); the path is
        named like a GGUF file.
    OSError
        The file cannot be written.
    """
    tensors, target = check.tensors(tensors, METADATA), check.safetensors_path(path)
    entries = {name: entry(name, tensor) for name, tensor in tensors.items()}
    own = None if metadata is None else _of_model(entries, metadata)
    with replacing(target) as temporary:
        write(temporary, entries, own)


def _of_model(tensors: Mapping[str, Tensor], metadata: Any) -> bytes:
    """The bytes of a model's metadata; TypeError or ValueError where no model has these tensors."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"metadata are those of a model, model.metadata, not {check.a_or_an(metadata)}")
    if not tensors:
        raise ValueError("a model has tensors: save none without metadata")
    for name, tensor in tensors.items():
        shape = tensor.shape if tensor.weight is None else tensor.weight["shape"]
        problem = misfit(name, shape)
        if tensor.weight is None and tensor.type not in OF_MODELS:
            problem = f"has the type {tensor.type}; allowed are {', '.join(OF_MODELS)}"
        if problem:
            raise ValueError(f"tensor {name!r} {problem} (without metadata it can be saved)")
    plain = all(tensor.weight is None for tensor in tensors.values())
    kind = metadata.get("general.file_type") if plain else None  # it was that of other tensors
    return as_gguf(metadata, DEFAULT_ALIGNMENT, kind if type(kind) is int and 0 <= kind < 1 << 32 else None)


def entry(name: str, tensor: Any) -> Tensor:
    """An array that is there already; TypeError where it is none, or of another type."""
    if check.is_quantized(tensor):
        return quantized(tensor.format, tensor.shape, lambda: tensor.blocks)
    if check.is_transposed(tensor):
        raise TypeError(f"tensor {name!r} is a Transposed: save the array that it is of, its .T")
    array = check.array(tensor, f"tensor {name!r}", "floats, integers or bools")
    for kind, dtype in TYPES.items():
        if array.dtype == dtype:
            return Tensor(kind, array.shape, lambda: array)
    native = array.dtype.newbyteorder("<")
    remedy = f", little-endian: pass it .astype(numpy.{native.name})" if native in TYPES.values() else ""
    raise TypeError(f"tensor {name!r} has dtype {array.dtype}; allowed are {', '.join(TYPES)}{remedy}")


def quantized(fmt: Format, shape: tuple[int, ...], make: Callable[[], Any]) -> Tensor:
    """A quantized array of that format and shape; `make` returns its storage bytes."""
    return Tensor("U8", fmt.stored(shape), make, {"shape": shape, "format": formats.describe(fmt)})


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: bytes | None,
    shown: Callable[[Iterable[str]], Iterable[str]] = iter,
) -> None:
    """Write a file, a tensor at a time as each is made, with a model's metadata, if that is what it is; names
    of tensors pass through `shown`."""
    weights = {name: tensor.weight for name, tensor in tensors.items() if tensor.weight is not None}
    note: dict[str, Any] = {"version": VERSION, "weights": weights}
    if metadata is not None:
        held = np.frombuffer(metadata, np.uint8)
        tensors = {**tensors, METADATA: Tensor("U8", held.shape, lambda: held)}
        note["metadata"] = METADATA
    # Wide types first: then no number lies across its alignment.
    order = sorted(tensors, key=lambda name: -TYPES[tensors[name].type].itemsize)
    places, end = {}, 0
    for name in order:
        start, end = end, end + math.prod(tensors[name].shape) * TYPES[tensors[name].type].itemsize
        places[name] = start, end
    infos = {
        name: {"dtype": tensor.type, "shape": tensor.shape, "data_offsets": places[name]}
        for name, tensor in tensors.items()
    }
    text = json.dumps({"__metadata__": {KEY: json.dumps(note)}} | infos).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shown(order):
            array = devices.as_numpy(tensors[name].make())
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def load(path: str | os.PathLike[str], device: str | None = None) -> dict[str, Any]:
    """Tensors of a file that `save` wrote.

    Parameters
    ----------
    path : str or path
    device : "cpu" or "cuda", optional
        Where tensors are put: by default on the GPU where one can be used.

    Returns
    -------
    dict of str to QuantizedArray or array, in the order in which they were saved
        On the CPU they share the memory-mapped file and are read-only. A model's metadata are not among
        them: `cuquant.open(path).metadata` has them.

    Raises
    ------
    TypeError
        `path` is no path.
    ValueError
        Not a safetensors file, not one of this library's, or one that is damaged (the message says how);
        `device` is another word.
    OSError
        There is no such file, it is a folder, or cannot be read.
    RuntimeError
        `device` is "cuda", and there is no GPU (the message says why).
    """
    target = check.usable_device(device)
    to_device = devices.cupy().asarray if target == "cuda" else _itself
    path = check.path(path)
    saved = read(path)
    return {
        name: _weight(path, name, to_device(array), saved.weights[name])
        if name in saved.weights
        else to_device(array)
        for name, array in saved.arrays.items()
    }


def _itself(array: Any) -> Any:
    return array


class Saved(NamedTuple):
    """What is in a file that `save` wrote."""

    arrays: dict[str, Any]
    """Tensors as views of the file."""
    offsets: dict[str, int]
    """Where the bytes of each tensor begin in the file."""
    weights: dict[str, Any]
    """What is said of the tensors that are storage bytes."""
    metadata: Any
    """Metadata of a model, as the bytes of a GGUF file; None of other arrays."""
    status: os.stat_result
    """What the system says of the file."""


def read(path: Path) -> Saved:
    """What is in the file; ValueError where it is none of these."""
    with sound(path) as (stream, reader):
        note = _note(path, reader.metadata() or {})
        status = os.fstat(stream.fileno())
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        infos, start = header_of(stream)
    arrays = {name: _view(path, name, buffer, start, info) for name, info in infos.items()}
    offsets = {name: start + info["data_offsets"][0] for name, info in infos.items()}
    weights, own = note.weights, None
    if note.metadata is not None:
        own = arrays.pop(note.metadata, None)
        if own is None or own.dtype != np.uint8 or own.ndim != 1:
            raise ValueError(f"{path}: it has no metadata under the name {note.metadata!r}: it is damaged")
        offsets.pop(note.metadata)
    missing = weights.keys() - arrays.keys()
    if missing:
        raise ValueError(f"{path}: the weight {min(missing)!r} is listed, but there is no such tensor")
    return Saved(arrays, offsets, weights, own, status)


@contextmanager
def sound(path: Path) -> Iterator[tuple[BinaryIO, Any]]:
    """A file that is open, and the safetensors package's reader of it.

    ValueError where the package refuses it, or it is another by then; as `check.require_mappable`.
    """
    import safetensors

    check.require_mappable(path)
    with path.open("rb") as stream:
        try:
            reader = safetensors.safe_open(path, framework="numpy")
        except safetensors.SafetensorError as error:
            problem = why_unreadable(path, error)
            raise ValueError(f"{path} is not a safetensors file that can be read: {problem}") from None
        with reader:
            check.require_same_by_name(path, os.fstat(stream.fileno()))
            yield stream, reader


class Header(NamedTuple):
    """What a file says of its tensors, and where their bytes begin."""

    tensors: Mapping[str, Any]
    end: int


def is_begun(head: bytes) -> bool:
    """Whether a file that begins with these nine bytes is a safetensors file: the length of a header, and the
    header's first character."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= LONGEST_HEADER


def header_of(stream: BinaryIO) -> Header:
    """The header of a file that the safetensors package has found to be sound."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    infos = json.loads(stream.read(length))
    infos.pop("__metadata__", None)
    return Header(infos, 8 + length)


def small_floats(stream: BinaryIO, name: str, header: Header) -> Any:
    """A tensor of `SMALL_FLOATS`."""
    info = header.tensors[name]
    stream.seek(header.end + info["data_offsets"][0])
    return np.fromfile(stream, SMALL_FLOATS[info["dtype"]], math.prod(info["shape"])).reshape(info["shape"])


def why_unreadable(path: Path, error: Exception) -> str:
    """What is wrong with a file that the safetensors package refused with that error."""
    told = cut(escaped(str(error)), _LONGEST_TOLD)  # it may cite the file
    with path.open("rb") as file:
        if pointer := of_pointer(file.read(len(LFS_POINTER))):
            return f"it is {pointer}"
        file.seek(0)
        head = file.read(9)
        size = os.fstat(file.fileno()).st_size
        if head.startswith(b"GGUF"):
            return f"{told} (cuquant.open reads GGUF files)"
        if size == 0:
            return "it is empty"
        length = int.from_bytes(head[:8], "little")
        if size > 8 and not is_begun(head):
            return told
        end = 8 + length if size > 8 else 9
        if end <= size:
            end += _data_bytes(head[8:] + file.read(length - 1))
    if size < end:
        return f"{size:,} bytes of {end:,} or more are there: it is cut short, perhaps an incomplete download"
    return told


def _data_bytes(header: bytes) -> int:
    """Where the last tensor ends, counted from the header's end; 0 where that cannot be told."""
    try:
        infos = json.loads(header)
        return max(int(info["data_offsets"][1]) for name, info in infos.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
        return 0


def _view(path: Path, name: str, buffer: mmap.mmap, start: int, info: Mapping[str, Any]) -> Any:
    """A tensor as a read-only array; its data begins `start` bytes after its offset."""
    if info["dtype"] not in TYPES:
        raise ValueError(f"{path}: tensor {name!r} has the type {info['dtype']}; read are {', '.join(TYPES)}")
    dtype = TYPES[info["dtype"]]
    offset = start + info["data_offsets"][0]
    try:
        return np.frombuffer(buffer, dtype, math.prod(info["shape"]), offset).reshape(info["shape"])
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: tensor {name!r} has the shape {info['shape']}: {error}") from None


def type_of(array: Any) -> str:
    """The type of a tensor of plain numbers."""
    return next(name for name, dtype in TYPES.items() if dtype == array.dtype)


class _Note(NamedTuple):
    """What our entry in a file's metadata says."""

    weights: dict[str, Any]
    metadata: str | None
    """Name of the tensor that is a model's metadata."""


def _note(path: Path, metadata: Mapping[str, str]) -> _Note:
    """What is in a file's metadata of ours; ValueError where nothing is, or it is damaged."""
    if f"{KEY}.kv_cache" in metadata:
        raise ValueError(f"{path} is a cache that KVCache.save wrote: cuquant.KVCache.load reads it")
    if KEY not in metadata:
        raise ValueError(
            f"{path} is not a file of cuquant.save: its metadata has no {KEY!r} "
            f"(safetensors.numpy.load_file reads its tensors as plain arrays; {OTHER_READERS})"
        )
    try:
        note = json.loads(metadata[KEY], object_pairs_hook=_distinct)
        version, weights, name = note["version"], dict(note["weights"]), note.get("metadata")
        if not isinstance(name, (str, type(None))):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path}: the metadata {KEY!r} is damaged: {metadata[KEY][:80]!r}") from None
    if version != VERSION:
        raise ValueError(f"{path} has version {cut(repr(version))}; this cuquant reads version {VERSION}")
    return _Note(weights, name)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; ValueError where a key is there twice, of which Python takes the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError
    return made


def _weight(path: Path, name: str, raw: Any, weight: Any) -> QuantizedArray:
    """The quantized array of a tensor's bytes."""
    fmt, shape = described(path, name, weight)
    try:
        return from_blocks(raw, fmt, shape)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: the weight {name!r} is damaged: {error}") from None


def described(path: Path, name: str, weight: Any) -> tuple[Format, tuple[int, ...]]:
    """Format and shape of a weight, as the file says; ValueError where it says what cannot be."""
    if not isinstance(weight, Mapping) or not isinstance(weight.get("shape", []), list):
        told = cut(repr(weight))
        raise ValueError(f"{path}: the weight {name!r} is damaged: {told} is not a shape and a format")
    try:
        shape, fmt = check.shape(tuple(weight["shape"])), formats.described(weight["format"])
        if fmt.lacks:
            raise ValueError(f"{fmt}: the format has no {fmt.lacks}")
        return check.whole_blocks(shape, fmt), shape
    except KeyError as error:
        raise ValueError(f"{path}: the weight {name!r} is damaged: no {error} is given") from None
    except (ValueError, TypeError, OverflowError) as error:
        told = cut(str(error), _LONGEST_TOLD)
        raise ValueError(f"{path}: the weight {name!r} is damaged: {told}") from None
