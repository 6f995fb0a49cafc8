"""The file of a cache of keys and values, also damaged."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_kvcache import F, filled, state, tokens

import cuquant as cq


@pytest.mark.parametrize(
    "options", [{}, {"key_scales": "halves"}, {"track_attention": True}, {"capacity": {8: 9, 3: 20}}]
)
def test_save_and_load(tmp_path: Path, options: dict[str, Any]) -> None:
    cache = filled(12, 3, [8, 3] * 6, **({"widths": (8, 3)} | options))
    cache.evict([[3], [-1], [7]])
    cache.save(tmp_path / "cache.safetensors")
    loaded = cq.KVCache.load(tmp_path / "cache.safetensors")
    assert state(loaded) == state(cache)
    for name in ("capacity", "bits", "rotate", "auto_scales", "track_attention", "nbytes"):
        assert getattr(loaded, name) == getattr(cache, name)
    for each in (cache, loaded):
        each.append(*tokens(3, 2, 2, 16, seed=3), 3)
    assert state(loaded) == state(cache)


def test_save_and_load_of_a_full_cache(tmp_path: Path) -> None:
    """Which has no more tokens than there is room for, of all widths together."""
    path = tmp_path / "cache"
    cache = filled(6, 1, [8, 8, 8, 4, 4, 4], capacity=6, widths=(8, 4))
    cache.save(path)
    assert state(cq.KVCache.load(path)) == state(cache)

    def smaller(arrays: dict[str, Any], settings: dict[str, Any]) -> None:
        settings |= {"rooms": [[8, 5], [4, 5]], "capacity": 5}

    changed(smaller, path)
    with pytest.raises(ValueError, match="a sequence has 6 tokens, beyond the capacity 5"):
        cq.KVCache.load(path)


def test_save_and_load_of_an_empty_rotated_cache(tmp_path: Path) -> None:
    cq.KVCache(2, 32, 5, key_scales="pairs", rotate=True).save(str(tmp_path / "cache"))
    loaded = cq.KVCache.load(tmp_path / "cache")
    assert (loaded.rotate, loaded.auto_scales, loaded.slots) == (True, "pairs", 0)


def test_a_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    path.write_bytes(b"before")

    def fails(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no space left"):
        filled().save(path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("cache", b"before")]


def test_the_name_of_a_gguf_file(tmp_path: Path) -> None:
    """Is none of a cache, and cuquant.open says what reads one."""
    with pytest.raises(ValueError, match=r"c\.gguf would be a safetensors file by the name of a GGUF file"):
        filled().save(tmp_path / "c.gguf")
    assert not list(tmp_path.iterdir())
    filled().save(tmp_path / "c")
    with pytest.raises(cq.GGUFError, match=r"cuquant wrote it, and cuquant\.KVCache\.load reads it"):
        cq.open(tmp_path / "c")


def changed(change: Callable[[dict[str, Any], dict[str, Any]], Any], path: Path) -> None:
    """A saved cache gets other arrays and settings."""
    arrays = {name: array.copy() for name, array in load_file(path).items()}
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    settings = json.loads(header["__metadata__"]["cuquant.kv_cache"])
    change(arrays, settings)
    save_file(arrays, path, {"cuquant.kv_cache": json.dumps(settings)})


def damaged(change: Callable[[dict[str, Any], dict[str, Any]], Any], path: Path) -> None:
    """A small cache, saved and changed."""
    filled(6, 1, 8).save(path)
    changed(change, path)


DAMAGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "version": (lambda a, s: s.update(version=2), "the cache's version is 2; this is version 1"),
    "long version": (
        lambda a, s: s.update(version="x" * 10**5),
        r"the cache's version is 'x+\.\.\.; this is",
    ),
    "version of a text": (lambda a, s: s.update(version="\x1b[2J"), r"version is '\\x1b\[2J'"),
    "no version": (lambda a, s: s.pop("version"), "it has no 'version'"),
    "no array": (lambda a, s: a.pop("8.k_qx"), "it has no '8.k_qx'"),
    "head_dim": (
        lambda a, s: s.update(head_dim=24),
        r"16.k_qx is float16 \(0, 2, 16\); float16 \(0, 2, 24\) is",
    ),
    "dtype": (lambda a, s: a.update({"8.v_qx": a["8.v_qx"].astype(F)}), "8.v_qx is float32"),
    "dtype of none": (
        lambda a, s: a.update({"8.importance": a["8.importance"].astype(ml_dtypes.float8_e4m3fn)}),
        "8.importance has the type F8_E4M3; the arrays of a cache have I32, F32, F16, I8, U8",
    ),
    "rooms of one number": (
        lambda a, s: s.update(rooms=[[8]]),
        r"rooms are \[\[8\]\]; pairs of bits and tokens",
    ),
    "rooms of lists": (lambda a, s: s.update(rooms=[[[8], 3]]), r"rooms are \[\[\[8\], 3\]\]; pairs of"),
    "rooms that are lists": (
        lambda a, s: s.update(rooms=[[8, [3]]]),
        r"rooms are \[\[8, \[3\]\]\]; pairs of",
    ),
    "capacity": (lambda a, s: s.update(capacity=[3]), "capacity is a list; an integer is needed"),
    "rooms of none": (lambda a, s: s.update(rooms=64), "rooms are 64; pairs of bits and tokens are needed"),
    "rooms": (lambda a, s: s.update(rooms=[[8, 3]], capacity=3), "8.lengths are beyond the 3 tokens"),
    "lengths": (lambda a, s: a.update({"8.lengths": np.array([-1], np.int32)}), "8.lengths are beyond"),
    "slots": (lambda a, s: a["8.global_slots"].fill(2), "global slots of sequence 0 are out of range, or"),
    "next slot": (lambda a, s: a["next_slots"].fill(5), "global slots of sequence 0 are out of range"),
    "negative slots": (
        lambda a, s: a["8.global_slots"].__isub__(1),
        "global slots of sequence 0 are out of range, or",
    ),
    "ids": (lambda a, s: a["8.token_ids"].fill(-1), "sequence 0 has a negative token id"),
    "importance": (
        lambda a, s: a["8.importance"].fill(np.nan),
        "sequence 0 has an importance that is negative",
    ),
    "negative importance": (lambda a, s: a["8.importance"].fill(-1), "sequence 0 has an importance that is"),
    "infinite importance": (
        lambda a, s: a["8.importance"].fill(np.inf),
        "sequence 0 has an importance that is",
    ),
    "batch": (lambda a, s: s.update(batch=2**31 - 1), "batch is 2147483647, but that of arrays is another"),
    "heads": (lambda a, s: s.update(n_kv_heads=2**31 - 1), "n_kv_heads is 2147483647, but that of arrays"),
    "heads of some": (lambda a, s: a.update({"8.v_qx": a["8.v_qx"][:, :1]}), "n_kv_heads is 2, but that of"),
    "found scales": (lambda a, s: s.update(auto_scales="pairs"), "it has no 'key_scales'"),
    "bits": (lambda a, s: s.update(rooms=[[7, 64]]), "bits are"),
    "text": (lambda a, s: s.update(batch="many"), "batch is a str"),
    "scales": (
        lambda a, s: a.update(key_scales=np.zeros((1, 2, 16), F)),
        "key_scales must be finite and positive",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    change, message = DAMAGES[name]
    damaged(change, tmp_path / "cache")
    with pytest.raises(ValueError, match=rf"cache is no cache that cuquant saved: .*{message}"):
        cq.KVCache.load(tmp_path / "cache")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    save_file({"x": np.zeros(3, F)}, tmp_path / "other")
    (tmp_path / "text").write_bytes(b"nothing")
    filled().save(tmp_path / "cut")
    os.truncate(tmp_path / "cut", 900)
    for name in ("other", "text", "cut"):
        with pytest.raises(ValueError, match=rf"{name} is no cache that cuquant saved"):
            cq.KVCache.load(tmp_path / name)
    for name, kind in (("none", FileNotFoundError), ("", IsADirectoryError)):
        with pytest.raises(kind, match=str(tmp_path / name)):
            cq.KVCache.load(tmp_path / name)
    filled().save(tmp_path / "cache")
    with pytest.raises(
        ValueError, match=r"cache is a cache that KVCache\.save wrote: cuquant\.KVCache\.load reads it"
    ):
        cq.load(tmp_path / "cache")


def test_files_are_told_apart(tmp_path: Path) -> None:
    """As cuquant.load tells them: what a file is, and what reads it."""
    filled().save(tmp_path / "cut")
    os.truncate(tmp_path / "cut", 900)
    (tmp_path / "empty").touch()
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "gguf").write_bytes(b"GGUF" + bytes(20))
    cq.save(tmp_path / "arrays", {"w": cq.quantize(np.ones((2, 32), F), "q4_0")})
    for name, problem in (
        ("cut", r"900 bytes of [\d,]+ or more are there: it is cut short"),
        ("empty", "it is empty"),
        ("pointer", "it is a Git LFS pointer"),
        ("gguf", r"\(cuquant\.open reads GGUF files\)"),
        ("arrays", r"it has the arrays that cuquant\.save wrote, and cuquant\.load reads them"),
    ):
        with pytest.raises(ValueError, match=rf"{name} is no cache that cuquant saved: .*{problem}"):
            cq.KVCache.load(tmp_path / name)
    with pytest.raises(IsADirectoryError, match="is a folder, not a file"):
        cq.KVCache.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="the path is empty"):
        cq.KVCache.load("")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("batch", [1, 2])
def test_key_scales_survive_a_file(order: Any, batch: int, tmp_path: Path) -> None:
    """Also those that a batch shares, or that lie column by column."""
    scales = np.asarray(np.random.default_rng(0).uniform(0.5, 2, (2, 32)), np.float32, order=order)
    cache = cq.KVCache(2, 32, 10, batch, key_scales=scales)
    cache.save(tmp_path / "c.safetensors")
    again = cq.KVCache.load(tmp_path / "c.safetensors")
    np.testing.assert_array_equal(again.key_scales, cache.key_scales)
    np.testing.assert_array_equal(again.key_scales[0], scales)


@pytest.mark.parametrize("text", ["", "{" * 1000, "[1]", "3", "null"])
def test_settings_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.safetensors"
    filled(6, 1, 8).save(path)
    save_file(load_file(path), path, {"cuquant.kv_cache": text})
    shown = re.escape(repr(text) if len(text) < 100 else "'{{{")
    with pytest.raises(
        ValueError, match=f"no cache that cuquant saved: its settings are damaged: {shown}"
    ) as e:
        cq.KVCache.load(path)
    assert len(str(e.value)) < 400


def test_settings_that_are_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    filled(6, 1, 8).save(path)
    save_file(load_file(path), path, {"cuquant.kv_cache": "[" * 100_000 + "]" * 100_000})
    with pytest.raises(ValueError, match="no cache that cuquant saved: its settings are nested too deeply"):
        cq.KVCache.load(path)


def test_a_gpu_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has an error of its own, which stays what it is."""

    class OutOfMemoryError(MemoryError):
        pass

    def full(cache: cq.KVCache, where: str) -> cq.KVCache:
        if where == "cuda":
            raise OutOfMemoryError("no room for 512 bytes")
        return cache

    filled(6, 1, 8).save(tmp_path / "c.safetensors")
    monkeypatch.setattr("cuquant.kv.copies.on_device", full)
    with pytest.raises(OutOfMemoryError, match=r"^no room for 512 bytes$"):
        cq.KVCache.load(tmp_path / "c.safetensors", "cuda")


@pytest.mark.parametrize("name", ["8.k_qx", "8.importance"])
def test_a_large_room_is_not_made_for_damaged_tokens(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor, where there is no such memory, without a word of which file has it."""

    def large(arrays: dict[str, Any], settings: dict[str, Any]) -> None:
        settings |= {"rooms": [[8, 2**31 - 48]], "capacity": 2**31 - 48}

    def broken(arrays: dict[str, Any], settings: dict[str, Any]) -> None:
        large(arrays, settings)
        arrays[name] = arrays[name][1:]

    def full(*args: Any) -> None:
        raise MemoryError("unable to allocate")

    damaged(broken, tmp_path / "broken")
    damaged(large, tmp_path / "large")
    monkeypatch.setattr("cuquant.kv.cache.Tier", full)
    with pytest.raises(ValueError, match=rf"no cache that cuquant saved: {name} is .* \(6.*\) is needed"):
        cq.KVCache.load(tmp_path / "broken")
    with pytest.raises(
        MemoryError, match=r"^the cache of .*large, with all the tokens it has room for: unable"
    ):
        cq.KVCache.load(tmp_path / "large")
