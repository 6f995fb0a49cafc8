"""What a weight format is: a record per block of weights, and the two conversions of a block.

A format is one small class. Subclassing `Format` with a `name` registers it; the class then works
everywhere a format name is taken (quantize, from_blocks, GGUF files, evaluation, command line). A class with
parameters sets the attributes in its constructor and registers the instances that have a name of their own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache, cached_property
from inspect import signature
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from .kernels import Kernels

_ENCODING = ("encode", "encode_with", "fit", "weights_of_errors")
"""Methods that quantize."""
_BY_NAME: dict[str, Format] = {}
_READ_ONLY: dict[str, Format] = {}
"""Formats that only others quantize to, by name."""
_ELSEWHERE = {"int8": "q8_0", "int4": "int4-128", "nf4": "kbit4", "fp4": "mxfp4"}
"""What formats are called by others, where no name is near."""


class Format(ABC):
    """One storage layout of quantized weights, with its NumPy reference conversions.

    A block holds `block_size` consecutive weights of a row (along K) in one record of type `storage`;
    a row of K weights is K / block_size records, back to back. A format that stores matrices in another way
    derives from `formats.base.WholeMatrices`. A format compares equal to its name.
    """

    name: str
    """Lower-case name, as in ``cq.quantize(w, "q4_0")``; letters, digits and ``._-``."""
    bits: int
    """Bits of a weight's code."""
    block_size: int = 32
    """Weights in a block."""
    storage: np.dtype[Any]
    """The record of one block, as the file format has it: little-endian, packed."""
    scale_size: ClassVar[int] = 32
    """Weights that have a scale in common, or an integer that one multiplies; at most 32."""
    scales: ClassVar[tuple[str, ...]] = ("d",)
    """Fields of `storage` that hold scales or minimums; an encoder may overflow those of float16."""
    largest: float | None = None
    """The largest magnitude of a weight that it takes; None where only its float16 scales set a limit."""
    beyond: str = ""
    """What to do about larger ones, and about those too small for its scales."""
    formula: str
    """How a weight is read back, for people: ``W = d * (q - 8)``."""
    ggml_type: int | None = None
    """Type number in GGUF files; None where GGUF has no such type."""
    ggml_type_elsewhere: int | None = None
    """The number that files of a fork of llama.cpp have for it, which is another format's in llama.cpp's."""
    file_type: int | None = None
    """GGUF's `general.file_type` of a model whose matrices are mostly of this format."""
    made_by: ClassVar[str] = ""
    """Who quantizes to a format that only others quantize to (`ReadOnly`), and what reads it, for people."""
    for_activations: ClassVar[bool] = False
    """True for a format of activations: made in the hot path, so values are never checked."""
    kernels: Kernels | None = None
    """What kernels are told of it; None where GPUs do not know it. The NumPy backend has every format.
    A class that derives from another has the other's, but none that quantize if it has an `encode` of its
    own, and none at all if it has a `decode` or `rows`, until it says what kernels are told of it."""
    whole_matrices: ClassVar[bool] = False
    """Whether a matrix is one record: `encode` then takes it whole, [N, K], and returns its bytes."""
    rows_together: ClassVar[int] = 1
    """Rows of a matrix of whose numbers none are made without the others'."""
    ragged_vectors: ClassVar[bool] = False
    """Whether vectors may end within a block, whose rest is then zeros."""
    takes_importance: ClassVar[bool] = False
    """Whether `encode` takes a second argument: the importance of each weight, float32 [n, block_size], or
    what `weights_of_errors` makes of it. A class that derives from one that does takes one if its own
    `encode` has the argument."""
    takes_moments: ClassVar[bool] = False
    """Whether an importance goes to `ops.trellis` in place of `encode`: moments of a matrix's inputs."""
    scale_beside: ClassVar[bool] = False
    """Whether `tensor_scale` is stored beside a tensor, whose type's name then does not tell it."""
    of_each: ClassVar[str] = ""
    """What arrays of it have of their own, though it is of one kind, and how others get the same, for people:
    errors of joining say it."""
    codebook: NDArray[np.float32] | None = None
    """What codes are looked up in: 2^bits numbers."""
    thresholds: NDArray[np.float32] | None = None
    """2^bits - 1 numbers: a weight above the i-th, in units of its block's scale, has a code above i; None
    where codes are chosen otherwise."""
    lacks: str = ""
    """What is to be fitted to weights before there can be an array of the format, and how to pass it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "encode" in cls.__dict__ and "takes_importance" not in cls.__dict__ and cls.takes_importance:
            own = signature(cls.encode).parameters  # self, the blocks, and perhaps an importance
            cls.takes_importance = len(own) > 2
        if "name" in cls.__dict__:
            register(cls())

    @property
    def on_gpu(self) -> bool:
        """Whether there are kernels for it."""
        return self.kernels is not None and not self._differs("decode", "rows")

    @property
    def encodes_on_gpu(self) -> bool:
        """Whether there is a kernel that quantizes to it; else arrays on a GPU are quantized by NumPy."""
        encoder = None if self.kernels is None else self.kernels.encoder
        return self.on_gpu and encoder is not None and not self._differs(*_ENCODING)

    def _differs(self, *methods: str) -> bool:
        """Whether its class has one of these methods of its own, but takes over what kernels are told."""
        by_constructor = "kernels" in self.__dict__ and not self._kernels_made_anew()
        return not by_constructor and _differs(type(self), methods)

    @classmethod
    def _kernels_made_anew(cls) -> bool:
        """Whether what kernels are told follows from the rest, when it is first asked for."""
        return isinstance(getattr(cls, "kernels", None), cached_property)

    @property
    def for_kernels(self) -> Format:
        """The format as which a GPU keeps weights: itself, but where blocks differ in their length alone, or
        it is another tensor's too, or kernels take its weights for another's."""
        return self if self.kernels is None or self.kernels.kept is None else self.kernels.kept.format

    @property
    def type_name(self) -> str:
        """What files and tables call the type of its tensors."""
        return self.name.upper()

    @property
    def no_gguf_type(self) -> str:
        """What is said where a tensor of a GGUF file is to have it, and `ggml_type` is None."""
        return (
            f"{self} has no GGUF type: such weights cannot be stored in a GGUF file "
            "(in one named *.safetensors they can)"
        )

    @property
    def read_only(self) -> bool:
        """Whether only others quantize to it."""
        return bool(self.made_by)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.storage.itemsize

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k weights."""
        return k // self.block_size * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        """Storage bits per weight, scales included."""
        return 8 * self.block_bytes / self.block_size

    def for_row(self, k: int) -> Format:
        """The format of rows of k weights, whole blocks: this one, unless its blocks are rows."""
        return self

    def fitted(self, x: Any, importance: Any = None) -> Format:
        """The format for the weights x (..., N, K): this one, unless parameters that it lacks follow from
        them, and from the importance of their columns, float32 [K], where it takes moments."""
        return self

    @property
    def fine_from(self) -> int:
        """The least scale that is fine, in steps of its type's subnormal numbers (2^-24 of float16). Smaller
        ones are rounded so much that normally distributed weights have about 1.5 times their usual squared
        error or more. With others it is below four times that, or below a hundredth of their squares.

        The more codes tell weights apart, the more an error of the scale adds. A minimum is rounded to the
        same steps, and adds its own.
        """
        return max(2, self.bits - 1) * len(self.scales)

    def coarse_scales(self, blocks: Any) -> Any:
        """Which scales of blocks (..., row bytes) are below `fine_from`, bool (..., scales of a row); None of
        formats whose scales are fine enough for any weights."""
        field = self.scales[0] if self.scales else ""
        if not field or self.storage[field] != np.float16:
            return None
        assert self.storage.fields is not None
        _, at, *_ = self.storage.fields[field]
        bits = blocks.reshape(*blocks.shape[:-1], -1, self.block_bytes)[..., at : at + 2]
        return (bits[..., 0] < self.fine_from) & (bits[..., 1] & 0x7F == 0)

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the storage bytes of an array of that shape: (..., N, K) -> (..., N, bytes of a row)."""
        *lead, k = shape
        return (*lead, self.row_bytes(k + -k % self.block_size))

    def rows(self, blocks: NDArray[np.uint8], shape: tuple[int, ...], part: slice) -> NDArray[np.float32]:
        """Rows `part` of the matrix of shape (N, K) that has these storage bytes: float32 [n, K]."""
        raw = np.ascontiguousarray(blocks[part])
        return self.decode(raw.view(self.storage).reshape(-1)).reshape(len(raw), -1)

    def select(
        self, blocks: Any, shape: tuple[int, ...], index: tuple[Any, ...]
    ) -> tuple[Any, tuple[int, ...]]:
        """Storage bytes, copied, and shape of rows that an index of all axes but the last selects."""
        chosen = blocks[index].copy()
        return chosen, (*chosen.shape[:-1], shape[-1])

    def flaws(self, blocks: NDArray[np.uint8], shape: tuple[int, ...], strict: bool = False) -> list[str]:
        """What is wrong with storage bytes that an array cannot be made of, if `strict` also what has a
        meaning but is not what a quantizer writes; every block is some weights."""
        return []

    def numbers(self, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        """The fields of the storage bytes of an array of that shape, by name."""
        records = np.ascontiguousarray(blocks).reshape(-1).view(self.storage)
        return {name: records[name] for name in self.storage.names or ()}

    @property
    def tensor_scale(self) -> float:
        """A float32 number beside the blocks, by which all that they read as is multiplied."""
        return 1.0

    @abstractmethod
    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        """Quantize blocks: float32 [n, block_size] -> `storage` records [n]."""

    def weights_of_errors(
        self, rows: NDArray[np.float32], importance: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """What `encode` takes beside rows [n, K], a block at a time: the importance [n, K], or what a format
        makes of it that looks at more of a row than the block."""
        return importance

    @abstractmethod
    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        """Dequantize blocks: `storage` records [n] -> float32 [n, block_size]."""

    def __getstate__(self) -> dict[str, Any]:
        """What pickles and copies have: not what kernels are told where that is made anew of the rest."""
        made_anew = self._kernels_made_anew()
        return {name: v for name, v in self.__dict__.items() if not (made_anew and name == "kernels")}

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<format {self.name}: {self.formula}, {self.bits_per_weight:g} bits per weight>"

    def __eq__(self, other: object) -> bool:
        if isinstance(
            other, Format
        ):  # one that is defined again is another one, whose plans and tables differ
            return type(self) is type(other) and self.name == other.name
        return self.name == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)


@cache
def _differs(kind: type[Format], methods: tuple[str, ...]) -> bool:
    """Whether a class has one of these methods of its own, but takes over another's `kernels`."""
    told = next(each for each in kind.__mro__ if "kernels" in each.__dict__)
    if told is Format:  # nothing, or what a constructor sets
        return False
    before = kind.__mro__[: kind.__mro__.index(told)]
    return any(method in each.__dict__ for each in before for method in methods)


