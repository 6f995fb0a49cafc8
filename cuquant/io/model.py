"""A model's file as a lazy mapping from tensor names to arrays."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import check, cpu
from ..array import QuantizedArray
from ..device import as_numpy, cupy
from ..formats import Format
from ..formats.nvfp4 import NvFp4
from ..render import counted, escaped, html_facts
from ..slabs import Slabs
from . import numbers
from .counts import not_finite
from .gguf import PLAIN_TYPES, File, GGUFError, Metadata, TensorInfo
from .imatrix import is_imatrix
from .parts import open_parts
from .saved import SavedFile
from .words import IMPORTANCE, missing


class FallbackWarning(UserWarning):
    """Some tensors are of GGUF types without a format on this device: they are read as float16 numbers."""


class Model(Mapping[str, Any]):
    """Tensors and metadata of a model, read from the memory-mapped file when asked for.

    ``model[name]`` is a QuantizedArray for the formats of this library and a plain array for F32, F16, BF16
    and the integer types, in NumPy's axis order (rows first). On the CPU both share the file's memory and
    are read-only. Weights in nvfp4 have the scale that the file has beside them (``model["a.scale"]`` of
    ``model["a.weight"]``) in their format. Other quantized types are dequantized to float16 at every access;
    on a GPU so are formats that have no kernels, and anywhere nvfp4 with a scale for each expert.

    Attributes
    ----------
    metadata : Mapping
        The header's key-value pairs; arrays are decoded when first asked for.
    tensors : dict of str to TensorInfo
        Name, shape, type, offset and bytes of every tensor, in file order.
    """

    def __init__(self, files: list[File | SavedFile], device: str, *, lent: bool = False) -> None:
        self._files = files
        self._device = device
        self._lent = lent
        """Whether the files belong to another model, which closes them."""
        self._home = {name: f for f in files for name in f.header.tensors}
        self.tensors: dict[str, TensorInfo] = {n: i for f in files for n, i in f.header.tensors.items()}
        self.metadata: Metadata = files[0].header.metadata

    @property
    def path(self) -> Path:
        """The file, or the first of a split model, as it was given to `open`."""
        return self._files[0].path

    @property
    def paths(self) -> list[Path]:
        """The file, or all files of a split model."""
        return [file.path for file in self._files]

    @property
    def _stamps(self) -> list[tuple[Path, os.stat_result]]:
        """Where each file was, and what the system said of it, when it was opened."""
        return [(file.place, file.status) for file in self._files]

    def _reads(self, target: Path) -> bool:
        """Whether a path leads to one of the files, or to what has taken its place."""
        status, place = target.stat() if target.exists() else None, os.path.realpath(target)
        return any(
            os.path.realpath(file.place) == place
            or (status is not None and os.path.samestat(status, file.status))
            for file in self._files
        )

    def _as_opened(self) -> Model:
        """The model itself; ValueError where a file is closed, or was changed since it was opened."""
        for file in self._files:
            check.require_still_as_opened(file.path, file.place, file.status, file.closed)
        return self

    def _on(self, device: str) -> Model:
        """A model of these files whose tensors are put on that device; closing it leaves them open."""
        return Model(self._as_opened()._files, device, lent=True)

    @property
    def alignment(self) -> int:
        """Bytes to which the tensors' data is aligned in the file."""
        return self._files[0].header.alignment

    @property
    def device(self) -> str:
        """Where tensors are put when read: "cpu" or "cuda"."""
        return self._device

    @property
    def xp(self) -> ModuleType:
        """The module of its arrays, to make others with: numpy, or on a GPU cupy."""
        return np if self._device == "cpu" else cupy()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file."""
        return sum(info.nbytes for info in self.tensors.values())

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor: a read-only uint8 view of the file."""
        info = self._info(name)
        return self._home[name].bytes_of(info)

    def __getitem__(self, name: str) -> Any:
        info = self._info(name)
        if self._format(info) is not None:
            return self._quantized(info).to_device(self._device)
        plain = info.ggml_type in PLAIN_TYPES
        array = self._plain(info) if plain else self.floats(name, np.float16)
        return array if self._device == "cpu" else cupy().asarray(array)

    def format(self, name: str) -> Format | None:
        """The format of a tensor's blocks, scale included; None of floats, of types without one here, and of
        blocks with a scale for each expert."""
        info = self._info(name)
        fmt = self._of_blocks(info)
        return None if fmt is None else self._scaled(fmt, info)

    def floats(self, name: str, dtype: Any = np.float32) -> NDArray[Any]:
        """A tensor's numbers as a NumPy array of float16, bfloat16 or float32, each rounded once (integers of
        more than 53 bits twice).

        TypeError where the dtype is none of these; GGUFError where numbers of this type cannot be read, or
        one is beyond the dtype's range. What is infinite or NaN stays so.
        """
        made, _ = self._floats(name, check.float_dtype(dtype))
        return made

    def _floats(self, name: str, dtype: np.dtype[Any]) -> tuple[NDArray[Any], int]:
        """As `floats`, and how many are infinite or NaN."""
        info = self._info(name)
        made = self._numbers(info, dtype)
        spoiled = not_finite(made)
        if spoiled:
            with np.errstate(invalid="ignore"):  # of a signaling NaN
                lost = ~np.isfinite(made)
                beyond = self._exact(info)[lost].astype(np.float64)
            beyond = np.abs(beyond[np.isfinite(beyond)])
            if beyond.size:
                half = dtype == check.FLOAT16
                most = "float16's 65504" if half else dtype.name
                wider = "bfloat16 and float32 have" if half else "float32 has"
                hint = f": {wider} room" if beyond.max() <= np.finfo(np.float32).max else ""
                raise GGUFError(f"tensor {name!r} ({info.type_name}) has values beyond {most}{hint}")
        return made, spoiled

    def _slabs(self, name: str) -> Iterator[Any]:
        """A tensor's numbers in float32, or as a plain type has them, some rows at a time, where they are
        dequantized."""
        info = self._info(name)
        on_gpu = self._device == "cuda" and self._format(info) is not None
        if info.ggml_type in PLAIN_TYPES:
            tensor: Any = self._plain(info)
        else:
            tensor = self.floats(name) if self._of_blocks(info) is None else self._quantized(info)
        slabs = Slabs(tensor, on_gpu=on_gpu)
        return (slabs.at(*place)[0] for place in slabs.places)

    def check_readable(self, name: str) -> None:
        """GGUFError where the numbers of a tensor cannot be read, for its type or its scale; nothing is."""
        info = self._info(name)
        if self.format(name) is None and info.ggml_type not in PLAIN_TYPES:
            numbers.require_known(info)

    def _numbers(self, info: TensorInfo, dtype: np.dtype[Any]) -> NDArray[Any]:
        """As `floats`, but infinite where they are beyond the dtype's range."""
        plain = info.ggml_type in PLAIN_TYPES
        if not plain and self._of_blocks(info) is None:
            scales = self._scales(info)
            of_experts = None if scales is None else self.raw(scales.name).view(np.float32)
            return numbers.foreign(self.raw(info.name), info, of_experts, dtype)
        with cpu.silent():
            if plain:
                return numbers.rounded(self._plain(info), dtype)
            made = self._quantized(info)
            if self._format(info) is not None:
                made = made.to_device(self._device)
            return as_numpy(made.dequantize(dtype))

    def _exact(self, info: TensorInfo) -> NDArray[Any]:
        """A tensor's numbers before they are rounded, as the file has them or in float32."""
        plain = info.ggml_type in PLAIN_TYPES
        return self._plain(info) if plain else self._numbers(info, np.dtype(np.float32))

    def _plain(self, info: TensorInfo) -> NDArray[Any]:
        """The numbers of a plain type: a read-only view of the file."""
        assert info.ggml_type is not None
        return self.raw(info.name).view(PLAIN_TYPES[info.ggml_type][1]).reshape(info.shape)

    def _quantized(self, info: TensorInfo) -> QuantizedArray:
        """A tensor of blocks that have a format, on the CPU."""
        fmt = self.format(info.name)
        assert fmt is not None
        raw = self.raw(info.name)
        try:
            blocks = check.raw_blocks(raw, fmt, info.shape)
        except ValueError as error:
            raise GGUFError(f"{self._home[info.name].path}: tensor {info.name!r}: {error}") from None
        return QuantizedArray._made(fmt, blocks, shape=info.shape)

    def _of_blocks(self, info: TensorInfo) -> Format | None:
        """The format of a tensor's blocks, before its scale."""
        scales = self._scales(info)
        return info.format if scales is None or scales.shape in ((), (1,)) else None

    def _format(self, info: TensorInfo) -> Format | None:
        """The format of a tensor's blocks, before its scale, where arrays of it can be used on the model's
        device."""
        fmt = self._of_blocks(info)
        return fmt if fmt is not None and (fmt.on_gpu or self._device == "cpu") else None

    def _scales(self, info: TensorInfo) -> TensorInfo | None:
        """The float32 scale beside the blocks of an nvfp4 tensor, or one for each expert, if it has any.

        llama.cpp's names: "blk.0.ffn_up.weight" has "blk.0.ffn_up.scale".
        """
        scales = self.tensors.get(f"{info.name.removesuffix('weight')}scale")
        if scales is None or info.format != "nvfp4":
            return None
        if scales.type_name != "F32" or scales.shape not in ((), (1,), info.shape[:-2]):
            kind = f"{scales.type_name} {scales.shape}"
            raise GGUFError(f"{self.path}: {scales.name!r} is no scale of {info.name!r} {info.shape}: {kind}")
        return scales

    def scale_of(self, name: str) -> str | None:
        """The name of the tensor by which the blocks of an nvfp4 tensor are multiplied, if there is one."""
        scales = self._scales(self._info(name))
        return None if scales is None else scales.name

    def _scaled(self, fmt: Format, info: TensorInfo) -> Format:
        """The format with the scale that the tensor has beside its blocks, if any."""
        scales = self._scales(info)
        if scales is None:
            return fmt
        try:
            return NvFp4(float(self.raw(scales.name).view(np.float32)[0]))
        except ValueError as error:
            raise GGUFError(f"{self.path}: {scales.name!r}: {error}") from None

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise missing(self.path.name, "tensor", name, self.tensors) from None

    # A mapping, but one of a file: compared and hashed as an object, not by reading every tensor.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or `default` where there is none of that name."""
        # As Metadata.get: no error is made, nor names found for it that are near.
        return super().get(name, default) if name in self else default

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def close(self) -> None:
        """Read no more of the files, and unmap them, unless arrays read from them are still alive (they keep
        their file mapped).

        Metadata that are arrays, as a vocabulary, are read when they are asked for: before this.
        """
        for file in () if self._lent else self._files:
            file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __copy__(self) -> Model:
        return self

    def __reduce__(self) -> NoReturn:
        raise check.pickle_error(self, "tensors")

    def _types(self) -> str:
        counts = Counter(info.type_name for info in self.tensors.values())
        return ", ".join(f"{count} {name}" for name, count in counts.most_common())

    def __repr__(self) -> str:
        tensors = f"{counted(len(self), 'tensor')}: {self._types()}; {self.nbytes:,} bytes of tensors"
        return f"Model({str(self.path)!r}, {tensors})"

    def _shown(self, key: str) -> str:
        """A value as text; empty where the key is missing, or can no longer be read."""
        try:
            return str(self.metadata.get(key, ""))
        except ValueError:
            return ""

    def _repr_html_(self) -> str:
        head = ("architecture", "name")
        facts = {key: self._shown(f"general.{key}") for key in head}
        facts |= {"tensors": self._types(), "bytes of tensors": f"{self.nbytes:,}", "file": str(self.path)}
        return html_facts(facts)


