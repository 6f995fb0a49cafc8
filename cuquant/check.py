"""Every check of an argument, and so every error: shapes, dtypes, devices, layouts, values.

Each function says what was given and what is allowed, before any work starts. TypeError is about what a
thing is, ValueError about the values and shapes it has, as in NumPy.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from . import device, memory

if TYPE_CHECKING:
    from .formats import Format

FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
ACTIVATIONS = ("relu", "gelu", "gelu_erf", "silu")
_FLOAT_NAMES = "float16, bfloat16 or float32"


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """One of float16, bfloat16, float32, from anything NumPy takes as a dtype, or the name "bfloat16"."""
    try:
        given = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype {dtype!r} is not one of {_FLOAT_NAMES}") from None
    if given not in FLOATS:
        raise TypeError(f"dtype {given} is not one of {_FLOAT_NAMES}")
    return given


def array(value: Any, what: str, of: str = _FLOAT_NAMES) -> Any:
    """A NumPy or CuPy array that shares memory with `value`, theirs or DLPack's (a torch tensor)."""
    if type(value) is np.ndarray or device.is_cuda(value):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array; its mask would be lost: pass .filled(value)")
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        return device.cupy().asarray(value)
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
        try:
            return np.from_dlpack(value)
        except (TypeError, RuntimeError, BufferError) as error:
            raise TypeError(f"{what}: NumPy cannot take this {type(value).__name__}: {error}") from None
    raise TypeError(f"{what} is a {type(value).__name__}; a NumPy or CuPy array of {of} is needed")


def floats(value: Any, what: str) -> Any:
    """`array`, of dtype float16, bfloat16 or float32."""
    result = array(value, what)
    if result.dtype not in FLOATS:
        raise TypeError(f"{what} has dtype {result.dtype}; allowed are {_FLOAT_NAMES}")
    return result


def typed(value: Any, what: str, dtype: Any) -> Any:
    """`array` of NumPy's, of one dtype."""
    result = on_cpu(array(value, what, str(np.dtype(dtype))), what)
    if result.dtype != dtype:
        raise TypeError(f"{what} has dtype {result.dtype}; {np.dtype(dtype)} is needed")
    return result


def on_cpu(value: Any, what: str) -> Any:
    """An array that is NumPy's."""
    if device.is_cuda(value):
        raise TypeError(f"{what} is a CuPy array, and this works on NumPy arrays only: pass {what}.get()")
    return value


def codes(value: Any) -> Any:
    """`array`, of dtype uint8."""
    result = array(value, "codes")
    if result.dtype != np.uint8:
        raise TypeError(f"codes has dtype {result.dtype}; E4M4 codes are uint8")
    return result


def e4m4(x: Any) -> None:
    """Numbers that E4M4 has codes for: finite and not negative."""
    bad = ~((x >= 0) & np.isfinite(x))
    if bad.any():
        raise ValueError(f"E4M4 has no code for {x[bad][0]}: numbers must be finite and not negative")


def codebook_bits(value: Any, allowed: tuple[int, ...]) -> int:
    """Bits of an index into a codebook."""
    choices = ", ".join(map(str, allowed))
    try:
        bits = operator.index(value)
    except TypeError:
        raise TypeError(f"bits is a {type(value).__name__}; allowed are {choices}") from None
    if bits not in allowed:
        raise ValueError(f"bits is {bits}; allowed are {choices}")
    return bits


def group_size(value: Any) -> int:
    """Weights that share a scale: a multiple of 32, or -1 for a row."""
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"group_size is a {type(value).__name__}, not an integer") from None
    if size != -1 and (size < 1 or size % 32):
        raise ValueError(
            f"group_size is {size}; allowed are 32, 64, 128, other multiples of 32, and -1 for a row"
        )
    return size


def one_of(value: Any, what: str, allowed: tuple[int, ...]) -> int:
    """One of some integers."""
    choices = " and ".join(map(str, allowed))
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is a {type(value).__name__}; allowed are {choices}") from None
    if number not in allowed:
        raise ValueError(f"{what} is {number}; allowed are {choices}")
    return number


