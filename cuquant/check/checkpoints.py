"""Checks of what checkpoints of others hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .common import FLOATS, array, is_many, on_cpu, one_of, typed
from .formats import group_of, group_size

_WITHOUT_ORDER = -1
"""Group index that all weights have where they keep their order: compressed-tensors' mark."""
_ABOVE_NAN = 0x7F
"""The least byte of E4M3 that is no finite number of sign 0."""
_E8M0_NAN = 0xFF


def packed(qweight: Any, qzeros: Any, scales: Any, along_k: int) -> tuple[Any, Any, Any, int]:
    """Tensors of GPTQ or AWQ as NumPy arrays, with `along_k` codes along K in a word, scales as float16; the
    group size."""
    qweight, qzeros = typed(qweight, "qweight", np.int32), typed(qzeros, "qzeros", np.int32)
    scales = _float16(scales, "scales")
    given = qweight.shape, qzeros.shape, scales.shape
    if any(len(extents) != 2 for extents in given) or not (
        given[1][0] == given[2][0] and 8 * given[1][1] == given[2][1] == 8 // along_k * given[0][1]
    ):
        words = "(K / 8, N)" if along_k == 8 else "(K, N / 8)"
        raise ValueError(
            f"qweight {given[0]}, qzeros {given[1]} and scales {given[2]} are not codes of 4 bits in words: "
            f"{words}, (G, N / 8) and (G, N)"
        )
    return qweight, qzeros, scales, group_of(along_k * given[0][0], given[2][0])


def pack_quantized(packed: Any, scales: Any, zeros: Any, extents: Any) -> tuple[Any, Any, Any, int]:
    """Tensors of compressed-tensors' "pack-quantized" as NumPy arrays, scales as float16; the group size."""
    packed = typed(packed, "weight_packed", np.int32)
    scales = _float16(scales, "weight_scale")
    if packed.ndim != 2 or scales.ndim != 2 or len(packed) != len(scales):
        raise ValueError(
            f"weight_packed {packed.shape} and weight_scale {scales.shape} are not of one weight: (N, K / 8) "
            "and (N, G)"
        )
    n, k = len(packed), 8 * packed.shape[1]
    if extents is not None:
        sides = on_cpu(array(extents, "weight_shape", "integers"), "weight_shape")
        if sides.dtype.kind not in "iu":
            raise TypeError(f"weight_shape has dtype {sides.dtype}; integers are needed")
        given = tuple(int(side) for side in sides.ravel())
        if given != (n, k):
            bits = f"; codes of {4 * k // given[1]} bits cannot be read" if _wider(given, n, k) else ""
            raise ValueError(
                f"weight_shape is {given}; weight_packed {packed.shape} has {(n, k)} codes of 4 bits{bits}"
            )
    if zeros is not None:
        zeros = typed(zeros, "weight_zero_point", np.int32)
        if (8 * len(zeros), *zeros.shape[1:]) != scales.shape:
            raise ValueError(
                f"weight_zero_point has shape {zeros.shape}; of weight_scale {scales.shape} it is "
                f"{(n // 8, scales.shape[1])}, eight of N in a word"
            )
    return packed, scales, zeros, group_of(k, scales.shape[1])


def _wider(given: tuple[int, ...], n: int, k: int) -> bool:
    """Whether words hold fewer codes of a weight (n, ...) than eight each."""
    return len(given) == 2 and given[0] == n and 0 < given[1] < k and 4 * k % given[1] == 0


def _float16(value: Any, what: str) -> Any:
    """Scales of a float type, to the nearest of float16, of which single ones may become 0."""
    given = on_cpu(array(value, what, "floats"), what)
    if given.dtype not in FLOATS:
        raise TypeError(f"{what} has dtype {given.dtype}; float16, bfloat16 or float32 is needed")
    with np.errstate(over="ignore", under="ignore"):
        rounded = given.astype(np.float16)
    lost = np.isinf(rounded) & np.isfinite(given)
    if lost.any():
        raise ValueError(f"{what} holds {given[lost][0]}, which is beyond float16 (65504)")
    small = (rounded == 0) & (given != 0)
    if is_many(int(small.sum()), small.size):
        raise ValueError(
            f"{small.mean():.0%} of {what}, as {given[small][0]}, are below 3e-8 and would be 0 in float16"
        )
    return rounded


