"""One step's work, and its arrays."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.base import StepPlan
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.tree import DraftTree


class Work(NamedTuple):
    """Tokens num_computed .. num_computed + num_tokens of one sequence, and how many of its last ones need logits.

    With a tree: its last known token and the nodes, all with logits.
    """

    sequence: Sequence
    num_tokens: int
    num_logits: int
    tree: DraftTree | None = None


class Step(NamedTuple):
    """What the executor gets (`plan`) and what it means (`work`, in the plan's order)."""

    plan: StepPlan
    work: tuple[Work, ...]
    has_trees: bool = False
    """Whether any of `work` has one."""


def build_step(
    work: tuple[Work, ...], block_table: NDArray[np.int32], block_size: int, *, has_trees: bool = False
) -> Step:
    """Lay out the arrays of a step, whose trees are chains. `block_table`: [rows, W], row `sequence.row` holding that
    sequence's blocks."""
    counts = _column([item.num_tokens for item in work])
    context = _column([item.sequence.num_computed for item in work])
    rows = _column([item.sequence.row for item in work])
    query_start = np.zeros(len(work) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    num_tokens = int(query_start[-1])

    tokens = np.empty(num_tokens, np.int64)
    logits_rows: list[int] = []
    end = 0
    for item in work:
        sequence, start, end = item.sequence, end, end + item.num_tokens
        first = sequence.num_computed
        if item.tree is None:
            tokens[start:end] = sequence.tokens[first : first + item.num_tokens]
        else:
            assert item.tree.shape.is_chain
            tokens[start] = sequence.tokens[first]
            tokens[start + 1 : end] = item.tree.tokens
        logits_rows.extend(range(end - item.num_logits, end))

    positions = np.arange(num_tokens, dtype=np.int64) + np.repeat(context - query_start[:-1], counts)
    blocks = block_table[np.repeat(rows, counts), positions // block_size].astype(np.int64)
    width = int(-(-(context + counts).max() // block_size))
    plan = StepPlan(
        tokens=tokens,
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        query_start=query_start,
        context_len=context.astype(np.int32),
        block_table=block_table[rows, :width],
        logits_rows=np.array(logits_rows, np.int64),
    )
    return Step(plan, work, has_trees)


def _column(values: Ordered[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
