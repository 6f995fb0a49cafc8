"""Quantized matrix multiplication for NumPy and CuPy arrays, with no compile step.

import cuquant as cq

model = cq.open("model.gguf")          # lazy, memory-mapped, dict-like
W = model["blk.0.ffn_up.weight"]       # QuantizedArray (N, K)
y = x @ W.T                            # x (..., K) -> (..., N)
"""

from .array import QuantizedArray
from .eval import Evaluation, evaluate
from .formats import Format
from .io.convert import quantize_file
from .io.gguf import GGUFError
from .io.model import FallbackWarning, Model, open
from .ops.matmul import linear, matmul
from .ops.quantize import from_blocks, quantize

__version__ = "0.1.0"

__all__ = [
    "Evaluation",
    "FallbackWarning",
    "Format",
    "GGUFError",
    "Model",
    "QuantizedArray",
    "__version__",
    "evaluate",
    "from_blocks",
    "linear",
    "matmul",
    "open",
    "quantize",
    "quantize_file",
]
