"""Quantizing to k-quants and IQ4, and by importance to q4_0 and its siblings, a scalar at a time, as
ggml-quants.c defines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

F = np.float32
LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
Numbers = Sequence[np.float32] | NDArray[np.float32]


def nearest_int(x: np.float32) -> int:
    """By the bits of x + 1.5 * 2^23, whatever x is."""
    return (int(F(x + F(12582912)).view(np.uint32)) & 0x7FFFFF) - 0x400000


def clipped(x: np.float32, low: int, high: int) -> int:
    return max(low, min(high, nearest_int(x)))


def total(terms: Numbers) -> np.float32:
    result = F(0)
    for term in terms:
        result = result + term
    return result


def qkx(
    x: Numbers, w: Numbers, most: int, first: float, delta: float, steps: int, mad: bool = False
) -> tuple[np.float32, np.float32, list[int]]:
    """make_qkx2_quants and make_qkx3_quants, which differ for infinite factors only."""
    low, high = min(F(0), *x), max(x)
    if low == high:
        return F(0), -low, [0] * len(x)

    def codes(inverse: np.float32) -> list[int]:
        return [clipped(inverse * (v - low), 0, most) for v in x]

    def error(scale: np.float32, low: np.float32, q: list[int]) -> np.float32:
        differences = [scale * F(c) + low - v for c, v in zip(q, x, strict=True)]
        return total([u * (abs(d) if mad else d * d) for u, d in zip(w, differences, strict=True)])

    sum_w, sum_x = total(w), total([u * v for u, v in zip(w, x, strict=True)])
    scale = F(1) / (F(most) / (high - low))
    best = codes(F(most) / (high - low))
    least = error(scale, low, best)
    for i in range(steps + 1):
        q = codes((F(first) + F(delta) * F(i) + F(most)) / (high - low))
        wq = [u * F(c) for u, c in zip(w, q, strict=True)]
        sum_q, sum_q2 = total(wq), total([u * F(c) for u, c in zip(wq, q, strict=True)])
        sum_xq = total([u * v for u, v in zip(wq, x, strict=True)])
        determinant = sum_w * sum_q2 - sum_q * sum_q
        if determinant > 0:
            new_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
            new_low = (sum_q2 * sum_x - sum_q * sum_xq) / determinant
            if new_low > 0:
                new_scale, new_low = sum_xq / sum_q2, F(0)
            now = error(new_scale, new_low, q)
            if now < least:
                least, best, scale, low = now, q, new_scale, new_low
    return scale, -low, best


def peak_of(x: Numbers) -> np.float32:
    return max(x, key=abs)


def qx(x: Numbers, w: Numbers, most: int) -> tuple[np.float32, list[int]]:
    """make_qx_quants."""
    peak = peak_of(x)
    if abs(peak) < F(1e-15):
        return F(0), [0] * len(x)

    def tried(inverse: np.float32) -> tuple[list[int], np.float32, np.float32]:
        q = [clipped(inverse * v, -most, most - 1) for v in x]
        sum_xq = total([u * v * F(c) for u, v, c in zip(w, x, q, strict=True)])
        return q, sum_xq, total([u * F(c) * F(c) for u, c in zip(w, q, strict=True)])

    best, sum_xq, sum_q2 = tried(F(-most) / peak)
    scale = sum_xq / sum_q2 if sum_q2 else F(0)
    gain = scale * sum_xq
    for i in range(-9, 10):
        if i:
            q, sum_xq, sum_q2 = tried(-(F(most) + F(0.1) * F(i)) / peak)
            if sum_q2 > 0 and sum_xq * sum_xq > gain * sum_q2:
                best, scale = q, sum_xq / sum_q2
                gain = scale * sum_xq
    return scale, [c + most for c in best]


def improve(x: Numbers, w: Numbers, q: list[int], low: int, high: int) -> np.float32:
    """The end of make_q3_quants and make_qp_quants: changes codes, returns their scale."""
    sum_xq = total([u * v * F(c) for u, v, c in zip(w, x, q, strict=True)])
    sum_q2 = total([u * F(c) * F(c) for u, c in zip(w, q, strict=True)])
    for _ in range(5):
        changed = False
        for i, (u, v) in enumerate(zip(w, x, strict=True)):
            xq, q2 = sum_xq - u * v * F(q[i]), sum_q2 - u * F(q[i]) * F(q[i])
            if xq > 0 and (low < 0 or q2 > 0):
                new = clipped(v * q2 / xq, low, high)
                xq, q2 = xq + u * v * F(new), q2 + u * F(new) * F(new)
                if new != q[i] and q2 > 0 and xq * xq * sum_q2 > sum_xq * sum_xq * q2:
                    q[i], sum_xq, sum_q2, changed = new, xq, q2, True
        if not changed:
            break
    return sum_xq / sum_q2 if sum_q2 > 0 else F(0)


def q3(x: Numbers) -> tuple[np.float32, list[int]]:
    """make_q3_quants."""
    peak = peak_of(x)
    if abs(peak) < F(1e-15):
        return F(0), [0] * len(x)
    q = [clipped(F(-4) / peak * v, -4, 3) for v in x]
    scale = improve(x, [v * v for v in x], q, -4, 3)
    return scale, [c + 4 for c in q]


def qp(x: Numbers, w: Numbers, most: int) -> tuple[np.float32, list[int]]:
    """make_qp_quants."""
    peak = max(x)
    if peak < F(1e-15):
        return F(0), [0] * len(x)

    def tried(inverse: np.float32) -> tuple[np.float32, list[int]]:
        q = [min(most, nearest_int(inverse * v)) for v in x]
        differences = [v - F(1) / inverse * F(c) for v, c in zip(x, q, strict=True)]
        return total([u * d * d for u, d in zip(w, differences, strict=True)]), q

    least, best = tried(F(most) / peak)
    for i in range(-4, 5):
        if i:
            now, q = tried((F(0.1) * F(i) + F(most)) / peak)
            if now < least:
                least, best = now, q
    return improve(x, w, best, 0, most), best


def index_of(x: np.float32) -> int:
    """best_index_int8: the nearest level, of two equally near the upper one."""
    distances = [abs(float(x) - level) for level in LEVELS]
    return 15 - distances[::-1].index(min(distances))


def iq4(x: Numbers, w: Numbers) -> np.float32:
    """The search of quantize_row_iq4_nl_impl."""
    peak = peak_of(x)
    if abs(peak) < F(1e-15):
        return F(0)

    def tried(inverse: np.float32) -> tuple[np.float32, np.float32]:
        levels = [F(LEVELS[index_of(inverse * v)]) for v in x]
        sum_xl = total([u * c * v for u, c, v in zip(w, levels, x, strict=True)])
        return sum_xl, total([u * c * c for u, c in zip(w, levels, strict=True)])

    sum_xl, sum_l2 = tried(F(1) / (-peak / F(-127)))
    scale = sum_xl / sum_l2 if sum_l2 > 0 else F(0)
    gain = scale * sum_xl
    for i in range(-7, 8):
        sum_xl, sum_l2 = tried(F(i - 127) / peak)
        if sum_l2 > 0 and sum_xl * sum_xl > gain * sum_l2:
            scale = sum_xl / sum_l2
            gain = scale * sum_xl
    return scale


def half(x: np.float32) -> bytes:
    return np.float16(x).tobytes()


def as_stored(x: np.float32) -> np.float32:
    return F(np.float16(x))


def with_importance(x: Numbers, importance: Numbers, factor: float) -> list[np.float32]:
    """Weights of a super-block's errors: importance * sqrt(factor * mean of squares + square)."""
    mean = total([v * v for v in x]) * F(factor / len(x))
    return [u * np.sqrt(mean + v * v) for u, v in zip(importance, x, strict=True)]


