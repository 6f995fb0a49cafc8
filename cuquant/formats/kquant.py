"""What k-quants and IQ4 share: searches for scales, those of llama.cpp's reference quantizers, and packing.

Searches take the weights of a group along the first axis, and groups along the second: float32 [b, g]. Every
step rounds to float32, and sums run over a group in order, as the C code of ggml-quants.c is written; a
compiler that fuses multiplications and additions makes other last bits.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Format
from .kernels import Encoder

Floats = NDArray[np.float32]
Codes = NDArray[Any]
"""Codes of weights, uint8 mostly."""

F = np.float32
SUPER = 256
"""Weights in a block of most of these formats."""
PIECE = 1 << 15
"""Weights searched at a time: their arrays, of 128 KB, stay in a core's cache."""
NEGLIGIBLE = F(1e-15)
"""A group whose largest magnitude is below it reads as 0 (GROUP_MAX_EPS)."""
SEARCH = Encoder("search", each=32)


class KQuant(Format):
    """A format whose scales are searched for; `fit` quantizes a few blocks."""

    block_size = SUPER
    takes_importance = True

    @property
    def fine_from(self) -> int:
        """Least scale that is fine: codes are chosen for scales and minimums as they are stored."""
        return max(2, self.bits - 1)

    def encode(self, x: Floats, importance: Floats | None = None) -> NDArray[Any]:
        """Quantize blocks, also by the importance of each weight, float32 [n, block_size]."""
        records = np.empty(len(x), self.storage)
        step = PIECE // self.block_size
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            fields = self.fit(x[part], None if importance is None else importance[part])
            for name, values in fields.items():
                records[name][part] = values.reshape(records[name][part].shape)
        return records

    @abstractmethod
    def fit(self, x: Floats, importance: Floats | None) -> dict[str, NDArray[Any]]:
        """The fields of the records [n] of blocks [n, block_size]."""


def groups(x: NDArray[Any], size: int) -> NDArray[Any]:
    """Blocks [n, b] -> their groups of `size` weights, [size, n * b / size]."""
    return np.ascontiguousarray(x.reshape(-1, size).T)


def ungrouped(q: Codes, n: int) -> Codes:
    """Codes of groups -> codes of n blocks (see `groups`)."""
    return np.ascontiguousarray(q.T).reshape(n, -1)


def sums(terms: Floats) -> Floats:
    """Sums over the first axis, term after term: [b, g] -> [g]."""
    if terms.shape[1] == 1:  # which NumPy would sum pairwise
        return np.add.accumulate(terms, axis=0)[-1]
    return np.add.reduce(terms, axis=0)


