"""What an evaluation measures: perplexity and divergence over tokens, and errors of single tensors.

Conventions and labels are those of llama.cpp's llama-perplexity.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, inf, log10
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import cpu, device
from ..array import QuantizedArray

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
    errors = error_of(
        *(map(_in_a_row, (original, quantized)) if quantized.ndim == 1 else (original, quantized))
    )
    return TensorError(name, str(quantized.format), quantized.bits_per_weight, *errors)


def _in_a_row(vector: Any) -> NDArray[Any]:
    """Numbers [K] as a matrix [1, K]."""
    numbers = vector.dequantize() if isinstance(vector, QuantizedArray) else vector
    return device.as_numpy(numbers)[None]


def error_of(original: Any, other: Any) -> tuple[float, float | None, float]:
    """nmse, its ratio in dB and the largest error of one tensor (..., N, K) against another.

    Each is quantized, or an array of floats or of integers; errors are float64, and 0 only of equal numbers.
    A NaN or an infinity that both have in one place is no error, another one is an error of NaN or infinity.
    The signal is that of finite numbers.
    """
    original, other = _on_host(original), _on_host(other)
    noise = signal = largest = 0.0
    for index in np.ndindex(other.shape[:-2]):
        for part in cpu.slabs(*other.shape[-2:]):
            exact = _rows(original, index, part)
            error, most = _norms(_difference(exact, _rows(other, index, part)))
            noise, largest = hypot(noise, error), float(np.maximum(largest, most))
            signal = hypot(signal, _norms(exact[np.isfinite(exact)])[0])
    ratio = noise / signal if signal else (inf if noise else 0.0)
    return ratio * ratio, -20 * log10(ratio) if ratio else None, largest


def _on_host(tensor: Any) -> Any:
    return tensor.to_device("cpu") if isinstance(tensor, QuantizedArray) else device.as_numpy(tensor)


def _rows(tensor: Any, index: tuple[int, ...], part: slice) -> NDArray[Any]:
    """Rows `part` of the matrix `index` of a stack, as the tensor has them or in float32."""
    return tensor[index][part] if isinstance(tensor, np.ndarray) else cpu.weight_rows(tensor, index, part)


def _difference(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """b - a, but 0 where both are NaN or the same infinity."""
    (a, a_rest), (b, b_rest) = _parts(a), _parts(b)
    with np.errstate(over="ignore", invalid="ignore"):
        result = (b - a) + (b_rest - a_rest)
    result[np.isnan(result) & (np.isnan(a) == np.isnan(b))] = 0
    return result


def _parts(x: NDArray[Any]) -> tuple[NDArray[np.float64], Any]:
    """Two float64 numbers for each: itself, and what it has beyond them if it is an integer above 2^53."""
    if x.dtype != np.int64:
        return x.astype(np.float64), 0.0
    rest = np.where(np.abs(x) > 1 << 53, x % 1024, 0)
    return (x - rest).astype(np.float64), rest.astype(np.float64)


def _norms(x: NDArray[Any]) -> tuple[float, float]:
    """The root of the sum of squares, none of which overflows or vanishes, and the largest magnitude."""
    x = x.astype(np.float64).reshape(-1)
    peak = float(np.abs(x).max(initial=0))
    if not 0 < peak < inf:
        return peak, peak
    x /= peak
    return peak * float(np.sqrt(x @ x)), peak