def parts(x: Numbers, size: int) -> list[Numbers]:
    return [x[i : i + size] for i in range(0, len(x), size)]


def nibbles(q: list[int], span: int) -> bytes:
    """Of each `span` codes, the first half in low nibbles."""
    step = span // 2
    return bytes(
        q[i + j] & 15 | (q[i + j + step] & 15) << 4 for i in range(0, len(q), span) for j in range(step)
    )


def twos(q: list[int]) -> bytes:
    """Two bits of each of 128 codes, 32 apart in a byte."""
    return bytes(
        sum((q[i + j + 32 * part] & 3) << 2 * part for part in range(4))
        for i in range(0, len(q), 128)
        for j in range(32)
    )


def ones(q: list[int]) -> bytes:
    """A bit of each of 256 codes, 32 apart in a byte."""
    return bytes(sum((q[j + 32 * part] & 1) << part for part in range(8)) for j in range(32))


def scales_of_largest(values: list[np.float32], most: int) -> tuple[np.float32, list[int]]:
    top = max(F(0), *values)
    if top == 0:
        return F(0), [0] * len(values)
    return top / F(most), [min(most, nearest_int(F(most) / top * v) & 255) for v in values]


def affine_codes(
    x: Numbers,
    size: int,
    found: list[tuple[np.float32, np.float32, list[int]]],
    most: int,
    d: np.float32,
    dmin: np.float32,
    s: list[int],
    m: list[int],
) -> list[int]:
    """Codes by the stored scales; where a scale is 0, those of the search."""
    made: list[int] = []
    for group, (_, _, q), s_j, m_j in zip(parts(x, size), found, s, m, strict=True):
        step, below = as_stored(d) * F(s_j), as_stored(dmin) * F(m_j)
        made += q if step == 0 else [clipped((v + below) / step, 0, most) for v in group]
    return made


