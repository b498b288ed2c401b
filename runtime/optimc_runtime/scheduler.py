"""Which tokens run in the next step. The whole algorithm:

1. A step has one budget of max_step_tokens tokens. At most min(max_seqs, max_step_tokens) sequences run at once.
2. Running sequences with one token left to compute (decode) go first, oldest first; then running prefills take chunks
   of the budget, oldest first; what remains admits waiting sequences, in the order of `policy` and `fair_share`. While
   anybody decodes, all chunks together are cut to what `chunk_budget` says a step has time for. Without chunked prefill
   prompts run whole: where none fits beside what decodes, they take a step of their own before it, never two in a row.
3. A sequence is admitted only if its whole context (prompt, and output from before a preemption) and the token after it
   fit the pool; it takes all blocks of the context at once. Cached full blocks come from the prefix cache, but the last
   known token is always computed: its logits are needed.
4. A decode that finds no block preempts the youngest running sequence, perhaps itself: it gives back all its blocks and
   waits before all that never ran, to be recomputed. The oldest is never a victim of others, so it always moves on:
   policies decide who enters, never who leaves.
5. A waiting sequence that does not fit is overtaken by later ones at most max_overtakes times; then no later one is
   admitted before it. Everything accepted fits an empty pool, so it runs once the running ones have finished.
6. Full blocks become visible in the prefix cache in `commit`, after the step that wrote them succeeded.
7. What is left of the budget may go to guesses, trees behind decoding sequences: see `guesses`. There are none in a
   step whose chunks were cut: it has no time left.
8. Pinned prefixes hold their blocks for good; what is accepted fits beside them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc_runtime.block_pool import BlockId, BlockPool
from optimc_runtime.chunk_budget import ChunkBudget
from optimc_runtime.config import StepLimits
from optimc_runtime.decode_steps import DecodeSteps
from optimc_runtime.fair_share import FairShare
from optimc_runtime.guesses import Drafter, Guesses
from optimc_runtime.pins import Pins
from optimc_runtime.policy import PolicyName, rank
from optimc_runtime.prefix_cache import Extras, PrefixCache
from optimc_runtime.sequence import Sequence, Status
from optimc_runtime.speculative_steps import SpeculativeSteps
from optimc_runtime.step import Step, Work, build_step

_AGE = attrgetter("order")
_RANK = attrgetter("rank")


class Scheduler:
    """Decides without tensors: sequences and block ids in, one `Step` out.

    Per step the caller does `schedule`, then either `observe`, `commit` and `Sequence.append`, or `release` for the
    sequences of a step that failed. What was accepted of a tree, and the token after it, are appended before `commit`.
    `release` ends a sequence in any state. Not thread-safe.
    """

    def __init__(
        self,
        limits: StepLimits,
        pool: BlockPool,
        cache: PrefixCache | None,
        *,
        chunked_prefill: bool = True,
        inflight_batching: bool = True,
        max_overtakes: int = 64,
        policy: PolicyName = "fcfs",
        ageing_s: float = 10.0,
        chunk_budget: ChunkBudget | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.cache = cache
        self.running: list[Sequence] = []
        """By age, oldest first."""
        self.waiting: list[Sequence] = []
        """By rank."""
        self.pins = Pins(pool)
        self.waiting_tokens = 0
        self.prefilled_tokens = 0
        """Computed in chunks, by steps that succeeded."""
        self.chunk_budget_tokens = 0
        """What the last step's chunks were cut to; 0 if they were not."""
        self.num_preemptions = 0
        self.prefix_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache; recomputation after a preemption does not count."""
        self.prefix_hit_tokens = 0
        self._chunked_prefill = chunked_prefill
        self._inflight_batching = inflight_batching
        self._max_overtakes = max_overtakes
        self._policy = policy
        self._ageing_s = ageing_s
        self._chunk_budget = chunk_budget if chunked_prefill else None
        self._fair_share = FairShare()
        self._decodes_waited = False
        """Whether the last step was one of prompts alone, while others could have decoded."""
        # One row per running sequence, updated when its blocks change: a step copies rows, it does not rebuild them.
        columns = -(-limits.max_request_tokens // limits.block_size)
        self._table = np.zeros((limits.max_running, columns), np.int32)
        self._free_rows = list(range(limits.max_running - 1, -1, -1))
        self._decode_steps = DecodeSteps(self._table, limits.block_size)
        self._speculative_steps = SpeculativeSteps(self._table, limits.block_size, limits.max_step_tokens)
        self._guesses = Guesses(limits, pool, self._table)

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait. The caller has checked that it fits alone."""
        assert sequence.status is Status.WAITING
        assert 0 < sequence.num_tokens <= sequence.max_tokens <= self.limits.max_request_tokens
        self._fair_share.enter(sequence)
        self._wait(sequence)

    def schedule(self, draft: Drafter | None = None) -> Step | None:
        """Return the next step, or None if there is no work. `draft` is asked for guesses once all else is decided."""
        if not self.has_work:
            return None
        # A static batch is open until its first step; later arrivals wait for the next one.
        open_for_admission = self._inflight_batching or not self.running
        decoding: list[Sequence] = []
        all_sample = True
        for sequence in self.running:  # preemption shortens the list from its young end, at or behind this sequence
            if sequence.num_tokens - sequence.num_computed == 1 and self._grow(sequence):
                decoding.append(sequence)
                all_sample = all_sample and sequence.wants_token and not sequence.all_logits
        most = self.limits.max_step_tokens - len(decoding)
        assert most >= 0

        chunks: list[tuple[Sequence, int]] = []
        has_prefills = len(decoding) < len(self.running)
        may_admit = open_for_admission and bool(self.waiting) and bool(self._free_rows)
        budget = most
        decodes_wait = False
        if has_prefills or may_admit:
            budget = self._cut(most, len(decoding))
            chunks = self._chunks(budget, has_prefills=has_prefills, may_admit=may_admit)
            if decoding and not chunks and not self._chunked_prefill and not self._decodes_waited:
                # What must run whole and does not fit beside decodes goes before them, or it would wait for their end.
                # Not twice in a row: they would wait for the end of all that comes.
                chunks = self._chunks(self.limits.max_step_tokens, has_prefills=has_prefills, may_admit=may_admit)
                decodes_wait = bool(chunks)
                decoding = [] if chunks else decoding
        self._decodes_waited = decodes_wait
        is_cut = budget < most

        only_decodes = all_sample and not chunks
        if draft is None or not decoding or (is_cut and (chunks or not budget)):
            trees = None
        else:
            trees = self._guesses.ask(
                draft,
                decoding,
                sum([count for _, count in chunks]),
                chains_only=not only_decodes,
                may_take_blocks=not self.waiting,
            )
        if only_decodes and trees is None:
            assert decoding, "work exists, but nothing can run"
            return self._decode_steps.build(decoding)
        self._decode_steps.forget()
        if only_decodes and trees is not None:
            return self._speculative_steps.build(decoding, trees)
        chunks = [*((sequence, 1) for sequence in decoding), *chunks]
        work = [Work(sequence, count, _num_logits(sequence, count)) for sequence, count in chunks]
        for place, tree in enumerate(trees or ()):
            if tree is not None:
                count = 1 + tree.shape.num_nodes
                work[place] = Work(work[place].sequence, count, count, tree)
        return build_step(tuple(work), self._table, self.limits.block_size, has_trees=trees is not None)

    def commit(self, step: Step) -> None:
        """Record that the step succeeded for all its sequences that were not released since: their tokens are computed,
        and blocks they filled become visible in the cache. Of a tree, what was appended is computed but for its last
        token, and blocks beyond that are given back."""
        size, running = self.limits.block_size, Status.RUNNING
        for item in step.work:
            sequence = item.sequence
            if sequence.status is not running:
                continue
            if item.tree is None:
                sequence.num_computed += item.num_tokens
            else:
                sequence.num_computed = sequence.num_tokens - 1
                self._guesses.shrink(sequence)
            if sequence.all_logits:
                sequence.num_scored = max(sequence.num_scored, sequence.num_computed)
            while sequence.lease is not None and (sequence.num_published + 1) * size <= sequence.num_computed:
                assert self.cache is not None
                start = sequence.num_published * size
                tokens = sequence.tokens[start : start + size]
                block = sequence.blocks[sequence.num_published]
                sequence.lease = self.cache.publish(sequence.lease, tokens, block)
                sequence.num_published += 1

    def observe(self, step: Step, execute_s: float) -> None:
        """Learn what a step took, once it has succeeded and before `commit`."""
        # A chunk of a single token costs what a decode does.
        chunks = [item.num_tokens for item in step.work if item.num_tokens > 1 and item.tree is None]
        self.prefilled_tokens += sum(chunks)
        if self._chunk_budget is not None and not step.has_trees:
            self._chunk_budget.learn(len(step.work) - len(chunks), sum(chunks), execute_s)

    def figures(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that the scheduler knows and that have defaults; from any thread."""
        return {
            "waiting_tokens": self.waiting_tokens,
            "prefix_cached_blocks": 0 if self.cache is None else len(self.cache),
            "prefix_evicted_blocks": 0 if self.cache is None else self.cache.num_evicted,
            "pinned_blocks": len(self.pins),
            "chunk_budget_tokens": self.chunk_budget_tokens,
            "tenants": self._fair_share.stats(self.running, self.waiting),
        }

    def pin(self, tokens: NDArray[np.int64], extras: Extras) -> None:
        """Pin the cached full blocks that `tokens` begin with. Raises ConfigError if they are too many, EngineError
        unless all of them are there, and nobody else who was promised the room they take."""
        assert self.cache is not None
        blocks = [node.block for node in self.cache.match(tokens, extras) if node.block is not None]
        if self.has_work or len(blocks) < len(tokens) // self.limits.block_size:
            raise EngineError("prefixes are pinned before requests come, and some came meanwhile")
        self.pins.add(blocks)
        self.limits = replace(self.limits, pinned_blocks=len(self.pins))

    def release(self, sequence: Sequence) -> None:
        """End a sequence, waiting or running: it gives back all it holds."""
        assert sequence.status is not Status.FINISHED
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        else:
            self._stop_waiting(sequence)
        self._fair_share.leave(sequence)
        sequence.status = Status.FINISHED

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, pinned ones too. What runs goes on, but publishes nothing more."""
        if self.cache is not None:
            for sequence in self.running:
                sequence.lease = None
            self.cache.clear()
            self.pins.drop()
            self.limits = replace(self.limits, pinned_blocks=0)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, references, rows and queues agree."""
        self.pool.check_integrity()
        if self.cache is not None:
            self.cache.check_integrity()
        references = [int(BlockId(block) in self.pins) for block in range(self.pool.num_blocks)]
        for sequence in self.running:
            for block in sequence.blocks:
                references[block] += 1
            row = self._table[sequence.row]
            assert row[: len(sequence.blocks)].tolist() == sequence.blocks, "a table row is stale"
            assert not row[len(sequence.blocks) :].any(), "a table row is not cleared"
        assert references == [self.pool.refcount(BlockId(block)) for block in range(self.pool.num_blocks)], (
            "references and block tables disagree"
        )
        assert len(self.running) + len(self._free_rows) == self.limits.max_running, "a table row leaked"
        assert self.waiting_tokens == sum(sequence.num_tokens for sequence in self.waiting)
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"
        assert self.waiting == sorted(self.waiting, key=_RANK), "the queue is out of order"
        assert self.limits.pinned_blocks == len(self.pins)

    def _chunks(self, budget: int, *, has_prefills: bool, may_admit: bool) -> list[tuple[Sequence, int]]:
        """Return sequences and how many tokens of their prompts to run now: of those that run, then of those let in."""
        chunks: list[tuple[Sequence, int]] = []
        if has_prefills:
            for sequence in self.running:
                remaining = sequence.num_tokens - sequence.num_computed
                if remaining > 1 and (count := self._chunk(sequence, remaining, budget)):
                    chunks.append((sequence, count))
                    budget -= count
        if may_admit:
            self._admit(chunks, budget)
        return chunks

    def _chunk(self, sequence: Sequence, remaining: int, budget: int) -> int:
        """Tokens of a prefill to run now. Recomputation may always be split: it can be longer than any step."""
        if remaining <= budget or self._chunked_prefill or sequence.num_output:
            return min(remaining, budget)
        return 0

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the next token, preempting from the young end; False if the sequence itself had to go."""
        if len(sequence.blocks) * self.limits.block_size >= sequence.num_tokens:
            return True
        while (blocks := self.pool.allocate(1)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self._table[sequence.row, len(sequence.blocks)] = blocks[0]
        sequence.blocks += blocks
        return True

    def _cut(self, most: int, num_decodes: int) -> int:
        """Return how many tokens of prompts a step has room and time for."""
        if self._chunk_budget is None or not num_decodes:
            self.chunk_budget_tokens = 0
            return most
        budget = min(most, self._chunk_budget.tokens(num_decodes))
        if budget:
            self.chunk_budget_tokens = budget
        return budget

    def _admit(self, chunks: list[tuple[Sequence, int]], budget: int) -> None:
        if budget == 0 and self._inflight_batching:
            return
        if self._fair_share.is_contended:
            self._fair_share.charge_output(self.running)
        overtaken: list[Sequence] = []
        patience_left = True
        for sequence in self._fair_share.order(self.waiting):
            if not self._free_rows or (budget == 0 and self._inflight_batching):
                return
            if not self._enter(sequence, budget):
                if sequence.num_overtaken >= self._max_overtakes:
                    return
                overtaken.append(sequence)
                continue
            for older in overtaken:
                older.num_overtaken += 1
                if older.num_overtaken >= self._max_overtakes:
                    patience_left = False
            if count := self._chunk(sequence, sequence.num_tokens - sequence.num_computed, budget):
                chunks.append((sequence, count))
                budget -= count
            if not patience_left:
                return

    def _enter(self, sequence: Sequence, budget: int) -> bool:
        """Move a waiting sequence to running with all blocks of its context, or change nothing."""
        if sequence.blocked_since == self.pool.num_released:
            return False
        size = self.limits.block_size
        cached = (
            self.cache.match(sequence.tokens[: sequence.num_tokens - 1], sequence.extras)
            if self.cache is not None and sequence.extras is not None
            else []
        )
        hits = [node.block for node in cached if node.block is not None]
        num_hit = len(hits) * size
        if self._inflight_batching and not self._chunk(sequence, sequence.num_tokens - num_hit, budget):
            return False
        missing = -(-sequence.num_tokens // size) - len(hits)
        with_next = -(-min(sequence.num_tokens + 1, sequence.max_tokens) // size) - len(hits)
        idle_hits = sum(self.pool.refcount(block) == 0 for block in hits)
        if with_next + idle_hits > self.pool.num_available:
            sequence.blocked_since = self.pool.num_released
            return False

        for block in hits:  # before allocating, which may evict what nobody references
            self.pool.share(block)
        fresh = self.pool.allocate(missing)
        assert fresh is not None
        self._stop_waiting(sequence)
        sequence.status = Status.RUNNING
        sequence.blocks = hits + fresh
        sequence.num_computed = num_hit
        sequence.num_published = len(hits)
        sequence.blocked_since = None
        sequence.num_overtaken = 0
        sequence.row = self._free_rows.pop()
        self._table[sequence.row, : len(sequence.blocks)] = sequence.blocks
        if self.cache is not None and sequence.extras is not None:
            sequence.lease = self.cache.lease(cached, sequence.extras)
            if sequence.num_preemptions == 0:
                sequence.num_cached = num_hit
                self.prefix_queried_tokens += sequence.num_prompt
                self.prefix_hit_tokens += num_hit
        self._fair_share.admit(sequence, num_hit)
        insort(self.running, sequence, key=_AGE)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        sequence.rank = rank(sequence, self._policy, self._ageing_s)
        insort(self.waiting, sequence, key=_RANK)
        self.waiting_tokens += sequence.num_tokens

    def _stop_waiting(self, sequence: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, sequence.rank, key=_RANK)]
        self.waiting_tokens -= sequence.num_tokens

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[bisect_left(self.running, sequence.order, key=_AGE)]
        self._decode_steps.forget()
        self._table[sequence.row, : len(sequence.blocks)] = 0
        self._free_rows.append(sequence.row)
        self.pool.free(sequence.blocks)
        if sequence.lease is not None:
            assert self.cache is not None
            self.cache.release(sequence.lease)
            sequence.lease = None
        sequence.row = -1
        sequence.blocks = []
        sequence.num_computed = 0


def _num_logits(sequence: Sequence, count: int) -> int:
    """Logits wanted of a chunk: all not yet delivered when scoring, the last token's when it completes the context."""
    end = sequence.num_computed + count
    if sequence.all_logits:
        return min(count, max(0, end - sequence.num_scored))
    return int(end == sequence.num_tokens and sequence.wants_token)
