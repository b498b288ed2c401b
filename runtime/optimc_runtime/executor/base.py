"""The contract between scheduler and executor: one dataclass down, one up.

The pool belongs to the executor, the block ids to the scheduler. Letters: T tokens in the step (packed, no padding),
B sequences, R rows that need logits, V vocabulary, S slots per block, K Medusa heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. Sequence b owns tokens `query_start[b]:query_start[b+1]`."""

    tokens: NDArray[np.int64]
    """[T] token ids."""
    positions: NDArray[np.int64]
    """[T] position of each token in its sequence."""
    slots: NDArray[np.int64]
    """[T] where each token's K/V row is written: block_id * S + offset."""
    query_start: NDArray[np.int32]
    """[B+1] exclusive prefix sum of the sequences' token counts; the last entry is T."""
    context_len: NDArray[np.int32]
    """[B] tokens of each sequence already in the pool before this step."""
    block_table: NDArray[np.int32]
    """[B, W] block ids in order, rows padded with 0; row b covers context_len[b] plus its tokens of this step."""
    logits_rows: NDArray[np.int64]
    """[R] indices into T whose logits are wanted, ascending."""
    tree_mask: NDArray[np.bool_] | None = None
    """[T, Q] with Q the longest query: token t sees token j (counted from its sequence's first token in this step).
    None means causal."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's answer."""

    logits: NDArray[np.float32]
    """[R, V]. May be reused by the executor's next step: copy what must outlive it."""
    medusa_logits: NDArray[np.float32] | None = None
    """[K, R, V] with Medusa heads, else None."""


@dataclass(frozen=True, slots=True)
class KvPoolInfo:
    """The pool an executor allocated."""

    num_blocks: int
    """P."""
    block_size: int
    """S, in tokens."""
    bytes_per_block: int
    """Real bytes over all layers, scales included."""


class Executor(Protocol):
    """What every target implements. Not thread-safe: the engine's step loop is its only caller."""

    @property
    def pool(self) -> KvPoolInfo:
        """The KV pool this executor owns."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: write K/V of all T tokens to their slots, return logits of the asked rows."""
        ...

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Copy K/V rows between slots, as if all were read before any is written."""
        ...

    def close(self) -> None:
        """Release the pool and the engine."""
        ...
