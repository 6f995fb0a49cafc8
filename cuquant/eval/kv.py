"""How an evaluation quantizes keys and values: the width of a token by its age."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .. import check
from ..kv import KVCache
from ..kv.codes import BITS
from .config import Config

STEP = 16
"""Tokens that a sequence takes at a time where they age, or scales are found. Ages count from the last of
them."""

# Ten digits hold what int32 does, and int() refuses thousands in words of its own.
_NUMBER = "[1-9][0-9]{0,9}"
_PART = f"{_NUMBER}(:{_NUMBER})?"
_SPEC = re.compile(rf"(?P<widths>{_PART}(,{_PART})*)(?P<options>(\+(scales|rotate))*)")


class UnknownWidthsError(ValueError):
    """A text that is no widths of a cache. `of_command` is what a command says, which is not in Python."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        widths = text.split(",")
        self._several = widths if len(widths) > 1 and {*widths} <= {*map(str, BITS)} else []

    def __str__(self) -> str:
        several = f"; several evaluations are kv_bits={self._several}" if self._several else ""
        return f"kv_bits is {self.args[0]!r}; it is {_ALLOWED}{several}"

    @property
    def of_command(self) -> str:
        options = " ".join(f"--kv-bits {width}" for width in self._several)
        return f"{self.args[0]!r} is not {_ALLOWED}" + f"; several evaluations are {options}" * bool(options)


_ALLOWED = (
    f"a width of {', '.join(map(str, BITS))}, or widths with how many of the newest tokens have them "
    f'(at most {check.LARGEST_INDEX}), as "8:64,4:256,2": narrower with age, the last '
    'without a number; "+scales" and "+rotate" may follow'
)


class KVBits:
    """Bit widths of a cache's tokens, parsed from a text.

    "4" is one width for all tokens; "8:64,4:256,2" is 8 bits for the newest 64, 4 for the 256 before them and
    2 for the rest. "+scales" and "+rotate" at the end ask for KVCache's automatic scales and rotation.

    Raises
    ------
    TypeError, ValueError
        The text is nothing of the kind.
    """

    def __init__(self, text: str | int | np.integer[Any]) -> None:
        if not isinstance(text, (str, int, np.integer)) or isinstance(text, bool):
            by_age = ': widths by age are "16:32,4", 16 bits for the newest 32 tokens'
            ages = by_age if isinstance(text, Mapping) else ""
            raise TypeError(f"kv_bits is {check.a_or_an(text)}; a text or an integer is needed{ages}")
        self.text = str(text).replace(" ", "")
        match = _SPEC.fullmatch(self.text)
        parts = [part.split(":") for part in match["widths"].split(",")] if match else []
        self.widths = np.array([int(part[0]) for part in parts])
        counts = [int(part[1]) for part in parts if len(part) > 1]
        fits = [len(part) for part in parts] == [2] * (len(parts) - 1) + [1]
        fits = fits and max(counts, default=0) <= check.LARGEST_INDEX
        fits = fits and bool((np.diff(self.widths) < 0).all()) and {*self.widths.tolist()} <= {*BITS}
        if not match or not fits:
            raise UnknownWidthsError(self.text)
        self._newest = dict(zip(self.widths.tolist(), counts, strict=False))
        self._ages = np.cumsum(counts)
        self._scales, self._rotate = "+scales" in match["options"], "+rotate" in match["options"]
        self.text = match["widths"] + "+scales" * self._scales + "+rotate" * self._rotate  # each once

    @property
    def by_steps(self) -> bool:
        """Whether it matters how many tokens come at a time: to widths by age, and to scales, which are those
        of the first tokens."""
        return len(self.widths) > 1 or self._scales

    def cache(self, config: Config, batch: int, capacity: int, *, device: str) -> KVCache:
        """An empty cache for a layer, on "cpu" or "cuda"."""
        return KVCache(
            config.n_kv_heads,
            config.head_dim,
            capacity,
            batch,
            self.widths.tolist(),
            key_scales=("pairs" if config.rope_interleaved else "halves") if self._scales else None,
            rotate=self._rotate,
            device=device,
        )

    def append(self, cache: KVCache, k: Any, v: Any) -> None:
        """Move tokens that k and v (batch, n, n_kv_heads, head_dim) make too old, then append those.

        They are arrays of the cache's device.
        """
        if len(self.widths) == 1:
            return cache.append(k, v, int(self.widths[0]))
        n = k.shape[1]
        cache.age(self._newest, coming=n)
        ages = np.arange(n, 0, -1)
        cache.append(k, v, self.widths[np.searchsorted(self._ages, ages)])


HALVES = KVBits(16)
"""Keys and values in float16, as a GPU's attention takes them."""


def distinct_widths(kv_bits: str | int | Iterable[str | int]) -> list[KVBits]:
    """The widths that are asked for, each once; TypeError or ValueError as of each."""
    several = isinstance(kv_bits, Iterable) and not isinstance(kv_bits, (str, Mapping))
    given: Any = kv_bits if several else [kv_bits]
    return list({kv.text: kv for kv in map(KVBits, given)}.values())
