"""A step's arrays against the pool and the model, before a device reads memory by them: it would read anything."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc.plan import Limits
from optimc_runtime.executor.base import KvPoolInfo, StepPlan


def check_step(plan: StepPlan, pool: KvPoolInfo, vocab_size: int, limits: Limits) -> None:
    """Raise EngineError naming the array that reaches outside what there is."""
    num_tokens = len(plan.tokens)
    _check("token", plan.tokens, vocab_size)
    _check("position", plan.positions, limits.max_seq_len)
    check_slots(plan.slots, pool)
    _check("logits row", plan.logits_rows, num_tokens)
    _check("block", plan.block_table, pool.num_blocks)
    lengths = plan.context_len + np.diff(plan.query_start)
    most = plan.block_table.shape[1] * pool.block_size
    if len(lengths) and (lengths.max() > most or plan.context_len.min() < 0):
        raise EngineError(f"a sequence of {int(lengths.max())} tokens with blocks for {most}")


def check_slots(slots: NDArray[np.int64], pool: KvPoolInfo) -> None:
    """Raise EngineError unless all lie in the pool."""
    _check("slot", slots, pool.num_blocks * pool.block_size)


def check_draft(hidden: NDArray[np.float32], tokens: NDArray[np.int64], width: int, vocab_size: int) -> None:
    """Raise EngineError unless there is a row [N, width] for each of N tokens, N at least 1."""
    if not len(tokens) or hidden.shape != (len(tokens), width):
        raise EngineError(f"hidden states {list(hidden.shape)}, want a row of {width} for each of {len(tokens)}")
    _check("token", tokens, vocab_size)


def _check(what: str, values: NDArray[np.integer], count: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= count):
        wrong = values[(values < 0) | (values >= count)][0]
        raise EngineError(f"{what} {int(wrong)} is not one of {count}")
