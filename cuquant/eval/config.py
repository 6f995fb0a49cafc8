"""Hyperparameters of the Llama family, read from GGUF metadata; what is not understood is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..render import told

ARCHITECTURES = {"llama": True, "mistral": True, "qwen2": False, "qwen3": False, "qwen3moe": False}
"""Known architectures, and whether their rotary embedding turns interleaved pairs (x[2i], x[2i+1])
rather than halves (x[i], x[i + d/2])."""

_CHANGES_THE_MODEL = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_group_count",
    "expert_shared_count",
    "expert_weights_scale",
    "final_logit_softcapping",
    "interleave_moe_layer_step",
    "logit_scale",
    "residual_scale",
    "use_parallel_residual",
)
"""Keys that change the computation and are not implemented here."""


_WIDEST_HEAD = 1 << 16
"""Channels of a head, far above real ones: rotary frequencies are made before tensors are looked at."""


class UnsupportedModel(ValueError):
    """The model needs something that this forward pass does not compute."""


@dataclass(frozen=True, eq=False)
class Config:
    """Shape of a model. `rope_frequencies` are radians per position [rope_dim / 2]; `rope_scale` multiplies
    the rotated vectors (YaRN's attention factor)."""

    architecture: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ctx: int
    window: int | None
    rms_eps: float
    n_experts: int
    n_experts_used: int
    rope_interleaved: bool
    rope_frequencies: NDArray[np.float64]
    rope_scale: float


def read(metadata: Mapping[str, Any]) -> Config:
    """The configuration in a file's metadata; UnsupportedModel names what is missing or not understood."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {told(arch)} is not supported; known are {', '.join(ARCHITECTURES)}"
        )
    odd = [key for key in _CHANGES_THE_MODEL if not _is_zero(metadata.get(f"{arch}.{key}"))]
    if metadata.get(f"{arch}.attention.causal", True) is not True:
        odd.append("attention.causal")
    if odd:
        raise UnsupportedModel(f"this {arch} model uses {', '.join(odd)}, which is not implemented")
    keys = _Keys(metadata, arch)
    n_layers = keys.integer("block_count")
    n_heads = keys.integer("attention.head_count", of_layers=n_layers)
    d_model = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", d_model // n_heads)
    if head_dim > _WIDEST_HEAD:
        raise UnsupportedModel(f"{arch} heads of {head_dim} channels; at most {_WIDEST_HEAD} are implemented")
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{arch}.attention.value_length differs from the key length {head_dim}")
    n_kv_heads = keys.integer("attention.head_count_kv", n_heads, of_layers=n_layers)
    if n_heads % n_kv_heads:
        raise UnsupportedModel(f"{n_heads} query heads cannot share {n_kv_heads} key heads evenly")
    n_experts = keys.integer("expert_count", 0)
    n_experts_used = keys.integer("expert_used_count", 0 if n_experts == 0 else None)
    if n_experts_used > n_experts:
        raise UnsupportedModel(
            f"{arch}.expert_used_count is {n_experts_used}, but there are {n_experts} experts"
        )
    with np.errstate(all="ignore"):
        frequencies, scale = _rope(keys, head_dim)
    if not (np.isfinite(frequencies).all() and np.isfinite(scale)):
        raise UnsupportedModel(f"{arch}.rope.scaling makes rotary embeddings that are not finite")
    return Config(
        architecture=arch,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_ctx=keys.integer("context_length"),
        window=keys.integer("attention.sliding_window", 0) or None,
        rms_eps=keys.not_negative("attention.layer_norm_rms_epsilon"),
        n_experts=n_experts,
        n_experts_used=n_experts_used,
        rope_interleaved=ARCHITECTURES[arch],
        rope_frequencies=frequencies,
        rope_scale=scale,
    )


def _is_zero(value: Any) -> bool:
    """Whether a key is absent, or a number or flag that switches its feature off."""
    return value is None or (isinstance(value, (bool, int, float)) and not value)


def _of_all(value: Any, layers: int) -> Any:
    """The integer of an array that has it for each layer; other values as they are."""
    numbers = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.shape == (layers,)
    return int(value[0]) if numbers and (value == value[0]).all() else value


class _Keys:
    """The architecture's own metadata keys, by type."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self._metadata, self._arch = metadata, arch

    def _get(
        self,
        key: str,
        default: Any,
        kind: type | tuple[type, ...],
        what: str,
        of_layers: int | None = None,
    ) -> Any:
        value = self._metadata.get(f"{self._arch}.{key}", default)
        if of_layers is not None:
            value = _of_all(value, of_layers)
        if value is None:
            raise UnsupportedModel(f"the metadata has no {self._arch}.{key}")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UnsupportedModel(f"{self._arch}.{key} is {told(value)}; {what} is needed")
        return value

    def integer(self, key: str, default: int | None = None, *, of_layers: int | None = None) -> int:
        """A positive integer, or 0 where that is the default; of so many layers also one for each, if it is
        the same for all."""
        value = int(self._get(key, default, int, "an integer", of_layers))
        if value < 0 or (value == 0 and default != 0):
            raise UnsupportedModel(f"{self._arch}.{key} is {value}; a positive integer is needed")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = -np.inf) -> float:
        value = float(self._get(key, default, (int, float), "a number"))
        if not above < value < np.inf:
            least = f" above {above:g}" if above > -np.inf else ""
            raise UnsupportedModel(f"{self._arch}.{key} is {value}; a finite number{least} is needed")
        return value

    def not_negative(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value < 0:
            raise UnsupportedModel(f"{self._arch}.{key} is {value}; it cannot be negative")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self._get(key, default, str, "a string"))


