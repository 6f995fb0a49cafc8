"""Launches that may be a product's fastest, and which of them plans take."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from itertools import product as combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run, assert_one_line_error
from hardware import SHARED
from products import cuda_weight, gauss

import cuquant as cq
from cuquant import device, plan, testing
from cuquant.bench import Record, tune
from cuquant.bench.tune import problems
from cuquant.cuda import backend as cuda, jit
from cuquant.ops.matmul import Product
from cuquant.plan import tuning
from cuquant.testing import nmse

GPUS = [
    plan.Gpu(75, 40),
    plan.Gpu(80, 108),
    plan.Gpu(89, 128),
    plan.Gpu(90, 114),
    plan.Gpu(90),
    plan.Gpu(120, 170),
]


def problem(name: str, m: int, n: int, k: int, gpu: plan.Gpu) -> plan.Problem:
    return plan.Problem(cq.formats.get(name).for_kernels, m, n, k, gpu)


def candidates(given: plan.Problem) -> list[plan.Gemm]:
    return tuning.candidates(plan.gemm(given), given)


def tuned_to(given: plan.Problem, tuned: tuning.Tuned) -> plan.Problem:
    """The same on a GPU of which this was measured."""
    return given._replace(gpu=given.gpu._replace(tuned=tuned))


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_candidates_fit_the_gpu(gpu: plan.Gpu) -> None:
    """The usual launch is the first, none is there twice, and each covers all rows."""
    for name, m, (n, k) in combinations(
        ("q4_0", "q8_0", "kbit4", "q6_k", "trellis3"), (1, 3, 8, 16, 64, 300), ((4096, 4096), (1000, 2080))
    ):
        given = problem(name, m, n, k, gpu)
        found = candidates(given)
        assert found[0] == plan.gemm(given)
        assert len({tuning.mark(gemm) for gemm in found}) == len(found)
        assert 2 <= len(found) <= 1 + 2 * tuning.MOST
        for gemm in found:
            c, (x, y, _) = dict(gemm.plan.kernel.constants), gemm.plan.grid
            assert (
                gemm.plan.shared
                <= gemm.plan.kernel.max_shared
                <= SHARED.get(f"sm_{gpu.capability}", 227 << 10)
            )
            if plan.core_of(gemm.plan.kernel) == "decode":
                assert x // c["CLUSTER"] * c["ROW_TILES"] * c["ROW_WARPS"] * 16 >= n
                assert y * c["GROUPS"] * 8 >= m
                assert gemm.chunk >= c["WARPS"] // c["ROW_WARPS"]
            if c.get("RESIDENT") == 2 and "CLUSTER" in c and gpu.capability >= 80:
                assert c["WARPS"] == 8


def test_plans_go_by_what_was_measured() -> None:
    gpu = plan.Gpu(80, 108)
    given = problem("q4_0", 4, 14336, 4096, gpu)
    usual, *others = candidates(given)
    for other in others:
        tuned = tuning.Tuned().with_one(tuning.ProblemKind.of(given), other)
        assert plan.gemm(tuned_to(given, tuned)) == other
        for elsewhere in (problem("q4_1", 4, 14336, 4096, gpu), problem("q4_0", 5, 14336, 4096, gpu)):
            assert plan.gemm(tuned_to(elsewhere, tuned)) == plan.gemm(elsewhere)
        for how in ({"repeats": True}, {"to_convert": True}):
            assert plan.gemm(tuned_to(given, tuned), **how) == plan.gemm(given, **how)
    wide = given._replace(half=False)
    assert plan.gemm(tuned_to(wide, tuned)) == plan.gemm(wide)
    forgotten = tuned.with_one(tuning.ProblemKind.of(given), None)
    assert (len(tuned), len(forgotten)) == (1, 0)
    assert plan.gemm(tuned_to(given, forgotten)) == usual


def test_a_choice_stands_for_all_batches_up_to_a_power_of_two() -> None:
    given = problem("q5_1", 64, 14336, 4096, plan.Gpu(90))
    other = candidates(given)[3]
    tuned = tuning.Tuned().with_one(tuning.ProblemKind.of(given), other)
    assert plan.gemm(tuned_to(given, tuned)) == other
    for m in (33, 40, 63):
        gemm = plan.gemm(tuned_to(given._replace(m=m), tuned))
        assert dict(gemm.plan.kernel.constants) == dict(other.plan.kernel.constants)
    for m in (32, 65):
        batch = given._replace(m=m)
        assert plan.gemm(tuned_to(batch, tuned)) == plan.gemm(batch)


def test_a_tuned_tile_shares_columns_by_the_very_number_of_tiles() -> None:
    """384 rows stand for as many as 512, of which the same tile leaves no round nearly empty."""
    of_512, of_384 = (problem("kbit4", m, 14336, 4096, plan.Gpu(80)) for m in (512, 384))
    assert tuning.ProblemKind.of(of_512) == tuning.ProblemKind.of(of_384)
    usual = plan.gemm(of_512)
    assert usual.streamed == 0
    tuned = tuning.Tuned().with_one(tuning.ProblemKind.of(of_512), usual)
    for given, shared in ((of_512, 0), (of_384, 36)):
        gemm = plan.gemm(tuned_to(given, tuned))
        assert tuning.mark(gemm) == tuning.mark(usual)
        assert gemm.streamed == shared


def test_files(tmp_path: Path) -> None:
    tuned, gpu = tuning.Tuned(), plan.Gpu(90)
    problems = (problem("q4_0", 1, 4096, 4096, gpu), problem("kbit4", 64, 14336, 4096, gpu))
    for given in problems:
        tuned = tuned.with_one(tuning.ProblemKind.of(given), candidates(given)[-1])
    file = tmp_path / "tuned.json"
    assert len(tuning.Tuned.read(file)) == 0
    file.write_text(tuned.to_json())
    back = tuning.Tuned.read(file)
    assert len(back) == 2
    assert back.name == tuned.name != tuning.Tuned().name
    for given in problems:
        assert back.choice(given) == tuned.choice(given) is not None
        assert back.choice(given._replace(gpu=plan.Gpu(75, 40))) is None  # another GPU has no such launch
    strange = json.loads(tuned.to_json())
    strange["products"][0]["constants"]["WARPS"] = 1 << 20
    assert tuning.Tuned.from_json(json.dumps(strange)).choice(problems[0]) is None
    huge = '{"version": 2, "products": [{"constants": {"A": 1e999}, "streamed": 0}]}'
    for text in (
        huge,
        "[" * 100_000,
        "",
        "[]",
        '{"version": 1, "products": []}',
        '{"version": 2, "products": [{}]}',
        "null",
    ):
        with pytest.raises(ValueError, match="not a file of tuned products"):
            tuning.Tuned.from_json(text)


def test_what_a_later_version_tuned_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, module = tmp_path / "tuned.json", importlib.import_module("cuquant.bench.tune")
    monkeypatch.setattr(device, "tuned_file", lambda: file)
    one = tuning.ProblemKind("q4_0", 18, 1, 4096, 4096, 1)
    gemm = plan.gemm(problem("q4_0", 1, 4096, 4096, plan.Gpu(90)))
    later = '{"version": 9, "more": 1}'
    file.write_text(later)
    with pytest.raises(ValueError, match="a later version of cuquant wrote it, and it is not replaced"):
        module._keep(one, gemm)
    assert file.read_text() == later
    file.write_text("damaged")
    module._keep(one, gemm)
    assert one in tuning.Tuned.read(file)


def test_the_command_line_refuses_what_does_not_go_together(run: Run) -> None:
    for others in (["--from", "x.json"], ["moe"], ["--plot", "x.svg"], ["--peers", "none"]):
        done = run("bench", *others, "--tune")
        assert done.status == 2, others
        assert "--tune measures products" in done.err or "tune takes no --" in done.err


def test_without_a_gpu_the_command_says_why(run: Run) -> None:
    if device.gpu_problem() is None:
        pytest.skip("there is one")
    done = run("bench", "--tune", "--formats", "q4_0")
    assert done.status == 1
    assert_one_line_error(done)


@pytest.fixture
def tuned_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "tuned.json"
    monkeypatch.setattr(device, "tuned_file", lambda: file)
    jit.read_tuned()
    yield file
    monkeypatch.undo()
    jit.read_tuned()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 8, 16, 40])
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "kbit4", "q4_k", "trellis3"])
def test_every_candidate_is_right(name: str, m: int) -> None:
    cupy, (n, k) = device.cupy(), (520, 4096)
    w, x = cuda_weight(name, (n, k)), cupy.asarray(gauss((m, k)).astype(np.float16))
    out, reference = cupy.empty((m, n), np.float16), testing.linear(x, w)
    gpu = jit.gpu()._replace(tuned=None)
    given = problem(name, m, n, k, gpu)
    for gemm in candidates(given):
        tuned = tuning.Tuned().with_one(tuning.ProblemKind.of(given), gemm)
        with jit.planned_for(gpu._replace(tuned=tuned)):
            out.fill(np.nan)
            cuda.product(Product(x, w, None, None, None), out)
        assert nmse(out, reference) < 1e-6, gemm


@pytest.mark.gpu
def test_tuning_keeps_the_fastest(monkeypatch: pytest.MonkeyPatch, tuned_file: Path) -> None:
    module: Any = importlib.import_module("cuquant.bench.tune")  # the package has a function of that name
    monkeypatch.setattr(module, "warm_up", lambda: None)
    times: list[float] = []

    def graph_us(calls: list[Any]) -> Any:
        calls[0]()
        return cq.bench.timing.Timing(times.pop(0), 1980.0)

    monkeypatch.setattr(module, "graph_us", graph_us)
    monkeypatch.setattr(module, "random_weights", lambda *given: [cuda_weight(given[0], given[1:])])
    keys = problems(["q4_0", "q4_0"], [(256, 512)], [4, 4])
    assert len(keys) == 1
    shape = ("q4_0", 4, 256, 512)
    found = candidates(problem(*shape, jit.gpu()))
    times += [9.0, 8.9, 5.0, *[10.0] * len(found)]
    record = Record(None, {}, [])
    (cell,) = tune(record, keys)
    assert (cell.us, cell.usual_us, cell.tried) == (5.0, 9.0, len(found))
    assert cell.nmse < 1e-6
    assert cell.tile
    assert list(tune(record, keys)) == []
    assert plan.gemm(problem(*shape, jit.gpu())) == found[2]
    w, x = cuda_weight("q4_0", (256, 512)), device.cupy().asarray(gauss((4, 512)).astype(np.float16))
    assert nmse(x @ w.T, testing.linear(x, w)) < 1e-6
    # Times that differ by themselves are no reason.
    times[:] = [9.0, 8.9, *[10.0] * len(found)]
    (cell,) = tune(Record(None, {}, []), keys)
    assert (cell.us, cell.usual_us, cell.tile) == (9.0, 9.0, "")
    assert plan.gemm(problem(*shape, jit.gpu())) == found[0]
    assert len(tuning.Tuned.read(tuned_file)) == 0
    tuned_file.write_text("nothing of the kind")
    jit.read_tuned()
    with pytest.warns(UserWarning, match=r"tuned\.json is not used \(it is not a file of tuned products"):
        assert jit.gpu().tuned is None
    # It is replaced; and batches that one launch stands for are tuned once.
    times[:] = [9.0, 5.0] + [10.0] * (len(candidates(problem("q4_0", 64, 256, 512, jit.gpu()))) - 2)
    (cell,) = tune(Record(None, {}, []), problems(["q4_0"], [(256, 512)], [40, 64]))
    assert (cell.M, cell.us) == (64, 5.0)
    assert len(tuning.Tuned.read(tuned_file)) == 1
    # Products ask for whole pieces of K.
    found = candidates(problem("trellis3", 1, 64, 104, jit.gpu()))
    times[:] = [9.0, 5.0] + [10.0] * (len(found) - 2)
    (cell,) = tune(Record(None, {}, []), problems(["trellis3"], [(64, 100)], [1]))
    assert (cell.K, cell.us) == (100, 5.0)
    assert plan.gemm(problem("trellis3", 1, 64, 104, jit.gpu())) == found[1]
    # What the record tells of, but no file any more, is measured again.
    tuned_file.unlink()
    jit.read_tuned()
    times[:] = [9.0, 8.9, 4.0] + [10.0] * (len(candidates(problem(*shape, jit.gpu()))) - 3)
    assert [c.us for c in tune(record, keys)] == [c["us"] for c in record.cells] == [4.0]
    assert list(tune(record, keys)) == []
