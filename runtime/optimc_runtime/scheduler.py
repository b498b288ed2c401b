"""Which tokens run in the next step. The whole algorithm:

1. A step has one budget of max_step_tokens tokens. At most min(max_seqs, max_step_tokens) sequences run at once.
2. Running sequences with one token left to compute (decode) go first, oldest first; then running prefills take chunks
   of the budget, oldest first; what remains admits waiting sequences, oldest first.
3. A sequence is admitted only if its whole context (prompt, and output from before a preemption) and the token after it
   fit the pool; it takes all blocks of the context at once. Cached full blocks come from the prefix cache, but the last
   known token is always computed: its logits are needed.
4. A decode that finds no block preempts the youngest running sequence, perhaps itself: it gives back all its blocks and
   waits at its old place, to be recomputed. The oldest is never a victim of others, so it always moves on.
5. A waiting sequence that does not fit is overtaken by younger ones at most max_overtakes times; then no younger one is
   admitted before it. Everything accepted fits an empty pool, so it runs once the running ones have finished.
6. Full blocks become visible in the prefix cache in `commit`, after the step that wrote them succeeded.
7. What is left of the budget may go to guesses: trees behind decoding sequences, cut to what fits. They take free
   blocks only, none while anybody waits, and give them back in `commit`: a guess costs nobody a preemption or a wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np

from optimc_runtime.block_pool import BlockId, BlockPool
from optimc_runtime.config import StepLimits
from optimc_runtime.decode_steps import DecodeSteps
from optimc_runtime.prefix_cache import PrefixCache
from optimc_runtime.sequence import Sequence, Status
from optimc_runtime.speculate.fit import fit
from optimc_runtime.speculate.tree import DraftTree
from optimc_runtime.speculative_steps import SpeculativeSteps
from optimc_runtime.step import Step, Work, build_step

_AGE = attrgetter("order")

Drafter = Callable[[list[Sequence], int, int, bool], list[DraftTree | None] | None]
"""`Speculator.draft`."""


class Scheduler:
    """Decides without tensors: sequences and block ids in, one `Step` out.

    Per step the caller does `schedule`, then either `commit` and `Sequence.append`, or `release` for the sequences of a
    step that failed. What was accepted of a tree, and the token after it, are appended before `commit`. `release` ends
    a sequence in any state. Not thread-safe.
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
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.cache = cache
        self.running: list[Sequence] = []
        """By age, oldest first."""
        self.waiting: list[Sequence] = []
        """By age, oldest first; preempted ones stand at their old place."""
        self.waiting_tokens = 0
        self.num_preemptions = 0
        self.prefix_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache; recomputation after a preemption does not count."""
        self.prefix_hit_tokens = 0
        self._chunked_prefill = chunked_prefill
        self._inflight_batching = inflight_batching
        self._max_overtakes = max_overtakes
        # One row per running sequence, updated when its blocks change: a step copies rows, it does not rebuild them.
        columns = -(-limits.max_request_tokens // limits.block_size)
        self._table = np.zeros((limits.max_running, columns), np.int32)
        self._free_rows = list(range(limits.max_running - 1, -1, -1))
        self._decode_steps = DecodeSteps(self._table, limits.block_size)
        self._speculative_steps = SpeculativeSteps(self._table, limits.block_size, limits.max_step_tokens)

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait. The caller has checked that it fits alone."""
        assert sequence.status is Status.WAITING
        assert 0 < sequence.num_tokens <= sequence.max_tokens <= self.limits.max_request_tokens
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
        budget = self.limits.max_step_tokens - len(decoding)
        assert budget >= 0

        chunks: list[tuple[Sequence, int]] = []
        if len(decoding) < len(self.running):
            for sequence in self.running:
                remaining = sequence.num_tokens - sequence.num_computed
                if remaining > 1 and (count := self._chunk(sequence, remaining, budget)):
                    chunks.append((sequence, count))
                    budget -= count

        if open_for_admission and self.waiting:
            self._admit(chunks, budget)
        only_decodes = all_sample and not chunks
        if draft is None or not decoding:
            trees = None
        else:
            chunk_tokens = sum([count for _, count in chunks])
            trees = self._guess(draft, decoding, chunk_tokens, chains_only=not only_decodes)
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
                self._shrink(sequence)
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

    def figures(self) -> dict[str, Any]:
        """Return the fields of `EngineStats` that the scheduler knows and that have defaults; from any thread."""
        return {}

    def release(self, sequence: Sequence) -> None:
        """End a sequence, waiting or running: it gives back all it holds."""
        assert sequence.status is not Status.FINISHED
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        else:
            self._stop_waiting(sequence)
        sequence.status = Status.FINISHED

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. What runs goes on, but publishes nothing more."""
        if self.cache is not None:
            for sequence in self.running:
                sequence.lease = None
            self.cache.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, references, rows and queues agree."""
        self.pool.check_integrity()
        if self.cache is not None:
            self.cache.check_integrity()
        references = [0] * self.pool.num_blocks
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

    def _guess(
        self, draft: Drafter, decoding: list[Sequence], chunk_tokens: int, *, chains_only: bool
    ) -> list[DraftTree | None] | None:
        """Ask for trees behind the decoding sequences and make room for what fits, in their order; None if nothing
        comes of it. All decodes of the step have grown before, so nobody goes short."""
        budget = self.limits.max_step_tokens - len(decoding) - chunk_tokens
        # The root emits a token; a guess is worth something if another may follow.
        asked = [
            place
            for place, sequence in enumerate(decoding)
            if sequence.max_tokens - sequence.num_tokens > 1
            and sequence.num_output > 0
            and not sequence.all_logits
            and sequence.proposer != "off"
        ]
        if budget <= 0 or not asked:
            return None
        guesses = draft(
            [decoding[place] for place in asked], len(decoding) - len(asked) + chunk_tokens, budget, chains_only
        )
        if guesses is None:
            return None
        trees: list[DraftTree | None] = [None] * len(decoding)
        found = False
        for place, guess in zip(asked, guesses, strict=True):
            tree = None if guess is None else self._fit(guess, decoding[place], budget, chains_only)
            if tree is not None:
                trees[place] = tree
                budget -= tree.shape.num_nodes
                found = True
        return trees if found else None

    def _fit(self, guess: DraftTree, sequence: Sequence, budget: int, chain_only: bool) -> DraftTree | None:
        """Cut a guess to what fits the step, the sequence and free blocks, and take those. Nodes need slots each, so a
        tree may be wider than the sequence may be long."""
        most_nodes = min(budget, self.limits.max_request_tokens - sequence.num_tokens)
        tree = fit(guess, most_nodes, sequence.max_tokens - sequence.num_tokens - 1, chain_only=chain_only)
        if tree is None:
            return None
        size = self.limits.block_size
        held = len(sequence.blocks)
        missing = -(-(sequence.num_tokens + tree.shape.num_nodes) // size) - held
        if missing <= 0:
            return tree
        # Each block that is given back wakes whoever waits for blocks, for nothing.
        missing = 0 if self.waiting else min(missing, self.pool.num_free)
        blocks = self.pool.allocate(missing)
        assert blocks is not None
        self._table[sequence.row, held : held + missing] = blocks
        sequence.blocks += blocks
        return fit(tree, (held + missing) * size - sequence.num_tokens, tree.shape.depth, chain_only=chain_only)

    def _shrink(self, sequence: Sequence) -> None:
        """Give back blocks beyond the known tokens."""
        needed = -(-sequence.num_tokens // self.limits.block_size)
        if needed < len(sequence.blocks):
            self._table[sequence.row, needed : len(sequence.blocks)] = 0
            self.pool.free(sequence.blocks[needed:])
            del sequence.blocks[needed:]

    def _admit(self, chunks: list[tuple[Sequence, int]], budget: int) -> None:
        overtaken: list[Sequence] = []
        patience_left = True
        for sequence in tuple(self.waiting):
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
        insort(self.running, sequence, key=_AGE)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_AGE)
        self.waiting_tokens += sequence.num_tokens

    def _stop_waiting(self, sequence: Sequence) -> None:
        del self.waiting[bisect_left(self.waiting, sequence.order, key=_AGE)]
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
