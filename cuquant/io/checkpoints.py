"""Weights as GPTQ, AWQ and EXL3 checkpoints store them (the last: exl3.py).

The first two keep a weight of 4 bits transposed, in three tensors: codes and zero points, eight in an int32,
and float16 scales. With G groups along K:

            qweight     qzeros      scales    code i of a word, from its lowest bits
    GPTQ    [K/8, N]    [G, N/8]    [G, N]    i
    AWQ     [K, N/8]    [G, N/8]    [G, N]    column 0, 2, 4, 6, 1, 3, 5, 7 of its eight

Layouts are those of AutoGPTQ and GPTQModel (qweight packed along K, qzeros along N) and of AutoAWQ's GEMM
kernels (both along N). A weight is read as (q - zero) * scale.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..array import QuantizedArray
from ..formats.exl3 import GENERATORS
from ..formats.int4 import pack_pairs, unpack_pairs
from ..ops.int4 import int4_from_parts
from .exl3 import from_exl3
from .safetensors import KEY
from .shards import PART, Tensors, opened
from .words import named_like

_PER_WORD = 8
_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_SYMMETRIC_ZERO = 8
_MINUS_1 = np.int32(0x11111111)
"""What version 1 takes off a word of eight zero points."""


def from_gptq(qweight: Any, qzeros: Any, scales: Any, g_idx: Any = None, version: int = 1) -> QuantizedArray:
    """A weight of a GPTQ checkpoint of 4 bits, without rounding.

    Parameters
    ----------
    qweight : NumPy array of int32, shape (K / 8, N)
        Eight codes along K in a word, the first in its lowest bits.
    qzeros : NumPy array of int32, shape (G, N / 8)
        Eight zero points along N in a word.
    scales : NumPy array of float16, shape (G, N)
    g_idx : NumPy array of integers, shape (K,), optional
        Group of each weight along K; only k // (K / G) is taken, which is what it is without act-order.
    version : 1 or 2
        The checkpoint format: "gptq" (1) stores zero points minus 1, "gptq_v2" (2) stores them as they are.
        To those of version 1 it adds 1 as GPTQModel takes it off, of the eight in a word at once: a stored 15
        is 0, and carries 1 into the next. Some read 16 there, a zero point that no quantizer makes.

    Returns
    -------
    QuantizedArray of shape (N, K), of the format Int4(K / G), symmetric where all zero points are 8

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; weights are permuted (g_idx); K / G is no multiple of 32.
    """
    minus = np.int32(2 - check.gptq_version(version))
    qweight, qzeros, scales, group = check.packed(qweight, qzeros, scales, along_k=_PER_WORD)
    check.group_index(g_idx, _PER_WORD * len(qweight), group)
    return _weight(_words_as_bytes(qweight.T), scales, _codes(qzeros + minus * _MINUS_1), group)


def from_awq(qweight: Any, qzeros: Any, scales: Any) -> QuantizedArray:
    """A weight of an AWQ checkpoint of 4 bits (the GEMM layout), without rounding.

    Parameters
    ----------
    qweight : NumPy array of int32, shape (K, N / 8)
        Eight codes along N in a word, those of columns 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on.
    qzeros : NumPy array of int32, shape (G, N / 8)
        Zero points in the same order.
    scales : NumPy array of float16, shape (G, N)

    Returns
    -------
    QuantizedArray of shape (N, K), of the format Int4(K / G), symmetric where all zero points are 8

    Raises
    ------
    TypeError, ValueError
        Dtypes, devices or shapes are not those; K / G is no multiple of 32.
    """
    qweight, qzeros, scales, group = check.packed(qweight, qzeros, scales, along_k=1)
    codes, zeros = (_columns_in_order(_codes(words)) for words in (qweight, qzeros))
    return _weight(pack_pairs(np.ascontiguousarray(codes.T)), scales, zeros, group)


def read_safetensors(
    path: str | os.PathLike[str], version: int = 1, names: str | Iterable[str] = "*"
) -> dict[str, Any]:
    """The quantized weights of a GPTQ, AWQ or EXL3 checkpoint, or of one file of it.

    Every tensor "name.qweight" makes a weight of "name.qzeros" and "name.scales", in whichever file they are;
    which of the two layouts it has is told from the shapes. Every "name.trellis" makes one of "name.suh" and
    "name.svh" (or "su" and "sv"), with the codebook of "name.mcg" or "name.mul1", if there is one. Other
    tensors are left alone.

    Parameters
    ----------
    path : str or path
        A safetensors file; of a checkpoint of several files its folder, or its *.safetensors.index.json.
    version : 1 or 2
        Of GPTQ weights, see `from_gptq`: 2 where the checkpoint's configuration says "gptq_v2".
    names : str, or several
        Shell patterns of the weights to read: "*.layers.0.*" are those of one layer.

    Returns
    -------
    dict of "name.weight" to QuantizedArray of shape (N, K), on the CPU, in alphabetical order
        Empty for one file of several (…-00002-of-00003.safetensors) that has
        nothing of such weights.

    Raises
    ------
    TypeError, ValueError
        The file is no safetensors file, or has no such weight; files of the checkpoint are missing; a pattern
        matches no weight; a weight lacks a tensor, which another file may have, or is of two kinds; or
        `from_gptq`, `from_awq` or `from_exl3` refuse it (the message names the file and the tensor).
    OSError
        A file cannot be read.
    """
    path = check.path(path)
    with opened(path) as tensors:
        found = sorted(name for name in tensors if name.endswith((".qweight", ".trellis")))
        part = PART.fullmatch(path.name) is not None  # it may have only what is not quantized
        own = any(KEY in (file.metadata() or {}) for file in tensors.files.values())
        if not found and (own or not part):
            wrote = "; cuquant wrote it, and cuquant.load reads it" if own else ""
            kinds = "GPTQ, AWQ or EXL3: no tensor named *.qweight or *.trellis"
            raise ValueError(f"{path} has no weight of {kinds}{wrote}")
        if part:
            _check_alone(tensors)
        hint = _ELSEWHERE * part
        weights = {f"{name[:-7]}weight": name for name in found}
        chosen = named_like(weights, names, f"weight of {path.name}", "names") if weights else []
        beside = {
            name: _beside(tensors, weights[name], hint) for name in chosen
        }  # of all, before any is made
        return {name: _read(tensors, weights[name], more, version) for name, more in beside.items()}


_BESIDE = {"qweight": (("qzeros",), ("scales",)), "trellis": (("suh", "su"), ("svh", "sv"))}
"""What a weight has beside its codes; the second name where there is not the first."""
_ELSEWHERE = "; another file of the checkpoint may: pass its folder, or its *.safetensors.index.json"


def _check_alone(tensors: Tensors) -> None:
    """ValueError where a file has parts of a weight whose codes another has."""
    kinds = {name: kind for kind, parts in _BESIDE.items() for names in parts for name in names}
    for name in tensors:
        prefix, _, part = name.rpartition(".")
        if part in kinds and f"{prefix}.{kinds[part]}" not in tensors:
            raise ValueError(f"{tensors.named(name)} has no {kinds[part]} beside it{_ELSEWHERE}")


def _beside(tensors: Tensors, name: str, hint: str) -> list[str]:
    """The names of the tensors that a weight's codes need; of EXL3 the codebook's name, too."""
    prefix, _, kind = name.rpartition(".")
    if all(f"{prefix}.{codes}" in tensors for codes in _BESIDE):
        raise ValueError(f"{tensors.named(name)}: there is a {' and a '.join(_BESIDE)} of this weight")
    there = [[part for part in parts if f"{prefix}.{part}" in tensors] for parts in _BESIDE[kind]]
    for twice in (found for found in there if len(found) > 1):
        raise ValueError(f"{tensors.named(name)}: there is a {' and a '.join(twice)} of this weight")
    missing = [parts[0] for parts, found in zip(_BESIDE[kind], there, strict=True) if not found]
    if missing:
        raise ValueError(f"{tensors.named(name)} has no {' and no '.join(missing)} beside it{hint}")
    beside = [f"{prefix}.{found[0]}" for found in there]
    return [*beside, _codebook(tensors, prefix)] if kind == "trellis" else beside


def _read(tensors: Tensors, name: str, beside: list[str], version: int) -> Any:
    """The weight whose codes are this tensor."""
    prefix, _, kind = name.rpartition(".")
    codes, one, other = (tensors[each] for each in (name, *beside[:2]))
    try:
        if kind == "trellis":
            return from_exl3(codes, one, other, beside[2])
        if codes.shape[-1:] == one.shape[-1:]:
            return from_awq(codes, one, other)
        return from_gptq(codes, one, other, tensors.get(f"{prefix}.g_idx"), version)
    except TypeError as error:
        raise TypeError(f"{tensors.named(name)}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{tensors.named(name)}: {error}") from None


def _codebook(tensors: Tensors, prefix: str) -> str:
    """The codebook of an EXL3 weight: a tensor of its name has what states are multiplied by."""
    there = [codebook for codebook in ("mcg", "mul1") if f"{prefix}.{codebook}" in tensors]
    if len(there) > 1:
        raise ValueError(
            f"{tensors.named(f'{prefix}.trellis')}: there is an {' and a '.join(there)} of this weight"
        )
    for codebook in there:
        name = f"{prefix}.{codebook}"
        if tensors[name].dtype.kind not in "iu":
            raise TypeError(f"{tensors.named(name)} has dtype {tensors[name].dtype}; an integer is needed")
        found = [int(factor) & 0xFFFFFFFF for factor in tensors[name].flat]
        if found != [GENERATORS[codebook]]:
            shown, known = ", ".join(map(hex, found)) or "empty", GENERATORS[codebook]
            raise ValueError(f"{tensors.named(name)} is {shown}; {known:#x} alone is known")
        return codebook
    return "3inst"


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