def q4_or_5(x: Numbers, importance: Numbers | None, most: int) -> tuple[bytes, list[int]]:
    if importance is None:
        search = (-1.0, 0.1, 20) if most == 15 else (-0.5, 0.1, 15)
        weights = []
        for group in parts(x, 32):
            mean = np.sqrt(total([v * v for v in group]) / F(32))
            weights.append([mean + abs(v) for v in group])
    else:
        search = (-0.9, 0.05, 36)
        weights = [list(part) for part in parts(with_importance(x, importance, 2), 32)]
    found = [qkx(g, w, most, *search) for g, w in zip(parts(x, 32), weights, strict=True)]
    scales, minimums = [f[0] for f in found], [f[1] for f in found]
    if importance is None:
        (d, s), (dmin, m) = scales_of_largest(scales, 63), scales_of_largest(minimums, 63)
    else:
        sums = [total(w) for w in weights]
        (d, s), (dmin, m) = qp(scales, sums, 63), qp(minimums, sums, 63)
    q = affine_codes(x, 32, found, most, d, dmin, s, m)
    packed = [s[j] | s[j + 4] >> 4 << 6 for j in range(4)] + [m[j] | m[j + 4] >> 4 << 6 for j in range(4)]
    packed += [s[j] & 15 | (m[j] & 15) << 4 for j in range(4, 8)]
    return half(d) + half(dmin) + bytes(packed), q


def q2_k(x: Numbers, importance: Numbers | None) -> bytes:
    if importance is None:
        found = [qkx(g, [abs(v) for v in g], 3, -0.5, 0.1, 15, mad=True) for g in parts(x, 16)]
        d, s = scales_of_largest([f[0] for f in found], 15)
        dmin, m = scales_of_largest([f[1] for f in found], 15)
    else:
        weights = parts(with_importance(x, importance, 1), 16)
        found = [qkx(g, w, 3, -0.9, 0.05, 36) for g, w in zip(parts(x, 16), weights, strict=True)]
        sums = [total(w) for w in weights]
        (d, s), (dmin, m) = qp([f[0] for f in found], sums, 15), qp([f[1] for f in found], sums, 15)
    q = affine_codes(x, 16, found, 3, d, dmin, s, m)
    return bytes(a | b << 4 for a, b in zip(s, m, strict=True)) + twos(q) + half(d) + half(dmin)


def q3_k(x: Numbers, importance: Numbers | None) -> bytes:
    if importance is None:
        found = [q3(g) for g in parts(x, 16)]
        top = peak_of([f[0] for f in found])
        d, s = F(0), [0] * 16
        if top:
            inverse = F(-32) / top
            d, s = F(1) / inverse, [clipped(inverse * f[0], -32, 31) + 32 for f in found]
    else:
        weights = parts(with_importance(x, importance, 2), 16)
        found = [qx(g, w, 4) for g, w in zip(parts(x, 16), weights, strict=True)]
        d, s = qx([f[0] for f in found], [total(w) for w in weights], 32)
    q: list[int] = []
    for group, (_, codes), s_j in zip(parts(x, 16), found, s, strict=True):
        step = as_stored(d) * F(s_j - 32)
        q += codes if step == 0 else [clipped(v / step, -4, 3) + 4 for v in group]
    low = bytes(s[j] & 15 | (s[j + 8] & 15) << 4 for j in range(8))
    high = bytes(sum(s[j + 4 * part] >> 4 << 2 * part for part in range(4)) for j in range(4))
    return ones([c >> 2 for c in q]) + twos(q) + low + high + half(d)


