"""Affine quantization of weights in groups along their columns; pure arithmetic.

A group of columns of one row shares a scale s and a zero point z: w is stored as the code q in 0 .. 2**b - 1 and read
as (q - z) * s. 0 is always representable exactly, and no element is off by more than s / 2.

Letters: N rows (output features), C columns (input features), G group size, g = ceil(C / G) groups per row, b bits.
The last group is ragged when G does not divide C.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SMALLEST_SCALE = np.finfo(np.float32).tiny
"""Scales stay normal numbers: division by a subnormal one has no precision left."""


class AffineCodes(NamedTuple):
    """A weight matrix as codes."""

    codes: NDArray[np.uint8]
    """[N, C], each 0 .. 2**b - 1."""
    scales: NDArray[np.float32]
    """[N, g], finite and positive."""
    zeros: NDArray[np.uint8] | None
    """[N, g], each 0 .. 2**b - 1; None means 2**(b - 1) everywhere."""


def quantize_affine(weight: NDArray[np.floating], bits: int, group: int, *, symmetric: bool) -> AffineCodes:
    """Round each element of `weight` [N, C] to the nearest code of its group's grid.

    Raises ValueError if an element is not finite.
    """
    assert weight.ndim == 2, weight.shape
    assert 2 <= bits <= 8, bits
    assert group >= 1, group
    weight = weight.astype(np.float32, copy=False)
    low, high = group_range(weight, group)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        rows = np.flatnonzero(~np.isfinite(weight).all(axis=1))
        raise ValueError(f"{len(rows)} rows have elements that are not finite, the first is row {rows[0]}")
    scales, zeros = symmetric_grid(low, high, bits) if symmetric else asymmetric_grid(low, high, bits)
    return AffineCodes(encode(weight, scales, zeros, bits, group), scales, zeros)


def group_range(weight: NDArray[np.float32], group: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the smallest and largest element of each group, [N, g] each, widened to include 0; NaN stays NaN."""
    if weight.shape[1] == 0:
        empty = np.zeros((weight.shape[0], 0), np.float32)
        return empty, empty
    starts = np.arange(0, weight.shape[1], group)
    low = np.minimum.reduceat(weight, starts, axis=1)
    high = np.maximum.reduceat(weight, starts, axis=1)
    return np.minimum(low, 0), np.maximum(high, 0)


def symmetric_grid(low: NDArray[np.float32], high: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], None]:
    """Return scales for grids with the zero point 2**(b - 1).

    The grid has one code more below zero than above, and the scale is the smallest that covers both sides.
    """
    half = 2 ** (bits - 1)
    return _usable(np.maximum(high / np.float32(half - 1), -low / np.float32(half))), None


def asymmetric_grid(
    low: NDArray[np.float32], high: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return scales, and zero points rounded to codes."""
    top = 2**bits - 1
    # Divided first: the range of two large float32 numbers may overflow.
    scales = _usable(high / np.float32(top) - low / np.float32(top))
    zeros = np.clip(np.rint(-low / scales), 0, top).astype(np.uint8)
    return scales, zeros


def encode(
    weight: NDArray[np.float32], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None, bits: int, group: int
) -> NDArray[np.uint8]:
    """Return the nearest code of each element, uint8 [N, C]."""
    groups = np.arange(weight.shape[1]) // group
    steps = np.rint(weight / scales[:, groups])
    steps += np.float32(2 ** (bits - 1)) if zeros is None else zeros[:, groups]
    codes: NDArray[np.uint8] = np.clip(steps, 0, 2**bits - 1).astype(np.uint8)
    return codes


def _usable(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace scales nobody can divide by: 1 where a group is all zero, a normal number where it nearly is."""
    return np.where(scales == 0, np.float32(1), np.maximum(scales, SMALLEST_SCALE)).astype(np.float32)