class ReadOnly(Format):
    """A format that only others quantize to."""

    made_by = "it is only read"

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        raise TypeError(f"{self} is only read")  # check.require_quantized_to says so before


class WholeMatrices(Format):
    """A format that stores each matrix (N, K) as one record, without blocks along K.

    `encode` takes a matrix, and returns its bytes. Where not all bytes are some weights, it has `flaws`, too.
    """

    block_size = 1
    whole_matrices = True

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        raise TypeError(f"{self} has no blocks along K: a matrix is read by rows()")

    @abstractmethod
    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., N, K) -> (..., bytes of a matrix)"""

    @abstractmethod
    def rows(self, blocks: NDArray[np.uint8], shape: tuple[int, ...], part: slice) -> NDArray[np.float32]: ...

    @abstractmethod
    def select(
        self, blocks: Any, shape: tuple[int, ...], index: tuple[Any, ...]
    ) -> tuple[Any, tuple[int, ...]]: ...

    @abstractmethod
    def numbers(self, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]: ...


def chosen_rows(shape: tuple[int, ...], index: tuple[Any, ...]) -> NDArray[np.intp]:
    """Numbers of the rows that an index takes of an array of that shape (..., N, K), as the result has them;
    the index may name the last axis, as a whole."""
    numbers = np.arange(prod(shape[:-1])).reshape(*shape[:-1], 1)
    chosen: NDArray[np.intp] = numbers[tuple(map(device.as_numpy, index))][..., 0]
    return chosen


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """N and K of a shape (..., N, K); a vector is a matrix of one row."""
    return shape[-2] if len(shape) > 1 else 1, shape[-1]


def register(fmt: Format) -> None:
    """Make a format known by its name.

    TypeError where it lacks what every format has; ValueError where nobody could give its name, or a format
    of another class has it. One that is defined again, as by a notebook's cell, takes its own place.
    """
    check.require_registrable(fmt, _READ_ONLY.get(fmt.name) or _BY_NAME.get(fmt.name))
    own, other = (_READ_ONLY, _BY_NAME) if fmt.read_only else (_BY_NAME, _READ_ONLY)
    own[fmt.name] = fmt
    other.pop(fmt.name, None)


def names() -> tuple[str, ...]:
    """Names of all formats that arrays are quantized to, sorted."""
    return tuple(sorted(_BY_NAME))


def names_of_read_only() -> tuple[str, ...]:
    """Names of formats that are only read, sorted."""
    return tuple(sorted(_READ_ONLY))


def get(name: str | Format) -> Format:
    """The format of that name (any case), or the format itself; ValueError lists the known names."""
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        if isinstance(name, type) and issubclass(name, Format):
            raise TypeError(f"format is the class {name.__name__}: call it, as in KBit(4) or Int4(128)")
        given = check.a_or_an(name)
        raise TypeError(f"format is {given}; a format is a name or a Format; names: {', '.join(names())}")
    try:
        return _READ_ONLY.get(name.lower()) or _BY_NAME[name.lower()]
    except KeyError:
        raise _unknown_format(name) from None


class UnknownFormatError(ValueError):
    """Error for a name that is none of the known formats, nor of `more` that are not listed.

    It says a hint that is given, or what makes it in Python, or which names are near. `of_command` is what a
    command says, which is not in Python.
    """

    def __init__(
        self, name: str, known: Sequence[str], hint: str | None = None, more: Sequence[str] = ()
    ) -> None:
        self.name, self.known = name, known
        self._given = name, known, hint, more
        in_python, instead = (hint, hint) if hint else _made_by(name.lower(), known)
        self.of_command = self._told(instead, more)
        super().__init__(self._told(in_python, more))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all arguments, as processes hand errors on: an exception's own has only the message."""
        return UnknownFormatError, self._given, self.__dict__

    def _told(self, hint: str | None, more: Sequence[str] = ()) -> str:
        """The message with a hint, or with the names that are near."""
        near, lower = [], self.name.lower()
        if hint is None:
            meant = _ELSEWHERE.get(lower)
            near = [meant] if meant else get_close_matches(lower, [*self.known, *more], 3)
        listed = ", ".join(self.known)
        if near:
            return f"unknown format {self.name!r}: did you mean {' or '.join(near)}? Known are {listed}"
        return f"unknown format {self.name!r}{hint or ''}; known are {listed}"


