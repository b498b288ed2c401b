"""Steps in which every sequence takes one token: nearly all steps there are, so their arrays are laid out cheaply."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.base import StepPlan
from optimc_runtime.sequence import Sequence
from optimc_runtime.step import Step, Work


class DecodeSteps:
    """Lays out steps as `build_step` does, for sequences that each compute their last token and want its logits.

    While the same sequences decode, `Step.work` is the same object, and so is a plan's block table until one of them
    enters a new block.
    """

    def __init__(self, block_table: NDArray[np.int32], block_size: int) -> None:
        """`block_table`: [rows, W], row `sequence.row` holding that sequence's blocks."""
        self._table = block_table
        self._block_size = block_size
        self._starts = np.arange(len(block_table) + 1, dtype=np.int32)
        self._indices = np.arange(len(block_table), dtype=np.int64)
        self.forget()

    def forget(self) -> None:
        """Start anew: sequences have taken steps that were not built here, or one has lost its row."""
        self._sequences: list[Sequence] = []
        self._work: tuple[Work, ...] = ()
        self._rows: NDArray[np.int64] = self._indices[:0]
        self._step_table = self._table[:0]

    def build(self, sequences: list[Sequence]) -> Step:
        """Return the step that computes the last token of each of `sequences`, in their order."""
        new_block = sequences != self._sequences
        if new_block:
            self._sequences = sequences
            self._work = tuple([Work(sequence, 1, 1) for sequence in sequences])
            self._rows = np.array([sequence.row for sequence in sequences], np.int64)
        size = self._block_size
        tokens, positions, slots = [], [], []
        for sequence in sequences:
            position = sequence.num_computed
            block, offset = divmod(position, size)
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(sequence.blocks[block] * size + offset)
            if offset == 0:
                new_block = True
        if new_block:
            self._step_table = self._table[self._rows, : max(positions) // size + 1]
        count = len(sequences)
        plan = StepPlan(
            tokens=np.array(tokens, np.int64),
            positions=np.array(positions, np.int64),
            slots=np.array(slots, np.int64),
            query_start=self._starts[: count + 1],
            context_len=np.array(positions, np.int32),
            block_table=self._step_table,
            logits_rows=self._indices[:count],
        )
        return Step(plan, self._work)
