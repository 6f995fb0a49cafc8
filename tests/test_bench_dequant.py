"""The comparison of conversions: loops, the verdict, its command. (Measured in test_gpu_convert.py.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cells import RECORD
from commands import Run, assert_one_line_error

from cuquant import device
from cuquant.bench import DequantCell, Record, sass
from cuquant.bench.conversions import CONVERSIONS
from cuquant.bench.dequant import verdict

SASS = """
.text.other:
.L_x_9:
        /*0000*/                   HMMA.16816.F32 R4, R4, R2, R8 ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
//--------------------- .text.registers           --------------------------
	.section	.text.registers,"ax",@progbits
.text.registers:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P2 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   IMAD.SHL.U32 R4, R24.reuse, 0x200, RZ ;
.L_x_2:
        /*0030*/                   LOP3.LUT R23, R24.reuse, 0x70007000, RZ, 0xc0, !PT ;
        /*0040*/                   HMMA.16816.F32 R16, R20, R2, R16 ;
        /*0050*/                   NOP ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0070*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0080*/               @P0 BRA `(.L_x_3) ;
.L_x_4:
        /*0090*/              @!UP0 HMMA.1688.F32 R16, R20, R2, R16 ;
        /*00a0*/                   HMMA.1688.F32 R16, R20, R2, R16 ;
        /*00b0*/                   HMMA.1688.F32 R16, R20, R2, R16 ;
        /*00c0*/               @P0 BRA `(.L_x_4) ;
        /*00d0*/               @P1 BRA `(.L_x_1) ;
.L_x_0:
        /*00e0*/                   EXIT ;
.L_x_5:
        /*00f0*/                   BRA `(.L_x_5);
//--------------------- .text.words               --------------------------
"""


def test_innermost_loops_of_a_function() -> None:
    """Those with the instructions asked for; NOP counts as none."""
    assert list(sass.loops(SASS, "registers", "HMMA")) == [sass.Loop(3, 1), sass.Loop(4, 3)]
    assert list(sass.loops(SASS, "registers", "IADD3")) == [sass.Loop(2, 1)]
    assert list(sass.loops(SASS, "nothing", "HMMA")) == []


def cell(codec: str, us: float, **changes: Any) -> DequantCell:
    c = CONVERSIONS[codec]
    own = DequantCell("dequant", "registers", c.kind, c.method, None, None, None, us, 8000.0, 1.5)
    return replace(own, **changes)


def test_verdict() -> None:
    record, decode = Record(None, {}), {"where": "decode", "M": 1, "N": 64, "K": 128}
    for made in (
        cell("Int8", 1),
        cell("E2m1Uncorrected", 2),
        cell("Pairs", 3),
        cell("Permutes", 5, instructions=None),
        cell("E2m1Uncorrected", 10, **decode),
        cell("Values", 11, **decode),
        cell("Pairs", 7, **(decode | {"M": 8})),
    ):
        record.add(made)
    record.conclude(verdict(record.cells))
    assert record.verdict == (
        "in registers, times over that of e2m1 by bits, uncorrected: 1.50 any 16 by shared table of pairs; "
        "2.50 any 16 by byte-permute table\n"
        "in the decode core, 1 x 64 x 128, times over that of e2m1 by bits, uncorrected: "
        "1.10 any 16 by shared table of values"
    )
    assert record.render("md").endswith("of values")
    assert "\n- in registers" in record.render("md")
    assert "\nin registers" in record.render("table")
    assert "<p>in registers" in record._repr_html_()


def test_a_record_of_conversions_is_read_and_shown(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    record = Record(path, {"device": "x", "versions": {"numpy": "2"}, "commit": None})
    record.add(cell("E2m1Uncorrected", 2))
    record.conclude("it is so")
    again = Record.read(path)
    assert again == Record(path, record.header, record.cells, "it is so")
    assert again.to_json() + "\n" == path.read_text(encoding="utf-8")
    done = run("bench", "--from", path)
    assert (done.status, done.err) == (0, f"{path}: 1 of 1 cells, x, an installed package (NumPy 2)\n")
    assert done.out.splitlines()[-1] == "it is so"
    assert_one_line_error(run("bench", "--from", path, "--plot", tmp_path / "p.svg"))


@pytest.mark.parametrize("option", ["--formats", "--activations", "--peers"])
def test_options_of_products(run: Run, option: str) -> None:
    value = {"--formats": "q4_0", "--activations": "f16", "--peers": "none"}[option]
    done = run("bench", "dequant", option, value)
    assert (done.status, done.out) == (2, "")
    assert f"dequant takes no {option}" in done.err


def test_without_a_gpu(run: Run) -> None:
    if device.gpu_problem() is None:
        pytest.skip("there is a GPU")
    assert_one_line_error(run("bench", "dequant"))


def test_the_committed_record() -> None:
    path = RECORD.with_name("h200-dequant.json")
    record = Record.read(path)
    assert record.op == "dequant"
    assert record.verdict == verdict(record.cells)
    assert len(record.cells) == 1 + len(CONVERSIONS) + 2 * sum(
        c.weights is not None for c in CONVERSIONS.values()
    )
    assert record.to_json() + "\n" == path.read_text(encoding="utf-8")
    assert record.render("md") + "\n" == path.with_suffix(".md").read_text(encoding="utf-8")
