"""What rounding to nearest makes of a weight, and what the difference costs a layer's output; pure arithmetic.

Letters: N output features, C input features, G group size, g groups per row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from optimc_passes.quantize.affine import grid_of, group_range

Round = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""A weight [N, C] to the weight that its codes stand for."""


def nearest(bits: int, group: int, *, symmetric: bool) -> Round:
    """Return what rounds a weight [N, C] to the nearest numbers of its groups' grids, and gives those numbers."""

    def rounded(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        low, high = group_range(weight, group)
        scales, zeros = grid_of(low, high, bits, symmetric=symmetric)
        return on_grid(weight, scales, zeros, bits, group)

    return rounded


def on_grid(
    weight: NDArray[np.float32], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None, bits: int, group: int
) -> NDArray[np.float32]:
    """Return the nearest number of its group's grid for each element."""
    rows, columns = weight.shape
    offsets = np.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros.astype(np.float32)
    if columns % group:
        groups = np.arange(columns) // group
        scales, offsets = scales[:, groups], offsets[:, groups]
        parts = weight
    else:
        # Views of the groups: nothing of the weight's size is made for scales and zero points.
        scales, offsets = scales[:, :, None], offsets[:, :, None]
        parts = weight.reshape(rows, columns // group, group)
    codes: NDArray[np.float32] = np.rint(parts / scales)
    codes += offsets
    np.clip(codes, 0, 2**bits - 1, out=codes)
    codes -= offsets
    codes *= scales
    return codes.reshape(rows, columns)


def output_error(difference: NDArray[np.float32], moment: NDArray[np.float32]) -> float:
    """Return tr(D H D^T) for D [N, C]: the squared error of the layer's output, summed over the tokens of H."""
    return float(np.einsum("nc,nc->n", difference @ moment, difference).sum(dtype=np.float64))
