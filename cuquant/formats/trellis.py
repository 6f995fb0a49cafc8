"""trellis2 to trellis4: tiles of indices into a grid, scales of groups along K, signs of rows and columns.

Layout and dequantization are those of a document on kernels for "Trellis" weights, which calls the format
EXL3's. It is not: files of EXL3 hold a procedural codebook over sliding windows of 16 bits, scales in their
sign vectors suh and svh, Hadamard transforms of 128 on both sides, and tiles permuted for tensor cores.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from math import frexp, ldexp, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from .base import Format, WholeMatrices, chosen_rows, get, register, sides
from .kernels import Coding, Encoder, KeptAs, Kernels, Scaling, kept_as
from .trellis_search import fit, nearest

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    F32 = NDArray[np.float32]

BITS = (2, 3, 4)
GROUP_SIZES = (32, 128)
TILE = 16
ALIGNMENT = 16
"""Bytes: a stack's matrices begin on multiples of it."""
_LEAST_MOMENT = np.float32(2.0**-40)
"""Least importance of inputs that are not 0, relative to the greatest."""
_SLAB = 1 << 20
"""Weights unpacked or encoded at a time."""
_SAMPLE = 1 << 16
"""Weights that a grid is fitted to, in groups drawn from rows of sixteen times as many."""
LEAST_HALF = 2.0**-14
"""The least magnitude of a float16 number with all its bits."""
_LARGEST_IN_TILE = 64
"""Weights of a group up to which a tile of the kernels' layout has scales of its own."""


class Parts(NamedTuple):
    """The arrays of a trellis weight of shape (..., N, K), with leading axes."""

    packed: Any
    """uint8 (..., ceil(K / 16), ceil(N / 16), 32 * bits): indices of 16 x 16 tiles, row-major (k, n), from
    the least significant bit of each byte on; 3-bit indices run across bytes."""
    scales: Any
    """float32 (..., ceil(K / group_size), N)"""
    su: Any
    """(..., K): +1 and -1, int8 as stored."""
    sv: Any
    """(..., N): +1 and -1, int8 as stored."""


class HalfLevels(NamedTuple):
    """Levels of a grid as products look them up: float16 [2^bits], times 2^lift."""

    levels: NDArray[np.float16]
    lift: int
    least: float
    """Magnitude of the least level that is not 0."""
    largest: float


