"""Quantizing a model file: which tensors, and the new file."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..formats import Format
from ..ops.quantize import blocks_of_each, quantize, tensor_name
from ..render import counted, escaped
from . import imatrix, mixture, safetensors
from .gguf import PLAIN_TYPES, TensorInfo
from .mixture import FormatLike, Mixture, Recipe
from .model import Model, opened, warn_of_fallback
from .rewrite import Changed, new_file, scales_of, write_gguf, write_safetensors
from .words import named_like

FLOAT_TYPES = ("F32", "F16", "BF16")
_STAYS_FLOAT = (
    "*_norm.weight",
    "*altup*",
    "*attn_rel_b.weight",
    "*ffn_gate_inp*.weight",
    "*laurel*",
    "*per_layer_model_proj*",
    "*position_embd.weight",
    "*ssm_conv1d.weight",
    "*time_mix_[wva][012].weight",
    "*time_mix_g[12].weight",
    "*time_mix_decay_w[12].weight",
    "*time_mix_first.weight",
    "*time_mix_lerp_fused.weight",
    "*token_types.weight",
)
"""Small or sensitive matrices that llama.cpp keeps in float too (tensor_allows_quantization in its
src/llama-quant.cpp): norms, routers, position tables, and the small matrices of other architectures."""


def is_weight_matrix(info: TensorInfo) -> bool:
    """Whether quantizing a model quantizes this tensor: a weight matrix, or a stack of experts'.

    One row is a vector to llama.cpp, which drops trailing axes of 1 (ggml_n_dims), and stays float.
    """
    return (
        info.name.endswith(".weight")
        and len(info.shape) in (2, 3)
        and math.prod(info.shape[:-1]) > 1
        and not any(fnmatchcase(info.name, pattern) for pattern in _STAYS_FLOAT)
    )


@dataclass(frozen=True, repr=False)
class Selection:
    """What happens to each tensor of a model: quantized to a format, or copied as it is."""

    format: Format | Mixture | Recipe
    """What was asked for."""
    label: str
    """What to call the result: a recipe's formats that were used, those of most weights first."""
    formats: Mapping[str, Format]
    """Format of each tensor that is quantized, by its name."""
    kept: frozenset[str]
    """Names of tensors that are copied as they are."""
    ragged: frozenset[str]
    """Names of tensors of `kept` that stay float only because K is not a multiple of the block size."""
    unmatched: frozenset[str]
    """Weight matrices of `kept` that no pattern of a mapping matches."""
    replaced: frozenset[str]
    """Names of tensors of `formats` that have another format because K is not a multiple of the block
    size."""
    source_bytes: int
    """Size of the model's file, or of all parts of a split one."""
    left_out: frozenset[str] = frozenset()
    """Scales that the formats of kept tensors have in them now: in safetensors files."""
    by_importance: frozenset[str] = frozenset()
    """Names of tensors of `formats` that are quantized by the importance of their columns."""

    def __repr__(self) -> str:
        made = f"{counted(len(self.formats), 'tensor')} quantized"
        return f"Selection({self.label}: {made}, {len(self.kept)} as they are)"

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the tensors that are quantized."""
        return frozenset(self.formats)


def select(
    model: Model, format: FormatLike, keep: str | Iterable[str] = (), by_importance: bool = False
) -> Selection:
    """Decide which tensors of a float model are quantized, and to what.

    Parameters
    ----------
    model : Model
        A model of F32, F16 or BF16 weights.
    format : str, Format, or mapping of str to either
        "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl" and
        "iq4_xs" are llama-quantize's mixtures of formats. Any other name, and a Format object, is a weight
        format: that of every matrix. Rows that are no multiple of 256 have formats of blocks of 32 then,
        those that llama-quantize takes. A mapping has shell patterns (``*``, ``?``, ``[...]``) of tensor
        names, and the weight format of each, of which the first that matches counts; matrices that none
        matches are copied: ``{"*.ffn_down.*": "q6_k", "*": "q4_k"}``.
    keep : str, or several
        Shell patterns of tensor names to copy unchanged.
    by_importance : bool
        Whether there is an importance matrix, with which some mixtures have other formats.

    Raises
    ------
    ValueError
        The format is one of activations; a pattern matches no tensor, or decides nothing: it matches only
        tensors that are never quantized, or those that patterns before it take ("*" at the end may); a matrix
        is quantized already, and quantizing twice adds both errors, or holds float64 or integers; or nothing
        is left to quantize.
    """
    wanted_format = mixture.get(format)
    rules = dict(wanted_format.rules) if isinstance(wanted_format, Recipe) else {}
    for fmt in [wanted_format, *rules.values()]:
        if isinstance(fmt, Format) and fmt.for_activations:
            raise ValueError(f"{fmt} is a format of activations, not of weights")
        if isinstance(fmt, Format):
            check.require_quantized_to(fmt)
    kept = copied(model, keep)
    named_like(model, rules, f"tensor of {model.path.name}", "format")
    matrices = [info for info in model.tensors.values() if is_weight_matrix(info)]
    _check_rules(model, rules, [info.name for info in matrices])
    if isinstance(wanted_format, Format):
        asked = {info.name: wanted_format for info in matrices}
    else:
        asked = wanted_format.formats_of(matrices, model, model.metadata, by_importance)
    wanted = [info for info in matrices if info.name in asked and info.name not in kept]
    already = [info for info in wanted if info.ggml_type not in PLAIN_TYPES]
    if already:
        raise ValueError(
            f"{model.path.name} is quantized already: {_listed(already)}; "
            "quantize from a float16, bfloat16 or float32 file"
        )
    others = [info for info in wanted if info.type_name not in FLOAT_TYPES]
    if others:
        raise ValueError(
            f"{model.path.name}: only float16, bfloat16 and float32 can be quantized, not {_listed(others)}; "
            "convert them first, or copy them with keep (--keep)"
        )
    given = {info.name: mixture.fallback(asked[info.name], info.shape[-1]) for info in wanted}
    made = {name: fmt for name, fmt in given.items() if fmt is not None}
    if not made:
        left = " that is not to be kept" if any(name in kept for name in asked) else ""
        raise ValueError(f"{model.path.name} has no weight matrix to quantize to {wanted_format}{left}")
    return Selection(
        wanted_format,
        _label(model, made) if rules else str(wanted_format),
        made,
        kept=frozenset(model.tensors) - made.keys(),
        ragged=frozenset(given) - made.keys(),
        unmatched=frozenset(info.name for info in matrices) - asked.keys() - kept,
        replaced=frozenset(name for name, fmt in made.items() if fmt != asked[name]),
        source_bytes=sum(status.st_size for _, status in model._stamps),
    )


def _check_rules(model: Model, rules: Iterable[str], matrices: Collection[str]) -> None:
    """ValueError for a pattern that decides no matrix's format, but for one of all matrices: a default, which
    may have nothing left to take."""
    takers: dict[str, str] = {}
    for pattern in rules:
        matched = [name for name in matrices if fnmatchcase(name, pattern)]
        if not matched and pattern != "*":
            like = next(name for name in model if fnmatchcase(name, pattern))
            raise ValueError(
                f"the pattern {pattern!r} (format) matches only tensors that are never quantized, as {like!r}"
            )
        if takers.keys() >= set(matched) and len(matched) < len(matrices):
            earlier = list(dict.fromkeys(takers[name] for name in matched))
            # First, it would leave each of those something.
            apart = all(any(takers[n] == one and n not in matched for n in takers) for one in earlier)
            raise ValueError(
                f"the pattern {pattern!r} (format) decides nothing in {model.path.name}: the first that "
                f"matches counts, and all its tensors match {' or '.join(map(repr, earlier))}; "
                + (f"put {pattern!r} first" if apart else "leave out one of them")
            )
        takers = dict.fromkeys(matched, pattern) | takers


def _label(model: Model, made: Mapping[str, Format]) -> str:
    """Formats of these tensors, in words."""
    weights: Counter[str] = Counter()
    for name, fmt in made.items():
        weights[str(fmt)] += math.prod(model.tensors[name].shape)
    return mixture.listed(weights)


def copied(model: Model, keep: str | Iterable[str]) -> set[str]:
    """Names of the tensors that match these patterns; ValueError where one matches none."""
    return set(named_like(model, keep, f"tensor of {model.path.name}", "keep"))


def _listed(infos: Sequence[TensorInfo]) -> str:
    """The first of these tensors, with their types."""
    shown = ", ".join(f"{escaped(info.name)} ({info.type_name})" for info in infos[:3])
    return f"{shown}, ..." if len(infos) > 3 else shown


def quantize_file(
    source: str | os.PathLike[str] | Model,
    target: str | os.PathLike[str],
    format: FormatLike,
    *,
    keep: str | Iterable[str] = (),
    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    force: bool = False,
    device: str | None = None,
    progress: bool = False,
) -> Selection:
    """Quantize a model into a new file: GGUF that llama.cpp loads, or safetensors.

    Tensors are read, quantized and written one at a time, under a temporary name beside `target` that takes
    its place only when complete. Metadata is copied; a general.architecture that is missing, which GGUF
    demands, is written as "unknown". A split model becomes one file. A safetensors file can be opened,
    evaluated and dequantized as a GGUF file can, or read by `cuquant.load`; of types without a format here it
    has float16 numbers, and of nvfp4 the tensor's scale in its format, not beside it.

    Parameters
    ----------
    source : path or Model
    target : path
        Of a GGUF file, *.gguf, or a safetensors file, *.safetensors.
    format : str, Format, or mapping of str to either
        A weight format, one with a GGUF type for a GGUF file; one of llama.cpp's mixtures ("q2_k", "q3_k_s",
        "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"); or formats by
        shell patterns of tensor names, of which the first that matches counts, as in
        ``{"*.ffn_down.*": "q6_k", "*": "q4_k"}``. Matrices that no pattern matches are copied.
    keep : str, or several
        Shell patterns of tensor names to copy unchanged.
    importance : path, or mapping of str to array of numbers, optional
        An importance matrix that `measure_importance` or llama.cpp's llama-imatrix wrote, or what
        `measure_importance` and `read_imatrix` return: by names of tensors the mean square of each column's
        inputs, (K,), or of a stack of experts (E, K), or the same flat. Tensors that get a k-quant, q4_0,
        q4_1, q5_0, q5_1, an IQ4 or a trellis format are quantized by theirs, as
        ``quantize(w, format, importance)`` does: of a stack each expert by its own row, with a trellis grid
        for all that is fitted by the mean of the rows, each in units of its greatest number. A row of zeros
        counts as one of ones. Tensors without an entry, as the embedding and mostly the output are, and all
        other formats, are quantized without. Mixtures are llama-quantize's with an importance matrix: iq4_nl
        and iq4_xs give no layer's ffn_down more bits. The new file's metadata say what is known of the
        matrix: quantize.imatrix.file, .dataset, .entries_count and .chunks_count.
    force : bool
        Replace an existing `target`.
    device : "cpu" or "cuda", optional
        Where to quantize, with the same bytes; by default on the GPU where one can be used.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    Selection
        What was quantized and what was kept.

    Raises
    ------
    FileExistsError
        `target` exists and `force` is false; so too where it has appeared meanwhile.
    GGUFError, TypeError, ValueError
        See `cuquant.open`; the target's name has another ending; a matrix is quantized already; a pattern
        matches no tensor, or decides nothing, as all that it matches is taken before it, or never quantized;
        the format has no GGUF type; a tensor cannot be quantized (its name and row are in the message).
        See `read_imatrix`; importance does not fit a tensor that is quantized by it, holds numbers that are
        negative or not finite, or names no tensor of the model.

    Warns
    -----
    FallbackWarning
        Tensors of types without a format here go into a safetensors file, as float16 numbers.
    """
    if isinstance(importance, Model):
        raise TypeError(f"importance is an open model, {imatrix.NOT_ONE}")
    with opened(source, device) as model:
        matrix = None if importance is None else imatrix.given(importance)
        # Before the target: where it is swapped with the format, this error says so.
        todo = select(model, format, keep, matrix is not None)
        rows = {} if matrix is None else _rows(model, todo.formats, matrix.entries)
        todo = replace(todo, by_importance=frozenset(rows))
        added = None if matrix is None else matrix.metadata
        target = check.model_target(target)
        if isinstance(importance, (str, os.PathLike)):
            check.require_another_file(target, importance, "importance matrix")
        to_gguf = target.suffix.lower() != ".safetensors"
        if not to_gguf:
            warn_of_fallback(model)
            left_out = frozenset(scales_of(model, model))
            todo = replace(todo, kept=todo.kept - left_out, left_out=left_out)
        for fmt in todo.formats.values() if to_gguf else ():
            check.require_gguf_type(fmt)
        formats, file_type = todo.formats.items(), todo.format.file_type
        with new_file(model, target, force) as temporary:
            if to_gguf:
                changed = {name: _changed(model, name, fmt, rows.get(name)) for name, fmt in formats}
                write_gguf(temporary, model, changed, file_type, progress, added=added)
            else:
                made = {name: _fitted(model, name, fmt, rows.get(name)) for name, fmt in formats}
                write_safetensors(temporary, model, made, file_type, progress, todo.left_out, added)
    return todo


_Rows = NDArray[np.float32] | None
"""Importance of the columns of a tensor's matrices, [E, K]; None where it is quantized without."""


