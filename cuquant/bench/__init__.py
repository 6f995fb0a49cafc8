"""What `cuquant bench` runs."""

from .matmul import Cell, matmul
from .record import Record

__all__ = ["Cell", "Record", "matmul"]
