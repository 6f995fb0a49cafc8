"""Quantized matrix multiplication for NumPy and CuPy arrays, with no compile step.

import cuquant as cq

model = cq.open("model.gguf")          # lazy, memory-mapped, dict-like
W = model["blk.0.ffn_up.weight"]       # QuantizedArray (N, K)
y = x @ W.T                            # x (..., K) -> (..., N)
"""

from . import testing as testing
from .array import QuantizedArray
from .cuda.jit import KernelError
from .debug import config
from .device import gpu_problem
from .eval import (
    Comparison,
    Evaluation,
    Evaluations,
    Tokenizer,
    UnsupportedModel,
    compare,
    evaluate,
    evaluate_files,
    measure_importance,
)
from .formats import Format
from .formats.e4m4 import e4m4_decode, e4m4_encode
from .formats.exl3 import Exl3
from .formats.int4 import Int4
from .formats.kbit import KBit, normal_float_codebook
from .formats.nvfp4 import NvFp4
from .formats.trellis import Trellis
from .io.checkpoints import read_safetensors
from .io.convert import quantize_file
from .io.exl3 import from_exl3
from .io.floats import dequantize_file
from .io.fp4 import from_mxfp4, from_nvfp4
from .io.gguf import GGUFError, Metadata
from .io.imatrix import read_imatrix
from .io.int4 import from_awq, from_gptq, from_pack_quantized
from .io.model import FallbackWarning, Model, open
from .io.safetensors import load, save
from .kv import KVCache, attention
from .ops.int4 import int4_from_parts, int4_parts
from .ops.kbit import kbit_from_tiles, kbit_tiles
from .ops.matmul import linear, matmul
from .ops.moe import Experts, moe, route
from .ops.quantize import from_blocks, quantize
from .ops.trellis import trellis_from_parts, trellis_parts, trellis_quantize
from .warmup import warmup

__version__ = "0.1.0"


def __dir__() -> list[str]:
    """What users need: other modules of the package are its own affair."""
    return sorted([*__all__, "formats", "testing"])


__all__ = [
    "Comparison",
    "Evaluation",
    "Evaluations",
    "Exl3",
    "Experts",
    "FallbackWarning",
    "Format",
    "GGUFError",
    "Int4",
    "KBit",
    "KVCache",
    "KernelError",
    "Metadata",
    "Model",
    "NvFp4",
    "QuantizedArray",
    "Tokenizer",
    "Trellis",
    "UnsupportedModel",
    "__version__",
    "attention",
    "compare",
    "config",
    "dequantize_file",
    "e4m4_decode",
    "e4m4_encode",
    "evaluate",
    "evaluate_files",
    "from_awq",
    "from_blocks",
    "from_exl3",
    "from_gptq",
    "from_mxfp4",
    "from_nvfp4",
    "from_pack_quantized",
    "gpu_problem",
    "int4_from_parts",
    "int4_parts",
    "kbit_from_tiles",
    "kbit_tiles",
    "linear",
    "load",
    "matmul",
    "measure_importance",
    "moe",
    "normal_float_codebook",
    "open",
    "quantize",
    "quantize_file",
    "read_imatrix",
    "read_safetensors",
    "route",
    "save",
    "trellis_from_parts",
    "trellis_parts",
    "trellis_quantize",
    "warmup",
]
