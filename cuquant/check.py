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
_DIVIDE = "divide the weights by a number, and multiply products by it"


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


def finite(values: Any, first_row: int, shape: tuple[int, ...]) -> None:
    """No NaN or infinity in rows [n, K] that start at row `first_row` of an array of `shape`."""
    bad = ~np.isfinite(values).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        value = values[row][~np.isfinite(values[row])][0]
        raise ValueError(
            f"cannot quantize {value} in row {_row(first_row + row, shape)}: weights must be finite"
        )


def magnitudes(values: Any, fmt: Format, first_row: int, shape: tuple[int, ...]) -> None:
    """No weight is larger than the format takes in rows [n, K] (rows as in `finite`)."""
    if fmt.largest is None:
        return
    peaks = np.abs(values).max(axis=1)
    bad = peaks > fmt.largest
    if bad.any():
        row = int(bad.argmax())
        other = 'use cuquant.KBit(..., absmax="float16")' if fmt.scales == ("absmax",) else _DIVIDE
        raise ValueError(
            f"{fmt}: a weight of magnitude {peaks[row]} in row {_row(first_row + row, shape)} is beyond "
            f"{fmt.largest}, what an 8-bit scale holds: {other}"
        )


def scales(records: Any, fmt: Format, first_row: int, shape: tuple[int, ...]) -> None:
    """No scale overflowed float16 in block records [n, K / block_size] (rows as in `finite`)."""
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
    """Storage bytes as uint8 (..., N, row bytes) for an array of `shape`; a view if `raw` is contiguous."""
    blocks = array(
        np.frombuffer(raw, np.uint8) if isinstance(raw, (bytes, bytearray, memoryview)) else raw, "raw"
    )
    if blocks.dtype != np.uint8:
        raise TypeError(f"raw has dtype {blocks.dtype}; storage bytes are uint8 (raw.view(np.uint8))")
    whole_blocks(shape, fmt)
    *lead, k = shape
    wanted = (*lead, fmt.row_bytes(k + -k % fmt.block_size))
    need = int(np.prod(wanted, dtype=object))
    if blocks.size != need:
        raise ValueError(f"raw has {blocks.size} bytes; {fmt} of shape {shape} has {need}")
    return blocks.reshape(wanted)


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
    if codes.ndim < 1 or codes.shape[:-1] != scales.shape[:-1]:
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


def weights(w: Any) -> Any:
    """The right operand, not transposed: a quantized weight, or a plain float one."""
    if is_quantized(w):
        if w.format.for_activations:
            raise TypeError(
                f"W is quantized to {w.format}, a format of activations: weights are quantized otherwise"
            )
    elif _is_transposed(w):
        raise TypeError(
            f"W is a transposed {w.format} array of shape {w.shape}; cuquant.linear(x, W) computes x @ W.T "
            f"itself: pass W of shape {w.T.shape}, or write x @ W.T"
        )
    else:
        w = floats(w, "W")
    if w.ndim < 2:
        raise ValueError(f"W has shape {w.shape}; a weight is (..., N, K)")
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
