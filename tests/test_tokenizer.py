"""The tokenizer of GGUF vocabularies, against hand-derived cuts and merges written from the definitions."""

from __future__ import annotations

import pickle
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from synthetic import Spec, write
from vocabularies import (
    ALPHABET,
    CONTROL,
    SPACED,
    USER_DEFINED,
    Metadata,
    byte_level,
    random_scores,
    read_back,
    sentencepiece,
    spelled,
    tokens_of,
    without,
)

import cuquant as cq
from cuquant.eval.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "examples" / "data"
HELD_OUT = (DATA / "heldout-public.txt").read_text(encoding="utf-8")
PRE_TOKENIZERS = ["default", "falcon", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "tekken"]
PRE_TOKENIZERS += ["gpt-4o", "deepseek-coder", "deepseek-v3"]


@cache
def nano_llama() -> Metadata:
    reader = gguf.GGUFReader(DATA / "nano-llama-f16.gguf")
    return {key: field.contents() for key, field in reader.fields.items()}


@cache
def nano_llama_as(pre: str) -> Tokenizer:
    return Tokenizer.from_metadata(nano_llama() | {"tokenizer.ggml.pre": pre})


def test_real_file_gives_the_known_number_of_tokens_and_reads_back() -> None:
    tokenizer = Tokenizer.from_metadata(nano_llama())
    ids, tokens = tokenizer.encode(HELD_OUT), nano_llama()["tokenizer.ggml.tokens"]
    assert len(ids) == 61182
    assert read_back([tokens[i] for i in ids]) == HELD_OUT
    assert tokenizer.decode(ids) == HELD_OUT
    assert (tokenizer.vocab_size, tokenizer.add_bos, tokenizer.bos_id) == (4096, False, 0)


def test_a_model_stands_for_its_metadata() -> None:
    model = cq.open(DATA / "nano-llama-f16.gguf", "cpu")
    text = HELD_OUT[:1000]
    expected = Tokenizer.from_metadata(model.metadata).encode(text)
    np.testing.assert_array_equal(Tokenizer.from_metadata(model).encode(text), expected)
    for path in (model.path, str(model.path)):
        np.testing.assert_array_equal(Tokenizer.from_metadata(path).encode(text), expected)


@pytest.mark.parametrize("kind", [*PRE_TOKENIZERS, "sentencepiece"])
def test_pickled_tokenizers_do_the_same(kind: str) -> None:
    """As processes of a pool take them."""
    if kind == "sentencepiece":
        tokenizer = Tokenizer.from_metadata(sentencepiece(random_scores(0, tied=False)))
    else:
        tokenizer = nano_llama_as(kind)
    again = pickle.loads(pickle.dumps(tokenizer))
    text = HELD_OUT[:20000] + "don't 12345 HTTPServer \t\n"
    np.testing.assert_array_equal(again.encode(text), tokenizer.encode(text))
    assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (again.vocab_size, again.add_bos, again.bos_id) == (
        tokenizer.vocab_size,
        tokenizer.add_bos,
        tokenizer.bos_id,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (5, "an int; a str is needed$"),
        (b"12", r"a bytes; a str is needed: pass text\.decode\(\)"),
        (np.array([1, 2]), "an ndarray; a str is needed$"),
        (None, "None; a str is needed$"),
    ],
)
def test_what_is_no_text(text: Any, said: str) -> None:
    for metadata in (nano_llama(), sentencepiece({"a": 0.0})):
        with pytest.raises(TypeError, match=f"^text is {said}"):
            Tokenizer.from_metadata(metadata).encode(text)
        with pytest.raises(ValueError, match=r"^text is no text in Unicode: .* position 1: surrogates"):
            Tokenizer.from_metadata(metadata).encode("a\ud800")


def test_what_has_no_vocabulary() -> None:
    for wrong, said in ((None, "None"), (3, "an int"), ([("a", 1)], "a list")):
        with pytest.raises(
            TypeError, match=rf"^metadata is {said}; a mapping, a cuquant\.Model or the path of"
        ):
            Tokenizer.from_metadata(wrong)  # type: ignore[arg-type]


