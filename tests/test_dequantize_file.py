"""Quantized files as files of floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from commands import Run, assert_one_line_error, finish, start
from formats_table import random_blocks
from gguf import GGMLQuantizationType as Type
from gguf_files import NANO, Stored, untouched, write
from test_convert import weights

import cuquant as cq
from cuquant import dequantize_file
from cuquant.io import counts, floats
from cuquant.io.header import same_value

F, H, B = np.float32, np.float16, ml_dtypes.bfloat16


def mixed(path: Path, **more: Stored) -> Path:
    """Two quantized matrices, two of floats, a norm."""
    tensors: dict[str, Stored] = {
        "blk.0.attn_q.weight": (cq.quantize(weights(8, 64), "q4_0").blocks, Type.Q4_0),
        "blk.0.ffn_up.weight": (cq.quantize(weights(4, 256, seed=2), "q6_k").blocks, Type.Q6_K),
        "blk.0.ffn_norm.weight": weights(64),
        "blk.0.ffn_gate_inp.weight": weights(4, 64),
        "output.weight": weights(4, 32, seed=1),
    }
    return write(path, tensors | {name.replace("__", "."): value for name, value in more.items()})


@pytest.mark.parametrize(("dtype", "kind"), [(H, "F16"), ("bf16", "BF16"), (F, "F32")])
def test_every_tensor_is_what_it_stood_for(tmp_path: Path, dtype: Any, kind: str) -> None:
    source, target = tmp_path / "q.gguf", tmp_path / "f.gguf"
    cq.quantize_file(NANO, source, "q4_k_m")
    done = dequantize_file(source, target, dtype)
    before, after = cq.open(source, "cpu"), cq.open(target, "cpu")
    assert list(before) == list(after)
    for name, info in after.tensors.items():
        w = before[name]
        if isinstance(w, cq.QuantizedArray):
            assert info.type_name == kind
            assert name in done.made
            np.testing.assert_array_equal(
                after[name].view(np.uint8), w.dequantize(B if dtype == "bf16" else dtype).view(np.uint8)
            )
        else:
            assert name in done.kept
            assert before.raw(name).tobytes() == after.raw(name).tobytes()
    assert set(after.metadata) == set(before.metadata)
    changed = {k for k in after.metadata if not same_value(after.metadata[k], before.metadata[k])}
    assert changed == {"general.file_type"}
    name = gguf.LlamaFileType(after.metadata["general.file_type"]).name
    assert name in (f"MOSTLY_{kind}", f"ALL_{kind}")
    assert {t.tensor_type.name for t in gguf.GGUFReader(target).tensors} == {kind, "F32"}


def test_float_matrices_get_the_type_and_small_ones_stay(tmp_path: Path) -> None:
    source, target = mixed(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    done = dequantize_file(source, target, "bfloat16")
    types = {name: info.type_name for name, info in cq.open(target, "cpu").tensors.items()}
    assert types == {
        "blk.0.attn_q.weight": "BF16",
        "blk.0.ffn_up.weight": "BF16",
        "blk.0.ffn_norm.weight": "F32",
        "blk.0.ffn_gate_inp.weight": "F32",
        "output.weight": "BF16",
    }
    assert done.made == {"blk.0.attn_q.weight", "blk.0.ffn_up.weight", "output.weight"}
    np.testing.assert_array_equal(cq.open(target, "cpu")["output.weight"], weights(4, 32, seed=1).astype(B))
    with (
        untouched(tmp_path),
        pytest.raises(ValueError, match=r"t\.gguf has no matrix to turn into bfloat16: its own are already$"),
    ):
        dequantize_file(target, tmp_path / "u.gguf", "bfloat16")
    alone = write(tmp_path / "v.gguf", {"norm.weight": weights(64)})
    with pytest.raises(ValueError, match=r"v\.gguf has no matrix to turn into float16$"):
        dequantize_file(alone, tmp_path / "u.gguf")


def test_kept_tensors_are_copied(tmp_path: Path) -> None:
    source, target = mixed(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    done = dequantize_file(source, target, keep="*attn_q*")
    made = cq.open(target, "cpu")
    assert made.tensors["blk.0.attn_q.weight"].type_name == "Q4_0"
    assert (
        made["blk.0.attn_q.weight"].blocks.tobytes() == cq.quantize(weights(8, 64), "q4_0").blocks.tobytes()
    )
    assert done.kept == {"blk.0.attn_q.weight", "blk.0.ffn_norm.weight", "blk.0.ffn_gate_inp.weight"}


@pytest.mark.filterwarnings("ignore::cuquant.FallbackWarning")
def test_scales_of_tensors_are_in_the_numbers(tmp_path: Path) -> None:
    raw, experts = random_blocks("nvfp4", (4, 64)), random_blocks("nvfp4", (2, 4, 64))
    tensors: dict[str, Stored] = {"a.weight": (raw, Type.NVFP4), "b.weight": (experts, Type.NVFP4)}
    tensors |= {"a.scale": np.array([0.3], F), "b.scale": np.array([2, -3], F), "c.scale": np.ones(3, F)}
    source, target = write(tmp_path / "s.gguf", tensors), tmp_path / "t.gguf"
    done = dequantize_file(source, target, F)
    assert done.left_out == {"a.scale", "b.scale"}
    before, after = cq.open(source, "cpu"), cq.open(target, "cpu")
    assert set(after) == {"a.weight", "b.weight", "c.scale"}
    np.testing.assert_array_equal(after["a.weight"], before["a.weight"].dequantize())
    exact = before.floats("b.weight", np.dtype(F))
    np.testing.assert_array_equal(after["b.weight"], exact)
    np.testing.assert_array_equal(exact.astype(H), before["b.weight"])
    for keep in ("*.scale", "a.*"):
        kept = tmp_path / "kept.gguf"
        if keep == "a.*":
            assert dequantize_file(source, kept, F, keep=keep).left_out == {"b.scale"}
        else:
            with (
                untouched(tmp_path),
                pytest.raises(ValueError, match=r"'[ab]\.scale' is the scale of '[ab]\.weight'"),
            ):
                dequantize_file(source, kept, F, keep=keep)


def test_scales_of_kept_tensors_are_in_a_safetensors_file_once(tmp_path: Path) -> None:
    """A reader that multiplies by what it finds beside a tensor would do so twice."""
    stored: Stored = (random_blocks("nvfp4", (4, 64)), Type.NVFP4)
    tensors: dict[str, Stored] = {"a.weight": stored, "b.weight": stored, "f.weight": weights(4, 64)}
    tensors |= {f"{name}.scale": np.array([value], F) for name, value in (("a", 0.3), ("b", 3), ("c", 1))}
    source, target = write(tmp_path / "s.gguf", tensors), tmp_path / "t.safetensors"
    done = dequantize_file(source, target, F, keep="a.weight")
    assert done.made == {"b.weight"}
    assert done.kept == {"a.weight", "f.weight", "c.scale"}
    assert done.left_out == {"a.scale", "b.scale"}
    selection = cq.quantize_file(source, tmp_path / "u.safetensors", "q8_0", keep=["a.*", "b.*"])
    assert selection.kept == {"a.weight", "b.weight", "c.scale"}
    assert selection.left_out == {"a.scale", "b.scale"}
    before = cq.open(source, "cpu")
    for path, kept in ((target, ["a.weight"]), (tmp_path / "u.safetensors", ["a.weight", "b.weight"])):
        after = cq.load(path, "cpu")
        assert set(after) == {"a.weight", "b.weight", "f.weight", "c.scale"}
        for name in kept:
            assert after[name].format == before[name].format
            np.testing.assert_array_equal(after[name].blocks, before[name].blocks)
    both = cq.quantize_file(source, tmp_path / "u.gguf", "q8_0", keep=["a.*", "b.*"])
    assert set(cq.open(tmp_path / "u.gguf")) == set(before)
    assert not both.left_out


@pytest.mark.usefixtures("foreign_types")
@pytest.mark.filterwarnings("ignore::cuquant.FallbackWarning")
def test_types_that_have_no_format_here(tmp_path: Path) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (2, 74), np.uint8)
    raw[:, :2] = np.array([1], H).view(np.uint8)
    source = write(tmp_path / "s.gguf", {"x.weight": (raw, Type.IQ2_XS)})
    expected = gguf.quants.dequantize(raw, Type.IQ2_XS)
    for dtype in (F, B, H):
        dequantize_file(source, tmp_path / "t.gguf", dtype, force=True)
        np.testing.assert_array_equal(cq.open(tmp_path / "t.gguf", "cpu")["x.weight"], expected.astype(dtype))


@pytest.mark.filterwarnings("ignore::cuquant.FallbackWarning")
def test_what_cannot_be_read_is_told_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.zeros((2, 292), np.uint8)
    source = mixed(tmp_path / "s.gguf", z__weight=(raw, Type.Q8_K))
    monkeypatch.setattr(cq.Model, "floats", None)
    with (
        untouched(tmp_path),
        pytest.raises(cq.GGUFError, match=r"'z\.weight': the gguf package cannot dequan"),
    ):
        dequantize_file(source, tmp_path / "t.gguf")


def test_nothing_is_read_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a safetensors file has of a model is not all in memory."""
    source, read = mixed(tmp_path / "s.gguf"), []
    raw = cq.Model.raw

    def seen(model: cq.Model, name: str) -> Any:
        read.append(name)
        return raw(model, name)

    monkeypatch.setattr(cq.Model, "raw", seen)
    monkeypatch.setattr("cuquant.io.safetensors.write", lambda *args: None)
    dequantize_file(source, tmp_path / "t.safetensors", keep="*attn_q*")
    cq.quantize_file(
        write(tmp_path / "f.gguf", {"a.weight": weights(4, 32)}), tmp_path / "u.safetensors", "q8_0"
    )
    assert set(read) <= {"a.weight"}  # to fit its format


