"""Joins the parts a split `paged_attention` left. Importing this file imports Triton.

    parts      float32 [Z, T, H*D]
    log_sums   float32 [Z, T, H], -inf where a part saw nothing
    rows       int32 T*H
    splits     int32 Z, at most MAX_SPLITS
    out        half [T, H*D]

Launched on a grid of (T * H): a program joins one head of one token. At least one part must have seen something.
"""

# Triton's language has types of its own, and compile-time constants are upper case there.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_splits(parts, log_sums, rows, splits, out, MAX_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """The parts' mean, weighted by their sums of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MAX_SPLITS)
    column = tl.arange(0, D)
    log_sum = tl.load(log_sums + part.to(tl.int64) * rows + row, mask=part < splits, other=float("-inf"))
    weight = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    inside = (log_sum > float("-inf"))[:, None] & (column < HEAD_DIM)[None, :]
    at = (part.to(tl.int64) * rows + row)[:, None] * HEAD_DIM + column[None, :]
    values = tl.load(parts + at, mask=inside, other=0.0)
    mean = tl.sum(values * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + row * HEAD_DIM + column, mean.to(out.dtype.element_ty), mask=column < HEAD_DIM)
