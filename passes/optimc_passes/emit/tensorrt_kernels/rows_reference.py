"""What the row kernels mean, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DROPPED = -1
"""Slot of a row that is left alone."""


def commit_rows(pools: Sequence[NDArray[Any]], rows: Sequence[NDArray[Any]], slots: NDArray[np.int64]) -> None:
    """Write row r of each `rows` [R, …] to row slots[r] of its pool. `slots` [R] are distinct, but for DROPPED."""
    kept = slots != DROPPED
    for pool, source in zip(pools, rows, strict=True):
        pool[slots[kept]] = source[: len(slots)][kept]


def gather_rows(pools: Sequence[NDArray[Any]], rows: Sequence[NDArray[Any]], slots: NDArray[np.int64]) -> None:
    """Write row slots[r] of each pool to row r of its `rows` [R, …]; rows whose slot is DROPPED stay as they are."""
    kept = np.flatnonzero(slots != DROPPED)
    for pool, target in zip(pools, rows, strict=True):
        target[kept] = pool[slots[kept]]


def move_rows(pools: Sequence[NDArray[Any]], src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
    """Copy rows between slots of each pool, as if all were read before any is written."""
    staging = [np.zeros((len(src_slots), *pool.shape[1:]), pool.dtype) for pool in pools]
    gather_rows(pools, staging, src_slots)
    commit_rows(pools, staging, dst_slots)