def _unknown_format(name: str) -> UnknownFormatError:
    """Error for a name that is no array format; a hint says so of a mixture's name."""
    hint = None
    if name.lower()[-4:] in ("_k_s", "_k_m", "_k_l") and name.lower()[:-2] in _BY_NAME:
        hint = f"; {name} is llama.cpp's name of a mixture, for whole files (quantize_file, cuquant quantize)"
        hint += f", and an array takes one format, as {name.lower()[:-2]}"
    return UnknownFormatError(name, names(), hint, tuple(_READ_ONLY))


def _made_by(name: str, known: Sequence[str]) -> tuple[str, str] | tuple[None, None]:
    """What makes floats of that name, or formats with parameters in their names, as "int4-256"; and what is
    said where nothing can be made."""
    from .parameters import FAMILIES

    if name in check.NAMED_FLOATS:
        floats = "floats, which are not quantized"
        return f"; numbers.astype({check.NAMED_FLOATS[name]!r}) makes {floats}", f"; it is of {floats}"
    for family, (kind, given) in FAMILIES.items():
        listed = any(each.startswith(family) for each in known)
        if listed and re.match(rf"{re.escape(family)}\d*[-*]", name):
            made = f"; cuquant.{kind.__name__}({', '.join(given)}) makes formats of other parameters"
            return made, "; on the command line only formats that have names can be given"
    return None, None


def by_ggml_type(number: int) -> Format | None:
    """The format with that GGUF type number, or None."""
    return next((f for f in (*_BY_NAME.values(), *_READ_ONLY.values()) if f.ggml_type == number), None)


def by_type_name(name: str) -> Format | None:
    """The format of tensors of GGUF files whose type has that name (any case), or None."""
    fmt = _READ_ONLY.get(name.lower()) or _BY_NAME.get(name.lower())
    is_type = fmt is not None and (fmt.ggml_type is not None or fmt.ggml_type_elsewhere is not None)
    return fmt if is_type else None


def of_forks() -> tuple[Format, ...]:
    """Formats for which only forks of llama.cpp have a type number, that of another format."""
    return tuple(f for f in (*_BY_NAME.values(), *_READ_ONLY.values()) if f.ggml_type_elsewhere is not None)
