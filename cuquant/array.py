"""QuantizedArray: blocks of a weight format, with the shape and operators of the array they stand for."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from . import check, device
from .formats import Format, get as get_format
from .formats.kernels import kernels_of
from .packed import Packed
from .render import html_facts, html_shape

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from .cuda.activations import Rows
    from .cuda.fragments import Fragments

_preparing = threading.Lock()


class QuantizedArray(Packed):
    """A quantized array of shape (..., N, K), stored as the format's blocks along K.

    Made by `cuquant.quantize`, `cuquant.from_blocks` and `cuquant.open`. Immutable: no operation changes
    its bytes. ``x @ W.T`` and ``W @ x`` multiply by it; it offers no buffer of numbers (`__array__` raises),
    since its bytes are not numbers: `.dequantize()` gives those, `.blocks` the bytes. Equal to itself alone,
    as keys of dicts are: compare what `.blocks` or `.dequantize()` gives.

    Parameters
    ----------
    format : str or Format
        What the bytes mean.
    blocks : NumPy or CuPy uint8 array, shape `format.stored(shape)`
        The storage bytes, shared where they are contiguous: (..., N, K / format.block_size *
        format.block_bytes) for most formats, K / format.block_size being rounded up.
    shape : tuple of int, optional
        Shape of the array, where the last block of a row is not full or the format stores whole matrices.

    Raises
    ------
    TypeError, ValueError
        As `cuquant.from_blocks`; or there is no shape, and the bytes do not tell it.
    """

    __slots__ = ("_blocks", "_format", "_fragments", "_shape", "rows")
    is_quantized_array = True

    _format: Format
    _shape: tuple[int, ...]
    _blocks: Any
    """Storage blocks, unless `_fragments` has the weight: on a GPU the first product replaces blocks by
    fragments."""
    _fragments: Fragments | None
    rows: Rows | None
    """Float16 rows that a GPU made with blocks of activations, for the product that follows; else None."""

    def __new__(
        cls, format: str | Format, blocks: Any, shape: tuple[int, ...] | None = None
    ) -> QuantizedArray:
        fmt = get_format(format)
        shape = check.shape_of_blocks(blocks, fmt) if shape is None else check.shape(shape)
        fmt = check.whole_blocks(shape, fmt)
        return cls._made(fmt, check.raw_blocks(blocks, fmt, shape, "blocks"), shape=shape)

    @classmethod
    def _made(
        cls, format: Format, blocks: Any, rows: Rows | None = None, shape: tuple[int, ...] | None = None
    ) -> QuantizedArray:
        """An array of blocks that are known to fit, as those just made: every call of a loop makes some, and
        checks would take longer than the rest."""
        if shape is None:
            *lead, row_bytes = blocks.shape
            shape = (*lead, row_bytes // format.block_bytes * format.block_size)
        array = object.__new__(cls)
        array._format = format
        array._shape = shape
        array._blocks = blocks
        array._fragments = None
        array.rows = rows
        return array

    @property
    def format(self) -> Format:
        """The storage format; compares equal to its name."""
        return self._format

    @property
    def blocks(self) -> Any:
        """The storage bytes.

        Of a weight that was prepared for the GPU's kernels they are made anew, exactly, at every access.

        Returns
        -------
        uint8 array (..., N, bytes of a row), or as the format has them, on this array's device; on the CPU a
        read-only view.

        Raises
        ------
        RuntimeError
            A kernel does not compile (`KernelError`).
        """
        blocks = self._blocks  # read once: another thread may be preparing
        if blocks is not None:
            if not device.is_cuda(blocks):
                blocks = blocks.view()
                blocks.flags.writeable = False
            return blocks
        from .cuda.fragments import from_fragments

        fragments = self.fragments()
        with device.cupy().cuda.Device(fragments.buffer.data.device_id):
            return from_fragments(fragments)

    def _is_here(self) -> None:
        """ValueError where it is on another GPU than the current one."""
        if self.device == "cuda":
            check.require_one_device(W=self.storage)

    def _may_make_blocks(self) -> None:
        """RuntimeError where they would be made for a moment only, and a graph is captured."""
        if self._blocks is None:
            check.require_memory("the storage bytes of a prepared weight are made", "do that before")

    @property
    def storage(self) -> Any:
        """The array that holds the bytes now, in whichever layout."""
        blocks = self._blocks
        return self.fragments().buffer if blocks is None else blocks

    def prepare(self) -> QuantizedArray:
        """Bring a weight on the GPU into the layout that the kernels read, and free its storage blocks.

        The first product does so on its own; call it before capturing a CUDA graph. On the CPU there is
        nothing to do, nor for a vector, which no product reads, for activations, and for what products make
        floats of first.

        Returns
        -------
        The array itself.

        Raises
        ------
        ValueError
            It is on another GPU than the current one.
        RuntimeError
            A CUDA graph is being captured, and it was not prepared before; or a kernel does not compile
            (`KernelError`).
        """
        matrices = self.device == "cuda" and self.ndim > 1 and not self._format.for_activations
        if matrices and kernels_of(self._format).in_float16:
            self.fragments()
        return self

    def fragments(self) -> Fragments:
        """The weight in the GPU kernels' layout, made on first use, when all streams are waited for."""
        if self._fragments is None:
            from .cuda.fragments import to_fragments

            check.require_one_device(W=self.storage)
            with _preparing:
                if self._fragments is None:
                    made = to_fragments(self._blocks, self._format, self._shape)
                    device.synchronize()  # other streams may still read the blocks, which are freed
                    self._fragments, self._blocks = made, None
        return self._fragments

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of numbers, (..., N, K)."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self._shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage blocks."""
        return math.prod(self._format.stored(self._shape))

    @property
    def bits_per_weight(self) -> float:
        """Storage bits per element, scales included."""
        return 8 * self.nbytes / self.size if self.size else self._format.bits_per_weight

    @property
    def device(self) -> str:
        """ "cpu" (NumPy) or "cuda" (CuPy)."""
        return device.of(self.storage)

    @property
    def T(self) -> Transposed:
        """The last two axes swapped, for ``x @ W.T``.

        For stacks (E, N, K) too, as `.mT`: NumPy's .T reverses all axes, so that of numbers
        ``x @ W.dequantize().mT`` is the same product.

        Returns
        -------
        Transposed: a view.

        Raises
        ------
        ValueError
            The array is a vector.
        """
        return Transposed(self)

    mT = T

    def dequantize(self, dtype: DTypeLike = "float32") -> Any:
        """The numbers: the format's formula in float32, then one rounding to `dtype`.

        Parameters
        ----------
        dtype : float32, float16 or bfloat16, also as "f32", "f16" or "bf16"

        Returns
        -------
        Array of shape `self.shape`, on this array's device.

        Raises
        ------
        TypeError
            The dtype is none of these.
        ValueError
            The array is on another GPU than the current one.
        RuntimeError
            A CUDA graph is being captured, for which the storage bytes of a prepared weight would be made; or
            a kernel does not compile (`KernelError`).
        """
        from .ops.quantize import dequantize

        return dequantize(self, dtype)

    def validate(self) -> QuantizedArray:
        """Look through all storage bytes for what would spoil products; on a GPU, copied to the host first.

        Returns
        -------
        The array itself.

        Raises
        ------
        ValueError
            Weights that are NaN or infinite (of which row first, and in how many), and what the format knows
            more of: signs other than +1 and -1, indices beyond a grid.
        """
        from .ops.quantize import validate

        validate(self)
        return self

    def to_device(self, device: str) -> QuantizedArray:
        """This array on "cpu" or "cuda" (the current CuPy device); itself where it is there already.

        Copies wait for the GPU, so no CUDA graph can have them.

        Raises
        ------
        ValueError
            The device is another word.
        RuntimeError
            There is no GPU (the message says why).
        """
        from .ops.quantize import to_device

        return to_device(self, device)

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Rows, selected as NumPy selects along every axis but the last: a copy in storage order.

        Integers, slices, ellipsis, boolean and integer arrays all work; the last axis is the blocks' axis
        and cannot be indexed. CuPy's arrays are read by the host, for an error if some are out of range. The
        blocks of a weight on the GPU that was prepared are made for it, which no graph can capture.

        Raises
        ------
        IndexError
            An index is of the last axis, a new axis, out of range, or no index; or it selects what is no
            array of the format: rows of EXL3 other than whole runs of 128, rows of several trellis or EXL3
            matrices whose signs or factors differ.
        ValueError
            A slice's step is 0, or the weight is on another GPU than the current one.
        RuntimeError
            A CUDA graph is being captured, and the weight was prepared.
        """
        parts = check.row_index(index, self.shape, self.device == "cuda")
        self._is_here()
        self._may_make_blocks()
        return self._selected(self.blocks, parts)

    def _selected(self, blocks: Any, index: tuple[Any, ...]) -> QuantizedArray:
        """What an index of all axes but the last selects of this array, given its `blocks`, which may have to
        be made."""
        chosen, shape = self._format.select(blocks, self._shape, index)
        return QuantizedArray._made(self._format, chosen, shape=shape)

    def _of_stack(self, number: int) -> QuantizedArray | None:
        """A matrix of a stack (E, N, K) on the GPU, in the same memory; None where kernels have no use for
        it so."""
        if self.device != "cuda" or self.ndim != 3:
            return None
        kernels = kernels_of(self._format)
        if not (kernels.turned and kernels.in_float16):
            return None
        from .cuda.exl3 import matrix

        made = QuantizedArray._made(self._format, None, shape=self._shape[1:])
        made._fragments = matrix(self.fragments(), number)
        return made

    def __copy__(self) -> QuantizedArray:
        made = QuantizedArray._made(self._format, self._blocks, self.rows, self._shape)
        made._fragments = self._fragments
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or deep-copy the storage bytes: prepared weights know their own addresses."""
        return QuantizedArray._made, (self._format, self.blocks, None, self._shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantizedArray]:
        """Iterate along the first axis, as NumPy does; TypeError for a vector, whose numbers are packed."""
        return self._along(range(len(self)))

    def __reversed__(self) -> Iterator[QuantizedArray]:
        return self._along(range(len(self))[::-1])

    def _along(self, numbers: range) -> Iterator[QuantizedArray]:
        check.require_iterable(self.shape)
        self._is_here()
        self._may_make_blocks()
        blocks = self.blocks  # once: on a GPU they may have to be made
        return (self._selected(blocks, (i,)) for i in numbers)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise check.assignment_error(self)

    def __array__(self, *args: Any, **kwargs: Any) -> NDArray[Any]:
        raise check.numbers_error(self)

    def __repr__(self) -> str:
        return (
            f"QuantizedArray(shape={self.shape}, format={self._format}, "
            f"bits_per_weight={self.bits_per_weight:g}, nbytes={self.nbytes}, device={self.device!r})"
        )

    def _repr_html_(self) -> str:
        return _html(self, self.bits_per_weight)