def test_safetensors(tmp_path: Path) -> None:
    source, target = mixed(tmp_path / "s.gguf"), tmp_path / "t.safetensors"
    dequantize_file(source, target)
    found = cq.load(target, "cpu")
    assert {name: str(array.dtype) for name, array in found.items()} == {
        "blk.0.attn_q.weight": "float16",
        "blk.0.ffn_up.weight": "float16",
        "blk.0.ffn_norm.weight": "float32",
        "blk.0.ffn_gate_inp.weight": "float32",
        "output.weight": "float16",
    }
    model = cq.open(source, "cpu")
    w = model["blk.0.ffn_up.weight"]
    np.testing.assert_array_equal(found["blk.0.ffn_up.weight"], w.dequantize(H))
    dequantize_file(source, target, keep="*ffn_up*", force=True)
    kept = cq.load(target, "cpu")["blk.0.ffn_up.weight"]
    assert kept.format == w.format
    assert kept.blocks.tobytes() == w.blocks.tobytes()
    for name in ("blk.0.ffn_norm.weight", "blk.0.ffn_gate_inp.weight"):
        np.testing.assert_array_equal(found[name], model[name])


@pytest.mark.parametrize(
    ("arguments", "error", "problem"),
    [
        ({"dtype": "float64"}, TypeError, "dtype float64 is not one of"),
        ({"keep": "*"}, ValueError, r"s\.gguf has no matrix .* that is not to be kept"),
        ({"dtype": "q4_0"}, TypeError, "dtype 'q4_0' is not one of"),
        ({"target": "there.gguf", "force": "no"}, TypeError, "force is a str; allowed are True and False"),
        ({"keep": "zz*"}, ValueError, r"no tensor of s\.gguf is named like 'zz\*' \(keep\)"),
        ({"target": "s.gguf", "force": True}, ValueError, r"s\.gguf is the file being read"),
        ({"target": "there.gguf"}, FileExistsError, r"there\.gguf exists; force=True replaces it"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], problem: str
) -> None:
    source, target = mixed(tmp_path / "s.gguf"), tmp_path / arguments.pop("target", "t.gguf")
    (tmp_path / "there.gguf").write_bytes(b"old")
    with untouched(tmp_path), pytest.raises(error, match=problem):
        dequantize_file(source, target, **arguments)


@pytest.mark.parametrize("stored", [False, True])
def test_numbers_beyond_float16(tmp_path: Path, stored: bool) -> None:
    """An error, not infinity; numbers that are infinite in the source stay so."""
    big = np.full((4, 32), 1e6, F)
    one: Stored = (cq.quantize(big, "q8_0").blocks, Type.Q8_0) if stored else big
    source = mixed(tmp_path / "s.gguf", blk__1__attn_q__weight=one)
    problem = r"tensor 'blk\.1\.attn_q\.weight' .* beyond float16's 65504: bfloat16 and float32 have room"
    with untouched(tmp_path), pytest.raises(ValueError, match=problem):
        dequantize_file(source, tmp_path / "t.gguf")
    huge = mixed(tmp_path / "h.gguf", blk__1__attn_q__weight=np.full((4, 32), 3.4e38, F))
    with untouched(tmp_path), pytest.raises(ValueError, match="has values beyond bfloat16: float32 has room"):
        dequantize_file(huge, tmp_path / "t.gguf", "BF16")
    dequantize_file(source, tmp_path / "t.gguf", F)
    assert cq.open(tmp_path / "t.gguf", "cpu")["blk.1.attn_q.weight"].max() > 9e5
    spoiled = np.where(np.eye(4, 32) > 0, np.inf, F(1)).astype(F)
    other = mixed(tmp_path / "i.gguf", blk__1__attn_q__weight=spoiled)
    with pytest.warns(
        UserWarning, match=r"^tensor 'blk\.1\.attn_q\.weight': 4 of 128 numbers are NaN or inf"
    ):
        dequantize_file(other, tmp_path / "j.gguf")
    np.testing.assert_array_equal(cq.open(tmp_path / "j.gguf", "cpu")["blk.1.attn_q.weight"], spoiled)
    spoiled[0, 1] = 1e6  # beside what is infinite already
    both = mixed(tmp_path / "b.gguf", blk__1__attn_q__weight=spoiled)
    with untouched(tmp_path), pytest.raises(cq.GGUFError, match=problem):
        dequantize_file(both, tmp_path / "c.gguf")


@pytest.mark.parametrize(
    ("name", "dtype", "size", "room"),
    [
        ("mxfp4", H, 1e-8, r"bfloat16 and float32 \(--type bf16, f32\) have"),
        (None, H, 1e-8, r"bfloat16 and float32 \(--type bf16, f32\) have"),
        (None, B, 2.0**-134, r"float32 \(--type f32\) has"),
    ],
)
def test_numbers_too_small_for_the_dtype(
    tmp_path: Path, name: str | None, dtype: Any, size: float, room: str
) -> None:
    """Are said, tensor by tensor; zeros are no loss, nor are small numbers that the dtype has."""
    tiny, few = weights(16, 64) * F(size), weights(16, 64, seed=3)
    few[0, :8] = F(1e-9)
    stored: Stored = tiny if name is None else (cq.quantize(tiny, name).blocks, Type.MXFP4)
    exact = np.where(np.eye(16, 64), weights(16, 64), np.ldexp(F(1), np.arange(64) % 3 - 24)).astype(F)
    others = {"few.weight": few, "none.weight": np.zeros((16, 64), F), "exact.weight": exact}
    source = write(tmp_path / "s.gguf", {"tiny.weight": stored, **others})
    of = rf"^tensor 'tiny\.weight': about \d+% of the weights are too small for {np.dtype(dtype)}, and "
    with pytest.warns(UserWarning, match=f"{of}become 0 or far from what they were: {room} room$") as said:
        dequantize_file(source, tmp_path / "t.gguf", dtype)
    assert len(said) == 1
    if name is not None:
        dequantize_file(source, tmp_path / "u.gguf", F)


@pytest.mark.parametrize("dtype", [H, F])
def test_numbers_that_are_nan(tmp_path: Path, dtype: Any) -> None:
    """Stay so, with a word; all in one block whose scale is NaN."""
    blocks = np.array(cq.quantize(weights(8, 64), "q4_0").blocks)
    blocks[3, :2] = np.array([np.nan], H).view(np.uint8)
    source = mixed(tmp_path / "s.gguf", blk__1__attn_q__weight=(blocks, Type.Q4_0))
    said = r"^tensor 'blk\.1\.attn_q\.weight': 32 of 512 numbers are NaN or infinite, as they are in s\.gguf$"
    with pytest.warns(UserWarning, match=said) as warned:
        dequantize_file(source, tmp_path / "t.gguf", dtype)
    assert len(warned) == 1


@pytest.mark.parametrize("dtype", [H, B, F])
def test_numbers_are_counted_by_their_bits(dtype: Any) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    x = (patterns if dtype != F else patterns.astype(np.uint32) << 16).view(dtype)[::-1].reshape(64, -1)
    with np.errstate(invalid="ignore"):  # of signaling NaN
        assert counts.not_finite(x) == (~np.isfinite(x)).sum()
    for least in (2.0**-21, 2.0**-130, 3.0):
        assert counts.below(x, least) == (np.abs(x.astype(F)) < F(np.array(least, dtype))).sum()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "mxfp4", "nvfp4.weight"])
