"""FP4 weights as checkpoints of others store them: codes, two in a byte, and scales in separate tensors.

                          codes                        scales                         of the tensor
    NVIDIA ModelOpt       weight [N, K/2]              weight_scale [N, K/16] E4M3    weight_scale_2
    compressed-tensors    weight_packed [N, K/2]       weight_scale [N, K/16] E4M3    1 / weight_global_scale
                          weight_packed [N, K/2]       weight_scale [N, K/32] E8M0
    gpt-oss               _blocks [E, N, K/32, 16]     _scales [E, N, K/32] E8M0
    OpenAI's gpt-oss      .blocks, of that shape       .scales

Everywhere byte j of a row holds weight 2 j in its low nibble and weight 2 j + 1 in its high one. Blocks here
have ggml's order of nibbles, so bytes change and numbers do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..array import QuantizedArray
from ..formats import ggml
from ..formats.base import Format, get
from ..formats.int4 import unpack_pairs
from ..formats.nvfp4 import NvFp4


def from_nvfp4(codes: Any, scales: Any, scale: float = 1.0) -> QuantizedArray:
    """A weight in NVFP4 from its codes and scales, without rounding.

    W = E2M1[code] * scale of 16 weights * scale of the tensor.

    Parameters
    ----------
    codes : NumPy array of uint8, shape (..., N, K / 2)
        Byte j of a row holds code 2 j in its low nibble and code 2 j + 1 in its high one. "weight" of
        ModelOpt, "weight_packed" of compressed-tensors.
    scales : NumPy array of uint8 or float8_e4m3fn, shape (..., N, K / 16)
        E4M3 numbers or their bytes, in the order of weights: not swizzled for tensor cores. "weight_scale".
    scale : float
        Of the tensor: "weight_scale_2" of ModelOpt, 1 over "weight_global_scale" of compressed-tensors.

    Returns
    -------
    QuantizedArray of shape (..., N, K), of the format NvFp4(scale)

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; K is no multiple of 64; a scale is NaN or negative; the
        tensor's is not from 2^-100 to 2^100.
    """
    fmt = NvFp4(scale)
    codes, scales = check.nvfp4(codes, scales)
    return _weight(fmt, codes, group=16, d=scales.reshape(-1, 4))


def from_mxfp4(codes: Any, scales: Any) -> QuantizedArray:
    """A weight in MXFP4 from its codes and scales, without rounding.

    W = E2M1[code] * 2^(scale - 127).

    Parameters
    ----------
    codes : NumPy array of uint8, shape (..., N, K / 2) or (..., N, K / 32, 16)
        Byte j of a row holds code 2 j in its low nibble and code 2 j + 1 in its high one. "_blocks" of
        gpt-oss, "weight_packed" of compressed-tensors.
    scales : NumPy array of uint8 or float8_e8m0fnu, shape (..., N, K / 32)
        Exponents. "_scales" of gpt-oss, "weight_scale" of compressed-tensors.

    Returns
    -------
    QuantizedArray of shape (..., N, K), of the format "mxfp4"

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; K is no multiple of 32; a scale is 255, E8M0's NaN.
    """
    codes, scales = check.mxfp4(codes, scales)
    return _weight(get("mxfp4"), codes, group=32, e=scales.reshape(-1))


def _weight(fmt: Format, codes: NDArray[np.uint8], group: int, **scales: NDArray[np.uint8]) -> QuantizedArray:
    """A weight of codes in pairs, of which ggml has the halves of a group in the nibbles of its bytes."""
    nibbles = unpack_pairs(codes).reshape(-1, group)
    qs = ggml.pack_nibbles(nibbles).reshape(-1, fmt.block_size // 2)
    blocks = ggml.records_of(fmt.storage, qs=qs, **scales).view(np.uint8)
    return QuantizedArray(fmt, blocks.reshape(*codes.shape[:-1], fmt.row_bytes(2 * codes.shape[-1])))
