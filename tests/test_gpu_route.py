"""Routing on a GPU: the experts of each token, next to NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mixtures import BF16, F, gauss

import cuquant as cq
from cuquant import device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [F, np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (11, 11), (64, 8), (300, 40)])
def test_routing(dtype: Any, experts: int, top_k: int) -> None:
    logits = (gauss(70, experts) * 3).astype(dtype)
    logits[5:20] = np.round(logits[5:20])  # equal ones
    for normalize in (True, False):
        ids, probs = cq.route(device.cupy().asarray(logits), top_k, normalize)
        expected_ids, expected_probs = cq.route(logits, top_k, normalize)
        assert (ids.dtype, probs.dtype) == (np.int32, F)
        np.testing.assert_array_equal(ids.get(), expected_ids)
        np.testing.assert_allclose(probs.get(), expected_probs, rtol=1e-5)


def test_routing_of_extreme_logits() -> None:
    cupy = device.cupy()
    inf, nan = np.inf, np.nan
    logits = [[3e38, -3e38, 0], [-inf, 1, 1], [0.0, -0.0, 0.0], [1e-45, 0, -1e-45]]
    logits += [[nan, 1, 2], [inf, 1, 2], [-inf] * 3]
    given = np.array(logits, F)
    ids, probs = (a.get() for a in cq.route(cupy.asarray(given), 2))
    expected = cq.route(given, 2)
    np.testing.assert_array_equal(ids, expected[0])
    np.testing.assert_array_equal(probs[:4], expected[1][:4])
    assert np.isnan(probs[4:]).all()
    assert cq.route(cupy.zeros((0, 4), F), 4)[0].shape == (0, 4)
    assert cq.route(cupy.zeros(4, F), 2)[0].shape == (2,)
