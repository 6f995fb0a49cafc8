"""Hostile GGUF files: each is refused with one kind of error, in little time and memory."""

from __future__ import annotations

import gc
import re
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type, GGUFValueType as Value
from gguf_files import array, entry, gguf_file, string, tensor, u32, u64
from hypothesis import given, settings, strategies as st

from cuquant.io import gguf as scanner
from cuquant.io.gguf import File, GGUFError, scan

TOP = 2**64 - 1
INVALID_UTF8 = {
    "lone byte": b"caf\xe9",
    "overlong": b"\xc0\xaf",
    "surrogate": b"\xed\xa0\x80",
    "beyond unicode": b"\xf4\x90\x80\x80",
}


def one_tensor(
    extents: Sequence[int],
    ggml_type: int = Type.F32,
    offset: int = 0,
    rank: int | None = None,
    data: bytes = bytes(256),
) -> bytes:
    return gguf_file([], [tensor("w", extents, ggml_type, offset, rank)], data)


def aligned_to(value: bytes, value_type: int = Value.UINT32) -> bytes:
    return gguf_file([entry("general.alignment", value_type, value)], [tensor("w", [8])], bytes(64))


# Name: (file, pattern that the message must match).
HOSTILE: dict[str, tuple[bytes, str]] = {
    # The file as a whole.
    "empty": (b"", "the file is empty"),
    "magic cut": (b"GGU", "not a GGUF file"),
    "wrong magic": (b"GGML" + gguf_file()[4:], "not a GGUF file: it starts with b'GGML' instead of b'GGUF'$"),
    "Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "not a GGUF file, but a Git LFS pointer, a small text in the file's place: git lfs pull .* file$",
    ),
    "zip file": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "magic only": (b"GGUF", "version needs 4 bytes, but 0 are left"),
    "no counts": (b"GGUF" + u32(3), "counts .* need"),
    "one count": (b"GGUF" + u32(3) + u64(0), "pair of counts .* needs 16 bytes, but 8"),
    "version 0": (gguf_file(version=0), "unknown GGUF version 0"),
    "version 1": (gguf_file(version=1), "version 1 is too old"),
    "version 4": (gguf_file(version=4), "unknown GGUF version 4"),
    "version max": (gguf_file(version=2**32 - 1), "unknown GGUF version 4294967295"),
    "big-endian 2": (gguf_file(version=2 << 24), "big-endian"),
    "big-endian 3": (gguf_file(version=3 << 24), "big-endian"),
    "version 3 in the high half": (gguf_file(version=3 << 16), "unknown GGUF version 196608"),
    # Counts.
    "2^64-1 keys": (gguf_file(entry_count=TOP), f"{TOP} keys are declared"),
    "2^63 keys": (gguf_file(entry_count=2**63), f"{2**63} keys are declared"),
    "keys above the bound": (gguf_file(entry_count=4097), "4097 keys are declared; at most 4096"),
    "keys beyond the file": (gguf_file(entry_count=4096), "list of 4096 keys needs 57344 bytes, but 0"),
    "one key too many": (gguf_file([entry("a", 0, b"\1")], entry_count=2), "list of 2 keys"),
    "one key too many, tensors follow": (
        gguf_file([entry("a", 0, b"\1")], [tensor("w", [8])], bytes(32), entry_count=2),
        "the name of tensor number 0 is empty",
    ),
    "2^64-1 tensors": (gguf_file(tensor_count=TOP), f"{TOP} tensors are declared"),
    "tensors above the bound": (gguf_file(tensor_count=16385), "16385 tensors are declared; at most 16384"),
    "tensors beyond the file": (gguf_file(tensor_count=3), "list of 3 tensors needs 75 bytes, but 0"),
    # Keys.
    "empty key": (gguf_file([entry("", 4, u32(1))]), "key number 0 is empty"),
    "key twice": (gguf_file([entry("a", 0, b"\1"), entry("a", 1, b"\1")]), "key 'a' occurs twice"),
    "key of 65536 bytes": (gguf_file([entry("k" * 65536, 0, b"\1")]), "65536 bytes; at most 65535"),
    "key of 2^62 bytes": (gguf_file([string("a", 2**62) + bytes(16)]), f"key number 0 needs {2**62} bytes"),
    "key of 2^64-1 bytes": (gguf_file([string("a", TOP) + bytes(16)]), f"key number 0 needs {TOP} bytes"),
    "key longer than the file": (gguf_file([string("a", 100) + bytes(16)]), "key number 0 needs 100 bytes"),
    "control characters in a key": (
        gguf_file([entry("\x1b[2J\r\n\u202e", 99, b"")]),
        re.escape(r"key '\x1b[2J\r\n\u202e' has the unknown value type 99"),
    ),
    **{
        f"key of {how}": (gguf_file([entry(raw, 0, b"\1")]), "key number 0 is not valid UTF-8")
        for how, raw in INVALID_UTF8.items()
    },
    # Values.
    "value type 13": (gguf_file([entry("a", 13, bytes(8))]), "key 'a' has the unknown value type 13"),
    "value type max": (gguf_file([entry("a", 2**32 - 1, bytes(8))]), "unknown value type 4294967295"),
    "value type cut": (gguf_file([string("abcdef")]), "key 'abcdef' needs 4 bytes, but 0"),
    "value cut": (gguf_file([entry("a", Value.UINT64, bytes(7))]), "key 'a' needs 8 bytes, but 7"),
    "bool 2": (gguf_file([entry("a", Value.BOOL, b"\2")]), "key 'a': a bool is the byte 2"),
    "bool 255": (gguf_file([entry("a", Value.BOOL, b"\xff")]), "a bool is the byte 255"),
    "string of 2^62 bytes": (gguf_file([entry("a", 8, u64(2**62))]), f"key 'a' needs {2**62} bytes"),
    "string of 2^63 bytes": (gguf_file([entry("a", 8, u64(2**63))]), f"key 'a' needs {2**63} bytes"),
    "string that wraps to the header": (gguf_file([entry("a", 8, u64(TOP - 40))]), "key 'a' needs"),
    "string one byte too long": (gguf_file([entry("a", 8, string("bc", 3))]), "needs 3 bytes, but 2"),
    # Arrays.
    "array without a count": (gguf_file([entry("abc", 9, u32(4))]), "key 'abc' needs 12 bytes, but 4"),
    "array of unknown type": (
        gguf_file([array("a", 13, 0)]),
        "array of key 'a' has the unknown value type 13",
    ),
    "array of arrays": (gguf_file([array("a", 9, 1, u32(4) + u64(0))]), "key 'a' .*nested"),
    "array of 2^40 bytes": (gguf_file([array("a", 0, 2**40)]), f"key 'a' needs {2**40} bytes, but 0"),
    "array of 2^40 strings": (gguf_file([array("a", 8, 2**40)]), f"key 'a' needs {2**43} bytes, but 0"),
    "array of 2^61 float64": (gguf_file([array("a", 12, 2**61, bytes(64))]), f"needs {2**64} bytes, but 64"),
    "array of 2^64-1 uint16": (gguf_file([array("a", 2, TOP)]), f"needs {2 * TOP} bytes"),
    "array one number short": (gguf_file([array("a", 5, 3, bytes(8))]), "key 'a' needs 12 bytes, but 8"),
    "array of a bad bool": (gguf_file([array("a", 7, 3, b"\0\1\x80")]), "a bool is the byte 128"),
    "bools above the bound": (
        gguf_file([array("a", 7, 1_200_001, bytes(1_200_001))]),
        "key 'a' brings all arrays above 1200000 strings and bools",
    ),
    "array of one string of 2^62 bytes": (gguf_file([array("a", 8, 1, u64(2**62))]), "key 'a' needs"),
    "array whose first string wraps": (
        gguf_file([array("a", 8, 2, u64(TOP - 7) + u64(0))]),
        "key 'a': string 1 of 2 lies beyond the end",
    ),
    "array one string short": (
        gguf_file([array("a", 8, 2, string("12345678"))]),
        "key 'a': string 1 of 2 lies beyond the end of the file, which is damaged or cut short",
    ),
    "array whose last string is cut": (
        gguf_file([array("a", 8, 1, string("ab", 3))]),
        "needs 11 bytes, but 10",
    ),
    # Alignment.
    "alignment 0": (aligned_to(u32(0)), "'general.alignment' is 0, not a power of two"),
    "alignment 1": (aligned_to(u32(1)), "'general.alignment' is 1, not a power of two from 8"),
    "alignment 24": (aligned_to(u32(24)), "'general.alignment' is 24"),
    "alignment 2^21": (aligned_to(u32(1 << 21)), "2097152, not a power of two from 8 to 1048576"),
    "alignment 2^31": (aligned_to(u32(1 << 31)), "'general.alignment' is 2147483648"),
    "alignment UINT64": (aligned_to(u64(32), Value.UINT64), "has the type UINT64; it must be UINT32"),
    "alignment INT32": (aligned_to(u32(32), Value.INT32), "has the type INT32; it must be UINT32"),
    "alignment STRING": (aligned_to(string("32"), Value.STRING), "has the type STRING"),
    "alignment ARRAY": (aligned_to(u32(4) + u64(1) + u32(32), Value.ARRAY), "has the type ARRAY"),
    "padding cut": (gguf_file([], [tensor("w", [8])]), "tensor 'w' ends at byte"),
    # Tensor descriptions.
    "empty tensor name": (gguf_file([], [tensor("", [8])], bytes(32)), "name of tensor number 0 is empty"),
    "tensor name of 64 bytes": (gguf_file([], [tensor("n" * 64, [8])], bytes(32)), "64 bytes; at most 63"),
    "tensor name of 2^63 bytes": (
        gguf_file([], [string("n", 2**63) + bytes(64)]),
        f"name of tensor number 0 needs {2**63} bytes",
    ),
    "tensor twice": (
        gguf_file([], [tensor("w", [8]), tensor("w", [8], offset=32)], bytes(64)),
        "tensor 'w' occurs twice",
    ),
    **{
        f"tensor name of {how}": (
            gguf_file([], [tensor(raw, [8])], bytes(32)),
            "tensor number 0 is not valid UTF-8",
        )
        for how, raw in INVALID_UTF8.items()
    },
    "control characters in a tensor name": (
        gguf_file([], [tensor("a\nb\x07", [0])], bytes(32)),
        re.escape(r"tensor 'a\nb\x07' has the shape (0,)"),
    ),
    "a block of a scalar": (one_tensor([], Type.Q8_0), "tensor 'w' has rows of 1 weights; Q8_0 needs"),
    "5 dimensions": (one_tensor([1] * 5), "tensor 'w' has 5 dimensions; 0 to 4"),
    "2^32-1 dimensions": (one_tensor([8], rank=2**32 - 1), "tensor 'w' has 4294967295 dimensions"),
    "dimensions cut": (gguf_file([], [tensor("w", [8], rank=4)]), "tensor 'w' needs 44 bytes, but 20"),
    "zero dimension": (one_tensor([8, 0, 8]), r"tensor 'w' has the shape \(8, 0, 8\)"),
    "type removed": (one_tensor([32], 4), "tensor 'w' has the unknown type 4 "),
    "type unknown": (one_tensor([32], 999), "tensor 'w' has the unknown type 999"),
    "type max": (one_tensor([32], 2**32 - 1), "tensor 'w' has the unknown type 4294967295"),
    "row of half a block": (one_tensor([48, 2], Type.Q4_0), "rows of 48 weights; Q4_0 needs blocks of 32"),
    "row of a k-quant": (one_tensor([128, 2], Type.Q4_K), "rows of 128 weights; Q4_K needs blocks of 256"),
    "transposed blocks": (one_tensor([2, 32], Type.Q8_0), "rows of 2 weights; Q8_0"),
    # Tensor data.
    "offset unaligned": (one_tensor([8], offset=16), "offset 16, not a multiple of the alignment 32"),
    "offset near 2^64": (one_tensor([8], offset=2**64 - 32), f"ends at byte {2**64 + 64}, the file at 320"),
    "offset that wraps to byte 0": (one_tensor([8], offset=2**64 - 64), f"ends at byte {2**64 + 32}"),
    "offset at the end": (one_tensor([8], offset=256), "ends at byte 352, the file at 320"),
    "data one byte short": (
        one_tensor([8], data=bytes(31)),
        "ends at byte 96, the file at 95: it is cut short, perhaps an incomplete download",
    ),
    "extents wrap to 0": (one_tensor([2**32, 2**32]), "tensor 'w' ends at byte"),
    "extents wrap to 32": (one_tensor([32, 2**63 + 1, 2]), "tensor 'w' ends at byte"),
    "bytes wrap": (one_tensor([2**62, 4, 1, 1]), f"ends at byte {2**66 + 96}"),
    "extents of 2^64-1": (one_tensor([TOP] * 4), "tensor 'w' ends at byte"),
    "same data twice": (
        gguf_file([], [tensor("v", [8]), tensor("w", [8])], bytes(64)),
        "tensor 'w' overlaps 'v'",
    ),
    "overlap by a byte": (
        gguf_file([], [tensor("v", [33], Type.I8), tensor("w", [8], offset=32)], bytes(64)),
        "tensor 'w' overlaps 'v'",
    ),
    "overlap, listed backwards": (
        gguf_file([], [tensor("v", [8], offset=32), tensor("w", [16])], bytes(64)),
        "tensor 'v' overlaps 'w'",
    ),
}


