"""Which output feature lies at which place of a weight in panels of 32.

Letters: N output features, P panels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.plan.cpu_program import PANEL_ROWS


def panel_rows(outputs: int) -> NDArray[np.int64]:
    """Return [P * 32]: the output at each place, -1 for padding."""
    rows = np.full(-(-outputs // PANEL_ROWS) * PANEL_ROWS, -1, np.int64)
    rows[:outputs] = np.arange(outputs)
    return rows


def gated_rows(outputs: int, gate: int, up: int) -> NDArray[np.int64]:
    """Return the same for a weight that holds `outputs` gate rows from `gate` on and their up rows from `up` on."""
    half = panel_rows(outputs).reshape(-1, PANEL_ROWS)
    return np.stack([np.where(half < 0, -1, half + first) for first in (gate, up)], axis=1).reshape(-1)


def into_panels(rows: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """Return [P, 32, ...] of an array [N, ...]; padding is 0."""
    shape = (-1, PANEL_ROWS, *rows.shape[1:])
    if len(order) == len(rows) and np.array_equal(order, np.arange(len(rows))):
        return rows.reshape(shape)
    taken = rows[np.maximum(order, 0)]
    taken[order < 0] = 0
    return taken.reshape(shape)
