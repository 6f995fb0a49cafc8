"""Parameters of formats, storage bytes, and weights that are to be quantized."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import device
from .common import (
    LARGEST_INDEX,
    a_or_an,
    array,
    count,
    described,
    is_quantized,
    numbers,
    on_cpu,
    row_name,
    storage,
    typed,
)

if TYPE_CHECKING:
    from ..formats import Format


def require_registrable(fmt: Format, known: Format | None) -> None:
    """A format that has what arrays of it need, and a name that can be given, and is no other class's;
    `known` is the format that has the name now."""
    kind = _full_name(fmt)
    needed = ("bits", "formula", *(() if fmt.whole_matrices else ("storage",)))
    lacking = [name for name in needed if not hasattr(fmt, name)]
    if lacking:
        raise TypeError(f"the format class {kind} has no {' and no '.join(lacking)}: see cuquant.Format")
    if not isinstance(fmt.name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", fmt.name):
        raise ValueError(
            f"the format class {kind} has the name {fmt.name!r}; names are lower-case letters, digits, ._-"
        )
    if known is not None and _full_name(known) != kind:
        raise ValueError(
            f"the format class {kind} has the name {fmt.name!r}, which is that of {_full_name(known)}: "
            "give it another"
        )


def _full_name(fmt: Format) -> str:
    """A format's class and its module."""
    return f"{type(fmt).__module__}.{type(fmt).__qualname__}"


def require_quantized_to(fmt: Format) -> None:
    """A format that is not only read."""
    if fmt.read_only:
        raise ValueError(f"nothing here quantizes to {fmt}: {fmt.made_by}")


def require_gguf_type(fmt: Format) -> None:
    """A format that tensors of GGUF files can have."""
    if fmt.ggml_type is None:
        raise ValueError(fmt.no_gguf_type)


def codes(value: Any) -> Any:
    """`array`, of dtype uint8."""
    result = array(value, "codes", "uint8")
    if result.dtype != np.uint8:
        raise TypeError(f"codes has dtype {result.dtype}; E4M4 codes are uint8")
    return result


def require_e4m4(x: Any) -> None:
    """Numbers that E4M4 has codes for: finite and not negative."""
    bad = ~((x >= 0) & np.isfinite(x))
    if bad.any():
        raise ValueError(f"E4M4 has no code for {x[bad][0]}: numbers must be finite and not negative")


def group_size(value: Any) -> int:
    """Weights that share a scale: a multiple of 32 that int32 holds, or -1 for a row."""
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"group_size is {a_or_an(value)}, not an integer") from None
    if size != -1 and (size < 1 or size % 32):
        raise ValueError(
            f"group_size is {size}; allowed are 32, 64, 128, other multiples of 32, and -1 for a row"
        )
    if size > LARGEST_INDEX:
        raise ValueError(f"group_size is {size}; at most {LARGEST_INDEX} is allowed")
    return size


