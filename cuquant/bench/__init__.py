"""What `cuquant bench` runs."""

from . import peers
from .attention import AttentionCell, attend
from .matmul import Cell, matmul
from .record import Record

__all__ = ["AttentionCell", "Cell", "Record", "attend", "matmul", "peers"]
