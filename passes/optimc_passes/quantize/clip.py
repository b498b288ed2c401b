"""Ranges of groups that are smaller than what the weights span, where that costs less than it saves.

`clipped_range` judges a range by the squared error of each column, `best_clip` by the error of the output, columns of a
group together.

Letters as in `affine`: N rows, C columns, G group size, g groups per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimc_passes.quantize.affine import grid_of, group_range
from optimc_passes.quantize.rounding import on_grid

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


def best_clip(
    weight: NDArray[np.float32],
    blocks: Sequence[NDArray[np.float32]],
    bits: int,
    group: int,
    *,
    symmetric: bool,
    steps: int = 10,
    smallest: float = 0.5,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the range (low, high), [N, g] each, within which each group of `weight` [N, C] is best rounded.

    A range that leaves out the outermost elements has finer steps for the others. Ranges from all of the group's down
    to `smallest` of it are tried, each judged by d H_g d^T for the group's rounding error d and the block H_g [G, G] of
    the second moment; where none is better the whole range stays.
    """
    assert len(blocks) == -(-weight.shape[1] // group)
    low, high = group_range(weight, group)
    best = np.full(low.shape, np.inf, np.float32)
    best_low, best_high = low.copy(), high.copy()
    for factor in np.linspace(1, smallest, steps, dtype=np.float32):
        tried_low, tried_high = low * factor, high * factor
        scales, zeros = grid_of(tried_low, tried_high, bits, symmetric=symmetric)
        difference = on_grid(weight, scales, zeros, bits, group)
        difference -= weight
        errors = np.stack(
            [
                np.einsum("ng,ng->n", part @ block, part)
                for part, block in zip(_groups(difference, group), blocks, strict=True)
            ],
            axis=1,
        )
        better = errors < best
        best = np.where(better, errors, best)
        best_low, best_high = np.where(better, tried_low, best_low), np.where(better, tried_high, best_high)
    return best_low, best_high


def group_blocks(moment: NDArray[np.float32], group: int) -> list[NDArray[np.float32]]:
    """Return the blocks [G, G] of a second moment [C, C] along its diagonal; the last one may be smaller."""
    return [moment[at : at + group, at : at + group] for at in range(0, len(moment), group)]


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
    scales, zeros = grid_of(low, high, bits, symmetric=symmetric)
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


def _groups(array: NDArray[np.float32], group: int) -> list[NDArray[np.float32]]:
    return [array[:, at : at + group] for at in range(0, array.shape[1], group)]
