"""Measuring which columns of a model's weights matter: mean squares of their inputs over a text."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check, device as device_info
from ..io import imatrix
from ..io.imatrix import Sums
from ..io.model import Model
from ..io.rewrite import new_file
from ..render import counted, progress_bar
from .contenders import Contender
from .evaluate import batches, check_ids, cut, on_device, runnable, text_or_tokens, token_ids, warn_of_context
from .llama import Array, Weight

_LARGEST = float(np.finfo(np.float32).max)


def measure_importance(
    model: str | os.PathLike[str] | Model,
    target: str | os.PathLike[str] | None = None,
    *,
    text: str | os.PathLike[str] | None = None,
    tokens: Any = None,
    ctx: int = 512,
    chunks: int | None = None,
    process_output: bool = False,
    force: bool = False,
    device: str | None = None,
    progress: bool = False,
) -> dict[str, NDArray[np.float32]]:
    """Measure how much each column of a model's weights matters, as llama.cpp's llama-imatrix does.

    The model is run over a text in chunks, as `evaluate` runs it. For each weight that is multiplied the
    squares of its inputs are summed over all tokens of all chunks, each column by itself, in float64; for
    experts over the tokens that are routed to each. `quantize_file` weights errors by what comes of it.

    Parameters
    ----------
    model : path or Model
        As in `evaluate`; usually the float original.
    target : path, optional
        Write the importance matrix there, in llama.cpp's GGUF format: a file that `read_imatrix` reads, and
        so do `quantize_file` and llama-quantize. It holds the sums in float32, how many inputs they are of,
        and the name of the text. The file takes its place when it is whole.
    text, tokens
        One of them, as in `evaluate`. A text like those that the model is for, and not the one that it is
        evaluated on.
    ctx, chunks : int
        Tokens of a chunk; how many chunks to use (by default all whole ones).
    process_output : bool
        Measure the output matrix, too (of a model that has none of its own its embedding), which is left out
        otherwise, as llama-imatrix does.
    force : bool
        Replace an existing `target`.
    device : "cpu" or "cuda", optional
        As in `evaluate`.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.

    Returns
    -------
    dict of str to float32 array
        What `read_imatrix` returns of the file, to be passed as ``quantize_file(importance=)``: by names of
        weights the mean square of each column's inputs, (K,), or (E, K) of a stack of experts (E, N, K).
        Experts that no token was routed to have 1 everywhere.

    Raises
    ------
    UnsupportedModel
        The architecture, or something in it, is not implemented (named), or a tensor or key is missing.
    TypeError, ValueError
        Before the model is run, as in `evaluate`: both or none of `text` and `tokens` are given, the text is
        shorter than a chunk, and so on; or `target` is a file that is being read. At the chunk where it
        happens, which is named: inputs of weights are NaN or infinite, or the sums of their squares too large
        for float32.
    OSError, GGUFError
        A file cannot be read, or is damaged (see `cuquant.open`). FileExistsError, before the model is run,
        where `target` exists and `force` is false, and other errors where nothing can be written there.
    RuntimeError
        `device` is "cuda", and there is no GPU (the message says why).

    Warns
    -----
    UserWarning
        No token was routed to some of the experts; or as `evaluate` warns of `ctx`, and `cuquant.open`.
    """
    ctx, chunks = check.chunking(ctx, chunks)
    process_output, given = check.flag(process_output, "process_output"), text_or_tokens(text, tokens)
    source = on_device(model, device)
    with ExitStack() as opened:
        file = None
        if target is not None:
            target = check.new_path(target)
            if isinstance(text, os.PathLike):
                check.require_another_file(target, text, "text")
            file = opened.enter_context(new_file(source, target, force))
        ids, bos, label = token_ids(source, given)
        pieces = cut(ids, bos, ctx, chunks)
        warn_of_context(ctx, [source])
        sums = _sums(Contender.of(source), pieces, process_output, progress)
        source._as_opened()  # also by now: weights were read meanwhile
        if file is not None:
            imatrix.write(file, sums, label, len(pieces), ctx)
    _warn_of_unreached(sums)
    return imatrix.means(sums)


class _Inputs:
    """Sums of the squares of what weights are multiplied by, where the model computes.

    The host counts rows and knows their number from shapes, so that nothing waits for a GPU.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._squares: dict[str, Any] = {}
        self._counts: dict[str, NDArray[np.int64]] = {}

    def add(self, weight: Weight, x: Array) -> None:
        """Rows (..., K) that a matrix is multiplied by."""
        rows = x.reshape(-1, x.shape[-1])
        # Squares may be rounded: sums of those that float32 does not hold have no place in a file either.
        added = (rows * rows).sum(axis=0, dtype=np.float64)
        if weight.name not in self._squares:
            *lead, _, k = self._tensors[weight.name].shape
            self._squares[weight.name] = np.zeros_like(added, shape=(math.prod(lead), k))
            self._counts[weight.name] = np.zeros(math.prod(lead), np.int64)
        self._squares[weight.name][weight.expert] += added
        self._counts[weight.name][weight.expert] += len(rows)

    def copy(self) -> _Inputs:
        made = _Inputs(self._tensors)
        made._squares = {name: squares.copy() for name, squares in self._squares.items()}
        made._counts = {name: counts.copy() for name, counts in self._counts.items()}
        return made

    def beyond(self) -> str | None:
        """The first weight with a sum that is NaN, or that float32 does not hold; None where there is none.

        This waits for a GPU.
        """
        fit = np.stack([(squares <= _LARGEST).all() for squares in self._squares.values()])
        fits = zip(self._squares, device_info.as_numpy(fit), strict=True)
        return next((name for name, held in fits if not held), None)

    def sums(self) -> dict[str, Sums]:
        """All of them, in float32 on the host."""
        made = {name: device_info.as_numpy(squares) for name, squares in self._squares.items()}
        counts = self._counts
        return {n: Sums(each.astype(np.float32), counts[n].astype(np.float32)) for n, each in made.items()}


