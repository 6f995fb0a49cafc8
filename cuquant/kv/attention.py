"""Attention over a cache of buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import check
from ..debug import shown
from . import cpu

if TYPE_CHECKING:
    from .cache import KVCache


class Attention(NamedTuple):
    """A checked problem: out = softmax(scale * q K^T + mask) V, over the tokens of a cache.

    q is (batch, q_len, heads, head_dim), mask None or (batch, heads, q_len, slots), bool or float, positions
    int64 (batch, q_len), or None where every token is seen.
    """

    q: Any
    cache: KVCache
    scale: float
    mask: Any
    positions: Any


@shown
def attention(
    q: Any,
    cache: KVCache,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = True,
    out: Any = None,
    *,
    positions: Any = None,
) -> Any:
    """softmax(scale * q K^T + mask) V over the tokens of a cache, accumulated in float32 and rounded once.

    Parameters
    ----------
    q : array (batch, q_len, heads, head_dim)
        float16, bfloat16 or float32; after RoPE, as the keys. heads is a multiple of the cache's n_kv_heads:
        heads h * g .. (h + 1) * g - 1 share key head h. q_len is 1 to 64.
    cache : KVCache
        Its tokens include the queries' own, if they are to be seen.
    scale : float, optional
        1 / sqrt(head_dim) by default.
    mask : bool or float array that broadcasts to (batch, heads, q_len, slots), optional
        Its last axis is indexed by global slot and has at least `cache.slots` columns. True: may be seen;
        floats are added to the scaled scores, -inf hides.
    causal : bool
        A query sees tokens at slots up to its own position.
    out : float array of q's shape, optional
        Written in place and returned; must not overlap q or the mask.
    positions : int array (batch, q_len), optional
        Of the queries. By default they are the last q_len of their sequence.

    Returns
    -------
    array (batch, q_len, heads, head_dim) of out's dtype, else q's. A query that sees no token gives zeros;
    hidden tokens do not touch it, whatever they hold.

    Raises
    ------
    TypeError, ValueError
        Before any work: dtypes, shapes or devices do not fit (the message says how).
    """
    check.kv_cache(cache)
    q = check.on_cpu(check.floats(q, "q"), "q")
    check.queries(q.shape, (cache.batch, cache.n_kv_heads, cache.head_dim))
    scale = check.score_scale(scale, cache.head_dim)
    mask = check.attention_mask(mask, q.shape, cache.slots)
    positions = check.positions(positions, q.shape)
    if positions is None:
        positions = cache.next_slots[:, None].astype(np.int64) + np.arange(-q.shape[1], 0)
    y = np.empty(q.shape, q.dtype) if out is None else check.on_cpu(check.floats(out, "out"), "out")
    check.output(y, q.shape, {"q": q, "mask": mask}, None, False)
    cpu.attend(Attention(q, cache, scale, mask, positions if causal else None), y)
    return y if out is None else out
