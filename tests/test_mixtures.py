"""Mixtures of k-quants, and files of them: what each tensor gets, and what real models score."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commands import Run
from formats_table import K_QUANTS, Row, random_blocks
from gguf_files import NANO, write, write_blocks
from synthetic import EXPERTS, some_tokens, write as write_model
from test_kquants import DATA, F, rng

import cuquant as cq
from cuquant.io import mixture
from cuquant.io.header import TensorInfo

# Mixtures


def formats_of(
    name: str,
    layers: int = 32,
    *,
    experts: int = 0,
    heads: int = 32,
    key_heads: Any = 32,
    architecture: str = "llama",
    tied: bool = False,
    k: int = 512,
    by_importance: bool = False,
) -> dict[str, str]:
    """Names of formats of a model's matrices; blk.7.ffn_down.weight is ("ffn_down", 7) there."""
    suffix = "_exps" if experts else ""
    names = ["token_embd.weight"] if tied else ["token_embd.weight", "output.weight"]
    for i in range(layers):
        names += [f"blk.{i}.attn_{part}.weight" for part in ("q", "k", "v", "output")]
        names += [f"blk.{i}.ffn_{part}{suffix}.weight" for part in ("gate", "up", "down")]
    metadata = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": key_heads,
        f"{architecture}.expert_count": experts,
    }
    infos = [TensorInfo(name, (64, k), 1, "F16", 0, 0) for name in names]
    chosen = mixture.get(name)
    assert isinstance(chosen, mixture.Mixture)
    return {n: f.name for n, f in chosen.formats_of(infos[::-1], names, metadata, by_importance).items()}


def layers_of(made: dict[str, str], part: str, name: str) -> list[int]:
    return sorted(int(n.split(".")[1]) for n, fmt in made.items() if part in n and fmt == name)


MORE = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
"""Of 32 layers the first and the last four, and each third between."""
ALL = list(range(32))


def test_the_type_of_a_file_of_several_formats() -> None:
    types = {("q4_k", 15): "q4_k_m", ("q4_0", 2): "q4_0", ("q6_k", 15): None, ("q4_0", None): None}
    assert {given: mixture.of_file(*given) for given in types} == types


@pytest.mark.parametrize(
    ("name", "base", "embedding", "exceptions"),
    [
        (
            "q2_k",
            "q2_k",
            "q2_k",
            {"attn_v": {"q3_k": ALL}, "ffn_down": {"q3_k": ALL}, "attn_output": {"q3_k": ALL}},
        ),
        ("q3_k_s", "q3_k", "q3_k", {}),
        (
            "q3_k_m",
            "q3_k",
            "q3_k",
            {
                "attn_v": {"q5_k": [0, 1], "q4_k": ALL[2:]},
                "ffn_down": {"q5_k": [0, 1], "q4_k": ALL[2:]},
                "attn_output": {"q4_k": ALL},
            },
        ),
        ("q3_k_l", "q3_k", "q3_k", {part: {"q5_k": ALL} for part in ("attn_v", "ffn_down", "attn_output")}),
        ("q4_k_s", "q4_k", "q4_k", {"attn_v": {"q5_k": ALL[:4]}, "ffn_down": {"q5_k": ALL[:4]}}),
        ("q4_k_m", "q4_k", "q4_k", {"attn_v": {"q6_k": MORE}, "ffn_down": {"q6_k": MORE}}),
        ("q5_k_s", "q5_k", "q5_k", {}),
        ("q5_k_m", "q5_k", "q5_k", {"attn_v": {"q6_k": MORE}, "ffn_down": {"q6_k": MORE}}),
        ("q6_k", "q6_k", "q6_k", {}),
        ("iq4_nl", "iq4_nl", "iq4_nl", {"ffn_down": {"q5_k": ALL[:4]}}),
        ("iq4_xs", "iq4_xs", "iq4_xs", {"ffn_down": {"q5_k": ALL[:4]}}),
    ],
)
def test_mixtures_of_a_model_of_32_layers(
    name: str, base: str, embedding: str, exceptions: dict[str, dict[str, list[int]]]
) -> None:
    made = formats_of(name)
    assert made.pop("output.weight") == "q6_k"
    assert made.pop("token_embd.weight") == embedding
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        others = exceptions.get(part, {})
        for fmt, layers in others.items():
            assert layers_of(made, part, fmt) == layers
        rest = [i for i in ALL if not any(i in layers for layers in others.values())]
        if base not in others:
            assert layers_of(made, part, base) == rest


