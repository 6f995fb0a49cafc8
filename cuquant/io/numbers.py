"""Numbers of tensors as floats: of plain types, and of types without a format here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check, cpu
from .gguf import GGUFError, TensorInfo


def rounded(x: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Plain numbers in that dtype; infinite where they are beyond its range."""
    if dtype != check.BFLOAT16 or x.dtype in check.FLOATS:
        return x.astype(dtype)
    # ml_dtypes goes by way of float32. What that cannot hold becomes the odd one of the two numbers about it,
    # which is halfway between no two of bfloat16.
    wide = x.astype(np.float64)
    near = wide.astype(np.float32)
    below = np.where(np.abs(near) > np.abs(wide), np.nextafter(near, np.float32(0)), near)
    return (below.view(np.uint32) | (near != wide)).view(np.float32).astype(dtype)


def require_known(info: TensorInfo) -> None:
    """GGUFError where the gguf package does not know what the blocks of a tensor stand for."""
    import gguf

    assert info.ggml_type is not None
    kind = gguf.GGMLQuantizationType(info.ggml_type)
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        problem = f"tensor {info.name!r}: the gguf package cannot dequantize {info.type_name}"
        raise GGUFError(problem) from None


def foreign(
    raw: NDArray[np.uint8], info: TensorInfo, scales: NDArray[np.float32] | None, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """A tensor of a foreign quantized type as floats, through the gguf package, times scales of experts."""
    import gguf

    require_known(info)
    kind = gguf.GGMLQuantizationType[info.type_name]
    rows = raw.reshape(-1, info.nbytes * info.shape[-1] // int(np.prod(info.shape, dtype=object)))
    out = np.empty((len(rows), info.shape[-1]), dtype)
    for part in cpu.slabs(len(rows), info.shape[-1]):
        with cpu.silent():
            numbers = gguf.quants.dequantize(rows[part], kind)
            out[part] = numbers if scales is None else numbers * _of_rows(scales, part, len(rows))
    return out.reshape(info.shape)


def _of_rows(scales: NDArray[np.float32], part: slice, rows: int) -> NDArray[np.float32]:
    """The scales of these rows, of which each matrix has as many."""
    return scales[np.arange(part.start, part.stop) // (rows // scales.size), None]
