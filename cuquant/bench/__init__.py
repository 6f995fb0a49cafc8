"""What `cuquant bench` runs."""

from . import peers
from .dequant import DequantCell, dequant
from .matmul import Cell, matmul
from .moe import MoeCell, moe
from .record import Record

__all__ = ["Cell", "DequantCell", "MoeCell", "Record", "dequant", "matmul", "moe", "peers"]