def flag(value: Any, what: str) -> bool:
    """True or False, of Python or NumPy."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} is a {type(value).__name__}; allowed are True and False")
    return bool(value)


def choice(value: Any, what: str, allowed: tuple[str, ...]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{what} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
    return value


def codebook(value: Any, count: int) -> Any:
    """`count` numbers in [-1, 1], ascending, as a new float32 array."""
    if isinstance(value, str):
        raise ValueError(f'codebook is {value!r}; allowed are "normal" and {count} numbers')
    if device.is_cuda(value):
        on_cpu(value, "codebook")
    try:
        with np.errstate(over="ignore"):
            result = np.array(value, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"codebook is no array of {count} numbers: {error}") from None
    if result.shape != (count,):
        raise ValueError(f"codebook has shape {result.shape}; {count} numbers are needed")
    if not (np.abs(result) <= 1).all():
        worst = result[~(np.abs(result) <= 1)][0]
        raise ValueError(f"codebook holds {worst}; entries are in [-1, 1]: blocks are divided by their peak")
    if (result[1:] < result[:-1]).any():
        at = int((result[1:] < result[:-1]).argmax())
        raise ValueError(
            f"codebook is not sorted: entry {at + 1} ({result[at + 1]}) is below entry {at} ({result[at]}); "
            "pass numpy.sort(codebook)"
        )
    return result


def kbit_format(fmt: Any, kind: type[Format]) -> Any:
    """A k-bit format."""
    if not isinstance(fmt, kind):
        raise TypeError(f"format is {fmt}; a cuquant.KBit is needed")
    return fmt


def kbit_matrix(w: Any, kind: type[Format]) -> Any:
    """The format of a k-bit weight (N, K)."""
    if not is_quantized(w) or not isinstance(w.format, kind) or w.ndim != 2:
        raise TypeError(f"w is {_kind(w)}; a QuantizedArray (N, K) of a format cuquant.KBit is needed")
    return w.format


def tile_sizes(tile_n: Any, tile_k: Any, block: int) -> None:
    """Sides of tiles, whole blocks along K."""
    for what, value, multiple in (("tile_n", tile_n, 1), ("tile_k", tile_k, block)):
        if count(value, what) % multiple:
            raise ValueError(f"{what} is {value}; a positive multiple of {multiple} is needed")


def kbit_tiled(packed: Any, absmax: Any, fmt: Format, shape: Any) -> tuple[int, int]:
    """Bit planes and scales in tiles that hold a k-bit weight of shape (N, K)."""
    scale = fmt.storage["absmax"]
    packed, absmax = typed(packed, "packed", np.uint32), typed(absmax, "absmax", scale)
    if packed.ndim != 5 or packed.shape[:-1] != absmax.shape or packed.shape[-1] != fmt.bits:
        raise ValueError(
            f"packed has shape {packed.shape}, absmax {absmax.shape}; "
            f"(k tiles, n tiles, tile_n, tile_k / 32) is needed, and for packed {fmt.bits} more"
        )
    whole_blocks(shape, fmt)
    k_tiles, n_tiles, tile_n, blocks = absmax.shape
    sides = (tile_n, 32 * blocks)
    needed = tuple(-(-extent // max(side, 1)) for extent, side in zip(shape, sides, strict=False))
    if len(shape) != 2 or needed != (n_tiles, k_tiles):
        raise ValueError(
            f"{n_tiles} x {k_tiles} tiles of {tile_n} x {32 * blocks} do not hold a weight of shape {shape}"
        )
    return shape


def grid(value: Any, most: int) -> Any:
    """1 to `most` finite numbers, as a new float32 array."""
    if device.is_cuda(value):
        on_cpu(value, "grid")
    try:
        with np.errstate(over="ignore"):
            result = np.array(value, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"grid is no array of numbers: {error}") from None
    if result.ndim != 1 or not 1 <= result.size <= most:
        raise ValueError(f"grid has shape {result.shape}; 1 to {most} numbers are needed")
    if not np.isfinite(result).all():
        raise ValueError(f"grid holds {result[~np.isfinite(result)][0]}; its numbers must be finite")
    return result


def trellis_scales(scales: Any, fmt: Format) -> None:
    """No scale of quantized weights is beyond float32, as with tiny grids."""
    if not np.isfinite(scales).all():
        raise ValueError(f"{fmt}: a scale overflows float32: the weights are too large for this grid")


def not_signs(**arrays: Any) -> list[tuple[str, Any]]:
    """Names of arrays with an element that is neither +1 nor -1, and the first such element."""
    bad = {name: a[np.abs(a.astype(np.float32)) != 1] for name, a in arrays.items()}
    return [(name, elements[0]) for name, elements in bad.items() if elements.size]


def same_signs(su: Any) -> None:
    """Matrices whose signs along K, su [n, K], are one: rows of theirs can be put into one matrix."""
    if (su != su[0]).any():
        raise IndexError(
            "rows of several trellis matrices whose su differ cannot be one matrix: dequantize, then index"
        )


def trellis_parts(
    packed: Any, scales: Any, su: Any, sv: Any, shape: tuple[int, ...], groups: tuple[int, ...], given: Any
) -> tuple[Any, Any, Any, Any, int, int]:
    """The arrays of a trellis weight (..., N, K) as NumPy's, bits of its indices, and the group size.

    That is the one given, or the first of `groups` that fits the shape of scales.
    """
    packed, scales = typed(packed, "packed", np.uint8), typed(scales, "scales", np.float32)
    if len(shape) < 2 or 0 in shape[-2:]:
        raise ValueError(f"shape is {shape}; a trellis weight is (..., N, K), with N and K from 1 on")
    *lead, n, k = shape
    tiles = (*lead, -(-k // 16), -(-n // 16))
    if packed.shape[:-1] != tiles or packed.shape[-1] not in (64, 96, 128):
        raise ValueError(
            f"packed has shape {packed.shape}; a weight {shape} has {tiles} tiles of 64, 96 or 128 bytes "
            "(2, 3 or 4 bits)"
        )
    sizes = groups if given is None else (one_of(given, "group_size", groups),)
    fits = [size for size in sizes if scales.shape == (*lead, -(-k // size), n)]
    if not fits:
        wanted = " or ".join(f"{(*lead, -(-k // size), n)} for groups of {size}" for size in sizes)
        raise ValueError(f"scales has shape {scales.shape}; {wanted} is needed")
    su, sv = signs(su, "su", (*lead, k)), signs(sv, "sv", (*lead, n))
    if not np.isfinite(scales).all():
        raise ValueError(f"scales holds {scales[~np.isfinite(scales)][0]}; scales must be finite")
    return packed, scales, su, sv, packed.shape[-1] // 32, fits[0]


def trellis_weight(w: Any, kind: type[Format]) -> Any:
    """The format of a trellis weight in NumPy's memory."""
    if not is_quantized(w) or not isinstance(w.format, kind):
        raise TypeError(f"w is {_kind(w)}; a QuantizedArray of a format cuquant.Trellis is needed")
    on_cpu(storage(w), "w")
    return w.format


