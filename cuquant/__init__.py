"""Quantized matrix multiplication for NumPy and CuPy arrays, with no compile step.

import cuquant as cq

model = cq.open("model.gguf")          # lazy, memory-mapped, dict-like
W = model["blk.0.ffn_up.weight"]       # QuantizedArray (N, K)
y = x @ W.T                            # x (..., K) -> (..., N)
"""

from .array import QuantizedArray
from .eval import Evaluation, evaluate
from .formats import Format
from .formats.e4m4 import e4m4_decode, e4m4_encode
from .formats.kbit import KBit, normal_float_codebook
from .io.convert import quantize_file
from .io.gguf import GGUFError
from .io.model import FallbackWarning, Model, open
from .kv import KVCache, attention
from .ops.matmul import linear, matmul
from .ops.quantize import from_blocks, quantize

__version__ = "0.1.0"

__all__ = [
    "Evaluation",
    "FallbackWarning",
    "Format",
    "GGUFError",
    "KBit",
    "KVCache",
    "Model",
    "QuantizedArray",
    "__version__",
    "attention",
    "e4m4_decode",
    "e4m4_encode",
    "evaluate",
    "from_blocks",
    "linear",
    "matmul",
    "normal_float_codebook",
    "open",
    "quantize",
    "quantize_file",
]
