"""`cuquant quantize`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from commands import Run, assert_one_line_error, finish, start
from gguf import GGMLQuantizationType as Type
from gguf_files import NANO, write

import cuquant as cq


def test_quantize(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    done = run("quantize", NANO, target, "--format", "q4_0", "--keep", "output.*", "--keep", "blk.3.*")
    assert (done.status, done.out) == (0, "")
    sizes = f"file of {NANO.stat().st_size:,} -> {target.stat().st_size:,} bytes"
    assert done.err == f"{target}: 22 tensors to q4_0, 17 copied, {sizes}\n"
    kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(target).tensors}
    assert kinds["output.weight"] == kinds["blk.3.attn_q.weight"] == Type.F16
    assert kinds["token_embd.weight"] == kinds["blk.2.attn_q.weight"] == Type.Q4_0


def test_quantize_by_a_recipe(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    done = run("quantize", NANO, target, "--format", "*ffn_down*=Q6_K, *=q4_k")
    assert (done.status, done.out) == (0, "")
    assert done.err.startswith(f"{target}: 30 tensors to q4_k+q6_k, 9 copied, ")
    kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(target).tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["output.weight"]) == (Type.Q6_K, Type.Q4_K)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ("*ffn_down*=q6_k",),
            "copied, no PATTERN matches: 26 matrices ('*=FORMAT' at the end takes them)\n",
        ),
        (("*blk*=q6_k", "--keep", "output.*"), "no PATTERN matches: 1 matrix ("),
        (("*ffn_down*=q6_k,*=q4_k",), ""),
        (("q4_0", "--keep", "*blk*"), ""),
    ],
)
def test_quantize_counts_what_no_pattern_matches(
    run: Run, tmp_path: Path, options: tuple[str, ...], told: str
) -> None:
    """Not what is kept on purpose."""
    done = run("quantize", NANO, tmp_path / "q.gguf", "--format", *options)
    assert done.status == 0
    assert told in done.err
    assert ("no PATTERN" in done.err) == bool(told)


@pytest.mark.parametrize("command", [("quantize", "--format", "q8_0"), ("dequantize",)])
@pytest.mark.parametrize("name", ["typo.safetensor", "y", "-", "model.gguf.part"])
def test_a_target_by_any_other_name(run: Run, tmp_path: Path, command: tuple[str, ...], name: str) -> None:
    """Would be a GGUF file that nothing takes for one."""
    verb, *options = command
    source = tmp_path / "s.gguf"
    cq.quantize_file(NANO, source, "q4_0", device="cpu")
    done = run(verb, NANO if verb == "quantize" else source, tmp_path / name, *options, "--device", "cpu")
    assert_one_line_error(done)
    assert f"{name}'; its name must end in .gguf or .safetensors" in done.err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("*ffn_down*=q6_k,q4_k", "'q4_k' in '*ffn_down*=q6_k,q4_k' is no PATTERN=FORMAT"),
        ("*=q4_k,*=q6_k", "'*=q6_k' in '*=q4_k,*=q6_k' names a pattern again"),
        ("*=q4_k,", "'' in '*=q4_k,' is no PATTERN=FORMAT"),
        ("=q4_k", "'=q4_k' in '=q4_k' is no PATTERN=FORMAT"),
        ("blk.[0,1].*=q4_k", "is no PATTERN=FORMAT (patterns have no commas here)"),
        ("*=q4_7", "unknown format 'q4_7': did you mean"),
        (
            "*down*=Q4_K_M,*=q4_k",
            "'Q4_K_M' is a mixture of formats for a whole file, to be given alone; the ",
        ),
        (
            "*=q4_k,b=int4-256",
            "unknown format 'int4-256'; on the command line only formats that have names can",
        ),
    ],
)
def test_quantize_by_what_is_no_recipe(run: Run, tmp_path: Path, recipe: str, problem: str) -> None:
    done = run("quantize", NANO, tmp_path / "q.gguf", "--format", recipe)
    assert (done.status, done.out) == (2, "")
    assert problem in done.err


def test_a_recipe_is_pure_already(run: Run, tmp_path: Path) -> None:
    done = run("quantize", NANO, tmp_path / "q.gguf", "--format", "*=q4_k", "--pure")
    assert_one_line_error(done)
    assert "--pure makes one format of a mixture's name" in done.err


def test_quantize_to_a_format_that_gguf_lacks(run: Run, tmp_path: Path) -> None:
    done = run("quantize", NANO, tmp_path / "q.gguf", "--format", "kbit4", "--device", "cpu")
    assert_one_line_error(done)
    assert "kbit4 has no GGUF type: such weights cannot be stored in a GGUF file" in done.err
    assert not list(tmp_path.iterdir())
    target = tmp_path / "q.safetensors"
    done = run("quantize", NANO, target, "--format", "kbit4", "--device", "cpu")
    sizes = f"file of {NANO.stat().st_size:,} -> {target.stat().st_size:,} bytes"
    assert done == (0, "", f"{target}: 30 tensors to kbit4, 9 copied, {sizes}\n")
    source, made = cq.open(NANO, "cpu"), cq.load(target, "cpu")
    assert made.keys() == source.keys()
    blocks = cq.quantize(source["output.weight"], "kbit4").blocks
    np.testing.assert_array_equal(made["output.weight"].blocks, blocks)
    np.testing.assert_array_equal(made["output_norm.weight"], source["output_norm.weight"])


def test_quantize_names_formats_that_are_near(run: Run, tmp_path: Path) -> None:
    done = run("quantize", NANO, tmp_path / "q.gguf", "--format", "q4_1_m")
    assert (done.status, done.out) == (2, "")
    assert "did you mean q4_k_m or q4_1" in done.err
    assert done.err.count("q8_0") == 1
    assert "q8_0" in run("quantize", "--help").out


@pytest.mark.parametrize(
    ("command", "format"),
    [
        (("quantize", NANO, "q.safetensors", "--format"), "int4-256"),
        (("eval", NANO, "--formats"), "KBIT4-float16"),
        (("bench", "--formats"), "trellis3-*"),
    ],
)
def test_a_command_takes_named_formats_only(run: Run, command: tuple[object, ...], format: str) -> None:
    """It gives no advice for Python."""
    done = run(*command, format)
    assert (done.status, done.out) == (2, "")
    told = f"unknown format {format!r}; on the command line only formats that have names can be given; known"
    assert told in done.err
    assert "cuquant." not in done.err


def test_a_command_makes_no_floats(run: Run) -> None:
    done = run("bench", "--formats", "f16")
    assert (done.status, done.out) == (2, "")
    assert "unknown format 'f16'; it is of floats, which are not quantized; known are" in done.err


def test_quantize_to_a_format_of_activations(run: Run, tmp_path: Path) -> None:
    done = run("quantize", NANO, tmp_path / "q.gguf", "--format", "q8_1")
    assert_one_line_error(done)
    assert "q8_1 is a format of activations, not of weights" in done.err
    assert not list(tmp_path.iterdir())


def test_quantize_shows_no_progress_in_a_pipe(tmp_path: Path) -> None:
    done = finish(start("quantize", NANO, tmp_path / "q.gguf", "--format", "q8_0"))
    assert (done.status, done.out) == (0, "")
    assert done.err.count("\n") == 1
    assert "\r" not in done.err


def test_quantize_says_what_would_replace_a_file(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    target.write_text("precious")
    done = run("quantize", NANO, target, "--format", "q4_0")
    assert_one_line_error(done)
    assert done.err == f"cuquant: error: {target} exists; --force replaces it\n"
    assert target.read_text() == "precious"
    assert run("quantize", NANO, target, "--format", "q4_0", "--force").status == 0
    assert cq.open(target)["output.weight"].format == "q4_0"


def test_quantize_names_the_tensors_of_ragged_rows(run: Run, tmp_path: Path) -> None:
    tensors = {"even.weight": np.ones((2, 64)), "odd.weight": np.ones((2, 40)), "b.weight": np.ones((2, 1))}
    source = write(tmp_path / "s.gguf", {name: t.astype(np.float32) for name, t in tensors.items()})
    done = run("quantize", source, tmp_path / "t.gguf", "--format", "q4_0")
    assert done.status == 0
    assert "1 tensor to q4_0, 2 copied" in done.err
    assert done.err.endswith("kept in float, rows are not whole blocks: b.weight, odd.weight\n")


def test_names_that_a_terminal_would_obey(run: Run, tmp_path: Path) -> None:
    """None of what a hostile file is called inside reaches it."""
    shapes = {"even.weight": (2, 64), "odd\x1b[2J\n.weight": (2, 40), "half\x1b[2J.weight": (2, 96)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    source = write(tmp_path / "s.gguf", tensors)
    err = run("quantize", source, tmp_path / "t.gguf", "--format", "q4_k_s").err
    assert "kept in float, rows are not whole blocks: odd\\x1b[2J\\n.weight\n" in err
    assert (
        "in another format, rows are not whole blocks: even.weight (q5_0), half\\x1b[2J.weight (q5_0)\n"
        in err
    )


def test_quantize_counts_the_bytes_of_all_parts(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {f"{n}.weight": np.ones((64, 64), np.float32) for n in "abc"}, split=1)
    parts = sorted(tmp_path.iterdir())
    done = run("quantize", parts[0], tmp_path / "t.gguf", "--format", "q4_0")
    assert f" {sum(path.stat().st_size for path in parts):,} -> " in done.err


def test_quantize_names_the_weight_that_it_cannot_quantize(run: Run, tmp_path: Path) -> None:
    bad = np.ones((4, 32), np.float32)
    bad[2, 7] = np.nan
    source = write(tmp_path / "s.gguf", {"bad.weight": bad})
    done = run("quantize", source, tmp_path / "t.gguf", "--format", "q4_0")
    assert_one_line_error(done)
    assert "tensor 'bad.weight': cannot quantize nan in row 2" in done.err
    assert list(tmp_path.iterdir()) == [source]
