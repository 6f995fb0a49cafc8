"""int4 weights as GPTQ, AWQ and compressed-tensors (llm-compressor, vLLM) store them: eight codes in a word.

With G groups along K:

                          codes       zero points    scales    code i of a word, from its lowest bits
    GPTQ                  [K/8, N]    [G, N/8]       [G, N]    i
    AWQ                   [K, N/8]    [G, N/8]       [G, N]    column 0, 2, 4, 6, 1, 3, 5, 7 of its eight
    compressed-tensors    [N, K/8]    [N/8, G]       [N, G]    i

The first two keep a weight transposed. Layouts are those of AutoGPTQ and GPTQModel (qweight packed along K,
qzeros along N), of AutoAWQ's GEMM kernels (both along N), and of compressed-tensors' "pack-quantized" (codes
along K, zero points along N). A weight is read as (q - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..array import QuantizedArray
from ..formats.int4 import pack_pairs, unpack_pairs
from ..ops.int4 import int4_from_parts

Stated = Mapping[str, Collection[int]]
"""Sizes of groups that are allowed, by who says so in an error."""
_PER_WORD = 8
_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_SYMMETRIC_ZERO = 8
_MINUS_1 = np.int32(0x11111111)
"""What version 1 takes off a word of eight zero points."""


def from_gptq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    g_idx: Any = None,
    version: int = 1,
    group_size: int | None = None,
) -> QuantizedArray:
    """A weight of a GPTQ checkpoint of 4 bits; of float16 scales without rounding.

    Parameters
    ----------
    qweight : NumPy array of int32, shape (K / 8, N)
        Eight codes along K in a word, the first in its lowest bits.
    qzeros : NumPy array of int32, shape (G, N / 8)
        Eight zero points along N in a word.
    scales : NumPy array of float16, bfloat16 or float32, shape (G, N)
        Rounded to float16, as weight_scale of `from_pack_quantized`.
    g_idx : NumPy array of integers, shape (K,), optional
        Group of each weight along K; only k // (K / G) is taken, which is what it is without act-order.
    version : 1 or 2
        The checkpoint format: "gptq" (1) stores zero points minus 1, "gptq_v2" (2) stores them as they are.
        To those of version 1 it adds 1 as GPTQModel takes it off, of the eight in a word at once: a stored 15
        is 0, and carries 1 into the next. Some read 16 there, a zero point that no quantizer makes.
    group_size : int, optional
        What the checkpoint's configuration says, -1 for a group of K: K / G is then compared with it. Without
        it, and without g_idx, a K / G that is no power of 2 is refused where there are several groups: it
        may come from longer groups, of which the last is cut short.

    Returns
    -------
    QuantizedArray of shape (N, K), of the format Int4(K / G), symmetric where all zero points are 8

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; a scale is beyond float16; weights are permuted (g_idx);
        K / G is no multiple of 32, or not the size of the groups.
    """
    return gptq_weight(qweight, qzeros, scales, g_idx, version, check.asked_groups(group_size))


def gptq_weight(
    qweight: Any, qzeros: Any, scales: Any, g_idx: Any, version: int, stated: Stated
) -> QuantizedArray:
    """As `from_gptq`, of groups whose size may be stated."""
    minus = np.int32(2 - check.gptq_version(version))
    qweight, qzeros, scales, group = check.packed(qweight, qzeros, scales, along_k=_PER_WORD)
    check.require_groups(_PER_WORD * len(qweight), group, stated, g_idx)
    return _weight(_words_as_bytes(qweight.T), scales, _codes(qzeros + minus * _MINUS_1), group)


def from_awq(qweight: Any, qzeros: Any, scales: Any, group_size: int | None = None) -> QuantizedArray:
    """A weight of an AWQ checkpoint of 4 bits (the GEMM layout); of float16 scales without rounding.

    Parameters
    ----------
    qweight : NumPy array of int32, shape (K, N / 8)
        Eight codes along N in a word, those of columns 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on.
    qzeros : NumPy array of int32, shape (G, N / 8)
        Zero points in the same order.
    scales : NumPy array of float16, bfloat16 or float32, shape (G, N)
        Rounded to float16, as weight_scale of `from_pack_quantized`.
    group_size : int, optional
        As of `from_gptq`.

    Returns
    -------
    QuantizedArray of shape (N, K), of the format Int4(K / G), symmetric where all zero points are 8

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; a scale is beyond float16; K / G is no multiple of 32, or not
        the size of the groups.
    """
    return awq_weight(qweight, qzeros, scales, check.asked_groups(group_size))


def awq_weight(qweight: Any, qzeros: Any, scales: Any, stated: Stated) -> QuantizedArray:
    """As `from_awq`, of groups whose size may be stated."""
    qweight, qzeros, scales, group = check.packed(qweight, qzeros, scales, along_k=1)
    check.require_groups(len(qweight), group, stated, None)
    codes, zeros = (_columns_in_order(_codes(words)) for words in (qweight, qzeros))
    return _weight(pack_pairs(np.ascontiguousarray(codes.T)), scales, zeros, group)


def from_pack_quantized(
    weight_packed: Any,
    weight_scale: Any,
    weight_zero_point: Any = None,
    weight_shape: Any = None,
    weight_g_idx: Any = None,
    group_size: int | None = None,
) -> QuantizedArray:
    """A weight of 4 bits of a compressed-tensors checkpoint whose format is "pack-quantized" (W4A16).

    Parameters
    ----------
    weight_packed : NumPy array of int32, shape (N, K / 8)
        Eight codes along K in a word, the first in its lowest bits.
    weight_scale : NumPy array of float16, bfloat16 or float32, shape (N, G)
        Rounded to float16, in which the format keeps them: of bfloat16 only numbers below 6.1e-5 change, by
        up to 3e-8.
    weight_zero_point : NumPy array of int32, shape (N / 8, G), optional
        Eight zero points along N in a word; without, all are 8.
    weight_shape : NumPy array of integers, N and K, optional
        Tells codes of 4 bits from those of 8, which are refused: without it these would be read as twice
        as many of 4 bits.
    weight_g_idx : NumPy array of integers, shape (K,), optional
        As g_idx of `from_gptq`; that of a weight without act-order may be all -1.
    group_size : int, optional
        As of `from_gptq`.

    Returns
    -------
    QuantizedArray of shape (N, K), of the format Int4(K / G), symmetric where all zero points are 8

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; a scale is beyond float16; weights are permuted
        (weight_g_idx); K / G is no multiple of 32, or not the size of the groups.
    """
    return pack_quantized_weight(
        weight_packed,
        weight_scale,
        weight_zero_point,
        weight_shape,
        weight_g_idx,
        check.asked_groups(group_size),
    )


def pack_quantized_weight(
    weight_packed: Any,
    weight_scale: Any,
    weight_zero_point: Any,
    weight_shape: Any,
    weight_g_idx: Any,
    stated: Stated,
) -> QuantizedArray:
    """As `from_pack_quantized`, of groups whose size may be stated."""
    packed, scales, zeros, group = check.pack_quantized(
        weight_packed, weight_scale, weight_zero_point, weight_shape
    )
    check.require_groups(_PER_WORD * packed.shape[1], group, stated, weight_g_idx, "weight_g_idx")
    points = np.full(scales.T.shape, _SYMMETRIC_ZERO, np.uint8) if zeros is None else _codes(zeros.T)
    return _weight(_words_as_bytes(packed), scales.T, points, group)


def _weight(
    codes: NDArray[np.uint8], scales: NDArray[np.float16], zeros: NDArray[np.uint8], group: int
) -> QuantizedArray:
    """A weight of code bytes [N, K / 2], and of scales and zero points [G, N]."""
    symmetric = bool((zeros == _SYMMETRIC_ZERO).all())
    return int4_from_parts(codes, scales.T, None if symmetric else zeros.T, group)


def _codes(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Codes [rows, 8 * columns] of words [rows, columns], from the lowest bits on."""
    return unpack_pairs(_words_as_bytes(words))


def _words_as_bytes(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Bytes [rows, 4 * columns] of words [rows, columns], low ones first."""
    return np.ascontiguousarray(words, "<i4").view(np.uint8)


def _columns_in_order(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of AWQ words [rows, N] in the order of their columns."""
    result = np.empty_like(codes)
    result.reshape(len(codes), -1, _PER_WORD)[..., _AWQ_COLUMNS] = codes.reshape(len(codes), -1, _PER_WORD)
    return result
