"""Text to token ids and back, by the vocabulary that a GGUF file carries.

The rules are llama.cpp's (src/llama-vocab.cpp): perplexities compare only between equal token ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from heapq import heappop, heappush
from itertools import pairwise
from math import isnan
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..io.gguf import GGUFError
from ..io.model import Model, open as open_model
from ..render import told

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
"""Types of tokens in `tokenizer.ggml.token_type`."""
_ENDS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "</s>",
    "<eos>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
"""Texts of tokens that llama.cpp makes control tokens, whatever their type: they end a generation.

Not here: it makes one of each kind for fill-in-the-middle such a token, too, of several the one that its hash
table has first, and takes those of gpt-oss's channels, and "<|end|>" among these, for user-defined ones."""

DECISIVE = tuple(
    f"tokenizer.ggml.{name}"
    for name in (
        "model",
        "pre",
        "tokens",
        "token_type",
        "merges",
        "scores",
        "add_space_prefix",
        "unknown_token_id",
        "add_bos_token",
        "bos_token_id",
    )
)
"""Keys that decide which ids a text becomes: all that `Tokenizer.from_metadata` reads."""

_HINT = "token ids from a .npy file (--tokens) work instead"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back, by a GGUF file's own vocabulary.

    tokenizer = cuquant.Tokenizer.from_metadata(cuquant.open("model.gguf").metadata)
    """

    vocab_size: int
    add_bos: bool
    """Whether llama.cpp starts a text with `bos_id` for this vocabulary."""
    bos_id: int | None
    """The token that begins a text; None where the vocabulary has none."""
    _user_defined: Sequence[tuple[str, int]] = field(repr=False)
    _encode_plain: Callable[[str], list[int]] = field(repr=False)
    _ids: Mapping[str, int] = field(repr=False)
    """Ids of all tokens by their texts, in order."""
    _types: Sequence[float] = field(repr=False)
    _to_bytes: Callable[[str, float], bytes] = field(repr=False)
    """What a token of a type stands for, in UTF-8."""
    _prefix: bytes = field(repr=False)
    """What stands before every text that is encoded."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | Model | str | os.PathLike[str]) -> Tokenizer:
        """Build from the `tokenizer.ggml.*` keys of a model: its metadata, a Model, or its file's path.

        Raises TypeError for what is none of these, ValueError for a vocabulary that is malformed or of a kind
        not known here, and what `cuquant.open` raises of a path.
        """
        if isinstance(metadata, (str, os.PathLike)):
            metadata = open_model(metadata, "cpu")
        if isinstance(metadata, Model):
            try:
                return cls.from_metadata(metadata.metadata)
            except GGUFError:  # which says where it is
                raise
            except ValueError as error:
                raise ValueError(f"{metadata.path}: {error}") from None
        if not isinstance(metadata, Mapping):
            given = check.a_or_an(metadata)
            raise TypeError(f"metadata is {given}; a mapping, a cuquant.Model or the path of one is needed")
        model = metadata.get("tokenizer.ggml.model")
        if not isinstance(model, str) or model not in ("gpt2", "llama"):
            raise ValueError(f"tokenizer.ggml.model is {told(model)}; known are 'gpt2' and 'llama'; {_HINT}")
        ids, types = _vocabulary(metadata)
        prefix, default_bos = "", None
        to_bytes: Callable[[str, float], bytes]
        if model == "gpt2":
            pre = _pre_tokenizer(metadata)
            encode_plain, add_bos, to_bytes = _byte_level_bpe(ids, metadata, pre), pre.add_bos, _of_letters
        else:
            sentencepiece = _SentencePiece(ids, metadata)
            encode_plain, add_bos, to_bytes = sentencepiece.encode, True, _of_piece
            prefix, default_bos = sentencepiece.prefix, 1
        add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", add_bos)
        bos_id = metadata.get("tokenizer.ggml.bos_token_id", default_bos)
        if bos_id is not None:
            bos_id = _token_id("tokenizer.ggml.bos_token_id", bos_id, len(ids))
        elif add_bos:
            raise ValueError(f"tokenizer.ggml.bos_token_id is missing, but a text begins with it; {_HINT}")
        user_defined = [
            (text, i) for text, i in ids.items() if types[i] == _USER_DEFINED and text not in _ENDS
        ]
        user_defined.sort(key=lambda token: -len(token[0].encode()))
        names = (ids, types, to_bytes, prefix.encode())
        return cls(len(ids), add_bos, bos_id, user_defined, encode_plain, *names)

    @cached_property
    def _pieces(self) -> list[bytes]:
        """What each token stands for; an evaluation never asks."""
        return [
            b"" if kind == _CONTROL or text in _ENDS else self._to_bytes(text, kind)
            for text, kind in zip(self._ids, self._types, strict=True)
        ]

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids int32 [n] of a text; `bos_id` is not added.

        User-defined tokens written in the text are taken whole; control tokens, and what llama.cpp makes
        such, are read as plain text.

        Raises TypeError for what is no str, ValueError for one with half a character (a surrogate).
        """
        ids: list[int] = []
        for part in self._partition(check.text(text)):
            ids += self._encode_plain(part) if isinstance(part, str) else [part]
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids: ``decode(encode(text)) == text`` for byte-level vocabularies that have all
        bytes. For SentencePiece ones, too, but for U+2581, which they read as a space, and for the spaces
        that they put behind user-defined tokens.

        Control tokens have no text. An unknown one of SentencePiece, and bytes that are no UTF-8, as those
        of a character whose last token is still to come, are U+FFFD. The space that some vocabularies put
        before a text is taken off, so a continuation is decoded together with what it continues.

        Raises TypeError for what are no integers, ValueError for an id that is no token's.
        """
        lone = getattr(ids, "ndim", None) == 0  # such an array has an __iter__ all the same
        if isinstance(ids, (str, bytes)) or lone or not isinstance(ids, Iterable):
            several = ""
            with suppress(TypeError):
                several = f": of one token it is decode([{index(ids)}])"  # type: ignore[arg-type]
            raise TypeError(f"ids is {check.a_or_an(ids)}; integers are needed{several}")
        found = [check.count(i, "a token id", least=0, most=self.vocab_size - 1) for i in ids]
        pieces = [(i, self._pieces[i]) for i in found if self._pieces[i]]
        text = b"".join(piece for _, piece in pieces)
        user_defined = {i for _, i in self._user_defined}
        if pieces and pieces[0][0] not in user_defined:
            text = text.removeprefix(self._prefix)
        return text.decode("utf-8", "replace")

    def _partition(self, text: str) -> list[str | int]:
        """Plain text and user-defined token ids in turn; the longest token (in bytes) is searched first."""
        parts: list[str | int] = [text]
        for token, token_id in self._user_defined:
            if token in text:
                parts = [piece for part in parts for piece in _cut_out(part, token, token_id)]
        return [part for part in parts if part != ""]


