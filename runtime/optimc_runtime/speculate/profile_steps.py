"""How long steps take here, before anybody waits for one: what the cost model starts from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from optimc_runtime.block_pool import BlockId, BlockPool
from optimc_runtime.config import StepLimits
from optimc_runtime.executor.base import Executor, StepPlan
from optimc_runtime.request import RequestId
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.cost_model import CostModel
from optimc_runtime.step import Work, build_step

Shape = tuple[int, int]
"""(sequences, rows)."""

ROWS = (1, 4, 2, 3, 8, 16, 6, 5, 12)
"""Rows of one sequence that are measured, the most telling first: a slow machine measures fewer."""
SEQUENCES = (16, 4)
"""Sequences of one row each that are measured."""
CONTEXT_TOKENS = 128
"""What stands before the measured rows."""
FEWEST_ROUNDS = 3
"""Times each step is measured; what cannot be measured that often within the budget is left out."""


def profile_steps(
    executor: Executor,
    pool: BlockPool,
    limits: StepLimits,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel | None:
    """Return a cost model of steps run in about `budget_s`, the fastest of each shape: what else the machine does only
    makes them slower. None if there is no room for a step.

    Only free blocks are written, nothing is cached.
    """
    plans = _plans(pool, limits)
    if not plans:
        return None
    try:
        samples: dict[Shape, list[float]] = {}
        started_s = clock()
        round_s = 0.0
        for shape, (plan, _) in plans.items():
            if samples and FEWEST_ROUNDS * round_s > budget_s:
                break
            executor.execute(plan)  # what is done once, or once per shape, is not measured
            samples[shape] = [_seconds(executor, plan, clock)]
            round_s += samples[shape][0]
        rounds = 1
        while rounds < FEWEST_ROUNDS or clock() - started_s + round_s < budget_s:
            for shape, times in samples.items():
                times.append(_seconds(executor, plans[shape][0], clock))
            rounds += 1
    finally:
        for _, blocks in plans.values():
            pool.free(blocks)
    return _model({shape: min(times) for shape, times in samples.items()})


def _plans(pool: BlockPool, limits: StepLimits) -> dict[Shape, tuple[StepPlan, list[BlockId]]]:
    """Return the steps that are within the limits and fit what is free, each with its blocks."""
    context = min(CONTEXT_TOKENS, limits.max_request_tokens // 2)
    shapes = [(1, rows) for rows in ROWS] + [(sequences, sequences) for sequences in SEQUENCES]
    plans: dict[Shape, tuple[StepPlan, list[BlockId]]] = {}
    for sequences, rows in shapes:
        each = rows // sequences
        columns = -(-(context + each) // limits.block_size)
        if context + each > limits.max_request_tokens or rows > limits.max_step_tokens or sequences > limits.max_seqs:
            continue
        if columns * sequences > pool.num_free or (blocks := pool.allocate(columns * sequences)) is None:
            continue
        work = []
        for row in range(sequences):
            sequence = Sequence(RequestId(f"profile-{row}"), row, np.zeros(context + each, np.int64), 0)
            sequence.row = row
            sequence.num_computed = context
            work.append(Work(sequence, each, each))
        table = np.array(blocks, np.int32).reshape(sequences, columns)
        plans[sequences, rows] = (build_step(tuple(work), table, limits.block_size).plan, blocks)
    return plans


def _seconds(executor: Executor, plan: StepPlan, clock: Callable[[], float]) -> float:
    started_s = clock()
    executor.execute(plan)
    return clock() - started_s


def _model(measured: dict[Shape, float]) -> CostModel:
    """Rows as measured with one sequence; what several sequences take beyond that is shared out to them."""
    model = CostModel([(rows, seconds) for (sequences, rows), seconds in measured.items() if sequences == 1])
    beyond = [
        (seconds - model.seconds(1, rows)) / (sequences - 1)
        for (sequences, rows), seconds in measured.items()
        if sequences > 1
    ]
    return CostModel(
        [(rows, seconds) for (sequences, rows), seconds in measured.items() if sequences == 1],
        max(0.0, statistics.fmean(beyond)) if beyond else 0.0,
    )