def _sums(
    contender: Contender, pieces: NDArray[np.integer[Any]], process_output: bool, progress: bool
) -> dict[str, Sums]:
    """Sums over all tokens of all chunks, by names of weights; ValueError at the chunk that spoils them."""
    inputs = _Inputs(contender.tensors)
    model = runnable(contender, pieces.shape[1], inputs=lambda *given: inputs.add(*given))
    check_ids(pieces, [model], [contender])

    def spoiled(batch: NDArray[np.integer[Any]]) -> str | None:
        """Add the inputs of some chunks; what is not finite then, if anything is."""
        states = model.hidden(batch, 0)
        if process_output:
            inputs.add(model.output, states)
        # That this waits for each batch also keeps the host from running ahead of a GPU.
        name = inputs.beyond()
        if name is not None:
            return f"sums of squared inputs of {name!r}"
        return None if np.isfinite(states).all() else "states"

    with (
        np.errstate(all="ignore"),  # what is not finite is said with a name
        progress_bar(progress, "chunk", total=len(pieces)) as bar,
    ):
        done = 0
        for batch in batches(pieces):
            earlier = inputs.copy()
            found = spoiled(batch)
            if found is not None:
                inputs = earlier  # and one by one, to tell which it is
                each = ((at, spoiled(chunk[None])) for at, chunk in enumerate(batch, done))
                last = done + len(batch) - 1, found
                before, found = next(((at, name) for at, name in each if name is not None), last)
                fewer = f", or the chunks before (chunks={before}, --chunks {before})" if before else ""
                contender.check_scores(
                    False,
                    f"{found} in chunk {before + 1:,} of {len(pieces):,}",
                    f"take another text{fewer}",
                )
            done += len(batch)
            bar.update(len(batch))
    return inputs.sums()


def _warn_of_unreached(sums: Mapping[str, Sums]) -> None:
    """Warn of experts without inputs."""
    empty = {name: int((each.counts == 0).sum()) for name, each in sums.items() if not each.counts.all()}
    if empty:
        name, count = next(iter(empty.items()))
        warnings.warn(
            f"no token of the text was routed to some experts of {counted(len(empty), 'tensor')} "
            f"({name!r}: {count} of {len(sums[name].counts)}), whose columns count alike: take a longer text",
            stacklevel=3,
        )
