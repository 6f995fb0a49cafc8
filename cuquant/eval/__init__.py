"""Evaluation of GGUF models: a Llama forward pass on quantized weights, its scores and tables."""

from .compare import Comparison, Difference, compare
from .config import UnsupportedModel
from .evaluate import evaluate
from .files import evaluate_files
from .importance import measure_importance
from .report import Evaluation, Evaluations, Row
from .scores import TensorError
from .tokenizer import Tokenizer

__all__ = [
    "Comparison",
    "Difference",
    "Evaluation",
    "Evaluations",
    "Row",
    "TensorError",
    "Tokenizer",
    "UnsupportedModel",
    "compare",
    "evaluate",
    "evaluate_files",
    "measure_importance",
]