def nvfp4(codes: Any, scales: Any) -> tuple[Any, Any]:
    """Codes (..., N, K / 2) and scales (..., N, K / 16) of nvfp4 as bytes."""
    codes = typed(codes, "codes", np.uint8)
    raw = _as_bytes(scales, "scales", ml_dtypes.float8_e4m3fn)
    _of_one_weight(codes, raw, 16, 64)
    if (raw >= _ABOVE_NAN).any():
        raise ValueError("scales hold NaN or negative numbers; those of nvfp4 are from 0 to 448")
    return codes, raw


def mxfp4(codes: Any, scales: Any) -> tuple[Any, Any]:
    """Codes (..., N, K / 2), or (..., N, K / 32, 16), and scales (..., N, K / 32) of mxfp4 as bytes."""
    codes = typed(codes, "codes", np.uint8)
    raw = _as_bytes(scales, "scales", ml_dtypes.float8_e8m0fnu)
    if codes.ndim == raw.ndim + 1 and codes.shape[-1] == 16:
        codes = codes.reshape(*codes.shape[:-2], 16 * codes.shape[-2])
    _of_one_weight(codes, raw, 32, 32)
    if (raw == _E8M0_NAN).any():
        raise ValueError("scales hold 255, which is NaN in E8M0")
    return codes, raw


def _as_bytes(value: Any, what: str, dtype: Any) -> Any:
    """An array of bytes, given so or as floats of 8 bits."""
    given = on_cpu(array(value, what, f"uint8 or {np.dtype(dtype)}"), what)
    if given.dtype not in (np.uint8, dtype):
        raise TypeError(f"{what} has dtype {given.dtype}; uint8 or {np.dtype(dtype)} is needed")
    return given.view(np.uint8)


