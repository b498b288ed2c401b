"""A step's trees against its logits: what is emitted, and which K/V rows then stand in the wrong place."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.base import StepPlan
from optimc_runtime.sampler import SamplingState, TreeSamples, sample_trees
from optimc_runtime.step import Work
from optimc_runtime.structured.grammar import GrammarState
from optimc_runtime.structured.step_masks import step_masks

_ROOT = np.array([-1], np.int32)


def sample_step(
    work: Ordered[Work],
    places: Ordered[int],
    states: Ordered[SamplingState],
    plan: StepPlan,
    logits: NDArray[np.float32],
    typical: tuple[float, float],
    grammars: Ordered[GrammarState | None] | None = None,
) -> TreeSamples:
    """Choose tokens for the sequences at `places` of `work`, sampled as `states` say; those without a tree are sampled
    from their last row. `logits` [R, V] belong to `plan.logits_rows`; `grammars` are what the sequences follow."""
    if len(work) == 1 and grammars is None and (tree := work[0].tree) is not None:
        parents_alone = tree.shape.query_parents
        return sample_trees(logits, states, [0], [len(parents_alone)], parents_alone, plan.tokens, typical)
    first_rows: list[int] = []
    counts: list[int] = []
    parents: list[NDArray[np.int32]] = []
    sampled = iter(places)
    wanted = next(sampled, -1)
    row = 0
    for place, item in enumerate(work):
        rows = item.num_logits
        if item.tree is not None:
            parents.append(item.tree.shape.query_parents)
        elif rows:
            parents.append(_ROOT if rows == 1 else np.full(rows, -1, np.int32))
        if place == wanted:
            count = rows if item.tree is not None else 1
            first_rows.append(row + rows - count)
            counts.append(count)
            wanted = next(sampled, -1)
        row += rows
    tokens = plan.tokens if row == len(plan.tokens) else plan.tokens[plan.logits_rows]
    all_parents = parents[0] if len(parents) == 1 else np.concatenate(parents)
    if grammars is None:
        return sample_trees(logits, states, first_rows, counts, all_parents, tokens, typical)
    trees = [work[place].tree for place in places]
    masks = step_masks(grammars, trees, first_rows, *logits.shape)
    samples = sample_trees(logits, states, first_rows, counts, all_parents, tokens, typical, masks.rows)
    samples.failures.update(masks.failures)
    return samples


def accepted_moves(
    plan: StepPlan, places: Ordered[int], paths: Ordered[list[int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return (source, target) slots that put the accepted queries of the sequences at `places` right behind their
    roots, in order; None if they stand there already."""
    sources: list[int] = []
    targets: list[int] = []
    for place, path in zip(places, paths, strict=True):
        if path and path[-1] != len(path):  # queries ascend: the last stands right if and only if all do
            root = int(plan.query_start[place])
            for depth, query in enumerate(path, 1):
                if query != depth:
                    sources.append(root + query)
                    targets.append(root + depth)
    if not sources:
        return None
    return plan.slots[sources], plan.slots[targets]
