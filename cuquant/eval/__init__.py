"""Evaluation of GGUF models: a Llama forward pass on quantized weights, its scores and tables."""

from .evaluate import evaluate
from .report import Evaluation, Row
from .scores import TensorError

__all__ = ["Evaluation", "Row", "TensorError", "evaluate"]
