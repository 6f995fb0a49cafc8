"""What `cuquant bench` runs."""

from . import peers
from .matmul import Cell, matmul
from .record import Record

__all__ = ["Cell", "Record", "matmul", "peers"]