def tensor_scale(value: Any, bounds: tuple[float, float]) -> float:
    """A number that all weights of a tensor are multiplied by, rounded to float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"scale is {a_or_an(value)}, not a number")
    number = value if isinstance(value, int) else float(value)
    if not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"scale is {value}; allowed are numbers from {bounds[0]:g} to {bounds[1]:g}")
    return float(np.float32(number))


def new_floats(value: Any, what: str, needed: str) -> Any:
    """Numbers as a new float32 array of NumPy's; those beyond it are infinite."""
    if device.is_cuda(value):
        on_cpu(value, what)
    try:
        with np.errstate(over="ignore"):
            return np.array(value, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{what} is no array of {needed}: {error}") from None


def codebook(value: Any, count: int) -> Any:
    """`count` numbers in [-1, 1], ascending, as a new float32 array."""
    if isinstance(value, str):
        raise ValueError(f'codebook is {value!r}; allowed are "normal" and {count} numbers')
    result = new_floats(value, "codebook", f"{count} numbers")
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


def of_kind(fmt: Any, kind: type[Format]) -> Any:
    """A format of that class."""
    if not isinstance(fmt, kind):
        raise TypeError(f"format is {fmt}; a cuquant.{kind.__name__} is needed")
    return fmt


def kbit_matrix(w: Any, kind: type[Format]) -> Any:
    """The format of a k-bit weight (N, K)."""
    if not is_quantized(w) or not isinstance(w.format, kind) or w.ndim != 2:
        raise TypeError(f"w is {described(w)}; a QuantizedArray (N, K) of a format cuquant.KBit is needed")
    return w.format


def require_tile_sizes(tile_n: Any, tile_k: Any, block: int) -> None:
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


def format_of(w: Any, kind: type[Format]) -> Any:
    """The format, of that class, of a weight in NumPy's memory."""
    if not is_quantized(w) or not isinstance(w.format, kind):
        raise TypeError(
            f"w is {described(w)}; a QuantizedArray of a format cuquant.{kind.__name__} is needed"
        )
    on_cpu(storage(w), "w")
    return w.format


def require_array_first(x: Any, fmt: Any) -> None:
    """What is to be quantized is no format: that comes second."""
    if hasattr(x, "encode") and not hasattr(fmt, "encode"):  # as names and formats have, and no array
        raise TypeError(
            f"x is {x!r}, format {a_or_an(fmt)}: they are swapped; quantize(x, format) has the array first"
        )


def whole_blocks(shape: tuple[int, ...], fmt: Format, of: str = "the array") -> Format:
    """A quantized shape has at least one axis, and a last one of whole blocks; the format of such rows.

    A vector may end within a block in some formats. `of` is the argument that has the shape.
    """
    if not shape:
        raise ValueError(f"{of} is a scalar; {fmt} needs an array of at least one axis")
    k = shape[-1]
    multiple = 1 if len(shape) == 1 and fmt.ragged_vectors else fmt.block_size
    if k == 0 or k % multiple:
        raise ValueError(
            f"{of} has shape {shape}: {fmt} stores blocks of {fmt.block_size} along the last axis, which has "
            f"{k} elements (a positive multiple of {multiple} is needed)"
        )
    return fmt.for_row(k)


def require_quantizable(values: Any, fmt: Format, first_row: int, shape: tuple[int, ...]) -> None:
    """Rows [n, K] that start at row `first_row` of an array of `shape` hold finite numbers, none of them
    larger than the format takes; the first row that does not is named."""
    bad = ~np.isfinite(values).all(axis=1)
    peaks = np.abs(values).max(axis=1)
    large = bad if fmt.largest is None else bad | (peaks > fmt.largest)
    if not large.any():
        return
    row = int(large.argmax())
    where = f"in row {row_name(first_row + row, shape)}"
    if bad[row]:
        value = values[row][~np.isfinite(values[row])][0]
        raise ValueError(f"cannot quantize {value} {where}: weights must be finite")
    raise ValueError(
        f"{fmt}: a weight of magnitude {peaks[row]} {where} is beyond {fmt.largest}, "
        f"what an 8-bit scale holds: {fmt.beyond}"
    )


TAKE_IMPORTANCE = "k-quants (q4_k, ...), iq4_nl, iq4_xs, q4_0, q4_1, q5_0, q5_1 and trellis formats"
"""The formats that take an importance, for people."""


def column_importance(value: Any, fmt: Format, k: int) -> Any:
    """Importance of k columns, float32 from 2^-40 to 2, in proportion: products of it do not underflow."""
    if not fmt.takes_importance:
        raise ValueError(f"{fmt} takes no importance; {TAKE_IMPORTANCE} do")
    given = device.as_numpy(numbers(value, "importance"))
    if given.shape != (k,):
        raise ValueError(f"importance has shape {given.shape}; {(k,)} is needed, a number for each column")
    with np.errstate(over="ignore"):
        result = given.astype(np.float64)
    if not ((result >= 0) & (result < np.inf)).all() or not result.any():
        raise ValueError("importance must be finite, not negative, and above 0 somewhere")
    return np.maximum(np.ldexp(result, 1 - np.frexp(result.max())[1]), 2.0**-40).astype(np.float32)


def importances(value: Any) -> Mapping[str, Any]:
    """A mapping of names of weights to importances of their columns, of one weight or more."""
    needed = "the path of an imatrix file, or a mapping of names of tensors to arrays, is needed"
    if not isinstance(value, Mapping):
        raise TypeError(f"importance is {a_or_an(value)}; {needed}")
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"importance has the key {name!r}; {needed}")
    if not value:
        raise ValueError(f"importance is an empty mapping; {needed}")
    return value


def importance_of_weight(value: Any, name: str, shape: tuple[int, ...]) -> Any:
    """Importance of the columns of a weight (N, K), or of each of a stack (E, N, K), float32 [E, K]; it may
    be flat. Where all columns of a matrix have 0, which says nothing of them, they have 1."""
    what = f"importance[{name!r}]"
    given = device.as_numpy(numbers(value, what))
    *lead, _, k = shape
    matrices = prod(lead)
    if given.shape not in ((matrices, k), (matrices * k,)):
        needed = (matrices, k) if lead else (k,)
        raise ValueError(f"{what} has shape {given.shape}; {needed} is needed for a weight of shape {shape}")
    given = given.reshape(matrices, k)
    with np.errstate(over="ignore", under="ignore"):
        result = given.astype(np.float32)
    require_importance(result, what)
    result[~given.any(axis=1)] = 1
    lost = ~result.any(axis=1)
    if lost.any():
        raise ValueError(
            f"{what} holds {given[lost].max()} at most, which is 0 in float32: multiply all by a number, as "
            "only their proportions count"
        )
    return result