def is_trellis(fmt: Format, kind: type[Format]) -> Any:
    """A format of that kind."""
    if not isinstance(fmt, kind):
        raise TypeError(f"format is {fmt}; a cuquant.Trellis is needed")
    return fmt


def moments(value: Any, k: int) -> Any:
    """Second moments of k inputs in float32, or None."""
    if value is None:
        return None
    result = on_cpu(floats(value, "moments"), "moments").astype(np.float32)
    if result.shape != (k,):
        raise ValueError(f"moments has shape {result.shape}; one for each of K = {k} inputs is needed")
    if not (np.isfinite(result) & (result >= 0)).all():
        raise ValueError("moments must be finite and not negative")
    return result


def signs(value: Any, what: str, shape: tuple[int, ...]) -> Any:
    """+1 and -1 as NumPy's int8."""
    result = on_cpu(array(value, what, "+1 and -1"), what)
    if result.dtype.kind not in "iuf" and result.dtype not in FLOATS:
        raise TypeError(f"{what} has dtype {result.dtype}; +1 and -1 are integers or floats")
    if result.shape != shape:
        raise ValueError(f"{what} has shape {result.shape}; {shape} is needed")
    for _, bad in not_signs(**{what: result}):
        raise ValueError(f"{what} holds {bad}; signs are +1 and -1")
    return result.astype(np.int8)


def same_device(**operands: Any) -> bool:
    """All arrays on one device, and whether it is a GPU; None is skipped."""
    on_gpu = [device.is_cuda(a) for a in operands.values() if a is not None]
    if True in on_gpu and False in on_gpu:
        where = {name: device.of(a) for name, a in operands.items() if a is not None}
        places = ", ".join(f"{name} on {place}" for name, place in where.items())
        raise TypeError(
            f"operands are on different devices: {places}; move them with to_device or cupy.asarray"
        )
    return on_gpu[0]


def whole_blocks(shape: tuple[int, ...], fmt: Format) -> Format:
    """A quantized shape has at least one axis, and a last one of whole blocks; the format of such rows.

    A vector may end within a block in some formats.
    """
    if not shape:
        raise ValueError(f"{fmt} needs an array of at least one axis, not a scalar")
    k = shape[-1]
    multiple = 1 if len(shape) == 1 and fmt.ragged_vectors else fmt.block_size
    if k == 0 or k % multiple:
        raise ValueError(
            f"{fmt} stores blocks of {fmt.block_size} along the last axis, which has {k} elements "
            f"(shape {shape}): a positive multiple of {multiple} is needed"
        )
    return fmt.for_row(k)


def to_quantize(values: Any, fmt: Format, first_row: int, shape: tuple[int, ...]) -> None:
    """Rows [n, K] that start at row `first_row` of an array of `shape` hold finite numbers, none of them
    larger than the format takes; the first row that does not is named."""
    bad = ~np.isfinite(values).all(axis=1)
    peaks = np.abs(values).max(axis=1)
    large = bad if fmt.largest is None else bad | (peaks > fmt.largest)
    if not large.any():
        return
    row = int(large.argmax())
    where = f"in row {_row(first_row + row, shape)}"
    if bad[row]:
        value = values[row][~np.isfinite(values[row])][0]
        raise ValueError(f"cannot quantize {value} {where}: weights must be finite")
    raise ValueError(
        f"{fmt}: a weight of magnitude {peaks[row]} {where} is beyond {fmt.largest}, "
        f"what an 8-bit scale holds: {fmt.beyond}"
    )


def column_importance(value: Any, fmt: Format, k: int) -> Any:
    """Importance of k columns, float32 from 2^-40 to 2, in proportion: products of it do not underflow."""
    if not fmt.takes_importance:
        raise ValueError(f"{fmt} takes no importance; k-quants (q4_k, ...) and iq4_nl, iq4_xs do")
    given = device.as_numpy(array(value, "importance", "numbers"))
    if given.dtype.kind not in "fiu" and given.dtype not in FLOATS:
        raise TypeError(f"importance has dtype {given.dtype}; numbers are needed")
    if given.shape != (k,):
        raise ValueError(f"importance has shape {given.shape}; {(k,)} is needed, a number for each column")
    result = given.astype(np.float64)
    if not ((result >= 0) & (result < np.inf)).all() or not result.any():
        raise ValueError("importance must be finite, not negative, and above 0 somewhere")
    return np.maximum(np.ldexp(result, 1 - np.frexp(result.max())[1]), 2.0**-40).astype(np.float32)


def scales(records: Any, fmt: Format, first_row: int, shape: tuple[int, ...]) -> None:
    """No scale overflowed float16 in block records [n, K / block_size] (rows as in `to_quantize`)."""
    for field in fmt.scales:
        bad = ~np.isfinite(records[field]).all(axis=1)
        if bad.any():
            row = _row(first_row + int(bad.argmax()), shape)
            raise ValueError(
                f"{fmt}: the scale {field!r} of a block in row {row} overflows float16 "
                "(largest 65504): the weights are too large for this format"
            )


def _row(flat: int, shape: tuple[int, ...]) -> str:
    """Index of a flat row number, as a person would write it: 5, or (1, 5) for stacks."""
    index = [int(i) for i in np.unravel_index(flat, shape[:-1])] if len(shape) > 1 else [0]
    return str(index[0]) if len(index) == 1 else str(tuple(index))


