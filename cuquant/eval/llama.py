"""The Llama family's forward pass on quantized weights, built on `cuquant.linear`.

Weights stay as they are stored; everything else is float32, but that a GPU's products, and its attention,
multiply numbers in float16. A block is

    h = h + Wo · attention(rope(Wq · norm(h)), rope(Wk · norm(h)), Wv · norm(h))
    h = h + Wdown · (silu(Wgate · norm(h)) * (Wup · norm(h)))

with a mixture of such networks, `cuquant.moe`, in place of the second line where the model has experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import check, device
from ..array import QuantizedArray
from ..kv import KVCache, attention
from ..ops.matmul import linear
from ..ops.moe import Experts, moe, route
from ..ops.quantize import quantize
from ..render import counted, escaped
from . import passes
from .config import Config, UnsupportedModel
from .kv import HALVES, STEP, KVBits

Array = NDArray[np.float32]

_LARGEST_HALF = float(np.finfo(np.float16).max)
_LEAST_PEAK = 2.0**-8
"""The largest number of a layer's queries, at least, if they are to be float16, whose least is 2^-24."""
QUERY_BLOCK = 128
"""Queries of one attention product: keys after the block are never multiplied, about half of all."""


class Weight(NamedTuple):
    """A matrix that inputs are multiplied by, or a stack of them, by the name that the model has for it."""

    name: str
    matrix: Any
    bias: Any = None
    expert: int = 0
    """Which matrix of the stack, where that is one."""

    def of(self, expert: int) -> Weight:
        """One matrix of a stack."""
        return self._replace(matrix=self.matrix[expert], expert=expert)


Inputs = Callable[[Weight, Array], None]
"""What takes note of a matrix and of its inputs (..., K)."""


