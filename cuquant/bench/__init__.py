"""What `cuquant bench` runs."""

from . import peers
from .dequant import DequantCell, dequant
from .matmul import Cell, matmul
from .record import Record

__all__ = ["Cell", "DequantCell", "Record", "dequant", "matmul", "peers"]