def _rows(
    model: Model, formats: Mapping[str, Format], entries: Mapping[str, Any]
) -> dict[str, NDArray[np.float32]]:
    """The importance of each tensor that is quantized by it, checked."""
    check.require_some_importance(entries, model, model.path.name)
    return {
        name: check.importance_of_weight(entries[name], name, model.tensors[name].shape)
        for name, fmt in formats.items()
        if name in entries and (fmt.takes_importance or fmt.takes_moments)
    }


def _fitted(model: Model, name: str, fmt: Format, rows: _Rows) -> safetensors.Tensor:
    """A tensor in that format, with parameters that fit it."""
    shape = model.tensors[name].shape
    fmt = fmt.for_row(shape[-1])
    with told_of(name):
        if rows is None:
            fitted = fmt.fitted(model[name])
        else:
            each = rows / rows.max(axis=1, keepdims=True)  # so that all matrices count the same
            fitted = fmt.fitted(model[name], rows[0] if len(rows) == 1 else each.mean(axis=0))
    return safetensors.quantized(fitted, shape, lambda: _quantized(model, name, fitted, rows))


def _changed(model: Model, name: str, fmt: Format, rows: _Rows) -> Changed:
    """A tensor in that format, which has a GGUF type."""
    assert fmt.ggml_type is not None
    *lead, k = model.tensors[name].shape
    nbytes = math.prod(lead) * fmt.row_bytes(k)
    return Changed(fmt.ggml_type, nbytes, lambda: _quantized(model, name, fmt, rows))


def _quantized(model: Model, name: str, fmt: Format, rows: _Rows) -> Any:
    """Storage bytes of a tensor in that format."""
    with told_of(name):
        w = model[name]
        if rows is None:
            return quantize(w, fmt).blocks
        if w.ndim == 2:
            return quantize(w, fmt, rows[0]).blocks
        return model.xp.stack(blocks_of_each(w, fmt, rows))


@contextmanager
def told_of(name: str) -> Iterator[None]:
    """Errors and warnings of what is quantized inside say which tensor it is."""
    before = tensor_name.set(name)
    try:
        yield
    except ValueError as error:
        raise ValueError(f"tensor {name!r}: {error}") from None
    finally:
        tensor_name.reset(before)