def _cut_out(part: str | int, token: str, token_id: int) -> list[str | int]:
    """A part with each occurrence of a token replaced by its id."""
    if isinstance(part, int):
        return [part]
    first, *others = part.split(token)
    return [first, *(piece for plain in others for piece in (token_id, plain))]


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[dict[str, int], list[float]]:
    """Ids by token text, and token types by id."""
    ids: dict[str, int] = {}
    for i, token in enumerate(_texts(metadata, "tokenizer.ggml.tokens")):
        text = token or f"[EMPTY_{i}]"
        if ids.setdefault(text, i) != i:
            raise ValueError(f"tokenizer.ggml.tokens has {told(text)} twice: tokens {ids[text]} and {i}")
    return ids, _numbers(metadata, "tokenizer.ggml.token_type", len(ids), default=np.ones(len(ids)))


def _typed(metadata: Mapping[str, Any], key: str, kind: Any, what: str, default: Any = None) -> Any:
    """The value of a key; ValueError where it is of another type, or missing where there is no default."""
    value = metadata.get(key, default)
    if value is None:
        raise ValueError(f"{key} is missing: text cannot become token ids; {_HINT}")
    if not isinstance(value, kind):
        raise ValueError(f"{key} is {told(value)}; {what} is needed; {_HINT}")
    return value


