"""Kernels, their launches, and what a GPU has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .tuning import Tuned

WARP = 32
LARGE_GPU = 132
"""Multiprocessors of an H200, on which what plans go by was measured."""
FLAGS = 4 * LARGE_GPU
"""Flags in global memory of what blocks leave to each other: of warpgroups, or of tiles whose columns are
shared."""
MOST_BLOCKS = 65_535
"""Most blocks of a launch along its second and third axes."""
STRIDING_BLOCKS = 1 << 16
"""Most blocks of a launch whose blocks stride over what is left."""


class Gpu(NamedTuple):
    """A GPU, as far as plans go by it."""

    capability: int
    """90 for sm_90."""
    multiprocessors: int = LARGE_GPU
    tuned: Tuned | None = None
    """What was measured on it, if anything was."""
    memory: float = 1.0
    """How fast its memory is, next to an H200's."""


def places_of(gpu: Gpu, cluster: int = 1) -> int:
    """Clusters of so many blocks that run at once, a block on a multiprocessor: of four blocks an H200 has
    room for 28, as parts of the GPU have 16 or 18 multiprocessors."""
    blocks = min(gpu.multiprocessors, LARGE_GPU)
    return blocks * 112 // (LARGE_GPU * cluster) if cluster == 4 else blocks // cluster


@dataclass(frozen=True)
class Kernel:
    """One compiled entry point: kernels/ops/`op`.cu, for a format, under constants.

    Attributes
    ----------
    op, entry : str
        File and function.
    format : str or None
        The format whose header the file includes.
    constants : tuple of (name, value)
        Defined as CUQUANT_name: integers, or names that the file knows.
    max_shared : int
        Bytes of dynamic shared memory that a launch may ask for.
    """

    op: str
    entry: str
    format: str | None = None
    constants: tuple[tuple[str, Any], ...] = ()
    max_shared: int = 0

    def __post_init__(self) -> None:
        # Looked up again and again: hash the nested tuples once.
        object.__setattr__(self, "_hash", hash((self.op, self.entry, self.format, self.constants)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def defines(self) -> tuple[str, ...]:
        """The compiler's options."""
        return tuple(f"-DCUQUANT_{name}={value}" for name, value in self.constants)


@dataclass(frozen=True)
class Plan:
    """A kernel and its launch."""

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared: int = 0
    """Bytes of dynamic shared memory."""
    cluster: int = 1
    """Blocks along x that share their shared memory (sm_90)."""
    overlaps: bool = False
    """Whether the kernel itself waits for what comes before it in the stream, and may start earlier
    (kernels/core/ptx.cuh has the rules)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.kernel, self.grid, self.block, self.shared)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


_SHARED = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 120: 99, 121: 99}
"""Kilobytes of shared memory that a block may have, where that is less than 227."""
_STATIC = 1 << 10
"""Bytes of shared memory beside the dynamic: barriers, what warpgroups tell each other; the driver's own."""


def shared_limit(capability: int, blocks: int = 1) -> int:
    """Bytes of dynamic shared memory that a block may have, of so many that a multiprocessor is to hold. From
    sm_80 on each costs 1 KB more."""
    most, system = _per_block(capability)
    return min(most - 2 * _STATIC, (most + system) // blocks - system - _STATIC // 2)


def _per_block(capability: int) -> tuple[int, int]:
    """Bytes of shared memory that a block alone may have, and those that each costs beside its own."""
    return _SHARED.get(capability, 227) << 10, 1 << 10 if capability >= 80 else 0


def lone(shared: int, capability: int) -> int:
    """Bytes of shared memory, so many or more, with which a multiprocessor has no room for a second block.

    Blocks that start while the launch before still runs go where there is room first. Of as many as there are
    multiprocessors some would get two then, and others none: up to 70% more time on an H200.
    """
    most, system = _per_block(capability)
    return max(shared, (most + system) // 2 - system + 128)


def beside(shared: int, blocks: int, capability: int) -> int:
    """Most bytes for small blocks of which so many have room beside a block that has `shared`."""
    most, system = _per_block(capability)
    return max(0, (most - shared - _STATIC) // blocks - system - _STATIC // 2) // 128 * 128
