"""Integer weights as TensorRT takes them: signed codes, zero points of 0, blocks it has kernels for. Pure arithmetic.

TensorRT's codes have no zero points. A weight that has some is written as two products,

    x · (q - z) s  =  x · (q - m) s  +  mean_b(x) · b s (m - z)

where m is the middle of the code's range (8 for 4 bits), b the block's length, and the mean is over a block's features.
q - m fits a signed code whatever z is, so nothing is clipped; the second product is b times smaller than the first. The
mean stands there instead of the sum since it is finite in float16 wherever x is.

Letters: C input features, N output features, G the group as it was quantized, g = ceil(C / G), b block, a divisor of C.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128
"""TensorRT-RTX builds blocks of 16 and more; of 4-bit codes, full TensorRT documents those of 64 and 128 alone."""


def block_of(group: int, features: int, bits: int) -> int | None:
    """Return the block that holds groups of `group` features exactly, or None if there is none.

    It is a power of two. Groups that are longer, or end with a shorter one, are cut: their scale is repeated. An 8-bit
    weight of one group per output feature has the block C.
    """
    if bits == 8 and group >= features:
        return features
    block = gcd(min(group, features), features, LARGEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else None


def signed_codes(codes: NDArray[np.integer], bits: int) -> NDArray[np.int8]:
    """Return unsigned codes of so many bits minus the middle of their range."""
    signed: NDArray[np.int8] = (codes.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)
    return signed


def of_blocks(per_group: NDArray[np.generic], group: int, block: int, features: int) -> NDArray[np.generic]:
    """Return what belongs to groups [g, N] for each block, [C / b, N]."""
    return per_group[np.arange(0, features, block) // group]


def mean_weights(scales: NDArray[np.float32], zeros: NDArray[np.integer], block: int, bits: int) -> NDArray[np.float32]:
    """Return b s (m - z) [C / b, N] from scales and unsigned zero points of blocks. Exact for scales of 20 bits."""
    weights: NDArray[np.float32] = scales * (np.float32(block) * (2 ** (bits - 1) - zeros.astype(np.float32)))
    return weights


def dequantized(
    codes: NDArray[np.integer], scales: NDArray[np.float32], zeros: NDArray[np.integer] | None, group: int
) -> NDArray[np.float32]:
    """Return (codes - zeros) * scales [C, N], groups along the first axis."""
    groups = np.arange(codes.shape[0]) // group
    exact = codes.astype(np.float32)
    if zeros is not None:
        exact -= zeros.astype(np.float32)[groups]
    return exact * scales[groups]