@pytest.mark.parametrize("name", ["q2_k", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"])
def test_mixtures_with_an_importance_matrix(name: str) -> None:
    """As llama-quantize has them: the first layers of ffn_down need no more bits in IQ4 then."""
    made, without = formats_of(name, key_heads=8, by_importance=True), formats_of(name, key_heads=8)
    others = {f"blk.{i}.ffn_down.weight": name for i in range(4)} if name.startswith("iq4") else {}
    assert made == without | others


def test_mixtures_by_what_a_model_is() -> None:
    assert formats_of("q4_k_m", tied=True)["token_embd.weight"] == "q6_k"
    assert formats_of("q2_k", key_heads=8)["blk.9.attn_v.weight"] == "q4_k"
    assert formats_of("iq4_nl", key_heads=8)["blk.9.attn_v.weight"] == "q5_k"
    assert formats_of("iq4_nl", key_heads=np.array([8, 32]))["blk.9.attn_v.weight"] == "q5_k"
    assert formats_of("iq4_nl", key_heads=np.array([], int))["blk.9.attn_v.weight"] == "iq4_nl"
    assert formats_of("q4_k_m", k=96)["output.weight"] == "q8_0"
    large = formats_of("q4_k_s", 80, key_heads=8)
    assert layers_of(large, "attn_v", "q5_k") == list(range(80))
    assert layers_of(formats_of("q4_k_s", 80), "attn_v", "q5_k") == list(range(4))
    assert layers_of(formats_of("q3_k_s", 80, architecture="qwen2"), "attn_v", "q5_k") == list(range(80))
    falcon = formats_of("q4_k_m", architecture="falcon")
    assert falcon["output.weight"] == "q8_0"
    assert layers_of(falcon, "ffn_down", "q6_k") == [0, 1]
    assert layers_of(falcon, "ffn_down", "q5_k") == MORE[2:]
    assert layers_of(formats_of("q3_k_m", architecture="falcon"), "ffn_down", "q3_k") == [
        i for i in ALL[2:] if i not in MORE
    ]
    assert formats_of("q3_k_l", architecture="falcon")["blk.9.attn_output.weight"] == "q4_k"


def test_the_mixture_of_eight_experts() -> None:
    """As llama-quantize made it of a model of four layers."""
    made = formats_of("q4_k_m", 4, experts=8, heads=8, key_heads=2)
    assert made.pop("output.weight") == "q6_k"
    assert made.pop("token_embd.weight") == "q4_k"
    for i in range(4):
        block = {
            part: made[f"blk.{i}.{part}.weight"] for part in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        assert block == {"attn_q": "q4_k", "attn_k": "q8_0", "attn_v": "q8_0", "attn_output": "q5_k"}
        exps = [made[f"blk.{i}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
        assert exps == ["q4_k", "q4_k", "q6_k" if i >= 2 else "q4_k"]
    assert formats_of("q5_k_m", 4, experts=8)["blk.1.attn_output.weight"] == "q5_k"
    assert formats_of("q6_k", 4, experts=8)["blk.1.attn_output.weight"] == "q6_k"


@pytest.mark.parametrize(
    ("name", "k", "expected"),
    [
        ("q4_k", 512, "q4_k"),
        ("q4_k", 288, "q5_0"),
        ("q2_k", 288, "q4_0"),
        ("q3_k", 288, "q4_0"),
        ("q5_k", 288, "q5_1"),
        ("q6_k", 288, "q8_0"),
        ("iq4_xs", 288, "iq4_nl"),
        ("iq4_nl", 288, "iq4_nl"),
        ("q4_k", 40, None),
        ("iq4_nl", 40, None),
        ("nvfp4", 96, None),
    ],
)
def test_formats_of_other_rows(name: str, k: int, expected: str | None) -> None:
    made = mixture.fallback(cq.formats.get(name), k)
    assert (made if made is None else made.name) == expected


# Files


@pytest.mark.parametrize("shape", [(256,), (3, 512), (2, 1, 3, 256)], ids=str)
@pytest.mark.parametrize("row", K_QUANTS, ids=lambda row: row.name)
def test_opens_from_a_gguf_file(tmp_path: Path, row: Row, shape: tuple[int, ...]) -> None:
    raw = random_blocks(row.name, shape)
    w = cq.open(write_blocks(tmp_path / "m.gguf", shape, row.ggml_type, raw), "cpu")["w.weight"]
    assert (w.format, w.shape) == (row.name, shape)
    assert w.blocks.tobytes() == raw.tobytes()
    assert not w.blocks.flags.writeable  # the file's own bytes


DIGESTS: dict[str, str] = json.loads((DATA / "nano-llama-mixtures-sha256.json").read_text())
"""Of all tensors' data; of q2_k, q4_k_m, q6_k and iq4_nl the scores equal those of llama-quantize's files."""


@pytest.mark.parametrize("name", DIGESTS)
def test_a_real_model_as_before(tmp_path: Path, name: str) -> None:
    done = cq.quantize_file(NANO, tmp_path / "q.gguf", name, device="cpu")
    made = gguf.GGUFReader(tmp_path / "q.gguf")
    data = b"".join(t.data.tobytes() for t in made.tensors)
    assert hashlib.sha256(data).hexdigest() == DIGESTS[name]
    kind = made.fields["general.file_type"].contents()
    assert gguf.LlamaFileType(kind).name.removeprefix("MOSTLY_") == name.upper()
    assert str(done.format) == name
    assert not done.ragged | done.replaced
    types = {t.name: t.tensor_type.name.lower() for t in made.tensors if t.name in done.formats}
    assert types == {tensor: fmt.name for tensor, fmt in done.formats.items()}


def test_a_mixture_of_experts_runs_as_it_is_stored(tmp_path: Path) -> None:
    """No fallback: warnings are errors."""
    source = write_model(tmp_path / "m.gguf", replace(EXPERTS, d_model=256, n_ff=256))
    cq.quantize_file(source, tmp_path / "q.gguf", "q4_k_m", device="cpu")
    model = cq.open(tmp_path / "q.gguf", "cpu")
    assert {info.type_name for info in model.tensors.values()} == {"F32", "Q4_K", "Q5_0", "Q6_K"}
    tokens = some_tokens(64)
    stored = cq.evaluate(model, tokens=tokens, base=source, ctx=32, device="cpu").rows[1]
    made = cq.evaluate(source, tokens=tokens, formats=["q4_k_m"], ctx=32, device="cpu").rows[1]
    assert (stored.ppl, stored.mean_kld) == (made.ppl, made.mean_kld)
    assert stored.bits_per_weight == made.bits_per_weight < 6


def ragged(folder: Path) -> Path:
    """Rows of 512, 288 (of whole blocks of 32) and 40 weights."""
    x = rng().standard_normal((4, 1024), F)
    tensors = {f"blk.{i}.ffn_up.weight": x[:, :k] for i, k in enumerate((512, 288, 40))}
    return write(folder / "m.gguf", tensors | {"output.weight": x[:, :512]})


def test_ragged_rows_have_other_formats(tmp_path: Path, run: Run) -> None:
    source, target = ragged(tmp_path), tmp_path / "q.gguf"
    done = run("quantize", source, target, "--format", "q4_k_m", "--device", "cpu")
    assert done.status == 0
    assert "3 tensors to q4_k_m, 1 copied" in done.err
    assert "kept in float, rows are not whole blocks: blk.2.ffn_up.weight\n" in done.err
    assert done.err.endswith("in another format, rows are not whole blocks: blk.1.ffn_up.weight (q5_0)\n")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(target).tensors}
    assert types == {
        "blk.0.ffn_up.weight": "Q4_K",
        "blk.1.ffn_up.weight": "Q5_0",
        "blk.2.ffn_up.weight": "F32",
        "output.weight": "Q6_K",
    }


@pytest.mark.parametrize(("name", "expected"), [("q2_k", "Q2_K"), ("q4_k_m", "Q4_K"), ("q4_0", "Q4_0")])
def test_pure(tmp_path: Path, run: Run, name: str, expected: str) -> None:
    """One format for all; a Format object asks for the same."""
    source = ragged(tmp_path)
    run("quantize", source, tmp_path / "a.gguf", "--format", name, "--pure", "--device", "cpu")
    cq.quantize_file(source, tmp_path / "b.gguf", cq.formats.get(expected.lower()), device="cpu")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert types["output.weight"] == types["blk.0.ffn_up.weight"] == expected


def test_a_mixture_in_a_safetensors_file(tmp_path: Path) -> None:
    cq.quantize_file(ragged(tmp_path), tmp_path / "q.safetensors", "Q4_K_M", device="cpu")
    made = cq.load(tmp_path / "q.safetensors", "cpu")
    assert made["output.weight"].format == "q6_k"
    assert made["blk.1.ffn_up.weight"].format == "q5_0"
    assert made["blk.2.ffn_up.weight"].dtype == F


def test_kept_tensors_do_not_move_a_mixture(tmp_path: Path) -> None:
    done = cq.quantize_file(NANO, tmp_path / "q.gguf", "q4_k_s", keep=["blk.0.*"], device="cpu")
    assert done.formats["blk.3.attn_v.weight"] == "q5_k"
    assert "blk.0.attn_v.weight" in done.kept


def test_eval_takes_mixtures(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(64))
    command = ("eval", NANO, "--tokens", tmp_path / "ids.npy", "--ctx", "64", "--device", "cpu", "-o", "csv")
    done = run(*command, "--formats", "Q4_K_S,q8_0")
    assert done.status == 0
    assert [line.split(",")[0] for line in done.out.splitlines()] == ["format", "f16", "q4_k_s", "q8_0"]
    assert "unknown format 'q4_k_x'" in run(*command, "--formats", "q4_k_x").err


def test_formats_unknown_to_files(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown format 'q4_k_x': did you mean q4.*\? Known are .*q4_k_m, "
    ):
        cq.quantize_file(NANO, tmp_path / "q.gguf", "q4_k_x", device="cpu")
    assert {"q4_k_m", "q4_k", "q4_0", "kbit4"} < set(mixture.names())
    assert "q8_1" not in mixture.names()
