"""The engine's heart, single-threaded: schedule, execute, sample, commit, deliver.

A step with guesses goes the same way but for two things: what follows from a tree is chosen in one go, and the tokens
it gives are added to their sequences before `commit`, which must know what was accepted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, OptimcError
from optimc_runtime.active_request import ActiveRequest
from optimc_runtime.delivery import Delivery, Settled
from optimc_runtime.executor.base import Executor, StepPlan, StepResult
from optimc_runtime.request import RequestId
from optimc_runtime.sampler import RowMasks, Sampled, TreeSamples, sample
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.sequence import Sequence, Status
from optimc_runtime.speculate.tree import DraftTree, Speculator, Verified
from optimc_runtime.speculate.verify import accepted_moves, sample_step
from optimc_runtime.stats import Counters, EngineStats
from optimc_runtime.step import Step
from optimc_runtime.step_batch import NO_BATCH, StepBatch, make_batch
from optimc_runtime.structured.step_masks import blamed, step_masks
from optimc_runtime.warm_up import warm_up

_log = logging.getLogger(__name__)


class StepLoop:
    """Owns what only one thread may touch: scheduler, executor, and the requests in flight.

    A failure is contained where it arose: in a row of logits or a callback, that request fails; in the executor, the
    requests of that step fail. What a failed step wrote is never published. `on_end`: see `Delivery`.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        on_end: Callable[[RequestId], None],
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.counters = Counters()
        self._executor = executor
        self._speculator = speculator
        self._delivery = Delivery(self.counters, self._release, on_end)
        self._batch = NO_BATCH

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._delivery.active)

    def add(self, request: ActiveRequest) -> None:
        """Take in a request that was checked to fit."""
        self._delivery.add(request)
        self.scheduler.add(request.sequence)

    def abort(self, request: ActiveRequest) -> None:
        """End a request in whatever state it is; nothing happens if it is finished."""
        if self._delivery.active.get(request.sequence.request_id) is request:
            self._delivery.end(request, "abort")

    def abort_all(self) -> None:
        """End every request."""
        for request in tuple(self._delivery.active.values()):
            self._delivery.end(request, "abort")

    def fail_all(self, error: OptimcError, not_added: Iterable[ActiveRequest]) -> None:
        """Deliver `error` to every request, and to those not added yet, when the loop itself is broken. Scheduler and
        pool are left as they are."""
        self._delivery.fail_all(error, not_added)

    def step(self) -> None:
        """Run one step, if there is work."""
        started_s = time.monotonic()
        counters, speculator = self.counters, self._speculator
        drafted_before_s = counters.draft_s
        step = self.scheduler.schedule(None if speculator is None or speculator.is_idle else self._draft)
        if step is None:
            return
        if step.work is not self._batch.work:
            self._batch = self._batch_of(step, started_s)
        batch = self._batch
        scheduled_s = executed_s = time.monotonic()
        try:
            result = self._executor.execute(step.plan)
            executed_s = time.monotonic()
            if step.has_trees:
                samples = self._verify(batch, step.plan, result.logits)
            else:
                chosen = self._sample(batch, result.logits)
            sampled_s = time.monotonic()
        except Exception as error:  # whatever a target raises, only this step's requests are lost
            sampled_s = time.monotonic()
            if executed_s == scheduled_s:
                executed_s = sampled_s  # the executor raised it
            self._fail_step(batch, error)
        else:
            self.scheduler.observe(step, executed_s - scheduled_s)
            if step.has_trees:
                settled = self._delivery.settle(batch, samples)
                self.scheduler.commit(step)
                self._delivery.deliver_verified(batch, result, samples, settled)
                self._report(batch, result, samples, settled, len(step.plan.tokens), executed_s - scheduled_s)
            else:
                self.scheduler.commit(step)
                self._delivery.deliver(batch, result, chosen)
                if speculator is not None:
                    self._keep(batch, batch.rows, result)
                    speculator.plain_step(batch.num_decodes, len(step.plan.tokens), executed_s - scheduled_s)
        if not self._delivery.active:
            self._batch = NO_BATCH  # nobody's request is held on to
        ended_s = time.monotonic()
        counters.steps += 1
        counters.last_step_s = ended_s - started_s
        counters.schedule_s += scheduled_s - started_s - (counters.draft_s - drafted_before_s)
        counters.execute_s += executed_s - scheduled_s
        counters.sample_s += sampled_s - executed_s
        counters.commit_s += ended_s - sampled_s

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Run the largest prefill and decode steps once; see `warm_up`."""
        warm_up(self._executor, self.scheduler.pool, self.scheduler.limits, max_tokens)

    def stats(self, not_added: int) -> EngineStats:
        """Return a snapshot, with `not_added` more requests waiting; may be called from any thread."""
        scheduler, pool, counters = self.scheduler, self.scheduler.pool, self.counters
        free, cached = pool.num_free, pool.num_cached_idle
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + not_added,
            blocks_total=pool.num_blocks,
            blocks_free=free,
            blocks_cached=cached,
            blocks_used=pool.num_blocks - free - cached,
            steps=counters.steps,
            failed_steps=counters.failed_steps,
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            prefix_queried_tokens=scheduler.prefix_queried_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            preemptions=scheduler.num_preemptions,
            finished=dict(counters.finished),
            last_step_s=counters.last_step_s,
            schedule_s=counters.schedule_s,
            execute_s=counters.execute_s,
            sample_s=counters.sample_s,
            commit_s=counters.commit_s,
            draft_s=counters.draft_s,
            speculation=None if self._speculator is None else self._speculator.stats(),
            **scheduler.figures(),
        )

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)

    def _draft(
        self, sequences: list[Sequence], other_rows: int, most_nodes: int, chains_only: bool
    ) -> list[DraftTree | None] | None:
        assert self._speculator is not None
        started_s = time.monotonic()
        trees = self._speculator.draft(sequences, other_rows, most_nodes, chains_only)
        self.counters.draft_s += time.monotonic() - started_s
        return trees

    def _batch_of(self, step: Step, now_s: float) -> StepBatch:
        requests = tuple([self._delivery.active[item.sequence.request_id] for item in step.work])
        for request in requests:
            if request.timings.scheduled_s is None:
                request.mark(scheduled_s=now_s)
        return make_batch(step.work, requests)

    def _sample(self, batch: StepBatch, logits: NDArray[np.float32]) -> list[Sampled | None]:
        """Choose a token for every sequence of the step that wants one, None for the others; a request whose logits are
        unusable fails alone."""
        _check_rows(batch, logits)
        if not batch.rows:
            return [None] * len(batch.work)
        wanted = logits if len(batch.rows) == batch.num_rows else logits[batch.rows]
        masks = None
        if batch.has_grammars:
            num_rows, vocab_size = wanted.shape
            masks, failures = step_masks(batch.grammars, [None] * num_rows, range(num_rows), num_rows, vocab_size)
            for index, error in failures.items():
                self._delivery.end(batch.requests[batch.places[index]], "error", error=error)
        sampled: list[Sampled | None]
        try:
            sampled = [*sample(wanted, batch.states, masks)]
        except EngineError:
            sampled = [
                self._sample_one(wanted[row : row + 1], batch.requests[place], masks and masks.at(row))
                for row, place in enumerate(batch.places)
            ]
        if len(sampled) == len(batch.work):
            return sampled
        chosen: list[Sampled | None] = [None] * len(batch.work)
        for place, choice in zip(batch.places, sampled, strict=True):
            chosen[place] = choice
        return chosen

    def _sample_one(self, row: NDArray[np.float32], request: ActiveRequest, masks: RowMasks | None) -> Sampled | None:
        if request.sequence.status is Status.FINISHED:  # its grammar failed
            return None
        assert request.sampling is not None
        try:
            return sample(row, [request.sampling], masks)[0]
        except EngineError as error:
            self._delivery.end(request, "error", error=blamed(error, request.grammar))
            return None

    def _verify(self, batch: StepBatch, plan: StepPlan, logits: NDArray[np.float32]) -> TreeSamples:
        """Choose tokens for every sequence of a step with trees, and put what was accepted in its place; a request
        whose logits are unusable fails alone. States have accepted what was chosen."""
        assert self._speculator is not None
        _check_rows(batch, logits)
        grammars = batch.grammars if batch.has_grammars else None
        samples = sample_step(batch.work, batch.places, batch.states, plan, logits, self._speculator.typical, grammars)
        moves = accepted_moves(plan, batch.places, samples.paths)
        if moves is not None:
            self._executor.move(*moves)
        for index, error in samples.failures.items():
            request = batch.requests[batch.places[index]]
            self._delivery.end(request, "error", error=blamed(error, request.grammar))
        return samples

    def _fail_step(self, batch: StepBatch, error: Exception) -> None:
        _log.error("step %d failed", self.counters.steps, exc_info=error)
        self.counters.failed_steps += 1
        for request in batch.requests:
            if request.sequence.status is not Status.FINISHED:
                reason = f"{type(error).__name__}: {error}"
                self._delivery.end(request, "error", error=EngineError(f"step {self.counters.steps} failed: {reason}"))

    def _report(
        self,
        batch: StepBatch,
        result: StepResult,
        samples: TreeSamples,
        settled: dict[int, Settled],
        num_rows: int,
        execute_s: float,
    ) -> None:
        """Tell the speculator what became of its trees."""
        assert self._speculator is not None
        self._keep(batch, samples.last_rows, result)
        verified: list[Verified] = []
        for place, path in zip(batch.places, samples.paths, strict=True):
            item = batch.work[place]
            if item.tree is not None and place in settled:
                nodes = [query - 1 for query in path]
                verified.append(Verified(item.sequence, item.tree, nodes, len(settled[place].token_ids)))
        self._speculator.observe(verified, batch.num_decodes, num_rows, execute_s)

    def _keep(self, batch: StepBatch, rows: list[int], result: StepResult) -> None:
        """Hand the speculator the hidden states that the newest tokens of those who go on were sampled from: `rows`
        of the sequences at `batch.places`."""
        assert self._speculator is not None
        if result.hidden is None or not self._speculator.wants_hidden:
            return
        sequences: list[Sequence] = []
        wanted: list[int] = []
        for place, row in zip(batch.places, rows, strict=True):
            sequence = batch.requests[place].sequence
            if sequence.status is Status.RUNNING and sequence.proposer != "off":
                sequences.append(sequence)
                wanted.append(row)
        if len(wanted) == 1:  # a slice costs a fraction of picking rows
            self._speculator.keep(tuple(sequences), result.hidden[wanted[0] : wanted[0] + 1].copy())
        elif wanted:
            self._speculator.keep(tuple(sequences), result.hidden[wanted])


def _check_rows(batch: StepBatch, logits: NDArray[np.float32]) -> None:
    if len(logits) != batch.num_rows:
        raise EngineError(f"the executor returned {len(logits)} rows of logits, {batch.num_rows} were asked for")