def _texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    texts: list[str] = _typed(metadata, key, list, "an array of strings")
    return texts


def _numbers(metadata: Mapping[str, Any], key: str, count: int, default: Any = None) -> list[float]:
    """A number for each token."""
    values = np.asarray(_typed(metadata, key, (np.ndarray, list), "an array of numbers", default))
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{key} is an array of {values.dtype}; one of numbers is needed; {_HINT}")
    if len(values) != count:
        raise ValueError(f"{key} has {len(values)} values for {count} tokens")
    numbers: list[float] = values.tolist()
    return numbers


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    return bool(_typed(metadata, key, int, "a bool", default))


def _token_id(key: str, value: Any, vocab_size: int) -> int:
    """The value of a key that names a token, if there is such a token."""
    if type(value) is not int or value not in range(vocab_size):
        raise ValueError(f"{key} is {told(value)}; the vocabulary has tokens 0 to {vocab_size - 1}")
    return value


# Byte-level BPE ("gpt2"): regular expressions cut the text in words, ranked merges join the bytes of a word.


@dataclass(frozen=True)
class _PreTokenizer:
    """What a `tokenizer.ggml.pre` stands for: each pattern cuts the pieces that those before it left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token stays whole, whatever the merges say."""
    add_bos: bool = False


def _either(*patterns: str) -> str:
    return "|".join(patterns)


_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# One part of a camelCase name. Letters outside ASCII count as both cases.
_NOT_LOWER, _NOT_UPPER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_HUMP = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_NOT_LOWER}*{_NOT_UPPER}+|{_NOT_LOWER}+{_NOT_UPPER}*)"
_SYMBOLS_OR_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

# Text that no alternative takes, here a lone tab or newline before a word, is a piece of its own.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _either(_CONTRACTION, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES)
_QWEN2 = _either(_CONTRACTION, _WORD, r"\p{N}", _SYMBOLS, _SPACES)
_MARKED_WORD, _NO_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = _either(_CONTRACTION, _MARKED_WORD, r"\p{N}", _NO_MARKS, _SPACES)
_TEKKEN = _either(_HUMP, r"\p{N}", _SYMBOLS_OR_PATH, _SPACES)
_GPT4O = _either(f"{_HUMP}(?:{_CONTRACTION})?", r"\p{N}{1,3}", _SYMBOLS_OR_PATH, _SPACES)
_DEEPSEEK3 = _either(
    r"[!-/:-@\[-`{-~][A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}")

_FAMILIES = {
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    "falcon": _PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe modern-bert mpt "
    "olmo jais mellum trillion exaone4 granite-docling gigachat a.x-4.0": _PreTokenizer((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": _PreTokenizer((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _PreTokenizer(
        (_QWEN2,)
    ),
    "qwen35": _PreTokenizer((_QWEN35,)),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _PreTokenizer((_GPT4O,)),
    "deepseek-coder": _PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _PreTokenizer(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3)
    ),
}
"""Values of `tokenizer.ggml.pre` that mean the same, and what they mean."""
_PRE_TOKENIZERS = {name: pre for names, pre in _FAMILIES.items() for name in names.split()}


def _pre_tokenizer(metadata: Mapping[str, Any]) -> _PreTokenizer:
    """The rules that `tokenizer.ggml.pre` names; a file without the key means "default"."""
    name = _typed(metadata, "tokenizer.ggml.pre", str, "a string", "default") or "default"
    try:
        return _PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ValueError(f"tokenizer.ggml.pre is {told(name)}; known are {known}; {_HINT}") from None


