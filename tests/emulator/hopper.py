"""For pytest's -p: the emulated GPU is one of sm_90a."""

from . import cupy

cupy.Device.compute_capability = "90"
cupy.Device.attributes = {"MultiProcessorCount": 132}

from . import plugin  # noqa: E402, F401
