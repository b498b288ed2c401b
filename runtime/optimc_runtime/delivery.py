"""What requests are told: their tokens as text, why they end, and what went wrong, each on its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from optimc.errors import EngineError, OptimcError
from optimc_runtime.active_request import ActiveRequest
from optimc_runtime.executor.base import StepResult
from optimc_runtime.request import FinishReason, RequestId, RequestOutput, TokenLogprob
from optimc_runtime.sampler import Sampled, TreeSamples
from optimc_runtime.sequence import Sequence, Status
from optimc_runtime.stats import Counters
from optimc_runtime.step_batch import StepBatch

_log = logging.getLogger(__name__)


class Settled(NamedTuple):
    """Tokens a tree gave, added to their sequence and not delivered yet."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason | None


class Delivery:
    """The requests in flight, from `add` to their last output. A request whose text or callback fails ends alone.

    When one ends, `release(sequence)` gives back what it holds; `on_end(request_id)` is called before its last output
    is delivered. Tokens and ends are counted in `counters`.
    """

    def __init__(
        self, counters: Counters, release: Callable[[Sequence], None], on_end: Callable[[RequestId], None]
    ) -> None:
        self.active: dict[RequestId, ActiveRequest] = {}
        self._counters = counters
        self._release = release
        self._on_end = on_end

    def add(self, request: ActiveRequest) -> None:
        """Take in a new request."""
        assert request.sequence.request_id not in self.active
        self.active[request.sequence.request_id] = request

    def deliver(self, batch: StepBatch, result: StepResult, chosen: list[Sampled | None]) -> None:
        """Hand on what a step without trees gave: logits, hidden states, and the token `chosen` for each request."""
        hidden = result.hidden if batch.wants_hidden else None
        end = 0
        for item, request, choice in zip(batch.work, batch.requests, chosen, strict=True):
            start, end = end, end + item.num_logits
            if request.sequence.status is Status.FINISHED:
                continue
            try:
                if request.on_logits is not None and item.num_logits:
                    request.on_logits(request.sequence.num_computed - item.num_logits, result.logits[start:end])
                if request.sequence.num_computed == request.sequence.num_tokens:
                    if choice is not None:
                        assert request.sampling is not None
                        request.sampling.accept(choice.token_id)
                        if hidden is not None and request.on_hidden is not None:
                            request.on_hidden(hidden[end - 1 : end])
                    self._advance(request, choice)
            except Exception as error:  # a callback is the caller's code; other requests go on
                self._fail_delivery(request, error)

    def settle(self, batch: StepBatch, samples: TreeSamples) -> dict[int, Settled]:
        """Add what the trees gave to their sequences, each up to where its request is complete; by place."""
        settled: dict[int, Settled] = {}
        for index, place in enumerate(batch.places):
            if batch.work[place].tree is None or index in samples.failures:
                continue
            request = batch.requests[place]
            token_ids, texts = samples.token_ids[index], []
            reason: FinishReason | None = None
            try:
                for token_id in token_ids:
                    self._counters.output_tokens += 1
                    text, reason = request.take(token_id)
                    texts.append(text)
                    if reason is not None:
                        break
            except Exception as error:
                self._fail_delivery(request, error)
                continue
            count = len(texts)
            logprobs = samples.logprobs[index][:count]
            settled[place] = Settled(tuple(token_ids[:count]), "".join(texts), logprobs, reason)
        return settled

    def deliver_verified(
        self, batch: StepBatch, result: StepResult, samples: TreeSamples, settled: dict[int, Settled]
    ) -> None:
        """`deliver` of a step with trees, whose tokens are accepted by their states, and those of trees settled."""
        hidden = result.hidden if batch.wants_hidden else None
        index_of = {place: index for index, place in enumerate(batch.places)}
        end = 0
        for place, (item, request) in enumerate(zip(batch.work, batch.requests, strict=True)):
            start, end = end, end + item.num_logits
            sequence = request.sequence
            if sequence.status is Status.FINISHED:
                continue
            index = index_of.get(place)
            tree_gave = settled.get(place)
            try:
                if hidden is not None and request.on_hidden is not None and index is not None:
                    rows = [end - 1]
                    if tree_gave is not None:
                        path = samples.paths[index][: len(tree_gave.token_ids) - 1]
                        rows = [start, *[start + query for query in path]]
                    request.on_hidden(hidden[rows])
                if tree_gave is not None:
                    token_ids, text, logprobs, reason = tree_gave
                    if reason is None:
                        request.on_output(request.output(token_ids, text, logprobs=logprobs))
                    else:
                        self.end(request, reason, token_ids, text, logprobs)
                    continue
                if request.on_logits is not None and item.num_logits:
                    request.on_logits(sequence.num_computed - item.num_logits, result.logits[start:end])
                if sequence.num_computed == sequence.num_tokens:
                    self._advance(request, None if index is None else samples.sampled(index))
            except Exception as error:  # as in deliver
                self._fail_delivery(request, error)

    def end(
        self,
        request: ActiveRequest,
        reason: FinishReason,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        error: OptimcError | None = None,
    ) -> None:
        """Give back what the request holds, then tell its owner."""
        self._release(request.sequence)
        request.mark(finished_s=time.monotonic())
        output = request.output(token_ids, text, logprobs=logprobs, finish_reason=reason, error=error)
        self._deliver_last(request, output)

    def fail_all(self, error: OptimcError, not_added: Iterable[ActiveRequest]) -> None:
        """Deliver `error` to every request, and to those not added yet, when the loop itself is broken. Scheduler and
        pool are left as they are."""
        self.active.update((request.sequence.request_id, request) for request in not_added)
        for request in tuple(self.active.values()):
            request.mark(finished_s=time.monotonic())
            self._deliver_last(request, request.output(finish_reason="error", error=error))

    def _advance(self, request: ActiveRequest, choice: Sampled | None) -> None:
        """Hand on the token, accepted by its state, that follows a request's computed ones, and end the request if it
        is complete."""
        sequence = request.sequence
        if sequence.num_output == 0:
            self._counters.prompt_tokens += sequence.num_prompt
            if choice is not None:
                request.mark(first_token_s=time.monotonic())
        if choice is None:
            self.end(request, "length")
            return
        self._counters.output_tokens += 1
        text, reason = request.take(choice.token_id)
        logprobs = () if choice.logprob is None else (choice.logprob,)
        if reason is None:
            request.on_output(request.output((choice.token_id,), text, logprobs=logprobs))
        else:
            self.end(request, reason, (choice.token_id,), text, logprobs)

    def _fail_delivery(self, request: ActiveRequest, error: Exception) -> None:
        if isinstance(error, OptimcError):  # says itself what is wrong with the request, such as its grammar
            self.end(request, "error", error=error)
            return
        _log.error("request %s: its text or callback failed", request.sequence.request_id, exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        self.end(request, "error", error=EngineError(f"the request's text or callback failed: {reason}"))

    def _deliver_last(self, request: ActiveRequest, output: RequestOutput) -> None:
        assert output.finish_reason is not None
        del self.active[output.request_id]
        self._counters.finished[output.finish_reason] += 1
        self._on_end(output.request_id)
        try:
            request.on_output(output)
        except Exception as error:  # as above, and there is nobody left to tell
            _log.error("request %s: its last callback failed", output.request_id, exc_info=error)
