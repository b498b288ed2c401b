"""Ranges of groups that are smaller than what the weights span, where that costs less than it saves.

Letters as in `affine`: N rows, C columns, G group size, g groups per row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc_passes.quantize.affine import asymmetric_grid, group_range, symmetric_grid

SHRINKS = tuple(1 - step / 40 for step in range(1, 21))
"""Fractions of a group's range that are tried beside the whole: down to a half."""
_ROWS = 512
"""Rows searched at a time, so that intermediate arrays stay small."""


def clipped_range(
    weight: NDArray[np.float32],
    bits: int,
    group: int,
    *,
    symmetric: bool,
    importance: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return low and high [N, g] per group: the fraction of its range whose grid gives the smallest squared error.

    `importance` [C] weighs the error of each column, for example the mean square of what the column is multiplied
    with; by default all count the same. A tie keeps the wider range, so an exact group stays exact.
    """
    low, high = group_range(weight, group)
    for begin in range(0, weight.shape[0], _ROWS):
        rows = slice(begin, begin + _ROWS)
        low[rows], high[rows] = _search(weight[rows], low[rows], high[rows], bits, group, symmetric, importance)
    return low, high


def _search(
    weight: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    bits: int,
    group: int,
    symmetric: bool,
    importance: NDArray[np.float32] | None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    best = np.ones_like(low)
    least = _error(weight, low, high, bits, group, symmetric, importance)
    for shrink in SHRINKS:
        factor = np.float32(shrink)
        error = _error(weight, low * factor, high * factor, bits, group, symmetric, importance)
        better = error < least
        best[better], least[better] = factor, error[better]
    return low * best, high * best


def _error(
    weight: NDArray[np.float32],
    low: NDArray[np.float32],
    high: NDArray[np.float32],
    bits: int,
    group: int,
    symmetric: bool,
    importance: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """Return the squared error of each group [N, g] on the grid for a range."""
    scales, zeros = symmetric_grid(low, high, bits) if symmetric else asymmetric_grid(low, high, bits)
    columns = weight.shape[1]
    widths = np.diff(np.append(np.arange(0, columns, group), columns))
    scale = np.repeat(scales, widths, axis=1)
    zero = np.float32(2 ** (bits - 1)) if zeros is None else np.repeat(zeros.astype(np.float32), widths, axis=1)
    steps = weight / scale
    np.rint(steps, out=steps)
    np.clip(steps, -zero, (2**bits - 1) - zero, out=steps)
    steps *= scale
    steps -= weight
    steps *= steps
    if importance is not None:
        steps *= importance
    summed: NDArray[np.float32] = np.add.reduceat(steps, np.arange(0, columns, group), axis=1)
    return summed