def _of_one_weight(codes: Any, scales: Any, group: int, block: int) -> None:
    """Codes of two weights in a byte, and a scale for each `group`; rows are whole blocks."""
    k = 2 * codes.shape[-1] if codes.ndim else 0
    if codes.ndim < 2 or scales.shape != (*codes.shape[:-1], k // group) or k % group:
        raise ValueError(
            f"codes {codes.shape} and scales {scales.shape} are not of one weight: (..., N, K / 2) and "
            f"(..., N, K / {group})"
        )
    if k % block or k == 0:
        raise ValueError(f"K is {k}; a multiple of {block} is needed")


def exl3(trellis: Any, suh: Any, svh: Any) -> tuple[Any, Any, Any]:
    """Tensors of EXL3 as NumPy arrays; signs that are packed become float16 numbers."""
    trellis = typed(trellis, "trellis", np.int16)
    extents = trellis.shape
    if len(extents) != 3:
        raise ValueError(f"trellis has shape {extents}; it has three axes: (K / 16, N / 16, 16 * bits)")
    for side, tiles in zip("KN", extents, strict=False):
        if tiles % 8 or tiles == 0:
            raise ValueError(f"trellis has shape {extents}: {side} is {16 * tiles}, no multiple of 128")
    if extents[2] not in range(16, 129, 16):
        raise ValueError(f"trellis has shape {extents}; its last axis is 16 times bits, 1 to 8")
    signs = []
    for value, name, side in ((suh, "suh", 16 * extents[0]), (svh, "svh", 16 * extents[1])):
        given = on_cpu(array(value, name, "float16, or int16 with a bit for each"), name)
        if given.dtype == np.int16:
            given = np.unpackbits(np.ascontiguousarray(given, "<i2").view(np.uint8), bitorder="little")
            given = 1 - 2 * given.astype(np.float16)
        if given.dtype != np.float16:
            raise TypeError(
                f"{name} has dtype {given.dtype}; float16, or int16 with a bit for each, is needed"
            )
        if given.shape != (side,):
            raise ValueError(f"{name} stands for {given.shape} numbers; trellis {extents} has {side} there")
        signs.append(given)
    return trellis, *signs


def gptq_version(value: Any) -> int:
    """Version of a GPTQ checkpoint: 1 or 2."""
    return one_of(value, "version", (1, 2))


def stated_version(version: int | None, stated: Mapping[Path, tuple[str, int]]) -> int | None:
    """The version of GPTQ weights: what is asked for, or else what files say, with their names of it; None
    where neither does."""
    versions = {number for _, number in stated.values()}
    said = " and ".join(f"{file} says {name!r} (version {number})" for file, (name, number) in stated.items())
    if version is None and len(versions) > 1:
        raise ValueError(f"{said}: pass version=1 or version=2")
    if version is not None and versions and version not in versions:
        raise ValueError(f"version is {version}, but {said}: leave it out")
    return max(versions, default=None) if version is None else version


def asked_groups(size: Any) -> dict[str, set[int]]:
    """Sizes that an argument group_size (or None) states, as `require_groups` takes them."""
    return {} if size is None else {f"group_size is {size}": {group_size(size)}}


def require_groups(
    k: int, group: int, stated: Mapping[str, Collection[int]], g_idx: Any, what: str = "g_idx"
) -> None:
    """Groups of k weights are of the size that the number of scales gives them, and in order.

    Where a writer's groups do not divide K it stores a scale for the rest as well, and K over the number of
    scales is another size. `stated` are sizes, -1 for a row, that are allowed by each of those who say so.
    """
    count = k // group
    scales = f"K is {k} with {count} scale{'' if count == 1 else 's'} in each row"
    for who, sizes in stated.items():
        if count > 1 and any(size > 0 and k % size and -(-k // size) == count for size in sizes):
            raise ValueError(f"{who}, and {scales}: the last group is cut short, and cannot be read")
        if group not in sizes and not (count == 1 and any(size == -1 or size > k for size in sizes)):
            raise ValueError(f"{who}, but {scales}, which are groups of {group}")
    known = is_group_index(g_idx, k, group, what) or bool(stated)
    if not known and count > 1 and group & (group - 1):
        raise ValueError(
            f"{scales}: groups of {group}, or longer ones of which the last is cut short, which cannot be "
            f"read. If they are of {group}, have the configuration beside the file say so, or pass "
            f"group_size={group} to what takes arrays (as from_gptq)"
        )


def is_group_index(value: Any, k: int, group: int, what: str) -> bool:
    """Group of each of k weights, in their own order; None says so too, and so do all -1. Whether it says
    the groups."""
    if value is None:
        return False
    g_idx = on_cpu(array(value, what, "integers"), what)
    if g_idx.dtype.kind not in "iu":
        raise TypeError(f"{what} has dtype {g_idx.dtype}; groups are numbered by integers")
    if g_idx.shape != (k,):
        raise ValueError(f"{what} has shape {g_idx.shape}; there are {k} weights along K")
    other = g_idx != np.arange(k) // group
    if not (g_idx != _WITHOUT_ORDER).any():
        return False
    if other.any():
        at, first = int(other.argmax()), int((g_idx == 0).sum())
        if first and k % first and (g_idx == np.arange(k) // first).all():
            raise ValueError(
                f"{what} says groups of {first}, and K is {k}: the last one is cut short, and cannot be read"
            )
        raise ValueError(
            f"{what} puts weight {at} into group {g_idx[at]}, not {at // group}: weights permuted along K "
            "(act-order, desc_act) cannot be read"
        )
    return True


def one_number(value: Any, what: str) -> float:
    """The number of an array of one."""
    if value.size != 1 or value.dtype.kind not in "fiu":
        raise ValueError(f"{what} has dtype {value.dtype} and shape {value.shape}; it is one number")
    return float(value.ravel()[0])


def one_over(value: Any, what: str) -> float:
    """1 over the number of an array of one, which is positive."""
    number = one_number(value, what)
    if not number > 0:
        raise ValueError(f"{what} is {number}; a positive number is needed")
    return float(np.float32(1) / np.float32(number))
