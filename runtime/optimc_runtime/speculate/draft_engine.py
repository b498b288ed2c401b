"""Guesses of a smaller model: another plan with the same tokenizer, on an executor and KV blocks of its own."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc_runtime.block_pool import BlockPool
from optimc_runtime.config import StepLimits
from optimc_runtime.executor.base import Executor
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.proposal import Proposal
from optimc_runtime.speculate.tree import ProposerName, chain
from optimc_runtime.step import Work, build_step

MOST_READ = 64
"""Tokens this model reads at once of what it has missed, of all sequences: everybody waits meanwhile."""
FEW = 8
"""Tokens that are read along with the first guess, as what was accepted since the last one is."""
SMOOTHING = 0.2
"""Share of the newest time in the running mean."""


class DraftEngine:
    """Lets the other model go on greedily. What it computed of a sequence stays in its pool, also guesses that turn out
    right; others are overwritten. A sequence that finds no room there, is too long, or was not read to its end yet,
    gets no guess."""

    name: ProposerName = "draft"
    times_itself = True

    def __init__(self, executor: Executor, limits: StepLimits) -> None:
        """`limits`: of the draft plan and its pool. The executor is this object's to close."""
        self.cost_s = 2e-3
        self._is_timed = False
        self._executor = executor
        self._limits = limits
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        columns = -(-limits.max_request_tokens // limits.block_size)
        self._table = np.zeros((limits.max_running, columns), np.int32)
        self._free_rows = list(range(limits.max_running))
        self._drafted: dict[int, Sequence] = {}
        """By order of the sequence drafted for: the same tokens, and guesses, as this model's pool holds them."""

    def propose(self, sequences: list[Sequence], most_depth: int) -> list[Proposal | None]:
        """Return a greedy chain for each sequence there is room for. Raises EngineError for logits that say nothing."""
        proposals: list[Proposal | None] = [None] * len(sequences)
        mine: list[tuple[int, Sequence]] = []
        for place, sequence in enumerate(sequences):
            if most_depth > 0 and (copy := self._catch_up(sequence, most_depth)) is not None:
                mine.append((place, copy))
        self._read([copy for _, copy in mine])
        mine = [(place, copy) for place, copy in mine if copy.num_tokens - copy.num_computed <= FEW]
        if not mine:
            return proposals
        copies = [copy for _, copy in mine]
        tokens: list[list[int]] = [[] for _ in mine]
        confidences: list[list[float]] = [[] for _ in mine]
        is_caught_up = all(copy.num_tokens - copy.num_computed == 1 for copy in copies)
        started_s = perf_counter()
        for depth in range(most_depth):
            logits = self._compute(copies)
            if depth == 0 and not is_caught_up:
                started_s = perf_counter()  # reading what was missed is no part of what a guess costs
            best = logits.argmax(1)
            top = logits[np.arange(len(best)), best]
            if not np.isfinite(top).all():
                raise EngineError("the draft plan's logits hold NaN or infinity")
            shares = 1 / np.exp(logits - top[:, None]).sum(1)
            for copy, token, share, its_tokens, its_confidences in zip(
                copies, best.tolist(), shares.tolist(), tokens, confidences, strict=True
            ):
                its_tokens.append(token)
                its_confidences.append(share)
                copy.append(token)
        timed = most_depth if is_caught_up else most_depth - 1
        if timed:
            spent_s = (perf_counter() - started_s) * most_depth / timed / len(copies)
            self.cost_s += SMOOTHING * (spent_s - self.cost_s) if self._is_timed else spent_s - self.cost_s
            self._is_timed = True
        for (place, _), its_tokens, its_confidences in zip(mine, tokens, confidences, strict=True):
            proposals[place] = Proposal(chain(most_depth), its_tokens, its_confidences)
        return proposals

    def forget(self, sequence: Sequence) -> None:
        """Give back the blocks of a sequence that has ended."""
        copy = self._drafted.pop(sequence.order, None)
        if copy is not None:
            self._pool.free(copy.blocks)
            self._table[copy.row] = 0
            self._free_rows.append(copy.row)

    def close(self) -> None:
        """Close the draft plan's executor."""
        self._executor.close()

    def _catch_up(self, sequence: Sequence, depth: int) -> Sequence | None:
        """Return the copy of a sequence, cut to what both agree on and brought to its length, with blocks for `depth`
        guesses; None if there is no room."""
        needed = sequence.num_tokens + depth
        if needed > self._limits.max_request_tokens:
            return None
        copy = self._drafted.get(sequence.order)
        if copy is None:
            if not self._free_rows:
                return None
            copy = Sequence(sequence.request_id, sequence.order, [], self._limits.max_request_tokens)
            copy.row = self._free_rows.pop()
            self._drafted[sequence.order] = copy
        missing = -(-needed // self._limits.block_size) - len(copy.blocks)
        if missing > 0:
            blocks = self._pool.allocate(missing)
            if blocks is None:
                return None
            self._table[copy.row, len(copy.blocks) : len(copy.blocks) + missing] = blocks
            copy.blocks += blocks
        _follow(copy, sequence, needed)
        return copy

    def _read(self, copies: list[Sequence]) -> None:
        """Compute a part of what is missing where that is much, in one step."""
        budget = min(MOST_READ, self._limits.max_step_tokens)
        work: list[Work] = []
        for copy in copies:
            missing = copy.num_tokens - copy.num_computed
            if missing > FEW and (count := min(missing - 1, budget)):
                work.append(Work(copy, count, 0))
                budget -= count
        if work:
            self._execute(work)

    def _execute(self, work: list[Work]) -> NDArray[np.float32]:
        step = build_step(tuple(work), self._table, self._limits.block_size)
        logits = self._executor.execute(step.plan).logits
        for item in work:
            item.sequence.num_computed += item.num_tokens
        return logits

    def _compute(self, copies: list[Sequence]) -> NDArray[np.float32]:
        """Compute what is known of all copies; return the logits [n, V] after the last token of each."""
        found: dict[int, NDArray[np.float32]] = {}
        while len(found) < len(copies):
            budget = self._limits.max_step_tokens
            work: list[Work] = []
            ending: list[int] = []
            for place, copy in enumerate(copies):
                count = min(copy.num_tokens - copy.num_computed, budget)
                if count:
                    is_last = copy.num_computed + count == copy.num_tokens
                    work.append(Work(copy, count, int(is_last)))
                    budget -= count
                    if is_last:
                        ending.append(place)
            logits = self._execute(work)
            for row, place in enumerate(ending):
                found[place] = logits[row].copy()
        return np.stack([found[place] for place in range(len(copies))])


def _follow(copy: Sequence, sequence: Sequence, capacity: int) -> None:
    """Give `copy` the tokens of `sequence`, keeping as computed what both agree on; the last token is always computed,
    since its logits are wanted."""
    known = min(copy.num_tokens, sequence.num_tokens)
    differs = np.flatnonzero(copy.tokens[:known] != sequence.tokens[:known])
    agreed = int(differs[0]) if len(differs) else known
    if len(copy.tokens) < capacity:
        grown = np.empty(2 * capacity, np.int64)
        grown[:agreed] = copy.tokens[:agreed]
        copy.tokens = grown
    copy.tokens[agreed : sequence.num_tokens] = sequence.tokens[agreed : sequence.num_tokens]
    copy.num_tokens = sequence.num_tokens
    copy.num_computed = min(copy.num_computed, agreed, sequence.num_tokens - 1)
