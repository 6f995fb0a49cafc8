"""Metadata of a GGUF file for another one, which may have nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .header import Metadata

DEFAULT_ALIGNMENT = 32
"""Alignment in bytes of a file that states none."""
QUANTIZATION_VERSION = 2
"""ggml's version of the block formats, stored as general.quantization_version."""


Added = Mapping[str, str | int]
"""Keys that a new file has of its own: strings, and integers that 32 bits hold."""
IMATRIX = "quantize.imatrix."
"""How keys begin that say by which importance matrix weights were quantized."""


def writer(
    path: Path, metadata: Metadata, alignment: int, file_type: int | None, added: Added | None = None
) -> Any:
    """The gguf package's writer, with all of the metadata; those that speak of the file itself are the new
    one's, whose general.file_type, if it has any, is given, and so are those of an importance matrix where
    `added` has them. It writes empty arrays, too, and no file without a general.architecture."""
    import gguf

    class Writer(gguf.GGUFWriter):
        def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
            if vtype == gguf.GGUFValueType.ARRAY and len(val) == 0:
                head = self._pack("I", vtype) if add_vtype else b""
                return bytes(head + self._pack("I", sub_type) + self._pack("Q", 0))
            return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))

    made = Writer(path, arch=str(metadata.get("general.architecture", "unknown")))
    made.data_alignment = alignment
    own = {f"general.{key}" for key in ("architecture", "alignment", "file_type", "quantization_version")}
    for key in metadata:
        if key.startswith("split.") or key in own or (added and key.startswith(IMATRIX)):
            continue
        kind, element = metadata.value_type(key)
        value = metadata[key]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        sub = None if element is None else gguf.GGUFValueType(element)
        made.add_key_value(key, value, gguf.GGUFValueType(kind), sub_type=sub)
    if alignment != gguf.GGUF_DEFAULT_ALIGNMENT:
        made.add_custom_alignment(alignment)
    if file_type is not None:
        made.add_file_type(file_type)
    made.add_quantization_version(QUANTIZATION_VERSION)
    for key, new in (added or {}).items():
        made.add_string(key, new) if isinstance(new, str) else made.add_uint32(key, new)
    return made


def as_gguf(metadata: Metadata, alignment: int, file_type: int | None, added: Added | None = None) -> bytes:
    """A GGUF file of no tensors."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metadata.gguf"
        with closing(writer(path, metadata, alignment, file_type, added)) as made:
            made.write_header_to_file()
            made.write_kv_data_to_file()
        return path.read_bytes()
