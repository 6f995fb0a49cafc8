"""For pytest's -p: this process has the emulated GPU, and no other."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import scipy.special

from cuquant import device
from cuquant.cuda import jit

from . import cupy
from .driver import Driver

sys.modules |= {"cupy": cupy, "cupyx.scipy.special": scipy.special}
sys.modules |= {name: ModuleType(name) for name in ("cupyx", "cupyx.scipy")}
vars(device).update(driver=lambda: Driver)
# Chosen tests need few of what their files compile ahead.
vars(jit).update(compile_ahead=lambda kernels: iter(()))
np.seterr(all="ignore")  # CuPy says nothing of what is not finite