def open(path: str | os.PathLike[str], device: str | None = None) -> Model:
    """Open a model: the header is read and validated, tensor bytes are not touched.

    They are read when a tensor is asked for, and errors of theirs are raised then: GGUFError for numbers that
    cannot be read, KeyError for a name that is not there (with those that are near), ValueError once the
    model is closed.

    Parameters
    ----------
    path : str or path
        A GGUF file, little-endian, version 2 or 3; for a split model (…-00001-of-00003.gguf) any of its
        files, the others beside it. Or a safetensors file that `cuquant.quantize_file` wrote, or
        `cuquant.save` with metadata.
    device : "cpu" or "cuda", optional
        Where tensors are put when read: by default on the GPU where one can be used (see `cuquant info`).

    Returns
    -------
    Model

    Raises
    ------
    TypeError, ValueError
        `path` is no path; `device` is another word.
    OSError
        There is no such file, it is a folder, or cannot be read.
    GGUFError
        The file is no such file, as an importance matrix is not (`read_imatrix` reads that), or damaged; or
        parts of a split model are missing or do not belong together.
    RuntimeError
        `device` is "cuda", and there is no GPU (the message says why).

    Warns
    -----
    FallbackWarning
        Once, naming types and tensors that have no format here, or on a GPU no kernels, and are dequantized
        to float16 when read.
    """
    model = opened(path, device)
    warn_of_fallback(model)
    return model


