"""Models to be scored: a file's own tensors, and these in other formats."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from .. import check, cpu, device as device_info
from ..array import QuantizedArray
from ..formats import get as get_format
from ..io import convert, mixture
from ..io.gguf import PLAIN_TYPES
from ..io.mixture import FormatLike
from ..io.model import Model
from ..io.rewrite import scales_of
from ..ops.quantize import quantize
from .kv import KVBits
from .scores import TensorError, tensor_error


class Contender:
    """A model to be scored: its tensors in memory, under a label, and how it caches keys and values."""

    def __init__(self, model: Model, label: str, tensors: dict[str, Any], kv: KVBits | None = None) -> None:
        self.model, self.label, self.tensors, self.kv = model, label, tensors, kv

    @classmethod
    def of(cls, model: Model) -> Contender:
        """The model as its file has it."""
        return cls(model, _own_type(model), _weights(model))

    def cached(self, caches: Iterable[KVBits]) -> list[Contender]:
        """The model with keys and values cached at each of these widths."""
        return [Contender(self.model, self.label, self.tensors, kv) for kv in caches]

    @property
    def bits_per_weight(self) -> float:
        """Bits of all tensors as stored, scales included, over all weights."""
        infos = self.model.tensors
        stored = [
            t.nbytes if isinstance(t, QuantizedArray) else infos[name].nbytes
            for name, t in self.tensors.items()
        ]
        stored += [infos[scale].nbytes for scale in scales_of(self.model, self.tensors)]
        return 8 * sum(stored) / sum(t.size for t in self.tensors.values())

    @property
    def has_quantized_products(self) -> bool:
        """Whether some product has a quantized weight."""
        return any(
            isinstance(tensor, QuantizedArray) and tensor.ndim > 1 and not _is_looked_up(name, self.tensors)
            for name, tensor in self.tensors.items()
        )

    def check_scores(self, finite: bool, what: str = "scores", advice: str = "") -> None:
        """ValueError where its scores, or other numbers that it makes, are not finite; `advice` is what to do
        where its weights are."""
        kv = "" if self.kv is None else f", keys and values in {self.kv.text}"
        of = f"{self.model.path} ({self.label}{kv}) has {what}"
        check.require_finite_scores(finite, of, self._first_flaw, advice)

    def _first_flaw(self) -> str | None:
        """The first tensor that holds NaN or infinity, if there is one."""
        return next((name for name, tensor in self.tensors.items() if not _is_finite(tensor)), None)

    def errors(self, original: Contender) -> list[TensorError]:
        """Errors of the quantized tensors against the original's of the same name and shape.

        None with a quantized cache: they are those of the model without.
        """
        if original is self or self.kv is not None:
            return []
        return [
            tensor_error(name, original.tensors[name], tensor)
            for name, tensor in self.tensors.items()
            if isinstance(tensor, QuantizedArray)
            and getattr(original.tensors.get(name), "shape", None) == tensor.shape
        ]


def _is_finite(tensor: Any) -> bool:
    if isinstance(tensor, QuantizedArray):
        return not len(cpu.rows_not_finite(tensor.to_device("cpu")))
    return bool(np.isfinite(device_info.as_numpy(tensor)).all())


def _weights(model: Model) -> dict[str, Any]:
    """A model's tensors but scales, which others have in their formats or numbers."""
    scales = scales_of(model, model)
    return {name: model[name] for name in model if name not in scales}


def requantized(original: Contender, formats: Sequence[FormatLike], activations: str) -> list[Contender]:
    """The model in each of these formats."""
    source, result = original.model, []
    selections = [convert.select(source, name) for name in formats]
    if activations == "q8_1":
        for chosen in selections:
            _check_blocks(source, chosen)
    labels = _numbered([chosen.label for chosen in selections])
    for chosen, label in zip(selections, labels, strict=True):
        if chosen.ragged:
            ragged = ", ".join(sorted(chosen.ragged))
            warnings.warn(f"{label}: kept in float, as K is ragged: {ragged}", stacklevel=3)
        made = dict(original.tensors)
        for name, fmt in chosen.formats.items():
            with convert.told_of(name):
                made[name] = quantize(made[name], fmt)
        result.append(Contender(source, label, made))
    return result


def _numbered(labels: Sequence[str]) -> list[str]:
    """Labels that differ: "q4_k+q6_k", "q4_k+q6_k (2)"."""
    counts = [labels[: i + 1].count(label) for i, label in enumerate(labels)]
    return [f"{label} ({n})" if n > 1 else label for label, n in zip(labels, counts, strict=True)]


def _check_blocks(source: Model, chosen: convert.Selection) -> None:
    """The inputs of all products with weights that will be quantized are whole blocks of q8_1."""
    for name, fmt in chosen.formats.items():
        if _is_looked_up(name, source):
            continue
        try:
            check.whole_blocks(source.tensors[name].shape, get_format("q8_1"))
        except ValueError as error:
            raise ValueError(f"tensor {name!r} in {fmt} has no q8_1 activations: {error}") from None


def _is_looked_up(name: str, names: Container[str]) -> bool:
    """Whether a tensor of a model of these is in no product: an embedding that is not the output too."""
    return name == "token_embd.weight" and "output.weight" in names


def _own_type(model: Model) -> str:
    """The mixture that a file says it is, or else the types of its quantized weights, or of most floats, in
    lower case."""
    if not model.tensors:
        raise ValueError(f"{model.path} has no tensors")
    plain: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for info in model.tensors.values():
        weights = plain if info.ggml_type in PLAIN_TYPES else blocks
        weights[info.type_name.lower()] += int(np.prod(info.shape, dtype=object))
    if not blocks:
        return plain.most_common(1)[0][0]
    ((most, _),) = blocks.most_common(1)
    named = mixture.of_file(most, model.metadata.get("general.file_type")) if len(blocks) > 1 else None
    return named or mixture.listed(blocks)
