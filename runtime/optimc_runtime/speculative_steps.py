"""Steps in which sequences take their last token and guesses after it, each as a tree."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.base import StepPlan
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.tree import DraftTree, TreeShape, tree_shape
from optimc_runtime.step import Step, Work

_NO_NODES = tree_shape(())


class SpeculativeSteps:
    """Lays out steps of decodes, every token of which wants its logits.

    Nodes take the slots behind their sequence's last token in the order of the tree, wherever they stand: what is
    accepted moves to its place afterwards. Their positions say where they stand.
    """

    def __init__(self, block_table: NDArray[np.int32], block_size: int, max_step_tokens: int) -> None:
        """`block_table`: [rows, W], row `sequence.row` holding that sequence's blocks."""
        self._table = block_table
        self._block_size = block_size
        self._indices = np.arange(max_step_tokens, dtype=np.int64)
        self._alone: dict[int, NDArray[np.int32]] = {}
        """By tokens of a step that has one sequence: its `query_start`."""

    def build(self, sequences: Ordered[Sequence], trees: Ordered[DraftTree | None]) -> Step:
        """Return the step that computes the last token of each of `sequences` and its tree, in their order."""
        if len(sequences) == 1 and trees[0] is not None:
            return self._build_alone(sequences[0], trees[0])
        size = self._block_size
        work: list[Work] = []
        shapes: list[TreeShape] = []
        tokens: list[int] = []
        slots: list[int] = []
        contexts: list[int] = []
        starts = [0]
        longest = last_block = 0
        all_chains = True
        for sequence, tree in zip(sequences, trees, strict=True):
            context = sequence.num_computed
            tokens.append(sequence.tokens[context])
            if tree is None:
                shape = _NO_NODES
            else:
                shape = tree.shape
                tokens += tree.tokens
                all_chains = all_chains and shape.is_chain
            count = shape.num_nodes + 1
            work.append(Work(sequence, count, count, tree))
            shapes.append(shape)
            contexts.append(context)
            starts.append(starts[-1] + count)
            longest = max(longest, count)
            block, offset = divmod(context, size)
            while count:
                run = min(count, size - offset)
                first = sequence.blocks[block] * size + offset
                slots += range(first, first + run)
                count -= run
                block, offset = block + 1, 0
            last_block = max(last_block, block)
        plan = StepPlan(
            tokens=np.array(tokens, np.int64),
            positions=_positions(shapes, contexts),
            slots=np.array(slots, np.int64),
            query_start=np.array(starts, np.int32),
            context_len=np.array(contexts, np.int32),
            block_table=self._table[[sequence.row for sequence in sequences], :last_block],
            logits_rows=self._indices[: starts[-1]],
            tree_mask=None if all_chains else _mask(shapes, starts, longest),
        )
        return Step(plan, tuple(work), has_trees=True)

    def _build_alone(self, sequence: Sequence, tree: DraftTree) -> Step:
        """`build` for the commonest step with guesses, without what only several sequences need."""
        shape, size, context = tree.shape, self._block_size, sequence.num_computed
        count = shape.num_nodes + 1
        first_block, offset = divmod(context, size)
        last_block = (context + shape.num_nodes) // size
        blocks = sequence.blocks
        first = blocks[first_block] * size + offset
        if first_block == last_block:
            slots = self._indices[:count] + first
        else:
            at = range(context, context + count)
            slots = np.array([blocks[position // size] * size + position % size for position in at], np.int64)
        query_start = self._alone.get(count)
        if query_start is None:
            query_start = self._alone[count] = np.array([0, count], np.int32)
        plan = StepPlan(
            tokens=np.array([sequence.tokens[context], *tree.tokens], np.int64),
            positions=shape.depths + context,
            slots=slots,
            query_start=query_start,
            context_len=np.array([context], np.int32),
            block_table=self._table[sequence.row : sequence.row + 1, : last_block + 1],
            logits_rows=self._indices[:count],
            tree_mask=None if shape.is_chain else shape.mask,
        )
        return Step(plan, (Work(sequence, count, count, tree),), has_trees=True)


def _positions(shapes: list[TreeShape], contexts: list[int]) -> NDArray[np.int64]:
    if len(shapes) == 1:
        return shapes[0].depths + contexts[0]
    return np.concatenate([shape.depths + context for shape, context in zip(shapes, contexts, strict=True)])


def _mask(shapes: list[TreeShape], starts: list[int], longest: int) -> NDArray[np.bool_]:
    """[T, longest] which of its sequence's queries each query sees."""
    if len(shapes) == 1:
        return shapes[0].mask
    mask = np.zeros((starts[-1], longest), np.bool_)
    for shape, start in zip(shapes, starts[:-1], strict=True):
        count = shape.num_nodes + 1
        mask[start : start + count, :count] = shape.mask
    return mask
