"""Launches that are planned before it is known where their memory lies."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from cuquant import device
from cuquant.cuda import buffers, jit, problem, streams
from cuquant.cuda.templates import Place, Tensor, launch, template
from cuquant.plan import Kernel, Plan

PLAN = Plan(Kernel("moe", "level"), (1, 1, 1), 32)
MAP = problem.Map((64, 8, 1, 1, 1), (128, 16, 16, 16), (64, 8, 1, 1, 1))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is started, by which thread's launch on which stream of which device; whether it may overlap."""
    found: list[Any] = []

    class Started:
        def __init__(self, device_id: int, plan: Plan, size: int, offsets: tuple[int, ...]) -> None:
            self.given = device_id, plan, size, offsets
            self.arguments = memoryview(bytearray(size))

        def __call__(self, stream: int, overlaps: bool) -> None:
            found.append((*self.given, stream, overlaps, bytes(self.arguments)))

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 3))
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(streams, "current", lambda: (77, False))
    monkeypatch.setattr(jit, "prepared", Started)
    monkeypatch.setattr(buffers, "tensor_map", lambda address, map: struct.pack("<Q120x", address))
    return found


def test_addresses_are_filled_in(started: list[Any]) -> None:
    """Each where the kernel finds it, of the memory that it is in; what is known stays."""
    step = template(PLAN, ("Q", "i", "Q", "q", "Q"), Place(1, 40), -7, Place(0).behind(16), -1, 99)
    for starts in ((1000, 5000), (2**63, 2**40)):
        started.clear()
        launch((step, step), starts)
        expected = struct.pack("<Qi4xQqQ", starts[1] + 40, -7, starts[0] + 16, -1, 99)
        assert started == [(3, PLAN, 40, (0, 8, 16, 24, 32), 77, False, expected)] * 2


def test_places_before_the_start_of_memory(started: list[Any]) -> None:
    """Rows that run backwards."""
    launch((template(PLAN, ("Q",), Place(0, -24)),), (1000,))
    assert started[0][-1] == struct.pack("<Q", 976)


def test_tensors_and_structs(started: list[Any]) -> None:
    """A struct is one argument; a tensor starts where its memory does."""
    values = (bytes(128), Tensor(MAP, Place(1, 256)), Place(1, 8))
    launch((template(PLAN, ("128s", "128s", "Q"), *values, whole=True),), (1, 512))
    argument = bytes(128) + struct.pack("<Q120x", 768) + struct.pack("<Q", 520)
    assert started == [(3, PLAN, 264, (0,), 77, False, argument)]


def test_grouped_products_are_structs_of_problem_cuh() -> None:
    """`struct Grouped` adds 128 bytes to `struct Problem`, of which each product has 12 addresses."""
    packing, offsets = jit.layout(problem._GROUP)
    own = (struct.calcsize("<384s12q"), problem._NUMBERS.size, problem._OTHERS.size)
    assert (packing.size, offsets[3], offsets[15]) == (sum(own) + 128, 384, own[0])
    assert offsets[16] == sum(own[:2])
    added = (0, 8, 16, 24, 28, 32, 36, 40, 44, 48, 52, 56, 64, 72, 80)
    assert offsets[-len(added) - 1 : -1] == tuple(sum(own) + at for at in added)
