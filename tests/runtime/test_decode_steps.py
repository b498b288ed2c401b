"""Decode steps are those `build_step` would lay out, with what did not change kept."""

from dataclasses import fields

import numpy as np
import pytest

from optimc_runtime.block_pool import BlockId
from optimc_runtime.decode_steps import DecodeSteps
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.request import RequestId
from optimc_runtime.sequence import Sequence
from optimc_runtime.step import Step, build_step

BLOCK_SIZE = 4
ROWS, COLUMNS = 6, 10


class Decoding:
    """Sequences with rows and blocks of their own, as the scheduler would keep them."""

    def __init__(self, lengths: list[int]) -> None:
        self.table = np.zeros((ROWS, COLUMNS), np.int32)
        self.sequences: list[Sequence] = []
        self._free = [BlockId(block) for block in np.random.default_rng(0).permutation(ROWS * COLUMNS).tolist()]
        for row, length in enumerate(lengths):
            sequence = Sequence(RequestId(f"s{row}"), row, list(range(100 * row, 100 * row + length)), 1000)
            sequence.row = ROWS - 1 - row
            sequence.num_computed = length - 1
            self.sequences.append(sequence)
            self.cover(sequence)

    def cover(self, sequence: Sequence) -> None:
        while len(sequence.blocks) * BLOCK_SIZE < sequence.num_tokens:
            self.table[sequence.row, len(sequence.blocks)] = self._free[-1]
            sequence.blocks.append(self._free.pop())

    def advance(self) -> None:
        for sequence in self.sequences:
            sequence.num_computed += 1
            sequence.append(7 * sequence.num_tokens)
            self.cover(sequence)


def assert_same(step: Step, table: np.ndarray) -> None:
    want = build_step(step.work, table, BLOCK_SIZE)
    for field in fields(StepPlan):
        got, expected = getattr(step.plan, field.name), getattr(want.plan, field.name)
        if expected is None:
            assert got is None
            continue
        assert got.dtype == expected.dtype, field.name
        assert got.tolist() == expected.tolist(), field.name
        assert got.flags.c_contiguous, field.name


@pytest.mark.parametrize("lengths", [[1], [5], [1, 2, 3, 4, 5, 6], [9, 1, 4]], ids=str)
def test_every_step_equals_the_general_layout(lengths: list[int]) -> None:
    decoding = Decoding(lengths)
    steps = DecodeSteps(decoding.table, BLOCK_SIZE)
    for _ in range(20):
        step = steps.build(list(decoding.sequences))
        assert [item.sequence for item in step.work] == decoding.sequences
        assert_same(step, decoding.table)
        decoding.advance()


def test_arrays_of_an_earlier_step_stay_as_they_are() -> None:
    decoding = Decoding([3, 6])
    steps = DecodeSteps(decoding.table, BLOCK_SIZE)
    kept = []
    for _ in range(6):
        plan = steps.build(list(decoding.sequences)).plan
        arrays = [getattr(plan, field.name) for field in fields(StepPlan) if field.name != "tree_mask"]
        kept.append([(array, array.copy()) for array in arrays])
        decoding.advance()
    assert all((array == copy).all() for arrays in kept for array, copy in arrays)


def test_work_is_the_same_object_until_a_sequence_joins_or_leaves() -> None:
    decoding = Decoding([3, 6, 2])
    steps = DecodeSteps(decoding.table, BLOCK_SIZE)
    first = steps.build(list(decoding.sequences)).work
    decoding.advance()
    assert steps.build(list(decoding.sequences)).work is first
    decoding.advance()
    fewer = steps.build(decoding.sequences[1:])
    assert fewer.work is not first
    assert_same(fewer, decoding.table)


def test_blocks_entered_in_other_steps_are_seen_once_told_to_forget() -> None:
    decoding = Decoding([3, 4])
    steps = DecodeSteps(decoding.table, BLOCK_SIZE)
    steps.build(list(decoding.sequences))
    for _ in range(3):
        decoding.advance()
    steps.forget()
    assert_same(steps.build(list(decoding.sequences)), decoding.table)
