"""The engine's heart, single-threaded: schedule, execute, sample, commit, deliver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError, OptimcError
from optimc_runtime.active_request import ActiveRequest
from optimc_runtime.executor.base import Executor, StepPlan
from optimc_runtime.request import FinishReason, RequestId, RequestOutput
from optimc_runtime.sampler import Sampled, SamplingState, sample
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.sequence import Sequence as TokenSequence
from optimc_runtime.stats import Counters, EngineStats
from optimc_runtime.step import Step, Work, build_step

_log = logging.getLogger(__name__)


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
            self._deliver_last(request, request.output(finish_reason="error", finished_s=time.monotonic(), error=error))

    def step(self) -> None:
        """Run one step, if there is work."""
        started_s = time.monotonic()
        step = self.scheduler.schedule()
        if step is None:
            return
        for item in step.work:
            request = self._active[item.sequence.request_id]
            if request.scheduled_s is None:
                request.scheduled_s = started_s
        scheduled_s = executed_s = sampled_s = time.monotonic()
        try:
            logits = self._executor.execute(step.plan).logits
            executed_s = sampled_s = time.monotonic()
            chosen = self._sample(step, logits)
            sampled_s = time.monotonic()
        except Exception as error:  # whatever a target raises, only this step's requests are lost
            self._fail_step(step, error)
        else:
            self.scheduler.commit(step)
            self._deliver(step, logits, chosen)
        ended_s = time.monotonic()
        counters = self.counters
        counters.steps += 1
        counters.last_step_s = ended_s - started_s
        counters.schedule_s += scheduled_s - started_s
        counters.execute_s += executed_s - scheduled_s
        counters.sample_s += sampled_s - executed_s
        counters.commit_s += ended_s - sampled_s

    def warm_up(self) -> None:
        """Run a prefill and a decode step as large as the limits and the free blocks allow, so that the first request
        does not pay for what the executor does once per shape. Only free blocks are written, and nothing is cached."""
        limits, pool = self.scheduler.limits, self.scheduler.pool
        prefill = min(limits.max_step_tokens, limits.max_seq_len, pool.num_free * limits.block_size)
        decodes = min(limits.max_running, pool.num_free)
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

    def _sample(self, step: Step, logits: NDArray[np.float32]) -> dict[RequestId, Sampled]:
        """Choose a token for every sequence of the step that wants one; one whose logits are unusable fails alone."""
        rows: list[int] = []
        requests: list[ActiveRequest] = []
        states: list[SamplingState] = []
        end = 0
        for item in step.work:
            end += item.num_logits
            request = self._active[item.sequence.request_id]
            if item.num_logits and request.sampling is not None:
                rows.append(end - 1)
                requests.append(request)
                states.append(request.sampling)
        if len(logits) != end:
            raise EngineError(f"the executor returned {len(logits)} rows of logits, {end} were asked for")
        if not rows:
            return {}
        chosen = logits if len(rows) == end else logits[rows]
        try:
            sampled: list[Sampled | None] = list(sample(chosen, states))
        except EngineError:
            sampled = [self._sample_one(chosen[i : i + 1], request) for i, request in enumerate(requests)]
        return {
            request.sequence.request_id: choice
            for request, choice in zip(requests, sampled, strict=True)
            if choice is not None
        }

    def _sample_one(self, row: NDArray[np.float32], request: ActiveRequest) -> Sampled | None:
        assert request.sampling is not None
        try:
            return sample(row, [request.sampling])[0]
        except EngineError as error:
            self._end(request, "error", error=error)
            return None

    def _fail_step(self, step: Step, error: Exception) -> None:
        _log.error("step %d failed", self.counters.steps, exc_info=error)
        self.counters.failed_steps += 1
        for item in step.work:
            request = self._active.get(item.sequence.request_id)
            if request is not None:
                reason = f"{type(error).__name__}: {error}"
                self._end(request, "error", error=EngineError(f"step {self.counters.steps} failed: {reason}"))

    def _deliver(self, step: Step, logits: NDArray[np.float32], chosen: dict[RequestId, Sampled]) -> None:
        row = 0
        for item in step.work:
            start, row = row, row + item.num_logits
            request = self._active.get(item.sequence.request_id)
            if request is None:
                continue
            try:
                self._advance(request, item, logits[start:row], chosen.get(item.sequence.request_id))
            except Exception as error:  # a callback is the caller's code; other requests go on
                _log.error("request %s: its text or callback failed", item.sequence.request_id, exc_info=error)
                reason = f"{type(error).__name__}: {error}"
                self._end(request, "error", error=EngineError(f"the request's text or callback failed: {reason}"))

    def _advance(self, request: ActiveRequest, item: Work, logits: NDArray[np.float32], choice: Sampled | None) -> None:
        """Hand on what one step brought for one request, and end it if it is complete."""
        sequence = request.sequence
        if request.on_logits is not None and item.num_logits:
            request.on_logits(sequence.num_computed - item.num_logits, logits)
        if sequence.num_computed < sequence.num_tokens:
            return
        if sequence.num_output == 0:
            self.counters.prompt_tokens += sequence.num_prompt
        if choice is None:
            self._end(request, "length")
            return
        assert request.sampling is not None
        assert request.text is not None
        token_id = choice.token_id
        sequence.append(token_id)
        request.sampling.accept(token_id)
        self.counters.output_tokens += 1
        if request.first_token_s is None:
            request.first_token_s = time.monotonic()
        reason: FinishReason | None = None
        if token_id in request.stop_ids:
            text, reason = request.text.finish(), "stop"
        else:
            text = request.text.push(token_id)
            if request.text.stopped:
                reason = "stop"
            elif not sequence.wants_token:
                text += request.text.finish()
                reason = "stop" if request.text.stopped else "length"
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
        output = request.output(
            token_ids,
            text,
            logprob=None if choice is None else choice.logprob,
            finish_reason=reason,
            finished_s=time.monotonic(),
            error=error,
        )
        self._deliver_last(request, output)

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
