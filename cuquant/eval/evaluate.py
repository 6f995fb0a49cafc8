"""Evaluating a model: the same text through the original and its quantizations, side by side."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check, device as device_info
from ..formats import Format
from ..io import mixture
from ..io.header import same_value
from ..io.mixture import FormatLike
from ..io.model import Model, open as open_model, opened, warn_of_fallback
from ..render import counted, progress_bar
from . import config
from .contenders import Contender, requantized
from .kv import distinct_widths
from .llama import Inputs, Llama
from .report import Evaluation, Row
from .scores import Tokens, log_softmax
from .tokenizer import DECISIVE, Tokenizer

BATCH_TOKENS = 4096
"""Tokens that pass through a model together."""
LOGIT_BLOCK = 1 << 24
"""Logits held at a time for one model: 64 MB of float32."""
STDIN = "standard input"
"""Name of a text that comes from standard input."""


def evaluate(
    model: str | os.PathLike[str] | Model,
    *,
    text: str | os.PathLike[str] | None = None,
    tokens: Any = None,
    base: str | os.PathLike[str] | Model | None = None,
    formats: FormatLike | Iterable[FormatLike] = (),
    ctx: int = 512,
    chunks: int | None = None,
    activations: str = "f16",
    kv_bits: str | int | Iterable[str | int] = (),
    device: str | None = None,
    progress: bool = False,
) -> Evaluation:
    """Perplexity, divergence from the original, and tensor errors of a Llama-architecture model.

    The tokens are cut into chunks of `ctx`, each an independent context; only the second half of a chunk is
    scored (for 512: positions 256..510 predict tokens 257..511), as llama-perplexity does. Where the
    vocabulary asks for a BOS token, it replaces the first token of every chunk of a text.

    Parameters
    ----------
    model : path or Model
        What `cuquant.open` opens: a GGUF file, or a safetensors file with a model's metadata.
    text : str or path-like
        A str is the text itself, a path object a UTF-8 file (whose byte order mark is left out). Tokenized
        with the model's vocabulary.
    tokens : int array [n]
        Token ids, in place of a text.
    base : path or Model, optional
        The model to compare with, usually the float original. Vocabularies must be the same, and a text the
        same ids to both. It is read on the device of the other.
    formats : weight formats, or names of them or of llama.cpp's mixtures ("q4_k_m"), optional
        Requantize every weight matrix of a float model to each in turn, once, and compare with the original.
        A mapping gives formats by patterns of names (see `quantize_file`); its row is called after those that
        were used, and a second row of a name is "q4_k+q6_k (2)".
    ctx, chunks : int
        Tokens of a chunk, at least 4; how many chunks to use (by default all whole ones).
    activations : "f16" or "q8_1"
        "q8_1" quantizes the input of every product with a quantized weight to 8 bits, as integer kernels
        do; "f16" stands for activations that are not quantized (on NumPy they are float32).
    kv_bits : text, int, or several, optional
        Evaluate each model (except `base`) once more for each of these, with the keys and values of attention
        quantized: "8", "4", "3" or "2" bits, "16" for float16, or widths by age as "8:64,4:256,2": the newest
        64 tokens at 8 bits, the 256 before at 4, the rest at 2. "+scales" and "+rotate" at the end turn on
        KVCache's automatic key scales and its rotation. A chunk's own keys and values are read back from the
        cache, too. Where widths go by age, or scales are automatic, tokens go through in steps of 16. (On a
        GPU keys and values are float16 without `kv_bits`, too, so that "16" changes nothing, and queries are;
        but float32 where float16 does not hold them, or no cache takes the model's heads.)
    device : "cpu" or "cuda", optional
        Where to compute; by default on the device of a Model that is open, and else on the GPU where one can
        be used. Tensors of a Model on another device are read once more from its files.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    Evaluation
        One row per model; the original first where there is something to compare.

    Raises
    ------
    UnsupportedModel
        The architecture, or something in it, is not implemented (named), or a tensor or key is missing.
    TypeError
        An argument is of another type: `model` or `base` are no models, `text` is no text or path, `tokens`
        no vector of integers, `formats` and `kv_bits` are not what is named above.
    ValueError
        Both or none of `text` and `tokens` are given, or `base` and `formats`; a format, width, device or
        kind of activations is not known, nothing quantizes to it, or it does not fit the model; numbers are
        out of range; the text is shorter than a chunk, no UTF-8, or the vocabulary cannot tokenize it; token
        ids are beyond the vocabulary; models have other vocabularies, or a text is other ids to them; a
        weight that is to be quantized is NaN or infinite, or a score is (the first tensor with such weights
        is named); a Model is closed, or its file was changed since it was opened.
    OSError, GGUFError
        A file cannot be read, or is damaged (see `cuquant.open`).
    RuntimeError
        `device` is "cuda", and there is no GPU (the message says why).

    Warns
    -----
    UserWarning
        `ctx` is longer than the contexts that the model was trained on; tensors are kept in float, as their K
        is no multiple of a format's blocks; or as `cuquant.open` and `cuquant.quantize` warn.
    """
    ctx, chunks = check.chunking(ctx, chunks)
    if activations not in ("f16", "q8_1"):
        raise ValueError(f"unknown activations {activations!r}; allowed are 'f16' and 'q8_1'")
    formats = distinct(formats)
    if formats and base is not None:
        raise ValueError("formats compares with the model itself: give base or formats, not both")
    caches, given = distinct_widths(kv_bits), text_or_tokens(text, tokens)
    source = on_device(model, device)
    ids, bos, label = token_ids(source, given)
    pieces = cut(ids, bos, ctx, chunks)
    files = [source] if base is None else [on_device(base, source.device), source]
    warn_of_context(ctx, files)
    contenders = [Contender.of(file) for file in files]
    contenders += contenders[-1].cached(caches)
    models = [runnable(c, ctx, activations) for c in contenders]
    check_ids(pieces, models, contenders)
    if isinstance(given, Text):
        _check_tokens(files, given, pieces)
    for made in requantized(contenders[0], formats, activations):
        contenders += [made, *made.cached(caches)]
    models += [runnable(c, ctx, activations) for c in contenders[len(models) :]]
    with np.errstate(all="ignore"):  # what is not finite is said with a name
        scores = _score(models, contenders, pieces, progress=progress)
        summaries = [score.summary() for score in scores]
    for contender, summary in zip(contenders, summaries, strict=True):
        contender.check_scores(all(number is None or isfinite(number) for number in summary.values()))
    for file in files:
        file._as_opened()  # also by now: weights were read meanwhile
    original = contenders[0]
    rows = [
        Row(
            c.label,
            **summary,  # type: ignore[arg-type]
            bits_per_weight=c.bits_per_weight,
            tensors=c.errors(original),
            kv_bits=None if c.kv is None else c.kv.text,
            activations=activations if c.has_quantized_products else "f16",
        )
        for c, summary in zip(contenders, summaries, strict=True)
    ]
    scored = len(pieces) * len(range(*_scored(ctx).indices(ctx - 1)))
    backend = device_info.name(source.device)
    origin = None if base is None else str(contenders[0].model.path)
    facts = str(source.path), label, ctx, len(pieces), scored, backend
    return Evaluation(*facts, rows, origin, activations)


def distinct(formats: FormatLike | Iterable[FormatLike]) -> list[FormatLike]:
    """The formats that are asked for, each once."""
    one = isinstance(formats, (str, Format, Mapping, type))
    given: list[Any] = [formats] if one else check.several_formats(formats)
    kinds = [mixture.get(each) for each in given]
    return [each for i, each in enumerate(given) if kinds[i] not in kinds[:i]]


class Text(str):
    """A text, and what to call it."""

    label: str

    def __new__(cls, text: str, label: str) -> Text:
        made = super().__new__(cls, text)
        made.label = label
        return made


def text_or_tokens(text: Any, tokens: Any) -> Text | NDArray[np.integer[Any]]:
    """What is evaluated: a text, read once (its file may be a pipe), or token ids [n].

    TypeError or ValueError where there are both or none, or what is given is none of these.
    """
    if (text is None) == (tokens is None):
        raise ValueError("give either text or tokens")
    if tokens is not None:
        return check.token_vector(tokens)
    if isinstance(text, Text):
        return text
    if isinstance(text, os.PathLike):
        path = Path(text)
        return Text(decoded(path.read_bytes(), str(path)), str(path))
    if not isinstance(text, str):
        raise TypeError(f"text is {check.a_or_an(text)}; a str (the text) or a path (its file) is needed")
    named = len(text) < 256 and "\n" not in text
    if named and (os.path.isfile(text) or (" " not in text and text.endswith((".txt", ".raw", ".md")))):
        raise ValueError(f"text is a str, and so the text itself: for the file pass pathlib.Path({text!r})")
    return Text(check.text(text), f"text of {len(text)} characters")


def on_device(model: str | os.PathLike[str] | Model, device: str | None) -> Model:
    """A model on that device, by default its own: one that is open there is itself."""
    if not isinstance(model, Model):
        return open_model(model, device)
    wanted = model.device if device is None else check.device_name(device)
    if wanted == model.device:
        return model._as_opened()
    other = opened(model, wanted)
    warn_of_fallback(other)
    return other


def runnable(contender: Contender, ctx: int, activations: str = "f16", inputs: Inputs | None = None) -> Llama:
    """A model that takes chunks of that length; UnsupportedModel where it cannot."""
    with _told_of(contender.model):
        settings = config.read(contender.model.metadata)
        if settings.window is not None and ctx > settings.window:
            raise config.UnsupportedModel(
                f"attention in this model slides over {settings.window} tokens, which is not implemented: "
                f"use a ctx of at most that, not {ctx}"
            )
        return Llama(settings, contender.tensors, activations, contender.kv, inputs)


def warn_of_context(ctx: int, models: Iterable[Model]) -> None:
    """Warn the caller's caller where chunks are longer than the contexts that a model was trained on."""
    trained = min(map(_trained, models))
    if ctx > trained:
        warnings.warn(f"ctx {ctx} is longer than the {trained} tokens the model was trained on", stacklevel=3)


def _trained(model: Model) -> int:
    """Tokens of the longest context that it was trained on."""
    with _told_of(model):
        return config.read(model.metadata).n_ctx


@contextmanager
def _told_of(model: Model) -> Iterator[None]:
    """What is not implemented in a model is said with its file."""
    try:
        yield
    except config.UnsupportedModel as error:
        raise config.UnsupportedModel(f"{model.path}: {error}") from None


def token_ids(
    source: Model, given: Text | NDArray[np.integer[Any]]
) -> tuple[NDArray[np.integer[Any]], int | None, str]:
    """Token ids [n], the BOS id that starts every chunk or None, and what to call the text."""
    if isinstance(given, np.ndarray):
        return given, None, "token ids"
    words = Tokenizer.from_metadata(source)
    return words.encode(given), words.bos_id if words.add_bos else None, given.label


def decoded(raw: bytes, name: str) -> str:
    """The text of a file's bytes, with line ends as they are; ValueError with its name where it is none."""
    try:
        return raw.decode("utf-8-sig")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from None


def cut(
    ids: NDArray[np.integer[Any]], bos: int | None, ctx: int, chunks: int | None
) -> NDArray[np.integer[Any]]:
    """Chunks [n, ctx] of the tokens, of which there must be one."""
    pieces = _chunks(ids, bos, ctx, chunks)
    if len(pieces) == 0:
        there = counted(len(ids) + (bos is not None), "token")
        raise ValueError(f"the text has {there}; at least one chunk of {ctx} tokens is needed")
    return pieces


def _chunks(
    ids: NDArray[np.integer[Any]], bos: int | None, ctx: int, chunks: int | None
) -> NDArray[np.integer[Any]]:
    """Chunks [n, ctx] of the tokens, none if tokens are too few; a partial last one is dropped."""
    if bos is not None:
        ids = np.concatenate([[bos], ids])
    count = min(len(ids) // ctx, chunks or len(ids))
    pieces = ids[: count * ctx].reshape(count, ctx).copy()
    if bos is not None:
        pieces[:, 0] = bos
    return pieces


def check_ids(pieces: NDArray[np.integer[Any]], models: list[Llama], contenders: list[Contender]) -> None:
    """ValueError for token ids that a vocabulary lacks, or vocabularies of other sizes."""
    for model, contender in zip(models, contenders, strict=True):
        low, high = int(np.min(pieces)), int(np.max(pieces))
        if low < 0 or high >= model.vocab_size:
            raise ValueError(
                f"token ids run from {low} to {high}, but the vocabulary of {contender.model.path.name} "
                f"has {model.vocab_size}"
            )
    if len({m.vocab_size for m in models}) > 1:
        raise ValueError(f"the models' vocabularies differ in size: {[m.vocab_size for m in models]}")


def _check_tokens(files: Sequence[Model], text: Text, pieces: NDArray[np.integer[Any]]) -> None:
    """Ids of a text mean the same to all models that say what their tokens are, and the text is the same ids
    to those that also say how it becomes ids. `pieces` are those of the last one."""
    own, key = files[-1], "tokenizer.ggml.tokens"
    for file in files[:-1]:
        if not same_value(file.metadata.get(key, own.metadata[key]), own.metadata[key]):
            differing = f"has another vocabulary ({key}) than {own.path.name}"
        elif keys := _tokenizes_otherwise(file, own, text, pieces):
            differing = f"tokenizes the text otherwise than {own.path.name} ({', '.join(keys)})"
        else:
            continue
        raise ValueError(f"{file.path.name} {differing}: a text is not the same ids to both")


def _tokenizes_otherwise(file: Model, own: Model, text: Text, pieces: NDArray[np.integer[Any]]) -> list[str]:
    """The keys that may be why a model reads other chunks in a text; empty if it reads the same ones, or does
    not say how a text becomes ids."""
    if not {"tokenizer.ggml.tokens", "tokenizer.ggml.model"} <= file.metadata.keys():
        return []
    keys = [key for key in DECISIVE if not same_value(file.metadata.get(key), own.metadata.get(key))]
    if not keys:
        return []
    try:
        ids, bos, _ = token_ids(file, text)
    except ValueError:  # its tokenizer is unknown here, or lacks a part
        return []
    count, ctx = pieces.shape
    return [] if np.array_equal(_chunks(ids, bos, ctx, count), pieces) else keys


def _scored(ctx: int) -> slice:
    """Positions of a chunk whose successors are scored: the second half, the last excepted."""
    return slice(ctx // 2, ctx - 1)


def _score(
    models: list[Llama], contenders: list[Contender], pieces: NDArray[np.integer[Any]], progress: bool
) -> list[Tokens]:
    """Statistics of every model over all chunks; of several the first is the base of the others.

    ValueError as soon as one is not finite.
    """
    scores = [Tokens() for _ in models]
    where = _scored(pieces.shape[1])
    with progress_bar(progress, "chunk", total=len(pieces) * len(models)) as bar:
        for batch in batches(pieces):
            target = batch[:, where.start + 1 : where.stop + 1].reshape(-1)
            states = []
            for model in models:
                hidden = model.hidden(batch, where.start)[:, : where.stop - where.start]
                states.append(hidden.reshape(-1, hidden.shape[-1]))
                bar.update(len(batch))
            for part in _blocks(len(target), models[0].vocab_size):
                base = None
                for model, contender, state, score in zip(models, contenders, states, scores, strict=True):
                    logp = log_softmax(model.logits(state[part]))
                    base = logp if base is None and len(models) > 1 else base
                    score.add(logp, model.put(target[part]), base)
                    contender.check_scores(score.finite)
    return scores


def batches(pieces: NDArray[np.integer[Any]]) -> Iterator[NDArray[np.integer[Any]]]:
    """Chunks [n, ctx] in parts that pass through a model together."""
    step = max(1, BATCH_TOKENS // pieces.shape[1])
    return (pieces[i : i + step] for i in range(0, len(pieces), step))


def _blocks(rows: int, vocab: int) -> Iterator[slice]:
    """Slices of rows of logits, LOGIT_BLOCK numbers each."""
    step = max(1, LOGIT_BLOCK // vocab)
    return (slice(i, i + step) for i in range(0, rows, step))