def test_one_id_is_no_list() -> None:
    tokenizer = Tokenizer.from_metadata(nano_llama())
    for one in (3, np.int64(3), np.array(3), np.array(3, np.uint8)):
        with pytest.raises(TypeError, match=r"integers are needed: of one token it is decode\(\[3\]\)$"):
            tokenizer.decode(one)  # type: ignore[arg-type]
    for none, said in ((None, "None"), (np.array(3.0), "an ndarray")):
        with pytest.raises(TypeError, match=rf"^ids is {said}; integers are needed$"):
            tokenizer.decode(none)  # type: ignore[arg-type]


@given(text=st.text(), pre=st.sampled_from(PRE_TOKENIZERS))
@settings(deadline=None)
def test_no_pre_tokenizer_loses_a_byte(text: str, pre: str) -> None:
    tokens = nano_llama()["tokenizer.ggml.tokens"]
    tokenizer = nano_llama_as(pre)
    ids = tokenizer.encode(text)
    assert read_back([tokens[i] for i in ids]) == tokenizer.decode(ids) == text


def words(pre: str, text: str) -> list[str]:
    """Where `pre` cuts a text: merges that join whatever neighbours there are leave one token per word."""
    symbols = spelled(text)
    cuts = sorted(combinations(range(len(symbols) + 1), 3), key=lambda cut: cut[2] - cut[0])
    merges = dict.fromkeys(f"{symbols[a:b]} {symbols[b:c]}" for a, b, c in cuts)
    return [read_back([token]) for token in tokens_of(byte_level([*merges], pre=pre, bos_token_id=0), text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", " don", "'t"]),
        ("gpt-2", ["DON", "'", "T"]),
        ("mpt", ["a", " ", " b", " 1234", "!?", "\t", "y"]),
        ("gpt-2", ["a", "\n", "\n", "b", "  "]),
        ("smollm", ["x", " ", "1", "2"]),
        ("starcoder", ["don", "'t", " go"]),
        ("default", ["a", ",", "b", " ", "123", "4", ",", " ", "12"]),
        ("default", ["123", "4", " `"]),
        ("falcon", ["123", "4", " ", "`"]),
        ("llama-bpe", ["DON", "'T"]),
        ("llama3", ["a", " ", "123", "456", "7"]),
        ("llama-bpe", ["(foo", ")\n\n", "  ", " b"]),
        ("llama-bpe", ["!\n", "/"]),
        ("qwen2", ["it", "'S", " ", "\tx", " \n", "y", " ", "1", "2"]),
        ("dbrx", ["e", "\u0301", "123", "4"]),
        ("qwen35", ["e\u0301", "1", "2"]),
        ("tekken", ["hello", "World", " HTTPServer", " ", "1", "2"]),
        ("tekken", ["don", "'t", "\n", "!\n/"]),
        ("gpt-4o", ["don't", " I'LL", " ", "123", "4"]),
        ("deepseek-coder", ["a", "\u4e16\u754c", " ", "1", "2", "\n", "\n", " b"]),
        ("deepseek-v3", ["x", ".append", " ", "123", "4", ".", "\u00e9t"]),
        ("deepseek-v3", ["a", "\u4e16\u754c", "b"]),
    ],
)
def test_words_before_merging(pre: str, expected: list[str]) -> None:
    assert words(pre, "".join(expected)) == expected


def test_missing_pre_means_default() -> None:
    text = HELD_OUT[:5000]
    ids = Tokenizer.from_metadata(without(nano_llama(), "pre")).encode(text)
    np.testing.assert_array_equal(ids, nano_llama_as("default").encode(text))
    assert len(ids) != len(nano_llama_as("gpt-2").encode(text))


@pytest.mark.parametrize(
    ("merges", "expected"),
    [
        (["a b", "b c"], ["ab", "c"]),
        (["b c", "a b"], ["a", "bc"]),
        (["b c", "a b", "b c"], ["a", "bc"]),  # the first line of a repeated merge counts
        (["a b", "ab c"], ["abc"]),
    ],
)
def test_merges_go_by_rank(merges: list[str], expected: list[str]) -> None:
    assert tokens_of(byte_level(merges), "abc") == expected


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("qwen2", ["ab", "c"])])
def test_llama3_keeps_a_word_that_is_a_token(pre: str, expected: list[str]) -> None:
    assert tokens_of(byte_level(["a b"], extra=["abc"], pre=pre, bos_token_id=0), "abc") == expected


