"""A model's file anew: some tensors become other bytes, and everything else is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import check
from ..device import as_numpy
from . import safetensors
from .atomic import replacing
from .gguf import PLAIN_TYPES
from .model import Model
from .words import escaped

QUANTIZATION_VERSION = 2
"""ggml's version of the block formats, stored as general.quantization_version."""


class Changed(NamedTuple):
    """What a tensor becomes."""

    ggml_type: int
    nbytes: int
    make: Callable[[], Any]
    """Returns the NumPy or CuPy array of its bytes."""


@contextmanager
def new_file(model: Model, target: Path, force: bool) -> Iterator[Path]:
    """Where to write what takes the place of `target` when it is whole.

    ValueError if that is the model's own file, FileExistsError if it exists and `force` is false; TypeError
    if that is neither True nor False.
    """
    force = check.flag(force, "force")
    if any(target.exists() and target.samefile(path) for path in model.paths):
        raise ValueError(f"{target} is the file being read")
    with replacing(target, force) as temporary:
        yield temporary


def write_gguf(
    path: Path,
    model: Model,
    changed: Mapping[str, Changed],
    file_type: int | None,
    progress: bool,
    left_out: Collection[str] = (),
) -> None:
    """Write the header, then each tensor as it is made; `file_type` is the new general.file_type."""
    names = [name for name in model if name not in left_out]
    with closing(_writer(path, model)) as writer:
        _copy_metadata(model, file_type, writer)
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
    progress: bool,
    left_out: Collection[str],
) -> None:
    """The same to a safetensors file, which has no metadata; `left_out` are `scales_of` all tensors."""
    tensors = {name: changed.get(name) or _copied(model, name) for name in model if name not in left_out}
    safetensors.write(path, tensors, lambda names: _shown(names, progress))


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
    from tqdm import tqdm

    with tqdm(names, unit="tensor", disable=None if progress else True) as bar:
        for name in bar:
            bar.set_postfix_str(escaped(name))
            yield name


def _writer(path: Path, model: Model) -> Any:
    """The gguf package's writer, with the model's alignment, and made to write empty arrays too."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
            if vtype == gguf.GGUFValueType.ARRAY and len(val) == 0:
                head = self._pack("I", vtype) if add_vtype else b""
                return bytes(head + self._pack("I", sub_type) + self._pack("Q", 0))
            return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))

    writer = Writer(path, arch=str(model.metadata.get("general.architecture", "unknown")))
    writer.data_alignment = model.alignment
    return writer


def _announce(model: Model, name: str, new: Changed | None, writer: Any) -> None:
    """Name, shape and type of a tensor."""
    import gguf

    info = model.tensors[name]
    number, nbytes = (info.ggml_type, info.nbytes) if new is None else (new.ggml_type, new.nbytes)
    kind = gguf.GGMLQuantizationType(number)
    # Shapes of uint8 tensors would be taken for bytes; of any other type they are the elements'.
    writer.add_tensor_info(name, info.shape, np.dtype(np.void), nbytes, kind)


def _copy_metadata(model: Model, file_type: int | None, writer: Any) -> None:
    """All keys with their types; those that speak of the file itself are the new file's."""
    import gguf

    own = {f"general.{key}" for key in ("architecture", "alignment", "file_type", "quantization_version")}
    for key in model.metadata:
        if key.startswith("split.") or key in own:
            continue
        kind, element = model.metadata.value_type(key)
        value = model.metadata[key]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        sub = None if element is None else gguf.GGUFValueType(element)
        writer.add_key_value(key, value, gguf.GGUFValueType(kind), sub_type=sub)
    if model.alignment != gguf.GGUF_DEFAULT_ALIGNMENT:
        writer.add_custom_alignment(model.alignment)
    if file_type is not None:
        writer.add_file_type(file_type)
    writer.add_quantization_version(QUANTIZATION_VERSION)