def require_importance(values: Any, what: str) -> None:
    """Numbers that are finite and not negative."""
    bad = ~((values >= 0) & (values < np.inf))
    if bad.any():
        raise ValueError(f"{what} holds {values[bad][0]}; numbers must be finite and not negative")


def require_some_importance(names: Any, tensors: Any, model: str) -> None:
    """One of these names at least is that of a tensor."""
    if not any(name in tensors for name in names):
        raise ValueError(
            f"importance is of another model: no tensor of {model} is named as one of its {len(names)}, as "
            f"{next(iter(names))!r}"
        )


def require_scales(records: Any, fmt: Format, first_row: int, shape: tuple[int, ...]) -> None:
    """No scale overflowed float16 in block records [n, K / block_size] (rows as in `require_quantizable`)."""
    for field in fmt.scales:
        bad = ~np.isfinite(records[field]).all(axis=1)
        if bad.any():
            row = row_name(first_row + int(bad.argmax()), shape)
            raise ValueError(
                f"{fmt}: the scale {field!r} of a block in row {row} overflows float16 "
                "(largest 65504): the weights are too large for this format; scales of mxfp4 and trellis4 "
                "reach further, or divide the weights by a power of 2, and multiply results by it"
            )


def shape_of_blocks(blocks: Any, fmt: Format) -> tuple[int, ...]:
    """Shape of the array that has these storage bytes (..., N, row bytes), whose rows are whole blocks."""
    *lead, row_bytes = array(blocks, "blocks", "uint8").shape or (0,)
    if fmt.whole_matrices:
        raise ValueError(f"shape is missing: {fmt} stores whole matrices, and their bytes do not tell it")
    if row_bytes == 0 or row_bytes % fmt.block_bytes:
        raise ValueError(
            f"blocks has {row_bytes} bytes along its last axis; rows of {fmt} have a positive multiple of "
            f"{fmt.block_bytes}"
        )
    return (*lead, row_bytes // fmt.block_bytes * fmt.block_size)


def raw_blocks(raw: Any, fmt: Format, shape: tuple[int, ...], what: str = "raw") -> Any:
    """Storage bytes as uint8 (..., N, row bytes) for an array of `shape`, contiguous; a view if `raw` is.

    On a GPU they are copied from an odd address, too: kernels read pairs of bytes.
    """
    if isinstance(raw, memoryview) and not raw.c_contiguous:
        raise ValueError(f"{what} is a memoryview with gaps; pass its .tobytes(), or an array")
    given = np.frombuffer(raw, np.uint8) if isinstance(raw, (bytes, bytearray, memoryview)) else raw
    blocks = array(given, what, "uint8")
    if blocks.dtype != np.uint8:
        raise TypeError(f"{what} has dtype {blocks.dtype}; storage bytes are uint8 ({what}.view(np.uint8))")
    whole_blocks(shape, fmt)
    if fmt.lacks:
        raise ValueError(f"{fmt}: the format has no {fmt.lacks}")
    wanted = fmt.stored(shape)
    need = int(np.prod(wanted, dtype=object))
    if blocks.size != need:
        raise ValueError(f"{what} has {blocks.size} bytes; {fmt} of shape {shape} has {need}")
    blocks = blocks.reshape(wanted)
    odd = device.is_cuda(blocks) and blocks.data.ptr % 2
    blocks = blocks.copy() if odd or not blocks.flags.c_contiguous else blocks
    if fmt.whole_matrices and (flaws := fmt.flaws(device.as_numpy(blocks), shape)):
        raise ValueError(f"{fmt} of shape {shape}: {flaws[0]}")
    return blocks


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
    if zeros is not None and (zeros > 15).any():
        raise ValueError(f"zeros holds {zeros.max()}; zero points are codes, 0 to 15")
    size = group_of(2 * codes.shape[-1], scales.shape[-1])
    wanted = size if group is None else group_size(group)
    if wanted not in (size, -1) or (wanted == -1 and scales.shape[-1] > 1):
        raise ValueError(f"group_size is {group}; codes {codes.shape} and scales {scales.shape} have {size}")
    return codes, scales, zeros, size


def group_of(k: int, count: int) -> int:
    """Size of `count` groups of k weights."""
    if k == 0 or count == 0 or k % count:
        raise ValueError(f"{k} weights along K are not {count} groups of one size")
    return group_size(k // count)


def require_sound(w: Any, flaws: list[str], bad_rows: Any) -> None:
    """A quantized array without flaws, and whose rows, by flat numbers, are all finite."""
    found = list(flaws)
    if len(bad_rows):
        first = row_name(int(bad_rows[0]), w.shape)
        rows = "1 row holds" if len(bad_rows) == 1 else f"{len(bad_rows)} rows hold"
        found.append(f"{rows} weights that are NaN or infinite, the first is row {first}")
    if found:
        raise ValueError(f"{described(w)}: {'; '.join(found)}")