def opened(path: str | os.PathLike[str] | Model, device: str | None) -> Model:
    """As `open`, without a warning; of a model the files that it has open, on its device where none is
    named."""
    own = path.device if isinstance(path, Model) else None
    target = check.usable_device(own if device is None else device)
    if isinstance(path, Model):
        return path._on(target)
    with ExitStack() as mapped:
        parts = open_parts(check.model_path(path), mapped)
        if is_imatrix(parts[0].header):
            raise GGUFError(f"{path}: {IMPORTANCE}")
        mapped.pop_all()  # the model's now
    return Model(parts, target)


def warn_of_fallback(model: Model) -> None:
    """One warning that names the types without a format, and their tensors, at the line that called the
    function which calls this."""
    by_type: dict[str, list[str]] = {}
    for info in model.tensors.values():
        if info.ggml_type not in PLAIN_TYPES and model._format(info) is None:
            by_type.setdefault(info.type_name, []).append(info.name)
    if by_type:
        listed = "; ".join(
            f"{kind}: {', '.join(map(escaped, names[:3]))}"
            + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            for kind, names in by_type.items()
        )
        warnings.warn(
            f"{model.path.name} has tensors of types without a native format"
            f"{' on a GPU' if model.device == 'cuda' else ''}, dequantized to float16 when read ({listed})",
            FallbackWarning,
            stacklevel=3,
        )