def test_only_user_defined_tokens_are_parsed() -> None:
    types = {"<user>": USER_DEFINED, "<control>": CONTROL}
    metadata = byte_level(extra=[*types], types=types)
    assert tokens_of(metadata, "a<user><user>") == ["a", "<user>", "<user>"]
    assert tokens_of(metadata, "<control>") == [*"<control>"]


@pytest.mark.parametrize("text", ["<|im_end|>", "</s>", "<eos>", "[e~["])
def test_what_ends_a_generation_is_no_user_defined_token(text: str) -> None:
    """Whatever its type, by the list in llama.cpp's src/llama-vocab.cpp."""
    metadata = byte_level(extra=[text, "<user>"], types={text: USER_DEFINED, "<user>": USER_DEFINED})
    assert tokens_of(metadata, f"{text}<user>") == [*text, "<user>"]


def test_longest_user_defined_token_is_searched_first() -> None:
    types = {"ab": USER_DEFINED, "bcd": USER_DEFINED}
    assert tokens_of(byte_level(extra=[*types], types=types), "abcdab") == ["a", "bcd", "ab"]


@pytest.mark.parametrize(
    ("metadata", "add_bos", "bos_id"),
    [
        (sentencepiece(SPACED), True, 1),
        (sentencepiece(SPACED, bos_token_id=5, add_bos_token=False), False, 5),
        (byte_level(), False, None),
        (byte_level(add_bos_token=True, bos_token_id=7), True, 7),
        (byte_level(pre="llama-bpe", bos_token_id=3), True, 3),
        (byte_level(pre="tekken", bos_token_id=3), True, 3),
        (byte_level(pre="llama-bpe", add_bos_token=False), False, None),
    ],
)
def test_beginning_of_text(metadata: Metadata, add_bos: bool, bos_id: int | None) -> None:
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.add_bos, tokenizer.bos_id) == (add_bos, bos_id)
    assert tokenizer.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    assert bos_id is None or bos_id not in tokenizer.encode("a")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"model is None; known are 'gpt2' and 'llama'; .*\.npy"),
        ({"tokenizer.ggml.model": "bert"}, r"model is 'bert'"),
        (byte_level(pre="kimi-k2"), r"pre is 'kimi-k2'; known are .*gpt-2.*qwen2.*\.npy"),
        (without(byte_level(), "tokens"), r"tokens is missing.*\.npy"),
        (without(byte_level(), "merges"), "merges is missing"),
        (without(sentencepiece(SPACED), "scores"), "scores is missing"),
        (byte_level(extra=["a"]), "tokens has 'a' twice: tokens 97 and 256"),
        (byte_level() | {"tokenizer.ggml.token_type": np.ones(3)}, "token_type has 3 values for 256"),
        (sentencepiece(SPACED) | {"tokenizer.ggml.scores": np.ones(3)}, "scores has 3 values for 262"),
        *(
            (byte_level() | {"tokenizer.ggml.merges": [merge]}, f"merges has '{merge}'")
            for merge in ("ab", "a b c", "ab c", "a b")
        ),
        (byte_level(bos_token_id=256), "bos_token_id is 256; the vocabulary has tokens 0 to 255"),
        (byte_level(bos_token_id="\x1b[2J"), r"bos_token_id is '\\x1b\[2J'; the vocabulary has"),
        *(
            (byte_level() | {f"tokenizer.ggml.{key}": value}, f"{key} is {shown}.* needed")
            for key, value, shown in (
                ("tokens", np.arange(3), r"\[0, 1, 2\]; an array of strings"),
                ("merges", "", "''; an array of strings"),
                ("token_type", 5, "5; an array of numbers"),
                ("token_type", ["1", "1"], "an array of <U1; one of numbers"),
                ("pre", np.arange(3), r"\[0, 1, 2\]; a string"),
                ("pre", 5, "5; a string"),
                ("add_bos_token", np.ones(2), r"\[1\.0, 1\.0\]; a bool"),
                ("add_bos_token", [], r"\[\]; a bool"),
            )
        ),
        *(
            (sentencepiece(SPACED) | {f"tokenizer.ggml.{key}": value}, f"{key} is {shown}")
            for key, value, shown in (
                ("model", np.arange(3), r"\[0, 1, 2\]; known are 'gpt2'"),
                ("scores", "x", "'x'; an array of numbers"),
                ("bos_token_id", np.arange(3), r"\[0, 1, 2\]; the vocabulary has"),
                ("bos_token_id", 1.0, "1.0; the vocabulary has"),
                ("unknown_token_id", [1, 2], r"\[1, 2\]; the vocabulary has"),
                ("add_space_prefix", "no", "'no'; a bool"),
            )
        ),
        (sentencepiece(SPACED, unknown_token_id=-1), "unknown_token_id is -1"),
        (sentencepiece(SPACED | {"a": np.nan}), "scores has NaN for token 261"),
        (byte_level(pre="llama-bpe"), "bos_token_id is missing"),
    ],
)
def test_malformed_vocabularies(metadata: Metadata, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.model": "x" * 10**5},
        byte_level(pre="x" * 10**5),
        byte_level(extra=["x" * 10**5] * 2),
        byte_level() | {"tokenizer.ggml.merges": ["x\n" * 10**5]},
        byte_level() | {"tokenizer.ggml.model": np.arange(300)},
    ],
    ids=["model", "pre", "tokens", "merges", "array"],
)
def test_long_values_are_told_in_a_line(metadata: Metadata) -> None:
    with pytest.raises(ValueError, match=r"\.\.\.") as error:
        Tokenizer.from_metadata(metadata)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_a_malformed_vocabulary_is_told_with_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", Spec(keys={"tokenizer.ggml.pre": "kimi-k2"}))
    for source in (path, cq.open(path, "cpu")):
        with pytest.raises(ValueError, match=r"m\.gguf: tokenizer\.ggml\.pre is 'kimi-k2'; known are"):
            Tokenizer.from_metadata(source)


