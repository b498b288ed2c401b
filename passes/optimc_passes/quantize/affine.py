"""Affine quantization of weights in groups along their columns; pure arithmetic.

A group of columns of one row shares a scale s and a zero point z: w is stored as the code q in 0 .. 2**b - 1 and read
as (q - z) * s. 0 is always representable exactly, and no element is off by more than s / 2.

Letters: N rows (output features), C columns (input features), G group size, g = ceil(C / G) groups per row, b bits.
The last group is ragged when G does not divide C.

Scales are float16 numbers wherever a weight allows it, because kernels and checkpoint formats hold them so. They are
rounded before the codes are computed: the codes belong to the very scales that are served, and nothing is lost later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SMALLEST_SCALE = np.finfo(np.float32).tiny
"""Scales stay normal numbers: division by a subnormal one has no precision left."""

_FLOAT16 = np.finfo(np.float16)

Grid = tuple[NDArray[np.float32], NDArray[np.uint8] | None]
"""Scales [N, g], and zero points [N, g] or None: 2**(b - 1) everywhere."""


class AffineCodes(NamedTuple):
    """A weight matrix as codes."""

    codes: NDArray[np.uint8]
    """[N, C], each 0 .. 2**b - 1."""
    scales: NDArray[np.float32]
    """[N, g], finite and positive: all of them float16 numbers, or as computed where one is outside float16's range."""
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
    scales, zeros = grid_of(low, high, bits, symmetric=symmetric)
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


def grid_of(low: NDArray[np.float32], high: NDArray[np.float32], bits: int, *, symmetric: bool) -> Grid:
    """Return grids for ranges [N, g] that include 0."""
    return symmetric_grid(low, high, bits) if symmetric else asymmetric_grid(low, high, bits)


def symmetric_grid(low: NDArray[np.float32], high: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], None]:
    """Return scales for grids with the zero point 2**(b - 1).

    The grid has one code more below zero than above, and the scale is the smallest that covers both sides. Rounding
    it to float16 moves the outermost element by at most 2**(b - 1) * 2**-11 steps, a sixteenth: it stays within half.
    """
    half = 2 ** (bits - 1)
    nearest, _ = float16_neighbours(_usable(np.maximum(high / np.float32(half - 1), -low / np.float32(half))))
    return nearest, None


def asymmetric_grid(
    low: NDArray[np.float32], high: NDArray[np.float32], bits: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Return scales, and zero points rounded to codes.

    Here the zero point's rounding may use up the whole half step by which an element can be off. Where a scale that
    was rounded down to float16 would push the largest element beyond that, it is rounded up instead: then the grid
    covers the group's range as the exact scale's does.
    """
    top = 2**bits - 1
    # Divided first: the range of two large float32 numbers may overflow.
    nearest, above = float16_neighbours(_usable(high / np.float32(top) - low / np.float32(top)))
    clipped = high / nearest + _zero_points(low, nearest, top) > top + 0.5
    scales = np.where(clipped, above, nearest)
    return scales, _zero_points(low, scales, top).astype(np.uint8)


def float16_neighbours(scales: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return, for each scale, the nearest float16 number, and the nearest that is not below it.

    If one scale of the array lies outside float16's normal range, both are the scales themselves: float16 has fewer
    digits there or none, and a weight whose scales are float16 numbers in part only is of no use to those who store it.
    """
    if not ((scales >= _FLOAT16.smallest_normal) & (scales <= _FLOAT16.max)).all():
        return scales, scales
    nearest = scales.astype(np.float16)
    above = np.where(nearest < scales, np.nextafter(nearest, _FLOAT16.max), nearest)
    return nearest.astype(np.float32), above.astype(np.float32)


def encode(
    weight: NDArray[np.float32], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None, bits: int, group: int
) -> NDArray[np.uint8]:
    """Return the nearest code of each element, uint8 [N, C]."""
    groups = np.arange(weight.shape[1]) // group
    steps = np.rint(weight / scales[:, groups])
    steps += np.float32(2 ** (bits - 1)) if zeros is None else zeros[:, groups]
    codes: NDArray[np.uint8] = np.clip(steps, 0, 2**bits - 1).astype(np.uint8)
    return codes


def _zero_points(low: NDArray[np.float32], scales: NDArray[np.float32], top: int) -> NDArray[np.float32]:
    """Return the code that stands for 0 in each group."""
    zeros: NDArray[np.float32] = np.clip(np.rint(-low / scales), 0, top)
    return zeros


def _usable(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace scales nobody can divide by: 1 where a group is all zero, a normal number where it nearly is."""
    return np.where(scales == 0, np.float32(1), np.maximum(scales, SMALLEST_SCALE)).astype(np.float32)