@pytest.mark.parametrize(("dtype", "least"), [(H, 2.0**-21), (B, 2.0**-130)])
def test_what_is_lost_is_what_rounding_changes(
    tmp_path: Path, dtype: Any, least: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every border, too: halfway between two numbers, and between the last small one and `least`."""
    monkeypatch.setattr("cuquant.cpu.SLAB", 100)
    steps = np.arange(-160, 160) / 16 + np.array([[0], [2.0**-12], [-(2.0**-12)]])
    x = np.append(steps * least / 8, [np.inf, np.nan, 3e38, -0.0]).astype(F).reshape(4, -1)
    stored: dict[str, Stored] = {
        "float32": x,
        "bfloat16": (gguf.quants.quantize(x, Type.BF16), Type.BF16),
        "mxfp4": (cq.quantize(weights(4, 64) * F(1e-8), "mxfp4").blocks, Type.MXFP4),
        "nvfp4.weight": (cq.quantize(weights(4, 64), "nvfp4").blocks, Type.NVFP4),
        "nvfp4.scale": np.array([2.0**-24], F),
    }
    model = cq.open(write(tmp_path / "s.gguf", stored), "cpu")
    exact = model["bfloat16"].astype(F) if name == "bfloat16" else model.floats(name)
    with np.errstate(over="ignore"):
        made = exact.astype(dtype).astype(F)
    expected = ((np.abs(made) < least) & (made != exact)).sum()
    assert floats._lost(model, name, least) == expected
    assert (expected > 0) == (dtype == H or name == "float32")


def test_float64_is_rounded_once(tmp_path: Path) -> None:
    halfway = 1 + 2.0**-8  # between two of bfloat16's
    numbers = [halfway, halfway + 2.0**-40, -halfway - 2.0**-40, 1e-60, -(2.0**-140), np.inf, np.nan, 3.4e38]
    integers = [(1 << 24) + (1 << 16) + 1, -(1 << 30) + 1]
    tensors: dict[str, Stored] = {"x": np.array(numbers), "i": np.array(integers, np.int32)}
    model = cq.open(write(tmp_path / "s.gguf", tensors | {"h": np.array([1e300, np.inf, 1.0])}), "cpu")
    with pytest.raises(
        cq.GGUFError, match=r"tensor 'x' \(F64\) has values beyond bfloat16: float32 has room"
    ):
        model.floats("x", B)
    expected = [1, 1 + 2.0**-7, -1 - 2.0**-7, 0, 0, np.inf, np.nan]
    tensors["x"] = np.array(numbers[:-1])
    made = cq.open(write(tmp_path / "r.gguf", tensors), "cpu")
    got = made.floats("x", B).astype(F)
    np.testing.assert_array_equal(np.where(np.abs(got) < 1e-38, 0, got), expected)
    assert made.floats("i", B).astype(int).tolist() == [(1 << 24) + (1 << 17), -(1 << 30)]
    for dtype, most in ((H, "float16's 65504"), (B, "bfloat16"), (F, "float32")):
        with pytest.raises(cq.GGUFError, match=rf"tensor 'h' \(F64\) has values beyond {most}$"):
            model.floats("h", dtype)


def test_command(run: Run, tmp_path: Path) -> None:
    source, target = mixed(tmp_path / "s.gguf"), tmp_path / "t.gguf"
    done = run("dequantize", source, target, "--type", "bf16", "--device", "cpu")
    assert done.status in (None, 0)
    assert f"t.gguf: 3 tensors to bf16, 2 copied, file of {target.stat().st_size:,} bytes" in done.err
    again = run("dequantize", source, target)
    assert_one_line_error(again)
    assert again.err.endswith("t.gguf exists; --force replaces it\n")
    run("dequantize", source, target, "--force", "--keep", "output*", "--type", "float16")
    assert cq.open(target, "cpu").tensors["blk.0.attn_q.weight"].type_name == "F16"


def test_command_warns_of_small_numbers(tmp_path: Path) -> None:
    tiny = cq.quantize(weights(4, 32) * F(1e-8), "mxfp4").blocks
    source = write(tmp_path / "s.gguf", {"tiny.weight": (tiny, Type.MXFP4)})
    done = finish(start("dequantize", source, tmp_path / "t.gguf", "--device", "cpu"))
    assert done.status == 0
    assert "cuquant: warning: tensor 'tiny.weight': about 90% of the weights are too small for" in done.err


def test_a_file_of_arrays(run: Run, tmp_path: Path) -> None:
    """What its error says gives their numbers."""
    source = tmp_path / "w.safetensors"
    w = cq.quantize(np.ones((2, 32), F), "kbit4")
    cq.save(source, {"w": w, "norm": np.ones(3, F)})
    done = run("dequantize", source, tmp_path / "t.gguf")
    assert_one_line_error(done)
    assert "w.safetensors is no model, which is what dequantize takes" in done.err
    assert "evaluate" not in done.err
    told = done.err.partition("in Python, ")[2].partition(" has their numbers")[0]
    numbers = eval(told, {"cuquant": cq})
    np.testing.assert_array_equal(cq.testing.as_numpy(numbers["w"]), w.dequantize())
    assert numbers.keys() == {"w", "norm"}
