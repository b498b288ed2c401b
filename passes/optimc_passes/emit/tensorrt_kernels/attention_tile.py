"""Parts of the attention kernel: rows of a cache on their way in, and one tile of keys and values taken into account.

Importing this file imports Triton. Letters: M rows of a tile (a query and a head each), N keys of a tile, D head dim.
"""

# Triton's language has types of its own, and compile-time constants are upper case there.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""Softmax is computed to the base 2, the base of the hardware's exponential."""


@triton.jit
def load_rows(cache, scales, rows, inside, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """Return one head of `rows` [N] of a cache [·, KV_HEADS * HEAD_DIM], as stored, and their scales.

    Results: [N, D] with zeros beyond HEAD_DIM and where not `inside`; float32 [N], or 0.0 for a cache without scales.
    """
    column = tl.arange(0, D)
    offsets = rows[:, None] * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + column[None, :]
    if D == HEAD_DIM:
        codes = tl.load(cache + offsets, mask=inside[:, None], other=0.0)
    else:
        codes = tl.load(cache + offsets, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    if scales is None:
        scale = 0.0
    else:
        scale = tl.load(scales + rows * KV_HEADS + kv_head, mask=inside, other=0.0).to(tl.float32)
    return codes, scale


@triton.jit
def attend_tile(
    q,
    keys,
    key_scale,
    values,
    value_scale,
    visible,
    total,
    weight,
    highest,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Return `total` [M, D], `weight` [M], `highest` [M] (all float32) after N more keys and values: online softmax.

    `highest` is the largest score so far, to the base 2; `weight` the sum of 2^(score - highest); `total` the sum of
    values times that. `q` [M, D]; `visible` [M, N]. Scales multiply scores and weights, not codes: a product of codes
    is exact in half, and no [N, D] tile has to be rewritten.
    """
    scores = tl.dot(q, tl.trans(keys.to(q.dtype)))
    if SCALED:
        scores = scores * key_scale[None, :]
    scores = scores * SCALE
    if SOFTCAP > 0:
        # tanh by the exponential, right at both ends: 2 / (1 + e^inf) = 0 and 2 / (1 + 0) = 2.
        scores = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP))))
    scores = tl.where(visible, scores * LOG2_E, float("-inf"))

    risen = tl.maximum(highest, tl.max(scores, axis=1))
    # A row that has seen no key yet keeps -inf; its differences must not become NaN.
    base = tl.where(risen == float("-inf"), 0.0, risen)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    weight = weight * shrink + tl.sum(weights, axis=1)
    if SCALED:
        # Relative to the tile's largest scale, so that small scales do not leave the range of half.
        largest = tl.maximum(tl.max(value_scale, axis=0), 1e-30)
        weights = weights * (value_scale / largest)[None, :]
        mixed = tl.dot(weights.to(q.dtype), values.to(q.dtype)) * largest
    else:
        mixed = tl.dot(weights.to(q.dtype), values.to(q.dtype))
    return total * shrink[:, None] + mixed, weight, risen
