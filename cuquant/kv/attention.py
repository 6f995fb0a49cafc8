"""Attention over a cache of buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import check, device, repeats
from ..debug import shown

if TYPE_CHECKING:
    from .cache import KVCache


_NUMBERS = (int, float, np.number)
"""Scales that stay as they are: a tensor of one number, as some libraries learn it, may change."""


class Attention(NamedTuple):
    """A checked problem: out = softmax(scale * q K^T + mask) V, over the tokens of a cache.

    q is (batch, q_len, heads, head_dim), mask None or (batch, heads, q_len, slots), bool or float, positions
    (batch, q_len), or None for the last of each sequence; they count if causal.
    """

    q: Any
    cache: KVCache
    scale: float
    mask: Any
    positions: Any
    causal: bool


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

    It runs where the cache is, and q, mask and out must be: on a GPU without synchronising, so that a graph
    may capture it after a first call. There codes are multiplied exactly: by queries as two float16 numbers
    each, those of 16 bits as one (exactly, but for key scales and rotation) or, up to four of a key head
    without a mask, as integers of 16 bits (rounded to 2^-15 of their largest channel, or less; docs/formats/
    kv.md); and by softmax's weights in float16, rounded once.

    Parameters
    ----------
    q : array (batch, q_len, heads, head_dim)
        float16, bfloat16 or float32; after RoPE, as the keys. heads is a multiple of the cache's n_kv_heads:
        heads h * g .. (h + 1) * g - 1 share key head h. q_len is 1 to 4096.
    cache : KVCache
        Its tokens include the queries' own, if they are to be seen.
    scale : float, optional
        1 / sqrt(head_dim) by default; 0, or a magnitude from 2^-126 to 2e38.
    mask : bool or float array that broadcasts to (batch, heads, q_len, slots), optional
        Its last axis is indexed by global slot and has at least `cache.slots` columns; slots beyond them, as
        a graph may append, are hidden. True: may be seen; floats are added to the scaled scores, -inf
        hides.
    causal : bool
        A query sees tokens at slots up to its own position.
    out : float array of q's shape, optional
        Written in place and returned; must not overlap q or the mask.
    positions : int array (batch, q_len), optional
        Of the queries. By default they are the last q_len of their sequence, which not all are where
        sequences were given fewer tokens (`lengths` of `append`); those before the first token see none.

    Returns
    -------
    array (batch, q_len, heads, head_dim) of out's dtype, else q's. A query that sees no token gives zeros;
    hidden tokens do not touch it, whatever they hold. One that sees a value with NaN or infinity, if only in
    one element, gives NaN in all elements.

    Raises
    ------
    TypeError, ValueError
        Before any work: dtypes, shapes or devices do not fit (the message says how). ValueError too where an
        append to the cache was refused since the last call.
    RuntimeError
        A CUDA graph is being captured, and memory would be taken: for a q whose last axis has gaps, or
        positions (batch, q_len) that are not contiguous int32 on the GPU.
    """
    known = None
    if mask is None and positions is None and (scale is None or isinstance(scale, _NUMBERS)):
        known = repeats.of_cache(cache)
    if known is not None:
        settings = cache.bits, cache.rotate, cache.track_attention, cache._appender.even
        # 1 equals True, but is not taken for it.
        words = type(scale), scale, type(causal), causal, *settings, cache._next_slots.data.device_id
        found = repeats.find(known, words, q, out=out)
        if found is not None:
            return cache._backend.attend_again(cache, *found, out)
    check.require_kv_cache(cache)
    q = check.in_cache(check.floats(q, "q"), "q", cache.device)
    check.require_queries(q.shape, (cache.batch, cache.n_kv_heads, cache.head_dim))
    scale = check.score_scale(scale, cache.head_dim)
    if mask is not None:
        cache._check_appended()  # slots of tokens that were refused need no columns
        mask = check.attention_mask(mask, q.shape, cache._known_slots, cache.device)
    positions = check.positions(positions, q.shape, cache.device)
    causal = check.flag(causal, "causal")
    on_gpu = cache.device == "cuda"
    if out is None:
        y = device.backend(on_gpu).empty(q.shape, q.dtype)
    else:
        y = check.in_cache(check.floats(out, "out"), "out", cache.device)
        check.require_output(y, q.shape, {"q": q, "mask": mask}, None, on_gpu)
    how = cache._backend.attend(Attention(q, cache, scale, mask, positions, causal), y)
    if how is not None and known is not None:
        repeats.remember(known, words, how, q, out=None if out is None else y, result=y)
    return y if out is None else out
