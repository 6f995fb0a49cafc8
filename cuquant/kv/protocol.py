"""What a KVCache asks of its backends."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..repeats import CallTable, Repeat

if TYPE_CHECKING:
    from .cache import KVCache


class CacheAppender(Protocol):
    """How a cache takes tokens, and what the host knows of those that it holds.

    Made with the cache, which it must not refer to: it is an argument of all that needs it.
    """

    @property
    def repeats(self) -> CallTable | None:
        """Calls that were checked, which are not checked again; None where all are."""

    @property
    def even(self) -> bool:
        """Whether all sequences hold as many tokens of each width, as far as the host knows."""

    def read(self, cache: KVCache) -> None:
        """Take note of lengths and slots that were written into the buffers."""

    def know(self, held: dict[int, NDArray[np.int64]], slots: NDArray[np.int64]) -> None:
        """Take note of how many tokens [batch] each width holds, and of `next_slots`."""

    def check(self, cache: KVCache) -> None:
        """ValueError if an append that could not raise was refused since."""

    def copying(self, cache: KVCache) -> AbstractContextManager[None]:
        """Surround what copies the cache; RuntimeError while a graph is captured, else errors of `check`."""

    def moving(self, cache: KVCache) -> AbstractContextManager[None]:
        """Surround what moves tokens; RuntimeError while a graph is captured."""

    def known_slots(self, cache: KVCache) -> int:
        """Slots given out in the longest sequence, as far as the host knows."""

    def append(self, cache: KVCache, k: Any, v: Any, bits: Any, token_ids: Any, lengths: Any) -> Any:
        """Append checked tokens; returns how others like them are, for `append_again`, or None."""

    def append_again(self, cache: KVCache, known: Repeat, places: list[int]) -> bool:
        """Append tokens like some before, at these places; False where they may not fit, and nothing was
        done."""
