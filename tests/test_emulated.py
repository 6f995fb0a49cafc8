"""Kernels where there is no GPU: chosen GPU tests, in processes of their own with an emulated one."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulator import driver, translate

HERE = Path(__file__).parent


def problem() -> str | None:
    """Why nothing can be emulated here."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "emulated threads are x86-64 Linux's"
    if "f16c" not in Path("/proc/cpuinfo").read_text():
        return "the processor does not convert float16"
    return None if shutil.which("g++") else "g++ is not installed"


needs_compiler = pytest.mark.skipif(problem() is not None, reason=str(problem()))

CHOSEN = {
    "test_matmul.py": (
        52,
        "(every_format and (q4_0 or q8_0) and not bfloat16 and not float32) or known"
        " or scales or zeros or 8_bits or can_quantize or stored_sum or guarded or dense",
    ),
    "test_gpu.py": (
        147,
        "bytes_of_numpy or same_words or numbers_of_numpy or repack or picture"
        " or (beyond_float16 and (q4_0 or q5_1))"
        " or minimums_that_lose or (small_blocks and (q4_1 or q8_0))",
    ),
    "test_gpu_cores.py": (
        2,
        "(tile_of_the_mma and q4_0 and 8x2x4x1x3) or (share_columns and 70)",
    ),
    "test_gpu_x_format.py": (15, "not every_scale and not every_codec"),
    "test_gpu_convert.py": (12, "places and (E2m1 or U4 or Pairs or Int8)"),
    "test_gpu_kquants.py": (
        25,
        "(q2_k or q4_k or q6_k or iq4_nl or picture) and not every_batch and not older and not every_step"
        " and not (quantizing and (q6_k or iq4_nl))",
    ),
    "test_gpu_by_importance.py": (48, "not bfloat16"),
    "test_gpu_kbit.py": (42, "not variant and not magnitudes and not large_ones and not many"),
    "test_gpu_grids.py": (18, "numbers or rows or does_not_hold or (experts and (iq3_s or iq1_m))"),
    "test_gpu_fp4_int4.py": (
        53,
        "(mxfp4 or nvfp4 or int4-32 or int4-128-zeros or together or (beyond and 64-True)) and not products"
        " and not 1e",
    ),
    "test_gpu_random.py": (5, "(caches and (20 or 21)) or (mixtures and 3) or (products and 5)"),
    "test_gpu_rechecks.py": (9, "test"),
    "test_gpu_operands.py": (24, "test"),
    "test_gpu_repeats.py": (28, "test and not (formats_and and (trellis2 or nvfp4 or q4_k))"),
    "test_gpu_trellis.py": (
        27,
        "(trellis3 or 3-128 or odd_places or derived) and not step and not same_bits and not grids"
        " and not magnitudes and not fuse and not (products and shape1)",
    ),
    "test_gpu_exl3.py": (
        17,
        "(numbers and mcg) or stacks or parts or floats_first or warmup",
    ),
    "test_gpu_moe.py": (
        18,
        "(types and (few-q4_0 or few-mxfp4 or many-kbit3)) or nan"
        " or float_experts or go_where or (test_activations and 90) or (sizes and 8-2-33)"
        " or (graph and 16-q4_0)",
    ),
    "test_gpu_moe_prefill.py": (4, "levels or (mma_core and q4_0)"),
    "test_gpu_moe_repeats.py": (21, "not (again and (40 or bfloat16 or not float16))"),
    "test_gpu_moe_trellis.py": (
        15,
        "down-70 or (signs_of and (trellis3-32 or trellis2-alike-3 or trellis4-signs-70))",
    ),
    "test_gpu_moe_exl3.py": (
        21,
        "types or three_formats or stay or strides or 60 and graph or fallback",
    ),
    "test_gpu_kvcache.py": (7, "not growing"),
    "test_gpu_kv_appended.py": (95, "not long_prompt"),
    "test_gpu_kv_copies.py": (27, "test"),
    "test_gpu_kv_operands.py": (23, "not another_gpu"),
    "test_gpu_kv_refused.py": (29, "test"),
    "test_gpu_kv_captured.py": (17, "test"),
    "test_gpu_kv_moves.py": (135, "not many_elements"),
    "test_gpu_evaluate.py": (
        16,
        "(small_model and experts) or many_queries or beyond or no_numbers or layer",
    ),
    "test_gpu_errors.py": (39, "not no_tensor_is_dense"),
    "test_gpu_kv_repeats.py": (39, "not in_turn"),
    "test_tuning.py": (1, "right and q4_0 and 40"),
    "test_gpu_attention.py": (
        23,
        "(types and (64-3 or 128-64 or 40-1) and not bfloat16 and not (64 and float32))"
        " or (thought_to_be_even and widths0-6)"
        " or bad or seen or (fewer and (widths0 or widths5) and not 70000 and not 3000)",
    ),
    "test_gpu_attention_masks.py": (
        29,
        "(masks and True) or positions or seen or hides or (largest and 5-2.5e)",
    ),
    "test_gpu_attention_importance.py": (
        21,
        "not (nan-2 or inf-4 or nan-4 or inf-8 or nan-8 or 1200) and (widths5 or not any_shape)",
    ),
    "test_gpu_attention_lengths.py": (6, "(many or by_block) and (plain or masked)"),
    "test_gpu_attention_shares.py": (24, "True or 512-400"),
    "test_gpu_attention_queries.py": (35, "bad or (overflow and widths1) or (integers and 2-float16)"),
    "test_gpu_attention_prompts.py": (
        8,
        "(types and 65 and not bfloat16) or (masks and shape1) or (heads and 40)"
        " or nothing_to_merge or (leaves and 256) or (graph and float32)",
    ),
}
"""Tests that are emulated in seconds, of every kernel file and kind of format: how many there are at least (a
changed name must not leave one out unseen), and which, as -k takes them."""
CHOSEN_OF_SM_90 = {
    "test_gpu_kv_appended.py": (15, "many_heads or halfway or (share and 32)"),
    "test_gpu_attention.py": (
        7,
        "(eight_heads_at_once and 1000) or (zeros and 20) or (thought_to_be_even and widths1-6)",
    ),
    "test_gpu_attention_lengths.py": (3, "(eight_heads and same_grain) or (5-same_grain and plain)"),
    "test_gpu_attention_shares.py": (42, "test"),
    "test_gpu_attention_queries.py": (
        13,
        "(overflow and widths1-8) or (integers and 8-bfloat16 and larger) or (only_itself and 20)",
    ),
    "test_gpu_attention_panels.py": (
        15,
        "(types and (64-16 or 128-33) and not bfloat16) or (tokens and 40-129) or (masks and True and shape1)"
        " or sees_nothing or (bad and (k-nan-widths5 or v-inf-widths0 or v-nan-widths2)) or (move and 64-one)"
        " or (importance and 90 and not options1) or (behind and 96) or (positions and 70) or these",
    ),
    "test_gpu_attention_prompts.py": (
        7,
        "(types and 128-128 and not float32) or (heads and 96) or (positions and 20-float16)"
        " or (order and float16) or (graph and float16) or every_token",
    ),
    "test_gpu_attention_magnitudes.py": (
        28,
        "(take_back and 16 and (61 or 37)) or largest_float or as_large or move or (zeros and (3 or 16))",
    ),
    "test_gpu_cores.py": (
        3,
        "(edges and q5_1 and 256) or (parts_of and (16x1x1x4x2x1x1-q8_0 or 64x1x1x2x2x1x1-q4_k))",
    ),
    "test_gpu_exl3.py": (9, "graph or follows or any_place or magnitudes or (products and shape0-4-mcg)"),
    "test_gpu_launches.py": (1, "just_needs"),
    "test_gpu_random.py": (1, "caches and 20"),
    "test_gpu_moe_prefill.py": (
        4,
        "(few_tiles and int4 and 144) or (last_rows and 144) or (magnitudes and q4_0)",
    ),
    "test_gpu_moe_exl3.py": (3, "(tokens and 60 and (2 or 4)) or (graph and 60)"),
    "test_gpu_moe_trellis.py": (12, "signs_of and trellis4 and not 32"),
    "test_gpu_trellis.py": (1, "given_to_w and 3"),
    "test_matmul.py": (33, "strided or leading or (nan and 40 and not scales)"),
    "test_epilogue.py": (58, "test"),
}
"""Likewise, of a GPU with wgmma, a copy engine and clusters."""


