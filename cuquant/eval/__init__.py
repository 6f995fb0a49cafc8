"""Evaluation of GGUF models: a Llama forward pass on quantized weights, its scores and tables."""

from .compare import Comparison, Difference, compare
from .evaluate import evaluate
from .report import Evaluation, Row
from .scores import TensorError

__all__ = ["Comparison", "Difference", "Evaluation", "Row", "TensorError", "compare", "evaluate"]
