"""Tests that run on both backends take `xp`: NumPy always, CuPy under the mark `gpu` where there is a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest

from cuquant import device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if device.gpu_problem() is not None:
        skip = pytest.mark.skip(reason=f"needs a GPU: {device.gpu_problem()}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> ModuleType:
    """The array module of a backend."""
    if request.param == "cuda":
        return device.cupy()
    import numpy

    return numpy
