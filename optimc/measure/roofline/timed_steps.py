"""Steps of a program, run and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from optimc.measure.roofline.synthetic import BLOCK_SIZE, MAX_TOKENS, blocks_of
from optimc.plan import Plan
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.cpu import CpuExecutor

FEWEST_TIMES, MOST_TIMES = 3, 60
"""A step is run and timed, after once that is not."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one step run again and again."""

    best: float
    median: float


@contextmanager
def executor_of(plan: Plan, threads: int, kv_blocks: int, block_bytes: int) -> Iterator[CpuExecutor]:
    """Yield the plan's executor with room for so many blocks."""
    executor = CpuExecutor(plan, kv_memory_bytes=kv_blocks * block_bytes, threads=threads)
    try:
        yield executor
    finally:
        executor.close()


def step_of(contexts: Sequence[int], queries: Sequence[int]) -> StepPlan:
    """Return a step in which sequence b has `contexts[b]` tokens in blocks of its own and brings `queries[b]` more."""
    starts = np.concatenate([[0], np.cumsum(queries)])
    blocks = blocks_of([context + count for context, count in zip(contexts, queries, strict=True)])
    first = np.concatenate([[0], np.cumsum(blocks)])[:-1]
    positions = np.concatenate([np.arange(c, c + q) for c, q in zip(contexts, queries, strict=True)])
    owner = np.repeat(np.arange(len(queries)), queries)
    table = np.zeros((len(queries), max(blocks)), np.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = np.arange(first[row], first[row] + count)
    return StepPlan(
        tokens=np.arange(len(positions), dtype=np.int64) % 32,
        positions=positions.astype(np.int64),
        slots=(first[owner] * BLOCK_SIZE + positions).astype(np.int64),
        query_start=starts.astype(np.int32),
        context_len=np.asarray(contexts, np.int32),
        block_table=table,
        logits_rows=np.array([len(positions) - 1], np.int64),
    )


def fill_pool(executor: CpuExecutor, blocks: int) -> None:
    """Write every slot of the first `blocks` blocks: what nobody wrote may not be memory yet."""
    each = MAX_TOKENS // BLOCK_SIZE
    for start in range(0, blocks, each):
        count = min(each, blocks - start)
        step = step_of([0], [count * BLOCK_SIZE])
        shift = start * BLOCK_SIZE
        executor.execute(
            StepPlan(
                tokens=step.tokens,
                positions=step.positions,
                slots=step.slots + shift,
                query_start=step.query_start,
                context_len=step.context_len,
                block_table=step.block_table + np.int32(start),
                logits_rows=step.logits_rows,
            )
        )


def time_steps(
    executor: CpuExecutor,
    steps: Sequence[StepPlan],
    least_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Seconds]:
    """Run each step once, then all in turns; return each one's times. A step is run until `least_s` are spent on it,
    but FEWEST_TIMES at least and MOST_TIMES at most."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        executor.execute(step)
    while True:
        waiting = [index for index, taken in enumerate(times) if _wants_more(taken, least_s)]
        if not waiting:
            return [Seconds(min(taken), statistics.median(taken)) for taken in times]
        for index in waiting:
            started_s = clock()
            executor.execute(steps[index])
            times[index].append(clock() - started_s)


def _wants_more(taken: Sequence[float], least_s: float) -> bool:
    return len(taken) < FEWEST_TIMES or (len(taken) < MOST_TIMES and sum(taken) < least_s)
