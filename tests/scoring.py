"""Scores of an evaluation by their definitions: in float64, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

import cuquant as cq
from cuquant.eval import Evaluation, Row, TensorError, config
from cuquant.eval.llama import Llama

TEXT = "The quick brown fox jumps over the lazy dog; the end of the lane. " * 8
FORMATS = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


Ids = NDArray[np.integer[Any]]
F64 = NDArray[np.float64]


def log_probabilities(path: Path, chunk: Ids, activations: str = "f16") -> F64:
    """Natural log-probabilities [T, vocabulary] of the successors in one chunk."""
    source = cq.open(path)
    llama = Llama(config.read(source.metadata), dict(source), activations)
    logits = llama.logits(llama.hidden(chunk[None], 0)[0]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def scores(path: Path, chunks: Sequence[Ids], base: Path | None = None, activations: str = "f16") -> Row:
    """What llama-perplexity reports, by its definitions."""
    nll, kld, dp, same = [], [], [], []
    for chunk in chunks:
        logp = log_probabilities(path, chunk, activations)
        reference = logp if base is None else log_probabilities(base, chunk, activations)
        for position in range(len(chunk) // 2, len(chunk) - 1):
            successor = chunk[position + 1]
            p, q = reference[position], logp[position]
            nll.append(-q[successor])
            kld.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            dp.append(math.exp(q[successor]) - math.exp(p[successor]))
            same.append(int(p.argmax()) == int(q.argmax()))
    n, mean = len(nll), sum(nll) / len(nll)
    variance = sum(x * x for x in nll) / n - mean * mean
    return Row(
        format="",
        ppl=math.exp(mean),
        ppl_stderr=math.exp(mean) * math.sqrt(variance / (n - 1)),
        mean_kld=sum(kld) / n,
        max_kld=max(kld),
        same_top_percent=100 * sum(same) / n,
        rms_dp_percent=100 * math.sqrt(sum(x * x for x in dp) / n),
        bits_per_weight=math.nan,
    )


def agree(row: Row, expected: Row, *names: str, rel: float = 3e-4) -> None:
    names = names or ("ppl", "ppl_stderr", "mean_kld", "max_kld", "same_top_percent", "rms_dp_percent")
    for name in names:
        actual, wanted = getattr(row, name), getattr(expected, name)
        assert actual == (None if wanted is None else pytest.approx(wanted, rel=rel, abs=1e-6)), name


def same(result: Evaluation, expected: Evaluation) -> None:
    """Two ways to ask for one thing."""
    assert [row.format for row in result.rows] == [row.format for row in expected.rows]
    assert result.scored_tokens == expected.scored_tokens
    for row, wanted in zip(result.rows, expected.rows, strict=True):
        agree(row, wanted)
        assert row.bits_per_weight == wanted.bits_per_weight
        assert row.tensors == wanted.tensors


def chunked(ids: Ids, ctx: int) -> list[Ids]:
    return [ids[start : start + ctx] for start in range(0, len(ids) - ctx + 1, ctx)]


def read_tensors(path: Path) -> dict[str, tuple[Type, F64, int]]:
    """Type, numbers and bytes of all tensors of a file, by the gguf package."""
    return {
        t.name: (
            t.tensor_type,
            gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64),
            int(t.n_bytes),
        )
        for t in gguf.GGUFReader(path).tensors
    }


def bits_per_weight(path: Path) -> float:
    stored = read_tensors(path).values()
    return 8 * sum(nbytes for *_, nbytes in stored) / sum(numbers.size for _, numbers, _ in stored)


def check_errors(errors: Sequence[TensorError], base: Path, quantized: Path) -> None:
    originals, results = read_tensors(base), read_tensors(quantized)
    expected = [name for name, (kind, *_) in results.items() if kind not in (Type.F32, Type.F16)]
    assert [e.name for e in errors] == expected
    for e in errors:
        original, (kind, result, nbytes) = originals[e.name][1], results[e.name]
        noise, signal = np.sum((result - original) ** 2), np.sum(original**2)
        assert e.nmse == pytest.approx(noise / signal, rel=1e-5)
        assert e.sqnr_db == pytest.approx(10 * np.log10(signal / noise), abs=1e-4)
        assert e.max_abs_error == pytest.approx(np.abs(result - original).max(), rel=1e-6)
        assert (e.format, e.bits_per_weight) == (kind.name.lower(), 8 * nbytes / result.size)
