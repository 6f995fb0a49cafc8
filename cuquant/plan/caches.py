"""Launches of what changes a cache, and bytes of its arrays."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import ceil, gcd

from ..kv.codes import BITS
from .attention import MANY_HEADS, Shape, attention, importance
from .launch import LARGE_GPU, WARP, Kernel, Plan

ONE_TOKEN_WARPS, APPENDING_WARPS, APPENDING_BLOCKS, MOST_CLUSTERED = 16, 4, 8, 8
"""Most warps of a block that appends one token; warps of each that share more, about, and most such blocks of
a multiprocessor, which has room for them; most blocks of a cluster. With 32 key heads of 128 a cluster takes
an H200 2.8 us, a block 3.9, with 8 key heads 2.7 and 2.5."""
LEAST_LANES = 4
"""Minimum lanes per vector; a rotation needs 4."""
MOVING_BLOCKS = 1 << 12
"""Most blocks of a launch that moves tokens, which they take in turn: more than a GPU runs at once."""


@lru_cache(maxsize=1024)
def append(
    batch: int, n: int, kv_heads: int, head_dim: int, capability: int, multiprocessors: int
) -> tuple[Plan, int]:
    """Blocks that share a token's vectors, and the tokens of a sequence; and lanes that have a vector.

    A lane has eight numbers. Those of a warp are of one token, as its width is theirs. One token alone has a
    block or, if that would be a large one, from sm_90 on a cluster, which need not be counted either.
    """
    lanes = max(LEAST_LANES, 1 << (ceil(head_dim / 8) - 1).bit_length())
    lanes = max(lanes, WARP // gcd(WARP, 2 * kv_heads))
    needed = 2 * kv_heads * lanes // WARP  # warps of a token
    blocks, tokens, cluster = 1, 1, 1
    if n > 1:
        warps = _appending_warps(needed)
        blocks = ceil(needed / warps)
        at_once = max(1, warps // needed)
        most = max(1, multiprocessors * APPENDING_BLOCKS // (batch * blocks))
        tokens = min(most, ceil(n / at_once))
    else:
        if batch == 1 and capability >= 90 and ONE_TOKEN_WARPS <= needed <= MOST_CLUSTERED * ONE_TOKEN_WARPS:
            blocks = cluster = min(MOST_CLUSTERED, ceil(needed / APPENDING_WARPS))
        else:
            blocks = ceil(needed / ONE_TOKEN_WARPS)
        warps = ceil(needed / blocks)
    return Plan(Kernel("append", "append"), (blocks, batch, tokens), warps * WARP, 0, cluster, True), lanes


def _appending_warps(needed: int) -> int:
    """Warps of a block that has several tokens, each of which needs so many warps: whole tokens, or a part of
    one that leaves few warps without work."""
    if needed <= APPENDING_WARPS:
        return APPENDING_WARPS // needed * needed
    return min(range(APPENDING_WARPS, 2 * APPENDING_WARPS), key=lambda n: (ceil(needed / n) * n, n))


@lru_cache(maxsize=64)
def move(moves: int, kv_heads: int) -> Plan:
    """Plan moves: a block for each move or several, a warp for a vector: of powers of two few launches are
    prepared."""
    blocks = min(MOVING_BLOCKS, 1 << max(0, moves - 1).bit_length())
    return Plan(Kernel("move", "move"), (blocks, 1, 1), min(16, 2 * kv_heads) * WARP)


def bucket_bytes(bits: int, tokens: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Bytes of each array that `struct Tier` has for so many tokens (kernels/attention/cache.cuh), in its
    order."""
    rows = tokens * kv_heads
    codes, scales, number = rows * head_dim * bits // 8, rows * 2 * (bits < 16), tokens * 4
    return (codes, codes, scales, scales, number, number, number)


def all_kernels(capability: int, head_dims: tuple[int, ...] = (64, 96, 128, 256, 40)) -> list[Kernel]:
    """Kernels of what a cache does, for tests that compile them: attention of every kind, over all widths,
    and over one, of 16 bits or, with heads of 128, any, of one sequence and of several."""
    found = {append(1, 1, 1, 64, 90, 1)[0].kernel, move(1, 1).kernel}
    found |= {importance(1, dim, rows, 1).kernel for dim, rows in product(head_dims, (4, 8))}
    few, many = ((1, 0), (1, 1), (7, 1)), tuple(product((8, 64), (0, 1, 2)))
    for dim, (q_len, masked), halves in product(head_dims, few + many, (1, 2)):
        found.add(attention(Shape(1, q_len, 8, 2, dim, BITS, masked, halves), capability, 1).attention.kernel)
    alone = [(dim, 16) for dim in head_dims if dim < 128] + [(128, bits) for bits in BITS]
    for batch, (dim, bits), (q_len, masked) in product((1, 8), alone, many):
        shape = Shape(batch, q_len, 8, 2, dim, (bits,), masked, 1)
        found.add(attention(shape, capability, 1).attention.kernel)
    for batch, widths, group in product((1, 8), [(bits,) for bits in BITS] + [(8, 4, 2), BITS], (4, 8)):
        shape = Shape(batch, 1, 8 * group, 8, 128, widths, False, 1)
        found.add(attention(shape, capability, 1).attention.kernel)
    many_shares = attention(Shape(1, 1, 32, 8, 128, (2,), False, 1), capability, LARGE_GPU)
    found.add(many_shares.attention.kernel)
    for widths in ((4,), (8,), (8, 4)):
        heads = MANY_HEADS
        found.add(attention(Shape(1, 1, heads, heads, 128, widths, False, 1), capability, 1).attention.kernel)
    return sorted(found, key=repr)
