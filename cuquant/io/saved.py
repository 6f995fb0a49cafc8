"""A model in a safetensors file: weights for which GGUF has no types, beside the metadata of a GGUF file."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import safetensors
from .gguf import PLAIN_TYPES, GGUFError, Header, SavedArraysError, TensorInfo, scan
from .header import misfit

_NUMBERS = {name: number for number, (name, _) in PLAIN_TYPES.items()}


class SavedFile:
    """A file that `safetensors.save` wrote with metadata, read as a GGUF file is (`gguf.File`).

    Raises SavedArraysError where it has no metadata, GGUFError where it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.place = path, Path(os.path.abspath(path))
        try:
            saved = safetensors.read(path)
        except ValueError as error:
            raise GGUFError(str(error)) from None
        if saved.metadata is None:
            raise SavedArraysError(
                f"{path}: not a model, but arrays that cuquant wrote, and cuquant.load reads: it has no "
                "metadata (what cuquant.quantize_file writes has them, and cuquant.save can be given them)"
            )
        if not saved.arrays:
            raise GGUFError(f"{path}: the model has no tensors")
        try:
            told = scan(bytes(saved.metadata), f"{path}: metadata")
        except GGUFError as error:
            raise GGUFError(str(error)) from None
        if told.tensors:
            raise GGUFError(f"{path}: metadata: tensors are declared there: the file is damaged")
        self.status = saved.status
        self._arrays: dict[str, Any] | None = saved.arrays
        tensors = {
            name: self._info(name, array, saved.weights.get(name), saved.offsets[name])
            for name, array in saved.arrays.items()
        }
        self.header = Header(
            told.version, told.alignment, told.metadata, tensors, min(saved.offsets.values())
        )

    def _info(self, name: str, array: NDArray[Any], weight: Any, offset: int) -> TensorInfo:
        """What the file says of a tensor."""
        kind = safetensors.type_of(array)
        try:
            fmt, shape = (
                (None, array.shape) if weight is None else safetensors.described(self.path, name, weight)
            )
        except ValueError as error:
            raise GGUFError(str(error)) from None
        problem = misfit(name, shape)
        if fmt is None and kind not in safetensors.OF_MODELS:
            problem = f"has the type {kind}, which no model has"
        if problem:
            raise GGUFError(f"{self.path}: tensor {name!r} {problem}")
        if fmt is None:
            return TensorInfo(name, shape, _NUMBERS[kind], kind, offset, array.nbytes)
        need = math.prod(fmt.stored(shape))
        if kind != "U8" or array.size != need:
            held = f"{array.size} of {array.dtype} are there, {fmt} of shape {shape} has {need} bytes"
            raise GGUFError(f"{self.path}: the weight {name!r} is damaged: {held}")
        return TensorInfo(name, shape, fmt.ggml_type, fmt.type_name, offset, array.nbytes, fmt)

    def bytes_of(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, a read-only view; ValueError where the file is closed."""
        if self._arrays is None:
            raise ValueError(f"{self.path}: tensor {tensor.name!r}: the file is closed")
        return self._arrays[tensor.name].reshape(-1).view(np.uint8)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be read."""
        return self._arrays is None

    def close(self) -> None:
        """Unmap the file, unless views of it are alive: they keep it mapped."""
        self._arrays = None
