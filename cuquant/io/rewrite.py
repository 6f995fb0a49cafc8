"""A model's file anew: some tensors become other bytes, and everything else is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import check
from ..device import as_numpy
from ..render import escaped, progress_bar
from . import metadata, safetensors
from .atomic import replacing
from .gguf import PLAIN_TYPES, GGUFError
from .model import Model


class Changed(NamedTuple):
    """What a tensor becomes."""

    ggml_type: int
    nbytes: int
    make: Callable[[], Any]
    """Returns the NumPy or CuPy array of its bytes."""


@contextmanager
def new_file(model: Model, target: Path, force: bool) -> Iterator[Path]:
    """Where to write what takes the place of `target` when it is whole.

    ValueError if that is the model's own file, or this is changed meanwhile; FileExistsError if it exists and
    `force` is false; TypeError if that is neither True nor False.
    """
    force = check.flag(force, "force")
    if model._reads(target):
        raise ValueError(f"{target} is the file being read")
    with replacing(target, force) as temporary:
        yield temporary
        model._as_opened()  # else tensors may be of two states of its file


def write_gguf(
    path: Path,
    model: Model,
    changed: Mapping[str, Changed],
    file_type: int | None,
    progress: bool,
    left_out: Collection[str] = (),
    added: metadata.Added | None = None,
) -> None:
    """Write the header, then each tensor as it is made; `file_type` is the new general.file_type, and `added`
    are keys of the new file's own."""
    names = [name for name in model if name not in left_out]
    foreign = [name for name in names if name not in changed and model.tensors[name].ggml_type is None]
    if foreign:
        kind = model.format(foreign[0])
        raise GGUFError(
            f"tensor {foreign[0]!r} is in {kind}, for which GGUF has no type: it cannot be copied "
            "(into a file named *.safetensors it can)"
        )
    with closing(metadata.writer(path, model.metadata, model.alignment, file_type, added)) as writer:
        for name in names:
            _announce(model, name, changed.get(name), writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in _shown(names, progress):
            new = changed.get(name)
            writer.write_tensor_data(as_numpy(model.raw(name) if new is None else new.make()))


def write_safetensors(
    path: Path,
    model: Model,
    changed: Mapping[str, safetensors.Tensor],
    file_type: int | None,
    progress: bool,
    left_out: Collection[str],
    added: metadata.Added | None = None,
) -> None:
    """Write a safetensors file, each tensor as it is made; `left_out` are `scales_of` all tensors, and
    `added` keys of the new file's own."""
    tensors = {name: changed.get(name) or _copied(model, name) for name in model if name not in left_out}
    check.tensors(tensors, safetensors.METADATA)
    own = metadata.as_gguf(model.metadata, model.alignment, file_type, added)
    safetensors.write(path, tensors, own, lambda names: _shown(names, progress))


def scales_of(model: Model, names: Iterable[str]) -> dict[str, str]:
    """The scales beside nvfp4 tensors of these names, and whose they are. Numbers of such a tensor have been
    multiplied by its scale, and a safetensors file has the scale in the tensor's format."""
    return {scale: name for name in names if (scale := model.scale_of(name)) is not None}


def _copied(model: Model, name: str) -> safetensors.Tensor:
    """A tensor as it is, for a safetensors file; of a type without a format here float16 numbers. Nothing is
    read before it is written."""
    info, fmt = model.tensors[name], model.format(name)
    if fmt is not None:
        return safetensors.quantized(fmt, info.shape, lambda: model.raw(name))
    if info.ggml_type not in PLAIN_TYPES:
        return safetensors.Tensor("F16", info.shape, lambda: model[name])
    kind, dtype = PLAIN_TYPES[info.ggml_type]
    return safetensors.Tensor(kind, info.shape, lambda: model.raw(name).view(dtype))


def _shown(names: Iterable[str], progress: bool) -> Iterator[str]:
    """The names, behind a progress bar."""
    with progress_bar(progress, "tensor", names) as bar:
        for name in bar:
            bar.set_postfix_str(escaped(name))
            yield name


def _announce(model: Model, name: str, new: Changed | None, writer: Any) -> None:
    """Name, shape and type of a tensor."""
    import gguf

    info = model.tensors[name]
    number, nbytes = (info.ggml_type, info.nbytes) if new is None else (new.ggml_type, new.nbytes)
    assert number is not None
    kind = gguf.GGMLQuantizationType(number)
    # Shapes of uint8 tensors would be taken for bytes; of any other type they are the elements'.
    writer.add_tensor_info(name, info.shape, np.dtype(np.void), nbytes, kind)
