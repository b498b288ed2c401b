"""The engine's heart, single-threaded: schedule, execute, sample, commit, deliver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, OptimcError
from optimc_runtime.active_request import ActiveRequest
from optimc_runtime.executor.base import Executor, StepPlan
from optimc_runtime.request import FinishReason, RequestId, RequestOutput
from optimc_runtime.sampler import Sampled, SamplingState, sample
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.sequence import Sequence as TokenSequence
from optimc_runtime.sequence import Status
from optimc_runtime.stats import Counters, EngineStats
from optimc_runtime.step import Step, Work, build_step

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Whose work a step is, and who gets a token: kept while the scheduler hands out the same work."""

    work: tuple[Work, ...]
    requests: tuple[ActiveRequest, ...]
    """Of `work`, in its order."""
    num_rows: int
    """Rows of logits the step is asked for."""
    rows: list[int]
    """Those of them to sample from."""
    places: list[int]
    """Whose they are: index into `requests`."""
    states: list[SamplingState]
    """How they are to be sampled."""


_NO_BATCH = _Batch((), (), 0, [], [], [])


class StepLoop:
    """Owns what only one thread may touch: scheduler, executor, and the requests in flight.

    A failure is contained where it arose: in a row of logits or a callback, that request fails; in the executor, the
    requests of that step fail. What a failed step wrote is never published. `on_end(request_id)` is called before a
    request's last output is delivered.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, on_end: Callable[[RequestId], None]) -> None:
        self.scheduler = scheduler
        self.counters = Counters()
        self._executor = executor
        self._on_end = on_end
        self._active: dict[RequestId, ActiveRequest] = {}
        self._batch = _NO_BATCH

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._active)

    def add(self, request: ActiveRequest) -> None:
        """Take in a request that was checked to fit."""
        assert request.sequence.request_id not in self._active
        self._active[request.sequence.request_id] = request
        self.scheduler.add(request.sequence)

    def abort(self, request: ActiveRequest) -> None:
        """End a request in whatever state it is; nothing happens if it is finished."""
        if self._active.get(request.sequence.request_id) is request:
            self._end(request, "abort")

    def abort_all(self) -> None:
        """End every request."""
        for request in tuple(self._active.values()):
            self._end(request, "abort")

    def fail_all(self, error: OptimcError, not_added: Iterable[ActiveRequest]) -> None:
        """Deliver `error` to every request, and to those not added yet, when the loop itself is broken. Scheduler and
        pool are left as they are."""
        self._active.update((request.sequence.request_id, request) for request in not_added)
        for request in tuple(self._active.values()):
            request.mark(finished_s=time.monotonic())
            self._deliver_last(request, request.output(finish_reason="error", error=error))

    def step(self) -> None:
        """Run one step, if there is work."""
        started_s = time.monotonic()
        step = self.scheduler.schedule()
        if step is None:
            return
        if step.work is not self._batch.work:
            self._batch = self._batch_of(step, started_s)
        batch = self._batch
        scheduled_s = executed_s = sampled_s = time.monotonic()
        try:
            logits = self._executor.execute(step.plan).logits
            executed_s = sampled_s = time.monotonic()
            chosen = self._sample(batch, logits)
            sampled_s = time.monotonic()
        except Exception as error:  # whatever a target raises, only this step's requests are lost
            self._fail_step(batch, error)
        else:
            self.scheduler.commit(step)
            self._deliver(batch, logits, chosen)
        if not self._active:
            self._batch = _NO_BATCH  # nobody's request is held on to
        ended_s = time.monotonic()
        counters = self.counters
        counters.steps += 1
        counters.last_step_s = ended_s - started_s
        counters.schedule_s += scheduled_s - started_s
        counters.execute_s += executed_s - scheduled_s
        counters.sample_s += sampled_s - executed_s
        counters.commit_s += ended_s - sampled_s

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Run a prefill and a decode step as large as the limits, the free blocks and `max_tokens` allow, so that the
        first request does not pay for what the executor does once, or once per shape. Only free blocks are written,
        and nothing is cached."""
        limits, pool = self.scheduler.limits, self.scheduler.pool
        most = limits.max_step_tokens if max_tokens is None else min(max_tokens, limits.max_step_tokens)
        prefill = min(most, limits.max_seq_len, pool.num_free * limits.block_size)
        decodes = min(most, limits.max_running, pool.num_free)
        for lengths in ([prefill], [1] * decodes):
            if sum(lengths):
                counts = [-(-length // limits.block_size) for length in lengths]
                blocks = pool.allocate(sum(counts))
                assert blocks is not None
                try:
                    self._executor.execute(_warm_up_plan(lengths, counts, blocks, limits.block_size))
                finally:
                    pool.free(blocks)

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
        )

    def _batch_of(self, step: Step, now_s: float) -> _Batch:
        requests = tuple([self._active[item.sequence.request_id] for item in step.work])
        for request in requests:
            if request.timings.scheduled_s is None:
                request.mark(scheduled_s=now_s)
        rows: list[int] = []
        places: list[int] = []
        states: list[SamplingState] = []
        num_rows = 0
        for place, (item, request) in enumerate(zip(step.work, requests, strict=True)):
            num_rows += item.num_logits
            if item.num_logits and request.sampling is not None:
                rows.append(num_rows - 1)
                places.append(place)
                states.append(request.sampling)
        return _Batch(step.work, requests, num_rows, rows, places, states)

    def _sample(self, batch: _Batch, logits: NDArray[np.float32]) -> list[Sampled | None]:
        """Choose a token for every sequence of the step that wants one, None for the others; a request whose logits are
        unusable fails alone."""
        if len(logits) != batch.num_rows:
            raise EngineError(f"the executor returned {len(logits)} rows of logits, {batch.num_rows} were asked for")
        if not batch.rows:
            return [None] * len(batch.work)
        wanted = logits if len(batch.rows) == batch.num_rows else logits[batch.rows]
        sampled: list[Sampled | None]
        try:
            sampled = [*sample(wanted, batch.states)]
        except EngineError:
            sampled = [
                self._sample_one(wanted[row : row + 1], batch.requests[place]) for row, place in enumerate(batch.places)
            ]
        if len(sampled) == len(batch.work):
            return sampled
        chosen: list[Sampled | None] = [None] * len(batch.work)
        for place, choice in zip(batch.places, sampled, strict=True):
            chosen[place] = choice
        return chosen

    def _sample_one(self, row: NDArray[np.float32], request: ActiveRequest) -> Sampled | None:
        assert request.sampling is not None
        try:
            return sample(row, [request.sampling])[0]
        except EngineError as error:
            self._end(request, "error", error=error)
            return None

    def _fail_step(self, batch: _Batch, error: Exception) -> None:
        _log.error("step %d failed", self.counters.steps, exc_info=error)
        self.counters.failed_steps += 1
        for request in batch.requests:
            if request.sequence.status is not Status.FINISHED:
                reason = f"{type(error).__name__}: {error}"
                self._end(request, "error", error=EngineError(f"step {self.counters.steps} failed: {reason}"))

    def _deliver(self, batch: _Batch, logits: NDArray[np.float32], chosen: list[Sampled | None]) -> None:
        end = 0
        for item, request, choice in zip(batch.work, batch.requests, chosen, strict=True):
            start, end = end, end + item.num_logits
            if request.sequence.status is Status.FINISHED:
                continue
            try:
                if request.on_logits is not None and item.num_logits:
                    request.on_logits(request.sequence.num_computed - item.num_logits, logits[start:end])
                if request.sequence.num_computed == request.sequence.num_tokens:
                    self._advance(request, choice)
            except Exception as error:  # a callback is the caller's code; other requests go on
                _log.error("request %s: its text or callback failed", item.sequence.request_id, exc_info=error)
                reason = f"{type(error).__name__}: {error}"
                self._end(request, "error", error=EngineError(f"the request's text or callback failed: {reason}"))

    def _advance(self, request: ActiveRequest, choice: Sampled | None) -> None:
        """Hand on the token that follows a request's computed ones, and end the request if it is complete."""
        sequence, sampling, output_text = request.sequence, request.sampling, request.text
        if sequence.num_output == 0:
            self.counters.prompt_tokens += sequence.num_prompt
            if choice is not None:
                request.mark(first_token_s=time.monotonic())
        if choice is None:
            self._end(request, "length")
            return
        assert sampling is not None
        assert output_text is not None
        token_id = choice.token_id
        sequence.append(token_id)
        sampling.accept(token_id)
        self.counters.output_tokens += 1
        reason: FinishReason | None = None
        if token_id in request.stop_ids:
            text, reason = output_text.finish(), "stop"
        else:
            text = output_text.push(token_id)
            if output_text.stopped:
                reason = "stop"
            elif not sequence.wants_token:
                text += output_text.finish()
                reason = "stop" if output_text.stopped else "length"
        if reason is None:
            request.on_output(request.output((token_id,), text, logprob=choice.logprob))
        else:
            self._end(request, reason, (token_id,), text, choice)

    def _end(
        self,
        request: ActiveRequest,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        choice: Sampled | None = None,
        *,
        error: OptimcError | None = None,
    ) -> None:
        """Give back what the request holds, then tell its owner."""
        self.scheduler.release(request.sequence)
        request.mark(finished_s=time.monotonic())
        logprob = None if choice is None else choice.logprob
        self._deliver_last(request, request.output(token_ids, text, logprob=logprob, finish_reason=reason, error=error))

    def _deliver_last(self, request: ActiveRequest, output: RequestOutput) -> None:
        assert output.finish_reason is not None
        del self._active[output.request_id]
        self.counters.finished[output.finish_reason] += 1
        self._on_end(output.request_id)
        try:
            request.on_output(output)
        except Exception as error:  # as above, and there is nobody left to tell
            _log.error("request %s: its last callback failed", output.request_id, exc_info=error)


def _warm_up_plan(lengths: Sequence[int], counts: Sequence[int], blocks: Sequence[int], block_size: int) -> StepPlan:
    """A step of fresh sequences of the given lengths; sequence b owns the next counts[b] of `blocks`."""
    table = np.zeros((len(lengths), max(counts)), np.int32)
    work = []
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        sequence = TokenSequence(RequestId(f"warm-up-{row}"), row, np.zeros(length, np.int64), max_output_tokens=0)
        sequence.row = row
        table[row, :count] = blocks[first : first + count]
        first += count
        work.append(Work(sequence, num_tokens=length, num_logits=1))
    return build_step(tuple(work), table, block_size).plan
