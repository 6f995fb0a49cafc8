"""What an evaluation measures: perplexity and divergence over tokens, and errors of single tensors.

Conventions and labels are those of llama.cpp's llama-perplexity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import device
from ..array import QuantizedArray
from .errors import error_of

COMPARED = ["mean_kld", "max_kld", "same_top_percent", "rms_dp_percent"]
"""Scores that a base model is needed for."""


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural log-probabilities [n, vocabulary] of logits; overwrites the logits."""
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)
    return logits


class Tokens:
    """Statistics over the scored tokens of one model, with or without a base model to compare with."""

    def __init__(self) -> None:
        self._nll: list[NDArray[np.float64]] = []
        self._kld: list[NDArray[np.float64]] = []
        self._dp: list[NDArray[np.float64]] = []
        self._same_top: list[NDArray[np.bool_]] = []

    def add(
        self, logp: NDArray[np.float32], target: NDArray[np.integer[Any]], base: NDArray[np.float32] | None
    ) -> None:
        """Take log-probabilities [n, vocabulary], the true next tokens [n], and the base model's."""
        at_target = _at(logp, target)
        self._nll.append(-at_target)
        if base is None:
            return
        kld = (np.exp(base) * (base - logp)).sum(axis=1, dtype=np.float64)
        self._kld.append(device.as_numpy(kld))
        self._dp.append(np.exp(at_target) - np.exp(_at(base, target)))
        self._same_top.append(device.as_numpy(logp.argmax(axis=1) == base.argmax(axis=1)))

    @property
    def finite(self) -> bool:
        """Whether what was added last is."""
        return all(np.isfinite(kept[-1]).all() for kept in (self._nll, self._kld, self._dp) if kept)

    def summary(self) -> dict[str, float | None]:
        """ppl = exp(mean nll) with its standard error; mean and maximum Kullback-Leibler divergence
        KL(base || model) in nats; share of tokens with the same most probable successor; root mean square
        change of the true token's probability. Percentages where named so; None without a base."""
        nll = np.concatenate(self._nll)
        ppl = float(np.exp(nll.mean()))
        result: dict[str, float | None] = {
            "ppl": ppl,
            "ppl_stderr": ppl * float(nll.std() / np.sqrt(len(nll) - 1)) if len(nll) > 1 else None,
        }
        if not self._kld:
            return result | dict.fromkeys(COMPARED)
        kld, dp, same = np.concatenate(self._kld), np.concatenate(self._dp), np.concatenate(self._same_top)
        values = (kld.mean(), np.max(kld), 100 * same.mean(), 100 * np.sqrt(np.mean(dp * dp)))
        return result | dict(zip(COMPARED, map(float, values), strict=True))


def _at(logp: NDArray[np.float32], target: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Log-probability of each position's true next token, on the host."""
    chosen = np.take_along_axis(logp, target[:, None], axis=1)[:, 0]
    return device.as_numpy(chosen).astype(np.float64)


@dataclass(frozen=True)
class TensorError:
    """Error of one quantized tensor against its original w: nmse = sum((w' - w)^2) / sum(w^2), the signal to
    quantization noise ratio -10 log10(nmse) in dB, and the largest absolute difference.

    An exact tensor has nmse 0 and no ratio (None).
    """

    name: str
    format: str
    bits_per_weight: float
    nmse: float
    sqnr_db: float | None
    max_abs_error: float


def tensor_error(name: str, original: Any, quantized: QuantizedArray) -> TensorError:
    """Compare a quantized tensor (..., N, K) or (K,) with its original, float or quantized itself."""
    errors = error_of(original, quantized)
    return TensorError(name, str(quantized.format), quantized.bits_per_weight, *errors)