@pytest.mark.parametrize(("raw", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_refused_with_little_time_and_memory(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    gc.disable()  # of all that other tests have left it takes longer than is allowed here
    try:
        start = time.process_time()
        with pytest.raises(GGUFError, match=message) as caught:
            File(path)
        assert time.process_time() - start < 0.1
    finally:
        gc.enable()
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 1000

    tracemalloc.start()
    with pytest.raises(GGUFError):
        File(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("raw", INVALID_UTF8.values(), ids=INVALID_UTF8.keys())
def test_invalid_utf8_in_values_is_found_when_they_are_decoded(raw: bytes) -> None:
    entries = [entry("name", 8, string(raw)), array("tokens", 8, 2, string("fine") + string(raw))]
    metadata = scan(gguf_file(entries), "bad.gguf").metadata
    with pytest.raises(GGUFError, match=r"bad\.gguf: key 'name' is not valid UTF-8"):
        metadata["name"]
    with pytest.raises(GGUFError, match=r"bad\.gguf: key 'tokens': string 1 is not valid UTF-8"):
        metadata["tokens"]


def test_bounds_are_of_the_whole_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is within the bound; it is their sum that is not."""
    monkeypatch.setattr(scanner, "MAX_ARRAY_ITEMS", 5)
    monkeypatch.setattr(scanner, "MAX_TEXT_BYTES", 20)
    items = [array("a", 7, 3, bytes(3)), array("b", 8, 3, string("") * 3)]
    texts = [entry("a" * 10, 0, b"x"), entry("b" * 11, 0, b"y")]
    scan(gguf_file(items[:1]), "good.gguf")
    scan(gguf_file(texts[:1]), "good.gguf")
    with pytest.raises(GGUFError, match="key 'b' brings all arrays above 5 strings and bools"):
        scan(gguf_file(items), "bad.gguf")
    with pytest.raises(GGUFError, match="key number 1 brings keys and names above 20 bytes"):
        scan(gguf_file(texts), "bad.gguf")


def small_good_file() -> bytes:
    """Every kind of value, two tensors, and not a byte after their data."""
    entries = [
        entry("general.alignment", Value.UINT32, u32(16)),
        entry("flag", Value.BOOL, b"\1"),
        entry("name", Value.STRING, string("bär")),
        array("numbers", Value.INT16, 3, bytes(6)),
        array("flags", Value.BOOL, 2, b"\1\0"),
        array("words", Value.STRING, 3, string("a") + string("") + string("bc")),
    ]
    tensors = [tensor("v", [6], Type.F16), tensor("w", [32, 2], Type.Q4_0, offset=16)]
    return gguf_file(entries, tensors, bytes(16 + 36), alignment=16)


GOOD = small_good_file()


def test_every_shorter_file_is_refused() -> None:
    assert list(scan(GOOD, "good.gguf").tensors) == ["v", "w"]
    for size in range(len(GOOD)):
        with pytest.raises(GGUFError):
            scan(GOOD[:size], "cut.gguf")


POSITIONS = st.integers(0, len(GOOD) - 1)
EXTREMES = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, TOP - 31, TOP])
MUTATIONS = st.one_of(
    st.tuples(st.just("flip"), POSITIONS, st.integers(1, 255)),
    st.tuples(st.just("write"), POSITIONS, EXTREMES),
    st.tuples(st.just("cut"), POSITIONS, st.just(0)),
    st.tuples(st.just("repeat"), POSITIONS, st.integers(1, 64)),
)


def mutate(raw: bytes, kind: str, at: int, value: int) -> bytes:
    at = min(at, len(raw))
    if kind == "flip":
        return raw[:at] + bytes(byte ^ value for byte in raw[at : at + 1]) + raw[at + 1 :]
    if kind == "write":
        return raw[:at] + u64(value) + raw[at + 8 :]
    if kind == "cut":
        return raw[:at]
    return raw[: at + value] + raw[at:]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(MUTATIONS, min_size=1, max_size=4))
def test_mutated_files_are_refused_or_stay_inside_the_file(mutations: list[tuple[str, int, int]]) -> None:
    raw = GOOD
    for mutation in mutations:
        raw = mutate(raw, *mutation)
    try:
        header = scan(raw, "mutated.gguf")
        dict(header.metadata)
    except GGUFError:
        return
    for info in header.tensors.values():
        assert header.data_offset <= info.offset
        assert info.offset + info.nbytes <= len(raw)
        assert info.nbytes > 0
