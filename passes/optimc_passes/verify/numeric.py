"""How far apart two arrays are that should be the same, in one number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-5
"""Largest difference over the largest magnitude of its row. Fusions that keep every product and sum in its place give
0; one that scales a weight instead of an activation rounds float32 once more, some 1e-7 a layer. A wrong weight, bias,
factor or permutation shows at 1e-2 and above."""


def relative_error(before: NDArray[Any], after: NDArray[Any]) -> float:
    """Return the largest difference over the largest magnitude in its row of `before`; rows run along the last axis.

    Not a number where a difference is not one; infinite if the arrays, axes of size 1 apart, differ in shape.
    """
    before, after = np.squeeze(before), np.squeeze(after)
    if before.shape != after.shape:
        return float("inf")
    if before.size == 0:
        return 0.0
    before, after = (np.atleast_1d(array).astype(np.float64) for array in (before, after))
    scale = np.maximum(np.abs(before).max(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):
        return float((np.abs(after - before) / scale).max())