PROCESSES = {
    "products": ("test_matmul.py", "test_gpu_cores.py", "test_gpu_x_format.py"),
    "blocks": ("test_gpu.py", "test_gpu_convert.py", "test_gpu_grids.py", "test_tuning.py"),
    "k-quants": (
        "test_gpu_kquants.py",
        "test_gpu_by_importance.py",
        "test_gpu_rechecks.py",
        "test_gpu_operands.py",
    ),
    "codebooks": ("test_gpu_kbit.py", "test_gpu_trellis.py", "test_gpu_exl3.py"),
    "FP4 and int4": ("test_gpu_fp4_int4.py", "test_gpu_repeats.py"),
    "mixtures": ("test_gpu_moe.py", "test_gpu_moe_prefill.py", "test_gpu_moe_repeats.py"),
    "mixtures of others": ("test_gpu_moe_trellis.py", "test_gpu_moe_exl3.py", "test_gpu_random.py"),
    "caches": ("test_gpu_kvcache.py", "test_gpu_kv_moves.py", "test_gpu_kv_repeats.py"),
    "tokens of caches": ("test_gpu_kv_appended.py", "test_gpu_kv_copies.py"),
    "operands of caches": ("test_gpu_kv_operands.py", "test_gpu_kv_refused.py", "test_gpu_kv_captured.py"),
    "attention": (
        "test_gpu_attention.py",
        "test_gpu_attention_masks.py",
        "test_gpu_attention_importance.py",
        "test_gpu_attention_lengths.py",
        "test_gpu_attention_shares.py",
        "test_gpu_attention_queries.py",
        "test_gpu_attention_prompts.py",
    ),
    "a model": ("test_gpu_evaluate.py", "test_gpu_errors.py"),
}
"""Files of `CHOSEN` that share a process, which takes two seconds to begin."""
PROCESSES_OF_SM_90 = {
    "products": ("test_matmul.py", "test_epilogue.py", "test_gpu_cores.py", "test_gpu_launches.py"),
    "mixtures": ("test_gpu_moe_prefill.py", "test_gpu_moe_trellis.py", "test_gpu_moe_exl3.py"),
    "walks and trellises": ("test_gpu_exl3.py", "test_gpu_trellis.py"),
    "attention": (
        "test_gpu_kv_appended.py",
        "test_gpu_attention.py",
        "test_gpu_attention_lengths.py",
        "test_gpu_attention_shares.py",
        "test_gpu_attention_queries.py",
        "test_gpu_attention_panels.py",
        "test_gpu_attention_prompts.py",
        "test_gpu_attention_magnitudes.py",
        "test_gpu_random.py",
    ),
}
"""Likewise."""


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("process", PROCESSES)
def test_kernels(process: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    chosen = {file: CHOSEN[file] for file in PROCESSES[process]}
    run(chosen, "emulator.plugin", tmp_path_factory)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("process", PROCESSES_OF_SM_90)
def test_kernels_of_sm_90(process: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    chosen = {file: CHOSEN_OF_SM_90[file] for file in PROCESSES_OF_SM_90[process]}
    run(chosen, "emulator.hopper", tmp_path_factory)


def test_every_chosen_file_has_a_process() -> None:
    for processes, chosen in ((PROCESSES, CHOSEN), (PROCESSES_OF_SM_90, CHOSEN_OF_SM_90)):
        assert sorted(file for files in processes.values() for file in files) == sorted(chosen)


def run(chosen: dict[str, tuple[int, str]], gpu: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests of some files in a process of their own, with this GPU."""
    base = tmp_path_factory.getbasetemp()  # under xdist each process has one beside the others'
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulated-kernels"
    folder.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(HERE.parent), str(HERE), env.get("PYTHONPATH", "")])
    env |= {"PYTHONPATH": path, "CUPY_CACHE_DIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    options = ["-m", "gpu", "-p", gpu, "--tb=short"]
    for plugin in ("xdist", "cacheprovider", "hypothesispytest", "anyio"):  # some take a second to import
        options += ["-p", f"no:{plugin}"]
    which = " or ".join(f"({file} and ({expression}))" for file, (_, expression) in chosen.items())
    command = [sys.executable, "-m", "pytest", *options, "--no-header", "-vv", *chosen, "-k", which]
    done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1].strip("= ")
    passed = re.fullmatch(r"(\d+) passed(, \d+ deselected)? in .*", last)
    assert passed is not None, last
    counts = {file: len(re.findall(rf"^{file}::.* PASSED ", done.stdout, re.MULTILINE)) for file in chosen}
    assert sum(counts.values()) == int(passed[1])
    for file, (least, _) in chosen.items():
        assert counts[file] >= least, f"{counts[file]} tests of {file}"


SOURCE = """
typedef unsigned int u32;
extern "C" __global__ void __launch_bounds__(2 * (32)) turn(const u32* in, u32* out, bool meets) {
    __shared__ u32 all[64];
    all[threadIdx.x] = in[threadIdx.x];
    if (meets) __syncthreads();
    out[threadIdx.x] = all[63 - threadIdx.x];
    __syncthreads();
    out[64 + threadIdx.x] = all[threadIdx.x ^ 32];
}
#if 0
extern "C" __global__ void absent() {}
#endif
extern "C" __global__ void copied(const u32* in, u32* out, u32 to, int waits) {
    to += 4 * threadIdx.x;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(in + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (waits) asm volatile("cp.async.wait_group %0;" :: "n"(0) : "memory");
    asm("ld.shared.u32 %0, [%1];" : "=r"(out[threadIdx.x]) : "r"(to));
    asm volatile("cp.async.wait_group %0;" :: "n"(0) : "memory");
}
extern "C" __global__ void divided() {
    if (threadIdx.x % 2) __syncwarp();
}
extern "C" __global__ void subnormal(const float* in, float* out, u32 flushed) {
    const float a = in[threadIdx.x], b = in[threadIdx.x ^ 1];
    float exact;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(exact) : "f"(a), "f"(b));
    u32 less;
    asm("{.reg .pred p; setp.lt.f32 p, %1, %2; selp.u32 %0, 1, 0, p;}" : "=r"(less) : "f"(a), "f"(b));
    out[threadIdx.x] = threadIdx.x < flushed ? a + b : exact;
    out[64 + threadIdx.x] = threadIdx.x < flushed ? a < b : less;
}
extern "C" __global__ void words(const uint4* in, uint4* out, u32 bytes) {
    out[threadIdx.x] = *(const uint4*)((const char*)(in + threadIdx.x % 4) + bytes);
}
"""


@needs_compiler
def test_the_emulator_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Barriers and waits that are missing, addresses that are not there, lanes that do not come; and what
    a GPU does that CPUs do not."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    library = driver.build(SOURCE, ("-std=c++17",))
    given, out = (ctypes.c_uint * 64)(*range(64)), (ctypes.c_uint * 256)()

    def launch(name: str, *values: Any) -> None:
        arrays = [ctypes.c_void_p(ctypes.addressof(a)) for a in (given, out)] if values else []
        pointers = [ctypes.addressof(value) for value in (*arrays, *values)]
        config = SimpleNamespace(grid=(1, 1, 1), block=(64, 1, 1), shared=512, count=0)
        driver.Function(library, name).launch(config, pointers)

    launch("turn", ctypes.c_bool(True))
    assert list(out[:128]) == [*range(63, -1, -1), *range(32, 64), *range(32)]
    launch("turn", ctypes.c_bool(False))
    assert list(out[:64]) != list(range(63, -1, -1))
    launch("copied", ctypes.c_uint(256), ctypes.c_int(1))
    assert list(out[:64]) == list(range(64))
    launch("copied", ctypes.c_uint(256), ctypes.c_int(0))
    assert set(out[:64]) == {0xFFFFFFFF}
    with pytest.raises(RuntimeError, match="4 bytes at 512 of 512 shared ones"):
        launch("copied", ctypes.c_uint(260), ctypes.c_int(1))
    with pytest.raises(RuntimeError, match="32 threads wait for what never comes"):
        launch("divided")
    launch("subnormal", ctypes.c_uint(32))  # these words are floats of less than 2^-126
    assert list(out[:64]) == [0] * 32 + [i + (i ^ 1) for i in range(32, 64)]
    one = np.float32(1).view(np.uint32)
    assert list(out[64:128]) == [0] * 32 + [one, 0] * 16
    launch("words", ctypes.c_uint(0))
    assert list(out[:16]) == list(range(16))
    with pytest.raises(RuntimeError, match=r"line \d+: 16 bytes at .*4"):
        launch("words", ctypes.c_uint(4))
    with pytest.raises(driver.CompileError, match="clz_b32"):
        driver.build('__global__ void f(int v) { asm("clz.b32 %0, %0;" : "+r"(v)); }', ())


BOXES = """
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(64) Map { u64 words[16]; };
extern "C" __global__ void boxed(const __grid_constant__ Map map, u32* out, int bytes, int waits,
                                 int fences) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ u64 barrier;
    u32 at = __cvta_generic_to_shared(&barrier), to = __cvta_generic_to_shared(dynamic);
    if (threadIdx.x == 0) {
        asm("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at), "r"(1));
        if (fences) asm("fence.mbarrier_init.release.cluster;");
        asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(bytes));
        asm("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
            :: "r"(to), "l"(&map), "r"(at), "r"(0), "r"(1), "r"(0), "r"(0), "r"(0));
    }
    __syncthreads();
    if (waits)
        asm("{.reg .pred done;\\n"
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
            "@!done bra again;}" :: "r"(at), "r"(0));
    asm("ld.shared.u32 %0, [%1];" : "=r"(out[threadIdx.x]) : "r"(to + 4 * threadIdx.x));
}
"""


@needs_compiler
def test_boxes_arrive_when_they_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Swizzled, with zeros beyond the tensor, and with as many bytes as are expected."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    library = driver.build(BOXES, ("-std=c++17", "-arch=sm_90a"))
    x, out = np.arange(3 * 64, dtype=np.uint16).reshape(3, 64), np.empty((3, 32), np.uint32)
    memory = np.empty(32, np.uint64)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    rows = ((64, 3, 1, 1, 1), (128, 384, 384, 384), (64, 3, 1, 1, 1), (1,) * 5)
    for past, status in ((2, 1), (0, 0)):  # only whole units of 16 bytes are addresses
        address = ctypes.c_void_p(x.ctypes.data + past)
        encode = driver.Driver.cuTensorMapEncodeTiled
        assert encode(ctypes.c_void_p(start), 6, 5, address, *rows, 0, 3, 2, 0) == status

    def launch(bytes: int, waits: int, fences: int = 1) -> None:
        numbers = map(ctypes.c_int, (bytes, waits, fences))
        values = (ctypes.c_void_p(out.ctypes.data), *numbers)
        config = SimpleNamespace(grid=(3, 1, 1), block=(96, 1, 1), shared=512, count=0)
        driver.Function(library, "boxed").launch(config, [start, *map(ctypes.addressof, values)])

    launch(384, 1)
    eighths = out.view(np.uint16).reshape(3, 8, 8)
    np.testing.assert_array_equal(eighths[0].ravel(), x[1])
    np.testing.assert_array_equal(eighths[1][[1, 0, 3, 2, 5, 4, 7, 6]].ravel(), x[2])
    assert not eighths[2].any()
    with pytest.raises(RuntimeError, match="end before copies arrive"):
        launch(384, 0)
    assert (out == 0xFFFFFFFF).all()
    with pytest.raises(RuntimeError, match="96 threads wait for what never comes"):
        launch(256, 1)
    with pytest.raises(RuntimeError, match="barriers that are not fenced"):
        launch(384, 1, 0)


def test_instructions_become_calls() -> None:
    given = """if (a) asm volatile("{.reg .pred p;\\nagain: setp.lt.f32 p, %0, %1;\\n"
    "@!p bra again;}" :: "f"(f(a, b)), "f"(c) : "memory"); else int(d); __shared__ u32 e[2 * N], g;"""
    assert translate.translate(given) == (
        "if (a) { __label__ again; float a0 = float(f(a, b)); float a1 = float(c); bool p; "
        "again: ptx::setp_lt_f32(p, a0, a1); if (!p) goto again; }\n else to_int(d); "
        "static auto& e = emulated::fixed<u32[(2 * N)]>(); static auto& g = emulated::fixed<u32>();"
    )
