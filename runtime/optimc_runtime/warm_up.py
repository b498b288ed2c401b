"""What an executor does once, or once per shape, done before the first request pays for it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from optimc_runtime.block_pool import BlockPool
from optimc_runtime.config import StepLimits
from optimc_runtime.executor.base import Executor, StepPlan
from optimc_runtime.request import RequestId
from optimc_runtime.sequence import Sequence
from optimc_runtime.step import Work, build_step


def warm_up(executor: Executor, pool: BlockPool, limits: StepLimits, max_tokens: int | None = None) -> None:
    """Run a prefill and a decode step as large as the limits, the free blocks and `max_tokens` allow. Only free blocks
    are written, and nothing is cached."""
    most = limits.max_step_tokens if max_tokens is None else min(max_tokens, limits.max_step_tokens)
    prefill = min(most, limits.max_seq_len, pool.num_free * limits.block_size)
    decodes = min(most, limits.max_running, pool.num_free)
    for lengths in ([prefill], [1] * decodes):
        if sum(lengths):
            counts = [-(-length // limits.block_size) for length in lengths]
            blocks = pool.allocate(sum(counts))
            assert blocks is not None
            try:
                executor.execute(_plan(lengths, counts, blocks, limits.block_size))
            finally:
                pool.free(blocks)


def _plan(lengths: Ordered[int], counts: Ordered[int], blocks: Ordered[int], block_size: int) -> StepPlan:
    """A step of fresh sequences of the given lengths; sequence b owns the next counts[b] of `blocks`."""
    table = np.zeros((len(lengths), max(counts)), np.int32)
    work = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        sequence = Sequence(RequestId(f"warm-up-{row}"), row, np.zeros(length, np.int64), max_output_tokens=0)
        sequence.row = row
        table[row, :count] = blocks[first : first + count]
        first += count
        work.append(Work(sequence, num_tokens=length, num_logits=1))
    return build_step(tuple(work), table, block_size).plan