def test_empty_token_texts_keep_their_places() -> None:
    metadata = byte_level(extra=["", "", "xy"], types={"xy": USER_DEFINED})
    assert tokens_of(metadata, "axy") == ["a", "xy"]


def test_what_tokens_read_as() -> None:
    """Control tokens as nothing, parts of a character as U+FFFD until the rest is there."""
    marks = {"<|end|>": CONTROL, "<|im_end|>": USER_DEFINED, "<|user|>": USER_DEFINED, "tab\t": USER_DEFINED}
    tokenizer = Tokenizer.from_metadata(byte_level(["a b"], [*marks], marks))
    letters = {letter: i for i, letter in enumerate(ALPHABET)}
    first, second = (letters[letter] for letter in spelled("\u00e9"))
    for ids, text in (
        ([256], "ab"),
        ([first], "\ufffd"),
        ([first, second], "\u00e9"),
        (np.array([257, 256, 258, 259, 260]), "ab<|user|>tab\t"),
        ([], ""),
    ):
        assert tokenizer.decode(ids) == text
    for text in ("\u00e9", "a b", "\u2581"):  # user-defined ones are texts as they are
        user = Tokenizer.from_metadata(byte_level((), [f"<{text}>"], {f"<{text}>": USER_DEFINED}))
        assert user.decode(user.encode(f"a<{text}>b")) == f"a<{text}>b"
    marked = sentencepiece(
        {"\u2581x": 0.0, "  ": 0.0, "<0x4>": 0.0}, {"\u2581x": USER_DEFINED, "  ": USER_DEFINED}
    )
    user = Tokenizer.from_metadata(marked)
    assert user.decode(user.encode("  ")) == "  "
    assert user.decode([258]) == "\u2581x"
    assert user.decode([2 + 0x41, 260]) == "A<0x4>"
    pieces = Tokenizer.from_metadata(sentencepiece({"\u2581a": 0.0}))
    assert pieces.decode([0, 1, 2 + 0x41, 258]) == "\ufffdA a"
    assert (pieces.decode([258, 258]), pieces.decode([2 + 0x41, 258])) == ("a a", "A a")
    for wrong in (-1, 261):
        with pytest.raises(ValueError, match=f"a token id is {wrong}; allowed are 0 to 260"):
            tokenizer.decode([0, wrong])
    others: list[Any] = ["12", b"5", [1.5], np.array([1.0])]
    for other in others:
        with pytest.raises(TypeError, match=r"(ids is|a token id is) an? .*needed"):
            tokenizer.decode(other)