class Transposed(Packed):
    """The transpose of a QuantizedArray, shape (..., K, N): the right operand of ``x @ W.T``."""

    __slots__ = ("_base",)
    is_transposed_array = True

    def __init__(self, base: QuantizedArray) -> None:
        if len(base._shape) < 2:
            check.require_transposable(base._shape)
        self._base = base

    def __reduce__(self) -> tuple[Any, ...]:
        return Transposed, (self._base,)

    @property
    def T(self) -> QuantizedArray:
        """The array that this is the transpose of."""
        return self._base

    mT = T

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the transposed array of numbers, (..., K, N)."""
        *lead, n, k = self._base.shape
        return (*lead, k, n)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._base.ndim

    @property
    def format(self) -> Format:
        """The storage format."""
        return self._base.format

    @property
    def nbytes(self) -> int:
        """Bytes of the storage blocks."""
        return self._base.nbytes

    @property
    def device(self) -> str:
        """ "cpu" (NumPy) or "cuda" (CuPy)."""
        return self._base.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NoReturn:
        raise check.transpose_index_error(self)

    def dequantize(self, dtype: DTypeLike = "float32") -> Any:
        """The numbers, shape (..., K, N): a transposed view of the base's (see QuantizedArray.dequantize)."""
        return self._base.dequantize(dtype).swapaxes(-1, -2)

    def __array__(self, *args: Any, **kwargs: Any) -> NDArray[Any]:
        return self._base.__array__(*args, **kwargs)

    def __repr__(self) -> str:
        return (
            f"Transposed(shape={self.shape}, format={self.format}, "
            f"bits_per_weight={self._base.bits_per_weight:g}, nbytes={self.nbytes}, device={self.device!r})"
        )

    def _repr_html_(self) -> str:
        return _html(self, self._base.bits_per_weight)


def _html(array: QuantizedArray | Transposed, bits_per_weight: float) -> str:
    """HTML table of the array's facts, for notebooks."""
    return html_facts(
        {
            "shape": html_shape(array.shape),
            "format": f"{array.format}: {array.format.formula}",
            "bits per weight": f"{bits_per_weight:g}",
            "bytes": f"{array.nbytes:,}",
            "device": array.device,
        }
    )