class Llama:
    """A model ready to run.

    Parameters
    ----------
    config : Config
    tensors : mapping of GGUF tensor name to array
        QuantizedArrays or float arrays. Every tensor must be one that the forward pass uses.
    activations : "f16" or "q8_1"
        "q8_1" quantizes the input of every product with a quantized weight, as integer kernels do.
    kv : KVBits, optional
        Attend to quantized keys and values, which are cached where the model is. By default they are float32;
        on a GPU float16, if caches take the model's heads and `inputs` is not given. Queries of caches on a
        GPU are float16, too. Both are so until one is beyond float16's range, a layer has small queries
        alone, or states are not finite.
    inputs : callable, optional
        Called with each `Weight` that is multiplied, of a stack with each expert's, and the rows that it is
        multiplied by: float32 (..., K).
    """

    def __init__(
        self,
        config: Config,
        tensors: Mapping[str, Any],
        activations: str = "f16",
        kv: KVBits | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.config, self.kv, self._inputs = config, kv, inputs
        if kv is not None:
            kv.cache(config, 1, STEP, device="cpu")  # what a cache refuses is told before any token is scored
        self.activations = activations
        self._tensors = tensors
        self._used: set[str] = set()
        d = config.d_model
        self._embedding = self._need("token_embd.weight", None, d)
        output = self._get("output.weight", self.vocab_size, d)
        tied = Weight("token_embd.weight", self._embedding)
        self.output = tied if output is None else Weight("output.weight", output)
        self._output_norm = self._need("output_norm.weight", d)
        # NumPy's functions reach CuPy's arrays too; new arrays come from the weights' own module.
        self._xp: Any = device.cupy() if device.is_cuda(self._output_norm) else np
        # (Whoever takes note of inputs wants to see them once.)
        if kv is None and inputs is None and self._xp is not np and _is_cached(config):
            self.kv = HALVES
        self._has_half_queries = self._xp is not np and self.kv is not None and inputs is None
        self._peaks: list[Any] = []
        self._query_peaks: list[Any] = []
        factors = self._get("rope_freqs.weight", len(config.rope_frequencies))
        self._frequencies = config.rope_frequencies / (1 if factors is None else _divisors(factors))
        self._turned: tuple[Array, Array] | None = None
        self._blocks = [_Block(self, f"blk.{i}.") for i in range(config.n_layers)]
        unused = sorted(set(tensors) - self._used)
        if unused:
            raise UnsupportedModel(
                f"{counted(len(unused), 'tensor')} without a place in a {config.architecture} forward pass: "
                f"{', '.join(map(escaped, unused[:5]))}{', ...' if len(unused) > 5 else ''}"
            )

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below it."""
        return int(self._embedding.shape[0])

    def hidden(self, tokens: NDArray[np.integer[Any]], first: int) -> Array:
        """Final normalised states of positions `first` and later.

        Parameters
        ----------
        tokens : int [B, T]
            B independent sequences that start at position 0.

        Returns
        -------
        float32 [B, T - first, d_model]
        """
        self._peaks, self._query_peaks = [], []
        turn = self._turn(tokens.shape[1])
        by_steps = self.kv is not None and self.kv.by_steps
        h = self._by_steps(tokens, turn)[:, first:] if by_steps else self._at_once(tokens, turn, first)
        if self._has_half_queries and not (self._fit_halves() and np.isfinite(h).all()):
            self._has_half_queries = False
            self.kv = None if self.kv is HALVES else self.kv
            return self.hidden(tokens, first)
        return h

    def queries(self, q: Array, k: Array, v: Array) -> Any:
        """A layer's queries as its cache's attention takes them. The greatest magnitude of what becomes
        float16 is noted: states may be finite though one is beyond, as an infinite key may hide its token."""
        if not self._has_half_queries:
            return q
        self._query_peaks.append(passes.greatest(q))
        if self.kv is HALVES:
            self._peaks += passes.greatest(k), passes.greatest(v)
        return q.astype(np.float16)

    def _fit_halves(self) -> bool:
        """Whether float16 holds what was noted: queries that are all 0, too."""
        peaks = device.as_numpy(self._xp.stack([*self._query_peaks, *self._peaks]))
        of_queries = peaks[: len(self._query_peaks)]
        small = (of_queries != 0) & (of_queries < _LEAST_PEAK)
        return bool((peaks <= _LARGEST_HALF).all() and not small.any())

    def _at_once(self, tokens: NDArray[np.integer[Any]], turn: tuple[Array, Array], first: int) -> Array:
        """Final states of positions `first` and later, all positions through a layer after the other."""
        h = self._embedded(tokens)
        for block in self._blocks[:-1]:
            h = block(h, turn, 0, self._cache(*tokens.shape))
        # Nothing after the last attention mixes positions: only the wanted ones go on.
        h = self._blocks[-1](h, turn, first, self._cache(*tokens.shape))
        return passes.norm(h, self._output_norm, self.config.rms_eps)

    def _cache(self, batch: int, length: int) -> KVCache | None:
        """An empty cache of a layer for sequences of so many tokens; None where attention takes float32 keys
        and values."""
        where = device.of(self._output_norm)
        return None if self.kv is None else self.kv.cache(self.config, batch, length, device=where)

    def _by_steps(self, tokens: NDArray[np.integer[Any]], turn: tuple[Array, Array]) -> Array:
        """Final states of all positions, a step of them after the other through all layers."""
        caches = [self._cache(*tokens.shape) for _ in self._blocks]
        states = []
        for start in range(0, tokens.shape[1], STEP):
            step = slice(start, start + STEP)
            h = self._embedded(tokens[:, step])
            for block, cache in zip(self._blocks, caches, strict=True):
                h = block(h, (turn[0][step], turn[1][step]), 0, cache)
            states.append(passes.norm(h, self._output_norm, self.config.rms_eps))
        return self._xp.concatenate(states, axis=1)

    def _embedded(self, tokens: NDArray[np.integer[Any]]) -> Array:
        rows = self._embedding[self._xp.asarray(tokens.reshape(-1))]
        return _to_float32(rows).reshape(*tokens.shape, -1)

    def logits(self, hidden: Array) -> Array:
        """Logits [n, vocab_size] of final states [n, d_model]."""
        return self.project(hidden, self.output)

    def put(self, array: NDArray[Any]) -> Any:
        """A NumPy array where the model computes."""
        return self._xp.asarray(array)

    @property
    def is_observed(self) -> bool:
        """Whether inputs of every product are to be told."""
        return self._inputs is not None

    def project(
        self, x: Array, weight: Weight, activation: str | None = None, residual: Array | None = None
    ) -> Array:
        """x (..., K) -> act(x @ W.T + bias) + residual (..., N), x quantized first where the model asks for
        it."""
        if self._inputs is not None:
            self._inputs(weight, x)
        w = weight.matrix
        quantizes = self.activations == "q8_1" and isinstance(w, QuantizedArray)
        x_format = "q8_1" if quantizes else None
        return linear(x, w, bias=weight.bias, activation=activation, residual=residual, x_format=x_format)

    def _turn(self, length: int) -> tuple[Array, Array]:
        """Scaled cosines and sines of the rotary angles, [T, rope_dim / 2] each. The last ones are kept: they
        take the host as long as a GPU takes for some layers."""
        if self._turned is None or len(self._turned[0]) != length:
            angles = np.outer(np.arange(length), self._frequencies)
            scale = self.config.rope_scale
            cos, sin = ((f(angles) * scale).astype(np.float32) for f in (np.cos, np.sin))
            self._turned = self._xp.asarray(cos), self._xp.asarray(sin)
        return self._turned

    def future(self, first: int, stop: int) -> Any:
        """Which keys come after which queries, of positions first..stop - 1: bool [queries, keys]."""
        positions = self._xp.arange(first, stop)
        return positions > positions[:, None]

    def _get(self, name: str, *shape: int | None) -> Any:
        """A tensor of that shape (None: any extent), noted as used, as `_computable` gives it; None where the
        model has none."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        fits = len(tensor.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            raise UnsupportedModel(f"tensor {name!r} has shape {tensor.shape}; {shape} is needed")
        self._used.add(name)
        return _computable(name, tensor)

    def _need(self, name: str, *shape: int | None) -> Any:
        tensor = self._get(name, *shape)
        if tensor is None:
            raise UnsupportedModel(f"the model has no tensor {name!r}")
        return tensor


class _Block:
    """One layer: attention, then a dense or expert feed-forward network."""

    def __init__(self, model: Llama, prefix: str) -> None:
        self._model, self._config = model, model.config
        c = self._config
        d, q_rows, kv_rows = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim

        def weight(name: str, *shape: int | None) -> Weight:
            name = f"{prefix}{name}.weight"
            return Weight(name, model._need(name, *shape))

        def biased(name: str, rows: int | None, columns: int | None) -> Weight:
            made = weight(name, rows, columns)
            return made._replace(bias=model._get(f"{prefix}{name}.bias", made.matrix.shape[0]))

        self._attn_norm, self._ffn_norm = weight("attn_norm", d).matrix, weight("ffn_norm", d).matrix
        self._q, self._k, self._v = (
            biased("attn_q", q_rows, d),
            biased("attn_k", kv_rows, d),
            biased("attn_v", kv_rows, d),
        )
        self._o = biased("attn_output", d, q_rows)
        norm = model._need if c.architecture in ("qwen3", "qwen3moe") else model._get
        self._q_norm = norm(f"{prefix}attn_q_norm.weight", c.head_dim)
        self._k_norm = norm(f"{prefix}attn_k_norm.weight", c.head_dim)
        if c.n_experts:
            self._router = weight("ffn_gate_inp", c.n_experts, d)
            gate = weight("ffn_gate_exps", c.n_experts, None, d)
            rows = gate.matrix.shape[1]
            up = weight("ffn_up_exps", c.n_experts, rows, d)
            self._ffn = [gate, up, weight("ffn_down_exps", c.n_experts, d, rows)]
        else:
            gate = biased("ffn_gate", None, d)
            rows = gate.matrix.shape[0]
            self._ffn = [gate, biased("ffn_up", rows, d), biased("ffn_down", d, rows)]

    def __call__(
        self, h: Array, turn: tuple[Array, Array], first: int, cache: KVCache | None = None
    ) -> Array:
        """States [B, T, d] -> states [B, T - first, d] of positions `first` and later.

        Attention is over a cache, if there is one, which may have tokens before these: then `turn` begins at
        their position, and `first` is 0.
        """
        x = passes.norm(h, self._attn_norm, self._config.rms_eps)
        h = h[:, first:]
        h = self._attention(x, turn, h) if cache is None else self._cached(x, turn, h, cache)
        x = passes.norm(h, self._ffn_norm, self._config.rms_eps)
        if not self._config.n_experts:
            gate, up, down = self._ffn
            return self._swiglu(x, gate, up, down, residual=h)
        return h + self._experts(x.reshape(-1, x.shape[-1])).reshape(h.shape)

    def _attention(self, x: Array, turn: tuple[Array, Array], h: Array) -> Array:
        """Causal grouped-query attention of the last queries, as many as states h, to which it is added."""
        c = self._config
        first = x.shape[1] - h.shape[1]
        q, k, v = (heads.swapaxes(1, 2) for heads in self._projected(x, turn, first))
        batch, _, queries, _ = q.shape
        # Query heads that share a key head are neighbours, and multiplied by it as one: [B, kv head, query of
        # its group, T, head_dim].
        q = q.reshape(batch, c.n_kv_heads, -1, queries, c.head_dim) * np.float32(c.head_dim**-0.5)
        out = np.empty_like(q)
        for start in range(0, queries, QUERY_BLOCK):
            block = slice(start, min(start + QUERY_BLOCK, queries))
            seen = first + block.stop
            own = q[:, :, :, block]
            scores = own.reshape(batch, c.n_kv_heads, -1, c.head_dim) @ k[:, :, :seen].swapaxes(-1, -2)
            common = first + block.start  # keys before these all queries see
            future = self._model.future(common, seen) * np.float32(1e30)
            scores.reshape(*own.shape[:-1], seen)[..., common:] -= future
            sums = passes.exponentials(scores)
            out[:, :, :, block] = (scores @ v[:, :, :seen] / sums).reshape(own.shape)
        merged = out.reshape(batch, c.n_heads, queries, c.head_dim).swapaxes(1, 2)
        return self._model.project(merged.reshape(batch, queries, -1), self._o, residual=h)

    def _cached(self, x: Array, turn: tuple[Array, Array], h: Array, cache: KVCache) -> Array:
        """Attention of the last queries, as many as states h, to which it is added, over a cache that takes
        all keys and values: some queries at a time, when the cache has the tokens up to them."""
        kv, first = self._model.kv, x.shape[1] - h.shape[1]
        assert kv is not None
        q, k, v = self._projected(x, turn, first)
        out, appended = np.empty_like(q), 0
        q = self._model.queries(q, k, v)
        step = min(check.MOST_QUERIES, cache._backend.queries_at_once(cache, q))
        for start in range(0, q.shape[1], step):
            some = slice(start, min(start + step, q.shape[1]))
            new = slice(appended, first + some.stop)
            kv.append(cache, k[:, new], v[:, new])
            attention(q[:, some], cache, out=out[:, some])
            appended = new.stop
        return self._model.project(out.reshape(*h.shape[:2], -1), self._o, residual=h)

    def _projected(self, x: Array, turn: tuple[Array, Array], first: int) -> tuple[Array, Array, Array]:
        """Queries from position `first` on, and all keys and values: [B, T, heads, head_dim] each."""
        c = self._config
        q = self._heads(x[:, first:], self._q, self._q_norm, c.n_heads, turn, first)
        k = self._heads(x, self._k, self._k_norm, c.n_kv_heads, turn, 0)
        return q, k, self._heads(x, self._v, None, c.n_kv_heads, None, 0)

    def _heads(
        self,
        x: Array,
        weight: Weight,
        norm: Any,
        heads: int,
        turn: tuple[Array, Array] | None,
        first: int,
    ) -> Array:
        """Project to heads [B, T, heads, head_dim], normalised and rotated where asked."""
        y = self._model.project(x, weight).reshape(*x.shape[:2], heads, -1)
        if norm is not None:
            y = passes.norm(y, norm, self._config.rms_eps)
        if turn is None:
            return y
        cos, sin = (each[first:, None] for each in turn)
        return passes.rotated(y, cos, sin, self._config.rope_interleaved)

    def _swiglu(
        self, x: Array, gate: Weight, up: Weight, down: Weight, residual: Array | None = None
    ) -> Array:
        project = self._model.project
        if device.is_cuda(x):
            inner = passes.gated(project(x, gate), project(x, up))
        else:
            inner = project(x, gate, activation="silu") * project(x, up)
        return project(inner, down, residual=residual)

    def _experts(self, x: Array) -> Array:
        """Outputs of each token's top experts, weighted by renormalised router probabilities: [n, d]."""
        ids, probs = route(self._model.project(x, self._router), self._config.n_experts_used)
        experts = Experts(*(stack.matrix for stack in self._ffn))
        quantized = [isinstance(stack, QuantizedArray) for stack in experts]
        if not self._model.is_observed:
            if self._model.activations == "f16" or not any(quantized):
                return moe(x, experts, ids, probs)
            if all(quantized):
                return moe(quantize(x, "q8_1"), experts, ids, probs)
        # moe takes one x for all stacks, quantizes what down multiplies only where x is quantized, and tells
        # nobody what that is.
        out = np.zeros_like(x)
        chosen = device.as_numpy(ids)  # once: how many tokens an expert has decides shapes
        for expert in range(self._config.n_experts):
            token, slot = map(self._model.put, (chosen == expert).nonzero())
            if len(token):
                gate, up, down = (stack.of(expert) for stack in self._ffn)
                out[token] += self._swiglu(x[token], gate, up, down) * probs[token, slot, None]
        return out


def _is_cached(config: Config) -> bool:
    """Whether caches take this model's heads."""
    try:
        HALVES.cache(config, 1, 1, device="cpu")
    except ValueError:
        return False
    return True


def _computable(name: str, tensor: Any) -> Any:
    """A tensor as norms and products take it: of vectors, and of float64, float32 numbers."""
    if isinstance(tensor, QuantizedArray):
        if tensor.format.for_activations:
            raise UnsupportedModel(f"tensor {name!r} is in {tensor.format}, a format of activations")
        return tensor.dequantize() if tensor.ndim == 1 else tensor
    if tensor.dtype in check.FLOATS:
        return tensor
    if tensor.dtype.kind != "f":
        raise UnsupportedModel(f"tensor {name!r} holds {tensor.dtype} numbers; floats are needed")
    with np.errstate(over="ignore"):  # which an evaluation finds
        return tensor.astype(np.float32)


def _divisors(factors: Any) -> NDArray[np.float32]:
    """Factors of the rotary frequencies, on the host."""
    made: NDArray[np.float32] = device.as_numpy(factors).astype(np.float32)
    bad = made[~np.isfinite(made) | (made == 0)]
    if bad.size:
        raise UnsupportedModel(f"'rope_freqs.weight' has the factor {bad[0]}; they are finite, and not 0")
    return made


def _to_float32(rows: Any) -> Array:
    return rows.dequantize() if isinstance(rows, QuantizedArray) else rows.astype(np.float32)
