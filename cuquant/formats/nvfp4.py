"""nvfp4: 4-bit floats, one 8-bit float per 16 weights (ggml type 40)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from . import e2m1, ggml
from .base import Format, get, register
from .kernels import Coding, Encoder, KeptAs, Kernels, Scaling, kept_as

_GROUP = 16
"""Weights of one scale."""
_LARGEST = np.float32(e2m1.LARGEST * 448)
"""Largest weight, in units of the tensor's scale."""
_FITTED = np.float32(e2m1.LARGEST * 240)
"""Largest weight, in units of the tensor's scale, whose block's scale is still to nearest: all greater ones
become 448."""
SCALES = (2.0**-100, 2.0**100)
"""Bounds of a tensor's scale, by which products multiply their sums, also times a power of two."""
_LARGEST_CODE = 0x7E
_TOP_EXPONENT = 0x78
"""Code of 256, the least scale of the largest exponent."""
_SMALLEST_NORMAL = np.float32(2**-6)
_STEPS = np.float32(2**9)
"""Subnormal scales in 1."""


def _halves() -> NDArray[np.float32]:
    """Half the number of every byte: unsigned E4M3 without its sign bit, but 0x7F is 0."""
    exponent, mantissa = np.divmod(np.arange(256) & 0x7F, 8)
    normal = np.ldexp(np.float32(8) + mantissa.astype(np.float32), exponent - 11)
    halves = np.where(exponent > 0, normal, np.ldexp(mantissa.astype(np.float32), -10))
    halves[0x7F] = 0
    return halves


_HALVES = _halves()