def spread(x: Floats, size: int, factor: float, importance: Floats) -> Floats:
    """Weights of squared errors: importance * sqrt(factor * mean(x^2) + x^2), as groups.

    The mean is that of the block: an error of a large weight counts more, but not that of a small one less
    than its inputs ask for.
    """
    square = groups(x * x, x.shape[1])
    mean = sums(square) * F(factor / x.shape[1])
    x2 = groups(x * x, size)
    return groups(importance, size) * np.sqrt(np.repeat(mean, x.shape[1] // size) + x2)


def spread_over_rows(rows: Floats, importance: Floats) -> Floats:
    """Weights of squared errors: importance * sqrt(mean(x^2) + x^2), with the mean of the row that a weight
    is of (`spread` has the block's): [n, K] -> [n, K]."""
    square = rows * rows
    mean = sums(groups(square, rows.shape[1])) / F(rows.shape[1])
    return importance * np.sqrt(mean[:, None] + square)


def affine(
    x: Floats, w: Floats, most: int, first: float, step: float, steps: int, absolute: bool = False
) -> tuple[Floats, Floats, Codes]:
    """Scale and minimum of least weighted error in x = scale * q - minimum, q from 0 to `most`.

    Codes are made with (first + i * step + most) / (max - min), i = 0 .. steps, in place of 1 / scale; from
    these codes scale and minimum follow by least squares, and the best of all is taken. (make_qkx2_quants
    and make_qkx3_quants.)

    Parameters
    ----------
    x, w : float32 [b, g]
        Weights, and the weight of each one's error.
    absolute : bool
        Compare sums of magnitudes of errors, in place of squares.

    Returns
    -------
    scale, minimum : float32 [g], the minimum with its sign turned: 0 or above
    q : uint8 [b, g]
    """
    high, low = x.max(axis=0), np.minimum(x.min(axis=0), F(0))
    flat = high == low
    sum_w, sum_x = sums(w), sums(w * x)
    q, wq, spare = np.empty_like(x), np.empty_like(x), np.empty_like(x)

    def put_codes(inverse: Floats, low: Floats) -> None:
        np.subtract(x, low, out=q)
        np.multiply(q, inverse, out=q)
        np.clip(np.rint(q, out=q), F(0), F(most), out=q)

    def error(scale: NDArray[Any], low: NDArray[Any]) -> Floats:
        np.multiply(q, scale, out=spare)
        np.add(spare, low, out=spare)
        np.subtract(spare, x, out=spare)
        np.abs(spare, out=spare) if absolute else np.multiply(spare, spare, out=spare)
        return sums(np.multiply(spare, w, out=spare))

    inverse = finite(F(most) / (high - low))
    scale = F(1) / (F(most) / (high - low))
    put_codes(inverse, low)
    least = error(scale, low)
    best, origin = inverse, low
    for i in range(steps + 1):
        inverse = finite((F(first) + F(step) * F(i) + F(most)) / (high - low))
        put_codes(inverse, low)
        np.multiply(w, q, out=wq)
        sum_q, sum_xq = sums(wq), sums(np.multiply(wq, x, out=spare))
        sum_q2 = sums(np.multiply(wq, q, out=wq))
        determinant = sum_w * sum_q2 - sum_q * sum_q
        new_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
        new_low = (sum_q2 * sum_x - sum_q * sum_xq) / determinant
        above = new_low > 0
        new_scale = np.where(above, sum_xq / sum_q2, new_scale)
        new_low = np.where(above, F(0), new_low)
        now = error(new_scale, new_low)
        better = (determinant > 0) & (now < least)
        least = np.where(better, now, least)
        best, origin = np.where(better, inverse, best), np.where(better, low, origin)
        scale, low = np.where(better, new_scale, scale), np.where(better, new_low, low)
    put_codes(best, origin)
    return np.where(flat, F(0), scale), -low, np.where(flat, 0, q).astype(np.uint8)


def symmetric(x: Floats, w: Floats, most: int) -> tuple[Floats, Codes]:
    """Scale of least weighted squared error in x = scale * (q - most), q from 0 to 2 * most - 1.

    Codes are made with -(most + i / 10) / peak, i = -9 .. 9, in place of 1 / scale, where peak is the weight
    of the largest magnitude, with its sign; from these codes the scale follows by least squares, and the
    best of all is taken. (make_qx_quants.)

    Parameters
    ----------
    x, w : float32 [b, g]
        Weights, and the weight of each one's error.

    Returns
    -------
    scale : float32 [g]
    q : uint8 [b, g]
    """
    peak = largest(x)
    wx = w * x
    q, spare = np.empty_like(x), np.empty_like(x)

    def put_codes(inverse: Floats) -> None:
        np.rint(np.multiply(x, inverse, out=q), out=q)
        np.clip(q, F(-most), F(most - 1), out=q)

    def try_codes(inverse: Floats) -> tuple[Floats, Floats]:
        put_codes(inverse)
        sum_xq = sums(np.multiply(wx, q, out=spare))
        np.multiply(np.multiply(w, q, out=spare), q, out=spare)
        return sum_xq, sums(spare)

    best = F(-most) / peak
    sum_xq, sum_q2 = try_codes(best)
    scale = _quotient(sum_xq, sum_q2)
    gain = scale * sum_xq
    for i in (*range(-9, 0), *range(1, 10)):
        inverse = -(F(most) + F(0.1) * F(i)) / peak
        sum_xq, sum_q2 = try_codes(inverse)
        better = (sum_q2 > 0) & (sum_xq * sum_xq > gain * sum_q2)
        scale = np.where(better, sum_xq / sum_q2, scale)
        gain = np.where(better, scale * sum_xq, gain)
        best = np.where(better, inverse, best)
    put_codes(best)
    return _of_codes(scale, peak, q, most)


def by_turns(x: Floats, most: int) -> tuple[Floats, Codes]:
    """As `symmetric` with w = x^2: codes made with -most / peak are improved in turn, five times over.

    (make_q3_quants.)
    """
    peak = largest(x)
    q = np.clip(np.rint(F(-most) / peak * x), F(-most), F(most - 1))
    return _of_codes(_improved(x, x * x, q, -most, most - 1), peak, q, most)


def _of_codes(scale: Floats, peak: Floats, q: Floats, most: int) -> tuple[Floats, Codes]:
    """What `symmetric` returns, of codes from -most on."""
    codes = np.where(np.abs(peak) < NEGLIGIBLE, 0, q + F(most)).astype(np.uint8)
    return of_peak(scale, peak, F(-most)), codes


def of_peak(scale: Floats, peak: Floats, code: np.float32) -> Floats:
    """Scales [g] that were found of groups whose largest weights `peak` have that code: 0 of negligible ones.

    Sums of weights above 1e12 overflow; their scale is beyond float16 too, and must be seen to be.
    """
    scale = np.where(np.isfinite(scale), scale, peak / code)
    return np.where(np.abs(peak) < NEGLIGIBLE, F(0), scale)


def of_least_error(x: Floats, w: Floats, most: int) -> tuple[Floats, Codes]:
    """Scale of least weighted squared error in x = scale * q of numbers from 0 on, q from 0 to `most`.

    A scale that was found may be below 0, where few weights of its group matter: it gets code 0 (of the
    reference the lower bits of what C makes of a negative number).

    The best of nine scales around max(x) / most; then each code is improved in turn, five times over.
    (make_qp_quants.)

    Parameters
    ----------
    x, w : float32 [n, m]
        Numbers of a block, and the weight of each one's error.

    Returns
    -------
    scale : float32 [n]
    q : uint8 [n, m]
    """
    x, w = np.ascontiguousarray(x.T), np.ascontiguousarray(w.T)
    peak = x.max(axis=0)

    def codes(inverse: Floats) -> Floats:
        return np.clip(np.rint(inverse * x), F(0), F(most))

    def error(inverse: Floats) -> Floats:
        difference = x - F(1) / inverse * codes(inverse)
        return sums(w * difference * difference)

    best = F(most) / peak
    least = error(best)
    for i in (*range(-4, 0), *range(1, 5)):
        inverse = (F(0.1) * F(i) + F(most)) / peak
        now = error(inverse)
        better = now < least
        least, best = np.where(better, now, least), np.where(better, inverse, best)
    q = codes(best)
    scale = _improved(x, w, q, 0, most)
    zero = peak < NEGLIGIBLE
    scale = np.where(np.isfinite(scale), scale, peak / F(most))
    return np.where(zero, F(0), scale), np.where(zero, 0, q).astype(np.uint8).T.copy()


def of_largest(scales: Floats, most: int) -> tuple[Floats, Codes]:
    """Numbers from 0 on as codes of the block's largest: [n, m] -> scale [n], codes up to `most` [n, m]."""
    top = scales.max(axis=1) + F(0)  # -0 becomes 0
    inverse = finite(F(most) / top)[:, None]
    return top / F(most), np.clip(np.rint(inverse * scales), F(0), F(most)).astype(np.uint8)


def _improved(x: Floats, w: Floats, q: Floats, least: int, most: int) -> Floats:
    """Change codes [b, g] one after the other to what the others' best scale asks for; the scale of all, [g].

    A change is kept where it lowers the weighted squared error. Five passes.
    """
    wx = w * x
    sum_xq, sum_q2 = sums(wx * q), sums(w * q * q)
    for _ in range(5):
        for x_i, w_i, wx_i, q_i in zip(x, w, wx, q, strict=True):
            rest_xq, rest_q2 = sum_xq - wx_i * q_i, sum_q2 - w_i * q_i * q_i
            new = np.clip(np.rint(x_i * rest_q2 / rest_xq), F(least), F(most))
            new_xq, new_q2 = rest_xq + wx_i * new, rest_q2 + w_i * new * new
            better = (rest_xq > 0) & (new != q_i) & ((new_q2 if least < 0 else rest_q2) > 0)
            better &= new_xq * new_xq * sum_q2 > sum_xq * sum_xq * new_q2
            q_i[...] = np.where(better, new, q_i)
            sum_xq, sum_q2 = np.where(better, new_xq, sum_xq), np.where(better, new_q2, sum_q2)
    return np.where(sum_q2 <= 0, F(0), sum_xq / sum_q2)  # NaN where weights overflow


def largest(x: Floats) -> Floats:
    """Per group, the number of the largest magnitude with its sign, the first of equals: [b, g] -> [g]."""
    return np.take_along_axis(x, np.argmax(np.abs(x), axis=0)[None], axis=0)[0]


def requantized(x: Floats, d: Floats, q: Codes, least: int, most: int) -> Codes:
    """Codes of groups x / d, from 0 on (`least` is that of code 0); where d is 0, those that the search made.

    Parameters
    ----------
    x : float32 [b, g]
    d : float32 [g], scales as they are stored
    q : uint8 [b, g]
    """
    made = np.clip(np.rint(x / d), F(least), F(most)) - F(least)
    return np.where(d == 0, q, made).astype(np.uint8)


def pack_pairs_of_bits(q: Codes) -> Codes:
    """Codes up to 3, [n, 4 * b] -> bytes [n, b]: bits 2 i of byte j belong to code i * b + j."""
    a, b, c, d = np.split(q, 4, axis=1)
    return a | (b << 2) | (c << 4) | (d << 6)


def unpack_pairs_of_bits(raw: Codes) -> Codes:
    """Bytes [n, b] -> codes [n, 4 * b] (see pack_pairs_of_bits)."""
    return np.concatenate([(raw >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)


def pack_bits(q: Codes) -> Codes:
    """Bits [n, 8 * b] -> bytes [n, b]: bit i of byte j belongs to code i * b + j."""
    return np.packbits(q.reshape(len(q), 8, -1), axis=1, bitorder="little")[:, 0]


def unpack_bits(raw: Codes) -> Codes:
    """Bytes [n, b] -> bits [n, 8 * b] (see pack_bits)."""
    return np.unpackbits(raw[:, None], axis=1, bitorder="little").reshape(len(raw), -1)


def pack_scales(scales: Codes, minimums: Codes) -> Codes:
    """Scales and minimums of 6 bits, [n, 8] each -> bytes [n, 12], as q4_k and q5_k have them.

    Bytes 0 to 3 are scales 0 to 3, with the upper two bits of scales 4 to 7 above; bytes 4 to 7 are the same
    of minimums; bytes 8 to 11 the lower four bits of scales 4 to 7, and above those of minimums.
    """
    first = [part[:, :4] | (part[:, 4:] >> 4 << 6) for part in (scales, minimums)]
    return np.concatenate([*first, (scales[:, 4:] & 15) | (minimums[:, 4:] << 4)], axis=1)


def unpack_scales(raw: Codes) -> tuple[Codes, Codes]:
    """Bytes [n, 12] -> scales and minimums [n, 8] (see pack_scales)."""
    s, m, low = np.split(raw, 3, axis=1)
    scales = np.concatenate([s & 63, (low & 15) | (s >> 6 << 4)], axis=1)
    return scales, np.concatenate([m & 63, (low >> 4) | (m >> 6 << 4)], axis=1)


def scaled(d: NDArray[Any], codes: NDArray[Any]) -> Floats:
    """Scales of groups: a block's float16 or float32, [n], times codes [n, m]."""
    return d.astype(F)[:, None] * codes.astype(F)


def read(q: NDArray[Any], d: Floats, minimum: Floats | None = None) -> Floats:
    """d * q, or d * q - minimum: codes [n, b], scales and minimums of groups [n, m] -> float32 [n, b]."""
    wide = q.reshape(*d.shape, -1).astype(F)
    wide *= d[..., None]
    if minimum is not None:
        wide -= minimum[..., None]
    return wide.reshape(len(q), -1)


def finite(x: Floats) -> Floats:
    """x, and 0 where it overflowed: a factor that gives code 0, as the reference does there."""
    return np.where(np.isfinite(x), x, F(0))


def _quotient(a: Floats, b: Floats) -> Floats:
    return np.where(b != 0, a / b, F(0))
