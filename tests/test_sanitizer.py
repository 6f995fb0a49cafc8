"""Kernels of every kind under compute-sanitizer: no access out of bounds, no race. Minutes; run with
-m sanitizer.

racecheck does not see that copies arrive at a barrier in shared memory on their own
(cp.async.mbarrier.arrive), and takes every stage of the wgmma core for a race: it checks the cores of other
GPUs alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]
ROOT = Path(__file__).parent.parent

PROGRAM = """
import cupy, numpy
import cuquant as cq

generator = numpy.random.default_rng(0)
for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "kbit2", "kbit3", "kbit4", "kbit5"):
    for lead, n, k in (((), 33, 96), ((), 130, 2112), ((3,), 17, 160)):
        w = generator.standard_normal((*lead, n, k)).astype(numpy.float32)
        W = cq.quantize(cupy.asarray(w), name).prepare()
        W.blocks
        W.dequantize()
        for m in (1, 3, 9, 16, 17, 70):
            x = cupy.asarray(generator.standard_normal((*lead, m, k)).astype(numpy.float32))
            bias, residual = cupy.ones(n, numpy.float32), cupy.ones((*lead, m, n), numpy.float16)
            cq.linear(x.astype(numpy.float16), W, bias=bias, activation="silu", residual=residual)
            cq.linear(x, W)
            cq.linear(cq.quantize(x, "q8_1"), W)
# What converts blocks of other kinds; their bytes end within a word.
for name, k in (
    ("q4_k", 512), ("q6_k", 512), ("iq4_nl", 96), ("mxfp4", 96), ("nvfp4", 192),
    ("int4-32", 96), ("int4-64-zeros", 192), ("int4-128", 256), ("trellis3", 100),
):
    w = cupy.asarray(generator.standard_normal((33, k)).astype(numpy.float32))
    for x in (w, w.astype(numpy.float16)):
        W = cq.quantize(x, name).prepare()
        W.blocks
        W.dequantize()
        W.dequantize(numpy.float16)
# Output tiles that clusters share out.
W = cq.quantize(cupy.asarray(generator.standard_normal((2048, 1024)).astype(numpy.float32)), "q5_1")
x = cupy.asarray(generator.standard_normal((2400, 1024)).astype(numpy.float16))
for _ in range(2):
    cq.linear(x, W)
    cq.linear(cq.quantize(x, "q8_1"), W)
# Few tiles with long columns, which blocks of the mma core share.
W = cq.quantize(cupy.asarray(generator.standard_normal((200, 6144)).astype(numpy.float32)), "q4_0")
for m in (12, 20, 70):
    cq.linear(cupy.asarray(generator.standard_normal((m, 6144)).astype(numpy.float16)), W)
# Caches: appended to, moved, evicted from, attended to.
k, v = cupy.asarray(generator.standard_normal((2, 2, 60, 2, 64)).astype(numpy.float16))
room = {16: 8, 8: 64, 4: 64, 3: 64, 2: 64}
cache = cq.KVCache(2, 64, room, batch=2, device="cuda", track_attention=True)
cache.append(k, v, bits=8)
cache.append(k[:, :1], v[:, :1], lengths=[1, 0])
for bits in (2, 3, 4):
    cache.assign(list(range(10 * bits, 10 * bits + 9)), bits)
cache.evict([7, 50])
for queries in (1, 5, 40):
    q = cupy.asarray(generator.standard_normal((2, queries, 8, 64)).astype(numpy.float16))
    cq.attention(q, cache)
    cq.attention(q, cache, mask=cupy.ones((queries, 61), bool))
# Mixtures of experts, of few tokens and of many.
gate, up, down = (
    cq.quantize(cupy.asarray(generator.standard_normal((4, 96, 96)).astype(numpy.float32)), "q4_0")
    for _ in range(3)
)
for tokens in (1, 7, 70):
    x = cupy.asarray(generator.standard_normal((tokens, 96)).astype(numpy.float16))
    logits = cupy.asarray(generator.standard_normal((tokens, 4)).astype(numpy.float32))
    cq.moe(x, cq.Experts(gate, up, down), *cq.route(logits, 2))
cupy.cuda.Device().synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool: str, tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = tmp_path / "program.py"
    # CuPy's memory pool would hide an access beyond an allocation.
    older = "from cuquant.cuda import jit; jit.capability = lambda: 80\n" if tool == "racecheck" else ""
    program.write_text("import cupy; cupy.cuda.set_allocator(None)\n" + older + PROGRAM)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "done" in done.stdout
    assert re.search(r"ERROR SUMMARY: 0 errors|\b0 hazards", done.stdout), done.stdout[-4000:]
