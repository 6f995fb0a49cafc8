"""Vocabularies as a GGUF file has them, made of a few tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuquant.eval.tokenizer import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""Types of tokens, of which 1 is a normal one."""

Metadata = dict[str, Any]

SPACED = {"\u2581": -3.0, "\u2581\u2581": -1.0, "\u2581a": -2.0, "a": -4.0}
"""Pieces of a SentencePiece vocabulary, some with a space."""


def byte_alphabet() -> list[str]:
    """The character of each byte: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


ALPHABET = byte_alphabet()


def spelled(text: str) -> str:
    return "".join(ALPHABET[byte] for byte in text.encode())


def read_back(tokens: Sequence[str]) -> str:
    return bytes(ALPHABET.index(character) for token in tokens for character in token).decode()


def vocabulary(model: str, tokens: Sequence[str], types: Mapping[str, int], **keys: Any) -> Metadata:
    """Metadata of a vocabulary; tokens are normal but for those in `types`."""
    keys |= {"model": model, "tokens": [*tokens]}
    keys["token_type"] = np.array([types.get(token, 1) for token in tokens], np.int32)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def byte_level(
    merges: Sequence[str] = (), extra: Sequence[str] = (), types: Mapping[str, int] | None = None, **keys: Any
) -> Metadata:
    """A byte-level vocabulary: 256 bytes, what the merges make, and tokens that no merge makes."""
    made = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    keys = {"pre": "gpt-2", "merges": [*merges], **keys}
    return vocabulary("gpt2", [*ALPHABET, *made, *extra], types or {}, **keys)


def sentencepiece(
    scores: Mapping[str, float], types: Mapping[str, int] | None = None, **keys: Any
) -> Metadata:
    """A SentencePiece vocabulary: unknown, begin of text, 256 byte tokens, and scored pieces."""
    reserved = {"<unk>": UNKNOWN, "<s>": CONTROL} | {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    values = np.array([0.0] * len(reserved) + [*scores.values()], np.float32)
    return vocabulary("llama", [*reserved, *scores], reserved | dict(types or {}), scores=values, **keys)


def without(metadata: Metadata, key: str) -> Metadata:
    return {k: v for k, v in metadata.items() if k != f"tokenizer.ggml.{key}"}


def tokens_of(metadata: Metadata, text: str) -> list[str]:
    """What `text` becomes, as token texts."""
    ids = Tokenizer.from_metadata(metadata).encode(text)
    assert ids.dtype == np.int32
    return [metadata["tokenizer.ggml.tokens"][i] for i in ids]


def random_scores(seed: int, tied: bool) -> dict[str, float]:
    """Pieces of one to five characters, some with a space inside, with distinct scores or only four."""
    rng = np.random.default_rng(seed)
    made = ["".join(rng.choice([*"aab\u2581\n"], rng.integers(2, 6))) for _ in range(120)]
    pieces = sorted({*"ab\u2581", *made})
    order = rng.permutation(len(pieces))
    return {piece: -float(order[i] % 4 if tied else order[i]) for i, piece in enumerate(pieces)}
