"""What `cuquant bench` runs."""

from . import peers
from .matmul import Cell, matmul
from .moe import MoeCell, moe
from .record import Record

__all__ = ["Cell", "MoeCell", "Record", "matmul", "moe", "peers"]
