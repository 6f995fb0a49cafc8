"""SentencePiece vocabularies of GGUF files, against joins written from the definition."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from vocabularies import (
    BYTE,
    CONTROL,
    SPACED,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    random_scores,
    sentencepiece,
    tokens_of,
    vocabulary,
)

from cuquant.eval.tokenizer import Tokenizer


def greedy_tokens(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece BPE by its definition: of all joins the best score, of equal ones the leftmost."""
    pieces = [*text.replace(" ", "\u2581")]
    while True:
        joins = [left + right for left, right in pairwise(pieces)]
        best = max((join for join in joins if join in scores), key=scores.__getitem__, default=None)
        if best is None:
            break
        i = max(range(len(joins)), key=lambda i: (scores.get(joins[i], -np.inf), -i))
        pieces[i : i + 2] = [joins[i]]
    fallback = [[piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()] for piece in pieces]
    return [token for tokens in fallback for token in tokens]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_sentencepiece_joins_by_score(seed: int, tied: bool) -> None:
    scores = random_scores(seed, tied)
    text = "".join(np.random.default_rng(seed + 100).choice([*"aaab  \n\u00e9"], 400))
    expected = greedy_tokens(" " + text, scores)
    assert tokens_of(sentencepiece(scores), text) == expected
    assert any(len(token) > 2 for token in expected)


@given(
    text=st.text(st.sampled_from("aab \n") | st.characters(codec="utf-8"), max_size=40), tied=st.booleans()
)
@settings(deadline=None)
def test_sentencepiece_on_any_text(text: str, tied: bool) -> None:
    scores = random_scores(7, tied)
    assert tokens_of(sentencepiece(scores, add_space_prefix=False), text) == greedy_tokens(text, scores)


@pytest.mark.parametrize(
    ("prefix", "text", "expected"),
    [
        (True, "a a", ["\u2581a", "\u2581a"]),
        (False, "a a", ["a", "\u2581a"]),
        (True, "  a", ["\u2581\u2581", "\u2581a"]),
        (False, "  a", ["\u2581\u2581", "a"]),
        (True, "", []),
        (True, "<user>a<user>", ["<user>", "\u2581a", "<user>"]),
        (False, "<user>a<user>", ["<user>", "a", "<user>"]),
    ],
)
def test_space_prefix(prefix: bool, text: str, expected: list[str]) -> None:
    metadata = sentencepiece(SPACED | {"<user>": 0.0}, {"<user>": USER_DEFINED}, add_space_prefix=prefix)
    assert tokens_of(metadata, text) == expected


@pytest.mark.parametrize("token_type", [1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE])
def test_tokens_of_every_type_are_joined(token_type: int) -> None:
    """As try_add_bigram and resegment look them up, llama.cpp's src/llama-vocab.cpp."""
    metadata = sentencepiece({"a": -2.0, "b": -3.0, "ab": 0.0}, {"ab": token_type}, add_space_prefix=False)
    assert tokens_of(metadata, "ab") == ["ab"]
    assert tokens_of(metadata, "<s>") == [f"<0x{byte:02X}>" for byte in b"<s>"]  # nothing joins to "<s"


def test_characters_without_byte_tokens_are_unknown() -> None:
    tokens = ["<unk>", "<s>", "a", "<0xC3>"]
    types = {"<unk>": UNKNOWN, "<s>": CONTROL, "<0xC3>": BYTE}
    metadata = vocabulary("llama", tokens, types, scores=np.zeros(4, np.float32), add_space_prefix=False)
    assert tokens_of(metadata, "a\u00e9a") == ["a", "<unk>", "a"]


@given(text=st.text(st.sampled_from("ab \u00e9\U0001f600<s>0x41_")))
@settings(deadline=None)
def test_sentencepiece_is_read_back(text: str) -> None:
    """Words with a space before, bytes of characters that are no piece, a control token's text."""
    scores = {
        "\u2581": -1.0,
        "a": -2.0,
        "b": -2.0,
        "\u2581a": -1.5,
        "<s>0": -9.0,
        "_": -3.0,
        "\u2581\u2581": -0.5,
    }
    for prefix in (True, False):
        tokenizer = Tokenizer.from_metadata(sentencepiece(scores, add_space_prefix=prefix))
        assert tokenizer.decode(tokenizer.encode(text)) == text
