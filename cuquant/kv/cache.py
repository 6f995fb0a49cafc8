"""KVCache: the keys and values of one attention layer, each token at a bit width of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check, device as gpu, repeats
from ..debug import shown
from ..plan import MOST_BLOCKS
from . import codes, contents, copies, cpu, file, widths
from .contents import CachedTokens
from .protocol import CacheAppender
from .tiers import Tier


class KVCache:
    """A quantized cache of keys and values, in fixed buffers: one bucket per bit width and sequence.

    On a GPU `append` and `attention` neither synchronise nor need the host's memory: once captured in a
    graph, they can be replayed with a cache that grows. Everything else that tells or changes what is held
    waits for the GPU, properties too.

    `copy`, of the copy module too, forks a cache. A pickle holds what `save` writes, and comes back on the
    device that it was made on: for a machine without a GPU pickle `cache.to_device("cpu")`.

    A token's key and value vectors of each head are codes times a float16 scale (docs/formats/kv.md). Keys
    are stored as they are appended, after RoPE. A token has an id, by which the caller moves or evicts it,
    and a global slot, its position in the sequence: the first token appended is at 0, and slots are never
    reused. What changes a cache is for one thread at a time.

    Parameters
    ----------
    n_kv_heads : int
    head_dim : int
        A multiple of 8 up to 256; of 32 with `rotate`.
    capacity : int, or mapping of bits to int
        How many tokens a sequence has room for. For an int every width has room for all of them, which takes
        more memory than float16 would; a mapping gives each width its own room, and has the widths.
    batch : int
        Sequences, each with lengths of its own; on a GPU 65535 at most.
    bits : ints
        Widths of the buckets, of 16 (float16), 8, 4, 3 and 2: by default the last four, or the keys of a
        mapping, beside which others are an error.
    key_scales : None, "pairs", "halves", or float array ([batch, ]n_kv_heads, head_dim)
        Keys are divided by these channel by channel before they are quantized, and queries multiplied.
        "pairs" and "halves" take them for each sequence from the first tokens appended to it: the square root
        of the root mean square of the two channels that RoPE turns into one another (2i and 2i + 1; i and
        i + head_dim / 2), rounded to a power of two, so that float16 tokens stay exact.
    rotate : bool
        Rotate keys and queries by a Hadamard transform of each 32 channels, after the key scales.
    track_attention : bool
        Let `attention` add to each token's importance the probability that it receives: the sum over
        queries of the mean over heads.
    device : "cpu" or "cuda"
        Where the buffers are, as NumPy or CuPy arrays (of the current GPU); keys, values and queries must be
        there too.

    Attributes
    ----------
    tiers : dict of int to Tier
        The buffers by bits, widest first.
    auto_scales : "pairs", "halves" or None
        How `key_scales` are found from the first tokens, if they are.
    device : "cpu" or "cuda"
    next_slots : int32 [batch]
        The slot that the next token of each sequence gets: on the CPU a read-only view, on a GPU the cache's
        own array, which must not be written.
    key_scales : float32 (batch, n_kv_heads, head_dim), or None
        An array of the cache's device.

    Raises
    ------
    TypeError, ValueError
        An argument is none of these.
    RuntimeError
        There is no GPU, or a CUDA graph is being captured there.
    """

    is_kv_cache = True

    def __init__(
        self,
        n_kv_heads: int,
        head_dim: int,
        capacity: int | Mapping[int, int],
        batch: int = 1,
        bits: Sequence[int] | None = None,
        *,
        key_scales: Any = None,
        rotate: bool = False,
        track_attention: bool = False,
        device: str = "cpu",
    ) -> None:
        self.device = check.device_name(device)
        self.n_kv_heads = check.count(n_kv_heads, "n_kv_heads")
        self.rotate = check.flag(rotate, "rotate")
        self.track_attention = check.flag(track_attention, "track_attention")
        self.head_dim = check.head_dim(head_dim, codes.HADAMARD if self.rotate else 8)
        most = MOST_BLOCKS if self.device == "cuda" else check.LARGEST_INDEX
        self.batch = check.count(batch, "batch", most=most)
        rooms = check.rooms(capacity, bits, codes.BITS)
        self.capacity = sum(rooms.values()) if isinstance(capacity, Mapping) else max(rooms.values())
        if self.device == "cuda":
            check.require_memory("a cache is made on the GPU", "make it before")
        sizes = self.n_kv_heads, self.head_dim, self.device
        self.tiers = {b: Tier(b, self.batch, room, *sizes) for b, room in rooms.items()}
        self._next_slots: Any = self._xp.zeros(self.batch, np.int32)
        shape = (self.batch, self.n_kv_heads, self.head_dim)
        self.auto_scales = key_scales if isinstance(key_scales, str) else None
        given = check.key_scales(key_scales, shape)
        self.key_scales: Any = None if given is None else self._xp.asarray(given)
        self._backend: Any = cpu
        self._appender: CacheAppender
        if self.device == "cuda":
            from . import cuda

            self._backend, self._appender = cuda, cuda.Appender(self)
        else:
            self._appender = cpu.Appender(self)

    @property
    def _xp(self) -> Any:
        return np if self.device == "cpu" else gpu.cupy()

    @property
    def bits(self) -> tuple[int, ...]:
        """Widths of the buckets, widest first."""
        return tuple(self.tiers)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens held of each sequence, int32 [batch]."""
        return np.sum([tier.held for tier in self.tiers.values()], axis=0, dtype=np.int32)

    @property
    def next_slots(self) -> Any:
        """The slot that the next token of each sequence gets, int32 [batch]: on the CPU a read-only view, on
        a GPU the cache's own array, which must not be written."""
        if self.device == "cuda":
            return self._next_slots
        view = self._next_slots.view()
        view.flags.writeable = False
        return view

    @property
    def slots(self) -> int:
        """Slots given out so far in the longest sequence: the columns that a mask needs."""
        return int(gpu.as_numpy(self._next_slots).max())

    @property
    def _known_slots(self) -> int:
        """`slots` as far as the host knows without asking the GPU: it does not see what graphs append."""
        return int(self._appender.known_slots(self))

    @property
    def average_bits(self) -> float:
        """Mean bits of a stored number over all tokens, scales not counted; 0 for an empty cache."""
        stored = sum(tier.bits * int(tier.held.sum()) for tier in self.tiers.values())
        return stored / max(1, int(self.lengths.sum()))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tier.nbytes for tier in self.tiers.values())

    @property
    def used_nbytes(self) -> int:
        """Bytes of the codes and scales of the tokens held: what attention reads."""
        return sum(tier.token_bytes * int(tier.held.sum()) for tier in self.tiers.values())

    @shown
    def append(self, k: Any, v: Any, bits: Any = None, *, token_ids: Any = None, lengths: Any = None) -> None:
        """Add the next tokens of every sequence.

        Parameters
        ----------
        k, v : arrays (batch, n, n_kv_heads, head_dim)
            float16, bfloat16 or float32; keys after RoPE. NaN, infinity and magnitudes that no float16
            scale reaches (65504 * 2^(bits - 1)) make a token's head NaN (at 16 bits the element alone
            infinite: of a key it makes scores infinite or NaN, on a GPU more often NaN for float32 queries,
            which are two float16 numbers there; of a value the whole head of what `attention` gives NaN).
        bits : int, or int array (n,) or (batch, n), optional
            Width of the tokens; by default the widest.
        token_ids : int array (n,) or (batch, n), optional
            Not negative; by default the global slots. Tokens of one id are moved and evicted together.
        lengths : int array (batch,), optional
            How many of the n tokens each sequence gets, where they differ; bits and ids of the others may be
            anything (but not where lengths are on a GPU, and bits or ids are not).

        Raises
        ------
        TypeError, ValueError
            An argument does not fit, or a sequence or bucket is full (named): nothing has changed then. On a
            GPU a call that a graph replays, or that has bits or lengths there, may be refused later: it adds
            no token, and the next call of `append`, `attention`, `copy`, `save` or `to_device` that is not
            replayed raises.
        RuntimeError
            A CUDA graph is being captured, and memory would be taken: for an array of bits, for ids
            (batch, n) or lengths that are not contiguous int32 on the GPU, for keys or values whose last axis
            has gaps, or to find key scales.
        """
        bits = self.bits[0] if bits is None else bits
        known = repeats.of_cache(self) if token_ids is None and lengths is None else None
        if known is not None:
            words = type(bits), bits, self.capacity, self.rotate, self._next_slots.data.device_id
            found = repeats.find(known, words, k, (v,))
            if found is not None and self._appender.append_again(self, *found):
                return
        k, v = (check.in_cache(check.floats(a, what), what, self.device) for a, what in ((k, "k"), (v, "v")))
        check.require_tokens(k.shape, v.shape, (self.batch, self.n_kv_heads, self.head_dim))
        how = self._appender.append(self, k, v, bits, token_ids, lengths)
        if how is not None and known is not None:
            repeats.remember(known, words, how, k, (v,))

    @shown
    def assign(self, token_ids: Any, bits: Any) -> int:
        """Move tokens to other bit widths: what the cache holds of them is quantized anew, where it is.

        Parameters
        ----------
        token_ids : int, or int array (n,) or (batch, n)
            A vector names tokens of all sequences, each of which may lack some; rows name tokens of each
            sequence, -1 none. CuPy's arrays are read by the host.
        bits : int, or int array of token_ids' shape
            If an id is named twice its last width counts. A wider one than a token has costs memory, and
            brings nothing back.

        Returns
        -------
        int: how many tokens have moved.

        Raises
        ------
        TypeError, ValueError
            An argument does not fit, an id is not there, or a bucket is full: nothing has changed then.
        RuntimeError
            A CUDA graph is being captured.
        """
        with self._appender.moving(self):
            return widths.assign(self, token_ids, bits)

    @shown
    def allocate(
        self,
        average_bits: float,
        importance: Any = None,
        *,
        recent: int | None = None,
        hysteresis: float = 0.5,
        coming: int = 0,
    ) -> int:
        """Move tokens between bit widths so that each sequence holds an average, important tokens wide.

        Errors of b bits fall as 4^-b, so what is to be small is the sum of importance * 4^-bits. Tokens take
        steps to the next width, those that save most per bit first, until the next step would exceed the
        average. No widths that take as few bits have a smaller sum. Those that reach the average exactly may
        have one, by less than that step would save: little, unless a sequence has only a few tokens. (Where
        a bucket is full, a step into it and those that make room for it count as one step.) Tokens move only
        for a change of importance that outweighs the hysteresis, so buckets stay stable.

        Parameters
        ----------
        average_bits : float
            Most bits of a number in the mean over each sequence's tokens, scales not counted. The mean is
            below it by less than one token's step to its next width, or by more where wider buckets are full.
        importance : float array (batch, slots) or (slots,), optional
            Not negative, by global slot; by default the attention that was tracked. Without either all tokens
            are as important, and newer ones go first. CuPy's arrays are read by the host.
        recent : int, optional
            So many of the newest tokens count as much as the most important one: by default 64, or half of
            them if these are fewer, where tracked attention decides, as it is a sum over steps, of which they
            have seen few; else none.
        hysteresis : float
            By what share a token must be more important than one that holds a width to take it.
        coming : int
            So many tokens are to be appended next, to every sequence: the widest bucket, to which `append`
            brings them, keeps room for them, as far as others have room for its tokens.

        Returns
        -------
        int: how many tokens have moved.

        Raises
        ------
        TypeError, ValueError
            An argument does not fit.
        RuntimeError
            A CUDA graph is being captured.
        """
        average = check.average_bits(average_bits, self.bits)
        hysteresis = check.not_negative(hysteresis, "hysteresis")
        coming = check.count(coming, "coming", least=0)
        with self._appender.moving(self):
            return widths.allocate(self, average, importance, recent, hysteresis, coming)

    @shown
    def age(self, newest: Mapping[int, int], *, coming: int = 0) -> int:
        """Move tokens that have become too old for their width to the one of their age.

        ``cache.age({16: 64, 8: 256}, coming=1)`` before a step of a token, and ``append(k, v)`` after it,
        leave the newest 64 tokens at 16 bits, the 256 before them at 8, and all others at the narrowest width
        of the cache. A token never gets wider: what is lost stays lost. Ages count slots, those of evicted
        tokens, too.

        Parameters
        ----------
        newest : mapping of bits to int
            Widths of the cache, and how many of the newest tokens have each, from the newest on: widths fall.
        coming : int
            So many tokens are to be appended next, to every sequence, and count as the newest already.

        Returns
        -------
        int: how many tokens have moved.

        Raises
        ------
        TypeError, ValueError
            An argument does not fit, or a bucket is full: nothing has changed then.
        RuntimeError
            A CUDA graph is being captured.
        """
        ages = check.ages(newest, self.bits)
        coming = check.count(coming, "coming", least=0)
        with self._appender.moving(self):
            return widths.age(self, *ages, coming)

    @shown
    def evict(self, token_ids: Any) -> int:
        """Remove tokens; their slots stay empty.

        Parameters
        ----------
        token_ids : int, or int array (n,) or (batch, n)
            Tokens, named as in `assign`.

        Returns
        -------
        int: how many tokens are gone.

        Raises
        ------
        TypeError, ValueError
            The argument does not fit, or an id is not there: nothing has changed then.
        RuntimeError
            A CUDA graph is being captured.
        """
        with self._appender.moving(self):
            return widths.evict(self, token_ids)

    @shown
    def trim(self, length: int, importance: Any = None, *, recent: int | None = None) -> int:
        """Evict the least important tokens, of equal ones the oldest, until sequences hold `length` at most.

        Parameters
        ----------
        length : int
            Most tokens of each sequence afterwards.
        importance : float array (batch, slots) or (slots,), optional
            As in `allocate`.
        recent : int, optional
            As in `allocate`; by default, where tracked attention decides, 64, or half of the tokens that stay
            if these are fewer.

        Returns
        -------
        int: how many tokens are gone.

        Raises
        ------
        TypeError, ValueError
            An argument does not fit: nothing has changed then.
        RuntimeError
            A CUDA graph is being captured.
        """
        length = check.count(length, "length", least=0)
        with self._appender.moving(self):
            return widths.trim(self, length, importance, recent)

    def clear(self, sequence: int | None = None) -> None:
        """Empty the cache, or one sequence, whose place another can take: slots count from 0 again, and
        automatic key scales are found anew, by the next append that is not replayed from a graph.

        Parameters
        ----------
        sequence : int, optional
            The sequence to empty; by default all.

        Raises
        ------
        TypeError, ValueError
            There is no such sequence.
        RuntimeError
            A CUDA graph is being captured.
        """
        which: Any = slice(None) if sequence is None else check.sequence(sequence, self.batch)
        with self._appender.moving(self):
            for tier in self.tiers.values():
                tier.lengths[which] = 0
            self._next_slots[which] = 0
            self._refresh()

    @shown
    def dequantize(
        self, sequence: int = 0
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """The tokens of a sequence, in the order of positions, as the numbers that attention computes with.

        Parameters
        ----------
        sequence : int

        Returns
        -------
        token_ids, slots : NumPy int32 [T]
            The tokens' ids, and their global slots, ascending.
        keys, values : NumPy float32 [T, n_kv_heads, head_dim]
            Rotation and key scales are undone.

        Raises
        ------
        TypeError, ValueError
            There is no such sequence.
        """
        return contents.numbers(self, check.sequence(sequence, self.batch))

    @shown
    def tokens(self, sequence: int = 0) -> CachedTokens:
        """What a sequence holds, in the order of positions.

        Parameters
        ----------
        sequence : int

        Returns
        -------
        A named tuple of NumPy's arrays [T]: `token_ids`, `slots` (positions) and `bits`, int32, and
        `importance`, float32.

        Raises
        ------
        TypeError, ValueError
            There is no such sequence.
        """
        return contents.tokens(self, check.sequence(sequence, self.batch))

    def _refresh(self) -> None:
        """Take note of lengths and slots that were written into the buffers on a GPU."""
        self._appender.read(self)

    def _check_appended(self) -> None:
        """ValueError if an append was refused since the last call (see `append`)."""
        self._appender.check(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens and all settings to a safetensors file, atomically: it is whole or absent.

        Raises
        ------
        OSError
            The file cannot be written.
        RuntimeError
            A CUDA graph is being captured.
        ValueError
            An append was refused since the last call, or a token has a negative id: `append` does not look at
            those that are on a GPU. Or the path is named like a GGUF file.
        """
        file.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str = "cpu") -> KVCache:
        """Read the cache that `save` wrote.

        Parameters
        ----------
        path : str or path
        device : "cpu" or "cuda"
            Where the cache is to be: "cuda" is the current CuPy device.

        Returns
        -------
        KVCache: an equal cache, with as much room.

        Raises
        ------
        TypeError, ValueError
            The file is none that `save` wrote, or is damaged (it says how), or the device is another word.
        OSError
            The file cannot be read.
        RuntimeError
            There is no GPU (the message says why).
        MemoryError
            There is no memory for all that the cache has room for; on a GPU CuPy's OutOfMemoryError.
        """
        return file.load(cls, path, check.device_name(device))

    def copy(self) -> KVCache:
        """An independent cache of the same tokens and settings on the same device, as to fork a sequence.

        Every buffer is copied once, on a GPU without its bytes coming to the host.

        Raises
        ------
        RuntimeError
            A CUDA graph is being captured.
        ValueError
            An append was refused since the last call: the copy would lack its tokens.
        """
        return copies.copied(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return file.restored, (type(self), file.state(self), self.device)

    def to_device(self, device: str) -> KVCache:
        """A copy on "cpu" or "cuda" (the current CuPy device); the cache itself where it is there already.

        Raises as `copy` does.
        """
        return copies.on_device(self, check.device_name(device))

    def __repr__(self) -> str:
        return contents.text(self)

    def _repr_html_(self) -> str:
        return contents.html(self)