def raw_blocks(raw: Any, fmt: Format, shape: tuple[int, ...]) -> Any:
    """Storage bytes as uint8 (..., N, row bytes) for an array of `shape`, contiguous; a view if `raw` is.

    On a GPU they are copied from an odd address, too: kernels read pairs of bytes.
    """
    blocks = array(
        np.frombuffer(raw, np.uint8) if isinstance(raw, (bytes, bytearray, memoryview)) else raw, "raw"
    )
    if blocks.dtype != np.uint8:
        raise TypeError(f"raw has dtype {blocks.dtype}; storage bytes are uint8 (raw.view(np.uint8))")
    whole_blocks(shape, fmt)
    wanted = fmt.stored(shape)
    need = int(np.prod(wanted, dtype=object))
    if blocks.size != need:
        raise ValueError(f"raw has {blocks.size} bytes; {fmt} of shape {shape} has {need}")
    blocks = blocks.reshape(wanted)
    odd = device.is_cuda(blocks) and blocks.data.ptr % 2
    blocks = blocks.copy() if odd or not blocks.flags.c_contiguous else blocks
    if fmt.whole_matrices and (flaws := fmt.flaws(device.as_numpy(blocks), shape)):
        raise ValueError(f"{fmt} of shape {shape}: {flaws[0]}")
    return blocks


def shape(value: Any) -> tuple[int, ...]:
    """A tuple of dimensions; one may stand for itself."""
    try:
        result = tuple(operator.index(n) for n in ((value,) if isinstance(value, int) else value))
    except TypeError:
        raise TypeError(f"shape {value!r} is not a tuple of integers") from None
    if any(n < 0 for n in result):
        raise ValueError(f"shape {result} has a negative dimension")
    return result


