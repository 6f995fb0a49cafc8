"""For pytest's -p: the emulated GPU is one of sm_90a."""

from . import cupy, driver

cupy.Device.compute_capability, driver.capability = "90", 90
cupy.Device.attributes = {"MultiProcessorCount": 132}

from . import plugin  # noqa: E402, F401
