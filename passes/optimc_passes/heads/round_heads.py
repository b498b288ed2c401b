"""Heads as they are stored: matrices as codes, or as bfloat16."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from optimc_passes.heads.heads import DRAFT_VOCAB, SHARED_PROJECTION, Heads
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.weights import Dense, Quantized, Weight

GROUP = 64
METHOD = "rtn"
_FLOAT_BITS = 16


def round_heads(heads: Heads, bits: int) -> Heads:
    """Return heads whose own matrices have `bits` bits; 16 is bfloat16.

    Biases stay float32. A shared projection is rows of the model's output head and stays as those are.
    """
    rounded = {name: _rounded(name, weight, bits) for name, weight in heads.weights.items()}
    info = heads.info.model_copy(update={"bits": None if bits == _FLOAT_BITS else bits})
    return replace(heads, info=info, weights=rounded)


def _rounded(name: str, weight: Weight, bits: int) -> Weight:
    if name in (DRAFT_VOCAB, SHARED_PROJECTION) or isinstance(weight, Quantized) or len(weight.shape) == 1:
        return weight
    values = weight.read().astype(np.float32)
    if bits == _FLOAT_BITS:
        return Dense.of(values.astype(ml_dtypes.bfloat16))
    codes, scales, zeros = quantize_affine(values, bits, group_of(values.shape[1]), symmetric=True)
    return Quantized.of(codes, scales, zeros, bits=bits, group=group_of(values.shape[1]), method=METHOD)


def group_of(columns: int) -> int:
    """Return the group for a matrix of that many columns: 64, a smaller power of two that divides them, or all."""
    return next((group for group in (GROUP, 32, 16) if columns % group == 0), columns)