def int4_parts(codes: Any, scales: Any, zeros: Any, group: Any) -> tuple[Any, Any, Any, int]:
    """Codes (..., K / 2), and scales and zeros (..., K / group) as NumPy arrays, and the group size."""
    codes, scales = typed(codes, "codes", np.uint8), typed(scales, "scales", np.float16)
    zeros = None if zeros is None else typed(zeros, "zeros", np.uint8)
    if min(codes.ndim, scales.ndim) < 1 or codes.shape[:-1] != scales.shape[:-1]:
        raise ValueError(
            f"codes {codes.shape} and scales {scales.shape} are not of one weight: "
            "(..., N, K / 2) and (..., N, K / group_size)"
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros has shape {zeros.shape}; that of scales is {scales.shape}")
    size = _group_of(2 * codes.shape[-1], scales.shape[-1])
    wanted = size if group is None else group_size(group)
    if wanted not in (size, -1) or (wanted == -1 and scales.shape[-1] > 1):
        raise ValueError(f"group_size is {group}; codes {codes.shape} and scales {scales.shape} have {size}")
    return codes, scales, zeros, size


def _group_of(k: int, count: int) -> int:
    """Size of `count` groups of k weights."""
    if k == 0 or count == 0 or k % count:
        raise ValueError(f"{k} weights along K are not {count} groups of one size")
    return group_size(k // count)


def int4_format(w: Any, kind: type[Format]) -> Any:
    """The format of an int4 weight in NumPy's memory."""
    if not is_quantized(w) or not isinstance(w.format, kind):
        raise TypeError(f"w is {_kind(w)}; a QuantizedArray of a format cuquant.Int4 is needed")
    on_cpu(storage(w), "w")
    return w.format


def packed(qweight: Any, qzeros: Any, scales: Any, along_k: int) -> tuple[Any, Any, Any, int]:
    """Tensors of GPTQ or AWQ as NumPy arrays, with `along_k` codes along K in a word, and the group size."""
    qweight, qzeros = typed(qweight, "qweight", np.int32), typed(qzeros, "qzeros", np.int32)
    scales = typed(scales, "scales", np.float16)
    given = qweight.shape, qzeros.shape, scales.shape
    if any(len(extents) != 2 for extents in given) or not (
        given[1][0] == given[2][0] and 8 * given[1][1] == given[2][1] == 8 // along_k * given[0][1]
    ):
        words = "(K / 8, N)" if along_k == 8 else "(K, N / 8)"
        raise ValueError(
            f"qweight {given[0]}, qzeros {given[1]} and scales {given[2]} are not codes of 4 bits in words: "
            f"{words}, (G, N / 8) and (G, N)"
        )
    return qweight, qzeros, scales, _group_of(along_k * given[0][0], given[2][0])


def gptq_version(value: Any) -> int:
    """1 or 2."""
    if value not in (1, 2):
        raise ValueError(f"version is {value!r}; GPTQ checkpoints have 1 or 2")
    return int(value)


def group_index(value: Any, k: int, group: int) -> None:
    """Group of each of k weights, in their own order; None says so too."""
    if value is None:
        return
    g_idx = on_cpu(array(value, "g_idx", "integers"), "g_idx")
    if g_idx.dtype.kind not in "iu":
        raise TypeError(f"g_idx has dtype {g_idx.dtype}; groups are numbered by integers")
    if g_idx.shape != (k,):
        raise ValueError(f"g_idx has shape {g_idx.shape}; there are {k} weights along K")
    other = g_idx != np.arange(k) // group
    if other.any():
        at = int(other.argmax())
        raise ValueError(
            f"g_idx puts weight {at} into group {g_idx[at]}, not {at // group}: weights permuted along K "
            "(act-order, desc_act) cannot be read"
        )


def row_index(index: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index of every axis but the last, which must stay whole."""
    parts = tuple(
        np.asarray(p, None if p else np.intp) if isinstance(p, list) else p
        for p in (index if isinstance(index, tuple) else (index,))
    )
    if any(p is None for p in parts):
        raise IndexError("a QuantizedArray takes no new axes: dequantize first, or reshape the other operand")
    dots = [i for i, p in enumerate(parts) if p is Ellipsis]
    used = sum(
        p.ndim if getattr(p, "dtype", None) == np.dtype(bool) else 1 for p in parts if p is not Ellipsis
    )
    reaches_last = used >= len(shape) or bool(dots and dots[-1] != len(parts) - 1)
    if reaches_last and not (isinstance(parts[-1], slice) and parts[-1] == slice(None)):
        raise IndexError(
            f"the last axis of shape {shape} is stored in blocks and cannot be indexed: "
            "index the axes before it, or dequantize first"
        )
    return parts


def can_iterate(shape: tuple[int, ...]) -> None:
    """At least two axes: rows to go through."""
    if len(shape) < 2:
        raise TypeError(
            f"a QuantizedArray of shape {shape} has no rows to iterate over, and its numbers are packed in "
            "blocks: iterate over .dequantize()"
        )


def can_transpose(shape: tuple[int, ...]) -> None:
    """At least two axes."""
    if len(shape) < 2:
        raise ValueError(f"shape {shape} has no rows and columns to swap")


def tensors(value: Any) -> Mapping[str, Any]:
    """A mapping whose keys are names that tensors can have in a safetensors file."""
    if not isinstance(value, Mapping):
        raise TypeError(f"tensors is a {type(value).__name__}; a mapping of names to arrays is needed")
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"a tensor is named {name!r}; names are str")
        if name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):  # reserved; no UTF-8
            raise ValueError(f"a safetensors file can have no tensor named {name!r}")
    return value


def device_name(name: Any) -> str:
    """ "cpu" or "cuda"."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; allowed are 'cpu' and 'cuda'")
    return str(name)


def activations(x: Any) -> Any:
    """The left operand of a product: floats, or activations quantized to q8_1."""
    if is_quantized(x):
        if not x.format.for_activations:
            raise TypeError(
                f"x is quantized to {x.format}; activations are {_FLOAT_NAMES}, or q8_1 "
                "by cuquant.quantize(x, 'q8_1')"
            )
        return x
    return floats(x, "x")


def weights(w: Any, what: str = "W") -> Any:
    """The right operand, not transposed: a quantized weight, or a plain float one."""
    if is_quantized(w):
        if w.format.for_activations:
            raise TypeError(
                f"{what} is quantized to {w.format}, a format of activations: weights are quantized otherwise"
            )
    elif _is_transposed(w):
        raise TypeError(
            f"{what} is a transposed {w.format} array of shape {w.shape}; cuquant.linear(x, W) computes "
            f"x @ W.T itself: pass W of shape {w.T.shape}, or write x @ W.T"
        )
    else:
        w = floats(w, what)
    if w.ndim < 2:
        raise ValueError(f"{what} has shape {w.shape}; a weight is (..., N, K)")
    return w


@lru_cache(maxsize=4096)
def product_shape(x: tuple[int, ...], w: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of x (..., M, K) @ W (..., N, K) transposed: leading axes broadcast as in numpy.matmul."""
    if not x:
        raise ValueError("x is a scalar; activations are (..., K)")
    if x[-1] != w[-1]:
        raise ValueError(f"x {x} and W {w} differ in K, their last axis: {x[-1]} and {w[-1]}")
    try:
        lead = np.broadcast_shapes(x[:-2], w[:-2])
    except ValueError:
        raise ValueError(f"the leading axes of x {x} and W {w} do not broadcast") from None
    return (*lead, *x[-2:-1], w[-2])


def activation(name: Any) -> None:
    """None or one of ACTIVATIONS."""
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(
            f"unknown activation {name!r}; allowed are None, {', '.join(map(repr, ACTIVATIONS))}"
        )


def bias(value: Any, w: tuple[int, ...]) -> Any:
    """Floats of shape (N,), or (..., N) with the leading axes of W; None stays None."""
    if value is None:
        return None
    value = floats(value, "bias")
    if value.shape not in {w[-2:-1], w[:-1]}:
        raise ValueError(
            f"bias has shape {value.shape}; for W {w} it is {w[-2:-1]}" + f" or {w[:-1]}" * (len(w) > 2)
        )
    return value


def residual(value: Any, shape: tuple[int, ...]) -> Any:
    """Floats of the result's shape; None stays None."""
    if value is None:
        return None
    value = floats(value, "residual")
    if value.shape != shape:
        raise ValueError(f"residual has shape {value.shape}; the result has {shape}")
    return value


def result_dtype(x: Any, out: Any, dtype: Any) -> np.dtype[Any]:
    """`dtype` if given, else that of out, else the activations' own (float32 for quantized ones)."""
    if dtype is not None:
        wanted = float_dtype(dtype)
        if out is not None and out.dtype != wanted:
            raise TypeError(f"out has dtype {out.dtype}, but dtype={wanted} was asked for")
        return wanted
    if out is not None:
        return out.dtype
    return FLOATS[2] if is_quantized(x) else x.dtype


def output(out: Any, shape: tuple[int, ...], reads: dict[str, Any], residual: Any, on_gpu: bool) -> None:
    """`out` can take the result: its shape, writable, and apart from what is read while it is written.

    The residual may be `out` itself (an update in place), as every element is read before it is written.
    """
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}; the result has {shape}")
    if not getattr(out.flags, "writeable", True):
        raise ValueError("out is read-only")
    if not out.flags.c_contiguous and memory.overlaps_itself(out):
        raise ValueError(f"out has strides {out.strides} that put several elements in one place")
    if residual is not None and not memory.same_view(out, residual):
        reads = {**reads, "residual": residual}
    for name, operand in reads.items():
        if operand is not None and memory.may_overlap(out, operand, on_gpu):
            raise ValueError(
                f"out may share memory with {name}: the result would overwrite what is still read"
            )


def is_weight(value: Any) -> bool:
    """Whether a value is a quantized array of a weight format."""
    return is_quantized(value) and not value.format.for_activations


def may_prepare(stream: Any) -> None:
    """A weight is not brought into its layout while a graph is captured: the graph would repeat it."""
    if stream.is_capturing():
        raise RuntimeError("the weight must be prepared before a CUDA graph is captured: call W.prepare()")


def batch_axes(count: int, most: int, shape: tuple[int, ...]) -> None:
    """Leading axes that a kernel can walk, those counted as one that strides join."""
    if count > most:
        raise ValueError(
            f"the result {shape} has {count} leading axes that do not merge; at most {most} are possible"
        )


def launch_size(blocks: int, most: int, shape: tuple[int, ...]) -> None:
    """Blocks along an axis of a launch: matrices of a stack, or tiles of batch rows."""
    if blocks > most:
        raise ValueError(
            f"the result {shape} takes {blocks} blocks along an axis of one launch; "
            f"at most {most} are possible"
        )


def not_a_product(a: Any, b: Any) -> TypeError:
    """The error for a product that no quantized operand makes possible."""
    given = f"{_kind(a)} @ {_kind(b)}"
    if is_weight(b) and b.ndim < 2:
        return TypeError(f"{given}: a quantized vector has no rows to multiply by; dequantize it first")
    if is_weight(b) or (_is_transposed(a) and is_weight(a.T)):
        return TypeError(
            f"{given} contracts the weight along N, but its blocks run along K: x @ W.T and W @ x do not"
        )
    return TypeError(f"{given} has no quantized weight on either side: x @ W.T or W @ x is needed")


def storage(operand: Any) -> Any:
    """The array that holds an operand's bytes: a quantized array's own, or the array itself."""
    return operand.storage if is_quantized(operand) else operand


def is_quantized(value: Any) -> bool:
    """Whether a value is a QuantizedArray (known by a class attribute: that module imports this one)."""
    return getattr(type(value), "is_quantized_array", False)


def _is_transposed(value: Any) -> bool:
    return getattr(type(value), "is_transposed_array", False)


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    name = f"{value.format} array" if is_quantized(value) or _is_transposed(value) else type(value).__name__
    return name if shape is None else f"{name} {tuple(shape)}" + ".T" * _is_transposed(value)


def sound(w: Any, flaws: list[str], bad_rows: Any) -> None:
    """A quantized array without flaws, and whose rows, by flat numbers, are all finite."""
    found = list(flaws)
    if len(bad_rows):
        first = _row(int(bad_rows[0]), w.shape)
        found.append(f"{len(bad_rows)} rows hold weights that are NaN or infinite, the first is row {first}")
    if found:
        raise ValueError(f"{_kind(w)}: {'; '.join(found)}")


# Mixtures of experts.


def experts(value: Any) -> tuple[Any, Any, Any]:
    """Stacks gate (E, F, K), up (E, F, K) and down (E, N, F) of weights, as an `Experts` has them."""
    if not all(hasattr(value, name) for name in ("gate", "up", "down")):
        raise TypeError(f"experts is a {type(value).__name__}; a cuquant.Experts(gate, up, down) is needed")
    gate, up, down = (weights(getattr(value, name), f"experts.{name}") for name in ("gate", "up", "down"))
    shapes = gate.shape, up.shape, down.shape
    if any(len(s) != 3 for s in shapes) or up.shape != gate.shape or down.shape[::2] != gate.shape[:2]:
        raise ValueError(
            f"experts have gate {shapes[0]}, up {shapes[1]} and down {shapes[2]}; "
            "(E, F, K), (E, F, K) and (E, N, F) are needed"
        )
    return gate, up, down


def routing(ids: Any, probs: Any, x: tuple[int, ...], gate: tuple[int, ...]) -> tuple[Any, Any]:
    """Ids and probabilities (..., top_k) of the tokens x (..., K), which gates (E, F, K) take; NumPy's."""
    ids = on_cpu(array(ids, "expert_ids", "integers"), "expert_ids")
    probs = on_cpu(floats(probs, "expert_probs"), "expert_probs")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"expert_ids has dtype {ids.dtype}; experts are numbered by integers")
    if not x or x[-1] != gate[-1]:
        raise ValueError(f"x {x} and experts.gate {gate} differ in K, their last axis")
    if ids.shape[:-1] != x[:-1] or ids.ndim != len(x) or probs.shape != ids.shape:
        raise ValueError(
            f"expert_ids {ids.shape} and expert_probs {probs.shape} do not fit x {x}: both are (..., top_k), "
            "with the leading axes of x"
        )
    return ids, probs


def top_k(value: Any, logits: tuple[int, ...]) -> None:
    """An integer from 1 to the number of experts."""
    if not logits:
        raise ValueError("logits is a scalar; (..., E) is needed")
    if not 1 <= count(value, "top_k") <= logits[-1]:
        raise ValueError(f"top_k is {value}; logits {logits} are of {logits[-1]} experts")


# Caches of keys and values.

_LARGEST_INDEX = np.iinfo(np.int32).max
MOST_QUERIES = 64


def count(value: Any, what: str, least: int = 1) -> int:
    """An integer from `least` up to what int32 holds."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is a {type(value).__name__}; an integer is needed") from None
    if not least <= number <= _LARGEST_INDEX:
        raise ValueError(f"{what} is {number}; allowed are {least} to {_LARGEST_INDEX}")
    return number


def head_dim(value: Any, multiple: int) -> int:
    """Whole groups of codes and rotations, up to 256."""
    number = count(value, "head_dim")
    if number % multiple or number > 256:
        raise ValueError(
            f"head_dim is {number}; a multiple of {multiple} up to 256 is needed"
            + " to rotate keys" * (multiple > 8)
        )
    return number


def rooms(capacity: Any, bits: Any, allowed: tuple[int, ...]) -> dict[int, int]:
    """Tokens that each width has room for, widest first."""
    widths = list(capacity) if isinstance(capacity, Mapping) else list(bits)
    if not widths or len({*widths}) < len(widths) or not {*widths} <= {*allowed}:
        raise ValueError(f"bits are {widths}; one or more of {', '.join(map(str, allowed))}, each once")
    given = capacity if isinstance(capacity, Mapping) else dict.fromkeys(widths, capacity)
    return {b: count(given[b], "capacity") for b in allowed if b in given}


def key_scales(value: Any, shape: tuple[int, int, int]) -> Any:
    """float32 (batch, n_kv_heads, head_dim), a copy, ones for automatic ones; None stays None."""
    if value is None:
        return None
    if isinstance(value, str):
        choice(value, "key_scales", ("pairs", "halves"))
        return np.ones(shape, np.float32)
    given = on_cpu(floats(value, "key_scales"), "key_scales")
    if given.shape not in (shape, shape[1:]):
        raise ValueError(f"key_scales has shape {given.shape}; {shape[1:]} or {shape} is needed")
    result = np.broadcast_to(given, shape).astype(np.float32, order="C")
    if not (np.isfinite(result) & (result > 0)).all():
        raise ValueError("key_scales must be finite and positive: keys are divided by them")
    return result


def tokens(k: tuple[int, ...], v: tuple[int, ...], cache: tuple[int, int, int]) -> None:
    """Shapes of new keys and values fit a cache of (batch, n_kv_heads, head_dim)."""
    batch, heads, dim = cache
    for what, shape in (("k", k), ("v", v)):
        if len(shape) != 4 or (shape[0], *shape[2:]) != cache:
            raise ValueError(f"{what} has shape {shape}; this cache takes ({batch}, n, {heads}, {dim})")
    if k != v:
        raise ValueError(f"k {k} and v {v} differ in their number of tokens")


def lengths(value: Any, batch: int, n: int) -> Any:
    """int64 [batch], 0 to n each; n for None."""
    if value is None:
        return np.full(batch, n)
    result = _integers(value, "lengths")
    if result.shape != (batch,):
        raise ValueError(f"lengths has shape {result.shape}; one for each of {batch} sequences is needed")
    if ((result < 0) | (result > n)).any():
        raise ValueError(f"lengths are {result.tolist()}; allowed are 0 to {n}, the tokens given")
    return result


def token_bits(value: Any, shape: tuple[int, int], allowed: tuple[int, ...]) -> Any:
    """Widths that a cache has, int64 of `shape`."""
    result = _broadcast(_integers(value, "bits"), shape, "bits")
    bad = ~np.isin(result, allowed)
    if bad.any():
        raise ValueError(f"bits is {result[bad][0]}; this cache has {', '.join(map(str, allowed))}")
    return result


def token_ids(value: Any, shape: tuple[int, int]) -> Any:
    """Names of new tokens, int64 of `shape`."""
    result = _broadcast(_integers(value, "token_ids"), shape, "token_ids")
    if ((result < 0) | (result > _LARGEST_INDEX)).any():
        raise ValueError(f"token_ids run from {result.min()} to {result.max()}; they are int32, not negative")
    return result


def named_tokens(value: Any, batch: int) -> tuple[Any, bool]:
    """Ids int64 (batch, n), and whether each sequence has its own."""
    ids = _integers(value, "token_ids")
    own = ids.ndim == 2
    if ids.ndim not in (1, 2) or (own and len(ids) != batch):
        raise ValueError(f"token_ids has shape {ids.shape}; (n,) or ({batch}, n) is needed")
    return np.broadcast_to(ids, (batch, ids.shape[-1])), own


def found(ids: Any, seen: Any, own: bool) -> None:
    """Every id (batch, n) names a token: of its sequence, or of any for ids that are all sequences'."""
    missing = ~seen & (ids >= 0) if own else ~seen.any(axis=0, keepdims=True) & np.ones_like(ids, bool)
    if missing.any():
        sequence, index = (int(i) for i in np.argwhere(missing)[0])
        where = f"sequence {sequence}" if own else "the cache"
        raise ValueError(f"{where} holds no token of id {ids[sequence, index]}")


def fits(adds: Mapping[int, Any], tiers: Mapping[int, Any], capacity: int) -> None:
    """Room for what comes to each width's bucket (less what leaves), [batch] tokens."""
    held, new = sum(t.lengths.astype(np.int64) for t in tiers.values()), sum(adds.values())
    _room(held, new, capacity, "this cache", "evict some, or make the cache larger")
    for bits, tier in tiers.items():
        hint = "move or evict some, or give the width a larger capacity"
        _room(tier.lengths.astype(np.int64), adds[bits], tier.room, f"its {bits}-bit bucket", hint)


def _room(held: Any, new: Any, room: int, place: str, hint: str) -> None:
    full = (held + new > room) & (new > 0)
    if full.any():
        sequence = int(full.argmax())
        raise ValueError(
            f"sequence {sequence} holds {held[sequence]} tokens of the {room} that {place} has room for: "
            f"{new[sequence]} more do not fit; {hint}"
        )


def slot_range(last: int) -> None:
    """Slots are int32."""
    if last > _LARGEST_INDEX:
        raise ValueError(f"slot {last} is beyond int32: clear the cache")


def importance(value: Any, shape: tuple[int, int]) -> Any:
    """Weights by global slot, (batch, slots) or more columns; None stays None."""
    if value is None:
        return None
    result = np.asarray(value)
    batch, slots = shape
    if result.dtype.kind not in "fiu" and result.dtype not in FLOATS:
        raise TypeError(f"importance has dtype {result.dtype}; numbers are needed")
    if result.ndim not in (1, 2) or result.shape[-1] < slots or result.shape[:-1] not in ((), (batch,)):
        raise ValueError(f"importance has shape {result.shape}; {(slots,)} or {shape} is needed, or wider")
    if not ((result >= 0) & (result < np.inf)).all():
        raise ValueError("importance must be finite and not negative")
    return np.broadcast_to(result, (batch, result.shape[-1]))


def average_bits(value: Any, bits: tuple[int, ...]) -> float:
    """A mean that a cache's widths can have."""
    number = _number(value, "average_bits")
    if not bits[-1] <= number <= bits[0]:
        raise ValueError(f"average_bits is {number:g}; this cache's widths allow {bits[-1]} to {bits[0]}")
    return number


def not_negative(value: Any, what: str) -> float:
    """A finite number, 0 or above."""
    number = _number(value, what)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{what} is {number}; a finite number, 0 or above, is needed")
    return number


def kv_cache(value: Any) -> None:
    """A KVCache (known by a class attribute: that module imports this one)."""
    if not getattr(type(value), "is_kv_cache", False):
        raise TypeError(f"cache is a {type(value).__name__}; a cuquant.KVCache is needed")


def queries(q: tuple[int, ...], cache: tuple[int, int, int]) -> None:
    """Queries fit a cache of (batch, n_kv_heads, head_dim)."""
    batch, heads, dim = cache
    if len(q) != 4 or (q[0], q[3]) != (batch, dim):
        raise ValueError(f"q has shape {q}; this cache takes ({batch}, q_len, heads, {dim})")
    if not 1 <= q[1] <= MOST_QUERIES:
        raise ValueError(f"q has {q[1]} queries in a sequence; allowed are 1 to {MOST_QUERIES}")
    if q[2] == 0 or q[2] % heads:
        raise ValueError(f"q has {q[2]} heads, which cannot share {heads} key heads evenly")


def score_scale(value: Any, dim: int) -> float:
    """What scores are multiplied by: 1 / sqrt(head_dim) for None."""
    if value is None:
        return float(dim**-0.5)
    number = _number(value, "scale")
    if not np.isfinite(number):
        raise ValueError(f"scale is {number}; a finite number is needed")
    return number


def attention_mask(value: Any, q: tuple[int, ...], slots: int) -> Any:
    """bool or floats (batch, heads, q_len, slots or more), broadcast; None stays None."""
    if value is None:
        return None
    mask = on_cpu(array(value, "mask"), "mask")
    if mask.dtype != bool and mask.dtype not in FLOATS:
        raise TypeError(f"mask has dtype {mask.dtype}; allowed are bool, {_FLOAT_NAMES}")
    lead = (q[0], q[2], q[1])
    if mask.ndim == 0 or mask.shape[-1] < slots:
        raise ValueError(
            f"mask has shape {mask.shape}; its last axis needs {slots} columns, one for each slot"
        )
    try:
        return np.broadcast_to(mask, (*lead, mask.shape[-1]))
    except ValueError:
        raise ValueError(f"mask has shape {mask.shape}; it does not broadcast to {(*lead, slots)}") from None


def positions(value: Any, q: tuple[int, ...]) -> Any:
    """Positions of queries, int64 (batch, q_len); None stays None."""
    return None if value is None else _broadcast(_integers(value, "positions"), q[:2], "positions")


def restored(cache: Any) -> None:
    """A cache read from a file: its capacity holds, slots are given out and used once, no id is negative."""
    if (cache.lengths > cache.capacity).any():
        raise ValueError(f"a sequence has {cache.lengths.max()} tokens, beyond the capacity {cache.capacity}")
    for sequence in range(cache.batch):
        buckets = [tier.bucket(sequence) for tier in cache.tiers.values()]
        slots = np.concatenate([b.global_slots for b in buckets])
        if len(np.unique(slots)) < len(slots) or ((slots < 0) | (slots >= cache.next_slots[sequence])).any():
            raise ValueError(f"global slots of sequence {sequence} are out of range, or taken twice")
        if any((b.token_ids < 0).any() for b in buckets):
            raise ValueError(f"sequence {sequence} has a negative token id")


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is a {type(value).__name__}; a number is needed") from None


def _integers(value: Any, what: str) -> Any:
    """int64 numbers; an empty list is such an array too."""
    result = np.asarray(value)
    if result.dtype.kind not in "iu" and result.size:
        raise TypeError(f"{what} has dtype {result.dtype}; integers are needed")
    return result.astype(np.int64)


def _broadcast(value: Any, shape: tuple[int, ...], what: str) -> Any:
    try:
        return np.broadcast_to(value, shape)
    except ValueError:
        raise ValueError(f"{what} has shape {value.shape}, which does not broadcast to {shape}") from None
