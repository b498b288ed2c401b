"""Costs taken from steps on an executor whose time the test makes up."""

import numpy as np
import pytest

from optimc_runtime.block_pool import BlockPool
from optimc_runtime.config import StepLimits
from optimc_runtime.executor.base import StepResult
from optimc_runtime.speculate.profile_steps import ROWS, profile_steps


class Timed:
    """Takes 1 ms a step, 0.2 ms a row and 0.1 ms a sequence, on a clock of its own."""

    def __init__(self, factor=1.0):
        self.now_s = 0.0
        self.factor = factor
        self.shapes = []
        self.slots = set()

    def execute(self, plan):
        rows, sequences = len(plan.tokens), len(plan.context_len)
        self.shapes.append((sequences, rows))
        self.slots.update(plan.slots.tolist())
        self.now_s += self.factor * (1e-3 + 2e-4 * rows + 1e-4 * sequences)
        return StepResult(np.zeros((len(plan.logits_rows), 4), np.float32))

    def clock(self):
        return self.now_s


def limits(**changes):
    return StepLimits(
        **{"max_seq_len": 512, "max_step_tokens": 64, "max_seqs": 16, "block_size": 16, "num_blocks": 400, **changes}
    )


def test_costs_are_the_executors():
    executor, pool = Timed(), BlockPool(400, 16)
    cost = profile_steps(executor, pool, limits(), 1.0, executor.clock)
    for rows in (1, 4, 8, 16):
        assert cost.seconds(1, rows) == pytest.approx(1.1e-3 + 2e-4 * rows)
    assert cost.seconds(16, 16) == pytest.approx(1e-3 + 32e-4 + 16e-4)
    assert cost.seconds(8, 32) == pytest.approx(1e-3 + 64e-4 + 8e-4)


def test_what_was_used_is_given_back():
    pool = BlockPool(400, 16)
    executor = Timed()
    profile_steps(executor, pool, limits(), 0.1, executor.clock)
    assert pool.num_free == 400
    pool.check_integrity()


def test_a_slow_machine_measures_fewer_steps():
    executor = Timed(factor=100)
    cost = profile_steps(executor, BlockPool(400, 16), limits(), 0.4, executor.clock)
    assert len(set(executor.shapes)) < len(ROWS) / 2
    assert executor.now_s < 3
    assert cost.seconds(1, 4) == pytest.approx(0.19)


def test_limits_and_the_pool_are_kept():
    executor = Timed()
    profile_steps(
        executor, BlockPool(12, 16), limits(num_blocks=12, max_step_tokens=6, max_seqs=2), 0.1, executor.clock
    )
    assert max(rows for _, rows in executor.shapes) <= 6
    assert max(sequences for sequences, _ in executor.shapes) <= 2
    full = BlockPool(4, 16)
    full.allocate(4)
    assert profile_steps(executor, full, limits(num_blocks=4), 0.1, executor.clock) is None
