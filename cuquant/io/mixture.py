"""Files of several formats: llama.cpp's mixtures, and recipes of one's own.

Which tensor of a file like "q4_k_m" gets which format is a rule of llama-quantize (llama_tensor_get_type_impl
and tensor_type_fallback in its src/llama-quant.cpp): more bits where errors cost more. With an importance
matrix (has_imatrix there) only ffn_down of iq4_nl and iq4_xs differs, of the kinds of files that are made
here.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np

from .. import check, formats
from ..formats import Format
from ..formats.base import UnknownFormatError
from .gguf import TensorInfo

_FALLBACK = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
}
"""Formats that rows get that are no multiple of 256, by the format that was meant for them."""
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_V_LIKE = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")
_CATEGORIES = (
    *_V_LIKE,
    "attn_k.weight",
    "attn_q.weight",
    "attn_output.weight",
    "ffn_up",
    "ffn_gate",
    "ffn_down",
)
"""Parts of names; the first that occurs counts."""
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Mixture:
    """A kind of file: a format of most matrices, and others for some."""

    name: str
    base: Format
    file_type: int
    """Number in GGUF's `general.file_type`."""

    def __str__(self) -> str:
        return self.name

    def formats_of(
        self,
        matrices: Iterable[TensorInfo],
        names: Iterable[str],
        metadata: Mapping[str, Any],
        by_importance: bool = False,
    ) -> dict[str, Format]:
        """The format of each weight matrix of a model, by name, before `fallback`.

        Parameters
        ----------
        matrices : the tensors to quantize
        names : the names of all tensors of the model
        metadata : the model's
        by_importance : whether there is an importance matrix
        """
        model = _Model.read(metadata, names, by_importance)
        seen = {"v": 0, "ffn_down": 0}
        return {info.name: formats.get(self._name(info, model, seen)) for info in _in_order(matrices)}

    def _name(self, info: TensorInfo, model: _Model, seen: dict[str, int]) -> str:
        """The name of a tensor's format; `seen` counts what came before."""
        base, falcon = self.base.name, model.architecture == "falcon"
        if info.name == "output.weight" or (info.name in _EMBEDDINGS and model.tied):
            return "q8_0" if falcon or info.shape[-1] % self.base.block_size else "q6_k"
        category = "" if info.name in _EMBEDDINGS else next((c for c in _CATEGORIES if c in info.name), "")
        if category in _V_LIKE:
            seen["v"] += 1
            return self._of_v(seen["v"] - 1, model)
        if category == "attn_k.weight" and model.experts == 8:
            return "q8_0"
        if category == "attn_output.weight":
            return self._of_attention_output(model)
        if category == "ffn_down":
            seen["ffn_down"] += 1
            layer = _layer(info.name) if model.experts > 1 else seen["ffn_down"] - 1
            return self._of_ffn_down(layer, model)
        return base

    def _of_v(self, index: int, model: _Model) -> str:
        name = self.base.name
        if self.name == "q2_k":
            name = "q4_k" if model.queries_per_key >= 4 else "q3_k"
        elif self.name == "q3_k_m":
            name = "q5_k" if index < 2 else "q4_k"
        elif self.name == "q3_k_l" or (self.name.startswith("iq4") and model.queries_per_key >= 4):
            name = "q5_k"
        elif self.name in ("q4_k_m", "q5_k_m") and _more_bits(index, model.v_tensors):
            name = "q6_k"
        elif self.name == "q4_k_s" and index < 4:
            name = "q5_k"
        if model.is_70b and name in ("q3_k", "q4_k"):
            name = "q5_k"
        return "q8_0" if model.experts == 8 else name

    def _of_attention_output(self, model: _Model) -> str:
        if model.architecture == "falcon":
            return "q4_k" if self.name == "q3_k_l" else self.base.name
        if model.experts == 8:
            return self.base.name if self.name in ("q3_k_l", "q5_k_s", "q5_k_m", "q6_k") else "q5_k"
        return {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(self.name, self.base.name)

    def _of_ffn_down(self, layer: int, model: _Model) -> str:
        falcon, layers = model.architecture == "falcon", model.layers
        first, more = layer < layers // 8, _more_bits(layer, layers)
        if self.name == "q2_k":
            return "q3_k"
        if self.name == "q3_k_m":
            return "q5_k" if layer < layers // 16 else "q4_k" if not falcon or more else "q3_k"
        if self.name == "q3_k_l":
            return "q4_k" if falcon else "q5_k"
        if self.name == "q4_k_m" and falcon:
            return "q6_k" if layer < layers // 16 else "q5_k" if more else "q4_k"
        if self.name in ("q4_k_m", "q5_k_m") and more:
            return "q6_k"
        iq4 = self.name.startswith("iq4") and not model.by_importance
        if first and (iq4 or (self.name == "q4_k_s" and not falcon)):
            return "q5_k"
        return self.base.name


@dataclass(frozen=True)
class Recipe:
    """Formats by patterns of tensor names: that of the first which a name matches; the others stay float."""

    rules: tuple[tuple[str, Format], ...]
    file_type: ClassVar[None] = None
    """A file without `general.file_type` is known by its tensors."""

    def __str__(self) -> str:
        return "+".join(dict.fromkeys(str(fmt) for _, fmt in self.rules))

    def formats_of(
        self,
        matrices: Iterable[TensorInfo],
        names: Iterable[str],
        metadata: Mapping[str, Any],
        by_importance: bool = False,
    ) -> dict[str, Format]:
        """The format of each weight matrix that a pattern matches, by name."""
        matched = (
            (info.name, next((fmt for pattern, fmt in self.rules if fnmatchcase(info.name, pattern)), None))
            for info in matrices
        )
        return {name: fmt for name, fmt in matched if fmt is not None}


@dataclass(frozen=True)
class _Model:
    """What the rules ask of a model."""

    architecture: str
    layers: int
    experts: int
    queries_per_key: int
    is_70b: bool
    tied: bool
    """Whether the embedding is the output matrix too."""
    v_tensors: int
    by_importance: bool

    @classmethod
    def read(cls, metadata: Mapping[str, Any], names: Iterable[str], by_importance: bool) -> _Model:
        names = list(names)
        architecture = str(metadata.get("general.architecture", ""))

        def number(key: str, default: int) -> int:
            value = metadata.get(f"{architecture}.{key}")
            if isinstance(value, np.ndarray) and value.size:  # one for each block
                value = value.flat[0]
            return int(value) if isinstance(value, (int, np.integer)) else default

        layers, heads = number("block_count", 0), number("attention.head_count", 1)
        key_heads = number("attention.head_count_kv", heads)
        return cls(
            architecture,
            layers,
            number("expert_count", 0),
            heads // key_heads if key_heads else 0,
            layers == 80 and (architecture == "qwen2" or (architecture == "llama" and heads != key_heads)),
            "output.weight" not in names,
            sum(any(part in name for part in _V_LIKE) for name in names),
            by_importance,
        )


_MIXTURES = {
    name: Mixture(name, formats.get(base), file_type)
    for name, base, file_type in (
        ("q2_k", "q2_k", 10),
        ("q3_k_s", "q3_k", 11),
        ("q3_k_m", "q3_k", 12),
        ("q3_k_l", "q3_k", 13),
        ("q4_k_s", "q4_k", 14),
        ("q4_k_m", "q4_k", 15),
        ("q5_k_s", "q5_k", 16),
        ("q5_k_m", "q5_k", 17),
        ("q6_k", "q6_k", 18),
        ("iq4_nl", "iq4_nl", 25),
        ("iq4_xs", "iq4_xs", 30),
    )
}


def names() -> tuple[str, ...]:
    """Names of all kinds of files: mixtures, and formats of weights."""
    return tuple(sorted({*_MIXTURES, *weight_formats()}))


def weight_formats() -> list[str]:
    """Names of what a pattern of a recipe takes."""
    return [name for name in formats.names() if not formats.get(name).for_activations]


FormatLike = str | Format | Mapping[str, str | Format]
"""What people give: the name of a mixture or a format, a format, or the rules of a recipe."""


def get(name: FormatLike) -> Format | Mixture | Recipe:
    """The mixture of that name (any case), a recipe of these rules, or the format.

    `formats.get`'s errors, but of a name that is neither: ValueError lists the mixtures too, and of a float
    type says how it is had.
    """
    if isinstance(name, (list, tuple)):
        raise TypeError(
            f"format is {check.a_or_an(name)}; one format is needed, or a mapping of patterns of tensor "
            'names to formats: {"*ffn_down*": "q6_k", "*": "q4_k"}'
        )
    refuse_floats(name.values() if isinstance(name, Mapping) else [name])
    if isinstance(name, Mapping):
        if not name:
            raise ValueError("format is an empty mapping; patterns of tensor names and formats are needed")
        return Recipe(tuple((str(pattern), _of_rule(str(pattern), fmt)) for pattern, fmt in name.items()))
    if isinstance(name, str) and name.lower() in _MIXTURES:
        return _MIXTURES[name.lower()]
    if isinstance(name, os.PathLike) or _is_file_name(name):
        hint = (
            "; it looks like the name of a file (quantize_file takes source, target and format in this order)"
        )
        raise UnknownFormatError(str(name), names(), hint)
    try:
        return formats.get(name)
    except ValueError:
        raise UnknownFormatError(str(name), names()) from None


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and (
        name.lower().endswith((".gguf", ".safetensors")) or os.path.basename(name) != name
    )


def _of_rule(pattern: str, name: str | Format) -> Format:
    """A weight format of a recipe."""
    try:
        return formats.get(name)
    except ValueError:
        mixture = _MIXTURES.get(str(name).lower())
    if mixture is not None:
        raise ValueError(
            f"{name!r} is a mixture of formats for a whole file, to be given alone; the pattern {pattern!r} "
            f"takes one format, as {mixture.base}"
        )
    raise UnknownFormatError(str(name), weight_formats())


_KEPT = (
    "tensors that keep names, or no pattern of a mapping matches, are copied as they are; dequantize_file "
    "makes a file of floats; an evaluation has the original's row first"
)


def refuse_floats(names: Iterable[Any], instead: str = _KEPT) -> None:
    """ValueError for a name of floats, to which nothing is quantized; `instead` is what there is for them."""
    for name in names:
        if isinstance(name, str) and name.lower() in check.NAMED_FLOATS:
            raise ValueError(f"{name!r} is no format to quantize to: {instead}")


def listed(weights: Counter[str]) -> str:
    """Formats, those of most weights first: "q4_k+q6_k"."""
    return "+".join(name for name, _ in weights.most_common())


def of_file(base: str, file_type: Any) -> str | None:
    """The name of the mixture, or else of the format, whose files have most weights in this format and this
    `general.file_type`, if any."""
    every = map(formats.get, (*formats.names(), *formats.names_of_read_only()))
    plain = (fmt for fmt in every if fmt.file_type is not None)
    known = {(fmt.name, fmt.file_type): fmt.name for fmt in plain}
    known |= {(m.base.name, m.file_type): m.name for m in _MIXTURES.values()}
    return known.get((base, file_type))


def pure(name: str) -> Format:
    """The format of that name, or that of most matrices of the mixture."""
    kind = _MIXTURES.get(name.lower())
    return formats.get(name) if kind is None else kind.base


def fallback(fmt: Format, k: int) -> Format | None:
    """The format of rows of k weights that are to have that format; None where they stay float."""
    if k % fmt.block_size and fmt.name in _FALLBACK:
        fmt = formats.get(_FALLBACK[fmt.name])
    return None if k % fmt.block_size else fmt


def _in_order(matrices: Iterable[TensorInfo]) -> list[TensorInfo]:
    """Matrices as llama-quantize counts them: by block, then by name."""
    return sorted(matrices, key=lambda info: (_layer(info.name), info.name))


def _layer(name: str) -> int:
    """The number of a tensor's block; -1 outside of blocks."""
    match = _BLOCK.match(name)
    return -1 if match is None else int(match[1])


def _more_bits(index: int, count: int) -> bool:
    """Whether a layer is among the first or last eighth, or each third of those between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
