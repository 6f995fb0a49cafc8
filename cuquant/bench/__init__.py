"""What `cuquant bench` runs."""

from . import peers
from .append import AppendCell, append
from .attention import AttentionCell, attend
from .dequant import DequantCell, dequant
from .host import HostCell, host
from .matmul import Cell, matmul
from .moe import MoeCell, moe
from .record import Record
from .tune import TunedCell, tune
from .weights import WeightCell, weights

__all__ = [
    "AppendCell",
    "AttentionCell",
    "Cell",
    "DequantCell",
    "HostCell",
    "MoeCell",
    "Record",
    "TunedCell",
    "WeightCell",
    "append",
    "attend",
    "dequant",
    "host",
    "matmul",
    "moe",
    "peers",
    "tune",
    "weights",
]
