"""What is taken of a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cuquant import device


@contextmanager
def allocated() -> Iterator[list[int]]:
    """Bytes of each piece of memory that CuPy gives meanwhile."""
    sizes: list[int] = []

    class Watch(device.cupy().cuda.MemoryHook):  # type: ignore[misc]
        name = "watch"

        def malloc_postprocess(
            self, device_id: int, size: int, mem_size: int, mem_ptr: int, pmem_id: int
        ) -> None:
            sizes.append(size)

    with Watch():
        yield sizes
