"""What the attention kernels mean, in NumPy: `optimc::PagedAttention` with the step's rows beside the pool."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc_passes.dialect.paged_attention import PagedAttention, attend, window_mask


@dataclass(frozen=True)
class CacheRows:
    """Keys or values as a cache stores them."""

    codes: NDArray[Any]
    """[rows, Hkv*D]."""
    scales: NDArray[np.float16] | None = None
    """[rows, Hkv], for codes that are multiples of them."""

    def numbers(self) -> NDArray[np.float32]:
        """Return [rows, Hkv*D]."""
        numbers = self.codes.astype(np.float32)
        if self.scales is None:
            return numbers
        per_head = numbers.reshape(*self.scales.shape, -1) * self.scales.astype(np.float32)[..., None]
        return per_head.reshape(numbers.shape)


@dataclass(frozen=True)
class RaggedStep:
    """Where tokens, context and masks of a step lie; the letters are those of `paged_attention_kernel`."""

    query_start: NDArray[np.int32]
    """[B+1]."""
    context_len: NDArray[np.int32]
    """[B]."""
    block_table: NDArray[np.int32]
    """[B, W]."""
    positions: NDArray[np.int64]
    """[T]."""
    block_size: int
    tree_mask: NDArray[np.bool_] | None = None
    """[T, Q]; sequences with more than Q queries are causal."""


def paged_attention(
    spec: PagedAttention,
    q: NDArray[np.float32],
    step: RaggedStep,
    *,
    step_keys: CacheRows,
    step_values: CacheRows,
    key_pool: CacheRows,
    value_pool: CacheRows,
) -> NDArray[np.float32]:
    """Return the attention of every token, float32 [T, H*D], for `q` of that shape."""
    out = np.empty_like(q)
    new_keys, new_values = step_keys.numbers(), step_values.numbers()
    old_keys, old_values = key_pool.numbers(), value_pool.numbers()
    for b, (start, stop) in enumerate(pairwise(step.query_start)):
        num_queries, num_context = int(stop - start), int(step.context_len[b])
        index = np.arange(num_context)
        slots = step.block_table[b, index // step.block_size].astype(np.int64) * step.block_size
        slots += index % step.block_size
        own = own_mask(step, start, num_queries)
        visible = np.concatenate([np.ones((num_queries, num_context), bool), own], axis=1)
        positions = step.positions[start:stop]
        visible &= window_mask(spec, positions, np.concatenate([index, positions]))
        keys = np.concatenate([old_keys[slots], new_keys[start:stop]])
        values = np.concatenate([old_values[slots], new_values[start:stop]])
        out[start:stop] = attend(spec, q[start:stop], keys, values, visible)
    return out


def own_mask(step: RaggedStep, start: int, num_queries: int) -> NDArray[np.bool_]:
    """Return bool [num_queries, num_queries]: which tokens of its own sequence each token sees."""
    if step.tree_mask is None or num_queries > step.tree_mask.shape[1]:
        return np.tri(num_queries, dtype=bool)
    return step.tree_mask[start : start + num_queries, :num_queries]
