"""The contract between scheduler and executor: one dataclass down, one up.

The pool belongs to the executor, the block ids to the scheduler. Letters: T tokens in the step (packed, no padding),
B sequences, R rows that need logits, V vocabulary, S slots per block, d hidden size, K Medusa heads, N rows to draft
for, k candidates per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from optimc.plan.heads import HeadsInfo


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
    hidden: NDArray[np.float32] | None = None
    """[R, d] what the output head multiplied, if the plan was lowered for it. May be reused by the executor's next
    call."""


class DraftCandidates(NamedTuple):
    """What the heads of a plan guess. Fresh arrays, the caller's."""

    ids: NDArray[np.int32]
    """[N, K, k] token ids of the full vocabulary, likeliest first."""
    logprobs: NDArray[np.float32]
    """[N, K, k] under the head's softmax over the draft vocabulary."""


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

    @property
    def heads(self) -> HeadsInfo | None:
        """The plan's Medusa heads; None without any."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: write K/V of all T tokens to their slots, return logits of the asked rows."""
        ...

    def move(self, src_slots: NDArray[np.int64], dst_slots: NDArray[np.int64]) -> None:
        """Copy K/V rows between slots, as if all were read before any is written."""
        ...

    def draft(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> DraftCandidates:
        """Evaluate the heads for N rows: `hidden` [N, d] as `execute` gave it, `tokens` [N] what was sampled from that
        row (ignored by heads that are not conditioned). Overwrites what `execute` returned.

        Raises EngineError if there are no heads or they fail.
        """
        ...

    def close(self) -> None:
        """Release the pool and the engine."""
        ...