class NvFp4(Format):
    """64 weights in 36 bytes: 4 unsigned E4M3 scales, then 4 x 8 bytes of nibbles; W = E2M1[q] * d * scale.

    Scale g and bytes 8 g to 8 g + 7 of the nibbles belong to weights 16 g to 16 g + 15; of these bytes, byte
    j holds weight j in its low nibble and weight j + 8 in its high one. The scale is absmax / 6, rounded as
    ggml does: to nearest, ties up; but below 2^-6 to at most 7 * 2^-9, and from 248 on to 448. 0x7F, E4M3's
    NaN, reads as 0, and 0xFF as 480. Source: quantize_row_nvfp4_ref and ggml_fp32_to_ue4m3 of ggml.

    16 weights below 0.0058 would read as 0, since the least of these scales is 2^-9. So a tensor may have a
    float32 `scale` beside its blocks: weights are divided by it before they are quantized, and what blocks
    read as is multiplied by it, each with one rounding in float32; products multiply their float32 sums. It
    is that of NVIDIA's NVFP4 (weight_scale_2), and in GGUF files a tensor "name.scale". "nvfp4" is
    `NvFp4(1)`: blocks alone.

    Parameters
    ----------
    scale : float, optional
        From 2^-100 to 2^100, rounded to float32. Without one, quantizing gives arrays of a format whose scale
        is the least that keeps those of blocks to nearest: their greatest magnitude over 6 * 240.

    Raises
    ------
    TypeError, ValueError
        scale is no such number.
    """

    def __init__(self, scale: float | None = None) -> None:
        self.scale = None if scale is None else check.tensor_scale(scale, SCALES)
        """The tensor's scale; None where it is to be fitted."""
        of_tensor = "scale" if self.scale is None else f"{self.scale:.9g}"
        if self.scale == 1:
            self.ggml_type, self.file_type = 40, 39
        self.name = "nvfp4" if self.scale == 1 else f"nvfp4*{of_tensor}"
        self.formula = "W = E2M1[q] * d" + ("" if self.scale == 1 else f" * {of_tensor}")
        self.largest = None if self.scale is None else _largest(np.float32(self.scale))
        self.beyond = (
            "divide the weights"
            if self.scale == SCALES[1]
            else "use cuquant.NvFp4(), which has a scale for the tensor"
        )
        self.lacks = "scale: pass NvFp4(scale)" if self.scale is None else ""

    bits = 4
    block_size = 4 * _GROUP
    scale_size = _GROUP
    storage = np.dtype([("d", "u1", (4,)), ("qs", "u1", (32,))])
    scales = ("d",)
    codebook = e2m1.TWICE
    fine_from = 1  # codes are chosen for the scale as it is stored, which makes up for its rounding
    type_name = "NVFP4"
    scale_beside = True
    of_each = (
        "each has a scale for the tensor of its own: quantize the floats as one array, or each with one "
        "cuquant.NvFp4(s), s being the greatest of their .format.scale"
    )

    @property
    def no_gguf_type(self) -> str:
        return (
            f"{self!r} has no GGUF type: nvfp4 tensors with a scale beside them are read from GGUF files, "
            'but not quantized to; "nvfp4", without a scale, can be written '
            "(and both in a *.safetensors file)"
        )

    @property
    def tensor_scale(self) -> float:
        assert self.scale is not None
        return self.scale

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        if self.scale == 1:
            return Kernels("nvfp4", Coding.E2M1, Scaling.E4M3, encoder=Encoder())
        return kept_as(KeptAs(get("nvfp4")))

    def fitted(self, x: Any, importance: Any = None) -> NvFp4:
        if self.scale is not None:
            return self
        # By their bits floats are ordered as their magnitudes, NaN last, in NumPy and CuPy.
        bits = x.view(f"u{x.itemsize}") & ((1 << (8 * x.itemsize - 1)) - 1)
        greatest = np.array(int(bits.max()) if bits.size else 0, bits.dtype).view(x.dtype)
        peak = np.float32(greatest.astype(np.float32))
        if peak == 0:
            return NvFp4(1)
        if not np.isfinite(peak):  # which quantizing refuses
            return NvFp4(SCALES[1])
        with np.errstate(under="ignore"):
            scale = max(peak / _FITTED, np.float32(SCALES[0]))
        above = scale if peak / scale <= _FITTED else np.nextafter(scale, np.float32(np.inf))
        return NvFp4(min(float(above), SCALES[1]))  # and what is beyond that, too

    def coarse_scales(self, blocks: Any) -> Any:
        records = blocks.reshape(*blocks.shape[:-1], -1, self.block_bytes)
        return (records[..., :4] < self.fine_from).reshape(*blocks.shape[:-1], -1)

    def encode(self, x: NDArray[np.float32]) -> NDArray[Any]:
        groups = x.reshape(-1, _GROUP) / np.float32(self.tensor_scale)
        d = _codes(np.abs(groups).max(axis=1, keepdims=True) / np.float32(e2m1.LARGEST))
        qs = ggml.pack_nibbles(e2m1.nearest(groups, _HALVES[d]))
        return ggml.records_of(self.storage, d=d.reshape(-1, 4), qs=qs.reshape(-1, 32))

    def decode(self, records: NDArray[Any]) -> NDArray[np.float32]:
        q = ggml.unpack_nibbles(records["qs"].reshape(-1, _GROUP // 2))
        blocks = e2m1.TWICE[q] * _HALVES[records["d"].reshape(-1, 1)]
        return (blocks * np.float32(self.tensor_scale)).reshape(-1, self.block_size)

    def numbers(self, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        return super().numbers(blocks, shape) | {"scale": np.array(self.scale, np.float32)}

    def __repr__(self) -> str:
        return (
            super().__repr__()
            if self.scale == 1
            else f"NvFp4({'' if self.scale is None else f'{self.scale:.9g}'})"
        )


def _largest(scale: np.float32) -> float:
    """The greatest float32 number that over the scale is at most 6 * 448."""
    x = _LARGEST * scale
    while x / scale > _LARGEST:
        x = np.nextafter(x, np.float32(0))
    while (above := np.nextafter(x, np.float32(np.inf))) / scale <= _LARGEST:
        x = above
    return float(x)


def _codes(scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Unsigned E4M3 of numbers from 0 to 448, rounded as ggml_fp32_to_ue4m3 does."""
    bits = np.ascontiguousarray(scales).view(np.int32)
    normal = ((bits + (1 << 19)) >> 20) - ((127 - 7) << 3)
    normal = np.where(normal >= _TOP_EXPONENT, _LARGEST_CODE, normal)
    subnormal = np.minimum((scales * _STEPS + ggml.HALF).astype(np.int32), 7)
    return np.where(scales < _SMALLEST_NORMAL, subnormal, normal).astype(np.uint8)


register(NvFp4(1))