def q4_k(x: Numbers, importance: Numbers | None) -> bytes:
    head, q = q4_or_5(x, importance, 15)
    return head + nibbles(q, 64)


def q5_k(x: Numbers, importance: Numbers | None) -> bytes:
    head, q = q4_or_5(x, importance, 31)
    return head + ones([c >> 4 for c in q]) + nibbles(q, 64)


def q6_k(x: Numbers, importance: Numbers | None) -> bytes:
    weights = [v * v for v in x] if importance is None else importance
    found = [qx(g, w, 32) for g, w in zip(parts(x, 16), parts(weights, 16), strict=True)]
    top = peak_of([f[0] for f in found])
    if abs(top) < F(1e-15):
        return bytes(210)
    inverse = F(-128) / top
    d, s = F(1) / inverse, [min(127, nearest_int(inverse * f[0])) for f in found]
    q: list[int] = []
    for group, (_, codes), s_j in zip(parts(x, 16), found, s, strict=True):
        step = as_stored(d) * F(s_j)
        q += codes if step == 0 else [clipped(v / step, -32, 31) + 32 for v in group]
    return nibbles(q, 128) + twos([c >> 4 for c in q]) + np.array(s, np.int8).tobytes() + half(d)


def iq4_nl(x: Numbers, importance: Numbers | None) -> bytes:
    weights = [v * v for v in x] if importance is None else with_importance(x, importance, 2)
    d = iq4(x, weights)
    inverse = F(1) / d if d else F(0)
    return half(d) + nibbles([index_of(inverse * v) for v in x], 32)


def iq4_xs(x: Numbers, importance: Numbers | None) -> bytes:
    weights = [v * v for v in x] if importance is None else with_importance(x, importance, 2)
    scales = [iq4(g, w) for g, w in zip(parts(x, 32), parts(weights, 32), strict=True)]
    d = -peak_of(scales) / F(32)
    s, q = [], []
    for group, scale in zip(parts(x, 32), scales, strict=True):
        code = clipped((F(1) / d if d else F(0)) * scale, -32, 31)
        step = d * F(code)
        q += [index_of((F(1) / step if step else F(0)) * v) for v in group]
        s.append(code + 32)
    high = sum(c >> 4 << 2 * i for i, c in enumerate(s))
    low = bytes(s[i] & 15 | (s[i + 1] & 15) << 4 for i in range(0, 8, 2))
    return half(d) + high.to_bytes(2, "little") + low + nibbles(q, 32)


BLOCK: dict[str, Callable[[Numbers, Numbers | None], bytes]] = {
    f.__name__: f for f in (q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs)
}
"""By format: float32 weights of a block, and maybe their importance, to its bytes."""


def fifths(q: list[int]) -> bytes:
    return sum((c >> 4) << j for j, c in enumerate(q)).to_bytes(4, "little")


def q4_0(x: Numbers, w: Numbers) -> bytes:
    d, q = qx(x, w, 8)
    return half(d) + nibbles(q, 32)


def q4_1(x: Numbers, w: Numbers) -> bytes:
    d, below, q = qkx(x, w, 15, -0.9, 0.05, 36)
    return half(d) + half(-below) + nibbles(q, 32)


def q5_0(x: Numbers, w: Numbers) -> bytes:
    d, q = qx(x, w, 16)
    return half(d) + fifths(q) + nibbles(q, 32)


def q5_1(x: Numbers, w: Numbers) -> bytes:
    d, below, q = qkx(x, w, 31, -0.9, 0.05, 36)
    return half(d) + half(-below) + fifths(q) + nibbles(q, 32)


OF_ROWS: dict[str, Callable[[Numbers, Numbers], bytes]] = {f.__name__: f for f in (q4_0, q4_1, q5_0, q5_1)}
"""By format: float32 weights of a block, and what errors of each count, to its bytes."""


def row_by_importance(name: str, x: Numbers, importance: Numbers) -> bytes:
    """A row's bytes: errors count by the mean square of all of it."""
    mean = total([v * v for v in x]) / F(len(x))
    w = [u * np.sqrt(mean + v * v) for u, v in zip(importance, x, strict=True)]
    return b"".join(OF_ROWS[name](*block) for block in zip(parts(x, 32), parts(w, 32), strict=True))