def _byte_level_bpe(
    ids: dict[str, int], metadata: Mapping[str, Any], pre: _PreTokenizer
) -> Callable[[str], list[int]]:
    """The encoder of plain text for a byte-level vocabulary."""
    import tokenizers  # here: only these vocabularies need it
    from tokenizers import models, pre_tokenizers

    ranked: dict[tuple[str, str], None] = {}  # a merge listed twice has the rank of its first line
    for merge in _texts(metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            raise ValueError(f"tokenizer.ggml.merges has {told(merge)}: not two tokens that join to a third")
        ranked[left, right] = None
    bpe = tokenizers.Tokenizer(models.BPE(ids, list(ranked), ignore_merges=pre.ignore_merges))
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    return partial(_encoded, bpe)


def _encoded(bpe: Any, text: str) -> list[int]:
    """Token ids of a text by an encoder of the tokenizers package."""
    ids: list[int] = bpe.encode(text, add_special_tokens=False).ids
    return ids


@cache
def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable ones themselves, the others
    letters from U+0100 on (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _of_letters(token: str, kind: float) -> bytes:
    """The bytes of a token of a byte-level vocabulary; user-defined ones are texts as they are."""
    letters = _letters()
    if kind == _USER_DEFINED or not letters.keys() >= {*token}:
        return token.encode()
    return bytes(letters[letter] for letter in token)


# SentencePiece BPE ("llama"): no words; the pair of pieces with the best score anywhere is joined first.


class _SentencePiece:
    """The encoder of plain text for a SentencePiece vocabulary.

    Two neighbours may join if together they are a piece: the highest score first, of equal scores the
    leftmost. Ranked merges only come close: they rank the ways to split one piece, which scores do not.
    Tokens of every type are pieces: llama.cpp (llm_tokenizer_spm_session) looks texts up without their type,
    so that the characters of a control token may join to it.
    """

    def __init__(self, ids: dict[str, int], metadata: Mapping[str, Any]) -> None:
        scores = _numbers(metadata, "tokenizer.ggml.scores", len(ids))
        if any(map(isnan, scores)):
            at = next(i for i, score in enumerate(scores) if isnan(score))
            raise ValueError(f"tokenizer.ggml.scores has NaN for token {at}, which no score compares with")
        self._ids = ids
        self._costs = {text: -scores[i] for text, i in ids.items()}
        self._inner_pairs = {text[i : i + 2] for text in self._costs for i in range(len(text) - 1)}
        unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
        self._unknown_id = _token_id("tokenizer.ggml.unknown_token_id", unknown_id, len(ids))
        self.prefix = " " if _flag(metadata, "tokenizer.ggml.add_space_prefix", True) else ""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text in which no user-defined token is left.

        No join spans two characters that stand side by side in no piece. To cut the text there changes
        nothing, and a word that comes again need not be merged again.
        """
        text = (self.prefix + text).replace(" ", "\u2581")
        cuts = [i for i in range(1, len(text)) if text[i - 1 : i + 1] not in self._inner_pairs]
        words = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        ids = {word: [i for piece in self._merge(word) for i in self._piece_ids(piece)] for word in {*words}}
        return [i for word in words for i in ids[word]]

    def _merge(self, word: str) -> list[str]:
        """The pieces of a word."""
        pieces = list(word)  # a piece stands at its first character; "" at those it has taken up
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        queue: list[tuple[float, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(word) and (joined := pieces[left] + pieces[right]) in self._costs:
                heappush(queue, (self._costs[joined], left, joined))

        for i in range(len(word) - 1):
            offer(i, i + 1)
        while queue:
            _, left, joined = heappop(queue)
            right = after[left]
            if not pieces[left] or right == len(word) or pieces[left] + pieces[right] != joined:
                continue  # one of the two has changed since the offer
            pieces[left], pieces[right] = joined, ""
            after[left] = after[right]
            if after[left] < len(word):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [piece for piece in pieces if piece]

    def _piece_ids(self, piece: str) -> list[int]:
        """The id of a piece; else, for a lone character, the ids of its UTF-8 bytes or the unknown token."""
        if piece in self._ids:
            return [self._ids[piece]]
        names = [f"<0x{byte:02X}>" for byte in piece.encode()]
        return [self._ids[name] for name in names] if self._ids.keys() >= {*names} else [self._unknown_id]


def _of_piece(piece: str, kind: float) -> bytes:
    """The bytes of a token of a SentencePiece vocabulary."""
    if kind == _UNKNOWN:
        return "\ufffd".encode()
    if kind == _USER_DEFINED:
        return piece.encode()
    if kind == _BYTE and (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)):
        return bytes.fromhex(byte[1])
    return piece.replace("\u2581", " ").encode()