def _rope(keys: _Keys, head_dim: int) -> tuple[NDArray[np.float64], float]:
    """Rotary frequencies and scale: base^(-2i/d), changed as rope.scaling.type says.

    "linear" (the default) divides positions by the factor; "yarn" (Peng et al. 2023, arXiv:2309.00071) does
    so only for slow frequencies, with a ramp between 32 and 1 turns over the original context, and scales
    the vectors.
    """
    dim = keys.integer("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise UnsupportedModel(f"rope.dimension_count {dim} does not fit heads of {head_dim}")
    base = keys.number("rope.freq_base", 10000.0, above=1)
    frequencies = base ** (-np.arange(0, dim, 2) / dim)
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"rope.scaling.type {told(kind)} is not supported; known are none, linear, yarn"
        )
    _check_yarn(keys, kind)
    factor = keys.not_negative("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    attn_factor = keys.number("rope.scaling.attn_factor", 1.0)
    if kind == "none" or factor == 1:
        return frequencies, attn_factor
    if kind == "linear":
        return frequencies / factor, attn_factor
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    low, high = (
        dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base))
        for turns in (
            keys.number("rope.scaling.yarn_beta_fast", 32.0, above=0),
            keys.number("rope.scaling.yarn_beta_slow", 1.0, above=0),
        )
    )
    low, high = max(0.0, np.floor(low)), min(dim - 1.0, np.ceil(high))
    slow = np.clip((np.arange(dim // 2) - low) / max(0.001, high - low), 0, 1)
    blended = frequencies / factor * slow + frequencies * (1 - slow)
    return blended, attn_factor * (1 + 0.1 * float(np.log(max(factor, 1.0))))


def _check_yarn(keys: _Keys, kind: str) -> None:
    """UnsupportedModel for a key by which llama.cpp would compute something else. It takes a negative
    ext_factor for none."""
    neutral = {"ext_factor": float(kind == "yarn"), "attn_factor": 1.0, "log_multiplier": 0.0}
    for name, value in neutral.items():
        given = keys.number(f"rope.scaling.yarn_{name}", value)
        if given != value and not (name == "ext_factor" and given < 0):
            raise UnsupportedModel(f"rope.scaling.yarn_{name} is {given:g}; only {value:g} is implemented")
