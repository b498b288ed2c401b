"""From a packed step to padded batches: which sequences run together, and what their attention reads.

Linear layers work on packed tokens; only attention needs sequences of one length. A step is split into groups of
similar lengths so that padding stays a small part of the work, and each group runs the graph once. Pure NumPy.

Letters: T tokens, B sequences, Q longest query, C longest context in reach, S slots per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.base import StepPlan

MAX_WASTED_SCORES = 1 << 16
"""Most padded attention scores (per head) in a group: what costs about as much as the next group's pass over the
weights would. The optimum is flat."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of a step that run together."""

    sequences: NDArray[np.intp]
    """[B] indices into the step's sequences, ascending."""
    tokens: NDArray[np.intp]
    """[T] indices into the step's tokens, ascending."""
    rows: NDArray[np.intp]
    """[R] indices into the step's `logits_rows` that fall into this group, ascending."""
    logits_rows: NDArray[np.int64]
    """[R] the same rows as indices into this group's tokens."""


@dataclass(frozen=True, slots=True)
class QueryLayout:
    """Where a group's packed tokens stand in the padded batch."""

    query_index: NDArray[np.int64]
    """[B, Q] token of the group at each place. Padding repeats its sequence's last token, so that it computes
    something finite and nothing of another sequence."""
    unpad_index: NDArray[np.int64]
    """[T] place of each token in the flattened [B * Q]."""
    is_query: NDArray[np.bool_]
    """[B, Q] False on padding."""


@dataclass(frozen=True, slots=True)
class WindowView:
    """What layers of one window see."""

    context_slots: NDArray[np.int64]
    """[B, C] pool rows; padding points at the null row."""
    mask: NDArray[np.bool_]
    """[B, Q, C + Q] which keys each query sees."""


def split(plan: StepPlan) -> list[Group]:
    """Partition the step's sequences, longest queries first, into groups that waste at most MAX_WASTED_SCORES."""
    queries = np.diff(plan.query_start).astype(np.int64)
    keys = queries + plan.context_len
    order = np.lexsort((-keys, -queries))
    groups: list[list[int]] = []
    longest_query = longest_keys = work = 0
    for sequence in order.tolist():
        if queries[sequence] == 0:
            continue
        query, key = int(queries[sequence]), int(keys[sequence])
        if groups:
            size = len(groups[-1]) + 1
            padded = size * longest_query * max(longest_keys, key)
            if padded - (work + query * key) <= MAX_WASTED_SCORES:
                groups[-1].append(sequence)
                longest_keys, work = max(longest_keys, key), work + query * key
                continue
        groups.append([sequence])
        longest_query, longest_keys, work = query, key, query * key
    return [group_of(plan, np.sort(np.array(group, np.intp))) for group in groups]


def group_of(plan: StepPlan, sequences: NDArray[np.intp]) -> Group:
    """Return the group of `sequences` [B], which are ascending."""
    starts, stops = plan.query_start[sequences], plan.query_start[sequences + 1]
    tokens = np.concatenate([np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)])
    member = np.zeros(len(plan.tokens), bool)
    member[tokens] = True
    rows = np.flatnonzero(member[plan.logits_rows])
    return Group(sequences, tokens, rows, np.searchsorted(tokens, plan.logits_rows[rows]).astype(np.int64))


def lay_out(plan: StepPlan, group: Group) -> QueryLayout:
    """Return where the group's tokens go in a batch padded to its longest query."""
    counts = np.diff(plan.query_start)[group.sequences].astype(np.int64)
    longest = int(counts.max())
    first = np.cumsum(counts) - counts
    place = np.arange(longest)[None, :]
    is_query = place < counts[:, None]
    query_index = first[:, None] + np.minimum(place, counts[:, None] - 1)
    return QueryLayout(query_index, np.flatnonzero(is_query.ravel()).astype(np.int64), is_query)


def view(plan: StepPlan, group: Group, layout: QueryLayout, window: int, block_size: int, null_row: int) -> WindowView:
    """Return the context rows and the mask for layers of `window` (0 means none).

    `null_row` is a pool row that holds zeros: where padding of the context points.
    """
    step_token = group.tokens[layout.query_index]
    positions = plan.positions[step_token]
    context_len = plan.context_len[group.sequences].astype(np.int64)
    reach = np.maximum(0, positions.min(axis=1) - window + 1) if window else np.zeros_like(context_len)
    reach = np.minimum(reach, context_len)
    longest = int((context_len - reach).max())
    context_positions = reach[:, None] + np.arange(longest)[None, :]
    exists = context_positions < context_len[:, None]
    table = plan.block_table[group.sequences].astype(np.int64)
    if reach.any():
        block = np.where(exists, context_positions // block_size, 0)
        slots = np.take_along_axis(table, block, axis=1) * block_size + context_positions % block_size
    else:  # Whole blocks from the first on: most steps, and several times faster.
        blocks = table[:, : -(-longest // block_size), None] * block_size
        slots = (blocks + np.arange(block_size)).reshape(len(table), -1)[:, :longest]
    sees_context = np.broadcast_to(exists[:, None, :], (*positions.shape, longest))
    place = np.arange(positions.shape[1])
    if plan.tree_mask is None:
        # Padding stands for its sequence's last token: its place among the queries is that token's.
        last = layout.is_query.sum(axis=1, keepdims=True) - 1
        sees_step = np.minimum(place, last)[:, :, None] >= place[None, None, :]
    else:
        sees_step = plan.tree_mask[step_token][:, :, : len(place)]
    sees_step = sees_step & layout.is_query[:, None, :]
    if window:
        sees_context = sees_context & (positions[:, :, None] - context_positions[:, None, :] < window)
        sees_step &= positions[:, :, None] - positions[:, None, :] < window
    return WindowView(np.where(exists, slots, null_row), np.concatenate([sees_context, sees_step], axis=2))