class Trellis(WholeMatrices):
    """Indices of 2 to 4 bits into a grid, with scales and signs: W[n, k] = grid[q] * scale * su[k] * sv[n].

    So y = ((x * su) @ V.T) * sv with V = grid[q] * scale; signs change no rounding. A matrix (N, K), whose
    sides may have any length, is one record: the arrays of `Parts` back to back, then zeros up to a multiple
    of 16 bytes. scale is float32, one for group_size weights along k of the same n. An index beyond the grid
    reads as index 0. "trellis2" .. "trellis4" are `Trellis(2)` .. `Trellis(4)`; "trellis3-32" has groups of
    32. `cuquant.trellis_from_parts` and `cuquant.trellis_parts` convert from and to separate arrays.

    Quantizing, for weights w[n, k] and importances h[k], 1 or the second moments of inputs:

    1. Signs are drawn from a generator (or given), and taken off the weights.
    2. Without a grid, one is fitted to them by Lloyd's iteration: groups in units of their scales, each level
       the h-weighted mean of the weights nearest to it, each scale its group's least squares solution.
    3. Each group takes of 20 scales (40 where the grid is not symmetric: negative ones too) that one whose
       nearest levels fit the group best, with the scale solved for by least squares, and refines it thrice.

    Parameters
    ----------
    bits : 2, 3 or 4
    group_size : 32 or 128
    grid : 1 to 2^bits finite numbers, optional
        In any order, rounded to float32. Without one, quantizing gives arrays of a format whose grid is
        fitted to the array, ascending, with 1 as its largest magnitude.

    Raises
    ------
    TypeError, ValueError
        An argument is none of these.
    """

    def __init__(self, bits: int, group_size: int = 128, grid: ArrayLike | None = None) -> None:
        self.bits = check.one_of(bits, "bits", BITS)
        self.group_size = check.one_of(group_size, "group_size", GROUP_SIZES)
        self.grid: F32 | None = None
        """float32 [n_levels], read-only; None where it is to be fitted."""
        if grid is not None:
            self.grid = check.grid(grid, 1 << self.bits)
            self.grid.flags.writeable = False
        self.lacks = "grid: pass Trellis(bits, group_size, grid)" if self.grid is None else ""
        self.name = f"trellis{self.bits}" + ("" if self.group_size == 128 else f"-{self.group_size}")

    takes_moments = True
    of_each = (
        "each has a grid of its own, fitted when it was quantized: quantize the floats as one stack, or each "
        "with the grid of one, as cuquant.quantize(w, A.format)"
    )
    formula = "W = grid[q] * scale * su * sv"

    @property
    def bits_per_weight(self) -> float:
        """Bits of an index and its share of a scale; signs and padding depend on an array's shape."""
        return self.bits + 32 / self.group_size

    @property
    def codebook(self) -> F32 | None:  # type: ignore[override]
        """float32 [2^bits]: the grid, and its first level in place of those that it lacks."""
        if self.grid is None:
            return None
        return np.concatenate([self.grid, np.repeat(self.grid[:1], (1 << self.bits) - len(self.grid))])

    @property
    def block_bytes(self) -> int:
        """Bytes of a group of a row: its indices and its scale."""
        return self.group_size * self.bits // 8 + 4

    @cached_property
    def kernels(self) -> Kernels:  # type: ignore[override]
        if self.grid is not None:  # which is the array's: arrays of different grids share their plans
            return replace(kept_as(KeptAs(get(self.name))), in_float16=self.half_levels is not None)
        group = self.group_size if self.group_size > _LARGEST_IN_TILE else 0
        encoder = Encoder("quantize_trellis", self.group_size // 8)
        return Kernels("trellis", Coding.CODEBOOK, Scaling.SINGLE, group, encoder)

    @cached_property
    def half_levels(self) -> HalfLevels | None:
        """The grid in float16, times a power of two; None where that would lose bits of a level.

        The largest is from 1/2 to 1 then, or up to 2^15 where the least needs it.
        """
        assert self.codebook is not None
        sizes = np.abs(self.codebook[self.codebook != 0].astype(np.float64))
        if not sizes.size:
            return HalfLevels(np.zeros(1 << self.bits, np.float16), 0, 0.0, 0.0)
        _, exponent = frexp(sizes.max())
        for lift in (-exponent, 15 - exponent):
            least, largest = ldexp(sizes.min(), lift), ldexp(sizes.max(), lift)
            if least >= LEAST_HALF:
                levels = np.ldexp(self.codebook.astype(np.float64), lift).astype(np.float16)
                return HalfLevels(levels, lift, least, largest)
        return None

    def fitted(self, x: Any, importance: Any = None) -> Trellis:
        return self if self.grid is not None else self.with_grid_for(x, importance)

    def with_grid_for(self, x: Any, moments: F32 | None) -> Trellis:
        """This format with a grid fitted to weights (..., N, K), by the importance of their columns."""
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        drawn_rows = device.as_numpy(rows[:: max(1, rows.size // (16 * _SAMPLE))])
        sample = np.ascontiguousarray(drawn_rows, np.float32)
        su, sv = random_signs(*sample.shape)
        with np.errstate(under="ignore"):
            groups, h = self._groups(sample * su * sv[:, None], moments)
        h = np.broadcast_to(h, groups.shape)
        if groups.size > _SAMPLE:
            drawn = np.random.default_rng(0).choice(len(groups), _SAMPLE // self.group_size, replace=False)
            groups, h = groups[drawn], h[drawn]
        if device.is_cuda(x):
            from ..cuda.trellis import Nearest

            return Trellis(self.bits, self.group_size, fit(groups, h, self.bits, Nearest(self)))
        with np.errstate(under="ignore"):
            return Trellis(self.bits, self.group_size, fit(groups, h, self.bits))

    def encode(self, x: F32) -> NDArray[np.uint8]:
        return self.encode_with(x, *random_signs(*x.shape), None)

    def encode_with(self, x: F32, su: Any, sv: Any, moments: F32 | None) -> NDArray[np.uint8]:
        """Storage bytes of a matrix [N, K], with signs [K] and [N] and the importance of its columns."""
        assert self.grid is not None
        n, k = x.shape
        raw = np.zeros(self.stored(x.shape), np.uint8)
        parts = self.parts(raw, x.shape)
        parts.su[...], parts.sv[...] = su, sv
        step = max(TILE, _SLAB // k // TILE * TILE)
        for start in range(0, n, step):
            part = slice(start, min(start + step, n))
            with np.errstate(under="ignore"):
                groups, h = self._groups(x[part] * parts.su * parts.sv[part, None], moments)
                codes, scales = nearest(groups, h, self.grid)
            check.require_trellis_scales(scales, self)
            parts.scales[:, part] = scales.reshape(-1, len(parts.scales)).T
            codes = codes.reshape(part.stop - start, -1)[:, :k]
            parts.packed[:, start // TILE : -(-part.stop // TILE)] = _pack(codes, self.bits)
        return raw

    def importance(self, moments: F32) -> F32:
        """Importance of columns, from their inputs' second moments: up to 1, or 1 of all where these are all
        0."""
        if not moments.any():
            return np.ones_like(moments)
        # Small ones count at least so much that none is lost.
        return np.where(moments > 0, np.maximum(moments / moments.max(), _LEAST_MOMENT), 0).astype(np.float32)

    def _groups(self, u: F32, moments: F32 | None) -> tuple[F32, F32]:
        """Rows [n, K] as groups [n * groups, group_size], filled up with zeros, and the importance of their
        columns, up to 1, of the same shape or [1, group_size]."""
        n, k = u.shape
        missing = -k % self.group_size
        if moments is None and not missing:
            return u.reshape(-1, self.group_size), np.ones((1, self.group_size), np.float32)
        h = np.ones(k, np.float32) if moments is None else self.importance(moments)
        filled = (np.pad(a, ((0, 0), (0, missing))) for a in (u, np.broadcast_to(h, (n, k))))
        groups, weights = (a.reshape(-1, self.group_size).astype(np.float32, copy=False) for a in filled)
        return groups, weights

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], self._places(shape)[-1])

    def _places(self, shape: tuple[int, ...]) -> tuple[int, int, int, int, int]:
        """Where a matrix's packed indices, scales, su and sv end in its record, and the record."""
        n, k = sides(shape)
        packed = -(-k // TILE) * -(-n // TILE) * 32 * self.bits
        scales = packed + 4 * n * -(-k // self.group_size)
        signs = scales + k + n
        return packed, scales, scales + k, signs, signs + -signs % ALIGNMENT

    def parts(self, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> Parts:
        """The arrays that the storage bytes of an array of that shape hold: views."""
        n, k = sides(shape)
        lead, (packed, scales, su, sv, _) = blocks.shape[:-1], self._places(shape)
        return Parts(
            blocks[..., :packed].reshape(*lead, -(-k // TILE), -(-n // TILE), 32 * self.bits),
            blocks[..., packed:scales].view(np.float32).reshape(*lead, -(-k // self.group_size), n),
            blocks[..., scales:su].view(np.int8),
            blocks[..., su:sv].view(np.int8),
        )

    def rows(self, blocks: NDArray[np.uint8], shape: tuple[int, ...], part: slice) -> F32:
        assert self.codebook is not None
        parts, k = self.parts(blocks, shape), shape[-1]
        first = part.start // TILE
        codes = _unpack(parts.packed[:, first : -(-part.stop // TILE)], self.bits)
        codes = codes[part.start - first * TILE : part.stop - first * TILE, :k]
        scales = np.repeat(parts.scales[:, part].T, self.group_size, axis=1)[:, :k]
        return self.codebook[codes] * scales * parts.su * parts.sv[part, None]

    def select(
        self, blocks: Any, shape: tuple[int, ...], index: tuple[Any, ...]
    ) -> tuple[Any, tuple[int, ...]]:
        n, k = sides(shape)
        chosen = chosen_rows(shape, index)
        result = (*chosen.shape, k)
        if device.is_cuda(blocks):
            from ..cuda import trellis as cuda_trellis

            return cuda_trellis.select(self, blocks, shape, chosen, result), result
        out = np.zeros(self.stored(result), np.uint8)
        sources, targets = blocks.reshape(-1, blocks.shape[-1]), out.reshape(-1, out.shape[-1])
        rows = chosen.reshape(len(targets), chosen.shape[-1] if chosen.ndim else 1)
        for target, ids in zip(targets, rows, strict=True):
            home = ids // n
            if len(ids) == n > 0 and (ids == home[0] * n + np.arange(n)).all():
                target[...] = sources[home[0]]
            else:
                self._gather(sources, (n, k), home, ids % n, target)
        return out, result

    def _gather(
        self,
        sources: NDArray[np.uint8],
        shape: tuple[int, int],
        home: NDArray[np.int64],
        ids: NDArray[np.int64],
        target: NDArray[np.uint8],
    ) -> None:
        """Fill the record `target` with rows `ids` of the matrices `home`, of that shape, of `sources`."""
        parts, k = self.parts(sources, shape), shape[1]
        new = self.parts(target, (len(ids), k))
        if len(ids) == 0:
            new.su[...] = 1
            return
        check.require_same_signs(parts.su[np.unique(home)])
        new.su[...], new.sv[...] = parts.su[home[0]], parts.sv[home, ids]
        new.scales[...] = parts.scales[home, :, ids].T
        step = max(TILE, _SLAB // (TILE * k) // TILE * TILE)  # each row may unpack a tile of its own
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            tiles, where = np.unique(np.stack([home[part], ids[part] // TILE]), axis=1, return_inverse=True)
            packed = parts.packed[tiles[0], :, tiles[1]].swapaxes(0, 1)
            codes = _unpack(packed, self.bits)[where.reshape(-1) * TILE + ids[part] % TILE]
            new.packed[:, start // TILE : -(-min(start + step, len(ids)) // TILE)] = _pack(codes, self.bits)

    def numbers(self, blocks: NDArray[np.uint8], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
        assert self.grid is not None
        return {"grid": self.grid, **self.parts(blocks, shape)._asdict()}

    def flaws(self, blocks: NDArray[np.uint8], shape: tuple[int, ...], strict: bool = False) -> list[str]:
        assert self.grid is not None
        parts = self.parts(blocks, shape)
        found = [f"{name} holds {bad}" for name, bad in check.wrong_signs(su=parts.su, sv=parts.sv)]
        found += [f"scales holds {bad}" for bad in parts.scales[~np.isfinite(parts.scales)][:1]]
        if strict and (beyond := self._beyond(parts.packed, shape)):
            found.append(
                f"{beyond} indices are beyond the grid of {len(self.grid)} levels and read as index 0"
            )
        return found

    def _beyond(self, packed: NDArray[np.uint8], shape: tuple[int, ...]) -> int:
        """How many weights have an index that the grid lacks."""
        assert self.grid is not None
        n, k = sides(shape)
        count = 0
        for tiles in packed.reshape(prod(packed.shape[:-3]), *packed.shape[-3:]):
            for row in range(tiles.shape[1]):
                codes = _unpack(tiles[:, row : row + 1], self.bits)[: n - row * TILE, :k]
                count += int((codes >= len(self.grid)).sum())
        return count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trellis):
            return super().__eq__(other)
        same = (
            self.grid is other.grid
            if self.grid is None or other.grid is None
            else np.array_equal(self.grid, other.grid)
        )
        return self.name == other.name and same

    __hash__ = Format.__hash__

    def __repr__(self) -> str:
        group = "" if self.group_size == 128 else f", group_size={self.group_size}"
        grid = "" if self.grid is None else f", grid={self.grid.tolist()}"
        return f"Trellis({self.bits}{group}{grid})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Trellis, (self.bits, self.group_size, self.grid)


def random_signs(n: int, k: int, seed: int = 0) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
    """su [k] and sv [n] of NumPy's default generator; weights of the same inputs have the same su."""
    draws = (np.random.default_rng([seed, i]).integers(0, 2, size) for i, size in enumerate((k, n)))
    su, sv = ((1 - 2 * bits).astype(np.int8) for bits in draws)
    return su, sv


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Indices [N, K] -> tiles [ceil(K / 16), ceil(N / 16), 32 * bits], index 0 where there is no weight."""
    n, k = codes.shape
    padded = np.pad(codes, ((0, -n % TILE), (0, -k % TILE)))
    rows, columns = (extent // TILE for extent in padded.shape)
    tiles = padded.reshape(rows, TILE, columns, TILE).transpose(2, 0, 3, 1).reshape(columns, rows, 32, 8)
    # Eight indices fill whole bytes: `bits` of them.
    words = np.bitwise_or.reduce(tiles.astype(np.uint32) << _shifts(bits), axis=-1)
    return words.astype("<u4")[..., None].view(np.uint8)[..., :bits].reshape(columns, rows, 32 * bits)


def _unpack(tiles: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Tiles [columns, rows, 32 * bits] -> indices [16 * rows, 16 * columns] (see _pack)."""
    columns, rows, _ = tiles.shape
    octets = tiles.reshape(columns, rows, 32, bits)
    words = octets[..., 0].astype(np.uint32)
    for i in range(1, bits):
        words |= octets[..., i].astype(np.uint32) << np.uint32(8 * i)
    codes = ((words[..., None] >> _shifts(bits)) & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(columns, rows, TILE, TILE).transpose(1, 3, 0, 2).reshape(rows * TILE, -1)


@cache
def _shifts(bits: int) -> NDArray[np.uint32]:
    return np.arange(0, 8 * bits, bits, dtype=np.uint32)


for _bits in BITS:
    for _group in GROUP_SIZES:
        register(Trellis(_bits, _group))
