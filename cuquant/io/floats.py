"""A quantized model as a file of floats."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..render import counted
from . import safetensors
from .convert import FLOAT_TYPES, copied, is_weight_matrix
from .counts import below
from .gguf import PLAIN_TYPES, GGUFError, SavedArraysError, TensorInfo
from .model import Model, opened
from .rewrite import Changed, new_file, scales_of, write_gguf, write_safetensors

_FILE_TYPES = {0: 0, 1: 1, 30: 32}
"""`general.file_type` of files whose matrices have these GGUF types: F32, F16, BF16."""


@dataclass(frozen=True, repr=False)
class Dequantized:
    """What happened to each tensor of a model."""

    dtype: np.dtype[Any]
    made: frozenset[str]
    """Names of tensors that have this dtype now."""
    kept: frozenset[str]
    """Names of tensors that were copied."""
    left_out: frozenset[str]
    """Names of scales that the numbers of others, or their formats, have in them now."""

    def __repr__(self) -> str:
        made = f"{counted(len(self.made), 'tensor')} to {self.dtype}"
        out = f", {len(self.left_out)} left out" if self.left_out else ""
        return f"Dequantized({made}, {len(self.kept)} as they are{out})"


def dequantize_file(
    source: str | os.PathLike[str] | Model,
    target: str | os.PathLike[str],
    dtype: Any = np.float16,
    *,
    keep: str | Iterable[str] = (),
    force: bool = False,
    device: str | None = None,
    progress: bool = False,
) -> Dequantized:
    """Write the numbers that a quantized model stands for to a file of floats: GGUF, or safetensors.

    Quantized tensors, and weight matrices of other floats (but float64), get this dtype, each number rounded
    once; norms and all else are copied, the metadata too. (What `keep` names of types without a format here
    is float16 in a safetensors file, and of nvfp4 has the tensor's scale in its format, not beside it.)
    Tensors are read and written one at a time, under a temporary name beside `target` that takes its place
    only when complete.

    Parameters
    ----------
    source, target : path
        A split model becomes one file. The target is a GGUF file, *.gguf, or a safetensors file,
        *.safetensors, which has the metadata, too.
    dtype : float16, bfloat16 or float32, or "f16", "bf16" or "f32"
    keep : str, or several
        Shell patterns of tensor names to copy unchanged.
    force : bool
        Replace an existing `target`.
    device : "cpu" or "cuda", optional
        Where to dequantize, with the same numbers; by default on the GPU where one can be used.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    Dequantized
        With the names of the tensors that got the `dtype` (`made`), were copied (`kept`), or were scales of
        others (`left_out`).

    Raises
    ------
    FileExistsError
        `target` exists and `force` is false; so too where it has appeared meanwhile.
    GGUFError, TypeError, ValueError
        See `cuquant.open`; the dtype is none of these; the target's name has another ending; a pattern
        matches no tensor, or the scale of one that is not kept; nothing is left to do; a type cannot be read;
        or a number is beyond the dtype's range (its tensor is named).

    Warns
    -----
    UserWarning
        More than a hundredth of a tensor's weights are too small for the dtype: they became 0, or are below
        2^-21 in float16 (2^-130 in bfloat16), where numbers have three bits at most, and were rounded. Or a
        tensor holds NaN or infinity, which stay.
    """
    wanted = check.float_dtype(dtype)
    target = check.model_target(target)
    with _opened(source, device) as model:
        kept = copied(model, keep)
        made = [i for i in model.tensors.values() if i.name not in kept and _changes(i, wanted)]
        if not made:
            left = " that is not to be kept"
            if not kept:  # all are plain
                matrices = {i.type_name for i in model.tensors.values() if is_weight_matrix(i)}
                own = {dtype for name, dtype in PLAIN_TYPES.values() if name in matrices}
                left = ": its own are already" if own == {wanted} else ""
            raise ValueError(f"{model.path.name} has no matrix to turn into {wanted}{left}")
        number, kind = next((number, name) for number, (name, own) in PLAIN_TYPES.items() if own == wanted)
        changed = {info.name: _changed(model, info, number, wanted) for info in made}
        left_out = scales_of(model, changed)
        for scale in left_out.keys() & kept:
            raise ValueError(f"{scale!r} is the scale of {left_out[scale]!r}: keep both, or neither")
        for info in made:
            model.check_readable(info.name)
        to_gguf = target.suffix.lower() != ".safetensors"
        if not to_gguf:
            left_out |= scales_of(model, kept)
        with new_file(model, target, force) as temporary:
            if to_gguf:
                write_gguf(temporary, model, changed, _FILE_TYPES[number], progress, left_out)
            else:
                made_of = {
                    name: safetensors.Tensor(kind, model.tensors[name].shape, new.make)
                    for name, new in changed.items()
                }
                write_safetensors(temporary, model, made_of, _FILE_TYPES[number], progress, left_out)
        others = model.tensors.keys() - changed.keys() - left_out.keys()
    return Dequantized(wanted, frozenset(changed), frozenset(others), frozenset(left_out))


def _opened(source: str | os.PathLike[str] | Model, device: str | None) -> Model:
    """The model; of arrays that `cuquant.save` wrote, the error says how they are made floats."""
    try:
        return opened(source, device)
    except SavedArraysError:
        raise GGUFError(
            f"{source} is no model, which is what dequantize takes, but arrays that cuquant wrote, without "
            "metadata: in Python, {name: w.dequantize() if isinstance(w, cuquant.QuantizedArray) else w "
            f"for name, w in cuquant.load({str(source)!r}).items()}} has their numbers"
        ) from None


def _changes(info: TensorInfo, dtype: np.dtype[Any]) -> bool:
    if info.ggml_type not in PLAIN_TYPES:
        return True
    return (
        is_weight_matrix(info) and info.type_name in FLOAT_TYPES and PLAIN_TYPES[info.ggml_type][1] != dtype
    )


def _changed(model: Model, info: TensorInfo, number: int, dtype: np.dtype[Any]) -> Changed:
    nbytes = math.prod(info.shape) * dtype.itemsize
    return Changed(number, nbytes, lambda: _made(model, info.name, dtype))


def _made(model: Model, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A tensor's numbers in that dtype; a warning where some are NaN or infinite, or many too small."""
    made, spoiled = model._floats(name, dtype)
    if spoiled:
        warnings.warn(
            f"tensor {name!r}: {spoiled:,} of {counted(made.size, 'number')} are NaN or infinite, as they "
            f"are in {model.path.name}",
            stacklevel=2,
        )
    if dtype not in _COARSE:
        return made
    least, room = _COARSE[dtype]
    if check.is_many(below(made, least), made.size):  # the tensor's own zeros, perhaps
        lost = _lost(model, name, least)
        if check.is_many(lost, made.size):
            warnings.warn(
                f"tensor {name!r}: about {lost / made.size:.0%} of the weights are too small for {dtype}, "
                f"and become 0 or far from what they were: {room} room",
                stacklevel=2,
            )
    return made


def _lost(model: Model, name: str, least: float) -> int:
    """How many numbers of a tensor are rounded to others that are below `least`, of which a dtype has eighths
    alone."""
    # By bits of float32 numbers: CuPy's kernels take those below 2^-126 for zeros.
    held = (np.arange(8) * least / 8).astype(np.float32).view(np.uint32)
    rounded_up = np.float32(least - least / 16).view(np.uint32)
    lost: Any = 0
    for exact in model._slabs(name):
        bits = exact.astype(np.float32, copy=False).view(np.uint32) & np.uint32(0x7FFFFFFF)
        lost = lost + np.count_nonzero(bits < rounded_up)
        for number in held:
            lost = lost - np.count_nonzero(bits == number)
    return int(lost)


_COARSE = {
    check.FLOAT16: (2.0**-21, "bfloat16 and float32 (--type bf16, f32) have"),
    check.BFLOAT16: (2.0**-130, "float32 (--type f32) has"),
}
"""Below what a dtype's numbers have three bits at most, and what others have more."""
