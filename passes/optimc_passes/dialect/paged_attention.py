"""What `optimc::PagedAttention` means: its attributes, and the computation in plain NumPy.

Letters: T tokens in the step, B sequences, H query heads, Hkv key/value heads, D head dim, P blocks, S slots per block.

Token t of sequence b sees the `context_len[b]` tokens of b already in the pool and, of this step's tokens, those its
mask allows: causal, or a given tree mask. A window of w lets position p see keys at positions above p - w. Scores are
scaled, then soft-capped, then masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

DOMAIN = "optimc"
DOMAIN_VERSION = 1
OP_TYPE = "PagedAttention"


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """The attributes of one node."""

    layer: int
    """Index of the layer's cache in the KV layout."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    """Keys a query sees, itself included; 0 means all."""
    softcap: float = 0.0
    """Scores become softcap * tanh(scores / softcap); 0 means they stay."""

    @classmethod
    def from_node(cls, node: ir.Node) -> PagedAttention:
        """Read a node that obeys the dialect's rules (see `rules.verify_graph`)."""
        attributes = node.attributes
        return cls(
            layer=attributes["layer"].as_int(),
            num_heads=attributes["num_heads"].as_int(),
            num_kv_heads=attributes["num_kv_heads"].as_int(),
            head_dim=attributes["head_dim"].as_int(),
            scale=attributes["scale"].as_float(),
            window=attributes["window"].as_int(),
            softcap=attributes["softcap"].as_float(),
        )

    @property
    def q_width(self) -> int:
        """H * D, the width of q and of the output."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Hkv * D, the width of k, v and of a slot in the pool."""
        return self.num_kv_heads * self.head_dim


def is_paged_attention(node: ir.Node) -> bool:
    """Whether the node is the dialect's attention."""
    return node.domain == DOMAIN and node.op_type == OP_TYPE


def attend(
    spec: PagedAttention, q: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], visible: NDArray[np.bool_]
) -> NDArray[Any]:
    """Return softmax(cap(scale * q k^T)) v for one sequence, [Q, H*D] in the dtype of q.

    `q` [Q, H*D]; `keys`, `values` [K, Hkv*D]; `visible` [Q, K], at least one True in every row. Keys and values no
    query sees may hold anything, NaN included.
    """
    dtype = q.dtype.type
    group = spec.num_heads // spec.num_kv_heads
    seen = visible.any(axis=0)
    q_heads = q.reshape(len(q), spec.num_kv_heads, group, spec.head_dim)
    k_heads = keys[seen].reshape(-1, spec.num_kv_heads, spec.head_dim).astype(q.dtype)
    v_heads = values[seen].reshape(-1, spec.num_kv_heads, spec.head_dim).astype(q.dtype)
    scores = np.einsum("qhgd,khd->hgqk", q_heads, k_heads) * dtype(spec.scale)
    if spec.softcap:
        scores = np.tanh(scores / dtype(spec.softcap)) * dtype(spec.softcap)
    scores = np.where(visible[:, seen], scores, dtype(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: NDArray[Any] = np.einsum("hgqk,khd->qhgd", weights, v_heads)
    return mixed.reshape(len(q), spec.q_width)


def window_mask(spec: PagedAttention, query_positions: NDArray[Any], key_positions: NDArray[Any]) -> NDArray[np.bool_]:
    """Return [Q, K]: which keys lie inside each query's window. All True without a window."""
    distance = query_positions[:, None] - key_positions[None, :]
    return distance < spec.window if spec.window else np.ones_like(distance, dtype=bool)


def causal_attention(spec: PagedAttention, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    """Return the attention of one sequence without context, at positions 0..T-1: [T, H*D] in the dtype of q."""
    positions = np.arange(len(q))
    visible = (positions[:, None] >= positions[None, :]) & window_mask(spec, positions, positions)
    return attend(spec, q, k, v, visible)


def paged_attention(
    spec: PagedAttention,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    key_pool: NDArray[Any],
    value_pool: NDArray[Any],
    slots: NDArray[Any],
    positions: NDArray[Any],
    query_start: NDArray[Any],
    context_len: NDArray[Any],
    block_table: NDArray[Any],
    block_size: int,
    tree_mask: NDArray[np.bool_] | None = None,
    store_keys: Callable[[NDArray[Any]], NDArray[Any]] = lambda rows: rows,
    store_values: Callable[[NDArray[Any]], NDArray[Any]] = lambda rows: rows,
) -> NDArray[Any]:
    """Write this step's K/V to their slots, then return the attention of every token: [T, H*D] in the dtype of q.

    `q` [T, H*D]; `k`, `v` [T, Hkv*D]; the pools [P*S, Hkv*D], changed in place; the rest as in the executor's step:
    `slots` [T], `positions` [T], `query_start` [B+1], `context_len` [B], `block_table` [B, W], `tree_mask` [T, Q].
    `store_keys` and `store_values` are what a round trip through the cache's format does to rows, so that keys and
    values of this step are attended to exactly as later steps will see them.
    """
    key_pool[slots] = store_keys(k)
    value_pool[slots] = store_values(v)
    out = np.empty_like(q)
    for b, (start, stop) in enumerate(pairwise(query_start)):
        num_queries, num_context = int(stop - start), int(context_len[b])
        index = np.arange(num_context)
        context_slots = block_table[b, index // block_size].astype(np.int64) * block_size + index % block_size
        rows = np.concatenate([context_slots, slots[start:stop]])
        query_positions = positions[start:stop]
        step = (
            np.tri(num_queries, dtype=bool) if tree_mask is None else tree_mask[start:stop, :num_queries].astype(bool)
        )
        visible = np.concatenate([np.ones((num_queries, num_context), dtype=bool), step], axis=1)
        visible &= window_mask(spec, query_positions, np.concatenate([index, query_positions]))
        out[start:stop] = attend(spec, q[start:stop], key_pool[rows], value_pool[rows], visible)
    return out
